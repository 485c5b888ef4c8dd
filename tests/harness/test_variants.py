"""Kinds of linear layers and forms of pass side by side: each computes the model's own logits, and none changes the model."""

from __future__ import annotations

import json

from spec_common import Timed, UserError

import pytest
import torch

import spec_precondition
import tiny
from spec_harness import variants
from spec_harness.costs import affordable_side
from spec_harness.results import lasting
from spec_models.checks import Loaded
from spec_models.fused import FusedLlama
from spec_models.linear import KINDS, works

CPU = torch.device("cpu")
HERE = [kind for kind in KINDS if works(kind)]
IDS = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", ["plain", "fused"])
@torch.inference_mode()
def test_every_kind_computes_the_models_logits_and_the_model_is_left_alone(form):
    loaded = Loaded(tiny.llama(), None, "t", "--model")
    whole, before = loaded.model(IDS).logits, list(loaded.model.modules())
    models = variants.in_each_kind(loaded, form)
    assert list(models) == [*HERE, "plain"]
    for kind, model in models.items():
        assert isinstance(model, FusedLlama) == (form == "fused")
        assert (model(IDS).logits - whole).abs().max() <= {"half": 0.1}.get(kind, 1e-3) * whole.std()
        assert {type(one) for one in model.modules()} & set(KINDS.values()) == (
            {KINDS[kind]} if kind in KINDS else set()
        )
    after = list(loaded.model.modules())
    assert len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))
    assert torch.equal(loaded.model(IDS).logits, whole)


@torch.inference_mode()
def test_both_forms_of_pass_are_the_same_model_and_share_what_is_packed_once():
    loaded = Loaded(tiny.llama(), None, "t", "--model")
    models = variants.in_each_pass(loaded, HERE[0])
    assert list(models) == ["plain", "fused"] and isinstance(models["fused"], FusedLlama)
    assert models["fused"].head is models["plain"].lm_head
    assert (models["fused"](IDS).logits - models["plain"](IDS).logits).abs().max() < 1e-3


def test_what_cannot_be_compared_is_refused_by_its_flag():
    with pytest.raises(UserError, match="--compare-passes: g cannot be fused"):
        variants.in_each_pass(Loaded(tiny.gpt2(), None, "g", "--model"), "plain")


def test_the_table_has_a_line_for_each_size_and_v_of_every_variant(pair, target_folder, results, capsys):
    argv = ["--device", "cpu", "--model", target_folder, "--context", "8", "--tokens", "1,3", "--results", str(results)]
    code = spec_precondition.main([*argv, "--repeats", "2", "--compare-linears", "--compare-passes"])
    compared, out = json.loads(results.read_text())["summary"]["compared"], capsys.readouterr().out
    assert code == 0 and "linear layers side by side" in out and "forms of pass side by side" in out
    assert {row["variant"] for row in compared["linear layers"]} == {*HERE, "plain"}
    for rows in compared.values():
        assert all(row["v"] == 1 for row in rows if row["tokens"] == 1)
        assert all(row["of_first"] == 1 for row in rows if row["variant"] == rows[0]["variant"])
        assert {row["tokens"] for row in rows} == {1, 3} and all(len(row["seconds"]) == 2 for row in rows)


def test_a_product_that_would_take_minutes_is_made_smaller(monkeypatch):
    for seconds, side in ((1e-4, 2048), (1e-3, 1024), (0.02, 256), (10.0, 128)):
        monkeypatch.setattr("spec_harness.costs.timed", lambda work, device, seconds=seconds: Timed(None, seconds))
        assert affordable_side(2048, CPU, torch.float32) == side


def test_what_was_timed_to_choose_a_setting_does_not_hinder_resuming():
    assert lasting({"cpu_linear": "half", "cpu_linear_trial_ms": {"half": 1.0}}) == {"cpu_linear": "half"}
    assert lasting([{"a_ms": 1, "b": 2}]) == [{"b": 2}]
    assert lasting([1]) == [1] and lasting(None) is None
