"""Train a draft that reads what the target thinks (EAGLE, Medusa), on the shards that ordinary drafts are trained on.

A shard holds the target's final normed state at every position, which is the feature that the draft reads, so nothing of the
target runs while it trains. EAGLE is unrolled: it learns to go on from its own states too, as deep as `--depths` says.
Medusa's heads learn what the target thinks 1, 2, ... `--heads` places further on.

    python -m draft_training.make_head --target FOLDER --data data --out eagle --layers 0,1,23 --grow draft-s.safetensors
    python -m draft_training.make_head --target FOLDER --data data --out eagle --layers 29     # one layer, as published
    python -m draft_training.make_head --kind medusa --target FOLDER --data data --out medusa --state 0
"""

import json
import sys
from collections.abc import Callable
from typing import NamedTuple

from spec_common import UserError

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_training.ahead import medusa_agreement, medusa_states, rank_shares
from draft_training.checkpoint import save_state
from draft_training.data import target_folder
from draft_training.judge import held_out
from draft_training.train import Lesson, grow, log_start, prepare, report, shards_of, shards_parser, train
from spec_cli import at_least, command
from spec_models.eagle import build_eagle, new_eagle, save_eagle
from spec_models.medusa import MEDUSA, Medusa, build_medusa, save_medusa


def eagle_states(eagle, shards, batch, depths, generator):
    """What the loss compares at every depth: the draft's states and the teacher's (rows, hidden), the teacher's best ids."""
    ids, place, hidden, top = shards.tensors(batch, generator)
    with torch.autocast("cpu", torch.bfloat16):
        found = eagle.unrolled(ids, shards.features(batch, ids.shape[1]), depths)
    parts = [(states.flatten(0, 1), place % ids.shape[1] >= depth) for depth, states in enumerate(found)]
    mine = [states[place[learnt]] for states, learnt in parts]
    theirs, best = ([rows[learnt] for _, learnt in parts] for rows in (hidden, top))
    return torch.cat(mine), torch.cat(theirs), torch.cat(best)


@torch.inference_mode()
def with_features(target, rows):
    """The held-out rows, each with the target's features of its whole text but the last token."""
    for row in rows:
        ids = torch.tensor([row["prompt"] + row["continuation"]])
        row["features"] = target.model(ids[:, :-1], use_cache=False).last_hidden_state
    return rows


@torch.inference_mode()
def eagle_agreement(eagle, rows, depths):
    """Share of the target's greedy tokens that are the head's choice, by kind at the first guess, and over all kinds at each
    depth, the guesses before it taken to be right."""
    hits, deep = {row["kind"]: [] for row in rows}, [[] for _ in range(depths)]
    for row in rows:
        ids = torch.tensor([row["prompt"] + row["continuation"]])
        first, wanted = len(row["prompt"]) - 1, torch.tensor(row["continuation"])  # row i speaks of token i + 1
        for depth, states in enumerate(eagle.unrolled(ids[:, :-1], row["features"], depths)):
            said = eagle.get_output_embeddings()(states[0, first + depth :]).argmax(-1)
            right = (said == wanted[depth:]).tolist()
            deep[depth] += right
            if not depth:
                hits[row["kind"]] += right
    table = {kind: sum(found) / max(1, len(found)) for kind, found in hits.items()}
    return table | {f"guess {depth + 1}": sum(found) / max(1, len(found)) for depth, found in enumerate(deep)}


class Kind(NamedTuple):
    """How a kind of head begins, is taught, written and read again; its file has its name."""

    begin: Callable  # (args, target) -> an untrained one
    lesson: Callable  # (args) -> Lesson
    save: Callable  # (path, head, target, card)
    build: Callable  # (path, target)


def begin_eagle(args, target):
    """As the target's layers, or a trained draft's."""
    eagle = new_eagle(target, args.layers)
    if args.grow:
        grow(eagle.body, args.layers, args.grow)
    return eagle


def eagle_lesson(args):
    return Lesson(
        lambda draft, shards, batch, generator: eagle_states(draft, shards, batch, args.depths, generator),
        lambda draft, judged: eagle_agreement(draft, judged, args.depths),
    )


KINDS = {
    "eagle": Kind(begin_eagle, eagle_lesson, save_eagle, build_eagle),
    MEDUSA: Kind(lambda args, target: Medusa(target, args.heads), lambda args: Lesson(medusa_states, medusa_agreement), save_medusa, build_medusa),
}


def parse_args(argv):
    parser = shards_parser(__doc__)
    parser.add_argument("--kind", choices=tuple(KINDS), default="eagle", help="what is trained")
    parser.add_argument("--heads", type=at_least(1, 16), default=4, help="of Medusa: how many, one for each place ahead")
    parser.add_argument("--depths", type=at_least(1, 16), default=3, help="guesses ahead that it is trained for")
    return parser.parse_args(argv)


def load_target(args):
    """The target in float32. Raises UserError for one that none is made for here."""
    args.target = target_folder(args.target)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    if target.config.model_type != "llama" or not target.config.tie_word_embeddings:
        raise UserError(f"--target {args.target}: made for a Llama with a tied head; give another model")
    if args.guesses > 1:
        raise UserError("--guesses: one pass makes one guess here; leave it out, or train a draft with draft_training.train")
    if args.kind == MEDUSA and args.grow:
        raise UserError("--grow: Medusa's heads have no layers to begin from; leave it out")
    if max(args.layers) >= target.config.num_hidden_layers:
        raise UserError(f"--layers: the target has layers 0 to {target.config.num_hidden_layers - 1}")
    return target


def export(args, head, target, rows, card):
    """Write the draft's file; its card says what the int8 file itself agrees with, so it is read back and written again."""
    path, kind = args.out / f"{args.kind}.safetensors", KINDS[args.kind]
    kind.save(path, head, target, card)
    again = kind.build(path, target)
    card = card | {"agreement": {name: round(share, 4) for name, share in kind.lesson(args).judge(again, rows).items()}}
    if args.kind == MEDUSA:
        head.ranks = [[round(share, 4) for share in shares] for shares in rank_shares(again, rows)]
    kind.save(path, head, target, card)
    return card


@command
def main(argv=None):
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    target = load_target(args)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    rows = with_features(target, held_out(target, tokenizer, args.data / "held_out.json", args.prompts))
    kind = KINDS[args.kind]
    head, lesson = kind.begin(args, target), kind.lesson(args)
    optimizer, progress = prepare(args, head)
    shards = shards_of(args, tokenizer, rows)
    log_start(args, shards)
    finished = train(args, head, lesson, optimizer, shards, rows, progress)
    save_state(args.out / "state.pt", head, optimizer, progress)
    report(args, head, lesson, rows, progress)
    card = {"tokens": progress["tokens"], "steps": progress["step"], "data_tokens": shards.tokens}
    card |= {"heads": args.heads} if args.kind == MEDUSA else {"depths": args.depths}
    card |= {"cpu_minutes": round(progress["cpu_s"] / 60, 1)}
    print(json.dumps({"finished": finished, **export(args, head, target, rows, card)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
