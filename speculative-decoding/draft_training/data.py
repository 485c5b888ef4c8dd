"""Teacher data for a draft: the target's own continuations of many prompts, with what it thought at every position.

A shard is one safetensors file: flat `ids`, the final normed hidden state of each position (float16; with the target's
head, which the draft shares, it gives the teacher's logit of any id), the teacher's 16 best ids, row `lengths`,
`prompt_lengths`, `kinds`. Most rows go through the chat template: prompts of a file, the target's own requests,
several turns, long contexts.

    python -m draft_training.data --target FOLDER --out data --prompts mine.jsonl --shards 20
"""

import os
import pathlib
import random
import sys
import time

from spec_common import UserError, say

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from draft_training.options import training_parser
from draft_training.prompts import KINDS, SHORTEST, training_prompts
from draft_training.requests import (
    LONGEST_PROMPT,
    asked,
    conversations,
    is_held_out,
    long_request,
    own_requests,
    read_prompts,
    templated,
)
from draft_training.teacher import Teacher, continue_rows
from spec_cli import at_least, command, fraction
from spec_models.embedded import ensure_target
from spec_models.find import EMBEDDED

NEW_TOKENS = 64  # tokens a row: many short rows, because a draft agrees least at the beginning of a text
SHARES = {"code": 0.34, "list": 0.16, "json": 0.16, "repeat": 0.08, "prose": 0.26}  # of the rows that are no chat
CHAT = 0.75  # share of the rows that come through the chat template, as an instruct model is used
CHAT_SHARES = {"file": 0.5, "own": 0.2, "turns": 0.1, "long": 0.2}  # of those, with a file of prompts
OWN_SHARES = {"file": 0.0, "own": 0.8, "turns": 0.1, "long": 0.1}  # and without one
MOST_ROWS, CACHED = 256, 80_000  # rows of a batch, and cache slots of all of them together
SAMPLED_STARTS = (0, 0, 4, 12)  # tokens sampled before greedy takes over: the same template then leads to many texts
OPENING_STARTS = (12, 20, 28)  # the same after a bare opening, which alone would always lead to the same text


def shard_of(rows, prompt_lengths, kinds):
    """Rows as the flat tensors of a shard. The last position of a row has a prediction, so the next id need not be in
    it."""
    ids, hidden, best = ([row[i] for row in rows] for i in range(3))
    return {
        "ids": torch.cat(ids).to(torch.int32),
        "hidden": torch.cat(hidden).contiguous(),
        "top": torch.cat(best).contiguous(),
        "lengths": torch.tensor([len(row) for row in ids]),
        "prompt_lengths": torch.tensor(prompt_lengths),
        "kinds": torch.tensor(kinds),
    }


def chat_prompts(teacher, tokenizer, count, seed, texts, generator):
    """Prompts through the chat template: of the user's file (`texts`, each once before any twice), the target's own
    requests, second and third turns, long contexts. Without a file the target's own stand in."""
    rng, shares = random.Random(seed), CHAT_SHARES if texts else OWN_SHARES
    wanted = {name: round(count * share) for name, share in shares.items()}
    attempts = round((wanted["own"] + (0 if texts else wanted["turns"])) * 1.3)
    own = own_requests(teacher, tokenizer, attempts, generator) if attempts else []
    first = seed * (wanted["file"] + wanted["turns"])
    taken = [texts[(first + at) % len(texts)] for at in range(wanted["file"] + wanted["turns"])] if texts else []
    pool = [asked(kind, text, rng) for kind, text in taken] or own
    passages = [text for _, text in texts if len(text) > 200] or [text for _, text in texts] or own
    prompts = [templated(tokenizer, [text]) for text in pool[wanted["turns"] :]]
    prompts += [templated(tokenizer, [text]) for text in own[: wanted["own"]] if texts]
    prompts += conversations(teacher, tokenizer, pool[: wanted["turns"]], rng)
    if passages:
        prompts += [templated(tokenizer, [long_request(passages, rng)]) for _ in range(wanted["long"])]
    return [ids for ids in prompts if len(ids) <= LONGEST_PROMPT]


