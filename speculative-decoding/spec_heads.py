"""Drafting architectures side by side: on one target, the same texts, one clock.

Claim: what an architecture is worth is what a round of its guesses costs against the tokens that a round then writes, and
two of them can be told apart only where target, texts, machine and turns are the same. What a file holds decides how it
guesses: a draft model (a pass a guess), a draft that makes all guesses in one pass, a draft that reads the target's states
(EAGLE), heads on the target's last state (Medusa); with --tree a tree of guesses too, where its kind can. Copying from the
text needs no file.

    python spec_heads.py                                                  # the drafts that ship, and copying
    python spec_heads.py --drafts draft-s e/eagle.safetensors m/medusa.safetensors --tree 8
    python spec_heads.py --drafts draft-s --copy none --prompt-file mine.jsonl --chat
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from spec_common import UserError, judge_speed, say, tell

from spec_cli import at_least, command, make_parser
from spec_decode import Cell, measure_all
from spec_drafts import default_drafts, load_drafts
from spec_harness.arms import Method, Task, draft_model
from spec_harness.cells import find_or_measure, pooled, ratio
from spec_harness.costs import costs_at, measure_costs
from spec_harness.options import add_decoding_options, add_prompt_options, chosen_prompts, make_task, open_run
from spec_harness.results import ResultFile
from spec_harness.tables import fixed, markdown_table, progress, shown_interval, speed_words
from spec_harness.theory import measured_v
from spec_methods.lookup import HybridDrafter, LookupDrafter
from spec_methods.medusa import MedusaTreeDrafter
from spec_methods.policy import FixedK
from spec_methods.suffix import SuffixDrafter
from spec_methods.trees import TreeDrafter, check_tree
from spec_models.checks import Loaded, vocabulary_rows
from spec_models.eagle import Eagle
from spec_models.find import EMBEDDED
from spec_models.masked import guesses_at_once
from spec_models.medusa import Medusa
from spec_models.pairs import PAIRS, SHIPPED_DRAFTS
from workloads import WORKLOADS

COPIES = {"lookup": LookupDrafter, "suffix": SuffixDrafter}
HYBRID = "hybrid"  # look-up, and where nothing matches the first draft
COPY_K = 10  # guesses of a round that are copied, which cost no pass


# ------------------------------------------------------------------------------------------------------------- methods


class Entrant(NamedTuple):
    """A method that takes part: a draft's chain or tree, a copy, or both (hybrid)."""

    name: str
    draft: Loaded | None
    tree: bool = False


def entrants(args, drafts: list[Loaded]) -> list[Entrant]:
    """The methods in the order of the table. A tree is for a draft that can guess several tokens for one place."""
    found = []
    for draft in drafts:
        found.append(Entrant(draft.name, draft))
        if args.tree and not isinstance(draft.model, Eagle) and not guesses_at_once(draft.model):
            found.append(Entrant(f"{draft.name}, tree", draft, True))
    return found + [Entrant(name, drafts[0] if name == HYBRID else None) for name in args.copy]


def method_of(args, one: Entrant, task: Task, costs: dict) -> Method:
    """How it is done, at the costs of its draft. Raises UserError for a tree of heads that were never judged."""
    if one.draft is None:
        return Method(COPIES[one.name](), FixedK(COPY_K))
    draft, rows = one.draft.model, vocabulary_rows(task.target)
    chain = draft_model(task, draft, args.k)
    if one.name == HYBRID:
        return Method(HybridDrafter(LookupDrafter(), chain.drafter, args.k), FixedK(COPY_K))
    if not one.tree:
        return chain
    if not isinstance(draft, Medusa):
        return Method(TreeDrafter(draft, rows, args.tree, costs["c"] or 0.0, measured_v(costs)), FixedK(args.k))
    try:
        return Method(MedusaTreeDrafter(draft, task.target, rows, args.tree, measured_v(costs)), FixedK(args.k))
    except ValueError as error:
        raise UserError(f"--drafts {one.draft.name}: {error}, or take --tree 0") from error


# ------------------------------------------------------------------------------------------------------------- the run


