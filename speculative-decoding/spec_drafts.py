"""Drafts side by side on one target: cheapness against agreement.

Claim: what a draft gives is decided by its cost in time, c, against its agreement, alpha, not by its parameters; no
speedup exists for a draft whose alpha does not exceed its c (Leviathan et al.), and a bigger draft can lose to a smaller.

    python spec_drafts.py                                             # drafts of the embedded target
    python spec_drafts.py --target Qwen/Qwen2.5-7B-Instruct --drafts Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-1.5B-Instruct
"""

from __future__ import annotations

import statistics

from spec_common import UserError, at_least, command, dtype_name, make_parser, ratio_summary, set_up
from spec_harness.cells import cell
from spec_harness.costs import measured_costs
from spec_harness.essay import essay_draft
from spec_harness.options import add_decoding_options, make_task, workload_prompt
from spec_harness.results import ResultFile, environment, settings
from spec_harness.tables import fixed, markdown_table, percent, progress
from spec_models import linear as cpu_linear
from spec_models.load import EMBEDDED
from spec_models.pairs import EMBEDDED_DRAFTS, load_pair
from workloads import DEFAULT_WORKLOAD, WORKLOADS


def costs_row(file: ResultFile, target, draft, context: int, k: int, limit: int | None) -> dict:
    """What the draft and the target cost on this machine, before any speedup is measured: one row a draft."""
    if found := file.find(part="costs", draft=draft.name):
        return found
    weights, _ = cpu_linear.pass_weights(draft.model)
    row = {"part": "costs", "draft": draft.name, "parameters": draft.about["parameters"], "weights_per_pass": weights}
    return file.add({**row, **measured_costs(target.model, draft.model, context, [k], limit)})


def run(args, target, drafts, file: ResultFile, device) -> list[dict]:
    """Measure what the file lacks, every draft on every workload. Returns one pooled row a draft. Raises Mismatch."""
    names = list(WORKLOADS) if args.workload == "all" else [args.workload]
    cells = [(draft, name) for draft in drafts for name in names]
    measured: dict[str, list[dict]] = {draft.name: [] for draft in drafts}
    costs = {}
    for draft, name in progress(cells, "drafts"):
        task = make_task(args, target, draft, WORKLOADS[name], args.k, device)
        costs[draft.name] = costs_row(
            file, target, draft, task.prompt.shape[1] + args.n_tokens // 2, args.k, task.limit
        )
        measured[draft.name].append(
            cell(file, task, args, {"part": "draft", "draft": draft.name, "workload": name}, costs[draft.name])
        )
    return [pooled(draft, costs[draft.name], measured[draft.name]) for draft in drafts]


def pooled(draft, costs: dict, rows: list[dict]) -> dict:
    """One draft over all its cells: counts added up, the speedup from the paired times of all of them."""
    good = [row for row in rows if not row["error"]]
    row = {"draft": draft.name, "parameters": costs["parameters"], "c": costs["c"], "draft_pass_ms": 1000 * statistics.median(costs["seconds"]["draft"]),
           "error": None if good else rows[0]["error"]}  # fmt: skip
    if not good:
        return row
    accepted, proposed = (sum(one[name] for one in good) for name in ("accepted", "proposed"))
    rejected = sum(one["rejections"] for one in good)
    ratios = ratio_summary(
        *([value for one in good for value in one[name]] for name in ("baseline_s", "speculative_s"))
    )
    alpha = accepted / (accepted + rejected) if accepted + rejected else None
    return {
        **row, "proposed": proposed, "accepted": accepted, "discarded": proposed - accepted, "acceptance_rate": accepted / proposed if proposed else None,
        "alpha": alpha, "speedup": ratios["median"], "speedup_low": ratios["low"], "speedup_high": ratios["high"],
        "predicted_costs": statistics.median(one["predicted_costs"] for one in good), "alpha_exceeds_c": alpha is not None and alpha > costs["c"],
    }  # fmt: skip


