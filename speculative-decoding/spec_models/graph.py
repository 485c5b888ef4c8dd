"""A fused pass captured once for each size and replayed: on CUDA its operators are then launched by one call.

A graph replays the same kernels at the same addresses, so nothing that changes from pass to pass may be a shape or a
number on the host. Inputs are copied into buffers, the cache is written at slots that stand in one of them, and every
pass looks over the whole room of the cache through a mask. Where nothing can be captured the same code runs as it is.

Batches of rows and long prefills (more than MOST tokens) run through the fused model itself: there launching is little.
"""

from __future__ import annotations

import weakref
from functools import partial

from spec_common import UserError, first_line, is_out_of_memory

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from spec_models.fused import FusedCache, FusedLlama
from spec_models.sight import Block, visible

MOST = 64  # tokens of a captured pass; what is longer is a prompt, read once
WARM_UP = 3  # passes before a capture: libraries choose their kernels and take their memory in the first ones


def captures(device: torch.device) -> bool:
    return device.type == "cuda"


def warm_up(work) -> None:
    """Run it a few times on a stream of its own, as torch asks before a capture. It writes the same values each time."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(side)


def captured(work, n: int, device: torch.device) -> tuple[torch.cuda.CUDAGraph, CausalLMOutputWithPast]:
    """The graph of `work`, a pass over n tokens, and the outputs that each replay fills. Raises UserError; running out
    of memory stays what it is, which callers know how to handle."""
    try:
        with torch.cuda.device(device):
            warm_up(work)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = work()
    except RuntimeError as error:
        # Leaving a broken capture raises an error of its own, which hides the one that broke it.
        first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        if is_out_of_memory(first) or is_out_of_memory(error):
            raise first from None
        raise UserError(
            f"--pass graph: a pass over {n} tokens cannot be captured ({first_line(first)}); use --pass fused"
        ) from error
    return graph, out


def copied(out: CausalLMOutputWithPast) -> CausalLMOutputWithPast:
    """Outputs of the caller's own: the next replay writes over a graph's."""
    states = out.hidden_states and tuple(state if state is None else state.clone() for state in out.hidden_states)
    return CausalLMOutputWithPast(logits=out.logits.clone(), hidden_states=states)


class Stage:
    """All that stands at fixed addresses, for one text at a time, and the graphs captured over it.

    `store` (2, layers, kv heads, room, head size). Inputs of a pass over n tokens, the first n of each: `ids`, `slots`
    (where they are written) and `positions`, (MOST,); `seen` (MOST, room), True where a token looks. `graphs`: by (n,
    rows of logits, hidden states wanted), a graph and its outputs.
    """

    def __init__(self, device: torch.device):
        self.store, self.turns, self.graphs = None, None, {}
        self.ids, self.slots, self.positions = torch.zeros(3, MOST, dtype=torch.long, device=device).unbind()
        self.steps = torch.arange(MOST, device=device)

    def move_to(self, store: torch.Tensor, fused: FusedLlama) -> None:
        """From now on in a larger room. Graphs know addresses and shapes, so those of the old room are dropped, and
        each is captured anew at its next pass: as often as a room doubles."""
        room = store.shape[3]
        self.store, self.graphs = store, {}
        # Held here: the model replaces its table when another text needs a longer one, while graphs read this one.
        self.turns = fused.turn(slice(room), room)
        self.places = torch.arange(room, device=store.device)
        self.seen = torch.zeros(MOST, room, dtype=torch.bool, device=store.device)

    def put(self, ids: torch.Tensor, length: int, positions: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        """The inputs of a pass over ids (1, n) behind `length` tokens; positions (1, n), mask (1, 1, n, length + n)."""
        n, end = ids.shape[1], length + ids.shape[1]
        slots, seen = self.slots[:n], self.seen[:n]
        self.ids[:n].copy_(ids[0])
        torch.add(self.steps[:n], length, out=slots)
        self.positions[:n].copy_(slots if positions is None else positions[0])
        if mask is None:
            torch.le(self.places, slots[:, None], out=seen)
        else:
            seen[:, :end].copy_(visible(mask[0, 0]))
            seen[:, end:] = False

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (1, kv heads, n, head size) at this pass's slots. Returns the room, (1, kv heads, room, head size)."""
        stores, slots = self.store[:, layer], self.slots[: keys.shape[2]]
        for store, states in zip(stores, (keys[0], values[0]), strict=True):
            store.index_copy_(1, slots, states)
        return stores[0][None], stores[1][None]

    def run(self, fused: FusedLlama, n: int, rows: int, wanted: frozenset[int]) -> CausalLMOutputWithPast:
        """The pass over the inputs that were put here: replayed where it can be captured. Raises UserError."""
        work = partial(static_pass, fused, self, n, rows, wanted)
        if not captures(fused.device):
            return work()
        if (n, rows, wanted) not in self.graphs:
            self.graphs[n, rows, wanted] = captured(work, n, fused.device)
        graph, out = self.graphs[n, rows, wanted]
        graph.replay()  # after a capture too: capturing computes nothing
        return copied(out)


