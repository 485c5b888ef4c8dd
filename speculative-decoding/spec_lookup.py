"""Guessing by copying: look-up in the text so far, a draft model, and the look-up with the model where nothing matches.

Claim: a guess copied from the context costs nothing, so look-up pays where a text repeats its input, and it needs no more
rounds than `generate(prompt_lookup_num_tokens=k)` of the same k and n-gram size. Where nothing repeats it pays nothing.

    python spec_lookup.py                    # the embedded pair: three grounded prompts, the five workloads, three methods
    python spec_lookup.py --methods lookup --target Qwen/Qwen2.5-0.5B-Instruct    # no draft model is loaded
    python spec_lookup.py --prompt-file mine.jsonl --ngram-min 2                  # fewer chance matches
"""

from __future__ import annotations

import functools
import statistics

from spec_common import FEWEST_PAIRS, ClaimFailed, UserError, interval_text, judge_speed, say, tell

from spec_cli import at_least, command, make_parser
from spec_decode import Cell, measure_all
from spec_harness.arms import Method, Task, draft_model, run_speculative
from spec_harness.cells import find_or_measure, pooled, ratio
from spec_harness.costs import costs_at, measure_costs
from spec_harness.options import (
    add_policy_options,
    add_prompt_options,
    add_task_options,
    check_policy,
    chosen_prompts,
    load_one_draft,
    make_task,
    open_run,
    policy_of,
)
from spec_harness.reference import prompt_lookup_rounds, run_prompt_lookup
from spec_harness.results import ResultFile
from spec_harness.tables import fixed, markdown_table, percent, progress, shown_interval, turns_of
from spec_methods.lookup import MATCHES, HybridDrafter, LookupDrafter
from spec_methods.suffix import SuffixDrafter
from spec_models.pairs import PAIRS, load_pair
from workloads import GROUNDED, WORKLOADS

TEXTS = {**GROUNDED, **WORKLOADS}
NGRAMS = (3, 1)  # the longest and the shortest n-gram looked for, unless said
LONGEST_NGRAM = 32  # every size has its index; a longer match is always one of this length as well
METHODS = ("lookup", "hybrid", "draft")
VERDICTS = {
    "faster": "pays on",
    "slower": "do not use it on",
    "noise": "no difference beyond the noise on",
    "few": "too few pairs on",
}


def method_of(args, name: str, task: Task, draft, costs: dict) -> Method:
    """How a method does it. A model's guesses cost passes, so it gets a k of its own."""
    if name == "draft":
        method = draft_model(task, draft.model, args.draft_k)
        return Method(method.drafter, policy_of(args, args.draft_k, costs))
    drafter = SuffixDrafter() if args.match == "suffix" else LookupDrafter(args.ngram_max, args.ngram_min, args.match)
    if name == "hybrid":
        drafter = HybridDrafter(drafter, draft_model(task, draft.model, args.draft_k).drafter, args.draft_k)
    return Method(drafter, policy_of(args, args.k, costs))


def look_ups(task: Task, method: Method) -> dict:
    """From a watched run of its own: the share of rounds in which something matched, and the seconds of one look-up."""
    run = run_speculative(task, method, watched=True)
    drafter = getattr(method.drafter, "lookup", method.drafter)
    return {
        "match_rate": ratio(drafter.matches, run.done.target_passes),
        "look_up_s": statistics.median(run.watch.seconds("look-up")),
    }


# -------------------------------------------------------------------------------------------------------------- running


def same_search(args) -> bool:
    """Whether rounds can be compared with transformers': it goes down to n-grams of 1, and its k is fixed."""
    return args.ngram_min == 1 and args.k_policy == "fixed" and args.match != "suffix"


def check_rounds(args, row: dict) -> None:
    """By the same rule every round must write what transformers' own does. Raises ClaimFailed.

    A near-tie that was excused parts the texts and with them the rounds.
    """
    theirs = row["transformers_emitted_lengths"]
    if (
        theirs is not None
        and args.match == "first"
        and same_search(args)
        and not row["near_ties"]
        and theirs != row["emitted_lengths"]
    ):
        raise ClaimFailed(
            f"{row['text']}: rounds of generate's prompt look-up wrote {theirs} tokens, ours {row['emitted_lengths']}"
        )


def cell_of(task: Task, target, draft, name: str, args, costs: dict) -> tuple[Cell, dict]:
    """One method on one text, look-up with transformers' own beside it; and what its row says besides. Raises Mismatch."""
    arms, more = {}, {"match_rate": None, "look_up_s": None}
    if name == "lookup":
        costs = {**costs, "c": 0.0}  # no model drafts: a round costs its check and the loop's own time
        plain = target.plain or target.model
        theirs = prompt_lookup_rounds(plain, task, args.k, args.ngram_max)
        arms = {"prompt_lookup": lambda: run_prompt_lookup(plain, task, args.k, args.ngram_max)} if theirs else {}
        more.update(transformers_emitted_lengths=theirs, transformers_rounds=theirs and len(theirs))
    method = method_of(args, name, task, draft, costs)
    more.update(look_ups(task, method) if name != "draft" else {})
    return Cell(task, method, costs, arms), more


