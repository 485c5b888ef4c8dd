"""Your own requests against a serving engine, with and without its speculative decoding, at several loads.

Claim: speculation pays at some loads of some traffic and not at others, and an engine that speculates writes what it would write
without. Requests come from a file of yours; arms take turns; every pair of outputs is compared; where it stops paying is said.

    python spec_traffic.py --url localhost:8000 --url-without localhost:8001 --prompt-file mine.jsonl
    python spec_traffic.py --url localhost:8000 --prompt-file mine.jsonl --concurrency 1,4,16 --rate 2,8 --ttft 0.5 --tpot 0.05
"""

from __future__ import annotations

import functools
import http.client
import json
import statistics
from pathlib import Path

from spec_common import FEWEST_PAIRS, HERE, UserError, first_line, interleave, judge_speed, remark, say, tell

import torch

from spec_cli import Help, Parser, at_least, command, reachable, replaceable, whole_list
from spec_harness.cells import ratio, speedups
from spec_harness.engine import CPU, Engine, ask, engine_at, fetch, read_totals, refused_extras, since
from spec_harness.machine import environment
from spec_harness.options import add_file_options, wanted_of
from spec_harness.prompts import read_prompts
from spec_harness.results import ResultFile, settings
from spec_harness.tables import fixed, markdown_table, percent, progress, shown_interval, speed_words, turns_of
from spec_harness.traffic import Load, compared, run_load, summary_of

ARMS = {"speculative": "url", "baseline": "url_without", "baseline_again": "url_without"}


