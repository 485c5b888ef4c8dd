"""The closed forms give the essay's numbers and agree with a simulation of what they describe."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from spec_harness.cells import accounted, pooled
from spec_harness.costs import costs_at
from spec_harness.essay import (
    FIGURES,
    essay_cost,
    essay_decode,
    essay_draft,
    essay_sweep,
    essay_workload,
    is_essay_pair,
)
from spec_harness.theory import (
    alpha_of_acceptance,
    best_k,
    ceiling,
    cost_speedup,
    even_costs,
    expected_tokens,
    interpolated,
    leviathan_speedup,
)

FREE = {1: 1.0}  # V(n) is 1 for every n


def free(n: int) -> float:
    return 1.0


def test_the_essays_own_numbers():
    """At 72 %, four right in a row 27 % of the time and eight 7 %; no more than 3.6 tokens a round, 2.6 of them guesses."""
    a = 0.72
    assert round(a**4, 2) == 0.27 and round(a**8, 2) == 0.07
    assert round(ceiling(a), 1) == 3.6
    assert expected_tokens(a, 1) == pytest.approx(1.72)
    assert expected_tokens(a, 16) == pytest.approx(3.56, abs=0.01)
    assert expected_tokens(a, 5) == pytest.approx(1 + a + a**2 + a**3 + a**4 + a**5)


def test_the_ends_of_the_formula():
    assert expected_tokens(0, 7) == 1
    assert expected_tokens(1, 7) == 8
    assert expected_tokens(0.5, 0) == 1
    assert ceiling(0) == 1
    assert ceiling(1) is None


@pytest.mark.parametrize(("alpha", "k"), [(0.5, 1), (0.72, 5), (0.9, 8)])
def test_a_simulated_round_writes_as_many_tokens_as_expected(alpha, k):
    """Guesses are right with chance alpha each; a round keeps those before the first wrong one, and writes one more."""
    draw = random.Random(0)
    rounds = 40_000
    written = 0
    for _ in range(rounds):
        kept = 0
        while kept < k and draw.random() < alpha:
            kept += 1
        written += kept + 1
    assert written / rounds == pytest.approx(expected_tokens(alpha, k), rel=0.02)


@given(alpha=st.floats(0, 0.999), k=st.integers(0, 40))
def test_more_guesses_never_write_fewer_tokens_and_never_reach_the_ceiling(alpha, k):
    assert expected_tokens(alpha, k) <= expected_tokens(alpha, k + 1) + 1e-9
    assert expected_tokens(alpha, k) <= ceiling(alpha) + 1e-9


@given(alpha=st.floats(0.001, 0.999), c=st.floats(0.001, 0.999))
def test_a_speedup_exists_exactly_where_alpha_exceeds_c(alpha, c):
    assume(abs(alpha - c) > 1e-6)
    best = max(leviathan_speedup(alpha, c, k) for k in range(1, 60))
    assert (best > 1) == (alpha > c)
    assert (best_k(alpha, even_costs(c, FREE), 60)[0] > 0) == (alpha > c)


def test_a_draft_pass_more_a_round_costs_what_it_costs():
    assert leviathan_speedup(0.72, 0.17, 5) == pytest.approx(expected_tokens(0.72, 5) / 1.85)
    assert leviathan_speedup(0.72, 0.17, 5, passes=6) == pytest.approx(expected_tokens(0.72, 5) / 2.02)


def test_the_measured_cost_form_adds_up_what_a_run_took():
    """10 tokens in 2 rounds of 5 tokens each, 8 draft passes at 0.25: 8 * 0.25 + 2 * 1.5 of a target pass."""
    assert cost_speedup(10, 8 * 0.25, [5, 5], lambda n: 1.5) == pytest.approx(10 / 5)
    assert cost_speedup(10, 8 * 0.25, [5, 5], lambda n: 1.5, overhead=0.5) == pytest.approx(10 / 6)
    assert cost_speedup(10, 8 * 0.25, [5, 5], lambda n: 1.5, plain_overhead=0.1) == pytest.approx(11 / 5)


def test_an_account_charges_a_draft_pass_that_reads_two_tokens_for_two():
    counted = {"proposed_lengths": [4, 4], "overhead_s": 0.0, "target_passes": 2, "baseline_overhead_share": 0.0,
               "draft_passes": 8, "drafting_lengths": [4, 4], "draft_tokens_read": 9, "emitted": 10}  # fmt: skip
    costs = {"v": {"1": 1.0, "5": 1.5}, "c": 0.275, "c_places": [0.3, 0.28, 0.25], "c2": 0.4, "target_pass_s": 0.02}
    assert accounted(counted, costs) == pytest.approx(10 / (2 * (0.3 + 0.28 + 0.25 + 0.25) + 0.1 + 2 * 1.5))
    copied = {**counted, "draft_passes": 4, "drafting_lengths": [4, 0], "draft_tokens_read": 4}  # one of the rounds was looked up
    assert accounted(copied, costs) == pytest.approx(10 / (0.3 + 0.28 + 0.25 + 0.25 + 2 * 1.5))
    assert accounted({**counted, "overhead_s": 0.04}, costs) == pytest.approx(
        10 / (2 * 1.08 + 0.1 + 2 * 1.5 + 2)
    )
    assert accounted({**counted, "baseline_overhead_share": 0.5}, costs) == pytest.approx(
        20 / (2 * 1.08 + 0.1 + 2 * 1.5)
    )


def test_costs_lie_on_the_line_between_the_contexts_that_were_measured():
    low = {
        "context": 100,
        "v": {"1": 1.0, "6": 1.2},
        "c": 0.1,
        "c_places": [0.1, 0.05],
        "c2": 0.12,
        "target_pass_s": 0.02,
    }
    high = {
        "context": 300,
        "v": {1: 1.0, 6: 1.6},
        "c": 0.14,
        "c_places": [0.14, 0.05],
        "c2": 0.2,
        "target_pass_s": 0.03,
    }
    here = costs_at([low, high], 150)
    one = 0.0225  # seconds lie on the line: 3/4 of the way from 20 to 30 ms back, 24 to 48 ms for six tokens
    assert here["target_pass_s"] == pytest.approx(one) and here["v"] == {1: 1.0, 6: pytest.approx(0.030 / one)}
    assert here["c"] == here["c_places"][0] == pytest.approx((0.75 * 0.002 + 0.25 * 0.0042) / one)
    assert here["c_places"][1] == pytest.approx((0.75 * 0.001 + 0.25 * 0.0015) / one)
    assert here["c2"] == pytest.approx((0.75 * 0.0024 + 0.25 * 0.006) / one)
    assert costs_at([low], 999) is low
    no_draft = [{**one, "c": None, "c_places": [], "c2": None} for one in (low, high)]
    assert costs_at(no_draft, 200)["c"] is None


def test_cells_are_pooled_as_time_over_time():
    """Four texts three times as fast and one half as fast, each 1 s alone: 5 s against 3.33, not 3x."""
    fast = {
        "baseline_s": [1.0] * 6,
        "baseline_again_s": [1.0] * 6,
        "speculative_s": [1 / 3] * 6,
        "predicted_costs": 3.0,
    }
    slow = {**fast, "speculative_s": [2.0] * 6, "predicted_costs": 0.5}
    row = pooled([fast] * 4 + [slow])
    assert row["speedup"] == row["speedup_low"] == row["speedup_high"] == pytest.approx(1.5)
    assert row["predicted_costs"] == pytest.approx(1.5) and row["aa"] == 1.0 and row["pairs"] == 6


@pytest.mark.parametrize(("alpha", "k"), [(0.89, 5), (0.5, 3), (0.99, 8), (0.0, 4)])
def test_the_alpha_behind_an_acceptance_is_found_again(alpha, k):
    accepted = (expected_tokens(alpha, k) - 1) / k
    assert alpha_of_acceptance(accepted, k) == pytest.approx(alpha, abs=1e-9)


def test_the_essays_acceptance_of_five_guesses_is_an_alpha_of_089():
    """72 % of what was proposed; 89 % of what was judged. Taken for one another they give another best k."""
    assert alpha_of_acceptance(FIGURES["decode_k5_prose"]["acceptance"], 5) == pytest.approx(0.89, abs=0.005)


def test_plain_decoding_predicts_a_speedup_of_one():
    assert cost_speedup(7, 0.0, [1] * 7, free, overhead=0.2, plain_overhead=0.2) == pytest.approx(1)


def test_the_essays_run_is_foreseen_from_its_costs():
    """15 rounds of 6 tokens at 1.07x, 90 draft passes at c = 0.17: its 1.83x is within a tenth of that."""
    run = FIGURES["decode_k5_prose"]
    c = run["draft_pass_ms"] / run["target_pass_ms"]
    foreseen = cost_speedup(
        64, run["draft_passes"] * c, [6] * run["target_passes"]["speculative"], lambda n: essay_cost(n) or 1
    )
    assert foreseen == pytest.approx(run["speedup"], abs=0.3)


def test_costs_between_measured_sizes_lie_on_straight_lines():
    v = interpolated({1: 1.0, 4: 1.3, 8: 2.1})
    assert [v(1), v(4), v(8)] == [1.0, 1.3, 2.1]
    assert v(2) == pytest.approx(1.1)
    assert v(6) == pytest.approx(1.7)
    assert v(10) == pytest.approx(2.5), "past the end the last slope goes on"
    assert interpolated({1: 1.0})(5) == 1.0


def test_where_nothing_pays_the_best_k_is_zero():
    assert best_k(0.1, even_costs(0.5, FREE), 16) == (0, 1.0)
    assert best_k(0.72, even_costs(0.17, {1: 1.0, 2: 2.0}), 16) == (0, 1.0)
    assert best_k(0.9, even_costs(0.1, FREE), 0) == (0, 1.0)


def test_the_best_k_is_best():
    k, speedup = best_k(0.8, even_costs(0.1, FREE), 16)
    others = [leviathan_speedup(0.8, 0.1, other) for other in range(1, 17)]
    assert speedup == pytest.approx(max(others)) and others.index(max(others)) + 1 == k


def test_the_best_k_pays_a_dear_first_pass_once_a_round():
    """One draft pass takes 0.9 behind the target and 0.1 behind another: by their mean of 0.26 (of five) the best k at alpha
    0.7 is nearer than by what a round takes."""
    costs = {"v": FREE, "c": 0.26, "c_places": [0.9, 0.1], "c2": 0.9}
    by_hand = {k: expected_tokens(0.7, k) / (0.9 + 0.1 * (k - 1) + 1) for k in range(1, 17)}
    assert best_k(0.7, costs, 16) == pytest.approx((max(by_hand, key=by_hand.get), max(by_hand.values())))
    assert best_k(0.7, costs, 16)[0] > best_k(0.7, even_costs(0.26, FREE), 16)[0]


# ----------------------------------------------------------------------------------------------- the published figures


def test_the_published_figures_stand_beside_the_essays_own_pair_only():
    class Args:
        target, draft = FIGURES["setup"]["target"], FIGURES["setup"]["draft"]

    assert is_essay_pair(Args)
    Args.draft = "cut:0,1"
    assert not is_essay_pair(Args)


def test_published_figures_are_found_by_what_was_measured():
    assert essay_sweep(5)["speedup"] == 1.83 and essay_sweep(7) == {}
    assert essay_workload("code")["speedup"] == 2.40 and essay_workload("poetry") == {}
    assert essay_cost(8) == 1.15 and essay_cost(7) is None
    assert essay_draft("Qwen/Qwen2.5-1.5B-Instruct")["cost_coefficient"] == 0.32
    assert essay_decode({"k": 5, "n_tokens": 64, "workload": "open prose"})["speedup"] == "1.83x"
    assert essay_decode({"k": 4, "n_tokens": 64, "workload": "open prose"}) is None


@pytest.mark.parametrize("row", FIGURES["k_sweep"], ids=lambda row: f"k={row['k']}")
def test_the_published_counts_obey_the_loops_identities(row):
    """The essay's loop takes k+1 draft passes a round and counts what it threw away: ours must count the same things."""
    rounds = row["target_passes"]
    assert row["draft_passes"] == rounds * (row["k"] + 1)
    assert row["acceptance"] == pytest.approx(1 - row["discarded"] / (row["k"] * rounds), abs=6e-4)
