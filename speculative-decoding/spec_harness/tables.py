"""What a person reads: tables for a terminal and Markdown alike, the formats of their cells, and the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spec_common import FEWEST_PAIRS, interval_text, judge_speed

from spec_models.pieces import next_piece, pieces


def markdown_table(rows: Sequence[dict], columns: Sequence[tuple[str, str, Callable[[object], str]]]) -> str:
    """A Markdown table, padded so that it reads in a terminal too, columns of numbers to the right. `columns` holds (key, heading, format)."""
    cells = [[heading for _, heading, _ in columns]]
    cells += [["-" if row.get(key) is None else form(row[key]) for key, _, form in columns] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]  # Markdown's rule needs three
    right = [
        all(text == "-" or text.lstrip("-")[:1].isdigit() for text in column[1:])
        and any(text != "-" for text in column[1:])
        for column in zip(*cells, strict=True)
    ]
    lines = []
    for line in cells:
        padded = (
            text.rjust(width) if flush else text.ljust(width)
            for text, width, flush in zip(line, widths, right, strict=True)
        )
        lines.append("| " + " | ".join(padded) + " |")
    lines.insert(
        1,
        "| "
        + " | ".join("-" * (width - 1) + (":" if flush else "-") for width, flush in zip(widths, right, strict=True))
        + " |",
    )
    return "\n".join(lines)


def fixed(digits: int, unit: str = "") -> Callable[[object], str]:
    return lambda value: f"{value:.{digits}f}{unit}"


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def progress(steps: Sequence, title: str):
    """Iterate with a bar and the time left, on stderr."""
    from rich.console import Console
    from rich.progress import track

    yield from track(steps, description=title, console=Console(stderr=True))


def speed_words(row: dict) -> str:
    """A speedup with all that it rests on: the verdict, the interval, the pairs."""
    pairs = len(row["baseline_s"]) if "baseline_s" in row else row["pairs"]
    found = judge_speed(row)
    if found == "few":
        return f"{row['speedup']:.2f}x from too few pairs for a verdict ({pairs}); {FEWEST_PAIRS} (--repeats, --seeds) give one"
    words = {"faster": "faster than", "slower": "slower than", "noise": "no difference beyond the noise to"}[found]
    interval = interval_text(row["speedup_low"], row["speedup_high"])
    return f"{row['speedup']:.2f}x ({interval}, {pairs} pairs), {words} the target alone"


def shown_interval(row: dict) -> dict:
    """The row with its `interval` as text: the error where it has one, nothing where the pairs are too few."""
    return {**row, "interval": row["error"] or interval_text(row["speedup_low"], row["speedup_high"])}


ACCEPTED, CORRECTED, DISCARDED, PLAIN = "\033[32m", "\033[33m", "\033[2;9m", "\033[0m"


def shown_rounds(tokenizer, row: dict, colour: bool) -> str:
    """The text round by round: guesses kept, the target's own token, and what was thrown away."""
    marks = (ACCEPTED, CORRECTED, DISCARDED, PLAIN) if colour else ("", "", "", "")
    lines, start, tokens = [], 0, row["tokens"]
    counts = [(min(len(path), n), n) for path, n in zip(row["paths"], row["emitted_lengths"], strict=True)]
    texts = iter(pieces(tokenizer, tokens, [part for kept, n in counts for part in (kept, n - kept)]))
    rounds = zip(row["proposals"], row["paths"], counts, strict=True)
    for number, (guesses, path, (kept, count)) in enumerate(rounds, 1):
        lost = [guess for place, guess in enumerate(guesses) if place not in path[:kept]]
        thrown_away = next_piece(tokenizer, tokens[: start + kept], lost)
        start += count
        parts = [
            ("accepted", marks[0], kept, next(texts)),
            ("target", marks[1], count - kept, next(texts)),
            ("discarded", marks[2], len(lost), thrown_away),
        ]
        shown = [f"{name} {mark}{text!r}{marks[3] if mark else ''}" for name, mark, n, text in parts if n > 0]
        lines.append(f"{number:>3}  " + "   ".join(shown))
    return "\n".join(lines)
