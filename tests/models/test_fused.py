"""A fused model computes what the plain model computes, however the text is split, and leaves the model it came from alone."""

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
from spec_loop import LOOPS, keep_slots, new_cache
from spec_methods.rows import check_rows, feed, read_prompts
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
            assert_near(tiny.fed(fused, TEXT[:, :end], cache, end - start)[0], whole[start:end])
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
        assert_near(tiny.fed(fused, TEXT[:, :length], cache, keep)[0], whole[length - keep : length])
        if wrong:
            tiny.fed(fused, torch.cat([TEXT[:, :length], 63 - TEXT[:, :wrong]], dim=1), cache, 1)
        keep_slots(cache, length)
        assert cache.get_seq_length() == length


def test_logits_to_keep_of_zero_means_every_row():
    _, fused, whole = made("llama")
    with torch.inference_mode():
        assert_near(fused(TEXT[:, :9], past_key_values=new_cache(fused)).logits[0], whole[:9])


def test_two_caches_of_one_model_know_nothing_of_each_other():
    _, fused, whole = made("qwen2")
    one, other = new_cache(fused), new_cache(fused)
    tiny.fed(fused, TEXT[:, :20], one, 1)
    tiny.fed(fused, 63 - TEXT[:, :30], other, 1)
    assert_near(tiny.fed(fused, TEXT[:, :24], one, 4)[0], whole[20:24])


def test_keys_stay_where_they_are_until_the_room_is_full():
    """What the fusing is for: a pass copies no cache. Room is reserved once, then doubled."""
    _, fused, _ = made("llama")
    cache, places = new_cache(fused), []
    assert isinstance(cache, FusedCache) and cache.get_seq_length() == 0
    for end in (3, 4, FIRST_ROOM, FIRST_ROOM + 1, FIRST_ROOM + 40):
        tiny.fed(fused, TEXT[:, :end], cache, 1)
        places.append((cache.keys[0].shape[1], cache.keys[0].data_ptr()))
    assert [room for room, _ in places] == [FIRST_ROOM] * 3 + [2 * FIRST_ROOM] * 2
    assert len(set(places)) == 2


# ------------------------------------------------------------------------------------------- text, positions, trees, taps


@pytest.mark.parametrize("name", MODELS)
def test_the_greedy_text_is_generates_own(name):
    model, fused, _ = made(name)
    prompt = TEXT[:, :7]
    with torch.inference_mode():
        written = model.generate(prompt, do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0)[0]
        cache, ids = new_cache(fused), prompt
        while ids.shape[1] < 47:
            token = fused(ids[:, cache.get_seq_length() :], cache, logits_to_keep=1).logits[0, -1].argmax()
            ids = torch.cat([ids, token.view(1, 1)], dim=1)
    assert len(set(written.tolist())) > 10, "a text of one token hides faults"
    assert ids[0].tolist() == written.tolist()


TREE = (-1, 0, 0, 1, 1, 2, 4, 4)  # the parent of each node; the first is the root
PATHS = ([0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 4, 6], [0, 1, 4, 7])
NODES = torch.tensor([[9, 4, 51, 33, 8, 20, 61, 2]])


def tree_mask(length: int) -> torch.Tensor:
    mask = torch.zeros(1, 1, len(TREE), length + len(TREE), dtype=torch.bool)
    mask[..., :length] = True
    for node, path in enumerate(PATHS):
        mask[0, 0, node, [length + one for one in path]] = True
    return mask


