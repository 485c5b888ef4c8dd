"""PEARL as two sides that take turns: greedy text to the token, the exact law under sampling, and each published fault seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sampling import DIFFERENT, PLAIN, PROMPT, SAME, table_law

import tiny
from enumerate_law import Branches, Remembered, Table, law_of, processed, total_variation, true_law
from spec_loop import DecodingError, Greedy, ModelDrafter, prefill
from spec_methods import pearl as module
from spec_methods.pearl import Ahead, Checker, pearl
from spec_methods.sampled import Sampled

FAMILIES = {"llama": tiny.llama, "qwen2": tiny.qwen2, "gpt2": tiny.gpt2}
TARGETS = {name: make() for name, make in FAMILIES.items()}
DRAFTS = {
    name: {"near": tiny.near(one), "itself": one, "wrong": tiny.always_wrong(one)} for name, one in TARGETS.items()
}
LONGEST = 24


def pearled(target, draft, prompt, n, g, rule=None, draft_rule=None, ends=frozenset(), side=Ahead, reach=None):
    """What the scheme wrote and counted."""
    state = prefill(target, torch.tensor([list(prompt)]), n)
    rows = target.get_input_embeddings().weight.shape[0]
    ahead = side(ModelDrafter(draft, rows, rule=draft_rule or rule), g, reach)
    ahead.start(state)
    return pearl(target, ahead, state, n, rule or Greedy(), ends)


# -------------------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize("g", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", ["near", "itself", "wrong"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_greedys_own(name, kind, g):
    done = pearled(TARGETS[name], DRAFTS[name][kind], tiny.PROMPT, LONGEST, g)
    assert tuple(done.tokens) == tiny.greedy_once(TARGETS[name], tiny.PROMPT, LONGEST)


@given(
    kind=st.sampled_from(["near", "itself", "wrong"]),
    g=st.integers(1, 9),
    n=st.integers(0, LONGEST),
    prompt=st.sampled_from([(7,), (5, 9), tuple(range(3, 36))]),
    ends_at=st.sets(st.integers(0, LONGEST - 1), max_size=2),
)
def test_every_length_prompt_and_end_token(kind, g, n, prompt, ends_at):
    target, whole = TARGETS["llama"], list(tiny.greedy_once(TARGETS["llama"], prompt, LONGEST))
    ends = frozenset(whole[i] for i in ends_at)
    expected = whole[:n]
    expected = expected[: next((i + 1 for i, token in enumerate(expected) if token in ends), n)]
    done = pearled(target, DRAFTS["llama"][kind], prompt, n, g, ends=ends)
    assert done.tokens == expected and sum(done.emitted) == len(expected)
    assert done.target_passes == len(done.rounds)


@pytest.mark.parametrize("g", [1, 2, 4, 5])
def test_a_draft_that_is_always_right_gives_g_tokens_a_round_after_the_first(g):
    done = pearled(TARGETS["llama"], TARGETS["llama"], tiny.PROMPT, 1 + 4 * g, g)
    assert done.emitted == [1, g, g, g, g] and not any(done.rejected)


def test_a_draft_that_is_never_right_gives_one_token_a_round():
    """Its g - 1 further guesses were never judged; only the first of a round was."""
    done = pearled(TARGETS["llama"], DRAFTS["llama"]["wrong"], tiny.PROMPT, 9, 4)
    assert done.emitted == [1] * 9 and [len(one) for one in done.proposals] == [1] * 9
    assert done.draft_passes == 4 * 6 + 3 + 2 + 1, "no guess reaches past the text's end"


def emitted_by_hand(target, draft, prompt, n: int, g: int) -> list[int]:
    """Tokens of each round, from the two models' next tokens alone: no cache, none of the suite's code."""
    text, pending, found = list(prompt), [], []
    while len(text) < len(prompt) + n:
        ahead = list(pending)
        while len(ahead) < min(len(pending) + g, len(prompt) + n - len(text)):
            ahead += tiny.greedy_once(draft, tuple(text + ahead), 1)
        judged, before = ahead[: len(pending) + 1], len(text)
        while judged and judged[0] == tiny.greedy(target, text, 1)[0]:
            text.append(judged.pop(0))
        stood = not judged and len(ahead) > len(pending)
        pending = ahead[len(pending) + 1 :] if stood else []
        text += [] if stood else tiny.greedy(target, text, 1)
        found.append(min(len(text), len(prompt) + n) - before)
    return found


@pytest.mark.parametrize("g", [1, 2, 3, 5])
def test_each_round_writes_what_its_guesses_allow(g):
    """Pending guesses kept behind one that fell, or a view that is not rolled back, cost tokens and no exactness."""
    target, draft = TARGETS["llama"], DRAFTS["llama"]["near"]
    done = pearled(target, draft, tiny.PROMPT, LONGEST, g)
    assert done.emitted == emitted_by_hand(target, draft, tiny.PROMPT, LONGEST, g)
    assert any(done.rejected) and any(done.accepted)


def test_no_pass_reads_a_token_twice(monkeypatch):
    from spec_loop import forward

    fed = []

    def noted(model, tokens, cache, *rest, **more):
        fed.append((cache.get_seq_length(), tokens.shape[1], model is TARGETS["llama"]))
        return forward(model, tokens, cache, *rest, **more)

    monkeypatch.setattr("spec_loop.forward", noted)
    monkeypatch.setattr(module, "forward", noted)
    done = pearled(TARGETS["llama"], DRAFTS["llama"]["near"], tiny.PROMPT, LONGEST, 3)
    target = [(held, n) for held, n, is_target in fed if is_target][1:]
    lengths = [len(tiny.PROMPT) + sum(done.emitted[:i]) for i in range(len(done.rounds))]
    assert [held for held, _ in target] == [length - 1 for length in lengths]
    assert all(n <= 3 for _, n in target) and all(n <= 2 for _, n, is_target in fed[2:] if not is_target)


def test_past_its_reach_the_draft_is_silent_and_the_target_goes_on():
    target, draft = TARGETS["gpt2"], tiny.gpt2(1, n_positions=16)
    done = pearled(target, draft, tiny.PROMPT, LONGEST, 3, reach=16)
    assert tuple(done.tokens) == tiny.greedy_once(target, tiny.PROMPT, LONGEST)
    assert done.emitted[-10:] == [1] * 10


def test_an_id_that_the_draft_cannot_read_silences_it():
    target = TARGETS["llama"]
    done = pearled(target, tiny.llama(1, vocab_size=40), tiny.PROMPT, LONGEST, 3)
    assert tuple(done.tokens) == tiny.greedy_once(target, tiny.PROMPT, LONGEST)
    assert max(done.tokens) >= 40, "else nothing was tried"


def test_logits_that_are_not_finite_end_it():
    broken = tiny.llama(2)
    with torch.no_grad():
        broken.get_output_embeddings().weight[3] = float("nan")
    for target, draft, who in ((broken, TARGETS["llama"], "LlamaForCausalLM"), (TARGETS["llama"], broken, "the draft")):
        with pytest.raises(DecodingError, match=f"{who}.* not finite"):
            pearled(target, draft, tiny.PROMPT, 8, 3)


# ------------------------------------------------------------------------------------------------------------- the law


def written_law(
    target, draft, n, g, law=PLAIN, draft_law=None, rule=Sampled, ends=frozenset(), chance=Branches, side=Ahead
):
    def run(branch):
        drawn = Greedy() if draft_law == "greedy" else Sampled(*(draft_law or law), branch)
        return pearled(target, draft, PROMPT, n, g, rule(*law, branch), drawn, ends, side).tokens

    return law_of(run, chance)


def strayed(target, draft, n, g, law=PLAIN, ends=frozenset(), **options) -> float:
    written = written_law(target, draft, n, g, law, ends=ends, **options)
    assert sum(written.values()) == pytest.approx(1, abs=SAME)
    return total_variation(written, table_law(target, n, law, ends))


@pytest.mark.parametrize(("rows", "n", "g"), [(3, 3, 1), (3, 3, 2), (3, 3, 3), (3, 4, 2), (4, 3, 2)])
def test_the_law_of_the_text_is_the_targets_own(rows, n, g):
    assert strayed(Table(rows, 1), Table(rows, 2), n, g) < SAME


@pytest.mark.parametrize(
    ("law", "draft_law"),
    [((0.7, 0, 1.0), None), ((1.0, 2, 0.9), PLAIN), (PLAIN, (0.5, 2, 1.0)), (PLAIN, "greedy"), ((0.0, 0, 1.0), PLAIN)],
)
def test_the_two_sides_need_no_common_settings(law, draft_law):
    assert strayed(Table(3, 1), Table(3, 2), 3, 2, law, draft_law=draft_law) < SAME


def test_an_end_token_and_a_smaller_vocabulary_keep_the_law():
    assert strayed(Table(3, 1), Table(3, 2), 3, 2, ends=frozenset([1])) < SAME
    assert strayed(Table(4, 1), Table(3, 2), 3, 2) < SAME
    assert strayed(Table(4, 1), Table(4, 2, kept=[3, 0, 1]), 3, 2) < SAME


def test_real_models_caches_included():
    target, draft = (tiny.llama(seed, torch.float64, vocab_size=3) for seed in (0, 1))
    rows = lambda ids: processed(target(torch.tensor([ids]), use_cache=False).logits[0, -1].tolist())  # noqa: E731
    written = written_law(Remembered(target), Remembered(draft), 3, 2)
    assert total_variation(written, true_law(rows, PROMPT, 3)) < SAME


# ----------------------------------------------------------------------------------------------------- published faults


class Refilters(Ahead):
    """The law of a pending guess is worked out anew, with another temperature than it was drawn at."""

    def go_on(self):
        made = super().go_on()
        made.laws = [row**2 / (row**2).sum() for row in made.laws]
        return made


class KeepsFallen(Checker):
    """A guess behind one that fell is written although its row was judged behind another token."""

    def settle(self, out, made, *drafted):
        judged = [*self.pending.tokens.tolist(), *made.tokens.tolist()[:1]]
        news = super().settle(out, made, *drafted)
        behind = judged[len(news.block) :][:1]
        if news.stood or not behind or self.finished:
            return news
        self.state.write(behind)
        self.done.tokens += behind
        return news._replace(block=news.block + behind)


class Unjudged(Checker):
    """The text ends with what is pending, which nobody has judged."""

    @property
    def finished(self):
        over = super().finished
        if not over and self.state.length + len(self.pending) >= self.end:
            self.done.tokens += self.pending.tokens.tolist()
            return True
        return over


class Bonus(Sampled):
    """Behind guesses that all stand it draws a token more, from the last row there is."""

    def judge(self, out, proposal):
        verdict = super().judge(out, proposal)
        token = self.chance.categorical(self.law(out.logits[0])[-1]) if verdict.token is None else verdict.token
        return verdict._replace(token=int(token))


class FromDraft(Sampled):
    """And from the draft's law, which is not the target's."""

    def judge(self, out, proposal):
        verdict = super().judge(out, proposal)
        token = self.chance.categorical(proposal.laws[-1]) if verdict.token is None else verdict.token
        return verdict._replace(token=int(token))


class ReusedNumber(Branches):
    """The number that accepted a guess of a pre-verify round also judges the first one of the round behind it: both stand
    with min(a, b), not a b."""

    def begin(self):
        super().begin()
        self.accepted = None

    def bernoulli(self, probability):
        before, self.accepted = self.accepted, None
        below = probability if before is None else min(1.0, probability / before)
        stands = super().bernoulli(below)
        self.accepted = probability if stands and before is None else None
        return stands


@pytest.mark.parametrize(
    "fault",
    [{"side": Refilters}, {"rule": Bonus}, {"rule": FromDraft}, {"chance": ReusedNumber}],
    ids=lambda fault: next(iter(fault.values())).__name__,
)
def test_a_published_fault_writes_another_law(fault):
    assert strayed(Table(3, 1), Table(3, 2), 3, 2, **fault) > DIFFERENT


@pytest.mark.parametrize("side", [KeepsFallen, Unjudged])
def test_a_guess_that_nobody_judged_in_the_text_writes_another_law(side, monkeypatch):
    monkeypatch.setattr(module, "Checker", side)
    assert strayed(Table(3, 1), Table(3, 2), 3, 2) > DIFFERENT
