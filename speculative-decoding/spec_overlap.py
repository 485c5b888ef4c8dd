"""Drafting while the target checks: PEARL and SSD, what they would hide on a second device, and what they cost on one.

Claim: the text stays the target's own, token for token, in whatever order the two sides finish; and on one queue overlap
gains nothing, since draft and target compete for the same time. What a second device would give is worked out beside it.

    python spec_overlap.py                     # the embedded pair: both schemes, their sides taking turns, beside the chain
    python spec_overlap.py --overlap process   # and really at once: two processes, a core each
    python spec_overlap.py --overlap device --draft-device cuda:1     # two devices (seen on CPUs alone so far)
    python spec_overlap.py --method ssd        # answers to foreseen outcomes alone
    python spec_overlap.py --also draft-p      # and a second draft in the same turns: one that makes all guesses in one pass
    python spec_overlap.py --simulate --c 0.1 --v 1:1,8:1.2 --alpha 0.8    # no models: what a second device would do
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
from typing import NamedTuple

from spec_common import UserError, interval_text, judge_speed, pick_device, say, tell

from spec_cli import at_least, command, make_parser
from spec_decode import Cell, measure_all
from spec_harness.arms import Method, Task, draft_model
from spec_harness.cells import find_or_measure, pooled, ratio
from spec_harness.costs import costs_at, draft_reads, inside_limit, measure_costs
from spec_harness.essay import essay_at_once
from spec_harness.options import add_prompt_options, add_task_options, chosen_prompts, fill_pair, make_task, open_run
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
from spec_models.masked import guesses_at_once
from spec_models.pairs import load_pair

METHODS, OVERLAPS = ("pearl", "ssd"), ("none", "process", "device")
AT_ONCE, BY_TURNS = ", at once", ", by turns"  # of two processes, one thread each
VERDICTS = {
    "faster": "pays",
    "slower": "does not pay",
    "noise": "makes no difference beyond the noise",
    "few": "was measured in too few turns to say",
}


# ------------------------------------------------------------------------------------------------------------- methods


class Arm(NamedTuple):
    """One way to decode a text, and one row of it."""

    scheme: str  # "chain", the ordinary one, or one of METHODS
    draft: str  # its name
    further: bool = False  # a draft of --also, which the row's name then says
    where: str = ""  # AT_ONCE or BY_TURNS, the draft in a process of its own; else both sides take turns in this one

    @property
    def name(self) -> str:
        return self.scheme + (f", {self.draft}" if self.further else "") + self.where

    @property
    def here(self) -> Arm:
        return self._replace(where="")


def arms_of(args, drafts: list[Loaded]) -> list[Arm]:
    """Of each draft the chain and each scheme, and the schemes in two processes. SSD is left out for a draft that makes all
    guesses in one pass, which reads no guess of its own."""
    found = []
    for draft in drafts:
        schemes = [name for name in args.method if name != "ssd" or not guesses_at_once(draft.model)]
        places = ["", AT_ONCE, BY_TURNS] if args.overlap != "none" else [""]
        kinds = [("chain", ""), *((scheme, where) for where in places for scheme in schemes)]
        found += [Arm(scheme, draft.name, draft is not drafts[0], where) for scheme, where in kinds]
    return found


def method_of(args, scheme: str, task: Task, draft, costs: dict) -> Method:
    """With both sides taking turns in this process."""
    if scheme == "chain":
        return draft_model(task, draft, args.k)
    if scheme == "ssd":
        fans = [args.fan] * (args.k + 1)
        return Method(
            ForeseeingDrafter(draft, vocabulary_rows(task.target), fans, reach=task.draft_limit), FixedK(args.k)
        )
    g = args.ahead or balanced_g(costs["c"], measured_v(costs), MOST_AHEAD)
    return Method(Ahead(draft_model(task, draft, g).drafter, g, task.draft_limit), FixedK(g), decode=pearl_loop)


# ------------------------------------------------------------------------------------------------------------- the run


class Side(NamedTuple):
    """The draft's process of one scheme, and what passes cost beside it."""

    process: DraftProcess
    beside: dict


class Text(NamedTuple):
    """A text with one draft."""

    task: Task
    draft: Loaded
    costs: dict


def measure_text(texts: dict[str, Text], arms: list[Arm], args, others: dict[Arm, Side]) -> dict[str, dict]:
    """The rows of one text, all arms in the same turns. `texts` by the draft's name, `others` by the arm's `here`. Raises
    Mismatch."""
    cells, methods = {}, {}
    for arm in arms:
        task, draft, costs = texts[arm.draft]
        if arm.where:
            process, beside = others[arm.here]
            pass_s = statistics.median(beside["draft_beside"])
            size, by_turns = methods[arm.here.name].k, arm.where == BY_TURNS
            methods[arm.name] = process.method(arm.scheme, size, by_turns, task.draft_limit, pass_s)
        else:
            methods[arm.name] = method_of(args, arm.scheme, task, draft.model, costs)
        cells[arm.name] = Cell(task, methods[arm.name])
    rows = measure_all(cells, args)
    found = {}
    for arm in arms:
        row, here, costs = rows[arm.name], rows[arm.here.name], texts[arm.draft].costs
        if arm.scheme == "ssd":
            row.update(foreseen(methods[arm.name].drafter))
        foresee_s = here.get("foresee_s", 0.0) / here["target_passes"]
        found[arm.name] = (
            row_apart(arm.scheme, row, costs, others[arm.here].beside, arm.where == AT_ONCE, foresee_s)
            if arm.where
            else row_here(arm.scheme, row, costs)
        )
    return found


