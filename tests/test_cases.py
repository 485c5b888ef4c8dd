"""Inputs that once went wrong without a word, through the scripts as a user calls them."""

from __future__ import annotations

import json

import spec_plot


def rows_of_a_sweep(name: str) -> list[dict]:
    row = {"workload": name, "error": None, "speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6, "emitted": 8}
    row |= {"predicted_costs": 1.4, "target_passes": 4, "draft_passes": 8, "alpha": 0.7}
    row |= {"draft_s": 0.1, "verify_s": 0.2, "overhead_s": 0.1, "speculative_s": [0.4], "baseline_s": [0.6]}
    return [{**row, "part": part, "k": k} for part in ("k", "workload") for k in (1, 2)]


def test_names_that_look_like_formulas_are_drawn_as_they_are(tmp_path):
    name = "x$_{$y"
    where = {"device": "cpu", "cpu_model": name, "threads": 1, "dtype": "float32", "git_commit": None}
    config = {"target": {"name": name}, "draft": {"name": name}}
    document = {"environment": where, "config": config, "rows": rows_of_a_sweep(name), "summary": {}}
    (tmp_path / "spec_bench.json").write_text(json.dumps(document))
    assert spec_plot.main(["--results", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.png"))) == 6
