"""A draft for your own model: its own layers, trained on what it writes after your prompts, in one command.

The target goes on with your prompts (or with requests of its own), a few of its layers learn to foresee it, and what
comes out is a plain model folder that `--draft`, `generate(assistant_model=)` and other engines take. Everything on
the way is kept in a folder beside it, so a run that was stopped goes on with --resume.

    python -m draft_training.make_draft --target FOLDER --prompts mine.jsonl --hours 2 --out my-draft
"""

import functools
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

from spec_common import UserError, say, timed

import torch
from transformers import DynamicCache

from draft_training import train as training
from draft_training.card import model_card
from draft_training.data import make_shard, training_prompts_of
from draft_training.guard import kept_out_runs, reported_texts
from draft_training.judge import agreement, held_out, write_json
from draft_training.options import above_zero, layer_list, training_parser
from draft_training.shards import Shards
from draft_training.teacher import TOP, Teacher
from spec_cli import at_least, command
from spec_models.load import load

CUTTABLE = ("llama", "qwen2", "qwen3")  # what the fast teacher computes
DATA_SHARE, TRIAL_SHARE = 0.45, 0.05  # of the hours: writing data, trying layers; the rest trains
# How far up sits a layer that looks at what followed an earlier occurrence: 23 of 30 in SmolLM2.
COPYING = 0.78
PROMPT_SHARE = 0.3  # of the positions inside prompts that are learnt from
PASSES = 15  # timed passes of one token


def load_target(name):
    """The target in float32 and its tokenizer. Raises UserError for one that cannot be cut or has no chat template."""
    loaded = load(name, "--target", torch.device("cpu"), torch.float32)
    model, config = loaded.model, loaded.model.config
    if config.model_type not in CUTTABLE:
        raise UserError(
            f"--target {name}: a '{config.model_type}' cannot be cut here; give one of {', '.join(CUTTABLE)}"
        )
    first = model.model.layers[0]
    if first.self_attn.o_proj.bias is not None or first.mlp.down_proj.bias is not None:
        raise UserError(
            f"--target {name}: its output projections have biases, which the teacher lacks; give another model"
        )
    if config.num_hidden_layers < 2:
        raise UserError(f"--target {name}: it has one layer, so no part of it is cheaper; give a deeper model")
    if not loaded.tokenizer.chat_template:
        raise UserError(f"--target {name}: its tokenizer has no chat template; give an instruct model")
    return model, loaded.tokenizer


def check_room_on_disk(args, model):
    """Raises UserError where the data, the checkpoint (weights and two moments) and the draft do not fit."""
    width, rows = model.config.hidden_size, model.get_input_embeddings().weight.numel()
    layers = 3 * sum(weights.numel() for weights in model.model.layers[0].parameters())
    needed = args.tokens * (2 * width + 4 * TOP + 4) + 4 * (4 * layers + 2 * rows)
    free = shutil.disk_usage(next(folder for folder in args.out.absolute().parents if folder.exists())).free
    if needed > free:
        raise UserError(
            f"--out {args.out.name}: {needed / 1e9:.1f} GB are needed there and {free / 1e9:.1f} free; "
            "lower --tokens or name another place"
        )


def candidates(layers):
    """The cuts that are tried: two early layers and a late one, which may be the one that copies. Lists of layer
    numbers."""
    late = sorted({min(layers - 1, round(share * layers)) for share in (COPYING, 0.9, 1)})
    return [[0, 1, layer] for layer in late] if layers > 3 else [[0]]


# ------------------------------------------------------------------------------------------------------------ stages


class Work:
    """The folder beside the draft in which all is kept until it is whole, and the seconds spent on each stage."""

    def __init__(self, args):
        self.folder = args.out.with_name(args.out.name + ".work")
        self.data, self.path = self.folder / "data", self.folder / "progress.json"
        settings = {name: str(getattr(args, name)) for name in ("target", "prompts", "keep_out", "layers", "seed")}
        if args.out.exists():
            raise UserError(f"--out {args.out.name}: already there; name a new folder")
        if self.path.exists() and not args.resume:
            raise UserError(f"--out {args.out.name}: begun already; go on with --resume, or name a new folder")
        self.state = json.loads(self.path.read_text()) if self.path.exists() else {"settings": settings, "data_s": 0.0}
        if self.state["settings"] != settings:
            differing = next(name for name in settings if settings[name] != self.state["settings"].get(name))
            raise UserError(
                f"--resume: --{differing.replace('_', '-')} was another; give it as before, or name a new --out"
            )
        self.data.mkdir(parents=True, exist_ok=True)

    def keep(self, **more):
        self.state.update(more)
        write_json(self.path, self.state)


