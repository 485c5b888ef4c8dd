"""The loop: a draft guesses, the target checks every guess in one pass, and the text stays the target's own.

`ids` is the truth and every cache a prefix of it, so nothing is ever carried as "pending": a pass feeds the difference.
A round is three paragraphs of `speculate`: draft (a drafter proposes tokens), verify (one pass of the target gives a
row for each of them and one more), keep (the agreed path and the target's own next token stand; the caches keep those
slots and no others). What differs between methods comes in from outside, in three parts:

- a drafter, what guesses: `start(state)`, `propose(state, budget)`, `keep(state, path, features)`; it says what it
  wants to see of the target (`taps`) and whether its guesses carry a probability (`confident`), and counts its `work`;
- a rule, what stands: `begin()`, `choose(row)`, `judge(out, proposal)`; losslessness is the rule's alone;
- a policy, how far to look: `begin()`, `budget(confident)`, `learn(proposed, accepted)` (spec_methods/policy.py).

The plain ones stand here: a draft model, the greedy rule. What a run took is counted by spec_counts.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from spec_common import UserError, dtype_name, unwatched

import torch
from transformers import DynamicCache

from spec_counts import Decoded, Work, count_pass, work_of
from spec_ids import DraftIds

LOOPS = ("lean", "essay")


class DecodingError(UserError):
    """A pass gave something no text may be made of: logits that are not finite, or a cache that did not roll back."""


class Pass(NamedTuple):
    """What a pass gave."""

    logits: torch.Tensor  # (1, rows, vocabulary) of its last rows; a row says what follows the token that was fed there
    features: tuple[torch.Tensor, ...]  # (1, fed, width) for each tap
    finite: torch.Tensor  # () on the device: no row holds a NaN or an infinite best


class TextCache(DynamicCache):
    """transformers' cache. Without a config it keeps every key: sliding windows stay exact and can roll back."""

    def keep(self, length: int, path: Sequence[int]) -> None:
        """The first `length` slots stand and, moved up behind them, those of `path` (rising); the rest is forgotten."""
        end = length + len(path)
        if list(path) != list(range(length, end)):  # the path of a tree; a chain's is in place already
            for layer in self.layers:
                for store in (layer.keys, layer.values):
                    store[:, :, length:end] = store[:, :, list(path)]
        self.crop(end - self.get_seq_length())


def new_cache(model):
    """An empty cache that can always roll back: the model's own kind if it has one."""
    return model.new_cache() if hasattr(model, "new_cache") else TextCache()


@functools.cache
def forward_options(model_class: type) -> frozenset[str]:
    """Which keywords of ours that class's forward knows; cache= is the newer name of past_key_values=."""
    return frozenset({"logits_to_keep", "cache"} & set(inspect.signature(model_class.forward).parameters))


@torch.inference_mode()
def forward(model, tokens: torch.Tensor, cache, rows: int = 1, taps: Sequence[int] = (), **geometry) -> Pass:
    """Feed `tokens` (1, n) behind what `cache` holds, in one pass that appends to it; nothing else does, so passes are
    counted here. `taps`: hidden states to hand out (0: the embeddings, i: what layer i gives, the last one behind the
    final norm). `geometry`: position_ids (1, n) and attention_mask of tokens that do not follow one another."""
    options = forward_options(type(model))
    keywords = {"cache" if "cache" in options else "past_key_values": cache, **geometry}
    if "logits_to_keep" in options:
        keywords["logits_to_keep"] = rows
    if taps:
        keywords["output_hidden_states"] = list(taps)
    count_pass(cache, tokens.shape[1])
    out = model(tokens, use_cache=True, **keywords)
    logits = out.logits[:, -rows:]
    return Pass(logits, tuple(out.hidden_states[tap] for tap in taps), logits.amax(-1).isfinite().all())


def keep_slots(cache, length: int, path: Sequence[int] = ()) -> None:
    """Make the cache hold its first `length` slots and those of `path` (rising, from `length` on) alone; one that is
    shorter stays. The only place that takes anything back. Raises DecodingError where the cache did not obey."""
    end = length + len(path)
    if cache.get_seq_length() > end or any(slot != length + i for i, slot in enumerate(path)):
        cache.keep(length, path)
        if cache.get_seq_length() != end:
            raise DecodingError(f"the cache holds {cache.get_seq_length()} tokens after a rollback to {end}")


def not_finite(model) -> DecodingError:
    where = f"{dtype_name(model.dtype)} on {model.device}"
    return DecodingError(f"{type(model).__name__}: logits are not finite in {where}; try another --dtype")


# ------------------------------------------------------------------------------------------------- what goes to and fro


