"""What passes cost for a batch, what they predict of its speedup, and how much memory it takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import psutil
import torch

from spec_common import interleave, ratio_summary, timed
from spec_harness.cells import Task
from spec_harness.costs import COST_REPEATS, COST_WARMUP, random_ids
from spec_harness.theory import interpolated
from spec_methods.rows import feed, read_prompts


@torch.inference_mode()
def pass_arms(model, name: str, rows: int, context: int, sizes: list[int]) -> dict[str, Callable]:
    """Arms for `interleave`: a pass of `rows` rows over q new tokens each, after `context` cached ones. Slots are written
    over, so every repeat runs at the same context and nothing has to be put back."""
    ids = random_ids([model], rows * (context + max(sizes))).view(rows, -1)
    cache = read_prompts(model, ids, [context + 1] * rows, ids.shape[1])
    slots = torch.arange(ids.shape[1], device=ids.device).expand(rows, -1)
    return {
        f"{name} {q}": lambda q=q: timed(
            lambda: feed(model, ids, cache, slots[:, context : context + q], context + q, q), ids.device
        )
        for q in sizes
    }


def widest(task: Task) -> int:
    """The most guesses that a round can have, at least 1: the lean loop looks no further than the text."""
    return max(1, min(task.k, task.n_tokens - 1))


def batch_costs(task: Task, rows: int, context: int) -> dict:
    """Raw seconds of passes in turns: T(B, 1), T(B, k+1), and the draft's T_d(B, 1) and T_d(B, 2): it reads two tokens
    where all guesses of a row were kept. The context is shortened to what the models' limit leaves."""
    block = widest(task) + 1
    context = context if task.limit is None else max(1, min(context, task.limit - block))
    arms = pass_arms(task.target, "target", rows, context, [1, block]) | pass_arms(
        task.draft, "draft", rows, context, [1, 2]
    )
    samples = interleave(
        {name: lambda arm=arm: (None, arm()[1]) for name, arm in arms.items()}, COST_REPEATS, COST_WARMUP
    )
    seconds = {name: [each for _, each in runs] for name, runs in samples.items()}
    one = seconds["target 1"]
    return {"context": context, "seconds": seconds, "target_pass_s": statistics.median(one), "error": None,
            "check_cost": ratio_summary(seconds[f"target {block}"], one)["median"], "c": ratio_summary(seconds["draft 1"], one)["median"]}  # fmt: skip


def pass_seconds(costs: list[dict], name: str, q: int) -> Callable[[int], float]:
    """Seconds of such a pass for any number of rows, from the batches measured (straight lines between them)."""
    return interpolated({row["batch"]: statistics.median(row["seconds"][f"{name} {q}"]) for row in costs})


def predicted_speedup(costs: list[dict], k: int, plain: tuple, fast: tuple) -> float:
    """What the counted rounds of both arms cost by measured passes alone: with a full batch in every round this is
    E / (T(B, k+1) / T(B, 1) + k c(B) + o). `plain` and `fast` are watched runs; their loops' own time is added.

    Rows leave as they finish, so each round is charged for the rows and guesses that it had.
    """
    one, block = pass_seconds(costs, "target", 1), pass_seconds(costs, "target", k + 1)
    guess, catch_up = pass_seconds(costs, "draft", 1), pass_seconds(costs, "draft", 2)
    spent = sum(one(rows) for rows, _, _ in plain[0].rounds)
    spent_fast = 0.0
    for rows, ahead, missing in fast[0].rounds:
        spent_fast += one(rows) + (block(rows) - one(rows)) * ahead / k
        if ahead:
            spent_fast += (catch_up if missing > 1 else guess)(rows) + (ahead - 1) * guess(rows)
    overheads = [
        sum(seconds for phase, seconds, _ in run[2].laps if phase in ("pick", "keep")) for run in (plain, fast)
    ]
    return (spent + overheads[0]) / (spent_fast + overheads[1])


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


@torch.inference_mode()
def bytes_needed(tasks: list[Task]) -> int:
    """About what a batch takes beside the weights: both caches, once more while rows leave them, and the logits in float32."""
    task, room = tasks[0], max(task.prompt.shape[1] + task.room() for task in tasks)
    slot = sum(
        read_prompts(model, task.prompt.new_zeros(1, 2), [2], 1).row_bytes() for model in (task.target, task.draft)
    )
    logits = (task.k + 1) * task.target.get_input_embeddings().weight.shape[0] * (4 + task.target.dtype.itemsize)
    return len(tasks) * (2 * room * slot + logits)
