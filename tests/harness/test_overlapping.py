"""What overlap should give: the closed forms against chains whose every outcome is enumerated, and against the very code."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch

import tiny
from enumerate_law import Table
from spec_harness.overlapping import (
    balanced_g,
    chain_speedup,
    compare_schemes,
    pearl_rounds,
    pearl_speedup,
    ssd_speedup,
    together,
)
from spec_loop import ModelDrafter, prefill
from spec_methods.pearl import Ahead, pearl
from spec_methods.sampled import Chance, Sampled, overlap

ALPHAS = (0.0, 0.3, 0.7, 0.95)


def round_of(coins: tuple, pending: bool) -> tuple[int, bool]:
    """(tokens written, whether the next round has guesses pending) of a round whose guesses stand as `coins` say."""
    judged = coins if pending else coins[:1]
    stood = next((i for i, stands in enumerate(judged) if not stands), len(judged))
    return (stood, len(coins) > 1) if stood == len(judged) else (stood + 1, False)


def enumerated(alpha: float, g: int) -> tuple[float, float]:
    """(tokens a round, share of rounds with guesses pending) in the long run, by every outcome of g guesses and the power of the
    chain; no closed form."""
    moves = {False: [], True: []}
    for pending, coins in itertools.product(moves, itertools.product([True, False], repeat=g)):
        chance = alpha ** sum(coins) * (1 - alpha) ** (g - sum(coins))
        moves[pending].append((chance, *round_of(coins, pending)))
    share, before = 0.0, -1.0
    while abs(share - before) > 1e-15:
        before = share
        stays, comes = (sum(chance for chance, _, after in moves[start] if after) for start in (True, False))
        share = (share + share * stays + (1 - share) * comes) / 2  # averaged: a chain may swing between two states
    tokens = {pending: sum(chance * wrote for chance, wrote, _ in moves[pending]) for pending in moves}
    return share * tokens[True] + (1 - share) * tokens[False], share


@pytest.mark.parametrize("g", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_rounds_of_pearl_are_those_of_the_enumerated_chain(alpha, g):
    assert pearl_rounds(alpha, g) == pytest.approx(enumerated(alpha, g), abs=1e-9)


def test_a_draft_that_is_always_right_gives_g_tokens_a_round():
    for g in (1, 3, 6):
        assert pearl_rounds(1.0, g) == (g, g > 1)
        assert pearl_rounds(1 - 1e-9, g).tokens == pytest.approx(g, rel=1e-6)


def test_the_published_table():
    """alpha, g = 1/c: the speedup where checking is free (worked out by simulation elsewhere)."""
    for alpha, g, expected in ((0.5, 5, 1.32), (0.7, 5, 1.81), (0.8, 5, 2.28), (0.9, 3, 2.31), (0.9, 5, 3.13)):
        assert pearl_speedup(alpha, g, 1 / g, lambda n: 1.0) == pytest.approx(expected, abs=0.006)


def test_rounds_of_the_real_machine_come_to_the_closed_form():
    """Two tables whose rows do not depend on the text: every guess is accepted with the overlap of the laws."""
    target, draft, g, n = (
        Table(3, probs=lambda ids: [0.5, 0.3, 0.2]),
        Table(3, probs=lambda ids: [0.4, 0.2, 0.4]),
        3,
        3000,
    )
    alpha = overlap(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.2, 0.4]), 0)
    rule, own = (Sampled(1.0, 0, 1.0, Chance(seed)) for seed in (1, 2))
    state = prefill(target, torch.tensor([list(tiny.PROMPT[2:3])]) * 0, n)
    ahead = Ahead(ModelDrafter(draft, 3, rule=own), g)
    ahead.start(state)
    done = pearl(target, ahead, state, n, rule)
    assert alpha == pytest.approx(0.8)
    assert statistics.fmean(done.emitted) == pytest.approx(pearl_rounds(alpha, g).tokens, rel=0.04)


def test_one_device_adds_up_what_two_do_at_once():
    assert together(2.0, 3.0, 2) == 3.0 and together(2.0, 3.0, 1) == 5.0
    for alpha in ALPHAS:
        turns = chain_speedup(alpha, 4, 0.2, lambda n: 1.0)
        assert pearl_speedup(alpha, 4, 0.2, lambda n: 1.0, devices=1) <= turns, (
            "it writes less a round, and hides nothing"
        )
        assert ssd_speedup(alpha, 4, 0.2, lambda n: 1.0, 1.0, 1.0, devices=1) < turns


def test_the_time_of_a_round_is_the_longer_sides_and_what_handing_over_takes():
    v = {1: 1.0, 2: 1.5, 3: 2.0}.__getitem__
    assert pearl_speedup(0.0, 2, 0.1, v) == pytest.approx(1.0), "nothing is ever pending"
    assert pearl_speedup(0.0, 2, 0.8, v) == pytest.approx(1 / 1.6)
    assert pearl_speedup(1.0, 2, 0.1, v) == pytest.approx(2 / 1.5)
    assert pearl_speedup(1.0, 2, 0.1, v, wait=0.5) == pytest.approx(2 / 2.0)
    assert ssd_speedup(1.0, 2, 0.1, v, hit=1.0, foresee=0.5) == pytest.approx(3 / 2.0)
    assert ssd_speedup(1.0, 2, 0.1, v, hit=0.0, foresee=0.5) == pytest.approx(3 / 2.2)
    assert ssd_speedup(1.0, 2, 0.1, v, hit=1.0, foresee=2.5, wait=0.5) == pytest.approx(3 / 3.0)


def test_the_g_that_balances_both_sides():
    assert balanced_g(0.2, lambda n: 1.0, 8) == 5
    assert balanced_g(0.2, lambda n: 0.9 + 0.1 * n, 12) == 9
    assert balanced_g(0.01, lambda n: 1.0, 8) == 8 and balanced_g(3.0, lambda n: 1.0, 8) == 1


def test_no_overlap_gives_more_than_twice_what_taking_turns_does():
    for alpha, draft in itertools.product((0.3, 0.7, 0.9), (0.05, 0.2, 0.6)):
        turns, *others = compare_schemes(alpha, draft, lambda n: 1 + 0.02 * n, 12, hit=1.0, widest=1.0)
        assert all(one.speedup < 2 * max(turns.speedup, 1) for one in others)
        turns, *others = compare_schemes(alpha, draft, lambda n: 1 + 0.02 * n, 12, hit=1.0, widest=1.0, devices=1)
        assert all(one.speedup < turns.speedup for one in others), "on one queue overlap loses"
