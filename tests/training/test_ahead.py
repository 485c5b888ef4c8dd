"""Medusa's heads from shards: each is taught what the target thought its own distance further on, the command goes to a file
and on from its checkpoint, the shares that a tree is chosen from are those counted by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from test_make_head import data, make, target  # noqa: F401 (fixtures)
from transformers import AutoModelForCausalLM

from draft_training.ahead import RANKS, medusa_agreement, medusa_states, rank_shares
from draft_training.make_head import with_features
from draft_training.shards import Shards
from spec_models.medusa import Medusa, build_medusa


def test_the_command_goes_to_a_file_and_on_from_its_checkpoint(target, data, tmp_path, capsys):  # noqa: F811
    words = ("--kind", "medusa", "--heads", "2", "--layers", "1")
    assert make(target, data, tmp_path, "--steps", "4", *words) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["finished"] and first["steps"] == 4 and first["heads"] == 2
    assert set(first["agreement"]) == {"list", "chat", "head 1", "head 2", "head 1, best 3", "head 2, best 3"}
    assert make(target, data, tmp_path, "--steps", "6", *words, "--resume") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 6
    heads = build_medusa(tmp_path / "medusa.safetensors", AutoModelForCausalLM.from_pretrained(target))
    assert heads.blocks.weight.abs().max() > 0, "it was trained"
    assert len(heads.ranks) == 2 and all(len(shares) == RANKS for shares in heads.ranks)


@pytest.mark.parametrize(
    ("words", "named"), [(["--grow", "x"], "--grow: Medusa's heads"), (["--heads", "0"], "--heads")]
)
def test_a_mistake_is_one_line(words, named, target, data, tmp_path, capsys):  # noqa: F811
    try:
        status = make(target, data, tmp_path / "out", "--kind", "medusa", "--layers", "1", *words)
    except SystemExit as stop:
        status = stop.code
    assert status == 2 and named in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "out").exists()


def test_every_head_is_compared_with_what_the_target_thought_its_distance_further_on(tmp_path):
    """With places written as features and best ids, 100 a text apart: head j's rows stand j + 1 before theirs, in their text."""
    lengths = [7, 5]
    places = torch.cat([torch.arange(length) + 100 * text for text, length in enumerate(lengths)]).to(torch.int32)
    shard = {
        "ids": torch.arange(12, dtype=torch.int32),
        "hidden": places[:, None].expand(-1, 8).half().contiguous(),
        "top": places[:, None].expand(-1, 16).contiguous(),
        "lengths": torch.tensor(lengths),
        "prompt_lengths": torch.tensor([2, 3]),
        "kinds": torch.tensor([0, 0]),
    }
    save_file(shard, tmp_path / "shard-0.safetensors")
    shards = Shards(tmp_path, 1.0)
    fake = SimpleNamespace(heads=3, head_states=lambda features, head: features + 1000 * head)
    states, hidden, top = medusa_states(fake, shards, shards.index, None)
    wanted = [
        (head, place + 100 * text)
        for head in range(3)
        for text, n in enumerate(lengths)
        for place in range(head + 1, n)
    ]
    assert states[:, 0].tolist() == [1000 * head + place - head - 1 for head, place in wanted]
    assert hidden[:, 0].tolist() == top[:, 0].tolist() == [place for _, place in wanted]


def test_held_out_shares_are_those_counted_by_hand(target):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    torch.manual_seed(0)
    medusa, prompt, text = Medusa(model, 2).eval(), [5, 6, 7], []
    torch.nn.init.normal_(medusa.blocks.weight, std=0.2)

    def best(ids, head):
        states = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1:]
        return medusa(states)[0, head].topk(RANKS).indices.tolist()

    counted = torch.zeros(2, RANKS)
    with torch.inference_mode():
        for place in range(9):
            known = [*prompt, *text]
            said = [best(known[: len(known) - head - 1], head) for head in range(2)]
            text.append(said[place % 2][place // 2] if place < 8 else 30)
            for head in range(2):
                counted[head] += torch.tensor([guess == text[-1] for guess in said[head]])
    rows = with_features(model, [{"kind": "a", "prompt": prompt, "continuation": text}])
    assert torch.tensor(rank_shares(medusa, rows)).allclose(counted / 9) and counted.sum() >= 8
    table = medusa_agreement(medusa, rows)
    assert table["a"] == table["head 1"] == pytest.approx(float(counted[0, 0]) / 9)
    assert table["head 2, best 3"] == pytest.approx(float(counted[1, :3].sum()) / 9)