def verdict(rows: list[dict]) -> str:
    """Who wins and why, from the measured rows alone."""
    good = [row for row in rows if not row["error"]]
    if not good:
        return "nothing could be measured; see the errors in the result file"
    best = max(good, key=lambda row: row["speedup"])
    sure = "" if best["speedup_low"] > 1 else ", but its interval reaches below 1: not beyond the noise"
    lines = [
        f"{best['draft']} is the fastest: {best['speedup']:.2f}x"
        + (f"{sure}." if best["speedup"] > 1 else ", slower than no draft at all: do not speculate here.")
    ]
    most = max(good, key=lambda row: row["alpha"] or 0)
    if most is not best and (most["alpha"] or 0) > (best["alpha"] or 0):
        lines.append(
            f"{most['draft']} agrees more (alpha {most['alpha']:.2f} against {best['alpha']:.2f}) and is slower all the same: "
            f"its pass costs c = {most['c']:.2f} against {best['c']:.2f}."
        )
    lines += [
        f"{row['draft']} is larger ({row['parameters'] / 1e6:.1f} M against {best['parameters'] / 1e6:.1f} M parameters) and loses: {row['speedup']:.2f}x, alpha "
        f"{row['alpha'] or 0:.2f} against {best['alpha'] or 0:.2f}, c {row['c']:.2f} against {best['c']:.2f}."
        for row in good
        if row["parameters"] > best["parameters"] and not (row is most and (most["alpha"] or 0) > (best["alpha"] or 0))
    ]
    lines += [
        f"{row['draft']}: alpha {row['alpha'] or 0:.2f} does not exceed c {row['c']:.2f}, so no k can pay."
        for row in good
        if not row["alpha_exceeds_c"]
    ]
    return "\n".join(lines)


COLUMNS = [
    ("draft", "draft", str), ("parameters", "parameters", lambda n: f"{n / 1e6:.1f} M"), ("draft_pass_ms", "ms per pass", fixed(2)), ("c", "c", fixed(2)),
    ("acceptance_rate", "acceptance", percent), ("alpha", "alpha", fixed(2)), ("discarded", "discarded", str), ("speedup", "speedup", fixed(2, "x")),
    ("interval", "interval", str), ("predicted_costs", "predicted", fixed(2, "x")), ("pays", "alpha > c", str),
]  # fmt: skip
ESSAY_COLUMNS = [
    ("essay_speedup", "the essay's speedup", fixed(2, "x")),
    ("essay_c", "its c", fixed(2)),
    ("essay_acceptance", "its acceptance", percent),
]


def table(rows: list[dict], essay: bool) -> str:
    shown = []
    for row in rows:
        published = essay_draft(row["draft"]) if essay else {}
        interval = row["error"] or f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
        shown.append({**row, "interval": interval, "pays": {True: "yes", False: "no"}.get(row.get("alpha_exceeds_c")), "essay_speedup": published.get("speedup"),
                      "essay_c": published.get("cost_coefficient"), "essay_acceptance": published.get("acceptance")})  # fmt: skip
    return markdown_table(shown, [*COLUMNS, *(ESSAY_COLUMNS if essay else [])])


def parse_args(argv):
    parser = make_parser(__doc__, "spec_drafts", resume=True)
    parser.add_argument("--target", default=EMBEDDED, help="hub id, folder, .gguf file or 'smollm2'")
    parser.add_argument(
        "--drafts",
        nargs="+",
        metavar="DRAFT",
        help=f"hub ids, folders, .gguf files or 'cut:0,1,23'; for the embedded target {' '.join(EMBEDDED_DRAFTS)}",
    )
    add_decoding_options(parser)
    parser.add_argument("--workload", default=DEFAULT_WORKLOAD, help=f"one of {', '.join(WORKLOADS)}, or all")
    parser.add_argument("-k", "--k", type=at_least(1), default=5, help="guesses a round")
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    device, dtype = set_up(args)
    if args.workload != "all":
        workload_prompt(args.workload)
    if args.drafts is None:
        if args.target != EMBEDDED:
            raise UserError("--drafts: missing; name the drafts to compare on that target")
        args.drafts = list(EMBEDDED_DRAFTS)
    if len(set(args.drafts)) < len(args.drafts):
        raise UserError("--drafts: the same draft twice; name each once")
    heads = [0, args.draft_vocab] if args.draft_vocab else None  # a cut head is shown beside the whole one
    target, drafts = load_pair(args, device, dtype, args.drafts, heads)
    for draft in drafts:
        for name in WORKLOADS if args.workload == "all" else [args.workload]:
            make_task(args, target, draft, WORKLOADS[name], args.k, device)
    print(
        f"{target.name}, {device}, {dtype_name(dtype)}, linear layers: {target.about['cpu_linear']}, {args.workload}, k = {args.k}, {args.n_tokens} tokens\n"
    )
    config = settings(args, target=target.about, draft_models=[draft.about for draft in drafts])
    with ResultFile(args.results, "spec_drafts", config, environment(device, dtype, target.model), args.resume) as file:
        rows = run(args, target, drafts, file, device)
        file.finish({"drafts": rows})
    print(
        f"{table(rows, any(essay_draft(draft.name) for draft in drafts))}\n\n{verdict(rows)}\nresults in {args.results}"
    )
    return int(all(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
