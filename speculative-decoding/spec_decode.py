"""One prompt, decoded plainly and speculatively: what it does, what it cost, and whether the text is the same.

Claim: speculative greedy decoding writes, token for token, what the target alone would have written, in fewer passes of
the target. Every run asserts it, and a mismatch fails the run (exit 1). The loop itself is in spec_loop.py.

    python spec_decode.py                    # the embedded pair, k=5, 64 tokens of open prose
    python spec_decode.py --show             # and the text, round by round
    python spec_decode.py --self-draft       # sanity: a model that drafts for itself is accepted 100 %
    python spec_decode.py --vs-transformers  # and `generate`, plain and assisted, as arms of the same run
"""

from __future__ import annotations

import statistics
import sys

from spec_common import (
    FEWEST_PAIRS,
    ClaimFailed,
    at_least,
    command,
    dtype_name,
    make_parser,
    ratio_summary,
    say,
    set_up,
)
from spec_harness.cells import cell
from spec_harness.costs import costs_row
from spec_harness.essay import essay_decode, is_essay_pair
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
from spec_harness.reference import overridden, reference_arms
from spec_harness.results import ResultFile, environment, settings
from spec_harness.tables import fixed, markdown_table, percent
from spec_models.pairs import PAIRS, form, load_pair
from spec_models.pieces import next_piece, pieces

ACCEPTED, CORRECTED, DISCARDED, PLAIN = "\033[32m", "\033[33m", "\033[2;9m", "\033[0m"


# ---------------------------------------------------------------------------------------------------------- the tables


def what_it_does(row: dict, published: dict | None) -> str:
    """The essay's table, baseline beside speculation, its own column where the pair is the essay's."""
    rows = []

    def line(label: str, form, plain, fast) -> None:
        rows.append(
            {
                "label": label,
                "plain": None if plain is None else form(plain),
                "fast": None if fast is None else form(fast),
            }
        )

    whole = fixed(0)
    line("tokens per second", fixed(2), row["baseline_tokens_per_s"], row["speculative_tokens_per_s"])
    line("speedup", fixed(2, "x"), 1.0, row["speedup"])
    line("target passes", whole, row["emitted"], row["target_passes"])
    line("draft passes", whole, 0, row["draft_passes"])
    for name in ("proposed", "accepted", "discarded"):
        line(name, whole, None, row[name])
    line("acceptance (accepted / proposed)", percent, None, row["acceptance_rate"])
    line("alpha (accepted / judged)", percent, None, row["alpha"])
    line("tokens per target pass", fixed(2), 1.0, row["block_efficiency"])
    line("ms per target pass, one token", fixed(1), row["target_pass_ms"], None)
    line("ms per target pass, checking", fixed(1), None, row["verify_pass_ms"])
    line("ms per draft pass", fixed(1), None, row["draft_pass_ms"])
    line("c (draft pass / target pass)", fixed(2), None, row["cost_coefficient"])
    phases = ("draft_s", "verify_s", "overhead_s")
    total = sum(row[name] for name in phases)
    line("time: draft / verify / overhead", str, None, " / ".join(percent(row[name] / total) for name in phases))
    line("time to first token, ms", fixed(0), 1000 * row["baseline_ttft_s"], 1000 * row["speculative_ttft_s"])
    if published:
        for entry in rows:
            entry["essay"] = published.get(entry["label"])
    columns = [("label", "", str), ("plain", "baseline", str), ("fast", f"speculative (k={row['k']})", str)]
    return markdown_table(rows, columns + ([("essay", "the essay's", str)] if published else []))


def against_transformers(row: dict) -> str | None:
    """Ours against `generate`, whole calls (prefill included): a ratio above 1 means that ours is faster."""
    rows = []
    for arm, ours in (("generate", "baseline"), ("assisted", "speculative")):
        if f"{arm}_end_to_end_s" in row:
            ratio = ratio_summary(row[f"{arm}_end_to_end_s"], row[f"{ours}_end_to_end_s"])
            theirs, mine = (statistics.median(row[f"{name}_end_to_end_s"]) for name in (arm, ours))
            rows.append(
                {
                    "arm": f"{arm}, our {ours}",
                    "theirs": theirs,
                    "mine": mine,
                    "ratio": ratio["median"],
                    "interval": ratio,
                }
            )
    columns = [
        ("arm", "arm", str),
        ("theirs", "theirs, s", fixed(3)),
        ("mine", "ours, s", fixed(3)),
        ("ratio", "theirs / ours", fixed(2, "x")),
        ("interval", "interval", lambda i: f"{i['low']:.2f} to {i['high']:.2f}"),
    ]
    return markdown_table(rows, columns) if rows else None


def verdict(row: dict) -> str:
    """Whether it pays, said only as far as the interval and the A/A arm carry."""
    aa = f"the same code against itself measured {row['aa']:.2f}x ({row['aa_low']:.2f} to {row['aa_high']:.2f})"
    pairs = len(row["baseline_s"])
    interval = f"{row['speedup']:.2f}x ({row['speedup_low']:.2f} to {row['speedup_high']:.2f}, {pairs} pairs)"
    if row["draft_passes"] == 0:
        words = f"the draft was not asked for a guess, so both arms did the same work: {interval}"
    elif pairs < FEWEST_PAIRS:
        words = (
            f"{row['speedup']:.2f}x from too few pairs for a verdict ({pairs}); take --repeats {FEWEST_PAIRS} or more"
        )
    elif row["speedup_low"] > 1 and row["speedup"] > row["aa_high"]:
        words = f"speculation writes this text {interval} as fast"
    elif row["speedup_high"] < 1:
        words = f"do not speculate here: {interval}, slower than the target alone"
    else:
        words = f"no difference beyond the noise: {interval}"
    text = (
        "token for token the target's own text"
        if row["exact"]
        else f"NOT the same text, a near-tie excused: {row['near_ties'][0]}"
    )
    return f"{text}; {words}; {aa}."


