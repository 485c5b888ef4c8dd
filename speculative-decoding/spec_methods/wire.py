"""What goes to and fro between a draft's process and a target's: ids and laws in memory that both see, one small message each
way a round.

`Far` stands on the target's side in the place of a drafter (SSD, in `speculate`) or of `Ahead` (in `pearl`); `serve` runs on
the draft's side around the real one. A message says only that the board was written: no tensor is pickled. The target's side
waits for the draft's guesses and judges them; what it decides travels with the next request. So both sides do, in whatever
time each takes, the very steps that they do by turns in one process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import NamedTuple

from spec_common import first_line

import torch

from spec_counts import Work
from spec_loop import Budget, DecodingError, Proposal, State
from spec_methods.pearl import Ahead, News
from spec_methods.ssd import ForeseeingDrafter

PATIENCE_S = 60.0  # for an answer that nobody knows the length of; a process that has ended is noticed at once
LEAST_S, TIMES = 3.0, 50  # where passes were timed: so many seconds at least, and for a round so many times what it takes
START, ROUND, READY, FAILED, QUIT = b"s", b"r", b"d", b"f", b"q"
HEAD = 8  # whole numbers in front of the ids, either way
LAWS = (None, torch.float32, torch.float64)


class SideLost(DecodingError):
    """The draft's side has ended, failed or stopped answering."""


class Sizes(NamedTuple):
    """Of the board."""

    room: int  # tokens of the longest text
    most: int  # guesses a round
    rows: int  # ids that a law speaks of; 0: guesses are certain


class Board:
    """The memory: 8-byte numbers, `down` to the draft's side and `up` from it, each with a head; then `laws` (most, rows) in
    float64, which holds a float32 law to the bit. Whoever gives no name makes it and takes it away again."""

    def __init__(self, sizes: Sizes, name: str | None = None):
        shapes = [(HEAD + sizes.room,), (HEAD + sizes.most,), (sizes.most, sizes.rows)]
        counts = [torch.Size(shape).numel() for shape in shapes]
        self.own, self.owed = name is None, 0  # `owed`: answers that were asked for and not taken
        self.memory = SharedMemory(name, create=self.own, size=8 * sum(counts))
        whole = torch.frombuffer(self.memory.buf, dtype=torch.int64, count=sum(counts))
        self.down, self.up, laws = (part.view(shape) for part, shape in zip(whole.split(counts), shapes, strict=True))
        self.laws = laws.view(torch.float64)

    def close(self) -> None:
        """Let go of the memory; a second call does nothing. Nothing that was read from it may be in use."""
        if self.memory is None:
            return
        self.down = self.up = self.laws = None
        memory, self.memory = self.memory, None
        if self.own:
            memory.unlink()
        with contextlib.suppress(BufferError):  # an error on its way may still hold a part of it
            memory.close()


def set_numbers(part: torch.Tensor, head: list[int], ids: torch.Tensor) -> None:
    part[: len(head)] = torch.tensor(head)
    part[HEAD : HEAD + len(ids)] = ids


def lost(what: str) -> SideLost:
    return SideLost(f"--overlap: the draft's side {what}; mend that and call again with --resume")


def receive(conn, patience: float | None = PATIENCE_S) -> bytes:
    """The next message of the draft's side; `patience` in seconds, None: without end. Raises SideLost."""
    try:
        message = conn.recv_bytes() if conn.poll(patience) else None
    except (EOFError, OSError) as error:
        raise lost("has ended (killed, or out of memory)") from error
    if message is None:
        raise lost(f"has not answered for {patience:.0f} s")
    if message[:1] == FAILED:
        raise lost(f"failed ({message[1:].decode()})")
    return message


def send(conn, message: bytes) -> None:
    """Raises SideLost where nobody is there to take it: why is its last message, if it left one."""
    try:
        conn.send_bytes(message)
    except OSError:
        receive(conn)
        raise


# ---------------------------------------------------------------------------------------------------- the target's side


