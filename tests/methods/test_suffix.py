"""Suffix look-up guesses what counting all of the text gives, and never changes the text."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spec_lookup
import tiny
from spec_harness.arms import Method, run_speculative
from spec_loop import Budget, ModelDrafter, State
from spec_methods.lookup import HybridDrafter
from spec_methods.policy import FixedK
from spec_methods.suffix import DEPTH, LEAST, SuffixDrafter

TARGET = tiny.llama()


def state_of(text: list[int]) -> State:
    return State(torch.tensor([text], dtype=torch.long), len(text), None)


def followers(text: list[int], sequence: list[int]) -> dict[int, int]:
    """Token -> how often it follows `sequence` in the text, in the order of first sight."""
    found: dict[int, int] = {}
    for end in range(len(sequence), len(text)):
        if text[end - len(sequence) : end] == sequence:
            found[text[end]] = found.get(text[end], 0) + 1
    return found


def counted(text: list[int], k: int) -> list[int]:
    """The guesses by counting the whole text anew: no tree, nothing kept."""
    best: tuple[float, list[int]] = (0.0, [])
    for m in range(1, min(DEPTH, len(text)) + 1):
        guesses, chance, score = [], 1.0, 0.0
        while len(guesses) < min(k, m):
            seen = followers(text, [*text[-m:], *guesses]) if m + len(guesses) < DEPTH else {}
            if not seen:
                break
            token = max(seen, key=seen.get)
            chance *= seen[token] / sum(seen.values())
            if chance < LEAST:
                break
            guesses.append(token)
            score += chance
        best = (score, guesses) if score >= best[0] and guesses else best
    return best[1]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=4), st.integers(0, 8))  # fmt: skip
def test_the_guess_is_what_counting_the_whole_text_gives_after_every_round(prompt, blocks, k):
    drafter, text = SuffixDrafter(), list(prompt)
    drafter.start(state_of(prompt))
    for block in ([], *blocks):
        text += block
        drafter.keep(SimpleNamespace(new=block), [], ())
        made = drafter.propose(state_of(text), Budget(k))
        assert made.tokens.tolist() == counted(text, k) and made.laws == [None] * len(made)


@pytest.mark.parametrize(
    ("text", "k", "expected"),
    [
        ([1, 2, 3, 1, 2, 4, 1, 2, 4, 9, 1, 2], 5, [4, 1]),  # the commonest, as many as matched; of equals the first seen
        ([7, 8], 5, []),
        ([5, 6, 5], 5, [6]),
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], 3, [9, 1, 2]),  # the longest match may guess as many as matched, up to k
        ([1, 2, 1, 3, 1, 4, 1], 5, [2]),  # a third is above LEAST
        ([1, 2, 3, 1, 2], 0, []),
    ],
)
def test_guesses_by_hand(text, k, expected):
    drafter = SuffixDrafter()
    drafter.start(state_of(text))
    made = drafter.propose(state_of(text), Budget(k))
    assert made.tokens.tolist() == expected and drafter.matches == bool(expected)


def test_what_the_counts_doubt_is_not_guessed():
    """Eleven different continuations: each one's chance is below LEAST."""
    text = [token for other in range(2, 13) for token in (1, other)] + [1]
    drafter = SuffixDrafter()
    drafter.start(state_of(text))
    assert drafter.propose(state_of(text), Budget(4)).tokens.tolist() == []


@pytest.mark.parametrize("prompt", [(5, 6, 7, 5, 6, 7, 5), (1,), tuple(range(1, 30)), (4, 4, 4, 4)])
@pytest.mark.parametrize("hybrid", [False, True])
def test_the_text_is_greedys_own(prompt, hybrid):
    task, drafter = tiny.task(TARGET, prompt, 40), SuffixDrafter()
    if hybrid:
        drafter = HybridDrafter(drafter, ModelDrafter(TARGET, 64), 3)
    done = run_speculative(task, Method(drafter, FixedK(6))).done
    assert done.tokens == tiny.greedy(TARGET, list(prompt), 40)
    assert sum(done.emitted) == 40 and max(map(len, done.proposals)) <= 6


def test_a_length_of_match_is_not_asked_for(pair, results, capsys):
    assert spec_lookup.main([*pair, "--match", "suffix", "--ngram-min", "2"]) == 2
    assert capsys.readouterr().err == "error: --match suffix: weighs every length of match; leave --ngram-max and --ngram-min out\n"


def test_the_script_names_it_and_compares_no_rounds_with_another_rule(pair, results, capsys):
    argv = [*pair, "--prompt", "w1 w2 w3 w1 w2 w3 w1", "--methods", "lookup", "--match", "suffix"]
    assert spec_lookup.main([*argv, "--cpu-linear", "plain"]) == 0
    (row,) = [row for row in json.loads(results.read_text())["rows"] if row["part"] == "look-up"]
    assert row["exact"] and row["tokens"] == tiny.greedy(tiny.llama(), [5, 6, 7, 5, 6, 7, 5], 8)
    said = " ".join(capsys.readouterr().out.split())
    assert "every length by its counts" in said and "not the same rule" in said
