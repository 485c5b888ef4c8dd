"""Drafts side by side on one target: cheapness against agreement.

Claim: what a draft gives is decided by its cost in time, c, against its agreement, alpha, not by its parameters; no
speedup exists for a draft whose alpha does not exceed its c (Leviathan et al.), and a bigger draft can lose to a smaller.

    python spec_drafts.py                                             # drafts of the embedded target
    python spec_drafts.py --target Qwen/Qwen2.5-7B-Instruct --drafts Qwen/Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-1.5B-Instruct
"""

from __future__ import annotations

import functools
import re
import statistics

from spec_common import UserError, judge_speed, tell

from spec_cli import at_least, command, make_parser
from spec_decode import Cell, measure_all
from spec_harness.arms import draft_model
from spec_harness.cells import find_or_measure, pooled
from spec_harness.costs import costs_at, measure_costs
from spec_harness.essay import essay_draft
from spec_harness.options import add_decoding_options, add_prompt_options, chosen_prompts, make_task, open_run
from spec_harness.results import ResultFile
from spec_harness.tables import fixed, markdown_table, percent, progress, shown_interval, speed_words
from spec_models import linear as cpu_linear
from spec_models.find import EMBEDDED
from spec_models.pairs import EMBEDDED_DRAFTS, load_pair
from workloads import WORKLOADS


def costs_rows(file: ResultFile, draft, tasks: list, k: int) -> list[dict]:
    """What the draft and the target cost at the shortest and the longest context, before any speedup is measured."""
    weights, _ = cpu_linear.pass_weights(draft.model)
    about = {"parameters": draft.about["parameters"], "weights_per_pass": weights, "head": draft.about.get("draft_vocab") or 0}
    return measure_costs(file, tasks, draft.model, [k], draft=draft.name, **about)


def measure_drafts(tasks: dict, drafts: list, args, costs: dict) -> dict:
    """The row of one text, under `drafts` one for each draft, all of them in the same turns. `tasks` and `costs` by the draft's
    name. Raises Mismatch."""
    cells = {
        one.name: Cell(tasks[one.name], draft_model(tasks[one.name], one.model, args.k), costs[one.name]) for one in drafts
    }
    rows = measure_all(cells, args)
    return {"drafts": {name: {**row, "target_alone_from": tasks[name].alone_from} for name, row in rows.items()}, "error": None}


def run(args, target, drafts, prompts: list[tuple[str, str]], file: ResultFile) -> list[dict]:
    """Measure what the file lacks: a row holds one text and every draft. Returns one pooled row a draft. Raises Mismatch."""
    tasks = {name: {draft.name: make_task(args, target, draft, text) for draft in drafts} for name, text in prompts}
    costs = {
        draft.name: costs_rows(file, draft, [mine[draft.name] for mine in tasks.values()], args.k) for draft in drafts
    }
    measured: dict[str, list[dict]] = {draft.name: [] for draft in drafts}
    for name in progress(list(tasks), "texts"):
        here = {draft.name: costs_at(costs[draft.name], tasks[name][draft.name].context) for draft in drafts}
        work = functools.partial(measure_drafts, tasks[name], drafts, args, here)
        row = find_or_measure(file, tasks[name][drafts[0].name], {"part": "draft", "workload": name}, work)
        for draft in drafts:
            measured[draft.name].append({"error": row["error"]} if row["error"] else row["drafts"][draft.name])
    return [one_draft(draft, costs[draft.name], measured[draft.name]) for draft in drafts]


def one_draft(draft, costs: list[dict], rows: list[dict]) -> dict:
    """One draft over all its texts: counts added up, the speedup as time over time, turn by turn."""
    good = [row for row in rows if not row["error"]]
    row = {"draft": draft.name, "parameters": costs[0]["parameters"], "head": costs[0]["head"], "c": statistics.fmean(one["c"] for one in costs),
           "draft_pass_ms": 1000 * statistics.median(costs[0]["seconds"]["draft"]), "error": None if good else rows[0]["error"]}  # fmt: skip
    if not good:
        return row
    accepted, proposed, rejected = (sum(one[name] for one in good) for name in ("accepted", "proposed", "rejections"))
    alpha = accepted / (accepted + rejected) if accepted + rejected else None
    return {
        **row, **pooled(good), "proposed": proposed, "accepted": accepted, "discarded": proposed - accepted,
        "acceptance_rate": accepted / proposed if proposed else None, "alpha": alpha, "alpha_exceeds_c": alpha is not None and alpha > row["c"],
        "block_efficiency": sum(one["emitted"] for one in good) / sum(one["target_passes"] for one in good),
    }  # fmt: skip


