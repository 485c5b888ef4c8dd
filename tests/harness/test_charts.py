"""What the charts show is what the rows say: every bar, point and error bar, and nothing of a cell that failed."""

from __future__ import annotations

import pytest

from spec_harness import charts
from spec_harness.drawing import THEMES

WHERE = {"device": "cpu", "cpu_model": "one", "threads": 2, "dtype": "float32", "git_commit": "abcdef0123"}


def document(rows: list[dict], **summary) -> dict:
    return {"environment": WHERE, "config": {"target": {"name": "t"}, "draft": {"name": "d"}}, "rows": rows, "summary": summary}


def sped(speedup: float, low: float | None = None, high: float | None = None, **more) -> dict:
    return {"speedup": speedup, "speedup_low": low, "speedup_high": high, "error": None, **more}


def heights(ax) -> dict[str, list[float]]:
    """Label -> heights of its bars."""
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in ax.containers if hasattr(bars, "patches")}


def points(ax) -> dict[str, list[tuple]]:
    """Label -> the points of its line."""
    lines = {line.get_label(): line for line in ax.get_lines()}
    lines |= {bars.get_label(): bars.lines[0] for bars in ax.containers if not hasattr(bars, "patches")}
    return {name: [tuple(map(float, point)) for point in line.get_xydata()] for name, line in lines.items()}


def spans(ax) -> list[tuple[float, float]]:
    """Lower and upper end of every error bar."""
    found = [line for bars in ax.containers if hasattr(bars, "has_yerr") for line in bars.lines[2]]
    return [(float(ends[0][1]), float(ends[1][1])) for line in found for ends in line.get_segments()]


@pytest.fixture(params=THEMES)
def theme(request) -> dict:
    return THEMES[request.param]


def test_look_up_has_a_bar_for_each_method_on_each_text(theme):
    rows = [sped(1.0 + i, 0.5 + i, 2.0 + i, part="look-up", text=text, method=method, alpha=0.5)
            for i, (text, method) in enumerate((text, method) for text in ("prose", "code") for method in ("lookup", "draft"))]  # fmt: skip
    rows.append({**rows[0], "method": "hybrid", "speedup": None, "error": "out of memory"})
    figure = charts.plot_lookup(document(rows), theme)
    ax = figure.axes[0]
    assert heights(ax) == {"lookup": [1.0, 3.0], "draft": [2.0, 4.0]}
    assert spans(ax) == [(0.5, 2.0), (2.5, 4.0), (1.5, 3.0), (3.5, 5.0)]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["prose", "code"]


def test_policies_stand_beside_the_best_fixed_k_of_that_text(theme):
    arms = {"k = 1": (1.1, 1.4), "k = 3": (1.3, 1.2), "heuristic": (1.0, 1.1), "confidence": (1.5, 1.6), "cost": (1.6, 1.7)}
    rows = [sped(speeds[i], arm=arm, text=text) for arm, speeds in arms.items() for i, text in enumerate(("all", "code"))]
    figure = charts.plot_policies(document([], arms=rows), theme)
    assert heights(figure.axes[0]) == {
        "best fixed k": [1.3, 1.4],
        "heuristic": [1.0, 1.1],
        "confidence": [1.5, 1.6],
        "cost": [1.6, 1.7],
    }
    assert spans(figure.axes[0]) == [], "no interval is drawn from one pair"


def test_sampling_is_drawn_over_the_temperature_with_the_overlap_beside_alpha(theme):
    rows = [sped(1.5, 1.4, 1.6, temperature=0.0, alpha=0.8, expected_alpha=None),
            sped(1.2, 1.1, 1.3, temperature=1.0, alpha=0.6, expected_alpha=0.61),
            {"temperature": 2.0, "speedup": None, "error": "out of memory"}]  # fmt: skip
    speeds, rates = charts.plot_sampling(document([], temperatures=rows), theme).axes
    assert points(speeds)["speedup, measured"] == [(0.0, 1.5), (1.0, 1.2)] and spans(speeds) == [(1.4, 1.6), (1.1, 1.3)]
    assert points(rates) == {"alpha (right)": [(0.0, 0.8), (1.0, 0.6)], "overlap of the laws (right)": [(1.0, 0.61)]}


def test_batches_are_drawn_in_their_order_with_the_prediction(theme):
    rows = [sped(1.4, 1.3, 1.5, part="batch", batch=size, predicted=1.45, baseline_tokens_per_s=10.0 * size,
                 speculative_tokens_per_s=14.0 * size) for size in (1, 8)]  # fmt: skip
    speeds, rates = charts.plot_batches(document(rows), theme).axes
    assert points(speeds)["speedup, measured"] == [(0.0, 1.4), (1.0, 1.4)]
    assert points(speeds)["from counts and costs"] == [(0.0, 1.45), (1.0, 1.45)]
    assert [label.get_text() for label in speeds.get_xticklabels()] == ["1", "8"]
    assert points(rates) == {"alone (right)": [(0.0, 10.0), (1.0, 80.0)], "with draft (right)": [(0.0, 14.0), (1.0, 112.0)]}


@pytest.mark.parametrize("name", charts.CHARTS)
def test_a_file_without_rows_has_no_chart(name, theme):
    assert charts.CHARTS[name][1](document([]), theme) is None
