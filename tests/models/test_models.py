"""Loading, pairing and the checks before any timing."""

from __future__ import annotations

import types

from spec_common import UserError, pick_device, pick_dtype

import pytest
import torch
import transformers as T

import tiny
from spec_models import load as loading
from spec_models.checks import Loaded, check_blocks, check_room, context_limit
from spec_models.load import load, load_random, placement
from spec_models.pairs import cut_draft
from spec_models.words import check_ids, check_same_tokenizer, end_ids, prompt_ids

CPU, F32 = torch.device("cpu"), torch.float32


def loaded(model, tokenizer=None, flag="--target", name="tiny") -> Loaded:
    return Loaded(model, tokenizer or tiny.words(), name, flag)


# ----------------------------------------------------------------------------------------------------------- cut drafts


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_draft_that_keeps_every_layer_is_the_target(name):
    target = tiny.model(name)
    layers = ",".join(map(str, range(target.config.num_hidden_layers)))
    draft = cut_draft(loaded(target), f"cut:{layers}").model
    ids = torch.tensor([tiny.PROMPT * 3])
    with torch.inference_mode():
        assert torch.equal(draft(ids).logits, target(ids).logits)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_draft_of_some_layers_shares_their_weights_and_is_exact(name):
    target = tiny.model(name)
    last = target.config.num_hidden_layers - 1
    draft = cut_draft(loaded(target), f"cut:{last}").model
    mine = {parameter.data_ptr() for parameter in target.parameters()}
    assert {parameter.data_ptr() for parameter in draft.parameters()} <= mine
    assert draft.num_parameters() < target.num_parameters()
    assert draft.get_output_embeddings() is target.get_output_embeddings()
    assert tiny.speculated(target, draft, n=20).tokens == list(tiny.greedy_once(target, tiny.PROMPT, 20))


def test_a_cut_draft_computes_the_layers_it_names():
    """The last layer alone: embedding, that layer, norm and head, by hand."""
    target = tiny.llama(num_hidden_layers=3)
    draft = cut_draft(loaded(target), "cut:0,2").model
    by_hand = tiny.llama(num_hidden_layers=2)
    state = {key: value for key, value in target.state_dict().items() if ".layers.1." not in key}
    by_hand.load_state_dict({key.replace(".layers.2.", ".layers.1."): value for key, value in state.items()})
    ids = torch.tensor([tiny.PROMPT])
    assert torch.equal(draft(ids).logits, by_hand(ids).logits)


@pytest.mark.parametrize(
    ("name", "words"),
    [("cut:", "write cut:"), ("cut:a", "write cut:"), ("cut:0,", "write cut:"), ("cut:0,9", "layers 0 to 1")],
)
def test_a_cut_that_cannot_be_made_says_why(name, words):
    with pytest.raises(UserError, match=f"--draft {name}: .*{words}"):
        cut_draft(loaded(tiny.llama()), name)


# --------------------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_model_that_verifies_blocks_is_accepted(name):
    check_blocks(loaded(tiny.model(name)))


