"""What a draft is judged on while it trains: the target's greedy text after prompts that no training row comes from."""

import json
import os
import sys

import torch

from draft_training.prompts import KINDS, held_out_prompts
from draft_training.requests import is_held_out, read_prompts, templated

HELD_OUT_TOKENS = 96  # greedy tokens a held-out prompt
HELD_OUT_A_KIND, LONGEST_HELD_OUT = 10, 300  # prompts of a file that are judged on, of each of its kinds; ids of one


def write_json(path, data):
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(data, indent=1))
    os.replace(partial, path)


def own_held_out(tokenizer, path):
    """(kind, ids) of the prompts of a file that are kept from training, a few of each of its kinds, through the
    template."""
    found = {}
    for kind, text in read_prompts(path):
        if is_held_out(text) and len(ids := templated(tokenizer, [text])) <= LONGEST_HELD_OUT:
            found.setdefault(f"file {kind}".strip(), []).append(ids)
    return [(kind, ids) for kind, rows in found.items() for ids in rows[:HELD_OUT_A_KIND]]


def held_out(target, tokenizer, path, prompts=None):
    """The held-out set, made once: the target's greedy text (float32) for prompts that training never sees."""
    if path.exists():
        return json.loads(path.read_text())
    print("writing the held-out texts, once (a minute or two, outside the budget) ...", file=sys.stderr, flush=True)
    pairs, stop = held_out_prompts(tokenizer), tokenizer.eos_token_id
    pairs += own_held_out(tokenizer, prompts) if prompts else []
    width = max(len(ids) for _, ids in pairs)
    ids = torch.tensor([[stop] * (width - len(ids)) + ids for _, ids in pairs])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for _, ids in pairs])
    out = target.generate(ids, attention_mask=mask, max_new_tokens=HELD_OUT_TOKENS, do_sample=False).tolist()
    rows = []
    for (kind, prompt), row in zip(pairs, out, strict=True):
        text = row[width:]
        rows.append(
            {"kind": kind, "prompt": prompt, "continuation": text[: text.index(stop) + 1] if stop in text else text}
        )
    write_json(path, rows)
    return rows


@torch.inference_mode()
def agreement(draft, rows):
    """Share of the target's greedy tokens that are the draft's own choice over the full vocabulary, by kind: alpha."""
    hits = {row["kind"]: [] for row in rows}
    for row in rows:
        ids = torch.tensor([row["prompt"] + row["continuation"]])
        logits = draft(ids[:, :-1], logits_to_keep=len(row["continuation"])).logits[0]
        hits[row["kind"]] += (logits.argmax(-1) == torch.tensor(row["continuation"])).tolist()
    table = {kind: sum(found) / max(1, len(found)) for kind, found in hits.items()}
    five = [table[kind] for kind in KINDS if kind != "chat" and kind in table]
    return table | ({"mean5": sum(five) / len(five)} if five else {})
