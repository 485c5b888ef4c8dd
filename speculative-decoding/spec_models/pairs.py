"""A target and its drafts: each draft by its name, in the form in which it runs, checked against the target.

A draft's name is a hub id, a folder, a `.gguf` file, a file of drafts/ by its name, or `cut:0,1,29` (those layers of the
target, with its own embedding and head). Its form: with the whole head or the frequent ids alone, and run by transformers'
own code or fused. Neither can change the text, only which guesses are made and what they cost.
"""

from __future__ import annotations

import copy
import hashlib
import re
from dataclasses import replace
from pathlib import Path

import torch

from spec_common import HERE, UserError, dtype_name, first_line
from spec_models import fused
from spec_models import linear as cpu_linear
from spec_models.checks import Loaded, check_blocks, check_same_tokenizer
from spec_models.cut import cut_model
from spec_models.embedded import sha256
from spec_models.files import belongs_to, build_draft
from spec_models.load import EMBEDDED, linear_kind, load
from spec_models.vocab import cut_head, frequent_ids

# The drafts that the repository ships for the embedded target, each one small file; and untrained layers of the target.
SHIPPED_DRAFTS = {path.stem: path for path in sorted((HERE / "drafts").glob("*.safetensors"))}
SHIPPED_HEAD = (
    16384  # ids that the head of a draft that ships keeps unless asked otherwise: all that the target wrote in its data
)
EMBEDDED_DRAFTS = (*SHIPPED_DRAFTS, "cut:0,1,23")
PAIRS = {
    "smollm2": (EMBEDDED, "draft-s"),
    "essay": ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
}
DRAFT_PASSES = ("auto", "fused", "plain")


# ------------------------------------------------------------------------------------------------------------ by name


def cut_draft(target: Loaded, name: str) -> Loaded:
    """A draft made of some of the target's own layers, e.g. `cut:0,1,23`; embedding, last norm and head are shared."""
    match = re.fullmatch(r"cut:(\d+(?:,\d+)*)", name)
    if not match:
        raise UserError(f"--draft {name}: write cut: and layer numbers, e.g. cut:0,1,23")
    wanted = [int(number) for number in match[1].split(",")]
    return own_draft(target, cut_model(target, wanted, name), name, {"cut_from": target.about})


def own_draft(target: Loaded, draft, name: str, about: dict) -> Loaded:
    """A draft that uses the target's own embedding and head: one of each in memory, the head packed once."""
    draft.get_input_embeddings().weight = target.model.get_input_embeddings().weight
    draft.set_output_embeddings(target.model.get_output_embeddings())
    return Loaded(
        draft.eval(), target.tokenizer, name, "--draft", {"name": name, **about, "parameters": draft.num_parameters()}
    )


def shipped_draft(target: Loaded, name: str, allow: bool = False) -> Loaded:
    """A draft that the repository ships. On the target that it was trained for it shares the embedding and head; a larger
    model of that family has its tokenizer, and gets the draft with the embedding it was trained with. Raises UserError."""
    about = {"sha256": sha256(SHIPPED_DRAFTS[name]), "draft_vocab": SHIPPED_HEAD}
    model = target.model
    if belongs_to(SHIPPED_DRAFTS[name], model):
        return own_draft(target, build_draft(SHIPPED_DRAFTS[name], model).to(model.device, model.dtype), name, about)
    origin = load(EMBEDDED, "--draft", model.device, model.dtype)
    try:
        draft = build_draft(SHIPPED_DRAFTS[name], origin.model).to(model.device, model.dtype)
    except ValueError as error:
        raise UserError(f"--draft {name}: {first_line(error)}") from error
    loaded = Loaded(
        draft, origin.tokenizer, name, "--draft", {"name": name, **about, "parameters": draft.num_parameters()}
    )
    check_same_tokenizer(target, loaded, allow)
    return loaded


def load_draft(
    target: Loaded, name: str, device, dtype, revision: str | None, trust: bool, same: bool = False, allow: bool = False
) -> Loaded:
    """A draft for that target, by name; `same`: the target itself; `allow`: whatever its tokenizer. Raises UserError where
    they share none."""
    if same:
        return Loaded(target.model, target.tokenizer, target.name, "--draft", dict(target.about))
    if name.startswith("cut:"):
        return cut_draft(target, name)
    if name in SHIPPED_DRAFTS:
        return shipped_draft(target, name, allow)
    if re.fullmatch(r"draft-\w+", name) and not Path(name).exists():
        raise UserError(f"--draft {name}: no such draft; the repository ships {', '.join(SHIPPED_DRAFTS) or 'none'}")
    draft = load(name, "--draft", device, dtype, revision, trust)
    check_same_tokenizer(target, draft, allow)
    return draft


# ------------------------------------------------------------------------------------------------------------ its form


def head_twin(model):
    """A shallow copy of a model that shares everything with it but the way to its head: a new head of the twin is not one
    of the original."""
    head = model.get_output_embeddings()
    way = next(name for name, module in model.named_modules() if module is head).split(".")[:-1]
    twin = parent = copy.copy(model)
    twin._modules = dict(model._modules)
    for part in way:
        child = copy.copy(parent._modules[part])
        child._modules = dict(child._modules)
        parent._modules[part] = child
        parent = child
    return twin


