"""Faults that were once here, each met in use: what must happen instead."""

from __future__ import annotations

import json
import os

from spec_common import UserError, is_out_of_memory, pick_device

import pytest
from safetensors.torch import load_file, save_file

import spec_decode
import spec_drafts
import spec_precondition
import tiny
from spec_decode import counts
from spec_harness.prompts import read_prompts
from spec_harness.results import ResultFile


def refused(main, argv, capfd) -> str:
    """The one line that `main` says as it refuses; nothing on the way may ask or trace back."""
    code = main([str(word) for word in argv])
    lines = capfd.readouterr().err.strip().splitlines()
    assert code == 2
    assert lines[-1].startswith("error: ")
    return lines[-1]


def test_what_is_no_plain_file_is_never_replaced(pair, tmp_path, capfd):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "--results" in refused(spec_decode.main, [*pair[:-1], pipe], capfd)
    assert pipe.is_fifo()


def test_two_drafts_in_folders_of_one_name_are_both_measured(target_folder, tmp_path, results):
    """Rows are found by the draft's name: one must not be shown the other's figures."""
    same = [
        tiny.save(model, tmp_path / place / "draft")
        for place, model in (("a", tiny.llama()), ("b", tiny.always_wrong(tiny.llama())))
    ]
    argv = [
        "--device",
        "cpu",
        "--target",
        target_folder,
        "--drafts",
        *same,
        "--n-tokens",
        "8",
        "--repeats",
        "1",
        "--results",
        str(results),
    ]
    assert spec_drafts.main(argv) == 0
    rows = json.loads(results.read_text())["summary"]["drafts"]
    assert [row["acceptance_rate"] for row in rows] == [1.0, 0.0]


def test_a_checkpoint_that_lacks_weights_is_refused(pair, tmp_path, capfd):
    """transformers would fill them in at random and write on."""
    folder = tiny.save(tiny.llama(), tmp_path / "holes")
    tensors = {
        name: tensor for name, tensor in load_file(f"{folder}/model.safetensors").items() if "lm_head" not in name
    }
    save_file(tensors, f"{folder}/model.safetensors", metadata={"format": "pt"})
    line = refused(spec_decode.main, [*pair, "--target", folder], capfd)
    assert "--target" in line and "incomplete" in line


def test_a_chat_template_that_refuses_is_one_line(pair, tmp_path, capfd):
    tokenizer = tiny.words()
    tokenizer.chat_template = "{{ raise_exception('a system turn is needed') }}"
    folder = tiny.save(tiny.llama(), tmp_path / "strict", tokenizer)
    assert "--chat" in refused(spec_decode.main, [*pair, "--target", folder, "--chat", "--prompt", "w1 w2"], capfd)


CODE = "from transformers import LlamaConfig, LlamaForCausalLM\nclass C(LlamaConfig):\n    model_type = 'own'\nclass M(LlamaForCausalLM):\n    config_class = C\n"


