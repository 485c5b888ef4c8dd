"""What every script shares: the device, the clock, fair measuring, plain statistics and the one verdict.

The only file that reads a clock. Two rules from the essay live here: synchronise before stopping it (an accelerator
queues work, so an unsynchronised timer measures how fast Python queued it), and warm up what is measured.
"""

from __future__ import annotations

import functools
import math
import os
import random
import signal
import statistics
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple


def limit_spinning() -> None:
    """Let OpenMP's threads sleep soon after they find no work, unless the user has said how. Spinning threads fight every
    other busy process for its core. Read when torch is loaded, so it stands before that import."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ):
        os.environ["GOMP_SPINCOUNT"] = "20000"


HERE = Path(__file__).resolve().parent


def leave(*_) -> None:
    """Ctrl-C before a script has begun: one line, at once."""
    os.write(2, b"\ninterrupted before anything was begun\n")
    os._exit(130)


def mind_imports() -> None:
    """Let Ctrl-C end a script of ours in one line while it still imports, which takes seconds; `command` (spec_cli.py) puts
    the usual handler back."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script and HERE in Path(script).resolve().parents and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, leave)


limit_spinning()
mind_imports()

import torch  # noqa: E402

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# What `--dtype auto` means: float32 on a CPU, where nothing is excused; the essay's float16 on Apple's GPU; bfloat16,
# which cannot overflow, on the others.
AUTO_DTYPE = {"cpu": "float32", "mps": "float16", "cuda": "bfloat16", "xpu": "bfloat16"}
LEVEL = 0.95  # of every interval: what it covers
FEWEST_PAIRS = 6  # the fewest whose whole range covers the median so often; below it no interval and no verdict
LONGEST_ERROR = 500
WIDTH = 100  # columns of what is printed


class UserError(Exception):
    """A mistake that the caller can mend: printed as one line that names the flag and the fix, exit code 2."""


class ClaimFailed(Exception):
    """The check of a script's claim did not hold: printed in full, exit code 1."""


