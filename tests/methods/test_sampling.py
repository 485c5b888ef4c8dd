"""Sampling is lossless: the exact law of what the loop writes is the target's, and every known wrong rule is seen to differ.

The laws are enumerated (enumerate_law.py), over the suite's own rule, drafter and loop, so nothing here depends on luck.
"""

from __future__ import annotations

import collections
import functools
import json
import math

import pytest
import torch

import spec_sampling
import tiny
from enumerate_law import Branches, Grid, Remembered, Table, law_of, processed, total_variation, true_law
from spec_harness import law
from spec_harness.arms import Method, draft_model, run_baseline, run_speculative
from spec_ids import DraftIds
from spec_loop import Choice, DecodingError, Greedy, ModelDrafter, Pass, Proposal
from spec_methods import sampled
from spec_methods.block import BlockSampled
from spec_methods.lookup import HybridDrafter, LookupDrafter
from spec_methods.policy import Confidence, FixedK
from spec_methods.sampled import Chance, Sampled, acceptance, residual
from spec_models.vocab import cut_head

PROMPT = (1, 0, 2)
PLAIN = (1.0, 0, 1.0)  # temperature, top-k, top-p
SAME = 1e-12  # total variation of two equal laws, with room for rounding
DIFFERENT = 1e-4


def written_law(
    target,
    draft,
    n,
    k,
    law=PLAIN,
    draft_law=None,
    rule=Sampled,
    draft_rule=Sampled,
    drafter=ModelDrafter,
    policy=None,
    chance=Branches,
    **options,
):
    """The exact law of n tokens of speculation; `draft_law` where the draft has settings of its own, None greedy."""
    rows = target.get_input_embeddings().weight.shape[0]

    task = tiny.task(target, PROMPT, n, **options)

    def run(branch):
        own = {} if draft_law == "greedy" else {"rule": draft_rule(*(draft_law or law), branch)}
        made = drafter(draft, rows, task.loop == "essay", **own)
        return run_speculative(task, Method(made, policy or FixedK(k), rule(*law, branch))).done.tokens

    return law_of(run, chance)


def table_law(target: Table, n: int, law=PLAIN, ends=frozenset()):
    return true_law(lambda ids: processed(target.logits_after(ids).tolist(), *law), PROMPT, n, ends)


def distance(target: Table, draft, n, k, law=PLAIN, ends=frozenset(), **options) -> float:
    """Total variation between what speculation writes and the product of the target's laws."""
    written = written_law(target, draft, n, k, law, ends=ends, **options)
    assert math.isclose(sum(written.values()), 1, abs_tol=SAME), "every branch was tried, and each law adds up to 1"
    return total_variation(written, table_law(target, n, law, ends))


# ------------------------------------------------------------------------------------------------- the exact law, tables


@pytest.mark.parametrize(
    ("rows", "k", "n", "law"),
    [
        (3, 1, 3, PLAIN),
        (3, 2, 3, (0.7, 0, 1.0)),
        (4, 2, 3, (1.0, 3, 1.0)),
        (5, 2, 3, (1.0, 0, 0.8)),
        (5, 1, 3, (1.3, 4, 0.9)),
        (3, 3, 4, (1.0, 2, 1.0)),
        (5, 2, 3, (0.0, 0, 1.0)),
    ],
)
def test_the_law_of_the_text_is_the_targets_own(rows, k, n, law):
    assert distance(Table(rows, 1), Table(rows, 2), n, k, law) < SAME


@pytest.mark.parametrize(
    ("law", "draft_law"),
    [
        (PLAIN, (0.5, 2, 1.0)),
        (PLAIN, (1.0, 0, 0.5)),
        ((1.0, 2, 0.9), (1.7, 0, 1.0)),
        ((0.0, 0, 1.0), PLAIN),
        (PLAIN, (0.0, 0, 1.0)),
        (PLAIN, "greedy"),
        ((0.6, 3, 1.0), "greedy"),
    ],
)
def test_the_two_sides_need_no_common_settings(law, draft_law):
    assert distance(Table(4, 1), Table(4, 2), 3, 2, law, draft_law=draft_law) < SAME


@pytest.mark.parametrize("loop", ["lean", "essay"])
@pytest.mark.parametrize("ends", [frozenset(), frozenset([1])])
def test_either_loop_and_an_end_token_keep_the_law(loop, ends):
    assert distance(Table(3, 1), Table(3, 2), 3, 2, ends=ends, loop=loop) < SAME


def test_drafting_that_ends_after_a_doubtful_guess_keeps_the_law():
    assert distance(Table(3, 1), Table(3, 2), 3, 2, policy=Confidence(2, 0.5)) < SAME