def static_pass(fused: FusedLlama, stage: Stage, n: int, rows: int, wanted: frozenset[int]) -> CausalLMOutputWithPast:
    """Logits of the last `rows` of n tokens, (1, rows, vocabulary), and the hidden states wanted, from buffers alone."""
    room, group = stage.store.shape[3], fused.heads // fused.kv_heads
    turn = tuple(table[stage.positions[:n]] for table in stage.turns)
    sight = Block(1, n, room - n, stage.seen[None, None, :n], group, fused.dtype, fused.device)
    x, states = fused.through_layers(fused.embed(stage.ids[:n]), stage, turn, sight, wanted)
    return fused.result(x[None], states, wanted, rows)


class GraphCache(FusedCache):
    """One text's slots of a stage: a FusedCache whose room the stage's graphs know."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage
        if stage.store is not None:
            self.store, self.keys, self.values = stage.store, list(stage.store[0]), list(stage.store[1])

    def reserve(self, model: FusedLlama, end: int) -> None:
        before = self.store
        super().reserve(model, end)
        if self.store is not before:
            self.stage.move_to(self.store, model)


class GraphLlama(nn.Module):
    """A FusedLlama that is called, cached and rolled back as before, its short passes captured. Its layers and its head
    must not be replaced after the first pass: graphs would go on with the old ones."""

    def __init__(self, fused: FusedLlama):
        super().__init__()
        self.fused, self.config, self.generation_config = fused, fused.config, fused.generation_config
        self.spare: list[Stage] = []  # stages of texts that are done: a new text finds its graphs captured

    @property
    def dtype(self) -> torch.dtype:
        return self.fused.dtype

    @property
    def device(self) -> torch.device:
        return self.fused.device

    def get_input_embeddings(self) -> nn.Module:
        return self.fused.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.fused.head

    @torch.inference_mode()
    def new_cache(self) -> GraphCache:
        """An empty cache, on a stage that no living cache has."""
        stage = self.spare.pop() if self.spare else Stage(self.device)
        if stage.store is not None:
            stage.store.zero_()  # a masked slot has weight 0, and 0 times a NaN that a text left is NaN
        cache = GraphCache(stage)
        weakref.finalize(cache, self.spare.append, stage).atexit = False
        return cache

    @torch.inference_mode()
    def forward(
        self, input_ids: torch.Tensor, past_key_values=None, position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None, logits_to_keep: int = 0, use_cache: bool = True,
        output_hidden_states=None,
    ):  # fmt: skip
        """As FusedLlama's, over a GraphCache; with another cache, or more than MOST tokens, FusedLlama's itself."""
        cache, (rows, n) = past_key_values, input_ids.shape
        if not isinstance(cache, GraphCache) or rows != 1 or n > MOST:
            return self.fused(
                input_ids, cache, position_ids, attention_mask, logits_to_keep, use_cache, output_hidden_states
            )
        cache.reserve(self.fused, cache.length + n)
        cache.stage.put(input_ids, cache.length, position_ids, attention_mask)
        out = cache.stage.run(self.fused, n, logits_to_keep or n, frozenset(output_hidden_states or ()))
        cache.length += n
        return out
