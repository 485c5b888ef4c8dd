"""What is looked at before any timing: whether a model can be used at all, and whether a prompt fits it."""

from __future__ import annotations

from dataclasses import dataclass, field

from spec_common import UserError, dtype_name, first_line, is_out_of_memory

import torch

from spec_loop import forward, keep_slots, new_cache

# A block of tokens on a warm cache must give the logits of one pass over everything, to within rounding: this share of
# their spread. Wrong models (state-space layers that drop their state) are off by more than the spread itself.
BLOCK_TOLERANCE = {torch.float32: 0.02, torch.float16: 0.25, torch.bfloat16: 0.25}
# A row alone against the same row in a block of four, in float32: rounding changes a logit by 1e-5 of their spread, a layer
# that scales its input over the whole block (8-bit weights quantised dynamically) by a hundred times that and more.
ROW_TOLERANCE = 0.001
LIMITS = ("max_position_embeddings", "max_seq_len", "max_target_positions")  # what configs call the longest text
TRIAL = 10  # tokens of the real try
CANNOT = "this architecture cannot verify blocks: it {}"
OWN_REACH = ("attention_chunk_size", "window_size")  # what configs call a reach that no mask of ours knows
KNOWN_KINDS = {"full_attention", "sliding_attention", "global"}


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
    config = model.config.get_text_config(decoder=True)
    limit = next((size for field in LIMITS if (size := getattr(config, field, None) or 0) > 0), None)
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


def tried(loaded: Loaded, what: str, work):
    """The result of `work`, or its own reason in one line. Raises UserError."""
    try:
        with torch.inference_mode():
            return work()
    except (
        ValueError,
        RuntimeError,
        TypeError,
        AttributeError,
        IndexError,
        KeyError,
        NotImplementedError,
        UserError,
    ) as error:
        if is_out_of_memory(error):
            raise UserError(
                f"{loaded.flag} {loaded.name}: out of memory in a pass over ten tokens; choose a smaller model"
            ) from error
        raise UserError(
            f"{loaded.flag} {loaded.name}: {what} ({type(error).__name__}: {first_line(error)}); choose another model"
        ) from error


def check_blocks(loaded: Loaded) -> None:
    """One real try: a block on a warm cache, rolled back and fed again, must give what one pass over everything gives.

    Raises UserError, with the reason, for models that fail a short pass, take no cache of ours, ignore it or cannot
    roll it back (state-space layers), look both ways, or give logits that are not finite.
    """
    model, rows = loaded.model, vocabulary_rows(loaded.model)
    if model.get_input_embeddings().weight.is_meta:
        raise UserError(f"{loaded.flag} {loaded.name}: its weights are not in memory; choose a model that fits")
    length = min(TRIAL, context_limit(model) or TRIAL)
    warm = length * 6 // 10
    ids = torch.arange(3, 3 + length, device=model.device).remainder(rows)[None]
    whole = tried(loaded, f"a pass over {length} tokens fails", lambda: one_pass(model, ids))
    if not whole.isfinite().all():
        raise UserError(
            f"{loaded.flag} {loaded.name}: logits are not finite in {dtype_name(model.dtype)} on {model.device}; try --dtype float32 or bfloat16"
        )
    if whole.std() == 0:
        raise UserError(
            f"{loaded.flag} {loaded.name}: all logits are equal in {dtype_name(model.dtype)}, which is no text: "
            "its weights are too small for that dtype, or empty; try --dtype float32 --cpu-linear plain"
        )
    found = tried(loaded, CANNOT.format("takes no cache of ours"), lambda: blocks(model, ids, warm))
    allowed = BLOCK_TOLERANCE.get(model.dtype, 0.25) * whole.std()
    for reason, start, logits in found:
        if logits is None or not (logits - whole[:, start : start + logits.shape[1]]).abs().max() <= allowed:
            raise UserError(f"{loaded.flag} {loaded.name}: {CANNOT.format(reason)}; choose a transformer")
        if start == 0:  # the tokens before it agree: now the head, given one row instead of all
            check_neighbours(loaded, whole, lambda: one_pass(model, ids, 1))
    check_neighbours(loaded, found[-1][2], lambda: alone_row(model, ids))


