"""What is said of a row of overlap beside its speedup: what its costs come to, taking turns and at once."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

from spec_common import paired_ratio

from spec_harness.cells import accounted, pooled
from spec_harness.overlapping import balanced_g, chain_speedup, pearl_speedup, ssd_speedup
from spec_harness.theory import interpolated, measured_v

MOST_AHEAD = 16  # guesses a round that the balance may come to: V is carried on past what was measured


class Setting(NamedTuple):
    """What a scheme is worked out from, in target passes over one token as the baseline makes them."""

    draft: float  # a draft pass
    v: Callable[[int], float]  # v(n): a target pass over n tokens
    devices: int  # 2: both sides at once
    wait: float  # the loop's own time and what handing over takes, a round
    foresee: float  # all answers of a round of SSD


def scheme_speedup(scheme: str, row: dict, at: Setting) -> float | None:
    """The speedup that the row's alpha comes to; None without one."""
    if row["alpha"] is None:
        return None
    if scheme == "chain":
        return chain_speedup(row["alpha"], row["k"], at.draft, at.v, at.wait)
    if scheme == "pearl":
        return pearl_speedup(row["alpha"], row["k"], at.draft, at.v, at.devices, at.wait)
    return ssd_speedup(row["alpha"], row["k"], at.draft, at.v, row["hit_rate"] or 0.0, at.foresee, at.devices, at.wait)


def here(row: dict, costs: dict, devices: int) -> Setting:
    """Costs as every run measures them, all threads for each side in its turn; on two devices as if each had as many."""
    one = costs["target_pass_s"]
    wait = row["overhead_s"] / row["target_passes"] / one
    return Setting(costs["c"], measured_v(costs), devices, wait, row.get("foresee_s", 0.0) / row["target_passes"] / one)


def apart(row: dict, costs: dict, beside: dict, at_once: bool, foresee_s: float) -> Setting:
    """Costs on one thread each, measured while the other side ran, or, for `by turns`, while it did not. `foresee_s`, of a
    round here, is taken to grow as a draft pass does."""
    which, one = "beside" if at_once else "alone", costs["target_pass_s"]
    draft = statistics.median(beside[f"draft_{which}"]) / one
    v = {int(n): statistics.median(seconds) / one for n, seconds in beside[f"target_{which}"].items()}
    wait = (row["overhead_s"] / row["target_passes"] + beside["message_s"]) / one
    return Setting(draft, interpolated(v), 2 if at_once else 1, wait, foresee_s / one * draft / costs["c"])


def by_turns(scheme: str, row: dict, costs: dict) -> float | None:
    """What the row's own counted rounds come to at the measured costs, the sides taking turns: an account, not a forecast. A pass
    of PEARL's target reads as many tokens as it judges guesses; SSD's rounds are taken by the formula."""
    if scheme == "ssd":
        return scheme_speedup(scheme, row, here(row, costs, devices=1))
    return accounted(row, costs, [max(1, length) for length in row["proposed_lengths"]] if scheme == "pearl" else None)


def with_predictions(row: dict, predicted: float | None, two_devices: float | None, costs: dict) -> dict:
    """The row with what it should have been (error: prediction less measurement) and what two whole devices would give."""
    error = None if predicted is None else predicted - row["speedup"]
    row.update(predicted_costs=predicted, two_devices=two_devices, prediction_error=error, cost_coefficient=costs["c"])
    row["balanced_g"] = balanced_g(costs["c"], measured_v(costs), MOST_AHEAD)
    return row


def row_here(scheme: str, row: dict, costs: dict) -> dict:
    """A row of both sides in one process."""
    two = scheme_speedup(scheme, row, here(row, costs, devices=2))
    return with_predictions(row, by_turns(scheme, row, costs), two, costs)


def row_apart(scheme: str, row: dict, costs: dict, beside: dict, at_once: bool, foresee_s: float) -> dict:
    """A row of two processes; `at_once`: both sides worked at the same time."""
    told = scheme_speedup(scheme, row, apart(row, costs, beside, at_once, foresee_s))
    return with_predictions({**row, "pinned": beside["pinned"], "message_s": beside["message_s"]}, told, None, costs)


def over(rows: list[dict], name: str, other: str) -> dict | None:
    """How much faster the method NAME is than OTHER, in the same turns and over the texts that both have: `speedup`, its interval
    and that of the A/A arm, as the one verdict reads them; None where no text has both."""
    good = {
        which: {row["text"]: row for row in rows if row["method"] == which and not row["error"]}
        for which in (name, other)
    }
    shared = [text for text in good[name] if text in good[other]]
    if not shared:
        return None
    turns = [
        [sum(turn) for turn in zip(*(good[which][text]["speculative_s"] for text in shared), strict=True)]
        for which in (other, name)
    ]
    found, noise = paired_ratio(*turns), pooled([good[name][text] for text in shared])
    return {"speedup": found["median"], "speedup_low": found["low"], "speedup_high": found["high"], "pairs": found["n"],
            "aa": noise["aa"], "aa_low": noise["aa_low"], "aa_high": noise["aa_high"]}  # fmt: skip


def waiting(rows: list[dict]) -> dict:
    """Of two processes: the share of its time that the target's side waited for guesses, and what a message takes."""
    if not all("wait_s" in row for row in rows):
        return {}
    whole = sum(row[name] for row in rows for name in ("draft_s", "verify_s", "overhead_s", "wait_s"))
    return {"wait_share": sum(row["wait_s"] for row in rows) / whole, "message_s": rows[0]["message_s"]}