def batches_of(jobs, new_tokens):
    """Jobs of like length together: as many as keep the cache within some gigabytes."""
    jobs, batch = sorted(jobs, key=lambda job: len(job[0])), []
    for job in jobs:
        if batch and (len(batch) == MOST_ROWS or (len(batch) + 1) * (len(job[0]) + new_tokens) > CACHED):
            yield batch
            batch = []
        batch.append(job)
    yield batch


def make_shard(teacher, tokenizer, path, seed, rows, new_tokens, texts=(), chat=CHAT):
    """One shard of about `rows` rows over all kinds, `chat` of them through the template."""
    generator = torch.Generator().manual_seed(seed)
    prompts = {
        kind: training_prompts(tokenizer, kind, round(rows * (1 - chat) * share), seed)
        for kind, share in SHARES.items()
    }
    prompts["chat"] = chat_prompts(teacher, tokenizer, round(rows * chat), seed, texts, generator) if chat else []
    jobs = [(ids, number) for number, kind in enumerate(KINDS) for ids in prompts[kind]]
    done, order = [], []
    for batch in batches_of(jobs, new_tokens):
        begun, draws = [ids for ids, _ in batch], torch.randint(12, (len(batch),), generator=generator).tolist()
        choices = [OPENING_STARTS if len(ids) < SHORTEST else SAMPLED_STARTS for ids in begun]
        starts = [choice[draw % len(choice)] for choice, draw in zip(choices, draws, strict=True)]
        done += continue_rows(teacher, begun, new_tokens, starts, tokenizer.eos_token_id, generator)
        order += batch
    shard = shard_of(done, [len(job[0]) for job in order], [job[1] for job in order])
    partial = path.with_suffix(".part")
    save_file(shard, partial)
    os.replace(partial, path)
    return len(shard["ids"])


def training_prompts_of(path):
    """The prompts of a file that may be trained on, in an order of their own. Raises UserError."""
    texts = [one for one in read_prompts(path) if not is_held_out(one[1])]
    random.Random(0).shuffle(texts)
    return texts


def target_folder(name):
    """The folder of a target: the embedded one's by its name. Raises UserError where no model is in it."""
    if name == EMBEDDED:
        return str(ensure_target())
    if not (pathlib.Path(name) / "config.json").exists():
        raise UserError(f"--target {name}: no folder of a model; give one, or '{EMBEDDED}'")
    return name


def make_shards(teacher, tokenizer, args, texts):
    """Shards up to the number asked for; those that are there are kept, the time left told."""
    for number in range(args.first, args.first + args.shards):
        path = args.out / f"shard-{number:04d}.safetensors"
        if not path.exists():
            begun = time.process_time()
            tokens = make_shard(teacher, tokenizer, path, number, args.rows, args.new_tokens, texts, args.chat)
            seconds = time.process_time() - begun
            left = (args.first + args.shards - number - 1) * seconds / 60
            say(f"{path.name}: {tokens} tokens, {tokens / seconds:.0f} a CPU second, {left:.1f} CPU minutes left")


def parse_args(argv):
    parser = training_parser(
        __doc__,
        "folder of the target, or 'smollm2'",
        "folder for the shards; those that are there are kept",
        '.jsonl of {"kind", "prompt"}; without it the target asks itself',
    )
    parser.add_argument("--chat", type=fraction, default=CHAT, help="share of the rows through the chat template")
    parser.add_argument("--first", type=at_least(0), default=0, help="number of the first shard")
    parser.add_argument("--shards", type=at_least(1), default=20, help="shards wanted from there on")
    parser.add_argument("--rows", type=at_least(1), default=512, help="rows a shard")
    parser.add_argument("--new-tokens", type=at_least(1), default=NEW_TOKENS, help="tokens continued a row")
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    args.target = target_folder(args.target)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    texts = training_prompts_of(args.prompts) if args.prompts else []
    make_shards(Teacher(args.target), AutoTokenizer.from_pretrained(args.target), args, texts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
