"""How far to look ahead: a k policy chooses k before a round, may end drafting inside it, and learns from what came of it."""

from __future__ import annotations


class FixedK:
    """The same k every round."""

    reads_confidence = False  # whether `enough` looks at the draft's own probability of its guess

    def __init__(self, k: int):
        self.k = k

    def ahead(self) -> int:
        """Guesses to ask for in the next round, 0 or more."""
        return self.k

    def enough(self, confidence: float) -> bool:
        """Whether to stop drafting after a guess that the draft gave this probability. The guess is kept: whether it is
        included may not depend on what it is, or sampling would no longer be lossless."""
        return False

    def learn(self, proposed: int, accepted: int) -> None:
        """What came of the round."""
