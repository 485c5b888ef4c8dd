"""Speculation while sampling: the probabilistic accept rule, at several temperatures, and what it gives.

Claim: at every temperature a sampled guess is accepted as often as the laws of the two models overlap, the mean of
sum(min(target, draft)); at temperature 0 the text is greedy's own. The text of a seed is not what plain sampling writes
from that seed, for other numbers are drawn: what is the same is the law, which --check-law tests.

    python spec_sampling.py                                              # the embedded pair, temperatures 0 to 1
    python spec_sampling.py --temperatures 0.8 --top-p 0.95 --seeds 8
    python spec_sampling.py --temperatures 1 --seeds 3 --check-law 5000  # and the law of the first two tokens
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import replace

from spec_common import (
    FEWEST_PAIRS,
    ClaimFailed,
    UserError,
    at_least,
    command,
    dtype_name,
    interleave,
    make_parser,
    ratio_summary,
    set_up,
)
from spec_harness.cells import Task, check_exact, counts, ratio, recorded, run_baseline, run_speculative, speed
from spec_harness.law import Recorder, acceptance_check, law_line, law_row
from spec_harness.options import (
    add_prompt_options,
    add_task_options,
    check_prompts,
    chosen_prompts,
    fill_pair,
    make_task,
)
from spec_harness.results import ResultFile, environment, settings
from spec_harness.tables import fixed, markdown_table, percent, progress
from spec_methods.sampled import Chance, Sampled
from spec_models.pairs import form, load_pair

FALSE_ALARMS = 0.001  # how often a right build may fail, all checks of a run together: they share it
SEEDS = 5  # of each temperature, every one a text of its own: what is measured is no single text's luck


# ------------------------------------------------------------------------------------------------------------ one seed


def check_repeated(arm: str, seed: int, first: list[int], got: list[int]) -> None:
    """Raises ClaimFailed where a run of the same seed wrote another text."""
    if got != first:
        pairs = zip(first, got, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(got)))
        raise ClaimFailed(
            f"seed {seed}: {arm} wrote another text than the first run of that seed, from token {place} on"
        )


def measure(task: Task, law: tuple, seed: int, args) -> dict:
    """The row of one prompt, temperature and seed. `law`: temperature, top-k, top-p. Raises Mismatch or ClaimFailed."""
    drawn, recorder = replace(task, rule=lambda: Sampled(*law, Chance(seed))), Recorder(*law, Chance(seed))
    # These two warm up the timed runs; the one that notes the overlaps is counted and never timed.
    first = {"baseline": run_baseline(drawn)[0][0].tokens, "speculative": run_speculative(drawn)[0][0].tokens}
    counting = run_speculative(replace(task, rule=lambda: recorder))[0][0]
    check_repeated("the counted run", seed, first["speculative"], counting.tokens)
    near_ties = []
    if law[0] == 0:
        greedy = run_baseline(task)[0][0].tokens
        near_ties = [check_exact(task, arm, greedy, tokens, args.allow_near_ties) for arm, tokens in first.items()]
        near_ties = [tie for tie in near_ties if tie]
    arms = {
        "baseline": lambda: run_baseline(drawn),
        "speculative": lambda: run_speculative(drawn),
        "baseline_again": lambda: run_baseline(drawn),
    }
    samples = interleave(arms, args.repeats, args.warmup)
    for arm, runs in samples.items():
        for (done, _), _ in runs:
            check_repeated(arm, seed, first[arm.removesuffix("_again")], done.tokens)
    return {
        "k": task.k, "loop": task.loop, "n_tokens": task.n_tokens, "prompt_tokens": task.prompt.shape[1], **counts(task, counting),
        "judged_accepted": recorder.accepted, "overlaps": recorder.overlaps, **speed(samples, task.n_tokens), "exact": not near_ties,
        "near_ties": near_ties, "error": None, "tokens": counting.tokens, "proposals": counting.proposals, "baseline_tokens": first["baseline"],
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the run


def run(args, target, draft, prompts: list[tuple[str, str]], file: ResultFile, device) -> tuple[list[dict], list[dict]]:
    """Measure what the file lacks. Returns (one pooled row a temperature, rows of the law's test). Raises ClaimFailed."""
    tasks = [(name, make_task(args, target, draft, text, args.k, device)) for name, text in prompts]
    texts = list(enumerate(tasks * args.seeds, args.seed))  # a seed of its own for every text of a temperature
    measured: dict[float, list[dict]] = {t: [] for t in args.temperatures}
    for t, (seed, (name, task)) in progress(
        [(t, text) for t in args.temperatures for text in texts], "temperatures and seeds"
    ):
        where, law = {"part": "sampling", "workload": name, "temperature": t, "seed": seed}, (t, args.top_k, args.top_p)
        measured[t].append(
            recorded(file, task, where, lambda task=task, law=law, seed=seed: measure(task, law, seed, args))
        )
    warm = [t for t in args.temperatures if t > 0] if args.check_law else []
    laws = []
    for t in warm:
        where, law = {"part": "law", "workload": tasks[0][0], "temperature": t}, (t, args.top_k, args.top_p)
        laws.append(
            recorded(file, tasks[0][1], where, lambda law=law: law_row(tasks[0][1], law, args.seed, args.check_law))
        )
    level = FALSE_ALARMS / (len(measured) + len(warm))
    laws = [{**row, "fits": None if row["error"] or row["p_value"] is None else row["p_value"] > level} for row in laws]
    return [pooled(t, rows, level) for t, rows in measured.items()], laws


def pooled(temperature: float, rows: list[dict], level: float) -> dict:
    """One temperature over all its prompts and seeds: counts added up, speedups from the paired times of all of them."""
    good = [row for row in rows if not row["error"]]
    if not good:
        return {"temperature": temperature, "speedup": None, "within": None, "error": rows[0]["error"]}
    seconds = {
        arm: [value for row in good for value in row[f"{arm}_s"]]
        for arm in ("baseline", "speculative", "baseline_again")
    }
    row = {"temperature": temperature, "pairs": len(seconds["baseline"]), "error": None}
    for name, arm in (("speedup", "speculative"), ("aa", "baseline_again")):
        summary = ratio_summary(seconds["baseline"], seconds[arm])
        row |= {name: summary["median"], f"{name}_low": summary["low"], f"{name}_high": summary["high"]}
    for arm in ("baseline", "speculative"):
        row[f"{arm}_tokens_per_s"] = good[0]["n_tokens"] / statistics.median(seconds[arm])
    total = {
        name: sum(one[name] for one in good)
        for name in ("accepted", "proposed", "emitted", "target_passes", "draft_passes")
    }
    row |= {**total, "acceptance_rate": ratio(total["accepted"], total["proposed"])}
    row["block_efficiency"] = ratio(total["emitted"], total["target_passes"])
    return row | {"texts": len({tuple(one["tokens"]) for one in good}), **acceptance_check(good, level)}


# -------------------------------------------------------------------------------------------------------------- tables

COLUMNS = [
    ("temperature", "temperature", lambda t: f"{t:g}"), ("baseline_tokens_per_s", "alone, tokens/s", fixed(1)), ("speculative_tokens_per_s", "with draft", fixed(1)),
    ("speedup", "speedup", fixed(2, "x")), ("interval", "interval", str), ("aa", "A/A", fixed(2, "x")), ("acceptance_rate", "acceptance", percent),
    ("block_efficiency", "tokens/pass", fixed(2)), ("alpha", "alpha", fixed(3)), ("expected_alpha", "overlap of the laws", fixed(3)),
    ("expects", "alpha may be", str), ("fits", "it is", str), ("judged", "judged", str), ("texts", "different texts", str),
]  # fmt: skip


def table(rows: list[dict]) -> str:
    shown = []
    for row in rows:
        interval = row["error"] or f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
        expects = None if row["expected_low"] is None else f"{row['expected_low']:.3f} to {row['expected_high']:.3f}"
        shown.append(
            {**row, "interval": interval, "expects": expects, "fits": {True: "yes", False: "NO"}.get(row["within"])}
        )
    return markdown_table(shown, COLUMNS)


def pays(row: dict) -> str:
    """Whether it pays at one temperature, said only as far as the interval and the A/A arm carry."""
    interval = f"{row['speedup']:.2f}x ({row['speedup_low']:.2f} to {row['speedup_high']:.2f}, {row['pairs']} pairs)"
    if row["pairs"] < FEWEST_PAIRS:
        return f"{row['speedup']:.2f}x from too few pairs for a verdict ({row['pairs']}); take --seeds {FEWEST_PAIRS} or more"
    if row["speedup_low"] > 1 and row["speedup"] > row["aa_high"]:
        return f"speculation writes {interval} as fast"
    return (
        f"do not speculate: {interval}, slower than the target alone"
        if row["speedup_high"] < 1
        else f"no difference beyond the noise: {interval}"
    )


def check_claim(rows: list[dict], laws: list[dict]) -> str:
    """The verdict on the claim. Raises ClaimFailed."""
    for row in rows:
        if row["within"] is False:
            raise ClaimFailed(
                f"temperature {row['temperature']:g}: {row['judged_accepted']} of {row['judged']} judged guesses were accepted, alpha {row['alpha']:.3f}, where "
                f"the overlap of the laws allows {row['expected_low']:.3f} to {row['expected_high']:.3f}: the accept rule is not the lossless one"
            )
    for row in laws:
        if row["fits"] is False:
            raise ClaimFailed(f"{law_line(row)}: the text has not the target's law")
    silent = ", ".join(f"{row['temperature']:g}" for row in rows if row["within"] is None)
    if not any(row["within"] for row in rows):
        return "too few guesses were judged to say anything of the accept rule; take more --seeds or --n-tokens."
    but = f" (too few were judged to say so at temperature {silent})" if silent else ""
    return f"Guesses are accepted as often as the laws overlap{but}; the same seed wrote the same text every time."


# ------------------------------------------------------------------------------------------------------------- options


def temperature_list(text: str) -> list[float]:
    """A type for argparse: numbers from 0 with commas or blanks between, sorted, each once."""
    numbers = []
    for part in text.replace(",", " ").split():
        try:
            numbers.append(abs(float(part)) if float(part) >= 0 else math.nan)  # abs: -0 is 0
        except ValueError:
            numbers.append(math.nan)
    if not numbers or not all(map(math.isfinite, numbers)):
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a list of numbers of 0 or more, such as 0,0.7,1")
    return sorted(set(numbers))


def share(text: str) -> float:
    """A type for argparse: a number above 0, up to 1."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a number above 0, up to 1")
    return number


def parse_args(argv):
    parser = make_parser(__doc__, "spec_sampling", resume=True)
    add_task_options(parser)
    add_prompt_options(parser)
    parser.add_argument("-k", "--k", type=at_least(1, 1024), default=5, help="guesses a round")
    parser.add_argument(
        "--temperatures", type=temperature_list, default=[0.0, 0.3, 0.7, 1.0], metavar="T,T", help="0 is greedy"
    )
    parser.add_argument(
        "--top-k", type=at_least(0), default=0, help="draw from the k most likely ids, of both models; 0: from all"
    )
    parser.add_argument(
        "--top-p", type=share, default=1.0, help="draw from the most likely ids that together have this probability"
    )
    parser.add_argument("--seed", type=at_least(0, 2**32), default=0, help="the first seed")
    parser.add_argument("--seeds", type=at_least(1, 10**4), default=SEEDS, help="texts of each temperature, one a seed")
    parser.add_argument(
        "--check-law",
        type=at_least(0),
        default=0,
        metavar="N",
        help="draw the first two tokens of the first prompt N times and test their law; 0: do not",
    )
    parser.set_defaults(
        repeats=1, warmup=0
    )  # the seeds are the repeats, and each one's first runs, uncounted, its warm-up
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    if args.stop_at_eos:
        raise UserError(
            "--stop-at-eos: drawn texts end where chance has it, and times of unequal texts cannot be paired; leave it out"
        )
    device, dtype = set_up(args)
    prompts = chosen_prompts(args)
    fill_pair(args)
    target, (draft,) = load_pair(args, device, dtype, [args.draft])
    hashes = check_prompts(args, target, [draft], prompts, args.k, device)
    config = settings(args, target=target.about, draft=draft.about, prompt_ids_sha256=hashes)
    print(
        f"{target.name} + {form(draft)}, {device}, {dtype_name(dtype)}, linear layers: {target.about['cpu_linear']}, loop: {args.loop}, "
        f"k = {args.k}, top-k {args.top_k or 'off'}, top-p {args.top_p:g}, {args.n_tokens} tokens\n"
    )
    with ResultFile(
        args.results, "spec_sampling", config, environment(device, dtype, target.model), args.resume
    ) as file:
        rows, laws = run(args, target, draft, prompts, file, device)
        file.finish({"temperatures": rows, "laws": laws})
    print(table(rows) + "\n")
    for row in rows:
        print(f"temperature {row['temperature']:g}: {row['error'] or pays(row)}.")
    print(
        "\n".join(f"{law_line(row)}." for row in laws)
        + ("\n" if laws else "")
        + f"{check_claim(rows, laws)}\nresults in {args.results}"
    )
    return int(all(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
