"""What every script shares: the device, the clock, fair measuring, plain statistics, options and one-line errors.

The only file that reads a clock. Two rules from the essay live here: synchronise before stopping it (an accelerator
queues work, so an unsynchronised timer measures how fast Python queued it), and warm up what is measured.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# What `--dtype auto` means: float32 on a CPU, where nothing is excused; the essay's float16 on Apple's GPU; bfloat16,
# which cannot overflow, on the others.
AUTO_DTYPE = {"cpu": "float32", "mps": "float16", "cuda": "bfloat16", "xpu": "bfloat16"}
BOOTSTRAP_DRAWS = 2000
FEWEST_PAIRS = 3  # below it an interval of paired ratios says nothing, and no verdict is given
LONGEST_ERROR = 500


class UserError(Exception):
    """A mistake that the caller can mend: printed as one line that names the flag and the fix, exit code 2."""


class ClaimFailed(Exception):
    """The check of a script's claim did not hold: printed in full, exit code 1."""


def command(main: Callable[..., int]) -> Callable[..., int]:
    """Wrap a script's main: a UserError becomes one line and exit code 2, a claim that
    failed 1, Ctrl-C a line and 130; no traceback for any of them."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character must not end a run
        try:
            return main(argv)
        except UserError as error:
            print("error: " + " ".join(str(error).split())[:LONGEST_ERROR], file=sys.stderr)
            return 2
        except ClaimFailed as error:
            print(f"FAILED: {error}")
            return 1
        except KeyboardInterrupt:
            print("\ninterrupted; call it again (sweeps go on where they were with --resume)", file=sys.stderr)
            return 130
        except OSError as error:
            if isinstance(
                error, BrokenPipeError
            ):  # the reader of our table left (`| head`): nothing to say, nobody to say it to
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141
            print(f"error: {error}", file=sys.stderr)
            return 2

    return guarded


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
    """Wait until every device of that kind has done all queued work (a model may be spread). A CPU has no queue."""
    kind = getattr(torch, device.type)
    if device.type in ("cuda", "xpu") and kind.device_count() > 1:
        for index in range(kind.device_count()):
            kind.synchronize(index)
    elif device.type != "cpu":
        kind.synchronize()


# ---------------------------------------------------------------------------------------------------------- the clock


def timed(work: Callable[[], object], device: torch.device) -> tuple[object, float]:
    """Run `work` once: synchronise, clock, work, synchronise, clock. Returns (its result, seconds)."""
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


class Watch:
    """A clock at the end of every phase of a watched run. Watched runs say where time goes; they never give the speed.

    `laps` holds (phase, seconds, tokens) in order. Each lap synchronises, so a watched run is slower than a free one.
    """

    def __init__(self, device: torch.device):
        self.device, self.laps = device, []
        synchronize(device)
        self.last = time.perf_counter()

    def __call__(self, phase: str, tokens: int = 0) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        self.laps.append((phase, now - self.last, tokens))
        self.last = now

    def seconds(self, phase: str) -> list[float]:
        return [seconds for name, seconds, _ in self.laps if name == phase]


def unwatched(phase: str, tokens: int = 0) -> None:
    """The watch of a free run: does nothing."""


def interleave(arms: dict[str, Callable[[], tuple[object, float]]], repeats: int, warmup: int) -> dict[str, list]:
    """Run every arm once per repeat, the order rotated by one each time, after `warmup` uncounted turns of every arm.

    An arm returns (result, seconds), having set itself up outside its own clock. Returns each arm's list of those
    pairs, in the order of the repeats: index i of two arms was measured side by side. Raises UserError for a time
    that is not positive (a broken clock gives infinite speedups).
    """
    names = list(arms)
    samples: dict[str, list] = {name: [] for name in names}
    for turn in range(-warmup, repeats):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            result, seconds = arms[name]()
            if not seconds > 0:
                raise UserError(f"the clock gave {seconds} s for '{name}': it cannot be trusted, nothing was recorded")
            if turn >= 0:
                samples[name].append((result, seconds))
    return samples


# ---------------------------------------------------------------------------------------------------------- statistics


def paired_ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the median of `values`. With fewer than 6 it is close to their range, and says so little."""
    draw = random.Random(0).choices  # its own seed: the same numbers give the same interval
    medians = sorted(statistics.median(draw(values, k=len(values))) for _ in range(BOOTSTRAP_DRAWS))
    tail = int((1 - level) / 2 * BOOTSTRAP_DRAWS)
    return medians[tail], medians[-1 - tail]


