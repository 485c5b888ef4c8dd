"""Drafting while the target checks: PEARL and SSD, what they would hide on a second device, and what they cost on one.

Claim: the text stays the target's own, token for token, in whatever order the two sides finish; and on one queue overlap
gains nothing, since draft and target compete for the same time. What a second device would give is worked out beside it.

    python spec_overlap.py                     # the embedded pair: PEARL's two sides taking turns, beside the ordinary chain
    python spec_overlap.py --overlap process   # and really at once: two processes, a core each
    python spec_overlap.py --overlap device --draft-device cuda:1     # two devices (seen on CPUs alone so far)
    python spec_overlap.py --method ssd        # answers to foreseen outcomes instead of guesses that run ahead
    python spec_overlap.py --simulate --c 0.1 --v 1:1,8:1.2 --alpha 0.8    # no models: what a second device would do
"""

from __future__ import annotations

import contextlib
import functools
import statistics

from spec_common import UserError, interval_text, judge_speed, pick_device, say, tell

from spec_cli import at_least, command, make_parser
from spec_decode import Cell, measure_all
from spec_harness.arms import Method, Task, draft_model
from spec_harness.cells import find_or_measure, pooled, ratio
from spec_harness.costs import costs_at, draft_reads, inside_limit, measure_costs
from spec_harness.essay import essay_at_once
from spec_harness.options import add_prompt_options, add_task_options, chosen_prompts, make_task, open_run
from spec_harness.overlap_by_hand import add_hand_options, simulate
from spec_harness.overlap_rows import MOST_AHEAD, over, row_apart, row_here, waiting
from spec_harness.overlapping import balanced_g
from spec_harness.processes import DraftProcess, draft_process, draft_side, draft_thread
from spec_harness.results import ResultFile
from spec_harness.tables import fixed, markdown_table, percent, progress, shown_interval, turns_of
from spec_harness.theory import measured_v
from spec_methods.pearl import Ahead, pearl_loop
from spec_methods.policy import FixedK
from spec_methods.ssd import ForeseeingDrafter
from spec_methods.trees import tree_error
from spec_methods.wire import Sizes
from spec_models.checks import Loaded, check_passes, vocabulary_rows

METHODS, OVERLAPS = ("pearl", "ssd"), ("none", "process", "device")
AT_ONCE, BY_TURNS = ", at once", ", by turns"  # of two processes, one thread each
VERDICTS = {
    "faster": "pays",
    "slower": "does not pay",
    "noise": "makes no difference beyond the noise",
    "few": "was measured in too few turns to say",
}


# ------------------------------------------------------------------------------------------------------------- methods


def method_of(args, name: str, task: Task, draft, costs: dict) -> Method:
    """The ordinary chain ("chain"), PEARL or SSD, each with its two sides taking turns in this process."""
    if name == "chain":
        return draft_model(task, draft, args.k)
    if name == "ssd":
        fans = [args.fan] * (args.k + 1)
        return Method(
            ForeseeingDrafter(draft, vocabulary_rows(task.target), fans, reach=task.draft_limit), FixedK(args.k)
        )
    g = args.ahead or balanced_g(costs["c"], measured_v(costs), MOST_AHEAD)
    return Method(Ahead(draft_model(task, draft, g).drafter, g, task.draft_limit), FixedK(g), decode=pearl_loop)


# ------------------------------------------------------------------------------------------------------------- the run


def measure_text(
    task: Task, draft, args, costs: dict, other: DraftProcess | None, beside: dict | None
) -> dict[str, dict]:
    """The rows of one text, all arms in the same turns; `other` is the draft in a process of its own. Raises Mismatch."""
    methods = {name: method_of(args, name, task, draft, costs) for name in ("chain", args.method)}
    for name in arms_of(args)[2:]:
        methods[name] = other.method(
            args.method, methods[args.method].k, name == args.method + BY_TURNS, task.draft_limit
        )
    rows = measure_all({name: Cell(task, method) for name, method in methods.items()}, args)
    if args.method == "ssd":
        rows = {name: {**row, **foreseen(methods[name].drafter)} for name, row in rows.items()}
    foresee_s = rows[args.method].get("foresee_s", 0.0) / rows[args.method]["target_passes"]
    found = {name: row_here(name, rows[name], costs) for name in ("chain", args.method)}
    for name in arms_of(args)[2:]:
        found[name] = row_apart(args.method, rows[name], costs, beside, name == args.method + AT_ONCE, foresee_s)
    return found


