"""What rounding does to logits: the same text read one token a pass, in blocks and whole, and how far the rows lie apart.

    python -m spec_harness.rounding --dtype bfloat16          # and --dtype float16; from speculative-decoding/

The figures behind the tolerance of `near_ties.py`: of the target as transformers runs it and fused, and of random models
by depth. Columns: the error of a contender's logit, the difference of two contenders' errors, how many rows took another
id, how far that lay below the best, and what is allowed; in units of the best logit's last place.
"""

from __future__ import annotations

from spec_common import UserError, dtype_name, tell

import torch
import transformers

from spec_cli import at_least, command, make_parser
from spec_harness.near_ties import allowed_units, errors, read_in_blocks, write_singly
from spec_harness.options import open_run
from spec_harness.tables import fixed, markdown_table
from spec_models.checks import Loaded
from spec_models.find import EMBEDDED
from spec_models.fused import FusedLlama, prove_rows, supported
from spec_models.linear import pack, twin
from spec_models.load import linear_kind, load
from spec_models.words import prompt_ids
from workloads import WORKLOADS

SIZES = (2, 3, 6, 9, 16)
RANDOM = ((2, 0.15), (6, 0.15), (30, 0.02), (30, 0.05), (30, 0.15))  # layers, and the deviation of their weights


def random_llama(layers: int, deviation: float, dtype: torch.dtype):
    """A random model as deep as that; at a deviation of 0.02 it repeats a word, wider it writes lively text."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 2048,
        "hidden_size": 192,
        "intermediate_size": 576,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=layers, initializer_range=deviation, tie_word_embeddings=False
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def measured(model, prompts: list[torch.Tensor], n: int, name: str, form: str) -> list[dict]:
    """A row for each size of block, and one for the whole text as a block: medians and largest values over all places."""
    eps, rows = torch.finfo(model.dtype).eps, []
    texts = [(prompt.shape[1] - 1, *write_singly(model, prompt, n)) for prompt in prompts]
    allowed = [allowed_units(model, tuple(prompt[0].tolist()), n) for prompt in prompts]
    for size in (*SIZES, n):
        found = [errors(singly, read_in_blocks(model, ids, start, size), eps) for start, ids, singly in texts]
        one, pair, below = (torch.cat(part) for part in zip(*found, strict=True))
        rows.append({
            "model": name, "pass": form, "dtype": dtype_name(model.dtype), "rows": size, "places": len(pair),
            "rows_independent": getattr(model, "rows_independent", 0),
            "one_median": float(one.median()), "one_largest": float(one.max()), "pair_median": float(pair.median()),
            "pair_largest": float(pair.max()), "parted": int((below > 0).sum()), "below_largest": float(below.max()),
            "allowed_least": min(allowed), "pairs": pair.tolist(),
        })  # fmt: skip
    return rows


def load_target(args, device, dtype):
    if dtype == torch.float32:
        raise UserError("--dtype float32: nothing is excused there; choose bfloat16 or float16")
    target = load(args.target, "--target", device, dtype, args.revision, args.trust_remote_code)
    target.about["cpu_linear"] = "plain"
    return target, []


def models_of(args, target: Loaded, device: torch.device, dtype: torch.dtype):
    """(name, form of pass, model, prompts) of all that is measured: the target as transformers runs it and fused, then
    random models."""
    prompts = [prompt_ids(target, text, False, device) for text in WORKLOADS.values()]
    yield target.name, "plain", twin(target.model), prompts
    if supported(target.model):
        one = FusedLlama(twin(target.model)).eval()
        pack([one], linear_kind(args, device, dtype))
        prove_rows(one)
        yield target.name, "fused", one, prompts
    drawn = torch.randint(2048, (2, 8), generator=torch.Generator().manual_seed(3)).to(device)
    for layers, deviation in RANDOM:
        model = random_llama(layers, deviation, dtype).to(device)
        yield f"random, {layers} layers of {deviation}", "plain", model, list(drawn.split(1))


COLUMNS = [
    ("model", "model", str), ("pass", "pass", str), ("rows", "rows", str), ("one_median", "one", fixed(2)), ("one_largest", "largest", fixed(2)),
    ("pair_median", "two", fixed(2)), ("pair_largest", "largest", fixed(2)), ("parted", "parted", str), ("below_largest", "below", fixed(2)),
    ("allowed_least", "allowed", fixed(2)),
]  # fmt: skip


@command
def main(argv=None) -> int:
    parser = make_parser(__doc__, "rounding")
    parser.add_argument("--target", default=EMBEDDED, help="hub id, folder, .gguf file or 'smollm2'")
    parser.add_argument("--n-tokens", type=at_least(2), default=48, help="places of each text")
    parser.set_defaults(dtype="bfloat16")
    args = parser.parse_args(argv)
    with open_run(args, "rounding", load=load_target) as (file, target, _):
        for name, form, model, prompts in models_of(args, target, target.model.device, target.model.dtype):
            for row in measured(model, prompts, args.n_tokens, name, form):
                file.add(row)
        over = [row for row in file.rows if row["below_largest"] > row["allowed_least"]]
        file.finish({"below_largest": max(row["below_largest"] for row in file.rows), "not_allowed": len(over)})
    tell(
        f"in units of the best logit's last place\n\n{markdown_table(file.rows, COLUMNS)}\n\nresults in {args.results}"
    )
    return int(bool(over))


if __name__ == "__main__":
    raise SystemExit(main())
