"""The real try before any timing: what is refused says its own reason, and what works is not refused for a flag."""

from __future__ import annotations

from spec_common import UserError

import pytest
import torch
import transformers as T
from test_models import UNFIT

import tiny
from spec_models.checks import Loaded, check_blocks, check_room, context_limit

QWEN_NEXT = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GRANITE = {"num_local_experts": 0, "shared_intermediate_size": 64, "mamba_n_heads": 4, "mamba_expand": 2}
JAMBA = {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4}
WHISPER = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
WHISPER |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def loaded(model, flag="--target") -> Loaded:
    return Loaded(model, tiny.words(), "tiny", flag)


def mpt(**changes):
    return tiny.build(T.MptConfig(**{"vocab_size": 64, "d_model": 32, "n_heads": 4, "n_layers": 2, **changes}))


def whisper(limit: int):
    sizes = {"vocab_size": 64, "d_model": 32, "max_target_positions": limit, "init_std": 0.4, **WHISPER}
    return tiny.build(T.WhisperConfig(**sizes))


# ------------------------------------------------------------------------------------------------------------- its limit


@pytest.mark.parametrize(
    ("make", "limit"),
    [(lambda: mpt(max_seq_len=24), 24), (lambda: whisper(16), 16), (lambda: tiny.gpt2(n_positions=8), 8)],
)
def test_a_limit_is_known_by_whatever_name_the_config_gives_it(make, limit):
    model = make()
    assert context_limit(model) == limit
    with pytest.raises(
        UserError, match=f"--target tiny: prompt of {limit} . 1 new tokens is past its limit of {limit}"
    ):
        check_room(loaded(model), limit, 1, "--n-tokens")


def test_a_length_below_one_is_no_limit():
    """XLNet's config says -1: it has none."""
    assert context_limit(UNFIT["xlnet"]()) is None


@pytest.mark.parametrize("make", [lambda: tiny.gpt2(n_positions=8), lambda: mpt(max_seq_len=8), lambda: whisper(4)])
def test_a_model_of_few_positions_is_tried_within_them(make):
    check_blocks(loaded(make()))


# ------------------------------------------------------------------------------------------------- what works is accepted

ALL_ATTENTION = {
    "granite hybrid": lambda: tiny.build(
        T.GraniteMoeHybridConfig(**tiny.BASE, **GRANITE, layer_types=["attention", "attention"])
    ),
    "qwen3 next": lambda: tiny.build(
        T.Qwen3NextConfig(
            **tiny.BASE,
            **QWEN_NEXT,
            shared_expert_intermediate_size=32,
            layer_types=["full_attention", "full_attention"],
        )
    ),
    "jamba": lambda: tiny.build(T.JambaConfig(**tiny.BASE, **JAMBA, attn_layer_period=1, attn_layer_offset=0)),
}


@pytest.mark.parametrize("name", ALL_ATTENTION)
def test_a_hybrid_whose_layers_are_all_attention_is_accepted_and_exact(name):
    model = ALL_ATTENTION[name]()
    check_blocks(loaded(model))
    assert tiny.speculated(model, tiny.near(model, 0.03), n=20).tokens == tiny.greedy(model, tiny.PROMPT, 20)


# ---------------------------------------------------------------------------------------------------- the reason is its own


class Neighbours(torch.nn.Module):
    """A head whose logits lean on the mean of all rows of the pass, as scales taken over a block do."""

    def __init__(self, head):
        super().__init__()
        self.head, self.weight = head, head.weight

    def forward(self, x):
        logits = self.head(x)
        return logits + 2 * logits.mean(-2, keepdim=True)


def leaning():
    model = tiny.llama()
    model.lm_head = Neighbours(model.lm_head)
    return model


def broken():
    model = tiny.llama()
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(63, 32)
    return model


def without_memory():
    with torch.device("meta"):
        return T.AutoModelForCausalLM.from_config(T.LlamaConfig(**tiny.BASE))


def with_its_own_cache():
    layers = ["linear_attention", "full_attention"]
    return tiny.build(T.MiniMaxConfig(**tiny.BASE, layer_types=layers, num_local_experts=4, block_size=4))


def forgetful():
    """A model that keeps its cache but does not look at it."""
    model = tiny.llama()
    forward = model.forward

    def blind(ids, past_key_values=None, logits_to_keep=0, **options):
        forward(ids, past_key_values=past_key_values, **options)
        return forward(ids, logits_to_keep=logits_to_keep)

    model.forward = blind
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (leaning, "logits that depend on those after it"),
        (UNFIT["bert"], "logits that depend on those after it"),
        (broken, "a pass over 10 tokens fails .RuntimeError: mat1 and mat2"),
        (without_memory, "its weights are not in memory"),
        (with_its_own_cache, "takes no cache of ours .*MiniMax uses cache of its own"),
        (forgetful, "ignores its cache in a block"),
        (UNFIT["mamba"], "takes no cache of ours"),
    ],
)
def test_what_fails_in_the_try_is_told_by_its_own_reason(make, reason):
    with pytest.raises(UserError, match=f"--draft tiny: .*{reason}"):
        check_blocks(loaded(make(), "--draft"))


def test_a_cache_that_comes_back_wrong_is_told_as_that(monkeypatch):
    def careless(cache, length):
        surplus = cache.get_seq_length() - length
        if surplus > 0:
            cache.crop(-surplus)
            for layer in cache.layers:
                layer.keys = layer.keys + 1

    monkeypatch.setattr("spec_models.checks.keep_slots", careless)
    with pytest.raises(UserError, match="cannot roll back its cache"):
        check_blocks(loaded(tiny.llama()))
