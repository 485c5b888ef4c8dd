"""How far to look ahead: a k policy chooses k before a round, may end drafting inside it, and learns from what came of it.

None of them can change the text: a guess that was made is always judged, so what is included never depends on what it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from spec_loop import Budget

POLICIES = ("fixed", "heuristic", "confidence", "cost")
FIRST_K = 5  # where the schedule starts
THRESHOLD = 0.4  # transformers' default for its confidence threshold
# What `cost` believes. SURER is what `python -m spec_harness.fit_policy --prompt-file FILE` fits: here on 96 requests of a file of
# tasks, maths, code and instructions, the shipped draft. A distilled draft is more often right than it is sure, by about as much
# at every place of a block (log-odds over those of its own probability: 0.82, 0.88, 0.97, 1.02, 1.15, the first places counting
# most; slope 1.05). FORGET is the best of those tried there. STEP was chosen by hand: 0.05 is 0.7 % better on those requests, but
# sees too late that a text repeats itself (the five workloads were looked at).
SURER = 0.9
STEP, MOST_OFFSET = 0.3, 3.0  # of the running offset, which corrects the log-odds for other drafts and texts; its bound
FORGET = 0.95  # what old evidence still counts after each further round: traffic changes its kind
PRIOR_ALPHA, PRIOR_WEIGHT = 0.7, 3.0  # an opinion worth three judged guesses, before any has been seen
LOOP_OVERHEAD = 0.02  # of a target pass: what the loop itself is taken to cost a round
PROBE_EVERY = 16  # rounds: while nothing is guessed nothing is learnt, so look whether that is still right


class FixedK:
    """The same k every round."""

    def __init__(self, k: int):
        self.most = k
        self.begin()

    def begin(self) -> None:
        """A new text: forget what was learnt from the one before."""
        self.k = self.most

    def budget(self, confident: bool) -> Budget:
        """How far the next round may look. `confident`: whether the drafter's guesses carry a probability. A policy that
        reads it gives `enough`: whether to stop after a guess of that probability, which itself is kept."""
        return Budget(self.k)

    def learn(self, proposed: int, accepted: int) -> None:
        """What came of the round."""


class Schedule(FixedK):
    """transformers' heuristic: two more after a round in which all was accepted, one less after any other, from 1 to k."""

    def begin(self) -> None:
        self.k = min(FIRST_K, self.most)

    def learn(self, proposed: int, accepted: int) -> None:
        if proposed:
            self.k = min(self.most, self.k + 2) if accepted == proposed else max(1, self.k - 1)


class Confidence(FixedK):
    """Up to k guesses, but none after one that the draft itself gave less than the threshold (transformers' criterion)."""

    def __init__(self, k: int, threshold: float = THRESHOLD):
        super().__init__(k)
        self.threshold = threshold

    def budget(self, confident: bool) -> Budget:
        return Budget(self.k, self.enough if confident else None)

    def enough(self, confidence: float) -> bool:
        return confidence < self.threshold


class Cost(FixedK):
    """The k of the most expected tokens per second, from the measured costs and the acceptance seen so far.

    A block of m guesses takes T(m) = c_1 + ... + c_m + V(m+1) + o target passes (c_i: its i-th draft pass) and writes E(m) = 1 + a_1 + a_1 a_2 + ... tokens (Leviathan et al., equation 1, with an acceptance for each guess). Over many rounds the speed is the sum of the E over the sum of the T,
    so a block is worth E(m) - rate T(m) (renewal reward): `rate`, what time brings elsewhere, is the best E / T under the
    running alpha. A guess that is made counts with the acceptance that its confidence promises; those behind it with the
    running alpha. Drafting ends where no longer block is worth more than the one in hand; a round without guesses is one of
    the choices.
    """

    step, forget = STEP, FORGET

    def __init__(self, k: int, c: Sequence[float], v: Callable[[int], float], overhead: float = 0.0):
        """`c`: the i-th draft pass of a block, the last one for all behind it; empty where no model drafts."""
        drafting = [0.0, *accumulate(c[min(i, len(c) - 1)] if c else 0.0 for i in range(k))]
        self.passes = [drafting[m] + v(m + 1) + overhead for m in range(k + 1)]
        super().__init__(k)

    def begin(self) -> None:
        super().begin()
        self.right, self.judged = PRIOR_ALPHA * PRIOR_WEIGHT, PRIOR_WEIGHT
        self.offset, self.idle = 0.0, 0
        self.begin_block()

    def acceptance(self, confidence: float) -> float:
        """The chance that a guess is accepted, those before it in the block being so: the draft's own probability in log-odds,
        moved by how far a draft is off and by how far this one has been lately."""
        sure = min(max(confidence, 0.001), 0.999)
        return 1 / (1 + math.exp(-(math.log(sure / (1 - sure)) + SURER + self.offset)))

    def worth(self, made: int, reach: float, tokens: float) -> list[float]:
        """E(m) for m = `made` guesses, which write `tokens`, up to k: a next one counts where the last is reached."""
        found, alpha = [tokens], self.right / self.judged
        for _ in range(made, self.k):
            reach *= alpha
            found.append(found[-1] + reach)
        return found

    def begin_block(self) -> int:
        """Forget the block in hand. Returns how many guesses the next one should have if nothing is learnt on the way."""
        self.reach, self.tokens, self.confidences = 1.0, 1.0, []
        rates = [tokens / cost for tokens, cost in zip(self.worth(0, 1.0, 1.0), self.passes, strict=True)]
        self.rate = max(rates)
        return rates.index(self.rate)

    def is_whole(self) -> bool:
        """Whether no longer block is worth more than the one in hand."""
        made = len(self.confidences)
        gains = [tokens - self.rate * cost for tokens, cost in
                 zip(self.worth(made, self.reach, self.tokens), self.passes[made:], strict=True)]  # fmt: skip
        return max(gains) == gains[0]

    def budget(self, confident: bool) -> Budget:
        wanted = self.begin_block()
        self.idle = 0 if wanted else self.idle + 1
        if self.idle == PROBE_EVERY:
            self.idle, wanted = 0, min(1, self.k)
        return Budget(self.k, self.enough) if confident and wanted else Budget(wanted)

    def enough(self, confidence: float) -> bool:
        self.reach *= self.acceptance(confidence)
        self.tokens += self.reach
        self.confidences.append(confidence)
        return self.is_whole()

    def learn(self, proposed: int, accepted: int) -> None:
        if not proposed:
            return
        judged = min(proposed, accepted + 1)
        self.right, self.judged = self.forget * self.right + accepted, self.forget * self.judged + judged
        for place, confidence in enumerate(self.confidences[:judged]):
            surprise = (place < accepted) - self.acceptance(confidence)
            self.offset = max(-MOST_OFFSET, min(MOST_OFFSET, self.offset + self.step * surprise))


def make_policy(
    name: str,
    k: int,
    c: Sequence[float],
    v: Callable[[int], float],
    threshold: float = THRESHOLD,
    overhead: float = 0.0,
):
    """A fresh policy by its name; `k` is the most it may ask for. What only `cost` looks at, in target passes over one token:
    `c` the draft passes of a block by their place, `v(n)` a target pass over n, `overhead` the loop's."""
    if name == "cost":
        return Cost(k, c, v, overhead)
    return {"fixed": FixedK, "heuristic": Schedule}[name](k) if name != "confidence" else Confidence(k, threshold)
