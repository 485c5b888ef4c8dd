"""Whether what was drawn has the law it should have: acceptance against the overlap of the laws, and a chi-square test.

Both are smoke tests on real models: they see a fault of some percent. What proves the rule is tests/enumerate_law.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from spec_harness.arms import Method, Task, draft_model, start_drafter
from spec_harness.tables import progress
from spec_loop import Pass, Proposal, Verdict, forward, keep_slots, not_finite, prefill, speculate
from spec_methods.sampled import Sampled, overlap

# Steepness of the exponentials in `stray`: a few, so that one is near the best for tens as for thousands of guesses.
STEEPNESS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
WIDEST = 0.7  # of an interval of acceptance: a wider one says nothing
LAW_TOKENS = 2  # the law of so many first tokens is compared
LAW_K = 2  # with so many guesses: both can be accepted, either rejected
FEWEST_EXPECTED = 5  # draws in a cell, below which chi-square is a poor approximation


# ---------------------------------------------------------------------------------------------------------- acceptance


class Recorder(Sampled):
    """Notes, of every judged guess, the overlap of the two laws there, and whether it was accepted. Changes nothing."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.overlaps: list[float] = []
        self.accepted = 0

    def judge(self, out: Pass, proposal: Proposal) -> Verdict:
        verdict, probs = super().judge(out, proposal), self.law(out.logits[0])
        judged = len(verdict.path) + (len(verdict.path) < len(proposal))
        for place in range(judged):
            self.overlaps.append(overlap(probs[place], proposal.laws[place], verdict.guesses[place]))
        self.accepted += len(verdict.path)
        return verdict


def stray(overlaps: list[float], sign: int, level: float) -> float:
    """How far accepted - sum(overlaps) strays to one side (sign 1 or -1) in a right build, but for a chance of `level`.

    Given all that came before it, a judged guess is accepted with probability b, its overlap. So exp(s (accepted - sum b))
    over the product of its expectations is a martingale of mean 1, for any s fixed beforehand and however many guesses a
    run judges, and it ever exceeds 1/level with probability `level` at most (Ville's inequality). The few s share the
    level. No approximation is in it; it is about a third wider than a normal interval would be. Where every overlap is 0 or
    1, as in greedy decoding, nothing may stray at all.
    """
    if all(b in (0.0, 1.0) for b in overlaps):
        return 0.0
    reach = []
    for steepness in STEEPNESS:
        s = sign * steepness
        spread = sum(math.log(1 - b + b * math.exp(s)) - s * b for b in overlaps)
        reach.append((math.log(len(STEEPNESS) / level) + spread) / steepness)
    return min(reach)


def acceptance_check(rows: list[dict], level: float) -> dict:
    """Measured acceptance of the judged guesses of `rows` against the overlap of the laws; nulls where none was judged.

    `expected_low` and `expected_high` hold the measured one in a right build, but for a chance of `level`; `within` is null where
    they are too far apart to say anything.
    """
    overlaps, accepted = [b for row in rows for b in row["overlaps"]], sum(row["judged_accepted"] for row in rows)
    n, expected = len(overlaps), sum(overlaps)
    if not n:
        return dict.fromkeys(("alpha", "expected_alpha", "expected_low", "expected_high", "within")) | {"judged": 0}
    low, high = expected - stray(overlaps, -1, level / 2), expected + stray(overlaps, 1, level / 2)
    within = low <= accepted <= high
    says = (
        high - low <= WIDEST * n
    )  # an interval that holds almost anything confirms nothing, but what lies outside still fails
    return {"judged": n, "judged_accepted": accepted, "alpha": accepted / n, "expected_alpha": expected / n, "expected_low": max(0.0, low / n),
            "expected_high": min(1.0, high / n), "within": None if within and not says else within}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- chi-square


def law_task(task: Task) -> Task:
    """The first two tokens of a task. The essay's loop guesses a full k even where two tokens remain."""
    return replace(task, n_tokens=LAW_TOKENS, loop="essay", ends=frozenset())


