"""The draft file: small, exact where it says so, and a plain folder once unpacked."""

import copy
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, DynamicCache

import tiny
from draft_training.parallel import add_mask, guess
from draft_training.train import trainable
from spec_models.files import build_draft, fingerprint, pack_rows, read_draft, same_target, save_draft, unpack_draft


@pytest.fixture(scope="module")
def target():
    return tiny.tied(5)


@pytest.fixture()
def saved(target, tmp_path):
    draft = trainable(target, [0, 4]).eval()
    path = tmp_path / "draft.safetensors"
    save_draft(path, draft, target, [0, 4], {"steps": 0})
    return draft, path


def test_file_holds_only_what_was_trained(saved):
    with safe_open(saved[1], "pt") as file:
        names = list(file.keys())
        assert not [name for name in names if "embed_tokens" in name or "lm_head" in name]
        assert file.get_tensor("model.layers.0.mlp.up_proj.weight").dtype == torch.int8
    assert "model.norm.weight" in names
    assert not list(saved[1].parent.glob("*.part"))


def test_metadata_names_layers_target_and_card(saved, target):
    _, metadata = read_draft(saved[1])
    assert metadata["layers"] == [0, 4] and metadata["card"] == {"steps": 0}
    assert same_target(metadata["target"], target) and same_target(
        fingerprint(target), copy.deepcopy(target).bfloat16()
    )
    assert metadata["config"]["num_hidden_layers"] == 2


def test_rows_come_back_within_half_a_step():
    matrix = torch.randn(7, 33) * torch.logspace(-3, 2, 7)[:, None]
    packed, scales = pack_rows(matrix)
    # half a step of rounding, and the float16 scale's own 2^-11 at up to 127 steps
    assert ((packed.float() * scales.float() - matrix).abs() <= scales.float() * (0.5 + 127 * 2**-11)).all()


def test_zero_row_stays_zero():
    packed, scales = pack_rows(torch.zeros(2, 8))
    assert torch.isfinite(scales).all() and not (packed.float() * scales.float()).any()


def test_unpacked_folder_is_a_plain_model(saved, target, tmp_path):
    draft, path = saved
    folder = unpack_draft(path, target, None, tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(97, (4, 20), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        ours, loaded, built = draft(ids).logits, model(ids).logits, build_draft(path, target)(ids).logits
    assert torch.equal(loaded, built)
    assert (ours.argmax(-1) == loaded.argmax(-1)).float().mean() > 0.9
    assert torch.equal(model.lm_head.weight, target.lm_head.weight)


def test_unpacking_twice_keeps_the_first_folder(saved, target, tmp_path):
    folder = unpack_draft(saved[1], target, None, tmp_path / "plain")
    before = (folder / "config.json").stat().st_mtime_ns
    assert unpack_draft(saved[1], target, None, tmp_path / "plain") == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    assert not list(tmp_path.glob("*.part"))


def test_unpacking_clears_what_killed_processes_left_and_nothing_of_living_ones(saved, target, tmp_path):
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    dead, alive = (tmp_path / f"plain.{number}.part" for number in (killed.pid, os.getppid()))
    for folder in (dead, alive):
        folder.mkdir()
    unpack_draft(saved[1], target, None, tmp_path / "plain")
    assert (dead.exists(), alive.exists()) == (False, True)


def test_another_target_is_refused(saved):
    other = tiny.tied(1, seed=4, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="another target"):
        build_draft(saved[1], other)


def test_cut_of_all_layers_is_the_target(target):
    ids = torch.arange(30)[None] % 97
    with torch.inference_mode():
        assert torch.equal(trainable(target, range(5)).eval()(ids).logits, target(ids).logits)


def test_a_mask_is_kept_to_the_bit_and_becomes_the_embedding_of_a_spare_token(target, tmp_path):
    draft = trainable(target, [0, 4]).eval()
    add_mask(draft)
    with torch.no_grad():
        draft.mask.normal_()
    save_draft(tmp_path / "draft.safetensors", draft, target, [0, 4], {})
    built = build_draft(tmp_path / "draft.safetensors", target)
    assert torch.equal(built.mask, draft.mask)
    tokens = SimpleNamespace(
        all_special_ids=[1],
        bos_token_id=None,
        eos_token_id=94,
        pad_token_id=0,
        added_tokens_decoder={1: "", 93: "", 94: ""},
    )
    tokens.save_pretrained = lambda folder: None
    model = AutoModelForCausalLM.from_pretrained(
        unpack_draft(tmp_path / "draft.safetensors", target, tokens, tmp_path / "plain"), dtype=torch.float32
    )
    assert (model.config.pard_token, model.config.spd_type) == (93, "pard")
    assert torch.equal(model.model.embed_tokens.weight[93], draft.mask)
    assert torch.equal(model.lm_head.weight, target.lm_head.weight)
    with torch.inference_mode():
        spelled = model(torch.tensor([[5, 6, 7, 93, 93]]), logits_to_keep=3).logits[0]
        torch.testing.assert_close(spelled, guess(built, built.mask, [5, 6, 7], 3, DynamicCache()))
