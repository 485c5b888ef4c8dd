"""The clock: what it waits for, whose turn it is, what counts, and what is made of the times."""

from __future__ import annotations

import math
import random
import re
import types
from pathlib import Path

import spec_common
from spec_common import (
    HERE,
    Timed,
    UserError,
    Watch,
    interleave,
    interval_rank,
    judge_speed,
    median_interval,
    paired_ratio,
    synchronize,
    tell,
    timed,
    turn_order,
)

import pytest
import torch

import tiny
from spec_decode import measure
from spec_harness import tables
from spec_harness.arms import Run, run_baseline, run_speculative
from spec_harness.cells import arrivals, timing
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


@pytest.mark.parametrize("speculative", [False, True])
def test_a_free_run_reads_the_clock_at_its_ends_only(speculative, events):
    """Prefill and decode are timed apart: two clocks and two waits each, whatever the number of rounds."""
    target = tiny.llama()
    task = tiny.task(target, n=9)
    run_speculative(task, tiny.method(task, target, 2)) if speculative else run_baseline(task)
    assert events == ["wait", "clock"] * 4


def test_a_watched_run_reads_the_clock_in_every_round(events):
    target = tiny.llama()
    task = tiny.task(target, n=9)
    done, _, _, watch = run_speculative(task, tiny.method(task, target, 2), watched=True)
    assert len(watch.seconds("verify")) == done.target_passes == 3
    assert len(watch.seconds("draft")) == done.draft_passes
    assert sum(tokens for _, _, tokens in watch.laps) == 9


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_an_accelerator_is_waited_for_by_its_own_name(kind, monkeypatch):
    """And that one alone: a wait for another card opens a context on it, and takes its memory."""
    waited, device = [], types.SimpleNamespace(type=kind, index=1)
    monkeypatch.setattr(getattr(torch, kind), "synchronize", lambda *which: waited.append(which))
    monkeypatch.setattr(getattr(torch, kind), "device_count", lambda: 8)
    synchronize(device)
    synchronize(CPU)
    assert waited == [() if kind == "mps" else (device,)]


def test_one_file_reads_the_clock():
    reads = re.compile(r"perf_counter|time\.(time|monotonic)\b")  # training budgets CPU seconds, which measure nothing
    assert [path.name for path in sorted(Path(HERE).glob("*.py")) if reads.search(path.read_text())] == [
        "spec_common.py"
    ]


# ---------------------------------------------------------------------------------------------------------- taking turns


def turns(names: str, repeats: int, warmup: int):
    order, clock = [], iter(range(1, 1000))
    arms = {name: lambda name=name: Timed(order.append(name), float(next(clock))) for name in names}
    return order, interleave(arms, repeats, warmup)


def test_arms_take_turns_in_an_order_of_the_turns_own():
    """Over a pair of turns every arm stands as early as late; over many, no arm keeps its place or its neighbours."""
    order, samples = turns("abcdef", repeats=40, warmup=0)
    assert {name: len(runs) for name, runs in samples.items()} == dict.fromkeys("abcdef", 40)
    each = ["".join(order[first : first + 6]) for first in range(0, 240, 6)]
    assert all(sorted(turn) == list("abcdef") for turn in each)
    assert all(one == other[::-1] for one, other in zip(each[::2], each[1::2], strict=True))
    for name in "abcdef":
        assert len({turn.index(name) for turn in each}) == 6, "every place"
        assert len({turn[max(turn.index(name) - 1, 0)] for turn in each} - {name}) == 5, "every neighbour"


def test_a_part_of_a_longer_run_goes_on_with_its_order():
    """A sweep whose repeat is a seed measures one turn at a time, and must not start with the same arm every time."""
    firsts = {turn_order("abc", seed)[0] for seed in range(12)}
    assert firsts == set("abc")
    order = []
    arms = {name: lambda name=name: Timed(order.append(name), 1.0) for name in "abc"}
    interleave(arms, 1, 0, first_turn=7)
    assert order == turn_order("abc", 7)


def test_warm_up_runs_every_arm_and_is_not_counted():
    order, samples = turns("ab", repeats=1, warmup=2)
    assert len(order) == 6 and sorted(order[:2]) == sorted(order[2:4]) == ["a", "b"]
    assert sorted(run.seconds for run in samples["a"] + samples["b"]) == [5.0, 6.0]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_time_that_is_not_positive_is_rejected(seconds):
    with pytest.raises(UserError, match="clock gave"):
        interleave({"a": lambda: Timed(None, seconds)}, repeats=1, warmup=0)


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_every_raw_time_is_kept(repeats):
    target = tiny.llama()
    task = tiny.task(target, n=4)
    row = measure(task, tiny.method(task, target, 2), tiny.turns(repeats))
    for arm in ("baseline", "speculative", "baseline_again"):
        assert len(row[f"{arm}_s"]) == len(row[f"{arm}_end_to_end_s"]) == repeats
        assert all(whole > decode for whole, decode in zip(row[f"{arm}_end_to_end_s"], row[f"{arm}_s"], strict=True))


def test_every_run_starts_from_the_same_state(monkeypatch):
    """A forward grows its cache in place: a cache carried into the next repeat would be timed at another length."""
    lengths = []
    monkeypatch.setattr(
        "spec_harness.arms.baseline",
        lambda target, state, *rest, **more: lengths.append(state.cache.get_seq_length()) or tiny_done(),
    )

    def tiny_done():
        from spec_counts import Decoded

        return Decoded(tokens=[1])

    target = tiny.llama()
    task = tiny.task(target, n=4)
    for _ in range(3):
        run_baseline(task)
    assert lengths == [len(tiny.PROMPT) - 1] * 3


