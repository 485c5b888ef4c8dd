"""What the cost curve advises: how far checking is nearly free, the best k at an alpha, and the words for both."""

from __future__ import annotations

from spec_common import UserError

from spec_cli import reachable
from spec_harness.compare import read_document
from spec_harness.essay import FIGURES
from spec_harness.theory import alpha_of_acceptance, best_k, ceiling, even_costs

NEARLY_FREE = 1.25  # the essay calls 1.15x a ride-along and 1.71x "running out"; between them, nearer the first


def free_up_to(rows: list[dict]) -> int:
    """The last n, reading upwards from 1, whose pass costs no more than NEARLY_FREE."""
    free = 1
    for row in rows:
        if row.get("v") is None or row["v"] > NEARLY_FREE:
            break
        free = row["tokens"]
    return free


ESSAY_ALPHA = alpha_of_acceptance(FIGURES["decode_k5_prose"]["acceptance"], FIGURES["setup"]["k"])
ESSAYS = "the essay's: 72 % accepted of 5 proposed; give yours by --alpha or --from results/spec_bench.json"


def assumed_alpha(args) -> tuple[float, str]:
    """The alpha of the verdict and where it comes from. Raises UserError for a file that says none."""
    if args.alpha is not None:
        return args.alpha, "given"
    if args.measured is None:
        return ESSAY_ALPHA, ESSAYS
    path = reachable(args.measured, "--from")
    alpha = read_document(path, "--from")["summary"].get("alpha_median")
    if not isinstance(alpha, (int, float)):
        raise UserError(f"--from {path.name}: no result file of spec_bench.py with an alpha in it; run that first")
    return float(alpha), f"measured in {path.name}"


def advise(rows: list[dict], c: float, alpha: float, source: str) -> dict | None:
    """The best k and its predicted speedup; None where the costs are too noisy to be advice (a V below 1 with all of its
    interval: a pass over more tokens does not take less time)."""
    v = {row["tokens"]: row["v"] for row in rows if row.get("v") is not None}
    if any(row.get("v_high") is not None and row["v_high"] < 1 for row in rows if row["tokens"] > 1):
        return None
    k, speedup = best_k(alpha, even_costs(c, v), max(v) - 1)
    return {"best_k": k, "predicted_speedup": speedup, "assumed_alpha": alpha, "alpha_source": source, "c_used": c}


def ridge_words(summary: dict) -> str:
    ridge = f"n* = {summary['ridge_tokens']:.1f} tokens"
    if summary["mixture"]:
        return f"A mixture reads more experts for more tokens, so checking is never free; from {ridge} on arithmetic decides."
    return f"Checking could be free up to {ridge}."


def verdict(rows: list[dict], summary: dict, measured_c: bool) -> str:
    """The words under the table."""
    free, advice = summary["nearly_free_up_to"], summary["advice"]
    lines = [
        f"limits: {summary['read_bytes_per_s'] / 1e9:.1f} GB/s read, {summary['operations_per_s'] / 1e9:.0f} GFLOP/s. A pass reads "
        f"{summary['read_bytes'] / 1e6:.0f} MB, so it takes {1000 * summary['read_s']:.1f} ms or more; the measured one reaches "
        f"{100 * summary['bandwidth_share']:.0f} % of that bandwidth. {ridge_words(summary)}",
        f"checking is nearly free (V <= {NEARLY_FREE}) up to {free} tokens."
        if free > 1
        else "checking is not nearly free for any block here.",
    ]
    if advice is None:
        lines.append(
            "no advice: a pass over more tokens took less time than one over one, so the machine was too busy."
        )
        return "\n".join(lines)
    source = "measured" if measured_c else "the essay's; measure yours with --draft"
    alpha = f"alpha {advice['assumed_alpha']:.2f} ({advice['alpha_source']})"
    given = f"if c is {advice['c_used']:.2f} ({source}) and {alpha}"
    if advice["best_k"]:
        top = ceiling(advice["assumed_alpha"])
        bound = f" (no k writes more than {top:.1f} tokens a pass at that alpha)" if top else ""
        lines.append(
            f"{given}, k = {advice['best_k']} would be best: {advice['predicted_speedup']:.2f}x predicted{bound}."
        )
    else:
        lines.append(f"{given}, no k pays: do not speculate here.")
    return "\n".join(lines)
