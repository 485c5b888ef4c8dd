"""Teacher data for a draft: the target's own continuations of many prompts, with what it thought at every position.

A shard is one safetensors file: flat `ids`, the final normed hidden state of each position (float16; with the target's head, which
the draft shares, it gives the teacher's logit of any id), the teacher's 16 best ids, row `lengths`, `prompt_lengths`, `kinds`.
Half-precision matrices, a float32 residual stream and grouped queries over one preallocated cache: about 2x `generate` on a CPU.

    python -m draft_training.data --target FOLDER --out data --shards 20
"""

import os
import pathlib
import sys
import time

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_training.prompts import KINDS, SHORTEST, training_prompts
from spec_common import Help, Parser, UserError, at_least, command

TOP = 16  # ids kept a position: enough for the union of candidates that the loss looks at
AT_ONCE = 1536  # positions of one piece of a large pass
NEW_TOKENS = 64  # tokens a row: many short rows, because a draft agrees least at the beginning of a text
SHARES = {"code": 0.34, "list": 0.12, "json": 0.10, "repeat": 0.06, "prose": 0.26, "chat": 0.12}
SAMPLED_STARTS = (0, 0, 4, 12)  # tokens sampled before greedy takes over: the same template then leads to many texts
OPENING_STARTS = (12, 20, 28)  # the same after a bare opening, which alone would always lead to the same text


