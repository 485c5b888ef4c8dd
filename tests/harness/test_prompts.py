"""Prompt files as people save them: read by what is in them, or refused by the name of the line."""

from __future__ import annotations

import gzip
import json
import time

from spec_common import UserError

import pytest

import spec_decode
import tiny
from spec_harness.prompts import Wanted, prompt_of, read_prompts


@pytest.fixture
def file(tmp_path):
    def write(name: str, content: str | bytes):
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def texts(path, limit=None) -> list[str]:
    return [text for _, text in read_prompts(path, Wanted(limit))]


# ------------------------------------------------------------------------------------------------------------- records

USER = {"role": "user", "content": "a"}
MORE = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
SHARE = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"}]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ("a", ("a", 0)),
        ({"prompt": "a"}, ("a", 0)),
        ({"text": "a"}, ("a", 0)),
        ({"prompt": None, "text": "a"}, ("a", 0)),
        ({"question": "a", "answer": "b"}, ("a", 0)),
        ({"instruction": "a", "input": "", "output": "b"}, ("a", 0)),
        ({"instruction": "a", "input": "b"}, ("a\n\nb", 0)),
        ({"turns": ["a", "b"]}, ("a", 1)),
        ({"prompt": ["a"]}, ("a", 0)),
        ({"prompt": [USER, *MORE]}, ("a", 1)),
        (["a", "b", "c"], ("a", 2)),
        ({"messages": [USER]}, ("a", 0)),
        ({"messages": [USER, *MORE]}, ("a", 1)),
        ({"messages": [{"role": "system", "content": "s"}, USER]}, ("a", 1)),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, ("a", 0)),
        ({"conversations": SHARE}, ("a", 1)),
        ({"conversations": [{"from": "gpt", "value": "hello"}, *SHARE]}, ("a", 1)),
    ],
)
def test_a_record_gives_its_prompt_and_the_number_of_turns_it_leaves_out(record, expected):
    assert prompt_of(record) == expected


@pytest.mark.parametrize(
    "record",
    ["", " ", 3, None, [], {}, {"other": "a"}, {"turns": []}, {"prompt": {"a": 1}}, {"prompt": " "}, {"turns": [3]},
     {"messages": [{"role": "user"}]}],
)  # fmt: skip
def test_a_record_without_a_prompt_is_refused(record):
    with pytest.raises(ValueError, match="prompt, text, question, instruction, messages, conversations, turns"):
        prompt_of(record)


def test_a_conversation_in_which_the_user_is_silent_is_refused():
    with pytest.raises(ValueError, match="no turn of the user"):
        prompt_of({"messages": [{"role": "assistant", "content": "a"}]})


# --------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("s.json", '["w1","w2"]', ["w1", "w2"]),
        ("s.json", '[\n  {"prompt": "w1"},\n  "w2"\n]\n', ["w1", "w2"]),
        ("s.json", '{"prompt": "w1"}', ["w1"]),
        ("s.json", '{\n "prompt":\n "w1"\n}', ["w1"]),
        ("s.json", '"w1"\n"w2"\n', ["w1", "w2"]),
        ("s.jsonl", '[\n"w1",\n"w2"\n]', ["w1", "w2"]),
        ("s.jsonl", '["w1", "later"]\n["w2"]\n', ["w1", "w2"]),
        ("s.ndjson", '"w1"\n\n"w2"', ["w1", "w2"]),
        ("s.JSONL", '\ufeff"w1"\r\n"w2"\r\n', ["w1", "w2"]),
        ("s.jsonl.gz", gzip.compress(b'"w1"\n"w2"\n'), ["w1", "w2"]),
        ("s.jsonl", gzip.compress(b'"w1"\n"w2"\n'), ["w1", "w2"]),
        ("s.json.gz", gzip.compress(b'["w1", "w2"]'), ["w1", "w2"]),
        ("s.txt.gz", gzip.compress("\ufeffw1 w2\r\nw3".encode()), ["w1 w2\nw3"]),
        ("s.txt", "one\n\n two\n", ["one\n\n two\n"]),
        ("s.txt", '["a text may begin like this"', ['["a text may begin like this"']),
    ],
)
def test_a_file_is_read_by_what_is_in_it(name, content, expected, file):
    assert texts(file(name, content)) == expected


def test_prompts_are_named_by_their_line_or_number(file):
    assert [name for name, _ in read_prompts(file("a.jsonl", '"w1"\n\n"w2"'))] == ["a.jsonl:1", "a.jsonl:3"]
    assert [name for name, _ in read_prompts(file("a.json", '["w1", "w2"]'))] == ["a.json:1", "a.json:2"]
    assert [name for name, _ in read_prompts(file("a.txt", "w1"))] == ["a.txt"]


