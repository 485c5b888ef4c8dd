"""A draft that makes all guesses of a round in one pass (PARD, An et al. 2025, arXiv 2504.18583): how it reads a token that is
not known yet.

Where a guess has yet to be made it is shown a mask, a vector of its own that training has learnt (draft_training/parallel.py).
Here the mask has an id, the one behind the embedding's last row, so that a pass over known tokens and masks is a pass over ids
like any other, in every form of pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class MaskedEmbedding(nn.Module):
    """The embedding of ids below its rows, `weight` (rows, hidden), and for the id `rows` the `mask` (hidden,)."""

    def __init__(self, weight: nn.Parameter, mask: torch.Tensor):
        super().__init__()
        self.weight, self.mask = weight, nn.Parameter(mask.detach().clone(), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.weight.shape[0]
        known = F.embedding(ids.clamp(max=rows - 1), self.weight)
        return torch.where((ids == rows)[..., None], self.mask.to(known), known)


def read_masks(draft) -> None:
    """Have a draft that was trained with a mask (`draft.mask`) read it as an id, in place."""
    draft.set_input_embeddings(MaskedEmbedding(draft.get_input_embeddings().weight, draft.mask))
    del draft.mask


def guesses_at_once(draft) -> bool:
    """Whether the draft makes all guesses of a round in one pass."""
    return isinstance(draft.get_input_embeddings(), MaskedEmbedding)