@pytest.fixture
def own_code(tmp_path) -> str:
    """A checkpoint that brings its own classes."""
    folder = tiny.save(tiny.llama(), tmp_path / "own")
    (tmp_path / "own" / "own.py").write_text(CODE)
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    config.update(model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    return folder


def test_code_that_comes_with_a_model_runs_only_when_asked_and_never_asks(pair, own_code, capfd, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    assert "--trust-remote-code" in refused(spec_decode.main, [*pair, "--target", own_code], capfd)
    argv = [
        "--device",
        "cpu",
        "--n-tokens",
        "4",
        "--repeats",
        "1",
        "--warmup",
        "0",
        "--prompt",
        "w1 w2",
        "--results",
        pair[-1],
    ]
    assert spec_decode.main([*argv, "--target", own_code, "--draft", own_code, "--trust-remote-code"]) == 0


def test_resume_refuses_another_text_of_the_same_name(pair, tmp_path, capfd):
    file = tmp_path / "prompts.txt"
    for text, code in (("w1 w2", 0), ("w1 w2 w3", 2)):
        file.write_text(text)
        assert spec_decode.main([*pair, "--prompt-file", str(file), "--resume"]) == code
    assert "prompt_ids" in capfd.readouterr().err


def test_a_prompt_that_begins_like_a_path_is_kept_whole(pair, results):
    assert spec_decode.main([*pair, "--prompt", "/x/b w1 w2"]) == 0
    assert json.loads(results.read_text())["config"]["prompt"] == "/x/b w1 w2"


def test_a_second_run_on_the_same_file_is_refused(tmp_path):
    first = ResultFile(tmp_path / "one.json", "spec_bench", {}, {}, None)
    with first, pytest.raises(UserError, match="another run"):
        ResultFile(tmp_path / "one.json", "spec_bench", {}, {}, None)
    ResultFile(tmp_path / "one.json", "spec_bench", {}, {}, None)


def test_guesses_behind_an_end_token_are_not_blamed_on_the_cache():
    """A model drafting for itself that ends inside a block: nothing was rejected."""
    target = tiny.llama()
    end = frozenset([tiny.greedy(target, tiny.PROMPT, 3)[2]])
    done = tiny.speculated(target, target, n=20, k=5, ends=end)
    row = counts(done, 5)
    assert row["alpha"] == 1.0 and row["rejections"] == 0
    assert row["acceptance_rate"] < 1
    assert spec_decode.check_self_draft(tiny.task(target, n=20, ends=end), done, "x") == 0


def test_positions_that_were_never_judged_do_not_count_against_a_draft():
    target = tiny.llama()
    given = counts(tiny.speculated(target, target, n=6, k=3), 3)["acceptance_per_position_given_the_last"]
    assert set(given) == {1.0}


def test_rounds_of_assisted_generation_that_differ_fail_the_run(pair, monkeypatch, capsys):
    monkeypatch.setattr("spec_harness.reference.RoundLengths.rounds", property(lambda self: [99]))
    assert spec_decode.main([*pair, "--vs-transformers"]) == 1
    assert "rounds of assisted generation" in capsys.readouterr().out


def test_a_sweep_of_which_nothing_could_be_measured_fails(pair, monkeypatch, results):
    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: Cannot allocate memory")

    monkeypatch.setattr(spec_decode, "run_speculative", full)
    assert spec_decode.main(pair) == 1
    document = json.loads(results.read_text())
    assert document["status"] == "failed"
    assert is_out_of_memory(RuntimeError(document["rows"][-1]["error"]))


@pytest.mark.parametrize("name", ["cpu:", "cpu:5", "auto:7", "cuda:x", "cpu:²"])
def test_a_device_number_that_means_nothing_is_refused(name):
    with pytest.raises(UserError, match="--device"):
        pick_device(name)


@pytest.mark.parametrize("value", ["~nosuchuser/x", "x" * 300])
@pytest.mark.parametrize("flag", ["--target", "--draft", "--results", "--prompt-file"])
def test_names_that_no_file_system_takes_are_one_line(pair, flag, value, capfd):
    assert flag in refused(spec_decode.main, [*pair, flag, value], capfd)


def test_prompts_are_read_as_people_save_them(tmp_path):
    """A byte-order mark, Windows line ends, and separators that JSON allows inside a string."""
    plain, lines = tmp_path / "a.txt", tmp_path / "b.JSONL"
    plain.write_bytes("\ufeffw1 w2".encode())
    lines.write_bytes('\ufeff{"prompt": null, "text": "w1\u2028w2"}\r\n"w3"\r\n'.encode())
    assert read_prompts(plain)[0][1] == "w1 w2"
    assert [text for _, text in read_prompts(lines)] == ["w1\u2028w2", "w3"]


def test_plain_layers_are_timed_in_the_same_turns(target_folder, results, monkeypatch):
    monkeypatch.setattr("spec_harness.costs.READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr("spec_harness.costs.SQUARE", {"cpu": 64})
    argv = [
        "--device",
        "cpu",
        "--model",
        target_folder,
        "--tokens",
        "1,2",
        "--context",
        "8",
        "--repeats",
        "3",
        "--results",
        str(results),
    ]
    assert spec_precondition.main([*argv, "--vs-plain"]) == 0
    rows = json.loads(results.read_text())["rows"]
    assert all(len(row["plain_seconds"]) == len(row["seconds"]) == 3 and row["of_plain"] > 0 for row in rows)
