"""What a pass over n tokens costs against a pass over one: the discount that speculative decoding spends.

Claim: on this hardware, checking a few tokens in one pass costs about what producing one costs. If V(n), the middle
column, stays near 1.0x as tokens rise, speculation can pay here. If it climbs steeply it cannot, and no tuning fixes that.

    python spec_precondition.py                                       # the embedded target
    python spec_precondition.py --model <any-causal-lm> --device mps --dtype float16
    python spec_precondition.py --model qwen2.5-7b --draft qwen2.5-0.5b --random-weights   # before downloading 15 GB
"""

from __future__ import annotations

import statistics
from pathlib import Path

from spec_common import UserError, interval_text, paired_ratio, say, tell

from spec_cli import at_least, command, fraction, make_parser, whole_list
from spec_harness import variants
from spec_harness.advice import ESSAY_ALPHA, advise, assumed_alpha, free_up_to, verdict
from spec_harness.carried import carried_seconds, check_layers
from spec_harness.costs import (
    costs_of,
    device_limits,
    draft_reads,
    floor_s,
    limits_of_passes,
    linear_seconds,
    pass_seconds,
    random_ids,
)
from spec_harness.essay import FIGURES, essay_cost
from spec_harness.options import add_draft_options, open_run
from spec_harness.tables import fixed, markdown_table, turns_of
from spec_models.checks import check_room
from spec_models.depth import Depth, first_layers
from spec_models.find import EMBEDDED, SHIPPED_CONFIGS
from spec_models.linear import pass_weights
from spec_models.load import linear_kind, load, load_random
from spec_models.masked import guesses_at_once
from spec_models.pairs import in_form, load_draft, pack

TOKENS = (1, 2, 4, 8, 12, 16)


def make_rows(seconds: dict, failed: dict, costs: dict, floors: dict[int, float]) -> list[dict]:
    """A row for each size of block; `floors`: its least seconds, by size."""
    rows = []
    for n, floor in floors.items():
        row = {"tokens": n, "floor_ms": 1000 * floor, "error": failed.get(n)}
        if n in seconds:
            interval = costs["v_intervals"][n]
            row.update(v=interval["median"], v_low=interval["low"], v_high=interval["high"],
                       pass_ms=1000 * statistics.median(seconds[n]), seconds=seconds[n])  # fmt: skip
        if ("plain", n) in seconds:
            share = paired_ratio(seconds[n], seconds["plain", n])
            row.update(plain_ms=1000 * statistics.median(seconds["plain", n]), plain_seconds=seconds["plain", n],
                       of_plain=share["median"], of_plain_low=share["low"], of_plain_high=share["high"])  # fmt: skip
        rows.append(row)
    return rows


def run(args, target, draft, others: dict, depth: Depth | None = None) -> tuple[list[dict], dict]:
    """Rows of the cost curve, and the summary: c, the device's limits and what they imply. With a `depth`, `target` holds
    twice its part, `others["part"]` the part, and what is told is carried on to the whole. Raises UserError."""
    models = [one for one in (target, draft) if one is not None]
    ids = random_ids(models, args.context + max(*args.tokens, draft_reads(draft)))
    seconds, failed = pass_seconds(target, draft, ids, args.context, args.tokens, args.repeats, args.warmup, others)
    raw, parts = seconds, [others["part"], target] if depth else [target]
    told = depth.carried if depth else (lambda one: one)
    seconds = carried_seconds(raw, depth) if depth else raw
    costs, limits = costs_of(seconds, draft is not None and guesses_at_once(draft)), device_limits(target.device, target.dtype)

    def weights_of(n: float) -> tuple[float, float]:
        return tuple(told(*of_parts) for of_parts in zip(*(pass_weights(one, n) for one in parts), strict=True))

    limit = limits_of_passes(weights_of, limits)
    rows = make_rows(seconds, failed, costs, {n: floor_s(n, weights_of, limits) for n in args.tokens})
    for row in rows:
        if not row["error"]:
            n = row["tokens"]
            row["linears_ms"] = 1000 * told(*(statistics.median(linear_seconds(one, n, args.repeats)) for one in parts))
            if depth:
                row.update(carried_on=depth.words, part_seconds=raw["part", n], twice_seconds=raw[n])
    summary = {
        "c": costs["c"], "c_interval": costs["c_interval"], "draft_pass_ms": 1000 * statistics.median(seconds["draft"]) if draft else None,
        "draft_seconds": seconds.get("draft"), "nearly_free_up_to": free_up_to(rows), **limits, **limit,
        "bandwidth_share": limit["read_s"] / costs["target_pass_s"],
    }  # fmt: skip
    return rows, summary


