"""Everything that is measured, in a world where its right value is known: costs, arms, predictions, speedups, verdicts."""

from __future__ import annotations

import statistics

from spec_common import Timed, judge_speed

import pytest
import torch

import spec_decode
import tiny
from clock_world import Price, World
from spec_decode import measure
from spec_harness import costs, tables
from spec_harness.arms import Method, Run, Task, run_speculative
from spec_harness.cells import closed_form, timing
from spec_harness.costs import (
    ROUND,
    costs_at,
    costs_of,
    device_limits,
    floor_s,
    limits_of_passes,
    measure_costs,
    measured_costs,
    pass_seconds,
    random_ids,
)
from spec_methods import trees
from spec_methods.policy import FixedK

CPU = torch.device("cpu")
TARGET, DRAFT = Price(60, row=2, head=2), Price(6, row=1, head=1)  # one token: 64 and 8; four: 76; a draft's two: 9
LONG, LONG_DRAFT = TARGET._replace(seen=0.5), DRAFT._replace(seen=0.25)  # where the context costs as well
OWN = 16.0  # the loop's own time for each block it writes
PLAIN, FAST = 8 * (64 + OWN), (3 * 8 + 76 + OWN) + (9 + 2 * 8 + 76 + OWN)  # eight tokens alone; in two rounds of k = 3
WRONG = 18 * 8 + 5 * 76 + 72 + 68 + 64 + 8 * OWN  # eight rounds with nothing right, k = 3 and then what remains


@pytest.fixture
def world(monkeypatch) -> World:
    return quick_world(monkeypatch)


def quick_world(monkeypatch) -> World:
    """Of costs two turns are enough: every one is like the others."""
    monkeypatch.setattr(costs, "COST_REPEATS", 2)
    monkeypatch.setattr(costs, "COST_WARMUP", 0)
    return World(monkeypatch)


def pair(world: World, target=TARGET, draft=DRAFT, guess=lambda model: tiny.near(model, 0)):
    """A target and a draft at these prices; the draft is right every time unless it is made otherwise."""
    model = tiny.llama(num_hidden_layers=1)
    cheap = guess(model)
    return world.priced(model, target), world.priced(cheap, draft)


# --------------------------------------------------------------------------------------------------------------- costs


def test_a_pass_is_timed_at_its_context_with_every_row_of_logits(world):
    target, draft = pair(world, LONG, LONG_DRAFT)
    seconds, failed = pass_seconds(target, draft, random_ids([target], 32), 16, [1, 2, 4, 8], 2, 1)
    assert failed == {}
    for n in (1, 2, 4, 8):
        assert seconds[n] == [LONG.of(n, 16 + n)] * 2
    row = [LONG_DRAFT.of(1, 17 + i, 1) for i in range(ROUND)]  # in a row, as a round runs them
    assert seconds["draft"] == [statistics.fmean(row)] * 2
    assert [seconds[f"draft place {i}"] for i in range(1, ROUND + 1)] == [[tick] * 2 for tick in row]
    assert seconds["draft 2"] == [LONG_DRAFT.of(2, 18, 1)] * 2


def go_cold(world: World, target, draft):
    """The pair, a round's first draft pass, behind one of the target, taking 5 ticks more."""
    cold = []

    def charge(draft, tokens, out):
        if cold and tokens[0].shape[1] <= 2:  # more are a prompt, which is on no clock
            world.pass_by(5.0)
            cold.clear()

    target.register_forward_hook(lambda *_: cold.append(True))
    draft.register_forward_hook(charge)
    return target, draft


def test_a_rounds_draft_passes_are_timed_behind_a_pass_of_the_target(world):
    """It takes the draft's weights out of the caches: the first one behind it is told from the others."""
    target, draft = go_cold(world, *pair(world))
    found = costs_of(pass_seconds(target, draft, random_ids([target], 32), 16, [1, 2, 4], 6, 0)[0])
    assert (found["c"], found["c2"]) == ((8 + 5 / ROUND) / 64, 14 / 64)
    assert found["c_places"] == [13 / 64] + [8 / 64] * (ROUND - 1)


