"""A head from shards: what it is taught stands in its own places, the command goes to a file and on from a checkpoint."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from test_make_draft import folder_of, letters
from transformers import AutoModelForCausalLM

import tiny
from draft_training import make_head
from draft_training.data import shard_of
from draft_training.make_head import eagle_agreement, eagle_states, with_features
from draft_training.shards import Shards
from draft_training.teacher import Teacher, continue_rows
from spec_models.eagle import build_eagle, new_eagle


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    model = tiny.tied(2, vocab_size=260, eos_token_id=257, max_position_embeddings=4096)
    return folder_of(tmp_path_factory.mktemp("target"), model, letters())


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    """A folder as data.py leaves it: a shard, and the texts that are held out."""
    folder, prompts = tmp_path_factory.mktemp("data"), [[5 + at, 6, 7, 9 + at] for at in range(24)]
    rows = continue_rows(Teacher(target, torch.float32), prompts, 24, [0] * 24, 257, torch.Generator().manual_seed(0))
    save_file(shard_of(rows, [len(prompt) for prompt in prompts], [0] * 24), folder / "shard-0.safetensors")
    held = [{"kind": kind, "prompt": [60 + at, 7, 8], "continuation": list(range(20, 30))} for at, kind in enumerate(("list", "chat"))]
    (folder / "held_out.json").write_text(json.dumps(held))
    return folder


def make(target, data, out, *more):
    return make_head.main(["--target", str(target), "--data", str(data), "--out", str(out), "--threads", "1", *more])


def test_the_command_goes_to_a_file_and_on_from_its_checkpoint(target, data, tmp_path, capsys):
    assert make(target, data, tmp_path, "--steps", "4", "--depths", "2", "--layers", "1") == 0
    first = json.loads(capsys.readouterr().out)
    assert first["finished"] and first["steps"] == 4 and {"list", "chat", "guess 1", "guess 2"} == set(first["agreement"])
    assert make(target, data, tmp_path, "--steps", "6", "--depths", "2", "--layers", "1", "--resume") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    model = AutoModelForCausalLM.from_pretrained(target)
    trained, untrained = build_eagle(tmp_path / "eagle.safetensors", model), new_eagle(model, [1])
    assert not torch.equal(trained.norm_feature, untrained.norm_feature), "it was trained"


@pytest.mark.parametrize(("words", "named"), [(["--layers", "2"], "--layers: the target has layers 0 to 1"), (["--depths", "0"], "--depths"), (["--guesses", "2"], "--guesses: ")])
def test_a_mistake_is_one_line(words, named, target, data, tmp_path, capsys):
    try:
        status = make(target, data, tmp_path / "out", *words)
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and named in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "out").exists()


def test_a_target_of_another_family_is_refused(data, tmp_path, capsys):
    other = folder_of(tmp_path / "other", tiny.qwen2(), letters())
    assert make(other, data, tmp_path / "out") == 2 and "a Llama with a tied head" in capsys.readouterr().err


def test_every_row_is_compared_with_the_feature_it_speaks_of(tmp_path):
    """With places written as features and best ids: at depth d, positions from d on, each beside its own row."""
    lengths, prompts = [7, 5], [2, 3]
    places = torch.cat([torch.arange(length) for length in lengths]).to(torch.int32)
    shard = {
        "ids": torch.arange(12, dtype=torch.int32),
        "hidden": places[:, None].expand(-1, 8).half().contiguous(),
        "top": places[:, None].expand(-1, 16).contiguous(),
        "lengths": torch.tensor(lengths),
        "prompt_lengths": torch.tensor(prompts),
        "kinds": torch.tensor([0, 0]),
    }
    save_file(shard, tmp_path / "shard-0.safetensors")
    shards, seen = Shards(tmp_path, 1.0), {}

    def unrolled(ids, features, depths):
        seen.update(ids=ids, features=features)
        rows = torch.arange(float(ids.shape[1]))[None, :, None].expand(len(ids), -1, 8)
        return [rows + 100 * depth for depth in range(depths)]

    states, hidden, top = eagle_states(SimpleNamespace(unrolled=unrolled), shards, shards.index, 3, None)
    wanted = [(depth, place) for depth in range(3) for length in lengths for place in range(depth, length)]
    assert states[:, 0].tolist() == [100 * depth + place for depth, place in wanted]
    assert hidden[:, 0].tolist() == top[:, 0].tolist() == [place for _, place in wanted]
    assert seen["features"][0, :, 0].tolist() == [0, 1, 2, 3, 4, 5, 6] and seen["features"][1, :, 0].tolist() == [0, 1, 2, 3, 4, 0, 0]


def test_held_out_agreement_counts_what_it_says_at_every_depth(target):
    """A text of which some tokens are what it says: the shares are those counted by hand."""
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    eagle, prompt, text = new_eagle(model, [1]).eval(), [5, 6, 7], []
    torch.nn.init.normal_(eagle.join.weight, std=0.1)

    def said(ids, depths):
        ids = torch.tensor([ids])
        states = eagle.unrolled(ids, model.model(ids, use_cache=False).last_hidden_state, depths)
        return [eagle.get_output_embeddings()(one)[0].argmax(-1).tolist() for one in states]

    with torch.inference_mode():
        for place in range(8):
            text.append(said([*prompt, *text], 1)[0][-1] if place % 2 else 30 + place)
        deep = said([*prompt, *text][:-1], 2)
    right = [[deep[depth][2 + at] == text[at] for at in range(depth, 8)] for depth in range(2)]
    table = eagle_agreement(eagle, with_features(model, [{"kind": "a", "prompt": prompt, "continuation": text}]), 2)
    assert table["a"] == table["guess 1"] == sum(right[0]) / 8 >= 0.5 and table["guess 2"] == sum(right[1]) / 7
