"""Foreseen answers: the text is the target's own, hit or miss, its law enumerated, and the published faults are seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sampling import DIFFERENT, PLAIN, SAME, distance

import tiny
from enumerate_law import Branches, Table
from spec_loop import Greedy, ModelDrafter, Proposal
from spec_methods.sampled import Sampled
from spec_methods.ssd import ForeseeingDrafter, fan_out

FAMILIES = {"llama": tiny.llama, "qwen2": tiny.qwen2, "gpt2": tiny.gpt2}
TARGETS = {name: make() for name, make in FAMILIES.items()}
DRAFTS = {
    name: {"near": tiny.near(one), "itself": one, "wrong": tiny.always_wrong(one)} for name, one in TARGETS.items()
}
LONGEST = 24


def foreseeing(draft, fans, rows: int = 64, **options) -> ForeseeingDrafter:
    return ForeseeingDrafter(draft, rows, fans, **options)


# -------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("kind", ["near", "itself", "wrong"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_greedys_own_in_the_rounds_of_the_plain_chain(name, kind, k):
    """A foreseen answer is what the draft would have guessed then: token for token the same guesses, hit or miss."""
    target, draft = TARGETS[name], DRAFTS[name][kind]
    reach = 64 if name == "gpt2" else None
    drafter = foreseeing(draft, [2] * (k + 1), reach=reach)
    done = tiny.speculated(target, draft, n=LONGEST, k=k, drafter=drafter)
    plain = tiny.speculated(target, draft, n=LONGEST, k=k)
    assert tuple(done.tokens) == tiny.greedy_once(target, tiny.PROMPT, LONGEST)
    assert (done.proposals, done.emitted) == (plain.proposals, plain.emitted)


@given(
    kind=st.sampled_from(["near", "itself", "wrong"]),
    fans=st.lists(st.integers(0, 3), min_size=2, max_size=6),
    n=st.integers(0, LONGEST),
    prompt=st.sampled_from([(7,), (5, 9), tuple(range(3, 36))]),
    loop=st.sampled_from(["lean", "essay"]),
)
def test_every_fan_length_and_prompt(kind, fans, n, prompt, loop):
    target, draft = TARGETS["llama"], DRAFTS["llama"][kind]
    done = tiny.speculated(target, draft, prompt, n, len(fans) - 1, drafter=foreseeing(draft, fans), loop=loop)
    assert done.tokens == list(tiny.greedy_once(target, prompt, LONGEST)[:n])


def test_what_is_foreseen_is_hit_and_nothing_else():
    target, near = TARGETS["llama"], DRAFTS["llama"]["near"]
    for draft, fans, least, most in ((near, [0] * 4, 0, 0), (near, [64] * 4, 1, 1), (target, [0, 0, 0, 1], 1, 1)):
        drafter = foreseeing(draft, fans)
        done = tiny.speculated(target, draft, n=LONGEST, k=3, drafter=drafter)
        asked = len(done.rounds) - 2 if fans[-1] else 0  # no answer is needed to the last round
        assert least * drafter.asked <= drafter.hits <= most * drafter.asked and drafter.asked >= asked


def test_in_a_hit_no_pass_is_made_before_the_check():
    """A round is one pass over the guesses and one for each level of the answers; a miss takes k more."""
    target = TARGETS["llama"]
    done = tiny.speculated(target, target, n=1 + 4 * 5, k=3, drafter=foreseeing(target, [0, 0, 0, 1]))
    assert [one.draft_passes for one in done.rounds[:3]] == [3 + 1 + 3, 1 + 3, 1 + 3]
    done = tiny.speculated(target, target, n=4 * 5, k=3, drafter=foreseeing(target, [0, 0, 0, 1]))
    assert [one.draft_passes for one in done.rounds][-2:] == [1 + 3, 1 + 2], "no answer reaches past the text's end"
    done = tiny.speculated(target, target, n=1 + 4 * 5, k=3, drafter=foreseeing(target, [1, 1, 1, 0]))
    assert [one.draft_passes for one in done.rounds[:3]] == [3 + 1 + 3] * 3


def test_no_outcome_repeats_the_guess_that_it_turned_down():
    seen = []

    class Noted(ForeseeingDrafter):
        def likely(self, rows, made):
            found = super().likely(rows, made)
            seen.extend((one, made.tokens.tolist()) for one in found)
            return found

    target = TARGETS["llama"]
    tiny.speculated(target, DRAFTS["llama"]["near"], k=3, drafter=Noted(DRAFTS["llama"]["near"], 64, [2, 1, 2, 1]))
    assert seen and all(one.token != guesses[one.accepted] for one, guesses in seen if one.accepted < len(guesses))
    assert any(one.accepted == len(guesses) for one, guesses in seen)


def test_no_answer_reaches_past_what_the_draft_can_read():
    target, draft = TARGETS["gpt2"], tiny.near(tiny.gpt2(n_positions=20))
    drafter = foreseeing(draft, [2] * 6, reach=20)
    done = tiny.speculated(target, draft, n=LONGEST, k=5, drafter=drafter, limit=20)
    assert tuple(done.tokens) == tiny.greedy_once(target, tiny.PROMPT, LONGEST)


@pytest.mark.parametrize(
    ("k", "first", "alpha", "power", "fans"), [(2, 8, 0.25, 1.0, [8, 4, 2]), (2, 8, 0.75, 1.0, [8, 7, 12])]
)
def test_fans_by_hand(k, first, alpha, power, fans):
    assert fan_out(k, first, alpha, power) == fans


# ------------------------------------------------------------------------------------------------------------- the law


def strayed(fans, rows=3, n=3, law=PLAIN, drafter=ForeseeingDrafter, target=None, draft=None, **options) -> float:
    def make(draft, target_rows, read_last, rule=None):
        return drafter(draft, target_rows, fans, rule)

    return distance(target or Table(rows, 1), draft or Table(rows, 2), n, len(fans) - 1, law, drafter=make, **options)


@pytest.mark.parametrize("fans", [[1, 1], [0, 1], [1, 0], [2, 1], [1, 2]])
def test_the_law_of_the_text_is_the_targets_own(fans):
    """With hits, misses, and both."""
    assert strayed(fans) < SAME


@pytest.mark.parametrize("fans", [[1, 0], [0, 1]])
def test_answers_to_rounds_that_were_answers_keep_the_law(fans):
    assert strayed(fans, n=4) < SAME


def test_two_guesses_a_round_keep_the_law():
    for fans in ([1, 0, 0], [0, 0, 1]):
        assert strayed(fans, n=4, law=(1.0, 2, 1.0)) < SAME


@pytest.mark.parametrize(
    ("law", "draft_law"), [((0.7, 0, 1.0), None), (PLAIN, (0.5, 2, 1.0)), (PLAIN, "greedy"), ((0.0, 0, 1.0), PLAIN)]
)
def test_the_two_sides_need_no_common_settings(law, draft_law):
    assert strayed([1, 1], law=law, draft_law=draft_law) < SAME


def test_an_end_token_and_other_vocabularies_keep_the_law():
    assert strayed([1, 1], ends=frozenset([1])) < SAME
    assert strayed([1, 1], rows=4, draft=Table(4, 2, kept=[3, 0, 1])) < SAME


# ----------------------------------------------------------------------------------------------------- published faults


class Refilters(ForeseeingDrafter):
    """The law of an answer is worked out anew, with another temperature than it was drawn at."""

    def offer(self, state, budget):
        made = super().offer(state, budget)
        if self.answer is not None:
            made.laws = [row**2 / (row**2).sum() for row in made.laws]
        return made


class AnyToken(ForeseeingDrafter):
    """In a miss it offers any id, drawn uniformly, and says so."""

    def offer(self, state, budget):
        if self.answer is not None or not budget.depth:
            return super().offer(state, budget)
        law = torch.full((self.ids.rows,), 1 / self.ids.rows, dtype=torch.float64)
        return Proposal(self.rule.chance.categorical(law), [self.says(law)], [torch.tensor(True)])

    def says(self, law):
        return law


class Unsaid(AnyToken):
    def says(self, law):
        return None


class TakesTheBest(Sampled):
    """And stands where it is the target's best, else the target's own law is drawn from, the guess not left out."""

    def accepted_child(self, proposal, guesses, node, rest):
        children = proposal.children(node)
        if not children or proposal.laws[children[0]] is not None:
            return super().accepted_child(proposal, guesses, node, rest)
        stands = guesses[children[0]] == int(rest.argmax())
        return (
            super()
            .accepted_child(Proposal(proposal.tokens[:0]), guesses, -1, rest)
            ._replace(node=children[0] if stands else None)
        )


class KeepsFallen(Sampled):
    """A guess behind one that fell is written although its row was judged behind another token."""

    def judge(self, out, proposal):
        verdict = super().judge(out, proposal)
        behind = verdict.guesses[len(verdict.path) + 1 :]
        return verdict._replace(token=behind[0]) if behind else verdict


class Reusing(Branches):
    """Knows between which bounds the last number of an accept test lay, so that a further test can use it again."""

    reuse = False

    def bernoulli(self, probability):
        low, high = self.bounds if self.reuse else (0.0, 1.0)
        self.reuse, cut = False, min(max(probability, low), high)
        stands = super().bernoulli((cut - low) / (high - low))
        self.bounds = (low, cut) if stands else (cut, high)
        return stands


class ReusesInMiss(ForeseeingDrafter):
    """The number that judged the round of a miss judges the next one as well."""

    def offer(self, state, budget):
        self.rule.chance.reuse = bool(self.asked) and self.answer is None and budget.depth > 0
        return super().offer(state, budget)


def test_any_token_whose_law_is_said_keeps_the_law():
    assert strayed([1, 1], drafter=AnyToken) < SAME


@pytest.mark.parametrize(
    "fault",
    [
        {"drafter": Refilters},
        {"rule": KeepsFallen, "fans": [1, 0, 0], "law": (1.0, 2, 1.0)},
        {"drafter": Unsaid, "rule": TakesTheBest},
        {"drafter": ReusesInMiss, "chance": Reusing, "n": 4, "law": (1.0, 2, 1.0)},
    ],
    ids=lambda fault: fault.get("drafter", fault.get("rule")).__name__,
)
def test_a_published_fault_writes_another_law(fault):
    assert strayed(**{"fans": [1, 1], **fault}) > DIFFERENT


def test_the_pieces_of_those_faults_are_harmless_by_themselves():
    assert strayed([1, 1], chance=Reusing) < SAME and strayed([1, 1], rule=TakesTheBest) < SAME
    assert isinstance(foreseeing(TARGETS["llama"], [1, 1]).rule, Greedy) and issubclass(ForeseeingDrafter, ModelDrafter)
