"""k policies on mixed traffic: who needs to be told k?

Claim: a policy that knows what passes cost here finds k by itself, within 3 % of the best fixed k on every kind of text,
and without guesses where none pay. Every arm writes the same requests in the same order, its policy learning as it goes;
beside them the oracle, which knows the best k of every round in hindsight.

    python spec_adaptive.py                  # the five workloads, every fixed k, three policies
    python spec_adaptive.py --ks 2,5 -k 8 --confidence 0.5
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

from spec_common import FEWEST_PAIRS, interleave, judge_speed, paired_ratio, say, tell

from spec_cli import at_least, command, fraction, make_parser, whole_list
from spec_decode import check_exact, counts
from spec_harness.arms import Method, Run, Task, draft_model, run_baseline, run_speculative
from spec_harness.cells import accounted, find_or_measure, speedups, where_time_went
from spec_harness.costs import costs_at, measure_costs
from spec_harness.options import add_prompt_options, add_task_options, chosen_prompts, make_task, open_run
from spec_harness.replay import cheapest_way, on_one_ruler, record
from spec_harness.results import ResultFile
from spec_harness.tables import fixed, markdown_table, percent, progress, shown_interval, speed_words
from spec_harness.theory import measured_v
from spec_methods.policy import LOOP_OVERHEAD, POLICIES, THRESHOLD, FixedK, make_policy

KS = (1, 2, 3, 5, 8)
CLOSE = 0.97  # of the best fixed k's speed: as near as the claim asks
PLAIN, AGAIN = "alone", "alone again (A/A)"


# ---------------------------------------------------------------------------------------------------------------- arms


def arm_methods(args, task: Task, draft, costs: dict) -> dict[str, Method]:
    """Every arm that speculates, by name: each fixed k, each policy."""
    v, places = measured_v(costs), costs["c_places"]
    policies = {f"k = {k}": FixedK(k) for k in args.ks}
    policies |= {name: make_policy(name, args.k, places, v, args.confidence, LOOP_OVERHEAD) for name in POLICIES[1:]}
    return {name: Method(draft_model(task, draft, policy.most).drafter, policy) for name, policy in policies.items()}


@dataclass
class Requests:
    """All texts written one after the other by one arm: text -> run, and the seconds of all of them."""

    runs: dict[str, Run]

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs.values())


def run_requests(tasks: dict[str, Task], method: Method | None, watched: bool = False) -> Requests:
    """Every request in turn, one policy learning over all of them; without a method the target alone."""
    runs = {}
    for name, task in tasks.items():
        runs[name] = (
            run_speculative(task, method, watched, go_on=bool(runs)) if method else run_baseline(task, watched=watched)
        )
    return Requests(runs)


def counted_rows(
    tasks: dict[str, Task], plain: Requests, arm: str, method: Method, costs: list[dict], args
) -> list[dict]:
    """One watched run of an arm, checked: its counters by text, and the speedup that they and the costs come to. `plain`
    is a watched run of the target alone, whose texts are the right ones."""
    rows = []
    for text, run in run_requests(tasks, method, watched=True).runs.items():
        alone = plain.runs[text]
        ties = check_exact(tasks[text], arm, alone.done.tokens, run.done.tokens, args.allow_near_ties)
        row = {**counts(run.done, method.k), **where_time_went(alone, run)}
        row["predicted"] = accounted(row, costs_at(costs, tasks[text].context))
        rows.append({"part": "counts", "arm": arm, "text": text, **row, "near_ties": ties, "error": None})
    return rows


def turn_row(tasks: dict[str, Task], expected: dict, methods: dict, number: int, warmup: int, args) -> dict:
    """Every arm once, in an order of the turn's own, every text checked. Returns the row with all seconds."""
    every = {PLAIN: None, **methods, AGAIN: None}
    arms = {arm: functools.partial(run_requests, tasks, method) for arm, method in every.items()}
    samples = interleave(arms, 1, warmup, first_turn=number)
    ties, seconds = [], {}
    for arm in every:
        (found,) = samples[arm]
        seconds[arm] = {text: run.seconds for text, run in found.runs.items()}
        for text, run in found.runs.items():
            ties += check_exact(tasks[text], arm, expected[text], run.done.tokens, args.allow_near_ties)
    return {"seconds": seconds, "near_ties": ties}


# ------------------------------------------------------------------------------------------------------------- summary


