"""The loop: a draft guesses k tokens, the target checks them in one pass, the text stays the target's own.

A round is three paragraphs: draft (a drafter proposes), verify (one target pass gives k+1 rows), keep (the agreed prefix
and the target's own next token; roll back to it). `ids` is the truth, every cache a prefix of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from spec_common import unwatched
from spec_pass import check_finite, forward, new_cache, rollback, top_tokens

LOOPS = ("lean", "essay")


@dataclass
class Decoded:
    """What a run wrote and what it took. Lists hold one entry a round, in order."""

    tokens: list[int] = field(default_factory=list)
    target_passes: int = 0
    draft_passes: int = 0
    proposals: list[list[int]] = field(default_factory=list)  # the guesses, each round
    accepted: list[int] = field(default_factory=list)  # how many of them were kept, each round
    emitted: list[int] = field(default_factory=list)  # tokens written, each round: accepted + 1 unless cut
    rejected: list[bool] = field(default_factory=list)  # whether judging met a wrong guess, each round

    @property
    def rejections(self) -> int:
        return sum(self.rejected)


class ModelDrafter:
    """Guesses with a smaller model of the same tokenizer, one pass a guess.

    `read_last`: also feed the last guess, as the essay's loop does; otherwise the next round feeds what is missing.
    `vocabulary`: the target's rows; a padded draft may have more, and those ids are never proposed.
    """

    def __init__(self, model, vocabulary: int, read_last: bool = False):
        self.model, self.read_last = model, read_last
        self.kept = getattr(model.get_output_embeddings(), "kept", None)  # a cut head's rows speak of these ids
        self.vocabulary = vocabulary if self.kept is None else None
        self.rows = model.get_input_embeddings().weight.shape[0]

    def start(self, ids: torch.Tensor, length: int) -> None:
        """Read all but the last of `ids[:, :length]`."""
        self.cache = new_cache(self.model)
        self.blind = bool((ids[:, :length] >= self.rows).any())
        if length > 1 and not self.blind:
            forward(self.model, ids[:, : length - 1], self.cache, 1)

    def propose(self, ids: torch.Tensor, length: int, k: int, watch) -> tuple[int, int, list[torch.Tensor]]:
        """Write up to k guesses into `ids` from `length` on. Returns (guesses, passes taken, their top logits)."""
        if self.blind or k == 0:
            return 0, 0, []
        tops = []
        for guess in range(length, length + k):
            logits = forward(self.model, ids[:, :guess], self.cache, 1)
            watch("draft")
            choice, top = top_tokens(logits[:, -1], self.vocabulary)
            ids[:, guess] = choice if self.kept is None else self.kept[choice]
            tops.append(top)
            watch("pick")
        if self.read_last:
            forward(self.model, ids[:, : length + k], self.cache, 1)
            watch("draft")
        return k, k + self.read_last, tops

    def keep(self, length: int, written: list[int]) -> None:
        """Forget what was rejected: `length` tokens stand, of which `written` are new.

        An id past the draft's table (tables of one family are padded differently) can never be read: from then on
        the draft stays silent, and the target goes on alone.
        """
        rollback(self.cache, length - 1)
        self.blind = self.blind or max(written) >= self.rows


def agreed_prefix(guesses: list[int], choices: list[int]) -> int:
    """The greedy accept rule: how many guesses, from the start, are what the target would have written."""
    return next((i for i, guess in enumerate(guesses) if guess != choices[i]), len(guesses))


def cut_block(block: list[int], room: int, ends: frozenset[int]) -> list[int]:
    """The part of a block that is written: up to `room` tokens, and nothing after the first end token."""
    block = block[:room]
    return block[: next((i + 1 for i, token in enumerate(block) if token in ends), len(block))]


@dataclass
class State:
    """Where a decoding stands after prefill: the text in a buffer with room to grow, and the target's cache."""

    ids: torch.Tensor
    length: int
    cache: object


@torch.inference_mode()
def prefill(target, prompt: torch.Tensor, room: int) -> State:
    """Read all but the last prompt token, with the same split for every arm. `prompt` is (1, n), n of 1 or more."""
    length = prompt.shape[1]
    ids = torch.cat([prompt, prompt.new_zeros(1, room)], dim=1)
    cache = new_cache(target)
    if length > 1:
        forward(target, ids[:, : length - 1], cache, 1)
    return State(ids, length, cache)


@torch.inference_mode()
def baseline(target, state: State, n_tokens: int, ends: frozenset[int] = frozenset(), watch=unwatched) -> Decoded:
    """Plain greedy decoding: one target pass a token, no more. Takes the state that `prefill` made."""
    ids, length, cache, done = state.ids, state.length, state.cache, Decoded()
    while len(done.tokens) < n_tokens and not ends & set(done.tokens[-1:]):
        logits = forward(target, ids[:, :length], cache, 1)
        watch("target")
        choice, top = top_tokens(logits[:, -1])
        check_finite(target, top.tolist())
        ids[:, length] = choice
        done.tokens += choice.tolist()
        length += 1
        watch("keep", 1)
    done.target_passes = len(done.tokens)
    done.emitted = [1] * len(done.tokens)
    return done


@torch.inference_mode()
def speculate(
    target,
    drafter,
    state: State,
    n_tokens: int,
    k: int,
    loop: str = "lean",
    ends: frozenset[int] = frozenset(),
    limit: int | None = None,
    watch=unwatched,
) -> Decoded:
    """The loop. `loop`: 'lean' looks no further than what remains to be written; 'essay' always guesses k and cuts.

    `limit` is the longest text both models are defined for: no pass looks past it. The drafter has been started.
    """
    ids, length, cache, done = state.ids, state.length, state.cache, Decoded()
    end, ended = length + n_tokens, False
    while length < end and not ended:
        # draft: the small model writes ahead, into the text itself
        ahead = k if loop == "essay" else min(k, end - length - 1)
        ahead = ahead if limit is None else max(0, min(ahead, limit - length))
        proposed, passes, tops = drafter.propose(ids, length, ahead, watch)

        # verify: ONE target pass over the last written token and the guesses; row j judges guess j
        logits = forward(target, ids[:, : length + proposed], cache, proposed + 1)
        watch("verify")
        choices, values = top_tokens(logits[0])

        # keep: the agreed prefix and the target's own next token, which is free; the rest never happened
        guesses = ids[0, length : length + proposed].tolist()
        check_finite(target, values.tolist())
        check_finite(drafter.model, torch.cat(tops).tolist() if tops else [])
        accepted = agreed_prefix(guesses, choices.tolist())
        block = cut_block(choices[: accepted + 1].tolist(), end - length, ends)
        ended = block[-1] in ends
        ids[0, length : length + len(block)] = choices[: len(block)]
        length += len(block)
        rollback(cache, length - 1)
        drafter.keep(length, block)
        watch("keep", len(block))
        tally(done, passes, guesses, accepted, block, ended)
    return done


def tally(done: Decoded, passes: int, guesses: list[int], accepted: int, block: list[int], ended: bool) -> None:
    """Count a round. Guesses past an end token were never part of the text, so they are not counted as accepted;
    those past n tokens are (the essay's columns count them)."""
    if ended and len(block) <= accepted:  # the end token is itself a guess: what came after it was never judged
        accepted = len(block)
        done.rejected.append(False)
    else:
        done.rejected.append(accepted < len(guesses))
    done.target_passes += 1
    done.draft_passes += passes
    done.proposals.append(guesses)
    done.accepted.append(accepted)
    done.emitted.append(len(block))
    done.tokens += block
