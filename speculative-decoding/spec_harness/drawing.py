"""What all charts share: themes, axes, caption, legend, bars in groups, a curve with its intervals."""

from __future__ import annotations

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


def even(ax, theme: dict) -> None:
    """The line of no gain and no loss."""
    ax.axhline(1, color=theme["d"], linewidth=1, linestyle=":")
    ax.set_ylim(bottom=0)


def bars(ax, theme: dict, names: list[str], series: list[tuple[str, str, list[dict]]], name: str) -> None:
    """Groups of bars, one a text in `names`, with the `speedup` of each series (label, colour, rows) and its interval.
    `name`: the column of a row that says which text it is of."""
    width = 0.8 / len(series)
    for i, (label, colour, rows) in enumerate(series):
        places = [names.index(row[name]) + (i - (len(series) - 1) / 2) * width for row in rows]
        speeds = [row["speedup"] for row in rows]
        ax.bar(places, speeds, width * 0.92, yerr=errors(rows, "speedup"), color=theme[colour], ecolor=theme["ink"],
               capsize=2, label=label)  # fmt: skip
        for place, row in zip(places, rows, strict=True):
            if row.get("alpha") is not None:
                under(ax, theme, f"alpha\n{row['alpha']:.2f}", place)
    ax.set_xticks(range(len(names)), names)


def under(ax, theme: dict, text: str, place: float) -> None:
    """A few words at the foot of a bar."""
    ax.annotate(text, (place, 0), (0, 4), textcoords="offset points", color=theme["paper"], fontsize=7, ha="center")


def curve(ax, theme: dict, x: list, rows: list[dict], predicted: str | None = None) -> None:
    """The `speedup` of rows with its intervals, and what was predicted, if it was."""
    speeds = [row["speedup"] for row in rows]
    ax.errorbar(x, speeds, errors(rows, "speedup"), color=theme["a"], marker="o", capsize=3, label="speedup, measured")
    if predicted:
        foretold = [row[predicted] for row in rows]
        ax.plot(x, foretold, color=theme["a"], linestyle="--", linewidth=1, label="from counts and costs")


def right_axis(ax, theme: dict, label: str):
    """An axis of its own to the right, from 0 on."""
    other = ax.twinx()
    other.set_ylabel(label, color=theme["ink"])
    other.tick_params(colors=theme["ink"])
    for spine in other.spines.values():
        spine.set_visible(False)
    return other


def above(figure, theme: dict, columns: int, *parts) -> None:
    """The legend over the axes, where it covers no point."""
    figure.legend(*parts, frameon=False, labelcolor=theme["ink"], fontsize=9, loc="outside upper center", ncols=columns)


def above_both(figure, theme: dict, ax, other) -> None:
    """One legend for the lines of two axes."""
    both = zip(ax.get_legend_handles_labels(), other.get_legend_handles_labels(), strict=True)
    above(figure, theme, 4, *([*one, *two] for one, two in both))
