"""The clock: what it waits for, whose turn it is, what counts, and what is made of the times."""

from __future__ import annotations

import re
import types
from pathlib import Path

import pytest
import torch

import spec_common
import tiny
from spec_common import (
    HERE,
    UserError,
    Watch,
    interleave,
    median_interval,
    paired_ratios,
    ratio_summary,
    synchronize,
    timed,
)
from spec_harness import tables
from spec_harness.cells import arrivals, compare, run_baseline, run_speculative, speed, watched
from spec_harness.tables import markdown_table

CPU = torch.device("cpu")


@pytest.fixture
def events(monkeypatch):
    """The order in which the device is waited for and the clock is read. The clock gives 0, 1, 2, ..."""
    seen = []

    def clock():
        seen.append("clock")
        return float(seen.count("clock") - 1)

    monkeypatch.setattr(spec_common, "synchronize", lambda device: seen.append("wait"))
    monkeypatch.setattr(spec_common, "time", types.SimpleNamespace(perf_counter=clock))
    return seen


def test_the_device_is_waited_for_right_before_the_clock_is_read(events):
    result, seconds = timed(lambda: events.append("work") or "done", CPU)
    assert events == ["wait", "clock", "work", "wait", "clock"]
    assert (result, seconds) == ("done", 1.0)


def test_a_watch_waits_before_every_lap(events):
    watch = Watch(CPU)
    watch("draft")
    watch("keep", 3)
    assert events == ["wait", "clock"] * 3
    assert watch.laps == [("draft", 1.0, 0), ("keep", 1.0, 3)]
    assert watch.seconds("keep") == [1.0]


@pytest.mark.parametrize("run", [run_baseline, run_speculative])
def test_a_free_run_reads_the_clock_at_its_ends_only(run, events):
    """Prefill and decode are timed apart: two clocks and two waits each, whatever the number of rounds."""
    target = tiny.llama()
    run(tiny.task(target, target, n=9, k=2))
    assert events == ["wait", "clock"] * 4


def test_a_watched_run_reads_the_clock_in_every_round(events):
    target = tiny.llama()
    done, _, watch = watched(run_speculative, tiny.task(target, target, n=9, k=2))
    assert len(watch.seconds("verify")) == done.target_passes == 3
    assert len(watch.seconds("draft")) == done.draft_passes
    assert sum(tokens for _, _, tokens in watch.laps) == 9


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_an_accelerator_is_waited_for_by_its_own_name(kind, monkeypatch):
    waited = []
    monkeypatch.setattr(getattr(torch, kind), "synchronize", lambda: waited.append(kind))
    synchronize(types.SimpleNamespace(type=kind))
    synchronize(CPU)
    assert waited == [kind]


def test_one_file_reads_the_clock():
    reads = re.compile(r"perf_counter|time\.(time|monotonic)\b")  # training budgets CPU seconds, which measure nothing
    assert [path.name for path in sorted(Path(HERE).glob("*.py")) if reads.search(path.read_text())] == [
        "spec_common.py"
    ]


# ---------------------------------------------------------------------------------------------------------- taking turns


def turns(names: str, repeats: int, warmup: int):
    order, clock = [], iter(range(1, 1000))
    arms = {name: lambda name=name: (order.append(name), float(next(clock))) for name in names}
    return order, interleave(arms, repeats, warmup)


def test_arms_take_turns_and_the_order_rotates():
    order, samples = turns("abc", repeats=3, warmup=0)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert {name: len(runs) for name, runs in samples.items()} == {"a": 3, "b": 3, "c": 3}


