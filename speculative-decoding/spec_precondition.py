"""What a pass over n tokens costs against a pass over one: the discount that speculative decoding spends.

Claim: on this hardware, checking a few tokens in one pass costs about what producing one costs. If V(n), the middle
column, stays near 1.0x as tokens rise, speculation can pay here. If it climbs steeply it cannot, and no tuning fixes that.

    python spec_precondition.py                                       # the embedded target
    python spec_precondition.py --model <any-causal-lm> --device mps --dtype float16
    python spec_precondition.py --model qwen2.5-7b --draft qwen2.5-0.5b --random-weights   # before downloading 15 GB
"""

from __future__ import annotations

import statistics

import torch

from spec_common import (
    UserError,
    at_least,
    command,
    dtype_name,
    fraction,
    make_parser,
    ratio_summary,
    say,
    set_up,
    whole_list,
)
from spec_harness.costs import (
    DRAFT_PASSES,
    costs_of,
    device_limits,
    floor_s,
    implied,
    linear_seconds,
    pass_seconds,
    random_ids,
)
from spec_harness.essay import FIGURES, essay_cost
from spec_harness.options import add_draft_options
from spec_harness.results import ResultFile, environment, settings
from spec_harness.tables import fixed, markdown_table
from spec_harness.theory import best_k, ceiling, interpolated
from spec_models.checks import Loaded, check_room
from spec_models.load import EMBEDDED, SHIPPED_CONFIGS, linear_kind, load, load_random
from spec_models.pairs import form, in_form, load_draft, pack

TOKENS = (1, 2, 4, 8, 12, 16)
NEARLY_FREE = 1.25  # the essay calls 1.15x a ride-along and 1.71x "running out"; between them, nearer the first


def make_rows(seconds: dict, failed: dict, costs: dict, limit: dict, sizes: list[int]) -> list[dict]:
    rows = []
    for n in sizes:
        floor = floor_s(n, limit)
        row = {"tokens": n, "floor_ms": 1000 * floor, "error": failed.get(n)}
        if n in seconds:
            interval = costs["v_intervals"][n]
            row.update(v=interval["median"], v_low=interval["low"], v_high=interval["high"],
                       pass_ms=1000 * statistics.median(seconds[n]), seconds=seconds[n])  # fmt: skip
        if ("plain", n) in seconds:
            share = ratio_summary(seconds[n], seconds["plain", n])
            row.update(plain_ms=1000 * statistics.median(seconds["plain", n]), plain_seconds=seconds["plain", n],
                       of_plain=share["median"], of_plain_low=share["low"], of_plain_high=share["high"])  # fmt: skip
        rows.append(row)
    return rows


def free_up_to(rows: list[dict]) -> int:
    """The last n, reading upwards from 1, whose pass costs no more than NEARLY_FREE."""
    free = 1
    for row in rows:
        if row.get("v") is None or row["v"] > NEARLY_FREE:
            break
        free = row["tokens"]
    return free


def run(
    target, draft, ids: torch.Tensor, context: int, sizes: list[int], repeats: int, warmup: int, plain=None
) -> tuple[list[dict], dict]:
    """Rows of the cost curve, and the summary: c, the device's limits and what they imply."""
    seconds, failed = pass_seconds(target, draft, ids, context, sizes, repeats, warmup, plain)
    costs, limits = costs_of(seconds), device_limits(target.device, target.dtype)
    limit = implied(target, limits)
    rows = make_rows(seconds, failed, costs, limit, sizes)
    for row in rows:
        if not row["error"]:
            row["linears_ms"] = 1000 * statistics.median(linear_seconds(target, row["tokens"], repeats))
    summary = {
        "c": costs["c"], "c_interval": costs["c_interval"], "draft_pass_ms": 1000 * statistics.median(seconds["draft"]) if draft else None,
        "draft_seconds": seconds.get("draft"), "nearly_free_up_to": free_up_to(rows), **limits, **limit,
        "bandwidth_share": limit["read_s"] / costs["target_pass_s"],
    }  # fmt: skip
    return rows, summary


def advise(rows: list[dict], c: float, acceptance: float) -> dict:
    v = {row["tokens"]: row["v"] for row in rows if row.get("v") is not None}
    k, speedup = best_k(acceptance, c, interpolated(v), max(v) - 1)
    return {"best_k": k, "predicted_speedup": speedup, "assumed_acceptance": acceptance, "c_used": c}


