"""Teacher data: the fast teacher is the target, rows are kept whole, held-out prompts stay out."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

import tiny
from draft_training import train
from draft_training.data import shard_of
from draft_training.prompts import HELD_OUT, KINDS, training_texts
from draft_training.shards import Shards
from draft_training.teacher import Teacher, continue_rows
from draft_training.train import distill_loss, rate, trainable


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    tiny.tied(3, eos_token_id=96).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rows(folder):
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], [11]]
    return prompts, continue_rows(
        Teacher(folder, torch.float32), prompts, 12, [0, 0, 0], 96, torch.Generator().manual_seed(0)
    )


def test_teacher_writes_what_generate_writes(folder, rows):
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    for prompt, (ids, hidden, best) in zip(*rows, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=11, do_sample=False
        )[0]
        kept = ids.tolist()
        assert kept == expected[: len(kept)].tolist()
        with torch.inference_mode():
            states = model.model(ids[None].long()).last_hidden_state[0]
        assert torch.allclose(states, hidden.float(), atol=5e-3)
        assert torch.equal(best[:-1, 0][len(prompt) - 1 :].long(), ids[len(prompt) :].long())


def test_shards_serve_every_row_once(rows, tmp_path):
    prompts, done = rows
    save_file(shard_of(done, [len(prompt) for prompt in prompts], [0, 1, 2]), tmp_path / "shard-0.safetensors")
    shards = Shards(tmp_path, 1.0)
    batches = shards.epoch(1, 16)
    assert sorted(row for batch in batches for row in batch) == sorted(shards.index)
    assert shards.tokens == sum(len(row[0]) for row in done)
    ids, place, hidden, top = shards.tensors([shards.index[1], shards.index[0]])
    assert ids.flatten()[place].tolist() == done[1][0].tolist() + done[0][0].tolist()
    assert len(hidden) == len(top) == len(place)


def test_a_prompt_counts_as_asked_and_a_continuation_always(rows, tmp_path):
    prompts, done = rows
    save_file(shard_of(done, [len(prompt) for prompt in prompts], [0, 1, 2]), tmp_path / "shard-0.safetensors")
    shards = Shards(tmp_path, 0.0)
    ids, place, *_ = shards.tensors([shards.index[1]])
    assert place.tolist() == list(range(len(prompts[1]) - 1, len(done[1][0]))), (
        "the last prompt id foretells the first new one"
    )
    shards.prompt_share, drawn = 0.3, 0
    for seed in range(100):
        drawn += len(shards.tensors([shards.index[1]], torch.Generator().manual_seed(seed))[1]) - len(place)
    assert 0.2 < drawn / 100 / (len(prompts[1]) - 1) < 0.4


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
    top, extra = (states @ embedding.T).topk(16).indices, torch.arange(97)
    mix = {"hard": 0.0, "state": 1.0}
    same, parts = distill_loss(states, states, top, embedding, extra, mix)
    other, _ = distill_loss(states + 0.5 * torch.randn(40, 48), states, top, embedding, extra, mix)
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
    seen = set().union(
        *(grams(text) for seed in range(3) for text, _ in itertools.islice(training_texts(kind, seed), 300))
    )
    assert not held & seen


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--layers", "0,9"], "--layers: the target has layers 0 to 2"),
        (["--layers", "0,0"], "--layers"),
        (["--minutes", "0"], "--minutes"),
        (["--minutes", "nan"], "--minutes"),
        (["--batch-tokens", "-1"], "--batch-tokens"),
        (["--grow", "README.md"], "--grow README.md: "),
        ([], "--data: no shard with a row"),
    ],
)
def test_a_mistake_in_training_is_one_line(wrong, words, folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda _: None))
    monkeypatch.setattr(train, "held_out", lambda *_: [])
    monkeypatch.setattr(train, "kept_out_runs", lambda *_: set())
    (tmp_path / "README.md").write_text("no draft")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    try:
        code = train.main(["--target", str(folder), "--data", "data", "--out", "out", "--layers", "0,2", *wrong])
    except SystemExit as left:
        code = left.code
    err = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and err[-1].startswith("error: ") and words in err[-1]