def test_warm_up_runs_every_arm_and_is_not_counted():
    order, samples = turns("ab", repeats=1, warmup=2)
    assert len(order) == 6 and sorted(order[:2]) == sorted(order[2:4]) == ["a", "b"]
    assert [seconds for _, seconds in samples["a"] + samples["b"]] == [5.0, 6.0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_time_that_is_not_positive_is_rejected(seconds):
    with pytest.raises(UserError, match="clock gave"):
        interleave({"a": lambda: (None, seconds)}, repeats=1, warmup=0)


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_every_raw_time_is_kept(repeats):
    target = tiny.llama()
    row, _ = compare(tiny.task(target, target, n=4, k=2), repeats=repeats, warmup=0)
    for arm in ("baseline", "speculative", "baseline_again"):
        assert len(row[f"{arm}_s"]) == len(row[f"{arm}_end_to_end_s"]) == repeats
        assert all(whole > decode for whole, decode in zip(row[f"{arm}_end_to_end_s"], row[f"{arm}_s"], strict=True))


def test_every_run_starts_from_the_same_state(monkeypatch):
    """A forward grows its cache in place: a cache carried into the next repeat would be timed at another length."""
    lengths = []
    monkeypatch.setattr(
        "spec_harness.cells.baseline",
        lambda target, state, *rest, **more: lengths.append(state.cache.get_seq_length()) or tiny_done(),
    )

    def tiny_done():
        from spec_loop import Decoded

        return Decoded(tokens=[1])

    target = tiny.llama()
    task = tiny.task(target, target, n=4)
    for _ in range(3):
        run_baseline(task)
    assert lengths == [len(tiny.PROMPT) - 1] * 3


# ------------------------------------------------------------------------------------------------------------ statistics


def test_ratios_are_paired_before_the_median_is_taken():
    """One slow minute hits both arms of a repeat: the pairs say 2x, three times over."""
    summary = ratio_summary([2.0, 20.0, 2.2], [1.0, 10.0, 1.1])
    assert summary == {"median": 2.0, "low": 2.0, "high": 2.0, "n": 3}
    assert paired_ratios([3, 8], [1, 2]) == [3, 4]
    with pytest.raises(ValueError):
        paired_ratios([1.0], [1.0, 2.0])


def test_one_stalled_sample_does_not_move_the_median():
    assert ratio_summary([2.0, 2.0, 20.0], [1.0, 1.0, 1.0])["median"] == 2.0


def test_an_interval_covers_the_median_and_is_the_same_every_time():
    values = [1.0, 1.2, 1.1, 5.0, 0.9, 1.05, 1.15]
    low, high = median_interval(values)
    assert min(values) <= low <= 1.1 <= high <= max(values) and low < high
    assert (low, high) == median_interval(values)
    assert median_interval([1.7]) == (1.7, 1.7)


def test_a_speedup_below_one_is_printed_as_it_is():
    samples = {
        "baseline": [((None, 0.5), 1.0)],
        "speculative": [((None, 0.5), 2.0)],
        "baseline_again": [((None, 0.5), 1.0)],
    }
    row = speed(samples, tokens=10)
    assert (row["speedup"], row["aa"], row["speedup_end_to_end"]) == (0.5, 1.0, 0.6)
    assert (row["baseline_tokens_per_s"], row["speculative_tokens_per_s"]) == (10.0, 5.0)


def test_arrivals_under_speculation_are_bursts():
    watch = types.SimpleNamespace(
        laps=[("draft", 1.0, 0), ("verify", 2.0, 0), ("keep", 0.0, 3), ("verify", 4.0, 0), ("keep", 0.0, 1)]
    )
    assert arrivals(watch, prefill_s=10.0) == {"ttft_s": 13.0, "tpot_s": 4 / 3, "itl_mean_s": 4 / 3, "itl_max_s": 4.0}


def test_one_token_has_no_gaps():
    row = arrivals(types.SimpleNamespace(laps=[("verify", 2.0, 0), ("keep", 0.0, 1)]), prefill_s=1.0)
    assert row == {"ttft_s": 3.0, "tpot_s": None, "itl_mean_s": None, "itl_max_s": None}


def test_a_table_shows_a_missing_value_as_a_dash():
    table = markdown_table([{"a": 1.0, "b": None}], [("a", "A", tables.fixed(1, "x")), ("b", "B", str)])
    assert table.splitlines() == ["|    A | B   |", "| ---: | --- |", "| 1.0x | -   |"]
