"""What a decoding took, counted where it happens: a pass by the cache that it appends to, a round as it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Work(NamedTuple):
    """Passes, and the tokens that they read."""

    passes: int
    tokens: int

    def since(self, before: Work) -> Work:
        return Work(self.passes - before.passes, self.tokens - before.tokens)


NO_WORK = Work(0, 0)


def work_of(cache) -> Work:
    """The passes that have appended to that cache."""
    return getattr(cache, "work", NO_WORK)


def count_pass(cache, tokens: int) -> None:
    """A pass over that many tokens is about to append to the cache."""
    passes, read = work_of(cache)
    cache.work = Work(passes + 1, read + tokens)


class Round(NamedTuple):
    """What came of a round. alpha is the sum of `accepted` over the sum of `judged`: of a tree, a level is judged once."""

    guesses: Sequence[int]  # all that were proposed
    path: Sequence[int]  # the numbers of those that stand
    judged: int  # levels of the proposal that the rule looked at: those accepted, and the one that was not
    emitted: int  # tokens written: the accepted ones and the target's own, unless cut
    draft_passes: int


@dataclass
class Decoded:
    """What a run wrote and what it took."""

    tokens: list[int] = field(default_factory=list)
    target_passes: int = 0
    draft_passes: int = 0
    draft_tokens_read: int = 0  # by those passes: a pass after a round without a rejection reads two
    rounds: list[Round] = field(default_factory=list)

    @property
    def proposals(self) -> list[Sequence[int]]:
        return [one.guesses for one in self.rounds]

    @property
    def accepted(self) -> list[int]:
        return [len(one.path) for one in self.rounds]

    @property
    def emitted(self) -> list[int]:
        return [one.emitted for one in self.rounds]

    @property
    def rejected(self) -> list[bool]:
        """Whether judging met a wrong guess, each round."""
        return [one.judged > len(one.path) for one in self.rounds]

    def count_round(
        self, block: list[int], guesses: Sequence[int] = (), path: Sequence[int] = (), wrong: bool = False,
        ended: bool = False, drafted: Work = NO_WORK,
    ) -> None:  # fmt: skip
        """A round wrote `block`, after `path` of its `guesses`; `wrong`: guesses were judged behind the path, none right;
        `ended`: the block's last token ends the text.

        Guesses past an end token were never part of the text, so they are not counted as accepted; those past n tokens
        are (the essay's columns count them).
        """
        if ended and len(block) <= len(path):  # the end token is itself a guess: what came after it was never judged
            path, wrong = path[: len(block)], False
        self.tokens += block
        self.rounds.append(Round(guesses, path, len(path) + wrong, len(block), drafted.passes))
        self.draft_passes += drafted.passes
        self.draft_tokens_read += drafted.tokens
