"""The charts of single result files, each from the rows of one script, and two files of one script side by side."""

from __future__ import annotations

import statistics

from spec_harness.compare import measured_cells, shown_name
from spec_harness.drawing import (
    SIZE,
    above,
    above_both,
    axes,
    bars,
    caption,
    curve,
    even,
    legend,
    right_axis,
)


def rows_of(document: dict, part: str) -> list[dict]:
    """The measured rows of one part of a file."""
    return [row for row in document["rows"] if row.get("part") == part and not row["error"]]


def plot_k_sweep(document: dict, theme: dict):
    rows = rows_of(document, "k")
    if not rows:
        return None
    ks = [row["k"] for row in rows]
    title = f"Guessing further ahead: {rows[0]['workload']}"
    figure, ax = axes(theme, title, caption(document), "k, guesses a round", "speedup")
    curve(ax, theme, ks, rows, "predicted_costs")
    even(ax, theme)
    ax.set_xticks(ks)
    passes = right_axis(ax, theme, "passes")
    for name, marker, colour in (("target", "s", "c"), ("draft", "^", "b")):
        made, label = [row[f"{name}_passes"] for row in rows], f"{name} passes (right)"
        passes.plot(ks, made, color=theme[colour], marker=marker, markersize=4, linewidth=1, label=label)
    passes.set_ylim(bottom=0)
    above_both(figure, theme, ax, passes)
    return figure


def plot_costs(document: dict, theme: dict):
    rows = [row for row in document["rows"] if row.get("v") is not None]
    if not rows or not document["summary"]:  # an interrupted run has no device limits yet
        return None
    n, summary = [row["tokens"] for row in rows], document["summary"]
    figure, ax = axes(
        theme,
        "What checking n tokens costs against producing one",
        caption(document),
        "tokens in the pass, n",
        "ms a pass",
    )
    spread = [[min(row["seconds"]) * 1000 for row in rows], [max(row["seconds"]) * 1000 for row in rows]]
    ax.fill_between(n, *spread, color=theme["a"], alpha=0.15, linewidth=0)
    ax.plot(n, [row["pass_ms"] for row in rows], color=theme["a"], marker="o", label="measured (band: all samples)")
    for row in rows:
        ax.annotate(
            f"{row['v']:.2f}x",
            (row["tokens"], row["pass_ms"]),
            (0, 8),
            textcoords="offset points",
            color=theme["ink"],
            fontsize=8,
            ha="center",
        )
    ridge, last = summary["ridge_tokens"], n[-1]
    corner = [point for point in (1, ridge, last) if point <= last]
    floor = [1000 * max(summary["read_s"], point * summary["arithmetic_s_per_token"]) for point in corner]
    ax.plot(corner, floor, color=theme["d"], linestyle="--", label="floor: read every weight once, or the arithmetic")
    if ridge <= last:
        ax.axvline(ridge, color=theme["d"], linewidth=0.8, linestyle=":")
        ax.annotate(
            f"ridge n* = {ridge:.1f}", (ridge, 0), (4, 4), textcoords="offset points", color=theme["d"], fontsize=8
        )
    ax.set_ylim(bottom=0)
    ax.set_xticks(n)
    legend(ax, theme, loc="upper left")
    return figure


def plot_workloads(document: dict, theme: dict):
    rows = rows_of(document, "workload")
    if not rows:
        return None
    names, ks = list(dict.fromkeys(row["workload"] for row in rows)), list(dict.fromkeys(row["k"] for row in rows))
    figure, ax = axes(theme, "Speedup by what is written", caption(document), "", "speedup")
    series = [(f"k = {k}", "ab"[i % 2], [row for row in rows if row["k"] == k]) for i, k in enumerate(ks)]
    bars(ax, theme, names, series, "workload")
    even(ax, theme)
    above(figure, theme, 2)
    return figure


def plot_time(document: dict, theme: dict):
    """Bars as long as the free runs took, divided as the watched run says: a watched run is single, and slower."""
    rows = [row for row in document["rows"] if row.get("part") == "k" and not row["error"]]
    if not rows:
        return None
    title, label = f"Where the time goes: {rows[0]['workload']}", "ms a token"
    figure, ax = axes(theme, title, caption(document), "k, guesses a round", label)
    places, bottom = range(len(rows)), [0.0] * len(rows)
    for name, label, colour in (
        ("draft_s", "draft", "b"),
        ("verify_s", "verify", "a"),
        ("overhead_s", "the loop itself", "d"),
    ):
        heights = []
        for row in rows:
            share = row[name] / (row["draft_s"] + row["verify_s"] + row["overhead_s"])
            heights.append(1000 * share * statistics.median(row["speculative_s"]) / row["emitted"])
        ax.bar(places, heights, 0.7, bottom=bottom, color=theme[colour], label=label)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    plain = statistics.median(1000 * seconds / row["emitted"] for row in rows for seconds in row["baseline_s"])
    ax.axhline(plain, color=theme["ink"], linewidth=1, linestyle=":", label="the target alone")
    ax.set_xticks(places, [str(row["k"]) for row in rows])
    legend(ax, theme, loc="upper left")
    return figure


