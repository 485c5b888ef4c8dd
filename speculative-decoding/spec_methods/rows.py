"""A cache for rows of different lengths: every row writes at its own place, and what was rejected is written over.

Slot and position are one number: token i of a row lies in slot i of that row, wherever the other rows stand. Then a mask
is one comparison, `slot <= position of the query`; it comes from lengths, never from what an id is. Nothing is cropped,
moved or padded on the left: slots past a row's text hold rubbish that no query of the row sees before they are written.
"""

from __future__ import annotations

import functools

import torch
from transformers.cache_utils import Cache, DynamicLayer

from spec_loop import Pass, forward
from spec_models.checks import Loaded, attention_windows, check_passes, vocabulary_rows


class RowLayer(DynamicLayer):
    """Keys and values of one layer, (rows, room, heads, head size), allocated whole at the first pass.

    Zeros, not whatever was in memory: a masked slot has weight 0, and 0 times NaN is NaN.
    """

    def __init__(self, cache: RowCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, self.is_initialized = key_states.device, True
        self.keys, self.values = (
            states.new_zeros(self.cache.rows, self.cache.room, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (rows, heads, q, head size) at the slots of this pass. Returns every slot up to its end, heads first."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places = self.cache.places.to(self.device)
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store.flatten(0, 1).index_copy_(0, places, states.transpose(1, 2).flatten(0, 1))
        return tuple(store[:, : self.cache.end].transpose(1, 2) for store in (self.keys, self.values))

    def get_seq_length(self) -> int:
        return self.cache.end


class RowCache(Cache):
    """The cache of `rows` texts of up to `room` tokens. `feed` says before each pass which slots it writes."""

    def __init__(self, rows: int, room: int):
        super().__init__(layer_class_to_replicate=functools.partial(RowLayer, self))
        self.rows, self.room, self.end, self.places = rows, room, 0, None

    def write_at(self, slots: torch.Tensor, end: int) -> None:
        """The next pass writes row b's tokens at `slots[b]`, (rows, q) or (1, q) for all rows, all below `end`."""
        if end > self.room:
            raise ValueError(f"a pass up to slot {end} of {self.room}")
        starts = torch.arange(0, self.rows * self.room, self.room, device=slots.device)
        self.end, self.places = end, (starts[:, None] + slots).flatten()

    def select(self, rows: list[int]) -> None:
        """Go on with these rows alone, in that order."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self.rows = len(rows)

    def row_bytes(self) -> int:
        """What one row takes."""
        return sum(store.nbytes for layer in self.layers for store in (layer.keys, layer.values)) // self.rows


def mask_of(model, slots: torch.Tensor, end: int) -> torch.Tensor | dict[str, torch.Tensor]:
    """(rows, 1, q, end): 0 where a query at `slots` (rows, q) sees a slot, minus infinity elsewhere. Each sees itself, and
    back as far as its layer's window: layers of several kinds get a mask each, by the kind's name."""
    places, masks = torch.arange(end, device=slots.device), {}
    for kind, window in attention_windows(model).items():
        hidden = places > slots[:, None, :, None]
        if window is not None:
            hidden |= places <= slots[:, None, :, None] - window
        mask = torch.zeros(hidden.shape, dtype=model.dtype, device=slots.device)
        masks[kind] = mask.masked_fill_(hidden, -torch.inf)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def feed(model, ids: torch.Tensor, cache: RowCache, slots: torch.Tensor, end: int, rows: int) -> Pass:
    """One pass over `slots` of the texts `ids` (B, room), all of them below `end`: (B, q), or (1, q) where they are the
    same in every row. Gives the last `rows` rows of logits of each, (B, rows, vocabulary).

    A slot may stand twice: a row with less to read than the longest reads its last token again, into the same slot.
    """
    cache.write_at(slots, end)
    tokens = ids.gather(1, slots.expand(len(ids), -1))
    return forward(model, tokens, cache, rows, position_ids=slots, attention_mask=mask_of(model, slots, end))


def read_prompts(model, ids: torch.Tensor, lengths: list[int], room: int) -> RowCache:
    """A cache that holds all but the last token of every row: `lengths` tokens of `ids` (rows, width), padded on the
    right. What is read past a row's end is written over before anything can see it."""
    cache, longest = RowCache(len(lengths), room), max(lengths) - 1
    if longest:
        feed(model, ids, cache, torch.arange(longest, device=ids.device)[None], longest, 1)
    return cache


# -------------------------------------------------------------------------------------------------------------- checks


@torch.inference_mode()
def ragged_error(model) -> float:
    """How far a ragged batch is from single rows, as a share of the logits' spread: two rows, a block that is rejected,
    then one of three tokens for one row and of two for the other."""
    rows = vocabulary_rows(model)
    ids = torch.arange(3, 27, device=model.device).view(2, 12).remainder(rows)
    lengths = [9, 4]
    cache = read_prompts(model, ids, lengths, 12)
    starts = torch.tensor(lengths, device=model.device)[:, None] - 1
    steps = torch.arange(3, device=model.device)
    feed(model, ids.flip(1), cache, starts + steps, 11, 3)
    slots = torch.minimum(starts + steps, starts + steps.new_tensor([[2], [1]]))
    logits = feed(model, ids, cache, slots, 11, 3).logits.float()
    alone = [
        model(ids[b : b + 1, :end], use_cache=False).logits[0, -n:].float()
        for b, (end, n) in enumerate([(11, 3), (5, 2)])
    ]
    error = max((logits[0] - alone[0]).abs().max(), (logits[1, :2] - alone[1]).abs().max())
    return float(error / alone[0].std())


def check_rows(loaded: Loaded) -> None:
    """One real try: rows of different lengths must give what each gives alone. Raises UserError for models that take no
    mask of ours (ALiBi counted from a mask of ones and zeros, state-space layers, attention in chunks)."""
    refusal = (
        "rows of different lengths do not give what each gives alone, so this architecture cannot serve a batch here; "
        "choose a Llama or Qwen2, or use spec_decode.py"
    )
    check_passes(loaded, ragged_error, refusal, "a batch of two rows")
