"""Words in, ids out: the ids of a prompt are the prompt's, ends are known, and tokenizers that differ are told
apart."""

from __future__ import annotations

import json

from spec_common import UserError, remark

import pytest
import torch
from tokenizers.processors import TemplateProcessing

import spec_decode
import spec_precondition
import tiny
from spec_models.checks import Loaded
from spec_models.words import check_same_tokenizer, end_ids, prompt_ids

CPU = torch.device("cpu")
PARTS = "{% for m in messages %}<s> {% for part in m['content'] %}{% if part.type == 'text' %}{{ part.text }} {% endif %}{% endfor %}w9{% endfor %}"
EITHER = "{% for m in messages %}<s> {{ m['content'] if m['content'] is string else m['content'][0]['text'] }} w9{% endfor %}"


def loaded(tokenizer=None, flag="--target", name="tiny", model=None) -> Loaded:
    return Loaded(model or tiny.llama(), tokenizer or tiny.words(), name, flag)


def tokenizer(single: str | None = None, template: str | None = None):
    words = tiny.words()
    words.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    if single:
        marks = [("<s>", 1), ("</s>", 2)]
        words.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=marks)
    words.chat_template = template
    return words


def ids(tokenizer, text: str, chat: bool = False) -> list[int]:
    return prompt_ids(loaded(tokenizer), text, chat, CPU)[0].tolist()


# ------------------------------------------------------------------------------------------------------- chat templates


@pytest.mark.parametrize("template", [PARTS, EITHER])
@pytest.mark.parametrize(("text", "expected"), [("w1 w2", [1, 5, 6, 13]), ("w3", [1, 7, 13]), ("w9", [1, 13, 13])])
def test_a_template_that_wants_parts_gets_them(template, text, expected):
    """Given a plain string it goes through its letters, finds no part, and every prompt gives the same ids."""
    assert ids(tokenizer(template=template), text, chat=True) == expected


@pytest.mark.parametrize("words", ["w9", "w9 w1", "", "{{ m['content'] | length }}", "{{ m['content'][1:] }}"])
def test_a_template_that_swallows_the_prompt_is_refused(words):
    swallowing = tokenizer(template="{% for m in messages %}<s> " + words + "{% endfor %}")
    with pytest.raises(UserError, match="--chat: tiny's template leaves the words of the prompt out; leave --chat out"):
        ids(swallowing, "w9", chat=True)


def test_a_template_that_escapes_the_words_keeps_them():
    quoting = tokenizer(template="{% for m in messages %}{{ m['content'] | trim | tojson }}{% endfor %}")
    assert ids(quoting, '\n w1 "w2"\n', chat=True)


def test_a_template_that_refuses_every_form_says_why():
    raising = tokenizer(template="{{ raise_exception('only tools here') }}")
    with pytest.raises(UserError, match="--chat: .* refuses a single user turn .only tools here"):
        ids(raising, "w1", chat=True)


# ------------------------------------------------------------------------------------------------- tokens around a prompt


@pytest.mark.parametrize(
    ("single", "text", "expected"),
    [
        ("<s> $A", "w1", [1, 5]),
        ("<s> $A", "<s> w1", [1, 5]),
        ("<s> $A", "<s> <s> w1", [1, 1, 5]),
        ("$A </s>", "w1", [5]),
        ("$A </s>", "w1 </s>", [5, 2]),
        ("<s> $A </s>", "w1", [1, 5]),
        ("<s> $A </s>", "<s> w1", [1, 5]),
        (None, "<s> w1", [1, 5]),
    ],
)
def test_a_prompt_begins_once_and_is_not_ended(single, text, expected):
    assert ids(tokenizer(single), text) == expected


def test_a_prompt_that_the_tokenizer_does_not_give_back_is_remarked_once(capsys):
    for text in ("w1 unheard w2", "other w3"):
        ids(tokenizer(), text)
    ids(tokenizer(), "w1 w2")
    assert capsys.readouterr().err.count("word for word") == 1


# ------------------------------------------------------------------------------------------------------------------ ends


def test_ends_are_whatever_any_of_the_three_names():
    words, model = tokenizer(), tiny.llama()
    model.generation_config.eos_token_id = [7, 9]
    model.config.eos_token_id = 8
    assert end_ids(loaded(words, model=model)) == {2, 7, 8, 9}
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    assert end_ids(loaded(words, model=model)) == {2}
    assert end_ids(loaded(tiny.words(), model=model)) == frozenset()


def written(argv, results) -> list[int]:
    assert spec_decode.main(argv) == 0
    return json.loads(results.read_text())["rows"][-1]["tokens"]


