"""Cut drafts of models whose layers differ by their place: each kept layer is what it was, or one line refuses the
cut."""

from __future__ import annotations

import copy

from spec_common import UserError

import pytest
import torch
import transformers as T
from torch import nn

import tiny
from spec_models.checks import Loaded, check_blocks
from spec_models.cut import language_layers
from spec_models.pairs import cut_draft, with_cut_head
from spec_models.vocab import cut_head

FOUR = {**tiny.BASE, "num_hidden_layers": 4}
EIGHTS = {"head_dim": 8}
MIXTURE = {**EIGHTS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DEEPSEEK = {"first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
DEEPSEEK |= {"moe_intermediate_size": 32, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8}
DEEPSEEK |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1, "num_key_value_heads": 4}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 4, "query_pre_attn_scalar": 8}
EYES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
BART = {"encoder_layers": 1, "decoder_layers": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4}


def gemma_with_eyes():
    eyes = {**EYES, "image_size": 28, "patch_size": 14}
    text = {**FOUR, **EIGHTS, **WINDOWS}
    return tiny.build(T.Gemma3Config(text_config=text, vision_config=eyes, mm_tokens_per_image=4))


BY_PLACE = {
    "no rotary positions in some": lambda: tiny.build(T.SmolLM3Config(**{**FOUR, "pad_token_id": 0}, no_rope_layers=[1, 1, 1, 0])),
    "a scale by number": lambda: tiny.gpt2(n_layer=4, scale_attn_by_inverse_layer_idx=True),
    "windows in some": lambda: tiny.build(T.Gemma3TextConfig(**FOUR, **EIGHTS, **WINDOWS)),
    "the first dense": lambda: tiny.build(T.DeepseekV3Config(**{**FOUR, **DEEPSEEK})),
    "some dense": lambda: tiny.build(T.Qwen3MoeConfig(**FOUR, **MIXTURE, mlp_only_layers=[0, 2])),
    "llama 4": lambda: tiny.build(
        T.Llama4TextConfig(**FOUR, **EIGHTS, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=64)
    ),
    "experts by layer": lambda: tiny.build(T.HunYuanMoEV1Config(**FOUR, **EIGHTS, num_experts=4, moe_topk=[1, 2, 2, 4])),
    "text beside eyes": gemma_with_eyes,
    "half an encoder-decoder": lambda: tiny.build(
        T.BartConfig(vocab_size=64, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.4, **BART)
    ),
    "distances for positions": lambda: tiny.build(T.BloomConfig(vocab_size=64, hidden_size=32, n_layer=4, n_head=4)),
}  # fmt: skip


def loaded(model) -> Loaded:
    return Loaded(model, tiny.words(), "tiny", "--target")


class Skipped(nn.Module):
    """In the place of a layer that the draft leaves out: gives back what it is given."""

    def __init__(self, layer, in_tuple: bool):
        super().__init__()
        self.in_tuple = in_tuple

    def forward(self, hidden_states, *_, **__):
        return (hidden_states, None) if self.in_tuple else hidden_states


def by_hand(model, wanted: list[int]):
    """The target itself, the other layers taken out of the way."""
    model = copy.deepcopy(model)
    _, layers = language_layers(model)
    for number, layer in enumerate(layers):
        if number not in wanted:
            layers[number] = Skipped(layer, isinstance(model, T.BloomForCausalLM))
    return model


@pytest.mark.parametrize("wanted", [[0, 3], [1], [1, 2]])
@pytest.mark.parametrize("name", BY_PLACE)
def test_a_kept_layer_computes_what_it_computed_in_the_target(name, wanted):
    target = BY_PLACE[name]()
    draft = cut_draft(loaded(target), "cut:" + ",".join(map(str, wanted)))
    ids = torch.tensor([tiny.PROMPT * 2])
    with torch.inference_mode():
        assert torch.equal(
            draft.model(ids, use_cache=False).logits, by_hand(target, wanted)(ids, use_cache=False).logits
        )
    check_blocks(draft)
    assert tiny.speculated(target, draft.model, n=12).tokens == tiny.greedy(target, tiny.PROMPT, 12)


