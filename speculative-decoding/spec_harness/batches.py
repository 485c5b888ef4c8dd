"""One batch measured: baseline, baseline again and speculation in turns, every row checked against its request alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from spec_common import interleave, timed
from spec_harness.batch_costs import predicted_speedup, widest
from spec_harness.cells import Mismatch, Task, check_exact, counts, speed, watched, where_time_went
from spec_loop import Decoded
from spec_methods import batch as batch_loop
from spec_methods.batch import Batch, BatchDrafter

PER_REQUEST = (
    "emitted",
    "target_passes",
    "draft_passes",
    "proposed",
    "accepted",
    "rejections",
    "acceptance_rate",
    "alpha",
    "block_efficiency",
)


@dataclass
class Requests:
    """A batch to be decoded: the task of each of its rows, all of the same models, k and end tokens."""

    tasks: list[Task]
    names: list[str]

    @property
    def first(self) -> Task:
        return self.tasks[0]

    @property
    def device(self) -> torch.device:
        return self.first.device

    def begin(self, size: int) -> Requests:
        """The first `size` of them."""
        return Requests(self.tasks[:size], self.names[:size])

    def prefill(self) -> Batch:
        budgets = [task.n_tokens for task in self.tasks]
        return batch_loop.prefill(self.first.target, [task.prompt for task in self.tasks], budgets, self.first.k)


def run_plain(requests: Requests, watch=None) -> tuple[tuple[Batch, float], float]:
    """The whole batch, plainly. Returns ((what was written, prefill seconds), decode seconds)."""
    batch, prefill_s = timed(requests.prefill, requests.device)
    watching = {"watch": watch()} if watch else {}
    done, decode_s = timed(
        lambda: batch_loop.baseline(requests.first.target, batch, requests.first.ends, **watching), requests.device
    )
    return (done, prefill_s), decode_s


def run_speculative(requests: Requests, watch=None) -> tuple[tuple[Batch, float], float]:
    """The whole batch, speculatively; prefill of both models in the prefill seconds. Returns as `run_plain`."""
    task = requests.first
    drafter = BatchDrafter(task.draft, task.target.get_input_embeddings().weight.shape[0])

    def start():
        batch = requests.prefill()
        drafter.start(batch)
        return batch

    batch, prefill_s = timed(start, requests.device)
    watching = {"watch": watch()} if watch else {}
    done, decode_s = timed(
        lambda: batch_loop.speculate(task.target, drafter, batch, task.k, task.ends, **watching), requests.device
    )
    return (done, prefill_s), decode_s


def check_batch(
    requests: Requests, arm: str, done: list[Decoded], alone: list[list[int]], allow_near_ties: bool
) -> list[dict]:
    """The excused near-ties, by row. Raises Mismatch, naming the row, for a text that its request alone does not get."""
    found = []
    for row, (task, name, expected, got) in enumerate(zip(requests.tasks, requests.names, alone, done, strict=True)):
        try:
            tie = check_exact(task, f"row {row} ({name}) of {arm}", expected, got.tokens, allow_near_ties)
        except Mismatch as error:
            raise Mismatch({"row": row, **error.report}) from None
        found += [{"row": row, **tie}] if tie else []
    return found


def pooled(done: list[Decoded]) -> Decoded:
    """All rows' runs as one, for the counters."""
    whole = Decoded()
    for one in done:
        for name, value in vars(one).items():
            setattr(whole, name, getattr(whole, name) + value)
    return whole


def untimed(requests: Requests, plain: tuple, fast: tuple, costs: list[dict]) -> dict:
    """The part of a row that no free run is needed for: counts, where time went, the prediction. From the watched runs."""
    task, done = requests.first, fast[0].done
    mine = next(cost for cost in costs if cost["batch"] == len(requests.tasks))
    phases = {
        name: value for name, value in where_time_went(plain, fast).items() if "itl" not in name and "tpot" not in name
    }
    return {
        "k": task.k,
        "n_tokens": task.n_tokens,
        "prompt_tokens": [one.prompt.shape[1] for one in requests.tasks],
        **counts(task, pooled(done)),
        **phases,
        "batch_rounds": len(fast[0].rounds),
        "check_cost": mine["check_cost"],
        "c": mine["c"],
        "predicted": predicted_speedup(costs, widest(task), plain, fast),
        "requests": [
            {"request": name, "tokens": one.tokens, **{key: counts(task, one)[key] for key in PER_REQUEST}}
            for name, one in zip(requests.names, done, strict=True)
        ],
    }


def compare(requests: Requests, alone: list[list[int]], costs: list[dict], args) -> dict:
    """Measure one batch: counted and predicted first, then timed in turns. Raises Mismatch.

    `alone`: the text of each request by itself; `costs`: the rows of `batch_costs`, this batch's among them.
    """
    near_ties = []

    def check(arm: str, batch: Batch) -> None:
        near_ties.extend(check_batch(requests, arm, batch.done, alone, args.allow_near_ties))

    check(
        "the batched baseline, first", run_plain(requests)[0][0]
    )  # these two warm up the watched runs; `interleave` the timed ones
    check("speculation, first", run_speculative(requests)[0][0])
    plain, fast = watched(run_plain, requests), watched(run_speculative, requests)
    check("the batched baseline, watched", plain[0])
    check("speculation, watched", fast[0])
    row = untimed(requests, plain, fast, costs)
    arms = {"baseline": run_plain, "speculative": run_speculative, "baseline_again": run_plain}
    samples = interleave(
        {arm: functools.partial(run, requests) for arm, run in arms.items()}, args.repeats, args.warmup
    )
    for arm, runs in samples.items():
        for (batch, _), _ in runs:
            check(arm, batch)
    row.update(speed(samples, row["emitted"]))
    row.update(
        {f"{arm}_tokens_per_s_per_user": row[f"{arm}_tokens_per_s"] / len(alone) for arm in ("baseline", "speculative")}
    )
    row.update(prediction_error=row["predicted"] - row["speedup"], exact=not near_ties, near_ties=near_ties, error=None)
    return row
