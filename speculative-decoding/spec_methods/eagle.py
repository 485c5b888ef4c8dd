"""Guesses with a head that reads the target's own states: EAGLE's chain (Li et al. 2024, arXiv 2401.15077).

A round's first pass reads the tokens written since, each beside the feature that the target's check gave for the token before
it; every further one reads the guess before and the head's own state in place of a feature. Those rows are forgotten after
the check, which has given the true features by then.
"""

from __future__ import annotations

import torch

from spec_loop import Budget, ModelDrafter, Pass, Proposal, State, forward, keep_slots, new_cache

OWN_STATE = (1,)  # of a head's states the last one, which stands in for a feature


class EagleDrafter(ModelDrafter):
    """Guesses with an `Eagle` (spec_models/eagle.py). Row i of its cache holds token i + 1 of the text.

    `pending` (1, n, hidden): the target's features that it has not read; its cache and they are the text's but the last.
    """

    def __init__(self, model, target, target_rows: int, read_last: bool = False, rule=None):
        super().__init__(model, target_rows, read_last, rule)
        self.taps = (target.config.get_text_config().num_hidden_layers,)

    def start(self, state: State) -> None:
        """Read the text but its last token, with the features of those before."""
        self.cache = new_cache(self.model)
        self.blind = bool((state.ids[:, : state.length] >= self.ids.readable).any())
        known = state.length - 1  # tokens whose feature the target has given
        features = state.features[0][:, :known] if known else None
        self.pending = None if features is None else features[:, -1:]
        if known > 1 and not self.blind:
            forward(self.model, state.ids[:, 1:known], self.cache, features=features[:, :-1])

    def propose(self, state: State, budget: Budget) -> Proposal:
        """As any draft's; none where the target has not said anything yet (a text of one token)."""
        if self.pending is None:
            return Proposal(state.ids[0, :0])
        self.given = self.pending
        made = super().propose(state, budget)
        if len(made):
            self.pending = self.pending[:, :0]
        return made

    def unread(self, state: State) -> torch.Tensor:
        return state.ids[:, self.cache.get_seq_length() + 1 : state.length]

    def read(self, fed: torch.Tensor) -> Pass:
        out = forward(self.model, fed, self.cache, 1, OWN_STATE, features=self.given)
        self.given = out.features[0][:, -1:]
        return out

    def keep(self, state: State, path: list[int], features: tuple[torch.Tensor, ...]) -> None:
        """Forget the rows that read no feature of the target's; what the check gave is read next."""
        self.pending = features[0] if self.pending is None else torch.cat([self.pending, features[0]], dim=1)
        keep_slots(self.cache, state.length - 1 - self.pending.shape[1])
        self.blind = self.blind or max(state.new) >= self.ids.readable
