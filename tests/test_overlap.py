"""spec_overlap.py on a tiny pair: what it writes, what it refuses, what it works out of costs given by hand."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from spec_common import judge_speed

import pytest

import spec_overlap
import tiny
from spec_decode import measure_all
from spec_harness import processes
from spec_harness.overlap_rows import by_turns, over, row_apart, row_here
from spec_harness.overlapping import pearl_speedup, ssd_speedup
from spec_loop import Greedy
from spec_methods import pearl as module
from spec_methods.wire import Board, Far


def document(results) -> dict:
    return json.loads(results.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the file"))


@pytest.mark.parametrize("method", ["pearl", "ssd"])
def test_a_row_for_the_chain_and_the_method_each_exact(method, pair, results, capsys):
    assert spec_overlap.main([*pair, "--workload", "code", "--method", method, "-k", "3", "-g", "3"]) == 0
    rows = [row for row in document(results)["rows"] if row["part"] == "overlap"]
    assert [row["method"] for row in rows] == ["chain", method] and all(row["exact"] for row in rows)
    assert document(results)["status"] == "complete" and rows[0]["tokens"] == rows[1]["tokens"]
    for row in rows:
        assert row["draft_s"] >= 0 and row["overhead_s"] >= 0
        assert row["prediction_error"] == pytest.approx(row["predicted_costs"] - row["speedup"])
    said = capsys.readouterr().out
    assert "token for token the target's own text" in said and "two devices" in said


def test_both_schemes_and_a_further_draft_are_measured_in_the_same_turns(pair, results, monkeypatch, capsys):
    turns = []

    def noted(cells, args):
        turns.append({name: cell.method.drafter for name, cell in cells.items()})
        return measure_all(cells, args)

    monkeypatch.setattr(spec_overlap, "measure_all", noted)
    assert spec_overlap.main([*pair, "--workload", "code", "--also", "cut:0", "-k", "3", "-g", "3"]) == 0
    names = ["chain", "pearl", "ssd", "chain, cut:0", "pearl, cut:0", "ssd, cut:0"]
    rows = [row for row in document(results)["rows"] if row["part"] == "overlap"]
    assert [row["method"] for row in rows] == names and all(row["exact"] for row in rows)
    (drafters,) = turns
    assert list(drafters) == names and drafters["chain"].model is not drafters["chain, cut:0"].model
    assert drafters["pearl, cut:0"].drafter.model is drafters["ssd, cut:0"].model is drafters["chain, cut:0"].model
    assert {row["draft"] for row in document(results)["rows"] if row["part"] == "costs"} == {"draft", "cut:0"}
    assert "chain, cut:0: " in capsys.readouterr().out


def test_a_finished_run_is_gone_on_with_and_measures_nothing_again(pair, results):
    argv = [*pair, "--workload", "code", "--method", "pearl", "-g", "3"]
    assert spec_overlap.main(argv) == 0
    before = document(results)["rows"]
    tiny.killed_at(results, before[:-1])
    assert spec_overlap.main([*argv, "--resume"]) == 0
    after = document(results)["rows"]
    assert after[: len(before) - 1] == before[:-1] and after[-1]["method"] == "pearl"


def test_a_text_that_is_not_the_targets_fails_the_run(pair, results, monkeypatch, capsys):
    class Wrong(module.Checker):
        def settle(self, out, made, *drafted):
            self.rule = Later()
            return super().settle(out, made, *drafted)

    class Later(Greedy):
        def judge(self, out, proposal):
            verdict = super().judge(out, proposal)
            return verdict._replace(token=None if verdict.token is None else (verdict.token + 1) % 60)

    monkeypatch.setattr(module, "Checker", Wrong)
    assert spec_overlap.main([*pair, "--workload", "code", "-g", "3"]) == 1
    assert document(results)["status"] == "failed" and "not the target's own text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--loop", "essay"], "--loop essay: overlap has a loop of its own"),
        (["--simulate", "--v", "1"], "is no list of n:V"),
        (["--simulate", "--v", "0:1"], "is no list of n:V"),
        (["--simulate", "--c", "nan"], "--c: 'nan' is not a number of 0 or more"),
        (["--simulate", "--devices", "3"], "--devices"),
        (["-g", "0"], "-g/--ahead"),
        (["--draft-device", "cpu"], "--draft-device cpu: goes with --overlap device"),
        (["--overlap", "device", "--draft-device", "tpu"], "--draft-device tpu: unknown"),
    ],
)
def test_bad_input_gets_one_line(argv, says, capsys):
    try:
        code = spec_overlap.main(argv)
    except SystemExit as left:
        code = left.code
    said = capsys.readouterr().err.strip()
    assert code == 2 and says in said and "\n" not in said


def test_costs_by_hand_say_what_a_second_device_would_do(capsys):
    assert (
        spec_overlap.main(
            ["--simulate", "--c", "0.2", "--v", "1:1,9:1.4", "--alpha", "0.7", "--hit", "0.6", "--most", "6"]
        )
        == 0
    )
    said = capsys.readouterr().out

    def v(n):
        return 1 + 0.05 * (n - 1)

    pearl = {g: pearl_speedup(0.7, g, 0.2, v) for g in range(1, 7)}
    ssd = {k: ssd_speedup(0.7, k, 0.2, v, 0.6, (k + 1) * 0.2) for k in range(1, 7)}
    for scheme, of in (("pearl", pearl), ("ssd", ssd)):
        best = max(of, key=of.get)
        assert any(line.split() == f"| {scheme} | 2 | {best} | {of[best]:.2f}x |".split() for line in said.splitlines())
    assert "nothing was measured" in said and "at g = 6" in said


def test_the_account_of_pearl_counts_a_pass_over_as_many_tokens_as_it_judged():
    costs = {"c": 0.5, "c_places": [0.5], "c2": 0.5, "v": {1: 1.0, 2: 2.0, 3: 3.0}, "target_pass_s": 1.0}
    row = {
        "alpha": 0.5, "k": 2, "emitted": 6, "target_passes": 3, "draft_passes": 4, "drafting_lengths": [1, 2, 1], "draft_tokens_read": 4,
        "proposed_lengths": [1, 3, 0], "overhead_s": 0.0, "baseline_overhead_share": 0.0,
    }  # fmt: skip
    assert by_turns("pearl", row, costs) == pytest.approx(6 / (4 * 0.5 + 1 + 3 + 1))
    assert by_turns("chain", row, costs) == pytest.approx(6 / (4 * 0.5 + 2 + 4 + 1))
    at_once = {**costs, "c_places": [0.5, 0.1], "one_pass": True}  # four guesses in two passes
    assert by_turns("pearl", row, at_once) == pytest.approx(6 / (0.5 + 0.5 + 2 * 0.1 + 1 + 3 + 1))


COSTS = {"c": 0.5, "c_places": [0.5], "c2": 0.5, "v": {1: 1.0, 2: 2.0, 3: 3.0}, "target_pass_s": 0.1}
COUNTED = {
    "alpha": 1.0, "k": 2, "emitted": 6, "target_passes": 3, "draft_passes": 6, "drafting_lengths": [2, 2, 2], "draft_tokens_read": 6,
    "proposed_lengths": [2, 2, 2], "overhead_s": 0.03, "baseline_overhead_share": 0.0, "speedup": 0.5, "hit_rate": 0.5, "foresee_s": 0.6,
}  # fmt: skip


def test_what_two_devices_would_give_by_hand():
    """Two tokens a round; the check of two takes 2, two draft passes 1, the loop 0.1 of a target pass."""
    row = row_here("pearl", dict(COUNTED), COSTS)
    assert row["two_devices"] == pytest.approx(2 / (2 + 0.1))
    assert row["prediction_error"] == pytest.approx(6 / (6 * 0.5 + 3 * 2 + 3 * 0.1) - 0.5)
    row = row_here("ssd", dict(COUNTED), COSTS)
    assert row["predicted_costs"] == pytest.approx(3 / (3 + 0.6 / 3 / 0.1 + 0.5 * 2 * 0.5 + 0.1))
    assert row["two_devices"] == pytest.approx(3 / (3 + 0.5 * 2 * 0.5 + 0.1))
    assert row_here("chain", dict(COUNTED), COSTS)["two_devices"] == pytest.approx(3 / (2 * 0.5 + 3 + 0.1))
    assert row_here("pearl", {**COUNTED, "alpha": None}, COSTS)["two_devices"] is None


def test_what_two_processes_should_give_is_of_costs_measured_beside_one_another():
    beside = {
        "draft_alone": [0.1], "draft_beside": [0.1, 0.2, 0.3], "target_alone": {"1": [0.1], "2": [0.2]},
        "target_beside": {"1": [0.1], "2": [0.1, 0.3, 0.3]}, "message_s": 0.02, "pinned": True,
    }  # fmt: skip
    at_once = row_apart("pearl", dict(COUNTED), COSTS, beside, True, 0.0)
    assert at_once["predicted_costs"] == pytest.approx(2 / (max(2 * 2, 3) + 0.1 + 0.2)) and at_once["pinned"]
    turns = row_apart("pearl", dict(COUNTED), COSTS, beside, False, 0.0)
    assert turns["predicted_costs"] == pytest.approx(2 / (2 * 1 + 2 + 0.1 + 0.2))
    ssd = row_apart("ssd", dict(COUNTED), COSTS, beside, False, foresee_s=0.2)
    assert ssd["predicted_costs"] == pytest.approx(3 / (2 * 2 + 3 + 0.5 * 2 * 1 + 0.3)), (
        "its answers grow as a draft pass does"
    )


def test_what_the_readme_says_of_a_second_device_is_worked_out_so(capsys):
    readme = (Path(spec_overlap.__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    section = readme.split("## When a second device pays")[1].split("\n## ")[0]
    for c in ("0.2", "0.05"):
        assert spec_overlap.main(["--simulate", "--c", c, "--alpha", "0.8"]) == 0
        turns, *_, pearl, ssd = [line.split("|")[4].strip() for line in capsys.readouterr().out.splitlines()[2:7]]
        assert all(said in section for said in (turns, pearl, ssd))


# ------------------------------------------------------------------------------------------------------- two processes


def memory_is_there(name: str) -> bool:
    try:
        SharedMemory(name).close()
    except FileNotFoundError:
        return False
    return True


@pytest.fixture
def boards(monkeypatch):
    """The names of the memories that a run made, none of which may be there afterwards; nor any process."""
    names = []

    class Noted(Board):
        def __init__(self, *given):
            super().__init__(*given)
            names.append(self.memory.name)

    monkeypatch.setattr(processes, "Board", Noted)
    yield names
    assert names and not multiprocessing.active_children()
    assert not any(map(memory_is_there, names))


def overlapped(pair, *more) -> int:
    return spec_overlap.main(
        [*pair, "--workload", "code", "--overlap", "process", "--unpinned", "--method", "pearl", "-g", "3", *more]
    )


def test_two_processes_write_the_same_text_and_their_waits_are_named(pair, results, boards, capsys):
    assert overlapped(pair) == 0
    rows = {row["method"]: row for row in document(results)["rows"] if row["part"] == "overlap"}
    assert list(rows) == ["chain", "pearl", "pearl, at once", "pearl, by turns"]
    assert all(row["exact"] and row["tokens"] == rows["chain"]["tokens"] for row in rows.values())
    assert rows["pearl, at once"]["emitted_lengths"] == rows["pearl"]["emitted_lengths"]
    assert all("wait_s" in row and row["message_s"] > 0 for name, row in rows.items() if "," in name)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("of the time for guesses; a message") == 2
    assert (
        "pearl, at once, over pearl, by turns: " in said
        and "pearl, at once, over pearl: " in said
        and "two threads on one queue over taking turns: 0.93x" in said
    )
    (costs,) = (row for row in document(results)["rows"] if row["part"] == "costs beside")
    assert costs["draft_beside"] and set(costs["target_beside"]) == {"1", "3", "6"}


def test_a_thread_with_a_device_of_its_own_writes_the_same_text(pair, results, boards):
    """Another CPU stands for the device."""
    argv = [
        *pair,
        "--workload",
        "code",
        "--overlap",
        "device",
        "--draft-device",
        "cpu",
        "--unpinned",
        "--method",
        "ssd",
    ]
    assert spec_overlap.main(argv) == 0
    rows = [row for row in document(results)["rows"] if row["part"] == "overlap"]
    assert [row["method"] for row in rows] == ["chain", "ssd", "ssd, at once", "ssd, by turns"]
    assert all(row["exact"] and row.get("hit_rate") is not None for row in rows[1:])
    assert [row["pinned"] for row in rows[2:]] == [False, False]
    assert not any("attend" in one.name for one in threading.enumerate())


def at_message(monkeypatch, number: int, act) -> None:
    """Do that right before a message of so many is sent."""
    request, sent = Far.request, iter(range(10**6))

    def noted(far, message):
        if next(sent) == number:
            act()
        request(far, message)

    monkeypatch.setattr(Far, "request", noted)


def kill():
    (other,) = multiprocessing.active_children()
    os.kill(other.pid, signal.SIGINT)  # which it does not heed
    assert other.is_alive()
    os.kill(other.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("act", "code", "status", "says"),
    [
        (kill, 2, "failed", "error: --overlap: the draft's side has ended"),
        (lambda: signal.raise_signal(signal.SIGINT), 130, "interrupted", "interrupted; call it again"),
    ],
    ids=["killed", "Ctrl-C"],
)
def test_however_it_ends_a_file_says_so_and_nothing_is_left(act, code, status, says, pair, results, boards, monkeypatch, capsys):  # fmt: skip
    at_message(monkeypatch, 2, act)
    assert overlapped(pair) == code
    assert document(results)["status"] == status
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said


def timed_row(method: str, text: str, seconds: list[float], error=None) -> dict:
    return {"method": method, "text": text, "error": error, "speculative_s": seconds, "baseline_s": [4.0] * 6, "baseline_again_s": [4.0] * 6}  # fmt: skip


def test_one_arm_over_another_is_of_the_texts_that_both_have_time_over_time():
    rows = [timed_row("a", "x", [1.0] * 6), timed_row("b", "x", [3.0] * 6), timed_row("a", "y", [3.0] * 6)]
    rows += [timed_row("b", "y", [5.0] * 6), timed_row("a", "z", [9.0] * 6), timed_row("b", "z", [], "out of memory")]
    found = over(rows, "a", "b")
    assert (found["speedup"], found["speedup_low"], found["pairs"]) == (2.0, 2.0, 6) and judge_speed(found) == "faster"
    assert over(rows, "a", "c") is None
