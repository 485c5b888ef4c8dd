"""The loop: a draft guesses k tokens, the target checks them in one pass, the text stays the target's own.

A round is three paragraphs: draft (a drafter proposes), verify (one target pass gives k+1 rows), keep (the accepted guesses
and the target's own next token; roll back to them). `ids` is the truth, every cache a prefix of it. What differs between
methods comes in from outside: the drafter (spec_drafters), the rule that judges (spec_rules), the k policy (spec_policy).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from spec_common import unwatched
from spec_pass import check_finite, forward, new_cache, rollback
from spec_rules import Greedy

LOOPS = ("lean", "essay")
GREEDY = Greedy()


@dataclass
class Decoded:
    """What a run wrote and what it took. Lists hold one entry a round, in order."""

    tokens: list[int] = field(default_factory=list)
    target_passes: int = 0
    draft_passes: int = 0
    proposals: list[list[int]] = field(default_factory=list)  # the guesses, each round
    accepted: list[int] = field(default_factory=list)  # how many of them were kept, each round
    emitted: list[int] = field(default_factory=list)  # tokens written, each round: accepted + 1 unless cut
    rejected: list[bool] = field(default_factory=list)  # whether judging met a wrong guess, each round

    @property
    def rejections(self) -> int:
        return sum(self.rejected)


def cut_block(block: list[int], room: int, ends: frozenset[int]) -> list[int]:
    """The part of a block that is written: up to `room` tokens, and nothing after the first end token."""
    block = block[:room]
    return block[: next((i + 1 for i, token in enumerate(block) if token in ends), len(block))]


@dataclass
class State:
    """Where a decoding stands after prefill: the text in a buffer with room to grow, and the target's cache."""

    ids: torch.Tensor
    length: int
    cache: object


@torch.inference_mode()
def prefill(target, prompt: torch.Tensor, room: int) -> State:
    """Read all but the last prompt token, with the same split for every arm. `prompt` is (1, n), n of 1 or more."""
    length = prompt.shape[1]
    ids = torch.cat([prompt, prompt.new_zeros(1, room)], dim=1)
    cache = new_cache(target)
    if length > 1:
        forward(target, ids[:, : length - 1], cache, 1)
    return State(ids, length, cache)


@torch.inference_mode()
def baseline(
    target, state: State, n_tokens: int, ends: frozenset[int] = frozenset(), watch=unwatched, rule=GREEDY
) -> Decoded:
    """Plain decoding: one target pass a token, no more. Takes the state that `prefill` made."""
    ids, length, cache, done = state.ids, state.length, state.cache, Decoded()
    while len(done.tokens) < n_tokens and not ends & set(done.tokens[-1:]):
        logits = forward(target, ids[:, :length], cache, 1)
        watch("target")
        choice = rule.choose(logits[:, -1])
        check_finite(target, choice.top.tolist())
        ids[:, length] = choice.token
        done.tokens += choice.token.tolist()
        length += 1
        watch("keep", 1)
    done.target_passes = len(done.tokens)
    done.emitted = [1] * len(done.tokens)
    return done


@torch.inference_mode()
def speculate(
    target,
    drafter,
    state: State,
    n_tokens: int,
    policy,
    loop: str = "lean",
    ends: frozenset[int] = frozenset(),
    limit: int | None = None,
    watch=unwatched,
    rule=GREEDY,
) -> Decoded:
    """The loop. `loop`: 'lean' looks no further than what remains to be written; 'essay' always guesses k and cuts.

    `limit` is the longest text both models are defined for: no pass looks past it. The drafter has been started.
    """
    ids, length, cache, done = state.ids, state.length, state.cache, Decoded()
    end, ended = length + n_tokens, False
    while length < end and not ended:
        # draft: whatever guesses writes ahead, into the text itself
        ahead = policy.ahead(drafter.confident)
        ahead = ahead if loop == "essay" else min(ahead, end - length - 1)
        ahead = ahead if limit is None else max(0, min(ahead, limit - length))
        made = drafter.propose(ids, length, ahead, watch, policy)

        # verify: ONE target pass over the last written token and the guesses; row j judges guess j
        logits = forward(target, ids[:, : length + made.count], cache, made.count + 1)
        watch("verify")
        guesses = ids[0, length : length + made.count].tolist()
        verdict = rule.judge(logits[0], guesses, made.laws)
        check_finite(target, verdict.tops)
        drafter.check(made)

        # keep: the accepted guesses and the target's own next token, which is free; the rest never happened
        block = cut_block(verdict.tokens, end - length, ends)
        ended = block[-1] in ends
        ids[0, length : length + len(block)] = ids.new_tensor(block)
        length += len(block)
        rollback(cache, length - 1)
        drafter.keep(length, block)
        policy.learn(made.count, verdict.accepted)
        watch("keep", len(block))
        tally(done, made.passes, guesses, verdict.accepted, block, ended)
    return done


def tally(done: Decoded, passes: int, guesses: list[int], accepted: int, block: list[int], ended: bool) -> None:
    """Count a round. Guesses past an end token were never part of the text, so they are not counted as accepted;
    those past n tokens are (the essay's columns count them)."""
    if ended and len(block) <= accepted:  # the end token is itself a guess: what came after it was never judged
        accepted = len(block)
        done.rejected.append(False)
    else:
        done.rejected.append(accepted < len(guesses))
    done.target_passes += 1
    done.draft_passes += passes
    done.proposals.append(guesses)
    done.accepted.append(accepted)
    done.emitted.append(len(block))
    done.tokens += block
