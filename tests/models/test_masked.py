"""A draft that guesses in one pass: its rows are those it was trained on, its masks are forgotten, the text and the law stay the target's own."""

from __future__ import annotations

import copy
import functools

from spec_common import UserError

import pytest
import torch

import spec_decode
import tiny
from clock_world import Price, World
from draft_training.parallel import add_mask, guess
from enumerate_law import Table, law_of, processed, total_variation, true_law
from spec_harness import costs
from spec_harness.arms import Method, Task, draft_model, run_baseline, run_speculative
from spec_harness.cells import forecast
from spec_harness.costs import costs_of, measured_costs
from spec_loop import Greedy, ModelDrafter, new_cache
from spec_methods.parallel import OnePassDrafter
from spec_methods.pearl import Ahead, pearl_loop
from spec_methods.policy import Confidence, FixedK
from spec_methods.sampled import Sampled
from spec_methods.trees import check_tree
from spec_models.checks import Loaded
from spec_models.fused import FusedLlama
from spec_models.masked import guesses_at_once, read_masks

PROMPT = torch.tensor([tiny.PROMPT])


@functools.cache
def trained(architecture, seed: int = 1):
    """A target, and a copy that is often right a token ahead, and sometimes two."""
    target = architecture(seed)
    draft = copy.deepcopy(tiny.near(target, seed))
    torch.manual_seed(seed)
    add_mask(draft)
    draft.mask.data += 0.3 * torch.randn_like(draft.mask)
    return target, draft.eval()


def reading(draft):
    """It as a script runs it: masks are an id."""
    draft = copy.deepcopy(draft)
    read_masks(draft)
    return draft


def in_pass(target, draft, fused: bool):
    return tuple(FusedLlama(copy.deepcopy(one)).eval() if fused else one for one in (target, reading(draft)))


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("architecture", [tiny.llama, tiny.qwen2])
@pytest.mark.parametrize("fused", [False, True])
def test_the_text_is_the_targets_own(architecture, k, fused):
    target, draft = in_pass(*trained(architecture), fused)
    task = Task(target, PROMPT, 40)
    method = draft_model(task, draft, k)
    done = run_speculative(task, method).done
    assert done.tokens == run_baseline(task).done.tokens and isinstance(method.drafter, OnePassDrafter)
    assert len(set(done.accepted)) >= min(k, 2), "some are right, some are not"
    assert done.draft_passes == sum(bool(guesses) for guesses in done.proposals), "one pass a round, none where nothing is asked for"
    masks = sum(max(0, len(guesses) - 1) for guesses in done.proposals)
    asked = max(at for at, guesses in enumerate(done.proposals) if guesses)
    assert done.draft_tokens_read == 1 + sum(done.emitted[:asked]) + masks, "each token of the text once, and the masks"


@pytest.mark.parametrize("fused", [False, True])
def test_every_guess_is_what_training_would_have_it_say(fused):
    """Behind accepted and rejected ones, from a cache or from the whole text read afresh."""
    plain, trained_draft = trained(tiny.llama)
    target, draft = in_pass(plain, trained_draft, fused)
    k, task = 4, Task(target, PROMPT, 40)
    done, text = run_speculative(task, draft_model(task, draft, k)).done, list(tiny.PROMPT)
    for one in done.rounds:
        if one.guesses:
            rows = guess(trained_draft, trained_draft.mask, text, len(one.guesses), new_cache(trained_draft))
            assert list(one.guesses) == rows.argmax(-1).tolist()
        text += done.tokens[len(text) - len(tiny.PROMPT) :][: one.emitted]


def test_the_first_guess_is_the_ordinary_drafts():
    plain, trained_draft = trained(tiny.llama)
    ordinary, at_once = copy.deepcopy(trained_draft), reading(trained_draft)
    del ordinary.mask
    task = Task(plain, PROMPT, 40)
    one, many = (run_speculative(task, Method(kind(draft, 64), FixedK(1))).done
                 for kind, draft in ((ModelDrafter, ordinary), (OnePassDrafter, at_once)))  # fmt: skip
    assert one.proposals == many.proposals and one.draft_tokens_read == many.draft_tokens_read


def test_masks_leave_the_cache():
    target, draft = in_pass(*trained(tiny.llama), False)
    task = Task(target, PROMPT, 12)
    drafter = draft_model(task, draft, 5).drafter
    run_speculative(task, Method(drafter, FixedK(5)))
    fresh = new_cache(draft)
    text = torch.tensor([[*tiny.PROMPT, *run_baseline(task).done.tokens]])
    known = drafter.cache.get_seq_length()
    draft(text[:, :known], past_key_values=fresh, use_cache=True)
    for mine, theirs in zip(drafter.cache.layers, fresh.layers, strict=True):
        assert torch.allclose(mine.keys, theirs.keys, atol=1e-5) and torch.allclose(mine.values, theirs.values, atol=1e-5)


