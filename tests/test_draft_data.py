"""Teacher data: the fast teacher is the target, rows are kept whole, held-out prompts stay out."""

import itertools

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from draft_data import Shards, Teacher, continue_rows, shard_of
from draft_prompts import HELD_OUT, KINDS, training_texts
from train_draft import distill_loss, rate, trainable


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        initializer_range=0.35,
        eos_token_id=96,
    )
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rows(folder):
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]
    return prompts, continue_rows(Teacher(folder, torch.float32), prompts, 12, [0, 0, 0], 96, torch.Generator().manual_seed(0))


def test_teacher_writes_what_generate_writes(folder, rows):
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    for prompt, (ids, hidden, best) in zip(*rows, strict=True):
        expected = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=11, do_sample=False)[0]
        kept = ids.tolist()
        assert kept == expected[: len(kept)].tolist()
        with torch.inference_mode():
            states = model.model(ids[None].long()).last_hidden_state[0]
        assert torch.allclose(states, hidden.float(), atol=5e-3)
        assert torch.equal(best[:-1, 0][len(prompt) - 1 :].long(), ids[len(prompt) :].long())


def test_shards_serve_every_row_once(rows, tmp_path):
    prompts, done = rows
    save_file(shard_of(done, [len(prompt) for prompt in prompts], [0, 1, 2]), tmp_path / "shard-0.safetensors")
    shards = Shards(tmp_path, 0.3)
    batches = shards.epoch(1, 16)
    assert sorted(row for batch in batches for row in batch) == sorted(shards.index)
    assert shards.tokens == sum(len(row[0]) for row in done)
    ids, place, hidden, top, weight = shards.tensors([shards.index[1], shards.index[0]])
    assert ids.flatten()[place].tolist() == done[1][0].tolist() + done[0][0].tolist()
    assert len(hidden) == len(top) == len(weight) == len(place)
    assert weight.tolist().count(pytest.approx(0.3)) == len(prompts[1]) + len(prompts[0]) - 2


def test_new_shards_join_in(rows, tmp_path):
    prompts, done = rows
    shard = shard_of(done, [len(prompt) for prompt in prompts], [0, 1, 2])
    save_file(shard, tmp_path / "shard-0.safetensors")
    shards = Shards(tmp_path, 0.3)
    save_file(shard, tmp_path / "shard-1.safetensors")
    shards.refresh()
    shards.refresh()
    assert len(shards.index) == 2 * len(done)


def test_loss_is_least_at_the_teacher(folder):
    model = LlamaForCausalLM.from_pretrained(folder)
    embedding, states = model.model.embed_tokens.weight, torch.randn(40, 48)
    top, extra, weight = (states @ embedding.T).topk(16).indices, torch.arange(97), torch.ones(40)
    mix = {"hard": 0.0, "state": 1.0}
    same, parts = distill_loss(states, states, top, weight, embedding, extra, mix)
    other, _ = distill_loss(states + 0.5 * torch.randn(40, 48), states, top, weight, embedding, extra, mix)
    assert abs(same.item()) < 1e-4 < other.item()
    assert parts["hit"] == parts["weight"] == 40


def test_only_layers_and_norm_train(folder):
    draft = trainable(LlamaForCausalLM.from_pretrained(folder), [0, 2])
    frozen = {name for name, weights in draft.named_parameters() if not weights.requires_grad}
    assert frozen == {"model.embed_tokens.weight"}


def test_rate_is_a_trapezoid():
    rates = [rate(done, 1.0, step, 10, 0.25) for done, step in ((0, 0), (0.1, 9), (0.5, 50), (0.875, 90), (1, 100))]
    assert rates == pytest.approx([0.1, 1, 1, 0.5, 0])


def grams(text, n=7):
    words = text.replace('"', " ").replace(",", " , ").split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_prompts_share_no_seven_words_with_training(kind):
    held = set().union(*(grams(text) for texts in HELD_OUT.values() for text in texts))
    seen = set().union(*(grams(text) for seed in range(3) for text, _ in itertools.islice(training_texts(kind, seed), 300)))
    assert not held & seen
