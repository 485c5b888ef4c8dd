"""What passes cost on this machine: V(n), c, and the device's own limits that explain them."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Sequence

from spec_common import Timed, UserError, first_line, interleave, is_out_of_memory, paired_ratio, timed

import torch

from spec_loop import forward, keep_slots, new_cache
from spec_models import linear as cpu_linear
from spec_models.masked import guesses_at_once
from spec_models.medusa import Medusa

ROUND = 5  # draft passes are timed so many in a row behind a pass of the target, a round of the essay's k; c is their mean
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


def draft_reads(draft) -> int:
    """The most tokens that the timed passes of a round read behind the context."""
    return 2 * ROUND if draft is not None and guesses_at_once(draft) else ROUND + 1


def inside_limit(context: int, sizes: list[int], limit: int | None, reads: int) -> tuple[int, list[int]]:
    """The context and sizes that can be measured inside the models' limit: sizes too long are left out (V is carried on
    past the last one), the context is shortened to what they and the draft's `reads` leave."""
    if limit is None:
        return context, sizes
    sizes = [n for n in sizes if n == 1 or n < limit]
    return max(1, min(context, limit - max(sizes[-1], reads))), sizes


@contextlib.contextmanager
def passes_within(length: int, flag: str):
    """What fails in the passes over a text of up to `length` tokens, said in one line: a limit that no config names shows in
    no other way. `flag`: what to lower. Running out of memory stays what it is. Raises UserError."""
    try:
        yield
    except (IndexError, RuntimeError, ValueError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"{flag}: a pass fails in a text of up to {length} tokens ({type(error).__name__}: {first_line(error)}); "
            f"a model may be made for shorter ones without saying so: lower {flag} or give a shorter text"
        ) from error


def warm_cache(model, ids: torch.Tensor, context: int):
    cache = new_cache(model)
    forward(model, ids[:, :context], cache)
    return cache


def timed_pass(model, ids: torch.Tensor, cache, context: int, n: int) -> Timed:
    """One pass over n new tokens after `context` cached ones, every row's logits computed. The cache, which a pass
    appends to, is put back outside the clock: otherwise each repeat would run at a longer context than the last."""
    run = timed(lambda: forward(model, ids[:, context : context + n], cache, n), ids.device)
    keep_slots(cache, context)
    return run


def timed_draft(model, ids: torch.Tensor, cache, context: int, ahead: Callable[[], object], passes: Sequence[tuple]) -> Timed:
    """A round's draft passes, each on the clock as a target pass is: what they come to is a list of seconds. `ahead`, a pass
    of the target, comes before them, since it leaves the draft's weights in no cache: the first passes are slower than the
    later ones. `passes`: of each the tokens that it reads, and those at its end whose logits are computed."""
    ahead()
    seconds = []
    for n, rows in passes:
        fed = ids[:, cache.get_seq_length() :][:, :n]
        seconds.append(timed(functools.partial(forward, model, fed, cache, rows), ids.device).seconds)
    keep_slots(cache, context)
    return Timed(seconds, sum(seconds))


def timed_heads(draft: Medusa, ahead: Callable[[], object]) -> Timed:
    """All guesses of Medusa's heads behind a pass of the target, on the clock as `timed_draft`'s passes are."""
    state = torch.ones(1, draft.config.hidden_size, dtype=draft.dtype, device=draft.device)
    ahead()
    seconds = [timed(lambda: draft(state), draft.device).seconds]
    return Timed(seconds, sum(seconds))


def by_place(samples: dict) -> dict:
    """Raw seconds by name from what the turns of `pass_seconds` gave. Of the draft's passes: "draft", one of a ROUND, all
    places alike; "draft place i", the i-th behind the target's pass, from 1; "draft 2", a first one that reads two tokens,
    as it does where all guesses stood. Of one that guesses in one pass see `draft_arms`."""
    found = {name: [run.seconds for run in runs] for name, runs in samples.items() if not str(name).startswith("draft")}
    if "draft" in samples:
        rounds = [run.result for run in samples["draft"]]
        found["draft"] = [statistics.fmean(row) for row in rounds]
        found |= {name: [run.result[0] for run in samples[name]] for name in ("draft 1", "draft 2") if name in samples}
        found |= {f"draft place {i}": list(seconds) for i, seconds in enumerate(zip(*rounds, strict=True), 1)}
    return found


def pass_seconds(
    target,
    draft,
    ids: torch.Tensor,
    context: int,
    sizes: list[int],
    repeats: int,
    warmup: int,
    others: dict | None = None,
    flag: str = "--context",
) -> tuple[dict, dict]:
    """Raw seconds of passes in turns: {n: [...]} and those of the draft, see `by_place`; and {n: error} of sizes that ran out
    of memory, or fail.

    `ids` is (1, context + the largest size or more). `others`, name -> another form of the target, are timed in the same
    turns, as {(name, n): [...]}. Raises UserError where not even one token can be read; `flag`: what to lower then.
    """
    with passes_within(ids.shape[1], flag):
        arms, failed = target_arms(target, ids, context, sizes)
        arms |= other_arms(others or {}, ids, context, list(arms)) | draft_arms(draft, ids, context, arms)
        return by_place(interleave(arms, repeats, warmup)), failed


