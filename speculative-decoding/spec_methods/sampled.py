"""The accept rule of sampling: a guess stands with probability min(1, target / draft), and the text keeps the target's law.

Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318). It is lossless where the draft's law is
the very one the guess was drawn from; temperature, top-k and top-p need not be the same on both sides. All randomness goes
through one object, so that a test can put every outcome in its place and add up the exact law of what is written.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_loop import Choice, Pass, Proposal, Verdict

WIDE = {"mps": torch.float32}  # what probabilities are added up in: float64, which Apple's GPU has not


class Chance:
    """All that is random in a run, from one seed; it never touches torch's own generator, nor is touched by it."""

    def __init__(self, seed: int):
        self.seed, self.generator = seed, torch.Generator()
        self.begin()

    def begin(self) -> None:
        """A new text of the same seed: the same numbers again."""
        self.generator.manual_seed(self.seed)

    def uniform(self) -> float:
        """From 0 up to, never at, 1, in steps of 2**-53."""
        return torch.rand((), generator=self.generator, dtype=torch.float64).item()

    def bernoulli(self, probability: float) -> bool:
        """Strictly below: an id of probability 0 is not accepted even where the number drawn is 0."""
        return self.uniform() < probability

    def categorical(self, probs: torch.Tensor) -> torch.Tensor:
        """An id (1,) from probs (vocabulary,), on its device, without waiting for it. By the inverse of the cumulative law.

        Never an id of probability 0. From NaN it gives id 0 and does not raise: the loop's own test of finiteness follows.
        """
        cumulative, possible = probs.to(WIDE.get(probs.device.type, torch.float64)).cumsum(0), probs > 0
        past = cumulative > self.uniform() * cumulative[-1]
        # The first maximum: the first possible id past the number drawn, or a possible one where rounding left none past it
        # (in float32 the number drawn can become 1; on a GPU a cumulative sum need not rise everywhere).
        return (possible.int() + (possible & past).int()).argmax(0, keepdim=True)


def nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Of probs (n, vocabulary) the fewest ids whose probabilities reach `top_p`, normalised; of equal ids the lower first."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0)
    return torch.zeros_like(probs).scatter_(-1, ids, ordered / ordered.sum(-1, keepdim=True))


def acceptance(target_probs: torch.Tensor, draft_probs: torch.Tensor | None, guess: int) -> float:
    """min(1, target / draft) at the guess; the draft's law (vocabulary,) is None for a guess that was certain."""
    target, draft = float(target_probs[guess]), 1.0 if draft_probs is None else float(draft_probs[guess])
    return target / draft if target < draft else float(target > 0)


def residual(target_probs: torch.Tensor, draft_probs: torch.Tensor | None, guess: int) -> torch.Tensor:
    """What a rejected guess is replaced from, (vocabulary,): max(target - draft, 0), normalised.

    Where the two laws differ by rounding alone nothing is left to normalise, and the target's own law is taken: a guess is
    rejected there no more often than the sum that vanishes, so the text's law moves by less than a unit of rounding.
    """
    if draft_probs is None:
        rest = target_probs.clone()
        rest[guess] = 0
    else:
        rest = (target_probs - draft_probs).clamp(min=0)
    total = float(rest.sum())
    return rest / total if torch.finfo(rest.dtype).eps < total < float("inf") else target_probs


def overlap(target_probs: torch.Tensor, draft_probs: torch.Tensor | None, guess: int) -> float:
    """The chance that a guess is accepted, before it is drawn: sum of min(target, draft). Leviathan et al., theorem 3.5."""
    return float(target_probs[guess] if draft_probs is None else torch.minimum(target_probs, draft_probs).sum())


class Child(NamedTuple):
    """A guess that stands, by its number (None: none does), and the law of what is to be drawn where none does."""

    node: int | None
    rest: torch.Tensor


class Sampled:
    """Draws from the processed law: temperature, then top-k, then top-p; temperature 0 is greedy. `chance` as Chance."""

    def __init__(self, temperature: float, top_k: int, top_p: float, chance):
        """`temperature` 0 or more; `top_k` 0: all ids, ties at its edge are kept; `top_p` above 0, up to 1: all ids."""
        self.temperature, self.top_k, self.top_p, self.chance = temperature, top_k, top_p, chance

    def begin(self) -> None:
        self.chance.begin()

    def law(self, logits: torch.Tensor) -> torch.Tensor:
        """(n, vocabulary) logits to probabilities, in float32, or float64 where the logits are."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1)
        # The best logit becomes 0 first, so that no temperature, however low, can divide it to infinity.
        lowest = torch.finfo(logits.dtype).tiny
        scaled = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, lowest)
        if 0 < self.top_k < logits.shape[-1]:
            least = scaled.topk(self.top_k).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -float("inf"))
        probs = scaled.softmax(-1)
        return probs if self.top_p == 1 else nucleus(probs, self.top_p)

    def choose(self, logits: torch.Tensor, vocabulary: int | None = None) -> Choice:
        """One id from logits (1, vocabulary), and the law it was drawn from; ids from `vocabulary` up are never drawn."""
        if self.temperature == 0:
            return Choice(logits[:, :vocabulary].argmax(-1), None)
        law = self.law(logits[..., :vocabulary])[0]
        return Choice(self.chance.categorical(law), law)

    def judge(self, out: Pass, proposal: Proposal) -> Verdict:
        """Row 0 of `out.logits` says what follows the text, row i + 1 what follows guess i; the last row may be missing. Below a
        node the guesses are tried in turn, each drawn from its law (None: it was certain); one that is rejected leaves its residual to the
        next (SpecInfer's rule, which for a chain is Leviathan's), and what is left at the end gives the target's token."""
        probs = self.law(out.logits[0])
        *guesses, finite = torch.cat(
            [proposal.tokens, torch.stack([out.finite, *proposal.finite]).all()[None]]
        ).tolist()
        path, node, rest = [], -1, probs[0]
        while (child := self.accepted_child(proposal, guesses, node, rest)).node is not None:
            node = child.node
            path.append(node)
            if node + 1 == len(probs):
                return Verdict(path, None, guesses, bool(finite))
            rest = probs[node + 1]
        return Verdict(path, int(self.chance.categorical(child.rest)), guesses, bool(finite))

    def accepted_child(self, proposal: Proposal, guesses: list[int], node: int, rest: torch.Tensor) -> Child:
        """The first guess below `node` that stands, and what is left of the target's law (vocabulary,) behind the others."""
        for child in proposal.children(node):
            guess, law = guesses[child], proposal.laws[child]
            if self.chance.bernoulli(acceptance(rest, law, guess)):
                return Child(child, rest)
            rest = residual(rest, law, guess)
        return Child(None, rest)