@pytest.mark.parametrize("name", ["s.csv", "s.TSV", "s.csv.gz", "s.parquet"])
def test_a_table_is_refused_by_name(name, file):
    with pytest.raises(UserError, match=f"--prompt-file {name}: a table; give a .jsonl"):
        read_prompts(file(name, "prompt\nw1\n"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("s.jsonl", '"w1"\n{"other": 3}\n', "s.jsonl:2: needs a string"),
        ("s.jsonl", b'"w1"\n"\xff"\n', "s.jsonl:2: not a text in UTF-8"),
        ("s.jsonl", '{broken\n"w2"\n', "s.jsonl:1: .*column 2"),
        ("s.jsonl", '"w1"\n' + "[" * 100000 + "\n", "s.jsonl:2: nested too deeply"),
        ("s.json", '["w1",\n 3]', "s.json:2: needs a string"),
        ("s.json", '["w1",\n{"prompt" 3}]', "s.json: .*line 2, column 11"),
        ("s.json", "[]", "s.json: no prompt in it"),
        ("s.txt", b"\xff\xfe\x00", "s.txt: not a text in UTF-8"),
        ("s.jsonl.gz", gzip.compress(b'"w1"\n' * 9)[:-9], "s.jsonl.gz: not a whole gzip file"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_line(name, content, words, file):
    with pytest.raises(UserError, match=f"--prompt-file {words}"):
        read_prompts(file(name, content))


def test_rows_past_the_limit_are_not_read(file):
    path = file("s.jsonl", b'"w1"\n"w2"\n{broken\n"\xff"\n{"other": 3}\n')
    assert texts(path, 2) == ["w1", "w2"]
    with pytest.raises(UserError, match="s.jsonl:3"):
        texts(path, 3)
    assert texts(file("s.json", '["w1", 3]'), 1) == ["w1"]


def test_turns_left_out_are_counted_and_said_once(file, capsys):
    rows = [{"turns": ["w1", "w2", "w3"]}, {"turns": ["w1"]}, {"conversations": SHARE}]
    assert texts(file("s.jsonl", "\n".join(json.dumps(row) for row in rows))) == ["w1", "w1", "a"]
    said = capsys.readouterr().err
    assert said == "s.jsonl: the user's first turn is the prompt; 3 other turns in 2 rows are left out\n"
    texts(file("s.jsonl", '{"turns": ["w1"]}'))
    assert capsys.readouterr().err == ""


def test_ten_thousand_rows_take_less_than_a_second(file):
    path = file("s.jsonl", "\n".join(json.dumps({"messages": [USER, *MORE]}) for _ in range(10_000)))
    start = time.process_time()
    assert len(texts(path)) == 10_000
    assert time.process_time() - start < 1


# ----------------------------------------------------------------------------------------------------------- the scripts


def test_a_prompt_too_long_for_the_model_is_named_by_its_line(pair, tmp_path, file, capsys):
    """And not where --limit leaves it out."""
    short = tiny.save(tiny.llama(max_position_embeddings=32), tmp_path / "short")
    path = file("p.jsonl", "\n".join(json.dumps(row) for row in ("w1", " ".join(["w2"] * 300), "w3")))
    argv = [*pair, "--target", short, "--prompt-file", str(path)]
    assert spec_decode.main(argv) == 2
    said = capsys.readouterr().err
    assert "error: --prompt-file p.jsonl:2: --target short: prompt of 300 + 8 new tokens" in said
    assert spec_decode.main([*argv, "--limit", "1"]) == 0


# ------------------------------------------------------------------------------------------------------- what is wanted


def test_a_sample_is_drawn_by_its_seed_from_the_first_rows_and_keeps_their_order(file):
    path = file("a.jsonl", "\n".join(json.dumps({"prompt": f"w{i}"}) for i in range(40)))
    drawn = [[int(text[1:]) for _, text in read_prompts(path, Wanted(30, 9, seed))] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and all(one == sorted(set(one)) and len(one) == 9 and max(one) < 30 for one in drawn)
    assert any(one != list(range(9)) for one in drawn)
    with pytest.raises(UserError, match="^--sample 41: a.jsonl has 40 prompts; lower it"):
        read_prompts(path, Wanted(sample=41))


def test_bad_rows_are_skipped_where_that_is_asked_for_and_said(file, capsys):
    path = file("a.jsonl", '{"prompt": "w1"}\n{"other": 3}\n{"prompt": \n"w4"\n')
    with pytest.raises(UserError, match="a.jsonl:2: "):
        read_prompts(path)
    assert read_prompts(path, Wanted(skip_bad=True)) == [("a.jsonl:1", "w1"), ("a.jsonl:4", "w4")]
    assert "2 of 4 rows are skipped, the first a.jsonl:2: needs a string" in capsys.readouterr().err
    with pytest.raises(UserError, match="no prompt in it"):
        read_prompts(file("b.jsonl", '{"a": 1}\n{"b": 1}\n'), Wanted(skip_bad=True))


def test_the_kinds_of_the_records_are_counted(file, capsys):
    kinds = ["maths", "code", "maths"]
    path = file("a.jsonl", "\n".join(json.dumps({"prompt": f"w{i}", "category": kind}) for i, kind in enumerate(kinds)))
    read_prompts(path)
    assert "a.jsonl: 2 maths, 1 code" in capsys.readouterr().err


def test_prompts_longer_than_asked_for_are_left_out_and_the_rest_are_said(file, pair, results, capsys):
    path = file("a.jsonl", "\n".join(json.dumps({"prompt": " ".join(["w1"] * n)}) for n in (3, 9, 4, 12)))
    argv = [*pair, "--prompt-file", str(path), "--max-prompt-tokens"]
    assert spec_decode.main([*argv, "4"]) == 0
    rows = [row for row in json.loads(results.read_text())["rows"] if row["part"] == "decode"]
    assert [(row["workload"], row["prompt_tokens"]) for row in rows] == [("a.jsonl:1", 3), ("a.jsonl:3", 4)]
    said = capsys.readouterr().err
    assert "--max-prompt-tokens 4: 2 of 4 prompts are longer" in said and "a.jsonl: 2 prompts of 3 to 4 tokens" in said
    assert spec_decode.main([*argv, "2"]) == 2
    assert "--max-prompt-tokens 2: the shortest prompt has 3; raise it" in capsys.readouterr().err