# ------------------------------------------------------------------------------------------------------------ statistics


def test_ratios_are_paired_before_the_median_is_taken():
    """One slow minute hits both arms of a repeat: the pairs say 2x, three times over."""
    found = paired_ratio([2.0, 20.0, 2.2, 2.1, 4.0, 6.0], [1.0, 10.0, 1.1, 1.05, 2.0, 3.0])
    assert found == {"median": 2.0, "low": 2.0, "high": 2.0, "n": 6}
    assert paired_ratio([3, 8], [1, 2])["median"] == 3.5
    with pytest.raises(ValueError):
        paired_ratio([1.0], [1.0, 2.0])


def test_one_stalled_sample_does_not_move_the_median():
    assert paired_ratio([2.0, 2.0, 20.0], [1.0, 1.0, 1.0])["median"] == 2.0


def test_an_interval_covers_the_median_and_is_the_same_every_time():
    values = [1.0, 1.2, 1.1, 5.0, 0.9, 1.05, 1.15]
    low, high = median_interval(values)
    assert min(values) <= low <= 1.1 <= high <= max(values) and low < high
    assert (low, high) == median_interval(values)


@pytest.mark.parametrize("values", [[], [1.7], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0, 5.0]])
def test_too_few_values_have_no_interval(values):
    """The range of five covers the median 94 % of the time, that of three 75 %."""
    assert median_interval(values) == (None, None)


@pytest.mark.parametrize(("n", "rank"), [(6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (20, 5), (60, 21)])
def test_the_ranks_of_an_interval_are_the_tables(n, rank):
    """Order statistics of the binomial law with 1/2, as in any table of confidence intervals of a median."""
    assert interval_rank(n) == rank
    values = list(range(n))
    assert median_interval(values) == (rank, n - 1 - rank)


@pytest.mark.parametrize("n", [6, 7, 9, 15])
@pytest.mark.parametrize("draw", [random.Random(1).gauss, random.Random(2).lognormvariate])
def test_an_interval_covers_as_often_as_it_says(n, draw):
    """2000 runs of no effect: the true median is outside in at most 5 % of them, but for chance (four deviations)."""
    centre = 0.0 if draw.__name__ == "gauss" else 1.0
    missed = 0
    for _ in range(2000):
        low, high = median_interval([draw(0.0, 1.0) for _ in range(n)])
        missed += not low <= centre <= high
    assert missed / 2000 <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 2000)


def speed_row(speedup, low, high, aa=(0.98, 1.02)):
    return {"speedup": speedup, "speedup_low": low, "speedup_high": high, "aa_low": aa[0], "aa_high": aa[1]}


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (speed_row(1.3, 1.2, 1.4), "faster"),
        (speed_row(1.3, 0.9, 1.4), "noise"),
        (speed_row(1.03, 1.01, 1.05, (0.9, 1.1)), "noise"),
        (speed_row(0.8, 0.7, 0.9), "slower"),
        (speed_row(0.8, 0.7, 1.1), "noise"),
        (speed_row(0.97, 0.95, 0.99, (0.9, 1.1)), "noise"),
        (speed_row(5.0, None, None), "few"),
        (speed_row(5.0, 4.0, 6.0, (None, None)), "few"),
    ],
)
def test_the_one_verdict_goes_by_the_interval_and_by_the_same_code_against_itself(row, verdict):
    assert judge_speed(row) == verdict


def test_a_speedup_below_one_is_printed_as_it_is():
    samples = {
        "baseline": [Run(None, 0.5, 1.0)],
        "speculative": [Run(None, 0.5, 2.0)],
        "baseline_again": [Run(None, 0.5, 1.0)],
    }
    row = timing(samples, tokens=10)
    assert (row["speedup"], row["aa"], row["speedup_end_to_end"]) == (0.5, 1.0, 0.6)
    assert (row["baseline_tokens_per_s"], row["speculative_tokens_per_s"]) == (10.0, 5.0)


def test_arrivals_under_speculation_are_bursts():
    watch = types.SimpleNamespace(
        laps=[("draft", 1.0, 0), ("verify", 2.0, 0), ("keep", 0.0, 3), ("verify", 4.0, 0), ("keep", 0.0, 1)]
    )
    assert arrivals(Run(None, 10.0, 0.0, watch)) == {
        "ttft_s": 13.0,
        "tpot_s": 4 / 3,
        "itl_mean_s": 4 / 3,
        "itl_max_s": 4.0,
    }


def test_one_token_has_no_gaps():
    watch = types.SimpleNamespace(laps=[("verify", 2.0, 0), ("keep", 0.0, 1)])
    row = arrivals(Run(None, 1.0, 0.0, watch))
    assert row == {"ttft_s": 3.0, "tpot_s": None, "itl_mean_s": None, "itl_max_s": None}


def test_a_table_shows_a_missing_value_as_a_dash():
    table = markdown_table([{"a": 1.0, "b": None}], [("a", "A", tables.fixed(1, "x")), ("b", "B", str)])
    assert table.splitlines() == ["|    A | B   |", "| ---: | --- |", "| 1.0x | -   |"]


def test_sentences_are_wrapped_and_tables_are_not(capsys):
    table, words = "| " + "x" * 150 + " |", "a sentence of many words, " * 9
    tell(f"{table}\n{words}\n\nshort")
    first, *lines, blank, last = capsys.readouterr().out.splitlines()
    assert (first, blank, last) == (table, "", "short")
    assert len(lines) == 3 and max(map(len, lines)) <= 100 and " ".join(lines).split() == words.split()
