"""What passes cost on this machine: V(n), c, and the device's own limits that explain them."""

from __future__ import annotations

import statistics

import torch

from spec_common import UserError, interleave, is_out_of_memory, ratio_summary, timed
from spec_models import linear as cpu_linear
from spec_pass import forward, new_cache, rollback

DRAFT_PASSES = 4  # draft passes are timed so many in a row, as a round runs them
READ_BYTES = {"cpu": 256 << 20}  # more than any cache holds; 1 GiB elsewhere
SQUARE = {"cpu": 2048}  # side of the matrix product that measures the arithmetic rate; 4096 elsewhere
LIMIT_TRIES = 8
FIRST_SIDE, LONGEST_PRODUCT = 128, 1.0
COST_REPEATS, COST_WARMUP = 15, 2  # passes are short: more turns than whole texts get


def random_ids(models: list, length: int) -> torch.Tensor:
    """(1, length) ids that every model can read. What they say does not change what a pass costs."""
    rows = min(model.get_input_embeddings().weight.shape[0] for model in models)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(rows, (1, length), generator=generator).to(models[0].device)


def within(context: int, sizes: list[int], limit: int | None) -> tuple[int, list[int]]:
    """The context and sizes that can be measured inside the models' limit: sizes too long are left out (V is carried on
    past the last one), the context is shortened to what they leave."""
    if limit is None:
        return context, sizes
    sizes = [n for n in sizes if n == 1 or n < limit]
    return max(1, min(context, limit - max(sizes[-1], DRAFT_PASSES))), sizes


def warm_cache(model, ids: torch.Tensor, context: int):
    cache = new_cache(model)
    forward(model, ids[:, :context], cache, 1)
    return cache


def timed_pass(model, ids: torch.Tensor, cache, context: int, n: int) -> tuple[None, float]:
    """One pass over n new tokens after `context` cached ones, every row's logits computed. The cache, which a pass
    appends to, is put back outside the clock: otherwise each repeat would run at a longer context than the last."""
    _, seconds = timed(lambda: forward(model, ids[:, : context + n], cache, n), ids.device)
    rollback(cache, context)
    return None, seconds


def timed_draft(model, ids: torch.Tensor, cache, context: int) -> tuple[None, float]:
    """Seconds of one draft pass over one token: the median of a few in a row, each on the clock as a target pass is."""
    seconds = [
        timed(lambda end=context + i: forward(model, ids[:, :end], cache, 1), ids.device)[1]
        for i in range(1, DRAFT_PASSES + 1)
    ]
    rollback(cache, context)
    return None, statistics.median(seconds)


def pass_seconds(
    target, draft, ids: torch.Tensor, context: int, sizes: list[int], repeats: int, warmup: int, plain=None
) -> tuple[dict, dict]:
    """Raw seconds of passes in turns: {n: [...], "draft": [...]}, and {n: error} of sizes that ran out of memory.

    `ids` is (1, context + the largest size or more). `plain` is another copy of the target to time in the same turns,
    as {("plain", n): [...]}. Raises UserError where memory does not do for one token.
    """
    caches = {"target": warm_cache(target, ids, context)}
    arms, failed = {}, {}
    for n in sizes:
        try:
            timed_pass(target, ids, caches["target"], context, n)
            arms[n] = lambda n=n: timed_pass(target, ids, caches["target"], context, n)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            caches["target"] = warm_cache(target, ids, context)
            failed[n] = "out of memory"
    if 1 in failed:
        raise UserError("--model: out of memory in a pass over one token; choose a smaller model or context")
    if plain is not None:
        caches["plain"] = warm_cache(plain, ids, context)
        arms.update(
            {("plain", n): lambda n=n: timed_pass(plain, ids, caches["plain"], context, n) for n in sizes if n in arms}
        )
    if draft is not None:
        caches["draft"] = warm_cache(draft, ids, context)
        arms["draft"] = lambda: timed_draft(draft, ids, caches["draft"], context)
    samples = interleave(arms, repeats, warmup)
    return {name: [seconds for _, seconds in runs] for name, runs in samples.items()}, failed


