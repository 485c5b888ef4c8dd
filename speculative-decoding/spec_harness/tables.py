"""What a person reads: tables for a terminal and Markdown alike, the formats of their cells, and the progress bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence


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