def cost_table(rows: list[dict], essay: bool) -> str:
    columns = [
        ("tokens", "tokens", str),
        ("pass_ms", "ms", fixed(1)),
        ("v", "V(n)", fixed(2, "x")),
        ("interval", "interval", str),
        ("linears_ms", "linear layers, ms", fixed(1)),
        ("floor_ms", "floor, ms", fixed(1)),
        *(
            [("plain_ms", "nn.Linear, ms", fixed(1)), ("of_plain", "of that", fixed(2, "x"))]
            if any("of_plain" in row for row in rows)
            else []
        ),
        *([("essay", "the essay's V(n)", fixed(2, "x"))] if essay else []),
    ]
    shown = []
    for row in rows:
        interval = row["error"] or interval_text(row["v_low"], row["v_high"])
        shown.append({**row, "interval": interval, "essay": essay_cost(row["tokens"])})
    return markdown_table(shown, columns)


def load_models(args, device, dtype):
    """The model, and the draft if one is asked for; with --random-weights from their shapes alone. Raises UserError."""
    kind, trust = linear_kind(args, device, dtype), args.trust_remote_code
    if args.random_weights:
        named = [(name, flag) for name, flag in ((args.model, "--model"), (args.draft, "--draft")) if name is not None]
        part = {"--model": args.layers}
        both = [load_random(name, flag, device, dtype, args.revision, trust, part.get(flag)) for name, flag in named]
    else:
        both = [load(args.model, "--model", device, dtype, args.revision, trust)]
        if args.draft is not None:
            allow = args.allow_tokenizer_differences
            both.append(load_draft(both[0], args.draft, device, dtype, None, trust, allow=allow))
    model, drafts = both[0], [in_form(args, both[0], one, args.draft_vocab) for one in both[1:]]
    args.compared = compared_forms(args, model, kind)
    pack(args, model, drafts, kind)
    for one in [model, *drafts]:
        check_room(one, args.context, max(*args.tokens, draft_reads(drafts[0].model if drafts else None)), "--context or --tokens")
    return model, drafts


def compared_forms(args, model, kind: str) -> dict:
    """The model once more in each form of a comparison that was asked for, before it is packed itself. Raises UserError."""
    compared = {}
    if args.compare_linears:
        compared["linear layers"] = variants.in_each_kind(model, args.pass_form)
    if args.compare_passes:
        compared["forms of pass"] = variants.in_each_pass(model, kind)
    return compared


def other_forms(args, model, device, dtype) -> dict:
    """The forms of the model that are timed beside it, by name. Raises UserError."""
    if args.layers:
        return {"part": first_layers(model.model, args.layers)}
    if not args.vs_plain:
        return {}
    if device.type != "cpu" or args.random_weights:
        raise UserError("--vs-plain: compares linear layers on a CPU with real weights; leave it out")
    return {"plain": load(args.model, "--model", device, dtype, args.revision, args.trust_remote_code).model}