def foreseen(drafter) -> dict:
    """Of its last run, and so of every one: the share of outcomes that were foreseen; null where none was to be."""
    return {"hit_rate": ratio(getattr(drafter, "hits", 0), getattr(drafter, "asked", 0))}


def arms_of(args) -> list[str]:
    """The rows of a text, by their method."""
    apart = [args.method + AT_ONCE, args.method + BY_TURNS] if args.overlap != "none" else []
    return ["chain", args.method, *apart]


def measure_beside(file: ResultFile, other: DraftProcess, tasks: list[Task], args) -> dict:
    """The row of what passes cost on one thread each, alone and while the other side runs; at the longest context."""
    context = max(task.context for task in tasks)
    sizes = sorted({1, args.k + 1, args.ahead or MOST_AHEAD})
    where = {"part": "costs beside", "at": context}
    context, sizes = inside_limit(context, sizes, tasks[0].limit, draft_reads(None))
    return file.find(**where) or file.add({**where, **other.costs(tasks[0].target, context, sizes)})


def sides(args, tasks: list[Task]):
    """The draft's process or thread where one is asked for, to be entered. Raises SideLost."""
    if args.overlap == "none":
        return contextlib.nullcontext()
    room = max(task.prompt.shape[1] + task.n_tokens for task in tasks)
    say("a side of its own for the draft ...")
    build = functools.partial(draft_side, args, args.draft_device or str(tasks[0].device), tasks[0].target.dtype)
    start = draft_process if args.overlap == "process" else draft_thread
    return start(build, Sizes(room, max(args.k, args.ahead or MOST_AHEAD), 0), not args.unpinned)