def check_neighbours(loaded: Loaded, block: torch.Tensor, alone) -> None:
    """Whether the last row of a block, (1, rows, vocabulary), is what `alone()` gives for it, in float32. Raises UserError."""
    if loaded.model.dtype != torch.float32:
        return
    row = tried(loaded, CANNOT.format("takes no cache of ours"), alone)
    if (block[0, -1] - row[0, -1]).abs().max() > ROW_TOLERANCE * block.std():
        raise UserError(
            f"{loaded.flag} {loaded.name}: a token's logits depend on the tokens beside it in the block (layers quantised "
            "dynamically scale over all of them), so blocks cannot be checked; choose it unquantised"
        )


def alone_row(model, ids: torch.Tensor) -> torch.Tensor:
    """The logits (1, 1, vocabulary) of the last token, from a pass over it alone."""
    cache = new_cache(model)
    forward(model, ids[:, :-1], cache)
    return forward(model, ids[:, -1:], cache).logits.float()


def one_pass(model, ids: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """The logits of the last `rows` tokens (None: all), without a cache of ours where the model takes none."""
    rows = ids.shape[1] if rows is None else rows
    try:
        return forward(model, ids, new_cache(model), rows).logits.float()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return model(ids, use_cache=False).logits[:, -rows:].float()


def blocks(model, ids: torch.Tensor, warm: int) -> list[tuple[str, int, torch.Tensor | None]]:
    """What each use of a cache gives: (what it means where that is wrong, the first row's place, the logits)."""
    cache, n = new_cache(model), ids.shape[1]
    found = [
        (
            "gives a token logits that depend on those after it",
            0,
            forward(model, ids[:, :warm], cache, warm).logits.float(),
        )
    ]
    if cache.get_seq_length() != warm:
        return [*found, ("ignores its cache", 0, None)]
    found.append(("ignores its cache in a block", warm, forward(model, ids[:, warm:], cache, n - warm).logits.float()))
    keep_slots(cache, warm)
    forward(model, ids.flip(1)[:, warm : n - 1], cache)
    keep_slots(cache, warm)
    return [*found, ("cannot roll back its cache", warm, forward(model, ids[:, warm:], cache, n - warm).logits.float())]


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


def has_own_reach(model) -> bool:
    """Whether some layers look back in chunks, or in windows that they count themselves: a try of a few tokens, shorter
    than those, would not see it."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ["unknown"]
    return not KNOWN_KINDS.issuperset(kinds) and any(getattr(config, name, None) for name in OWN_REACH)


def vocabulary_rows(model) -> int:
    """How many ids the model can read."""
    return model.get_input_embeddings().weight.shape[0]


def check_passes(loaded: Loaded, error_of, refusal: str, tried_in: str) -> None:
    """One real try of passes that are no chain of tokens: `error_of(model)`, a share of the logits' spread, must stay
    within rounding. Raises UserError: `refusal`, or that memory ran out where it was tried."""
    refused = UserError(f"{loaded.flag} {loaded.name}: {refusal}")
    if getattr(loaded.model, "reads_states", False):
        where = f"{loaded.flag} {loaded.name}"
        raise UserError(f"{where}: reads the target's states, which only chains of one text hand out here; choose another draft")
    if has_own_reach(loaded.model):
        raise refused
    try:
        error = error_of(loaded.model)
    except (ValueError, RuntimeError, TypeError, AttributeError, IndexError, KeyError) as problem:
        if not is_out_of_memory(problem):
            raise refused from problem
        where = f"{loaded.flag} {loaded.name}"
        raise UserError(f"{where}: out of memory in {tried_in}; choose a smaller model") from problem
    if not error <= BLOCK_TOLERANCE.get(loaded.model.dtype, 0.25):
        raise refused
