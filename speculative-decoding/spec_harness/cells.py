"""The row of a cell: where its time went, what its costs predict; and the file that keeps it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from spec_common import ClaimFailed, UserError, first_line, is_out_of_memory, paired_ratio

from spec_harness.arms import Method, Run, Task
from spec_harness.costs import passes_within
from spec_harness.theory import cost_speedup, drafting_cost, forecast_speedup, leviathan_speedup, measured_v
from spec_methods.policy import FixedK

OVERLAPPED = ("foresee", "wait")  # phases of overlapped runs alone: answers made beforehand, waiting for the draft
ESSAY_ROUND = {"essay": 1, "lean": 0}  # draft passes a round beyond k


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# --------------------------------------------------------------------------------------------------------- seconds


def timing(samples: dict[str, list[Run]], tokens: int) -> dict:
    """The free runs: raw seconds, and each speedup as the median of paired ratios with its interval."""
    seconds = {arm: [run.seconds for run in runs] for arm, runs in samples.items()}
    whole = {arm: [run.whole_s for run in runs] for arm, runs in samples.items()}
    row = {f"{arm}_s": values for arm, values in seconds.items()}
    row.update({f"{arm}_end_to_end_s": values for arm, values in whole.items()})
    row.update(speedups(seconds))
    row["speedup_end_to_end"] = paired_ratio(whole["baseline"], whole["speculative"])["median"]
    for arm in ("baseline", "speculative"):
        row[f"{arm}_tokens_per_s"] = tokens / statistics.median(seconds[arm])
    return row


def speedups(seconds: dict[str, list[float]]) -> dict:
    """`speedup` and `aa`, each with _low and _high: the baseline's seconds over those of speculation, and of itself again."""
    row = {}
    for name, arm in (("speedup", "speculative"), ("aa", "baseline_again")):
        found = paired_ratio(seconds["baseline"], seconds[arm])
        row.update({name: found["median"], f"{name}_low": found["low"], f"{name}_high": found["high"]})
    return row


def pooled(rows: list[dict]) -> dict:
    """Several cells as one, time over time: the seconds of a turn added up over them, then `speedups`; `predicted_costs`
    the same way. Every cell of as many turns."""
    arms = ("baseline", "speculative", "baseline_again")
    turns = {arm: [sum(turn) for turn in zip(*(row[f"{arm}_s"] for row in rows), strict=True)] for arm in arms}
    found = {**speedups(turns), "pairs": len(turns["baseline"])}
    if all(row.get("predicted_costs") for row in rows):
        alone = [statistics.median(row["baseline_s"]) for row in rows]
        found["predicted_costs"] = sum(alone) / sum(
            t / row["predicted_costs"] for t, row in zip(alone, rows, strict=True)
        )
    return found


def arrivals(run: Run) -> dict:
    """ttft, tpot and the gaps between arrivals, in seconds, of a watched run (a round's tokens arrive together)."""
    clock, times = run.prefill_s, []
    for _, seconds, tokens in run.watch.laps:
        clock += seconds
        times += [clock] * tokens
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    return {
        "ttft_s": times[0],
        "tpot_s": ratio(times[-1] - times[0], len(gaps)),
        "itl_mean_s": ratio(sum(gaps), len(gaps)),
        "itl_max_s": max(gaps, default=None),
    }


def round_seconds(run: Run) -> list[float]:
    """The seconds of each round of a watched run: what was written ends it."""
    found = [0.0]
    for _, seconds, tokens in run.watch.laps:
        found[-1] += seconds
        found += [0.0] if tokens else []
    return found[:-1]


def where_time_went(plain: Run, fast: Run) -> dict:
    """From the watched runs: milliseconds a pass, the seconds of each phase, and what neither model's passes took."""
    draft, verify, target = fast.watch.seconds("draft"), fast.watch.seconds("verify"), plain.watch.seconds("target")
    whole, plain_whole = sum(fast.watch.seconds()), sum(plain.watch.seconds())
    beside = {f"{phase}_s": sum(laps) for phase in OVERLAPPED if (laps := fast.watch.seconds(phase))}
    overhead = whole - sum(draft) - sum(verify) - sum(beside.values())
    row = {
        "target_pass_ms": 1000 * statistics.median(target),
        "draft_pass_ms": 1000 * statistics.median(draft) if draft else None,
        "verify_pass_ms": 1000 * statistics.median(verify),
        "draft_s": sum(draft),
        "verify_s": sum(verify),
        **beside,
        "overhead_s": overhead,
        "overhead_share": overhead / whole,
        "baseline_overhead_share": 1 - sum(target) / plain_whole,
        "watched_round_s": round_seconds(fast),
    }
    for arm, run in (("baseline", plain), ("speculative", fast)):
        row.update({f"{arm}_{name}": value for name, value in arrivals(run).items()})
    return row


