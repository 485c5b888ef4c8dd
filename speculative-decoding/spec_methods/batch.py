"""The loop for a batch: the same three paragraphs, every row accepting its own number of guesses.

Rows of a batch part at once: one keeps four guesses where the next keeps none. Each has its own length and writes at its
own place (rows.py), so a row's text and counts are what the lean loop gives for it alone. Guesses stand in the text's own
buffer, behind its end; a row that needs fewer than the others takes fewer, and its surplus queries read its last token
again. Finished rows leave. A batch keeps a loop of its own because one row through it costs what the rows' bookkeeping
does: a gather and a mask for every pass.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field

from spec_common import unwatched

import torch

from spec_counts import NO_WORK, Decoded, Work
from spec_ids import DraftIds
from spec_loop import Budget, State, cut_block, not_finite
from spec_methods.rows import RowCache, feed, read_prompts


@dataclass
class Row:
    """One request: how long its text is, where it must end, how much of it the draft has read, what came of it."""

    length: int
    end: int
    read: int = 0
    reach: int = sys.maxsize  # the longest text that the draft can read
    blind: bool = False  # the draft has met an id that it cannot read
    ended: bool = False
    done: Decoded = field(default_factory=Decoded)
    policy: object = None

    @property
    def finished(self) -> bool:
        return self.ended or self.length >= self.end


@dataclass
class Batch:
    """Where a batch stands: its texts (rows, room) and the rows still being written. `all_rows` keeps those that left.

    `rounds` holds, of each target pass: rows in it, guesses it judged in the longest, tokens that the first draft pass read.
    """

    ids: torch.Tensor
    rows: list[Row]
    cache: RowCache
    all_rows: list[Row]
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    watch: object = unwatched

    @property
    def done(self) -> list[Decoded]:
        """What each request got, in the order of the prompts."""
        return [row.done for row in self.all_rows]

    def drop_finished(self, *caches: RowCache) -> list[int]:
        """Rows that are finished leave. Returns the places of those that stay."""
        left = [place for place, row in enumerate(self.rows) if not row.finished]
        if len(left) < len(self.rows):
            self.rows, self.ids = [self.rows[place] for place in left], self.ids[left]
            for cache in caches if left else ():
                cache.select(left)
        return left


@torch.inference_mode()
def prefill_rows(target, prompts: list[torch.Tensor], budgets: list[int], ahead: int) -> Batch:
    """Read all but the last token of every prompt, each (1, n). `budgets`: tokens to write, by row; `ahead`: the largest k."""
    lengths = [prompt.shape[1] for prompt in prompts]
    rows = [Row(length, length + budget) for length, budget in zip(lengths, budgets, strict=True)]
    ids = prompts[0].new_zeros(len(rows), max(row.end for row in rows) + ahead + 1)
    for place, prompt in enumerate(prompts):
        ids[place, : prompt.shape[1]] = prompt[0]
    batch = Batch(ids, rows, read_prompts(target, ids, lengths, ids.shape[1]), list(rows))
    batch.drop_finished(batch.cache)
    return batch


@torch.inference_mode()
def baseline_rows(target, batch: Batch, ends: frozenset[int] = frozenset()) -> Batch:
    """Plain decoding: one target pass for one more token of every row that is still being written."""
    while batch.rows:
        slots = torch.tensor([[row.length - 1] for row in batch.rows], device=batch.ids.device)
        out = feed(target, batch.ids, batch.cache, slots, max(row.length for row in batch.rows), 1)
        batch.watch("target")
        tokens = out.logits[:, -1].argmax(-1)
        batch.ids.scatter_(1, slots + 1, tokens[:, None])
        batch.rounds.append((len(batch.rows), 0, 0))
        *tokens, finite = torch.cat([tokens, out.finite[None]]).tolist()
        if not finite:
            raise not_finite(target)
        for row, token in zip(batch.rows, tokens, strict=True):
            row.length, row.ended = row.length + 1, token in ends
            row.done.count_round([token])
            row.done.target_passes += 1
        batch.watch("keep", len(batch.rows))
        batch.drop_finished(batch.cache)
    return batch


class Plan:
    """A round's plan: how many guesses each row has, and what its drafting took, as if alone (`work`, which a drafter with
    a model sets). The lists go to the device once a change."""

    def __init__(self, batch: Batch, confident: bool):
        budgets = [row.policy.budget(confident) for row in batch.rows]
        # the lean loop's: no further than what remains to be written and the draft can read, none where it is blind
        wanted = zip(batch.rows, budgets, strict=True)
        self.counts = [0 if row.blind else min(budget.depth, row.end - row.length - 1, row.reach - row.length)
                       for row, budget in wanted]  # fmt: skip
        self.enough = [budget.enough for budget in budgets]
        self.work = [NO_WORK] * len(batch.rows)
        self.lengths, self.device = [row.length for row in batch.rows], batch.ids.device
        self.begin()

    def begin(self) -> None:
        """Take the counts as they are now."""
        self.ahead = max(self.counts)
        self.length, self.count = torch.tensor([self.lengths, self.counts], device=self.device)[..., None]
        self.steps = torch.arange(self.ahead + 1, device=self.device)


class ModelRows:
    """The draft model for a batch: one pass for one guess of every row. `target_rows`: see ModelDrafter. `limit`: the
    longest text that it can read; rows past it ride along, at its last place, and nothing comes of it."""

    confident = True

    def __init__(self, model, target_rows: int, limit: int | None = None):
        self.model, self.ids, self.limit = model, DraftIds(model, target_rows), limit or sys.maxsize
        self.any_blind = False

    def readable(self, ids: torch.Tensor) -> torch.Tensor:
        """The texts of rows that went blind hold ids past the table; they ride along, and nothing comes of it."""
        return ids.clamp(max=self.ids.readable - 1) if self.any_blind else ids

    def start(self, batch: Batch) -> None:
        """Read all but the last token of every row."""
        for row, text in zip(batch.rows, batch.ids.tolist(), strict=True):
            row.read, row.reach = row.length - 1, self.limit
            row.blind = max(text[: row.length]) >= self.ids.readable or row.length >= self.limit
            self.any_blind |= row.blind
        lengths = [min(row.length, self.limit) for row in batch.rows]
        self.cache = (
            read_prompts(self.model, self.readable(batch.ids), lengths, batch.ids.shape[1]) if lengths else None
        )

    def propose(self, batch: Batch, plan: Plan) -> tuple[list[torch.Tensor], int]:
        """Write row b's `plan.counts[b]` guesses behind its text, fewer where its policy has enough, and rubbish where
        another row wants more. Returns a flag of finiteness for each pass, and the most tokens that the first one read.

        The first pass reads 1 token, or 2 where all guesses of a row were kept: its last one was never read.
        """
        rows, finite, i = batch.rows, [], 0
        behind = [row.length - row.read for row, count in zip(rows, plan.counts, strict=True) if count]
        missing = max(behind, default=0)
        read = torch.tensor([[row.read] for row in rows], device=plan.device)
        while i < plan.ahead:
            if i == 0:
                slots = torch.minimum(read + torch.arange(missing, device=plan.device), plan.length - 1)
            else:
                slots = plan.length - 1 + (plan.count - 1).clamp(min=0, max=i)
            slots = slots.clamp(max=self.limit - 1)
            end = max(row.length + min(i, max(count - 1, 0)) for row, count in zip(rows, plan.counts, strict=True))
            out = feed(self.model, self.readable(batch.ids), self.cache, slots, end, 1)
            batch.watch("draft")
            picked = out.logits[:, -1, : self.ids.sayable].argmax(-1)
            batch.ids.scatter_(1, plan.length + i, self.ids.of(picked)[:, None])
            finite.append(out.finite)
            i += 1
            self.stop_where_enough(plan, i, out.logits[:, -1], picked)
            batch.watch("pick")
        for place, (row, count) in enumerate(zip(rows, plan.counts, strict=True)):
            if count:
                plan.work[place] = Work(count, row.length + count - 1 - row.read)
                row.read = row.length + count - 1
        return finite, missing

    def stop_where_enough(self, plan: Plan, made: int, logits: torch.Tensor, picked: torch.Tensor) -> None:
        """End the block of every row whose policy reads confidences and has enough after its guess number `made`."""
        asked = [
            b
            for b, (enough, count) in enumerate(zip(plan.enough, plan.counts, strict=True))
            if enough and count >= made
        ]
        if not asked:
            return
        probs = logits[asked, : self.ids.sayable].float().softmax(-1)
        sure = probs.gather(1, picked[asked, None])[:, 0].tolist()
        over = [b for b, confidence in zip(asked, sure, strict=True) if plan.enough[b](confidence)]
        if over:
            plan.counts = [made if b in over else count for b, count in enumerate(plan.counts)]
            plan.begin()

    def keep(self, place: int, row: Row, written: list[int]) -> None:
        """Forget what was rejected: of what the draft has read, only the row's text stands, all but its last token."""
        row.read = min(row.read, row.length - 1)
        row.blind = row.blind or max(written) >= self.ids.readable or row.length >= self.limit
        self.any_blind |= row.blind

    def select(self, left: list[int]) -> None:
        self.cache.select(left)


