"""Guesses copied from the text itself: what followed the last few tokens when they stood there before. No model, no pass.

Prompt look-up decoding (Saxena 2023): the last n tokens are searched in prompt and output, the longest n first, and what
follows the match is the guess. Only tokens of the text are ever guessed, and none where nothing matches: a plain step.
"""

from __future__ import annotations

from bisect import bisect_right

import torch

from spec_drafters import Proposal

# Which of several matches is copied. first: the leftmost, as `generate` does. latest: the rightmost that k tokens follow;
# where none has so many, the one that most follow (of the rightmost alone little could be copied in a text that repeats).
MATCHES = ("first", "latest")


class LookupDrafter:
    """Copies up to k tokens that followed an earlier occurrence of the last n tokens, n from `ngram_max` to `ngram_min`.

    The index holds the places behind every n-gram that stands, the last tokens themselves excluded: nothing follows them.
    It grows in `keep` by the new tokens alone, so a round costs the same in a long text, and nothing is ever taken back.
    """

    confident = False  # a copied guess has no probability to look at

    def __init__(self, ngram_max: int = 3, ngram_min: int = 1, match: str = MATCHES[0]):
        self.sizes, self.match = range(ngram_max, ngram_min - 1, -1), match

    def start(self, ids: torch.Tensor, length: int) -> None:
        """Index `ids[:, :length]`."""
        self.text, self.indexed, self.places, self.matches = [], 1, {}, 0
        self.read(ids[0, :length].tolist())

    def read(self, tokens: list[int]) -> None:
        """Take in new tokens: `places` maps an n-gram to where its continuations start, in rising order."""
        self.text += tokens
        for end in range(self.indexed, len(self.text)):
            for n in self.sizes:
                if n <= end:
                    self.places.setdefault(tuple(self.text[end - n : end]), []).append(end)
        self.indexed = len(self.text)

    def source(self, k: int) -> int | None:
        """Where to copy from; None where nothing matches."""
        for n in self.sizes:
            if places := self.places.get(tuple(self.text[-n:])):
                return (
                    places[0] if self.match == "first" else places[max(bisect_right(places, len(self.text) - k) - 1, 0)]
                )
        return None

    def propose(self, ids: torch.Tensor, length: int, k: int, watch, policy) -> Proposal:
        """Copy up to k guesses into `ids` from `length` on, none past what stands. A certain guess has no law."""
        start = self.source(k)
        count = 0 if start is None else min(k, length - start)
        self.matches += count > 0
        if count:
            ids[:, length : length + count] = ids[:, start : start + count]
        watch("look-up")
        return Proposal(count, laws=[None] * count)

    def keep(self, length: int, written: list[int]) -> None:
        self.read(written)

    def check(self, made: Proposal) -> None:
        """Nothing was computed."""


class HybridDrafter:
    """Copies where the text repeats itself, and asks a draft model, for up to `model_k` guesses, where it does not.

    The model's cache stays a prefix of the text: it reads the copied tokens when it is next asked.
    """

    confident = False  # not every guess has a probability

    def __init__(self, lookup: LookupDrafter, model, model_k: int):
        self.lookup, self.model, self.model_k = lookup, model, model_k

    def start(self, ids: torch.Tensor, length: int) -> None:
        self.lookup.start(ids, length)
        self.model.start(ids, length)

    def propose(self, ids: torch.Tensor, length: int, k: int, watch, policy) -> Proposal:
        made = self.lookup.propose(ids, length, k, watch, policy)
        return made if made.count else self.model.propose(ids, length, min(k, self.model_k), watch, policy)

    def keep(self, length: int, written: list[int]) -> None:
        self.lookup.keep(length, written)
        self.model.keep(length, written)

    def check(self, made: Proposal) -> None:
        self.model.check(made)
