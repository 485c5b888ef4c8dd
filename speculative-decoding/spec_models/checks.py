"""What is looked at before any timing: whether a model can be used at all, a pair belongs together, a prompt fits."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field

from spec_common import UserError, dtype_name, first_line, is_out_of_memory, remark

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
FEW, MOST = 10, 100  # differing ids that a remark lists, and a result file
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
        ("gives a token logits that depend on those after it", 0, forward(model, ids[:, :warm], cache, warm).logits.float())
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


def meaning(tokenizer, token: str, token_id: int) -> str:
    return repr(tokenizer.decode([token_id]) or token)


def special_ids(tokenizer) -> set[int]:
    """The ids that stand for no text: control tokens and reserved ones."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(token_id for token_id, token in added.items() if token.special)}


def differing_ids(target: Loaded, draft: Loaded) -> dict[int, tuple[str, str]]:
    """The ids that mean other things to the two, with the draft's token and the target's. Sizes may differ: tables are
    often padded."""
    theirs = {token_id: token for token, token_id in draft.tokenizer.get_vocab().items()}
    ours = {token_id: token for token, token_id in target.tokenizer.get_vocab().items()}
    both = sorted(ours.keys() & theirs.keys())
    return {one: (theirs[one], ours[one]) for one in both if ours[one] != theirs[one]}


def check_same_tokenizer(target: Loaded, draft: Loaded, allow: bool = False) -> None:
    """Refuse a pair whose ids mean different things, naming one; `allow`: say which, and go on.

    Ids that stand for no text, and neither begin nor end one, may differ: a text that holds none of them is read alike.
    They are kept in the draft's `about`, and `check_ids` refuses a prompt that holds one. Raises UserError. Greedy
    output would stay exact, only acceptance would fall to noise, so nothing else notices.
    """
    if target.tokenizer is draft.tokenizer:
        return
    differing = differing_ids(target, draft)
    if not differing:
        return
    unused = special_ids(target.tokenizer) & special_ids(draft.tokenizer)
    unused -= {*end_ids(target), target.tokenizer.bos_token_id}

    def says(one: int) -> str:
        theirs, ours = differing[one]
        return f"id {one} is {meaning(draft.tokenizer, theirs, one)} to the draft and {meaning(target.tokenizer, ours, one)} to the target"

    if not allow and not differing.keys() <= unused:
        # An id with words on both sides shows it best; the essay's 464 does when it is among them.
        one = 464 if 464 in differing else min(differing.keys() - unused)
        raise UserError(
            f"--draft {draft.name} does not share the tokenizer of --target {target.name}: {says(one)} "
            f"({len(differing)} ids differ); choose a draft of the target's family, or --allow-tokenizer-differences"
        )
    draft.about["tokenizer_differences"] = list(differing)[: MOST if allow else None]
    draft.about["tokenizer_differences_count"] = len(differing)
    listed = ", ".join(says(one) for one in list(differing)[:FEW])
    more = f", and {len(differing) - FEW} more" if len(differing) > FEW else ""
    remark(
        f"--draft {draft.name}: its tokenizer is not quite the target's: {listed}{more}; the text stays exact, guesses may suffer"
    )


def vocabulary_rows(model) -> int:
    """How many ids the model can read."""
    return model.get_input_embeddings().weight.shape[0]


def check_ids(loaded: Loaded, ids: list[int], words=None, allow: bool = False) -> None:
    """Refuse a prompt with an id that the model has no row for, or that means something else to it. `words`: the
    tokenizer that the ids are of, where it is not the model's own. Raises UserError."""
    rows, tokenizer = vocabulary_rows(loaded.model), words or loaded.tokenizer
    worst = max(ids)
    if worst >= rows:
        raise UserError(
            f"{loaded.flag} {loaded.name}: id {worst} ({tokenizer.convert_ids_to_tokens(worst)!r}) of the prompt is past its embedding table "
            f"of {rows} rows; remove that token from the prompt"
        )
    other = set(ids) & set(loaded.about.get("tokenizer_differences", []))
    if other and not allow:
        raise UserError(
            f"{loaded.flag} {loaded.name}: id {min(other)} ({tokenizer.convert_ids_to_tokens(min(other))!r}) of the prompt is another token to it; "
            "remove that token, or pass --allow-tokenizer-differences"
        )