def test_costs_are_told_against_one_token(world):
    target, draft = pair(world, LONG, LONG_DRAFT)
    row = measured_costs(target, draft, 16, [1, 7], None)
    one = LONG.of(1, 17)
    assert row["v"] == {1: 1.0, 2: LONG.of(2, 18) / one, 8: LONG.of(8, 24) / one}
    assert row["c"] == LONG_DRAFT.of(1, 19, 1) / one and row["c2"] == LONG_DRAFT.of(2, 18, 1) / one
    assert row["c_places"] == [LONG_DRAFT.of(1, 17 + i, 1) / one for i in range(ROUND)]
    assert (row["target_pass_s"], row["context"], row["error"]) == (one, 16, None)
    assert len(row["seconds"]["1"]) == len(row["seconds"]["draft"]) == 2


def test_costs_at_a_context_are_those_of_a_pass_there(world):
    """Measured at the shortest and the longest text; the seconds between them lie on a line, whatever the ratios do."""
    target, draft = pair(world, LONG, LONG_DRAFT)
    rows = []
    file = type("File", (), {"find": lambda self, **where: None, "add": lambda self, row: rows.append(row) or row})()
    tasks = [tiny.task(target, prompt, 8) for prompt in ((5,) * 6, (5,) * 46, (5,) * 26)]
    found = measure_costs(file, tasks, draft, [3])
    assert [row["context"] for row in found] == [row["at"] for row in rows] == [10, 50]
    here = costs_at(found, 30)
    assert here["target_pass_s"] == LONG.of(1, 31)
    assert here["v"][4] == pytest.approx(LONG.of(4, 34) / LONG.of(1, 31))
    assert here["c"] == pytest.approx(LONG_DRAFT.of(1, 33, 1) / LONG.of(1, 31))


def test_v_and_c_are_medians_of_ratios_within_a_turn():
    """A slow minute hits a whole turn; the ends of the interval are not the value."""
    one = [1.0, 2.0, 4.0, 1.0, 8.0, 1.0, 2.0]
    ratios = [1.5, 1.25, 2.0, 1.0, 1.5, 3.0, 1.75]
    seconds = {1: one, 4: [a * b for a, b in zip(one, ratios, strict=True)]}
    seconds |= {"draft": [a * b / 8 for a, b in zip(one, ratios, strict=True)]}
    seconds |= {"draft 2": [a * b / 4 for a, b in zip(one, ratios, strict=True)]}
    found = costs_of(seconds)
    assert found["v"] == {1: 1.0, 4: 1.5} and (found["c"], found["c2"]) == (1.5 / 8, 1.5 / 4)
    assert found["v_intervals"][4] == {"median": 1.5, "low": 1.0, "high": 3.0, "n": 7}
    assert found["target_pass_s"] == 2.0


def test_the_devices_limits_are_its_best_tries(monkeypatch):
    """Anything slower was disturbed. A multiply-add counts as two operations."""
    monkeypatch.setattr(costs, "READ_BYTES", {"cpu": 1024})
    monkeypatch.setattr(costs, "SQUARE", {"cpu": 8})
    tries = iter([0.001] * 3 + [0.5, 0.25, 1.0, 2.0, 0.5, 0.5, 0.5, 0.5] + [4.0, 2.0, 8.0, 4.0, 4.0, 4.0, 4.0, 4.0])
    monkeypatch.setattr(costs, "timed", lambda work, device: Timed(work(), next(tries)))
    assert device_limits(CPU, torch.float32) == {"read_bytes_per_s": 1024 / 0.25, "operations_per_s": 2 * 8**3 / 2.0}
    assert next(tries, None) is None


def test_the_limits_of_a_pass_by_hand():
    """1000 weights of 4 bytes at 8000 bytes/s: half a second; two operations a weight at 16000 a second: an eighth."""
    weights_of = lambda n: (1000.0, 4000.0)  # noqa: E731
    limits = {"read_bytes_per_s": 8000.0, "operations_per_s": 16000.0}
    limit = limits_of_passes(weights_of, limits)
    assert limit == {
        "weights": 1000.0,
        "read_bytes": 4000.0,
        "read_s": 0.5,
        "arithmetic_s_per_token": 0.125,
        "ridge_tokens": 4.0,
        "mixture": False,
    }
    assert [floor_s(n, weights_of, limits) for n in (1, 4, 8)] == [0.5, 0.5, 1.0]


# ---------------------------------------------------------------------------------------------------------------- a cell


