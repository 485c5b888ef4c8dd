"""Result files: strict JSON, written whole after every row, resumable."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import re
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from spec_common import HERE, UserError, say

import numpy as np
import torch
from filelock import FileLock, Timeout

from spec_cli import replaceable
from spec_harness.machine import load_average

SCHEMA_VERSION = 2
TEXTS = ("--prompt", "--text")
MAY_DIFFER = ("load_average_1m", "load_average_1m_at_the_end", "cpu_busy", "git_dirty")  # of the environment, on resuming
# Options that change where things go, not what is measured: they may differ between a run and its resumption.
NOT_SETTINGS = {"results", "resume", "revision", "draft_revision", "compared", "wide"}


def plain(value):
    """Scalars of numpy and torch to Python's; NaN and infinity to null, so that a strict reader takes the file."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, (Path, torch.device, torch.dtype)) else value


def write_json(path: Path, document: dict) -> None:
    """Write whole or not at all: a reader, or a kill at any moment, finds the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(half, "w", encoding="utf-8") as file:
            json.dump(plain(document), file, indent=1, allow_nan=False, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def measured_hash(document: dict) -> str:
    """Signs what was measured, where and how: the sha256 of all of a document but the signature, as JSON whose keys are
    sorted. Raises ValueError for a NaN, which no run writes."""
    signed = {name: part for name, part in document.items() if name != "measured_sha256"}
    return hashlib.sha256(json.dumps(signed, sort_keys=True, allow_nan=False).encode()).hexdigest()


def was_edited(document: dict) -> bool:
    """Whether anything in it is not what was signed."""
    try:
        return document.get("measured_sha256") != measured_hash(document)
    except ValueError:
        return True


def without_folder(value):
    """A path from the root, the home or a folder above, alone or in a list, shortened to its name: no folder of this
    machine goes into a file."""
    if isinstance(value, (list, tuple)):
        return [without_folder(item) for item in value]
    leads_out = isinstance(value, (str, Path)) and (os.path.isabs(value) or str(value).startswith(("~", "..")))
    return Path(value).name if leads_out else value


def clear_unfinished(path: Path) -> None:
    """Remove what runs that were killed while they wrote `path` left behind. The caller holds the file's lock."""
    for half in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        half.unlink(missing_ok=True)


def shown_command() -> str:
    """The command line without any folder of this machine."""
    script = Path(sys.argv[0])
    inside = HERE in script.resolve().parents and script.resolve().parent != HERE  # what is in a folder is run with -m
    words, before = ["-m", f"{script.parent.name}.{script.stem}"] if inside else [script.name], ""
    for word in sys.argv[1:]:
        option, equals, value = word.partition("=")
        if option in TEXTS or before in TEXTS:  # a prompt may begin like a path
            words.append(word)
        else:
            words.append(
                f"{option}={without_folder(value)}" if equals and option.startswith("--") else without_folder(word)
            )
        before = word
    return shlex.join(["python", *words])


def settings(args, **more) -> dict:
    """The `config` of a result file: every option after defaults, and what was found on loading (`more`)."""
    options = {name: value for name, value in vars(args).items() if name not in NOT_SETTINGS}
    return plain(
        {**{name: value if f"--{name}" in TEXTS else without_folder(value) for name, value in options.items()}, **more}
    )


def lasting(setting):
    """A setting without what was timed to choose it, which comes out otherwise in every run."""
    if isinstance(setting, list):
        return [lasting(one) for one in setting]
    if not isinstance(setting, dict):
        return setting
    return {name: lasting(one) for name, one in setting.items() if not name.endswith("_ms")}


def first_difference(name: str, there, here) -> str | None:
    """Where two settings differ, by its own name inside of them; None where they do not."""
    there, here = lasting(there), lasting(here)
    if there == here:
        return None
    if isinstance(there, dict) and isinstance(here, dict):
        inside = (first_difference(f"{name}.{key}", there.get(key), here.get(key)) for key in [*here, *there])
        return next(filter(None, inside), None)
    return f"{name}: {there} there, {here} here"


def both_loaded(here, there):
    """The states here of the files that both runs loaded, and there of all the others: what one alone loads is called by a
    file of another state, if it is called at all."""
    if not isinstance(here, dict) or not isinstance(there, dict):
        return here
    return {name: here.get(name, state) for name, state in there.items()}


