"""The forecast: alpha of some rounds, the speed of others, in worlds whose costs and acceptance are known."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

import spec_bench
from spec_harness.cells import forecast, round_seconds
from spec_harness.theory import cost_speedup, expected_tokens, forecast_speedup, interpolated

COSTS = {
    "c": 0.11,
    "c_places": [0.12, 0.1],
    "c2": 0.15,
    "v": {"1": 1.0, "2": 1.1, "4": 1.3},
    "target_pass_s": 0.02,
}


def world(
    accepted: list[int], k: int = 3, overhead: float = 0.05, plain_overhead: float = 0.0, loop: str = "lean"
) -> dict:
    """The row of a run of full rounds whose every second is COSTS' own: a pass over one token takes 0.02 s."""
    v = interpolated({int(n): cost for n, cost in COSTS["v"].items()})
    passes = [(k + (loop == "essay")) * 0.1 + 0.02 + v(k + 1) + overhead for _ in accepted]
    if loop == "lean":
        passes = [cost + 0.03 * (at > 0 and accepted[at - 1] == k) for at, cost in enumerate(passes)]
    emitted = [kept + 1 for kept in accepted]
    return {"k": k, "loop": loop, "proposed_lengths": [k] * len(accepted), "accepted_lengths": accepted, "emitted_lengths": emitted,
            "watched_round_s": [0.02 * cost for cost in passes], "overhead_s": 0.02 * overhead * len(accepted), "target_passes": len(accepted),
            "emitted": sum(emitted), "baseline_overhead_share": plain_overhead / (1 + plain_overhead),
            "speedup": sum(emitted) * (1 + plain_overhead) / sum(passes)}  # fmt: skip


def test_a_forecast_by_hand():
    """Rounds 0 and 2 keep 3 and 1 of 3: 4 accepted of 5 judged. Rounds 1 and 3 keep 0 and 2: 4 tokens, one of them behind a
    round in which all stood, so its first draft pass reads two."""
    found = forecast(world([3, 0, 1, 2]), COSTS)
    alpha = 4 / 5
    assert found["forecast_alpha"] == alpha
    spent = 3 * 0.1 + 0.02 + alpha**3 * 0.03 + 1.3 + 0.05
    assert found["forecast"] == pytest.approx((1 + alpha + alpha**2 + alpha**3) / spent)
    assert found["forecast_came"] == pytest.approx(4 / (2 * (0.32 + 1.3 + 0.05) + 0.03))
    assert found["forecast_error"] == pytest.approx(found["forecast"] - found["forecast_came"])


def test_the_essays_loop_takes_a_pass_more_and_none_that_reads_two():
    found = forecast(world([3, 0, 1, 2], loop="essay"), COSTS)
    assert found["forecast"] == pytest.approx(expected_tokens(0.8, 3) / (0.42 + 1.3 + 0.05))


def test_what_the_other_rounds_kept_is_not_known_to_the_forecast():
    one, other = (forecast(world(accepted), COSTS) for accepted in ([2, 0, 1, 0], [2, 3, 1, 3]))
    assert one["forecast"] == other["forecast"] and one["forecast_came"] < other["forecast_came"]


@pytest.mark.parametrize(("alpha", "k"), [(0.5, 1), (0.6, 3), (0.9, 3)])
def test_a_forecast_comes_true_where_rounds_are_of_one_kind(alpha, k):
    draw = random.Random(1)
    accepted = [next((i for i in range(k) if draw.random() > alpha), k) for _ in range(20000)]
    found = forecast(world(accepted, k, plain_overhead=0.01), COSTS)
    assert found["forecast_error"] == pytest.approx(0, abs=0.02) and found["forecast_alpha"] == pytest.approx(
        alpha, abs=0.01
    )


def test_a_forecast_of_one_block_is_its_account():
    """At alpha 1 nothing is left to chance: both forms give the same."""
    v = interpolated({1: 1.0, 2: 1.1, 4: 1.3})
    assert forecast_speedup(1.0, 3, 3, COSTS, 0.05, 0.01) == pytest.approx(cost_speedup(4, 0.35, [4], v, 0.05, 0.01))


@pytest.mark.parametrize("accepted", [[2], []])
def test_a_text_without_other_rounds_has_no_forecast(accepted):
    row = {
        **world([1, 1]),
        **{
            name: [1] * len(accepted)
            for name in ("proposed_lengths", "accepted_lengths", "emitted_lengths", "watched_round_s")
        },
    }
    assert set(forecast(row, COSTS).values()) == {None}


def test_a_round_ends_where_tokens_are_written():
    laps = [("draft", 1.0, 0), ("verify", 2.0, 0), ("keep", 0.5, 3), ("verify", 2.0, 0), ("keep", 0.25, 1)]
    assert round_seconds(SimpleNamespace(watch=SimpleNamespace(laps=laps))) == [3.5, 2.25]


def test_the_summary_gives_the_error_signed_over_all_cells_that_have_one():
    cells = [{"forecast_error": error} for error in (-0.3, 0.1, 0.2, None)]
    found = spec_bench.median_error(cells, "forecast_error")
    assert found == {"forecast_error_median": 0.1, "forecast_error_median_abs": 0.2, "forecast_error_max_abs": 0.3}
    assert set(spec_bench.median_error(cells[3:], "forecast_error").values()) == {None}
