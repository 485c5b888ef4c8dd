"""What the target would write, and how its pass judges a draft's guesses: greedy here; sampling is one more rule.

A rule has two methods. `choose(logits)` picks one token from a model's row, for the baseline and for a draft. `judge`
takes the k+1 rows of a target pass and the guesses, and says which tokens stand. Losslessness is the rule's alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_pass import top_tokens


class Choice(NamedTuple):
    """One token picked: its id (1,), the row's best logit (1,) as the test of finiteness, and the law it was drawn from
    (vocabulary,), or None where nothing was drawn."""

    token: torch.Tensor
    top: torch.Tensor
    law: torch.Tensor | None


class Verdict(NamedTuple):
    """What stands of a block: `tokens`, the accepted guesses and then one token of the target's own; how many were
    `accepted`; the best logit of every row as the test of finiteness."""

    tokens: list[int]
    accepted: int
    tops: list[float]


def agreed_prefix(guesses: list[int], choices: list[int]) -> int:
    """How many guesses, from the start, are what the target would have written."""
    return next((i for i, guess in enumerate(guesses) if guess != choices[i]), len(guesses))


class Greedy:
    """The best id, always; a guess stands where it is that id."""

    def choose(self, logits: torch.Tensor, vocabulary: int | None = None) -> Choice:
        """From logits (1, vocabulary); ids from `vocabulary` up are never picked."""
        token, top = top_tokens(logits, vocabulary)
        return Choice(token, top, None)

    def judge(self, logits: torch.Tensor, guesses: list[int], laws: list) -> Verdict:
        """`logits` (k+1, vocabulary): row j judges guess j, and the row after the agreed prefix gives the free token."""
        choices, values = top_tokens(logits)
        choices = choices.tolist()
        accepted = agreed_prefix(guesses, choices)
        return Verdict(choices[: accepted + 1], accepted, values.tolist())