def measure_methods(task: Task, target, draft, args, costs: dict) -> dict[str, dict]:
    """The row of every method on one text, all of them in the same turns. Raises Mismatch."""
    cells = {name: cell_of(task, target, draft, name, args, costs) for name in args.methods}
    rows = measure_all({name: cell for name, (cell, _) in cells.items()}, args)
    return {name: {**row, **cells[name][1]} for name, row in rows.items()}


def run(args, target, draft, texts: list[tuple[str, str]], file: ResultFile) -> list[dict]:
    """Measure what the file lacks. Returns one row a text and method. Raises Mismatch, ClaimFailed."""
    tasks = {name: make_task(args, target, draft, text) for name, text in texts}
    say("what passes cost ...")
    costs = measure_costs(
        file, list(tasks.values()), draft and draft.model, sorted({args.k, args.k // 2, args.draft_k})
    )
    rows = []
    for text in progress(list(tasks), "look-up"):
        task = tasks[text]
        here = costs_at(costs, task.context)
        together = functools.cache(functools.partial(measure_methods, task, target, draft, args, here))
        for name in args.methods:
            where = {"part": "look-up", "text": text, "method": name}
            rows.append(find_or_measure(file, task, where, lambda name=name, measured=together: measured()[name]))
            if name == "lookup" and not rows[-1]["error"]:
                check_rounds(args, rows[-1])  # a row that failed its check is no better for having been written
    return rows


def summarise(rows: list[dict]) -> dict:
    """Pooled over the texts: the noise, where each method pays, what a look-up costs, and the rounds beside transformers'."""
    good = [row for row in rows if not row["error"]]
    if not good:
        return {"verdict": "nothing could be measured"}
    compared = [row for row in good if row.get("transformers_rounds") and not row["near_ties"]]
    cost = [row["look_up_s"] * 1000 / row["target_pass_ms"] for row in good if row["look_up_s"] is not None]
    errors = [row["prediction_error"] for row in good]
    aa = pooled(good)
    return {
        "aa": aa["aa"], "aa_low": aa["aa_low"], "aa_high": aa["aa_high"], "pairs": aa["pairs"],
        "where": {method: {kind: {row["text"]: row["speedup"] for row in good if row["method"] == method and judge_speed(row) == kind}
                           for kind in VERDICTS} for method in METHODS},
        "look_up_cost": statistics.median(cost) if cost else None,
        "rounds": sum(row["target_passes"] for row in compared) if compared else None,
        "transformers_rounds": sum(row["transformers_rounds"] for row in compared) if compared else None,
        "near_ties": sum(len(row["near_ties"]) for row in good), "prediction_error_median": statistics.median(errors),
        "prediction_error_median_abs": statistics.median(map(abs, errors)),
    }  # fmt: skip


def more_rounds(args, summary: dict) -> bool:
    """Whether the claim on rounds failed, over all texts."""
    return same_search(args) and (summary.get("rounds") or 0) > (summary.get("transformers_rounds") or 0)


def method_verdict(method: str, where: dict) -> str:
    named = {
        kind: ", ".join(f"{text} ({speedup:.2f}x)" for text, speedup in speedups.items())
        for kind, speedups in where.items()
    }
    return f"{method}: " + "; ".join(f"{VERDICTS[kind]} {texts}" for kind, texts in named.items() if texts) + "."


def rounds_verdict(args, summary: dict) -> str:
    not_same = "" if same_search(args) else " (n-grams down to 1, a fixed k, one place copied: not the same rule)"
    failed = f": the claim does NOT hold, --match {args.match} takes more" if more_rounds(args, summary) else ""
    return f"look-up took {summary['rounds']} rounds, generate's prompt look-up {summary['transformers_rounds']}{not_same}{failed}."


def verdict(args, summary: dict) -> str:
    """Where each method pays and where not, and what the claim rests on."""
    if "verdict" in summary:
        return f"{summary['verdict']}; see the errors in the result file"
    exact = (
        f"{summary['near_ties']} near-ties excused" if summary["near_ties"] else "token for token the target's own text"
    )
    lines = [f"every sample of every arm: {exact}."]
    if summary["pairs"] < FEWEST_PAIRS:
        lines.append(
            f"too few pairs for a verdict ({summary['pairs']}) on where it pays; take --repeats {FEWEST_PAIRS} or more."
        )
    else:
        lines += [
            method_verdict(method, summary["where"][method])
            for method in args.methods
            if any(summary["where"][method].values())
        ]
    if summary["look_up_cost"] is not None:
        lines.append(f"one look-up costs {summary['look_up_cost']:.4f} of a target pass.")
    if summary["rounds"] is not None:
        lines.append(rounds_verdict(args, summary))
    aa = interval_text(summary["aa_low"], summary["aa_high"], 3)
    lines.append(
        f"the same code against itself: {summary['aa']:.3f}x{f' ({aa})' if aa else ''}, {turns_of(summary['pairs'])}."
    )
    return "\n".join(lines)


COLUMNS = [
    ("text", "text", str), ("method", "method", str), ("speedup", "speedup", fixed(2, "x")), ("interval", "interval", str),
    ("predicted_costs", "from costs", fixed(2, "x")), ("block_efficiency", "tokens/pass", fixed(2)), ("alpha", "alpha", fixed(2)),
]  # fmt: skip
WIDE = [
    ("k", "k", str), ("acceptance_rate", "acceptance", percent), ("match_rate", "rounds with a match", percent), ("target_passes", "rounds", str),
    ("transformers_rounds", "transformers' rounds", str), ("aa", "A/A", fixed(2, "x")),
]  # fmt: skip


def table(rows: list[dict], wide: bool = False) -> str:
    return markdown_table([shown_interval(row) for row in rows], COLUMNS + (WIDE if wide else []))


# ------------------------------------------------------------------------------------------------------------- the user


def parse_args(argv):
    parser = make_parser(__doc__, "spec_lookup", resume=True)
    add_task_options(parser)
    add_policy_options(parser)
    add_prompt_options(parser, ("all", *TEXTS), "all")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="lookup alone needs no draft model"
    )
    parser.add_argument("-k", "--k", type=at_least(1, 1024), default=10, help="tokens copied a round, at most")
    parser.add_argument(
        "--draft-k",
        type=at_least(1, 1024),
        default=5,
        help="guesses of the draft model a round, alone and in the hybrid",
    )
    parser.add_argument(
        "--ngram-max", type=at_least(1, LONGEST_NGRAM), default=NGRAMS[0], help="last tokens to search for, the longest first"
    )
    parser.add_argument(
        "--ngram-min", type=at_least(1, LONGEST_NGRAM), default=NGRAMS[1], help="last tokens that must match at least"
    )
    parser.add_argument(
        "--match",
        choices=(*MATCHES, "suffix"),
        default=MATCHES[0],
        help="which of several matches is copied; first: as `generate` does; suffix: the commonest continuation, as far as counts go",
    )
    parser.set_defaults(keep_plain=True)  # transformers' own look-up is an arm of every run
    return parser.parse_args(argv)


def texts_of(args) -> list[tuple[str, str]]:
    """(name, text) of each prompt asked for. Raises UserError."""
    if args.prompt is not None or args.prompt_file is not None:
        return chosen_prompts(args)
    if args.workload not in ("all", *TEXTS):
        raise UserError(f"--workload {args.workload}: unknown; choose all, {', '.join(TEXTS)}")
    return [(name, text) for name, text in TEXTS.items() if args.workload in ("all", name)]


def load_models(args, device, dtype):
    """(target, the draft or none where no method needs one). Raises UserError."""
    if args.methods == ["lookup"]:
        args.target, args.draft = PAIRS[args.pair][0] if args.target is None else args.target, None
        return load_pair(args, device, dtype, [])
    try:
        return load_one_draft(args, device, dtype)
    except UserError as error:
        if not str(error).startswith("--draft: missing"):
            raise
        raise UserError(f"{error}; or take --methods lookup, which needs none") from error


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    args.methods = [method for method in METHODS if method in args.methods]
    check_policy(args)
    if args.k_policy == "confidence" and args.methods == ["lookup"]:
        raise UserError(
            "--k-policy confidence: a copied guess has no confidence to look at; choose cost, or a method with a draft"
        )
    if args.match == "suffix" and (args.ngram_max, args.ngram_min) != NGRAMS:
        raise UserError("--match suffix: weighs every length of match; leave --ngram-max and --ngram-min out")
    if args.ngram_min > args.ngram_max:
        raise UserError(f"--ngram-min {args.ngram_min}: more than --ngram-max {args.ngram_max}; lower it")
    texts = texts_of(args)
    with open_run(args, "spec_lookup", texts, load_models) as (file, target, drafts):
        rows = run(args, target, drafts[0] if drafts else None, texts, file)
        summary = summarise(rows)
        file.finish(summary)
    searched = "every length by its counts" if args.match == "suffix" else f"n-grams of {args.ngram_max} to {args.ngram_min}"
    tell(
        f"{searched}, {args.n_tokens} tokens\n\n{table(rows, args.wide)}\n\n{verdict(args, summary)}\nresults in {args.results}"
    )
    return int(any(row["error"] for row in rows) or more_rounds(args, summary))


if __name__ == "__main__":
    raise SystemExit(main())