def raw_ids(tokenizer, text: str) -> list[int]:
    """The ids of a text to go on from: with what the tokenizer puts before every text, once, and without what it puts
    behind one, which would end it."""
    ids, bare = (tokenizer(text, add_special_tokens=special)["input_ids"] for special in (True, False))
    places = [start for start in range(len(ids) - len(bare) + 1) if ids[start : start + len(bare)] == bare]
    if not bare or not places:  # the special tokens change how the words are cut: nothing to tell apart
        return ids
    before = ids[: places[0]]
    return bare if bare[: len(before)] == before else before + bare


def in_template(target: Loaded, text: str) -> str:
    """The prompt as a single user turn in the target's chat template. Raises UserError where that leaves its words out:
    some templates go through the parts of a message, and find none in a plain string."""
    for form in (str, lambda words: [{"type": "text", "text": words}]):
        try:
            once, twice = (
                target.tokenizer.apply_chat_template(
                    [{"role": "user", "content": form(words)}], tokenize=False, add_generation_prompt=True
                )
                for words in (text, f"{text} {text}")
            )
        except Exception as error:  # a template is a program of its author's, and may raise anything
            refusal = f"refuses a single user turn ({first_line(error)})"
            continue
        if once != twice and holds_words(once, text):
            return once
        refusal = "leaves the words of the prompt out"
    raise UserError(f"--chat: {target.name}'s template {refusal}; leave --chat out")


def holds_words(whole: str, text: str) -> bool:
    """Whether the words of `text` stand in `whole`, in order; letter case and signs apart."""
    place, whole = 0, unicodedata.normalize("NFKC", whole).casefold()
    for word in re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()):
        place = whole.find(word, place) + len(word)
        if place < len(word):
            return False
    return True


def prompt_ids(target: Loaded, text: str, chat: bool, device: torch.device, flag: str = "--prompt") -> torch.Tensor:
    """The prompt as ids, shape (1, n), with the target's tokenizer. Raises UserError for an empty or unreadable
    prompt."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{flag}: not valid Unicode ({error.reason}); give text in UTF-8") from error
    tokenizer = target.tokenizer
    if not text.strip():
        raise UserError(f"{flag}: empty; give some text")
    templated = chat and bool(tokenizer.chat_template)
    if chat and not templated:
        remark(f"{target.name} has no chat template: the prompt is used as it is")
    if templated:
        ids = tokenizer(in_template(target, text), add_special_tokens=False)["input_ids"]
    else:
        ids = raw_ids(tokenizer, text)
    if not ids:
        raise UserError(f"{flag}: '{text[:40]}' gives no tokens; give some text")
    check_ids(target, ids)
    if not holds_words(tokenizer.decode(ids), text):
        remark(
            f"{target.flag} {target.name}: its tokenizer does not give a prompt back word for word; the model goes on from what it reads"
        )
    return torch.tensor([ids], device=device)


def end_ids(target: Loaded) -> frozenset[int]:
    """The ids that end a text: whatever the generation config, the config or the tokenizer names."""
    holders = (target.model.generation_config, target.model.config.get_text_config(decoder=True), target.model.config)
    named = [getattr(holder, "eos_token_id", None) for holder in (*holders, target.tokenizer)]
    return frozenset(one for ids in named if ids is not None for one in ([ids] if isinstance(ids, int) else ids))


def stopping_ids(target: Loaded) -> frozenset[int]:
    """The ids at which --stop-at-eos stops; a remark where none is known."""
    ends = end_ids(target)
    if not ends:
        remark(f"--stop-at-eos: {target.name} names no end token, so every text goes on to --n-tokens")
    return ends