class Teacher:
    """The target with merged half-precision matrices, for large batches on a CPU."""

    def __init__(self, folder, dtype=torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.config, self.dtype = model.config, dtype
        self.eps, self.rotary = model.config.rms_norm_eps, model.model.rotary_emb
        self.embedding = model.model.embed_tokens.weight.detach()
        self.head, self.norm = self.embedding.to(dtype), model.model.norm.weight.detach()
        self.layers = [self._layer(layer) for layer in model.model.layers]

    def _layer(self, layer):
        attention, mlp = layer.self_attn, layer.mlp
        merge = lambda *parts: torch.cat([part.weight.detach() for part in parts]).to(self.dtype)  # noqa: E731
        return {
            "qkv": merge(attention.q_proj, attention.k_proj, attention.v_proj),
            "out": merge(attention.o_proj),
            "gate_up": merge(mlp.gate_proj, mlp.up_proj),
            "down": merge(mlp.down_proj),
            "norm1": layer.input_layernorm.weight.detach(),
            "norm2": layer.post_attention_layernorm.weight.detach(),
        }

    def _normed(self, x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def new_cache(self, rows, length):
        shape = (rows, self.config.num_key_value_heads, length, self.config.head_dim)
        return [[torch.zeros(shape, dtype=self.dtype), torch.zeros(shape, dtype=self.dtype)] for _ in self.layers]

    def _mask(self, start, end, pad):
        """0 where a query may look, -inf elsewhere: the past, without the padding on a row's left (a padding query sees itself)."""
        keys, queries = torch.arange(end)[None, None], torch.arange(start, end)[None, :, None]
        seen = (keys <= queries) & ((keys >= pad[:, None, None]) | (keys == queries))
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        mask = torch.zeros(seen.shape, dtype=self.dtype).masked_fill_(~seen, float("-inf"))
        return mask[:, None].repeat_interleave(group, dim=2)

    def _attend(self, x, layer, kept, start, turn, mask):
        """One layer's attention; the queries that share a key head stand side by side, so keys are never repeated."""
        (rows, n, _), (cos, sin) = x.shape, turn
        heads, kv_heads, size = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        mixed = (
            F.linear(self._normed(x, layer["norm1"]).to(self.dtype), layer["qkv"])
            .view(rows, n, -1, size)
            .transpose(1, 2)
        )
        qk = mixed[:, : heads + kv_heads].float()
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
        """Normed final hidden states of `ids` (rows, n), whose first column is cache position `start`; `pad` left pads a row.
        A few rows at a time: temporaries of more than some megabytes cost more to allocate than to compute."""
        rows = max(1, AT_ONCE // ids.shape[1])
        return torch.cat(
            [
                self._hidden(ids[at : at + rows], [[part[at : at + rows] for part in kept] for kept in cache], start, pad[at : at + rows])
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


def shard_of(rows, prompt_lengths, kinds):
    """Rows as the flat tensors of a shard. The last position of a row has a prediction, so the next id need not be in it."""
    ids, hidden, best = ([row[i] for row in rows] for i in range(3))
    return {
        "ids": torch.cat(ids).to(torch.int32),
        "hidden": torch.cat(hidden).contiguous(),
        "top": torch.cat(best).contiguous(),
        "lengths": torch.tensor([len(row) for row in ids]),
        "prompt_lengths": torch.tensor(prompt_lengths),
        "kinds": torch.tensor(kinds),
    }


def make_shard(teacher, tokenizer, path, seed, rows, new_tokens):
    """One shard of `rows` rows over all kinds; batches hold prompts of like length, so little is padded."""
    generator = torch.Generator().manual_seed(seed)
    jobs = [
        (ids, number)
        for number, kind in enumerate(KINDS)
        for ids in training_prompts(tokenizer, kind, round(rows * SHARES[kind]), seed)
    ]
    jobs.sort(key=lambda job: (job[1] == KINDS.index("chat"), len(job[0])))
    done = []
    for first in range(0, len(jobs), 128):
        batch = jobs[first : first + 128]
        prompts, draws = [ids for ids, _ in batch], torch.randint(12, (len(batch),), generator=generator).tolist()
        choices = [OPENING_STARTS if len(ids) < SHORTEST else SAMPLED_STARTS for ids in prompts]
        starts = [choice[draw % len(choice)] for choice, draw in zip(choices, draws, strict=True)]
        done += continue_rows(teacher, prompts, new_tokens, starts, tokenizer.eos_token_id, generator)
    shard = shard_of(done, [len(job[0]) for job in jobs], [job[1] for job in jobs])
    partial = path.with_suffix(".part")
    save_file(shard, partial)
    os.replace(partial, path)
    return len(shard["ids"])


def check_folder(name):
    """Raises UserError where no model is in that folder."""
    if not (pathlib.Path(name) / "config.json").exists():
        raise UserError(f"--target {name}: no folder of a model; python -m spec_models.embedded prints the embedded target's")


def parse_args(argv):
    parser = Parser(description=__doc__, formatter_class=Help)
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument(
        "--out", required=True, type=pathlib.Path, help="folder for the shards; those that are there are kept"
    )
    parser.add_argument("--shards", type=at_least(1), default=20, help="shards wanted in the folder")
    parser.add_argument("--rows", type=at_least(1), default=256, help="rows a shard, in batches of 128")
    parser.add_argument("--new-tokens", type=at_least(1), default=NEW_TOKENS, help="tokens continued a row")
    parser.add_argument("--threads", type=at_least(1), default=1, help="threads of the arithmetic")
    return parser.parse_args(argv)


@command
def main(argv=None):
    args = parse_args(argv)
    check_folder(args.target)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    if all((args.out / f"shard-{number:04d}.safetensors").exists() for number in range(args.shards)):
        print(f"{args.out}: {args.shards} shards are there already", file=sys.stderr)
        return 0
    teacher, tokenizer = Teacher(args.target), AutoTokenizer.from_pretrained(args.target)
    for number in range(args.shards):
        path = args.out / f"shard-{number:04d}.safetensors"
        if not path.exists():
            begun = time.process_time()
            tokens = make_shard(teacher, tokenizer, path, number, args.rows, args.new_tokens)
            seconds = time.process_time() - begun
            print(
                f"{path.name}: {tokens} tokens, {tokens / seconds:.0f} a CPU second, {(args.shards - number - 1) * seconds / 60:.1f} CPU minutes left",
                file=sys.stderr,
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
