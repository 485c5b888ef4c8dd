"""One prompt, decoded plainly and speculatively: what it does, what it cost, and whether the text is the same.

Claim: speculative greedy decoding writes, token for token, what the target alone would have written, in fewer passes of
the target. Every run asserts it, and a mismatch fails the run (exit 1). The loop itself is in spec_loop.py.

    python spec_decode.py                    # the embedded pair, k=5, 64 tokens of open prose
    python spec_decode.py --show             # and the text, round by round
    python spec_decode.py --tree 8           # the draft guesses a tree of 8 tokens instead of a chain
    python spec_decode.py --self-draft       # sanity: a model that drafts for itself is accepted 100 %
    python spec_decode.py --vs-transformers  # and `generate`, plain and assisted, as arms of the same run
"""

from __future__ import annotations

import functools
import statistics
import sys
from typing import NamedTuple

from spec_common import ClaimFailed, UserError, dtype_name, interleave, say, tell

import torch

from spec_cli import at_least, command, make_parser
from spec_counts import Decoded
from spec_harness.arms import Method, Run, Task, draft_model, run_baseline, run_speculative
from spec_harness.cells import accounted, closed_form, find_or_measure, ratio, timing, where_time_went
from spec_harness.costs import costs_at, measure_costs
from spec_harness.essay import essay_decode, is_essay_pair
from spec_harness.near_ties import allowed_units
from spec_harness.options import (
    add_policy_options,
    add_prompt_options,
    add_task_options,
    check_policy,
    chosen_prompts,
    make_task,
    open_run,
    policy_of,
)
from spec_harness.reference import reference_arms
from spec_harness.tables import against_transformers, decode_verdict, shown_rounds, turns_of, what_it_does
from spec_harness.theory import measured_v
from spec_loop import forward, prefill
from spec_methods.trees import TreeDrafter, check_tree
from spec_models.checks import vocabulary_rows
from spec_models.pairs import PAIRS

HALF = (torch.float16, torch.bfloat16)
BLOCK = 6  # rows of the pass that shows how much of a near-tie is the rows' own noise


# ---------------------------------------------------------------------------------------------------------- exactness


class Mismatch(ClaimFailed):
    """A sample that is not the target's text. `report` says where, both ids, and how close the call was."""

    def __init__(self, report: dict):
        super().__init__(
            f"not the target's own text: at token {report['index']} {report['arm']} wrote {report['got']}, the target "
            f"alone {report['expected']}; {report}"
        )
        self.report = report


@torch.inference_mode()
def forced_row(task: Task, tokens: list[int], rows: int = 1) -> torch.Tensor:
    """The target's float32 logits (vocabulary,) after the prompt and `tokens`, from a pass over the last `rows` tokens."""
    ids = torch.cat([task.prompt, task.prompt.new_tensor([tokens], dtype=torch.long)], dim=1)
    rows = min(rows, ids.shape[1])
    state = prefill(task.target, ids[:, : ids.shape[1] - rows + 1], 0)
    return forward(task.target, ids[:, -rows:], state.cache).logits[0, -1].float()


def below_best(task: Task, row: torch.Tensor, tokens: list[int]) -> tuple[float, float]:
    """How far the worst of `tokens` is below the best logit of the row, and how far rounding may put it there: in half
    precision `allowed_units` of this model and prompt, a unit being the last place of the best logit; in any other nothing."""
    best, noise = float(row.max()), 0.0
    if task.target.dtype in HALF:
        units = allowed_units(task.target, tuple(task.prompt[0].tolist()), task.n_tokens)
        noise = units * torch.finfo(task.target.dtype).eps * abs(best)
    return best - float(row[tokens].min()), noise


def is_whole(task: Task, tokens: list[int]) -> bool:
    """Whether a text ends where one may: after n tokens, or with its first end token."""
    if not tokens or task.ends & set(tokens[:-1]):
        return False
    return len(tokens) == task.n_tokens or (len(tokens) < task.n_tokens and tokens[-1] in task.ends)


