"""Many requests at once: what is left of the gain when the passes are full already.

Claim: speculation for a batch, every row keeping its own number of guesses, writes for each request, token for token, what
the target alone would have written for it; and its speedup is what measured passes over B and B(k+1) tokens predict. The
baseline decodes the same batch. Every timed row is checked against its request decoded alone; a mismatch fails the run.

    python spec_batch.py                                     # the embedded pair, batches of 1, 2, 4, 8, 16
    python spec_batch.py --batches 1,32 -k 3 --prompt-file prompts.jsonl --stop-at-eos
"""

from __future__ import annotations

import functools
import statistics
from itertools import islice

from spec_common import UserError, interleave, is_out_of_memory, judge_speed, paired_ratio, say, tell

from spec_cli import at_least, command, make_parser, whole_list
from spec_decode import Mismatch, check_exact, counts
from spec_harness.arms import Task, run_baseline
from spec_harness.batches import (
    BatchRun,
    Requests,
    all_rows,
    batch_costs,
    bytes_needed,
    free_bytes,
    phases,
    predicted_speedup,
    run_batches,
    run_generated,
    widest,
)
from spec_harness.cells import find_or_measure, timing
from spec_harness.options import (
    add_policy_options,
    add_prompt_options,
    add_task_options,
    chosen_prompts,
    make_task,
    open_run,
    policy_of,
)
from spec_harness.results import ResultFile
from spec_harness.tables import fixed, markdown_table, percent, progress, shown_interval, speed_words
from spec_methods.rows import check_rows
from workloads import WORKLOADS, later_starts

BATCHES = (1, 2, 4, 8, 16)
OF_FREE_MEMORY = 0.9
PER_REQUEST = (
    "emitted", "target_passes", "draft_passes", "proposed", "accepted", "rejections", "acceptance_rate", "alpha", "block_efficiency",
)  # fmt: skip
NO_COSTS = {"c_places": [], "v": {1: 1.0}}  # for the policies that look at none


# ------------------------------------------------------------------------------------------------------------- prompts


def row_prompts(args) -> list[tuple[str, str]]:
    """(name, text) of the requests, which every size decodes: as many as the largest batch has rows. Raises UserError."""
    most = max(args.batches)
    own = args.prompt is not None or args.prompt_file is not None
    chosen = chosen_prompts(args)
    prompts = chosen[:most] if own else list(islice(later_starts(dict(chosen)), most))
    if len(prompts) < most:
        where = "one --prompt is" if own else f"--workload {args.workload} gives"
        where = f"--prompt-file {args.prompt_file.name} has" if args.prompt_file else where
        raise UserError(
            f"--batches {most}: a batch larger than the prompts ({where} {len(prompts)}); lower it or give more, one a line of a .jsonl"
        )
    return prompts


# ------------------------------------------------------------------------------------------------------------- the run


def sizes_that_fit(sizes: list[int], requests: Requests) -> list[int]:
    """The batches that memory holds; a remark on the others. Raises UserError where it holds none."""
    fit = []
    for size in sizes:
        requests.size = size
        needed, free = bytes_needed(requests), free_bytes(requests.device)
        if needed <= OF_FREE_MEMORY * free:
            fit.append(size)
            continue
        beside = f"about {needed / 1e9:.1f} GB beside the weights"
        say(f"a batch of {size} is left out: {beside}, {free / 1e9:.1f} GB are free")
    if not fit:
        raise UserError(f"--batches: not even a batch of {min(sizes)} fits into memory; lower it or --n-tokens")
    return fit


def alone(task: Task) -> dict:
    """What a request gets by itself, from the single-request loop: what its row must get in every batch."""
    try:
        return {"tokens": run_baseline(task).done.tokens, "error": None}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        fix = "lower it or choose a smaller model"
        raise UserError(f"--n-tokens: out of memory with one request alone; {fix}") from error


def check_batch(
    requests: Requests, arm: str, run: BatchRun, expected: dict[str, list[int]], allow_near_ties: bool
) -> list[dict]:
    """The excused near-ties, by request. Raises Mismatch, naming it, for a text that it does not get alone."""
    found = []
    for row, ((name, task), got) in enumerate(zip(requests.tasks.items(), run.done, strict=True)):
        try:
            ties = check_exact(task, f"row {row} ({name}) of {arm}", expected[name], got.tokens, allow_near_ties)
        except Mismatch as error:
            raise Mismatch({"row": row, **error.report}) from None
        found += [{"row": row, **tie} for tie in ties]
    return found