class Far:
    """The draft's side, seen from the target's. `guesses`: a round's of `Ahead`. `by_turns`: the draft does all that a round asks
    of it before it answers, so that neither side works while the other does. `reach`: the longest text it may read. `pass_s`:
    what a pass of the draft takes, and so how long its answers may."""

    taps, confident = (), False

    def __init__(
        self, conn, board: Board, guesses: int = 0, by_turns: bool = False, reach: int | None = None, pass_s: float | None = None
    ):
        self.conn, self.board, self.guesses, self.by_turns, self.reach = conn, board, guesses, by_turns, reach
        self.pass_s = pass_s
        self.work, self.hits, self.asked = Work(0, 0), 0, 0

    def start(self, state: State) -> None:
        self.state, self.news = state, None
        while self.board.owed:  # a run before this one broke off: what it asked for is still being written
            self.take(state.length)
        reach = -1 if self.reach is None else self.reach
        head = [state.length, state.ids.shape[1], self.guesses, int(self.by_turns), reach]
        set_numbers(self.board.down, head, state.ids[0].cpu())
        self.request(START)
        self.collect(state.length)

    def request(self, message: bytes) -> None:
        send(self.conn, message)
        self.board.owed += 1

    def take(self, passes: int) -> None:
        """Wait for an answer that takes no longer than so many passes."""
        receive(self.conn, PATIENCE_S if self.pass_s is None else max(LEAST_S, passes * self.pass_s))
        self.board.owed -= 1

    def ask(self, depth: int = 0) -> None:
        """Say what stands since the last request, and that guesses are wanted."""
        news = self.news or News(0, [], True)
        set_numbers(self.board.down, [news.length, len(news.block), int(news.stood), depth], torch.tensor(news.block, dtype=torch.int64))  # fmt: skip
        self.request(ROUND)

    def collect(self, passes: int) -> Proposal:
        """What was asked for, as soon as it is there. Raises SideLost, DecodingError."""
        self.take(passes)
        count, kind, finite, passes, read, self.hits, self.asked = self.board.up[: HEAD - 1].tolist()
        self.work = Work(passes, read)
        if not finite:
            raise DecodingError("the draft's logits are not finite; try another --dtype")
        device = self.state.ids.device
        laws = [None] * count
        if kind:
            laws = [law.to(LAWS[kind], copy=True).to(device) for law in self.board.laws[:count]]
        return Proposal(self.board.up[HEAD : HEAD + count].clone().to(device), laws)

    def propose(self, state: State, budget: Budget) -> Proposal:
        self.ask(budget.depth)
        made = self.collect(TIMES * self.guesses)
        state.watch("wait")
        return made

    def go_on(self) -> Proposal:
        made = self.collect(TIMES * self.guesses)
        self.state.watch("wait")
        return made

    def hear(self, news: News) -> None:
        self.news = news

    def keep(self, state: State, path: list[int], features: tuple) -> None:
        self.news = News(state.length - len(state.new), state.new, False)


# ----------------------------------------------------------------------------------------------------- the draft's side


class AheadSide:
    """PEARL's: `drafter` runs ahead of what is judged."""

    hits = asked = 0

    def __init__(self, drafter):
        self.drafter = drafter

    def start(self, state: State, guesses: int, reach: int | None) -> None:
        self.ahead = Ahead(self.drafter, guesses, reach)
        self.ahead.start(state)

    def make(self, depth: int) -> Proposal:
        return self.ahead.go_on()

    def hear(self, news: News) -> None:
        self.ahead.hear(news)

    def foresee(self, made: Proposal) -> None:
        """Nothing is answered beforehand."""


class AnswersSide:
    """SSD's: `drafter` foresees outcomes."""

    def __init__(self, drafter: ForeseeingDrafter):
        self.drafter = drafter

    hits, asked = (property(lambda self, name=name: getattr(self.drafter, name)) for name in ("hits", "asked"))

    def start(self, state: State, guesses: int, reach: int | None) -> None:
        self.view, self.drafter.reach = state, sys.maxsize if reach is None else reach
        self.drafter.start(state)

    def make(self, depth: int) -> Proposal:
        return self.drafter.offer(self.view, Budget(depth))

    def hear(self, news: News) -> None:
        self.view.length = news.length
        self.view.write(news.block)
        self.drafter.keep(self.view, list(range(len(news.block) - 1)), ())

    def foresee(self, made: Proposal) -> None:
        self.drafter.foresee(self.view, made)


class Service:
    """The draft's end of the wire."""

    def __init__(self, conn, board: Board, side, device: torch.device):
        self.conn, self.board, self.side, self.device = conn, board, side, device

    def answer(self, made: Proposal) -> None:
        kind = LAWS.index(made.laws[0].dtype) if made.laws and made.laws[0] is not None else 0
        finite = bool(torch.stack(made.finite).all()) if made.finite else True
        passes, read = self.side.drafter.work
        head = [len(made), kind, int(finite), passes, read, self.side.hits, self.side.asked]
        set_numbers(self.board.up, head, made.tokens.cpu())
        for place, law in enumerate(made.laws if kind else ()):
            self.board.laws[place] = law.cpu()
        self.conn.send_bytes(READY)

    def start(self) -> None:
        length, room, guesses, by_turns, reach = self.board.down[:5].tolist()
        self.by_turns, self.fresh = bool(by_turns), True
        ids = self.board.down[HEAD : HEAD + room].clone().to(self.device)[None]
        self.side.drafter.rule.begin()
        self.side.start(State(ids, length, None), guesses, None if reach < 0 else reach)
        self.answer(Proposal(ids[0, :0]))

    def round(self) -> None:
        length, count, stood, depth = self.board.down[:4].tolist()
        if not self.fresh:
            self.side.hear(News(length, self.board.down[HEAD : HEAD + count].tolist(), bool(stood)))
        self.fresh, made = False, self.side.make(depth)
        if self.by_turns:
            self.side.foresee(made)
        self.answer(made)
        if not self.by_turns:
            self.side.foresee(made)


@torch.inference_mode()
def serve(conn, board: Board, side, device: torch.device, more: dict[bytes, Callable] | None = None) -> None:
    """Answer until told to quit, or until the target's side is gone. An error is the last answer. `more`: further kinds of
    message, each with what is to be done then."""
    service = Service(conn, board, side, device)
    acts = {START: service.start, ROUND: service.round, **(more or {})}
    try:
        while (message := conn.recv_bytes()) != QUIT:
            try:
                acts[message]()
            except (EOFError, OSError):
                raise
            except Exception as error:  # whatever it is, the other side is to say it
                conn.send_bytes(FAILED + f"{type(error).__name__}: {first_line(error)}".encode())
                return
    except (EOFError, OSError):
        return
