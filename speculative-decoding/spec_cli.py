"""What every command line shares: options that mean the same everywhere, their types, places to write, one-line errors."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from spec_common import (
    DTYPES,
    FEWEST_PAIRS,
    HERE,
    LONGEST_ERROR,
    ClaimFailed,
    UserError,
    leave,
    pick_device,
    pick_dtype,
)

import torch


def command(main: Callable[..., int]) -> Callable[..., int]:
    """Wrap a script's main: a UserError becomes one line and exit code 2, a claim that
    failed 1, Ctrl-C a line and 130; no traceback for any of them."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a character must not end a run
        if signal.getsignal(signal.SIGINT) is leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return main(argv)
        except UserError as error:
            print("error: " + " ".join(str(error).split())[:LONGEST_ERROR], file=sys.stderr)
            return 2
        except ClaimFailed as error:
            print(f"FAILED: {error}")
            return 1
        except KeyboardInterrupt:
            resumed = "; with --resume it goes on where it was" if Parser.resumes else ""
            print(f"\ninterrupted; call it again{resumed}", file=sys.stderr)
            return 130
        except OSError as error:
            if isinstance(
                error, BrokenPipeError
            ):  # the reader of our table left (`| head`): nothing to say, nobody to say it to
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141
            where = error.filename or "the output"
            print(f"error: {where}: {error.strerror or error}; choose a place that can be written", file=sys.stderr)
            return 2

    return guarded


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
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not os.access(nearest, os.W_OK):
        raise UserError(f"--results {path}: {nearest} cannot be written; name another place")
    if path.exists() and not path.is_file():
        raise UserError(
            f"--results {path}: a folder or a device, not a file that can be replaced; name a file such as results/mine.json"
        )
    return path


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

    resumes = False  # whether the script that runs can go on with an interrupted run

    def __init__(self, *args, **options):
        super().__init__(*args, allow_abbrev=False, **options)

    def parse_args(self, args=None, namespace=None):
        Parser.resumes = "--resume" in self._option_string_actions
        return super().parse_args(args, namespace)

    def error(self, message: str):
        unknown = re.findall(r"--?[\w-]+", message) if message.startswith("unrecognized") else []
        near = [name for word in unknown for name in difflib.get_close_matches(word, self._option_string_actions, n=1)]
        hint = f"did you mean {', '.join(near)}? See --help" if near else "see --help"
        self.exit(2, f"error: {' '.join(message.split())[:LONGEST_ERROR]}; {hint}\n")


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
        "--cpu-linear", default="auto", choices=["auto", "half", "packed", "plain"],
        help="how linear layers run on a CPU: half-precision weights with float32 arithmetic, packed once for oneDNN, or as they are",
    )  # fmt: skip
    shared.add_argument("--threads", type=at_least(0, 1024), default=0, help="CPU threads, 0 for torch's own choice")
    shared.add_argument("--repeats", type=at_least(1), default=FEWEST_PAIRS, help="counted turns of each arm")
    shared.add_argument(
        "--warmup", type=at_least(0), default=0, help="further uncounted turns; each arm has run before"
    )
    shared.add_argument(
        "--results", type=Path, default=HERE / "results" / "local" / f"{script}.json", help="where the JSON goes"
    )
    shared.add_argument("--wide", action="store_true", help="tables with every column, wider than a terminal")
    if resume:
        shared.add_argument(
            "--resume", nargs="?", const="strict", choices=["strict", "auto"],
            help="finish an interrupted run of the same settings; auto: start afresh where they differ",
        )  # fmt: skip
    return parser


def set_up(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    """The device and dtype asked for, threads set. Raises UserError before anything slow."""
    device = pick_device(args.device)
    replaceable(args.results)
    if args.threads:
        torch.set_num_threads(args.threads)
    return device, pick_dtype(args.dtype, device)
