"""The target as a fast writer of long batches on a CPU: merged half-precision matrices, a float32 residual stream,
grouped queries over one preallocated cache. Llama, Qwen2 and Qwen3 alike: biases and query/key norms are used where
they are.

Its decode is bound by reading keys and values: batched matrix products, packed linear layers and huge pages were tried
and gave nothing that could be told from noise.
"""

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

TOP = 16  # ids kept a position: enough for the union of candidates that the loss looks at
AT_ONCE = 1536  # positions of one piece of a large pass


class Teacher:
    """The target (a loaded model, or its folder) with merged half-precision matrices, for large batches on a CPU."""

    def __init__(self, target, dtype=torch.bfloat16):
        model = (
            target
            if isinstance(target, torch.nn.Module)
            else AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        )
        self.config, self.dtype = model.config, dtype
        self.eps, self.rotary = model.config.rms_norm_eps, model.model.rotary_emb
        self.size = model.model.layers[0].self_attn.head_dim
        self.embedding = model.model.embed_tokens.weight.detach()
        self.head, self.norm = model.lm_head.weight.detach().to(dtype), model.model.norm.weight.detach()
        self.layers = [self._layer(layer) for layer in model.model.layers]

    def _layer(self, layer):
        attention, mlp = layer.self_attn, layer.mlp
        merge = lambda *parts: torch.cat([part.weight.detach() for part in parts]).to(self.dtype)  # noqa: E731
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        biased = projections[0].bias is not None
        return {
            "qkv": merge(*projections),
            "bias": torch.cat([part.bias.detach() for part in projections]).to(self.dtype) if biased else None,
            "norm_q": getattr(getattr(attention, "q_norm", None), "weight", None),
            "norm_k": getattr(getattr(attention, "k_norm", None), "weight", None),
            "out": merge(attention.o_proj),
            "gate_up": merge(mlp.gate_proj, mlp.up_proj),
            "down": merge(mlp.down_proj),
            "norm1": layer.input_layernorm.weight.detach(),
            "norm2": layer.post_attention_layernorm.weight.detach(),
        }

    def _normed(self, x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def new_cache(self, rows, length):
        shape = (rows, self.config.num_key_value_heads, length, self.size)
        return [[torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)] for _ in self.layers]

    def _mask(self, start, end, pad):
        """0 where a query may look, -inf elsewhere: the past, without the padding on a row's left (a padding query
        sees itself)."""
        keys, queries = torch.arange(end)[None, None], torch.arange(start, end)[None, :, None]
        seen = (keys <= queries) & ((keys >= pad[:, None, None]) | (keys == queries))
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, float("-inf"))
        return mask[:, None].repeat_interleave(group, dim=2)

    def _attend(self, x, layer, kept, start, turn, mask):
        """One layer's attention; the queries that share a key head stand side by side, so keys are never repeated."""
        (rows, n, _), (cos, sin) = x.shape, turn
        heads, kv_heads, size = self.config.num_attention_heads, self.config.num_key_value_heads, self.size
        mixed = (
            F.linear(self._normed(x, layer["norm1"]).to(self.dtype), layer["qkv"], layer["bias"])
            .view(rows, n, -1, size)
            .transpose(1, 2)
        )
        qk = mixed[:, : heads + kv_heads].float()
        if layer["norm_q"] is not None:
            qk = torch.cat(
                (self._normed(qk[:, :heads], layer["norm_q"]), self._normed(qk[:, heads:], layer["norm_k"])), 1
            )
        half = torch.cat((-qk[..., size // 2 :], qk[..., : size // 2]), dim=-1)
        qk = (qk * cos + half * sin).to(self.dtype)
        kept[0][:, :, start : start + n] = qk[:, heads:]
        kept[1][:, :, start : start + n] = mixed[:, heads + kv_heads :]
        shape = (rows, kv_heads, heads // kv_heads, n, size)
        query = qk[:, :heads].view(shape).transpose(2, 3).reshape(rows, kv_heads, -1, size)
        out = F.scaled_dot_product_attention(
            query, kept[0][:, :, : start + n], kept[1][:, :, : start + n], attn_mask=mask
        )
        out = out.view(rows, kv_heads, n, -1, size).permute(0, 2, 1, 3, 4).reshape(rows, n, heads * size)
        return F.linear(out, layer["out"])

    def hidden(self, ids, cache, start, pad):
        """Normed final hidden states of `ids` (rows, n), whose first column is cache position `start`; `pad` left pads
        a row. A few rows at a time: temporaries of more than some megabytes cost more to allocate than to compute."""
        rows = max(1, AT_ONCE // ids.shape[1])
        return torch.cat(
            [
                self._hidden(
                    ids[at : at + rows],
                    [[part[at : at + rows] for part in kept] for kept in cache],
                    start,
                    pad[at : at + rows],
                )
                for at in range(0, len(ids), rows)
            ]
        )

    @torch.inference_mode()
    def _hidden(self, ids, cache, start, pad):
        end = start + ids.shape[1]
        x = self.embedding[ids]
        positions = (torch.arange(start, end)[None] - pad[:, None]).clamp(min=0)
        turn, mask = [part[:, None] for part in self.rotary(x, positions)], self._mask(start, end, pad)
        for layer, kept in zip(self.layers, cache, strict=True):
            x = x + self._attend(x, layer, kept, start, turn, mask)
            gate, up = F.linear(self._normed(x, layer["norm2"]).to(self.dtype), layer["gate_up"]).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        return self._normed(x, self.norm)

    @torch.inference_mode()
    def top(self, hidden):
        """Logits of the 16 best ids and the ids, for flat hidden states."""
        found = [F.linear(part.to(self.dtype), self.head).topk(TOP, dim=-1) for part in hidden.split(AT_ONCE)]
        return tuple(map(torch.cat, zip(*found, strict=True)))


def pick(values, indices, sampled, generator):
    """The next ids: greedy, or sampled among the teacher's best where `sampled`."""
    drawn = torch.multinomial(values.float().softmax(-1), 1, generator=generator)
    return torch.where(sampled, indices.gather(1, drawn)[:, 0], indices[:, 0])


def keep(kept, alive, running, parts, skips):
    """Append this step's ids, hidden states and top ids to every row that still runs, without its padding."""
    for at, row in enumerate(alive.tolist()):
        if running[at]:
            for store, part in zip(kept[row], parts, strict=True):
                store.append(part[at, skips[at] :])


def continue_rows(teacher, prompts, new_tokens, starts, stop_id, generator=None):
    """Continue prompts in one batch; gives per row (ids, hidden, top ids). A row ends at its stop id."""
    width, rows = max(map(len, prompts)), len(prompts)
    pad = torch.tensor([width - len(prompt) for prompt in prompts])
    block = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    cache, alive, starts = teacher.new_cache(rows, width + new_tokens), torch.arange(rows), torch.tensor(starts)
    kept, position, running = [[[], [], []] for _ in prompts], 0, torch.ones(rows, dtype=torch.bool)
    for step in range(new_tokens):
        hidden = teacher.hidden(block, cache, position, pad)
        values, best = (part.view(*block.shape, TOP) for part in teacher.top(hidden.flatten(0, 1)))
        keep(
            kept,
            alive,
            running,
            (block, hidden.half(), best.to(torch.int32)),
            pad.tolist() if step == 0 else [0] * len(alive),
        )
        position += block.shape[1]
        following = pick(values[:, -1], best[:, -1], step < starts, generator)
        block, running = following[:, None], running & (following != stop_id)
        if running.sum() < 0.9 * len(running):  # leaving costs a copy of the cache, so rows leave together
            block, pad, alive, starts = block[running], pad[running], alive[running], starts[running]
            cache = [[part[running] for part in layer] for layer in cache]
            running = running[running]
        if not len(alive):
            break
    return [[torch.cat(part) for part in row] for row in kept]
