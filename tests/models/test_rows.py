"""Exact by construction: a pass over n rows is bit for bit n passes over one, where no linear layer looks at neighbours."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from spec_models import fused as fused_module
from spec_models import linear as cpu_linear
from spec_models import sight
from spec_models.fused import FIRST_ROOM, FusedLlama, prove_rows
from spec_models.linear import MOST_ROWS, independent_rows, works
from spec_models.sight import STEP, Block, Rows, visible_paths

F32, BF16 = torch.float32, torch.bfloat16
# Sizes in multiples of 64: of smaller ones oneDNN adds up a row otherwise in a block, and nothing is promised.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 1024}
CASES = {
    "half": pytest.param(
        "half", F32, marks=pytest.mark.skipif(not works("half"), reason="no half-precision kernels here")
    ),
    "bfloat16": pytest.param(
        "packed",
        BF16,
        marks=pytest.mark.skipif(not works("packed", BF16), reason="a processor without bfloat16 instructions"),
    ),
}
MODELS = {
    "llama": lambda dtype: tiny.llama(dtype=dtype, **SIZES),
    "one key head": lambda dtype: tiny.llama(dtype=dtype, num_key_value_heads=1, **SIZES),
    "qwen2": lambda dtype: tiny.qwen2(**SIZES).to(dtype),
}
TEXT = torch.randint(0, 64, (1, 2 * FIRST_ROOM + 200), generator=torch.Generator().manual_seed(3))
both_kinds = pytest.mark.parametrize(("kind", "dtype"), CASES.values(), ids=CASES)


@functools.cache
def made(name: str, kind: str, dtype: torch.dtype) -> FusedLlama:
    model = FusedLlama(MODELS[name](dtype)).eval()
    assert cpu_linear.pack([model], kind) == []
    most = independent_rows(model)
    if most < 17:
        pytest.skip(f"on this processor linear layers keep rows independent up to {most} only")
    assert prove_rows(model) == most
    return model


@torch.inference_mode()
def after(model, length: int, ids=TEXT):
    cache = model.new_cache()
    if length:
        model(ids[:, :length], cache, logits_to_keep=1)
    return cache


@torch.inference_mode()
def one_by_one(model, length: int, n: int) -> tuple[torch.Tensor, object]:
    cache = after(model, length)
    return torch.cat([model(TEXT[:, i : i + 1], cache).logits[0] for i in range(length, length + n)]), cache


# Cache lengths on both sides of a step, of the first room, and of the doubled one.
EDGES = [edge + shift for edge in (0, STEP, 4 * STEP, FIRST_ROOM, 2 * FIRST_ROOM) for shift in range(-17, 3)]
lengths = st.one_of(st.sampled_from([edge for edge in EDGES if edge >= 0]), st.integers(0, 2 * FIRST_ROOM + 60))


@both_kinds
@settings(max_examples=60)
@given(name=st.sampled_from(sorted(MODELS)), length=lengths, n=st.integers(1, 17))
def test_a_pass_over_n_rows_is_bitwise_n_passes_over_one(kind, dtype, name, length, n):
    model = made(name, kind, dtype)
    cache = after(model, length)
    with torch.inference_mode():
        block = model(TEXT[:, length : length + n], cache).logits[0]
    alone, own = one_by_one(model, length, n)
    assert torch.equal(block, alone)
    end = length + n
    assert torch.equal(cache.store[:, :, :, :end], own.store[:, :, :, :end])


@both_kinds
@settings(max_examples=30)
@given(length=lengths, pieces=st.lists(st.integers(1, 17), min_size=2, max_size=6), wrong=st.integers(0, 9))
def test_any_split_with_wrong_guesses_taken_back_leaves_the_same_bits(kind, dtype, length, pieces, wrong):
    model = made("llama", kind, dtype)
    cache, rows, start = after(model, length), [], length
    with torch.inference_mode():
        for n in pieces:
            rows.append(model(TEXT[:, start : start + n], cache).logits[0])
            start += n
            if wrong:
                model(63 - TEXT[:, :wrong], cache)
                cache.keep(start)
    assert torch.equal(torch.cat(rows), one_by_one(model, length, sum(pieces))[0])


def tree(parents: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """Positions (1, n), mask (1, 1, n, length + n) and each node's path, of a tree whose first node is the root."""
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    mask = torch.zeros(1, 1, len(parents), length + len(parents), dtype=torch.bool)
    mask[..., :length] = True
    for node, path in enumerate(paths):
        mask[0, 0, node, [length + one for one in path]] = True
    return torch.tensor([[length + len(path) - 1 for path in paths]]), mask, paths


@st.composite
def trees(draw) -> list[int]:
    n = draw(st.integers(1, 17))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, n))]


