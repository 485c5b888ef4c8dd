"""Guesses with a draft that reads the target's own states: EAGLE's chain (Li et al. 2024, arXiv 2401.15077).

A round's first pass reads the tokens written since, each beside the feature that the target's check gave for the token before
it; every further one reads the guess before and the draft's own state in place of a feature. Those rows are forgotten after
the check, which has given the true features by then.
"""

from __future__ import annotations

import torch

from spec_loop import Budget, ModelDrafter, Pass, Proposal, State, forward, keep_slots, new_cache


class EagleDrafter(ModelDrafter):
    """Guesses with an `Eagle` (spec_models/eagle.py), whose cache holds the text's tokens as any draft's does.

    `pending` (1, n, hidden): the features that go with the n tokens which it has not read yet.
    """

    def __init__(self, model, target, target_rows: int, read_last: bool = False, rule=None):
        super().__init__(model, target_rows, read_last, rule)
        self.taps = (target.config.get_text_config().num_hidden_layers,)
        self.own_state = (model.config.num_hidden_layers,)  # the last of a pass, which stands in for a feature

    def start(self, state: State) -> None:
        """Read all but the last token of the text, each with the feature of the one before; nothing comes before the first."""
        self.cache = new_cache(self.model)
        self.blind = bool((state.ids[:, : state.length] >= self.ids.readable).any())
        none = torch.zeros(1, 1, self.model.config.hidden_size, dtype=self.model.dtype, device=state.ids.device)
        known = state.features[0][:, : state.length - 1] if state.length > 1 else none[:, :0]
        given, self.pending = torch.cat([none, known.to(none)], dim=1).split([state.length - 1, 1], dim=1)
        if state.length > 1 and not self.blind:
            forward(self.model, state.ids[:, : state.length - 1], self.cache, features=given)

    def propose(self, state: State, budget: Budget) -> Proposal:
        """As any draft's."""
        self.given = self.pending
        made = super().propose(state, budget)
        if len(made):
            self.pending = self.pending[:, :0]
        return made

    def read(self, state: State, fed: torch.Tensor) -> Pass:
        out = forward(self.model, fed, self.cache, 1, self.own_state, features=self.given)
        state.watch("draft")
        self.given = out.features[0][:, -1:]
        return out

    def keep(self, state: State, path: list[int], features: tuple[torch.Tensor, ...]) -> None:
        """Forget the rows that read no feature of the target's; those that the check gave are read next."""
        self.pending = torch.cat([self.pending, features[0].to(self.pending)], dim=1)
        keep_slots(self.cache, state.length - self.pending.shape[1])
        self.blind = self.blind or max(state.new) >= self.ids.readable