def tree_pass(fused, length: int, additive: bool = False):
    """A cache of `length` tokens and the tree behind them, and the logits of every node."""
    cache = new_cache(fused)
    tiny.fed(fused, TEXT[:, :length], cache, 1)
    positions, mask = torch.tensor([[length + len(path) - 1 for path in PATHS]]), tree_mask(length)
    if additive:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    with torch.inference_mode():
        return cache, fused(NODES, cache, position_ids=positions, attention_mask=mask).logits[0]


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("length", [5, FIRST_ROOM - 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_node_of_a_tree_gets_the_logits_of_its_path_run_alone(name, length, additive):
    model, fused, _ = made(name)
    _, rows = tree_pass(fused, length, additive)
    for node, path in enumerate(PATHS):
        with torch.inference_mode():
            alone = model(torch.cat([TEXT[:, :length], NODES[:, path]], dim=1), use_cache=False).logits[0, -1]
        assert_near(rows[node], alone)


@pytest.mark.parametrize("path", [*PATHS, []], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "one key head"])
def test_a_path_kept_by_gather_goes_on_as_if_nothing_else_had_been_there(name, path):
    model, fused, _ = made(name)
    length = FIRST_ROOM - 3
    cache, _ = tree_pass(fused, length)
    cache.keep(length, [length + node for node in path])
    assert cache.get_seq_length() == length + len(path)
    ids = torch.cat([TEXT[:, :length], NODES[:, path], TEXT[:, 300:304]], dim=1)
    with torch.inference_mode():
        assert_near(tiny.fed(fused, ids, cache, 4)[0], model(ids, use_cache=False).logits[0, -4:])


def test_a_path_that_lies_there_already_is_not_copied():
    _, fused, _ = made("llama")
    cache, _ = tree_pass(fused, 5)
    cache.store.index_select = None  # a copy would need it
    before = cache.store.clone()
    cache.keep(5, [5, 6])
    assert cache.length == 7 and torch.equal(cache.store, before)
    cache.keep(5)
    assert cache.length == 5


@pytest.mark.parametrize(("length", "path"), [(14, ()), (5, (4,)), (5, (7, 6)), (5, (6, 6)), (5, (13,)), (-1, ())])
def test_slots_that_cannot_be_kept_are_refused(length, path):
    _, fused, _ = made("llama")
    cache, _ = tree_pass(fused, 5)
    with pytest.raises(ValueError, match="cannot be kept"):
        cache.keep(length, path)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (1,), (2,), (0,), ()])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_hidden_states_are_those_of_transformers_where_asked_for(name, wanted):
    model, fused, _ = made(name)
    with torch.inference_mode():
        theirs = model(TEXT[:, :20], use_cache=False, output_hidden_states=True).hidden_states
        cache = new_cache(fused)
        fused(TEXT[:, :12], cache)
        out = fused(TEXT[:, 12:20], cache, logits_to_keep=2, output_hidden_states=wanted)
    assert out.logits.shape[1] == 2
    if not wanted:
        assert out.hidden_states is None
        return
    assert len(out.hidden_states) == len(theirs) == 3
    for index, (mine, whole) in enumerate(zip(out.hidden_states, theirs, strict=True)):
        if index in wanted:
            assert_near(mine, whole[:, 12:])
        else:
            assert mine is None


def test_a_position_is_where_a_token_stands_not_the_slot_it_is_in():
    model, fused, _ = made("llama")
    places = torch.tensor([[0, 1, 2, 5, 7]])
    with torch.inference_mode():
        cache = new_cache(fused)
        fused(TEXT[:, :3], cache)
        cache.reserve(fused, 9)
        rows = fused(
            TEXT[:, 3:5], cache, position_ids=places[:, 3:], attention_mask=torch.ones(1, 1, 2, 5).tril(3).bool()
        )
        expected = model(TEXT[:, :5], position_ids=places, attention_mask=torch.ones(1, 5), use_cache=False)
    assert_near(rows.logits[0], expected.logits[0, 3:])


# ------------------------------------------------------------------------------------------------------ rows of a batch


@pytest.mark.parametrize("name", MODELS)
def test_ragged_rows_of_a_batch_get_what_each_gets_alone(name):
    _, fused, _ = made(name)
    check_rows(Loaded(fused, None, name, "--target"))