@torch.inference_mode()
def linear_seconds(model, n: int, tries: int) -> list[float]:
    """Seconds of a pass's linear layers alone, one after the other on n rows: what is left of a pass is everything else."""
    layers = [
        (layer, torch.randn(1, n, layer.in_features, dtype=model.dtype, device=model.device))
        for layer in cpu_linear.linear_layers(model)
    ]

    def multiply():
        for layer, rows in layers:
            layer(rows)

    multiply()
    return [timed(multiply, model.device)[1] for _ in range(tries)]


def costs_of(seconds: dict) -> dict:
    """V(n) and c as medians of ratios paired by repeat, with intervals, from what `pass_seconds` gave (with n=1)."""
    one = seconds[1]
    v = {n: ratio_summary(values, one) for n, values in seconds.items() if isinstance(n, int)}
    c = ratio_summary(seconds["draft"], one) if "draft" in seconds else None
    return {"v": {n: cost["median"] for n, cost in v.items()}, "c": c and c["median"], "v_intervals": v, "c_interval": c,
            "target_pass_s": statistics.median(one)}  # fmt: skip


def measured_costs(target, draft, context: int, ks: list[int], limit: int | None) -> dict:
    """The part of a result row that says what passes cost at that context, for predicting the k in `ks`."""
    context, sizes = within(context, sorted({1, 2, *(k + 1 for k in ks)}), limit)
    ids = random_ids([model for model in (target, draft) if model is not None], context + sizes[-1] + DRAFT_PASSES)
    seconds, failed = pass_seconds(target, draft, ids, context, sizes, COST_REPEATS, COST_WARMUP)
    return {"context": context, **costs_of(seconds), "seconds": seconds, "failed": failed, "error": None}


def costs_row(file, target, draft, context: int, ks: list[int], limit: int | None) -> dict:
    """`measured_costs` as the one row of a result file that says what passes cost, measured before any speedup."""
    return file.find(part="costs") or file.add({"part": "costs", **measured_costs(target, draft, context, ks, limit)})


def affordable_side(side: int, device: torch.device, dtype: torch.dtype) -> int:
    """`side`, or half of it and so on until a product of two squares should take no longer than LONGEST_PRODUCT seconds:
    without a dtype's instructions a CPU would take minutes. A small first product says how fast it is."""
    first = torch.ones(FIRST_SIDE, FIRST_SIDE, dtype=dtype, device=device)
    seconds = min(timed(lambda: first @ first, device)[1] for _ in range(3))
    while side > FIRST_SIDE and seconds * (side / FIRST_SIDE) ** 3 > LONGEST_PRODUCT:
        side //= 2
    return side


@torch.inference_mode()
def device_limits(device: torch.device, dtype: torch.dtype) -> dict:
    """Read bandwidth (bytes/s) and matrix-product rate (multiply-adds counted as 2 operations/s), the best of a few tries."""
    block = torch.ones(READ_BYTES.get(device.type, 1 << 30) // dtype.itemsize, dtype=dtype, device=device)
    side = affordable_side(SQUARE.get(device.type, 4096), device, dtype)
    a = torch.ones(side, side, dtype=dtype, device=device)
    read = min(timed(block.sum, device)[1] for _ in range(LIMIT_TRIES))
    multiply = min(timed(lambda: a @ a, device)[1] for _ in range(LIMIT_TRIES))
    return {"read_bytes_per_s": block.numel() * dtype.itemsize / read, "operations_per_s": 2 * side**3 / multiply}


def implied(model, limits: dict) -> dict:
    """What the limits imply for a model: the floor of a pass and the ridge n*, up to which checking could be free.

    n* = rate * bytes per weight / (2 * bandwidth): reading a weight takes as long as multiplying it with n* tokens.
    """
    weights, read = cpu_linear.pass_weights(model)
    read_s, token_s = read / limits["read_bytes_per_s"], 2 * weights / limits["operations_per_s"]
    return {
        "weights": weights,
        "read_bytes": read,
        "read_s": read_s,
        "arithmetic_s_per_token": token_s,
        "ridge_tokens": read_s / token_s,
    }


def floor_s(n: int, limit: dict) -> float:
    """The least time of a pass over n tokens: reading all weights once, or the arithmetic, whichever is longer."""
    return max(limit["read_s"], n * limit["arithmetic_s_per_token"])
