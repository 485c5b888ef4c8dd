"""Guesses made before they are asked for (speculative speculative decoding, Kumar, Dao and May 2026, arXiv 2603.03251).

While the target checks k guesses, the draft foresees how that may come out: `accepted` of them stand and the target's own
`token` follows. For the likeliest outcomes it guesses k tokens each, all of them in one pass a level. When the outcome is
known and was foreseen (a hit), the next guesses are there; in a miss the draft guesses then, as it would without all this.

Every guess carries the law that it was drawn from, by numbers of its own, and which answers are made depends on the draft's
rows alone: so the rule and its losslessness are those of any chain, hit or miss.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from spec_loop import Budget, ModelDrafter, Proposal, State, forward, keep_slots
from spec_methods.pearl import part
from spec_methods.trees import tree_geometry


class Outcome(NamedTuple):
    """How a check may come out."""

    accepted: int  # guesses that stand
    token: int  # the target's own behind them


def fan_out(k: int, first: float, alpha: float, power: float) -> list[int]:
    """Outcomes foreseen behind 0 to k accepted guesses, F(n) = F(0) alpha**(n / (1 + r)), the last one by (1 - alpha)**(-1 / (1 +
    r)) more; `power` is r, where F answers miss with F**-r. Kumar et al. At least one each; alpha below 1."""
    shares = [alpha ** (n / (1 + power)) for n in range(k + 1)]
    shares[k] *= (1 - alpha) ** (-1 / (1 + power))
    return [max(1, round(first * share)) for share in shares]


class ForeseeingDrafter(ModelDrafter):
    """A draft model that foresees outcomes. `fans`: how many behind 0 to k accepted guesses, k + 1 numbers. `reach`: the
    longest text that the draft may read; None: any. `hits` of `asked` outcomes were foreseen."""

    confident = False  # what was guessed beforehand cannot be ended by a doubt

    def __init__(self, model, target_rows: int, fans: Sequence[int], rule=None, reach: int | None = None):
        super().__init__(model, target_rows, rule=rule)
        self.fans, self.reach = list(fans), sys.maxsize if reach is None else reach

    def start(self, state: State) -> None:
        super().start(state)
        self.answers: dict[Outcome, Proposal] = {}
        self.answer, self.hits, self.asked = None, 0, 0

    def propose(self, state: State, budget: Budget) -> Proposal:
        """By turns what two devices do at once: guesses for this round, then answers while they would be checked."""
        made = self.offer(state, budget)
        self.foresee(state, made)
        return made

    def offer(self, state: State, budget: Budget) -> Proposal:
        """The answer to how the last check came out, or, where it was not foreseen, guesses made now."""
        return super().propose(state, budget) if self.answer is None else part(self.answer, 0, budget.depth)

    def foresee(self, state: State, made: Proposal) -> None:
        """Answers to the likeliest outcomes of checking `made`: a pass over it, then one for each level of all answers."""
        room = min(
            self.reach - len(made) - 1, state.ids.shape[1] - 2
        )  # the least that follows: a token, then a last check's
        depth = min(len(self.fans) - 1, room - state.length)
        self.answers = {}
        if self.blind or not len(made) or depth < 1:
            return
        keep_slots(self.cache, state.length - 1)
        fed = torch.cat([state.unread(self.cache), made.tokens[None]], dim=1)
        out = forward(self.model, fed, self.cache, len(made) + 1)
        outcomes = self.likely(out.logits[0], made)
        if outcomes:
            answers = self.guess_levels(state, len(made), outcomes, depth)
            for one in answers:
                one.finite.append(out.finite)
            self.answers = dict(zip(outcomes, answers, strict=True))
        state.watch("foresee")

    def likely(self, rows: torch.Tensor, made: Proposal) -> list[Outcome]:
        """Behind n accepted guesses the best ids of row n; where a guess was turned down, never that guess again."""
        guesses, found = made.tokens.tolist(), []
        rows = rows[:, : self.ids.sayable]
        for n, row in enumerate(rows):
            fan = self.fans[n if n < len(guesses) else -1]
            best = self.ids.of(row.topk(min(fan + 1, len(row))).indices).tolist()
            found += [Outcome(n, token) for token in best if n == len(guesses) or token != guesses[n]][:fan]
        return found

    def guess_levels(self, state: State, made: int, outcomes: list[Outcome], depth: int) -> list[Proposal]:
        """For each outcome `depth` guesses: every pass reads one token of each, which sees its own accepted guesses and way."""
        chains = [Proposal(state.ids[0, :0]) for _ in outcomes]
        tokens, width = state.ids.new_tensor([one.token for one in outcomes]), len(outcomes)
        slots = [state.length + i for i in range(made)]
        for level in range(depth):
            positions = [state.length + one.accepted + level for one in outcomes]
            slots += positions
            seen = [
                [*range(one.accepted), *(made + before * width + i for before in range(level + 1))]
                for i, one in enumerate(outcomes)
            ]
            geometry = tree_geometry(self.model, state.length, positions, seen, slots)
            out = forward(self.model, tokens[None], self.cache, width, **geometry)
            picks = [self.rule.choose(row[None], self.ids.sayable) for row in out.logits[0]]
            tokens = self.ids.of(torch.cat([pick.token for pick in picks]))
            for chain, token, pick in zip(chains, tokens, picks, strict=True):
                chain.tokens = torch.cat([chain.tokens, token[None]])
                chain.laws.append(self.ids.law(pick.law))
                chain.finite.append(out.finite)
        return chains

    def keep(self, state: State, path: list[int], features: tuple) -> None:
        """Look up how it came out. The cache is cut back to the text: its accepted guesses were read in place."""
        super().keep(state, path, features)
        self.answer = self.answers.get(Outcome(len(path), state.new[-1]))
        self.asked += bool(self.answers)
        self.hits += self.answer is not None
