"""Loading one model, whole and fit to run: its weights, its tokenizer, what the result file says of them."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from spec_common import UserError, dtype_name, first_line, is_out_of_memory, remark, say

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.initialization import no_init_weights

from spec_models import linear as cpu_linear
from spec_models.checkpoint import check_complete, check_formats, check_generation_config, overridden
from spec_models.checks import Loaded
from spec_models.depth import at_depth, depth_of
from spec_models.embedded import MANIFEST, load_gguf, sha256
from spec_models.find import EMBEDDED, SHIPPED_CONFIGS, explain, locate, read_config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
hub_logging.set_verbosity_error()  # it writes a line for each of its tries; what comes of them is said in one

SHARE_KEY_HEADS = "TRANSFORMERS_SDPA_FORCE_GQA"


def share_key_heads(device: torch.device) -> bool:
    """Have transformers' attention on a CPU look at each key head once for all queries that share it, unless the user has
    said otherwise: with several rows and a mask it copies keys and values once per query head instead. The same for every
    arm and kind of linear layer; whether it is on goes into the result file."""
    if device.type == "cpu":
        os.environ.setdefault(SHARE_KEY_HEADS, "1")
    return os.environ.get(SHARE_KEY_HEADS) == "1"


def parameter_bytes(config, dtype: torch.dtype, trust: bool) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust)
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize


def placement(needed_bytes: int, device: torch.device, name: str, flag: str) -> dict:
    """How to place a model of that size: on the device, or spread by accelerate where the GPU alone is too small.

    Raises UserError where the machine's memory cannot hold it.
    """
    import psutil

    ram = psutil.virtual_memory().available
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if needed_bytes > 0.9 * free:
            say(
                f"{flag} {name}: {needed_bytes / 1e9:.1f} GB do not fit in {free / 1e9:.1f} GB free on {device}: spread with device_map=auto"
            )
            return {"device_map": "auto"}
    elif needed_bytes > 0.95 * ram:
        raise UserError(
            f"{flag} {name}: needs {needed_bytes / 1e9:.1f} GB and {ram / 1e9:.1f} GB are free; choose a smaller model or --dtype float16"
        )
    return {"device_map": str(device)}


def random_model(config, device: torch.device, dtype: torch.dtype, trust: bool = False):
    """A model of that config with random weights, made on the device in the dtype: its cost is the real one's."""
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust)
    model.tie_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights of 1 and small matrices keep every value finite through the layers in half precision.
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.uniform_(-0.02, 0.02)
    return model


def load_random(
    name: str, flag: str, device: torch.device, dtype: torch.dtype, revision=None, trust=False, part: int | None = None
) -> Loaded:
    """A model of that shape; with `part` the first 2 * `part` of its layers. Raises UserError."""
    shipped = re.sub(r"-instruct$", "", name.split("/")[-1].lower())
    where = str(SHIPPED_CONFIGS.get(shipped) or locate(name, flag))
    config = read_config(where, name, flag, revision, trust)
    depth = part and depth_of(config, part, name, flag, trust)
    config = at_depth(config, 2 * part) if part else config
    try:
        placement(parameter_bytes(config, dtype, trust), device, name, flag)
        model = random_model(config, device, dtype, trust)
    except (ValueError, RuntimeError) as error:
        raise explain(error, name, flag) from error
    shown = shown_name(name)
    about = {"name": shown, "weights": "random", "parameters": model.num_parameters()}
    about |= {"layers": depth.whole, "layers_measured": [part, 2 * part]} if depth else {}
    return Loaded(model.eval(), None, shown, flag, {**about, "shared_key_heads": share_key_heads(device)})


def shown_name(name: str) -> str:
    """The name for tables and result files: of a folder or file its last part, since no home folder belongs there."""
    path = Path(name).expanduser()
    is_path = name != EMBEDDED and (path.is_absolute() or path.exists())
    return Path(os.path.abspath(path)).name if is_path else name


def weights_about(where: str, config) -> dict:
    """What identifies the weights in the result file: the hub's commit, or the hash of the files."""
    path = Path(where)
    if not path.exists():
        return {"revision": getattr(config, "_commit_hash", None)}
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.json")])
    return {
        "sha256": hashlib.sha256("".join(sha256(file) for file in files if file.name != MANIFEST).encode()).hexdigest()
    }


