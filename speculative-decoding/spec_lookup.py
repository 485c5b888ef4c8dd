"""Guessing by copying: look-up in the text so far, a draft model, and the look-up with the model where nothing matches.

Claim: a guess copied from the context costs nothing, so look-up pays where a text repeats its input, and it needs no more
rounds than `generate(prompt_lookup_num_tokens=k)` of the same k and n-gram size. Where nothing repeats it pays nothing.

    python spec_lookup.py                    # the embedded pair: three grounded prompts, the five workloads, three methods
    python spec_lookup.py --methods lookup --target Qwen/Qwen2.5-0.5B-Instruct    # no draft model is loaded
    python spec_lookup.py --prompt-file mine.jsonl --ngram-min 2                  # fewer chance matches
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from grounded import GROUNDED
from spec_common import (
    FEWEST_PAIRS,
    ClaimFailed,
    UserError,
    at_least,
    command,
    dtype_name,
    make_parser,
    ratio_summary,
    say,
    set_up,
)
from spec_harness.cells import Task, cell, model_drafter, ratio, run_speculative, watched
from spec_harness.costs import costs_row
from spec_harness.options import (
    add_policy_options,
    add_prompt_options,
    add_task_options,
    check_policy,
    check_prompts,
    chosen_prompts,
    fill_pair,
    make_task,
    with_policy,
)
from spec_harness.reference import overridden, prompt_lookup_rounds, run_prompt_lookup
from spec_harness.results import ResultFile, environment, settings
from spec_harness.tables import fixed, markdown_table, percent, progress
from spec_methods.lookup import MATCHES, HybridDrafter, LookupDrafter
from spec_models.pairs import PAIRS, form, load_pair
from workloads import WORKLOADS

TEXTS = {**GROUNDED, **WORKLOADS}
LONGEST_NGRAM = 32  # every size has its index; a longer match is always one of this length as well
METHODS = ("lookup", "hybrid", "draft")
VERDICTS = {"pays": "pays on", "loses": "do not use it on", "noise": "no difference beyond the noise on"}


def method_task(args, method: str, task: Task) -> Task:
    """The task as a method does it. A model's guesses cost passes, so it gets a k of its own."""

    def lookup(task, rule):
        return LookupDrafter(args.ngram_max, args.ngram_min, args.match)

    def hybrid(task, rule):
        return HybridDrafter(lookup(task, rule), model_drafter(task, rule), args.draft_k)

    if method == "draft":
        return replace(task, k=args.draft_k)
    return replace(task, drafter={"lookup": lookup, "hybrid": hybrid}[method])


def look_ups(task: Task) -> dict:
    """From a watched run of its own: the share of rounds in which something matched, and the seconds of one look-up."""
    made = []
    done, _, watch = watched(
        run_speculative, replace(task, drafter=lambda *given: made.append(task.drafter(*given)) or made[-1])
    )
    drafter = getattr(made[-1], "lookup", made[-1])
    return {
        "match_rate": ratio(drafter.matches, done.target_passes),
        "look_up_s": statistics.median(watch.seconds("look-up")),
    }


# -------------------------------------------------------------------------------------------------------------- running


def same_search(args) -> bool:
    """Whether rounds can be compared with transformers': it goes down to n-grams of 1, and its k is fixed."""
    return args.ngram_min == 1 and args.k_policy == "fixed"


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


def measured(file: ResultFile, task: Task, args, where: dict, costs: dict) -> dict:
    """The row of one method on one text: the file's if it has it whole. Raises Mismatch, ClaimFailed."""
    found = file.find(**where)
    if found and "match_rate" in found:
        if where["method"] == "lookup":
            check_rounds(args, found)  # a row that failed its check is no better for having been written
        return found
    more, arms = {"match_rate": None, "look_up_s": None}, {}
    if where["method"] == "lookup":
        costs = {**costs, "c": 0.0}  # no model drafts: a round costs its check and the loop's own time
        theirs = prompt_lookup_rounds(task, args.ngram_max)
        arms = {"prompt_lookup": lambda: run_prompt_lookup(task, args.ngram_max)} if theirs else {}
        more.update(transformers_emitted_lengths=theirs, transformers_rounds=theirs and len(theirs))
    task = with_policy(args, task, costs)
    row = cell(file, task, args, where, costs, arms)
    if not row["error"]:
        row.update(more | (look_ups(task) if where["method"] != "draft" else {}))
        file.write()
        if where["method"] == "lookup":
            check_rounds(args, row)
    return row