DRAFTS = {
    "a larger table": lambda: Table(5, 2),
    "a smaller table": lambda: Table(3, 2),
    "a cut head": lambda: Table(4, 2, kept=[0, 2, 3]),
    "a cut head of one id": lambda: Table(4, 2, kept=[2]),
    "a cut head in no order": lambda: Table(4, 2, kept=[3, 0, 1]),
}


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("draft_law", [PLAIN, (0.5, 2, 0.95)])
def test_a_draft_of_another_vocabulary_keeps_the_law(draft, draft_law):
    assert distance(Table(4, 1), DRAFTS[draft](), 3, 2, draft_law=draft_law) < SAME


@pytest.mark.parametrize("hybrid", [False, True])
def test_guesses_copied_from_the_text_keep_the_law(hybrid):
    """Certain ones, in rounds between which a draft model may draw its own."""

    def make(draft, rows, read_last, rule=None):
        lookup = LookupDrafter()
        return HybridDrafter(lookup, ModelDrafter(draft, rows, read_last, rule), 2) if hybrid else lookup

    assert distance(Table(3, 1), Table(3, 2), 4 - hybrid, 2, drafter=make) < SAME


def test_equal_laws_accept_everything():
    """p equals q: the residual is all zero, and is never asked for."""
    target = Table(4, 1)
    done = tiny.speculated(target, target, PROMPT, 30, 3, Sampled(*PLAIN, Chance(0)))
    assert sum(done.accepted) == sum(map(len, done.proposals)) and done.target_passes == 8
    assert distance(target, target, 3, 2) < SAME


def test_the_baseline_draws_from_the_targets_law():
    target, law = Table(4, 1), (0.7, 3, 0.9)

    def run(branch):
        return run_baseline(tiny.task(target, PROMPT, 3), Sampled(*law, branch)).done.tokens

    assert total_variation(law_of(run), table_law(target, 3, law)) < SAME


# ------------------------------------------------------------------------------------------ the exact law, real models

SMALL = {"vocab_size": 6, "hidden_size": 16, "intermediate_size": 32}


@functools.cache
def transformers_pair():
    target = tiny.llama(dtype=torch.float64, **SMALL)
    near, cut = tiny.near(target, 0.3), tiny.near(target, 0.3)
    cut_head(cut, [4, 1, 0, 5], 4, 6)
    assert target.config._attn_implementation == "sdpa" and near.dtype == torch.float64
    return {name: Remembered(model) for name, model in (("target", target), ("near", near), ("cut", cut))}


@pytest.mark.parametrize(
    ("draft", "k", "law", "loop"),
    [
        ("near", 1, PLAIN, "lean"),
        ("near", 2, (0.8, 3, 0.95), "lean"),
        ("near", 2, (1.0, 2, 1.0), "essay"),
        ("cut", 2, (1.0, 3, 1.0), "lean"),
    ],
)
def test_two_transformers_with_their_caches_write_the_targets_law(draft, k, law, loop):
    models = transformers_pair()
    target = models["target"].model

    def next_probs(ids):
        return processed(target(torch.tensor([ids]), use_cache=False).logits[0, -1].tolist(), *law)

    written = written_law(models["target"], models[draft], 3, k, law, loop=loop)
    with torch.inference_mode():
        assert total_variation(written, true_law(next_probs, PROMPT, 3)) < SAME


# ------------------------------------------------------------------------------------- wrong rules, and that each is seen


class PlainResidual(Sampled):
    """A rejected guess is replaced from the target's law."""

    def judge(self, out, proposal):
        verdict = super().judge(out, proposal)
        if len(verdict.path) == len(proposal):
            return verdict
        return verdict._replace(token=int(self.chance.categorical(self.law(out.logits[0])[len(verdict.path)])))


class DraftBonus(Sampled):
    """After full acceptance the next token comes from the draft's law."""

    def judge(self, out, proposal):
        verdict = super().judge(out, proposal)
        if not len(proposal) or len(verdict.path) < len(proposal):
            return verdict
        return verdict._replace(token=int(self.chance.categorical(proposal.laws[-1])))


class NoBonus(Sampled):
    """The bonus row is judged one row too early."""

    def judge(self, out, proposal):
        early = torch.cat([out.logits[:, :-1], out.logits[:, -2:-1]], dim=1)
        return super().judge(out._replace(logits=early) if len(proposal) else out, proposal)


