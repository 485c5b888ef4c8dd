"""The draft in a process or a thread of its own: a process is started by `spawn` alone, on a core of its own; each is timed beside
the target, and always ended.

The process that was started by the user holds the target and decides what stands. The other ends with it, however it ends: it
sees its end of the pipe closed, and the memory is taken away by whoever is left. Ctrl-C is the first one's to answer.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import statistics
import threading
from array import array
from collections.abc import Callable
from multiprocessing import Pipe, get_context

from spec_common import first_line, timed

import torch

from spec_harness.arms import Method, Task, draft_model
from spec_harness.costs import COST_REPEATS, COST_WARMUP, draft_reads, pass_seconds, random_ids, timed_pass, warm_cache
from spec_harness.options import load_one_draft
from spec_loop import speculate
from spec_methods.pearl import pearl_loop
from spec_methods.policy import FixedK
from spec_methods.ssd import ForeseeingDrafter
from spec_methods.wire import (
    FAILED,
    QUIT,
    READY,
    AheadSide,
    AnswersSide,
    Board,
    Far,
    Sizes,
    receive,
    send,
    serve,
)
from spec_models.checks import vocabulary_rows

PING, COSTS, STOP = b"p", b"c", b"x"
PINGS = 200
ENDING_S = 1.0  # that a process is given to end by itself, and once more after it was asked to


def cores() -> tuple[int, int] | None:
    """A core for the target and another one for the draft; None where the system cannot pin, or allows one alone."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return (allowed[0], allowed[-1]) if len(allowed) > 1 else None


@contextlib.contextmanager
def one_thread(core: int | None):
    """One thread on that core (None: any), then as it was before."""
    threads = torch.get_num_threads()
    before = os.sched_getaffinity(0) if core is not None else None
    torch.set_num_threads(1)
    try:
        if core is not None:
            os.sched_setaffinity(0, {core})
        yield
    finally:
        torch.set_num_threads(threads)
        if before is not None:
            os.sched_setaffinity(0, before)


@contextlib.contextmanager
def silent():
    """What is to be said, the first process says."""
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    with nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


# ------------------------------------------------------------------------------------------------------ the draft's end


def draft_side(args, device: str, dtype: torch.dtype):
    """(the side that is served, its model), loaded as in any run; of the target stays what the draft shares with it."""
    target, (draft,) = load_one_draft(args, torch.device(device), dtype)
    rows = vocabulary_rows(target.model)
    if args.method == "ssd":
        return AnswersSide(ForeseeingDrafter(draft.model, rows, [args.fan] * (args.k + 1))), draft.model
    task = Task(target.model, torch.zeros(1, 1, dtype=torch.long), 1)
    return AheadSide(draft_model(task, draft.model, 1).drafter), draft.model


def attend(build: Callable, conn, board: Board, core: int | None) -> None:
    """What the draft's process or thread does. `build()` gives the side and its model."""
    try:
        with one_thread(core):
            side, model = build()
            gc.collect()
            more = {PING: lambda: conn.send_bytes(PING), COSTS: lambda: time_passes(conn, board, model)}
            with own_stream(model.device):
                conn.send_bytes(READY)
                serve(conn, board, side, torch.device(model.device), more)
    except Exception as error:
        with contextlib.suppress(OSError):
            conn.send_bytes(FAILED + f"{type(error).__name__}: {first_line(error)}".encode())


def own_stream(device: torch.device):
    """On CUDA a stream that waits for no other; elsewhere nothing."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    torch.cuda.synchronize(device)  # the weights are there before another stream reads them
    return torch.cuda.stream(torch.cuda.Stream(device))


def work(build: Callable, conn, name: str, sizes: Sizes, core: int | None) -> None:
    """The whole life of the draft's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    board = Board(sizes, name)
    try:
        with silent():
            attend(build, conn, board, core)
    finally:
        board.close()


def time_passes(conn, board: Board, model) -> None:
    """Draft passes over one token behind as many as the board says, on the clock: as many as it says, or (0) until a message
    comes. Their seconds go back."""
    context, count = board.down[:2].tolist()
    ids = random_ids([model], context + 1)
    cache = warm_cache(model, ids, context)
    timed_pass(model, ids, cache, context, 1)
    conn.send_bytes(READY)
    seconds = []
    while len(seconds) < count if count else not conn.poll(0):
        seconds.append(timed_pass(model, ids, cache, context, 1).seconds)
    if not count:
        conn.recv_bytes()
    conn.send_bytes(array("d", seconds).tobytes())


# ----------------------------------------------------------------------------------------------------- the target's end


