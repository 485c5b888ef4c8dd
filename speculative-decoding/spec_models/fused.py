"""A Llama's pass with little around the arithmetic: the same layers, a third of the operators, for target and draft.

A pass over few tokens spends much of its time in dispatch. So here q, k and v are one matrix, gate and up another, and keys
and values go into room reserved beforehand. The logits are transformers' to rounding; the tests hold its text against
`generate`'s. Both models of a pair run in this form or neither does: c and V(n) mean nothing between two forms.

Exact by construction: where no linear layer looks at a row's neighbours (`rows_independent`, found by trying), each row
attends by the very product that a pass over one token makes, and a pass over n rows is bit for bit n passes over one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, Qwen2ForCausalLM
from transformers.activations import SiLUActivation
from transformers.modeling_outputs import CausalLMOutputWithPast

from spec_models.linear import independent_rows
from spec_models.sight import STEP, Block, Rows
from spec_models.vocab import CutHead

FIRST_ROOM = 256  # slots reserved at first; doubled when a text outgrows them
SERIAL = 1 << 15  # values up to which torch runs an activation on one thread, and so splits no row in two


# ----------------------------------------------------------------------------------------------------------- supported


def plain_linear(*layers: nn.Module) -> bool:
    """Whether they are nn.Linear and nothing derived from it, with biases or without: packed storage cannot be joined."""
    return all(type(layer) is nn.Linear for layer in layers) and len({layer.bias is None for layer in layers}) == 1


def fixed_rope(model) -> bool:
    """Whether a position's angles depend on nothing but the position, and turn whole heads."""
    rope = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
    size = model.model.layers[0].self_attn.head_dim
    return rope not in ("dynamic", "longrope") and 2 * model.model.rotary_emb.inv_freq.numel() == size


def hooked(model) -> bool:
    """Whether something runs around a module that a fused pass would leave out (transformers' own hooks only listen)."""
    hooks = [
        hook for one in model.modules() for hook in (*one._forward_hooks.values(), *one._forward_pre_hooks.values())
    ]
    spread = any(hasattr(one, "_hf_hook") for one in model.modules())
    return spread or any(not getattr(hook, "__module__", "").startswith("transformers.") for hook in hooks)


def supported(model) -> bool:
    """Whether `model` is what is fused here: Llama's layers (Qwen2's are the same with biases), full attention, fixed
    RoPE, plain linear layers in one dtype on one device, no hooks that a fused pass would not call."""
    if type(model) not in (LlamaForCausalLM, Qwen2ForCausalLM):
        return False
    places = {(str(one.device), one.dtype) for one in model.parameters()}
    windowed = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"}
    parts = [(layer.self_attn, layer.mlp) for layer in model.model.layers]
    linear = type(model.lm_head) in (nn.Linear, CutHead) and all(
        plain_linear(attention.q_proj, attention.k_proj, attention.v_proj)
        and plain_linear(attention.o_proj)
        and plain_linear(mlp.gate_proj, mlp.up_proj)
        and plain_linear(mlp.down_proj)
        for attention, mlp in parts
    )
    quantised = getattr(model.config, "quantization_config", None) is not None
    return len(places) == 1 and not windowed and not hooked(model) and not quantised and linear and fixed_rope(model)


# --------------------------------------------------------------------------------------------------------------- parts


def joined(*layers: nn.Linear) -> nn.Linear:
    """One linear layer that gives the outputs of all of them side by side. Their weights become parts of its own, so the
    model that they belong to takes no second copy in memory."""
    first, sizes = layers[0], [layer.out_features for layer in layers]
    one = nn.Linear(first.in_features, sum(sizes), first.bias is not None, device="meta")
    for name in ("weight",) if first.bias is None else ("weight", "bias"):
        whole = torch.cat([getattr(layer, name).detach() for layer in layers])
        setattr(one, name, nn.Parameter(whole, requires_grad=False))
        for layer, part in zip(layers, whole.split(sizes), strict=True):
            setattr(layer, name, nn.Parameter(part, requires_grad=False))
    return one