def shown_rounds(tokenizer, row: dict, colour: bool) -> str:
    """The text round by round: guesses kept, the target's own token, and what was thrown away."""
    marks = (ACCEPTED, CORRECTED, DISCARDED, PLAIN) if colour else ("", "", "", "")
    lines, start, tokens = [], 0, row["tokens"]
    counts = [(min(kept, n), n) for kept, n in zip(row["accepted_lengths"], row["emitted_lengths"], strict=True)]
    texts = iter(pieces(tokenizer, tokens, [part for kept, n in counts for part in (kept, n - kept)]))
    for number, (guesses, (kept, count)) in enumerate(zip(row["proposals"], counts, strict=True), 1):
        discarded = next_piece(tokenizer, tokens[: start + kept], guesses[kept:])
        start += count
        parts = [
            ("accepted", marks[0], kept, next(texts)),
            ("target", marks[1], count - kept, next(texts)),
            ("discarded", marks[2], len(guesses) - kept, discarded),
        ]
        shown = [f"{name} {mark}{text!r}{marks[3] if mark else ''}" for name, mark, n, text in parts if n > 0]
        lines.append(f"{number:>3}  " + "   ".join(shown))
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- the run


def run(args, target, draft, prompts: list[tuple[str, str]], file: ResultFile, device) -> list[dict]:
    """Measure every prompt not yet in the file. Returns their rows."""
    rows = []
    for name, text in prompts:
        task = make_task(args, target, draft, text, args.k, device)
        say(f"{name}: {args.n_tokens} tokens, k={args.k}, {args.repeats} turns of every arm ...")
        context = task.prompt.shape[1] + task.n_tokens // 2
        costs = (
            costs_row(file, task.target, task.draft, context, [task.k], task.limit) if args.k_policy == "cost" else None
        )
        arms = reference_arms(task) if args.vs_transformers else {}
        rows.append(cell(file, with_policy(args, task, costs), args, {"workload": name}, costs, arms))
    return rows


def print_row(row: dict, args, tokenizer) -> None:
    """One prompt's tables, its text if asked for, and the verdict."""
    if row["error"]:
        print(f"\n{row['workload']}: not measured, {row['error']}")
        return
    print(
        f"\n{row['workload']}, {row['emitted']} tokens\n\n{what_it_does(row, essay_decode(row) if is_essay_pair(args) else None)}\n"
    )
    if table := against_transformers(row):
        print(f"{table}\n")
    if args.show:
        print(shown_rounds(tokenizer, row, colour=sys.stdout.isatty()) + "\n")
    print(verdict(row))


def check_self_draft(rows: list[dict]) -> None:
    """Two identical models agree on every guess; in half precision, on all but ties. Raises ClaimFailed."""
    for row in rows:
        if row["error"] or row["alpha"] in (1.0, None):
            continue
        if not row["near_ties"]:
            raise ClaimFailed(
                f"{row['workload']}: a model drafting for itself had {row['rejections']} guesses rejected: its cache is wrong"
            )
        say(
            f"{row['workload']}: {row['rejections']} of the model's own guesses were rejected, at near-ties of its half precision"
        )


def median_of(rows: list[dict], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.median(values) if values else None


def parse_args(argv):
    parser = make_parser(__doc__, "spec_decode", resume=True)
    add_task_options(parser)
    add_prompt_options(parser)
    add_policy_options(parser)
    parser.add_argument("-k", "--k", type=at_least(0, 1024), default=5, help="guesses a round; 0 is plain decoding")
    parser.add_argument(
        "--self-draft", action="store_true", help="the target drafts for itself: acceptance must be 100 %%"
    )
    parser.add_argument("--show", action="store_true", help="print the text round by round")
    parser.add_argument(
        "--vs-transformers", action="store_true", help="add `generate`, greedy and assisted at the same k"
    )
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    device, dtype = set_up(args)
    check_policy(args)
    prompts = chosen_prompts(args)
    if args.self_draft:
        args.target = PAIRS[args.pair][0] if args.target is None else args.target
        args.draft, args.draft_revision = args.target, args.revision
    fill_pair(args)
    target, (draft,) = load_pair(args, device, dtype, [args.draft])
    hashes = check_prompts(args, target, [draft], prompts, args.k, device)
    config = settings(
        args,
        target=target.about,
        draft=draft.about,
        prompt_ids_sha256=hashes,
        generation_config_overridden=overridden(target.model),
    )
    print(
        f"{target.name} + {form(draft)}, {device}, {dtype_name(dtype)}, linear layers: {target.about['cpu_linear']}, loop: {args.loop}"
    )
    with ResultFile(args.results, "spec_decode", config, environment(device, dtype, target.model), args.resume) as file:
        rows = run(args, target, draft, prompts, file, device)
        for row in rows:
            print_row(row, args, target.tokenizer)
        if args.self_draft:
            check_self_draft(rows)
        file.finish({"speedup": median_of(rows, "speedup")})
    print(f"results in {args.results}")
    return int(all(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
