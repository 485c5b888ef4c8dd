"""The README: every command in it parses, its tables are the committed results', and those are fit to be shown."""

import importlib
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import spec_report

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "speculative-decoding" / "results"
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
    assert len(MAKE) == 2


def test_its_figures_are_what_the_committed_results_say():
    assert spec_report.main(["--check"]) == 0


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_committed_results_are_strict_and_from_a_clean_commit(path):
    document = json.loads(path.read_text(encoding="utf-8"), parse_constant=no_nan)
    assert document["status"] == "complete"
    half = document["environment"]["dtype"] != "float32"
    assert document["environment"]["git_dirty"] is False
    exact = [row["exact"] or (half and bool(row["near_ties"])) for row in document["rows"] if "exact" in row]
    assert all(exact), "a text that is not the target's own, and no near-tie of half precision"


def test_every_chart_has_its_dark_twin():
    charts = {path.stem for path in RESULTS.glob("*.png")}
    assert charts == {
        f"{name}_{theme}" for name in ("k_sweep", "costs", "workloads", "time") for theme in ("light", "dark")
    }


def test_the_drafts_card_holds_acceptance_in_both_precisions():
    card = spec_report.CARD.read_text(encoding="utf-8")
    assert set(spec_report.card_figures()) == {"acceptance_float32", "acceptance_bfloat16"}
    assert all(f"draft-{size}" in card for size in "sm") and "guess 5" in card


def test_all_weights_together_are_small():
    assert sum(path.stat().st_size for path in (ROOT / "speculative-decoding" / "drafts").glob("*.safetensors")) < 25e6
