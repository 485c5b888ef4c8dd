"""Guesses copied from the text itself: what followed the last few tokens when they stood there before. No model, no pass.

Prompt look-up decoding (Saxena 2023): the last n tokens are searched in prompt and output, the longest n first, and what
follows the match is the guess. Only tokens of the text are ever guessed, and none where nothing matches: a plain step.
"""

from __future__ import annotations

from bisect import bisect_right

from spec_counts import NO_WORK, Work
from spec_loop import Budget, ModelDrafter, Proposal, State

# Which of several matches is copied. first: the leftmost, as `generate` does. latest: the rightmost that k tokens follow;
# where none has so many, the one that most follow (of the rightmost alone little could be copied in a text that repeats).
MATCHES = ("first", "latest")


class LookupDrafter:
    """Copies up to k tokens that followed an earlier occurrence of the last n tokens, n from `ngram_max` to `ngram_min`.

    The index holds the places behind every n-gram that stands, the last tokens themselves excluded: nothing follows them.
    It grows in `keep` by the new tokens alone, so a round costs the same in a long text, and nothing is ever taken back.
    """

    confident = False  # a copied guess has no probability to look at
    taps = ()
    work = NO_WORK  # no model runs

    def __init__(self, ngram_max: int = 3, ngram_min: int = 1, match: str = MATCHES[0]):
        self.sizes, self.match = range(ngram_max, ngram_min - 1, -1), match

    def start(self, state: State) -> None:
        """Index the text."""
        self.text, self.indexed, self.places, self.matches = [], 1, {}, 0
        self.read(state.ids[0, : state.length].tolist())

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

    def propose(self, state: State, budget: Budget) -> Proposal:
        """Up to `budget.depth` guesses, copied, none past what stands. A certain guess has no law."""
        start = self.source(budget.depth)
        count = 0 if start is None else min(budget.depth, state.length - start)
        self.matches += count > 0
        made = Proposal(state.ids[0, start : start + count] if count else state.ids[0, :0], [None] * count)
        state.watch("look-up")
        return made

    def keep(self, state: State, path: list[int], features: tuple) -> None:
        self.read(state.new)


class HybridDrafter:
    """Copies where the text repeats itself, and asks a draft model, for up to `model_k` guesses, where it does not.

    The model's cache stays a prefix of the text: it reads the copied tokens when it is next asked.
    """

    confident = False  # not every guess has a probability

    def __init__(self, lookup: LookupDrafter, drafter: ModelDrafter, model_k: int):
        self.lookup, self.drafter, self.model_k, self.taps = lookup, drafter, model_k, drafter.taps

    @property
    def work(self) -> Work:
        return self.drafter.work

    @property
    def model(self):
        return self.drafter.model

    def start(self, state: State) -> None:
        self.lookup.start(state)
        self.drafter.start(state)

    def propose(self, state: State, budget: Budget) -> Proposal:
        made = self.lookup.propose(state, budget)
        return made if len(made) else self.drafter.propose(state, Budget(min(budget.depth, self.model_k)))

    def keep(self, state: State, path: list[int], features: tuple) -> None:
        self.lookup.keep(state, path, features)
        self.drafter.keep(state, path, features)