def plot_lookup(document: dict, theme: dict):
    rows = rows_of(document, "look-up")
    if not rows:
        return None
    names = list(dict.fromkeys(row["text"] for row in rows))
    figure, ax = axes(theme, "Copying from the text: look-up beside the draft model", caption(document), "", "speedup")
    methods = list(dict.fromkeys(row["method"] for row in rows))
    shown = [(method, "abc"[i], [{**row, "alpha": None} for row in rows if row["method"] == method]) for i, method in enumerate(methods)]  # fmt: skip
    bars(ax, theme, names, shown, "text")
    even(ax, theme)
    above(figure, theme, 3)
    return figure


def plot_policies(document: dict, theme: dict):
    """Every policy beside the best of the fixed k of that text, which nobody knows beforehand."""
    rows = document["summary"].get("arms") or []  # none yet in an interrupted run
    texts = list(dict.fromkeys(row["text"] for row in rows))
    fixed = [row for row in rows if row["arm"].startswith("k = ")]
    if not fixed:
        return None
    best = [max((row for row in fixed if row["text"] == text), key=lambda row: row["speedup"]) for text in texts]
    names = {"heuristic": "c", "confidence": "b", "cost": "a"}
    series = [("best fixed k", "d", best), *((name, colour, [row for row in rows if row["arm"] == name]) for name, colour in names.items())]  # fmt: skip
    figure, ax = axes(theme, "How far to look ahead: policies", caption(document), "", "speedup")
    bars(ax, theme, texts, series, "text")
    even(ax, theme)
    above(figure, theme, 4)
    return figure


def plot_sampling(document: dict, theme: dict):
    rows = [row for row in document["summary"].get("temperatures") or [] if not row["error"]]
    if not rows:
        return None
    heats = [row["temperature"] for row in rows]
    figure, ax = axes(theme, "Sampling: what a higher temperature costs", caption(document), "temperature", "speedup")
    curve(ax, theme, heats, rows)
    even(ax, theme)
    ax.set_xticks(heats)
    rates = right_axis(ax, theme, "share of judged guesses")
    for name, label, style in (("alpha", "alpha (right)", "-"), ("expected_alpha", "overlap of the laws (right)", "--")):
        known = [(row["temperature"], row[name]) for row in rows if row.get(name) is not None]
        rates.plot(*zip(*known, strict=True), color=theme["b"], linestyle=style, linewidth=1, label=label) if known else None
    rates.set_ylim(0, 1.05)
    above_both(figure, theme, ax, rates)
    return figure


def plot_batches(document: dict, theme: dict):
    rows = rows_of(document, "batch")
    if not rows:
        return None
    places, title = range(len(rows)), "The same requests in batches"
    figure, ax = axes(theme, title, caption(document), "requests in a batch", "speedup")
    curve(ax, theme, places, rows, "predicted")
    even(ax, theme)
    ax.set_xticks(places, [str(row["batch"]) for row in rows])
    rates = right_axis(ax, theme, "tokens a second")
    for name, label, colour in (("baseline", "alone", "d"), ("speculative", "with draft", "c")):
        made = [row[f"{name}_tokens_per_s"] for row in rows]
        rates.plot(places, made, color=theme[colour], marker="s", markersize=4, linewidth=1, label=f"{label} (right)")
    rates.set_ylim(bottom=0)
    above_both(figure, theme, ax, rates)
    return figure


def plot_comparison(first: dict, second: dict, theme: dict):
    """The cells that both files have, one line each: figure and interval of A and of B."""
    cells = measured_cells(first), measured_cells(second)
    names = [name for name in cells[0] if all(name in mine and mine[name].figure is not None for mine in cells)]
    figure, ax = axes(
        theme,
        f"{first['experiment']}: two files side by side",
        f"A: {caption(first)}\nB: {caption(second)}",
        "speedup, or V(n)",
        "",
    )
    figure.set_size_inches(SIZE[0], max(SIZE[1], 1.6 + 0.26 * len(names)))
    for letter, mine, shift, colour in (("A", cells[0], -0.14, "a"), ("B", cells[1], 0.14, "b")):
        for place, name in enumerate(names):
            one = mine[name]
            label = letter if place == 0 else None
            if one.low is not None and one.high is not None:
                ax.plot([one.low, one.high], [place + shift] * 2, color=theme[colour], linewidth=1.5)
            ax.plot(
                [one.figure], [place + shift], color=theme[colour], marker="o", markersize=4, linestyle="", label=label
            )
    ax.axvline(1, color=theme["d"], linewidth=1, linestyle=":")
    ax.set_yticks(range(len(names)), [shown_name(name) for name in names], fontsize=8)
    ax.invert_yaxis()
    above(figure, theme, 2)
    return figure


CHARTS = {
    "k_sweep": ("spec_bench", plot_k_sweep),
    "costs": ("spec_precondition", plot_costs),
    "workloads": ("spec_bench", plot_workloads),
    "time": ("spec_bench", plot_time),
    "lookup": ("spec_lookup", plot_lookup),
    "policies": ("spec_adaptive", plot_policies),
    "sampling": ("spec_sampling", plot_sampling),
    "batches": ("spec_batch", plot_batches),
}