def test_a_batch_runs_the_same_form_of_pass_as_a_row_alone():
    _, fused, whole = made("llama")
    ids, lengths = torch.stack([TEXT[0, :40], TEXT[0, :40], TEXT[0, :40]]), [21, 3, 40]
    cache = read_prompts(fused, ids, lengths, 48)
    slots = torch.tensor(lengths)[:, None] - 1
    logits = feed(fused, ids, cache, slots, 40, 1).logits
    for row, length in enumerate(lengths):
        assert_near(logits[row, 0], whole[length - 1])


def test_a_cache_for_one_row_refuses_two():
    _, fused, _ = made("llama")
    with pytest.raises(ValueError, match="one row, not 2"):
        fused(TEXT[:, :3].repeat(2, 1), new_cache(fused))


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


def hooked():
    model = tiny.llama()
    model.model.layers[1].register_forward_hook(lambda *_: None)
    return model


def with_linear(change):
    """A model with one projection that is not nn.Linear itself."""
    model = tiny.llama()
    change(model.model.layers[1])
    return model


class LowRank(nn.Linear):
    """As adapters are put in: the same attributes, another function."""


def quantised_head():
    model = tiny.llama()
    return torch.ao.quantization.quantize_dynamic(model, {"lm_head": torch.ao.quantization.default_dynamic_qconfig})


def declared_quantised():
    model = tiny.llama()
    model.config.quantization_config = {"quant_method": "awq"}
    return model


UNFIT = {
    "a hook": hooked,
    "a projection of another class": lambda: with_linear(
        lambda one: setattr(one.mlp, "up_proj", LowRank(32, 64, bias=False))
    ),
    "one projection with a bias of its own": lambda: with_linear(
        lambda one: setattr(one.self_attn, "v_proj", nn.Linear(32, 16))
    ),
    "a quantised head": quantised_head,
    "packed already": lambda: (lambda model: cpu_linear.pack([model], PACKED[0]) and None or model)(tiny.llama()),
    "quantised by its config": declared_quantised,
    "two dtypes": lambda: (lambda model: model.model.norm.double() and None or model)(tiny.llama()),
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
        rows.append(tiny.fed(fused, TEXT[:, :end], cache, end - sum(map(len, rows)))[0])
    assert (torch.cat(rows) - whole[:60]).abs().max() <= {"half": 0.1, "packed": 1e-3}[kind] * whole.std()
    after = list(model.modules())
    assert len(after) == len(modules) and all(new is old for new, old in zip(after, modules, strict=True))
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(TEXT, use_cache=False).logits[0], whole)


def test_the_fused_model_and_its_original_hold_their_weights_once():
    model = tiny.llama(attention_bias=True)
    fused = FusedLlama(model).eval()
    spans = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *fused.parameters())}
    size = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    assert spans == set(size)
    assert sum(size.values()) == sum(one.nbytes for one in tiny.llama(attention_bias=True).parameters())


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
    assert not any(done.rejected) and done.target_passes == -(-n // (k + 1))
    assert done.tokens == list(tiny.greedy_once(TARGET, tiny.PROMPT, 30)[:n])


def test_a_fused_draft_is_followed_past_its_first_room():
    done = tiny.speculated(TARGET, FusedLlama(TARGET).eval(), n=300, k=7)
    assert not any(done.rejected) and done.tokens == tiny.plainly(TARGET, n=300).tokens


@pytest.mark.parametrize("scale", [0.1, 1.0])
@torch.inference_mode()
def test_a_scale_that_is_not_the_square_roots_is_kept(scale):
    """Attention's own default would be right for every model here but such a one."""
    model = tiny.llama()
    for layer in model.model.layers:
        assert layer.self_attn.scaling == layer.self_attn.head_dim**-0.5
        layer.self_attn.scaling = scale
    fused, whole = FusedLlama(model).eval(), model(TEXT[:, :40], use_cache=False).logits[0]
    cache = new_cache(fused)
    assert_near(tiny.fed(fused, TEXT[:, :30], cache, 30)[0], whole[:30])
    assert_near(tiny.fed(fused, TEXT[:, :40], cache, 10)[0], whole[30:])
