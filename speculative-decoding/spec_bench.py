"""Both sweeps of the essay: how far to guess (k), and on what text it pays.

Claim: raising k stops helping, because acceptance falls and checking stops being free, and at one k the text alone
decides the speedup. Costs are measured first and each cell's speedup is predicted from them before it is measured.

    python spec_bench.py                     # the embedded pair: k sweep, then the five workloads
    python spec_bench.py --pair essay --device mps --dtype float16
    python spec_bench.py --resume            # go on after an interruption
"""

from __future__ import annotations

import statistics

from spec_common import interval_text, judge_speed, tell

from spec_cli import command, make_parser, whole_list
from spec_decode import measure
from spec_harness.arms import draft_model
from spec_harness.cells import find_or_measure, forecast, pooled
from spec_harness.costs import costs_at, measure_costs
from spec_harness.essay import essay_sweep, essay_workload, is_essay_pair
from spec_harness.options import (
    add_prompt_options,
    add_task_options,
    chosen_prompts,
    make_task,
    open_run,
    workload_prompt,
)
from spec_harness.results import ResultFile
from spec_harness.tables import fixed, markdown_table, percent, progress, shown_interval, speed_words, turns_of
from spec_harness.theory import best_k, ceiling, measured_v
from workloads import WORKLOADS

KS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
USUAL_K = 5  # the essay's, and the workloads' second k


# -------------------------------------------------------------------------------------------------------------- running


def best_of(rows: list[dict], name: str = "speedup") -> dict | None:
    """The measured row with the highest `name`: k is ranked by time, never by acceptance, which falls with k anyway."""
    return max((row for row in rows if row.get(name) is not None), key=lambda row: row[name], default=None)


def run(args, target, draft, first: tuple[str, str], texts: list[tuple[str, str]], file: ResultFile):
    """Measure what the file lacks. `first`: name and text of the k sweep; `texts`: those of the workload sweep. Returns
    (rows of the k sweep, rows of the workload sweep, costs). Raises Mismatch."""
    tasks = {name: make_task(args, target, draft, text) for name, text in [first, *texts]}
    costs = measure_costs(file, list(tasks.values()), draft.model, args.ks)

    def cell(part: str, name: str, k: int) -> dict:
        task = tasks[name]
        here = costs_at(costs, task.context)

        def work() -> dict:
            row = measure(task, draft_model(task, draft.model, k), args, here)
            return {**row, **forecast(row, here)}

        return find_or_measure(file, task, {"part": part, "workload": name, "k": k}, work)

    sweep = [cell("k", first[0], k) for k in progress(args.ks, "k sweep")]
    tell(f"guessing further ahead: {first[0]}, {args.n_tokens} tokens\n\n{sweep_table(sweep, is_essay_pair(args), args.wide)}")  # fmt: skip
    best = best_of(sweep)
    ks = list(dict.fromkeys([best["k"] if best else USUAL_K, USUAL_K]))
    cells = [(name, k) for k in ks for name, _ in texts]
    workloads = [cell("workload", name, k) for name, k in progress(cells, "workloads")]
    tell(f"\nthe text alone: {args.n_tokens} tokens of each\n\n{workload_table(workloads, is_essay_pair(args), args.wide)}")  # fmt: skip
    return sweep, workloads, costs


def median_error(cells: list[dict], name: str) -> dict:
    """Of the errors `name` of all cells: the median, signed and without sign, and the largest. Null where there are none."""
    errors = [row[name] for row in cells if row.get(name) is not None]
    sizes = [abs(error) for error in errors]
    return {f"{name}_median": statistics.median(errors) if errors else None,
            f"{name}_median_abs": statistics.median(sizes) if errors else None, f"{name}_max_abs": max(sizes, default=None)}  # fmt: skip


