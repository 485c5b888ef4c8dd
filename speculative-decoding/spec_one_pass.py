"""One pass over a text answers every prefix of it at once.

Claim: what a causal model computes at position i is what it computes when the text ends at i. So checking k guesses
takes one pass, not k. Where the claim fails (a model that also looks ahead) the script names the position and exits 1.

    python spec_one_pass.py                              # the essay's sentence on the embedded target
    python spec_one_pass.py --model gpt2 --text "A cat sat on the"
"""

from __future__ import annotations

import inspect

from spec_common import UserError, dtype_name, tell

import torch

from spec_cli import at_least, command, make_parser
from spec_harness.costs import passes_within
from spec_harness.options import open_run
from spec_harness.tables import markdown_table, progress
from spec_models import linear as cpu_linear
from spec_models.checks import check_room
from spec_models.find import EMBEDDED
from spec_models.load import linear_kind, load
from spec_models.words import prompt_ids

ESSAY_TEXT = "The capital of France is Paris and it"
ESSAY_CUT = 5
# The nesting holds to rounding only, since passes of different lengths add in different orders. A model that looks
# ahead is off by about the spread of its logits (1.0 on this scale); rounding stays far below.
TOLERANCE = {torch.float32: 0.01, torch.float16: 0.2, torch.bfloat16: 0.3}


