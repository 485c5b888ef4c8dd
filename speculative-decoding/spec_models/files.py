"""A trained draft as one small file: only what was trained, matrices as int8 rows with a float16 scale each.

The embedding and the head are the target's own and are never stored. The scripts build the draft in memory by its name;
for any other tool it is unpacked once into a plain folder:

    python -m spec_models.files draft-s FOLDER     # then AutoModelForCausalLM.from_pretrained(FOLDER)
"""

from __future__ import annotations

import glob
import json
import math
import os
import pathlib
import shutil

from spec_common import HERE, UserError, tell

import psutil
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from spec_cli import Help, Parser, command
from spec_models.embedded import ensure_target

FORMAT = 1
SHARED = ("embed_tokens", "lm_head")  # the target's own: never stored
CONFIG_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def pack_rows(matrix):
    """int8 rows and their float16 scales; a row's largest entry becomes 127."""
    scales = (matrix.float().abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-7).half()
    return torch.round(matrix.float() / scales.float()).clamp(-127, 127).to(torch.int8), scales


def fingerprint(model):
    """32 entries of the embedding: they name the target that a draft belongs to, in whatever precision it is loaded."""
    weight = model.get_input_embeddings().weight.detach().flatten()
    places = torch.arange(1, 33) * (weight.numel() // 33)
    return [round(value, 4) for value in weight[places].float().tolist()]


def same_target(stored, model):
    """Whether `model` is the target of the stored fingerprint, up to half-precision rounding."""
    mine = fingerprint(model)
    return all(abs(a - b) <= 2e-4 + 0.01 * abs(a) for a, b in zip(stored, mine, strict=True))


def kind_of(path) -> str | None:
    """What sort of head the file holds; None: an ordinary draft."""
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata().get("kind", "null"))


def belongs_to(path, model) -> bool:
    """Whether the draft file was trained for `model`."""
    with safe_open(path, "pt") as file:
        return same_target(json.loads(file.metadata()["target"]), model)


def training_of(path) -> dict:
    """What the file's draft was given: `parameters` trained, `tokens` seen and `cpu_minutes` of its last training (null where
    it does not say)."""
    with safe_open(path, "pt") as file:
        card = json.loads(file.metadata().get("card", "{}"))
        names = [name for name in list(file.keys()) if not name.endswith(".scale")]
        sizes = [math.prod(file.get_slice(name).get_shape()) for name in names]
    return {"parameters": sum(sizes), "tokens": card.get("tokens"), "cpu_minutes": card.get("cpu_minutes")}


def write_tensors(path, states, metadata):
    """Write the tensors of a draft, matrices as int8 rows, whole or not at all."""
    tensors = {}
    for name, tensor in states.items():
        if tensor.ndim == 2:
            tensors[name], tensors[name + ".scale"] = pack_rows(tensor)
        else:
            tensors[name] = tensor.float().contiguous()
    path = pathlib.Path(path)
    partial = path.with_suffix(".part")
    save_file(tensors, partial, metadata={key: json.dumps(value) for key, value in metadata.items()})
    os.replace(partial, path)


def trained_states(model):
    """The tensors of a draft that are its own."""
    return {name: tensor for name, tensor in model.state_dict().items() if not any(part in name for part in SHARED)}


def config_of(model, layers):
    """The config of a draft of so many layers, as its file holds it."""
    return {key: getattr(model.config, key, None) for key in CONFIG_KEYS} | {"num_hidden_layers": layers}


def save_draft(path, model, target, layers, card):
    """Write the trained tensors of `model`, cut from `target` at `layers`, with what unpacking needs in the metadata."""
    about = {"config": config_of(model, len(layers)), "layers": list(layers), "target": fingerprint(target)}
    write_tensors(path, trained_states(model), {"format": FORMAT, **about, "card": card})


def read_draft(path):
    """Float32 tensors of the layers and the final norm, and the metadata."""
    with safe_open(path, "pt") as file:
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    if metadata["format"] != FORMAT:
        raise ValueError(f"{path}: draft format {metadata['format']}, this code reads {FORMAT}")
    states = {}
    for name, tensor in tensors.items():
        if not name.endswith(".scale"):
            states[name] = (
                tensor.float() * tensors[name + ".scale"].float() if name + ".scale" in tensors else tensor.float()
            )
    return states, metadata


