"""Batches measured: the same requests as batches of B, plainly, plainly again and speculatively, every row checked.

All sizes decode the same requests (16 of them as one batch of 16, as two of 8, ...), so that a size is compared with
another by its size alone. What passes over B rows cost is measured first, and the speedup is predicted from it.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from spec_common import Timed, Watch, interleave, paired_ratio, timed, unwatched

import psutil
import torch

from spec_counts import Decoded
from spec_harness.arms import Task
from spec_harness.costs import COST_REPEATS, COST_WARMUP, random_ids
from spec_harness.reference import generated_rows
from spec_harness.theory import interpolated
from spec_methods.batch import Batch, ModelRows, baseline_rows, prefill_rows, speculate_rows
from spec_methods.rows import feed, read_prompts
from spec_models.checks import context_limit, vocabulary_rows


@dataclass
class Requests:
    """What is to be written, by name; the draft model, the policy of every row, and how many rows a batch has."""

    tasks: dict[str, Task]
    draft: torch.nn.Module
    policy: object
    size: int

    @property
    def target(self) -> torch.nn.Module:
        return next(iter(self.tasks.values())).target

    @property
    def device(self) -> torch.device:
        return next(iter(self.tasks.values())).device

    @property
    def ends(self) -> frozenset[int]:
        return next(iter(self.tasks.values())).ends

    def groups(self) -> list[list[Task]]:
        """The batches, one after the other."""
        tasks = list(self.tasks.values())
        return [tasks[first : first + self.size] for first in range(0, len(tasks), self.size)]


@dataclass
class BatchRun:
    """What each request got, in order; the rounds of all batches; prefill and decode seconds of all of them together, the
    first one's prefill, and the clock of a watched run."""

    done: list[Decoded]
    rounds: list[tuple[int, int, int]]
    prefill_s: float
    seconds: float
    first_prefill_s: float = 0.0
    watch: Watch | None = None

    @property
    def whole_s(self) -> float:
        return self.prefill_s + self.seconds


def run_batches(requests: Requests, speculative: bool, watched: bool = False) -> BatchRun:
    """Every batch in turn: prefill (both models' where a draft guesses) apart from the decoding."""
    watch = Watch(requests.device) if watched else None
    run = BatchRun([], [], 0.0, 0.0, watch=watch)
    for group in requests.groups():
        drafter = draft_rows(requests) if speculative else None
        batch, prefill_s = timed(functools.partial(start_batch, requests, group, drafter), requests.device)
        batch.watch = watch or unwatched
        if watch:
            watch.begin()
        if drafter:
            decode = functools.partial(speculate_rows, requests.target, drafter, batch, requests.policy, requests.ends)
        else:
            decode = functools.partial(baseline_rows, requests.target, batch, requests.ends)
        seconds = timed(decode, requests.device).seconds
        run.first_prefill_s = run.first_prefill_s or prefill_s
        run.done, run.rounds = run.done + batch.done, run.rounds + batch.rounds
        run.prefill_s, run.seconds = run.prefill_s + prefill_s, run.seconds + seconds
    return run


def draft_rows(requests: Requests) -> ModelRows:
    return ModelRows(requests.draft, vocabulary_rows(requests.target), context_limit(requests.draft))


def start_batch(requests: Requests, group: list[Task], drafter) -> Batch:
    budgets = [task.n_tokens for task in group]
    batch = prefill_rows(requests.target, [task.prompt for task in group], budgets, requests.policy.most)
    if drafter:
        drafter.start(batch)
    return batch


def run_generated(target, requests: Requests) -> BatchRun:
    """transformers' `generate` on the same batches, prompts padded on the left; its prefill is in its seconds."""
    run = BatchRun([], [], 0.0, 0.0)
    for group in requests.groups():
        found = generated_rows(target, group)
        run.done, run.seconds = run.done + found.done, run.seconds + found.seconds
    return run


def all_rows(done: list[Decoded]) -> Decoded:
    """All requests' runs as one, for the counters."""
    whole = Decoded()
    for one in done:
        for name, value in vars(one).items():
            setattr(whole, name, getattr(whole, name) + value)
    return whole


def phases(plain: BatchRun, fast: BatchRun) -> dict:
    """From the watched runs: milliseconds a pass, the loop's own share, time to the first batch's first tokens, and how
    full the passes were (rows leave as they finish: the last ones run alone)."""
    row = {"draft_pass_ms": None}
    for name, run, phase in (("target", plain, "target"), ("verify", fast, "verify"), ("draft", fast, "draft")):
        if seconds := run.watch.seconds(phase):
            row[f"{name}_pass_ms"] = 1000 * statistics.median(seconds)
    row["overhead_share"] = sum(fast.watch.seconds("pick", "keep", "look-up")) / sum(fast.watch.seconds())
    for arm, run in (("baseline", plain), ("speculative", fast)):
        first = next(i for i, lap in enumerate(run.watch.laps) if lap[2])
        row[f"{arm}_ttft_s"] = run.first_prefill_s + sum(lap[1] for lap in run.watch.laps[: first + 1])
        row[f"{arm}_rows_a_pass"] = statistics.fmean(rows for rows, _, _ in run.rounds)
    return row | {"batch_rounds": len(fast.rounds), "row_rounds": sum(rows for rows, _, _ in fast.rounds)}


