"""How near a near-tie is: no right loop is failed in half precision, however deep the model, and a wrong one is."""

from __future__ import annotations

import pytest
import torch

import tiny
from spec_decode import Mismatch, check_exact
from spec_harness import near_ties
from spec_harness.near_ties import allowed_units, errors, read_in_blocks, write_singly
from spec_loop import TextCache

HALVES = (torch.bfloat16, torch.float16)
DEEP, N = {"num_hidden_layers": 12, "vocab_size": 256, "initializer_range": 0.3}, 32


def drawn(seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(256, (6,), generator=torch.Generator().manual_seed(seed)).tolist())


def texts(seed: int, dtype: torch.dtype):
    """A deep model's task, its own text, and what the loop writes with another model's guesses."""
    target, prompt = tiny.llama(seed, dtype, **DEEP), drawn(seed)
    task = tiny.task(target, prompt, N)
    return (
        task,
        tiny.plainly(target, prompt, N).tokens,
        tiny.speculated(target, tiny.near(target, 0.02), prompt, N, 4).tokens,
    )


def parted(dtype: torch.dtype, seeds=range(5)) -> int:
    """How many right loops part from plain decoding. Raises Mismatch where one is failed."""
    count = 0
    for seed in seeds:
        task, own, got = texts(seed, dtype)
        check_exact(task, "speculative", own, got, allow_near_ties=True)
        count += own != got
    return count


@pytest.mark.parametrize("dtype", HALVES)
def test_no_right_loop_is_failed_on_a_deep_model(dtype):
    assert parted(dtype) >= (3 if dtype == torch.bfloat16 else 0)


def test_a_tolerance_that_knows_nothing_of_the_model_would_fail_right_loops(monkeypatch):
    """Two units, as two logits' own last rounding would have it."""
    monkeypatch.setattr(near_ties, "MARGIN", 0.0)
    allowed_units.cache_clear()
    with pytest.raises(Mismatch) as caught:
        parted(torch.bfloat16)
    allowed_units.cache_clear()
    assert caught.value.report["near_tie"] is False


@pytest.mark.parametrize("dtype", HALVES)
def test_a_cache_that_comes_back_wrong_is_still_caught(dtype, monkeypatch):
    keep = TextCache.keep

    def careless(self, length, path):
        keep(self, length, path)
        for layer in self.layers:
            layer.keys[:, :, -1] = layer.keys[:, :, 0]

    monkeypatch.setattr(TextCache, "keep", careless)
    task, own, got = texts(1, dtype)
    with pytest.raises(Mismatch):
        check_exact(task, "speculative", own, got, allow_near_ties=True)


def test_errors_are_told_in_units_of_the_best_logit():
    rows, others = torch.tensor([[4.0, 3.0, 2.0, -9.0, -9.0]]), torch.tensor([[3.5, 3.75, 2.0, -9.0, 50.0]])
    (one,), (pair,), (below,) = errors(rows[:, :4], others[:, :4], 1 / 8)
    assert (one, pair, below) == (1.5, 2.5, 2.0), (
        "0.75 up and 0.5 down, of a unit of a half; the other reading takes id 1"
    )


def test_both_readings_give_the_rows_of_the_models_own_text():
    target, prompt = tiny.llama(), torch.tensor([tiny.PROMPT])
    ids, rows = write_singly(target, prompt, 9)
    assert rows.argmax(-1).tolist() == tiny.greedy(target, tiny.PROMPT, 9)
    assert ids[0].tolist() == [*tiny.PROMPT, *rows.argmax(-1).tolist()[:-1]]
    for size in (1, 2, 4, 9, 50):
        torch.testing.assert_close(read_in_blocks(target, ids, len(tiny.PROMPT) - 1, size), rows, rtol=1e-3, atol=1e-3)


def test_what_is_allowed_grows_with_what_rounding_does_and_is_never_less_than_two_logits_last_place():
    shallow, deep = (
        allowed_units(tiny.llama(0, torch.bfloat16, num_hidden_layers=n), tiny.PROMPT, 30) for n in (1, 16)
    )
    assert near_ties.FLOOR <= shallow < deep


def test_the_model_is_measured_within_its_limit():
    """Past it the frequencies change with the length, which is no rounding."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    target = tiny.llama(0, torch.bfloat16, max_position_embeddings=16, rope_parameters=rope)
    assert allowed_units(target, tiny.PROMPT, 40) == allowed_units(target, tiny.PROMPT, 10) < 8
    assert allowed_units(target, tuple(range(1, 17)), 1) >= near_ties.FLOOR
