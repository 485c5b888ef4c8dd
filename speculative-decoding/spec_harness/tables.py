"""What a person reads: tables for a terminal and Markdown alike, the formats of their cells, and the progress bar."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from spec_common import FEWEST_PAIRS, interval_text, judge_speed, paired_ratio

from spec_models.pieces import next_piece, pieces


def turns_of(count: int) -> str:
    return f"{count} turn" if count == 1 else f"{count} turns"


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
        return f"{row['speedup']:.2f}x, of too few pairs for a verdict ({pairs}; {FEWEST_PAIRS} turns give one)"
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


# ------------------------------------------------------------------------------------------------------------ one cell


def cell_lines(row: dict) -> list[tuple]:
    """(label, format, baseline, speculative) of the essay's table of one cell."""
    phases = [row[name] for name in ("draft_s", "verify_s", "overhead_s")]
    return [
        ("tokens per second", fixed(2), row["baseline_tokens_per_s"], row["speculative_tokens_per_s"]),
        ("speedup", fixed(2, "x"), 1.0, row["speedup"]),
        ("target passes", fixed(0), row["emitted"], row["target_passes"]),
        ("draft passes", fixed(0), 0, row["draft_passes"]),
        *((name, fixed(0), None, row[name]) for name in ("proposed", "accepted", "discarded")),
        ("acceptance (accepted / proposed)", percent, None, row["acceptance_rate"]),
        ("alpha (accepted / judged)", percent, None, row["alpha"]),
        ("tokens per target pass", fixed(2), 1.0, row["block_efficiency"]),
        ("ms per target pass, one token", fixed(1), row["target_pass_ms"], None),
        ("ms per target pass, checking", fixed(1), None, row["verify_pass_ms"]),
        ("ms per draft pass", fixed(1), None, row["draft_pass_ms"]),
        ("c (draft pass / target pass)", fixed(2), None, row.get("cost_coefficient")),
        ("time: draft / verify / overhead", " / ".join, None, [percent(part / sum(phases)) for part in phases]),
        ("time to first token, ms", fixed(0), 1000 * row["baseline_ttft_s"], 1000 * row["speculative_ttft_s"]),
    ]


def what_it_does(row: dict, published: dict | None) -> str:
    """One cell, baseline beside speculation; the essay's own column where the pair is the essay's."""
    rows = []
    for label, form, *values in cell_lines(row):
        plain, fast = (None if value is None else form(value) for value in values)
        rows.append({"label": label, "plain": plain, "fast": fast, "essay": (published or {}).get(label)})
    tree = f"tree of {row['tree_nodes']}, " if row.get("tree_nodes") else ""
    columns = [("label", "", str), ("plain", "baseline", str), ("fast", f"speculative ({tree}k={row['k']})", str)]
    return markdown_table(rows, columns + ([("essay", "the essay's", str)] if published else []))


def against_transformers(row: dict) -> str | None:
    """Ours against `generate`, whole calls (prefill included): a ratio above 1 means that ours is faster."""
    rows = []
    for arm, ours, what in (
        ("generate", "plain_baseline", "generate; our baseline, same form of pass"),
        ("generate", "baseline", "generate; our baseline as measured"),
        ("assisted", "plain_speculative", "assisted; our loop, same draft, same form of pass"),
        ("assisted", "speculative", "assisted; our loop as measured"),
    ):
        if f"{arm}_end_to_end_s" in row and f"{ours}_end_to_end_s" in row:
            found = paired_ratio(row[f"{arm}_end_to_end_s"], row[f"{ours}_end_to_end_s"])
            theirs, mine = (statistics.median(row[f"{name}_end_to_end_s"]) for name in (arm, ours))
            rows.append({"arm": what, "theirs": theirs, "mine": mine, "ratio": found["median"],
                         "interval": interval_text(found["low"], found["high"])})  # fmt: skip
    columns = [("arm", "arms", str), ("theirs", "theirs, s", fixed(3)), ("mine", "ours, s", fixed(3)),
               ("ratio", "theirs / ours", fixed(2, "x")), ("interval", "interval", str)]  # fmt: skip
    return markdown_table(rows, columns) if rows else None


def decode_verdict(row: dict) -> str:
    """Whether the text of a cell is the same and whether it pays, said only as far as the interval and the A/A arm carry."""
    aa = interval_text(row["aa_low"], row["aa_high"])
    if row["draft_passes"] == 0 and row["proposed"] == 0:
        words = "the draft was not asked for a guess, so both arms did the same work"
    else:
        words = {"faster": "speculation pays here", "slower": "do not speculate here"}.get(judge_speed(row), "")
        words = f"{words}: {speed_words(row)}" if words else speed_words(row)
    ties = len(row["near_ties"])
    text = "token for token the target's own text" if row["exact"] else f"NOT the same text: {ties} near-ties excused, the first {row['near_ties'][0]}"  # fmt: skip
    return f"{text}; {words}; the same code against itself measured {row['aa']:.2f}x{f' ({aa})' if aa else ''}."
