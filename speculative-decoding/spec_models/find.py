"""Finding one model by its name, a hub id, a folder, a `.gguf` file, or `smollm2` (the embedded target), and its config."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from spec_common import HERE, UserError, first_line

import transformers
from transformers import AutoConfig

from spec_cli import reachable
from spec_models.checkpoint import check_config, stored_config
from spec_models.embedded import check_gguf, ensure_target

EMBEDDED = "smollm2"
# Shapes that `--random-weights` knows without a hub: the published configs of the essay's family.
SHIPPED_CONFIGS = {path.parent.name: path.parent for path in (HERE / "spec_models" / "configs").glob("*/config.json")}


def hub_is_out_of_reach() -> bool:
    """True if the hub cannot be reached; asked first because its client tries for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    host = re.sub(r"^https?://", "", constants.ENDPOINT).split("/")[0].split(":")[0]
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        import urllib.request

        return not urllib.request.getproxies()
    return False


def locate(name: str, flag: str) -> str:
    """Where the model of that name is to be loaded from. Raises UserError if it is nowhere, before any slow try."""
    if not name.strip():
        raise UserError(f"{flag}: empty; give a hub id, a folder or a .gguf file")
    if name == EMBEDDED:
        return str(ensure_target())
    path = reachable(name, flag)
    if path.exists():
        if not path.is_dir() and path.suffix != ".gguf":
            raise UserError(f"{flag} {name}: a file; give the folder it is in, or a .gguf file")
        return str(path)
    if not re.fullmatch(r"[\w-]+/[\w.-]+|[\w-][\w.-]*", name) or path.suffix == ".gguf":
        raise UserError(f"{flag} {name}: no such file or folder")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise UserError(f"{flag} {name}: no such file or folder, and no name that the hub could have") from error
    if not cached and hub_is_out_of_reach():
        known = "a folder or a .gguf file, " + (ships() if flag == "--draft" else f"or '{EMBEDDED}'")
        shape = "; of that shape alone costs can be measured, with --random-weights" if name in SHIPPED_CONFIGS else ""
        raise UserError(
            f"{flag} {name}: no such folder, and the model hub is offline or out of reach; give {known}{shape}"
        )
    return name


def ships() -> str:
    """The drafts of the repository by name, for a message."""
    return f"one that ships ({', '.join(sorted(path.stem for path in (HERE / 'drafts').glob('*.safetensors')))}) or cut:0,1,23"


def explain(error: BaseException, name: str, flag: str) -> UserError:
    """The one line that says what to do about a model that does not load."""
    text = str(error)
    hints = (
        ("gated", "the model is gated: accept its licence on the hub and log in with `hf auth login`"),
        ("trust_remote_code", "it needs its own code; read that code, then pass --trust-remote-code"),
        ("no file named model.safetensors", "it has no safetensors weights, the only kind loaded here; give a folder with a model.safetensors, or a .gguf file"),
        ("not a valid model identifier", "not a folder here and not a model on the hub"),
        ("couldn't connect", f"the model hub is out of reach; give a folder or a .gguf file, or '{EMBEDDED}'"),
        ("not a valid JSON", "its config.json cannot be read"),
        ("does not recognize this architecture", "its architecture is not known to this version of transformers"),
        ("Padding_idx must be within", "its config.json has a pad_token_id outside of its vocab_size"),
    )
    hint = next((hint for mark, hint in hints if mark in text), reason(error))
    return UserError(f"{flag} {name}: {hint}")


def reason(error: BaseException) -> str:
    """What an error of a library says: its first line, with the second where the first only announces it."""
    if isinstance(error, KeyError):
        return f"its config.json names {error}, which this version of transformers does not know"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if len(lines) > 1 and lines[0].endswith(":") else first_line(error)


def read_config(where: str, name: str, flag: str, revision: str | None, trust: bool):
    """The config, refused where the class cannot write left to right. Raises UserError."""
    try:
        if where.endswith(".gguf"):
            check_gguf(Path(where))
            return AutoConfig.from_pretrained(Path(where).parent, gguf_file=Path(where).name)
        config = AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=trust)
    except Exception as error:  # every loader of transformers raises its own kinds
        check_config(stored_config(where), name, flag)
        raise explain(error, name, flag) from error
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    if not known:
        kind = "an encoder-decoder" if config.is_encoder_decoder else f"a '{config.model_type}' model"
        raise UserError(f"{flag} {name}: {kind}, not a causal language model; choose one that writes left to right")
    check_config(config.get_text_config(decoder=True), name, flag)
    return config
