"""Guesses of several heads on the target's last state (Medusa, Cai et al. 2024, arXiv 2401.10774): a chain, or a fixed tree.

The check of a round gives the state at the last accepted guess. From it the target's own head has just made the text's next
token; the heads make the tokens behind that one, all in one product and without a draft model's pass. No guess is drawn, so
that the sampled rule takes each as certain. Nothing is cached: a state is all that a round leaves behind.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from spec_counts import NO_WORK
from spec_ids import DraftIds
from spec_loop import Budget, Proposal, State
from spec_methods.trees import TreeProposal, best_size


class Guess(NamedTuple):
    """A node of a fixed tree: the guess of that rank of the head at that depth (both from 0), behind node `parent` (-1: the
    text). `value`: the chance that the whole way to it stands."""

    depth: int
    rank: int
    parent: int
    value: float


def likeliest_tree(ranks: Sequence[Sequence[float]], nodes: int) -> list[Guess]:
    """The best `nodes` guesses, their values falling, of heads whose guess of rank r is right with the chance `ranks[head][r]`:
    a node's value is the product on the way to it, as if heads erred apart from one another (the published choice). A
    parent comes before its children, a better sibling before a worse."""
    ways = [
        sorted(shares, reverse=True) for shares in ranks
    ]  # the best first, whatever little text said of the last ranks
    found, waiting = [], [(-ways[0][0], 0, 0, -1)] if ways else []
    while waiting and len(found) < nodes:
        less, depth, rank, parent = heapq.heappop(waiting)
        found.append(Guess(depth, rank, parent, -less))
        above = found[parent].value if parent >= 0 else 1.0
        if rank + 1 < len(ways[depth]):
            heapq.heappush(waiting, (-above * ways[depth][rank + 1], depth, rank + 1, parent))
        if depth + 1 < len(ways):
            heapq.heappush(waiting, (less * ways[depth + 1][0], depth + 1, 0, len(found) - 1))
    return found


class MedusaDrafter:
    """Guesses with a `Medusa` (spec_models/medusa.py): the best token of each head, one behind the other.

    `last` (1, hidden): the target's state before the text's last token; none where the text has one token alone.
    """

    confident = False  # how far a chain goes is fixed
    work = NO_WORK  # no pass of a model

    def __init__(self, model, target, target_rows: int):
        self.model, self.ids = model, DraftIds(model, target_rows)
        self.taps = (target.config.get_text_config().num_hidden_layers,)

    def start(self, state: State) -> None:
        """Nothing is read: the target has."""
        self.last = state.features[0][:, -1] if state.length > 1 else None

    def ranked(self, state: State, ranks: int, made: Proposal) -> torch.Tensor:
        """(heads, ranks): the ids that each head takes for likeliest."""
        logits = self.model(self.last)[0, :, : self.ids.sayable]
        made.finite.append(logits.amax(-1).isfinite().all())
        best = self.ids.of(logits.topk(ranks).indices)
        state.watch("draft")
        return best

    def propose(self, state: State, budget: Budget) -> Proposal:
        """As many guesses as there are heads, at most `budget.depth`."""
        made, depth = Proposal(state.ids[0, :0]), min(budget.depth, self.model.heads)
        if depth and self.last is not None:
            made.tokens = self.ranked(state, 1, made)[:depth, 0]
            made.laws = [None] * depth
        return made

    def keep(self, state: State, path: list[int], features: tuple[torch.Tensor, ...]) -> None:
        """The state at the last guess that stands, which the target's own token came from."""
        self.last = features[0][:, -1]


class MedusaTreeDrafter(MedusaDrafter):
    """Guesses the tree of up to `nodes` that most often held on held-out text; `v(n)`, a target pass over n tokens in passes
    over one, decides how many of them are offered. Without it (V 1) all are."""

    def __init__(self, model, target, target_rows: int, nodes: int, v: Callable[[int], float] = lambda n: 1.0):
        """Raises ValueError for heads that were never judged."""
        super().__init__(model, target, target_rows)
        if not model.ranks:
            raise ValueError("its file does not say how often each rank is right; train it again")
        tree = likeliest_tree(model.ranks, nodes)
        self.tree = tree[: best_size([one.value for one in tree], 0.0, v)[0]]

    def propose(self, state: State, budget: Budget) -> TreeProposal:
        """The nodes of at most `budget.depth` levels."""
        made, tree = TreeProposal(state.ids[0, :0]), [one for one in self.tree if one.depth < budget.depth]
        if tree and self.last is not None:
            best = self.ranked(state, 1 + max(one.rank for one in tree), made)
            made.tokens = best[[one.depth for one in tree], [one.rank for one in tree]]
            place = {
                number: i for i, number in enumerate(n for n, one in enumerate(self.tree) if one.depth < budget.depth)
            }
            made.parents = [place.get(one.parent, -1) for one in tree]
            made.laws = [None] * len(tree)
        return made