def with_cut_head(target: Loaded, draft: Loaded, size: int, text_file) -> Loaded:
    """The draft with a head of the `size` most frequent ids; the original keeps its own. Raises UserError."""
    if draft.model is target.model:
        raise UserError("--draft-vocab: a model that drafts for itself keeps its whole head; leave the option out")
    twin = head_twin(draft.model)
    rows = target.model.get_input_embeddings().weight.shape[0]
    # Random weights have no tokenizer, and need none: what the ids say does not change what a pass costs.
    ids = range(rows) if draft.tokenizer is None else frequent_ids(draft.tokenizer, text_file)
    cut_head(twin, ids, size, rows)
    kept = twin.get_output_embeddings().kept.tolist()
    digest = hashlib.sha256(str(kept).encode()).hexdigest()[:16]  # a result file's settings hold all of `about`
    return replace(draft, model=twin, about={**draft.about, "draft_vocab": len(kept), "draft_vocab_sha256": digest})


def run_fused(target: Loaded, draft: Loaded, asked: str) -> bool:
    """Whether the draft runs fused: where that is asked for, and of itself on a CPU where it can. Raises UserError."""
    can = draft.model is not target.model and fused.supported(draft.model)
    if asked == "fused" and not can:
        raise UserError(
            f"--draft-pass fused: {draft.name} is no Llama or Qwen2 on one device, or the target itself; leave it at auto"
        )
    return asked == "fused" or (asked == "auto" and can and draft.model.device.type == "cpu")


def in_form(args, target: Loaded, draft: Loaded, size: int | None) -> Loaded:
    """The draft as it will run. `size` of its head: None is the draft's own choice, 0 the whole."""
    plain, size = draft.model, draft.about.get("draft_vocab", 0) if size is None else size
    draft = (
        with_cut_head(target, draft, size, args.draft_vocab_text)
        if size
        else replace(draft, about={**draft.about, "draft_vocab": 0})
    )
    is_fused = run_fused(target, draft, args.draft_pass)
    model = fused.FusedLlama(draft.model).eval() if is_fused else draft.model
    about = {**draft.about, "draft_pass": "fused" if is_fused else "plain"}
    keeps_plain = getattr(args, "vs_transformers", False)  # what transformers' own `generate` can draft with
    return replace(draft, model=model, about=about, plain=plain if keeps_plain else None)


def form(draft: Loaded) -> str:
    """The draft's name with its form, for a script's first line."""
    size = draft.about.get("draft_vocab")
    return f"{draft.name} ({draft.about['draft_pass']} pass, {f'head of the {size} most frequent ids' if size else 'whole head'})"


def versions(args, target: Loaded, draft: Loaded, heads: list[int | None]) -> list[Loaded]:
    """The draft with each of those heads; several are told apart by their names."""
    found = [in_form(args, target, draft, size) for size in heads]
    if len(heads) > 1:
        for one in found:
            one.name += f", head {one.about['draft_vocab']}" if one.about["draft_vocab"] else ", whole head"
    return found


# -------------------------------------------------------------------------------------------------------------- pairs


def pack(args, target: Loaded, drafts: list[Loaded], kind: str) -> None:
    """Pack all linear layers once, and try every model out. Raises UserError."""
    if args.draft_vocab_text is not None and not any(one.about["draft_vocab"] for one in drafts):
        raise UserError("--draft-vocab-text: no head is cut; say how many ids with --draft-vocab N, or leave it out")
    every = [target, *drafts]
    cpu_linear.pack([*(one.model for one in every), *(one.plain for one in every if one.plain is not None)], kind)
    for one in every:
        check_blocks(one)
        one.about.update(dtype=dtype_name(one.model.dtype), cpu_linear=kind)


def load_pair(
    args, device: torch.device, dtype: torch.dtype, drafts: list[str], heads: list[int] | None = None
) -> tuple[Loaded, list[Loaded]]:
    """The target and its drafts, checked against each other, linear layers packed. Raises UserError.

    A pair without a shared tokenizer is refused here, before any timing. `args` holds the shared options. `heads`: every
    draft once with each of those sizes of its head.
    """
    kind = linear_kind(args, device, dtype)
    target = load(args.target, "--target", device, dtype, args.revision, args.trust_remote_code)
    revision = getattr(args, "draft_revision", None)
    loaded = []
    for name in drafts:
        same = (name, revision) == (args.target, args.revision)
        allow = getattr(args, "allow_tokenizer_differences", False)
        draft = load_draft(target, name, device, dtype, revision, args.trust_remote_code, same, allow)
        loaded += versions(args, target, draft, heads or [args.draft_vocab])
    for place, draft in enumerate(loaded):  # rows are found by the name, so two folders of one name need two
        if any(draft.name == other.name for other in loaded[:place]):
            draft.name = f"{draft.name} ({place + 1})"
    pack(args, target, loaded, kind)
    return target, loaded
