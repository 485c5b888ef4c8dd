"""Many requests at once: what is left of the gain when the passes are full already.

Claim: speculation for a batch, every row keeping its own number of guesses, writes for each request, token for token, what
the target alone would have written for it; and its speedup is what measured passes over B and B(k+1) tokens predict. The
baseline decodes the same batch. Every timed row is checked against its request decoded alone; a mismatch fails the run.

    python spec_batch.py                                     # the embedded pair, batches of 1, 2, 4, 8, 16
    python spec_batch.py --batches 1,32 -k 3 --prompt-file prompts.jsonl --stop-at-eos
"""

from __future__ import annotations

import functools
import re
import statistics
from itertools import count, islice
from pathlib import Path

from spec_common import (
    FEWEST_PAIRS,
    UserError,
    at_least,
    command,
    dtype_name,
    is_out_of_memory,
    make_parser,
    say,
    set_up,
    whole_list,
)
from spec_harness.batch_costs import batch_costs, bytes_needed, free_bytes
from spec_harness.batches import Requests, compare
from spec_harness.cells import Task, recorded, run_baseline
from spec_harness.options import add_task_options, check_prompts, chosen_prompts, fill_pair, make_task
from spec_harness.results import ResultFile, environment, settings
from spec_harness.tables import fixed, markdown_table, percent, progress
from spec_methods.rows import check_rows
from spec_models.pairs import form, load_pair
from workloads import WORKLOADS

BATCHES = (1, 2, 4, 8, 16)
FEWEST_WORDS = 4  # of a prompt made by beginning a workload's text later
OF_FREE_MEMORY = 0.9


# ------------------------------------------------------------------------------------------------------------- prompts


def workload_rows():
    """(name, text): the five workloads, then the same texts begun at their second word, at their third, ... All differ."""
    words = {name: re.split(r"(?<=\s)(?=\S)", text) for name, text in WORKLOADS.items()}
    for later in count():
        left = [name for name in words if not later or len(words[name]) - later >= FEWEST_WORDS]
        if not left:
            return
        for name in left:
            yield f"{name}, from word {later + 1}" if later else name, "".join(words[name][later:])


def row_prompts(args) -> list[tuple[str, str]]:
    """(name, text) of as many prompts as the largest batch has rows. Raises UserError where there are not so many."""
    most = max(args.batches)
    prompts = list(islice(workload_rows(), most)) if args.prompt_file is None else chosen_prompts(args)[:most]
    if len(prompts) < most:
        where = "the workloads give" if args.prompt_file is None else f"--prompt-file {args.prompt_file.name} has"
        raise UserError(
            f"--batches {most}: a batch larger than the prompts ({where} {len(prompts)}); lower it or give more, one a line of a .jsonl"
        )
    return prompts


# ------------------------------------------------------------------------------------------------------------- the run


def that_fit(sizes: list[int], tasks: list[Task], device) -> list[int]:
    """The batches that memory holds; a remark on the others. Raises UserError where it holds none."""
    fit = []
    for size in sizes:
        needed, free = bytes_needed(tasks[:size]), free_bytes(device)
        if needed <= OF_FREE_MEMORY * free:
            fit.append(size)
        else:
            say(
                f"a batch of {size} is left out: about {needed / 1e9:.1f} GB beside the weights, {free / 1e9:.1f} GB are free"
            )
    if not fit:
        raise UserError(f"--batches: not even a batch of {min(sizes)} fits into memory; lower it or --n-tokens")
    return fit


def alone(task: Task) -> dict:
    """What a request gets by itself, from the single-request loop: what its row must get in every batch."""
    try:
        return {"tokens": run_baseline(task)[0][0].tokens}
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise UserError(
                "--n-tokens: out of memory with one request alone; lower it or choose a smaller model"
            ) from error
        raise


def run(args, target, draft, prompts: list[tuple[str, str]], file: ResultFile, device) -> list[dict]:
    """Measure what the file lacks: each request alone, what passes cost, then every batch. Returns the batches' rows."""
    tasks = [make_task(args, target, draft, text, args.k, device) for _, text in prompts]
    sizes = that_fit(args.batches, tasks, device)
    every = Requests(tasks[: max(sizes)], [name for name, _ in prompts][: max(sizes)])
    expected, costs, rows = [], [], []
    for name, task in progress(list(zip(every.names, every.tasks, strict=True)), "each request alone"):
        expected.append(
            recorded(file, task, {"part": "alone", "request": name}, functools.partial(alone, task))["tokens"]
        )
    context = round(statistics.mean(task.prompt.shape[1] for task in every.tasks)) + args.n_tokens // 2
    for size in progress(sorted({1, *sizes}), "what passes cost"):
        measure = functools.partial(batch_costs, every.first, size, context)
        costs.append(recorded(file, every.first, {"part": "costs", "batch": size}, measure))
        if costs[-1]["error"]:
            say(f"a batch of {size} is left out: {costs.pop()['error']}")
    for size in progress([row["batch"] for row in costs if row["batch"] in sizes], "batches"):
        measure = functools.partial(compare, every.begin(size), expected[:size], costs, args)
        rows.append(recorded(file, every.first, {"part": "batch", "batch": size}, measure))
    return rows


# -------------------------------------------------------------------------------------------------------------- tables