MAMBA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "state_size": 8,
    "num_hidden_layers": 2,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
}
JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 2,
}
UNFIT = {
    "mamba": lambda: tiny.build(T.MambaConfig(**MAMBA)),
    "jamba": lambda: tiny.build(
        T.JambaConfig(**tiny.BASE, **JAMBA, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=4)
    ),
    "bert": lambda: tiny.build(
        T.BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            initializer_range=0.4,
        )
    ),
    "xlnet": lambda: tiny.build(
        T.XLNetConfig(vocab_size=64, d_model=32, n_layer=2, n_head=4, d_inner=64, initializer_range=0.4)
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_model_that_cannot_verify_blocks_is_refused(name):
    """State-space layers that cannot roll back, encoders that look ahead, a cache that is ignored."""
    with pytest.raises(UserError, match="--target tiny: this architecture cannot verify blocks"):
        check_blocks(loaded(UNFIT[name]()))


def test_the_decoder_half_of_an_encoder_decoder_is_causal_and_accepted():
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    bart = tiny.build(
        T.BartConfig(vocab_size=64, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.4, **sizes)
    )
    check_blocks(loaded(bart))
    assert tiny.speculated(bart, tiny.near(bart, 0.03), n=16).tokens == tiny.greedy(bart, tiny.PROMPT, 16)


def test_a_model_whose_logits_are_not_finite_is_refused():
    model = tiny.llama()
    model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(UserError, match="--draft tiny: logits are not finite in float32 on cpu; try --dtype"):
        check_blocks(loaded(model, flag="--draft"))


# ------------------------------------------------------------------------------------------------------------- contexts


def test_the_limit_of_a_context_is_where_its_frequencies_change():
    assert context_limit(tiny.llama()) == 256
    assert context_limit(tiny.gpt2(n_positions=32)) == 32
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    assert context_limit(tiny.llama(max_position_embeddings=16, rope_parameters=dynamic)) == 16
    stretched = {**dynamic, "original_max_position_embeddings": 16}
    assert context_limit(tiny.llama(max_position_embeddings=64, rope_parameters=stretched)) == 16
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    assert context_limit(tiny.llama(max_position_embeddings=64, rope_parameters=yarn)) == 64
    long = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    assert context_limit(tiny.llama(max_position_embeddings=64, rope_parameters=long)) == 16


def test_a_text_past_the_context_is_refused_naming_the_limit():
    check_room(loaded(tiny.llama(max_position_embeddings=16)), 8, 8, "--n-tokens")
    with pytest.raises(
        UserError, match="--target tiny: prompt of 8 . 9 new tokens is past its limit of 16; lower --n-tokens"
    ):
        check_room(loaded(tiny.llama(max_position_embeddings=16)), 8, 9, "--n-tokens")


# ----------------------------------------------------------------------------------------------------------- tokenizers


def test_a_pair_whose_ids_mean_other_words_is_refused_with_one_id_and_both_words():
    """Equal sizes and exact text: only acceptance would tell, so the meaning of ids is compared."""
    target, draft = loaded(tiny.llama()), loaded(tiny.llama(), tiny.words(reverse=True), "--draft", "other")
    with pytest.raises(
        UserError,
        match=r"--draft other does not share the tokenizer of --target tiny: id 4 is 'w59' to the draft and 'w0' to the target",
    ):
        check_same_tokenizer(target, draft)


def test_a_shift_by_one_special_token_is_refused():
    with pytest.raises(UserError, match="does not share the tokenizer"):
        check_same_tokenizer(loaded(tiny.llama()), loaded(tiny.llama(), tiny.words(first=5), "--draft"))


@pytest.mark.parametrize(("ours", "theirs"), [(176, 160), (160, 176)])
def test_tables_padded_to_other_sizes_are_accepted(ours, theirs):
    check_same_tokenizer(loaded(tiny.qwen2(vocab_size=ours)), loaded(tiny.qwen2(vocab_size=theirs), flag="--draft"))


def test_a_tokenizer_that_only_has_more_words_at_its_end_is_accepted():
    check_same_tokenizer(loaded(tiny.llama()), loaded(tiny.llama(), tiny.words(n=50), "--draft"))


def test_an_id_past_the_embedding_table_is_named_with_its_token():
    tokenizer = tiny.words()
    tokenizer.add_tokens(["<tool>"])
    with pytest.raises(
        UserError, match=r"--target tiny: id 64 \('<tool>'\) of the prompt is past its embedding table of 64 rows"
    ):
        prompt_ids(loaded(tiny.llama(), tokenizer), "w1 <tool>", False, CPU)
    check_ids(loaded(tiny.llama()), [63])


@pytest.mark.parametrize("text", ["", "  \n\t "])
def test_an_empty_prompt_is_refused(text):
    with pytest.raises(UserError, match="--prompt: empty"):
        prompt_ids(loaded(tiny.llama()), text, False, CPU)


def test_without_a_chat_template_the_prompt_is_used_as_it_is_and_that_is_said(capsys):
    ids = prompt_ids(loaded(tiny.llama()), "w1 w2", True, CPU)
    assert ids.tolist() == [[5, 6]]
    assert capsys.readouterr().err.count("no chat template") == 1


def with_bos(template=None):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.words()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.chat_template = template
    return tokenizer


def test_a_raw_prompt_begins_with_the_token_that_the_tokenizer_puts_there():
    for chat in (False, True):  # asked for, but there is no template: the prompt is raw all the same
        assert prompt_ids(loaded(tiny.llama(), with_bos()), "w1", chat, CPU).tolist() == [[1, 5]]


def test_a_chat_template_brings_its_own_special_tokens():
    template = "{% for m in messages %}<s> {{ m['content'] }} w9{% endfor %}"
    assert prompt_ids(loaded(tiny.llama(), with_bos(template)), "w1", True, CPU).tolist() == [[1, 5, 13]]


@pytest.mark.parametrize(("given", "expected"), [(None, []), (7, [7]), ([7, 9], [7, 9])])
def test_end_ids_are_the_generation_configs(given, expected):
    model = tiny.llama()
    model.generation_config.eos_token_id = given
    assert end_ids(loaded(model)) == frozenset(expected)


# ------------------------------------------------------------------------------------------------------ device, placement


def test_a_device_that_is_not_there_is_refused_naming_those_that_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="--device cuda: not on this machine; it has .*cpu"):
        pick_device("cuda")
    for name in ("gpu", "", "cuda:x", "meta"):
        with pytest.raises(UserError, match=f"--device {name}: unknown; choose auto"):
            pick_device(name)