def read_for(target, path, kind: str | None = None):
    """`read_draft` of a file of that kind that was trained for `target`. Raises ValueError for another."""
    states, metadata = read_draft(path)
    if (found := metadata.get("kind")) != kind:
        raise ValueError(f"{path}: of the kind {found or 'draft'}, not {kind or 'draft'}")
    if not same_target(metadata["target"], target):
        raise ValueError(f"{path} was trained for another target: the entries of its embedding differ from this one's")
    return states, metadata


def build_draft(path, target):
    """The draft as a model in memory, sharing the values of the target's embedding and head. Raises ValueError."""
    states, metadata = read_for(target, path)
    draft = LlamaForCausalLM(LlamaConfig(**metadata["config"]))
    states["model.embed_tokens.weight"] = target.get_input_embeddings().weight.detach().float()
    if not draft.config.tie_word_embeddings:
        states["lm_head.weight"] = target.get_output_embeddings().weight.detach().float()
    mask = states.pop("mask", None)
    missing, unexpected = draft.load_state_dict(states, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"{path}: missing {missing}, unexpected {unexpected}")
    draft.tie_weights()
    if mask is not None:  # read in place of a token that is guessed in the same pass: draft_training/parallel.py
        draft.mask = torch.nn.Parameter(mask, requires_grad=False)
    return draft.eval()


def clear_unfinished(out: pathlib.Path) -> None:
    """Remove what processes that were killed while they unpacked `out` left behind; one that lives is still at it."""
    for partial in out.parent.glob(f"{glob.escape(out.name)}.*.part"):
        number = partial.name.split(".")[-2]
        if number.isdigit() and not psutil.pid_exists(int(number)):
            shutil.rmtree(partial, ignore_errors=True)


def spare_token(tokenizer):
    """The id of a special token that no text uses: the last one added that neither begins, ends nor fills up a text."""
    used = {*tokenizer.all_special_ids, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    spare = [token for token in tokenizer.added_tokens_decoder if token not in used]
    if not spare:
        raise ValueError("the tokenizer has no special token to spare for the mask")
    return max(spare)


def spell_mask(draft, token):
    """A plain model whose embedding of `token` is the mask vector, named as other tools look for it; its head is left as it was."""
    head = draft.get_output_embeddings().weight.detach().clone()
    draft.config.tie_word_embeddings = False
    draft.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)
    with torch.no_grad():
        draft.model.embed_tokens.weight[token] = draft.mask
    del draft.mask
    draft.config.pard_token, draft.config.spd_type = token, "pard"
    return draft


def unpack_draft(path, target, tokenizer, out_folder, dtype=torch.float32):
    """Expand a draft once into a plain model folder; `target` and `tokenizer` are loaded ones or a folder. Returns the folder."""
    out = pathlib.Path(out_folder)
    if (out / "config.json").exists():
        return out
    if isinstance(target, (str, os.PathLike)):
        target = AutoModelForCausalLM.from_pretrained(target)
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    clear_unfinished(out)
    partial = out.with_name(f"{out.name}.{os.getpid()}.part")
    draft = build_draft(path, target)
    if hasattr(draft, "mask"):
        draft = spell_mask(draft, spare_token(tokenizer))
    draft.to(dtype).save_pretrained(partial)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    try:
        os.rename(partial, out)
    except OSError:  # another process was first: its folder is as good
        shutil.rmtree(partial)
        if not (out / "config.json").exists():
            raise
    return out


def parse_args(argv):
    parser = Parser(description=__doc__, formatter_class=Help)
    parser.add_argument("draft", help="a draft of drafts/, by its name")
    parser.add_argument("folder", type=pathlib.Path, help="the folder to make")
    return parser.parse_args(argv)


@command
def main(argv=None) -> int:
    args = parse_args(argv)
    path = HERE / "drafts" / f"{args.draft}.safetensors"
    if not path.exists():
        shipped = ", ".join(sorted(file.stem for file in (HERE / "drafts").glob("*.safetensors"))) or "none"
        raise UserError(f"{args.draft}: no such draft; the repository ships {shipped}")
    if args.folder.exists():
        raise UserError(f"{args.folder}: already there; name a new folder")
    transformers.logging.disable_progress_bar()
    target = ensure_target()
    tell(f"{args.draft} is in {unpack_draft(path, target, target, args.folder)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