def run(args, target, draft, texts: list[tuple[str, str]], file: ResultFile, device) -> list[dict]:
    """Measure what the file lacks. Returns one row a text and method. Raises Mismatch, ClaimFailed."""
    tasks = {name: make_task(args, target, draft, text, args.k, device) for name, text in texts}
    context = statistics.median_low(task.prompt.shape[1] for task in tasks.values()) + args.n_tokens // 2
    say("what passes cost ...")
    costs = costs_row(
        file,
        target.model,
        draft and draft.model,
        context,
        [args.k, args.k // 2, args.draft_k],
        next(iter(tasks.values())).limit,
    )
    rows = []
    for name, method in progress([(name, method) for name in tasks for method in args.methods], "look-up"):
        task = method_task(args, method, tasks[name])
        rows.append(measured(file, task, args, {"part": "look-up", "text": name, "method": method, "k": task.k}, costs))
    return rows


def kind_of(row: dict) -> str:
    """Whether it pays, as far as the interval and the A/A arm carry: a key of VERDICTS."""
    if row["speedup_low"] > 1 and row["speedup"] > row["aa_high"]:
        return "pays"
    return "loses" if row["speedup_high"] < 1 else "noise"


def summarise(rows: list[dict]) -> dict:
    """Pooled over the texts: the noise, where each method pays, what a look-up costs, and the rounds beside transformers'."""
    good = [row for row in rows if not row["error"]]
    if not good:
        return {"verdict": "nothing could be measured"}
    compared = [row for row in good if row.get("transformers_rounds") and not row["near_ties"]]
    cost = [row["look_up_s"] * 1000 / row["target_pass_ms"] for row in good if row["look_up_s"] is not None]
    return {
        "aa": ratio_summary(*([value for row in good for value in row[name]] for name in ("baseline_s", "baseline_again_s"))),
        "where": {method: {kind: {row["text"]: row["speedup"] for row in good if row["method"] == method and kind_of(row) == kind}
                           for kind in VERDICTS} for method in METHODS},
        "look_up_cost": statistics.median(cost) if cost else None,
        "rounds": sum(row["target_passes"] for row in compared) if compared else None,
        "transformers_rounds": sum(row["transformers_rounds"] for row in compared) if compared else None,
        "near_ties": sum(len(row["near_ties"]) for row in good), "pairs": min(len(row["baseline_s"]) for row in good),
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
    not_same = "" if same_search(args) else " (n-grams down to 1, k fixed: not the same rule)"
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
    aa = summary["aa"]
    lines.append(
        f"the same code against itself: {aa['median']:.3f}x ({aa['low']:.3f} to {aa['high']:.3f}, {aa['n']} pairs)."
    )
    return "\n".join(lines)


COLUMNS = [
    ("text", "text", str), ("method", "method", str), ("k", "k", str), ("speedup", "speedup", fixed(2, "x")), ("interval", "interval", str),
    ("predicted_costs", "predicted", fixed(2, "x")), ("acceptance_rate", "acceptance", percent), ("alpha", "alpha", fixed(2)),
    ("block_efficiency", "tokens/pass", fixed(2)), ("match_rate", "rounds with a match", percent), ("target_passes", "rounds", str),
    ("transformers_rounds", "transformers' rounds", str), ("aa", "A/A", fixed(2, "x")),
]  # fmt: skip


def table(rows: list[dict]) -> str:
    intervals = [row["error"] or f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}" for row in rows]
    return markdown_table(
        [{**row, "interval": interval} for row, interval in zip(rows, intervals, strict=True)], COLUMNS
    )


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
        "--ngram-max", type=at_least(1, LONGEST_NGRAM), default=3, help="last tokens to search for, the longest first"
    )
    parser.add_argument(
        "--ngram-min", type=at_least(1, LONGEST_NGRAM), default=1, help="last tokens that must match at least"
    )
    parser.add_argument(
        "--match",
        choices=MATCHES,
        default=MATCHES[0],
        help="which of several matches is copied; first: as `generate` does",
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
    """(target, draft or None where no method needs one). Raises UserError."""
    if args.methods == ["lookup"]:
        args.target, args.draft = PAIRS[args.pair][0] if args.target is None else args.target, None
        return load_pair(args, device, dtype, [])[0], None
    try:
        fill_pair(args)
    except UserError as error:
        raise UserError(f"{error}; or take --methods lookup, which needs none") from error
    target, (draft,) = load_pair(args, device, dtype, [args.draft])
    return target, draft


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    device, dtype = set_up(args)
    args.methods = [method for method in METHODS if method in args.methods]
    check_policy(args)
    if args.k_policy == "confidence" and args.methods == ["lookup"]:
        raise UserError(
            "--k-policy confidence: a copied guess has no confidence to look at; choose cost, or a method with a draft"
        )
    if args.ngram_min > args.ngram_max:
        raise UserError(f"--ngram-min {args.ngram_min}: more than --ngram-max {args.ngram_max}; lower it")
    texts = texts_of(args)
    target, draft = load_models(args, device, dtype)
    hashes = check_prompts(args, target, [draft], texts, args.k, device)
    drafting = "no draft model" if draft is None else form(draft)
    print(f"{target.name} + {drafting}, {device}, {dtype_name(dtype)}, linear layers: {target.about['cpu_linear']}, loop: {args.loop}, "
          f"n-grams of {args.ngram_max} to {args.ngram_min}, {args.n_tokens} tokens\n", flush=True)  # fmt: skip
    config = settings(
        args,
        target=target.about,
        draft=draft and draft.about,
        prompt_ids_sha256=hashes,
        generation_config_overridden=overridden(target.model),
    )
    with ResultFile(args.results, "spec_lookup", config, environment(device, dtype, target.model), args.resume) as file:
        rows = run(args, target, draft, texts, file, device)
        summary = summarise(rows)
        file.finish(summary)
    print(f"{table(rows)}\n\n{verdict(args, summary)}\nresults in {args.results}")
    return int("verdict" in summary or more_rounds(args, summary))


if __name__ == "__main__":
    raise SystemExit(main())
