"""One cell of every experiment: baseline, baseline again and speculation in turns, every sample checked, one flat row.

Free runs (two synchronisations) give the speed. One watched run of each arm, apart, says where the time goes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spec_common import (
    ClaimFailed,
    UserError,
    Watch,
    dtype_name,
    first_line,
    interleave,
    is_out_of_memory,
    ratio_summary,
    timed,
)
from spec_drafters import ModelDrafter
from spec_harness.theory import cost_speedup, leviathan_speedup, measured_v
from spec_loop import Decoded, baseline, prefill, speculate
from spec_methods.policy import FixedK
from spec_pass import forward, new_cache
from spec_rules import Greedy

NOISE_UNITS = 1  # units in the last place of the best logit
ESSAY_ROUND = {"essay": 1, "lean": 0}  # draft passes a round beyond k


def model_drafter(task: Task, rule):
    """The draft model guesses."""
    return ModelDrafter(
        task.draft, task.target.get_input_embeddings().weight.shape[0], read_last=task.loop == "essay", rule=rule
    )


def fixed_k(task: Task) -> FixedK:
    return FixedK(task.k)


@dataclass
class Task:
    """What is to be written: one prompt, how much of it, how. `prompt` is (1, n) on the models' device.

    `plain_draft`: the draft as transformers itself runs it, where `draft` is another form of it. `drafter`, `policy` and
    `rule` make what a method does otherwise, afresh for every run, so that no run learns from the one before.
    """

    target: torch.nn.Module
    draft: torch.nn.Module
    prompt: torch.Tensor
    n_tokens: int
    k: int
    loop: str = "lean"
    ends: frozenset[int] = frozenset()
    limit: int | None = None
    plain_draft: torch.nn.Module | None = None
    drafter: Callable[[Task, object], object] = model_drafter
    policy: Callable[[Task], object] = fixed_k
    rule: Callable[[], object] = Greedy

    @property
    def device(self) -> torch.device:
        return self.prompt.device

    def room(self) -> int:
        return self.n_tokens + self.k + 1


class Mismatch(ClaimFailed):
    """A sample that is not the baseline's text. `report` says where, both ids, and how close the call was."""

    def __init__(self, report: dict):
        super().__init__(
            f"not the target's own text: at token {report['index']} {report['arm']} wrote {report['got']}, the target alone {report['expected']}; {report}"
        )
        self.report = report


# --------------------------------------------------------------------------------------------------------------- arms


def run_baseline(task: Task, watch=None) -> tuple[tuple[Decoded, float], float]:
    """One plain run. Returns ((what was written, prefill seconds), decode seconds)."""
    state, prefill_s = timed(lambda: prefill(task.target, task.prompt, task.room()), task.device)
    watching = {"watch": watch()} if watch else {}
    done, decode_s = timed(
        lambda: baseline(task.target, state, task.n_tokens, task.ends, rule=task.rule(), **watching), task.device
    )
    return (done, prefill_s), decode_s


def run_speculative(task: Task, watch=None) -> tuple[tuple[Decoded, float], float]:
    """One speculative run, prefill of both models in the prefill seconds. Returns as `run_baseline`."""
    rule, policy = task.rule(), task.policy(task)
    drafter = task.drafter(task, rule)

    def start():
        state = prefill(task.target, task.prompt, task.room())
        drafter.start(state.ids, state.length)
        return state

    state, prefill_s = timed(start, task.device)
    watching = {"watch": watch()} if watch else {}
    options = {"loop": task.loop, "ends": task.ends, "limit": task.limit, "rule": rule, **watching}
    done, decode_s = timed(
        lambda: speculate(task.target, drafter, state, task.n_tokens, policy, **options), task.device
    )
    return (done, prefill_s), decode_s


def watched(run, task: Task) -> tuple[Decoded, float, Watch]:
    """A run with a clock at every phase. Returns (what was written, prefill seconds, the watch)."""
    watches = []
    (done, prefill_s), _ = run(task, lambda: watches.append(Watch(task.device)) or watches[-1])
    return done, prefill_s, watches[-1]


# ---------------------------------------------------------------------------------------------------------- exactness


