"""A target and its drafts: each draft by its name, in the form in which it runs, checked against the target.

A draft's name is a hub id, a folder, a `.gguf` file, a file of drafts/ by its name, or `cut:0,1,29` (those layers of the
target, with its own embedding and head). Its head: the whole, or the frequent ids alone. The form of the pass is one for
target and drafts, transformers' own code, fused, or fused and captured: costs of two forms say nothing of one another.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

from spec_common import HERE, UserError, dtype_name, first_line, remark

import torch
from safetensors import SafetensorError

from spec_models import fused
from spec_models import linear as cpu_linear
from spec_models.checks import Loaded, check_blocks
from spec_models.cut import cut_model
from spec_models.eagle import KIND, Eagle, build_eagle
from spec_models.embedded import sha256
from spec_models.files import belongs_to, build_draft, kind_of, training_of
from spec_models.find import EMBEDDED
from spec_models.graph import GraphLlama, captures
from spec_models.load import linear_kind, load, pack_linear
from spec_models.masked import read_masks
from spec_models.medusa import MEDUSA, Medusa, build_medusa
from spec_models.vocab import cut_head, frequent_ids
from spec_models.words import check_same_tokenizer

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
HEADS = {KIND: build_eagle, MEDUSA: build_medusa}  # what reads the target's states
PASSES = ("auto", "fused", "graph", "plain")


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


def built(path: Path, kind: str | None, target):
    """What the file holds, as it runs beside that target: a mask is read as an id. Raises ValueError."""
    draft = HEADS.get(kind, build_draft)(path, target).to(target.device, target.dtype)
    if hasattr(draft, "mask"):
        read_masks(draft)
    return draft


def draft_file(target: Loaded, path: Path, name: str, allow: bool = False) -> Loaded:
    """A draft of the kinds that the repository ships. On the target that it was trained for it shares the embedding and head;
    a larger model of the embedded one's family has its tokenizer, and gets the draft with the embedding it was trained with.
    Raises UserError."""
    model, about = target.model, {"sha256": sha256(path), "draft_vocab": SHIPPED_HEAD if name in SHIPPED_DRAFTS else 0}
    try:
        kind, own, about["trained"] = kind_of(path), belongs_to(path, model), training_of(path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"--draft {name}: not a file of draft_training ({first_line(error)})") from error
    if own:
        return own_draft(target, built(path, kind, model), name, about)
    if kind in HEADS:
        raise UserError(f"--draft {name}: a head that reads the states of {EMBEDDED} serves no other target; choose another draft")
    origin = load(EMBEDDED, "--draft", model.device, model.dtype)
    try:
        draft = built(path, kind, origin.model)
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
        return draft_file(target, SHIPPED_DRAFTS[name], name, allow)
    if name.endswith(".safetensors") and Path(name).is_file():
        return draft_file(target, Path(name), Path(name).name, allow)
    if re.fullmatch(r"draft-\w+", name) and not Path(name).exists():
        raise UserError(f"--draft {name}: no such draft; the repository ships {', '.join(SHIPPED_DRAFTS) or 'none'}")
    draft = load(name, "--draft", device, dtype, revision, trust)
    check_same_tokenizer(target, draft, allow)
    return draft


# ------------------------------------------------------------------------------------------------------------ its form


def with_cut_head(target: Loaded, draft: Loaded, size: int, text_file) -> Loaded:
    """The draft with a head of the `size` most frequent ids; the original keeps its own. Raises UserError."""
    if draft.model is target.model:
        raise UserError("--draft-vocab: a model that drafts for itself keeps its whole head; leave the option out")
    twin = cpu_linear.twin(draft.model)
    rows = target.model.get_input_embeddings().weight.shape[0]
    # Random weights have no tokenizer, and need none: what the ids say does not change what a pass costs.
    ids = range(rows) if draft.tokenizer is None else frequent_ids(draft.tokenizer, text_file)
    cut_head(twin, ids, size, rows)
    kept = twin.get_output_embeddings().kept.tolist()
    digest = hashlib.sha256(str(kept).encode()).hexdigest()[:16]  # a result file's settings hold all of `about`
    return replace(draft, model=twin, about={**draft.about, "draft_vocab": len(kept), "draft_vocab_sha256": digest})


def in_form(args, target: Loaded, draft: Loaded, size: int | None) -> Loaded:
    """The draft with the head that it will run with. `size`: None is the draft's own choice, 0 the whole."""
    size = draft.about.get("draft_vocab", 0) if size is None else size
    if not size:
        return replace(draft, about={**draft.about, "draft_vocab": 0})
    cut = with_cut_head(target, draft, size, args.draft_vocab_text)
    return replace(cut, plain=draft.model if keeps_plain(args) else None)