def target_arms(target, ids: torch.Tensor, context: int, sizes: list[int]) -> tuple[dict, dict]:
    """{n: a pass over n tokens} of the sizes that can be run, and {n: error} of the rest."""
    caches = {"target": warm_cache(target, ids, context)}
    arms, failed = {}, {}
    for n in sizes:
        try:
            timed_pass(target, ids, caches["target"], context, n)
            arms[n] = lambda n=n: timed_pass(target, ids, caches["target"], context, n)
        except (IndexError, RuntimeError, ValueError) as error:
            out = is_out_of_memory(error)
            if n == 1 and out:
                raise UserError(
                    "--model: out of memory in a pass over one token; choose a smaller model or context"
                ) from error
            if n == 1:
                raise
            caches["target"] = warm_cache(target, ids, context)
            failed[n] = "out of memory" if out else f"fails behind {context} tokens ({first_line(error)})"
    return arms, failed


def other_arms(others: dict, ids: torch.Tensor, context: int, sizes: list[int]) -> dict:
    """{(name, n): a pass} of the target's other forms, timed beside it."""
    arms = {}
    for name, other in others.items():
        run = functools.partial(timed_pass, other, ids, warm_cache(other, ids, context), context)
        arms.update({(name, n): functools.partial(run, n) for n in sizes})
    return arms


