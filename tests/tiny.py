"""Tiny random models that write lively text, three kinds of draft, and a greedy oracle that shares no code with the suite.

`initializer_range` is 0.4 and tables are untied: at the usual 0.02 a random model repeats one token, which hides faults.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json

import torch
import transformers as T
from tokenizers import Tokenizer, models, pre_tokenizers

from spec_harness import results
from spec_harness.arms import Method, Task, draft_model, run_baseline, run_speculative
from spec_loop import forward

BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PROMPT = (5, 9, 3, 17, 2, 11)
WINDOW = {"sliding_window": 8, "head_dim": 8}
GEMMA3_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def build(config, seed: int = 0, dtype: torch.dtype = torch.float32):
    torch.manual_seed(seed)
    return T.AutoModelForCausalLM.from_config(config).to(dtype).eval()


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    return build(T.LlamaConfig(**{**BASE, **changes}), seed, dtype)


def gpt2(seed: int = 0, **changes):
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.4}
    none = {"bos_token_id": None, "eos_token_id": None}
    return build(T.GPT2Config(**{**sizes, **none, "tie_word_embeddings": False, **changes}), seed)


def qwen2(seed: int = 0, **changes):
    return build(T.Qwen2Config(**{**BASE, **changes}), seed)


def tied(layers: int, seed: int = 3, **changes):
    """A Llama as the targets are whose drafts are trained here: tied, six heads over two, an odd vocabulary."""
    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": layers, "num_attention_heads": 6, "head_dim": 8}
    return llama(seed, **{**sizes, "tie_word_embeddings": True, "initializer_range": 0.35, **changes})


# Every prompt plus text in the tests is far longer than the windows of 8, where keys would be dropped.
ARCHITECTURES = {
    "llama": lambda: llama(),
    "qwen2": lambda: qwen2(),
    "gpt2": lambda: gpt2(),
    "mistral, window 8": lambda: build(T.MistralConfig(**BASE, **WINDOW)),
    "gemma2, window 8": lambda: build(T.Gemma2Config(**BASE, **WINDOW, query_pre_attn_scalar=8)),
    "gemma3, window 8": lambda: build(
        T.Gemma3TextConfig(
            **{**BASE, "num_hidden_layers": 3}, **WINDOW, query_pre_attn_scalar=8, layer_types=GEMMA3_LAYERS
        )
    ),
    "gpt-oss, window 8": lambda: build(T.GptOssConfig(**BASE, **WINDOW, num_local_experts=4, num_experts_per_tok=2)),
    "mixtral": lambda: build(T.MixtralConfig(**BASE, num_local_experts=4, num_experts_per_tok=2)),
}


@functools.cache
def model(name: str):
    return ARCHITECTURES[name]()


# -------------------------------------------------------------------------------------------------------------- drafts


@torch.no_grad()
def near(target, noise: float = 0.1, seed: int = 1):
    """A draft that agrees only now and then."""
    torch.manual_seed(seed)
    draft = copy.deepcopy(target)
    for parameter in draft.parameters():
        if parameter.numel() > 1:
            parameter.add_(torch.randn_like(parameter) * noise * parameter.std())
    return draft


@torch.no_grad()
def always_wrong(target):
    """A draft whose every guess is the id after the one the target would write."""
    draft = copy.deepcopy(target)
    head = draft.get_output_embeddings()
    head.weight.copy_(head.weight.roll(1, 0))
    return draft


# -------------------------------------------------------------------------------------------------------------- oracle


@torch.inference_mode()
def greedy(target, prompt, n: int, ends=frozenset()) -> list[int]:
    """The target's own text: everything recomputed for every token, no cache, none of the suite's code."""
    ids = list(prompt)
    while len(ids) < len(prompt) + n and not (len(ids) > len(prompt) and ids[-1] in ends):
        ids.append(int(target(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@functools.lru_cache(maxsize=64)
def greedy_once(target, prompt: tuple, n: int) -> tuple:
    return tuple(greedy(target, prompt, n))


# ----------------------------------------------------------------------------------------------------------- our loops


def task(target, prompt=PROMPT, n: int = 30, **options) -> Task:
    return Task(target, torch.tensor([list(prompt)]), n, **options)


def method(task: Task, draft, k: int = 3, rule=None, policy=None, drafter=None) -> Method:
    """The draft model's, or with another of its three parts."""
    plain = draft_model(task, draft, k, rule)
    return Method(drafter or plain.drafter, policy or plain.policy, plain.rule)


def fed(model, ids, cache, rows: int = 1) -> torch.Tensor:
    """Feed what of `ids` (1, n) the cache lacks. Returns the last `rows` rows of logits."""
    return forward(model, ids[:, cache.get_seq_length() :], cache, rows).logits


def turns(repeats: int, warmup: int = 0, **options):
    """What a measurement reads of a script's options."""
    return argparse.Namespace(**{"repeats": repeats, "warmup": warmup, "allow_near_ties": False, **options})


def speculated(target, draft, prompt=PROMPT, n: int = 30, k: int = 3, rule=None, policy=None, drafter=None, **options):
    """What the loop wrote and counted."""
    one = task(target, prompt, n, **options)
    return run_speculative(one, method(one, draft, k, rule, policy, drafter)).done


def plainly(target, prompt=PROMPT, n: int = 30, rule=None, **options):
    """What our baseline wrote and counted."""
    return run_baseline(task(target, prompt, n, **options), rule).done


def words(reverse: bool = False, n: int = 60, first: int = 4) -> T.PreTrainedTokenizerFast:
    """A word-level tokenizer: w0, w1, ... are ids 4, 5, ..."""
    names = [f"w{i}" for i in range(n)]
    ids = {word: i + first for i, word in enumerate(names[::-1] if reverse else names)}
    ids.update({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3})
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return T.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def save(model, folder, tokenizer=None) -> str:
    model.save_pretrained(folder)
    (tokenizer or words()).save_pretrained(folder)
    return str(folder)


def signed(document: dict) -> dict:
    """A result as a script writes it."""
    return {**document, "measured_sha256": results.measured_hash(document)}


def result_file(rows: list[dict], summary: dict) -> str:
    """The text of a result file of those parts."""
    return json.dumps(signed({"environment": {}, "config": {}, "rows": rows, "summary": summary}))


def killed_at(path, rows: list[dict]) -> None:
    """The result file as a run that was killed when it had those rows leaves it."""
    document = {**json.loads(path.read_text()), "rows": rows, "status": "running", "summary": {}}
    path.write_text(json.dumps(signed(document)))