@pytest.mark.parametrize("g", [1, 2, 5])
def test_it_runs_ahead_of_what_is_judged_too(g):
    target, draft = in_pass(*trained(tiny.llama), False)
    task = Task(target, PROMPT, 40)
    method = Method(Ahead(draft_model(task, draft, g).drafter, g), FixedK(g), decode=pearl_loop)
    assert run_speculative(task, method).done.tokens == run_baseline(task).done.tokens


def test_what_it_cannot_do_is_refused_in_one_line():
    target, draft = in_pass(*trained(tiny.llama), False)
    assert guesses_at_once(draft) and not guesses_at_once(target)
    with pytest.raises(UserError, match="--loop essay"):
        draft_model(Task(target, PROMPT, 8, "essay"), draft, 3)
    with pytest.raises(UserError, match="--tree: small"):
        check_tree(Loaded(draft, None, "small", "--draft"))


# ------------------------------------------------------------------------------------------------------------ the law


class Masked(Table):
    """A table that reads masks, the id behind its last row: a guess behind one depends on the tokens before and on its place."""

    def logits_after(self, ids):
        return super().logits_after(tuple(min(one, self.rows - 1) for one in ids))


def law_of_two(n, k, settings, policy=None, drafter=OnePassDrafter):
    target, draft = Table(3, 1), Masked(3, 2)
    task = tiny.task(target, (1, 0, 2), n)

    def run(branch):
        rule = Sampled(*settings, branch)
        method = Method(drafter(draft, 3, rule=Sampled(*settings, branch)), policy or FixedK(k), rule)
        return run_speculative(task, method).done.tokens

    return total_variation(law_of(run), true_law(lambda ids: processed(target.logits_after(ids).tolist(), *settings), (1, 0, 2), n))


@pytest.mark.parametrize("settings", [(1.0, 0, 1.0), (0.7, 2, 1.0)])
@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 2), (3, 3)])
def test_the_law_is_the_targets(n, k, settings):
    assert law_of_two(n, k, settings) < 1e-12


@pytest.mark.parametrize("threshold", [0.3, 0.45, 0.6])
def test_a_policy_that_looks_at_a_guess_before_the_next_is_drawn_leaves_the_law(threshold):
    assert law_of_two(3, 2, (1.0, 0, 1.0), Confidence(2, threshold)) < 1e-12


def test_a_rule_that_looks_at_a_guess_and_takes_it_back_does_not():
    """What is included must not depend on the value that was drawn there: the fault that the test above would miss."""

    class Regretful(OnePassDrafter):
        def propose(self, state, budget):
            made = super().propose(state, budget)
            sure = [float(law[token]) >= 0.45 for law, token in zip(made.laws, made.tokens.tolist(), strict=True)]
            end = sure.index(False) if False in sure else len(sure)
            made.tokens, made.laws = made.tokens[:end], made.laws[:end]
            return made

    assert law_of_two(3, 2, (1.0, 0, 1.0), drafter=Regretful) > 1e-4


# -------------------------------------------------------------------------------------------------------------- costs


TARGET, DRAFT = Price(60, row=2, head=2), Price(6, row=1, head=2)


def quick(monkeypatch) -> World:
    monkeypatch.setattr(costs, "COST_REPEATS", 2)
    monkeypatch.setattr(costs, "COST_WARMUP", 0)
    return World(monkeypatch)


def priced(world):
    plain, trained_draft = trained(tiny.llama)
    return world.priced(copy.deepcopy(plain), TARGET), world.priced(reading(trained_draft), DRAFT)


def test_its_costs_are_told_by_guess(monkeypatch):
    target, draft = priced(quick(monkeypatch))
    found = measured_costs(target, draft, 16, [3], None)
    assert found["one_pass"] and found["c"] == pytest.approx((6 + 5 * 3) / 5 / 64)
    assert found["c_places"] == pytest.approx([9 / 64, 3 / 64]) and found["c2"] == pytest.approx(10 / 64)
    assert found["c_interval"]["median"] == pytest.approx(found["c"])
    assert costs.costs_at([found, {**found, "context": 99}], 30)["one_pass"]
    assert costs_of({1: [64.0] * 6, "draft": [21.0] * 6, "draft 2": [26.0] * 6, "draft 1": [9.0] * 6}, True)["c_interval"]["low"] == 21 / 5 / 64


@pytest.mark.parametrize("k", [1, 3, 5])
def test_an_account_of_its_rounds_is_right_to_the_digit(monkeypatch, k):
    target, draft = priced(quick(monkeypatch))
    task = Task(target, PROMPT, 24)
    here = measured_costs(target, draft, task.context, [k], None)
    row = spec_decode.measure(task, draft_model(task, draft, k), tiny.turns(6), here)
    assert row["predicted_costs"] == pytest.approx(row["speedup"]), row["prediction_error"]
    assert row["draft_pass_ms"] >= 1000 * 9, "a pass, and not the mean over its guesses"
    assert forecast(row, here)["forecast"] is not None


def test_greedy_is_its_usual_rule():
    target, draft = in_pass(*trained(tiny.llama), False)
    assert isinstance(draft_model(Task(target, PROMPT, 8), draft, 3).drafter.rule, Greedy)
