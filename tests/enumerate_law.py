"""The exact law of what a sampling loop writes: every outcome of every draw is put in its place, and probabilities add up.

A Chance that replays a script of branches runs the suite's own code, rule, drafter and loop, once for each branch there is.
Nothing is sampled, so a wrong rule shows as a difference from the target's law and not as a doubtful statistic.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import defaultdict
from types import SimpleNamespace

import torch

from spec_loop import forward_options, keep_slots, new_cache
from spec_methods.sampled import Chance


class Branches(Chance):
    """Takes the branches of `script`, then the first of every choice; `untried` are the scripts of the others it passed."""

    def __init__(self, script: tuple = ()):
        self.script = script
        self.begin()

    def begin(self) -> None:
        self.taken, self.untried, self.probability = [], [], 1.0

    def take(self, options: list[tuple]):
        """One of the (outcome, probability) in `options`."""
        place = len(self.taken)
        if place < len(self.script):
            branch = self.script[place]
        else:
            branch = 0
            self.untried += [(*self.taken, other) for other in range(1, len(options))]
        self.taken.append(branch)
        outcome, probability = options[branch]
        self.probability *= probability
        return outcome

    def bernoulli(self, probability: float) -> bool:
        return self.take([(outcome, p) for outcome, p in ((True, probability), (False, 1 - probability)) if p > 0])

    def categorical(self, probs: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.take([(i, p) for i, p in enumerate(probs.tolist()) if p > 0])])


class Grid(Branches):
    """Draws its uniform numbers from a grid of `steps` cells, so that Chance's own comparisons are inside what is tried out.
    The first cell is tried at 0 itself, the others in their middle, where rounding cannot matter."""

    steps = 4
    bernoulli, categorical = Chance.bernoulli, Chance.categorical

    def uniform(self) -> float:
        return self.take([((cell + 0.5) / self.steps if cell else 0.0, 1 / self.steps) for cell in range(self.steps)])


def law_of(run, chance=Branches) -> dict[tuple, float]:
    """The law of the texts that `run(chance)` returns as lists of ids."""
    law, scripts = defaultdict(float), [()]
    while scripts:
        replay = chance(scripts.pop())
        law[tuple(run(replay))] += replay.probability
        scripts += replay.untried
    return dict(law)


def true_law(next_probs, prompt: tuple, n: int, ends=frozenset()) -> dict[tuple, float]:
    """The law of n tokens after `prompt`, up to an end token, as the product of `next_probs(ids)`, a list over the vocabulary."""
    law, whole = {(): 1.0}, {}
    for _ in range(n):
        grown = {
            (*text, i): p * q for text, p in law.items() for i, q in enumerate(next_probs((*prompt, *text))) if q > 0
        }
        whole |= {text: p for text, p in grown.items() if text[-1] in ends}
        law = {text: p for text, p in grown.items() if text[-1] not in ends}
    return whole | law


def total_variation(a: dict, b: dict) -> float:
    return sum(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys()) / 2


def processed(logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> list[float]:
    """The law that the three settings make of one row, shared with no code of the suite."""
    from math import exp, fsum

    best = max(logits)
    if temperature == 0:
        return [float(i == logits.index(best)) for i in range(len(logits))]
    weights = [exp((value - best) / temperature) for value in logits]
    if top_k:
        edge = sorted(weights, reverse=True)[:top_k][-1]
        weights = [weight if weight >= edge else 0.0 for weight in weights]
    probs = [weight / fsum(weights) for weight in weights]
    kept, mass = set(), 0.0
    for i in sorted(range(len(probs)), key=lambda i: -probs[i]):
        if mass < top_p:
            kept.add(i)
            mass += probs[i]
    return [probs[i] / fsum(probs[j] for j in kept) if i in kept else 0.0 for i in range(len(probs))]


# -------------------------------------------------------------------------------------------------------------- models


class IdCache:
    """What a table was fed."""

    def __init__(self):
        self.ids: list[int] = []

    def get_seq_length(self) -> int:
        return len(self.ids)

    def keep(self, length: int, path=()) -> None:
        self.ids[length:] = [self.ids[slot] for slot in path]


class Table:
    """A model whose logits are a table: a row drawn for every text, or given by `probs(text)`. What it says depends on what
    its cache was fed, in order, so a fault in the loop's bookkeeping changes the law. `kept`: the ids of a cut head."""

    device, dtype = torch.device("cpu"), torch.float64
    config = SimpleNamespace(get_text_config=SimpleNamespace)  # no sliding windows

    def __init__(self, rows: int, seed: int = 0, probs=None, kept: list[int] | None = None):
        self.rows, self.seed, self.given = rows, seed, probs
        self.head = SimpleNamespace() if kept is None else SimpleNamespace(kept=torch.tensor(kept))
        self.width = rows if kept is None else len(kept)
        self.logits_after = functools.cache(self.logits_after)

    def new_cache(self) -> IdCache:
        return IdCache()

    def get_input_embeddings(self):
        return SimpleNamespace(weight=torch.empty(self.rows, 1))

    def get_output_embeddings(self):
        return self.head

    def logits_after(self, ids: tuple) -> torch.Tensor:
        assert max(ids) < self.rows, "an id that this model cannot read"
        if self.given:
            return torch.tensor(self.given(ids), dtype=torch.float64).log()
        draw = random.Random(f"{self.seed} {ids}")  # a Dirichlet(0.7) row: uneven, as models are
        return torch.tensor([draw.gammavariate(0.7, 1) + 1e-3 for _ in range(self.width)], dtype=torch.float64).log()

    def forward(self, input_ids, cache, logits_to_keep=0, use_cache=True, position_ids=None, attention_mask=None):
        """Of every token the row of the text that it sees: all before it, or what its row of the mask leaves."""
        first = len(cache.ids)
        cache.ids += input_ids[0].tolist()
        rows = []
        for i in range(input_ids.shape[1]):
            seen = range(first + i + 1) if attention_mask is None else attention_mask[0, 0, i].isfinite().nonzero().flatten().tolist()
            if position_ids is not None:
                assert int(position_ids[0, i]) == len(seen) - 1, "a token that does not stand where its text ends"
            rows.append(self.logits_after(tuple(cache.ids[slot] for slot in seen)))
        return SimpleNamespace(logits=torch.stack(rows)[None])

    __call__ = forward