def arm_row(arm: str, text: str, turns: list[dict], found: dict, mine: list[str]) -> dict:
    """One arm on the texts `mine`: the speedup as time over time, turn by turn, and its counters added up."""
    seconds = {name: [sum(one[key][part] for part in mine) for one in turns]
               for name, key in (("baseline", PLAIN), ("speculative", arm), ("baseline_again", AGAIN))}  # fmt: skip
    row = {"arm": arm, "text": text, "pairs": len(turns), "error": None, **speedups(seconds)}
    if arm == AGAIN:
        return row
    counted = [found[arm, name] for name in mine]
    total = {
        key: sum(one[key] for one in counted)
        for key in ("emitted", "proposed", "accepted", "target_passes", "draft_passes")
    }
    over = {
        name: sum(one["emitted"] for one in counted) / sum(one["emitted"] / one[name] for one in counted)
        for name in ("predicted", "ruler", "oracle")
    }
    return {**row, **total, **over, "acceptance_rate": total["accepted"] / total["proposed"] if total["proposed"] else None,
            "block_efficiency": total["emitted"] / total["target_passes"], "mean_k": total["proposed"] / total["target_passes"]}  # fmt: skip


def summarise(turns: list[dict], found: dict, arms: list[str], texts: list[str]) -> list[dict]:
    """One row an arm and text, and one over all texts. `gap_closed`: how much of the way from the best fixed k to the
    oracle it goes, both by counted rounds at the same costs."""
    rows = []
    for text in ["all", *texts]:
        mine = [arm_row(arm, text, turns, found, texts if text == "all" else [text]) for arm in [*arms, AGAIN]]
        best = max(row["ruler"] for row in mine if is_fixed(row["arm"]))
        for row in mine[:-1]:
            row["gap_closed"] = (row["ruler"] - best) / (row["oracle"] - best) if row["oracle"] > best else None
        rows += mine
    return rows


def is_fixed(arm: str) -> bool:
    return arm.startswith("k = ")


def against_fixed(turns: list[dict], rows: list[dict], arm: str, text: str, texts: list[str]) -> tuple[str, float]:
    """The best fixed k on that text by measured time, and the arm's speed over its speed, paired by turn."""
    fixed_rows = [row for row in rows if row["text"] == text and is_fixed(row["arm"])]
    best = max(fixed_rows, key=lambda row: row["speedup"])["arm"]
    mine = texts if text == "all" else [text]
    times = {name: [sum(one[name][part] for part in mine) for one in turns] for name in (best, arm)}
    return best, paired_ratio(times[best], times[arm])["median"]


def verdict(turns: list[dict], rows: list[dict], texts: list[str], ties: int) -> str:
    text = f"NOT the same texts everywhere, {ties} near-ties excused: see near_ties in the file" if ties else "every text token for token the target's own"  # fmt: skip
    if len(turns) < FEWEST_PAIRS:
        return f"{text}.\ntoo few turns for a verdict ({len(turns)}); take --repeats {FEWEST_PAIRS} or more"
    lines, missed = [f"{text}."], []
    for text in ["all", *texts]:
        best, share = against_fixed(turns, rows, "cost", text, texts)
        row = next(row for row in rows if (row["arm"], row["text"]) == ("cost", text))
        lines.append(f"{'all of it' if text == 'all' else text}: cost {speed_words(row)}; {share:.3f} of the best fixed ({best})"
                     + ("; do not speculate there." if judge_speed(row) == "slower" else "."))  # fmt: skip
        missed += [text] if share < CLOSE and text != "all" else []
    lines.append(f"the claim {'does not hold on ' + ', '.join(missed) if missed else f'holds: within {1 - CLOSE:.0%} of the best fixed k on every text'}.")  # fmt: skip
    return "\n".join(lines)


COLUMNS = [
    ("arm", "k policy", str), ("speedup", "speedup", fixed(2, "x")), ("interval", "interval", str), ("gap_closed", "gap closed", percent),
    ("mean_k", "guesses/round", fixed(2)), ("block_efficiency", "tokens/pass", fixed(2)),
]  # fmt: skip
WIDE = [
    ("predicted", "from costs", fixed(2, "x")), ("ruler", "at set overhead", fixed(2, "x")), ("oracle", "oracle, the same", fixed(2, "x")),
    ("acceptance_rate", "acceptance", percent), ("target_passes", "target passes", str), ("draft_passes", "draft passes", str),
]  # fmt: skip


