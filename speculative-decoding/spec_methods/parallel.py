"""All guesses of a round in one pass of the draft (PARD, An et al. 2025, arXiv 2504.18583, section 3).

The pass reads the tokens that were written since, and a mask for each guess but the first; its last rows are the guesses'. The
masks are forgotten after it. A guess does not see the guesses before it, so its law depends on the text alone: each is drawn from
its own row and judged as any other (tests enumerate the law of what is written).
"""

from __future__ import annotations

from spec_common import UserError

import torch

from spec_loop import Budget, ModelDrafter, Pass, Proposal, State, forward, keep_slots


class OnePassDrafter(ModelDrafter):
    """Guesses with a draft that reads masks (spec_models/masked.py). What it has guessed it reads once it stands."""

    def __init__(self, model, target_rows: int, read_last: bool = False, rule=None):
        if read_last:
            raise UserError("--loop essay: takes a draft pass a guess, and this draft makes all in one; leave it out")
        super().__init__(model, target_rows, False, rule)

    def propose(self, state: State, budget: Budget) -> Proposal:
        """As any draft's; a budget that has enough leaves the rows behind undrawn."""
        self.rows, self.depth = [], budget.depth
        return super().propose(state, budget)

    def read(self, state: State, fed: torch.Tensor) -> Pass:
        """The next guess's row: of the pass over `fed` (1, n) and the masks where the round begins, whatever was fed behind it."""
        if not self.rows:
            masks = fed.new_full((1, self.depth - 1), self.ids.readable)
            known = self.cache.get_seq_length() + fed.shape[1]
            out = forward(self.model, torch.cat([fed, masks], dim=1), self.cache, self.depth)
            keep_slots(self.cache, known)
            state.watch("draft")
            self.rows = [out._replace(logits=out.logits[:, row : row + 1]) for row in range(self.depth)]
        return self.rows.pop(0)