@torch.inference_mode()
def last_logits(task: Task, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's float32 logits (vocabulary,) after prompt and `tokens`, from a pass over one token and one over k+1."""
    ids = torch.cat([task.prompt, task.prompt.new_tensor([tokens])], dim=1) if tokens else task.prompt
    start = max(0, ids.shape[1] - 1 - task.k)
    rows = []
    for split in (ids.shape[1] - 1, start):
        cache = new_cache(task.target)
        if split:
            forward(task.target, ids[:, :split], cache, 1)
        rows.append(forward(task.target, ids, cache, 1)[0, -1].float())
    return rows[0], rows[1]


def closeness(task: Task, tokens: list[int], contenders: list[int | None]) -> dict:
    """How close the call after `tokens` was, in logits: the gap of the two best, how far the worse of the two ids that
    were written is below the best, and the row noise (the largest change of a logit between passes over one token and
    over k+1).

    A near-tie, in half precision only: both ids are within two units in the last place of the best, which is what
    rounding on both of them can turn round. The noise measured here goes into the report but does not excuse: measured at
    one place it is often 0 where the loop's own cache did round, and a real fault would excuse itself by its size.
    """
    single, block = last_logits(task, tokens)
    best = single.topk(2).values
    noise = float((single - block).abs().max())
    unit = torch.finfo(task.target.dtype).eps * float(best[0].abs())
    below = None if None in contenders else float(best[0] - single[contenders].min())
    half = task.target.dtype != torch.float32
    tie = half and below is not None and below <= 2 * NOISE_UNITS * unit
    return {"top2_gap": float(best[0] - best[1]), "below_best": below, "row_noise": noise, "near_tie": tie}


def check_exact(task: Task, arm: str, expected: list[int], got: list[int], allow_near_ties: bool) -> dict | None:
    """None where `got` is `expected`. In half precision an excused near-tie's report; otherwise raises Mismatch.

    In float32 nothing is excused; see `closeness` for what a near-tie is.
    """
    if got == expected:
        return None
    pairs = zip(expected, got, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
    wanted, written = (tokens[index] if index < len(tokens) else None for tokens in (expected, got))
    report = {"arm": arm, "index": index, "dtype": dtype_name(task.target.dtype), "expected": wanted, "got": written}
    report |= closeness(task, expected[:index], [wanted, written])
    if report["near_tie"] and allow_near_ties:
        return report
    raise Mismatch(report)


# ---------------------------------------------------------------------------------------------------------------- rows


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def counts(task: Task, done: Decoded) -> dict:
    """The counters of a run, in the field's words; null where there was nothing to count."""
    proposed, accepted = sum(map(len, done.proposals)), sum(done.accepted)
    rounds = done.target_passes
    reached = [sum(kept >= i for kept in done.accepted) for i in range(1, task.k + 1)]
    turned_down = [
        sum(kept == i - 1 and wrong for kept, wrong in zip(done.accepted, done.rejected, strict=True))
        for i in range(1, task.k + 1)
    ]
    return {
        "emitted": len(done.tokens),
        "target_passes": rounds,
        "draft_passes": done.draft_passes,
        "proposed": proposed,
        "accepted": accepted,
        "discarded": proposed - accepted,
        "acceptance_rate": ratio(accepted, proposed),
        "rejections": done.rejections,
        "alpha": ratio(accepted, accepted + done.rejections),
        "block_efficiency": ratio(len(done.tokens), rounds),
        "acceptance_per_position": [ratio(count, rounds) for count in reached],
        "acceptance_per_position_given_the_last": [
            ratio(right, right + wrong) for right, wrong in zip(reached, turned_down, strict=True)
        ],
        "accepted_lengths": done.accepted,
        "emitted_lengths": done.emitted,
        "proposed_lengths": [len(guesses) for guesses in done.proposals],
    }


def speed(samples: dict[str, list], tokens: int) -> dict:
    """The free runs: raw seconds, medians, and each speedup as the median of paired ratios with its interval."""
    seconds = {arm: [decode_s for _, decode_s in runs] for arm, runs in samples.items()}
    whole = {arm: [prefill_s + decode_s for (_, prefill_s), decode_s in runs] for arm, runs in samples.items()}
    row = {f"{arm}_s": values for arm, values in seconds.items()}
    row.update({f"{arm}_end_to_end_s": values for arm, values in whole.items()})
    for name, arm in (("speedup", "speculative"), ("aa", "baseline_again")):
        summary = ratio_summary(seconds["baseline"], seconds[arm])
        row.update({name: summary["median"], f"{name}_low": summary["low"], f"{name}_high": summary["high"]})
    row["speedup_end_to_end"] = ratio_summary(whole["baseline"], whole["speculative"])["median"]
    row["baseline_tokens_per_s"] = tokens / statistics.median(seconds["baseline"])
    row["speculative_tokens_per_s"] = tokens / statistics.median(seconds["speculative"])
    return row


def arrivals(watch: Watch, prefill_s: float) -> dict:
    """ttft, tpot and the gaps between arrivals, in seconds, of a watched run (a round's tokens arrive together)."""
    clock, times = prefill_s, []
    for _, seconds, tokens in watch.laps:
        clock += seconds
        times += [clock] * tokens
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return {
        "ttft_s": times[0],
        "tpot_s": ratio(times[-1] - times[0], len(gaps)),
        "itl_mean_s": ratio(sum(gaps), len(gaps)),
        "itl_max_s": max(gaps, default=None),
    }


def where_time_went(plain: tuple, fast: tuple) -> dict:
    """From the watched runs: milliseconds a pass, the cost coefficient, and the seconds of each phase."""
    target, draft, verify = plain[2].seconds("target"), fast[2].seconds("draft"), fast[2].seconds("verify")
    whole = sum(seconds for _, seconds, _ in fast[2].laps)
    overhead = whole - sum(draft) - sum(verify)
    target_ms = 1000 * statistics.median(target)
    draft_ms = 1000 * statistics.median(draft) if draft else None
    row = {
        "target_pass_ms": target_ms,
        "draft_pass_ms": draft_ms,
        "verify_pass_ms": 1000 * statistics.median(verify),
        "cost_coefficient": draft_ms and draft_ms / target_ms,
        "draft_s": sum(draft),
        "verify_s": sum(verify),
        "overhead_s": overhead,
        "overhead_share": overhead / whole,
        "baseline_overhead_share": 1 - sum(target) / sum(seconds for _, seconds, _ in plain[2].laps),
    }
    for arm, run in (("baseline", plain), ("speculative", fast)):
        row.update({f"{arm}_{name}": value for name, value in arrivals(run[2], run[1]).items()})
    return row


def predict(task: Task, counted: dict, costs: dict) -> dict:
    """Both forms of the predicted speedup, from counts and costs alone, before any timed run. See spec_theory.

    `costs`: {"v": {n: V(n)}, "c": ..., "target_pass_s": ...} as `costs.costs_of` gives; the loop's own time a round
    comes from the watched run.
    """
    extra = ESSAY_ROUND[task.loop] if task.k else 0
    closed = (
        None
        if counted["alpha"] is None or task.policy is not fixed_k
        else leviathan_speedup(counted["alpha"], costs["c"], task.k, task.k + extra)
    )
    verified = [length + 1 for length in counted["proposed_lengths"]]
    v = measured_v(costs)
    overhead = counted["overhead_s"] / counted["target_passes"] / costs["target_pass_s"]
    share = counted["baseline_overhead_share"]
    measured = cost_speedup(
        counted["emitted"], counted["draft_passes"], verified, costs["c"], v, overhead, share / (1 - share)
    )
    return {"predicted_leviathan": closed, "predicted_costs": measured}


def compare(
    task: Task,
    repeats: int,
    warmup: int,
    allow_near_ties: bool = False,
    costs: dict | None = None,
    more_arms: dict | None = None,
) -> tuple[dict, Decoded]:
    """Measure one cell. Returns (row, the counted run). Raises Mismatch for a text that is not the target's own.

    `more_arms` are further ways to write the same tokens: name -> function returning ((Decoded, 0.0), seconds).
    """
    (first, _), _ = run_baseline(task)  # these two warm up the watched runs; `interleave` warms up the timed ones
    (warm, _), _ = run_speculative(task)
    plain, fast = watched(run_baseline, task), watched(run_speculative, task)
    near_ties = []

    def check(arm: str, done: Decoded) -> None:
        if tie := check_exact(task, arm, first.tokens, done.tokens, allow_near_ties):
            near_ties.append(tie)

    check("speculative, first", warm)
    check("baseline, watched", plain[0])
    check("speculative, watched", fast[0])
    row = {
        "k": task.k,
        "loop": task.loop,
        "n_tokens": task.n_tokens,
        "prompt_tokens": task.prompt.shape[1],
        **counts(task, fast[0]),
    }
    row.update(where_time_went(plain, fast))
    if costs:
        row.update(predict(task, row, costs))
    arms = {
        "baseline": lambda: run_baseline(task),
        "speculative": lambda: run_speculative(task),
        "baseline_again": lambda: run_baseline(task),
        **(more_arms or {}),
    }
    samples = interleave(arms, repeats, warmup)
    for arm, runs in samples.items():
        for (done, _), _ in runs:
            check(arm, done)
    row.update(speed(samples, len(first.tokens)), exact=not near_ties, near_ties=near_ties, error=None)
    if row.get("predicted_costs") is not None:
        row["prediction_error"] = row["predicted_costs"] - row["speedup"]
    return row, fast[0]


# ------------------------------------------------------------------------------------------------------- cells in a file


def failed_row(task: Task, error: Exception) -> dict:
    """The row of a cell that gave no measurement: why, and nulls where a reader would look for a number."""
    report = error.report if isinstance(error, Mismatch) else None
    return {"k": task.k, "loop": task.loop, "n_tokens": task.n_tokens, "speedup": None, "exact": False if report else None,
            "mismatch": report, "error": first_line(error)}  # fmt: skip


def recorded(file, task: Task, where: dict, measure: Callable[[], dict]) -> dict:
    """The row of one cell of a sweep: the file's if it has it, else measured and added. `where` names the cell.

    A cell that runs out of memory is recorded and the sweep goes on. A claim that failed, or logits that are
    not finite, are recorded and raised: they fail the run.
    """
    if found := file.find(**where):
        return found
    try:
        return file.add({**where, **measure()})
    except (ClaimFailed, UserError) as error:
        file.add({**where, **failed_row(task, error)})
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return file.add({**where, **failed_row(task, error)})


def cell(file, task: Task, args, where: dict, costs: dict | None = None, more_arms: dict | None = None) -> dict:
    """The row of one cell that `compare` measures, as `recorded`."""

    def measure() -> dict:
        row, counting = compare(task, args.repeats, args.warmup, args.allow_near_ties, costs, more_arms)
        return {**row, "tokens": counting.tokens, "proposals": counting.proposals}

    return recorded(file, task, where, measure)