class OtherTemperature(Sampled):
    """Guesses are drawn at one temperature and judged as if at another."""

    def choose(self, logits, vocabulary=None):
        choice = super().choose(logits, vocabulary)
        return Choice(choice.token, Sampled(1.0, 0, 1.0, None).law(logits[..., :vocabulary])[0])


class SoftGreedy(Sampled):
    """The draft takes its best id, and is judged as if it had drawn."""

    def choose(self, logits, vocabulary=None):
        return Choice(Greedy().choose(logits, vocabulary).token, self.law(logits[..., :vocabulary])[0])


class Pruned(ModelDrafter):
    """A guess is dropped because the draft itself finds it unlikely."""

    def propose(self, state, budget):
        made = super().propose(state, budget)
        doubtful = (i for i in range(len(made)) if made.laws[i][made.tokens[i]] < 0.4)
        count = next(doubtful, len(made))
        return Proposal(made.tokens[:count], made.laws[:count], made.finite)


class OwnOrder(ModelDrafter):
    """The law of a cut head is left over the draft's own rows."""

    class Ids(DraftIds):
        def law(self, law):
            return torch.cat([law, law.new_zeros(self.rows - len(law))])

    def __init__(self, model, target_rows, *more, **options):
        super().__init__(model, target_rows, *more, **options)
        self.ids = self.Ids(model, target_rows)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rule": PlainResidual},
        {"rule": DraftBonus},
        {"rule": NoBonus},
        {"draft_rule": OtherTemperature, "draft_law": (0.5, 0, 1.0)},
        {"draft_rule": OtherTemperature, "draft_law": (1.0, 2, 1.0)},
        {"draft_rule": SoftGreedy},
        {"drafter": Pruned},
    ],
    ids=lambda wrong: "-".join(getattr(value, "__name__", str(value)) for value in wrong.values()),
)
def test_a_wrong_rule_writes_another_law(wrong):
    assert distance(Table(3, 1), Table(3, 2), 3, 2, **wrong) > DIFFERENT


def test_a_law_in_the_order_of_a_cut_head_writes_another_law():
    assert distance(Table(4, 1), Table(4, 2, kept=[0, 2, 3]), 3, 2, drafter=OwnOrder) > DIFFERENT


def inverted(target, draft, guess):
    return acceptance(target if draft is None else draft, target, guess)


def softmaxed(target, draft, guess):
    return residual(target, draft, guess).softmax(-1)


def untouched(target, draft, guess):
    return target if draft is None else residual(target, draft, guess)


def spoiled(target, draft, guess):
    """In place: row 0 is spoiled by the time it is needed again."""
    if draft is None:
        target[guess] = 0
        return target / target.sum()
    return residual(target, draft, guess)


@pytest.mark.parametrize(
    ("name", "wrong", "draft_law"),
    [
        ("acceptance", inverted, None),
        ("acceptance", lambda target, draft, guess: float(target[guess]), None),
        ("residual", softmaxed, None),
        ("residual", lambda target, draft, guess: residual(target, None, guess), None),
        ("residual", untouched, "greedy"),
        ("residual", softmaxed, "greedy"),
    ],
    ids=[
        "inverted ratio",
        "every guess taken for certain",
        "softmaxed residual",
        "residual of a certain guess",
        "guess left in",
        "softmaxed, certain",
    ],
)
def test_a_wrong_piece_writes_another_law(name, wrong, draft_law, monkeypatch):
    monkeypatch.setattr(sampled, name, wrong)
    assert distance(Table(3, 1), Table(3, 2), 3, 2, draft_law=draft_law) > DIFFERENT


# ------------------------------------------------------------------------- the random numbers themselves, and wrong ones

# Laws in quarters, of which Grid's four cells hold whole numbers: ratios 1/2, 0 and 1, a residual of one id, a bonus.
TARGET_QUARTERS, DRAFT_QUARTERS = [0.25, 0.0, 0.75], [0.5, 0.25, 0.25]


def quarters(chance) -> float:
    target, draft = Table(3, probs=lambda ids: TARGET_QUARTERS), Table(3, probs=lambda ids: DRAFT_QUARTERS)
    return total_variation(written_law(target, draft, 2, 1, chance=chance), table_law(target, 2))


class Reused(Grid):
    """One number serves a whole run."""

    def uniform(self):
        self.number = super().uniform() if not self.taken else self.number
        return self.number


class Loose(Grid):
    """Accepts where the number drawn equals the ratio, which may be 0."""

    def bernoulli(self, probability):
        return self.uniform() <= probability


class Clumsy(Grid):
    """Takes the first id whose cumulative probability is not below the number: id 0 at 0, likely or not."""

    def categorical(self, probs):
        return (probs.cumsum(0) >= self.uniform()).int().argmax(0, keepdim=True)