def parse_args(argv):
    parser = make_parser(__doc__, "spec_precondition")
    parser.add_argument(
        "--model",
        default=EMBEDDED,
        help=f"hub id, folder, .gguf file or 'smollm2'; with --random-weights also {', '.join(sorted(SHIPPED_CONFIGS))}",
    )
    parser.add_argument("--draft", help="a draft, to measure c as well")
    add_draft_options(parser)
    parser.add_argument(
        "--tokens", type=whole_list(1, 4096), default=list(TOKENS), help="sizes of the block, e.g. 1,2,4,8"
    )
    parser.add_argument("--context", type=at_least(1), default=128, help="tokens in the cache before the block")
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--alpha",
        type=fraction,
        help=f"chance that a judged guess is accepted, for the verdict; left out: the essay's {ESSAY_ALPHA:.2f}",
    )
    group.add_argument(
        "--from", dest="measured", type=Path, metavar="FILE", help="take alpha from a result file of spec_bench.py"
    )
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="a model of that shape with random weights: nothing is downloaded but its config",
    )
    parser.add_argument(
        "--layers",
        type=at_least(1),
        metavar="N",
        help="with --random-weights: where the whole does not fit, measure N and 2N of its layers and carry on from them",
    )
    parser.add_argument(
        "--vs-plain", action="store_true", help="time the model with plain nn.Linear layers in the same turns (CPU)"
    )
    parser.add_argument(
        "--compare-linears",
        action="store_true",
        help="V(n) with every kind of linear layer, in turns with one another (CPU)",
    )
    parser.add_argument(
        "--compare-passes",
        action="store_true",
        help="V(n) in both forms of pass, on CUDA also captured (graph), in turns with one another",
    )
    parser.set_defaults(repeats=20, warmup=3)  # a pass is short: more turns, a steadier median
    return parser.parse_args(argv)


def print_run(args, rows: list[dict], summary: dict) -> None:
    """The tables, what a draft pass takes, the advice."""
    essay = args.model == FIGURES["setup"]["target"] and not args.random_weights
    carried = f", {summary['carried_on']}" if summary["carried_on"] else ""
    tell(f"context {args.context}{carried}\n\n{cost_table(rows, essay)}")
    for name, found in summary["compared"].items():
        tell(f"\n{name} side by side\n\n{variants.table(found)}")
        if name == "forms of pass":
            tell(f"\n{variants.launch_line(found)}")
    if summary["c"]:
        interval = interval_text(summary["c_interval"]["low"], summary["c_interval"]["high"], 3)
        ms = f"one draft pass {summary['draft_pass_ms']:.2f} ms"
        tell(f"\n{ms}, c = {summary['c']:.3f}{f' ({interval})' if interval else ''}")
    tell(f"\n{verdict(rows, summary, summary['c'] is not None)}\nresults in {args.results}")


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    args.tokens = sorted({1, *args.tokens})  # every cost is told against one token
    alpha, source = assumed_alpha(args)
    args.compared = {}
    check_layers(args)
    forms = lambda model: other_forms(args, model, model.model.device, model.model.dtype)  # noqa: E731
    with open_run(args, "spec_precondition", load=load_models, ready=forms) as (file, model, drafts, others):
        compared = args.compared
        say(f"{turns_of(args.repeats)} of passes over {', '.join(map(str, args.tokens))} tokens ...")
        draft = drafts[0] if drafts else None
        depth = Depth(args.layers, model.about["layers"]) if args.layers else None
        rows, summary = run(args, model.model, draft and draft.model, others, depth)
        summary["carried_on"] = depth and depth.words
        c = FIGURES["drafts"][0]["cost_coefficient"] if draft is None else summary["c"]
        summary["advice"] = advise(rows, c, alpha, source)
        for row in rows:
            file.add(row)
        ids = random_ids([model.model], args.context + max(args.tokens))
        summary["compared"] = {
            name: variants.measure_variants(models, ids, args.context, args.tokens, args.repeats, args.warmup)
            for name, models in compared.items()
        }
        file.finish(summary)
    print_run(args, rows, summary)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
