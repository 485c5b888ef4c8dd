"""Both sweeps of the essay: how far to guess (k), and on what text it pays.

Claim: raising k stops helping, because acceptance falls and checking stops being free, and at one k the text alone
decides the speedup. Costs are measured first and each cell's speedup is predicted from them before it is measured.

    python spec_bench.py                     # the embedded pair: k sweep, then the five workloads
    python spec_bench.py --pair essay --device mps --dtype float16
    python spec_bench.py --resume            # go on after an interruption
"""

from __future__ import annotations

import statistics

from spec_common import FEWEST_PAIRS, command, dtype_name, make_parser, ratio_summary, set_up, whole_list
from spec_harness.cells import cell
from spec_harness.costs import costs_row
from spec_harness.essay import essay_sweep, essay_workload, is_essay_pair
from spec_harness.options import add_task_options, check_prompts, fill_pair, make_task, workload_prompt
from spec_harness.results import ResultFile, environment, settings
from spec_harness.tables import fixed, markdown_table, percent, progress
from spec_harness.theory import ceiling
from spec_models.pairs import form, load_pair
from workloads import DEFAULT_WORKLOAD, WORKLOADS

KS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
USUAL_K = 5  # the essay's, and the workloads' second k


# -------------------------------------------------------------------------------------------------------------- running


def best_of(rows: list[dict], name: str = "speedup") -> dict | None:
    """The measured row with the highest `name`: k is ranked by time, never by acceptance, which falls with k anyway."""
    return max((row for row in rows if row.get(name) is not None), key=lambda row: row[name], default=None)


