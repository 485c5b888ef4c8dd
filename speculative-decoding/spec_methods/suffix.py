"""Look-up with counts: what followed the last tokens wherever they stood, for as long as the counts are sure of it.

Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975), cold: it remembers this text alone. Prompt look-up copies one place for
a set length; here every length of match is weighed, the guess is the commonest continuation, and the counts say how far.
"""

from __future__ import annotations

from spec_loop import Budget, Proposal, State
from spec_methods.lookup import LookupDrafter

DEPTH = 24  # tokens of the longest sequence that is counted
LEAST = 0.1  # chance of a whole guess, by the counts, below which it ends
FACTOR = 1.0  # guesses for each token that matched


class Node:
    """How often a sequence of tokens stood in the text, and what followed it."""

    __slots__ = ("children", "count")

    def __init__(self):
        self.count, self.children = 0, {}

    def grown(self, token: int) -> Node:
        """The node of the sequence with that token behind it, counted once more."""
        child = self.children.setdefault(token, Node())
        child.count += 1
        return child


class SuffixDrafter(LookupDrafter):
    """Guesses the commonest continuation of the last m tokens; of all m, that whose expected number of right guesses, by the
    counts, is the highest (of equals the longer). `tails` holds the nodes of the last 1, 2, ... DEPTH tokens: they grow in
    `keep` by the new tokens alone, and nothing is ever taken back."""

    def __init__(self):
        super().__init__(match="suffix")

    def start(self, state: State) -> None:
        self.root, self.tails, self.matches = Node(), [], 0
        self.read(state.ids[0, : state.length].tolist())

    def read(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tails = [node.grown(token) for node in (self.root, *self.tails[: DEPTH - 1])]

    def continued(self, m: int, k: int) -> tuple[float, list[int]]:
        """(expected right guesses, the guesses) behind the last m tokens, up to k and to FACTOR for each that matched."""
        node, chance, score, guesses = self.tails[m - 1], 1.0, 0.0, []
        while node.children and len(guesses) < min(k, int(FACTOR * m)):
            token, child = max(node.children.items(), key=lambda item: item[1].count)
            chance *= child.count / sum(other.count for other in node.children.values())
            if chance < LEAST:
                break
            guesses.append(token)
            score += chance
            node = child
        return score, guesses

    def propose(self, state: State, budget: Budget) -> Proposal:
        """Up to `budget.depth` guesses. A certain guess has no law."""
        found = [self.continued(m, budget.depth) for m in range(1, len(self.tails) + 1)]
        _, guesses = max(reversed(found), key=lambda one: one[0], default=(0.0, []))
        self.matches += bool(guesses)
        made = Proposal(state.ids.new_tensor(guesses), [None] * len(guesses))
        state.watch("look-up")
        return made
