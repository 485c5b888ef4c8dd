"""The scripts in a world whose numbers are known: what each measures, predicts and says of it, and that its arms are equal."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from spec_common import UserError

import pytest

import spec_batch
import spec_bench
import spec_decode
import spec_drafts
import spec_lookup
import spec_precondition
import spec_sampling
import tiny
from clock_world import Price, World
from spec_harness import advice, batches, costs
from spec_harness.batches import Requests, batch_costs, run_batches
from spec_harness.reference import RoundLengths, reference_arms
from spec_methods.policy import FixedK
from spec_models.checks import Loaded

TARGET, DRAFT = Price(60, row=2, head=2), Price(6, row=1, head=1)  # one token: 64 and 8; four: 76; a draft's two: 9
ALONE, TOGETHER = 8 * 64.0, 3 * 8 + 76 + 9 + 2 * 8 + 76.0  # eight tokens; the same in two rounds of k = 3, all right


@pytest.fixture
def world(monkeypatch) -> World:
    for module in (costs, batches):  # every turn is like the others
        monkeypatch.setattr(module, "COST_REPEATS", 1)
        monkeypatch.setattr(module, "COST_WARMUP", 0)
    return World(monkeypatch)


def loaded(world: World, model, price: Price, flag: str) -> Loaded:
    return Loaded(world.priced(model, price), tiny.words(), flag[2:], flag, {"parameters": 1})


def pair(world: World) -> tuple[Loaded, Loaded]:
    """A target, and a draft that is always right."""
    target = tiny.llama(num_hidden_layers=1)
    draft = tiny.near(target, 0)
    return loaded(world, target, TARGET, "--target"), loaded(world, draft, DRAFT, "--draft")


class Kept:
    """A result file in memory."""

    def __init__(self):
        self.rows: list[dict] = []

    def find(self, **cell) -> dict | None:
        return next((row for row in self.rows if cell.items() <= row.items()), None)

    def add(self, row: dict) -> dict:
        self.rows.append(row)
        return row


# -------------------------------------------------------------------------------------------------------- precondition


def test_the_precondition_by_hand(world, monkeypatch):
    """A model of 11264 weights, read at 45440 bytes/s and multiplied at 5632 weights/s; its plain form twice as slow."""
    monkeypatch.setattr(
        spec_precondition, "device_limits", lambda *_: {"read_bytes_per_s": 45440.0, "operations_per_s": 11264.0}
    )
    (target, draft), plain = pair(world), world.priced(tiny.llama(), Price(120, row=4, head=4))
    args = argparse.Namespace(tokens=[1, 2, 4, 8], context=16, repeats=6, warmup=0)
    rows, summary = spec_precondition.run(args, target.model, draft.model, {"plain": plain})
    assert [(row["tokens"], row["pass_ms"], row["v"]) for row in rows] == [
        (n, 1000 * (60 + 4 * n), (60 + 4 * n) / 64) for n in (1, 2, 4, 8)
    ]
    assert [(row["plain_ms"], row["of_plain"]) for row in rows] == [(2000 * (60 + 4 * n), 0.5) for n in (1, 2, 4, 8)]
    assert [row["floor_ms"] for row in rows] == [2000.0, 4000.0, 8000.0, 16000.0]
    assert (summary["c"], summary["draft_pass_ms"], summary["nearly_free_up_to"]) == (8 / 64, 8000.0, 4)
    assert (summary["weights"], summary["read_s"], summary["ridge_tokens"]) == (11264, 1.0, 0.5)
    assert summary["bandwidth_share"] == 1 / 64, "what the fastest possible read is of the pass"


def free(*costs_: float | None) -> int:
    return advice.free_up_to([{"tokens": n, "v": v} for n, v in zip((1, 2, 4, 8, 16), costs_, strict=False)])


def test_nearly_free_ends_with_the_first_size_that_is_not():
    """Or that could not be measured: what lies behind a gap says nothing of the gap."""
    assert free(1.0, 1.1, 1.25, 1.26, 1.5) == 4 and free(1.0, 1.1, 1.6) == 2
    assert free(1.0, 1.1, 1.4, 1.2, 1.2) == 2 and free(1.0, None, 1.0) == 1
    assert advice.NEARLY_FREE == 1.25, "of the essay's 1.15, a ride-along, and 1.71, running out"


def test_no_advice_reaches_past_what_was_measured():
    """Free passes and guesses that are nearly always right: the longest block that was timed, and none longer."""
    rows = [{"tokens": n, "v": 1.0, "v_high": 1.0} for n in (1, 2, 4, 8)]
    found = advice.advise(rows, 0.0, 0.99, "given")
    assert found["best_k"] == 7 and found["predicted_speedup"] == pytest.approx(sum(0.99**i for i in range(8)))
    assert advice.advise([*rows[:3], {"tokens": 8, "v": 0.9, "v_high": 0.95}], 0.0, 0.99, "given") is None


def test_alpha_is_fed_where_alpha_is_wanted(tmp_path):
    """What was accepted of the proposed (72 % of five) is another number, and gives another best k."""
    args = spec_precondition.parse_args([])
    assert advice.assumed_alpha(args)[0] == pytest.approx(0.89, abs=0.005)
    path = tmp_path / "bench.json"
    path.write_text(tiny.result_file([{"acceptance_rate": 0.4}], {"alpha_median": 0.625, "acceptance_rate": 0.4}))
    assert advice.assumed_alpha(spec_precondition.parse_args(["--from", str(path)])) == (
        0.625,
        "measured in bench.json",
    )
    assert advice.assumed_alpha(spec_precondition.parse_args(["--alpha", "0.5"])) == (0.5, "given")
    better = json.loads(path.read_text())
    better["summary"]["alpha_median"] = 0.9
    for text in ("{}", json.dumps(better), tiny.result_file([], {})):
        path.write_text(text)
        with pytest.raises(UserError, match="--from bench.json"):
            advice.assumed_alpha(argparse.Namespace(alpha=None, measured=Path(path)))


# --------------------------------------------------------------------------------------------------------------- bench


def test_a_sweep_in_a_known_world(world, capsys):
    """No context, no noise, a draft that is always right: the more guesses the better, and costs account for all of it."""
    target, draft = pair(world)
    args = spec_bench.parse_args(["--ks", "1,3", "--n-tokens", "8"])
    texts = [("one", "w1 w5 w9")]
    sweep, workloads, found = spec_bench.run(args, target, draft, texts[0], texts, Kept())
    speeds = {1: ALONE / (8 + 68 + 3 * (9 + 68)), 3: ALONE / TOGETHER}
    assert {row["k"]: row["speedup"] for row in sweep} == speeds
    summary = spec_bench.summarise(sweep, workloads, found)
    assert (summary["c"], summary["v2"], summary["aa"], summary["alpha_median"]) == (8 / 64, 68 / 64, 1.0, 1.0)
    assert abs(summary["prediction_error_median"]) < 1e-12 and summary["prediction_error_max_abs"] < 1e-12
    assert (summary["best_k"], summary["best_verdict"], summary["overhead_share_median"]) == (3, "faster", 0.0)
    assert summary["best_k_predicted"] == 3 and summary["best_speedup_predicted"] == pytest.approx(4 / ((9 + 8 + 8 + 76) / 64))


def cell(k: int, speedup: float, name: str = "one", **more) -> dict:
    return {"k": k, "workload": name, "speedup": speedup, "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1, "aa_low": 0.99,
            "aa_high": 1.01, "error": None, "prediction_error": 0.0, "alpha": 0.5, "acceptance_rate": 1 / k, "prompt_tokens": 4, "n_tokens": 8,
            "overhead_share": 0.0, "baseline_s": [1.0] * 6, "baseline_again_s": [1.0] * 6, "speculative_s": [1 / speedup] * 6, **more}  # fmt: skip


def test_the_best_k_is_quoted_from_turns_that_did_not_choose_it():
    found = [{"context": 8, "v": {"1": 1.0, "6": 1.2}, "c": 0.1, "c_places": [0.1], "c2": 0.1}]
    sweep = [cell(1, 1.2), cell(3, 1.5), cell(5, 1.3)]
    summary = spec_bench.summarise(sweep, [cell(3, 1.25), cell(3, 9.0, "two"), cell(5, 1.4)], found)
    assert (summary["best_k"], summary["best_speedup"]) == (3, 1.25)
    slow = spec_bench.summarise([cell(1, 0.8), cell(3, 0.9)], [cell(3, 0.95)], found)
    assert (slow["best_k"], slow["best_verdict"]) == (3, "noise") and "do not speculate" in spec_bench.verdict(
        slow, "one"
    )


# --------------------------------------------------------------------------------------------------------- equal arms


@pytest.fixture
def looking(world) -> World:
    """A look at the clock takes a tick: a free run's two looks leave one tick between them, a watched run has many."""
    world.reading = 1.0
    return world


