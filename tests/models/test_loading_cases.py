"""A checkpoint is what its config says, whole and nothing else, or one line says what is wrong with it."""

from __future__ import annotations

import json

from spec_common import UserError

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file

import tiny
from spec_models import load as loading
from spec_models.load import load, load_random

CPU, F32 = torch.device("cpu"), torch.float32


@pytest.fixture
def folder(tmp_path):
    """Makes a folder of a tiny Llama whose config or weights are then changed."""

    def make(model=None, weights=None, **config):
        path = tmp_path / "tiny"
        tiny.save(model or tiny.llama(), path)
        settings = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**settings, **config}))
        if weights:
            save_file(weights(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"})
        return path

    return make


def refused(path, *words: str, flag: str = "--target") -> str:
    with pytest.raises(UserError) as error:
        load(str(path), flag, CPU, F32)
    assert str(error.value).startswith(f"{flag} {path}: "), error.value
    for word in words:
        assert word in str(error.value), error.value
    return str(error.value)


# ------------------------------------------------------------------------------------------------ every tensor, no other


def eight_bit(weights: dict) -> dict:
    name = "model.layers.0.self_attn.q_proj.weight"
    return {**weights, name: (weights[name] * 50).to(torch.int8), f"{name}_scale": torch.ones(32, 1)}


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "mystery"}}])
def test_weights_of_a_format_that_nobody_unpacks_are_refused(config, folder):
    """transformers casts the 8-bit numbers to float and drops their scales: another model, and no word of it."""
    refused(folder(weights=eight_bit, **config), "1 weights", "model.layers.0.self_attn.q_proj.weight_scale")


@pytest.mark.parametrize("config", [{}, {"quantization_config": {"quant_method": "mystery"}}])
def test_weights_of_whole_numbers_without_a_scale_are_refused(config, folder):
    def whole(weights):
        return {name: value for name, value in eight_bit(weights).items() if not name.endswith("_scale")}

    refused(folder(weights=whole, **config), "model.layers.0.self_attn.q_proj.weight is stored as I8")


def test_layers_that_the_config_leaves_out_are_refused(folder):
    refused(folder(num_hidden_layers=1), "9 weights", "model.layers.1.")


def test_biases_that_the_config_leaves_out_are_refused(folder):
    refused(folder(tiny.llama(attention_bias=True), attention_bias=False), "8 weights", "k_proj.bias")


@pytest.mark.parametrize(
    "key", ["model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.layers.0.mlp.gate_proj.weight", "model.layers.2.x"]
)
def test_leftovers_that_no_model_needs_are_taken(key, folder):
    """Old buffers, and layers that predict further ahead where the config declares one (GLM, DeepSeek)."""
    path = folder(weights=lambda weights: {**weights, key: torch.ones(4)}, num_nextn_predict_layers=1)
    model = load(str(path), "--target", CPU, F32).model
    ids = torch.tensor([tiny.PROMPT])
    assert torch.equal(model(ids).logits, tiny.llama()(ids).logits)


def test_a_draft_head_of_another_engine_is_called_that(folder):
    def eagle(weights):
        kept = {name: value for name, value in weights.items() if "layers.0" in name}
        return {**kept, "fc.weight": torch.ones(32, 64)}

    refused(folder(weights=eagle), "incomplete", "fc.weight", "draft head for another engine", flag="--draft")


# --------------------------------------------------------------------------------------------------------------- GGUF