@dataclass
class State:
    """Where a decoding stands: the text is `ids[:, :length]`, in a buffer with room to grow."""

    ids: torch.Tensor
    length: int
    cache: object  # the target's
    features: tuple[torch.Tensor, ...] = ()  # of the prompt's tokens in it, (1, n, width) for each tap
    watch: Callable = unwatched  # the clock of a watched run
    new: list[int] = field(default_factory=list)  # what was written last

    def unread(self, cache) -> torch.Tensor:
        """(1, n): the tokens of the text that `cache` does not hold yet."""
        return self.ids[:, cache.get_seq_length() : self.length]

    def write(self, block: list[int]) -> None:
        self.ids[0, self.length : self.length + len(block)] = self.ids.new_tensor(block)
        self.length, self.new = self.length + len(block), block


class Budget(NamedTuple):
    """How far a round may look: guesses one after the other, and whether to stop after one of that probability."""

    depth: int
    enough: Callable[[float], bool] | None = None


@dataclass
class Proposal:
    """Guesses, in a buffer of their own, on the text's device. Each follows the one before (a chain)."""

    tokens: torch.Tensor  # (n,)
    laws: list = field(default_factory=list)  # of each the law (vocabulary,) it was drawn from; None: it was certain
    finite: list[torch.Tensor] = field(default_factory=list)  # a flag () for each pass of a draft model

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def children(self, node: int) -> list[int]:
        """The guesses that follow guess `node`; -1 is the text's last token."""
        return [node + 1] if node + 1 < len(self) else []

    def geometry(self, model, cached: int) -> dict:
        """What `forward` must know of the places behind `cached` tokens: nothing. A tree says more (trees.py)."""
        return {}


class Choice(NamedTuple):
    """One token picked."""

    token: torch.Tensor  # its id, (1,)
    law: torch.Tensor | None  # (vocabulary,), which it was drawn from; None where nothing was drawn


class Verdict(NamedTuple):
    """What stands of a proposal: a path of accepted guesses, then one token of the target's own, if a row gives it."""

    path: list[int]  # the guesses' numbers
    token: int | None  # None where all stand and no row says what follows them
    guesses: list[int]  # all of them, as read from the device
    finite: bool  # whether every pass was


class Greedy:
    """The best id, always; a guess stands where it is that id."""

    def begin(self) -> None:
        """A new text: nothing to forget."""

    def choose(self, logits: torch.Tensor, vocabulary: int | None = None) -> Choice:
        """From logits (1, vocabulary); ids from `vocabulary` up are never picked."""
        return Choice(logits[:, :vocabulary].argmax(-1), None)

    def judge(self, out: Pass, proposal: Proposal) -> Verdict:
        """Row 0 of `out.logits` says what follows the text, row i + 1 what follows guess i; the last row may be missing."""
        choices = out.logits[0].argmax(-1)
        flags = torch.stack([out.finite, *proposal.finite]).all()[None]
        read = torch.cat([proposal.tokens, choices, flags]).tolist()  # the one wait for the device in a round
        guesses, choices = read[: len(proposal)], read[len(proposal) : -1]
        path, node = [], -1
        while agreed := [child for child in proposal.children(node) if guesses[child] == choices[node + 1]]:
            node = agreed[0]
            path.append(node)
        return Verdict(path, choices[node + 1] if node + 1 < len(choices) else None, guesses, bool(read[-1]))


# ------------------------------------------------------------------------------------------------------------- the loop


@torch.inference_mode()
def prefill(target, prompt: torch.Tensor, room: int, taps: Sequence[int] = ()) -> State:
    """Read all but the last token of `prompt`, (1, n): the same split for every arm. `room` tokens may follow it."""
    length = prompt.shape[1]
    state = State(torch.cat([prompt, prompt.new_zeros(1, room)], dim=1), length, new_cache(target))
    if length > 1:
        state.features = forward(target, prompt[:, :-1], state.cache, 1, taps).features
    return state


@torch.inference_mode()
def baseline(target, state: State, n_tokens: int, rule, ends: frozenset[int] = frozenset()) -> Decoded:
    """Plain decoding: one target pass a token, no more. Takes the state that `prefill` made."""
    done, before = Decoded(), work_of(state.cache)
    while len(done.tokens) < n_tokens and not ends & set(done.tokens[-1:]):
        out = forward(target, state.unread(state.cache), state.cache)
        state.watch("target")
        token, finite = torch.cat([rule.choose(out.logits[:, -1]).token, out.finite[None]]).tolist()
        if not finite:
            raise not_finite(target)
        state.write([token])
        done.count_round([token])
        state.watch("keep", 1)
    done.target_passes = work_of(state.cache).since(before).passes
    return done


