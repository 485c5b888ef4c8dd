"""The loop: a draft guesses, the target checks every guess in one pass, and the text stays the target's own.

`ids` is the truth and every cache a prefix of it, so nothing is ever carried as "pending": a pass feeds the difference.
A round is three paragraphs of `speculate`: draft (a drafter proposes tokens), verify (one pass of the target gives a row
for each of them and one more), keep (the agreed path and the target's own next token stand; the caches keep those slots
and no others). What differs between methods comes in from outside, in three parts:

- a drafter, what guesses: `start(state)`, `propose(state, budget)`, `keep(state, path, features)`; it says what it wants to
  see of the target (`taps`), whether its guesses carry a probability (`confident`), and counts its `work` (here: a draft model);
- a rule, what stands: `begin()`, `choose(row)`, `judge(out, proposal)` (here: greedy; losslessness is the rule's alone);
- a policy, how far to look: `begin()`, `budget(confident)`, `learn(proposed, accepted)` (spec_methods/policy.py).
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

LOOPS = ("lean", "essay")


class DecodingError(UserError):
    """A pass gave something no text may be made of: logits that are not finite, or a cache that did not roll back."""


# ----------------------------------------------------------------------------------------------------- one pass, one cache


class Pass(NamedTuple):
    """What a pass gave: `logits` (1, rows, vocabulary) of its last rows, where row j says what follows the fed token j;
    `features`, for each tap (1, fed, width); `finite`, () on the device: whether no row holds a NaN or an infinite best."""

    logits: torch.Tensor
    features: tuple[torch.Tensor, ...]
    finite: torch.Tensor


class TextCache(DynamicCache):
    """transformers' cache. Built without a config it keeps every key, so sliding windows stay exact and can roll back."""

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
    """Feed `tokens` (1, n) behind what `cache` holds, in one pass that appends to it; the only place that does, and so
    the place where passes are counted (`cache.work`).

    `taps`: hidden states to hand out, numbered as transformers does (0: the embeddings, i: what layer i gives, the last
    one after the final norm). `geometry`: position_ids (1, n) and attention_mask of tokens that do not follow one another.
    """
    options = forward_options(type(model))
    keywords = {"cache" if "cache" in options else "past_key_values": cache, **geometry}
    if "logits_to_keep" in options:
        keywords["logits_to_keep"] = rows
    if taps:
        keywords["output_hidden_states"] = list(taps)
    cache.work = Work(work_of(cache).passes + 1, work_of(cache).tokens + tokens.shape[1])
    out = model(tokens, use_cache=True, **keywords)
    logits = out.logits[:, -rows:]
    features = tuple(out.hidden_states[tap] for tap in taps)
    return Pass(logits, features, logits.amax(-1).isfinite().all())


class Work(NamedTuple):
    """Passes, and the tokens that they read."""

    passes: int
    tokens: int

    def since(self, before: Work) -> Work:
        return Work(self.passes - before.passes, self.tokens - before.tokens)


def work_of(cache) -> Work:
    """The passes that have appended to that cache."""
    return getattr(cache, "work", Work(0, 0))


def keep_slots(cache, length: int, path: Sequence[int] = ()) -> None:
    """Make the cache hold its first `length` slots and those of `path` (rising, each `length` or more), nothing else; a
    shorter cache is left alone. The only place that takes anything back. Raises DecodingError if the cache did not obey."""
    end = length + len(path)
    if cache.get_seq_length() > end or any(slot != length + i for i, slot in enumerate(path)):
        cache.keep(length, path)
        if cache.get_seq_length() != end:
            raise DecodingError(f"the cache holds {cache.get_seq_length()} tokens after a rollback to {end}")


def not_finite(model) -> DecodingError:
    where = f"{dtype_name(model.dtype)} on {model.device}"
    return DecodingError(f"{type(model).__name__}: logits are not finite in {where}; try another --dtype")


# --------------------------------------------------------------------------------------------------- what goes to and fro


@dataclass
class State:
    """Where a decoding stands: the text `ids[:, :length]` in a buffer with room to grow, the target's cache, the features
    of the tokens in it (a tensor (1, n, width) for each of the drafter's taps), and the clock of a watched run."""

    ids: torch.Tensor
    length: int
    cache: object
    features: tuple[torch.Tensor, ...] = ()
    watch: Callable = unwatched
    new: list[int] = field(default_factory=list)  # what was written last

    def unread(self, cache) -> torch.Tensor:
        """(1, n): the tokens of the text that `cache` does not hold yet."""
        return self.ids[:, cache.get_seq_length() : self.length]

    def write(self, block: list[int]) -> None:
        self.ids[0, self.length : self.length + len(block)] = self.ids.new_tensor(block)
        self.length, self.new = self.length + len(block), block


