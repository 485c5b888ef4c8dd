"""A few of the target's own layers, distilled on what the target itself writes, agree with its greedy text often
enough to draft for it.

The draft keeps the target's embedding, head and tokenizer (frozen and shared) and trains only its layers and the final
norm, so its file is small and any tool can load it once it is unpacked. It learns from cached teacher shards (data.py
makes them): soft targets over the candidates that occur in the batch, the teacher's own choice as a hard target, and
its last hidden state.

    python -m draft_training.data --target FOLDER --out data
    python -m draft_training.train --target FOLDER --data data --out draft --layers 0,1,23
"""

import copy
import functools
import json
import pathlib
import sys
from collections.abc import Callable
from typing import NamedTuple

from spec_common import UserError, first_line

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_training.checkpoint import Clock, Stop, load_state, save_state
from draft_training.data import target_folder
from draft_training.guard import kept_out_runs
from draft_training.judge import agreement, held_out
from draft_training.loss import distill_loss
from draft_training.options import add_budget_options, add_draft_options, add_loss_options, training_parser
from draft_training.parallel import add_mask, by_place, chain_states
from draft_training.shards import Shards
from draft_training.teacher import Teacher
from spec_cli import command
from spec_models.cut import cut_layers
from spec_models.files import build_draft, read_draft, same_target, save_draft

BETAS = (0.9, 0.95)  # AdamW: a shorter memory of the squares suits a few thousand steps
CLIP = 1.0  # gradient norm: cut layers begin with large errors
LOG_EVERY = 20  # steps between two lines of the log


def trainable(target, layers):
    """A copy of the target's `layers`, in order, with its embedding, final norm and (tied) head; the embedding is
    frozen."""
    draft = copy.deepcopy(cut_layers(target, layers)).float()
    draft.get_input_embeddings().weight.requires_grad_(False)
    draft.get_output_embeddings().weight.requires_grad_(False)
    return draft


def grow(draft, layers, path):
    """Begin from a trained draft: its layers and norm as they are, a layer that it lacks writing nothing at first, so
    that the whole starts out agreeing as often as that draft (Net2Net's identity; Chen et al. 2016). Raises
    UserError."""
    try:
        states, metadata = read_draft(path)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise UserError(f"--grow {path.name}: not a draft file ({first_line(error)})") from error
    own = {old: f"model.layers.{place}." for place, old in enumerate(metadata["layers"])}
    if not same_target(metadata["target"], draft):
        raise UserError(f"--grow {path.name}: trained for another target than --target")
    if [layer for layer in layers if layer in own] != metadata["layers"]:
        raise UserError(
            f"--grow {path.name}: it has layers {metadata['layers']}; name all of them in --layers, in that order"
        )
    with torch.no_grad():
        draft.model.norm.weight.copy_(states["model.norm.weight"])
        if hasattr(draft, "mask") and "mask" in states:
            draft.mask.copy_(states["mask"])
        for layer, old in zip(draft.model.layers, layers, strict=True):
            if old in own:
                layer.load_state_dict({name: states[own[old] + name] for name in layer.state_dict()})
            else:
                for last in (*layer.self_attn.o_proj.parameters(), *layer.mlp.down_proj.parameters()):
                    last.zero_()


def rate(done, peak, step, warm_steps, decay):
    """Trapezoid over the share of the budget that is spent: warm-up, constant, then straight down to zero."""
    return peak * min(1.0, (step + 1) / warm_steps, max(0.0, (1 - done) / decay))


class Lesson(NamedTuple):
    """How a kind of draft is taught and judged."""

    states: Callable  # (draft, shards, batch, generator) -> its states and the teacher's (rows, hidden), the teacher's best ids
    judge: Callable  # (draft, held-out rows) -> shares by kind


def plain_states(draft, shards, batch, generator):
    """What the loss compares, of a draft that reads tokens alone: a row for each position that is learnt from."""
    ids, place, teacher_states, top = shards.tensors(batch, generator)
    with torch.autocast("cpu", torch.bfloat16):
        states = draft.model(ids, use_cache=False).last_hidden_state.flatten(0, 1)[place]
    return states, teacher_states, top


