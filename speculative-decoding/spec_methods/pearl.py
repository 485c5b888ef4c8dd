"""Drafting while the target checks (PEARL, Liu et al. 2024, arXiv 2408.11850), as two sides that exchange one message a round.

The text V stands; behind it are guesses U that no one has judged yet, each with the law it was drawn from. In a round, at the
same time, the draft goes on by g guesses behind V + U, and the target makes one pass over V's last token and U. Its rows judge
U and the first of the new guesses, whose own row nobody has: so there is no token of the target's own behind guesses that all
stand. The others stay pending then (post-verify); one guess that falls, and all that is behind it falls too, on both sides,
and the next round starts with nothing pending (pre-verify).

`Ahead` is the draft's side and `Checker` the target's, which alone decides what stands. What each tells the other is a
Proposal and a News. `pearl` lets them take turns in one process, in an order that cannot change the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from spec_counts import NO_WORK, Decoded, Work
from spec_loop import Budget, DecodingError, Pass, Proposal, State, cut_block, forward, keep_slots, not_finite


class News(NamedTuple):
    """What the target's side says after a round."""

    length: int  # of the text before the block
    block: list[int]  # what was written
    stood: bool  # all that was judged stands, so that what is pending behind it goes on


def part(made: Proposal, start: int, end: int | None = None) -> Proposal:
    """Guesses start to end - 1 of a chain, each with its law and its pass."""
    return Proposal(made.tokens[start:end], made.laws[start:end], made.finite[start:end])


def joined(first: Proposal, second: Proposal) -> Proposal:
    """One chain behind another."""
    tokens = torch.cat([first.tokens, second.tokens])
    return Proposal(tokens, first.laws + second.laws, first.finite + second.finite)


class Ahead:
    """The draft's side: its own view of the text, V + U and what it has guessed behind that.

    `g`: guesses a round. `reach`: the longest text that both models are defined for; None: any."""

    taps, confident = (), False

    def __init__(self, drafter, g: int, reach: int | None = None):
        self.drafter, self.g, self.reach = drafter, g, reach

    @property
    def work(self) -> Work:
        return self.drafter.work

    def start(self, state: State) -> None:
        """Read all but the last token of the text; no guess reaches past the room that `state` has."""
        room = state.ids.shape[1]
        self.most = room if self.reach is None else min(room, self.reach)
        self.view = State(state.ids.clone(), state.length, None, watch=lambda *lap: state.watch(*lap))
        self.drafter.start(replace(self.view, length=min(state.length, self.most)))

    def ask(self) -> None:
        """A side in another process begins its guesses here; this one makes them when they are waited for."""

    def go_on(self) -> Proposal:
        """Up to g guesses behind the view, which takes them in."""
        view = self.view
        made = self.drafter.propose(view, Budget(max(0, min(self.g, self.most - view.length))))
        view.ids[0, view.length : view.length + len(made)] = made.tokens
        view.length += len(made)
        return made

    def hear(self, news: News) -> None:
        """Where something fell, the view is the text again and the draft's cache a part of it."""
        if not news.stood:
            self.view.length = news.length
            self.view.write(news.block)
            self.drafter.keep(self.view, [], ())


class Checker:
    """The target's side: the text, what is pending behind it, and the one decision about what stands."""

    def __init__(self, target, state: State, n_tokens: int, rule, ends: frozenset[int] = frozenset()):
        self.target, self.state, self.rule, self.ends = target, state, rule, ends
        self.end, self.done = state.length + n_tokens, Decoded()
        self.pending = self.nothing = Proposal(state.ids[0, :0])

    @property
    def finished(self) -> bool:
        return self.state.length >= self.end or bool(self.ends & set(self.done.tokens[-1:]))

    def check(self) -> Pass:
        """ONE target pass over the last written token and what is pending; it needs nothing of what is drafted meanwhile."""
        state = self.state
        fed = torch.cat([state.unread(state.cache), self.pending.tokens[None]], dim=1)
        out = forward(self.target, fed, state.cache, len(self.pending) + 1)
        self.done.target_passes += 1
        state.watch("verify")
        return out

    def settle(self, out: Pass, made: Proposal, drafted: Work = NO_WORK) -> News:
        """Judge what is pending and the first guess of `made`, write what stands. Raises DecodingError."""
        judged, length = joined(self.pending, part(made, 0, 1)), self.state.length
        path, token, guesses, finite = self.rule.judge(out, judged)
        if not finite:
            draft = DecodingError("the draft's logits are not finite; try another --dtype")
            raise draft if out.finite else not_finite(self.target)
        block = [*(guesses[i] for i in path), *([] if token is None else [token])]
        block = cut_block(block, self.end - length, self.ends)
        self.state.write(block)
        keep_slots(self.state.cache, self.state.length - 1)
        self.pending = part(made, 1) if token is None else self.nothing
        self.state.watch("keep", len(block))
        self.done.count_round(block, guesses, path, len(path) < len(judged), block[-1] in self.ends, drafted)
        return News(length, block, token is None)


@torch.inference_mode()
def pearl(
    target, ahead, state: State, n_tokens: int, rule, ends: Sequence[int] | frozenset[int] = frozenset(),
    at_once: bool = False,
) -> Decoded:  # fmt: skip
    """Both sides by turns, the draft's first; `at_once`: the guesses are waited for behind the target's pass, for an `ahead`
    that makes them elsewhere meanwhile. It has been started. The passes and texts of every schedule are these."""
    side = Checker(target, state, n_tokens, rule, frozenset(ends))
    while not side.finished:
        before = ahead.work
        ahead.ask()
        if at_once:
            out = side.check()
            made = ahead.go_on()
        else:
            made = ahead.go_on()
            out = side.check()
        ahead.hear(side.settle(out, made, ahead.work.since(before)))
    return side.done


def pearl_loop(
    target, ahead, state: State, n_tokens: int, rule, policy, *, loop: str, ends: frozenset[int], limit: int | None,
    at_once: bool = False,
) -> Decoded:  # fmt: skip
    """`pearl` in the place of `speculate` (spec_loop.py), whose policy, form of the loop and limit it has no use for."""
    return pearl(target, ahead, state, n_tokens, rule, ends, at_once)
