"""Two sides, each in its own time: threads stand for the processes, and every text, law and count is that of taking turns."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from functools import partial
from multiprocessing import Pipe
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from spec_harness.arms import Method, run_speculative
from spec_loop import DecodingError, Greedy, ModelDrafter, prefill, speculate
from spec_methods import wire
from spec_methods.pearl import Ahead, pearl_loop
from spec_methods.policy import FixedK
from spec_methods.sampled import Chance, Sampled
from spec_methods.ssd import ForeseeingDrafter
from spec_methods.wire import QUIT, AheadSide, AnswersSide, Board, Far, SideLost, Sizes, serve

TARGET = tiny.llama()
DRAFTS = {"near": tiny.near(TARGET), "itself": TARGET, "wrong": tiny.always_wrong(TARGET)}
N, K = 12, 3
CPU = torch.device("cpu")


def waiting(waits, base):
    """A drafter that takes its time before whatever it does."""

    class Slow(base):
        def propose(self, state, budget):
            time.sleep(next(waits, 0.0))
            return super().propose(state, budget)

        def keep(self, *news):
            time.sleep(next(waits, 0.0))
            return super().keep(*news)

    return Slow


@contextlib.contextmanager
def other_side(side, rows: int = 0):
    """(the target's end, its board) of a wire to `side`, which is served by a thread."""
    ours, theirs = Pipe()
    board = Board(sizes := Sizes(len(tiny.PROMPT) + 40, 8, rows))
    far = Board(sizes, board.memory.name)
    thread = threading.Thread(target=serve, args=(theirs, far, side, CPU))
    thread.start()
    try:
        yield ours, board
    finally:
        with contextlib.suppress(OSError):
            ours.send_bytes(QUIT)
        thread.join(10)
        far.close()
        board.close()
        assert not thread.is_alive()


def side_of(scheme: str, draft, rule=None, slow=lambda base: base):
    if scheme == "pearl":
        return AheadSide(slow(ModelDrafter)(draft, 64, rule=rule))
    return AnswersSide(slow(ForeseeingDrafter)(draft, 64, [2] * (K + 1), rule=rule))


def decode_of(scheme: str, by_turns: bool):
    return partial(pearl_loop, at_once=not by_turns) if scheme == "pearl" else speculate


def apart(
    scheme: str, draft, rule=None, own=None, by_turns=False, n=N, slow=lambda base: base, rows=0, runs=1, **options
):
    """What a decoding with the draft's side elsewhere wrote; of the last of `runs`."""
    with other_side(side_of(scheme, draft, own, slow), rows) as (conn, board):
        far = Far(conn, board, K, by_turns, options.get("draft_limit"))
        method = Method(far, FixedK(K), rule or Greedy(), decode_of(scheme, by_turns))
        for _ in range(runs):
            done = run_speculative(tiny.task(TARGET, n=n, **options), method).done
        return done


def here(scheme: str, draft, rule=None, own=None, n=N, **options):
    """The same with both sides in this thread, by turns."""
    inner = ModelDrafter(draft, 64, rule=own)
    drafter = Ahead(inner, K, options.get("draft_limit"))
    if scheme == "ssd":
        drafter = ForeseeingDrafter(draft, 64, [2] * (K + 1), rule=own, reach=options.get("draft_limit"))
    if own:
        own.begin()
    method = Method(drafter, FixedK(K), rule or Greedy(), pearl_loop if scheme == "pearl" else speculate)
    return run_speculative(tiny.task(TARGET, n=n, **options), method).done


@pytest.mark.parametrize("by_turns", [False, True])
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("scheme", ["pearl", "ssd"])
def test_rounds_and_text_are_those_of_one_process(scheme, kind, by_turns):
    done, wanted = apart(scheme, DRAFTS[kind], by_turns=by_turns, runs=2), here(scheme, DRAFTS[kind])
    assert tuple(done.tokens) == tiny.greedy_once(TARGET, tiny.PROMPT, N)
    assert (done.proposals, done.emitted) == (wanted.proposals, wanted.emitted)
    if scheme == "pearl" or by_turns:  # else the last answers of a round are counted with the next
        assert done.draft_passes == wanted.draft_passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scheme", ["pearl", "ssd"])
def test_a_drawn_text_is_that_of_one_process_to_the_token(scheme, dtype):
    """Laws come over to the bit: of the same seeds the same text."""
    draft = tiny.near(tiny.llama(dtype=dtype))
    for seed in range(4):
        rules = [Sampled(1.0, 0, 0.9, Chance(seed + place)) for place in (0, 100, 0, 100)]
        done = apart(scheme, draft, rules[0], rules[1], rows=64, runs=2)
        assert done.tokens == here(scheme, draft, rules[2], rules[3]).tokens
    assert done.tokens != list(tiny.greedy_once(TARGET, tiny.PROMPT, N))


def test_end_tokens_limits_and_the_drafts_own_reach():
    whole = list(tiny.greedy_once(TARGET, tiny.PROMPT, N))
    for scheme in ("pearl", "ssd"):
        done = apart(scheme, DRAFTS["near"], ends=frozenset([whole[7]]))
        assert done.tokens == whole[: whole.index(whole[7]) + 1]


@pytest.mark.parametrize("limit", [4, 9])
@pytest.mark.parametrize("scheme", ["pearl", "ssd"])
def test_past_its_reach_the_draft_is_silent(scheme, limit):
    """Shorter than the prompt, and than the text; a pass further on would fail."""
    draft = tiny.gpt2(1, n_positions=limit)
    done, wanted = (write(scheme, draft, draft_limit=limit, limit=limit) for write in (apart, here))
    assert tuple(done.tokens) == tiny.greedy_once(TARGET, tiny.PROMPT, N)
    assert (done.proposals, done.emitted) == (wanted.proposals, wanted.emitted)


@settings(max_examples=500)
@given(
    scheme=st.sampled_from(["pearl", "ssd"]),
    kind=st.sampled_from(["near", "near", "wrong"]),
    by_turns=st.booleans(),
    n=st.integers(1, 6),
    seed=st.integers(0, 10**6),
)
def test_a_slow_side_never_changes_the_text(scheme, kind, by_turns, n, seed):
    """500 schedules: either side waits up to 2 ms before what it does, or does not."""
    draw = random.Random(seed)
    waits = iter([draw.choice([0, 0, 0.0005, 0.002]) for _ in range(50)])

    class Late(Greedy):
        def judge(self, *given):
            time.sleep(next(waits, 0.0))
            return super().judge(*given)

    slow = partial(waiting, iter([draw.choice([0, 0, 0.0005, 0.002]) for _ in range(50)]))
    done = apart(scheme, DRAFTS[kind], Late(), by_turns=by_turns, n=n, slow=slow)
    assert tuple(done.tokens) == tiny.greedy_once(TARGET, tiny.PROMPT, N)[:n]


# ------------------------------------------------------------------------------------------------------------ at the ends


@pytest.mark.parametrize("scheme", ["pearl", "ssd"])
def test_a_run_that_broke_off_is_not_answered_in_the_next(scheme):
    class Breaks(Far):
        collected = 0

        def collect(self, passes):
            self.collected += 1
            if self.collected == 3:  # the start's, a round's, and now with an answer on its way
                raise RuntimeError("out of memory")
            return super().collect(passes)

    wanted = here(scheme, DRAFTS["near"])
    with other_side(side_of(scheme, DRAFTS["near"])) as (conn, board):
        broken, whole = (
            Method(end(conn, board, K), FixedK(K), Greedy(), decode_of(scheme, False)) for end in (Breaks, Far)
        )
        with pytest.raises(RuntimeError):
            run_speculative(tiny.task(TARGET, n=N), broken)
        done = run_speculative(tiny.task(TARGET, n=N), whole).done
    assert (done.tokens, done.proposals) == (wanted.tokens, wanted.proposals)


class Failing(ModelDrafter):
    def keep(self, *news):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_an_error_of_the_drafts_side_is_said_by_the_targets():
    with pytest.raises(SideLost, match="RuntimeError: DefaultCPUAllocator: can't allocate memory"):
        apart("pearl", DRAFTS["wrong"], slow=lambda base: Failing)


def test_logits_that_are_not_finite_end_it():
    broken = tiny.llama(2)
    with torch.no_grad():
        broken.get_output_embeddings().weight[3] = float("nan")
    for scheme in ("pearl", "ssd"):
        with pytest.raises(DecodingError, match="the draft's logits are not finite"):
            apart(scheme, broken)


def test_a_side_that_is_gone_or_silent_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(wire, "PATIENCE_S", 0.05)
    ours, theirs = Pipe()
    board = Board(Sizes(40, 8, 0))
    far = Far(ours, board, K)
    state = prefill(TARGET, torch.tensor([list(tiny.PROMPT)]), N)
    with pytest.raises(SideLost, match="has not answered for 0 s"):
        far.start(state)
    monkeypatch.setattr(wire, "LEAST_S", 0.01)
    for pass_s, says in ((1e-6, "for 0 s"), (2 / len(tiny.PROMPT), "for 2 s")):
        timed, board.owed = Far(ours, board, K, pass_s=pass_s), 0
        with pytest.raises(SideLost, match=says):
            timed.start(state)
    theirs.close()
    for _ in range(2):
        with pytest.raises(SideLost, match="has ended"):
            far.start(state)
    board.close()


def test_the_memory_is_taken_away_once():
    board = Board(Sizes(8, 4, 16))
    name = board.memory.name
    again = Board(Sizes(8, 4, 16), name)
    again.laws[3] = torch.arange(16, dtype=torch.float64) / 3
    assert torch.equal(board.laws[3], torch.arange(16, dtype=torch.float64) / 3) and not board.laws[2].any()
    again.close()
    board.close()
    board.close()
    with pytest.raises(FileNotFoundError):
        SharedMemory(name)