@both_kinds
@settings(max_examples=40)
@given(name=st.sampled_from(sorted(MODELS)), length=lengths, parents=trees(), additive=st.booleans())
def test_every_node_of_a_tree_is_bitwise_what_its_path_gives_token_by_token(
    kind, dtype, name, length, parents, additive
):
    model = made(name, kind, dtype)
    positions, mask, paths = tree(parents, length)
    mask = sight.additive(mask, dtype) if additive else mask
    cache, nodes = after(model, length), TEXT[:, length : length + len(parents)]
    with torch.inference_mode():
        block = model(nodes, cache, position_ids=positions, attention_mask=mask).logits[0]
        deepest = max(paths, key=len)
        own = after(model, length)
        chain = torch.cat([model(nodes[:, node : node + 1], own).logits[0] for node in deepest])
        assert torch.equal(block[deepest], chain)
        cache.keep(length, [length + node for node in deepest])
        assert torch.equal(cache.store[:, :, :, : cache.length], own.store[:, :, :, : own.length])
        assert torch.equal(model(TEXT[:, :1], cache).logits, model(TEXT[:, :1], own).logits)


@both_kinds
def test_a_prompt_longer_than_what_is_promised_runs_as_one_block(kind, dtype):
    model = made("llama", kind, dtype)
    assert isinstance(model.sight(1, MOST_ROWS, 5, None, True), Rows)
    assert isinstance(model.sight(1, MOST_ROWS + 1, 5, None, True), Block)
    assert isinstance(model.sight(2, 4, 5, None, False), Block)


@pytest.mark.parametrize("threads", [2, 3, 7])
@pytest.mark.skipif(not works("half"), reason="no half-precision kernels here")
def test_rows_stay_independent_when_threads_share_the_work(threads):
    """An activation over more than 32768 values is cut between threads, wherever a row may end."""
    model = FusedLlama(tiny.llama(**{**SIZES, "intermediate_size": 4001})).eval()
    cpu_linear.pack([model], "half")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert prove_rows(model) >= 17
        with torch.inference_mode():
            block = model(TEXT[:, 9:26], after(model, 9)).logits[0]
        assert torch.equal(block, one_by_one(model, 9, 17)[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not works("half"), reason="no half-precision kernels here")
def test_another_activation_runs_row_by_row():
    model = FusedLlama(tiny.llama(hidden_act="gelu", **SIZES)).eval()
    cpu_linear.pack([model], "half")
    assert prove_rows(model) >= 17
    with torch.inference_mode():
        block = model(TEXT[:, 9:26], after(model, 9)).logits[0]
    assert torch.equal(block, one_by_one(model, 9, 17)[0])


# ----------------------------------------------------------------------------------------------------- what is not promised


def test_nothing_is_promised_of_plain_layers():
    model = FusedLlama(tiny.llama(**SIZES)).eval()
    assert prove_rows(model) == model.rows_independent == 0


@pytest.mark.skipif(not works("half"), reason="no half-precision kernels here")
def test_a_pass_that_looks_at_its_neighbours_after_all_promises_nothing(monkeypatch):
    """The linear layers hold what they promise here; attention, made to run as one block, does not."""
    model = FusedLlama(tiny.llama(**SIZES)).eval()
    cpu_linear.pack([model], "half")

    class Loud(Block):
        def __call__(self, *args):
            return super().__call__(*args) * (1 + 2**-10 * (self.n > 1))

    monkeypatch.setattr(
        fused_module, "Rows", lambda n, cached, mask, dtype, device: Loud(1, n, cached, mask, 2, dtype, device)
    )
    assert prove_rows(model) == model.rows_independent == 0


# -------------------------------------------------------------------------------------------------------------- what is seen


def test_a_chains_mask_needs_no_gathering_and_a_trees_does():
    chain = torch.ones(4, 9, dtype=torch.bool).tril(5)
    counts, paths = visible_paths(chain)
    assert counts == [6, 7, 8, 9] and paths is None
    chain[3, 8], chain[3, 2] = True, False
    counts, paths = visible_paths(chain)
    assert counts == [6, 7, 8, 8] and paths[3, :8].tolist() == [0, 1, 3, 4, 5, 6, 7, 8]


@given(cached=st.integers(0, 200), n=st.integers(1, 32))
def test_rows_of_one_width_share_a_product_and_never_more_than_two_are_made(cached, n):
    rows = Rows(n, cached, None, F32, torch.device("cpu"))
    assert len(rows.groups) == len({-(-(cached + 1 + row) // STEP) for row in range(n)}) <= 2
    assert sum(count for _, count, *_ in rows.groups) == n and rows.back is None