def verdict(rows: list[dict], summary: dict, measured_c: bool) -> str:
    """The words under the table."""
    free, advice = summary["nearly_free_up_to"], summary["advice"]
    lines = [
        f"limits: {summary['read_bytes_per_s'] / 1e9:.1f} GB/s read, {summary['operations_per_s'] / 1e9:.0f} GFLOP/s. A pass reads "
        f"{summary['read_bytes'] / 1e6:.0f} MB, so it takes {1000 * summary['read_s']:.1f} ms or more; the measured one reaches "
        f"{100 * summary['bandwidth_share']:.0f} % of that bandwidth. Checking could be free up to n* = {summary['ridge_tokens']:.1f} tokens.",
        f"checking is nearly free (V <= {NEARLY_FREE}) up to {free} tokens."
        if free > 1
        else "checking is not nearly free for any block here.",
    ]
    source = "measured" if measured_c else "the essay's; measure yours with --draft"
    given = (
        f"if c is {advice['c_used']:.2f} ({source}) and acceptance {100 * advice['assumed_acceptance']:.0f} % "
        "(--acceptance; the essay's unless given, yours comes from spec_bench.py)"
    )
    if advice["best_k"]:
        top = ceiling(advice["assumed_acceptance"])
        bound = f" (no k writes more than {top:.1f} tokens a pass at that acceptance)" if top else ""
        lines.append(
            f"{given}, k = {advice['best_k']} would be best: {advice['predicted_speedup']:.2f}x predicted{bound}."
        )
    else:
        lines.append(f"{given}, no k pays: do not speculate here.")
    return "\n".join(lines)


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
        interval = row["error"] or f"{row['v_low']:.2f} to {row['v_high']:.2f}"
        shown.append({**row, "interval": interval, "essay": essay_cost(row["tokens"])})
    return markdown_table(shown, columns)


def load_models(args, device, dtype) -> tuple[Loaded, Loaded | None]:
    """The model, and the draft if one is asked for; with --random-weights from their shapes alone. Raises UserError."""
    kind = linear_kind(args, device, dtype)
    if args.random_weights:
        both = [load_random(name, flag, device, dtype, args.revision, args.trust_remote_code)
                for name, flag in ((args.model, "--model"), (args.draft, "--draft")) if name is not None]  # fmt: skip
    else:
        both = [load(args.model, "--model", device, dtype, args.revision, args.trust_remote_code)]
        both += (
            [
                load_draft(
                    both[0],
                    args.draft,
                    device,
                    dtype,
                    None,
                    args.trust_remote_code,
                    allow=args.allow_tokenizer_differences,
                )
            ]
            if args.draft is not None
            else []
        )
    model, drafts = both[0], [in_form(args, both[0], one, args.draft_vocab) for one in both[1:]]
    pack(args, model, drafts, kind)
    for one in [model, *drafts]:
        check_room(one, args.context, max(*args.tokens, DRAFT_PASSES), "--context or --tokens")
    return model, drafts[0] if drafts else None


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
    parser.add_argument(
        "--acceptance",
        type=fraction,
        default=FIGURES["decode_k5_prose"]["acceptance"],
        help="acceptance for the verdict; the essay's",
    )
    parser.add_argument(
        "--random-weights",
        action="store_true",
        help="a model of that shape with random weights: nothing is downloaded but its config",
    )
    parser.add_argument(
        "--vs-plain", action="store_true", help="time the model with plain nn.Linear layers in the same turns (CPU)"
    )
    parser.set_defaults(repeats=20, warmup=3)  # a pass is short: more turns, a steadier median
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    device, dtype = set_up(args)
    args.tokens = sorted({1, *args.tokens})  # every cost is told against one token
    plain = None
    if args.vs_plain:
        if device.type != "cpu" or args.random_weights:
            raise UserError("--vs-plain: compares linear layers on a CPU with real weights; leave it out")
        plain = load(args.model, "--model", device, dtype, args.revision, args.trust_remote_code).model
    model, draft = load_models(args, device, dtype)
    models = [one.model for one in (model, draft) if one]
    print(
        f"{model.name}{f' + {form(draft)}' if draft else ''}, {device}, {dtype_name(dtype)}, context {args.context}, linear layers: {model.about['cpu_linear']}\n"
    )
    config = settings(args, model=model.about, draft_model=draft and draft.about)
    with ResultFile(args.results, "spec_precondition", config, environment(device, dtype, model.model), None) as file:
        say(f"{args.repeats} turns of passes over {', '.join(map(str, args.tokens))} tokens ...")
        ids = random_ids(models, args.context + max(*args.tokens, DRAFT_PASSES))
        rows, summary = run(
            model.model, draft and draft.model, ids, args.context, args.tokens, args.repeats, args.warmup, plain
        )
        summary["advice"] = advise(
            rows, FIGURES["drafts"][0]["cost_coefficient"] if draft is None else summary["c"], args.acceptance
        )
        for row in rows:
            file.add(row)
        file.finish(summary)
    essay = args.model == FIGURES["setup"]["target"] and not args.random_weights
    print(cost_table(rows, essay))
    if draft:
        print(
            f"\none draft pass {summary['draft_pass_ms']:.2f} ms, c = {summary['c']:.3f} ({summary['c_interval']['low']:.3f} to {summary['c_interval']['high']:.3f})"
        )
    print(f"\n{verdict(rows, summary, draft is not None)}\nresults in {args.results}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
