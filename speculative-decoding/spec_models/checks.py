"""What is looked at before any timing: whether a model can be used at all, a pair belongs together, a prompt fits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from spec_common import UserError, dtype_name, first_line, is_out_of_memory, say
from spec_loop import forward, keep_slots, new_cache

# A block of tokens on a warm cache must give the logits of one pass over everything, to within rounding: this share of
# their spread. Wrong models (state-space layers that drop their state) are off by more than the spread itself.
BLOCK_TOLERANCE = {torch.float32: 0.02, torch.float16: 0.25, torch.bfloat16: 0.25}
# A row alone against the same row in a block of four, in float32: rounding changes a logit by 1e-5 of their spread, a layer
# that scales its input over the whole block (8-bit weights quantised dynamically) by a hundred times that and more.
ROW_TOLERANCE = 0.001


@dataclass
class Loaded:
    """A model ready to run, its tokenizer (None for random weights), and what the result file says of them.

    `plain`: a draft as transformers itself runs it, where `model` is another form of it.
    """

    model: torch.nn.Module
    tokenizer: object
    name: str
    flag: str
    about: dict = field(default_factory=dict)
    plain: torch.nn.Module | None = None


def context_limit(model) -> int | None:
    """The longest text the model is defined for; None where the config names no limit.

    RoPE that rescales with the running length (dynamic NTK, LongRoPE) ends where rescaling starts: past it a block
    and single steps see different frequencies, and even a model drafting for itself departs from its own greedy text.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    for name, table in model.named_modules():  # RoBERTa's kind counts positions from the padding id on
        if name.endswith("position_embeddings") and getattr(table, "padding_idx", None) is not None:
            limit = table.num_embeddings - table.padding_idx - 1
    rope = getattr(config, "rope_parameters", None) or {}
    for one in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if one.get("rope_type") in ("dynamic", "longrope"):
            limit = (
                one.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or limit
            )
    return limit


def check_room(loaded: Loaded, prompt_tokens: int, new_tokens: int, fix: str) -> None:
    """Refuse what is past the model's limit; `fix` is the flag to lower. Raises UserError."""
    limit = context_limit(loaded.model)
    if limit is not None and prompt_tokens + new_tokens > limit:
        raise UserError(
            f"{loaded.flag} {loaded.name}: prompt of {prompt_tokens} + {new_tokens} new tokens is past its limit of {limit}; lower {fix} or give a shorter text"
        )


def check_blocks(loaded: Loaded) -> None:
    """One real try: a block on a warm cache, rolled back and fed again, must give what one pass over everything gives.

    Raises UserError for models that ignore or cannot roll back their cache (state-space layers), look both ways, or
    give logits that are not finite.
    """
    model, rows = loaded.model, loaded.model.get_input_embeddings().weight.shape[0]
    refusal = UserError(
        f"{loaded.flag} {loaded.name}: this architecture cannot verify blocks (its cache is ignored or cannot roll back); choose a transformer"
    )
    if getattr(model, "_is_stateful", False):
        raise refusal
    ids = torch.arange(3, 13, device=model.device).remainder(rows)[None]
    try:
        with torch.inference_mode():
            whole = forward(model, ids, new_cache(model), 4).logits.float()
            cache = new_cache(model)
            forward(model, ids[:, :6], cache)
            if cache.get_seq_length() != 6:
                raise refusal
            forward(model, ids.flip(1)[:, 6:9], cache)
            keep_slots(cache, 6)
            block = forward(model, ids[:, 6:], cache, 4).logits.float()
            keep_slots(cache, 9)
            alone = forward(model, ids[:, 9:], cache).logits.float()
    except (UserError, ValueError, RuntimeError, TypeError, AttributeError, IndexError) as error:
        if is_out_of_memory(error):
            raise UserError(
                f"{loaded.flag} {loaded.name}: out of memory in a pass over ten tokens; choose a smaller model"
            ) from error
        raise refusal from error
    if not whole.isfinite().all():
        raise UserError(
            f"{loaded.flag} {loaded.name}: logits are not finite in {dtype_name(model.dtype)} on {model.device}; try --dtype float32 or bfloat16"
        )
    if whole.std() == 0:
        raise UserError(
            f"{loaded.flag} {loaded.name}: all logits are equal in {dtype_name(model.dtype)}, which is no text: "
            "its weights are too small for that dtype, or empty; try --dtype float32 --cpu-linear plain"
        )
    if (block - whole).abs().max() > BLOCK_TOLERANCE.get(model.dtype, 0.25) * whole.std():
        raise refusal
    if model.dtype == torch.float32 and (block[0, -1] - alone[0, -1]).abs().max() > ROW_TOLERANCE * whole.std():
        raise UserError(
            f"{loaded.flag} {loaded.name}: a token's logits depend on the tokens beside it in the block (layers quantised "
            "dynamically scale over all of them), so blocks cannot be checked; choose it unquantised"
        )