def lesson_of(guesses):
    """The lesson of an ordinary draft, or of one whose single pass makes so many guesses."""
    if guesses == 1:
        return Lesson(plain_states, agreement)
    return Lesson(
        lambda draft, shards, batch, generator: chain_states(draft, shards, batch, guesses, generator),
        lambda draft, rows: agreement(draft, rows) | by_place(draft, rows, guesses),
    )


def one_step(draft, lesson, optimizer, shards, batch, args, learning_rate, generator):
    """One update; gives the sums of the loss parts and the tokens seen."""
    extra = torch.randint(draft.config.vocab_size, (args.negatives,), generator=generator)
    states, teacher_states, top = lesson.states(draft, shards, batch, generator)
    loss, parts = distill_loss(
        states,
        teacher_states,
        top,
        draft.get_output_embeddings().weight,
        extra,
        {"hard": args.hard, "state": args.state},
    )
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    loss.backward()
    torch.nn.utils.clip_grad_norm_([weights for weights in draft.parameters() if weights.requires_grad], CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return parts, sum(length for _, _, length, _ in batch)


def log(path, row):
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def report(args, draft, lesson, rows, progress):
    """Held-out agreement into the log and onto stderr."""
    draft.eval()
    table = lesson.judge(draft, rows)
    draft.train()
    log(args.out / "log.jsonl", {"event": "held_out", **progress, "agreement": table})
    print("\n  " + "  ".join(f"{kind} {share:.3f}" for kind, share in table.items()), file=sys.stderr, flush=True)
    return table


def tell(args, progress, parts, done, learning_rate):
    """One line of progress with the time left, and its row in the log."""
    mean = {name: parts[name] / parts["weight"] for name in ("kl", "hard", "hit")}
    log(args.out / "log.jsonl", {"event": "train", **progress, "lr": learning_rate, **mean})
    left, pace = args.minutes * (1 - done), progress["tokens"] / max(1e-9, progress["wall_s"])
    print(
        f"\rstep {progress['step']} epoch {progress['epoch']} kl {mean['kl']:.3f} hit {mean['hit']:.3f} "
        f"{pace:.0f} tokens/s, {left:.1f} min left ",
        end="",
        file=sys.stderr,
        flush=True,
    )


def train(args, draft, lesson, optimizer, shards, rows, progress):
    """Epochs over the shards until the budget of time (pauses between runs do not count) or steps is spent; whether it
    was."""
    draft.train()
    clock = Clock(progress)
    with Stop() as stop:
        while not stop.asked:
            shards.refresh()
            if not shards.index:
                raise UserError("--data: no shard with a row to train on; make some with draft_training.data")
            batches = shards.epoch(args.seed * 1000 + progress["epoch"], args.batch_tokens)
            if an_epoch(args, draft, lesson, optimizer, shards, batches[progress["batch"] :], rows, progress, clock, stop):
                return True
            if not stop.asked:
                progress.update(epoch=progress["epoch"] + 1, batch=0)
    return False


def an_epoch(args, draft, lesson, optimizer, shards, batches, rows, progress, clock, stop):
    """The batches of one epoch, as far as the budget goes; whether it is spent."""
    sums = {}
    for batch in batches:
        done = max(progress["wall_s"] / 60 / args.minutes, progress["step"] / args.steps if args.steps else 0)
        if stop.asked or done >= 1:
            return done >= 1
        learning_rate = rate(done, args.lr, progress["step"], args.warm_steps, args.decay)
        generator = torch.Generator().manual_seed(args.seed * 1_000_003 + progress["step"])
        parts, tokens = one_step(draft, lesson, optimizer, shards, batch, args, learning_rate, generator)
        sums = {name: sums.get(name, 0) + value for name, value in parts.items()}
        for name, more in (("step", 1), ("batch", 1), ("tokens", tokens)):
            progress[name] += more
        progress.update(clock.now())
        if progress["step"] % LOG_EVERY == 0:
            tell(args, progress, sums, done, learning_rate)
            sums = {}
        if progress["step"] % args.check_every == 0:
            report(args, draft, lesson, rows, progress)
            save_state(args.out / "state.pt", draft, optimizer, progress)
    return False


def shards_parser(doc):
    """A parser of what any draft that learns from shards is told."""
    parser = training_parser(
        doc,
        "folder of the target, a Llama with a tied head",
        "folder for the checkpoint, the log and the draft",
        "the file of data.py: what it holds out of it is judged on",
    )
    parser.add_argument("--data", required=True, type=pathlib.Path, help="folder of teacher shards")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out; new shards join in")
    add_draft_options(parser)
    add_budget_options(parser)
    add_loss_options(parser)
    return parser


def parse_args(argv):
    return shards_parser(__doc__).parse_args(argv)


def prepare(args, draft):
    """The optimizer, and how far an earlier run came (an interrupted epoch is left: shards may have joined since)."""
    trained = [weights for weights in draft.parameters() if weights.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=BETAS, weight_decay=args.weight_decay, fused=True)
    progress = {"step": 0, "epoch": 0, "batch": 0, "tokens": 0, "wall_s": 0.0, "cpu_s": 0.0}
    if args.resume and (args.out / "state.pt").exists():
        progress = load_state(args.out / "state.pt", draft, optimizer)
        progress.update(epoch=progress["epoch"] + 1, batch=0)
    return optimizer, progress


def export(args, draft, target, layers, rows, card):
    """Write the draft file; its card says what the int8 file itself agrees with, so it is written, read back, judged
    and written again."""
    path = args.out / "draft.safetensors"
    save_draft(path, draft, target, layers, card)
    table = agreement(build_draft(path, target), rows)
    card = card | {"agreement": {kind: round(share, 4) for kind, share in table.items()}}
    save_draft(path, draft, target, layers, card)
    return card


def shards_of(args, tokenizer, rows):
    """The shards to train on, without what is reported on or held out."""
    teacher, said = functools.partial(Teacher, args.target, torch.float32), [row["continuation"] for row in rows]
    reported = kept_out_runs(tokenizer, teacher, args.data / "kept_out.json", args.keep_out, said)
    return Shards(args.data, args.prompt_share, reported)


def log_start(args, shards):
    """The options of the run and its data into the log, without the names of folders."""
    paths = ("target", "data", "out", "grow", "keep_out", "prompts")
    config = {name: value for name, value in vars(args).items() if name not in paths}
    config["grown_from"] = args.grow and args.grow.name
    start = {"event": "start", "config": config, "data_tokens": shards.tokens, "left_out": shards.left_out}
    log(args.out / "log.jsonl", start)


@command
def main(argv=None):
    args = parse_args(argv)
    args.target = target_folder(args.target)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    target, layers = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval(), args.layers
    if max(layers) >= target.config.num_hidden_layers:
        raise UserError(f"--layers: the target has layers 0 to {target.config.num_hidden_layers - 1}")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    rows = held_out(target, tokenizer, args.data / "held_out.json", args.prompts)
    draft = trainable(target, layers)
    if args.guesses > 1:
        add_mask(draft)
    if args.grow:
        grow(draft, layers, args.grow)
    lesson = lesson_of(args.guesses)
    optimizer, progress = prepare(args, draft)
    shards = shards_of(args, tokenizer, rows)
    log_start(args, shards)
    if not progress["step"]:
        report(args, draft, lesson, rows, progress)
    finished = train(args, draft, lesson, optimizer, shards, rows, progress)
    save_state(args.out / "state.pt", draft, optimizer, progress)
    report(args, draft, lesson, rows, progress)
    card = {"tokens": progress["tokens"], "steps": progress["step"], "data_tokens": shards.tokens}
    card = export(args, draft, target, layers, rows, card | {"cpu_minutes": round(progress["cpu_s"] / 60, 1)})
    print(json.dumps({"finished": finished, **card}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