def check_exact(task: Task, arm: str, expected: list[int], got: list[int], allow_near_ties: bool) -> list[dict]:
    """[] where `got` is `expected`, the target's own text. Raises Mismatch, or gives what it excused.

    In float32 nothing is excused. In half precision a text may part from the other at a near-tie: from there on every
    token of `got` is looked at by itself, after its own prefix, in a pass over one token as in plain decoding, and has to
    be within rounding of the target's best; each one that is not the best is a tie more. It has to end where a text may.
    """
    if got == expected:
        return []
    pairs = zip(expected, got, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
    wanted, written = (tokens[first] if first < len(tokens) else None for tokens in (expected, got))
    ties = []
    for index in range(first, max(len(got), first + 1)):
        row = forced_row(task, got[:index])
        contenders = [wanted, written] if index == first else [got[index]]
        report = {"arm": arm, "index": index, "dtype": dtype_name(task.target.dtype), "expected": wanted if index == first else int(row.argmax()),
                  "got": contenders[-1], "below_best": None, "near_tie": False}  # fmt: skip
        if None not in contenders:
            report["below_best"], report["allowed"] = below_best(task, row, contenders)
            within = report["below_best"] <= report["allowed"]
            report["near_tie"] = within and task.target.dtype in HALF and is_whole(task, got)
        if not report["near_tie"] or not allow_near_ties:
            noise = (row - forced_row(task, got[:index], BLOCK)).abs().max()
            raise Mismatch(report | {"row_noise": float(noise), "top2_gap": float(row.topk(2).values.diff().abs())})
        ties += [report] if report["below_best"] > 0 or index == first else []
    return ties


def check_self_draft(task: Task, done: Decoded, name: str) -> int:
    """Two identical models agree on every guess. In half precision a guess may be turned down where the call is within
    rounding; each one is looked at. Returns how many were. Raises ClaimFailed."""
    turned_down, text = 0, []
    for one in done.rounds:
        written = done.tokens[len(text) : len(text) + one.emitted]
        if one.judged > len(one.path) and len(written) > len(one.path):
            guess = one.guesses[len(one.path)]
            far, noise = below_best(task, forced_row(task, text + written[: len(one.path)]), [guess])
            if far > noise:
                raise ClaimFailed(f"{name}: a model drafting for itself had a guess rejected: its cache is wrong")
            turned_down += 1
        text += written
    return turned_down


# ------------------------------------------------------------------------------------------------------------ the row


def counts(done: Decoded, k: int) -> dict:
    """The counters of a run, in the field's words; null where there was nothing to count."""
    proposed, accepted, rounds = sum(map(len, done.proposals)), sum(done.accepted), len(done.rounds)
    reached = [sum(kept >= i for kept in done.accepted) for i in range(1, k + 1)]
    lost = [sum(len(one.path) == i - 1 and one.judged == i for one in done.rounds) for i in range(1, k + 1)]
    return {
        "emitted": len(done.tokens),
        "target_passes": done.target_passes,
        "draft_passes": done.draft_passes,
        "draft_tokens_read": done.draft_tokens_read,
        "proposed": proposed,
        "accepted": accepted,
        "discarded": proposed - accepted,
        "acceptance_rate": ratio(accepted, proposed),
        "rejections": sum(done.rejected),
        "alpha": ratio(accepted, sum(one.judged for one in done.rounds)),
        "block_efficiency": ratio(len(done.tokens), rounds),
        "acceptance_per_position": [ratio(count, rounds) for count in reached],
        "acceptance_per_position_given_the_last": [ratio(a, a + b) for a, b in zip(reached, lost, strict=True)],
        "accepted_lengths": done.accepted,
        "judged_lengths": [one.judged for one in done.rounds],
        "emitted_lengths": done.emitted,
        "proposed_lengths": [len(guesses) for guesses in done.proposals],
        "drafting_lengths": [one.draft_passes for one in done.rounds],
    }


class Checked:
    """The texts of a cell against the target's own, each that differs looked at once; what was excused, of every arm."""

    def __init__(self, task: Task, expected: list[int], allow_near_ties: bool):
        self.task, self.expected, self.allow_near_ties = task, expected, allow_near_ties
        self.seen: dict[tuple, list] = {}
        self.near_ties: list[dict] = []

    def check(self, arm: str, done: Decoded) -> None:
        """Raises Mismatch."""
        key = tuple(done.tokens)
        if key not in self.seen:
            self.seen[key] = check_exact(self.task, arm, self.expected, done.tokens, self.allow_near_ties)
        self.near_ties += [{**tie, "arm": arm} for tie in self.seen[key]]


def counted_row(task: Task, method: Method, plain: Run, fast: Run, costs: dict | None) -> dict:
    """What watched runs say: the counters, where time went, and the speedup that these come to at the measured costs."""
    row = {"k": method.k, "tree_nodes": getattr(method.drafter, "nodes", None), "loop": task.loop, "n_tokens": task.n_tokens,
           "prompt_tokens": task.prompt.shape[1], **counts(fast.done, method.k), **where_time_went(plain, fast)}  # fmt: skip
    if costs:
        row["cost_coefficient"], row["predicted_leviathan"] = costs["c"], closed_form(task, method, row["alpha"], costs)
        row["predicted_costs"] = accounted(row, costs)
    return row


class Cell(NamedTuple):
    """One way to write a text, to be measured: by what method, at what costs; `arms`: name -> function that gives a Run,
    further ways to write the same tokens that its row is compared with."""

    task: Task
    method: Method
    costs: dict | None = None
    arms: dict = {}


def measure(task: Task, method: Method, args, costs: dict | None = None, more_arms: dict | None = None) -> dict:
    """The row of one cell. Raises Mismatch."""
    return measure_all({"speculative": Cell(task, method, costs, more_arms or {})}, args)["speculative"]


def measure_all(cells: dict[str, Cell], args) -> dict[str, dict]:
    """Measure several methods on one text in the same turns, so that they can be ranked against one another: counters first,
    from watched runs, then baseline, baseline again and each method in turns, every sample checked. Raises Mismatch."""
    first = next(iter(cells.values())).task
    expected = run_baseline(first).done.tokens  # this and the next warm up the watched runs; `interleave` the timed ones
    checked = {name: Checked(cell.task, expected, args.allow_near_ties) for name, cell in cells.items()}
    for name, cell in cells.items():
        checked[name].check(f"{name}, first", run_speculative(cell.task, cell.method).done)
    plain = run_baseline(first, watched=True)
    fast = {name: run_speculative(cell.task, cell.method, watched=True) for name, cell in cells.items()}
    arms = {"baseline": lambda: run_baseline(first)}
    for name, cell in cells.items():
        arms |= {name: functools.partial(run_speculative, cell.task, cell.method)}
    arms["baseline_again"] = arms["baseline"]
    samples = interleave(arms | {name: arm for cell in cells.values() for name, arm in cell.arms.items()}, args.repeats, args.warmup)
    return {name: one_row(name, cell, plain, fast[name], samples, checked[name]) for name, cell in cells.items()}


def one_row(name: str, cell: Cell, plain: Run, fast: Run, samples: dict[str, list[Run]], checked: Checked) -> dict:
    """The row of one of the methods, from the watched runs and the timed ones, all of them checked. Raises Mismatch."""
    checked.check("baseline, watched", plain.done)
    checked.check(f"{name}, watched", fast.done)
    row = counted_row(cell.task, cell.method, plain, fast, cell.costs)
    mine = {"baseline": samples["baseline"], "speculative": samples[name], "baseline_again": samples["baseline_again"]}
    mine |= {arm: samples[arm] for arm in cell.arms}
    for arm, runs in mine.items():
        for run in runs:
            checked.check(name if arm == "speculative" else arm, run.done)
    row.update(timing(mine, len(checked.expected)), exact=not checked.near_ties, near_ties=checked.near_ties, error=None)
    row["tokens_checked"] = sum(len(run.done.tokens) for runs in mine.values() for run in runs)
    if cell.costs:
        row["prediction_error"] = row["predicted_costs"] - row["speedup"]
    paths = [one.path for one in fast.done.rounds]
    return {**row, "tokens": fast.done.tokens, "proposals": fast.done.proposals, "paths": paths}


# ------------------------------------------------------------------------------------------------------------- the run


def method_of(args, task: Task, draft, costs: dict) -> Method:
    """The draft model's chain or tree, under the policy asked for."""
    method = draft_model(task, draft, args.k)
    if args.tree:
        drafter = TreeDrafter(draft, vocabulary_rows(task.target), args.tree, costs["c"] or 0.0, measured_v(costs))
        return Method(drafter, method.policy, method.rule)
    return Method(method.drafter, policy_of(args, args.k, costs), method.rule)


def run(args, target, draft, prompts: list[tuple[str, str]], file) -> list[dict]:
    """Measure every prompt not yet in the file. Returns their rows."""
    rows, tasks = [], {name: make_task(args, target, draft, text) for name, text in prompts}
    every = f"{args.n_tokens} tokens, k={args.k}, {turns_of(args.repeats)} of every arm"
    say(f"what passes cost, then {', '.join(tasks)}: {every} ...")
    costs = measure_costs(file, list(tasks.values()), draft.model, sorted({args.k, args.tree, 1}))
    for name, task in tasks.items():
        here = costs_at(costs, task.context)
        method = method_of(args, task, draft.model, here)
        arms = reference_arms(task, target, draft, args.k) if args.vs_transformers else {}
        work = functools.partial(measure, task, method, args, here, arms)
        rows.append(find_or_measure(file, task, {"part": "decode", "workload": name}, work))
        own = args.self_draft and not rows[-1]["error"]
        if own and (close := check_self_draft(task, run_speculative(task, method).done, name)):
            say(f"{name}: {close} of the model's own guesses were rejected, each within rounding of its half precision")
    return rows


def print_row(row: dict, args, tokenizer) -> None:
    """One prompt's tables, its text if asked for, and the verdict."""
    if row["error"]:
        tell(f"\n{row['workload']}: not measured, {row['error']}")
        return
    published = essay_decode(row) if is_essay_pair(args) else None
    tell(f"\n{row['workload']}, {row['emitted']} tokens\n\n{what_it_does(row, published)}\n")
    if table := against_transformers(row):
        tell(f"whole calls, prefill included\n\n{table}\n")
    if args.show:
        print(shown_rounds(tokenizer, row, colour=sys.stdout.isatty()) + "\n")
    tell(decode_verdict(row))


def parse_args(argv):
    parser = make_parser(__doc__, "spec_decode", resume=True)
    add_task_options(parser)
    add_prompt_options(parser)
    add_policy_options(parser)
    parser.add_argument("-k", "--k", type=at_least(0, 1024), default=5, help="guesses a round; 0 is plain decoding")
    parser.add_argument("--tree", type=at_least(0, 64), default=0, metavar="NODES", help="guess a tree of up to NODES tokens, -k deep; 0: a chain")  # fmt: skip
    parser.add_argument("--self-draft", action="store_true", help="the target drafts for itself: all must be accepted")
    parser.add_argument("--show", action="store_true", help="print the text round by round")
    parser.add_argument("--vs-transformers", action="store_true", help="add `generate`, greedy and assisted, same k")
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    check_policy(args)
    if args.tree and (args.loop != "lean" or args.k_policy != "fixed"):
        raise UserError("--tree: has its own rule for how far to look; leave --loop and --k-policy out")
    if args.tree and args.k == 0:
        raise UserError("--tree: needs a depth; give -k of 1 or more")
    prompts = chosen_prompts(args)
    if args.self_draft:
        args.target = PAIRS[args.pair][0] if args.target is None else args.target
        args.draft, args.draft_revision = args.target, args.revision
    with open_run(args, "spec_decode", prompts) as (file, target, (draft,)):
        for one in (target, draft) if args.tree else ():
            check_tree(one)
        rows = run(args, target, draft, prompts, file)
        for row in rows:
            print_row(row, args, target.tokenizer)
        good = [row["speedup"] for row in rows if not row["error"]]
        file.finish({"speedup": statistics.median(good) if good else None})
    tell(f"results in {args.results}")
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