@torch.inference_mode()
def exact_cells(task: Task, rule: Sampled, draws: int) -> dict[tuple[int, int], float]:
    """The pairs of first tokens that `draws` draws should give five times or more, each with its exact probability: the
    product of the target's own two laws, from plain passes."""
    state, least = prefill(task.target, task.prompt, LAW_TOKENS), FEWEST_EXPECTED / draws
    ids, length = state.ids, state.length

    def law(end: int) -> torch.Tensor:
        out = forward(task.target, ids[:, state.cache.get_seq_length() : end], state.cache)
        if not out.finite:
            raise not_finite(task.target)
        return rule.law(out.logits[:, -1])[0].double()

    first, cells = law(length).cpu(), {}
    for one in (first >= least).nonzero().flatten().tolist():
        ids[0, length] = one
        both = float(first[one]) * law(length + 1).cpu()
        cells |= {(one, two): float(both[two]) for two in (both >= least).nonzero().flatten().tolist()}
        keep_slots(state.cache, length)
    return cells


def drawn_pairs(task: Task, method: Method, draws: Iterable) -> Iterator[tuple[int, int]]:
    """The first two tokens of so many speculative runs, one after the other from one rule. The prompt is read once: both
    caches are rolled back to it, and the drafter to what it was."""
    drafter = method.drafter
    state = prefill(task.target, task.prompt, LAW_TOKENS, drafter.taps)
    length = state.length
    start_drafter(task, drafter, state)
    begun = dict(vars(drafter))
    for _ in draws:
        done = speculate(
            task.target, drafter, state, LAW_TOKENS, method.rule, method.policy, loop=task.loop, limit=task.limit
        )
        yield tuple(done.tokens)
        state.length = length
        keep_slots(state.cache, length - 1)
        if hasattr(drafter, "cache"):  # Medusa's heads keep none
            keep_slots(drafter.cache, length - 1)
        vars(drafter).update(begun)


def chi_square(counts: Counter, cells: dict[tuple, float], draws: int) -> dict:
    """Pearson's statistic of the counted pairs: the cells, and one of all the rest where that too is expected five times,
    else joined to the smallest cell. `p_value` None where a single cell leaves nothing to compare."""
    groups = sorted(((counts[pair], draws * p) for pair, p in cells.items()), key=lambda group: -group[1])
    rest = draws - sum(count for count, _ in groups), draws - sum(expected for _, expected in groups)
    if groups and rest[1] < FEWEST_EXPECTED:
        last = groups.pop()
        rest = last[0] + rest[0], last[1] + rest[1]
    groups.append(rest)
    statistic = sum((count - expected) ** 2 / expected for count, expected in groups)
    degrees, p_value = len(groups) - 1, None
    if degrees:
        half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
        p_value = float(torch.special.gammaincc(half[0], half[1]))
    return {
        "draws": draws,
        "cells": len(groups),
        "statistic": statistic,
        "degrees": degrees,
        "p_value": p_value,
        "error": None,
    }


def law_row(task: Task, draft, k: int, rule: Sampled, draws: int) -> dict:
    """The chi-square test of the first two tokens' law, of so many draws with two guesses at most."""
    task = law_task(task)
    method = draft_model(task, draft, min(k, LAW_K), rule)
    cells = exact_cells(task, rule, draws)
    pairs = drawn_pairs(task, method, progress(range(draws), f"law at temperature {rule.temperature:g}"))
    return {"k": method.k, **chi_square(Counter(pairs), cells, draws)}


def law_line(row: dict) -> str:
    """What the test of one temperature found, in words."""
    begin = f"temperature {row['temperature']:g}, law of the first two tokens: "
    if row["error"]:
        return f"{begin}not tested, {row['error']}"
    if row["p_value"] is None:
        return f"{begin}not tested, {row['draws']} draws leave a single cell; give --check-law more"
    return f"{begin}chi-square {row['statistic']:.1f} on {row['degrees']} degrees of freedom, p = {row['p_value']:.3g} ({row['draws']} draws)"
