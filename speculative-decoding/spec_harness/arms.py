"""The two arms of every experiment: the target alone, and speculation by some method, each on the clock.

A free run has two synchronisations around its decoding and gives the speed; a watched run has a clock at every phase and
says where the time went. A run sets itself up (prefill, the drafter's too) outside the clock of its decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spec_common import Watch, timed, unwatched

import torch

from spec_counts import Decoded
from spec_loop import Greedy, ModelDrafter, State, baseline, prefill, speculate
from spec_methods.eagle import EagleDrafter
from spec_methods.medusa import MedusaDrafter
from spec_methods.parallel import OnePassDrafter
from spec_methods.policy import FixedK
from spec_models.checks import vocabulary_rows
from spec_models.eagle import Eagle
from spec_models.masked import guesses_at_once
from spec_models.medusa import Medusa


@dataclass
class Task:
    """What is to be written: how many tokens after one prompt, (1, n) on the target's device, by which loop.

    `ends`: ids that end a text. `limit`: the longest text that all models are defined for; `draft_limit`: the draft's own,
    where it is shorter than the whole text: past it the target goes on alone.
    """

    target: torch.nn.Module
    prompt: torch.Tensor
    n_tokens: int
    loop: str = "lean"
    ends: frozenset[int] = frozenset()
    limit: int | None = None
    draft_limit: int | None = None

    @property
    def alone_from(self) -> int | None:
        """The number of the written token (from 0) from which on the draft guesses nothing; None where it can all along."""
        return None if self.draft_limit is None else max(0, self.draft_limit - self.prompt.shape[1])

    @property
    def device(self) -> torch.device:
        return self.prompt.device

    @property
    def context(self) -> int:
        """Tokens in the cache halfway through the text: where costs are measured."""
        return self.prompt.shape[1] + self.n_tokens // 2


@dataclass
class Method:
    """How it is written: what guesses, what stands, how far to look (see spec_loop). Made once, begun anew by every run."""

    drafter: object
    policy: object
    rule: object = field(default_factory=Greedy)
    decode: Callable[..., Decoded] = speculate  # another loop takes what `speculate` takes

    @property
    def k(self) -> int:
        """The most guesses, one after the other, that a round may ask for."""
        return self.policy.most


def draft_model(task: Task, draft, k: int, rule=None) -> Method:
    """The plain method: `draft` guesses k tokens a round, each in a pass of its own; where it reads masks all in one; Medusa's
    heads without one."""
    rule = rule or Greedy()
    options = {"target_rows": vocabulary_rows(task.target), "read_last": task.loop == "essay", "rule": rule}
    if isinstance(draft, Medusa):
        return Method(MedusaDrafter(draft, task.target, options["target_rows"]), FixedK(k), rule)
    if isinstance(draft, Eagle):
        return Method(EagleDrafter(draft, task.target, **options), FixedK(k), rule)
    drafter = OnePassDrafter if guesses_at_once(draft) else ModelDrafter
    return Method(drafter(draft, **options), FixedK(k), rule)


class Run(NamedTuple):
    """What was written, the seconds of the prefill, those of the decoding, and the clock of a watched run."""

    done: Decoded
    prefill_s: float
    seconds: float
    watch: Watch | None = None

    @property
    def whole_s(self) -> float:
        """End to end: prefill and decoding."""
        return self.prefill_s + self.seconds


def on_the_clock(task: Task, start, decode, watched: bool) -> Run:
    """`start()` gives the state after prefill, `decode(state)` what was written; the one is timed apart from the other."""
    state, prefill_s = timed(start, task.device)
    watch = Watch(task.device) if watched else None
    state.watch = watch or unwatched
    done, seconds = timed(lambda: decode(state), task.device)
    return Run(done, prefill_s, seconds, watch)


def run_baseline(task: Task, rule=None, watched: bool = False) -> Run:
    """The target alone; greedy unless a rule is given."""
    rule = rule or Greedy()
    rule.begin()
    return on_the_clock(
        task,
        lambda: prefill(task.target, task.prompt, task.n_tokens),
        lambda state: baseline(task.target, state, task.n_tokens, rule, task.ends),
        watched,
    )


def start_drafter(task: Task, drafter, state: State) -> None:
    """Start a drafter on the text; of one past the draft's limit on what it can read, since it is never asked there."""
    length = state.length if task.draft_limit is None else min(state.length, task.draft_limit)
    drafter.start(state if length == state.length else replace(state, length=length))


def run_speculative(task: Task, method: Method, watched: bool = False, go_on: bool = False) -> Run:
    """Speculation. `go_on`: the policy keeps what it has learnt from the text before."""
    drafter, policy, rule = method.drafter, method.policy, method.rule
    rule.begin()
    if not go_on:
        policy.begin()

    def start():
        state = prefill(task.target, task.prompt, task.n_tokens, drafter.taps)
        start_drafter(task, drafter, state)
        return state

    options = {"loop": task.loop, "ends": task.ends, "limit": task.limit}
    return on_the_clock(
        task,
        start,
        lambda state: method.decode(task.target, drafter, state, task.n_tokens, rule, policy, **options),
        watched,
    )
