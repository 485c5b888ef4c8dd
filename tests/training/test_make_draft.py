"""A small random-weight Qwen2 goes through all of making a draft: data, trial, training, a stop and a resume, a plain
folder."""

import json
import os
import signal

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from draft_training import make_draft
from draft_training import train as training
from draft_training.make_draft import candidates, prediction
from draft_training.teacher import Teacher

TEMPLATE = (
    "{% for turn in messages %}<s>{{ turn['role'] }}: {{ turn['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def letters(template=TEMPLATE):
    """One id a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    fast.chat_template = template
    return fast


def qwen2(**changes):
    torch.manual_seed(5)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    config = Qwen2Config(
        **{**sizes, **heads, "initializer_range": 0.3, "eos_token_id": 257, "bos_token_id": 256, **changes}
    )
    model = Qwen2ForCausalLM(config)
    for layer in model.model.layers:  # as a trained one has them: a fresh model's are 0, and a lost bias would not show
        torch.nn.init.normal_(layer.self_attn.q_proj.bias, std=0.5)
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=0.5)
    return model


def folder_of(path, model, tokenizer):
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("target"), qwen2(), letters())


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.jsonl"
    asked = [f"Tell me the {number}th thing about {word}." for number in range(12) for word in ("rain", "iron", "rye")]
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in asked))
    return path


def make(target, out, *more, hours="0.003"):
    return make_draft.main(
        ["--target", str(target), "--out", str(out), "--hours", hours, "--rows", "16", "--threads", "1", *more]
    )


def test_from_a_target_to_a_folder_that_drafts(target, mine, tmp_path, capsys):
    assert make(target, tmp_path / "my-draft", "--prompts", str(mine), "--tokens", "1500", "--new-tokens", "16") == 0
    assert "| mean5 |" in (printed := capsys.readouterr().out) and "| file |" in printed
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "my-draft").eval()
    assert type(draft) is Qwen2ForCausalLM and draft.config.num_hidden_layers == 3
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "my-draft", target))
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template
    ids = torch.tensor([[5, 9, 40, 77]])
    alone = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=draft), alone)
    card = json.loads((tmp_path / "my-draft" / "draft_card.json").read_text())
    assert card["steps"] > 0 and card["data_tokens"] > 0 and card["cost"] > 0
    cut = make_draft.training.trainable(model, card["layers"])
    assert not torch.equal(cut.model.norm.weight, draft.model.norm.weight), "it was trained"
    assert torch.equal(cut.lm_head.weight, draft.lm_head.weight), "the head is the target's own"


def test_a_stopped_run_goes_on_where_it_was(target, tmp_path, monkeypatch, capsys):
    """Ctrl-C while layers are tried; --resume must neither write the data again nor take other settings."""
    out, few = tmp_path / "d", ["--tokens", "900", "--new-tokens", "8"]
    monkeypatch.setattr(make_draft, "choose_layers", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert make(target, out, *few) == 130 and not out.exists()
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "d.work" / "data").glob("*.safetensors")}
    monkeypatch.undo()
    assert make(target, out, *few) == 2 and "--resume" in capsys.readouterr().err
    assert (
        make(target, out, *few, "--resume", "--layers", "0,3") == 2
        and "--layers was another" in capsys.readouterr().err
    )
    assert make(target, out, *few, "--resume") == 0 and (out / "config.json").exists()
    assert shards == {path: path.stat().st_mtime_ns for path in (tmp_path / "d.work" / "data").glob("*.safetensors")}


def test_ctrl_c_while_training_keeps_what_was_learnt(target, tmp_path, monkeypatch, capsys):
    out, few, whole, calls = (
        tmp_path / "d",
        ["--tokens", "900", "--new-tokens", "8", "--layers", "0,3"],
        training.one_step,
        [],
    )

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return whole(*args)

    monkeypatch.setattr(training, "one_step", interrupted)
    assert make(target, out, *few) == 130 and "--resume" in capsys.readouterr().err and not out.exists()
    saved = torch.load(tmp_path / "d.work" / "train" / "state.pt", weights_only=True)
    assert saved["progress"]["step"] == 3 == len(calls)
    assert make(target, out, *few, "--resume") == 0
    assert json.loads((out / "draft_card.json").read_text())["steps"] == len(calls) > 3, "no step was taken twice"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_teacher_is_each_family(family):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "tie_word_embeddings": False}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **heads)).eval()
    for name, weights in model.named_parameters():  # fresh biases are 0 and norms 1: a teacher without them would pass
        if weights.dim() == 1:
            torch.nn.init.normal_(weights, 1.0 if "norm" in name else 0.0, 0.5)
    teacher, ids = Teacher(model, torch.float32), torch.randint(0, 64, (2, 9))
    cache, pad = teacher.new_cache(2, 9), torch.zeros(2, dtype=torch.long)
    mine = torch.cat([teacher.hidden(ids[:, :6], cache, 0, pad), teacher.hidden(ids[:, 6:], cache, 6, pad)], dim=1)
    with torch.inference_mode():
        assert torch.allclose(mine, model.model(ids).last_hidden_state, atol=1e-4)
        assert torch.equal(teacher.top(mine.flatten(0, 1))[1][:, 0], model(ids).logits.argmax(-1).flatten())


def gpt2(path):
    return folder_of(path, GPT2LMHeadModel(GPT2Config(vocab_size=260, n_embd=16, n_layer=2, n_head=2)), letters())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("gpt2", "a 'gpt2' cannot be cut"),
        ("one layer", "it has one layer"),
        ("no template", "no chat template"),
        ("empty prompts", "--prompts mine.jsonl: no prompt in it"),
        ("no room", "GB are needed"),
        ("nothing there", "--target"),
        ("layers", "--layers: the target has layers 0 to 3"),
        ("there already", "already there"),
        ("keep out", "--keep-out typo.jsonl: No such file"),
    ],
)
def test_a_mistake_is_one_line(case, words, target, tmp_path, capsys, monkeypatch):
    out, more, where = tmp_path / "out", [], tmp_path / "other"
    if case == "gpt2":
        target = gpt2(where)
    elif case == "one layer":
        target = folder_of(where, qwen2(num_hidden_layers=1), letters())
    elif case == "no template":
        target = folder_of(where, qwen2(), letters(None))
    elif case == "empty prompts":
        (tmp_path / "mine.jsonl").write_text("\n")
        more = ["--prompts", str(tmp_path / "mine.jsonl")]
    elif case == "no room":
        more = ["--tokens", "1000000000"]
        monkeypatch.setattr(make_draft.shutil, "disk_usage", lambda _: type("Disk", (), {"free": 10**9}))
    elif case == "nothing there":
        target = where
    elif case == "keep out":  # read when the data is there: by then hours are gone
        more = ["--keep-out", str(tmp_path / "typo.jsonl")]
        monkeypatch.setattr(make_draft, "load_target", lambda _: pytest.fail("a model was loaded first"))
    elif case == "layers":
        more = ["--layers", "0,9"]
    else:
        out.mkdir()
    assert make(target, out, *more) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert err[-1].startswith("error: ") and words in err[-1]


@pytest.mark.parametrize("out", ["", ".", "/", "a/.."])
def test_a_draft_needs_a_folder_of_its_own(out, target, capsys):
    assert make(target, out) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("error: --out") and "name the new folder" in line


def test_the_cuts_that_are_tried_are_layers_of_the_target():
    assert [0, 1, 23] in candidates(30)
    for layers in range(2, 40):
        for cut in candidates(layers):
            assert max(cut) < layers and len(set(cut)) == len(cut) < layers


def test_prediction_against_arithmetic():
    k, gain = prediction(0.8, 0.1)
    assert gain == pytest.approx(max((1 - 0.8 ** (n + 1)) / 0.2 / (1 + 0.1 * n) for n in range(1, 9))) and k == 6
    assert prediction(0.1, 0.5) == (0, 1.0)