def verdict(rows: list[dict]) -> str:
    """Who wins and why, from the measured rows alone."""
    good = [row for row in rows if not row["error"]]
    if not good:
        return "nothing could be measured; see the errors in the result file"
    best = max(good, key=lambda row: row["speedup"])
    lines = [f"{best['draft']} took the least time: {speed_words(best)}."]
    if judge_speed(best) == "slower":
        lines.append("do not speculate here: no draft is faster than the target alone.")
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
    ("draft", "draft", str), ("head", "head", lambda ids: f"{ids} ids" if ids else "whole"), ("c", "c", fixed(2)), ("alpha", "alpha", fixed(2)), ("pays", "alpha > c", str), ("speedup", "speedup", fixed(2, "x")),
    ("interval", "interval", str), ("predicted_costs", "from costs", fixed(2, "x")), ("block_efficiency", "tokens/pass", fixed(2)),
]  # fmt: skip
WIDE = [
    ("parameters", "parameters", lambda n: f"{n / 1e6:.1f} M"), ("draft_pass_ms", "ms per pass", fixed(2)),
    ("acceptance_rate", "acceptance", percent), ("discarded", "discarded", str), ("aa", "A/A", fixed(2, "x")),
]  # fmt: skip
ESSAY_COLUMNS = [
    ("essay_speedup", "essay's", fixed(2, "x")),
    ("essay_c", "essay's c", fixed(2)),
    ("essay_acceptance", "essay's acceptance", percent),
]


def table(rows: list[dict], essay: bool = False, wide: bool = False) -> str:
    shown = []
    for row in rows:
        published = essay_draft(row["draft"]) if essay else {}
        shown.append({**shown_interval(row), "pays": {True: "yes", False: "no"}.get(row.get("alpha_exceeds_c")), "essay_speedup": published.get("speedup"),
                      "essay_c": published.get("cost_coefficient"), "essay_acceptance": published.get("acceptance")})  # fmt: skip
    return markdown_table(shown, [*COLUMNS, *(WIDE if wide else []), *(ESSAY_COLUMNS if essay else [])])


def load_drafts(args, device, dtype):
    """(target, the drafts to compare); a cut head is shown beside the whole one. Raises UserError."""
    try:
        return load_pair(args, device, dtype, args.drafts, [0, args.draft_vocab] if args.draft_vocab else None)
    except UserError as error:  # a draft's flag is another one here
        raise UserError(re.sub("^--draft(?= )", "--drafts", str(error))) from error


def parse_args(argv):
    parser = make_parser(__doc__, "spec_drafts", resume=True)
    parser.add_argument("--target", default=EMBEDDED, help="hub id, folder, .gguf file or 'smollm2'")
    parser.add_argument("--drafts", nargs="+", metavar="DRAFT", help=f"hub ids, folders, .gguf files or 'cut:0,1,23'; for the embedded target {' '.join(EMBEDDED_DRAFTS)}")  # fmt: skip
    add_decoding_options(parser)
    add_prompt_options(parser, ("all", *WORKLOADS), "all")
    parser.add_argument("-k", "--k", type=at_least(1, 1024), default=5, help="guesses a round")
    return parser.parse_args(argv)


def default_drafts(args, embedded) -> list[str]:
    """The drafts asked for, or those of the embedded target. Raises UserError."""
    if args.drafts is None:
        if args.target != EMBEDDED:
            raise UserError("--drafts: missing; name the drafts to compare on that target")
        return list(embedded)
    if len(set(args.drafts)) < len(args.drafts):
        raise UserError("--drafts: the same draft twice; name each once")
    return args.drafts


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    args.drafts = default_drafts(args, EMBEDDED_DRAFTS)
    prompts = chosen_prompts(args)
    with open_run(args, "spec_drafts", prompts, load_drafts) as (file, target, drafts):
        rows = run(args, target, drafts, prompts, file)
        file.finish({"drafts": rows})
    essay = any(essay_draft(draft.name) for draft in drafts)
    texts = ", ".join(name for name, _ in prompts)
    tell(
        f"{texts}; {args.n_tokens} tokens of each, k = {args.k}\n\n{table(rows, essay, args.wide)}\n\n{verdict(rows)}\nresults in {args.results}"
    )
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