class DraftProcess:
    """The process, seen from the one that started it."""

    def __init__(self, process, conn, board: Board, core: int | None):
        self.process, self.conn, self.board, self.core = process, conn, board, core

    def method(self, name: str, size: int, by_turns: bool, reach: int | None, pass_s: float | None = None) -> Method:
        """PEARL ("pearl") or SSD with the draft over there; here one thread, on a core of its own while it decodes. `pass_s`: what
        a pass of the draft takes."""
        loop = functools.partial(pearl_loop, at_once=not by_turns) if name == "pearl" else speculate

        def decode(*given, **options):
            with one_thread(self.core):
                return loop(*given, **options)

        return Method(Far(self.conn, self.board, size, by_turns, reach, pass_s), FixedK(size), decode=decode)

    def message_seconds(self) -> float:
        """A small message there and back, the median of many."""

        def exchange():
            send(self.conn, PING)
            receive(self.conn)

        return statistics.median(timed(exchange, torch.device("cpu")).seconds for _ in range(PINGS))

    @contextlib.contextmanager
    def passes(self, context: int, count: int = 0):
        """Draft passes over there: `count` of them, or as long as this lasts. Gives a list that holds their seconds then."""
        found: list[float] = []
        self.board.down[:2] = torch.tensor([context, count])
        send(self.conn, COSTS)
        receive(self.conn)
        yield found
        if not count:
            send(self.conn, STOP)
        seconds = array("d")
        seconds.frombytes(receive(self.conn))
        found += seconds

    def costs(self, target, context: int, sizes: list[int]) -> dict:
        """Seconds of passes on one thread each, alone and while the other side runs; and of a message."""
        with self.passes(context, COST_REPEATS) as draft_alone:
            pass
        ids = random_ids([target], context + max(*sizes, draft_reads(None)))
        measure = functools.partial(
            pass_seconds, target, None, ids, context, sizes, COST_REPEATS, COST_WARMUP, flag="--n-tokens"
        )
        with one_thread(self.core):
            alone, _ = measure()
            with self.passes(context) as draft_beside:
                beside, _ = measure()
        found = {"target_alone": alone, "target_beside": beside}
        seconds = {name: {str(n): values for n, values in one.items()} for name, one in found.items()}
        return {**seconds, "draft_alone": draft_alone, "draft_beside": draft_beside, "message_s": self.message_seconds(),
                "pinned": self.core is not None, "error": None}  # fmt: skip

    def end(self) -> None:
        """However it stands with it: by itself, asked to, or killed."""
        with contextlib.suppress(OSError):
            self.conn.send_bytes(QUIT)
        self.conn.close()
        for act in (None, self.process.terminate, self.process.kill):
            if act is not None:
                act()
            self.process.join(ENDING_S)
            if not self.process.is_alive():
                break
        self.board.close()


@contextlib.contextmanager
def draft_process(build: Callable, sizes: Sizes, pin: bool = True):
    """A DraftProcess as long as this lasts. `build`, which can be pickled, is called over there. `pin`: each side to
    a core, where that can be. Raises SideLost."""
    context, pinned = get_context("spawn"), cores() if pin else None
    here, there = context.Pipe()
    board = Board(sizes)
    process = context.Process(
        target=work, args=(build, there, board.memory.name, sizes, pinned and pinned[1]), daemon=True
    )
    other = DraftProcess(process, here, board, pinned and pinned[0])
    try:
        with no_interrupt():
            process.start()
        there.close()
        receive(here, None)
        yield other
    finally:
        if process.pid is None:
            board.close()
        else:
            other.end()


class DraftThread(DraftProcess):
    """The thread, seen from the one that started it. It cannot be killed, only waited for."""

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.conn.send_bytes(QUIT)
        self.process.join(ENDING_S)
        self.conn.close()
        self.process.join(ENDING_S)
        self.board.close()


@contextlib.contextmanager
def draft_thread(build: Callable, sizes: Sizes, pin: bool = True):
    """A DraftThread as long as this lasts: for a draft on a device of its own, or on the target's in a stream of its own.
    Raises SideLost."""
    pinned = cores() if pin else None
    here, there = Pipe()
    board = Board(sizes)
    thread = threading.Thread(target=attend, args=(build, there, board, pinned and pinned[1]), daemon=True)
    other = DraftThread(thread, here, board, pinned and pinned[0])
    thread.start()
    try:
        receive(here, None)
        yield other
    finally:
        other.end()


@contextlib.contextmanager
def no_interrupt():
    """What is started in here pays no heed to Ctrl-C; one that comes meanwhile is lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
