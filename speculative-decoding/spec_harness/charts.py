"""The charts of single result files, each from the rows of one script; and what all of them share: themes, axes, caption."""

from __future__ import annotations

import statistics

from spec_harness.compare import measured_cells

THEMES = {
    "light": {
        "paper": "#ffffff",
        "ink": "#1f2430",
        "faint": "#c9cdd6",
        "a": "#2a6fdb",
        "b": "#e07a1f",
        "c": "#2f9e5f",
        "d": "#8a8f9c",
    },
    "dark": {
        "paper": "#14171f",
        "ink": "#e6e9f0",
        "faint": "#3a404d",
        "a": "#6ea8ff",
        "b": "#f2a65a",
        "c": "#63d297",
        "d": "#9aa1b0",
    },
}
SIZE = (8, 4.6)


def caption(document: dict) -> str:
    """Models, device and commit, for the foot of a chart."""
    where, config = document["environment"], document["config"]
    models = [config[name]["name"] for name in ("target", "draft", "model") if isinstance(config.get(name), dict)]
    device = where["cpu_model"] if where["device"] == "cpu" else where["device_name"]
    return f"{' + '.join(models)} · {device}, {where['threads']} threads · {where['dtype']} · commit {(where['git_commit'] or 'unknown')[:9]}"


def axes(theme: dict, title: str, foot: str, x: str, y: str):
    """A figure and its axes in the theme, the claim as the title."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["text.parse_math"] = False  # a model or a prompt file may be called x$_y$: names are no formulas
    figure = Figure(figsize=SIZE, facecolor=theme["paper"], layout="constrained")
    ax = figure.add_subplot(facecolor=theme["paper"])
    ax.set_title(title, color=theme["ink"], loc="left", fontsize=12)
    ax.set_xlabel(x, color=theme["ink"])
    ax.set_ylabel(y, color=theme["ink"])
    figure.supxlabel(foot, color=theme["d"], fontsize=7)
    dress(ax, theme)
    return figure, ax


def dress(ax, theme: dict) -> None:
    ax.tick_params(colors=theme["ink"])
    ax.grid(axis="y", color=theme["faint"], linewidth=0.6)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(theme["faint"])


def legend(ax, theme: dict, **where) -> None:
    ax.legend(frameon=False, labelcolor=theme["ink"], fontsize=9, **where)


def errors(rows: list[dict], name: str) -> list[list[float]] | None:
    """Distances of the interval's ends from the median, as matplotlib wants them; None where there is no interval."""
    if any(row[f"{name}_low"] is None for row in rows):
        return None
    return [[row[name] - row[f"{name}_low"] for row in rows], [row[f"{name}_high"] - row[name] for row in rows]]


def plot_k_sweep(document: dict, theme: dict):
    rows = [row for row in document["rows"] if row.get("part") == "k" and not row["error"]]
    if not rows:
        return None
    ks, speeds = [row["k"] for row in rows], [row["speedup"] for row in rows]
    title = f"Guessing further ahead: {rows[0]['workload']}"
    figure, ax = axes(theme, title, caption(document), "k, guesses a round", "speedup")
    ax.axhline(1, color=theme["d"], linewidth=1, linestyle=":")
    ax.errorbar(ks, speeds, errors(rows, "speedup"), color=theme["a"], marker="o", capsize=3, label="speedup, measured")
    foretold = [row["predicted_costs"] for row in rows]
    ax.plot(ks, foretold, color=theme["a"], linestyle="--", linewidth=1, label="from counts and costs")
    ax.set_ylim(bottom=0)
    ax.set_xticks(ks)
    passes = draw_passes(ax, rows, theme)
    parts, names = (
        [*one, *other]
        for one, other in zip(ax.get_legend_handles_labels(), passes.get_legend_handles_labels(), strict=True)
    )
    above(figure, theme, 4, parts, names)
    return figure


def draw_passes(ax, rows: list[dict], theme: dict):
    """The passes of both models over k, on an axis of their own to the right. Returns it."""
    passes, ks = ax.twinx(), [row["k"] for row in rows]
    for name, marker, colour in (("target", "s", "c"), ("draft", "^", "b")):
        passes.plot(
            ks,
            [row[f"{name}_passes"] for row in rows],
            color=theme[colour],
            marker=marker,
            markersize=4,
            linewidth=1,
            label=f"{name} passes (right)",
        )
    passes.set_ylabel("passes", color=theme["ink"])
    passes.set_ylim(bottom=0)
    passes.tick_params(colors=theme["ink"])
    for spine in passes.spines.values():
        spine.set_visible(False)
    return passes


def above(figure, theme: dict, columns: int, *parts) -> None:
    """The legend over the axes, where it covers no point."""
    figure.legend(*parts, frameon=False, labelcolor=theme["ink"], fontsize=9, loc="outside upper center", ncols=columns)


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
    rows = [row for row in document["rows"] if row.get("part") == "workload" and not row["error"]]
    if not rows:
        return None
    names, ks = list(dict.fromkeys(row["workload"] for row in rows)), list(dict.fromkeys(row["k"] for row in rows))
    figure, ax = axes(theme, "Speedup by what is written", caption(document), "", "speedup")
    ax.axhline(1, color=theme["d"], linewidth=1, linestyle=":")
    width = 0.8 / len(ks)
    for i, k in enumerate(ks):
        mine = [row for row in rows if row["k"] == k]
        places = [names.index(row["workload"]) + (i - (len(ks) - 1) / 2) * width for row in mine]
        ax.bar(
            places,
            [row["speedup"] for row in mine],
            width * 0.92,
            yerr=errors(mine, "speedup"),
            color=theme["ab"[i % 2]],
            ecolor=theme["ink"],
            capsize=3,
            label=f"k = {k}",
        )
        for place, row in zip(places, mine, strict=True):
            text = "alpha\n-" if row["alpha"] is None else f"alpha\n{row['alpha']:.2f}"
            ax.annotate(
                text, (place, 0), (0, 4), textcoords="offset points", color=theme["paper"], fontsize=8, ha="center"
            )
    ax.set_xticks(range(len(names)), names)
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
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    above(figure, theme, 2)
    return figure


CHARTS = {
    "k_sweep": ("spec_bench", plot_k_sweep),
    "costs": ("spec_precondition", plot_costs),
    "workloads": ("spec_bench", plot_workloads),
    "time": ("spec_bench", plot_time),
}