class LookupRows:
    """Look-up for a batch: every row copies from its own text, by a drafter of its own. No model, no pass."""

    confident, model = False, None

    def __init__(self, drafter):
        """`drafter`: a LookupDrafter, whose settings every row takes."""
        self.drafter = drafter

    def start(self, batch: Batch) -> None:
        self.drafters = [copy.copy(self.drafter) for _ in batch.rows]
        for drafter, state in zip(self.drafters, self.states(batch), strict=True):
            drafter.start(state)

    def states(self, batch: Batch) -> list[State]:
        return [State(batch.ids[b : b + 1], row.length, None) for b, row in enumerate(batch.rows)]

    def propose(self, batch: Batch, plan: Plan) -> tuple[list[torch.Tensor], int]:
        for b, (drafter, state) in enumerate(zip(self.drafters, self.states(batch), strict=True)):
            made = drafter.propose(state, Budget(plan.counts[b]))
            plan.counts[b] = len(made)
            batch.ids[b, state.length : state.length + len(made)] = made.tokens.clone()
        batch.watch("look-up")
        plan.begin()
        return [], 0

    def keep(self, place: int, row: Row, written: list[int]) -> None:
        self.drafters[place].read(written)

    def select(self, left: list[int]) -> None:
        self.drafters = [self.drafters[place] for place in left]


