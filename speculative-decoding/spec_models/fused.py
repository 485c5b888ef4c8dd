"""A draft's pass with little around the arithmetic: the same Llama layers, a third of the operators.

A draft of a few layers spends more time in dispatch than in its weights, and c is what decides whether drafting pays. So
here q, k and v are one matrix, gate and up another, and keys and values go into room reserved beforehand. It serves drafts
only: what a draft computes can change which guesses are made, never the text. The target runs transformers' own code.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, Qwen2ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

FIRST_ROOM = 256  # positions reserved at first; doubled when a text outgrows them


def supported(model) -> bool:
    """Whether `model` is what is fused here: Llama's layers (Qwen2's are the same with biases), full attention, fixed RoPE."""
    if type(model) not in (LlamaForCausalLM, Qwen2ForCausalLM):
        return False
    config = model.config
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    windowed = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    return (
        rope not in ("dynamic", "longrope") and not windowed and len({str(p.device) for p in model.parameters()}) == 1
    )


def joined(*layers: nn.Linear) -> nn.Linear:
    """One linear layer that gives the outputs of all of them side by side."""
    first = layers[0]
    one = nn.Linear(
        first.in_features, sum(layer.out_features for layer in layers), first.bias is not None, device="meta"
    )
    one.weight = nn.Parameter(torch.cat([layer.weight.detach() for layer in layers]), requires_grad=False)
    if first.bias is not None:
        one.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]), requires_grad=False)
    return one


class FusedCache:
    """Keys and values of every layer, each (kv heads, room, head size), filled up to `length` positions."""

    def __init__(self):
        self.length, self.keys, self.values = 0, [], []

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, surplus: int) -> None:
        """Forget the last -`surplus` positions: transformers' convention for a negative number."""
        self.length += surplus

    def reserve(self, model: FusedLlama, end: int) -> None:
        """Room for positions up to `end` in every layer."""
        room = self.keys[0].shape[1] if self.keys else 0
        if end <= room:
            return
        shape = (model.kv_heads, max(FIRST_ROOM, 2 * room, end), model.head_size)
        for store in (self.keys, self.values):
            grown = [torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in model.layers]
            for old, new in zip(store, grown, strict=False):
                new[:, :room] = old
            store[:] = grown


class FusedLayer(nn.Module):
    """One decoder layer: two norms, four matrices."""

    def __init__(self, layer):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.down = attention.o_proj, mlp.down_proj
        self.gate_up, self.act = joined(mlp.gate_proj, mlp.up_proj), mlp.act_fn
        self.norm1, self.norm2 = layer.input_layernorm.weight, layer.post_attention_layernorm.weight


class FusedLlama(nn.Module):
    """A Llama for batch 1 that is called, cached and rolled back as the ones of transformers are."""

    def __init__(self, model):
        """Takes over the weights of `model`, which `supported` must have approved; linear layers may be packed afterwards."""
        super().__init__()
        self.config, self.generation_config = model.config, model.generation_config
        attention, body = model.model.layers[0].self_attn, model.model
        self.head_size, self.kv_heads, self.scale = (
            attention.head_dim,
            model.config.num_key_value_heads,
            attention.scaling,
        )
        self.heads, self.eps = model.config.num_attention_heads, model.config.rms_norm_eps
        self.embed, self.norm, self.head = body.embed_tokens, body.norm.weight, model.lm_head
        self.layers = nn.ModuleList(FusedLayer(layer) for layer in body.layers)
        self.rotary = body.rotary_emb
        self.turns = None

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

    def turn(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin of positions `start` to `end`, each (n, 1, head size), from a table that grows with the cache."""
        if self.turns is None or end > self.turns[0].shape[0]:
            room = max(FIRST_ROOM, 2 * end)
            cos, sin = self.rotary(self.embed.weight[:1], torch.arange(room, device=self.device)[None])
            half = self.head_size // 2
            self.turns = cos[0][:, None], torch.cat([-sin[0][:, :half], sin[0][:, half:]], dim=-1)[:, None]
        return self.turns[0][start:end], self.turns[1][start:end]

    def attend(self, x, layer: FusedLayer, keys, values, start: int, turn, mask) -> torch.Tensor:
        """Attention of x (n, hidden), written into its layer's cache from `start`. The queries that share a key head stand
        side by side as rows, so keys are never repeated."""
        n, end, group = len(x), start + len(x), self.heads // self.kv_heads
        mixed = layer.qkv(F.rms_norm(x, x.shape[1:], layer.norm1, self.eps)).view(n, -1, self.head_size)
        turned = mixed[:, : self.heads + self.kv_heads]
        turned = torch.addcmul(turned * turn[0], turned.roll(self.head_size // 2, -1), turn[1])
        keys[:, start:end] = turned[:, self.heads :].transpose(0, 1)
        values[:, start:end] = mixed[:, self.heads + self.kv_heads :].transpose(0, 1)
        query = (
            turned[:, : self.heads]
            .view(n, self.kv_heads, group, -1)
            .transpose(0, 1)
            .reshape(1, self.kv_heads, n * group, -1)
        )
        out = F.scaled_dot_product_attention(
            query, keys[None, :, :end], values[None, :, :end], attn_mask=mask, scale=self.scale
        )
        return layer.out(out.view(self.kv_heads, n, -1).transpose(0, 1).reshape(n, -1))

    def forward(
        self, input_ids: torch.Tensor, past_key_values: FusedCache, logits_to_keep: int = 0, use_cache: bool = True
    ):
        """Logits of the last `logits_to_keep` (0: all) of input_ids (1, n), (1, keep, vocabulary); the cache grows by n."""
        cache, start, n = past_key_values, past_key_values.length, input_ids.shape[1]
        cache.reserve(self, start + n)
        x, turn, mask = self.embed(input_ids[0]), self.turn(start, start + n), None
        if n > 1:  # row i of a block sees the past and the block up to itself; its queries of one key head are rows too
            seen = torch.ones(n, start + n, dtype=torch.bool, device=x.device).tril(start)
            mask = seen.repeat_interleave(self.heads // self.kv_heads, dim=0)
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x = x + self.attend(x, layer, keys, values, start, turn, mask)
            gate, up = layer.gate_up(F.rms_norm(x, x.shape[1:], layer.norm2, self.eps)).chunk(2, dim=-1)
            x = x + layer.down(layer.act(gate) * up)
        cache.length += n
        last = F.rms_norm(x[-logits_to_keep:], x.shape[1:], self.norm, self.eps)
        return CausalLMOutputWithPast(logits=self.head(last)[None])