def write_data(args, work, target, tokenizer, texts):
    """Shards until their share of the time, or the tokens asked for, are there."""
    teacher, number, budget = None, work.state.get("shards", 0), DATA_SHARE * args.hours * 3600
    tokens = work.state.get("tokens", 0)
    while number == 0 or (work.state["data_s"] < budget and tokens < args.tokens):
        teacher, begun = teacher or Teacher(target), time.monotonic()
        tokens += make_shard(
            teacher, tokenizer, work.data / f"shard-{number:04d}.safetensors", number, args.rows, args.new_tokens, texts
        )
        number += 1
        work.keep(data_s=work.state["data_s"] + time.monotonic() - begun, shards=number, tokens=tokens)
        left = max(0.0, min(budget - work.state["data_s"], work.state["data_s"] * (args.tokens / tokens - 1))) / 60
        say(
            f"data: {tokens} tokens in {number} shards, {tokens / work.state['data_s']:.0f} a second, "
            f"{left:.1f} minutes left"
        )


def options(args, work, out, minutes, layers):
    """The options of train.py for one run."""
    given = {
        "target": "-",
        "data": work.data,
        "out": out,
        "minutes": minutes,
        "threads": args.threads,
        "seed": args.seed,
    }
    out.mkdir(parents=True, exist_ok=True)
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return training.parse_args([*words, "--layers", ",".join(map(str, layers)), "--resume"])


def fit(run, target, layers, shards, rows):
    """Train one cut from its checkpoint on, as far as its options say; gives the draft and how far it came."""
    draft = training.trainable(target, layers)
    optimizer, progress = training.prepare(run, draft)
    lesson = training.lesson_of(1)
    finished = training.train(run, draft, lesson, optimizer, shards, rows, progress)
    training.save_state(run.out / "state.pt", draft, optimizer, progress)
    if not finished:
        raise KeyboardInterrupt
    return draft.eval(), progress


def choose_layers(args, work, target, shards, rows):
    """The layers asked for, or those whose short trial agrees most on the held-out texts."""
    if args.layers or "layers" in work.state:
        return args.layers or work.state["layers"]
    tried = candidates(target.config.num_hidden_layers)
    minutes, table = TRIAL_SHARE * args.hours * 60 / len(tried), {}
    for layers in tried if len(tried) > 1 else []:
        name = ",".join(map(str, layers))
        draft, _ = fit(
            options(args, work, work.folder / f"trial-{name}", minutes, layers), target, layers, shards, rows
        )
        table[name] = statistics.mean(agreement(draft, rows).values())
        say(f"\ntrial of layers {name}: {table[name]:.3f} of the held-out tokens agree")
    chosen = max(tried, key=lambda layers: table.get(",".join(map(str, layers)), 0))
    work.keep(layers=chosen, trials=table)
    return chosen


# ------------------------------------------------------------------------------------------------------------ its end


@torch.inference_mode()
def pass_seconds(model):
    """Median seconds of a pass over one token, plain transformers on this machine."""
    ids = torch.arange(3, 67).remainder(model.config.vocab_size)[None]
    cache = DynamicCache()
    model(ids, cache=cache)
    times = []
    for _ in range(PASSES):
        times.append(timed(lambda: model(ids[:, :1], cache=cache), torch.device("cpu"))[1])
    return statistics.median(times)


def prediction(share, cost, most=8):
    """(k, speedup) where `share` of the guesses is right and a draft pass costs `cost` target passes; k 0 where none
    pays."""
    gains = {k: sum(share**n for n in range(k + 1)) / (1 + k * cost) for k in range(1, most + 1)}
    best = max(gains, key=gains.get)
    return (best, gains[best]) if gains[best] > 1 else (0, 1.0)