def test_the_numbers_drawn_give_the_law():
    assert quarters(Grid) < SAME


@pytest.mark.parametrize("chance", [Reused, Loose])
def test_numbers_used_wrongly_give_another_law(chance):
    assert quarters(chance) > DIFFERENT


def test_an_id_of_probability_zero_is_never_drawn(monkeypatch):
    """At either end of the numbers that can be drawn."""
    ends = (0.0, 1 - 2**-53)

    class Fixed(Chance):
        def __init__(self, number):
            self.number = number

        def uniform(self):
            return self.number

    for probs in ([0.0, 0.3, 0.7, 0.0], [0.0, 0.0, 1.0], [1e-30, 0.0], [0.0, *[0.1] * 10, 0.0]):
        for dtype in (torch.float32, torch.float64):
            drawn = [int(Fixed(number).categorical(torch.tensor(probs, dtype=dtype))) for number in ends]
            possible = [i for i, p in enumerate(probs) if p > 0]
            assert drawn == [possible[0], possible[-1]]
    monkeypatch.setattr(sampled, "WIDE", {"cpu": torch.float32})
    assert int(Fixed(ends[1]).categorical(torch.tensor([0.0, 0.3, 0.7, 0.0]))) in (1, 2), "the number drawn is 1 there"
    assert not Fixed(0.0).bernoulli(0.0) and Fixed(ends[1]).bernoulli(1.0)
    assert int(Clumsy((0,)).categorical(torch.tensor([0.0, 1.0]))) == 0, "the wrong way does draw it"


def test_numbers_lie_from_0_to_below_1_and_ids_come_as_often_as_they_should():
    chance, probs = Chance(3), torch.tensor([0.3, 0.0, 0.2, 0.5])
    numbers = [chance.uniform() for _ in range(1000)]
    assert 0 <= min(numbers) < 0.01 and 0.99 < max(numbers) < 1
    seen = collections.Counter(int(chance.categorical(probs)) for _ in range(4000))
    cells = {(i,): float(p) for i, p in enumerate(probs) if p > 0}
    assert law.chi_square(collections.Counter({(i,): n for i, n in seen.items()}), cells, 4000)["p_value"] > 1e-3


# ------------------------------------------------------------------------------------------------------------ the pieces


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 1e-6, 0.01, 0.7, 1.0, 1e3])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (4, 0.5), (1, 1.0), (0, 1e-9), (99, 1.0)])
def test_the_processed_law_is_temperature_then_top_k_then_top_p(temperature, top_k, top_p):
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    for rows, close in ((logits, 1e-12), (logits.float(), 1e-5), (logits.bfloat16(), 1e-5)):
        law = Sampled(temperature, top_k, top_p, None).law(rows)
        assert law.dtype == (torch.float64 if rows.dtype == torch.float64 else torch.float32)
        for row, probs in zip(rows.tolist(), law.tolist(), strict=True):
            assert probs == pytest.approx(processed(row, max(temperature, 1e-30), min(top_k, 8), top_p), abs=close)


def passed(logits: torch.Tensor) -> Pass:
    """(rows, vocabulary) as what a pass gave."""
    return Pass(logits[None], (), logits.amax(-1).isfinite().all())


@pytest.mark.parametrize("temperature", [1.0, 0.01, 1e-6])
def test_a_residual_of_rounding_alone_is_not_normalised(temperature):
    """The same 1000 logits through float64 and float32: what remains of their difference is noise, not a law."""
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4
    rule = Sampled(temperature, 0, 1.0, Chance(0))
    target, draft = rule.law(logits)[0].float(), rule.law(logits.float())[0]
    assert torch.equal(residual(target, draft, 0), target)
    assert torch.equal(residual(target, target, 0), target)
    verdict = rule.judge(passed(logits.float().repeat(2, 1)), Proposal(torch.tensor([0]), [target]))
    assert verdict.finite and 0 <= verdict.token < 1000


@pytest.mark.parametrize("apart", [4e-3, 5e-4, 2e-5])
def test_a_residual_is_a_law_however_little_the_two_laws_differ(apart):
    """Between 0.0005 and nothing lie a thousand times the rounding of float32: taken for nothing, the text's law moves."""
    target, draft = torch.tensor([0.25, 0.25 + apart, 0.5 - apart]), torch.tensor([0.25, 0.25, 0.5])
    assert residual(target, draft, 2).tolist() == pytest.approx([0.0, 1.0, 0.0])


