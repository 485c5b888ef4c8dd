"""Two result files side by side: the same cells, what differs, nothing that does not."""

from __future__ import annotations

import json

import pytest

import spec_plot
import tiny
from spec_harness.charts import plot_comparison
from spec_harness.compare import compared_files, differences, measured_cells
from spec_harness.drawing import THEMES


def document(rows, experiment="spec_bench", dtype="float32", **config) -> dict:
    where = {
        "git_commit": "abc",
        "dtype": dtype,
        "device": "cpu",
        "cpu_model": "one",
        "threads": 1,
        "load_average_1m": len(dtype),
    }
    return {
        "experiment": experiment,
        "environment": where,
        "config": {"dtype": "auto", **config},
        "rows": rows,
        "summary": {},
    }


def written(one: dict) -> str:
    """As a script writes it: signed."""
    return json.dumps(tiny.signed(one))


def cell(k, speedup, low=None, high=None, **more) -> dict:
    return {"part": "k", "workload": "prose", "k": k, "tokens": [1, 2], "speedup": speedup, "speedup_low": low, "speedup_high": high, "error": None, **more}  # fmt: skip


ONE = document([cell(1, 1.5, 1.4, 1.6), cell(2, 2.0), cell(3, 1.0)], repeats=6, target={"name": "t", "pass": "fused"})
TWO = document([cell(2, 1.0, 0.9, 1.1), cell(1, 1.2, 1.1, 1.3), cell(5, 1.0)], dtype="bfloat16", repeats=3, target={"name": "t", "pass": "plain"})  # fmt: skip


def test_the_same_cells_stand_side_by_side_and_the_others_are_named():
    lines = compared_files(ONE, TWO, ("a.json", "b.json")).splitlines()
    head, table = lines[: lines.index("")], lines[lines.index("") + 1 :]
    assert head == ["A: a.json, B: b.json, spec_bench", "dtype: float32 | bfloat16", "repeats: 6 | 3", "target.pass: fused | plain",
                    "only A has: k, prose, k 3", "only B has: k, prose, k 5"]  # fmt: skip
    cells = [[part.strip() for part in line.strip("|").split("|")] for line in table[2:]]
    assert cells == [["k, prose, k 1", "1.50 (1.40 to 1.60)", "1.20 (1.10 to 1.30)", "0.80"],
                     ["k, prose, k 2", "2.00", "1.00 (0.90 to 1.10)", "0.50"]]  # fmt: skip
    assert max(map(len, lines)) <= 100


def test_nothing_that_is_equal_is_a_difference():
    assert differences(ONE["config"], ONE["config"]) == []
    assert differences({"a": 1, "chosen_ms": {"x_ms": 1}}, {"a": 1, "chosen_ms": {"x_ms": 2}}) == [], (
        "what was timed to choose"
    )
    assert differences({"a": None}, {}) == [] and differences({"load_average_1m": 1}, {"load_average_1m": 2}) == []


def test_a_failed_cell_stays_in_the_table_and_long_names_fit():
    failed = document(
        [{"part": "k", "workload": "w" * 90, "k": 1, "speedup": None, "error": "out of memory"}, cell(1, 1.0)]
    )
    table = compared_files(failed, failed, ("a" * 99, "b" * 99))
    assert "failed" in table and max(map(len, table.splitlines())) <= 100


def test_no_cell_stands_in_for_another_however_long_its_name():
    """Seeds of one temperature, and texts of one long name at several k: all of them are in the table."""
    seeds = [{"part": "sampling", "workload": "open prose", "temperature": 0.3, "seed": seed, "speedup": 1.0 + seed, "error": None} for seed in range(6)]
    long = [{"part": "k", "workload": "w" * 90, "k": k, "speedup": float(k), "error": None} for k in (1, 2, 3)]
    one = document([*seeds, *long])
    assert [found.figure for found in measured_cells(one).values()] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0, 2.0, 3.0]
    table = compared_files(one, one, ("a", "b")).splitlines()
    assert sum(line.startswith("| sampling") for line in table) == 6 and sum(".. " in line and "k 2" in line for line in table) == 1


def test_every_draft_of_a_text_is_a_cell():
    drafts = {"s": {"speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6, "error": None}, "m": {"speedup": 1.2, "error": None}}
    found = measured_cells(document([{"part": "draft", "workload": "code", "drafts": drafts, "error": None}]))
    assert {name: one.figure for name, one in found.items()} == {"draft, code, s": 1.5, "draft, code, m": 1.2}


def test_of_the_code_it_is_said_how_many_files_differ():
    assert differences({"code": {"a.py": "1", "b.py": "2"}}, {"code": {"a.py": "1", "b.py": "3", "c.py": "4"}}) == ["code: 2 files of other states"]


def test_costs_and_the_rows_of_a_summary_have_their_figure():
    costs = document(
        [
            {"tokens": 4, "v": 1.2, "v_low": 1.1, "v_high": 1.3, "error": None},
            {"part": "costs", "v": {"1": 1.0}, "error": None},
        ]
    )
    assert measured_cells(costs) == {"tokens 4": (1.2, 1.1, 1.3, None)}
    adaptive = {
        **document([{"part": "turn", "turn": 0, "error": None}]),
        "summary": {"arms": [{"arm": "cost", "text": "all", "speedup": 2.0, "error": None}]},
    }
    assert measured_cells(adaptive) == {"all, cost": (2.0, None, None, None)}


def test_every_cell_of_both_is_drawn_with_its_interval():
    (axes,) = plot_comparison(ONE, TWO, THEMES["light"]).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["k, prose, k 1", "k, prose, k 2"]
    points = [float(line.get_xdata()[0]) for line in axes.get_lines() if line.get_marker() == "o"]
    spans = [
        tuple(line.get_xdata()) for line in axes.get_lines() if line.get_marker() != "o" and line.get_linestyle() == "-"
    ]
    assert points == [1.5, 2.0, 1.2, 1.0] and spans == [(1.4, 1.6), (1.1, 1.3), (0.9, 1.1)]


def test_two_files_on_the_command_line(tmp_path, capsys):
    for name, one in (("a", ONE), ("b", TWO)):
        (tmp_path / f"{name}.json").write_text(written(one))
    assert (
        spec_plot.main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(tmp_path)]) == 0
    )
    assert "0.80" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "compare_spec_bench_dark.png",
        "compare_spec_bench_light.png",
    ]


BAD = {"no file": None, "empty": "", "a list": "[]", "no rows": '{"rows": 3}', "rows of numbers": json.dumps({**ONE, "rows": [1]}),
       "another script": written({**ONE, "experiment": "spec_drafts"}), "no cell in both": written(document([cell(9, 1.0)])),
       "words for a figure": written(document([cell(1, 1.0, "low", "high"), cell(2, 1.0)])), "edited": written(ONE).replace("1.5", "2.5"),
       "its signature taken away": json.dumps(ONE)}  # fmt: skip


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_file_that_cannot_be_compared_is_one_line(tmp_path, text, capsys):
    (tmp_path / "a.json").write_text(written(ONE))
    if text is not None:
        (tmp_path / "b.json").write_text(text)
    assert (
        spec_plot.main(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--out", str(tmp_path)]) == 2
    )
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1 and "--compare" in said[0]