def gguf(path, skip=(), parts: int = 0, extra=None) -> str:
    """A tiny Llama with its tokenizer as a GGUF file, without the tensors named in `skip`."""
    writer = pytest.importorskip("gguf").GGUFWriter(str(path), "llama")
    for add, value in (
        (writer.add_context_length, 256),
        (writer.add_embedding_length, 32),
        (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 64),
        (writer.add_head_count, 4),
        (writer.add_head_count_kv, 4),
        (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_vocab_size, 64),
        (writer.add_rope_dimension_count, 8),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_token_list, ["!!", *(chr(33 + i) for i in range(63))]),
        (writer.add_token_merges, ["! !"]),
    ):
        add(value)
    if parts:
        writer.add_uint16("split.count", parts)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    names |= {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for key, value in tiny.llama(num_key_value_heads=4).state_dict().items():
        stem = key.removesuffix(".weight")
        layer = stem.split(".")[2] if stem.startswith("model.layers.") else None
        name = f"blk.{layer}.{names[stem.split('.', 3)[3]]}.weight" if layer else f"{names[stem]}.weight"
        if name not in skip:
            writer.add_tensor(name, value.numpy())
    if extra:
        writer.add_tensor(extra, torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_a_gguf_file_without_some_tensors_is_refused(tmp_path):
    """transformers fills them in at random, on each load anew."""
    path = gguf(tmp_path / "m.gguf", skip=("blk.1.ffn_up.weight", "blk.1.attn_q.weight"))
    for flag in ("--target", "--draft"):
        refused(path, "incomplete, 2 weights", "model.layers.1.mlp.up_proj.weight", flag=flag)


def test_a_gguf_file_that_is_one_of_several_parts_is_refused(tmp_path):
    refused(gguf(tmp_path / "m.gguf", parts=3), "one of 3 parts", "merge")


def test_a_gguf_file_with_a_tensor_that_the_model_has_no_place_for_is_refused(tmp_path):
    refused(gguf(tmp_path / "m.gguf", extra="rope_freqs.weight"), "1 weights", "rope_freqs.weight", "leave them out")


def test_a_gguf_file_whose_head_is_its_embedding_is_whole(tmp_path):
    model = load(gguf(tmp_path / "m.gguf", skip=("output.weight",)), "--target", CPU, F32).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("share", [0.02, 0.5, 0.95])
def test_a_gguf_file_that_is_cut_short_is_refused(share, tmp_path):
    path = tmp_path / "m.gguf"
    gguf(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    refused(path, "no whole .gguf file")


# ------------------------------------------------------------------------------------------- the tensor or the field named


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"vocab_size": 32}, ["lm_head.weight is [64, 32] in the weights and [32, 32] by config.json"]),
        ({"num_key_value_heads": 3}, ["k_proj.weight is [16, 32]", "[24, 32]"]),
        ({"num_attention_heads": 3}, ["hidden size (32)", "attention heads (3)"]),
        ({"num_attention_heads": 0}, ["num_attention_heads = 0"]),
        ({"num_hidden_layers": -1}, ["num_hidden_layers = -1"]),
        ({"max_position_embeddings": -1}, ["max_position_embeddings = -1"]),
        ({"hidden_size": 0}, ["hidden_size = 0"]),
        ({"hidden_size": "32"}, ["'hidden_size'", "expected int, got str"]),
        ({"pad_token_id": 99}, ["pad_token_id", "vocab_size"]),
        ({"hidden_act": "nope"}, ["'nope'", "transformers"]),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_its_field_or_tensor(config, words, folder):
    assert "For details look" not in refused(folder(**config), *words)


def test_a_field_is_named_as_the_config_spells_it(folder):
    refused(folder(tiny.gpt2(), n_positions=-1), "n_positions = -1")


def test_a_model_without_a_tokenizer_is_told_what_is_missing(tmp_path):
    tiny.llama().save_pretrained(tmp_path / "tiny")
    refused(tmp_path / "tiny", "tokenizer cannot be loaded", "tokenizer.json")


def test_a_broken_tokenizer_is_called_the_tokenizer(folder):
    path = folder()
    (path / "tokenizer.json").write_text("{")
    refused(path, "tokenizer cannot be loaded")


# --------------------------------------------------------------------------------------------------- generation settings


def test_a_damaged_generation_config_is_refused(folder):
    path = folder()
    (path / "generation_config.json").write_text('{"eos_token_id": 2')
    refused(path, "generation_config.json cannot be read")


def test_a_checkpoint_that_samples_is_recorded_and_said_once(folder, capsys):
    path = folder()
    (path / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "top_k": 20, "repetition_penalty": 1.3})
    )
    both = [load(str(path), "--target", CPU, F32) for _ in range(2)]
    assert both[0].about["generation_config_overridden"] == {"do_sample": True, "top_k": 20, "repetition_penalty": 1.3}
    said = capsys.readouterr().err
    assert said.count("generation config") == 1
    assert "top_k = 20" in said and "repetition_penalty = 1.3" in said


def test_a_checkpoint_that_asks_for_nothing_is_no_remark(folder, capsys):
    assert load(str(folder()), "--target", CPU, F32).about["generation_config_overridden"] == {}
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------------------------------------------- names without folders


def test_no_folder_of_this_machine_names_a_model(folder, monkeypatch):
    path = folder()
    monkeypatch.chdir(path)
    for name in (str(path), f"{path}/", ".", f"../{path.name}"):
        for one in (load(name, "--model", CPU, F32), load_random(name, "--model", CPU, F32)):
            assert one.name == one.about["name"] == "tiny", name


def test_a_shape_that_ships_keeps_the_name_it_was_asked_by(monkeypatch):
    monkeypatch.setattr(loading, "random_model", lambda *a: tiny.llama())
    assert load_random("Qwen/Qwen2.5-0.5B-Instruct", "--model", CPU, F32).name == "Qwen/Qwen2.5-0.5B-Instruct"
    assert load_random("/nowhere/qwen2.5-0.5b", "--model", CPU, F32).name == "qwen2.5-0.5b"


def test_a_head_that_lies_beside_a_tied_one_is_used(folder):
    """tie_word_embeddings in the config, yet another head in the weights: the weights are the model."""
    model = load(str(folder(tie_word_embeddings=True)), "--target", CPU, F32).model
    ids = torch.tensor([tiny.PROMPT])
    assert torch.equal(model(ids).logits, tiny.llama()(ids).logits)
    assert isinstance(model, T.LlamaForCausalLM)
