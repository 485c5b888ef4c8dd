"""A draft in a process of its own, and every way in which either may end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest
import torch

import tiny
from spec_harness import processes
from spec_harness.arms import run_speculative
from spec_harness.processes import cores, draft_process, draft_thread, one_thread
from spec_loop import ModelDrafter
from spec_methods.ssd import ForeseeingDrafter
from spec_methods.wire import AheadSide, AnswersSide, SideLost, Sizes

TARGET = tiny.llama()
SIZES = Sizes(64, 8, 0)
N = 12


class Both:
    """Either scheme, by what was asked for at the start: g guesses (PEARL) or none (SSD). So one process serves all tests."""

    def __init__(self, draft):
        self.pearl, self.ssd = AheadSide(ModelDrafter(draft, 64)), AnswersSide(ForeseeingDrafter(draft, 64, [2] * 4))
        self.now = self.pearl

    def start(self, state, guesses, reach):
        self.now = self.pearl if guesses == 4 else self.ssd
        self.now.start(state, guesses, reach)

    def __getattr__(self, name):
        return getattr(self.now, name)

    @property
    def drafter(self):
        return self.__dict__.get("now", self.pearl).drafter


def build_side():
    torch.set_num_threads(1)
    draft = tiny.near(tiny.llama())
    return Both(draft), draft


def build_nothing():
    raise MemoryError("cannot allocate memory")


@pytest.fixture(scope="module")
def other():
    with draft_process(build_side, SIZES, pin=False) as found:  # other work on a core would delay every message
        yield found


def memory_is_gone(name: str) -> bool:
    try:
        SharedMemory(name).close()
    except FileNotFoundError:
        return True
    return False


@pytest.mark.parametrize("by_turns", [False, True])
@pytest.mark.parametrize(("scheme", "size"), [("pearl", 4), ("ssd", 3)])
def test_the_text_is_the_targets_own(other, scheme, size, by_turns):
    method = other.method(scheme, size, by_turns, None)
    for _ in range(2):
        run = run_speculative(tiny.task(TARGET, n=N), method, watched=True)
        assert tuple(run.done.tokens) == tiny.greedy_once(TARGET, tiny.PROMPT, N)
        assert len(run.watch.seconds("wait")) == len(run.done.rounds) and any(run.done.accepted)


def test_passes_are_timed_alone_and_beside_one_another(other):
    found = other.costs(TARGET, 20, [1, 4])
    assert set(found["target_alone"]) == set(found["target_beside"]) == {"1", "4"}
    for seconds in (found["draft_alone"], found["draft_beside"], *found["target_beside"].values()):
        assert seconds and min(seconds) > 0
    assert found["message_s"] > 0 and len(found["draft_alone"]) == processes.COST_REPEATS


def test_each_side_has_a_core_of_its_own_and_gets_back_what_it_had():
    pinned, threads = cores(), torch.get_num_threads()
    if pinned is None:
        pytest.skip("one core, or a system that cannot pin")
    allowed = os.sched_getaffinity(0)
    for pin in (True, False):
        with draft_thread(build_side, SIZES, pin) as found:
            there = os.sched_getaffinity(found.process.native_id)
            assert (there, found.core) == (({pinned[1]}, pinned[0]) if pin else (allowed, None))
    torch.set_num_threads(2)
    with one_thread(pinned[0]):
        assert os.sched_getaffinity(0) == {pinned[0]} != {pinned[1]} and torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == allowed and torch.get_num_threads() == 2
    torch.set_num_threads(threads)


def test_a_process_that_waits_two_seconds_changes_nothing(other):
    method = other.method("pearl", 4, False, None)
    os.kill(other.process.pid, signal.SIGSTOP)
    try:
        timer = threading.Timer(2.0, os.kill, (other.process.pid, signal.SIGCONT))
        timer.start()
        done = run_speculative(tiny.task(TARGET, n=N), method).done
    finally:
        os.kill(other.process.pid, signal.SIGCONT)
    assert tuple(done.tokens) == tiny.greedy_once(TARGET, tiny.PROMPT, N)


def test_a_process_that_hangs_is_given_up_and_ended():
    """What its passes take is known by then, so nobody waits long for them."""
    with pytest.raises(SideLost, match="has not answered for 3 s"), draft_process(build_side, SIZES, pin=False) as found:
        method, name = found.method("pearl", 4, False, None, pass_s=0.001), found.board.memory.name
        os.kill(found.process.pid, signal.SIGSTOP)
        run_speculative(tiny.task(TARGET, n=N), method)
    assert not found.process.is_alive() and memory_is_gone(name)


@pytest.mark.parametrize("start", [draft_process, draft_thread])
def test_what_fails_over_there_while_loading_is_said_here(start):
    with pytest.raises(SideLost, match="MemoryError: cannot allocate memory"), start(build_nothing, SIZES):
        pytest.fail("it was taken for ready")


@pytest.mark.parametrize(("scheme", "size"), [("pearl", 4), ("ssd", 3)])
def test_a_thread_does_as_a_process_does_and_ends_too(scheme, size):
    with draft_thread(build_side, SIZES, pin=False) as found:
        name = found.board.memory.name
        done = run_speculative(tiny.task(TARGET, n=N), found.method(scheme, size, False, None)).done
        assert found.costs(TARGET, 20, [1])["draft_beside"]
    assert tuple(done.tokens) == tiny.greedy_once(TARGET, tiny.PROMPT, N)
    assert not found.process.is_alive() and memory_is_gone(name)


def runs(pid: int) -> bool:
    """One that has ended and that nobody has asked about does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


DECIDES = """
import time
import tiny
from test_processes import SIZES, build_side
from spec_harness.processes import draft_process

with draft_process(build_side, SIZES) as found:
    print(found.process.pid, found.board.memory.name, flush=True)
    time.sleep(60)
"""


def test_a_draft_ends_with_the_process_that_decides_however_that_ends():
    """Killed, it can clear nothing away itself."""
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    argv = [sys.executable, "-c", DECIDES]
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as first:
        pid, name = first.stdout.readline().split()
        first.kill()
        deadline = time.monotonic() + 30  # for a build that never ends
        while (runs(int(pid)) or not memory_is_gone(name)) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert not runs(int(pid)) and memory_is_gone(name)