SPEED = [
    ("batch", "batch", str), ("baseline_tokens_per_s_per_user", "per user: alone", fixed(2)), ("speculative_tokens_per_s_per_user", "per user: with draft", fixed(2)),
    ("baseline_tokens_per_s", "in total: alone", fixed(1)), ("speculative_tokens_per_s", "in total: with draft", fixed(1)), ("speedup", "speedup", fixed(2, "x")),
    ("interval", "interval", str), ("predicted", "predicted", fixed(2, "x")), ("aa", "A/A", fixed(2, "x")),
    ("baseline_ttft_s", "ttft, ms: alone", lambda s: f"{1000 * s:.0f}"), ("speculative_ttft_s", "ttft, ms: with draft", lambda s: f"{1000 * s:.0f}"),
]  # fmt: skip
WHY = [
    ("batch", "batch", str), ("acceptance_rate", "acceptance", percent), ("alpha", "alpha", fixed(2)), ("block_efficiency", "tokens/pass", fixed(2)),
    ("check_cost", "T(B, k+1) / T(B, 1)", fixed(2)), ("c", "c(B)", fixed(2)), ("target_pass_ms", "ms: T(B, 1)", fixed(1)), ("draft_pass_ms", "draft pass", fixed(1)),
    ("overhead_share", "loop's own time", percent),
]  # fmt: skip


def tables(rows: list[dict]) -> str:
    shown = [
        {**row, "interval": row["error"] or f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}"} for row in rows
    ]
    return f"tokens per second\n\n{markdown_table(shown, SPEED)}\n\nwhy\n\n{markdown_table(shown, WHY)}"


def summarise(rows: list[dict]) -> dict:
    """Where it pays, beyond the noise; nulls where the pairs are too few to say."""
    good = [row for row in rows if not row["error"]]
    pays = [row["batch"] for row in good if row["speedup_low"] > 1 and row["speedup"] > row["aa_high"]]
    enough = bool(good) and len(good[0]["baseline_s"]) >= FEWEST_PAIRS
    return {
        "batches": [row["batch"] for row in good],
        "pays_at": pays if enough else None,
        "stops_paying_at": next((row["batch"] for row in good if row["batch"] not in pays), None) if enough else None,
        "prediction_error_max_abs": max((abs(row["prediction_error"]) for row in good), default=None),
        "exact": all(row["exact"] for row in good),
    }


def paying(pays: list[int] | None, stops: int | None, repeats: int) -> str:
    """The batch at which it stops paying, in words."""
    if pays is None:
        return f"too few pairs for a verdict ({repeats}); take --repeats {FEWEST_PAIRS} or more"
    if stops is None:
        return "it pays at every batch measured"
    if not pays:
        return "do not speculate at any batch measured"
    if max(pays) > stops:
        return f"it pays at {', '.join(map(str, pays))} alone; do not speculate at the other batches"
    return f"it stops paying at a batch of {stops}: do not speculate there or above"


def verdict(rows: list[dict], repeats: int) -> str:
    summary, by_batch = summarise(rows), {row["batch"]: row for row in rows if not row["error"]}
    if not by_batch:
        return "nothing could be measured; see the errors in the result file"
    first, last = (by_batch[pick(by_batch)] for pick in (min, max))
    words = paying(summary["pays_at"], summary["stops_paying_at"], repeats)
    change = f"{first['speedup']:.2f}x at a batch of {first['batch']}" + (
        f", {last['speedup']:.2f}x at {last['batch']}" if last is not first else ""
    )
    text = (
        "every row is token for token what its request gets alone"
        if summary["exact"]
        else "NOT the same texts, near-ties excused: see near_ties in the file"
    )
    return f"{text}; {words} ({change}); predictions were off by {summary['prediction_error_max_abs']:.2f} at most."


def parse_args(argv):
    parser = make_parser(__doc__, "spec_batch", resume=True)
    add_task_options(parser)
    parser.set_defaults(n_tokens=32, prompt=None, limit=None)
    parser.add_argument(
        "--batches", type=whole_list(1, 4096), default=list(BATCHES), help="the batch sizes, e.g. 1,2,4,8"
    )
    parser.add_argument(
        "--prompt-file",
        type=Path,
        help="a .jsonl, one prompt a line, for the rows in order; left out: the five workloads, then the same begun at a later word",
    )
    parser.add_argument("-k", "--k", type=at_least(1, 1024), default=5, help="guesses a round, for every row")
    args = parser.parse_args(argv)
    if args.loop != "lean":
        raise UserError(f"--loop {args.loop}: a batch is decoded by the lean loop; leave it out")
    return args


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    device, dtype = set_up(args)
    fill_pair(args)
    prompts = row_prompts(args)
    target, (draft,) = load_pair(args, device, dtype, [args.draft])
    hashes = check_prompts(args, target, [draft], prompts, args.k, device)
    longest = (
        max(make_task(args, target, draft, text, args.k, device).prompt.shape[1] for _, text in prompts) + args.n_tokens
    )
    for model in (target, draft):
        check_rows(model, longest)
    if args.prompt_file is None and len(prompts) > len(WORKLOADS):
        say(f"rows past the {len(WORKLOADS)} workloads: the same texts begun at a later word")
    config = settings(args, target=target.about, draft=draft.about, prompt_ids_sha256=hashes)
    print(f"{target.name} + {form(draft)}, {device}, {dtype_name(dtype)}, linear layers: {target.about['cpu_linear']}, k = {args.k}, {args.n_tokens} tokens a row\n")  # fmt: skip
    with ResultFile(args.results, "spec_batch", config, environment(device, dtype, target.model), args.resume) as file:
        rows = run(args, target, draft, prompts, file, device)
        file.finish(summarise(rows))
    print(f"{tables(rows)}\n\n{verdict(rows, args.repeats)}\nresults in {args.results}")
    return int(all(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