@torch.inference_mode()
def speculate_rows(target, drafter, batch: Batch, policy, ends: frozenset[int] = frozenset()) -> Batch:
    """The loop. The drafter has been started; every row has a policy of its own, begun as a copy of `policy`."""
    for row in batch.rows:
        row.policy = copy.copy(policy)
        row.policy.begin()
    while batch.rows:
        # draft: every row's guesses, behind its own text
        plan = Plan(batch, drafter.confident)
        finite, missing = drafter.propose(batch, plan)

        # verify: ONE target pass over every row's last written token and its guesses
        slots = plan.length - 1 + torch.minimum(plan.steps, plan.count)
        end = max(length + count for length, count in zip(plan.lengths, plan.counts, strict=True))
        out = feed(target, batch.ids, batch.cache, slots, end, plan.ahead + 1)
        batch.watch("verify")
        guesses, choices = batch.ids.gather(1, plan.length + plan.steps[:-1]), out.logits.argmax(-1)
        # a row's accepted guesses ARE its choices, so all choices are written; what lies past its new end is rubbish
        batch.ids.scatter_(1, plan.length + plan.steps, choices)
        flags = torch.stack([out.finite, *finite]).all()[None]
        *read, fine = torch.cat([guesses.flatten(), choices.flatten(), flags]).tolist()  # the one wait in a round
        if not fine:
            raise not_finite(drafter.model if out.finite else target)

        # keep: every row its accepted guesses and the target's own next token; finished rows leave
        batch.rounds.append((len(batch.rows), plan.ahead, missing))
        written = keep_rows(batch, drafter, plan, read, ends)
        batch.watch("keep", written)
        left = batch.drop_finished(batch.cache)
        if left and len(left) < len(plan.counts):
            drafter.select(left)
    return batch


def keep_rows(batch: Batch, drafter, plan: Plan, read: list[int], ends: frozenset[int]) -> int:
    """What stands of every row's block, counted. `read`: the guesses of all rows, then the choices. Returns the tokens
    written."""
    written, ahead = 0, plan.ahead
    for place, (row, count) in enumerate(zip(batch.rows, plan.counts, strict=True)):
        first, own = place * ahead, len(batch.rows) * ahead + place * (ahead + 1)
        guesses, choices = read[first : first + count], read[own : own + count + 1]
        accepted = agreed_prefix(guesses, choices)
        block = cut_block(choices[: accepted + 1], row.end - row.length, ends)
        row.ended = block[-1] in ends
        row.length += len(block)
        drafter.keep(place, row, block)
        row.policy.learn(count, accepted)
        row.done.count_round(block, guesses, list(range(accepted)), accepted < count, row.ended, plan.work[place])
        row.done.target_passes += 1
        written += len(block)
    return written


def agreed_prefix(guesses: list[int], choices: list[int]) -> int:
    """How many guesses, from the start, are what the target would have written."""
    return next((i for i, guess in enumerate(guesses) if guess != choices[i]), len(guesses))
