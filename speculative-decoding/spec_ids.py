"""Which of its target's ids a draft can read and say: tables of one family are padded differently, heads may be cut."""

from __future__ import annotations

import torch


class DraftIds:
    """What a draft can read and say of the target's `rows` ids. A head that is cut to the frequent ids
    (spec_models/vocab.py) says with which: its row i speaks of id `kept[i]`."""

    def __init__(self, model, rows: int):
        self.rows, self.kept = rows, getattr(model.get_output_embeddings(), "kept", None)
        self.readable = model.get_input_embeddings().weight.shape[0]
        self.sayable = rows if self.kept is None else None  # rows of the head that may be picked; None: all of them

    def of(self, picked: torch.Tensor) -> torch.Tensor:
        """The target's ids of picked rows of the head."""
        return picked if self.kept is None else self.kept[picked]

    def law(self, law: torch.Tensor | None) -> torch.Tensor | None:
        """A law over the head's rows as one over the target's ids, (rows,): what the draft cannot say has 0."""
        if law is None or (self.kept is None and len(law) == self.rows):
            return law
        whole = law.new_zeros(self.rows)
        whole[slice(len(law)) if self.kept is None else self.kept] = law
        return whole