def test_no_timed_arm_of_the_drafts_looks_at_the_clock_on_its_way(looking):
    target, draft = pair(looking)
    task = tiny.task(target.model, n=8)
    args = argparse.Namespace(k=3, n_tokens=8, repeats=2, warmup=0, allow_near_ties=False)
    found = {
        "v": {1: 1.0, 4: 76 / 64},
        "c": 8 / 64,
        "c_places": [8 / 64],
        "c2": 9 / 64,
        "target_pass_s": 64.0,
    }
    row = spec_drafts.measure_drafts({draft.name: task}, [draft], args, {draft.name: found})["drafts"][draft.name]
    assert (
        row["baseline_s"] == row["baseline_again_s"] == [ALONE + 1] * 2 and row["speculative_s"] == [TOGETHER + 1] * 2
    )
    assert row["exact"] is True and row["prediction_error"] == row["predicted_costs"] - row["speedup"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_timed_arm_of_a_seed_looks_at_the_clock_on_its_way(temperature, looking):
    target, draft = pair(looking)
    args = argparse.Namespace(k=3, repeats=2, warmup=0, allow_near_ties=False, verify="token")
    row = spec_sampling.measure_seed(tiny.task(target.model, n=8), draft.model, (temperature, 0, 1.0), 0, args)
    assert row["baseline_s"] == row["baseline_again_s"] == [ALONE + 1] * 2
    assert row["speculative_s"] == [TOGETHER + 1] * 2, "the run that notes the laws is no arm"
    assert row["exact"] is True and row["alpha"] == 1.0


def nobody_listens(monkeypatch) -> None:
    monkeypatch.setattr(RoundLengths, "put", lambda *_: pytest.fail("a timed run carries a streamer"))


def test_transformers_arms_are_timed_without_a_streamer(world, monkeypatch):
    """It takes each round's tokens to the host: a burden that our arms do not have."""
    target, draft = pair(world)
    arms = reference_arms(tiny.task(target.model, n=8), target, draft, 3)
    nobody_listens(monkeypatch)
    seconds = {}
    for name, arm in arms.items():
        before = world.ticks
        seconds[name] = arm().seconds
        assert 0 < seconds[name] <= world.ticks - before
    assert set(arms) == {"generate", "plain_baseline", "assisted", "plain_speculative"}
    assert (seconds["plain_baseline"], seconds["plain_speculative"]) == (ALONE, TOGETHER)
    assert seconds["generate"] == TARGET.of(len(tiny.PROMPT), rows=1) + 7 * 64, (
        "the prompt's pass gives the first token"
    )


def test_transformers_look_up_is_timed_without_a_streamer(world, monkeypatch):
    target, _ = pair(world)
    timed_turns = spec_decode.interleave

    def quiet(*given, **more):
        nobody_listens(monkeypatch)
        return timed_turns(*given, **more)

    monkeypatch.setattr(spec_decode, "interleave", quiet)
    args = spec_lookup.parse_args(["--methods", "lookup", "--repeats", "1", "--n-tokens", "8", "-k", "3"])
    found = {"v": {1: 1.0, 4: 76 / 64}, "c": None, "c_places": [], "c2": None, "target_pass_s": 64.0}
    row = spec_lookup.measure_methods(tiny.task(target.model, (7, 8, 9, 7, 8), 8), target, None, args, found)["lookup"]
    assert row["baseline_s"] == [ALONE] and row["prompt_lookup_s"][0] > 0
    assert row["speculative_s"] == [sum(60 + 4 * (n + 1) for n in row["proposed_lengths"])]
    assert abs(row["prediction_error"]) < 1e-12, "a look-up costs its checks alone"


# --------------------------------------------------------------------------------------------------------------- batch


def requests_of(world: World, size: int) -> Requests:
    target, draft = pair(world)
    tasks = {f"r{i}": tiny.task(target.model, (5, 9, 3, i), 8) for i in range(4)}
    return Requests(tasks, draft.model, FixedK(3), size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_batch_is_timed_without_its_prefill_and_without_a_watch(size, looking):
    """Four requests of one length, each written in two rounds of four: as many passes as there are batches."""
    requests = requests_of(looking, size)
    rows, groups = size, 4 // size
    step, block = (60 + 4 * q * rows for q in (1, 4))
    plain, fast = run_batches(requests, False), run_batches(requests, True)
    assert plain.seconds == groups * (8 * step + 1)
    one, two = (6 + q * rows + rows for q in (1, 2))
    assert fast.seconds == groups * (3 * one + block + two + 2 * one + block + 1)
    prefill = 60 + 2 * 3 * rows + 2 * rows, 6 + 3 * rows + rows
    assert plain.prefill_s == groups * (prefill[0] + 1) and fast.prefill_s == groups * (sum(prefill) + 1)


def test_no_timed_arm_of_a_batch_looks_at_the_clock_on_its_way(looking):
    requests = requests_of(looking, 4)
    found = [
        {"batch": rows, **batch_costs(next(iter(requests.tasks.values())), requests.draft, 3, rows, 8)}
        for rows in (1, 4)
    ]
    expected = {name: tiny.greedy(requests.target, one.prompt[0].tolist(), 8) for name, one in requests.tasks.items()}
    args = argparse.Namespace(repeats=1, warmup=0, allow_near_ties=False, k=3)
    row = spec_batch.measure_batch(requests, requests.target, expected, found, args)
    assert row["baseline_s"] == row["baseline_again_s"] == [8 * 76 + 1.0]
    assert row["speculative_s"] == [5 * 14 + 18 + 2 * 124 + 1.0]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_speed_of_a_batch_is_what_its_passes_come_to(size, world):
    """The same requests at every size: fewer passes, dearer ones, and a prediction with nothing to be wrong about."""
    requests = requests_of(world, size)
    task = next(iter(requests.tasks.values()))
    found = [{"batch": rows, **batch_costs(task, requests.draft, 3, rows, 8)} for rows in {1, size}]
    assert found[-1]["c"] == (6 + 2 * found[-1]["batch"]) / (60 + 4 * found[-1]["batch"])
    expected = {name: tiny.greedy(requests.target, one.prompt[0].tolist(), 8) for name, one in requests.tasks.items()}
    args = argparse.Namespace(repeats=1, warmup=0, allow_near_ties=False, k=3)
    row = spec_batch.measure_batch(requests, requests.target, expected, found, args)
    step, block, one, two = 60 + 4 * size, 60 + 16 * size, 6 + 2 * size, 6 + 3 * size
    assert row["speedup"] == 8 * step / (5 * one + two + 2 * block)
    assert abs(row["prediction_error"]) < 1e-12 and row["exact"] is True
    assert row["baseline_ttft_s"] == 60 + 8 * size + step


# ------------------------------------------------------------------------------------------------------------ verdicts


@pytest.mark.parametrize(("low", "high", "says"), [(0.8, 0.9, True), (0.8, 1.1, False), (None, None, False)])
def test_sampling_advises_against_only_where_the_interval_does(low, high, says):
    row = {
        "speedup": 0.85,
        "speedup_low": low,
        "speedup_high": high,
        "aa_low": low and 0.99,
        "aa_high": low and 1.01,
        "pairs": 6,
    }
    assert ("do not speculate" in spec_sampling.pays(row)) == says
    assert "faster" not in spec_sampling.pays({**row, "speedup": 1.2})


@pytest.mark.parametrize("script", ["decode", "drafts", "sampling", "batch"])
def test_a_text_with_an_excused_tie_is_not_called_exact(script, world, monkeypatch):
    """The check says what it excused; the row may not say that there was nothing."""
    tie = {"near_tie": True, "index": 1}
    for module in (spec_decode, spec_sampling, spec_batch):
        monkeypatch.setattr(module, "check_exact", lambda *_: [dict(tie)])
    requests = requests_of(world, 4)
    args = argparse.Namespace(k=3, n_tokens=8, repeats=1, warmup=0, allow_near_ties=True, verify="token")
    task, draft = next(iter(requests.tasks.values())), Loaded(requests.draft, None, "draft", "--draft")
    if script in ("decode", "drafts"):  # which look only at texts that differ
        real = spec_decode.run_speculative
        other = lambda run: run.done.tokens.append(run.done.tokens.pop() ^ 1) or run  # noqa: E731
        monkeypatch.setattr(spec_decode, "run_speculative", lambda *given, **more: other(real(*given, **more)))
    if script == "decode":
        row = spec_decode.measure(task, tiny.method(task, requests.draft, 3), args)
    elif script == "drafts":
        found = {
            "v": {1: 1.0, 4: 76 / 64},
            "c": 8 / 64,
            "c_places": [8 / 64],
            "c2": 9 / 64,
            "target_pass_s": 64.0,
        }
        row = spec_drafts.measure_drafts({"draft": task}, [draft], args, {"draft": found})["drafts"]["draft"]
    elif script == "sampling":
        row = spec_sampling.measure_seed(task, requests.draft, (0.0, 0, 1.0), 0, args)
    else:
        found = [{"batch": rows, **batch_costs(task, requests.draft, 3, rows, 8)} for rows in (1, 4)]
        row = spec_batch.measure_batch(requests, requests.target, dict.fromkeys(requests.tasks), found, args)
    assert row["exact"] is False and row["near_ties"]