def measured(world: World, guess=lambda model: tiny.near(model, 0), loop: str = "lean", arms=None, **paces) -> dict:
    """The row of a cell: eight tokens, k = 3, six turns, costs measured first."""
    target, draft = pair(world, guess=guess)
    world.writing_takes(OWN)
    task = tiny.task(target, n=8, loop=loop)
    world.turns_last(spec_decode, **paces)
    found = measured_costs(target, draft, task.context, [3], None)
    return measure(task, tiny.method(task, draft, 3), tiny.turns(6), found, arms)


@pytest.fixture(scope="module")
def cell() -> dict:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return measured(quick_world(monkeypatch))


def test_a_cell_has_the_speed_its_passes_come_to(cell):
    row = cell
    assert row["baseline_s"] == row["baseline_again_s"] == [PLAIN] * 6
    assert row["speculative_s"] == [FAST] * 6
    assert (row["speedup"], row["speedup_low"], row["speedup_high"]) == (PLAIN / FAST,) * 3
    assert (row["aa"], row["aa_low"], row["aa_high"]) == (1.0,) * 3
    assert (row["baseline_tokens_per_s"], row["speculative_tokens_per_s"]) == (8 / PLAIN, 8 / FAST)
    prefill = TARGET.of(5, rows=1), DRAFT.of(5, rows=1)  # all but the last token of the prompt, one row of logits
    assert row["baseline_end_to_end_s"] == [prefill[0] + PLAIN] * 6
    assert row["speculative_end_to_end_s"] == [sum(prefill) + FAST] * 6
    assert row["speedup_end_to_end"] == (prefill[0] + PLAIN) / (sum(prefill) + FAST)
    assert judge_speed(row) == "faster" and "speculation pays here" in tables.decode_verdict(row)


def test_a_cell_says_where_its_time_went(cell):
    row = cell
    assert (row["target_pass_ms"], row["draft_pass_ms"], row["verify_pass_ms"]) == (64e3, 8e3, 76e3)
    assert (row["draft_s"], row["verify_s"], row["overhead_s"]) == (49.0, 152.0, 2 * OWN)
    assert row["overhead_share"] == 2 * OWN / FAST and row["baseline_overhead_share"] == pytest.approx(OWN / 80)
    first = TARGET.of(5, rows=1)
    assert (row["baseline_ttft_s"], row["speculative_ttft_s"]) == (
        first + 80,
        first + DRAFT.of(5, rows=1) + 24 + 76 + OWN,
    )
    assert row["baseline_tpot_s"] == 80.0


def test_what_a_cell_costs_comes_to_its_speed(cell):
    """No context, no noise: the account has nothing to be wrong about. Leviathan's form leaves checking and the loop out."""
    row = cell
    assert row["cost_coefficient"] == 8 / 64 and row["alpha"] == 1.0
    assert row["predicted_costs"] == pytest.approx(PLAIN / FAST, rel=1e-12) and abs(row["prediction_error"]) < 1e-12
    assert row["predicted_leviathan"] == 4 / (3 / 8 + 1)


@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_account_holds_where_the_first_draft_pass_of_a_round_is_slower(world, k):
    target, draft = go_cold(world, *pair(world))
    world.writing_takes(OWN)
    task = tiny.task(target, n=8)
    row = measure(
        task, tiny.method(task, draft, k), tiny.turns(6), measured_costs(target, draft, task.context, [k], None)
    )
    assert abs(row["prediction_error"]) < 1e-12


def test_the_error_of_a_prediction_has_its_sign(world):
    """Speculation alone runs at half the pace: it gives half of what its costs say."""
    row = measured(world, speculative=[2.0] * 6)
    assert row["prediction_error"] == pytest.approx(PLAIN / FAST - PLAIN / (2 * FAST), rel=1e-12)


def test_a_draft_that_is_never_right_costs_what_it_costs(world):
    row = measured(world, guess=tiny.always_wrong)
    assert row["speculative_s"] == [WRONG] * 6 and row["speedup"] == PLAIN / WRONG
    assert row["predicted_costs"] == pytest.approx(PLAIN / WRONG, rel=1e-12)
    assert row["alpha"] == 0.0 and row["predicted_leviathan"] == 1 / (3 / 8 + 1)
    assert judge_speed(row) == "slower" and "do not speculate here" in tables.decode_verdict(row)