def foreseen(drafter) -> dict:
    """Of its last run, and so of every one: the share of outcomes that were foreseen; null where none was to be."""
    return {"hit_rate": ratio(getattr(drafter, "hits", 0), getattr(drafter, "asked", 0))}


def measure_beside(file: ResultFile, other: DraftProcess, method: str, tasks: list[Task], args) -> dict:
    """The row of what passes cost on one thread each, alone and while the other side runs; at the longest context."""
    context = max(task.context for task in tasks)
    sizes = sorted({1, args.k + 1, args.ahead or MOST_AHEAD})
    where = {"part": "costs beside", "method": method, "at": context}
    context, sizes = inside_limit(context, sizes, tasks[0].limit, draft_reads(None))
    return file.find(**where) or file.add({**where, **other.costs(tasks[0].target, context, sizes)})


@contextlib.contextmanager
def sides(args, arms: list[Arm], asked: dict[str, str], tasks: list[Task]):
    """The draft's process or thread of every arm that wants one, by the arm's `here`. `asked`: how each draft was asked for.
    Raises SideLost."""
    wanted = dict.fromkeys(arm.here for arm in arms if arm.where)
    if wanted:
        say("a side of its own for the draft ...")
    sizes = Sizes(max(task.prompt.shape[1] + task.n_tokens for task in tasks), max(args.k, args.ahead or MOST_AHEAD), 0)
    start = draft_process if args.overlap == "process" else draft_thread
    device, dtype = args.draft_device or str(tasks[0].device), tasks[0].target.dtype
    with contextlib.ExitStack() as stack:
        found = {}
        for arm in wanted:
            mine = argparse.Namespace(**{**vars(args), "draft": asked[arm.draft], "method": arm.scheme})
            build = functools.partial(draft_side, mine, device, dtype)
            found[arm] = stack.enter_context(start(build, sizes, not args.unpinned))
        yield found


def run(args, target: Loaded, drafts: list[Loaded], texts: list[tuple[str, str]], file: ResultFile) -> list[dict]:
    """Measure what the file lacks. Returns one row a text and method. Raises Mismatch, SideLost."""
    tasks = {name: [make_task(args, target, draft, text) for draft in drafts] for name, text in texts}
    arms, every, rows = arms_of(args, drafts), [of[0] for of in tasks.values()], []
    asked = dict(zip((draft.name for draft in drafts), [args.draft, *args.also], strict=True))
    say("what passes cost ...")
    sizes = sorted({args.k, args.k // 2, args.ahead or MOST_AHEAD})
    costs = [measure_costs(file, every, draft.model, sizes, draft=draft.name) for draft in drafts]
    with sides(args, arms, asked, every) as processes:
        others = {
            arm: Side(other, measure_beside(file, other, arm.name, every, args)) for arm, other in processes.items()
        }
        for name in progress(list(tasks), "texts"):
            here = zip(tasks[name], drafts, costs, strict=True)
            mine = {draft.name: Text(task, draft, costs_at(found, task.context)) for task, draft, found in here}
            measured = functools.cache(functools.partial(measure_text, mine, arms, args, others))
            for arm in arms:
                where = {"part": "overlap", "text": name, "method": arm.name}
                work = lambda arm=arm, measured=measured: measured()[arm.name]  # noqa: E731
                rows.append(find_or_measure(file, tasks[name][0], where, work))
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
    at_once = [name.removesuffix(AT_ONCE) for name in found if name.endswith(AT_ONCE)]
    return {
        "methods": found,
        "at_once_over": [
            {"method": name + AT_ONCE, "over": other, **both}
            for name in at_once
            for other in (name, name + BY_TURNS)
            if (both := over(rows, name + AT_ONCE, other))
        ],
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
    for both in summary["at_once_over"]:
        interval = interval_text(both["speedup_low"], both["speedup_high"])
        lines.append(
            f"{both['method']}, over {both['over']}: {both['speedup']:.2f}x{f' ({interval})' if interval else ''}, {VERDICTS[judge_speed(both)]}."
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
        "--method", nargs="+", choices=METHODS, default=list(METHODS),
        help="pearl: guesses run ahead of what is judged; ssd: answers to foreseen outcomes",
    )  # fmt: skip
    parser.add_argument(
        "--also", nargs="+", metavar="DRAFT", default=[],
        help="further drafts in the same turns; one that makes all guesses in one pass leaves little to hide",
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


def load_drafts(args, device, dtype) -> tuple[Loaded, list[Loaded]]:
    """The target and the drafts of the run. Raises UserError."""
    fill_pair(args)
    target, drafts = load_pair(args, device, dtype, [args.draft, *args.also])
    for draft in drafts:
        check_draft(args, draft)
    return target, drafts


def check_draft(args, draft: Loaded) -> None:
    """Whether this draft can run ahead by itself. Raises UserError."""
    if getattr(draft.model, "reads_states", False):
        raise UserError(
            f"--draft {draft.name}: reads the target's states, which are not there while it checks; choose another draft"
        )
    if "ssd" in args.method and (args.method == ["ssd"] or not guesses_at_once(draft.model)):
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
    args.method = [method for method in METHODS if method in args.method]
    with open_run(args, "spec_overlap", texts, load_drafts) as (file, target, drafts):
        rows = run(args, target, drafts, texts, file)
        summary = summarise(rows)
        file.finish(summary)
    tell(f"{args.n_tokens} tokens\n\n{table(rows, args.wide)}\n\n{verdict(summary)}\nresults in {args.results}")
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
