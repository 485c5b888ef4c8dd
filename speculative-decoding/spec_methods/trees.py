"""A tree of guesses: several tokens for one place, checked together in one pass, of which one path can stand.

Siblings share a position and differ in their slot of the cache, and each token sees the text, its ancestors and itself:
that is all that `forward` has to be told. Which nodes are worth their place is decided by what the draft itself gives
them: a node's value is the product of the draft's probabilities on the way to it, an estimate of the chance that it
stands, and the best n of all nodes seen are the best tree of n nodes (OPT-Tree, Wang et al. 2024, arXiv 2406.17276;
Sequoia, Chen et al. 2024, arXiv 2402.12374). No node is drawn, so that the sampled rule tries them as certain guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spec_common import UserError

import torch

from spec_loop import Budget, ModelDrafter, Proposal, State, forward, keep_slots, new_cache
from spec_models.checks import Loaded, attention_windows, check_passes, vocabulary_rows
from spec_models.masked import guesses_at_once

BRANCHES = 8  # children looked at of a node: a lower rank is hardly ever among the best nodes


def tree_geometry(
    model, text: int, positions: Sequence[int], seen: Sequence[Sequence[int]], slots: Sequence[int]
) -> dict:
    """position_ids and attention_mask of a pass over tokens that stand at `positions`. Each sees the first `text` slots
    and, of those behind them, the ones numbered in its entry of `seen` (itself among them, counted from `text` on);
    `slots` holds the positions of those slots. A mask (1, 1, tokens, slots) is 0 where a token looks, else -inf; layers
    with a sliding window get one of their own."""
    device = model.device
    visible = torch.zeros(len(positions), text + len(slots), dtype=torch.bool)
    visible[:, :text] = True
    for row, own in zip(visible, seen, strict=True):
        row[[text + slot for slot in own]] = True
    ids = torch.tensor([list(positions)], device=device)
    distance = ids[0, :, None] - torch.tensor([*range(text), *slots], device=device)
    visible, masks = visible.to(device), {}
    for kind, window in attention_windows(model).items():
        inside = visible if window is None else visible & (distance < window)
        masks[kind] = torch.zeros(inside.shape, dtype=model.dtype, device=device).masked_fill_(~inside, -torch.inf)[
            None, None
        ]
    return {"position_ids": ids, "attention_mask": masks if len(masks) > 1 else next(iter(masks.values()))}


@dataclass
class TreeProposal(Proposal):
    """Guesses of which node j follows node parents[j], -1 being the text's last token. A parent comes before its children;
    of siblings the earlier is tried first."""

    parents: list[int] = field(default_factory=list)

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def ancestors(self, node: int) -> list[int]:
        """The nodes on the way down to `node`, itself the last."""
        return [] if node < 0 else [*self.ancestors(self.parents[node]), node]

    def depth_of(self, node: int) -> int:
        return len(self.ancestors(node))

    def geometry(self, model, cached: int) -> dict:
        """The text's last token stands in slot `cached`, node j in the slot j + 1 behind it."""
        ways = [[]] + [self.ancestors(node) for node in range(len(self))]
        positions = [cached + len(way) for way in ways]
        seen = [[0, *(node + 1 for node in way)] for way in ways]
        return tree_geometry(model, cached, positions, seen, positions)


@dataclass
class Node:
    """A token that the draft gave some probability at its place: `value` is the chance that the whole way to it stands.
    `slot`: where the draft's cache holds it, once it has been read."""

    token: int
    value: float
    parent: Node | None
    depth: int
    slot: int | None = None

    def way(self) -> list[Node]:
        return [*(self.parent.way() if self.parent else []), self]


def best_size(values: Sequence[float], drafted: float, v: Callable[[int], float]) -> tuple[int, float]:
    """How many of the nodes, their values falling, give the most tokens for the time, and how many tokens that is for a
    target pass: argmax of (1 + sum of the first n values) / (drafted + V(n + 1)), V being anything measured."""
    tokens, best = 1.0, (0, 1 / (drafted + v(1)))
    for n, value in enumerate(values, 1):
        tokens += value
        best = max(best, (n, tokens / (drafted + v(n + 1))), key=lambda one: one[1])
    return best