class RememberedCache:
    """All that was done to a real cache, in order: ids fed, and lengths it was rolled back to."""

    def __init__(self):
        self.history: tuple = ()
        self.length = 0

    def get_seq_length(self) -> int:
        return self.length

    def keep(self, length: int, path=()) -> None:
        self.length = length + len(path)
        self.history = (*self.history, (length, tuple(path)))


class Remembered:
    """A real model that runs each pass once. Branches share their beginnings: a pass is looked up by everything that was done
    to its cache, rollbacks included, so what is looked up is, to the bit, what the model would give."""

    def __init__(self, model):
        self.model, self.passes = model, {}
        self.states = {(): new_cache(model)}

    def __getattr__(self, name):
        return getattr(self.model, name)

    def new_cache(self) -> RememberedCache:
        return RememberedCache()

    def state(self, history: tuple):
        """The real cache after that history, to be copied, never changed."""
        if history not in self.states:
            cache = copy.deepcopy(self.state(history[:-1]))
            keep_slots(cache, *history[-1])
            self.states[history] = cache
        return self.states[history]

    def forward(self, input_ids, cache, logits_to_keep=0, use_cache=True):
        fed = tuple(input_ids[0].tolist())
        after = (*cache.history, fed)
        if after not in self.passes:
            real = copy.deepcopy(self.state(cache.history))
            name = "cache" if "cache" in forward_options(type(self.model)) else "past_key_values"
            self.passes[after] = self.model(input_ids, use_cache=True, **{name: real}).logits
            self.states[after] = real
        cache.history, cache.length = after, cache.length + len(fed)
        return SimpleNamespace(logits=self.passes[after])

    __call__ = forward