def summarise(sweep: list[dict], workloads: list[dict], costs: list[dict]) -> dict:
    """The pooled figures: noise (A/A), how far costs and speed are apart (signed, over all cells), the best k measured and
    the one that alpha and costs alone would choose, the ceiling. The best k is quoted from turns that did not choose it:
    those of the same text in the workload sweep, where it is there."""
    cells = [row for row in [*sweep, *workloads] if not row["error"]]
    best = best_of(sweep)
    if not cells or best is None:
        return {"verdict": "nothing could be measured"}
    again = [
        row for row in workloads if (row["workload"], row["k"]) == (best["workload"], best["k"]) and not row["error"]
    ]
    quoted = again[0] if again else None
    alphas = [row["alpha"] for row in sweep if row.get("alpha") is not None]
    alpha = statistics.median(alphas) if alphas else None
    here = costs_at(costs, best["prompt_tokens"] + best["n_tokens"] // 2)
    foreseen = (None, None) if alpha is None else best_k(alpha, here, max(row["k"] for row in sweep))
    aa = pooled(cells)
    return {
        "aa": aa["aa"], "aa_low": aa["aa_low"], "aa_high": aa["aa_high"], "pairs": aa["pairs"],
        **median_error(cells, "prediction_error"), **median_error(cells, "forecast_error"), "best_k": best["k"], "best_speedup": quoted and quoted["speedup"],
        "best_verdict": judge_speed(quoted) if quoted else "few", "best_words": quoted and speed_words(quoted),
        "best_k_predicted": foreseen[0], "best_speedup_predicted": foreseen[1], "alpha_median": alpha,
        "ceiling_tokens_per_pass": None if alpha is None else ceiling(alpha), "c": here["c"], "v2": measured_v(here)(2),
        "overhead_share_median": statistics.median(row["overhead_share"] for row in cells),
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- tables

COLUMNS = [
    ("speedup", "speedup", fixed(2, "x")), ("interval", "interval", str), ("predicted_costs", "from costs", fixed(2, "x")),
    ("block_efficiency", "tokens/pass", fixed(2)), ("alpha", "alpha", fixed(2)), ("acceptance_rate", "acceptance", percent),
]  # fmt: skip
WIDE = [
    ("baseline_tokens_per_s", "alone, tokens/s", fixed(1)), ("speculative_tokens_per_s", "with draft", fixed(1)),
    ("forecast", "forecast", fixed(2, "x")), ("forecast_came", "came", fixed(2, "x")), ("predicted_leviathan", "closed form", fixed(2, "x")), ("discarded", "discarded", str),
    ("target_passes", "target passes", str), ("draft_passes", "draft passes", str), ("aa", "A/A", fixed(2, "x")),
]  # fmt: skip
ESSAY_COLUMNS = [("essay_speedup", "essay's", fixed(2, "x")), ("essay_acceptance", "essay's acceptance", percent)]


def columns(first: list, essay: bool, wide: bool) -> list:
    return [*first, *COLUMNS, *(WIDE if wide else []), *(ESSAY_COLUMNS if essay else [])]


def shown(row: dict, published: dict) -> dict:
    return {
        **shown_interval(row),
        "essay_speedup": published.get("speedup"),
        "essay_acceptance": published.get("acceptance"),
    }


def sweep_table(rows: list[dict], essay: bool = False, wide: bool = False) -> str:
    cells = [shown(row, essay_sweep(row["k"]) if essay else {}) for row in rows]
    return markdown_table(cells, columns([("k", "k", str)], essay, wide))


def workload_table(rows: list[dict], essay: bool = False, wide: bool = False) -> str:
    cells = [shown(row, essay_workload(row["workload"]) if essay and row["k"] == USUAL_K else {}) for row in rows]
    return markdown_table(cells, columns([("workload", "text", str), ("k", "k", str)], essay, wide))


def verdict(summary: dict, name: str) -> str:
    if summary.get("best_k") is None:
        return "nothing could be measured; see the errors in the result file"
    lines = [f"one draft pass costs c = {summary['c'] or 0:.2f} of a target pass; V(2) = {summary['v2']:.2f}."]
    if summary["ceiling_tokens_per_pass"]:
        lines.append(f"alpha is about {summary['alpha_median']:.2f}: no k can write more than {summary['ceiling_tokens_per_pass']:.1f} tokens a pass.")  # fmt: skip
    best = f"best k for {name}: {summary['best_k']} (alpha and costs alone would choose {summary['best_k_predicted']})"
    if summary["best_words"] is None:
        lines.append(f"{best}; its speed is not quoted from the turns that chose it: leave that text in --workloads.")
    elif summary["best_verdict"] in ("slower", "noise"):
        lines.append(f"do not speculate on {name} with this pair: the {best} gives {summary['best_words']}.")
    else:
        lines.append(f"{best}; in turns that did not choose it: {summary['best_words']}.")
    lines.append(
        f"speed and costs differ by {summary['prediction_error_median']:+.3f} in the median over all cells (without sign "
        f"{summary['prediction_error_median_abs']:.3f}, at most {summary['prediction_error_max_abs']:.3f})."
    )
    if summary.get("forecast_error_median") is not None:
        lines.append(f"foretold from alpha of every other round, the rounds between were off by {summary['forecast_error_median']:+.3f} in the median "
                     f"(without sign {summary['forecast_error_median_abs']:.3f}, at most {summary['forecast_error_max_abs']:.3f}).")  # fmt: skip
    aa = interval_text(summary["aa_low"], summary["aa_high"], 3)
    lines.append(f"the same code against itself: {summary['aa']:.3f}x{f' ({aa})' if aa else ''}, {turns_of(summary['pairs'])} of all cells; the loop's own time is "
                 f"{100 * summary['overhead_share_median']:.1f} % of a round.")  # fmt: skip
    return "\n".join(lines)


def texts_of(args) -> tuple[tuple[str, str], list[tuple[str, str]]]:
    """(name, text) of the k sweep, and those of the workload sweep. Prompts of one's own serve both. Raises UserError."""
    own = args.prompt is not None or args.prompt_file is not None
    chosen = chosen_prompts(args)
    return chosen[0], chosen if own else [workload_prompt(name, "--workloads") for name in dict.fromkeys(args.workloads)]


def parse_args(argv):
    parser = make_parser(__doc__, "spec_bench", resume=True)
    add_task_options(parser)
    add_prompt_options(parser)
    parser.add_argument("--ks", type=whole_list(1, 1024), default=list(KS), help="the k sweep, e.g. 1,2,4,8")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), metavar="NAME", help="the texts of the workload sweep")  # fmt: skip
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    first, texts = texts_of(args)
    with open_run(args, "spec_bench", [first, *texts]) as (file, target, (draft,)):
        sweep, workloads, costs = run(args, target, draft, first, texts, file)
        summary = summarise(sweep, workloads, costs)
        file.finish(summary)
    tell(f"\n{verdict(summary, first[0])}\nresults in {args.results}")
    return int(any(row["error"] for row in [*sweep, *workloads]))


if __name__ == "__main__":
    raise SystemExit(main())
