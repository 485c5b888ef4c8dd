"""Block verification: a chain of drawn guesses is judged as a whole, and never fewer stand than by the token rule.

Sun et al. 2024 (arXiv 2403.10444), algorithm 2. The token rule gives up at the first guess it turns down; here a longer part
of the chain may stand although a shorter one did not, since what counts is how likely the whole part is under the target.
The text's law is the target's own all the same. Where a guess was certain (greedy, look-up) both rules are the same.
"""

from __future__ import annotations

import torch

from spec_loop import Pass, Proposal, Verdict
from spec_methods.sampled import Sampled, residual


def part_weights(probs: torch.Tensor, laws: list[torch.Tensor], guesses: list[int]) -> list[float]:
    """pi_0 to pi_k: pi_i = min(1, pi_(i-1) target / draft) at guess i; `probs` (k + 1, vocabulary) are the target's rows."""
    weights = [1.0]
    for row, law, guess in zip(probs, laws, guesses, strict=False):
        weights.append(min(1.0, weights[-1] * float(row[guess]) / float(law[guess])))
    return weights


def part_chance(weight: float, following: torch.Tensor, law: torch.Tensor) -> float:
    """h: the chance that a part of weight pi stands, given that no longer one does. With Z the sum of max(pi target - draft, 0)
    over the row behind it, Z / (Z + 1 - pi); 1 where that is 0 / 0."""
    left = float((weight * following - law).clamp(min=0).sum())
    return left / (left + 1 - weight) if left + 1 - weight > 0 else 1.0


class BlockSampled(Sampled):
    """Draws as `Sampled` does, and judges chains whole. `chance` as there."""

    def judge(self, out: Pass, proposal: Proposal) -> Verdict:
        """Row 0 of `out.logits` says what follows the text, row i + 1 what follows guess i. Parts are tried from the whole
        chain down, each with a number of its own, so the longest that stands is found first."""
        if not len(proposal) or any(law is None for law in proposal.laws):
            return super().judge(out, proposal)
        probs, laws = self.law(out.logits[0]), proposal.laws
        flags = torch.stack([out.finite, *proposal.finite]).all()[None]
        *guesses, finite = torch.cat([proposal.tokens, flags]).tolist()
        weights = part_weights(probs, laws, guesses)
        k = stands = len(guesses)
        while stands and not self.chance.bernoulli(
            weights[k] if stands == k else part_chance(weights[stands], probs[stands], laws[stands])
        ):
            stands -= 1
        rest = probs[k] if stands == k else residual(weights[stands] * probs[stands], laws[stands], guesses[stands])
        return Verdict(list(range(stands)), int(self.chance.categorical(rest)), guesses, bool(finite))