def load_weights(where: str, dtype: torch.dtype, placed: dict, revision: str | None, trust: bool) -> tuple:
    """(model, what transformers says of its keys). safetensors or GGUF only."""
    if where.endswith(".gguf"):
        return load_gguf(Path(where), dtype, **placed)
    return AutoModelForCausalLM.from_pretrained(
        where, dtype=dtype, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
        revision=revision, trust_remote_code=trust, **placed,
    )  # fmt: skip


def load_tokenizer(where: str, name: str, flag: str, revision: str | None, trust: bool):
    """The tokenizer that lies with a model. Raises UserError."""
    try:
        if where.endswith(".gguf"):
            return AutoTokenizer.from_pretrained(Path(where).parent, gguf_file=Path(where).name)
        return AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=trust)
    except Exception as error:  # every kind of tokenizer raises its own
        raise UserError(
            f"{flag} {name}: its tokenizer cannot be loaded ({first_line(error)}); put its tokenizer.json and tokenizer_config.json beside the weights"
        ) from error


def load(
    name: str, flag: str, device: torch.device, dtype: torch.dtype, revision: str | None = None, trust: bool = False
) -> Loaded:
    """Load a model and its tokenizer from a hub id, folder or .gguf file; safetensors only. Raises UserError."""
    where = locate(name, flag)
    config = read_config(where, name, flag, revision, trust)
    if not where.endswith(".gguf"):
        check_generation_config(where, name, flag, revision)
    try:
        placed = placement(parameter_bytes(config, dtype, trust), device, name, flag)
        model, info = load_weights(where, dtype, placed, revision, trust)
    except (UserError, KeyboardInterrupt):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(
                f"{flag} {name}: out of memory while loading; choose a smaller model or --dtype float16"
            ) from error
        raise explain(error, name, flag) from error
    check_complete(info, config, name, flag)
    check_formats(where, config, name, flag)
    tokenizer = load_tokenizer(where, name, flag, revision, trust)
    shown = shown_name(name)
    check_finite(model, shown, flag)
    about = {"name": shown, **weights_about(where, config), "parameters": model.num_parameters()}
    about |= {
        "shared_key_heads": share_key_heads(device),
        "generation_config_overridden": remark_overridden(model, shown, flag),
    }
    return Loaded(model.eval(), tokenizer, shown, flag, about)


def check_finite(model, shown: str, flag: str) -> None:
    """Refuse weights that are not finite, by name. Raises UserError."""
    damaged = cpu_linear.first_not_finite(model)
    if damaged is not None:
        raise UserError(
            f"{flag} {shown}: {damaged} holds values that are not finite in {dtype_name(model.dtype)}; the checkpoint is "
            "damaged (fetch it anew) or needs another --dtype"
        )


def remark_overridden(model, shown: str, flag: str) -> dict:
    """What its generation config asks for and no run does, with a remark."""
    asked = overridden(model)
    if asked:
        names = ", ".join(f"{key} = {value}" for key, value in asked.items())
        remark(
            f"{flag} {shown}: its generation config asks for {names}; left out, every token is the most likely one or "
            "drawn as the script says"
        )
    return asked


def linear_kind(args, device: torch.device, dtype: torch.dtype) -> str:
    """The kind of linear layers that --cpu-linear means here, with a remark where the dtype is emulated. Raises UserError."""
    try:
        kind = cpu_linear.choose(args.cpu_linear, device, dtype)
    except ValueError as error:
        raise UserError(str(error)) from error
    slower = cpu_linear.emulation_factors(device, dtype)
    if slower is not None:
        say(
            f"--dtype {dtype_name(dtype)}: this processor has no instructions for it; emulated, a linear layer takes "
            f"{slower[8]:.1f} times as long as in float32 over 8 rows, {slower[64]:.1f} times over 64"
        )
    return kind


def pack_linear(loaded: Loaded, kind: str, done: dict | None = None) -> None:
    """Pack a model's linear layers in place, in transformers' own form too where that is kept; what stays plain is
    counted and said. `done`: as in linear.pack. Raises UserError."""
    forms = [loaded.model] if loaded.plain in (None, loaded.model) else [loaded.model, loaded.plain]
    try:
        left = cpu_linear.pack(forms, kind, done)
    except UserError as error:
        raise UserError(f"{loaded.flag} {loaded.name}: {error}") from error
    loaded.about.update(cpu_linear=kind, plain_linears=len(left))
    if loaded.model.device.type == "cpu":
        loaded.about["cpu_linear_trial_ms"] = cpu_linear.trial_ms(loaded.model.dtype)
    if left:
        say(
            f"{loaded.flag} {loaded.name}: {len(left)} linear layers stay plain, the first {left[0]}: half precision "
            "cannot hold their weights"
        )
