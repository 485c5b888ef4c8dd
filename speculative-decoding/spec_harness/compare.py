"""Two result files of one script side by side: the same cells with their intervals, and what differs in how they were made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from spec_common import UserError, interval_text

from spec_harness.results import lasting, was_edited
from spec_harness.tables import fixed, markdown_table

CELL = (
    "part",
    "workload",
    "text",
    "request",
    "method",
    "arm",
    "draft",
    "temperature",
    "seed",
    "batch",
    "k",
    "tree_nodes",
    "tokens",
)
FIGURES = ("speedup", "v")  # what a cell measured, with its interval: a speedup, or V(n)
CHANGES = {"load_average_1m", "load_average_1m_at_the_end"}  # these always differ and say nothing of a setting
SAID_TWICE = {
    "device",
    "dtype",
    "threads",
    "drafts",
}  # as asked for: what came of it is in the environment and in `draft`
LONGEST_CELL, LONGEST_LINE = 40, 100


class Measured(NamedTuple):
    """One cell's figure, its interval (null where the pairs are too few), or the error that stands in its place."""

    figure: float | None
    low: float | None
    high: float | None
    error: str | None


def read_document(path: Path, flag: str) -> dict:
    """A result file. Raises UserError for one that is not there or is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{flag} {path.name}: {error.strerror or error}; name a result file") from error
    except (ValueError, RecursionError):
        document = None
    parts = {"environment": dict, "config": dict, "rows": list, "summary": dict}
    whole = isinstance(document, dict) and all(isinstance(document.get(part), kind) for part, kind in parts.items())
    if not whole or not all(isinstance(row, dict) for row in document["rows"]):
        raise UserError(f"{flag} {path.name}: not a result file; measure again")
    if was_edited(document):
        raise UserError(f"{flag} {path.name}: it was edited after it was measured; measure again")
    return document


def cell_name(row: dict) -> str:
    """What names a cell in its sweep, in words."""
    named = [(key, row[key]) for key in CELL if isinstance(row.get(key), (str, int, float))]
    return ", ".join(str(value) if isinstance(value, str) else f"{key} {value}" for key, value in named)


def shown_name(name: str) -> str:
    """A cell's name as a table has room for it: its beginning and its end, where k and seed stand."""
    half = LONGEST_CELL // 2 - 2
    return name if len(name) <= LONGEST_CELL else f"{name[:half]} .. {name[-half:]}"


def rows_of(document: dict) -> list[dict]:
    """Every row with a figure of its own: of a row that holds several drafts, one for each; of turns that count only together,
    the summary's."""
    apart = [
        {**row, **one, "draft": name} for row in document["rows"] if isinstance(row.get("drafts"), dict) for name, one in row["drafts"].items()
    ]
    whole = [row for row in document["rows"] if not isinstance(row.get("drafts"), dict)]
    return [*whole, *apart, *(document["summary"].get("arms") or [])]


def measured_cells(document: dict) -> dict[str, Measured]:
    """Every cell that has a figure, or an error instead, by its whole name: none may stand in for another."""
    found = {}
    for row in rows_of(document):
        name = next((name for name in FIGURES if isinstance(row.get(name), (int, float))), "speedup")
        if isinstance(row.get(name), (int, float)) or row.get("error"):
            found[cell_name(row)] = Measured(
                row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high"), row.get("error")
            )
    return found


def differences(first: dict, second: dict, inside: str = "") -> list[str]:
    """One line for each setting or part of the environment that is not the same, by its own name; nothing that is."""
    lines = []
    for key in dict.fromkeys([*first, *second]):
        a, b = lasting(first.get(key)), lasting(second.get(key))
        if a == b or key in CHANGES:
            continue
        if key == "code" and isinstance(a, dict) and isinstance(b, dict):
            lines.append(f"{inside}code: {sum(a.get(file) != b.get(file) for file in {*a, *b})} files of other states")
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differences(a, b, f"{inside}{key}.")
        else:
            lines.append(shortened(f"{inside}{key}: {a} | {b}"))
    return lines


def shortened(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 3] + "..."


def shown_cell(cell: Measured) -> str:
    if cell.error:
        return "failed"
    interval = interval_text(cell.low, cell.high)
    return f"{cell.figure:.2f}" + (f" ({interval})" if interval else "")


def comparison_table(first: dict[str, Measured], second: dict[str, Measured]) -> str:
    """The cells that both have: figure and interval of each, and the second over the first."""
    rows = []
    for name in (name for name in first if name in second):
        a, b = first[name], second[name]
        both = a.figure and b.figure and not (a.error or b.error)
        rows.append(
            {"cell": shown_name(name), "a": shown_cell(a), "b": shown_cell(b), "ratio": b.figure / a.figure if both else None}
        )
    return markdown_table(rows, [("cell", "cell", str), ("a", "A", str), ("b", "B", str), ("ratio", "B / A", fixed(2))])


def compared_files(first: dict, second: dict, names: tuple[str, str]) -> str:
    """What is printed of two documents: what differs, the table, the cells of only one. Raises UserError where no cell is in
    both."""
    if not first.get("experiment") or first["experiment"] != second.get("experiment"):
        raise UserError(
            f"--compare: {names[0]} is of {first.get('experiment')}, {names[1]} of {second.get('experiment')}; name two files of one script"
        )
    cells = measured_cells(first), measured_cells(second)
    if not cells[0].keys() & cells[1].keys():
        raise UserError(f"--compare: no cell is in both {names[0]} and {names[1]}; measure the same texts and k")
    lines = [shortened(f"A: {names[0]}, B: {names[1]}, {first['experiment']}")]
    lines += differences(first["environment"], second["environment"])
    asked = [{key: value for key, value in one["config"].items() if key not in SAID_TWICE} for one in (first, second)]
    lines += differences(*asked)
    for letter, mine, other in (("A", *cells), ("B", *cells[::-1])):
        alone = [name for name in mine if name not in other]
        lines += [shortened(f"only {letter} has: {name}") for name in alone]
    return "\n".join(lines) + f"\n\n{comparison_table(*cells)}"
