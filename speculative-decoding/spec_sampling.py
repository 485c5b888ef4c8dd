"""Speculation while sampling: the probabilistic accept rule, at several temperatures, and what it gives.

Claim: at every temperature a sampled guess is accepted as often as the laws of the two models overlap, the mean of
sum(min(target, draft)); at temperature 0 the text is greedy's own. The text of a seed is not what plain sampling writes
from that seed, for other numbers are drawn: what is the same is the law, which --check-law tests.

    python spec_sampling.py                                              # the embedded pair, temperatures 0 to 1
    python spec_sampling.py --temperatures 0.8 --top-p 0.95 --seeds 8
    python spec_sampling.py --temperatures 1 --seeds 3 --check-law 5000  # and the law of the first two tokens
    python spec_sampling.py --verify block                               # beside it chains judged whole
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics

from spec_common import FEWEST_PAIRS, ClaimFailed, UserError, interleave, interval_text, judge_speed, paired_ratio, tell

from spec_cli import at_least, command, make_parser
from spec_decode import check_exact, counts
from spec_harness.arms import Method, Task, draft_model, run_baseline, run_speculative
from spec_harness.cells import find_or_measure, ratio, speedups, timing
from spec_harness.law import Recorder, acceptance_check, law_line, law_row
from spec_harness.options import add_prompt_options, add_task_options, chosen_prompts, make_task, open_run
from spec_harness.results import ResultFile
from spec_harness.tables import fixed, markdown_table, percent, progress, shown_interval, speed_words
from spec_methods.block import BlockSampled
from spec_methods.sampled import Chance, Sampled

FALSE_ALARMS = 0.001  # how often a right build may fail, all checks of a run together: they share it
RULES = {"token": Sampled, "block": BlockSampled}
SEEDS = FEWEST_PAIRS  # of each temperature, every one a text of its own: what is measured is no single text's luck


# ------------------------------------------------------------------------------------------------------------ one seed


def check_repeated(arm: str, seed: int, first: list[int], got: list[int]) -> None:
    """Raises ClaimFailed where a run of the same seed wrote another text."""
    if got != first:
        pairs = zip(first, got, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(got)))
        raise ClaimFailed(
            f"seed {seed}: {arm} wrote another text than the first run of that seed, from token {place} on"
        )


def measure_seed(task: Task, draft, law: tuple, seed: int, args) -> dict:
    """The row of one prompt, temperature and seed. `law`: temperature, top-k, top-p. Raises Mismatch or ClaimFailed."""
    rule, recorder = Sampled(*law, Chance(seed)), Recorder(*law, Chance(seed))
    drawn, noted = draft_model(task, draft, args.k, rule), draft_model(task, draft, args.k, recorder)
    arms, more = seed_arms(task, drawn, rule), {}
    # The first runs warm up the timed ones; the one that notes the overlaps is counted and never timed.
    first = {"baseline": run_baseline(task, rule).done.tokens, "speculative": run_speculative(task, drawn).done.tokens}
    if args.verify == "block":
        whole = draft_model(task, draft, args.k, BlockSampled(*law, Chance(seed)))
        arms["block"], done = lambda: run_speculative(task, whole), run_speculative(task, whole).done
        first["block"], more = done.tokens, {"by_block": counts(done, args.k), "block_tokens": done.tokens}
    counting = run_speculative(task, noted).done
    check_repeated("the counted run", seed, first["speculative"], counting.tokens)
    near_ties = []
    if law[0] == 0:
        greedy = run_baseline(task).done.tokens
        for arm, tokens in first.items():
            near_ties += check_exact(task, arm, greedy, tokens, args.allow_near_ties)
    samples = interleave(arms, args.repeats, args.warmup, first_turn=seed * args.repeats)
    for arm, runs in samples.items():
        for run in runs:
            check_repeated(arm, seed, first[arm.removesuffix("_again")], run.done.tokens)
    return {
        "k": args.k, "loop": task.loop, "n_tokens": task.n_tokens, "prompt_tokens": task.prompt.shape[1], **counts(counting, args.k),
        "judged_accepted": recorder.accepted, "overlaps": recorder.overlaps, **timing(samples, task.n_tokens), "exact": not near_ties,
        "near_ties": near_ties, "error": None, "tokens": counting.tokens, "proposals": counting.proposals, "baseline_tokens": first["baseline"], **more,
    }  # fmt: skip


def seed_arms(task: Task, drawn: Method, rule: Sampled) -> dict:
    return {
        "baseline": lambda: run_baseline(task, rule),
        "speculative": lambda: run_speculative(task, drawn),
        "baseline_again": lambda: run_baseline(task, rule),
    }


# ------------------------------------------------------------------------------------------------------------- the run


def run(args, target, draft, prompts: list[tuple[str, str]], file: ResultFile) -> tuple[list[dict], list[dict]]:
    """Measure what the file lacks. Returns (one pooled row a temperature, rows of the law's test). Raises ClaimFailed."""
    tasks = [(name, make_task(args, target, draft, text)) for name, text in prompts]
    texts = list(enumerate(tasks * args.seeds, args.seed))  # a seed of its own for every text of a temperature
    measured: dict[float, list[dict]] = {t: [] for t in args.temperatures}
    for t, (seed, (name, task)) in progress(
        [(t, text) for t in args.temperatures for text in texts], "temperatures and seeds"
    ):
        where, law = {"part": "sampling", "workload": name, "temperature": t, "seed": seed}, (t, args.top_k, args.top_p)
        work = functools.partial(measure_seed, task, draft.model, law, seed, args)
        measured[t].append(find_or_measure(file, task, where, work))
    warm = [t for t in args.temperatures if t > 0] if args.check_law else []
    laws, (name, task) = [], tasks[0]
    for t in warm:
        where, law = {"part": "law", "workload": name, "temperature": t}, (t, args.top_k, args.top_p)
        rule = RULES[args.verify](*law, Chance(args.seed))
        work = functools.partial(law_row, task, draft.model, args.k, rule, args.check_law)
        laws.append(find_or_measure(file, task, where, work))
    level = FALSE_ALARMS / (len(measured) + len(warm))
    laws = [{**row, "fits": None if row["error"] or row["p_value"] is None else row["p_value"] > level} for row in laws]
    return [one_temperature(t, rows, level) for t, rows in measured.items()], laws


def one_temperature(temperature: float, rows: list[dict], level: float) -> dict:
    """One temperature over all its prompts and seeds: counts added up, speedups from the paired times of all of them, each
    of a text of its own (a median of texts, whose interval is of texts too)."""
    good = [row for row in rows if not row["error"]]
    if not good:
        return {"temperature": temperature, "speedup": None, "within": None, "error": rows[0]["error"]}
    seconds = {
        arm: [value for row in good for value in row[f"{arm}_s"]]
        for arm in ("baseline", "speculative", "baseline_again")
    }
    row = {"temperature": temperature, "pairs": len(seconds["baseline"]), **speedups(seconds), "error": None}
    for arm in ("baseline", "speculative"):
        row[f"{arm}_tokens_per_s"] = sum(one["n_tokens"] for one in good) / sum(
            statistics.median(one[f"{arm}_s"]) for one in good
        )
    total = {
        name: sum(one[name] for one in good)
        for name in ("accepted", "proposed", "emitted", "target_passes", "draft_passes")
    }
    row |= {**total, "acceptance_rate": ratio(total["accepted"], total["proposed"])}
    row["block_efficiency"] = ratio(total["emitted"], total["target_passes"])
    if "by_block" in good[0]:
        row |= block_against_token(good, seconds)
    return row | {"texts": len({tuple(one["tokens"]) for one in good}), **acceptance_check(good, level)}


def block_against_token(rows: list[dict], seconds: dict) -> dict:
    """What judging chains whole gave: tokens a pass over all texts, the speedup, and its speed over that of the token rule."""
    whole = [value for row in rows for value in row["block_s"]]
    emitted, passes = (sum(row["by_block"][name] for row in rows) for name in ("emitted", "target_passes"))
    alone, token = (paired_ratio(seconds[arm], whole) for arm in ("baseline", "speculative"))
    return {
        "block_tokens_per_pass": ratio(emitted, passes), "block_speedup": alone["median"], "block_over_token": token["median"],
        "block_over_token_low": token["low"], "block_over_token_high": token["high"],
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- tables

BLOCK = [
    ("temperature", "temperature", lambda t: f"{t:g}"), ("block_efficiency", "tokens/pass, token rule", fixed(2)),
    ("block_tokens_per_pass", "chains judged whole", fixed(2)), ("speedup", "speedup, token rule", fixed(2, "x")),
    ("block_speedup", "judged whole", fixed(2, "x")), ("over", "one over the other", str),
]  # fmt: skip
COLUMNS = [
    ("temperature", "temperature", lambda t: f"{t:g}"), ("speedup", "speedup", fixed(2, "x")), ("interval", "interval", str),
    ("block_efficiency", "tokens/pass", fixed(2)), ("alpha", "alpha", fixed(3)), ("expected_alpha", "overlap", fixed(3)),
    ("expects", "alpha may be", str), ("fits", "it is", str),
]  # fmt: skip
WIDE = [
    ("baseline_tokens_per_s", "alone, tokens/s", fixed(1)), ("speculative_tokens_per_s", "with draft", fixed(1)), ("aa", "A/A", fixed(2, "x")),
    ("acceptance_rate", "acceptance", percent), ("judged", "judged", str), ("texts", "different texts", str),
]  # fmt: skip


def table(rows: list[dict], wide: bool = False) -> str:
    shown = []
    for row in rows:
        expects = (
            None if row.get("expected_low") is None else f"{row['expected_low']:.3f} to {row['expected_high']:.3f}"
        )
        fits = {True: "yes", False: "NO"}.get(row["within"])
        shown.append({**shown_interval(row), "expects": expects, "fits": fits})
    return markdown_table(shown, COLUMNS + (WIDE if wide else []))


def block_table(rows: list[dict]) -> str:
    """Block verification beside the token rule."""
    shown = []
    for row in rows:
        if row.get("block_over_token"):
            within = interval_text(row["block_over_token_low"], row["block_over_token_high"])
            shown.append({**row, "over": f"{row['block_over_token']:.2f}x{f' ({within})' if within else ''}"})
    return markdown_table(shown, BLOCK)


def pays(row: dict) -> str:
    """Whether it pays at one temperature."""
    return ("do not speculate: " if judge_speed(row) == "slower" else "") + speed_words(row)


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
    add_prompt_options(parser, seed=False)
    parser.add_argument("-k", "--k", type=at_least(1, 1024), default=5, help="guesses a round")
    parser.add_argument("--verify", choices=RULES, default="token", help="block: a further arm judges chains whole, in the same turns, and --check-law tests its law")  # fmt: skip
    parser.add_argument(
        "--temperatures", type=temperature_list, default=[0.0, 0.3, 0.7, 1.0], metavar="T,T", help="0 is greedy"
    )
    parser.add_argument(
        "--top-k", type=at_least(0), default=0, help="draw from the k most likely ids, of both models; 0: from all"
    )
    parser.add_argument(
        "--top-p", type=share, default=1.0, help="draw from the most likely ids that together have this probability"
    )
    parser.add_argument("--seed", type=at_least(0, 2**32), default=0, help="the first seed; of what --sample draws too")
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
    prompts = chosen_prompts(args)
    with open_run(args, "spec_sampling", prompts) as (file, target, (draft,)):
        rows, laws = run(args, target, draft, prompts, file)
        file.finish({"temperatures": rows, "laws": laws})
    tell(
        f"k = {args.k}, top-k {args.top_k or 'off'}, top-p {args.top_p:g}, {args.n_tokens} tokens of {', '.join(name for name, _ in prompts)}\n"
    )
    tell(table(rows, args.wide) + "\n")
    if args.verify == "block":
        tell(f"chains judged whole beside the token rule, same seeds\n\n{block_table(rows)}\n")
    for row in rows:
        tell(f"temperature {row['temperature']:g}: {row['error'] or pays(row)}.")
    tell(
        "\n".join(f"{law_line(row)}." for row in laws)
        + ("\n" if laws else "")
        + f"{check_claim(rows, laws)}\nresults in {args.results}"
    )
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