class TreeDrafter(ModelDrafter):
    """Guesses a tree of up to `nodes` tokens with a draft model: a pass for a level, the best nodes of the level read in it.

    `c` and `v(n)`: a draft pass, and a target pass over n tokens, in target passes over one; they decide how deep it
    goes and how many nodes are offered. Without them (c 0, V 1) every node is.
    """

    confident = False  # how far to look is decided here

    def __init__(self, model, target_rows: int, nodes: int, c: float = 0.0, v: Callable[[int], float] = lambda n: 1.0):
        super().__init__(model, target_rows)
        self.nodes, self.c, self.v = nodes, c, v

    def propose(self, state: State, budget: Budget) -> TreeProposal:
        """The best tree of at most `self.nodes` nodes and `budget.depth` levels."""
        made, found, level = TreeProposal(state.ids[0, :0]), [], [None]
        while level and (level[0].depth if level[0] else 0) < budget.depth and not self.blind:
            found += self.grown(state, level, made.finite)
            found = sorted(found, key=lambda node: (-node.value, node.depth))[: self.nodes]
            level = self.worth_reading(found, len(made.finite))
        size, _ = best_size([node.value for node in found], len(made.finite) * self.c, self.v)
        self.tree = found[:size]
        place = {id(node): i for i, node in enumerate(self.tree)}
        made.parents = [-1 if node.parent is None else place[id(node.parent)] for node in self.tree]
        made.tokens, made.laws = state.ids.new_tensor([node.token for node in self.tree]), [None] * size
        state.watch("pick")
        return made

    def grown(self, state: State, level: list[Node | None], finite: list[torch.Tensor]) -> list[Node]:
        """The likeliest children of a level's nodes ([None]: of the text itself), from one pass that reads it."""
        if level == [None]:
            fed, geometry = state.unread(self.cache), {}
        else:
            fed, geometry = state.ids.new_tensor([[node.token for node in level]]), self.level_geometry(state.length, level)
        state.watch("pick")
        out = forward(self.model, fed, self.cache, len(level), **geometry)
        finite.append(out.finite)
        state.watch("draft")
        probs = out.logits[0, :, : self.ids.sayable].float().softmax(-1)
        likely, picked = probs.topk(min(BRANCHES, probs.shape[-1]), dim=-1)
        children, depth = [], 1 if level == [None] else level[0].depth + 1
        for parent, row, ids in zip(level, likely.tolist(), self.ids.of(picked).tolist(), strict=True):
            value = parent.value if parent else 1.0
            children += [Node(token, value * p, parent, depth) for token, p in zip(ids, row, strict=True)]
        return children

    def level_geometry(self, length: int, level: list[Node]) -> dict:
        """Where a level's tokens stand, as `forward` wants it. Gives each node its slot in the draft's cache."""
        held = self.cache.get_seq_length()
        for i, node in enumerate(level):
            node.slot = held + i
        self.read = [*([] if held == length else self.read), *level]
        seen = [[one.slot - length for one in node.way()] for node in level]
        positions = [length - 1 + node.depth for node in level]
        return tree_geometry(self.model, length, positions, seen, [length - 1 + node.depth for node in self.read])

    def worth_reading(self, found: list[Node], passes: int) -> list[Node]:
        """The nodes of the last level that are among the best, if reading them can pay: at most each of them adds a
        token with the chance that it stands itself."""
        deepest = max((node.depth for node in found), default=0)
        level = [node for node in found if node.depth == deepest == passes]
        values = [node.value for node in found]
        hoped = sorted(values + [node.value for node in level], reverse=True)[: self.nodes]
        now, then = best_size(values, passes * self.c, self.v)[1], best_size(hoped, (passes + 1) * self.c, self.v)[1]
        return level if then > now else []

    def keep(self, state: State, path: list[int], features: tuple) -> None:
        """Of what the draft has read, the text stands: the nodes of the path that it has read, moved up behind it."""
        slots = [self.tree[node].slot for node in path if self.tree[node].slot is not None]
        keep_slots(self.cache, state.length - 1 - len(path), slots)
        self.blind = self.blind or max(state.new) >= self.ids.readable


# -------------------------------------------------------------------------------------------------------------- checks


@torch.inference_mode()
def tree_error(model) -> float:
    """How far a tree is from its paths run alone, as a share of the logits' spread: two branches of two tokens each behind
    a text, then the text going on along the second of them in the same cache."""
    ids = torch.arange(3, 15, device=model.device).remainder(vocabulary_rows(model)).tolist()
    text, tree = ids[:6], TreeProposal(torch.tensor(ids[6:10], device=model.device), parents=[-1, -1, 0, 1])
    cache = new_cache(model)
    tokens = torch.tensor([ids], device=model.device)
    forward(model, tokens[:, :5], cache)
    rows = (
        forward(model, torch.tensor([[text[5], *ids[6:10]]], device=model.device), cache, 5, **tree.geometry(model, 5))
        .logits[0]
        .float()
    )
    keep_slots(cache, 6, [7, 9])
    after = forward(model, tokens[:, 10:], cache, 1).logits[0, -1].float()
    ways = [[ids[6 + node] for node in tree.ancestors(node)] for node in range(4)]
    alone = [
        model(torch.tensor([text + way], device=model.device), use_cache=False).logits[0, -1].float() for way in ways
    ]
    gone_on = (
        model(torch.tensor([text + ways[3] + ids[10:]], device=model.device), use_cache=False).logits[0, -1].float()
    )
    errors = [(rows[i + 1] - row).abs().max() for i, row in enumerate(alone)] + [(after - gone_on).abs().max()]
    return float(max(errors) / alone[0].std())


def check_tree(loaded: Loaded) -> None:
    """One real try: the rows of a small tree must be those of its paths run alone. Raises UserError for models that take no
    mask or positions of ours (ALiBi, state-space layers, attention in chunks)."""
    if guesses_at_once(loaded.model):
        raise UserError(f"--tree: {loaded.name} makes one chain of guesses in a pass; leave --tree out or choose another draft")
    refusal = "this architecture cannot check a tree of guesses; leave --tree out"
    check_passes(loaded, tree_error, refusal, "a pass over five tokens")