class ResultFile:
    """One result file while it is being made: `rows` found on resuming, `add` for each new one.

    Rows are found again by `cell`, the values that name a cell of the sweep. Raises UserError where --resume finds a
    file of other settings (strict), or where the file cannot be written.
    """

    def __init__(self, path: Path, experiment: str, config: dict, where: dict, resume: str | None):
        self.path = replaceable(path)
        self.document = {
            "schema_version": SCHEMA_VERSION,
            "experiment": experiment,
            "status": "running",
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shown_command(),
            "environment": where,
            "config": config,
            "measured_sha256": "",
            "rows": [],
            "summary": {},
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0)
            self.lock.acquire()
            clear_unfinished(self.path)
            if self.path.exists():
                self.take_up(resume)
        except Timeout as error:
            raise UserError(f"--results {path}: another run is writing it; name another file") from error
        except OSError as error:
            raise UserError(
                f"--results {path}: the file that is there or its folder cannot be written ({error.strerror or error}); name another"
            ) from error
        self.write()

    @property
    def rows(self) -> list[dict]:
        return self.document["rows"]

    def take_up(self, resume: str | None) -> None:
        """Go on from the file that is there, or move it aside: nothing measured is ever lost."""
        try:
            old = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            old = {}
        old = old if isinstance(old, dict) else {}
        differs = self.difference(old)
        if resume and not differs:
            self.document["rows"] = [row for row in old["rows"] if not row.get("error")]
            self.document["created_at"] = old.get("created_at")
            say(
                f"going on with {self.path.name} of {old.get('created_at')}: its {len(self.rows)} rows are kept, costs included"
            )
            return
        if resume == "strict":
            raise UserError(
                f"--resume: {self.path.name} was made with other settings ({differs}); leave --resume out to start afresh"
            )
        stamp = re.sub(r"[^0-9A-Za-z+-]", "", str(old.get("created_at", "unreadable")))[:40]
        name = f"{self.path.stem}-{stamp}"
        (self.path.parent / "old").mkdir(exist_ok=True)
        number, aside = 1, self.path.parent / "old" / f"{name}.json"
        while aside.exists():
            number += 1
            aside = aside.with_name(f"{name}-{number}.json")
        os.replace(self.path, aside)
        say(f"the earlier {self.path.name} is kept as old/{aside.name}")

    def difference(self, old: dict) -> str | None:
        """The first setting, or part of the environment, in which an older file differs; None where it can go on."""
        mine = plain(self.document)
        rows = old.get("rows")
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            return "it is no result file"
        for part in ("config", "environment"):
            theirs = old.get(part)
            if not isinstance(theirs, dict):
                return "it is no result file"
            if part == "environment":
                mine[part]["code"] = both_loaded(mine[part].get("code"), theirs.get("code"))
            for name in [*mine[part], *theirs]:
                if name not in MAY_DIFFER and (found := first_difference(name, theirs.get(name), mine[part].get(name))):
                    return found[:200]
        if old.get("experiment") != self.document["experiment"]:
            return f"experiment: {old.get('experiment')} there, {self.document['experiment']} here"
        if old.get("schema_version") != SCHEMA_VERSION:
            return "it has another schema"
        return "it was edited after it was measured" if was_edited(old) else None

    def find(self, **cell) -> dict | None:
        return next(
            (row for row in self.rows if all(row.get(name) == plain(value) for name, value in cell.items())), None
        )

    def add(self, row: dict) -> dict:
        self.rows.append(plain(row))
        self.write()
        return self.rows[-1]

    def finish(self, summary: dict) -> None:
        self.document["summary"] = plain(summary)
        self.document["environment"]["load_average_1m_at_the_end"] = load_average()
        self.document["status"] = "failed" if any(row.get("error") for row in self.rows) else "complete"
        self.write()

    def write(self) -> None:
        self.document["measured_sha256"] = measured_hash(plain(self.document))
        try:
            write_json(self.path, self.document)
        except OSError as error:
            raise UserError(
                f"--results {self.path}: {error.strerror or error}; choose a place that can be written"
            ) from error

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self.document["status"] = "interrupted" if kind is KeyboardInterrupt else "failed"
            self.write()
            what = f"what was measured, {len(self.rows)} rows, is in" if self.rows else "nothing was measured yet; the settings are in"
            say(f"\n{what} {self.path.name}")
        self.lock.release()
