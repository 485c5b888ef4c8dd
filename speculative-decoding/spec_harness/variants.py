"""One model in several kinds of linear layers or forms of pass, timed in the same turns: what each makes of V(n)."""

from __future__ import annotations

import statistics
from functools import partial

from spec_common import UserError, interleave, paired_ratio

import torch

from spec_harness.costs import passes_within, timed_pass, warm_cache
from spec_harness.tables import fixed, markdown_table
from spec_models.checks import Loaded
from spec_models.fused import FusedLlama, supported
from spec_models.graph import GraphLlama, captures
from spec_models.linear import KINDS, pack, twin, works
from spec_models.pairs import fuse, run_fused


def in_each_kind(loaded: Loaded, asked: str) -> dict[str, torch.nn.Module]:
    """The model, not packed yet, with every kind of linear layer that serves its dtype here, in the form of pass `asked`
    for. Everything that is not packed is shared. Raises UserError off a CPU."""
    if loaded.model.device.type != "cpu":
        raise UserError("--compare-linears: compares linear layers on a CPU; leave it out")
    kinds = [kind for kind in KINDS if works(kind, loaded.model.dtype)]
    is_fused = run_fused(asked, [loaded])
    models = {
        kind: fuse(twin(loaded.model), asked) if is_fused else twin(loaded.model) for kind in (*kinds, "plain")
    }
    for kind, model in models.items():
        pack([model], kind)
    return models


def in_each_pass(loaded: Loaded, kind: str) -> dict[str, torch.nn.Module]:
    """The model, not packed yet, in both forms of pass, linear layers of that kind; on CUDA also captured, over the
    very layers of the fused one. Raises UserError where it cannot be fused."""
    if not supported(loaded.model):
        raise UserError(f"--compare-passes: {loaded.name} cannot be fused; leave it out")
    models = {"plain": twin(loaded.model), "fused": FusedLlama(twin(loaded.model)).eval()}
    if captures(loaded.model.device):
        models["graph"] = GraphLlama(models["fused"]).eval()
    done: dict = {}
    for model in models.values():
        pack([model], kind, done)
    return models


def measure_variants(models: dict, ids: torch.Tensor, context: int, sizes: list[int], repeats: int, warmup: int) -> list[dict]:
    """A row for each of `models` and n, all passes in the same turns: milliseconds, V(n), and the share of the first
    model's time, each a median with its raw seconds. Raises UserError where a pass fails."""
    with passes_within(ids.shape[1], "--context or --tokens"):
        caches = {name: warm_cache(model, ids, context) for name, model in models.items()}
        arms = {
            (name, n): partial(timed_pass, model, ids, caches[name], context, n)
            for name, model in models.items()
            for n in sizes
        }
        seconds = {arm: [run.seconds for run in runs] for arm, runs in interleave(arms, repeats, warmup).items()}
    first = next(iter(models))
    return [
        {"variant": name, "tokens": n, "pass_ms": 1000 * statistics.median(seconds[name, n]),
         "v": paired_ratio(seconds[name, n], seconds[name, 1])["median"],
         "of_first": paired_ratio(seconds[name, n], seconds[first, n])["median"], "seconds": seconds[name, n]}
        for name in models for n in sizes
    ]  # fmt: skip


def launch_line(rows: list[dict]) -> str:
    """How much of a fused pass was launching its operators: what capturing them saves, as medians of differences within
    a turn. From the rows of `measure_variants` for the forms of pass."""
    seconds = {(row["variant"], row["tokens"]): row["seconds"] for row in rows}
    sizes = [row["tokens"] for row in rows if row["variant"] == "graph"]
    if not sizes:
        return "launch overhead: nothing is captured on this device, so it cannot be told from the rest of a pass."
    parts = []
    for n in dict.fromkeys((min(sizes), max(sizes))):
        turns = list(zip(seconds["fused", n], seconds["graph", n], strict=True))
        saved = 1000 * statistics.median(fused - graph for fused, graph in turns)
        whole = 1000 * statistics.median(seconds["fused", n])
        parts.append(f"{saved:.2f} of {whole:.2f} ms in a pass over {n} token{'s' if n > 1 else ''}")
    return f"launch overhead (fused minus graph): {', '.join(parts)}."


def table(rows: list[dict]) -> str:
    """V(n) of every variant side by side, its milliseconds beside it."""
    names = list(dict.fromkeys(row["variant"] for row in rows))
    columns = [("tokens", "tokens", str)]
    for name in names:
        columns += [(f"{name}_ms", f"{name}, ms", fixed(1)), (f"{name}_v", "V(n)", fixed(2, "x"))]
    lines: dict[int, dict] = {}
    for row in rows:
        line = lines.setdefault(row["tokens"], {"tokens": row["tokens"]})
        line.update({f"{row['variant']}_ms": row["pass_ms"], f"{row['variant']}_v": row["v"]})
    return markdown_table(list(lines.values()), columns)
