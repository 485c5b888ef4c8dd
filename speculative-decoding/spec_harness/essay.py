"""The essay's published figures, to stand beside a run's own where the pair is the essay's. Never a run's result."""

from __future__ import annotations

import json

from spec_common import HERE

from spec_harness.tables import fixed, percent

FIGURES = json.loads((HERE / "spec_harness" / "essay_figures.json").read_text(encoding="utf-8"))


def is_essay_pair(args) -> bool:
    """Whether the models are the essay's, by their hub names."""
    setup = FIGURES["setup"]
    return (args.target, args.draft) == (setup["target"], setup["draft"])


def essay_decode(row: dict) -> dict | None:
    """The essay's column of the 'What it does' table, by our labels; None for another k or length."""
    setup, published = FIGURES["setup"], FIGURES["decode_k5_prose"]
    if (row["k"], row["n_tokens"], row["workload"]) != (setup["k"], setup["n_tokens"], "open prose"):
        return None
    return {
        "tokens per second": fixed(2)(published["speculative_tokens_per_s"]),
        "speedup": fixed(2, "x")(published["speedup"]),
        "target passes": str(published["target_passes"]["speculative"]),
        "draft passes": str(published["draft_passes"]),
        **{name: str(published[name]) for name in ("proposed", "accepted", "discarded")},
        "acceptance (accepted / proposed)": percent(published["acceptance"]),
        "ms per target pass, one token": fixed(1)(published["target_pass_ms"]),
        "ms per draft pass": fixed(1)(published["draft_pass_ms"]),
    }


def essay_sweep(k: int) -> dict:
    """The essay's row of the k sweep, or {}."""
    return next((row for row in FIGURES["k_sweep"] if row["k"] == k), {})


def essay_workload(name: str) -> dict:
    return next((row for row in FIGURES["workload_sweep_k5"] if row["workload"] == name), {})


def essay_cost(n: int) -> float | None:
    return FIGURES["precondition"]["relative_cost"].get(str(n))


def essay_draft(name: str) -> dict:
    return next((row for row in FIGURES["drafts"] if row["draft"] == name), {})


def essay_at_once() -> float:
    """Both models from two threads on one queue, over taking turns."""
    return FIGURES["overlap"]["two_threads_one_mps_queue"]
