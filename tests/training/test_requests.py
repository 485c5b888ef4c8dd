"""Requests: a file's prompts, the target's own, several turns, long contexts; nothing lost, doubled or held out."""

import json
import random

from spec_common import UserError

import pytest
import torch

from draft_training import data, requests
from draft_training.data import batches_of, chat_prompts, training_prompts_of
from draft_training.requests import (
    FOLLOW_UPS,
    asked,
    conversations,
    is_held_out,
    is_request,
    long_request,
    opening,
    own_requests,
    read_prompts,
)


class Plain:
    """One id a letter; turns between angle brackets."""

    eos_token_id = 1

    def __call__(self, text, add_special_tokens):
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, turns, tokenize, add_generation_prompt=False):
        text = "".join(f"<{turn['role']}:{turn['content']}>" for turn in turns)
        return text + "<assistant:" if add_generation_prompt else text

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(number) for number in ids)


def writes(monkeypatch, texts):
    """A target that goes on with these texts, one a row, again from the first when they are used up; what it was asked."""
    calls = []

    def continue_rows(teacher, prompts, new_tokens, starts, stop_id, generator=None):
        calls.append((prompts, new_tokens, starts))
        said = [texts[at % len(texts)] for at in range(len(prompts))]
        return [[torch.tensor([*ids, *map(ord, text)])] for ids, text in zip(prompts, said, strict=True)]

    monkeypatch.setattr(requests, "continue_rows", continue_rows)
    return calls


def text_of(ids):
    return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Can you explain how tides work?", True),
        ("Hello there.", False),
        ("Please write a poem about the", False),
        ("yes yes yes yes yes yes yes yes.", False),
        ("Write a function:\n```\ndef f(x): return x\n```", True),
    ],
)
def test_what_reads_as_a_request(text, good):
    assert is_request(text) == good


def test_own_requests_are_sampled_whole_and_each_once(monkeypatch):
    long = "Tell me all about it, and then about the next thing, and after that about everything else there is."
    calls = writes(monkeypatch, ["Can you explain how tides work?", "Can you explain how tides work?", "No.", long])
    assert own_requests(None, Plain(), 4, None) == ["Can you explain how tides work?"]
    [(prompts, new_tokens, starts)] = calls
    assert {text_of(ids) for ids in prompts} == {"<user:"} and set(starts) == {new_tokens}, "every id is sampled"


def test_a_template_that_drops_the_users_text_is_refused():
    class Mute(Plain):
        def apply_chat_template(self, turns, tokenize, add_generation_prompt=False):
            return "<>"

    with pytest.raises(UserError, match="--prompts"):
        opening(Mute())


def test_conversations_have_two_turns_and_a_third_of_them_three(monkeypatch):
    writes(monkeypatch, ["First I say a whole sentence. Then half of"])
    made = [text_of(ids) for ids in conversations(None, Plain(), ["a?", "b?", "c?"], random.Random(0))]
    assert [text.count("<user:") for text in made] == [3, 2, 2]
    for text, request in zip(made, "abc", strict=True):
        assert text.startswith(f"<user:{request}?><assistant:First I say a whole sentence.><user:")
        assert text.endswith("><assistant:") and any(one in text for one in FOLLOW_UPS)


def test_a_long_request_holds_passages_whole():
    texts = [f"Passage {number} {{with}} braces, and remarkable words." for number in range(9)]
    for seed in range(20):
        request = long_request(texts, random.Random(seed))
        assert 2 <= sum(text in request for text in texts) <= 4


def test_code_comes_mostly_with_what_to_do_and_prose_as_it_is():
    made = [asked("code", "def f():", random.Random(seed)) for seed in range(50)]
    assert 20 < sum(text != "def f():" for text in made) < 50 and all(text.endswith("def f():") for text in made)
    assert asked("task", "Do it.", random.Random(0)) == "Do it."


def test_every_prompt_of_a_file_comes_once_before_any_comes_twice(monkeypatch):
    writes(monkeypatch, ["Can you explain how tides work?"])
    texts = [("", f"Request number {number:02d} of them all.") for number in range(30)]
    seen = []
    for seed in range(3):
        seen += [text_of(ids) for ids in chat_prompts(None, Plain(), 16, seed, texts, None)]
    counts = [sum(text.startswith(f"<user:{one}>") for text in seen) for _, one in texts]
    assert counts == [1] * 30


def test_held_out_prompts_are_not_trained_on(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"kind": "k", "prompt": f"Question {number}?"}) for number in range(400)))
    trained, every = training_prompts_of(path), read_prompts(path)
    assert 0 < len(every) - len(trained) < 40 and not any(is_held_out(text) for _, text in trained)
    assert sorted(trained) != trained == training_prompts_of(path), "shuffled, the same each time"


@pytest.mark.parametrize("content", ["", "\n", "{}", '{"prompt": ""}', '{"prompt": 3}', "no json", '["a"]'])
def test_a_file_without_prompts_is_refused(content, tmp_path):
    (tmp_path / "p.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"--prompts p\.jsonl"):
        read_prompts(tmp_path / "p.jsonl")


def test_batches_hold_every_job_and_little_enough():
    jobs = [([0] * length, 0) for length in [3, 900, 50, 700, 4] * 90]
    batches = list(batches_of(jobs, 64))
    assert sorted(len(ids) for batch in batches for ids, _ in batch) == sorted(len(ids) for ids, _ in jobs)
    for batch in batches:
        assert len(batch) <= data.MOST_ROWS and len(batch) * (len(batch[-1][0]) + 64) <= data.CACHED