class Budget(NamedTuple):
    """How far a round may look: `depth` guesses one after the other; after each of them `enough(its probability)`, where
    it is given, says whether to stop there."""

    depth: int
    enough: Callable[[float], bool] | None = None


@dataclass
class Proposal:
    """Guesses, in a buffer of their own: `tokens` (n,) on the text's device. Each follows the one before (a chain).

    `laws`: of each guess the law (vocabulary,) it was drawn from, over the target's ids, or None for a certain one.
    `finite`: a flag () for each pass of a draft model that was needed.
    """

    tokens: torch.Tensor
    laws: list = field(default_factory=list)
    finite: list[torch.Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def children(self, node: int) -> list[int]:
        """The guesses that follow guess `node`; -1 is the text's last token."""
        return [node + 1] if node + 1 < len(self) else []

    def geometry(self, model, cached: int) -> dict:
        """What `forward` must be told of the text's last token and the guesses behind `cached` tokens: nothing, for a
        chain. A tree (spec_methods/trees.py) gives positions and a mask."""
        return {}


class Choice(NamedTuple):
    """One token picked: its id (1,), and the law (vocabulary,) it was drawn from, or None where nothing was drawn."""

    token: torch.Tensor
    law: torch.Tensor | None


class Verdict(NamedTuple):
    """What stands of a proposal: the `path` of accepted guesses by their numbers, then one `token` of the target's own;
    all `guesses` as read from the device, and whether every pass was `finite`."""

    path: list[int]
    token: int
    guesses: list[int]
    finite: bool


class Greedy:
    """The best id, always; a guess stands where it is that id."""

    def begin(self) -> None:
        """A new text: nothing to forget."""

    def choose(self, logits: torch.Tensor, vocabulary: int | None = None) -> Choice:
        """From logits (1, vocabulary); ids from `vocabulary` up are never picked."""
        return Choice(logits[:, :vocabulary].argmax(-1), None)

    def judge(self, out: Pass, proposal: Proposal) -> Verdict:
        """Row 0 of `out.logits` says what follows the text, row i + 1 what follows guess i."""
        choices = out.logits[0].argmax(-1)
        flags = torch.stack([out.finite, *proposal.finite]).all()[None]
        read = torch.cat([proposal.tokens, choices, flags]).tolist()  # the one wait for the device in a round
        guesses, choices = read[: len(proposal)], read[len(proposal) : -1]
        path, node = [], -1
        while agreed := [child for child in proposal.children(node) if guesses[child] == choices[node + 1]]:
            node = agreed[0]
            path.append(node)
        return Verdict(path, choices[node + 1], guesses, bool(read[-1]))


class Round(NamedTuple):
    """What came of a round. alpha is the sum of `accepted` over the sum of `judged`: of a tree, a level is judged once."""

    guesses: list[int]  # all that were proposed
    path: list[int]  # the numbers of those that stand
    judged: int  # levels of the proposal that the rule looked at: those accepted, and the one that was not
    emitted: int  # tokens written: the accepted ones and the target's own, unless cut
    draft_passes: int


@dataclass
class Decoded:
    """What a run wrote and what it took, counted where it happened."""

    tokens: list[int] = field(default_factory=list)
    target_passes: int = 0
    draft_passes: int = 0
    draft_tokens_read: int = 0  # by those passes: a pass after a round without a rejection reads two
    rounds: list[Round] = field(default_factory=list)

    @property
    def proposals(self) -> list[list[int]]:
        return [one.guesses for one in self.rounds]

    @property
    def accepted(self) -> list[int]:
        return [len(one.path) for one in self.rounds]

    @property
    def emitted(self) -> list[int]:
        return [one.emitted for one in self.rounds]

    @property
    def rejected(self) -> list[bool]:
        """Whether judging met a wrong guess, each round."""
        return [one.judged > len(one.path) for one in self.rounds]


# -------------------------------------------------------------------------------------------------------------- the loop


@torch.inference_mode()
def prefill(target, prompt: torch.Tensor, room: int, taps: Sequence[int] = ()) -> State:
    """Read all but the last prompt token, with the same split for every arm. `prompt` is (1, n), n of 1 or more; `room`
    tokens may follow it."""
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
        done.tokens.append(token)
        done.rounds.append(Round([], [], 0, 1, 0))
        state.watch("keep", 1)
    done.target_passes = work_of(state.cache).since(before).passes
    return done


@torch.inference_mode()
def speculate(
    target, drafter, state: State, n_tokens: int, rule, policy, *,
    loop: str = "lean", ends: frozenset[int] = frozenset(), limit: int | None = None,
) -> Decoded:  # fmt: skip
    """The loop. `loop`: 'lean' looks no further than what remains to be written; 'essay' always guesses k and cuts.

    `limit` is the longest text both models are defined for: no pass looks past it. The drafter has been started.
    """
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
        out = forward(target, fed, state.cache, len(made) + 1, drafter.taps, **made.geometry(target, cached))
        state.watch("verify")
        verdict = rule.judge(out, made)
        if not verdict.finite:
            raise not_finite(drafter.model if out.finite else target)

        # keep: the agreed path and the target's own next token, which is free; the rest never happened
        path, guesses = verdict.path, verdict.guesses
        block = cut_block([*(guesses[i] for i in path), verdict.token], end - state.length, ends)
        stands = path[: len(block) - 1]
        keep_slots(state.cache, state.length, [state.length + i for i in stands])
        state.write(block)
        drafter.keep(state, stands, tuple(feature[:, [0, *(i + 1 for i in stands)]] for feature in out.features))
        policy.learn(len(made), len(path))
        state.watch("keep", len(block))
        count_round(done, made, verdict, block, drafter.work.since(drafted), ended=block[-1] in ends)
    done.target_passes = work_of(state.cache).since(before).passes
    return done


def cut_block(block: list[int], room: int, ends: frozenset[int]) -> list[int]:
    """The part of a block that is written: up to `room` tokens, and nothing after the first end token."""
    block = block[:room]
    return block[: next((i + 1 for i, token in enumerate(block) if token in ends), len(block))]


def count_round(done: Decoded, made: Proposal, verdict: Verdict, block: list[int], drafted: Work, ended: bool) -> None:
    """Count a round. Guesses past an end token were never part of the text, so they are not counted as accepted;
    those past n tokens are (the essay's columns count them)."""
    path = verdict.path
    wrong = bool(made.children((path or [-1])[-1]))  # the target's own token was not among the guesses that it judged
    if ended and len(block) <= len(path):  # the end token is itself a guess: what came after it was never judged
        path, wrong = path[: len(block)], False
    done.rounds.append(Round(verdict.guesses, path, len(path) + wrong, len(block), drafted.passes))
    done.tokens += block
    done.draft_passes += drafted.passes
    done.draft_tokens_read += drafted.tokens


# ------------------------------------------------------------------------------------------------------- the draft model


class DraftIds:
    """What a draft can read and say of the target's `rows` ids. Tables of one family are padded differently, and a head
    may be cut to the frequent ids: then its row i speaks of id `kept[i]`."""

    def __init__(self, model, rows: int):
        self.rows, self.kept = rows, getattr(model.get_output_embeddings(), "kept", None)
        self.readable = model.get_input_embeddings().weight.shape[0]
        self.sayable = rows if self.kept is None else None  # rows of the head that may be picked; None: all of them

    def of(self, picked: torch.Tensor) -> torch.Tensor:
        """The target's ids of picked rows of the head."""
        return picked if self.kept is None else self.kept[picked]

    def law(self, law: torch.Tensor | None) -> torch.Tensor | None:
        """A law over the head's rows as one over the target's ids, (rows,): what the draft cannot say has 0."""
        if law is None or (self.kept is None and len(law) == self.rows):
            return law
        whole = law.new_zeros(self.rows)
        whole[slice(len(law)) if self.kept is None else self.kept] = law
        return whole


class ModelDrafter:
    """Guesses with a smaller model of the same tokenizer, one pass a guess.

    `target_rows`: the ids that the target can read. `read_last`: also feed the last guess, as the essay's loop does;
    otherwise the next round feeds what is missing. Once the text holds an id that the draft cannot read, it stays silent
    and the target goes on alone.
    """

    confident = True  # its guesses carry a probability, which a policy may look at
    taps = ()  # hidden states of the target that it wants to see

    def __init__(self, model, target_rows: int, read_last: bool = False, rule=None):
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

    def propose(self, state: State, budget: Budget) -> Proposal:
        """Up to `budget.depth` guesses; fewer where the budget has enough."""
        made, guesses, fed = Proposal(state.ids[0, :0]), [], state.unread(self.cache)
        while len(guesses) < budget.depth and not self.blind:
            out = forward(self.model, fed, self.cache)
            state.watch("draft")
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
                forward(self.model, fed, self.cache)
                state.watch("draft")
        return made

    def confidence(self, row: torch.Tensor, picked: torch.Tensor, law: torch.Tensor | None) -> float:
        """The probability that the draft gave to what it picked."""
        probs = row[0, : self.ids.sayable].float().softmax(-1) if law is None else law
        return float(probs[picked])

    def keep(self, state: State, path: list[int], features: tuple[torch.Tensor, ...]) -> None:
        """Forget what was rejected: the text stands, `path` names the guesses in it."""
        keep_slots(self.cache, state.length - 1)
        self.blind = self.blind or max(state.new) >= self.ids.readable
