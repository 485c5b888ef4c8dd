"""Inputs that once went wrong without a word, through the scripts as a user calls them."""

from __future__ import annotations

import ast
import json
import re

import pytest
import tokenizers
import transformers as T

import spec_plot
from spec_harness.results import measured_hash
from spec_harness.tables import shown_rounds
from spec_models import pieces


def rows_of_a_sweep(name: str) -> list[dict]:
    row = {"workload": name, "error": None, "speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6, "emitted": 8}
    row |= {"predicted_costs": 1.4, "target_passes": 4, "draft_passes": 8, "alpha": 0.7}
    row |= {"draft_s": 0.1, "verify_s": 0.2, "overhead_s": 0.1, "speculative_s": [0.4], "baseline_s": [0.6]}
    return [{**row, "part": part, "k": k} for part in ("k", "workload") for k in (1, 2)]


def test_names_that_look_like_formulas_are_drawn_as_they_are(tmp_path):
    name = "x$_{$y"
    where = {"device": "cpu", "cpu_model": name, "threads": 1, "dtype": "float32", "git_commit": None}
    config = {"target": {"name": name}, "draft": {"name": name}}
    document = {"environment": where, "config": config, "rows": rows_of_a_sweep(name), "summary": {}}
    document["measured_sha256"] = measured_hash(document)
    (tmp_path / "spec_bench.json").write_text(json.dumps(document))
    assert spec_plot.main(["--results", str(tmp_path)]) == 0
    assert len(list(tmp_path.glob("*.png"))) == 6


# ------------------------------------------------------------------------------------------------------- text in pieces

TEXT = "caf\u00e9 \U0001f600 \u4f60\u597d \U0001f468\u200d\U0001f469 end"


def bytes_alone():
    """A tokenizer that gives every byte a token: an emoji is four of them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    return T.PreTrainedTokenizerFast(tokenizer_object=model)


def rows_of_rounds(tokens: list[int], k: int) -> dict:
    """Rounds of k accepted guesses and a token of the target's own; every round also guessed one token too many."""
    parts = [tokens[start : start + k + 1] for start in range(0, len(tokens), k + 1)]
    return {
        "tokens": tokens,
        "proposals": [[*part[:k], tokens[0]] for part in parts],
        "paths": [list(range(min(k, len(part)))) for part in parts],
        "emitted_lengths": [len(part) for part in parts],
    }


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
def test_the_shown_parts_join_to_the_text_whatever_the_rounds_cut_through(k):
    tokenizer = bytes_alone()
    tokens = tokenizer(TEXT)["input_ids"]
    shown = shown_rounds(tokenizer, rows_of_rounds(tokens, k), colour=False)
    kept = re.findall(r"(?:accepted|target) ('.*?'|\".*?\")(?=   |$)", shown, re.M)
    assert "".join(ast.literal_eval(part) for part in kept) == TEXT


@pytest.mark.parametrize("lengths", [[1] * 40, [3, 5, 7], [100], [0, 5, 0, 6]])
def test_pieces_join_to_the_text(lengths):
    tokenizer = bytes_alone()
    tokens = tokenizer(TEXT)["input_ids"]
    parts = pieces.pieces(tokenizer, tokens, lengths)
    assert "".join(parts) == TEXT and len(parts) == len(lengths)
    assert pieces.next_piece(tokenizer, tokens[:5], tokens[5:]) == TEXT[4:]


def test_a_character_belongs_to_the_piece_that_completes_it():
    tokenizer = bytes_alone()
    tokens = tokenizer("a\U0001f600b")["input_ids"]
    assert pieces.pieces(tokenizer, tokens, [3, 1, 2]) == ["a", "", "\U0001f600b"]
    assert pieces.next_piece(tokenizer, tokens[:2], tokens[2:5]) == "\U0001f600"
