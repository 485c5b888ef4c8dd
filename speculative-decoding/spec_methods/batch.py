"""The loop for a batch: the same three paragraphs, every row accepting its own number of guesses.

Rows of a batch part at once: one keeps four guesses where the next keeps none. Each has its own length and writes at its
own place (batch_cache), so a row's text and counts are what the lean loop gives for it alone. k is shared in a round; a
row that needs fewer guesses takes fewer, and its surplus queries read its last token again. Finished rows leave.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from spec_common import unwatched
from spec_loop import Decoded, cut_block, tally
from spec_methods.rows import RowCache, feed, read_prompts
from spec_pass import check_finite, top_tokens
from spec_rules import agreed_prefix


@dataclass
class Row:
    """One request: how long its text is, where it must end, how much of it the draft has read, what came of it."""

    length: int
    end: int
    read: int = 0
    blind: bool = False  # the draft has met an id that it cannot read
    ended: bool = False
    done: Decoded = field(default_factory=Decoded)

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

    @property
    def done(self) -> list[Decoded]:
        """What each request got, in the order of the prompts."""
        return [row.done for row in self.all_rows]

    def drop_finished(self, *caches: RowCache) -> None:
        left = [place for place, row in enumerate(self.rows) if not row.finished]
        if len(left) < len(self.rows):
            self.rows, self.ids = [self.rows[place] for place in left], self.ids[left]
            for cache in caches if left else ():
                cache.select(left)


@torch.inference_mode()
def prefill(target, prompts: list[torch.Tensor], budgets: list[int], ahead: int) -> Batch:
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
def baseline(target, batch: Batch, ends: frozenset[int] = frozenset(), watch=unwatched) -> Batch:
    """Plain decoding: one target pass for one more token of every row that is still being written."""
    while batch.rows:
        slots = torch.tensor([[row.length - 1] for row in batch.rows], device=batch.ids.device)
        logits = feed(target, batch.ids, batch.cache, slots, max(row.length for row in batch.rows), 1)
        watch("target")
        tokens, tops = top_tokens(logits[:, -1])
        batch.ids.scatter_(1, slots + 1, tokens[:, None])
        batch.rounds.append((len(batch.rows), 0, 0))
        for row, (token, finite) in zip(
            batch.rows, torch.stack([tokens, tops.isfinite()], dim=1).tolist(), strict=True
        ):
            check_finite(target, [] if finite else tops.tolist())
            row.length, row.ended = row.length + 1, token in ends
            row.done.tokens.append(token)
            row.done.emitted.append(1)
            row.done.target_passes += 1
        watch("keep", len(batch.rows))
        batch.drop_finished(batch.cache)
    return batch


class Round:
    """A round's plan: how many guesses each row wants. The lists go to the device here, once, while it has nothing to do."""

    def __init__(self, batch: Batch, k: int):
        self.counts = [guesses_wanted(row, k) for row in batch.rows]
        self.ahead = max(self.counts)
        self.missing = max(
            (row.length - row.read for row, count in zip(batch.rows, self.counts, strict=True) if count), default=0
        )
        table = [[row.length, count, row.read] for row, count in zip(batch.rows, self.counts, strict=True)]
        self.length, self.count, self.read = torch.tensor(table, device=batch.ids.device).T[..., None]
        self.steps = torch.arange(self.ahead + 1, device=batch.ids.device)


def guesses_wanted(row: Row, k: int) -> int:
    """The lean loop's: no further than what remains to be written, and none where the draft is blind."""
    return 0 if row.blind else min(k, row.end - row.length - 1)