def draft_arms(draft, ids: torch.Tensor, context: int, target: dict) -> dict:
    """The draft's passes, behind a pass over the middle one of the target's sizes; the first reads one token, or two. A draft
    that guesses in one pass makes a ROUND of guesses, the same behind as many tokens more, or a single one."""
    if draft is None:
        return {}
    ahead = target[sorted(target)[len(target) // 2]]
    if isinstance(draft, Medusa):
        return {"draft": functools.partial(timed_heads, draft, ahead)}
    run = functools.partial(timed_draft, draft, ids, warm_cache(draft, ids, context), context, ahead)
    if guesses_at_once(draft):
        passes = {"draft": [(ROUND, ROUND)], "draft 2": [(2 * ROUND, ROUND)], "draft 1": [(1, 1)]}
    else:
        passes = {"draft": [(1, 1)] * ROUND, "draft 2": [(2, 1)] + [(1, 1)] * (ROUND - 1)}
    return {name: functools.partial(run, row) for name, row in passes.items()}


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
    return [timed(multiply, model.device).seconds for _ in range(tries)]


def costs_of(seconds: dict, one_pass: bool = False, heads: int = 0) -> dict:
    """V(n) and what a draft pass costs (c; by its place in a round, c_places; one that reads two tokens, c2) as medians of
    ratios paired by turn, with intervals, from what `pass_seconds` gave (with n = 1).

    Of a draft that guesses in `one_pass`, a pass being affine in what it reads and says: c is a guess's share of a ROUND's,
    c_places what the first guess of a pass and each further one adds, c2 a first one behind a token more. Of so many `heads` on
    the target's state alike: their product is all that a round's guesses cost, however many are made."""
    one = seconds[1]
    v = {n: paired_ratio(values, one) for n, values in seconds.items() if isinstance(n, int)}
    c, c2 = (paired_ratio(seconds[arm], one) if arm in seconds else None for arm in ("draft", "draft 2"))
    places = [paired_ratio(values, one)["median"] for arm, values in seconds.items() if str(arm).startswith("draft place")]
    if one_pass:
        first = paired_ratio(seconds["draft 1"], one)["median"]
        places = [first, (c["median"] - first) / (ROUND - 1)]
        c2 = {"median": first + (c2["median"] - c["median"]) / ROUND}
        c = {**c, **{name: c[name] and c[name] / ROUND for name in ("median", "low", "high")}}
    if heads:
        places, c2 = [c["median"], 0.0], c
        c = {**c, **{name: c[name] and c[name] / heads for name in ("median", "low", "high")}}
    return {"v": {n: cost["median"] for n, cost in v.items()}, "c": c and c["median"], "c_places": places, "c2": c2 and c2["median"], "one_pass": one_pass or heads > 0,
            "v_intervals": v, "c_interval": c, "target_pass_s": statistics.median(one)}  # fmt: skip


def measured_costs(target, draft, context: int, ks: list[int], limit: int | None) -> dict:
    """What passes cost at that context, for the k in `ks`: raw seconds and `costs_of` them."""
    context, sizes = inside_limit(context, sorted({1, 2, *(k + 1 for k in ks)}), limit, draft_reads(draft))
    length = context + max(sizes[-1], draft_reads(draft))
    ids = random_ids([model for model in (target, draft) if model is not None], length)
    seconds, failed = pass_seconds(target, draft, ids, context, sizes, COST_REPEATS, COST_WARMUP, flag="--n-tokens")
    one_pass, heads = draft is not None and guesses_at_once(draft), draft.heads if isinstance(draft, Medusa) else 0
    return {"context": context, **costs_of(seconds, one_pass, heads), "seconds": {str(name): values for name, values in seconds.items()},
            "failed": failed, "error": None}  # fmt: skip


def measure_costs(file, tasks: list, draft, ks: list[int], /, **about) -> list[dict]:
    """Rows of a result file that say what passes cost at the shortest and the longest context of the tasks, measured
    before any speedup. `draft`: the draft model, or None; `about`: what else a row is known by."""
    contexts = [task.context for task in tasks]
    rows = []
    for context in dict.fromkeys([min(contexts), max(contexts)]):
        where = {"part": "costs", **about, "at": context}
        measure = functools.partial(measured_costs, tasks[0].target, draft, context, ks, tasks[0].limit)
        rows.append(file.find(**where) or file.add({**where, **measure()}))
    return rows


def costs_at(rows: list[dict], context: int) -> dict:
    """v, the draft's costs and target_pass_s at a context: the seconds on the straight line through those measured (a pass
    is affine in the tokens that its attention reads), and the ratios of those."""
    low, high = rows[0], rows[-1]
    if low["context"] == high["context"]:
        return low
    share = (context - low["context"]) / (high["context"] - low["context"])
    weights = (1 - share) * low["target_pass_s"], share * high["target_pass_s"]
    one = sum(weights)

    def between(a, b):
        return None if a is None else (weights[0] * a + weights[1] * b) / one

    ends = [{int(n): value for n, value in row["v"].items()} for row in (low, high)]  # a file's keys are strings
    v = {n: between(value, ends[1][n]) for n, value in ends[0].items() if n in ends[1]}
    return {
        "context": context,
        "v": v,
        "target_pass_s": one,
        "one_pass": low.get("one_pass", False),
        **{name: between(low[name], high[name]) for name in ("c", "c2")},
        "c_places": [between(*pair) for pair in zip(low["c_places"], high["c_places"], strict=True)],
    }


def affordable_side(side: int, device: torch.device, dtype: torch.dtype) -> int:
    """`side`, or half of it and so on until a product of two squares should take no longer than LONGEST_PRODUCT seconds:
    without a dtype's instructions a CPU would take minutes. A small first product says how fast it is."""
    first = torch.ones(FIRST_SIDE, FIRST_SIDE, dtype=dtype, device=device)
    seconds = min(timed(lambda: first @ first, device).seconds for _ in range(3))
    while side > FIRST_SIDE and seconds * (side / FIRST_SIDE) ** 3 > LONGEST_PRODUCT:
        side //= 2
    return side


@torch.inference_mode()
def device_limits(device: torch.device, dtype: torch.dtype) -> dict:
    """Read bandwidth (bytes/s) and matrix-product rate (multiply-adds counted as 2 operations/s), the best of a few tries.
    Reading is timed on float32 whatever the dtype: a CPU adds up half precision slower than it reads it."""
    block = torch.ones(READ_BYTES.get(device.type, 1 << 30) // 4, device=device)
    side = affordable_side(SQUARE.get(device.type, 4096), device, dtype)
    a = torch.ones(side, side, dtype=dtype, device=device)
    read = min(timed(block.sum, device).seconds for _ in range(LIMIT_TRIES))
    multiply = min(timed(lambda: a @ a, device).seconds for _ in range(LIMIT_TRIES))
    return {"read_bytes_per_s": block.nbytes / read, "operations_per_s": 2 * side**3 / multiply}


def limits_of_passes(weights_of: Callable[[float], tuple[float, float]], limits: dict) -> dict:
    """What the limits imply for a model: the floor of a pass over one token, and the ridge n*, at which its arithmetic takes
    as long as its reading.

    `weights_of(n)` gives (weights a token, bytes read by a pass over n), as `pass_weights`. Where every pass reads the
    same, n* = rate * bytes per weight / (2 * bandwidth), and up to n* checking could be free. A `mixture` reads more
    experts for more tokens, so in it no checking is free; n* is found by halving there.
    """
    weights, read = weights_of(1)
    read_s, token_s = read / limits["read_bytes_per_s"], 2 * weights / limits["operations_per_s"]
    ridge, mixture = read_s / token_s, weights_of(2)[1] > read
    if mixture:
        low, high = 0.0, weights_of(math.inf)[1] / limits["read_bytes_per_s"] / token_s
        for _ in range(60):
            ridge = (low + high) / 2
            more = weights_of(ridge)[1] / limits["read_bytes_per_s"] > ridge * token_s
            low, high = (ridge, high) if more else (low, ridge)
    return {
        "weights": weights,
        "read_bytes": read,
        "read_s": read_s,
        "arithmetic_s_per_token": token_s,
        "ridge_tokens": ridge,
        "mixture": mixture,
    }


def floor_s(n: int, weights_of: Callable[[float], tuple[float, float]], limits: dict) -> float:
    """The least time of a pass over n tokens: reading what it reads once, or the arithmetic, whichever is longer."""
    weights, read = weights_of(n)
    return max(read / limits["read_bytes_per_s"], 2 * n * weights / limits["operations_per_s"])