def run(args, target, draft, file: ResultFile, device) -> tuple[list[dict], list[dict]]:
    """Measure what the file lacks. Returns (rows of the k sweep, rows of the workload sweep). Raises Mismatch."""
    task = make_task(args, target, draft, WORKLOADS[args.workload], max(args.ks), device)
    costs = costs_row(file, target.model, draft.model, task.prompt.shape[1] + args.n_tokens // 2, args.ks, task.limit)
    sweep = []
    for k in progress(args.ks, "k sweep"):
        task = make_task(args, target, draft, WORKLOADS[args.workload], k, device)
        sweep.append(cell(file, task, args, {"part": "k", "workload": args.workload, "k": k}, costs))
    print(
        f"\nguessing further ahead: {args.workload}, {args.n_tokens} tokens\n\n{sweep_table(sweep, is_essay_pair(args))}",
        flush=True,
    )
    best = best_of(sweep)
    ks = list(dict.fromkeys([best["k"] if best else USUAL_K, USUAL_K]))
    cells = [(name, k) for k in ks for name in args.workloads]
    workloads = []
    for name, k in progress(cells, "workloads"):
        task = make_task(args, target, draft, WORKLOADS[name], k, device)
        workloads.append(cell(file, task, args, {"part": "workload", "workload": name, "k": k}, costs))
    print(
        f"\nthe text alone: {args.n_tokens} tokens of each workload\n\n{workload_table(workloads, is_essay_pair(args))}",
        flush=True,
    )
    return sweep, workloads


def summarise(sweep: list[dict], workloads: list[dict]) -> dict:
    """The pooled figures: noise (A/A), prediction error, best k measured and predicted, the ceiling."""
    cells = [row for row in [*sweep, *workloads] if not row["error"]]
    if not cells:
        return {"verdict": "nothing could be measured"}
    aa = ratio_summary(
        *([value for row in cells for value in row[name]] for name in ("baseline_s", "baseline_again_s"))
    )
    errors = [row["prediction_error"] for row in sweep if not row["error"]]
    best, foreseen = best_of(sweep), best_of(sweep, "predicted_costs")
    alphas = [row["alpha"] for row in sweep if row.get("alpha") is not None]
    alpha = statistics.median(alphas) if alphas else None
    return {
        "aa": aa, "prediction_error_median_abs": statistics.median(map(abs, errors)) if errors else None,
        "prediction_error_max_abs": max(map(abs, errors), default=None), "best_k": best and best["k"], "best_speedup": best and best["speedup"],
        "best_k_predicted": foreseen and foreseen["k"], "alpha_median": alpha, "ceiling_tokens_per_pass": None if alpha is None else ceiling(alpha),
        "overhead_share_median": statistics.median(row["overhead_share"] for row in cells), "pays": bool(best and len(best["baseline_s"]) >= FEWEST_PAIRS and best["speedup_low"] > 1),
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- tables

SHARED_COLUMNS = [
    ("baseline_tokens_per_s", "alone, tokens/s", fixed(1)), ("speculative_tokens_per_s", "with draft", fixed(1)), ("speedup", "speedup", fixed(2, "x")), ("interval", "interval", str),
    ("predicted_costs", "predicted", fixed(2, "x")), ("predicted_leviathan", "closed form", fixed(2, "x")),
    ("acceptance_rate", "acceptance", percent), ("alpha", "alpha", fixed(2)), ("block_efficiency", "tokens/pass", fixed(2)),
    ("discarded", "discarded", str), ("target_passes", "target passes", str), ("draft_passes", "draft passes", str), ("aa", "A/A", fixed(2, "x")),
]  # fmt: skip
ESSAY_COLUMNS = [
    ("essay_speedup", "the essay's speedup", fixed(2, "x")),
    ("essay_acceptance", "its acceptance", percent),
]


def shown(row: dict, published: dict) -> dict:
    interval = None if row["error"] else f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
    return {
        **row,
        "interval": row["error"] or interval,
        "essay_speedup": published.get("speedup"),
        "essay_acceptance": published.get("acceptance"),
    }


def sweep_table(rows: list[dict], essay: bool) -> str:
    columns = [("k", "k", str), *SHARED_COLUMNS, *(ESSAY_COLUMNS if essay else [])]
    return markdown_table([shown(row, essay_sweep(row["k"]) if essay else {}) for row in rows], columns)


def workload_table(rows: list[dict], essay: bool) -> str:
    columns = [("workload", "workload", str), ("k", "k", str), *SHARED_COLUMNS, *(ESSAY_COLUMNS if essay else [])]
    return markdown_table(
        [shown(row, essay_workload(row["workload"]) if essay and row["k"] == USUAL_K else {}) for row in rows], columns
    )


def verdict(summary: dict, costs: dict, args) -> str:
    if summary.get("best_k") is None:
        return "nothing could be measured; see the errors in the result file"
    aa = summary["aa"]
    lines = [f"one draft pass costs c = {costs['c']:.2f} of a target pass; V(2) = {costs['v']['2']:.2f}."]
    if summary["ceiling_tokens_per_pass"]:
        lines.append(
            f"alpha is about {summary['alpha_median']:.2f}: no k can write more than {summary['ceiling_tokens_per_pass']:.1f} tokens a pass."
        )
    if summary["pays"]:
        lines.append(
            f"best k for {args.workload}: {summary['best_k']}, {summary['best_speedup']:.2f}x (predicted best: k = {summary['best_k_predicted']})."
        )
    elif args.repeats < FEWEST_PAIRS:
        lines.append(
            f"best k for {args.workload}: {summary['best_k']}, {summary['best_speedup']:.2f}x, from too few pairs for a verdict; "
            f"take --repeats {FEWEST_PAIRS} or more."
        )
    else:
        lines.append(
            f"do not speculate on {args.workload} with this pair: the best of all k, {summary['best_k']}, gives {summary['best_speedup']:.2f}x."
        )
    lines.append(
        f"predictions were off by {summary['prediction_error_median_abs']:.3f} in the median over k, {summary['prediction_error_max_abs']:.3f} at most."
    )
    lines.append(f"the same code against itself: {aa['median']:.3f}x ({aa['low']:.3f} to {aa['high']:.3f}, {aa['n']} pairs); the loop's own time is "
                 f"{100 * summary['overhead_share_median']:.1f} % of a round.")  # fmt: skip
    return "\n".join(lines)


def parse_args(argv):
    parser = make_parser(__doc__, "spec_bench", resume=True)
    add_task_options(parser)
    parser.add_argument("--ks", type=whole_list(1, 1024), default=list(KS), help="the k sweep, e.g. 1,2,4,8")
    parser.add_argument("--workload", default=DEFAULT_WORKLOAD, help="the text of the k sweep")
    parser.add_argument(
        "--workloads", nargs="+", default=list(WORKLOADS), metavar="NAME", help="the texts of the workload sweep"
    )
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    device, dtype = set_up(args)
    args.workloads = list(dict.fromkeys(args.workloads))
    for name in [args.workload, *args.workloads]:
        workload_prompt(name)
    fill_pair(args)
    target, (draft,) = load_pair(args, device, dtype, [args.draft])
    prompts = [(name, WORKLOADS[name]) for name in dict.fromkeys([args.workload, *args.workloads])]
    hashes = check_prompts(args, target, [draft], prompts, max(args.ks), device)
    print(
        f"{target.name} + {form(draft)}, {device}, {dtype_name(dtype)}, linear layers: {target.about['cpu_linear']}, loop: {args.loop}"
    )
    config = settings(args, target=target.about, draft=draft.about, prompt_ids_sha256=hashes)
    with ResultFile(args.results, "spec_bench", config, environment(device, dtype, target.model), args.resume) as file:
        sweep, workloads = run(args, target, draft, file, device)
        file.finish(summarise(sweep, workloads))
        summary, costs = file.document["summary"], file.find(part="costs")
    print(f"\n{verdict(summary, costs, args)}\nresults in {args.results}")
    return int(summary.get("best_k") is None)


if __name__ == "__main__":
    raise SystemExit(main())
