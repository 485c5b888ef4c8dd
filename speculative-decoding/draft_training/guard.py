"""What no draft may be trained on: the texts that acceptance is reported on, and what the target itself writes after
them.

Alpha is measured on the continuations, so a training row that shares a dozen ids in a row with one would be an answer
learnt by heart. Kept out are the five workloads, the grounded prompts, the held-out prompts and every prompt of the
files that the caller names (`--keep-out FILE.jsonl`), each with the target's greedy text after it.
"""

import hashlib
import json
import os
import sys

from spec_common import UserError

from draft_training.prompts import HELD_OUT, as_ids
from draft_training.teacher import continue_rows
from workloads import GROUNDED, WORKLOADS

RUN = 12  # ids in a row that a training row may not share with a reported text: about eight words
CONTINUED = 128  # greedy tokens of the target after each reported prompt: twice what the tables measure
AT_ONCE = 64  # prompts continued in one batch


def runs(ids, length=RUN):
    """Every run of `length` ids in a row."""
    return {tuple(ids[at : at + length]) for at in range(len(ids) - length + 1)}


def read_turns(path):
    """The user's turns of every line of a .jsonl file. Raises UserError."""
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"--keep-out {path.name}: {getattr(error, 'strerror', None) or error}") from error
    turns = [
        one.get("turns") or one.get("prompt") or one.get("text") if isinstance(one, dict) else one for one in records
    ]
    if not records or not all(turns):
        raise UserError(f"--keep-out {path.name}: every line needs turns, prompt or text; give a .jsonl of prompts")
    return [[one] if isinstance(one, str) else one for one in turns]


def reported_texts(files=()):
    """(text, through the chat template) of every prompt that a figure is reported on, later turns included."""
    plain = [*WORKLOADS.values(), *GROUNDED.values()]
    held = [(text, kind == "chat") for kind, texts in HELD_OUT.items() for text in texts]
    asked = [(turn, True) for path in files for turns in read_turns(path) for turn in turns]
    return [(text, False) for text in plain] + held + asked


def continue_all(teacher, prompts, stop_id):
    """The target's greedy ids after each prompt, as it writes them alone; prompts of like length share a batch."""

    order, texts = sorted(range(len(prompts)), key=lambda at: len(prompts[at])), [None] * len(prompts)
    for first in range(0, len(order), AT_ONCE):
        batch = order[first : first + AT_ONCE]
        rows = continue_rows(teacher, [prompts[at] for at in batch], CONTINUED, [0] * len(batch), stop_id)
        for at, row in zip(batch, rows, strict=True):
            texts[at] = row[0][len(prompts[at]) :].tolist()
        print(f"\rreported texts: {first + len(batch)} of {len(order)} continued ", end="", file=sys.stderr, flush=True)
    return texts


def continuations(teacher, prompts, stop_id, path):
    """The same, kept in `path` for as long as the prompts are these. `teacher`: called where they must be written."""
    digest = hashlib.sha256(json.dumps([prompts, stop_id, CONTINUED]).encode()).hexdigest()
    if path.exists() and (stored := json.loads(path.read_text()))["prompts_sha256"] == digest:
        return stored["continuations"]
    texts = continue_all(teacher(), prompts, stop_id)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps({"prompts_sha256": digest, "continuations": texts}))
    os.replace(partial, path)
    return texts


def kept_out_runs(tokenizer, teacher, path, files=(), said=(), longest=1024):
    """The runs that no training row may hold: of every reported prompt as it is read (without the template, whose ids
    every row shares), of the target's text after it, and of `said`, its text after what is held out (lists of ids).
    Prompts over `longest` ids are guarded, not continued."""
    texts = reported_texts(files)
    plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in texts]
    asked = [ids for text, chat in texts if len(ids := as_ids(tokenizer, text, chat)) <= longest]
    written = continuations(teacher, asked, tokenizer.eos_token_id, path)
    return set().union(*(runs(ids) for ids in [*plain, *written, *said]))