def test_layers_may_come_twice_and_in_any_order():
    target = tiny.build(T.SmolLM3Config(**{**FOUR, "pad_token_id": 0}, no_rope_layers=[1, 1, 1, 0]))
    draft = cut_draft(loaded(target), "cut:3,0,3").model
    check_blocks(Loaded(draft, None, "cut", "--draft"))
    assert len({id(layer) for layer in draft.model.layers}) == 3
    assert [layer.self_attn.layer_idx for layer in draft.model.layers] == [0, 1, 2]
    assert [layer.self_attn.use_rope for layer in draft.model.layers] == [0, 1, 0]


def test_a_cut_leaves_the_target_as_it_was():
    target = tiny.build(T.Gemma3TextConfig(**FOUR, **EIGHTS, **WINDOWS))
    ids = torch.tensor([tiny.PROMPT * 2])
    before, config = target(ids).logits, copy.deepcopy(target.config.to_dict())
    cut_draft(loaded(target), "cut:1,3")
    assert torch.equal(target(ids).logits, before) and target.config.to_dict() == config
    assert [layer.self_attn.layer_idx for layer in target.model.layers] == [0, 1, 2, 3]
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in target.model.layers)


def test_linear_layers_are_shared_whole_so_that_they_are_packed_once():
    target = tiny.llama()
    draft = cut_draft(loaded(target), "cut:1").model
    assert draft.model.layers[0].mlp.up_proj is target.model.layers[1].mlp.up_proj


# ---------------------------------------------------------------------------------------------------------- or one line


@pytest.mark.parametrize("name", ["text beside eyes", "half an encoder-decoder"])
def test_a_layer_that_the_language_part_lacks_is_refused_by_its_number(name):
    with pytest.raises(UserError, match="--draft cut:9: the target has layers 0 to 3"):
        cut_draft(loaded(BY_PLACE[name]()), "cut:9")


def gemma_3n():
    """Its layers take inputs, and some their keys, by their number."""
    sizes = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "laurel_rank": 8}
    windows = {"layer_types": WINDOWS["layer_types"], "sliding_window": 4}
    return tiny.build(T.Gemma3nTextConfig(**FOUR, **EIGHTS, **sizes, **windows, num_kv_shared_layers=2))


class Numbered(nn.Module):
    """A layer that looks at its number as it runs."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.layer_idx = layer, layer.self_attn.layer_idx

    def forward(self, hidden_states, **options):
        return self.layer(hidden_states, **options) + self.layer_idx


def numbered():
    model = tiny.llama(num_hidden_layers=4)
    model.model.layers = nn.ModuleList([Numbered(layer) for layer in model.model.layers])
    return model


@pytest.mark.parametrize("make", [gemma_3n, numbered])
def test_an_architecture_whose_layers_cannot_leave_their_place_is_refused(make):
    with pytest.raises(UserError, match="--draft cut:3: this architecture cannot be cut.*; choose another draft"):
        cut_draft(loaded(make()), "cut:3")


def on_disk(tmp_path):
    """A Llama whose second layer and head accelerate keeps on the disk."""
    from accelerate import disk_offload

    model = tiny.llama()
    disk_offload(model.model.layers[1], str(tmp_path / "layer"))
    disk_offload(model.lm_head, str(tmp_path / "head"))
    return model


def test_layers_on_the_disk_cannot_be_cut(tmp_path):
    with pytest.raises(UserError, match="--draft cut:1: the target's layers are not all in memory"):
        cut_draft(loaded(on_disk(tmp_path)), "cut:1")


def test_a_head_on_the_disk_cannot_be_cut(tmp_path):
    target = loaded(tiny.llama())
    draft = Loaded(on_disk(tmp_path), target.tokenizer, "draft", "--draft", {"draft_vocab": 0})
    (tmp_path / "words.txt").write_text("w1 w2 w3")
    with pytest.raises(UserError, match="--draft-vocab: this draft's head is not in memory"):
        with_cut_head(target, draft, 16, tmp_path / "words.txt")
    with pytest.raises(UserError, match="not in memory"):
        cut_head(draft.model, [1, 2], 2, 64)
