"""Texts longer than a model is made for: a draft that ends before the target, and limits that no config names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import spec_batch
import spec_decode
import spec_one_pass
import spec_precondition
import tiny
from spec_harness.arms import start_drafter
from spec_harness.batches import Requests, run_batches
from spec_methods.policy import FixedK
from spec_methods.trees import TreeDrafter

LIMIT = 16


def short_draft(target=None):
    """A draft of 16 learned positions (one more fails in the table) that guesses as the target does."""
    return tiny.gpt2(n_positions=LIMIT)


def limited(target, prompt, n: int = 20, **options):
    return tiny.task(target, prompt, n, limit=LIMIT, draft_limit=LIMIT, **options)


# ------------------------------------------------------------------------------------------- a draft that ends earlier


@pytest.mark.parametrize("loop", ["lean", "essay"])
@pytest.mark.parametrize("length", [10, 15, 16, 17, 30])
def test_the_target_goes_on_alone_past_the_drafts_limit(length, loop):
    target, prompt = tiny.gpt2(), tuple(i % 60 + 1 for i in range(length))
    task = limited(target, prompt, loop=loop)
    done = spec_decode.run_speculative(task, tiny.method(task, short_draft(), 3)).done
    assert done.tokens == tiny.greedy(target, prompt, 20)
    assert task.alone_from == max(0, LIMIT - length)
    place, guessed = 0, []
    for one in done.rounds:
        guessed += range(place, place + len(one.guesses))
        place += one.emitted
    assert max(guessed, default=-1) == (task.alone_from - 1), "it guesses up to its last position and no further"


def test_a_tree_ends_with_the_drafts_limit_too():
    target, prompt = tiny.llama(), tuple(range(1, 11))
    task = limited(target, prompt)
    drafter = TreeDrafter(tiny.llama(max_position_embeddings=LIMIT), 64, 6)
    done = spec_decode.run_speculative(task, tiny.method(task, target, 3, drafter=drafter)).done
    assert done.tokens == tiny.greedy(target, prompt, 20)
    assert sum(bool(one.guesses) for one in done.rounds) > 0 and not any(one.guesses for one in done.rounds[-10:])


def test_a_text_within_the_drafts_limit_knows_no_end():
    assert tiny.task(tiny.llama(), n=4).alone_from is None


def test_a_drafter_reads_no_more_of_a_prompt_than_it_can():
    seen = []
    drafter = type("Silent", (), {"start": lambda self, state: seen.append(state.length)})()
    for length in (10, 16, 30):
        task = limited(tiny.gpt2(), tuple(range(1, length + 1)))
        start_drafter(task, drafter, spec_decode.prefill(task.target, task.prompt, 4))
    assert seen == [10, 16, 16]


def test_rows_of_a_batch_end_their_guesses_one_by_one():
    target, prompts = tiny.gpt2(), [tuple(i % 60 + 1 for i in range(length)) for length in (4, 12, 18, 30)]
    tasks = {str(len(prompt)): limited(target, prompt) for prompt in prompts}
    run = run_batches(Requests(tasks, short_draft(), FixedK(3), 4), True)
    assert [done.tokens for done in run.done] == [tiny.greedy(target, prompt, 20) for prompt in prompts]
    assert [done.draft_passes > 0 for done in run.done] == [True, True, False, False]


@pytest.fixture
def short(tmp_path) -> list[str]:
    """The options of a pair of 64 and of 16 positions."""
    models = tiny.gpt2(), short_draft()
    where = [tiny.save(model, tmp_path / name) for name, model in zip(("long", "short"), models, strict=True)]
    results = str(tmp_path / "results.json")
    return [
        "--device",
        "cpu",
        "--target",
        where[0],
        "--draft",
        where[1],
        "--n-tokens",
        "20",
        "--repeats",
        "1",
        "--results",
        results,
    ]


@pytest.mark.parametrize("script", [spec_decode, spec_batch])
def test_the_file_says_from_which_token_the_target_writes_alone(script, short, capfd):
    ten = " ".join(f"w{i}" for i in range(10))
    sizes = ["--batches", "1"] if script is spec_batch else ["-k", "3"]
    assert script.main([*short, "--prompt", ten, *sizes]) == 0
    rows = [row for row in saved(short[-1])["rows"] if "target_alone_from" in row]
    assert rows and {row["target_alone_from"] for row in rows} == {6}
    assert "made for texts of up to 16 tokens; from token 6 of 20 on the target writes alone" in capfd.readouterr().err


# --------------------------------------------------------------------------------------------- a limit that nobody names


@pytest.fixture
def unnamed(monkeypatch):
    """A limit of 16 positions of which the config says nothing."""
    for place in ("spec_models.checks", "spec_harness.options", "spec_harness.batches"):
        monkeypatch.setattr(f"{place}.context_limit", lambda model: None)


def saved(results) -> dict:
    return json.loads(Path(results).read_text())


@pytest.mark.parametrize("script", [spec_decode, spec_batch])
def test_a_pass_that_fails_past_a_limit_is_one_line_and_measured_rows_stay(script, unnamed, tmp_path, capfd):
    folder, results = tiny.save(tiny.gpt2(n_positions=LIMIT), tmp_path / "m"), str(tmp_path / "r.json")
    argv = ["--device", "cpu", "--target", folder, "--draft", folder]
    argv += ["--repeats", "1", "--n-tokens", "12", "--results", results]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('"w1 w2"\n"w1 w2 w3 w4 w5 w6 w7 w8 w9"\n')
    size = ["--batches", "2"] if script is spec_batch else ["-k", "1"]
    assert script.main([*argv, "--prompt-file", str(prompts), *size]) == 2
    said = capfd.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: --n-tokens: a pass fails in a text of up to ") and "lower --n-tokens" in line
    assert "Traceback" not in said
    document = saved(results)
    assert document["status"] == "failed" and [row for row in document["rows"] if not row.get("error")]


def test_of_a_cost_curve_the_sizes_that_can_be_read_stay(unnamed, tmp_path, monkeypatch):
    monkeypatch.setattr("spec_harness.costs.READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr("spec_harness.costs.SQUARE", {"cpu": 64})
    folder, results = tiny.save(tiny.gpt2(n_positions=LIMIT), tmp_path / "m"), str(tmp_path / "r.json")
    argv = ["--device", "cpu", "--model", folder, "--tokens", "1,4,12", "--repeats", "2", "--results", results]
    assert spec_precondition.main([*argv, "--context", "8"]) == 0
    rows = {row["tokens"]: row for row in saved(results)["rows"]}
    assert rows[1]["v"] == 1.0 and rows[4]["v"] > 0
    assert rows[12].get("v") is None and "fails behind 8 tokens" in rows[12]["error"]


def test_a_context_that_cannot_be_read_is_one_line(unnamed, tmp_path, monkeypatch, capfd):
    folder = tiny.save(tiny.gpt2(n_positions=LIMIT), tmp_path / "m")
    argv = ["--device", "cpu", "--model", folder, "--tokens", "1,2"]
    argv += ["--repeats", "1", "--results", str(tmp_path / "r.json")]
    assert spec_precondition.main([*argv, "--context", "40"]) == 2
    assert "error: --context: a pass fails in a text of up to " in capfd.readouterr().err


def test_a_text_past_a_limit_is_one_line_where_one_pass_reads_it(unnamed, tmp_path, capfd):
    folder = tiny.save(tiny.gpt2(n_positions=LIMIT), tmp_path / "m")
    words = " ".join(f"w{i}" for i in range(LIMIT + 4))
    argv = ["--device", "cpu", "--model", folder, "--text", words, "--results", str(tmp_path / "r.json")]
    assert spec_one_pass.main(argv) == 2
    assert f"error: --text: a pass fails in a text of up to {LIMIT + 4} tokens" in capfd.readouterr().err


def test_forms_side_by_side_past_a_limit_are_one_line_and_the_curve_stays(unnamed, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("spec_harness.costs.READ_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr("spec_harness.costs.SQUARE", {"cpu": 64})
    folder, results = tiny.save(tiny.gpt2(n_positions=LIMIT), tmp_path / "m"), str(tmp_path / "r.json")
    argv = ["--device", "cpu", "--model", folder, "--tokens", "1,12", "--context", "8", "--compare-linears"]
    assert spec_precondition.main([*argv, "--repeats", "1", "--results", results]) == 2
    assert "error: --context or --tokens: a pass fails in a text of up to 20 tokens" in capfd.readouterr().err
    assert [row["tokens"] for row in saved(results)["rows"] if not row["error"]] == [1]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), KeyError("x")])
def test_what_says_nothing_of_a_limit_stays_what_it_is(error):
    from spec_harness.costs import passes_within

    with pytest.raises(type(error)), passes_within(3, "--context"):
        raise error
