"""A shape measured at two depths and carried on: to the digit what the whole costs, where costs are counted."""

from __future__ import annotations

import json
import types

import spec_common
from spec_common import UserError

import pytest
import torch
import transformers as T

import spec_precondition
import tiny
from spec_loop import new_cache
from spec_models.depth import Depth, at_depth, depth_of, first_layers
from spec_models.fused import FusedLlama

SIZES = [1, 2, 4, 8]


@pytest.fixture
def ticks(monkeypatch):
    """A clock that stands still but for `spend`."""
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(spec_common, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(
        spec_precondition, "device_limits", lambda *_: {"read_bytes_per_s": 1e3, "operations_per_s": 1e4}
    )
    monkeypatch.setattr(
        spec_precondition, "linear_seconds", lambda model, n, tries: [3.0 * len(model.model.layers) + n]
    )
    return spend


def counted(layers: int, spend):
    """A model of `layers` layers: each takes 5 and 0.5 a token, the head 7 and 1 a token."""
    model = tiny.llama(num_hidden_layers=layers)
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, __, out: spend(5 + 0.5 * out.shape[1]))
    model.lm_head.register_forward_hook(lambda _, __, out: spend(7 + out.shape[1]))
    return model


@pytest.mark.parametrize("part", [1, 2, 3])
def test_what_is_carried_on_is_what_the_whole_costs(part, ticks):
    whole, args = counted(9, ticks), tiny.turns(3, tokens=SIZES, context=6)
    draft = counted(1, ticks)
    rows, summary = spec_precondition.run(args, whole, draft, {})
    twice = first_layers(whole, 2 * part)
    found, told = spec_precondition.run(args, twice, draft, {"part": first_layers(twice, part)}, Depth(part, 9))
    assert [row["pass_ms"] for row in rows] == [1000 * (9 * (5 + 0.5 * n) + 7 + n) for n in SIZES], "the clock counts"
    for mine, theirs in zip(found, rows, strict=True):
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value), name
        assert mine["part_seconds"] == [part * (5 + 0.5 * mine["tokens"]) + 7 + mine["tokens"]] * 3
        assert mine["carried_on"] == f"carried on from {part} and {2 * part} layers to 9"
    for name, value in summary.items():
        assert told[name] == pytest.approx(value), name


def test_the_first_layers_compute_what_a_model_of_them_does():
    model = tiny.llama(num_hidden_layers=6)
    small = tiny.llama(num_hidden_layers=2)
    small.load_state_dict(model.state_dict(), strict=False)
    expected = tiny.fed(small, torch.tensor([tiny.PROMPT]), new_cache(small), 6)
    for one in (first_layers(model, 2), first_layers(FusedLlama(model).eval(), 2)):
        torch.testing.assert_close(
            tiny.fed(one, torch.tensor([tiny.PROMPT]), new_cache(one), 6), expected, rtol=1e-4, atol=1e-4
        )


def test_a_config_is_cut_with_all_that_it_says_by_layer():
    config = T.Qwen2Config(**{**tiny.BASE, "num_hidden_layers": 6})
    cut = at_depth(config, 4)
    assert (cut.num_hidden_layers, len(cut.layer_types)) == (4, 4)
    assert (config.num_hidden_layers, len(config.layer_types)) == (6, 6)


@pytest.mark.parametrize("part", [3, 4, 100])
def test_a_part_that_is_no_part_is_refused(part):
    config = T.LlamaConfig(**{**tiny.BASE, "num_hidden_layers": 6})
    assert depth_of(config, 2, "m", "--model") == Depth(2, 6)
    with pytest.raises(UserError, match=f"--layers {part}: --model m has 6 layers"):
        depth_of(config, part, "m", "--model")


def test_layers_that_are_not_alike_are_refused():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
    config = T.Qwen3MoeConfig(**{**tiny.BASE, "num_hidden_layers": 6}, **sizes, mlp_only_layers=[2])
    with pytest.raises(UserError, match="--layers 2: the layers of --model m are not alike"):
        depth_of(config, 2, "m", "--model")


def test_disturbed_turns_are_left_out_for_all_and_if_none_is_left_it_is_one_line():
    depth, draft = Depth(2, 28), {"draft": [0.1, 0.2]}
    found = spec_precondition.carried_seconds({1: [1.0, 1.0], ("part", 1): [0.9, 1.5], **draft}, depth)
    assert found == {1: [pytest.approx(0.9 + 13 * 0.1)], "draft": [0.1]}
    with pytest.raises(UserError, match="--layers 2: in every turn a pass took no longer"):
        spec_precondition.carried_seconds({1: [1.0, 1.0], ("part", 1): [1.5, 1.5], **draft}, depth)


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--random-weights", "--vs-plain"],
        ["--random-weights", "--compare-passes"],
        ["--random-weights", "--pass", "graph"],
    ],
)
def test_what_does_not_go_with_layers_is_one_line(more, target_folder, results, capfd):
    argv = ["--device", "cpu", "--model", target_folder, "--layers", "1", "--results", str(results)]
    assert spec_precondition.main([*argv, *more]) == 2
    assert capfd.readouterr().err.strip().splitlines()[-1].startswith("error: --layers: ")
    for value in ("0", "-1", "x"):
        with pytest.raises(SystemExit) as left:
            spec_precondition.main(["--random-weights", "--layers", value])
        assert left.value.code == 2


def test_the_table_and_the_file_say_that_they_are_carried_on(tmp_path, results, monkeypatch, capsys):
    monkeypatch.setattr("spec_harness.costs.READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr("spec_harness.costs.SQUARE", {"cpu": 64})
    folder = tiny.save(tiny.llama(num_hidden_layers=40), tmp_path / "deep")
    argv = ["--device", "cpu", "--model", folder, "--random-weights", "--layers"]
    argv += ["8", "--tokens", "1,2", "--context", "8"]
    assert spec_precondition.main([*argv, "--repeats", "3", "--results", str(results)]) == 0
    words = "carried on from 8 and 16 layers to 40"
    assert f"context 8, {words}" in capsys.readouterr().out
    document = json.loads(results.read_text())
    assert document["summary"]["carried_on"] == words and {row["carried_on"] for row in document["rows"]} == {words}
    about = document["config"]["target"]
    assert (about["layers"], about["layers_measured"]) == (40, [8, 16])