def test_the_essays_loop_is_charged_for_its_further_draft_pass(world):
    row = measured(world, loop="essay")
    fast = 2 * (4 * 8 + 76 + OWN)
    assert row["speculative_s"] == [fast] * 6 and row["predicted_costs"] == pytest.approx(PLAIN / fast, rel=1e-12)
    assert row["predicted_leviathan"] == 4 / (4 / 8 + 1)


UP, DOWN = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [6.0, 5.0, 4.0, 3.0, 2.0, 1.0]


def test_times_are_paired_by_turn_and_none_is_left_out(world):
    """The machine is ever slower to one arm and ever faster to the other: sorted, or with the fastest for all, they would
    say something else."""
    row = measured(world, baseline=UP, speculative=DOWN)
    assert row["baseline_s"] == [pace * PLAIN for pace in UP] and row["speculative_s"] == [pace * FAST for pace in DOWN]
    ratios = [a / b * (PLAIN / FAST) for a, b in zip(UP, DOWN, strict=True)]
    assert row["speedup"] == pytest.approx(statistics.median(ratios), rel=1e-12)
    assert (row["speedup_low"], row["speedup_high"]) == (pytest.approx(ratios[0]), pytest.approx(ratios[-1]))
    assert (row["aa"], row["aa_low"], row["aa_high"]) == (3.5, 1.0, 6.0)
    assert row["baseline_tokens_per_s"] == pytest.approx(8 / (3.5 * PLAIN))
    assert judge_speed(row) == "noise"
    said = tables.decode_verdict(row)
    assert "speculation pays" not in said and "do not speculate" not in said


def test_a_speedup_inside_what_the_same_code_gives_against_itself_pays_nothing(world):
    """Faster in every turn, but no more than the baseline was against itself."""
    row = measured(world, baseline_again=[0.25] + [1.0] * 5)
    assert row["speedup_low"] > 1 and row["aa_high"] == 4.0
    assert judge_speed(row) == "noise" and "pays" not in tables.decode_verdict(row)


# ---------------------------------------------------------------------------------------------------------- equal arms


def test_no_timed_arm_of_a_cell_looks_at_the_clock_on_its_way(world):
    """Looking takes a tick: a free run's two looks leave one tick between them."""
    target, draft = pair(world)
    task = tiny.task(target, n=8)
    world.reading = 1.0
    row = measure(task, tiny.method(task, draft, 3), tiny.turns(6))
    assert row["baseline_s"] == row["baseline_again_s"] == [8 * 64 + 1.0] * 6
    assert row["speculative_s"] == [FAST - 2 * OWN + 1.0] * 6


def test_the_closed_form_speaks_of_a_fixed_k_alone():
    task, found = tiny.task(tiny.llama(), n=4), {"c": 0.125}
    method = tiny.method(task, task.target, 3)
    assert closed_form(task, method, 1.0, found) == 4 / (3 * 0.125 + 1)
    assert closed_form(task, method, None, found) is None
    method.policy = type("Another", (type(method.policy),), {})(3)
    assert closed_form(task, method, 1.0, found) is None


def test_tokens_per_second_are_of_the_median_run():
    samples = {
        arm: [Run(None, 0.0, s) for s in (1.0, 2.0, 10.0)] for arm in ("baseline", "speculative", "baseline_again")
    }
    row = timing(samples, 8)
    assert (row["baseline_tokens_per_s"], row["speculative_tokens_per_s"]) == (4.0, 4.0)


def test_what_a_tree_tells_the_passes_is_the_loops_own_time(world, monkeypatch):
    """Working out who sees whom takes time of neither model's passes: it counts as overhead, for the levels that the draft
    reads and for the check."""
    target, draft = tiny.llama(), tiny.near(tiny.llama())
    calls = []

    def slowly(*given):
        calls.append(given[0])
        world.pass_by(3)
        return build(*given)

    build = trees.tree_geometry
    monkeypatch.setattr(trees, "tree_geometry", slowly)
    world.priced(target, Price(10))
    world.priced(draft, Price(1))
    task = Task(target, torch.tensor([tiny.PROMPT]), 12)
    run = run_speculative(task, Method(trees.TreeDrafter(draft, 64, 6), FixedK(3)), watched=True)
    assert {id(model) for model in calls} == {id(target), id(draft)}
    assert sum(run.watch.seconds("verify")) == 10 * run.done.target_passes
    assert sum(run.watch.seconds("draft")) == run.done.draft_passes
    assert sum(run.watch.seconds("pick")) == 3 * len(calls)
