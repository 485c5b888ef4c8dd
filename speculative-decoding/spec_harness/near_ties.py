"""How near a near-tie is in half precision: what rounding does to the logits of the model at hand, on its own text.

A pass over n rows rounds otherwise than n passes over one, so a right loop may part from plain decoding where two ids all
but tie. They exchange where their errors differ by more than their gap, so what counts is the difference of two errors. It
is told in units, the last place of the best logit (eps times its size).

Median and largest over some 60 to 200 places (random models of width 192 or 256; `rounding.py` measures them anew):

    SmolLM2, 30 layers, bfloat16     0.6   3.7    160 places; an id taken otherwise lay 1.0 below the best at most
    random, 2 layers of 0.15         0.5   2.0    bfloat16
    random, 6 layers of 0.15         1.5   4.7    bfloat16; 3.6 below the best
    random, 30 layers of 0.05        1.6   5.0    bfloat16; float16 1.6 and 3.8
    random, 30 layers of 0.15        5.5  16.3    bfloat16; float16 5.4 and 15.0; 4.3 below the best

In units it is one figure for both dtypes and for blocks of 6 to 32 (of 2 and 3 it may be less), but it grows with depth and with the weights: a constant
that serves the deepest would excuse anything of the others. So the model at hand is measured. In a fused pass whose rows
are independent (`rows_independent`) blocks differ from single rows by nothing (0.0 over those 160 places); what is left there is FLOOR.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from spec_loop import forward, new_cache
from spec_models.checks import context_limit

FLOOR, MARGIN = 2.0, 1.5
CONTENDERS = 4  # best ids of a row that are looked at
PLACES, BLOCK = 32, 6  # on which the model at hand is measured


class Errors(NamedTuple):
    """Of each place, in units, (places,): the largest error of a contender's logit; the largest difference of two of them;
    how far the id that the other reading takes lies below the best."""

    one: torch.Tensor
    pair: torch.Tensor
    below: torch.Tensor


@torch.inference_mode()
def write_singly(model, prompt: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompt (1, m) with the model's own next n tokens but the last, and the rows (n, vocabulary) that gave them, each
    from a pass over one token."""
    ids, cache, rows = prompt, new_cache(model), []
    if prompt.shape[1] > 1:
        forward(model, prompt[:, :-1], cache)
    while True:
        rows.append(forward(model, ids[:, -1:], cache).logits[0].float())
        if len(rows) == n:
            return ids, torch.cat(rows)
        ids = torch.cat([ids, rows[-1].argmax(-1)[None]], dim=1)


@torch.inference_mode()
def read_in_blocks(model, ids: torch.Tensor, start: int, n: int) -> torch.Tensor:
    """The rows (places, vocabulary) of `ids` (1, m) from `start` on, n of them a pass."""
    cache, rows = new_cache(model), []
    if start:
        forward(model, ids[:, :start], cache)
    for block in ids[:, start:].split(n, dim=1):
        rows.append(forward(model, block, cache, block.shape[1]).logits[0].float())
    return torch.cat(rows)


def errors(rows: torch.Tensor, others: torch.Tensor, eps: float) -> Errors:
    """How far two readings of the same places (places, vocabulary) lie apart."""
    best = rows.max(-1).values
    unit = eps * best.abs()
    contenders = torch.cat([reading.topk(CONTENDERS, -1).indices for reading in (rows, others)], -1)
    moved = (others - rows).gather(-1, contenders)
    below = best - rows.gather(-1, others.argmax(-1, keepdim=True))[:, 0]
    return Errors(moved.abs().max(-1).values / unit, (moved.max(-1).values - moved.min(-1).values) / unit, below / unit)


@functools.lru_cache(maxsize=64)
def allowed_units(model, prompt: tuple[int, ...], n: int) -> float:
    """How far below the best, in units, rounding may put an id that a right loop takes, on texts of `n` tokens behind that
    prompt: MARGIN times the largest difference of two errors at the first PLACES of the model's own text, and no less
    than FLOOR: the last rounding alone moves each of two logits by up to a unit."""
    limit = context_limit(model)
    n = min(n, PLACES) if limit is None else max(1, min(n, PLACES, limit - len(prompt)))
    ids, rows = write_singly(model, torch.tensor([prompt], device=model.device), n)
    eps = torch.finfo(model.dtype).eps
    found = [errors(rows, read_in_blocks(model, ids, len(prompt) - 1, size), eps).pair for size in (BLOCK, n)]
    return max(FLOOR, MARGIN * float(torch.cat(found).max()))