def publish(args, work, target, tokenizer, draft, facts):
    """The plain folder, moved into place whole; its own agreement was measured on exactly these weights."""
    partial = args.out.with_name(args.out.name + ".part")
    shutil.rmtree(partial, ignore_errors=True)
    draft.to(target.dtype).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "README.md").write_text(model_card(facts))
    write_json(partial / "draft_card.json", facts)
    os.replace(partial, args.out)


def facts_of(args, work, target, draft, layers, progress, rows, shards):
    """What the card says, all of it measured."""
    table = agreement(draft, rows)
    mine = [share for kind, share in table.items() if kind.startswith("file")] or [table["chat"]]
    share, cost = statistics.mean(mine), pass_seconds(draft) / pass_seconds(target)
    k, speedup = prediction(share, cost)
    return {
        "target": Path(args.target).name,
        "layers": layers,
        "trials": work.state.get("trials", {}),
        "data_tokens": shards.tokens,
        "rows_left_out": shards.left_out,
        "prompts": args.prompts.name if args.prompts else "the target's own",
        "tokens_seen": progress["tokens"],
        "steps": progress["step"],
        "minutes": round(progress["wall_s"] / 60, 1),
        "agreement": {kind: round(value, 4) for kind, value in table.items()},
        "agreement_on_yours": round(share, 4),
        "cost": round(cost, 4),
        "best_k": k,
        "predicted_speedup": round(speedup, 3),
    }


def parse_args(argv):
    parser = training_parser(
        __doc__,
        "hub id, folder or .gguf of a Llama, Qwen2 or Qwen3 with a chat template",
        "the draft's folder to make",
        '.jsonl of {"prompt"}; without it the target asks itself',
        torch.get_num_threads(),
    )
    parser.add_argument(
        "--keep-out", type=Path, nargs="*", default=[], metavar="FILE", help=".jsonl of prompts to judge on later"
    )
    parser.add_argument(
        "--hours",
        type=above_zero,
        default=2.0,
        help="for data and training; the texts that are judged on take some minutes more",
    )
    parser.add_argument(
        "--layers", type=layer_list, help="layers of the target to keep; by default a short trial chooses"
    )
    parser.add_argument("--tokens", type=at_least(1, 10**9), default=2_000_000, help="most tokens of data")
    parser.add_argument("--rows", type=at_least(8), default=512, help="rows a shard of data")
    parser.add_argument(
        "--new-tokens", type=at_least(4), default=64, help="tokens that the target writes after a prompt"
    )
    parser.add_argument("--seed", type=at_least(0, 10**6), default=0, help="of the order of rows")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was stopped")
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.out.name in ("", ".."):
        raise UserError(f"--out {args.out}: name the new folder of the draft")
    texts = training_prompts_of(args.prompts) if args.prompts else []
    reported_texts(args.keep_out)  # read again when the data is there; a mistake in them is told now
    target, tokenizer = load_target(args.target)
    if args.layers and max(args.layers) >= target.config.num_hidden_layers:
        raise UserError(f"--layers: the target has layers 0 to {target.config.num_hidden_layers - 1}")
    check_room_on_disk(args, target)
    work = Work(args)
    work.keep()
    write_data(args, work, target, tokenizer, texts)
    rows = held_out(target, tokenizer, work.folder / "held_out.json", args.prompts)
    teacher, said = functools.partial(Teacher, target, torch.float32), [row["continuation"] for row in rows]
    reported = kept_out_runs(tokenizer, teacher, work.folder / "kept_out.json", args.keep_out, said)
    shards = Shards(work.data, PROMPT_SHARE, reported)
    layers = choose_layers(args, work, target, shards, rows)
    minutes = (1 - DATA_SHARE - TRIAL_SHARE) * args.hours * 60
    draft, progress = fit(options(args, work, work.folder / "train", minutes, layers), target, layers, shards, rows)
    facts = facts_of(args, work, target, draft, layers, progress, rows, shards)
    publish(args, work, target, tokenizer, draft, facts)
    print(model_card(facts))
    say(f"{args.out.name} is whole; {work.folder.name} may be deleted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