def ratio_summary(numerator: Sequence[float], denominator: Sequence[float]) -> dict:
    """The median of paired ratios with its interval: `numerator` over `denominator`, repeat by repeat."""
    ratios = paired_ratios(numerator, denominator)
    low, high = median_interval(ratios)
    return {"median": statistics.median(ratios), "low": low, "high": high, "n": len(ratios)}


# -------------------------------------------------------------------------------------------------- places and remarks


def reachable(path: Path, flag: str) -> Path:
    """The path with ~ expanded, looked at once: a name that no file system takes is the caller's to mend. UserError."""
    try:
        path = Path(path).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"{flag} {str(path)[:60]}: {getattr(error, 'strerror', None) or error}; name another place"
        ) from error
    return path


def replaceable(path: Path) -> Path:
    """Where a result file may be written: nothing there yet, or a plain file. Raises UserError for a folder or device."""
    path = reachable(path, "--results")
    if any(folder.exists() and not folder.is_dir() for folder in path.parents):
        raise UserError(f"--results {path}: a file stands where a folder should be; name another place")
    if path.exists() and not path.is_file():
        raise UserError(
            f"--results {path}: a folder or a device, not a file that can be replaced; name a file such as results/mine.json"
        )
    return path


def say(text: str) -> None:
    """Progress and remarks go to stderr, so that stdout holds the tables alone."""
    print(text, file=sys.stderr, flush=True)


@functools.cache
def remark(text: str) -> None:
    """Something worth knowing that stops nothing: said once, however often it is met."""
    say(text)


# ------------------------------------------------------------------------------------------------------------- options


def at_least(minimum: int, most: int = 10**6) -> Callable[[str], int]:
    """A type for argparse: a whole number from `minimum` to `most`."""

    def whole(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if not minimum <= number <= most:
            raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a whole number of {minimum} or more, up to {most}")
        return number

    return whole


def whole_list(minimum: int, most: int = 10**6) -> Callable[[str], list[int]]:
    """A type for argparse: whole numbers with commas or blanks between, sorted, each once."""

    def whole_numbers(text: str) -> list[int]:
        numbers = [at_least(minimum, most)(part) for part in text.replace(",", " ").split()]
        if not numbers:
            raise argparse.ArgumentTypeError("empty; give whole numbers such as 1,2,4,8")
        return sorted(set(numbers))

    return whole_numbers


def fraction(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 to 1")
    return number


class Parser(argparse.ArgumentParser):
    """Says a wrong option in one line, as every other mistake, instead of after the whole usage; takes no shortened ones,
    which would name another option in another script."""

    def __init__(self, *args, **options):
        super().__init__(*args, allow_abbrev=False, **options)

    def error(self, message: str):
        self.exit(2, "error: " + " ".join(message.split())[:LONGEST_ERROR] + "; see --help\n")


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Every default shown, the docstring's lines kept."""


def make_parser(doc: str, script: str, resume: bool = False) -> Parser:
    """A parser with the options that mean the same in every script; the script adds its own models and sizes."""
    parser = Parser(description=doc.strip(), formatter_class=Help)
    shared = parser.add_argument_group("the same in every script")
    shared.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N, mps or xpu")
    shared.add_argument(
        "--dtype", default="auto", choices=["auto", *DTYPES], help="auto: float32 on cpu, float16 on mps, bfloat16 else"
    )
    shared.add_argument("--revision", help="revision of the (target) model on the hub")
    shared.add_argument("--trust-remote-code", action="store_true", help="run code that comes with a model")
    shared.add_argument(
        "--cpu-linear",
        default="auto",
        choices=["auto", "half", "packed", "plain"],
        help="how linear layers run on a CPU: half-precision weights with float32 arithmetic, packed once for oneDNN, or as they are",
    )
    shared.add_argument("--threads", type=at_least(0, 1024), default=0, help="CPU threads, 0 for torch's own choice")
    shared.add_argument("--repeats", type=at_least(1), default=3, help="counted measurements of each arm")
    shared.add_argument("--warmup", type=at_least(0), default=1, help="uncounted turns of each arm before them")
    shared.add_argument(
        "--results", type=Path, default=HERE / "results" / "local" / f"{script}.json", help="where the JSON goes"
    )
    if resume:
        shared.add_argument(
            "--resume",
            nargs="?",
            const="strict",
            choices=["strict", "auto"],
            help="finish an interrupted run of the same settings; auto: start afresh where they differ",
        )
    return parser


def set_up(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """The device and dtype asked for, threads set. Raises UserError before anything slow."""
    device = pick_device(args.device)
    replaceable(args.results)
    if args.threads:
        torch.set_num_threads(args.threads)
    return device, pick_dtype(args.dtype, device)