def measure_batch(requests: Requests, plain_target, expected: dict, costs: list[dict], args) -> dict:
    """The row of one size: counted and predicted first, then timed in turns, `generate` on the padded batch among them.
    `costs`: rows of `batch_costs`, this size's among them. Raises Mismatch."""
    near_ties, single = [], functools.partial(run_batches, requests, False)
    arms = {
        "baseline": single,
        "speculative": functools.partial(run_batches, requests, True),
        "baseline_again": single,
        "generate": functools.partial(run_generated, plain_target, requests),
    }

    def check(arm: str, run: BatchRun) -> None:
        near_ties.extend(check_batch(requests, arm, run, expected, args.allow_near_ties))

    check("the batched baseline, first", single())  # these two warm up the watched runs
    check("speculation, first", arms["speculative"]())
    plain, fast = single(watched=True), arms["speculative"](watched=True)
    check("the batched baseline, watched", plain)
    check("speculation, watched", fast)
    row, mine = untimed(requests, plain, fast, args.k), next(cost for cost in costs if cost["batch"] == requests.size)
    row |= {name: mine[name] for name in ("check_cost", "c")}
    row["predicted"] = predicted_speedup(costs, widest(next(iter(requests.tasks.values())), args.k), plain, fast)
    samples = interleave(arms, args.repeats, args.warmup)
    for arm, runs in samples.items():
        for run in runs:
            check(arm, run)
    row |= timing(samples, row["emitted"])
    row["prediction_error"] = row["predicted"] - row["speedup"]
    return row | {"exact": not near_ties, "near_ties": near_ties, "error": None}


def untimed(requests: Requests, plain: BatchRun, fast: BatchRun, k: int) -> dict:
    """The part of a row that no free run is needed for: counts and where time went. From the watched runs."""
    each = {name: counts(one, k) for name, one in zip(requests.tasks, fast.done, strict=True)}
    return {
        "k": k,
        "n_tokens": max(task.n_tokens for task in requests.tasks.values()),
        "prompt_tokens": [task.prompt.shape[1] for task in requests.tasks.values()],
        **counts(all_rows(fast.done), k),
        **phases(plain, fast),
        "requests": [
            {"request": name, "tokens": one.tokens, **{key: each[name][key] for key in PER_REQUEST}}
            for name, one in zip(requests.tasks, fast.done, strict=True)
        ],
    }


def run(args, target, draft, prompts: list[tuple[str, str]], file: ResultFile) -> list[dict]:
    """Measure what the file lacks: each request alone, what passes cost, then every size. Returns the sizes' rows."""
    tasks = {name: make_task(args, target, draft, text) for name, text in prompts}
    requests = Requests(tasks, draft.model, policy_of(args, args.k, NO_COSTS), max(args.batches))
    sizes = sizes_that_fit(args.batches, requests)
    expected, costs, rows = {}, [], []
    for name, task in progress(list(tasks.items()), "each request alone"):
        where = {"part": "alone", "request": name}
        expected[name] = find_or_measure(file, task, where, functools.partial(alone, task))["tokens"]
    first, context = next(iter(tasks.values())), round(statistics.mean(task.context for task in tasks.values()))
    for size in progress(sorted({1, *sizes}), "what passes cost"):
        work = functools.partial(batch_costs, first, draft.model, args.k, size, context)
        costs.append(find_or_measure(file, first, {"part": "costs", "batch": size}, work))
        if costs[-1]["error"]:
            say(f"a batch of {size} is left out: {costs.pop()['error']}")
    for size in progress([row["batch"] for row in costs if row["batch"] in sizes], "batches"):
        mine = Requests(tasks, draft.model, requests.policy, size)
        work = functools.partial(measure_batch, mine, target.plain or target.model, expected, costs, args)
        rows.append(find_or_measure(file, first, {"part": "batch", "batch": size}, work))
    return rows


# -------------------------------------------------------------------------------------------------------------- tables

SPEED = [
    ("batch", "batch", str), ("baseline_tokens_per_s", "alone, tokens/s", fixed(1)), ("speculative_tokens_per_s", "with draft", fixed(1)),
    ("speedup", "speedup", fixed(2, "x")), ("interval", "interval", str), ("predicted", "predicted", fixed(2, "x")),
    ("speculative_rows_a_pass", "rows a pass", fixed(1)),
]  # fmt: skip
WHY = [
    ("batch", "batch", str), ("alpha", "alpha", fixed(2)), ("block_efficiency", "tokens/pass", fixed(2)),
    ("check_cost", "T(B, k+1) / T(B, 1)", fixed(2)), ("c", "c(B)", fixed(2)), ("overhead_share", "loop's own time", percent),
]  # fmt: skip
WIDE = [
    ("aa", "A/A", fixed(2, "x")), ("generate_s", "generate / ours", str), ("target_pass_ms", "T(B, 1), ms", fixed(1)), ("draft_pass_ms", "draft pass, ms", fixed(1)),
    ("baseline_ttft_s", "ttft alone, ms", lambda s: f"{1000 * s:.0f}"), ("speculative_ttft_s", "with draft, ms", lambda s: f"{1000 * s:.0f}"),
]  # fmt: skip