def measure_text(args, tasks: dict[str, Task], methods: list[Entrant], costs: dict[str, dict]) -> dict[str, dict]:
    """The row of every method on one text, all of them in the same turns; `tasks` and `costs` by the draft's name. Raises
    Mismatch."""
    cells, first = {}, next(iter(tasks))
    for one in methods:
        name = one.draft.name if one.draft else first
        paid = costs[name] if one.draft else {**costs[name], "c": 0.0}  # no model drafts
        cells[one.name] = Cell(tasks[name], method_of(args, one, tasks[name], paid), paid)
    return measure_all(cells, args)


def run(args, target: Loaded, drafts: list[Loaded], texts: list[tuple[str, str]], file: ResultFile) -> list[dict]:
    """Measure what the file lacks. Returns one pooled row a method. Raises Mismatch."""
    tasks = {name: {draft.name: make_task(args, target, draft, text) for draft in drafts} for name, text in texts}
    say("what passes cost ...")
    sizes, methods, rows = sorted({args.k, args.k // 2, args.tree, COPY_K}), entrants(args, drafts), []
    costs = {
        draft.name: measure_costs(file, [of[draft.name] for of in tasks.values()], draft.model, sizes, draft=draft.name)
        for draft in drafts
    }
    for text in progress(list(tasks), "texts"):
        mine, first = tasks[text], tasks[text][drafts[0].name]
        here = {name: costs_at(found, first.context) for name, found in costs.items()}
        measured = functools.cache(functools.partial(measure_text, args, mine, methods, here))
        for one in methods:
            where = {"part": "heads", "text": text, "method": one.name}
            rows.append(find_or_measure(file, first, where, lambda one=one, measured=measured: measured()[one.name]))
    return [one_method(one, [row for row in rows if row["method"] == one.name]) for one in methods]


def by_depth(rows: list[dict]) -> list[float | None]:
    """Of the rounds in which a guess of that depth, from 1, was judged, the share in which one stood; null where none was."""
    rounds = [pair for row in rows for pair in zip(row["accepted_lengths"], row["judged_lengths"], strict=True)]
    deepest = max((judged for _, judged in rounds), default=0)
    return [
        ratio(sum(kept >= place for kept, _ in rounds), sum(judged >= place for _, judged in rounds))
        for place in range(1, deepest + 1)
    ]


def one_method(one: Entrant, rows: list[dict]) -> dict:
    """One method over all its texts: counts added up, the speedup as time over time, turn by turn."""
    trained = one.draft.about.get("trained", {}) if one.draft else {"parameters": 0}
    good = [row for row in rows if not row["error"]]
    found = {"method": one.name, "trained": trained.get("parameters"), "trained_tokens": trained.get("tokens"),
             "trained_minutes": trained.get("cpu_minutes"), "tree": one.tree, "error": None if good else rows[0]["error"]}  # fmt: skip
    if not good:
        return found
    rounds = sum(row["target_passes"] for row in good)
    accepted, proposed, rejected = (sum(row[count] for row in good) for count in ("accepted", "proposed", "rejections"))
    return {
        **found, **pooled(good), "proposed": proposed, "accepted": accepted, "alpha": ratio(accepted, accepted + rejected),
        "draft_ms": 1000 * sum(row["draft_s"] for row in good) / rounds, "guesses": proposed / rounds,
        "acceptance_by_depth": by_depth(good), "block_efficiency": sum(row["emitted"] for row in good) / rounds,
        "near_ties": sum(len(row["near_ties"]) for row in good),
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- tables


def shares(found: list[float | None]) -> str:
    """The first three of them; a reader sees where a method's guesses get worse."""
    return " ".join("-" if share is None else f"{share:.2f}" for share in found[:3])


COLUMNS = [
    ("method", "method", str), ("trained", "trained", lambda n: f"{n / 1e6:.1f} M" if n else "nothing"), ("draft_ms", "ms a round", fixed(1)),
    ("guesses", "guesses", fixed(1)), ("alpha", "alpha", fixed(2)), ("block_efficiency", "tokens/pass", fixed(2)), ("speedup", "speedup", fixed(2, "x")),
    ("interval", "interval", str), ("predicted_costs", "from costs", fixed(2, "x")),
]  # fmt: skip
WIDE = [
    ("acceptance_by_depth", "right at depth 1, 2, 3", shares), ("trained_tokens", "tokens seen", lambda n: f"{n / 1e6:.1f} M"),
    ("trained_minutes", "CPU minutes", fixed(0)), ("aa", "A/A", fixed(2, "x")),
]  # fmt: skip


def table(rows: list[dict], wide: bool = False) -> str:
    return markdown_table([shown_interval(row) for row in rows], COLUMNS + (WIDE if wide else []))


def verdict(rows: list[dict]) -> str:
    """Who took the least time, whether that pays, and what trees gave."""
    good = [row for row in rows if not row["error"]]
    if not good:
        return "nothing could be measured; see the errors in the result file"
    ties = sum(row["near_ties"] for row in good)
    best = max(good, key=lambda row: row["speedup"])
    exact = f"{ties} near-ties excused" if ties else "token for token the target's own text"
    lines = [
        f"every sample of every method: {exact}.",
        f"{best['method']} took the least time: {speed_words(best)}.",
    ]
    if judge_speed(best) == "slower":
        lines.append("do not speculate here: no method is faster than the target alone.")
    chains = {row["method"]: row for row in good if not row["tree"]}
    for row in good:
        if row["tree"] and (chain := chains.get(row["method"].removesuffix(", tree"))):
            lines.append(
                f"{row['method']}: {row['block_efficiency']:.2f} tokens a pass and {row['speedup']:.2f}x, its chain "
                f"{chain['block_efficiency']:.2f} and {chain['speedup']:.2f}x."
            )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- the user


def parse_args(argv):
    parser = make_parser(__doc__, "spec_heads", resume=True)
    parser.add_argument("--target", default=EMBEDDED, help="hub id, folder, .gguf file or 'smollm2'")
    parser.add_argument("--drafts", nargs="+", metavar="DRAFT", help=f"drafts by name or file, hub ids, folders; for the embedded target {' '.join(SHIPPED_DRAFTS)}")  # fmt: skip
    parser.add_argument("--copy", nargs="+", choices=(*COPIES, HYBRID, "none"), default=[*COPIES, HYBRID], help="copying from the text; hybrid: the first draft where nothing matches")  # fmt: skip
    parser.add_argument("--tree", type=at_least(0, 64), default=0, metavar="NODES", help="beside each chain a tree of up to NODES guesses, where its kind can; 0: none")  # fmt: skip
    add_decoding_options(parser)
    add_prompt_options(parser, ("all", *WORKLOADS), "all")
    parser.add_argument("-k", "--k", type=at_least(1, 1024), default=5, help="guesses a round, one after the other")
    return parser.parse_args(argv)


def check_args(args) -> None:
    """Raises UserError."""
    args.drafts = default_drafts(args, sorted(SHIPPED_DRAFTS, key=lambda name: name != PAIRS["smollm2"][1]))  # its own first
    if args.loop == "essay":
        raise UserError("--loop essay: takes a draft pass a guess, which not every method does; leave it out")
    if "none" in args.copy and len(args.copy) > 1:
        raise UserError("--copy none: goes with no other; name the ones wanted, or none")
    args.copy = [name for name in dict.fromkeys(args.copy) if name != "none"]
    args.takes_heads = True


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    check_args(args)
    texts = chosen_prompts(args)
    with open_run(args, "spec_heads", texts, load_drafts) as (file, target, drafts):
        for one in [target, *(one.draft for one in entrants(args, drafts) if one.tree)]:
            if args.tree and not isinstance(one.model, Medusa):
                check_tree(one)
        rows = run(args, target, drafts, texts, file)
        file.finish({"methods": rows})
    named = ", ".join(name for name, _ in texts)
    tell(f"{named}; {args.n_tokens} tokens of each, k = {args.k}\n\n{table(rows, args.wide)}\n\n{verdict(rows)}\nresults in {args.results}")
    return int(any(row["error"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