def positive(text: str) -> float:
    """A type for argparse: a number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def positives(text: str) -> list[float]:
    """A type for argparse: numbers above 0 with commas between."""
    return sorted({positive(part) for part in text.replace(",", " ").split()})


# ------------------------------------------------------------------------------------------------------------- engines


def ready(engine: Engine, flag: str, prompt: str, longest_s: float) -> Engine:
    """The engine with its model's name, asked once for a few tokens: what it does not know is left out from then on. Raises
    UserError where nothing answers."""
    try:
        model = engine.model or json.loads(fetch(engine, "/v1/models"))["data"][0]["id"]
    except (OSError, ValueError, KeyError, IndexError, TypeError, http.client.HTTPException) as error:
        raise UserError(f"{flag} {engine.name}: no engine answers there ({first_line(error)}); start it, or name its --model") from error
    engine = engine._replace(model=model)
    answer = ask(engine, "warm-up", prompt, 4, longest_s)
    if refused_extras(answer):
        engine = engine._replace(extras=False)
        remark(f"{flag} {engine.name}: knows no token ids, so outputs are compared as text")
        answer = ask(engine, "warm-up", prompt, 4, longest_s)
    if answer.error:
        raise UserError(f"{flag} {engine.name}: {answer.error}; mend that first")
    return engine


def engines_of(args, requests: list[tuple[str, str]]) -> dict[str, Engine]:
    """An engine for each arm. Raises UserError."""
    found = {}
    for option in ("url", "url_without"):
        if getattr(args, option):
            flag = "--" + option.replace("_", "-")
            engine = engine_at(getattr(args, option), flag, model=args.model or "", chat=args.chat, timeout=args.timeout)
            found[option] = ready(engine, flag, requests[0][1], args.longest)
    return {arm: found[option] for arm, option in ARMS.items() if option in found}


# ------------------------------------------------------------------------------------------------------------- the run


def one_turn(engine: Engine, requests: list[tuple[str, str]], load: Load, args):
    """Every request once by one engine: a record with `seconds`, as `interleave` wants it, its result (answers, totals)."""
    send = functools.partial(send_one, engine, args.n_tokens, args.longest)
    before = read_totals(engine)
    run = run_load(send, requests, load, args.seed)
    return run._replace(result=(run.result, since(read_totals(engine), before)))


def send_one(engine: Engine, n_tokens: int, longest_s: float, name: str, prompt: str):
    return ask(engine, name, prompt, n_tokens, longest_s)


def drafts_of(turns: list) -> dict:
    """Acceptance, accepted / proposed, and tokens a pass over an arm's turns: from the engine's totals, else from what it said of
    each request; nulls where it said nothing."""
    said = [totals for _, totals in turns if totals] or [one.drafted for answers, _ in turns for one in answers if one.drafted]
    sums = {name: sum(one.get(name) or 0 for one in said) for name in ("proposed", "accepted", "rounds")}
    return {**sums, "acceptance_rate": ratio(sums["accepted"], sums["proposed"]),
            "block_efficiency": 1 + sums["accepted"] / sums["rounds"] if sums["rounds"] else None}  # fmt: skip


def clock_of(run, load: Load) -> float:
    """What a turn is judged by: its whole time; of an open loop, whose time is the arrivals', the mean of its requests'."""
    answers = [one for one in run.result[0] if one.error is None]
    return run.seconds if load.rate is None or not answers else statistics.fmean(one.whole_s for one in answers)


def measure_load(engines: dict[str, Engine], requests: list[tuple[str, str]], load: Load, args) -> dict:
    """The row of one load: every arm in turns."""
    samples = interleave({arm: functools.partial(one_turn, engine, requests, load, args) for arm, engine in engines.items()}, args.repeats, 0)
    row = {"concurrency": load.concurrency, "rate": load.rate, "requests": len(requests), "error": None}
    for arm, runs in samples.items():
        turns = [summary_of(run.result[0], run.seconds, args.ttft, args.tpot) for run in runs]
        row[arm] = {"turns": turns, **drafts_of([run.result for run in runs]),
                    "errors": sorted({one.error for run in runs for one in run.result[0] if one.error})}  # fmt: skip
        row[f"{arm}_s"] = [clock_of(run, load) for run in runs]
    row["failed"] = sum(turn["failed"] for arm in engines for turn in row[arm]["turns"])
    if "baseline" in engines:
        row |= speedups({arm: row[f"{arm}_s"] for arm in ARMS})
        for name, arm in (("outputs", "speculative"), ("outputs_again", "baseline_again")):
            each = [compared(a.result[0], b.result[0]) for a, b in zip(samples[arm], samples["baseline"], strict=True)]
            row[name] = {"compared": sum(one["compared"] for one in each), "same": sum(one["same"] for one in each), "by": each[0]["by"],
                         "different": sorted({name for one in each for name in one["different"]})}  # fmt: skip
    return row


# ---------------------------------------------------------------------------------------------------------- what is told


def shown(row: dict) -> dict:
    """The row as the table wants it: medians of the turns."""
    fast = row["speculative"]
    middle = {name: statistics.median(values) if (values := [turn[name] for turn in fast["turns"] if turn[name] is not None]) else None
              for name in ("output_throughput", "median_ttft_ms", "median_tpot_ms")}  # fmt: skip
    outputs = row.get("outputs")
    return {
        **(shown_interval(row) if "speedup" in row else {"speedup": None, "interval": None}), **middle, "load": str(Load(row["concurrency"], row["rate"])),
        "acceptance_rate": fast["acceptance_rate"],
        "same": outputs and f"{outputs['same']} of {outputs['compared']}", "failed": row["failed"],
    }  # fmt: skip


COLUMNS = [
    ("load", "load", str), ("speedup", "speedup", fixed(2, "x")), ("interval", "interval", str), ("output_throughput", "tokens/s", fixed(1)),
    ("median_ttft_ms", "ttft ms", fixed(0)), ("median_tpot_ms", "tpot ms", fixed(1)),
    ("acceptance_rate", "accepted", percent), ("same", "same", str), ("failed", "failed", str),
]  # fmt: skip


def outputs_words(rows: list[dict]) -> str:
    """Whether the engine writes the same with and without, and with itself."""
    both = {name: [row[name] for row in rows if name in row] for name in ("outputs", "outputs_again")}
    same, of = (sum(one[key] for one in both["outputs"]) for key in ("same", "compared"))
    again, of_again = (sum(one[key] for one in both["outputs_again"]) for key in ("same", "compared"))
    if same == of and of:
        return f"all {of} outputs are the same with and without ({both['outputs'][0]['by']})."
    return (f"{same} of {of} outputs are the same with and without ({both['outputs'][0]['by']}); the engine without speculation gave "
            f"{again} of {of_again} of its own again.")  # fmt: skip


def verdict(rows: list[dict]) -> str:
    """Where it pays, by load; what failed; whether the outputs are the same."""
    lines = [f"{Load(row['concurrency'], row['rate'])}: {speed_words(row)}." for row in rows if "speedup" in row]
    slow = [str(Load(row["concurrency"], row["rate"])) for row in rows if "speedup" in row and judge_speed(row) == "slower"]
    if slow:
        lines.append(f"do not speculate at {', '.join(slow)}.")
    if any("outputs" in row for row in rows):
        lines.append(outputs_words(rows))
    errors = {error for row in rows for arm in ARMS for error in row.get(arm, {}).get("errors", [])}
    if failed := sum(row["failed"] for row in rows):
        lines.append(f"{failed} requests failed: {'; '.join(sorted(errors))[:300]}.")
    return "\n".join(lines or ["one engine: nothing to compare with; give --url-without."])


def parse_args(argv):
    parser = Parser(description=__doc__, formatter_class=Help)
    add = parser.add_argument
    add("--url", required=True, help="the engine that speculates, e.g. localhost:8000")
    add("--url-without", help="the same engine without speculation")
    add("--model", help="the name that it serves its model under; left out: the first it lists")
    add("--chat", action="store_true", help="through its chat API")
    add("--prompt-file", type=Path, required=True, help="a text, or a .jsonl or .json of prompts")
    add_file_options(parser)("--seed", type=at_least(0), default=0, help="of what --sample draws and of the arrivals")
    add("--n-tokens", type=at_least(1), default=64, help="tokens an answer, at most")
    add("--concurrency", type=whole_list(1, 1024), default=[1, 4, 16], help="requests in flight, e.g. 1,4,16: a closed loop for each")
    add("--rate", type=positives, default=[], help="requests a second, e.g. 2,8: arrivals of a Poisson process for each")
    add("--repeats", type=at_least(1), default=FEWEST_PAIRS, help="turns of each arm at each load")
    add("--ttft", type=positive, help="seconds to the first token that count as good")
    add("--tpot", type=positive, help="seconds a further token that count as good")
    add("--timeout", type=positive, default=60.0, help="seconds without a word after which a request has failed")
    add("--longest", type=positive, default=600.0, help="seconds that a request may take")
    add("--results", type=Path, default=HERE / "results" / "local" / "spec_traffic.json", help="where the JSON goes")
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    replaceable(args.results)
    requests = read_prompts(reachable(args.prompt_file, "--prompt-file"), wanted_of(args))
    engines = engines_of(args, requests)
    loads = [*(Load(concurrency=n) for n in args.concurrency), *(Load(rate=rate) for rate in args.rate)]
    config = settings(args, engines={arm: engine.model for arm, engine in engines.items()}, requests=len(requests))
    say(f"{len(requests)} requests at each of {len(loads)} loads, {turns_of(args.repeats)} of {', '.join(engines)} ...")
    with ResultFile(args.results, "spec_traffic", config, environment(CPU, torch.float32), None) as file:
        rows = [file.add({"part": "load", **measure_load(engines, requests, load, args)}) for load in progress(loads, "loads")]
        file.finish({"verdicts": {str(Load(row["concurrency"], row["rate"])): judge_speed(row) for row in rows if "speedup" in row}})
    tell(f"{len(requests)} requests, {args.n_tokens} tokens at most\n\n{markdown_table([shown(row) for row in rows], COLUMNS)}\n\n"
         f"{verdict(rows)}\nresults in {args.results}")  # fmt: skip
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