class BatchDrafter:
    """The draft model for a batch: one pass for one guess of every row. `vocabulary`: the target's rows, see ModelDrafter."""

    def __init__(self, model, vocabulary: int):
        self.model = model
        self.kept = getattr(model.get_output_embeddings(), "kept", None)  # a cut head's rows speak of these ids
        self.vocabulary = vocabulary if self.kept is None else None
        self.table = model.get_input_embeddings().weight.shape[0]
        self.any_blind = False

    def readable(self, ids: torch.Tensor) -> torch.Tensor:
        """The texts of rows that went blind hold ids past the table; they ride along, and nothing comes of it."""
        return ids.clamp(max=self.table - 1) if self.any_blind else ids

    def start(self, batch: Batch) -> None:
        """Read all but the last token of every row."""
        for row, text in zip(batch.rows, batch.ids.tolist(), strict=True):
            row.read, row.blind = row.length - 1, max(text[: row.length]) >= self.table
            self.any_blind |= row.blind
        lengths = [row.length for row in batch.rows]
        self.cache = (
            read_prompts(self.model, self.readable(batch.ids), lengths, batch.ids.shape[1]) if lengths else None
        )

    def propose(self, batch: Batch, plan: Round, watch) -> list[torch.Tensor]:
        """Write row b's `plan.counts[b]` guesses into its text, and rubbish behind them where another row wants more.
        Returns the best logits of every pass, each (rows,).

        The first pass reads 1 token, or 2 where all guesses of a row were kept: its last one was never read.
        """
        rows, tops = batch.rows, []
        for i in range(plan.ahead):
            if i == 0:
                slots = torch.minimum(plan.read + torch.arange(plan.missing, device=plan.read.device), plan.length - 1)
            else:
                slots = plan.length - 1 + (plan.count - 1).clamp(min=0, max=i)
            end = max(row.length + min(i, max(count - 1, 0)) for row, count in zip(rows, plan.counts, strict=True))
            logits = feed(self.model, self.readable(batch.ids), self.cache, slots, end, 1)[:, -1]
            watch("draft")
            tokens, best = top_tokens(logits, self.vocabulary)
            batch.ids.scatter_(1, plan.length + i, (tokens if self.kept is None else self.kept[tokens])[:, None])
            tops.append(best)
            watch("pick")
        for row, count in zip(rows, plan.counts, strict=True):
            row.read = row.length + count - 1 if count else row.read
        return tops

    def keep(self, row: Row, written: list[int]) -> None:
        """Forget what was rejected: of what the draft has read, only the row's text stands, all but its last token."""
        row.read = min(row.read, row.length - 1)
        row.blind = row.blind or max(written) >= self.table
        self.any_blind |= row.blind


@torch.inference_mode()
def speculate(
    target, drafter: BatchDrafter, batch: Batch, k: int, ends: frozenset[int] = frozenset(), watch=unwatched
) -> Batch:
    """The loop. The drafter has been started; the device is waited for once a round."""
    while batch.rows:
        # draft: every row's guesses, into its own text
        plan = Round(batch, k)
        draft_tops = drafter.propose(batch, plan, watch)

        # verify: ONE target pass over every row's last written token and its guesses
        slots = plan.length - 1 + torch.minimum(plan.steps, plan.count)
        end = max(row.length + count for row, count in zip(batch.rows, plan.counts, strict=True))
        logits = feed(target, batch.ids, batch.cache, slots, end, plan.ahead + 1)
        watch("verify")
        guesses, (choices, tops) = batch.ids.gather(1, plan.length + plan.steps[:-1]), top_tokens(logits)
        # a row's accepted guesses ARE its choices, so all choices are written; what lies past its new end is rubbish
        batch.ids.scatter_(1, plan.length + plan.steps, choices)
        finite = torch.cat([tops.flatten(), *draft_tops]).isfinite().all()
        *read, fine = torch.cat([guesses.flatten(), choices.flatten(), finite[None]]).tolist()
        if not fine:
            check_finite(target, tops.flatten().tolist())
            check_finite(drafter.model, torch.cat(draft_tops).tolist())

        # keep: every row its accepted guesses and the target's own next token; finished rows leave
        batch.rounds.append((len(batch.rows), plan.ahead, plan.missing))
        written = keep(batch, drafter, plan, read, ends)
        watch("keep", written)
        batch.drop_finished(batch.cache, drafter.cache)
    return batch


def keep(batch: Batch, drafter: BatchDrafter, plan: Round, read: list[int], ends: frozenset[int]) -> int:
    """What stands of every row's block, counted. `read`: the guesses of all rows, then the choices. Returns the tokens written."""
    written, ahead = 0, plan.ahead
    for place, (row, count) in enumerate(zip(batch.rows, plan.counts, strict=True)):
        first, own = place * ahead, len(batch.rows) * ahead + place * (ahead + 1)
        guesses, choices = read[first : first + count], read[own : own + count + 1]
        accepted = agreed_prefix(guesses, choices)
        block = cut_block(choices[: accepted + 1], row.end - row.length, ends)
        row.ended = block[-1] in ends
        row.length += len(block)
        drafter.keep(row, block)
        tally(row.done, count, guesses, accepted, block, row.ended)
        written += len(block)
    return written
