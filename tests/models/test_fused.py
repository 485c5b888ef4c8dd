"""A fused draft computes what the plain model computes, however the text is split, and leaves the model it came from alone."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import transformers as T
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tiny
from spec_loop import LOOPS, forward, new_cache, rollback
from spec_models import linear as cpu_linear
from spec_models.checks import Loaded, check_blocks, context_limit
from spec_models.fused import FIRST_ROOM, FusedCache, FusedLlama, supported
from spec_models.linear import KINDS, pass_weights, works

PACKED = [kind for kind in KINDS if works(kind)]
LENGTH = 600  # past the first room (256) and past the doubled one (512)
TEXT = torch.randint(0, 64, (1, LENGTH), generator=torch.Generator().manual_seed(5))
NEAR = {
    torch.float32: 1e-3,
    torch.float64: 1e-4,
}  # of the logits' spread; transformers' norm is float32 even in a float64 model
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
LLAMA3 = {
    **LINEAR,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": lambda: tiny.llama(),
    "tied": lambda: tiny.llama(tie_word_embeddings=True),
    "one key head": lambda: tiny.llama(num_key_value_heads=1),
    "no shared key heads": lambda: tiny.llama(num_key_value_heads=4),
    "wide heads": lambda: tiny.llama(head_dim=16),
    "biases": lambda: tiny.llama(attention_bias=True, mlp_bias=True),
    "another activation and eps": lambda: tiny.llama(hidden_act="gelu", rms_norm_eps=0.3),
    "linear rope": lambda: tiny.llama(rope_parameters=LINEAR),
    "llama3 rope": lambda: tiny.llama(rope_parameters=LLAMA3),
    "yarn rope": lambda: tiny.llama(
        rope_parameters={**LINEAR, "rope_type": "yarn", "original_max_position_embeddings": 64}
    ),
    "qwen2": lambda: tiny.qwen2(),
    "qwen2, tied": lambda: tiny.qwen2(tie_word_embeddings=True, head_dim=16),
}


@functools.cache
@torch.no_grad()
def made(name: str, dtype: torch.dtype = torch.float32):
    """The plain model, its fused form, and the plain logits of every row of TEXT. Biases and norms come as zeros and ones
    from the initialisation, which would hide one that is left out or taken for another."""
    model = MODELS[name]()
    torch.manual_seed(7)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.4 * torch.randn_like(parameter))
    model = model.to(dtype)
    return model, FusedLlama(model).eval(), model(TEXT, use_cache=False).logits[0]


def assert_near(rows: torch.Tensor, whole: torch.Tensor) -> None:
    assert rows.shape == whole.shape and rows.dtype == whole.dtype
    assert (rows - whole).abs().max() <= NEAR[whole.dtype] * whole.std()


# ---------------------------------------------------------------------------------------------------------- the logits


@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_prefill_steps_and_blocks_give_the_plain_logits_past_every_room(name, dtype):
    """The cache and the table of turns both grow at 256 and at 512: by a step, inside a block, and all at once."""
    _, fused, whole = made(name, dtype)
    for ends in ((40, 41, 42, 50, 255, 256, 257, 258, 300, 511, 514, LENGTH), (1, 250, 262, LENGTH), (LENGTH,)):
        cache, start = new_cache(fused), 0
        for end in ends:
            assert_near(forward(fused, TEXT[:, :end], cache, end - start)[0], whole[start:end])
            start = end
            assert cache.get_seq_length() == end


steps = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 3), st.integers(0, 20)), min_size=1, max_size=9)


@given(name=st.sampled_from(sorted(MODELS)), dtype=st.sampled_from(list(NEAR)), steps=steps)
def test_any_split_with_wrong_guesses_taken_back_gives_the_plain_logits(name, dtype, steps):
    """Each step feeds some of the text, looks at its last rows, feeds other ids, and forgets those again."""
    _, fused, whole = made(name, dtype)
    cache, length = new_cache(fused), 0
    for count, keep, wrong in steps:
        keep, length = min(keep, count), length + count
        assert_near(forward(fused, TEXT[:, :length], cache, keep)[0], whole[length - keep : length])
        if wrong:
            forward(fused, torch.cat([TEXT[:, :length], 63 - TEXT[:, :wrong]], dim=1), cache, 1)
        rollback(cache, length)
        assert cache.get_seq_length() == length


def test_logits_to_keep_of_zero_means_every_row():
    _, fused, whole = made("llama")
    with torch.inference_mode():
        assert_near(fused(TEXT[:, :9], past_key_values=new_cache(fused)).logits[0], whole[:9])


def test_two_caches_of_one_model_know_nothing_of_each_other():
    _, fused, whole = made("qwen2")
    one, other = new_cache(fused), new_cache(fused)
    forward(fused, TEXT[:, :20], one, 1)
    forward(fused, 63 - TEXT[:, :30], other, 1)
    assert_near(forward(fused, TEXT[:, :24], one, 4)[0], whole[20:24])


def test_keys_stay_where_they_are_until_the_room_is_full():
    """What the fusing is for: a pass copies no cache. Room is reserved once, then doubled."""
    _, fused, _ = made("llama")
    cache, places = new_cache(fused), []
    assert isinstance(cache, FusedCache) and cache.get_seq_length() == 0
    for end in (3, 4, FIRST_ROOM, FIRST_ROOM + 1, FIRST_ROOM + 40):
        forward(fused, TEXT[:, :end], cache, 1)
        places.append((cache.keys[0].shape[1], cache.keys[0].data_ptr()))
    assert [room for room, _ in places] == [FIRST_ROOM] * 3 + [2 * FIRST_ROOM] * 2
    assert len(set(places)) == 2


# ----------------------------------------------------------------------------------------------------- what can be fused


def mixed_devices():
    model = tiny.llama()
    model.lm_head = model.lm_head.to("meta")
    return model


class Subclass(T.LlamaForCausalLM):
    pass


LONG = {
    **LINEAR,
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 16,
}
UNFIT = {
    "qwen2, sliding windows": lambda: tiny.qwen2(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "dynamic rope": lambda: tiny.llama(rope_parameters={**LINEAR, "rope_type": "dynamic"}),
    "longrope": lambda: tiny.llama(rope_parameters=LONG),
    "two devices": mixed_devices,
    "a subclass, which may compute anything": lambda: Subclass(T.LlamaConfig(**tiny.BASE)),
    **{name: make for name, make in tiny.ARCHITECTURES.items() if name not in ("llama", "qwen2")},
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_not_computed_here_is_not_called_supported(name):
    assert not supported(UNFIT[name]())


@pytest.mark.parametrize("name", MODELS)
def test_what_is_supported_passes_the_same_checks_and_counts_as_the_plain_model(name):
    model, fused, _ = made(name)
    assert supported(model)
    check_blocks(Loaded(fused, None, name, "--draft"))
    assert context_limit(fused) == context_limit(model)
    assert pass_weights(fused) == pass_weights(model)
    assert (fused.dtype, fused.device) == (model.dtype, model.device)
    assert fused.get_input_embeddings() is model.get_input_embeddings()
    assert fused.get_output_embeddings() is model.get_output_embeddings()


# ----------------------------------------------------------------------------------------- packed, and the original


@pytest.mark.parametrize("name", ["llama", "tied", "biases", "qwen2"])
@pytest.mark.parametrize("kind", PACKED)
def test_packed_linear_layers_stay_near_the_plain_logits_and_the_original_is_left_alone(kind, name):
    plain, _, whole = made(name)
    model = copy.deepcopy(plain)
    modules, weights = list(model.modules()), {key: value.clone() for key, value in model.state_dict().items()}
    fused = FusedLlama(model).eval()
    cpu_linear.pack([fused], kind)
    assert not [module for module in fused.modules() if type(module) is nn.Linear]
    cache, rows = new_cache(fused), []
    for end in (30, 31, 36, 60):
        rows.append(forward(fused, TEXT[:, :end], cache, end - sum(map(len, rows)))[0])
    assert (torch.cat(rows) - whole[:60]).abs().max() <= {"half": 0.1, "packed": 1e-3}[kind] * whole.std()
    after = list(model.modules())
    assert len(after) == len(modules) and all(new is old for new, old in zip(after, modules, strict=True))
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(TEXT, use_cache=False).logits[0], whole)


def test_a_new_head_is_the_fused_models_alone():
    model = tiny.llama()
    fused, own = FusedLlama(model), model.get_output_embeddings()
    fused.set_output_embeddings(nn.Linear(32, 5))
    assert fused.get_output_embeddings().out_features == 5 and model.get_output_embeddings() is own


# -------------------------------------------------------------------------------------------------------------- the loop

TARGET = tiny.llama()
DRAFTS = {"near": tiny.near(TARGET, 0.03), "far": tiny.near(TARGET), "wrong": tiny.always_wrong(TARGET)}
cells = {"k": st.integers(0, 8), "n": st.integers(0, 30), "loop": st.sampled_from(LOOPS)}


@settings(max_examples=25)
@given(draft=st.sampled_from(sorted(DRAFTS)), **cells)
def test_a_fused_draft_guesses_and_counts_as_the_plain_one_and_the_text_is_exact(draft, k, n, loop):
    done = tiny.speculated(TARGET, FusedLlama(DRAFTS[draft]).eval(), n=n, k=k, loop=loop)
    assert done.tokens == list(tiny.greedy_once(TARGET, tiny.PROMPT, 30)[:n])
    assert done == tiny.speculated(TARGET, DRAFTS[draft], n=n, k=k, loop=loop)


@settings(max_examples=15)
@given(**cells)
def test_the_target_fused_is_accepted_every_time(k, n, loop):
    """Holes or stale keys in the draft's cache leave the text exact: only a rejection tells."""
    done = tiny.speculated(TARGET, FusedLlama(TARGET).eval(), n=n, k=k, loop=loop)
    assert done.rejections == 0 and done.target_passes == -(-n // (k + 1))
    assert done.tokens == list(tiny.greedy_once(TARGET, tiny.PROMPT, 30)[:n])


def test_a_fused_draft_is_followed_past_its_first_room():
    done = tiny.speculated(TARGET, FusedLlama(TARGET).eval(), n=300, k=7)
    assert done.rejections == 0 and done.tokens == tiny.plainly(TARGET, TARGET, n=300).tokens
