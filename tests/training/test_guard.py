"""The guard: no training row shares a dozen ids with a reported prompt, nor with what the target writes after it."""

import json

from spec_common import UserError

import pytest
import torch
from safetensors.torch import save_file

import tiny
from draft_training import guard
from draft_training.data import shard_of
from draft_training.guard import RUN, continuations, kept_out_runs, read_turns, reported_texts, runs
from draft_training.prompts import HELD_OUT
from draft_training.shards import Shards
from draft_training.teacher import Teacher, continue_rows
from workloads import GROUNDED, WORKLOADS


class Letters:
    """One id a letter; the template is a mark before and after."""

    eos_token_id = 96

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) % 96 for letter in text]}

    def apply_chat_template(self, turns, tokenize, add_generation_prompt):
        return "<<<<user says to you>>>>" + turns[0]["content"] + ">>"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    tiny.tied(2, seed=4).save_pretrained(folder)
    return folder


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"turns": ["Which of these words comes first?", "And which one is the last of all?"]}))
    return path


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Two of the suite's own prompts are enough beside the caller's."""
    monkeypatch.setattr(guard, "WORKLOADS", {"one": WORKLOADS["open prose"]})
    monkeypatch.setattr(guard, "GROUNDED", {})
    monkeypatch.setattr(guard, "HELD_OUT", {"chat": HELD_OUT["chat"][:1]})
    monkeypatch.setattr(guard, "CONTINUED", 40)


def kept(target, planted, files, tmp_path):
    """Which of the planted rows (id lists) a training run would see."""
    data = tmp_path / "data"
    data.mkdir()
    rows = [[torch.tensor(ids), torch.zeros(len(ids), 32).half(), torch.zeros(len(ids), 16).int()] for ids in planted]
    save_file(shard_of(rows, [1] * len(rows), [0] * len(rows)), data / "shard-0.safetensors")
    teacher = lambda: Teacher(target, torch.float32)  # noqa: E731
    shards = Shards(data, 1.0, kept_out_runs(Letters(), teacher, tmp_path / "kept_out.json", files))
    starts = [sum(map(len, planted[:at])) for at in range(len(planted))]
    assert len(shards.index) + shards.left_out == len(planted)
    return [starts.index(row[1]) for row in shards.index]


def written_after(target, text):
    tokenizer = Letters()
    ids = tokenizer(tokenizer.apply_chat_template([{"content": text}], False, True), False)["input_ids"]
    [row] = continue_rows(Teacher(target, torch.float32), [ids], 40, [0], 96)
    return row[0][len(ids) :].tolist()


def test_reported_prompts_and_the_targets_text_after_them_are_not_trained_on(target, mine, tmp_path):
    tokenizer = Letters()
    answer = written_after(target, "Which of these words comes first?")
    innocent = tokenizer("<<<<user says to you>>>>Tell me of something else now!>>", False)["input_ids"]
    later_turn = tokenizer("And which one is the last", False)["input_ids"]
    planted = [innocent, innocent + answer[5 : 5 + RUN], innocent + later_turn[:RUN], innocent + answer[5 : 4 + RUN]]
    assert kept(target, planted, [mine], tmp_path) == [0, 3], "a shorter run, and the template's own ids, are no leak"


def test_without_the_file_the_same_rows_are_trained_on(target, mine, tmp_path):
    answer = written_after(target, "Which of these words comes first?")
    assert kept(target, [answer[5 : 5 + RUN]], [], tmp_path) == [0]


def test_what_the_target_says_after_held_out_prompts_is_kept_out_too(target, tmp_path):
    said = list(range(30, 50))
    teacher = lambda: Teacher(target, torch.float32)  # noqa: E731
    found = [kept_out_runs(Letters(), teacher, tmp_path / "kept_out.json", said=one) for one in ([], [said])]
    assert found[1] - found[0] == runs(said)


def test_continuations_are_written_once_and_again_for_other_prompts(target, tmp_path):
    calls, path = [], tmp_path / "kept_out.json"
    teacher = lambda: calls.append(1) or Teacher(target, torch.float32)  # noqa: E731
    first = continuations(teacher, [[1, 2, 3]], 96, path)
    assert continuations(teacher, [[1, 2, 3]], 96, path) == first and len(calls) == 1
    continuations(teacher, [[1, 2, 4]], 96, path)
    assert len(calls) == 2


def test_every_reported_prompt_is_guarded(mine, monkeypatch):
    monkeypatch.undo()
    texts = {text for text, _ in reported_texts([mine])}
    held = {text for kind in HELD_OUT.values() for text in kind}
    assert {*WORKLOADS.values(), *GROUNDED.values(), *held, "And which one is the last of all?"} <= texts


@pytest.mark.parametrize("content", ["", "{}", '{"turns": []}', "not json"])
def test_a_file_to_keep_out_that_says_nothing_is_refused(content, tmp_path):
    (tmp_path / "mine.jsonl").write_text(content)
    with pytest.raises(UserError, match="--keep-out mine.jsonl"):
        read_turns(tmp_path / "mine.jsonl")


def test_runs_are_all_of_them():
    assert runs([1, 2, 3, 4], 3) == {(1, 2, 3), (2, 3, 4)} and not runs([1, 2], 3)