@pytest.mark.parametrize("holder", ["generation", "config", "tokenizer"])
def test_a_text_stops_at_an_end_that_only_one_of_them_knows(holder, pair, tmp_path, results):
    text = list(tiny.greedy_once(tiny.llama(), (5, 9, 13), 8))
    end = text[3]
    model, words = tiny.llama(), tiny.words()
    if holder == "generation":
        model.generation_config.eos_token_id = end
    elif holder == "config":
        model.config.eos_token_id = end
    else:
        words.eos_token = words.convert_ids_to_tokens(end)
    folder = tiny.save(model, tmp_path / "ends", words)
    argv = [*pair, "--target", folder, "--prompt", "w1 w5 w9", "--stop-at-eos"]
    assert written(argv, results) == text[: text.index(end) + 1]


def test_no_known_end_is_said_once(pair, capsys):
    assert spec_decode.main([*pair, "--prompt", "w1 w5 w9", "--stop-at-eos"]) == 0
    assert capsys.readouterr().err.count("names no end token") == 1
    assert spec_decode.main([*pair, "--prompt", "w1 w5 w9"]) == 0
    assert "names no end token" not in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------- tokenizers that differ


def reserved(name: str = "<reserved>", ordinary: bool = False):
    """A tokenizer whose id 60 is a control token of that name."""
    words = tiny.words(n=56)
    words.add_tokens(name) if ordinary else words.add_special_tokens({"additional_special_tokens": [name]})
    assert words.convert_tokens_to_ids(name) == 60
    return words


def test_a_renamed_token_that_stands_for_no_text_is_a_remark(capsys):
    draft = loaded(reserved("<tool>"), "--draft", "other")
    check_same_tokenizer(loaded(reserved()), draft)
    said = capsys.readouterr().err
    assert "id 60 is '<tool>' to the draft and '<reserved>' to the target" in said and said.count("\n") == 1
    assert draft.about == {"tokenizer_differences": [60], "tokenizer_differences_count": 1}


def test_a_renamed_word_is_refused_with_the_option_that_allows_it():
    draft = loaded(reserved("word", ordinary=True), "--draft", "other")
    with pytest.raises(UserError, match="id 60 is 'word'.*--allow-tokenizer-differences"):
        check_same_tokenizer(loaded(reserved("name", ordinary=True)), draft)


def test_a_renamed_end_is_refused():
    target = loaded(reserved())
    target.model.config.eos_token_id = 60
    with pytest.raises(UserError, match="id 60"):
        check_same_tokenizer(target, loaded(reserved("<tool>"), "--draft", "other"))


def test_a_result_file_lists_no_more_than_a_hundred_differing_ids():
    target, draft = loaded(tiny.words(n=300)), loaded(tiny.words(reverse=True, n=300), "--draft", "other")
    check_same_tokenizer(target, draft, allow=True)
    assert draft.about == {"tokenizer_differences": list(range(4, 104)), "tokenizer_differences_count": 300}


def both(tmp_path) -> list[str]:
    target, draft = tiny.llama(), tiny.near(tiny.llama())
    return [
        "--target", tiny.save(target, tmp_path / "t", reserved()),
        "--draft", tiny.save(draft, tmp_path / "d", reserved("<tool>")),
    ]  # fmt: skip


def test_a_prompt_that_holds_the_differing_token_is_refused_unless_allowed(pair, tmp_path, results, capsys):
    argv = [*pair, *both(tmp_path)]
    assert len(written([*argv, "--prompt", "w1 w5 w9"], results)) == 8
    config = json.loads(results.read_text())["config"]
    assert config["draft"]["tokenizer_differences"] == [60]
    assert spec_decode.main([*argv, "--prompt", "w1 <reserved> w9"]) == 2
    assert "id 60 ('<reserved>') of the prompt is another token to it" in capsys.readouterr().err
    assert len(written([*argv, "--prompt", "w1 <reserved> w9", "--allow-tokenizer-differences"], results)) == 8


def test_a_draft_of_another_tokenizer_goes_on_where_that_is_allowed_and_its_ids_are_listed(
    pair, tmp_path, results, capsys
):
    other = tiny.save(tiny.near(tiny.llama()), tmp_path / "other", tiny.words(reverse=True))
    argv = [*pair, "--draft", other, "--prompt", "w1 w5 w9"]
    assert spec_decode.main(argv) == 2
    costs = ["--device", "cpu", "--model", pair[3], "--draft", other, "--tokens", "1,2", "--repeats", "1"]
    costs += ["--context", "8", "--results", str(tmp_path / "costs.json")]
    assert spec_precondition.main(costs) == 2
    assert spec_precondition.main([*costs, "--allow-tokenizer-differences"]) == 0
    capsys.readouterr(), remark.cache_clear()
    assert written([*argv, "--allow-tokenizer-differences"], results) == tiny.greedy(tiny.llama(), (5, 9, 13), 8)
    said = capsys.readouterr().err
    assert "id 4 is 'w59' to the draft and 'w0' to the target" in said and "and 50 more" in said
    assert len(json.loads(results.read_text())["config"]["draft"]["tokenizer_differences"]) == 60