def against_generate(row: dict) -> str | None:
    """The padded `generate`'s time over our batched baseline's, both with their prefill."""
    if row["error"] or "generate_end_to_end_s" not in row:
        return None
    return f"{paired_ratio(row['generate_end_to_end_s'], row['baseline_end_to_end_s'])['median']:.2f}x"


def tables(rows: list[dict], wide: bool = False) -> str:
    shown = [{**shown_interval(row), "generate_s": against_generate(row)} for row in rows]
    return f"the same requests at every size\n\n{markdown_table(shown, SPEED)}\n\nwhy\n\n{markdown_table(shown, WHY + (WIDE if wide else []))}"


def summarise(rows: list[dict]) -> dict:
    """The verdict on every batch, and how far the predictions were off."""
    good = [row for row in rows if not row["error"]]
    verdicts = {row["batch"]: judge_speed(row) for row in good}
    errors = [row["prediction_error"] for row in good]
    return {
        "batches": list(verdicts),
        "verdicts": verdicts,
        "prediction_error_median": statistics.median(errors) if errors else None,
        "prediction_error_max_abs": max(map(abs, errors), default=None),
        "exact": all(row["exact"] for row in good),
    }


def where_it_pays(verdicts: dict[int, str]) -> str:
    """The batches of each verdict, in words."""
    if "few" in verdicts.values():
        return "too few pairs for a verdict"
    words = {"faster": "it pays at", "noise": "no difference beyond the noise at", "slower": "do not speculate at"}
    sizes = {kind: [str(batch) for batch, found in verdicts.items() if found == kind] for kind in words}
    return "; ".join(f"{said} a batch of {', '.join(sizes[kind])}" for kind, said in words.items() if sizes[kind])


def verdict(rows: list[dict]) -> str:
    summary, good = summarise(rows), [row for row in rows if not row["error"]]
    if not good:
        return "nothing could be measured; see the errors in the result file"
    text = "every row is token for token what its request gets alone" if summary["exact"] else "NOT the same texts, near-ties excused: see near_ties in the file"  # fmt: skip
    off = f"predictions were off by {summary['prediction_error_max_abs']:.2f} at most"
    lines = [f"{text}; {where_it_pays(summary['verdicts'])}; {off}."]
    return "\n".join(lines + [f"batch of {row['batch']}: {speed_words(row)}." for row in good])


def parse_args(argv):
    parser = make_parser(__doc__, "spec_batch", resume=True)
    add_task_options(parser)
    add_policy_options(parser)
    add_prompt_options(parser, ("all", *WORKLOADS), "all")
    parser.set_defaults(n_tokens=32, keep_plain=True)  # `generate` is an arm of every run
    parser.add_argument("--batches", type=whole_list(1, 4096), default=list(BATCHES), help="sizes, e.g. 1,2,4,8")
    parser.add_argument("-k", "--k", type=at_least(1, 1024), default=5, help="guesses a round, for every row")
    return check_args(parser.parse_args(argv))


def check_args(args):
    """What a batch cannot do. Raises UserError."""
    if args.loop != "lean":
        raise UserError(f"--loop {args.loop}: a batch is decoded by the lean loop; leave it out")
    if args.pass_form == "graph":
        raise UserError("--pass graph: captures passes of one request, not of a batch; choose fused, plain or auto")
    if args.k_policy == "cost":
        raise UserError(
            "--k-policy cost: knows what single requests cost; choose fixed, heuristic or confidence for a batch"
        )
    return args


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    prompts = row_prompts(args)
    with open_run(args, "spec_batch", prompts) as (file, target, (draft,)):
        if any(", from word " in name for name, _ in prompts):
            say("rows past the workloads: the same texts begun at a later word")
        for one in (target, draft):
            check_rows(one)
        rows = run(args, target, draft, prompts, file)
        file.finish(summarise(rows))
    tell(
        f"k = {args.k}, {len(prompts)} requests, {args.n_tokens} tokens of each\n\n{tables(rows, args.wide)}\n\n{verdict(rows)}\nresults in {args.results}"
    )
    return int(any(row["error"] for row in file.rows))  # a size whose costs could not be measured is no row of its own


if __name__ == "__main__":
    raise SystemExit(main())