def test_an_accelerator_that_is_there_is_picked_before_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("auto").type == "cuda"
    assert pick_device("cpu").type == "cpu"
    with pytest.raises(UserError, match="--device cuda:3: this machine has 1"):
        pick_device("cuda:3")


def test_auto_means_float32_on_a_cpu_where_nothing_is_excused():
    assert pick_dtype("auto", CPU) == torch.float32
    assert pick_dtype("auto", torch.device("mps")) == torch.float16
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("float16", CPU) == torch.float16


def free_memory(monkeypatch, ram: float, gpu: float = 0) -> None:
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=ram))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (gpu, gpu))


def test_a_model_too_big_for_one_gpu_is_spread_and_that_is_said(monkeypatch, capsys):
    free_memory(monkeypatch, ram=100e9, gpu=10e9)
    assert placement(int(5e9), torch.device("cuda"), "m", "--target") == {"device_map": "cuda"}
    assert placement(int(15e9), torch.device("cuda"), "m", "--target") == {"device_map": "auto"}
    assert "15.0 GB do not fit in 10.0 GB" in capsys.readouterr().err


def test_a_model_too_big_for_the_memory_is_refused_before_loading(monkeypatch, target_folder):
    free_memory(monkeypatch, ram=1000)
    monkeypatch.setattr(T.AutoModelForCausalLM, "from_pretrained", lambda *a, **b: pytest.fail("loaded all the same"))
    with pytest.raises(
        UserError, match="--target .*: needs .* GB and .* GB are free; choose a smaller model or --dtype float16"
    ):
        load(target_folder, "--target", CPU, F32)


# -------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_is_loaded_in_the_dtype_asked_for_and_identified_by_its_hash(target_folder, dtype):
    one = load(target_folder, "--target", CPU, dtype)
    assert one.model.dtype == dtype and not one.model.training
    assert len(one.about["sha256"]) == 64
    assert one.name == "target" and one.about["name"] == "target", "no folder of this machine in a result file"


def test_random_weights_have_the_shape_of_the_config_and_finite_logits(target_folder):
    for dtype in (torch.float32, torch.bfloat16):
        one = load_random(target_folder, "--model", CPU, dtype)
        assert one.model.num_parameters() == tiny.llama().num_parameters() and one.model.dtype == dtype
        assert one.tokenizer is None
        check_blocks(one)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"])
def test_the_shipped_shapes_have_the_published_sizes(name):
    published = {"qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-7b": 7_615_616_512}
    config = T.AutoConfig.from_pretrained(loading.SHIPPED_CONFIGS[name])
    with torch.device("meta"):
        model = T.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == published[name]


@pytest.fixture(scope="session")
def gguf_file(disk):
    """A tiny Llama as a GGUF file, with the tokenizer inside."""
    gguf = pytest.importorskip("gguf")
    path = disk / "tiny.gguf"
    model = tiny.llama(vocab_size=64, num_key_value_heads=4)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(64)
    writer.add_rope_dimension_count(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["!!", *(chr(33 + i) for i in range(63))])
    writer.add_token_merges(["! !"])
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
    }
    parts |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    parts |= {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    for key, value in model.state_dict().items():
        stem = key.removesuffix(".weight")
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            name = f"blk.{layer}.{parts[part]}"
        else:
            name = names[stem]
        writer.add_tensor(f"{name}.weight", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_a_plain_model(gguf_file):
    one = load(str(gguf_file), "--target", CPU, F32)
    assert not hasattr(one.model.config, "quantization_config")
    assert (one.name, len(one.about["sha256"])) == ("tiny.gguf", 64)
    check_blocks(one)
    assert tiny.speculated(one.model, tiny.near(one.model), n=12).tokens == tiny.greedy(one.model, tiny.PROMPT, 12)