def keeps_plain(args) -> bool:
    """Whether transformers' own form stays in memory beside a fused one: for its `generate`, as further arms. Packed, the
    joined matrices take their memory twice then."""
    return getattr(args, "vs_transformers", False) or getattr(args, "keep_plain", False)


def run_fused(asked: str, models: list[Loaded]) -> bool:
    """Whether all of them run fused, captured or not: where that is asked for, and of itself on a CPU where each can.
    Raises UserError."""
    unfit = next((one for one in models if not fused.supported(body_of(one.model))), None)
    if asked == "graph" and (heads := [one.name for one in models if isinstance(one.model, Eagle)]):
        raise UserError(f"--pass graph: the passes of {heads[0]} are not captured; leave it at auto")
    if asked in ("fused", "graph") and unfit is not None:
        raise UserError(
            f"--pass {asked}: {unfit.name} is no Llama or Qwen2 with plain linear layers on one device; leave it at auto"
        )
    return asked in ("fused", "graph") or (asked == "auto" and unfit is None and models[0].model.device.type == "cpu")


def body_of(model):
    """The layers that a pass runs through: those of a head that reads states, or the model itself."""
    return model.body if isinstance(model, Eagle) else model


def fuse(model, asked: str):
    """The fused form of a plain model, or with `asked` graph the form whose passes are captured."""
    if isinstance(model, Eagle):
        head = cpu_linear.twin(model)
        head.body = fuse(model.body, asked)
        return head
    one = fused.FusedLlama(model).eval()
    return GraphLlama(one).eval() if asked == "graph" else one


def set_passes(args, models: list[Loaded]) -> None:
    """Put target and drafts into one form of pass, in place. A model that two of them are is fused once."""
    is_fused, made = run_fused(args.pass_form, models), {}
    device = models[0].model.device
    if args.pass_form == "graph" and not captures(device):
        remark(f"--pass graph: nothing is captured on {device.type}; passes run the same code without, which is no gain")
    for one in models:
        one.about["pass"] = "graph" if args.pass_form == "graph" else "fused" if is_fused else "plain"
        if not is_fused:
            continue
        plain = one.model
        if id(plain) not in made:
            made[id(plain)] = (plain, fuse(plain, args.pass_form))
        one.model = made[id(plain)][1]
        one.plain = (one.plain or plain) if keeps_plain(args) else None
        object.__setattr__(one.model, "plain", one.plain)  # not registered: no part of the fused model


def form(draft: Loaded) -> str:
    """The draft's name with its form, for a script's first line."""
    size = draft.about.get("draft_vocab")
    return f"{draft.name} ({draft.about['pass']} pass, {f'head of {size} ids' if size else 'whole head'})"


def versions(args, target: Loaded, draft: Loaded, heads: list[int | None]) -> list[Loaded]:
    """The draft with each of those heads; several are told apart by their names."""
    found = [in_form(args, target, draft, size) for size in heads]
    if len(heads) > 1:
        for one in found:
            one.name += f", head {one.about['draft_vocab']}" if one.about["draft_vocab"] else ", whole head"
    return found


# -------------------------------------------------------------------------------------------------------------- pairs


def pack(args, target: Loaded, drafts: list[Loaded], kind: str) -> None:
    """One form of pass for all of them, all linear layers packed once, and every model tried out. Raises UserError."""
    heads = [one for one in drafts if isinstance(one.model, Medusa)]
    if heads and not getattr(args, "takes_heads", False):
        raise UserError(
            f"--draft {heads[0].name}: Medusa's heads make no pass of their own, which this script times; take spec_heads.py"
        )
    if args.draft_vocab_text is not None and not any(one.about["draft_vocab"] for one in drafts):
        raise UserError("--draft-vocab-text: no head is cut; say how many ids with --draft-vocab N, or leave it out")
    done, tried = {}, {}
    passing = [target, *(one for one in drafts if not isinstance(one.model, Medusa))]
    set_passes(args, passing)
    for one in heads:
        pack_linear(one, kind, done)
        one.about.update({"pass": "no", "dtype": dtype_name(one.model.dtype)})
    for one in passing:
        pack_linear(one, kind, done)
        check_blocks(one)
        if id(one.model) not in tried:
            tried[id(one.model)] = fused.prove_rows(one.model) if isinstance(one.model, fused.FusedLlama) else 0
        one.about.update(dtype=dtype_name(one.model.dtype), rows_independent=tried[id(one.model)])


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