@torch.inference_mode()
def all_logits(model, ids: torch.Tensor) -> torch.Tensor:
    """(1, n) ids to (n, vocabulary) float32 logits, one pass, no cache."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    return model(ids, **options).logits[0].float()


def predictions(logits: torch.Tensor, tokenizer, ids: list[int]) -> list[dict]:
    """One row per prefix: its text, and the token the model would write next."""
    choices = logits.argmax(-1).tolist()
    return [
        {
            "position": i,
            "prefix": tokenizer.decode(ids[: i + 1]),
            "prediction_id": choice,
            "prediction": tokenizer.decode([choice]),
        }
        for i, choice in enumerate(choices)
    ]


def differences(whole: torch.Tensor, part: torch.Tensor) -> list[float]:
    """Per position, the largest change of any logit between two passes that agree on the first len(part) tokens."""
    return (whole[: len(part)] - part).abs().amax(-1).tolist()


def run(model, tokenizer, ids: torch.Tensor, cut: int) -> tuple[list[dict], dict]:
    """Rows for each prefix, and the summary. A row says what one pass over everything predicts there, what the pass
    over the first `cut` tokens does, and what the prefix gives when it is run alone."""
    with passes_within(ids.shape[1], "--text"):
        whole = all_logits(model, ids)
    if not whole.isfinite().all():
        raise UserError(f"--model: logits are not finite in {dtype_name(model.dtype)}; try another --dtype")
    rows = predictions(whole, tokenizer, ids[0].tolist())
    shortened = all_logits(model, ids[:, :cut])
    for row, difference, choice in zip(
        rows, differences(whole, shortened), shortened.argmax(-1).tolist(), strict=False
    ):
        row.update(
            truncated_prediction=tokenizer.decode([choice]),
            truncated_difference=difference,
            truncated_same=choice == row["prediction_id"],
        )
    for i, row in enumerate(progress(rows, "each prefix alone")):
        alone = all_logits(model, ids[:, : i + 1])[-1]
        row.update(
            alone_prediction=tokenizer.decode([int(alone.argmax())]),
            alone_difference=float((alone - whole[i]).abs().max()),
            alone_same=int(alone.argmax()) == row["prediction_id"],
        )
    return rows, summarise(rows, TOLERANCE.get(model.dtype, 0.3) * float(whole.std()))


def summarise(rows: list[dict], allowed: float) -> dict:
    """Whether no prefix gave other logits than the whole text did, beyond what rounding is `allowed`."""
    moved = {row["position"]: max(row["alone_difference"], row.get("truncated_difference", 0)) for row in rows}
    broken = [position for position, difference in moved.items() if not difference <= allowed]
    return {
        "largest_numerical_difference": max(row.get("truncated_difference", 0) for row in rows),
        "largest_difference_alone": max(row["alone_difference"] for row in rows),
        "allowed_difference": allowed, "nesting_holds": not broken, "first_broken_position": broken[0] if broken else None,
    }  # fmt: skip


def same(value: bool) -> str:
    return "same" if value else "DIFFERENT"


COLUMNS_ONE_PASS = [("prefix", "after", repr), ("prediction", "the model writes", repr)]
COLUMNS_TRUNCATED = [
    ("position", "pos", str), ("prediction", "all of it", repr), ("truncated_prediction", "the first part alone", repr),
    ("truncated_same", "agree", same), ("truncated_difference", "largest difference, logits", "{:.6f}".format),
]  # fmt: skip
COLUMNS_ALONE = [
    ("position", "pos", str), ("prediction", "one pass", repr), ("alone_prediction", "prefix run alone", repr),
    ("alone_same", "agree", same), ("alone_difference", "largest difference, logits", "{:.6f}".format),
]  # fmt: skip


def parse_args(argv):
    parser = make_parser(__doc__, "spec_one_pass")
    parser.add_argument("--model", default=EMBEDDED, help="hub id, folder, .gguf file or 'smollm2'")
    parser.add_argument("--text", default=ESSAY_TEXT, help="any text")
    parser.add_argument(
        "--truncate",
        type=at_least(1),
        help=f"how many tokens the second pass keeps; {ESSAY_CUT}, or all but one of a shorter text, if left out",
    )
    return parser.parse_args(argv)


def load_model(args, device, dtype):
    """The model, and no draft. Raises UserError."""
    if not args.text.strip():
        raise UserError("--text: empty; give some text")
    kind = linear_kind(args, device, dtype)
    loaded = load(args.model, "--model", device, dtype, args.revision, args.trust_remote_code)
    cpu_linear.pack([loaded.model], kind)
    loaded.about["cpu_linear"] = kind
    return loaded, []


def text_ids(args, loaded) -> torch.Tensor:
    """The text as ids (1, n); settles where the second pass ends. Raises UserError."""
    ids = prompt_ids(loaded, args.text, False, loaded.model.device, "--text")
    check_room(loaded, ids.shape[1], 0, "--text")
    if args.truncate is None:
        args.truncate = max(1, min(ESSAY_CUT, ids.shape[1] - 1))
    elif args.truncate >= ids.shape[1]:
        raise UserError(f"--truncate {args.truncate}: the text has {ids.shape[1]} tokens; keep fewer")
    return ids


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    with open_run(args, "spec_one_pass", load=load_model, ready=lambda loaded: text_ids(args, loaded)) as (
        file,
        loaded,
        _,
        ids,
    ):
        rows, summary = run(loaded.model, loaded.tokenizer, ids, args.truncate)
        for row in rows:
            file.add(row)
        file.finish(summary)
    tell(
        f"input: {len(rows)} tokens -> {len(rows)} predictions, one pass\n\n{markdown_table(rows, COLUMNS_ONE_PASS)}\n"
    )
    tell(
        f"the same pass cut to its first {args.truncate} tokens\n\n{markdown_table(rows[: args.truncate], COLUMNS_TRUNCATED)}\n"
    )
    tell(f"largest numerical difference: {summary['largest_numerical_difference']:.4f}\n")
    tell(f"each prefix run alone, {len(rows)} passes\n\n{markdown_table(rows, COLUMNS_ALONE)}\n")
    if not summary["nesting_holds"]:
        where = summary["first_broken_position"]
        tell(
            f"the nesting does NOT hold, first at position {where}: this model looks ahead, it cannot be checked in one pass"
        )
        return 1
    rounding = summary["largest_difference_alone"]
    tell(f"the nesting holds: one pass gives all {len(rows)} answers (largest difference {rounding:.4f}, rounding)")
    tell(f"results in {args.results}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