class FusedCache:
    """Keys and values of every layer, `store` (2, layers, kv heads, room, head size), filled up to `length` slots."""

    def __init__(self):
        self.length, self.store, self.keys, self.values = 0, None, [], []

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, surplus: int) -> None:
        """Forget the last -`surplus` slots: transformers' convention for a negative number."""
        self.length += surplus

    @torch.inference_mode()  # what a pass under it wrote may be moved under it alone
    def keep(self, length: int, path=()) -> None:
        """The first `length` slots stand, after them those numbered in `path` (rising, none below `length`), next to one
        another; the rest is forgotten. A path that lies there already costs no copy. Raises ValueError for other slots."""
        path = list(path)
        rising = all(a < b for a, b in zip([length - 1, *path], [*path, self.length], strict=True))
        if not rising or not 0 <= length <= self.length:
            raise ValueError(f"slots {length} and {path} of {self.length} cannot be kept")
        end = length + len(path)
        if path and path[-1] != end - 1:
            moved = self.store.index_select(3, torch.tensor(path, device=self.store.device))
            self.store[:, :, :, length:end] = moved
        self.length = end

    def reserve(self, model: FusedLlama, end: int) -> None:
        """Room for slots up to `end` in every layer, a multiple of STEP."""
        room = 0 if self.store is None else self.store.shape[3]
        if end <= room:
            return
        room = max(FIRST_ROOM, 2 * room, -(-end // STEP) * STEP)
        # Zeros, not whatever was in memory: a masked slot has weight 0, and 0 times NaN is NaN.
        grown = model.embed.weight.new_zeros(2, len(model.layers), model.kv_heads, room, model.head_size)
        if self.length:
            grown[:, :, :, : self.length] = self.store[:, :, :, : self.length]
        self.store, self.keys, self.values = grown, list(grown[0]), list(grown[1])

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (1, kv heads, n, head size) behind what stands. Returns all the room, (1, kv heads, room, head size)."""
        end = self.length + keys.shape[2]
        self.keys[layer][:, self.length : end] = keys[0]
        self.values[layer][:, self.length : end] = values[0]
        return self.keys[layer][None], self.values[layer][None]


class FusedLayer(nn.Module):
    """One decoder layer: two norms, four matrices."""

    def __init__(self, layer):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.down = attention.o_proj, mlp.down_proj
        self.gate_up = joined(mlp.gate_proj, mlp.up_proj)
        self.act = F.silu if isinstance(mlp.act_fn, SiLUActivation) else mlp.act_fn
        self.norm1, self.norm2 = layer.input_layernorm.weight, layer.post_attention_layernorm.weight


# --------------------------------------------------------------------------------------------------------------- model


class FusedLlama(nn.Module):
    """A Llama that is called, cached and rolled back as the ones of transformers are.

    `rows_independent`: up to how many rows of a pass come out bit for bit as each would alone; 0 where nothing is promised.
    """

    def __init__(self, model):
        """Takes over the weights of `model`, which `supported` must have approved; linear layers may be packed afterwards."""
        super().__init__()
        self.config, self.generation_config = model.config, model.generation_config
        attention, body = model.model.layers[0].self_attn, model.model
        self.head_size, self.scale, self.eps = attention.head_dim, attention.scaling, model.config.rms_norm_eps
        self.heads, self.kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        self.embed, self.norm, self.head = body.embed_tokens, body.norm.weight, model.lm_head
        self.layers = nn.ModuleList(FusedLayer(layer) for layer in body.layers)
        self.rotary, self.turns, self.rows_independent = body.rotary_emb, None, 0

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def set_output_embeddings(self, head: nn.Module) -> None:
        self.head = head

    def new_cache(self) -> FusedCache:
        return FusedCache()

    def turn(self, places: slice | torch.Tensor, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin of positions below `end`, each (n, 1, head size), from a table that grows with the cache."""
        if self.turns is None or end > self.turns[0].shape[0]:
            room = max(FIRST_ROOM, 2 * end)
            cos, sin = self.rotary(self.embed.weight[:1], torch.arange(room, device=self.device)[None])
            half = self.head_size // 2
            self.turns = cos[0][:, None], torch.cat([-sin[0][:, :half], sin[0][:, half:]], dim=-1)[:, None]
        return self.turns[0][places], self.turns[1][places]

    def attend(self, x, layer: FusedLayer, index: int, cache, turn, sight) -> torch.Tensor:
        """Attention of x (rows x n, hidden), written into its layer's cache. The queries that share a key head stand side
        by side as rows of one product, so keys are never repeated."""
        rows, kv = sight.rows, self.kv_heads
        mixed = layer.qkv(F.rms_norm(x, x.shape[1:], layer.norm1, self.eps)).view(len(x), -1, self.head_size)
        turned = mixed[:, : self.heads + kv]
        turned = torch.addcmul(turned * turn[0], turned.roll(self.head_size // 2, -1), turn[1])
        keys, values = (
            part.view(rows, -1, kv, self.head_size).transpose(1, 2)
            for part in (turned[:, self.heads :], mixed[:, self.heads + kv :])
        )
        keys, values = cache.update(keys, values, index)
        query = turned[:, : self.heads].reshape(len(x), kv, self.heads // kv, self.head_size)
        return layer.out(sight(query, keys, values, self.scale))

    def mix(self, x: torch.Tensor, layer: FusedLayer) -> torch.Tensor:
        """The gated block of x (n, hidden). Row by row where torch would split the activation's rows between threads, or
        its own code for a block might round otherwise."""
        gate, up = layer.gate_up(F.rms_norm(x, x.shape[1:], layer.norm2, self.eps)).chunk(2, dim=-1)
        whole = not self.rows_independent or (layer.act is F.silu and gate.numel() < SERIAL)
        gate = layer.act(gate) if whole else torch.cat([layer.act(row) for row in gate.split(1)])
        return layer.down(gate * up)

    def sight(self, rows: int, n: int, cached: int, mask: torch.Tensor | None, own: bool):
        """What each of the rows x n queries sees, made once a pass; `own`: a FusedCache, whose room may be looked over."""
        if own and rows == 1 and n <= self.rows_independent:
            return Rows(n, cached, mask, self.dtype, self.device)
        return Block(rows, n, cached, mask, self.heads // self.kv_heads, self.dtype, self.device)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        past_key_values=None,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        use_cache: bool = True,
        output_hidden_states=None,
        inputs_embeds: torch.Tensor | None = None,
    ):
        """Logits of the last `logits_to_keep` (0: all) of input_ids (rows, n), (rows, keep, vocabulary); the cache grows by n.

        `position_ids` (rows or 1, n): where each token stands, below cached + n; left out: behind the cache. `attention_mask`
        (rows or 1, 1, n, cached + n): what each sees, True or 0, and does not see, False or -inf; left out: all before it
        and itself. `output_hidden_states`: indices as in transformers (0: embeddings, i: after layer i, last: after the last
        norm); `.hidden_states` has those, (rows, n, hidden), and None elsewhere. `past_key_values`: a FusedCache, which
        serves one row, or a cache of transformers that says itself where it writes; then positions and mask are needed.
        `inputs_embeds` (rows, n, hidden): what the first layer reads, in place of the embeddings of ids.
        """
        cache = FusedCache() if past_key_values is None else past_key_values
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        (rows, n), own = x.shape[:2], isinstance(cache, FusedCache)
        if own and rows != 1:
            raise ValueError(f"a FusedCache serves one row, not {rows}")
        end = cache.length + n if own else attention_mask.shape[-1]
        if own:
            cache.reserve(self, end)
        places = slice(end - n, end) if position_ids is None else position_ids.expand(rows, n).flatten()
        turn, sight = self.turn(places, end), self.sight(rows, n, end - n, attention_mask, own)
        wanted = frozenset(output_hidden_states or ())
        x, states = self.through_layers(x.flatten(0, 1), cache, turn, sight, wanted)
        if own:
            cache.length = end
        return self.result(x.view(rows, n, -1), states, wanted, logits_to_keep)

    def through_layers(self, x: torch.Tensor, cache, turn, sight, wanted: frozenset[int]) -> tuple[torch.Tensor, list]:
        """What the last layer gives for embeddings x (rows x n, hidden), and of all the states those `wanted`, else None.
        Nothing here depends on how much the cache holds: a pass over n tokens is the same operators every time."""
        states = [x if 0 in wanted else None]
        for index, layer in enumerate(self.layers):
            x = x + self.attend(x, layer, index, cache, turn, sight)
            x = x + self.mix(x, layer)
            states.append(x if index + 1 in wanted else None)
        return x, states

    def result(self, x: torch.Tensor, states: list, wanted: frozenset[int], keep: int) -> CausalLMOutputWithPast:
        """The last norm and the head of x (rows, n, hidden), and the hidden states asked for."""
        last = len(self.layers)
        normed = F.rms_norm(x if last in wanted else x[:, -keep:], x.shape[2:], self.norm, self.eps)
        states[last] = normed if last in wanted else None
        shaped = tuple(state if state is None else state.view(x.shape) for state in states)
        return CausalLMOutputWithPast(logits=self.head(normed[:, -keep:]), hidden_states=shaped if wanted else None)


@torch.inference_mode()
def prove_rows(model: FusedLlama) -> int:
    """Find and set `rows_independent`: what the linear layers promise, tried on whole passes across a step of the cache.
    A row of a block is fed again alone, on the cache that the block left before it."""
    model.rows_independent = most = independent_rows(model)
    size = model.embed.weight.shape[0]
    ids = torch.arange(5, 5 + STEP + most, device=model.device).remainder(size)[None]
    for n in {min(2, most), (most + 1) // 2, most} - {0}:
        cache, start = model.new_cache(), STEP - 1 - n // 2
        model(ids[:, :start], cache, logits_to_keep=1)
        block = model(ids[:, start : start + n], cache).logits[0]
        for row in (n - 1, 0):
            cache.keep(start + row)
            if not torch.equal(model(ids[:, start + row : start + row + 1], cache).logits[0, 0], block[row]):
                model.rows_independent = 0
    return model.rows_independent