def is_out_of_memory(error: BaseException) -> bool:
    """True for the ways torch says that memory ran out, on a GPU or on the CPU."""
    marks = ("not enough memory", "out of memory", "can't allocate memory", "cannot allocate memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(mark in str(error).lower() for mark in marks)


def first_line(error: BaseException) -> str:
    """The first line that an error says, or its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:200]


# ---------------------------------------------------------------------------------------------------- device and dtype


def pick_device(name: str) -> torch.device:
    """`auto` or a device name to a device that is there. Raises UserError before anything is loaded."""
    kind, colon, index = name.partition(":")
    here = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "xpu": hasattr(torch, "xpu") and torch.xpu.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, there in here.items() if there))
    if kind not in here or (colon and not (index.isascii() and index.isdigit() and kind in ("cuda", "xpu"))):
        raise UserError(f"--device {name}: unknown; choose auto, cpu, cuda, mps, xpu, or cuda:N")
    if not here[kind]:
        found = ", ".join(kind for kind, there in here.items() if there)
        raise UserError(f"--device {name}: not on this machine; it has {found}")
    if index and kind in ("cuda", "xpu") and int(index) >= getattr(torch, kind).device_count():
        raise UserError(
            f"--device {name}: this machine has {getattr(torch, kind).device_count()} of them, counted from 0"
        )
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    return DTYPES[AUTO_DTYPE[device.type] if name == "auto" else name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    return {"mps": "Apple GPU (MPS)", "cpu": "CPU"}[device.type]


def synchronize(device: torch.device) -> None:
    """Wait until that device has done all queued work; no other one is touched (looking at another GPU opens a context on
    it). Of a model that is spread over several this is the last one: its work waits for the others'. A CPU has no queue."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


# ---------------------------------------------------------------------------------------------------------- the clock


class Timed(NamedTuple):
    """What a piece of work gave, and its seconds."""

    result: object
    seconds: float


def timed(work: Callable[[], object], device: torch.device) -> Timed:
    """Run `work` once: synchronise, clock, work, synchronise, clock."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return Timed(result, time.perf_counter() - start)


class Watch:
    """A clock at the end of every phase of a watched run. Watched runs say where time goes; they never give the speed.

    `laps` holds (phase, seconds, tokens) in order. Each lap synchronises, so a watched run is slower than a free one.
    """

    def __init__(self, device: torch.device):
        self.device, self.laps = device, []
        self.begin()

    def begin(self) -> None:
        """The next lap starts now."""
        synchronize(self.device)
        self.last = time.perf_counter()

    def __call__(self, phase: str, tokens: int = 0) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        self.laps.append((phase, now - self.last, tokens))
        self.last = now

    def seconds(self, *phases: str) -> list[float]:
        """The seconds of every lap of those phases; of all laps where none is named."""
        return [seconds for name, seconds, _ in self.laps if name in phases or not phases]


def unwatched(phase: str, tokens: int = 0) -> None:
    """The watch of a free run: does nothing."""


def turn_order(names: Sequence[str], turn: int) -> list[str]:
    """The order of the arms in a turn: drawn for every pair of turns, the second of a pair the first one reversed. So no
    arm keeps its neighbours, and over a pair every arm stands as early as late."""
    order = random.Random(turn // 2).sample(list(names), len(names))
    return order[::-1] if turn % 2 else order


def interleave(arms: dict[str, Callable], repeats: int, warmup: int, first_turn: int = 0) -> dict[str, list]:
    """Run every arm once a turn, in an order of the turn's own, after `warmup` uncounted turns of every arm.

    An arm returns a record with `seconds` (Timed, or one like it), having set itself up outside its own clock. Returns
    each arm's list of them: index i of two arms is of one turn. `first_turn`: where this is a part of a longer run.
    Raises UserError for a time that is not positive (a broken clock gives infinite speedups).
    """
    samples: dict[str, list] = {name: [] for name in arms}
    for turn in range(first_turn - warmup, first_turn + repeats):
        for name in turn_order(list(arms), turn):
            run = arms[name]()
            if not run.seconds > 0:
                raise UserError(
                    f"the clock gave {run.seconds} s for '{name}': it cannot be trusted, nothing was recorded"
                )
            if turn >= first_turn:
                samples[name].append(run)
    return samples


# ---------------------------------------------------------------------------------------------------------- statistics


def interval_rank(n: int, level: float = LEVEL) -> int | None:
    """How many of n values to leave out at either end so that the rest spans the median with a probability of `level` or
    more, whatever their law (order statistics: 1 - 2 P(Bin(n, 1/2) <= rank)); None where even all of them do not."""
    outside, rank = 0.0, -1
    while rank < n // 2 and outside + math.comb(n, rank + 1) / 2**n <= (1 - level) / 2:
        rank += 1
        outside += math.comb(n, rank) / 2**n
    return None if rank < 0 else rank


def median_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float | None, float | None]:
    """The interval of the median of `values` that covers it with a probability of `level` or more; (None, None) from
    fewer than six values, whose whole range does not."""
    rank = interval_rank(len(values), level)
    ordered = sorted(values)
    return (None, None) if rank is None else (ordered[rank], ordered[-1 - rank])


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> dict:
    """The median of paired ratios with its interval: `numerator` over `denominator`, turn by turn."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, high = median_interval(ratios)
    return {"median": statistics.median(ratios), "low": low, "high": high, "n": len(ratios)}


def judge_speed(row: dict, name: str = "speedup") -> str:
    """The one verdict on a speedup, of every script and page: 'faster' or 'slower' than the target alone where the interval
    says so and the same code against itself (the A/A arm) did not stray as far; 'noise' between them, 'few' without an
    interval. `row` holds NAME, NAME_low, NAME_high, aa_low and aa_high."""
    speed, low, high = row[name], row[f"{name}_low"], row[f"{name}_high"]
    if low is None or row["aa_low"] is None:
        return "few"
    if low > 1 and speed > row["aa_high"]:
        return "faster"
    return "slower" if high < 1 and speed < row["aa_low"] else "noise"


def interval_text(low: float | None, high: float | None, digits: int = 2) -> str | None:
    return None if low is None else f"{low:.{digits}f} to {high:.{digits}f}"


def tell(text: str) -> None:
    """Results go to stdout: tables as they are, sentences wrapped to the WIDTH that tables fit."""
    for line in text.split("\n"):
        wrap = len(line) > WIDTH and not line.startswith("|")
        print(textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False) if wrap else line)
    sys.stdout.flush()


def say(text: str) -> None:
    """Progress and remarks go to stderr, so that stdout holds the tables alone."""
    print(text, file=sys.stderr, flush=True)


@functools.cache
def remark(text: str) -> None:
    """Something worth knowing that stops nothing: said once, however often it is met."""
    say(text)