# --------------------------------------------------------------------------------------------------------------- costs


@torch.inference_mode()
def pass_arms(
    model, name: str, rows: int, context: int, sizes: list[int], judged: int | None = None
) -> dict[str, Callable]:
    """Arms for `interleave`: a pass of `rows` rows over q new tokens each, after `context` cached ones, with the logits of
    the last `judged` of them (all q if not said: a target judges each, a draft needs one). Slots are written over, so
    every repeat runs at the same context and nothing has to be put back."""
    ids = random_ids([model], rows * (context + max(sizes))).view(rows, -1)
    cache = read_prompts(model, ids, [context + 1] * rows, ids.shape[1])
    slots = torch.arange(ids.shape[1], device=ids.device).expand(rows, -1)

    def arm(q: int) -> Timed:
        work = functools.partial(feed, model, ids, cache, slots[:, context : context + q], context + q, judged or q)
        return Timed(None, timed(work, ids.device).seconds)

    return {f"{name} {q}": functools.partial(arm, q) for q in sizes}


def widest(task: Task, k: int) -> int:
    """The most guesses that a round can have, at least 1: the lean loop looks no further than the text."""
    return max(1, min(k, task.n_tokens - 1))


def batch_costs(task: Task, draft, k: int, rows: int, context: int) -> dict:
    """Raw seconds of passes in turns: T(B, 1), T(B, k+1), and the draft's T_d(B, 1) and T_d(B, 2): it reads two tokens
    where all guesses of a row were kept. The context is shortened to what the models' limit leaves."""
    block = widest(task, k) + 1
    context = context if task.limit is None else max(1, min(context, task.limit - block))
    arms = pass_arms(task.target, "target", rows, context, [1, block])
    arms |= pass_arms(draft, "draft", rows, context, [1, 2], judged=1)
    samples = interleave(arms, COST_REPEATS, COST_WARMUP)
    seconds = {name: [run.seconds for run in runs] for name, runs in samples.items()}
    one = seconds["target 1"]
    return {"context": context, "seconds": seconds, "target_pass_s": statistics.median(one), "error": None,
            "check_cost": paired_ratio(seconds[f"target {block}"], one)["median"],
            "c": paired_ratio(seconds["draft 1"], one)["median"]}  # fmt: skip


def seconds_by_rows(costs: list[dict], name: str, q: int) -> Callable[[int], float]:
    """Seconds of such a pass for any number of rows, from the batches measured (straight lines between them)."""
    return interpolated({row["batch"]: statistics.median(row["seconds"][f"{name} {q}"]) for row in costs})


def predicted_speedup(costs: list[dict], k: int, plain: BatchRun, fast: BatchRun) -> float:
    """What the counted rounds of both arms cost by measured passes alone: with a full batch in every round this is
    E / (T(B, k+1) / T(B, 1) + k c(B) + o). `plain` and `fast` are watched runs; their loops' own time is added.

    Rows leave as they finish, so each round is charged for the rows and guesses that it had.
    """
    one, block = seconds_by_rows(costs, "target", 1), seconds_by_rows(costs, "target", k + 1)
    guess, catch_up = seconds_by_rows(costs, "draft", 1), seconds_by_rows(costs, "draft", 2)
    spent = sum(one(rows) for rows, _, _ in plain.rounds)
    spent_fast = 0.0
    for rows, ahead, missing in fast.rounds:
        spent_fast += one(rows) + (block(rows) - one(rows)) * ahead / k
        if ahead:
            spent_fast += (catch_up if missing > 1 else guess)(rows) + (ahead - 1) * guess(rows)
    overheads = [sum(run.watch.seconds("pick", "keep")) for run in (plain, fast)]
    return (spent + overheads[0]) / (spent_fast + overheads[1])


def free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


@torch.inference_mode()
def bytes_needed(requests: Requests) -> int:
    """About what a batch takes beside the weights: both caches, once more while rows leave them, the logits in float32."""
    k, tasks = requests.policy.most, list(requests.tasks.values())
    room = max(task.prompt.shape[1] + task.n_tokens for task in tasks) + k + 1
    two = tasks[0].prompt.new_zeros(1, 2)
    slot = sum(read_prompts(model, two, [2], 1).row_bytes() for model in (requests.target, requests.draft))
    logits = (k + 1) * vocabulary_rows(requests.target) * (4 + requests.target.dtype.itemsize)
    return min(requests.size, len(tasks)) * (2 * room * slot + logits)
