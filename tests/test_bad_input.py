"""A user's mistake is one line on stderr that names the flag, and exit code 2, before anything slow. Never a traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from spec_common import HERE

import pytest
import torch
import transformers as T

import spec_bench
import spec_decode
import spec_drafts
import spec_one_pass
import spec_precondition
import tiny
from spec_harness import options
from spec_models import linear
from spec_models import load as loading
from workloads import WORKLOADS


def refused(main, argv, capfd) -> str:
    """The one line that `main` says as it refuses."""
    try:
        code = main([str(word) for word in argv])
    except SystemExit as left:
        code = left.code
    said = capfd.readouterr()
    lines = said.err.strip().splitlines()
    assert code == 2, said
    assert len(lines) == 1 and lines[0].startswith("error: "), said.err
    assert "Traceback" not in said.err + said.out
    return lines[0]


def says(line: str, *words: str) -> None:
    for word in words:
        assert word in line, line


# ------------------------------------------------------------------------------------------- before anything is loaded


@pytest.fixture
def nothing_loads(monkeypatch):
    for module in (options, spec_drafts):
        monkeypatch.setattr(module, "load_pair", lambda *a, **b: pytest.fail("models were loaded first"))
    for module in (spec_one_pass, spec_precondition):
        monkeypatch.setattr(module, "load", lambda *a, **b: pytest.fail("a model was loaded first"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.skipif(sys.platform != "linux", reason="where a process is in its imports is read from /proc")
@pytest.mark.parametrize("script", [["spec_decode.py"], ["-m", "spec_models.embedded"], ["-m", "draft_training.make_draft"]])
def test_ctrl_c_during_imports_is_one_line(script):
    """Sent as soon as torch's library is being loaded, seconds before a script's own code begins."""
    process = subprocess.Popen(
        [sys.executable, *script, "--help"], cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    said, err = process.communicate(timeout=120)
    assert (process.returncode, said, err.strip()) == (130, "", "interrupted before anything was begun")


def test_a_folder_that_cannot_be_written_is_told_before_anything_loads(nothing_loads, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    line = refused(spec_decode.main, ["--results", tmp_path / "a" / "b.json"], capfd)
    says(line, "--results", "cannot be written; name another place")


SCRIPTS = [spec_decode.main, spec_bench.main, spec_drafts.main, spec_one_pass.main, spec_precondition.main]


@pytest.mark.parametrize("main", SCRIPTS)
@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--device", "gpu"], ["--device gpu: unknown", "cpu", "cuda", "mps", "xpu"]),
        (["--device", "cuda"], ["--device cuda: not on this machine; it has", "cpu"]),
        (["--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
        (["--repeats", "0"], ["--repeats", "'0' is not a whole number of 1 or more"]),
        (["--warmup", "-1"], ["--warmup", "'-1' is not a whole number of 0 or more"]),
        (["--threads", "two"], ["--threads", "'two' is not a whole number"]),
        (["--cpu-linear", "fast"], ["--cpu-linear", "half", "packed", "plain"]),
        (["--no-such-flag"], ["--no-such-flag", "see --help"]),
        (["--repeat", "3"], ["--repeat 3", "did you mean --repeats?"]),
    ],
)
def test_a_wrong_shared_option_is_refused_by_every_script(main, argv, words, nothing_loads, capfd):
    says(refused(main, argv, capfd), *words)


@pytest.mark.parametrize(
    ("main", "argv", "words"),
    [
        (spec_decode.main, ["-k", "-1"], ["-k/--k", "'-1' is not a whole number of 0 or more"]),
        (spec_decode.main, ["-k", "1.5"], ["-k/--k", "1.5"]),
        (spec_decode.main, ["--n-tokens", "0"], ["--n-tokens", "1 or more"]),
        (spec_decode.main, ["--workload", "poetry"], ["--workload poetry: unknown", *WORKLOADS]),
        (spec_decode.main, ["--prompt", ""], ["--prompt: empty"]),
        (spec_decode.main, ["--prompt", " \n "], ["--prompt: empty"]),
        (spec_decode.main, ["--prompt", "a", "--workload", "code"], ["--workload", "--prompt"]),
        (spec_decode.main, ["--prompt-file", "/no/such/file.txt"], ["--prompt-file file.txt", "No such file", "name a text"]),
        (spec_decode.main, ["--target", "somewhere/else"], ["--draft: missing"]),
        (spec_bench.main, ["--ks", "0,1"], ["--ks", "'0' is not a whole number of 1 or more"]),
        (spec_bench.main, ["--ks", ","], ["--ks", "empty"]),
        (spec_bench.main, ["--workload", "poetry"], ["--workload poetry: unknown", *WORKLOADS]),
        (spec_bench.main, ["--workloads", "code", "poetry"], ["--workload", "poetry: unknown", *WORKLOADS]),
        (spec_drafts.main, ["--workload", "poetry"], ["--workload poetry: unknown", *WORKLOADS]),
        (spec_drafts.main, ["--target", "somewhere/else"], ["--drafts: missing"]),
        (spec_drafts.main, ["--drafts", "a", "a"], ["--drafts", "twice"]),
        (spec_drafts.main, ["-k", "0"], ["-k/--k", "1 or more"]),
        (spec_one_pass.main, ["--text", " "], ["--text: empty"]),
        (spec_one_pass.main, ["--truncate", "0"], ["--truncate", "1 or more"]),
        (spec_precondition.main, ["--tokens", "0,4"], ["--tokens", "1 or more"]),
        (spec_precondition.main, ["--context", "0"], ["--context", "1 or more"]),
        (spec_precondition.main, ["--alpha", "72"], ["--alpha", "from 0 to 1"]),
    ],
)
def test_a_wrong_option_of_a_script_is_refused_before_loading(main, argv, words, nothing_loads, capfd):
    says(refused(main, argv, capfd), *words)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.txt", "  \n", ["no prompt in it; give some text"]),
        ("p.jsonl", "", ["no prompt in it; give some text"]),
        ("p.jsonl", '"fine"\n{"prompt": 3}\n', ["p.jsonl:2", "prompt, text, question"]),
        ("p.jsonl", '"fine"\n\n{broken\n', ["p.jsonl:3", "column 2"]),
    ],
)
def test_a_prompt_file_that_cannot_be_used_names_the_line(name, text, words, tmp_path, nothing_loads, capfd):
    (tmp_path / name).write_text(text)
    says(refused(spec_decode.main, ["--prompt-file", tmp_path / name], capfd), f"--prompt-file {name}", *words)


@pytest.mark.parametrize("what", ["folder", "bytes"])
def test_a_prompt_file_that_is_no_text_is_refused(what, tmp_path, nothing_loads, capfd):
    path = tmp_path / "p.txt"
    path.mkdir() if what == "folder" else path.write_bytes(b"\xff\xfe\x00")
    says(refused(spec_decode.main, ["--prompt-file", path], capfd), "--prompt-file p.txt")


# ------------------------------------------------------------------------------------------------ models that do not load


@pytest.fixture(scope="session")
def shelf(disk):
    """Folders that hold no usable model, by name."""
    shelf = disk / "shelf"
    tokenizer, config = tiny.words(), T.LlamaConfig(**tiny.BASE)

    def folder(name):
        (shelf / name).mkdir(parents=True)
        tokenizer.save_pretrained(shelf / name)
        return shelf / name

    T.T5Config(vocab_size=64, d_model=32, num_layers=2, num_heads=4, d_ff=64, d_kv=8).save_pretrained(
        folder("encoder-decoder")
    )
    config.save_pretrained(folder("no weights"))
    config.save_pretrained(folder("pickled"))
    torch.save(tiny.llama().state_dict(), shelf / "pickled" / "pytorch_model.bin")
    tiny.llama().save_pretrained(folder("half a file"))
    weights = shelf / "half a file" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    (folder("broken config") / "config.json").write_text("{")
    (folder("unknown kind") / "config.json").write_text('{"model_type": "abacus"}')
    code = {"auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}, "model_type": "mine"}
    (folder("own code") / "config.json").write_text(json.dumps(code))
    (shelf / "own code" / "mine.py").write_text("raise SystemExit('code of the model was run')")
    tiny.llama().save_pretrained(shelf / "no tokenizer")
    (shelf / "nothing at all").mkdir()
    (shelf / "broken.gguf").write_bytes(b"GGUF is not what this is")
    tiny.save(
        tiny.build(T.MambaConfig(vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2)),
        shelf / "state space",
    )
    tiny.save(tiny.build(T.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, initializer_range=0.4)), shelf / "bidirectional")  # fmt: skip
    nan = tiny.llama()
    nan.model.norm.weight.data.fill_(float("nan"))
    tiny.save(nan, shelf / "not finite")
    return shelf


@pytest.mark.parametrize("flag", ["--target", "--draft"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("encoder-decoder", ["encoder-decoder", "choose"]),
        ("no weights", ["safetensors"]),
        ("pickled", ["safetensors"]),
        ("half a file", []),
        ("broken config", ["config.json"]),
        ("unknown kind", []),
        ("own code", ["--trust-remote-code"]),
        ("no tokenizer", []),
        ("nothing at all", []),
        ("broken.gguf", []),
        ("state space", ["choose"]),
        ("bidirectional", ["cannot verify blocks"]),
        ("not finite", ["holds values that are not finite", "--dtype"]),
    ],
)
def test_a_model_that_cannot_be_used_is_one_line_naming_its_flag(flag, name, words, shelf, pair, capfd, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("asked a question"))
    says(refused(spec_decode.main, [*pair, flag, shelf / name], capfd), flag, name, *words)


@pytest.mark.parametrize("flag", ["--target", "--draft"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/folder", ["no such file or folder"]),
        ("./nowhere", ["no such file or folder"]),
        ("weights.gguf", ["no such file or folder"]),
        ("org/none", ["offline or out of reach"]),
        ("none", ["offline or out of reach"]),
        ("no--model", []),
        ("two..dots", []),
        ("", ["empty"]),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_at_once(flag, name, words, pair, capfd):
    says(refused(spec_decode.main, [*pair, flag, name], capfd), flag, name, *words)


def test_a_file_given_for_a_folder_is_refused(pair, target_folder, capfd):
    says(
        refused(spec_decode.main, [*pair, "--target", f"{target_folder}/config.json"], capfd),
        "--target",
        "give the folder",
    )


@pytest.mark.parametrize("main", [spec_one_pass.main, spec_precondition.main])
def test_the_scripts_of_one_model_name_its_flag(main, shelf, results, capfd):
    argv = ["--device", "cpu", "--results", results, "--model"]
    says(refused(main, [*argv, shelf / "encoder-decoder"], capfd), "--model", "encoder-decoder")
    says(refused(main, [*argv, "/no/such/folder"], capfd), "--model", "no such file or folder")


def test_a_cut_past_the_last_layer_is_refused(pair, capfd):
    says(refused(spec_decode.main, [*pair, "--draft", "cut:0,7"], capfd), "--draft cut:0,7", "layers 0 to 1")


def test_memory_that_runs_out_while_loading_is_one_line(pair, capfd, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nGPU 0 has ...")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", full)
    says(refused(spec_decode.main, pair, capfd), "--target", "out of memory", "choose a smaller model")


# ---------------------------------------------------------------------------------------------- pairs, prompts and sizes


@pytest.mark.parametrize("main", [spec_decode.main, spec_bench.main])
def test_a_pair_without_a_shared_tokenizer_is_refused(main, pair, disk, capfd):
    other = tiny.save(tiny.llama(1), disk / "other words", tiny.words(reverse=True))
    says(
        refused(main, [*pair, "--draft", other], capfd),
        "--draft",
        "does not share the tokenizer",
        "id 4 is 'w59' to the draft and 'w0'",
    )


def test_a_draft_among_drafts_that_cannot_be_had_is_named_by_the_flag_that_names_it(pair, tmp_path, disk, capfd):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((Path(pair[3]) / "config.json").read_text())
    argv = [*pair[:4], *pair[6:], "--drafts"]
    says(refused(spec_drafts.main, [*argv, "draft-zz"], capfd), "--drafts draft-zz: no such draft")
    says(refused(spec_drafts.main, [*argv, tmp_path / "bare"], capfd), "--drafts", "give a folder with a model.safetensors")


def test_drafts_are_refused_for_their_tokenizer_before_any_timing(pair, draft_folder, disk, capfd, monkeypatch):
    other = tiny.save(tiny.llama(1), disk / "other words too", tiny.words(reverse=True))
    monkeypatch.setattr(spec_drafts, "measure_costs", lambda *a, **b: pytest.fail("timed first"))
    argv = [word for word in pair if word not in ("--draft", draft_folder)]
    says(
        refused(spec_drafts.main, [*argv, "--drafts", draft_folder, other], capfd),
        "--draft",
        "does not share the tokenizer",
    )


def test_a_text_past_the_targets_context_names_it_and_its_limit(pair, disk, capfd):
    flag, short = "--target", disk / "short target"
    if not short.exists():
        tiny.save(tiny.llama(max_position_embeddings=12), short)
    says(
        refused(spec_decode.main, [*pair, flag, short, "--prompt", "w1 w2 w3 w4 w5"], capfd),
        flag,
        "prompt of 5 + 8 new tokens",
        "limit of 12",
        "--n-tokens",
    )


def test_one_pass_past_the_context_is_refused(disk, results, capfd):
    short = tiny.save(tiny.gpt2(n_positions=8), disk / "eight")
    argv = ["--device", "cpu", "--results", results, "--model", short, "--text", " ".join(f"w{i}" for i in range(9))]
    says(refused(spec_one_pass.main, argv, capfd), "--model", "limit of 8")


def test_an_id_past_the_table_is_named_before_any_pass(pair, disk, capfd):
    tokenizer = tiny.words()
    tokenizer.add_tokens(["<tool>"])
    target = tiny.save(tiny.llama(), disk / "tool", tokenizer)
    says(
        refused(spec_decode.main, [*pair, "--target", target, "--prompt", "w1 <tool>"], capfd),
        "id 64",
        "'<tool>'",
        "64 rows",
    )


def test_logits_that_turn_nan_midway_end_the_run_and_no_speedup_is_written(pair, disk, results, capfd, monkeypatch):
    """The try at loading reads a few ids only; here the 40th word alone is spoiled, and the look at the weights left out:
    finite weights may overflow as well."""
    monkeypatch.setattr(linear, "first_not_finite", lambda model: None)
    model = tiny.llama()
    model.model.embed_tokens.weight.data[44] = float("nan")
    target = tiny.save(model, disk / "nan midway")
    code = spec_decode.main([*pair, "--target", target, "--prompt", "w1 w40"])
    said = capfd.readouterr().err
    assert code == 2 and "Traceback" not in said
    says(said.strip().splitlines()[-1], "error:", "logits are not finite in float32", "--dtype")
    document = json.loads(results.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert document["status"] == "failed"
    rows = [row for row in document["rows"] if row["part"] == "decode"]
    assert rows and all(row.get("speedup") is None and row["error"] for row in rows)


def test_results_that_cannot_be_written_are_refused_by_name(pair, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    says(refused(spec_decode.main, [*pair, "--results", tmp_path / "file" / "r.json"], capfd), "--results")
    says(refused(spec_decode.main, [*pair, "--results", tmp_path], capfd), "--results", "folder")


def test_resuming_with_other_settings_names_the_setting(pair, capfd):
    argv = [*pair, "--prompt", "w1 w5 w9"]
    assert spec_decode.main(argv) == 0
    capfd.readouterr()
    says(refused(spec_decode.main, [*argv, "-k", "2", "--resume"], capfd), "--resume", "k: 5 there, 2 here")


def test_memory_that_runs_out_in_one_cell_is_recorded_and_the_sweep_goes_on(pair, results, capfd, monkeypatch):
    measure = spec_bench.measure

    def full_at_two(task, method, *args):
        if method.k == 2:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 2 GiB")
        return measure(task, method, *args)

    monkeypatch.setattr(spec_bench, "measure", full_at_two)
    assert spec_bench.main([*pair, "--ks", "1,2,3", "--workloads", "code"]) == 1, "a cell that failed is no success"
    rows = {row["k"]: row for row in json.loads(results.read_text())["rows"] if row["part"] == "k"}
    assert sorted(rows) == [1, 2, 3]
    assert rows[2]["speedup"] is None and "out of memory" in rows[2]["error"]
    assert rows[1]["speedup"] > 0 and rows[3]["speedup"] > 0


# ------------------------------------------------------------------------------------------------------- as a real process


def test_a_real_process_neither_asks_nor_shows_a_traceback(shelf, pair):
    """The whole way: a pipe for stdin, a model that wants its own code run."""
    argv = [sys.executable, str(HERE / "spec_decode.py"), *pair, "--target", str(shelf / "own code")]
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    says(line, "error: --target", "--trust-remote-code")