def run(args, target: Loaded, draft: Loaded, texts: list[tuple[str, str]], file: ResultFile) -> list[dict]:
    """Measure what the file lacks. Returns one row a text and method. Raises Mismatch, SideLost."""
    tasks, rows = {name: make_task(args, target, draft, text) for name, text in texts}, []
    every = list(tasks.values())
    say("what passes cost ...")
    costs = measure_costs(file, every, draft.model, sorted({args.k, args.k // 2, args.ahead or MOST_AHEAD}))
    with sides(args, every) as other:
        beside = measure_beside(file, other, every, args) if other else None
        for text in progress(list(tasks), "texts"):
            task = tasks[text]
            measured = functools.cache(
                functools.partial(measure_text, task, draft.model, args, costs_at(costs, task.context), other, beside)
            )
            for name in arms_of(args):
                where = {"part": "overlap", "text": text, "method": name}
                rows.append(find_or_measure(file, task, where, lambda name=name, measured=measured: measured()[name]))
    return rows


# -------------------------------------------------------------------------------------------------------------- tables

COLUMNS = [
    ("text", "text", str), ("method", "method", str), ("k", "k, g", str), ("speedup", "speedup", fixed(2, "x")),
    ("interval", "interval", str), ("predicted_costs", "from costs", fixed(2, "x")), ("two_devices", "two devices", fixed(2, "x")),
    ("alpha", "alpha", fixed(2)),
]  # fmt: skip
WIDE = [
    ("block_efficiency", "tokens/pass", fixed(2)), ("balanced_g", "g that balances", str), ("hit_rate", "foreseen", fixed(2)),
    ("prediction_error", "error", fixed(2)),
    ("overhead_share", "loop's share", fixed(3)), ("wait_s", "waits, s", fixed(2)), ("aa", "A/A", fixed(2, "x")),
]  # fmt: skip


def table(rows: list[dict], wide: bool = False) -> str:
    return markdown_table([shown_interval(row) for row in rows], COLUMNS + (WIDE if wide else []))


def summarise(rows: list[dict]) -> dict:
    """Each method over all texts, time over time, with the median signed error of its account."""
    found = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        good = [row for row in rows if row["method"] == name and not row["error"]]
        if good:
            errors = [row["prediction_error"] for row in good if row["prediction_error"] is not None]
            found[name] = {
                **pooled(good),
                "prediction_error_median": statistics.median(errors) if errors else None,
                **waiting(good),
            }
    at_once = next((name for name in found if name.endswith(AT_ONCE)), None)
    others = [name for name in found if at_once and name != at_once]
    return {
        "methods": found,
        "at_once_over": {name: over(rows, at_once, name) for name in others},
        "near_ties": sum(len(row["near_ties"]) for row in rows if not row["error"]),
    }


def verdict(summary: dict) -> str:
    """Where overlap pays, method by method, by the one verdict, and what that rests on."""
    if not summary["methods"]:
        return "nothing could be measured; see the errors in the result file"
    ties = summary["near_ties"]
    exact = f"{ties} near-ties excused" if ties else "token for token the target's own text"
    lines = [f"every sample of every arm: {exact}."]
    for name, one in summary["methods"].items():
        interval = interval_text(one["speedup_low"], one["speedup_high"])
        lines.append(
            f"{name}: {one['speedup']:.2f}x the target alone{f' ({interval})' if interval else ''}, {VERDICTS[judge_speed(one)]}."
        )
        if "wait_share" in one:
            lines[-1] += (
                f" The target waited {percent(one['wait_share'])} of the time for guesses; a message there and back takes "
                f"{1e6 * one['message_s']:.0f} us."
            )
    for name, both in summary["at_once_over"].items():
        interval = interval_text(both["speedup_low"], both["speedup_high"])
        lines.append(
            f"at once over {name}: {both['speedup']:.2f}x{f' ({interval})' if interval else ''}, {VERDICTS[judge_speed(both)]}."
        )
    if summary["at_once_over"]:
        lines.append(f"the essay, two threads on one queue over taking turns: {essay_at_once():.2f}x.")
    aa, within = one["aa"], interval_text(one["aa_low"], one["aa_high"], 3)
    lines.append(
        f"the same code against itself: {aa:.3f}x{f' ({within})' if within else ''}, {turns_of(one['pairs'])}."
    )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- the user


def add_overlap_options(parser) -> None:
    """Where the draft's side runs."""
    parser.add_argument(
        "--overlap", choices=OVERLAPS, default="none",
        help="process: the draft in a process of its own, one thread and one core each; device: in a thread, on --draft-device; "
        "none: both sides take turns",
    )  # fmt: skip
    parser.add_argument("--unpinned", action="store_true", help="let the system choose the cores: other work on a core that a side is pinned to delays every message")  # fmt: skip
    parser.add_argument(
        "--draft-device",
        help="of --overlap device: where the draft runs, such as cuda:1; left out: where the target does, in a stream of its own",
    )


def parse_args(argv):
    parser = make_parser(__doc__, "spec_overlap", resume=True)
    add_task_options(parser)
    add_prompt_options(parser, default="all")
    parser.add_argument(
        "--method", choices=METHODS, default="pearl",
        help="pearl: guesses run ahead of what is judged; ssd: answers to foreseen outcomes",
    )  # fmt: skip
    add_overlap_options(parser)
    parser.add_argument(
        "-k", "--k", type=at_least(1, 64), default=5, help="guesses a round of the ordinary chain and of ssd"
    )
    parser.add_argument(
        "-g", "--ahead", type=at_least(1, 64), metavar="G",
        help="guesses a round of pearl; left out: as many as take as long as their check",
    )  # fmt: skip
    parser.add_argument(
        "--fan", type=at_least(1, 64), default=2,
        help="of ssd: outcomes foreseen behind each number of accepted guesses",
    )  # fmt: skip
    add_hand_options(parser, MOST_AHEAD)
    return parser.parse_args(argv)


def check_devices(args) -> None:
    """Whether the draft's own device is there. Raises UserError."""
    if args.draft_device is None:
        return
    if args.overlap != "device":
        raise UserError(f"--draft-device {args.draft_device}: goes with --overlap device; give both or neither")
    try:
        pick_device(args.draft_device)
    except UserError as error:
        raise UserError(str(error).replace("--device", "--draft-device")) from error


def check_draft(args, draft: Loaded) -> None:
    """Whether this draft can run ahead by itself. Raises UserError."""
    if getattr(draft.model, "reads_states", False):
        raise UserError(
            f"--draft {draft.name}: reads the target's states, which are not there while it checks; choose another draft"
        )
    if args.method == "ssd":
        refusal = "this architecture cannot guess several answers in one pass; take --method pearl"
        check_passes(draft, tree_error, refusal, "a pass over five tokens")


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    if args.simulate:
        tell(simulate(args))
        return 0
    if args.loop == "essay":
        raise UserError("--loop essay: overlap has a loop of its own; leave it out")
    check_devices(args)
    texts = chosen_prompts(args)
    with open_run(args, "spec_overlap", texts) as (file, target, (draft,)):
        check_draft(args, draft)
        rows = run(args, target, draft, texts, file)
        summary = summarise(rows)
        file.finish(summary)
    tell(f"{args.n_tokens} tokens\n\n{table(rows, args.wide)}\n\n{verdict(summary)}\nresults in {args.results}")
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
