"""What a checkpoint must be before it is run: sizes that exist, every tensor and no other, settings that can be
read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

from spec_common import UserError

from safetensors import safe_open
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file

# Keys of a checkpoint that no model needs: buffers that old versions stored, heads that predict several tokens at once.
HARMLESS_KEYS = re.compile(r"rotary_emb\.inv_freq$|(attn|attention)\.(masked_)?bias$|position_ids$|^(model\.)?mtp\.")
AT_LEAST_ONE = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


def stored_config(where: str) -> SimpleNamespace:
    """The fields of a folder's config.json as they stand there; none where it cannot be read."""
    try:
        return SimpleNamespace(**json.loads((Path(where) / "config.json").read_text()))
    except (OSError, ValueError, TypeError):
        return SimpleNamespace()


def check_config(config, name: str, flag: str) -> None:
    """Refuse sizes that no model can have, by the name of the field. Raises UserError."""
    own, fields = getattr(config, "attribute_map", {}), vars(config)  # a property, as XLNet's length of -1, is no field
    for field in (own.get(field, field) for field in AT_LEAST_ONE):
        value = fields.get(field)
        if isinstance(value, int) and value < 1:
            raise UserError(f"{flag} {name}: its config.json has {field} = {value}; a model needs at least 1")


def check_generation_config(where: str, name: str, flag: str, revision: str | None) -> None:
    """Refuse a generation_config.json that cannot be read: transformers would go on without it. Raises UserError."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    path = cached_file(where, "generation_config.json", revision=revision, **quiet)
    try:
        readable = path is None or isinstance(json.loads(Path(path).read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        readable = False
    if not readable:
        raise UserError(f"{flag} {name}: its generation_config.json cannot be read; mend it or remove it")


def check_complete(info: dict, config, name: str, flag: str) -> None:
    """Refuse a checkpoint without every weight (transformers would fill them in at random), or with weights the model
    has no place for (it would drop them: scales of an 8-bit format, layers or biases its config lacks). Raises
    UserError."""
    if info["mismatched_keys"]:
        key, stored, wanted = sorted(info["mismatched_keys"])[0]
        sizes = f"is {list(stored)} in the weights and {list(wanted)} by config.json"
        raise UserError(f"{flag} {name}: {key} {sizes}; the two do not belong together")
    unknown = sorted(key for key in info["unexpected_keys"] if not harmless(key, config))
    absent = sorted(info["missing_keys"])
    if absent:
        also = f"; it has others such as {unknown[0]}: is it a draft head for another engine?" if unknown else ""
        raise UserError(
            f"{flag} {name}: the checkpoint is incomplete, {len(absent)} weights are missing, the first {absent[0]}{also}"
        )
    if unknown:
        why = "its config.json is another model's, or its format is not known to transformers"
        if name.endswith(".gguf"):
            why = "transformers would leave them out; give the folder that the file was made from"
        raise UserError(
            f"{flag} {name}: the checkpoint holds {len(unknown)} weights that its model has no place for, the first {unknown[0]}; {why}"
        )


def check_formats(where: str, config, name: str, flag: str) -> None:
    """Refuse a folder's weights that are whole numbers where nothing says how to unpack them: transformers would take
    the numbers for the weights. Raises UserError."""
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    for path in sorted(Path(where).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in sorted(file.keys()):
                stored = file.get_slice(key).get_dtype()
                if key.endswith(".weight") and stored.startswith(("I", "U")):
                    raise UserError(
                        f"{flag} {name}: {key} is stored as {stored}, and its config.json names no format known to transformers "
                        f"({method or 'no quantization_config'}); give the model in half precision"
                    )


def harmless(key: str, config) -> bool:
    """Whether a stored weight may be left out: a known leftover, or a layer that the config says predicts further
    ahead."""
    text = config.get_text_config(decoder=True)
    ahead = range(getattr(text, "num_nextn_predict_layers", None) or 0)
    extra = [f"layers.{text.num_hidden_layers + number}." for number in ahead]
    return bool(HARMLESS_KEYS.search(key)) or any(layer in key for layer in extra)


def overridden(model) -> dict:
    """What the checkpoint's own generation config asks for and a greedy comparison must leave out."""
    harmless = (
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "transformers_version",
        "use_cache",
        "_from_model_config",
    )
    asked = model.generation_config.to_diff_dict() if model.generation_config else {}
    return {
        name: value
        for name, value in asked.items()
        if name not in harmless and not name.startswith(("output_", "return_"))
    }