def test_a_residual_that_is_not_finite_raises_nothing_and_the_loop_refuses_the_logits():
    target, nan = tiny.llama(), tiny.llama()
    assert residual(torch.tensor([0.5, float("nan")]), torch.tensor([1.0, 0.0]), 0)[0] == 0.5
    nan.lm_head.weight.data[7] = float("nan")
    for pair in ((nan, target), (target, nan)):
        with pytest.raises(DecodingError, match="not finite"):
            tiny.speculated(*pair, rule=Sampled(*PLAIN, Chance(0)))


def test_judging_leaves_the_laws_as_they_were():
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    laws = [None, torch.full((6,), 1 / 6), None]
    before, kept = logits.clone(), laws[1].clone()
    rule = Sampled(*PLAIN, Branches((1,)))  # the first guess is rejected
    probs = rule.law(logits)
    rule.law = lambda _: probs
    spoilt = probs.clone()
    proposal = Proposal(torch.tensor([0, 1, 2]), laws)
    verdict = rule.judge(passed(logits), proposal)
    assert verdict.path == [] and verdict.token != 0
    assert verdict.guesses == proposal.tokens.tolist() == [0, 1, 2]
    assert torch.equal(logits, before) and torch.equal(laws[1], kept) and torch.equal(probs, spoilt)


def test_temperature_zero_is_greedy():
    target, draft = tiny.llama(), tiny.near(tiny.llama())
    rule = {"rule": Sampled(0.0, 0, 1.0, Chance(0))}
    assert tiny.speculated(target, draft, **rule) == tiny.speculated(target, draft)
    assert tiny.plainly(target, **rule).tokens == tiny.greedy(target, tiny.PROMPT, 30)


@pytest.mark.parametrize("speculative", [True, False])
def test_the_seed_alone_decides_the_text(speculative):
    """Whatever ran before in the process, and whatever torch's own generator was set to."""
    target, draft = tiny.llama(), tiny.near(tiny.llama())

    def text(seed):
        rule = Sampled(*PLAIN, Chance(seed))
        done = tiny.speculated(target, draft, rule=rule) if speculative else tiny.plainly(target, rule=rule)
        return done.tokens

    torch.manual_seed(5)
    first, state = text(1), torch.random.get_rng_state()
    torch.manual_seed(6)
    assert text(1) == first
    text(2), torch.rand(100), tiny.speculated(target, draft)
    assert text(1) == first
    assert text(2) != first
    torch.manual_seed(5)
    assert torch.equal(torch.random.get_rng_state(), state), "torch's own generator was not touched"


def test_one_rule_begins_its_seed_anew_with_every_run():
    """In the measuring of a seed the arms share one rule, in an order that changes: none may move the numbers of another."""
    task, draft = tiny.task(tiny.llama()), tiny.near(tiny.llama())
    rule = Sampled(*PLAIN, Chance(1))
    method = draft_model(task, draft, 3, rule)
    alone, fast = run_baseline(task, rule).done, run_speculative(task, method).done
    assert run_speculative(task, method).done == fast and run_baseline(task, rule).done == alone
    assert run_baseline(task, rule).done == alone and run_speculative(task, method, watched=True).done == fast


# ------------------------------------------------------------------------------------------------------------ the checks


def strayed(b: float, n: int, level: float) -> list[bool]:
    """Whether `accepted` leaves its interval, for each count that n guesses of that overlap can have."""
    overlaps = [b] * n
    low, high = n * b - law.stray(overlaps, -1, level / 2), n * b + law.stray(overlaps, 1, level / 2)
    return [not low <= accepted <= high for accepted in range(n + 1)]


