"""Policies on one ruler without a clock: what a draft would guess at every place of a text is recorded once, and any k policy is
replayed on it, its rounds counted and weighed at given costs. Beside it the oracle, which knows the best k of every round."""

from __future__ import annotations

from typing import NamedTuple

import torch

from spec_harness.arms import Task
from spec_harness.theory import cost_speedup, drafting_cost, measured_v
from spec_loop import Budget, prefill
from spec_methods.policy import LOOP_OVERHEAD


class Recording(NamedTuple):
    """Of every place of a text, were the draft asked there: how many of its guesses in a row are `right`, and the probability
    that it gave to each of up to k guesses (`confidences`), those behind a wrong one too."""

    right: list[int]
    confidences: list[list[float]]


@torch.inference_mode()
def record(task: Task, drafter, tokens: list[int], k: int) -> Recording:
    """Ask the drafter for k guesses at every place of `tokens`, the target's own text of the task."""
    state, right, confidences = prefill(task.target, task.prompt, len(tokens)), [], []
    drafter.start(state)
    for place, token in enumerate(tokens):
        seen: list[float] = []
        made = drafter.propose(
            state, Budget(min(k, task.n_tokens - place - 1), seen.append)
        )  # append gives None: go on
        agrees = [guess == own for guess, own in zip(made.tokens.tolist(), tokens[place:], strict=False)]
        right.append([*agrees, False].index(False))
        confidences.append(seen)
        state.write([token])
        drafter.keep(state, [], ())
    return Recording(right, confidences)


def replay(recording: Recording, policy) -> dict:
    """The counters of the rounds that the lean loop takes under that policy, named as in a measured row. The policy learns as
    it goes and is not begun anew."""
    place, proposed, accepted = 0, [], []
    while place < len(recording.right):
        depth, enough = policy.budget(True)
        made = 0
        for confidence in recording.confidences[place][:depth]:
            made += 1
            if enough and enough(confidence):
                break
        kept = min(made, recording.right[place])
        policy.learn(made, kept)
        proposed.append(made)
        accepted.append(kept)
        place += kept + 1
    return {"emitted": len(recording.right), "draft_passes": sum(proposed), "proposed_lengths": proposed, "drafting_lengths": proposed, "accepted_lengths": accepted}  # fmt: skip


def cheapest_way(runs: list[int], k: int, costs: dict) -> float:
    """The speedup of the best k of every round in hindsight: the cheapest way through the text by dynamic programming, where
    a round at a place may keep any number of guesses that are right there, up to k."""
    v, n = measured_v(costs), len(runs)
    left = [0.0] * (n + 1)
    for place in range(n - 1, -1, -1):
        blocks = range(min(runs[place], k, n - place - 1) + 1)
        left[place] = min(
            drafting_cost(costs, [m]) + v(m + 1) + LOOP_OVERHEAD + left[place + m + 1] for m in blocks
        )
    return n * (1 + LOOP_OVERHEAD) / left[0]


def on_one_ruler(row: dict, costs: dict) -> float:
    """The speedup that an arm's counted rounds come to at the costs and overhead that the oracle is given: the only ruler
    that both can be laid on."""
    verified = [length + 1 for length in row["proposed_lengths"]]
    drafted = drafting_cost(costs, row["drafting_lengths"])
    return cost_speedup(row["emitted"], drafted, verified, measured_v(costs), LOOP_OVERHEAD, LOOP_OVERHEAD)