def table(rows: list[dict], text: str, wide: bool = False) -> str:
    return markdown_table(
        [shown_interval(row) for row in rows if row["text"] == text], COLUMNS + (WIDE if wide else [])
    )


def by_text(rows: list[dict], texts: list[str]) -> str:
    """The speedup of every arm on every text."""
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    found = {(row["arm"], row["text"]): row["speedup"] for row in rows}
    shown = [{"arm": arm, **{text: found[arm, text] for text in texts}} for arm in arms]
    return markdown_table(shown, [("arm", "k policy", str), *((text, text, fixed(2, "x")) for text in texts)])


# ------------------------------------------------------------------------------------------------------------- the run


def count_arms(args, tasks: dict[str, Task], methods: dict[str, Method], costs: list[dict], file: ResultFile) -> dict:
    """(arm, text) -> the row of its counters, with the speedup that the oracle's costs give it and the oracle's own."""
    say("counting the rounds of every policy ...")
    plain = run_requests(tasks, None, watched=True)
    for arm, method in methods.items():
        missing = [text for text in tasks if not file.find(part="counts", arm=arm, text=text)]
        if missing:  # a policy learns from text to text, so all of them are run again
            for row in counted_rows(tasks, plain, arm, method, costs, args):
                if row["text"] in missing:
                    file.add(row)
    found = {(row["arm"], row["text"]): dict(row) for row in file.rows if row.get("part") == "counts"}
    drafter = next(iter(methods.values())).drafter
    for text, task in tasks.items():
        here = costs_at(costs, task.context)
        oracle = cheapest_way(record(task, drafter, plain.runs[text].done.tokens, args.k).right, args.k, here)
        for arm in methods:
            found[arm, text].update(ruler=on_one_ruler(found[arm, text], here), oracle=oracle)
    return found


def run(args, tasks: dict[str, Task], draft, file: ResultFile) -> tuple[list[dict], list[dict], int]:
    """Measure what the file lacks; every turn is a row. Returns (pooled rows, seconds of every turn, near-ties excused).
    Raises Mismatch."""
    first = next(iter(tasks.values()))
    costs = measure_costs(file, list(tasks.values()), draft.model, [*args.ks, args.k])
    middle = statistics.median_low([task.context for task in tasks.values()])
    methods = arm_methods(args, first, draft.model, costs_at(costs, middle))
    found = count_arms(args, tasks, methods, costs, file)
    expected = {name: run_baseline(task).done.tokens for name, task in tasks.items()}
    warmup, rows = args.warmup, []
    for number in progress(list(range(args.repeats)), "turns"):
        work = functools.partial(turn_row, tasks, expected, methods, number, warmup, args)
        rows.append(
            find_or_measure(file, first, {"part": "turn", "turn": number}, lambda work=work: {**work(), "error": None})
        )
        warmup = 0  # the first turn of this run has warmed up for all
    turns = [row["seconds"] for row in rows if not row["error"]]
    ties = sum(len(row.get("near_ties") or []) for row in file.rows)
    return summarise(turns, found, list(methods), list(tasks)) if turns else [], turns, ties


def parse_args(argv):
    parser = make_parser(__doc__, "spec_adaptive", resume=True)
    add_task_options(parser)
    add_prompt_options(parser, ("all",), "all")
    parser.add_argument("--ks", type=whole_list(1, 64), default=list(KS), help="the fixed k to compare with")
    parser.add_argument("-k", "--k", type=at_least(1, 64), default=8, help="the most guesses a round of the policies")
    parser.add_argument("--confidence", type=fraction, default=THRESHOLD, help="of the policy 'confidence': it stops after a less likely guess")  # fmt: skip
    args = parser.parse_args(argv)
    if args.loop != "lean":
        parser.error("--loop essay: always drafts a full k, so no policy has a say; leave it at lean")
    return args


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    prompts = chosen_prompts(args)
    with open_run(args, "spec_adaptive", prompts) as (file, target, (draft,)):
        tasks = {name: make_task(args, target, draft, text) for name, text in prompts}
        rows, turns, ties = run(args, tasks, draft, file)
        file.finish({"arms": rows})
    if rows:
        tell(
            f"all requests, {args.n_tokens} tokens of each\n\n{table(rows, 'all', args.wide)}\n\neach text\n\n{by_text(rows, list(tasks))}\n"
        )
        tell(verdict(turns, rows, list(tasks), ties))
    tell(f"results in {args.results}")
    return int(len(turns) < args.repeats)


if __name__ == "__main__":
    raise SystemExit(main())
