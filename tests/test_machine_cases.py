"""The machine that a run had: which CPUs, how much of them, and no advice from times that cannot be right."""

from __future__ import annotations

import json

from spec_common import UserError

import pytest
import torch

import spec_decode
from spec_harness import machine
from spec_harness.advice import advise
from spec_harness.machine import environment
from spec_harness.results import ResultFile

CPU = torch.device("cpu")


def test_the_cpus_that_a_run_may_use_are_part_of_its_environment(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3}, raising=False)
    monkeypatch.setattr(machine, "CPU_MAX", tmp_path / "cpu.max")
    assert (environment(CPU, torch.float32)["cpus_allowed"], environment(CPU, torch.float32)["cpu_quota"]) == (1, None)
    for text, quota in (("150000 100000", 1.5), ("max 100000", None), ("", None)):
        (tmp_path / "cpu.max").write_text(text)
        assert environment(CPU, torch.float32)["cpu_quota"] == quota


@pytest.mark.parametrize("name", ["cpus_allowed", "cpu_quota", "threads"])
def test_a_run_is_not_finished_on_other_cpus(name, tmp_path):
    with ResultFile(tmp_path / "r.json", "x", {}, {name: 2}, None):
        pass
    with pytest.raises(UserError, match=f"--resume: .*{name}: 2 there, 1 here"):
        ResultFile(tmp_path / "r.json", "x", {}, {name: 1}, "strict")


def test_more_threads_than_cpus_are_one_remark(pair, monkeypatch, capfd):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(machine, "cpus_allowed", lambda: 2)
    assert spec_decode.main([*pair, "--prompt", "w1 w2"]) == 0
    assert capfd.readouterr().err.count("64 threads on 2 CPUs") == 1
    assert json.loads(open(pair[-1], encoding="utf-8").read())["environment"]["cpus_allowed"] == 2  # noqa: SIM115


def test_a_pass_over_more_tokens_that_took_less_time_is_no_advice():
    rows = [{"tokens": 1, "v": 1.0, "v_high": 1.0}, {"tokens": 4, "v": 0.34, "v_high": 0.5}]
    assert advise(rows, 0.1, 0.9, "given") is None
    rows[1]["v_high"] = 1.2
    assert advise(rows, 0.1, 0.9, "given")["best_k"] == 3