def attention_windows(model) -> dict[str, int | None]:
    """How far back each kind of layer looks, in tokens (None: all the way), by the name that its config gives the kind.
    One entry where all layers are alike."""
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or ())
    if window is None or not kinds:
        return {"full_attention": window}
    found = {kind: window if kind.startswith("sliding") else None for kind in kinds}
    return found if len(found) > 1 else {"full_attention": next(iter(found.values()))}


def meaning(tokenizer, token: str, token_id: int) -> str:
    return repr(tokenizer.decode([token_id]) or token)


def check_same_tokenizer(target: Loaded, draft: Loaded) -> None:
    """Refuse a pair whose ids mean different things, naming one. Sizes may differ: tables are often padded.

    Raises UserError. Greedy output would stay exact, only acceptance would fall to noise, so nothing else notices.
    """
    if target.tokenizer is draft.tokenizer:
        return
    theirs = {token_id: token for token, token_id in draft.tokenizer.get_vocab().items()}
    ours = {token_id: token for token, token_id in target.tokenizer.get_vocab().items()}
    differing = sorted(token_id for token_id in ours.keys() & theirs.keys() if ours[token_id] != theirs[token_id])
    if differing:
        # An id with words on both sides shows it best; the essay's 464 does when it is among them.
        one = 464 if 464 in differing else differing[0]
        raise UserError(
            f"--draft {draft.name} does not share the tokenizer of --target {target.name}: id {one} is "
            f"{meaning(draft.tokenizer, theirs[one], one)} to the draft and {meaning(target.tokenizer, ours[one], one)} to the target "
            f"({len(differing)} ids differ); choose a draft of the target's family"
        )


def vocabulary_rows(model) -> int:
    """How many ids the model can read."""
    return model.get_input_embeddings().weight.shape[0]


def check_ids(loaded: Loaded, ids: list[int]) -> None:
    rows = vocabulary_rows(loaded.model)
    worst = max(ids)
    if worst >= rows:
        raise UserError(
            f"{loaded.flag} {loaded.name}: id {worst} ({loaded.tokenizer.convert_ids_to_tokens(worst)!r}) of the prompt is past its embedding table "
            f"of {rows} rows; remove that token from the prompt"
        )


def prompt_ids(target: Loaded, text: str, chat: bool, device: torch.device, flag: str = "--prompt") -> torch.Tensor:
    """The prompt as ids, shape (1, n), with the target's tokenizer. Raises UserError for an empty or unreadable prompt."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{flag}: not valid Unicode ({error.reason}); give text in UTF-8") from error
    tokenizer = target.tokenizer
    if not text.strip():
        raise UserError(f"{flag}: empty; give some text")
    templated = chat and bool(tokenizer.chat_template)
    if chat and not templated:
        say(f"{target.name} has no chat template: the prompt is used as it is")
    if templated:
        turns = [{"role": "user", "content": text}]
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of its author's, and may raise anything
            raise UserError(
                f"--chat: {target.name}'s template refuses a single user turn ({first_line(error)}); leave --chat out"
            ) from error
    ids = tokenizer(text, add_special_tokens=not templated)["input_ids"]
    if not ids:
        raise UserError(f"{flag}: '{text[:40]}' gives no tokens; give some text")
    check_ids(target, ids)
    return torch.tensor([ids], device=device)


def end_ids(model) -> frozenset[int]:
    """The ids that end a text, from the model's generation config."""
    ids = model.generation_config.eos_token_id if model.generation_config else None
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)