# ------------------------------------------------------------------------------------------------------ what costs say


def accounted(counted: dict, costs: dict, verified: list[int] | None = None) -> float:
    """The speedup that a cell's own counted rounds come to at the measured costs: an account of where the time goes,
    not a forecast. `counted` holds counters and shares of a watched run; `costs` as `costs_at` gives them; `verified` the tokens
    in each round's target pass, where they are not the guesses and the token before them."""
    verified = verified or [length + 1 for length in counted["proposed_lengths"]]
    overhead = counted["overhead_s"] / counted["target_passes"] / costs["target_pass_s"]
    share = counted["baseline_overhead_share"]
    lengths = counted["proposed_lengths" if costs.get("one_pass") else "drafting_lengths"]
    second = counted["draft_tokens_read"] - sum(lengths)  # tokens read beyond the first of their pass, masks left out
    drafted = drafting_cost(costs, lengths, second)
    return cost_speedup(counted["emitted"], drafted, verified, measured_v(costs), overhead, share / (1 - share))


def forecast(row: dict, costs: dict) -> dict:
    """What a cell of a fixed k could be told before it is timed, and whether it came: alpha of every other round, from the
    first on, forecasts the speedup of the rounds between them at the measured costs.

    Neighbours are alike, and no token is on both sides. What the others took is their share of the watched run's seconds,
    laid on the free runs'; null where a side judged or wrote nothing.
    """
    rounds = list(zip(row["proposed_lengths"], row["accepted_lengths"], row["emitted_lengths"], row["watched_round_s"], strict=True))  # fmt: skip
    known, other = rounds[::2], rounds[1::2]
    alpha = ratio(sum(kept for _, kept, _, _ in known), sum(min(made, kept + 1) for made, kept, _, _ in known))
    if alpha is None or not other:
        return dict.fromkeys(("forecast_alpha", "forecast", "forecast_came", "forecast_error"))
    overhead = row["overhead_s"] / row["target_passes"] / costs["target_pass_s"]
    share = row["baseline_overhead_share"]
    foretold = forecast_speedup(
        alpha, row["k"], row["k"] + ESSAY_ROUND[row["loop"]], costs, overhead, share / (1 - share)
    )
    tokens, seconds = sum(one[2] for one in other) / row["emitted"], sum(one[3] for one in other) / sum(row["watched_round_s"])  # fmt: skip
    came = row["speedup"] * tokens / seconds
    return {"forecast_alpha": alpha, "forecast": foretold, "forecast_came": came, "forecast_error": foretold - came}


def closed_form(task: Task, method: Method, alpha: float | None, costs: dict) -> float | None:
    """Leviathan's closed form; None where it does not speak: for another policy than a fixed k, or without an alpha."""
    if alpha is None or type(method.policy) is not FixedK:
        return None
    extra = ESSAY_ROUND[task.loop] if method.k else 0
    return leviathan_speedup(alpha, costs["c"] or 0.0, method.k, method.k + extra)


# ------------------------------------------------------------------------------------------------------ cells in a file


def failed_row(task: Task, error: Exception) -> dict:
    """The row of a cell that gave no measurement: why, and nulls where a reader would look for a number."""
    report = getattr(error, "report", None)
    return {"loop": task.loop, "n_tokens": task.n_tokens, "target_alone_from": task.alone_from, "speedup": None, "exact": False if report else None,
            "mismatch": report, "error": first_line(error)}  # fmt: skip


def find_or_measure(file, task: Task, where: dict, measure: Callable[[], dict]) -> dict:
    """The row of one cell of a sweep: the file's if it has it, else measured and added. `where` names the cell.

    A cell that runs out of memory is recorded and the sweep goes on. A claim that failed, logits that are not finite, or
    a pass that cannot be made are recorded and raised: they fail the run.
    """
    if found := file.find(**where):
        return found
    try:
        with passes_within(task.prompt.shape[1] + task.n_tokens, "--n-tokens"):
            return file.add({**where, **measure(), "target_alone_from": task.alone_from})
    except (ClaimFailed, UserError) as error:
        file.add({**where, **failed_row(task, error)})
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return file.add({**where, **failed_row(task, error)})
