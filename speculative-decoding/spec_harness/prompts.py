"""Prompts from a file, by what is in it: one text, or a record a line (.jsonl) or an item (.json), in the common
shapes.

A record is a string or an object with `prompt`, `text`, `question`, `instruction` (and `input`), `messages`,
`conversations` (ShareGPT's) or `turns`. Of a conversation the first turn of the user is the prompt; the rest is counted
and said, and so is what kinds (`category` or `kind`) the records are of.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from spec_common import UserError, remark

KEYS = ("prompt", "text", "question", "instruction", "messages", "conversations", "turns")
KINDS = ("category", "kind")
RECORDS = (".json", ".jsonl", ".ndjson")
TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".xlsx")
USERS = ("user", "human", "prompter")  # what conversations call the one who asks


def content(turn: object) -> object:
    """The words of one turn: a string, a message of OpenAI's shape (its content in parts or whole), or of
    ShareGPT's."""
    words = next((turn[key] for key in ("content", "value") if key in turn), None) if isinstance(turn, dict) else turn
    if isinstance(words, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in words]
        words = "\n".join(part for part in parts if isinstance(part, str))
    return words


def first_turn(turns: list) -> tuple[object, int]:
    """(the words of the user's first turn, how many other turns the user's words or the system's would have made)."""
    who = [turn.get("role", turn.get("from")) if isinstance(turn, dict) else "user" for turn in turns]
    asked = [turn for turn, name in zip(turns, who, strict=True) if name in USERS]
    if not asked:
        raise ValueError(f"no turn of the user in it; one of {', '.join(USERS)} must speak")
    return content(asked[0]), len(asked) - 1 + sum(name in ("system", "developer") for name in who)


def prompt_of(record: object) -> tuple[str, int]:
    """(the prompt of one record, how many turns it leaves out). Raises ValueError."""
    value, left_out = record, 0
    if isinstance(record, dict):
        value = next((record[key] for key in KEYS if record.get(key) is not None), None)
        if value is record.get("instruction") and isinstance(record.get("input"), str) and record["input"].strip():
            value = f"{value}\n\n{record['input']}"
    if isinstance(value, list) and value:
        value, left_out = first_turn(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"needs a string, or an object with one of {', '.join(KEYS)}")
    return value, left_out


def kind_of(record: object) -> str:
    """What a record says it is; "" where it says nothing."""
    kind = next((record[key] for key in KINDS if record.get(key)), "") if isinstance(record, dict) else ""
    return kind if isinstance(kind, str) else ""


def decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError("not a text in UTF-8; save it as one") from error


def parsed(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f", line {error.lineno}" if error.lineno > 1 else ""
        raise ValueError(f"{error.msg}{place}, column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def is_json(data: bytes) -> bool:
    try:
        parsed(decoded(data))
    except ValueError:
        return False
    return True


def records(data: bytes, lined: bool) -> Iterator[tuple[int, Callable[[], object]]]:
    """(number, what gives the record) of a file: each line is one if the first is, else the whole is a list or one
    record.

    A line is parsed only when it is asked for, so that lines past a limit cannot fail a run. `lined`: what the file's
    name promises, believed where neither can be read.
    """
    lines = [(number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip()]
    if len(lines) > 1 and (is_json(lines[0][1]) or (lined and not is_json(data))):
        yield from ((number, lambda line=line: parsed(decoded(line))) for number, line in lines)
    elif lines:
        whole = parsed(decoded(data))
        yield from (
            (number, lambda one=one: one) for number, one in enumerate(whole if isinstance(whole, list) else [whole], 1)
        )


def file_bytes(path: Path) -> bytes:
    """What is in a file, unpacked where it is gzip's, without a mark of its byte order. Raises ValueError, OSError."""
    data = path.read_bytes()
    if data.startswith(b"\x1f\x8b"):
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path.name}: not a whole gzip file ({error})") from error
    return data.removeprefix(b"\xef\xbb\xbf")


class Wanted(NamedTuple):
    """Which records of a file: the first `limit` of it; of those `sample`, drawn by `seed`; `skip_bad`: all that can be read."""

    limit: int | None = None
    sample: int | None = None
    seed: int = 0
    skip_bad: bool = False


def read_records(data: bytes, name: str, lined: bool, wanted: Wanted) -> list[tuple[str, str]]:
    """(name, prompt) of the records wanted, in the file's order. Raises ValueError naming the line, UserError for a sample of
    more than there are."""
    found, bad = [], []
    for number, record in islice(records(data, lined), wanted.limit):
        try:
            content = record()
            found.append((f"{name}:{number}", *prompt_of(content), kind_of(content)))
        except ValueError as error:
            if not wanted.skip_bad:
                raise ValueError(f"{name}:{number}: {error}") from error
            bad.append(f"{name}:{number}: {error}")
    if bad:
        remark(f"{len(bad)} of {len(bad) + len(found)} rows are skipped, the first {bad[0]}")
    if wanted.sample is not None:
        if wanted.sample > len(found):
            raise UserError(f"--sample {wanted.sample}: {name} has {len(found)} prompts; lower it")
        drawn = random.Random(wanted.seed).sample(range(len(found)), wanted.sample)
        found = [found[at] for at in sorted(drawn)]
    kinds = Counter(kind for _, _, _, kind in found if kind)
    if kinds:
        remark(f"{name}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")
    if left_out := [turns for _, _, turns, _ in found if turns]:
        remark(
            f"{name}: the user's first turn is the prompt; {sum(left_out)} other turns in {len(left_out)} rows are left out"
        )
    return [(where, prompt) for where, prompt, _, _ in found]


def read_prompts(path: Path, wanted: Wanted = Wanted(), flag: str = "--prompt-file") -> list[tuple[str, str]]:  # noqa: B008
    """(name, prompt) of the prompts wanted of a file. Raises UserError naming the file, and the line where one is bad."""
    path = Path(path).expanduser()
    kind = Path(path.name.lower().removesuffix(".gz")).suffix
    if kind in TABLES:
        raise UserError(f'{flag} {path.name}: a table; give a .jsonl with an object such as {{"prompt": "..."}} a line')
    try:
        data = file_bytes(path)
        if kind in RECORDS:
            found = read_records(data, path.name, kind != ".json", wanted)
        else:
            found = [(path.name, decoded(data).replace("\r\n", "\n").replace("\r", "\n"))]
    except OSError as error:
        raise UserError(f"{flag} {path.name}: {error.strerror or error}; name a text, or a .jsonl or .json of prompts") from error
    except ValueError as error:
        where = "" if str(error).startswith(path.name) else f"{path.name}: "
        raise UserError(f"{flag} {where}{error}") from error
    if not any(prompt.strip() for _, prompt in found):
        raise UserError(f"{flag} {path.name}: no prompt in it; give some text")
    return found