@pytest.mark.parametrize("b", [0.02, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("n", [5, 60, 600])
def test_a_right_rule_leaves_its_interval_more_seldom_than_it_says(b, n):
    level, outside = 0.01, strayed(b, n, 0.01)
    chances = [math.comb(n, accepted) * b**accepted * (1 - b) ** (n - accepted) for accepted in range(n + 1)]
    assert sum(p for p, out in zip(chances, outside, strict=True) if out) <= level
    if n == 600:
        assert all(outside[int(n * wrong)] for wrong in (max(0, b - 0.12), min(1, b + 0.12)) if abs(wrong - b) > 0.1)


def test_the_two_sides_stray_as_their_laws_do():
    """A sum of rejections strays down as one of acceptances strays up; the steepnesses tried share the level."""
    rare, often = [0.1, 0.2, 0.05] * 50, [0.9, 0.8, 0.95] * 50
    assert law.stray(rare, 1, 1e-3) == pytest.approx(law.stray(often, -1, 1e-3))
    assert law.stray(rare, 1, 1e-3) > 1.05 * law.stray(rare, -1, 1e-3)
    assert law.stray([0.5], 1, 0.01) > math.log(len(law.STEEPNESS) / 0.01) / max(law.STEEPNESS)


def test_where_every_overlap_is_certain_nothing_may_stray():
    row = {"overlaps": [1.0, 0.0, 1.0], "judged_accepted": 2}
    assert law.acceptance_check([row], 1e-3)["within"]
    assert not law.acceptance_check([{**row, "judged_accepted": 1}], 1e-3)["within"]
    assert law.acceptance_check([{"overlaps": [], "judged_accepted": 0}], 1e-3)["within"] is None


class SoftRecorder(SoftGreedy, law.Recorder):
    pass


def noted(recorder=law.Recorder) -> dict:
    """What acceptance_check says of eight texts of two tables."""
    rows, target, draft = [], Table(4, 1), Table(4, 2)
    for seed in range(8):
        made = recorder(*PLAIN, Chance(seed))
        tiny.speculated(target, draft, PROMPT, 100, 3, made)
        rows.append({"overlaps": made.overlaps, "judged_accepted": made.accepted})
    return law.acceptance_check(rows, 1e-3)


def test_a_right_rule_is_within_the_overlap_of_the_laws():
    row = noted()
    assert row["within"] and row["judged"] > 500 and row["expected_high"] - row["expected_low"] < 0.25


@pytest.mark.parametrize("wrong", [inverted, lambda target, draft, guess: float(target[guess]), lambda *_: 1.0])
def test_a_wrong_acceptance_leaves_the_overlap_of_the_laws(wrong, monkeypatch):
    monkeypatch.setattr(sampled, "acceptance", wrong)
    assert noted()["within"] is False


def test_a_draft_judged_by_a_law_it_was_not_drawn_from_leaves_it_too():
    assert noted(SoftRecorder)["within"] is False


def test_a_draft_that_fell_silent_guesses_again_in_the_next_draw(monkeypatch):
    made, propose = [], ModelDrafter.propose

    def noted_proposal(self, state, budget):
        proposal = propose(self, state, budget)
        made.extend([len(proposal)] if state.length == len(PROMPT) else [])
        return proposal

    monkeypatch.setattr(ModelDrafter, "propose", noted_proposal)
    task = law.law_task(tiny.task(Table(5, 1), PROMPT, 2))
    method = draft_model(task, Table(3, 2), 2, Sampled(*PLAIN, Chance(0)))
    pairs = list(law.drawn_pairs(task, method, range(30)))
    assert made == [2] * 30 and max(map(max, pairs)) >= 3


@pytest.mark.parametrize("k", [1, 2])
def test_the_law_of_the_first_tokens_fits_and_a_wrong_residual_does_not(k, monkeypatch):
    task, draft = tiny.task(Table(5, 1), PROMPT, 8), Table(5, 2)
    row = law.law_row(task, draft, k, Sampled(*PLAIN, Chance(0)), 1000)
    assert row["p_value"] > 1e-3 and row["cells"] > 10 and row["draws"] == 1000 and row["k"] == k
    monkeypatch.setattr(sampled, "residual", lambda target, draft, guess: target)
    assert law.law_row(task, draft, k, Sampled(*PLAIN, Chance(0)), 1000)["p_value"] < 1e-6


def test_the_law_of_the_first_tokens_is_tested_with_two_guesses_at_most():
    row = law.law_row(tiny.task(Table(5, 1), PROMPT, 8), Table(5, 2), 7, Sampled(*PLAIN, Chance(0)), 200)
    assert row["k"] == law.LAW_K == 2 and row["p_value"] > 1e-3


def test_chi_square_by_hand():
    counted = collections.Counter({(0, 0): 30, (0, 1): 50, (2, 2): 20})
    row = law.chi_square(counted, {(0, 0): 0.4, (0, 1): 0.4}, 100)
    assert (row["cells"], row["degrees"]) == (3, 2)
    assert row["statistic"] == pytest.approx(100 / 40 + 100 / 40 + 0)
    assert row["p_value"] == pytest.approx(math.exp(-2.5))
    joined = law.chi_square(counted, {(0, 0): 0.4, (0, 1): 0.4, (2, 2): 0.18}, 100)
    assert joined["cells"] == 3, "a rest of two draws joins the smallest cell"
    assert law.chi_square(counted, {}, 100)["p_value"] is None


# ------------------------------------------------------------------------------------------------------------ the script


@pytest.fixture
def sampling(pair, results):
    def call(*more) -> int:
        return spec_sampling.main([*pair, "--prompt", "w1 w5 w9", "-k", "3", "--cpu-linear", "plain", *map(str, more)])

    return call


def test_the_script_measures_every_temperature_and_writes_what_it_drew(sampling, results, capsys):
    assert (
        sampling(
            "--temperatures", "1,0,0.5", "--seeds", 3, "--seed", 4, "--n-tokens", 16, "--top-k", 20, "--top-p", 0.95
        )
        == 0
    )
    document = json.loads(results.read_text())
    rows, summary = document["rows"], document["summary"]["temperatures"]
    assert document["status"] == "complete" and [row["temperature"] for row in summary] == [0, 0.5, 1]
    assert [(row["temperature"], row["seed"]) for row in rows] == [(t, seed) for t in (0, 0.5, 1) for seed in (4, 5, 6)]
    assert all(len(row["overlaps"]) == row["judged_accepted"] + row["rejections"] for row in rows)
    greedy = tiny.greedy(tiny.llama(), [5, 9, 13], 16)
    assert all(row["tokens"] == row["baseline_tokens"] == greedy for row in rows if row["temperature"] == 0)
    assert len({tuple(row["tokens"]) for row in rows if row["temperature"] == 1}) == 3
    assert [row["texts"] for row in summary] == [1, 3, 3] and all(row["within"] for row in summary)
    said = capsys.readouterr().out
    assert " overlap |" in said and " alpha may be |" in said
    assert "Guesses are accepted as often as the laws overlap" in said


def test_chains_judged_whole_are_a_further_arm_with_counts_of_its_own(sampling, results, monkeypatch, capsys):
    argv = ("--temperatures", "0,1", "--seeds", 3, "--n-tokens", 12, "--verify", "block", "--check-law", 40)
    tested = []
    monkeypatch.setattr(spec_sampling, "law_row", lambda *given: tested.append(given[3]) or law.law_row(*given))
    assert sampling(*argv) == 0
    document = json.loads(results.read_text())
    rows, (greedy, warm) = [row for row in document["rows"] if row["part"] == "sampling"], document["summary"]["temperatures"]
    assert [type(rule) for rule in tested] == [BlockSampled]
    for row in rows:
        assert len(row["block_s"]) == len(row["speculative_s"]) == 1 and len(row["block_tokens"]) == row["by_block"]["emitted"] == 12
        assert row["temperature"] or row["block_tokens"] == row["tokens"]
    passes = sum(row["by_block"]["target_passes"] for row in rows if row["temperature"])
    assert warm["block_tokens_per_pass"] == 36 / passes and greedy["block_tokens_per_pass"] == greedy["block_efficiency"]
    ratios = [token / block for row in rows if row["temperature"] for token, block in zip(row["speculative_s"], row["block_s"], strict=True)]
    assert warm["block_over_token"] == pytest.approx(sorted(ratios)[1])
    assert "chains judged whole beside the token rule" in capsys.readouterr().out


def test_a_whole_chains_text_of_a_seed_is_compared_too(sampling, monkeypatch, capsys):
    calls = []

    def drifts(task, method, *more):
        run = run_speculative(task, method, *more)
        if isinstance(method.rule, BlockSampled):
            calls.append(run)
            run.done.tokens[-1] ^= len(calls) > 1
        return run

    monkeypatch.setattr(spec_sampling, "run_speculative", drifts)
    assert sampling("--temperatures", "1", "--seeds", 1, "--n-tokens", 8, "--verify", "block") == 1
    assert "block wrote another text" in capsys.readouterr().out


def test_a_run_goes_on_where_it_was(sampling, results, monkeypatch):
    argv = ("--temperatures", "1", "--seeds", 2, "--n-tokens", 8, "--resume")
    assert sampling(*argv) == 0
    before = results.read_text()
    monkeypatch.setattr(spec_sampling, "measure_seed", lambda *a: pytest.fail("measured again"))
    assert sampling(*argv) == 0
    assert json.loads(results.read_text())["rows"] == json.loads(before)["rows"]


def test_a_wrong_acceptance_fails_the_claim(sampling, monkeypatch, capsys, results):
    monkeypatch.setattr(sampled, "acceptance", lambda *_: 1.0)
    assert sampling("--temperatures", "1", "--seeds", 3, "--n-tokens", 32) == 1
    assert "FAILED: temperature 1" in capsys.readouterr().out
    assert json.loads(results.read_text())["summary"]["temperatures"][0]["within"] is False


def test_randomness_that_is_not_the_seeds_fails_the_run(sampling, monkeypatch, capsys):
    monkeypatch.setattr(Chance, "uniform", lambda self: float(torch.rand(())))
    assert sampling("--temperatures", "1", "--seeds", 1, "--n-tokens", 16) == 1
    assert "seed 0: the counted run wrote another text" in capsys.readouterr().out


@pytest.mark.parametrize("arm", ["baseline", "speculative", "baseline_again"])
def test_every_timed_text_is_compared_with_the_seeds_first(arm, sampling, monkeypatch, capsys):
    def spoilt(*given, real=spec_sampling.interleave, **more):
        samples = real(*given, **more)
        samples[arm][-1].done.tokens[-1] += 1
        return samples

    monkeypatch.setattr(spec_sampling, "interleave", spoilt)
    assert sampling("--temperatures", "1", "--seeds", 1) == 1
    assert (
        f"seed 0: {arm} wrote another text than the first run of that seed, from token 7 on" in capsys.readouterr().out
    )


def test_the_order_of_the_arms_changes_from_seed_to_seed(sampling, monkeypatch):
    """With one turn a seed, an arm that always came first would meet the machine in another state than the others."""
    orders = []

    def noted(arms, repeats, warmup, real=spec_sampling.interleave, **more):
        orders.append([])

        def named(name, run):
            return lambda: (orders[-1].append(name), run())[1]

        return real({name: named(name, run) for name, run in arms.items()}, repeats, warmup, **more)

    monkeypatch.setattr(spec_sampling, "interleave", noted)
    assert sampling("--temperatures", "1", "--seeds", 12, "--n-tokens", 2) == 0
    assert all(sorted(order) == ["baseline", "baseline_again", "speculative"] for order in orders) and len(orders) == 12
    assert len({tuple(order) for order in orders}) >= 4
    assert orders[1::2] == [order[::-1] for order in orders[::2]], "over a pair every arm stands as early as late"


def test_a_text_that_is_not_greedys_at_temperature_zero_fails_the_run(sampling, monkeypatch, capsys):
    monkeypatch.setattr(sampled, "acceptance", lambda *_: 1.0)
    assert sampling("--temperatures", "0", "--seeds", 1, "--n-tokens", 24) == 1
    assert "not the target's own text" in capsys.readouterr().out


def test_the_law_of_the_first_tokens_is_tested_where_asked(sampling, results, monkeypatch, capsys):
    argv = ("--temperatures", "0,1", "--top-k", "2", "--seeds", 1, "--check-law", 60)
    assert sampling(*argv) == 0
    (row,) = json.loads(results.read_text())["summary"]["laws"]
    assert row["temperature"] == 1 and row["p_value"] > 1e-3 and row["degrees"] > 0
    assert "law of the first two tokens: chi-square" in capsys.readouterr().out
    monkeypatch.setattr(law, "chi_square", lambda *_: {**row, "p_value": 1e-9})
    assert sampling(*argv) == 1
    assert "the text has not the target's law" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--temperatures", "-0.1"], ["--temperatures", "numbers of 0 or more"]),
        (["--temperatures", "nan"], ["--temperatures"]),
        (["--temperatures", "1,inf"], ["--temperatures"]),
        (["--temperatures", "1e999"], ["--temperatures"]),
        (["--temperatures", "warm"], ["--temperatures", "warm"]),
        (["--temperatures", ","], ["--temperatures"]),
        (["--top-p", "0"], ["--top-p", "above 0, up to 1"]),
        (["--top-p", "1.01"], ["--top-p"]),
        (["--top-p", "nan"], ["--top-p"]),
        (["--top-k", "-1"], ["--top-k", "0 or more"]),
        (["--seeds", "0"], ["--seeds", "1 or more"]),
        (["--seed", "-3"], ["--seed", "0 or more"]),
        (["--check-law", "-1"], ["--check-law"]),
        (["-k", "0"], ["-k/--k", "1 or more"]),
        (["--stop-at-eos"], ["--stop-at-eos", "leave it out"]),
        (["--workload", "poetry"], ["--workload poetry: unknown"]),
        (["--device", "gpu"], ["--device gpu: unknown"]),
    ],
)
def test_a_wrong_option_is_one_line_before_anything_is_loaded(more, words, results, capfd, monkeypatch):
    monkeypatch.setattr("spec_harness.options.load_pair", lambda *a, **b: pytest.fail("models were loaded first"))
    try:
        code = spec_sampling.main([*more, "--results", str(results)])
    except SystemExit as left:
        code = left.code
    said = capfd.readouterr()
    (line,) = said.err.strip().splitlines()
    assert code == 2 and line.startswith("error: ") and said.out == ""
    assert all(word in line for word in words)
