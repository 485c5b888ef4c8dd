"""Words and ids: whether two tokenizers mean the same by an id, a prompt as ids, the ids that end a text."""

from __future__ import annotations

import re
import unicodedata

from spec_common import UserError, first_line, remark

import torch

from spec_models.checks import Loaded, vocabulary_rows

FEW, MOST = 10, 100  # differing ids that a remark lists, and a result file


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


def both_meanings(target: Loaded, draft: Loaded, one: int, differing: dict[int, tuple[str, str]]) -> str:
    """What an id of `differing_ids` is to each of the two."""
    theirs, ours = differing[one]
    to_draft, to_target = meaning(draft.tokenizer, theirs, one), meaning(target.tokenizer, ours, one)
    return f"id {one} is {to_draft} to the draft and {to_target} to the target"


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
    if not allow and not differing.keys() <= unused:
        # An id with words on both sides shows it best; the essay's 464 does when it is among them.
        one = 464 if 464 in differing else min(differing.keys() - unused)
        raise UserError(
            f"--draft {draft.name} does not share the tokenizer of --target {target.name}: {both_meanings(target, draft, one, differing)} "
            f"({len(differing)} ids differ); choose a draft of the target's family, or --allow-tokenizer-differences"
        )
    draft.about["tokenizer_differences"] = list(differing)[: MOST if allow else None]
    draft.about["tokenizer_differences_count"] = len(differing)
    listed = ", ".join(both_meanings(target, draft, one, differing) for one in list(differing)[:FEW])
    more = f", and {len(differing) - FEW} more" if len(differing) > FEW else ""
    remark(
        f"--draft {draft.name}: its tokenizer is not quite the target's: {listed}{more}; the text stays exact, guesses may suffer"
    )


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


def ids_of(target: Loaded, text: str, chat: bool) -> list[int]:
    """What the target reads of a prompt, through its chat template where it has one and `chat` asks for it."""
    if chat and target.tokenizer.chat_template:
        return target.tokenizer(in_template(target, text), add_special_tokens=False)["input_ids"]
    return raw_ids(target.tokenizer, text)


def prompt_ids(target: Loaded, text: str, chat: bool, device: torch.device, flag: str = "--prompt") -> torch.Tensor:
    """The prompt as ids, shape (1, n), with the target's tokenizer. Raises UserError for an empty or unreadable
    prompt."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{flag}: not valid Unicode ({error.reason}); give text in UTF-8") from error
    if not text.strip():
        raise UserError(f"{flag}: empty; give some text")
    if chat and not target.tokenizer.chat_template:
        remark(f"{target.name} has no chat template: the prompt is used as it is")
    ids = ids_of(target, text, chat)
    if not ids:
        raise UserError(f"{flag}: '{text[:40]}' gives no tokens; give some text")
    check_ids(target, ids)
    if not holds_words(target.tokenizer.decode(ids), text):
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