@torch.inference_mode()
def speculate(
    target, drafter, state: State, n_tokens: int, rule, policy, *,
    loop: str = "lean", ends: frozenset[int] = frozenset(), limit: int | None = None,
) -> Decoded:  # fmt: skip
    """The loop. The drafter has been started. `loop`: 'lean' looks no further than what remains to be written; 'essay'
    always guesses k and cuts. `limit`: the longest text both models are defined for; no pass looks past it."""
    done, end, before = Decoded(), state.length + n_tokens, work_of(state.cache)
    while state.length < end and not ends & set(done.tokens[-1:]):
        # draft: guesses, in a buffer of their own
        depth, enough = policy.budget(drafter.confident)
        depth = depth if loop == "essay" else min(depth, end - state.length - 1)
        depth = depth if limit is None else max(0, min(depth, limit - state.length))
        drafted = drafter.work
        made = drafter.propose(state, Budget(depth, enough))

        # verify: ONE target pass over the last written token and the guesses; a row judges what follows it
        cached = state.cache.get_seq_length()
        fed = torch.cat([state.unread(state.cache), made.tokens[None]], dim=1)
        geometry = made.geometry(target, cached)
        state.watch("pick")
        out = forward(target, fed, state.cache, len(made) + 1, drafter.taps, **geometry)
        state.watch("verify")
        path, token, guesses, finite = rule.judge(out, made)
        if not finite:
            raise not_finite(drafter.model if out.finite else target)

        # keep: the agreed path and the target's own next token, which is free; the rest never happened
        block = cut_block([*(guesses[i] for i in path), token], end - state.length, ends)
        stands = path[: len(block) - 1]
        keep_slots(state.cache, state.length, [state.length + i for i in stands])
        state.write(block)
        drafter.keep(state, stands, tuple(feature[:, [0, *(i + 1 for i in stands)]] for feature in out.features))
        policy.learn(len(made), len(path))
        state.watch("keep", len(block))
        wrong = bool(made.children(path[-1] if path else -1))  # the target's own token was not among those it judged
        done.count_round(block, guesses, path, wrong, block[-1] in ends, drafter.work.since(drafted))
    done.target_passes = work_of(state.cache).since(before).passes
    return done


def cut_block(block: list[int], room: int, ends: frozenset[int]) -> list[int]:
    """The part of a block that is written: up to `room` tokens, and nothing after the first end token."""
    block = block[:room]
    return block[: next((i + 1 for i, token in enumerate(block) if token in ends), len(block))]


# ------------------------------------------------------------------------------------------------------ the draft model


class ModelDrafter:
    """Guesses with a smaller model of the same tokenizer, one pass a guess. Once the text holds an id that the draft
    cannot read, it stays silent and the target goes on alone."""

    confident = True  # its guesses carry a probability, which a policy may look at
    taps = ()  # hidden states of the target that it wants to see

    def __init__(self, model, target_rows: int, read_last: bool = False, rule=None):
        """`target_rows`: the ids that the target can read. `read_last`: feed the last guess too, as the essay does."""
        self.model, self.read_last, self.rule = model, read_last, rule or Greedy()
        self.ids = DraftIds(model, target_rows)

    @property
    def work(self) -> Work:
        return work_of(self.cache)

    def start(self, state: State) -> None:
        """Read all but the last token of the text."""
        self.cache = new_cache(self.model)
        self.blind = bool((state.ids[:, : state.length] >= self.ids.readable).any())
        if state.length > 1 and not self.blind:
            forward(self.model, state.ids[:, : state.length - 1], self.cache)

    def read(self, state: State, fed: torch.Tensor) -> Pass:
        """One pass over `fed` (1, n)."""
        out = forward(self.model, fed, self.cache)
        state.watch("draft")
        return out

    def propose(self, state: State, budget: Budget) -> Proposal:
        """Up to `budget.depth` guesses; fewer where the budget has enough."""
        made, guesses, fed = Proposal(state.ids[0, :0]), [], state.unread(self.cache)
        while len(guesses) < budget.depth and not self.blind:
            out = self.read(state, fed)
            row = out.logits[:, -1]
            picked, law = self.rule.choose(row, self.ids.sayable)
            fed = self.ids.of(picked)[None]
            guesses.append(fed[0])
            made.laws.append(self.ids.law(law))
            made.finite.append(out.finite)
            state.watch("pick")
            if budget.enough and budget.enough(self.confidence(row, picked, law)):
                break
        if guesses:
            made.tokens = torch.cat(guesses)
            if self.read_last:
                self.read(state, fed)
        return made

    def confidence(self, row: torch.Tensor, picked: torch.Tensor, law: torch.Tensor | None) -> float:
        """The probability that the draft gave to what it picked."""
        probs = row[0, : self.ids.sayable].float().softmax(-1) if law is None else law
        return float(probs[picked])

    def keep(self, state: State, path: list[int], features: tuple[torch.Tensor, ...]) -> None:
        """Forget what was rejected: the text stands, `path` names the guesses in it."""
        keep_slots(self.cache, state.length - 1)
        self.blind = self.blind or max(state.new) >= self.ids.readable
