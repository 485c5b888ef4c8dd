"""The README: every command in it parses, its tables are the committed results', and those are fit to be shown."""

import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

from spec_common import UserError

import pytest

import spec_report
from spec_harness.charts import CHARTS
from spec_harness.claims import essay_claims, further_claims
from spec_harness.drawing import THEMES
from spec_harness.results import measured_hash

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "speculative-decoding" / "results"
DRAFTS = ROOT / "speculative-decoding" / "drafts"
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
LINES = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
SCRIPTS = [line for line in LINES if line.startswith("../.venv/bin/python ")]
MAKE = [line for line in LINES if line.startswith("make ")]


def no_nan(name):
    raise AssertionError(f"{name} is not strict JSON")


@pytest.mark.parametrize("line", SCRIPTS)
def test_every_command_of_the_readme_is_taken_by_its_script(line):
    script, *options = shlex.split(line)[1:]
    module = importlib.import_module(options.pop(0) if script == "-m" else Path(script).stem)
    if options:
        assert module.parse_args(options)
    else:
        assert callable(module.main)


@pytest.mark.parametrize("line", MAKE)
def test_every_make_line_of_the_readme_names_a_target(line):
    done = subprocess.run(["make", "-n", *shlex.split(line)[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_there_are_commands_to_check():
    assert len(SCRIPTS) >= 10
    assert {"make bench", "make test"} <= set(MAKE)


def test_its_figures_are_what_the_committed_results_say():
    assert spec_report.main(["--check"]) == 0


def committed() -> dict:
    return spec_report.load_all(RESULTS)


def code_of(every: dict, name: str, **change) -> None:
    """Changes the states of the files that measured one of the results."""
    every[name]["environment"]["code"] = spec_report.code_states(every[name]) | change


def test_pages_are_not_filled_from_results_of_several_codes_or_of_uncommitted_code():
    spec_report.measured_by_one_code(committed())
    every = committed()
    code_of(every, "bench", **{"spec_new.py": "a"})  # a file that the others do not run through
    spec_report.measured_by_one_code(every)
    code_of(every, "decode", **{"spec_new.py": "b"})
    with pytest.raises(UserError, match="two states of spec_new.py; run `make results`"):
        spec_report.measured_by_one_code(every)
    every = committed()
    every["bench"]["environment"]["git_dirty"] = True
    with pytest.raises(UserError, match="make results FRESH=1"):
        spec_report.measured_by_one_code(every)


@pytest.fixture
def folder(tmp_path) -> Path:
    """The committed results in a folder of their own, signed as they are written today."""
    for path in RESULTS.glob("spec_*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        document["measured_sha256"] = measured_hash(document)
        (tmp_path / path.name).write_text(json.dumps(document), encoding="utf-8")
    return tmp_path


def edit(path: Path, change, signed: bool) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document | ({"measured_sha256": measured_hash(document)} if signed else {})), encoding="utf-8")


def better(document: dict) -> None:
    for row in document["rows"]:
        row.update({"speedup": 9.87} if row.get("part") == "k" else {})


def test_stale_pages_and_edited_results_and_those_of_other_code_are_told_apart(folder, capsys):
    """Measured anew: the pages are stale (1). Edited by hand, or of another state of the code: nothing is shown (2)."""
    check, bench = ["--results", str(folder), "--check"], folder / "spec_bench.json"
    assert spec_report.main(check) == 0
    edit(bench, better, signed=True)
    assert spec_report.main(check) == 1 and "RESULTS.md: not what the results say" in capsys.readouterr().out
    edit(bench, lambda document: better(document) or document["rows"][-1].update(k=77), signed=False)
    assert spec_report.main(check) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: --results spec_bench.json: it was edited after it was measured; measure again"
    edit(bench, lambda document: document["environment"].update(code=dict.fromkeys(spec_report.code_states(document), "0")), signed=True)
    assert spec_report.main(check) == 2 and "two states of" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"status": "complete", "rows": []}', "[]"])
def test_a_damaged_result_file_is_one_line(text, folder, capsys):
    (folder / "spec_bench.json").write_text(text)
    assert spec_report.main(["--results", str(folder), "--check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: --results spec_bench.json: not a result file; measure again"


def test_where_it_does_not_pay_names_the_cells_of_every_script():
    """By the verdict: with all of its interval below 1. Nothing that a script measured is left out."""
    every = committed()
    slow = {"speedup": 0.5, "speedup_low": 0.4, "speedup_high": 0.6}
    every["batch"]["rows"] = [row | (slow if row.get("batch") == 2 else {}) for row in every["batch"]["rows"]]
    every["sampling"]["summary"]["temperatures"][0].update(slow)
    every["lookup"]["rows"] = [row | (slow if row.get("text") == "code" else {}) for row in every["lookup"]["rows"]]
    words = spec_report.slower_cells(every)
    for named in ("a batch of 2, k = ", "sampling at temperature 0, k = ", "code by lookup: ", "code by hybrid: "):
        assert f"- {named}" in words
    assert "a batch of 1," not in words


def test_a_failed_cell_and_one_of_too_few_turns_can_be_shown():
    """Whatever a sweep left behind, the pages say what there is."""
    every = committed()
    for row in every["bench"]["rows"]:
        if row.get("part") == "k" and row["k"] == 2:
            row.update(error="out of memory", speedup=None)
    failed = {"draft": "x", "parameters": 1, "c": 0.1, "draft_pass_ms": 1.0, "error": "out of memory", "speedup": None}
    none = {**every["bench"], "config": {**every["bench"]["config"], "k": 5}, "rows": [], "summary": {"drafts": []}}
    every.setdefault("drafts", none)["summary"]["drafts"].append(failed)
    for row in every.get("sampling", {"summary": {"temperatures": []}})["summary"]["temperatures"]:
        row.update(speedup_low=None, speedup_high=None, aa_low=None, aa_high=None)
    shown = essay_claims(every, spec_report.USUAL_K) | further_claims(every, spec_report.CLOSE) | spec_report.tables(every)
    assert "out of memory" in shown["draft_table"] and shown.get("m_sampling", "none") == "none"
    every["bench"]["rows"].append({"part": "workload", "workload": "code", "k": 5, "speedup": None, "error": "out of memory"})
    assert essay_claims(every, spec_report.USUAL_K)["bench"] == shown["bench"], "a cell that failed has no figure to stand among them"


def test_words_about_a_row_come_from_the_row():
    every = committed()
    row = next(row for row in every["decode"]["rows"] if row.get("part") == "decode")
    assert f"{row['workload']}, k = {row['k']}" in essay_claims(every, spec_report.USUAL_K)["decode"]
    row.update(exact=False, near_ties=[{"index": 1}], workload="another text")
    said = essay_claims(every, spec_report.USUAL_K)["decode"]
    assert "token for token" not in said and "another text" in said


def test_what_was_not_measured_says_so_and_every_marker_is_known():
    text = "a <!-- tree --><!-- /tree --> <!-- costs -->\nold\n<!-- /costs -->"
    assert spec_report.filled(text, {"costs": "new"}) == "a <!-- tree -->not measured yet; `make results` does<!-- /tree --> <!-- costs -->\nnew\n<!-- /costs -->"
    source = "".join((ROOT / "speculative-decoding" / name).read_text() for name in ("spec_report.py", "spec_harness/claims.py"))
    for page in spec_report.PAGES.values():
        for name in re.findall(r"<!-- (\w+) -->", page.read_text(encoding="utf-8")):
            assert f'"{name}"' in source or name.startswith("from_") or name[2:] in ("lookup", "hybrid", "overlap", "heads"), name


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_are_strict_and_from_a_clean_commit(path):
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=no_nan)
    assert document["status"] == "complete"
    half = document["environment"]["dtype"] != "float32"
    assert document["environment"]["git_dirty"] is False
    rows = [one for row in document["rows"] for one in (row.get("drafts", {}).values() or [row]) if "exact" in one]
    near = [tie for row in rows for tie in row["near_ties"]]
    assert all(row["exact"] or row["near_ties"] for row in rows), "a text that is not the target's own"
    assert all(half and tie["near_tie"] for tie in near), "only a near-tie of half precision is excused"


def test_every_chart_has_its_dark_twin():
    charts = {path.stem for path in RESULTS.glob("*.png")}
    assert charts == {f"{name}_{theme}" for name in CHARTS for theme in THEMES}
    assert all(f"results/{name}_light.png" in (ROOT / "RESULTS.md").read_text(encoding="utf-8") for name in CHARTS)


def test_the_drafts_card_holds_acceptance_in_both_precisions():
    card = spec_report.PAGES["card"].read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- (acceptance_\w+) -->", card)) == {"acceptance_float32", "acceptance_bfloat16"}
    assert all(path.stem in card for path in DRAFTS.glob("*.safetensors"))
    assert ("guess 5" in card) == ("drafts" in committed())


def test_all_weights_together_are_small():
    assert sum(path.stat().st_size for path in DRAFTS.glob("*.safetensors")) < 25e6
