"""A replayed policy takes the rounds that the loop takes, guess for guess, without a model."""

from __future__ import annotations

import argparse
import json
import math
import random

from spec_common import UserError

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import tiny
from spec_decode import counts
from spec_harness import fit_policy
from spec_harness.arms import draft_model, run_baseline, run_speculative
from spec_harness.options import make_task
from spec_harness.replay import Recording, on_one_ruler, record, replay
from spec_harness.theory import interpolated
from spec_methods.policy import LOOP_OVERHEAD, POLICIES, FixedK, make_policy

TARGET = tiny.llama()
DRAFTS = {"itself": TARGET, "near": tiny.near(TARGET), "wrong": tiny.always_wrong(TARGET)}
V = interpolated({1: 1.0, 2: 1.06, 4: 1.12, 8: 1.31, 16: 1.9})
K = 6


def recorded(draft, prompt=tiny.PROMPT, n: int = 40):
    task = tiny.task(TARGET, prompt, n)
    return record(task, draft_model(task, draft, K).drafter, run_baseline(task).done.tokens, K)


RECORDINGS = {name: [recorded(draft, prompt) for prompt in (tiny.PROMPT, (7, 8, 9))] for name, draft in DRAFTS.items()}


@settings(max_examples=12, phases=[Phase.generate])
@given(name=st.sampled_from(POLICIES), draft=st.sampled_from(sorted(DRAFTS)), c=st.floats(0, 0.5), k=st.integers(1, K))
def test_a_replay_takes_the_rounds_of_the_loop(name, draft, c, k):
    """Of two texts, one after the other: what the policy learnt from the first counts in the second."""
    real, offline = (make_policy(name, k, [c], V, overhead=LOOP_OVERHEAD) for _ in range(2))
    for number, prompt in enumerate((tiny.PROMPT, (7, 8, 9))):
        task = tiny.task(TARGET, prompt, 40)
        done = run_speculative(task, tiny.method(task, DRAFTS[draft], k, policy=real), go_on=bool(number)).done
        row, counted = replay(RECORDINGS[draft][number], offline), counts(done, k)
        for counter in ("emitted", "draft_passes", "drafting_lengths", "proposed_lengths", "accepted_lengths"):
            assert row[counter] == counted[counter], counter


def test_a_recording_holds_every_place_and_what_is_guessed_behind_a_wrong_guess():
    right, confidences = RECORDINGS["near"][0]
    assert len(right) == len(confidences) == 40
    assert [len(seen) for seen in confidences] == [min(K, 39 - place) for place in range(40)]
    assert any(0 < kept < K for kept in right[:30]), "a draft that is now right, now wrong"
    assert RECORDINGS["itself"][0].right == [min(K, 39 - place) for place in range(40)]
    assert set(RECORDINGS["wrong"][0].right) == {0}


def test_the_ruler_weighs_the_rounds_at_the_costs():
    """Two rounds, of 3 guesses and of 1, that wrote 5 tokens: by hand, to the digit."""
    row = {"emitted": 5, "draft_passes": 4, "drafting_lengths": [3, 1], "proposed_lengths": [3, 1]}
    costs = {"c": 0.1, "c_places": [0.1], "c2": 0.1, "v": {"1": 1.0, "2": 1.06, "4": 1.12}}
    assert on_one_ruler(row, costs) == pytest.approx(5 * 1.02 / (4 * 0.1 + 1.12 + 1.06 + 2 * 0.02))


def synthetic(slope: float, constants: list[float], texts: int = 400):
    """Recordings of a draft whose guesses are right by a known law of its confidence and of their place in the block."""
    draw, found = random.Random(2), []
    for _ in range(texts):
        seen = [draw.uniform(0.02, 0.98) for _ in constants]
        odds = [slope * math.log(p / (1 - p)) + more for p, more in zip(seen, constants, strict=True)]
        right = next((i for i, one in enumerate(odds) if draw.random() > 1 / (1 + math.exp(-one))), len(seen))
        found.append(Recording([right], [seen]))
    return found


def test_the_fit_finds_the_law_that_guesses_obey():
    found = fit_policy.fitted(synthetic(0.8, [1.0, 0.5, 1.5, 1.0, 2.0], 30000))
    assert found["slope"] == pytest.approx(0.8, abs=0.05)
    assert found["places"] == pytest.approx([1.0, 0.5, 1.5, 1.0, 2.0], abs=0.15)


def test_policies_are_pooled_time_over_time_on_one_ruler():
    costs = [{"context": 10, "c": 0.1, "c_places": [0.1], "c2": 0.1, "v": {"1": 1.0, "2": 1.06, "4": 1.12}}]
    rows = [{"text": name, "context": at, "right": right, "confidences": [[0.5] * min(3, len(right) - 1 - i) for i in range(len(right))]}
            for name, at, right in (("a", 5, [3, 2, 1, 0]), ("b", 99, [0, 0]))]  # fmt: skip
    found = fit_policy.speed_of(FixedK(3), rows, costs)
    a, b = 0.3 + 1.12 + 0.02, (0.1 + 1.06 + 0.02) + 1.02
    assert found == pytest.approx({"a": 4 * 1.02 / a, "b": 2 * 1.02 / b, "all": 6 * 1.02 / (a + b)})
    table = {row["arm"]: row for row in fit_policy.compared_policies({"workloads": rows, "other": rows}, 3, costs)}
    assert table["k = 3"]["all"] == table["k = 3"]["other"] == pytest.approx(found["all"])
    assert {"cost, step 0.3", "cost, forget 1"} < table.keys()
    assert table["oracle"]["all"] == pytest.approx(6 * 1.02 / (a + 2 * 1.02)) and {*POLICIES[1:]} < table.keys()


@pytest.mark.parametrize("text", ["{}", "[1]", "no json", '{"rows": [1]}', '{"rows": [{"part": "costs"}]}', '{"rows": [{"part": "costs", "v": {"1": 1.0}, "c": 0.1}]}'])
def test_costs_of_a_file_that_holds_none_are_one_line(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match="--costs x.json"):
        fit_policy.read_costs(tmp_path / "x.json")


def test_the_script_records_fits_and_goes_on(target_folder, draft_folder, results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fit_policy, "WORKLOADS", {"one": "w1 w5 w9"})
    monkeypatch.setattr(fit_policy, "make_task", lambda args, *rest: make_task(argparse.Namespace(**{**vars(args), "chat": False}), *rest))  # fmt: skip
    (tmp_path / "p.jsonl").write_text('"w3 w4"\n"w5 w6"\n"w7 w8"\n')
    costs = {
        "part": "costs",
        "context": 9,
        "c": 0.1,
        "c_places": [0.1],
        "c2": 0.1,
        "v": {"1": 1.0, "4": 1.2},
    }
    (tmp_path / "costs.json").write_text(tiny.result_file([costs], {}))
    files = [
        "--prompt-file",
        str(tmp_path / "p.jsonl"),
        "--check-file",
        str(tmp_path / "p.jsonl"),
        "--costs",
        str(tmp_path / "costs.json"),
    ]
    words = [
        "--target",
        target_folder,
        "--draft",
        draft_folder,
        "--n-tokens",
        "12",
        "-k",
        "3",
        "--fit",
        "2",
        "--check",
        "1",
        "--results",
        str(results),
        *files,
    ]
    assert fit_policy.main(words) == 0
    rows = json.loads(results.read_text())["rows"]
    assert [(row["set"], len(row["right"])) for row in rows] == [(fit_policy.FIT, 12)] * 2 + [
        (fit_policy.CHECK, 12),
        ("workloads", 12),
    ]
    assert "oracle" in capsys.readouterr().out
    assert fit_policy.main([*words, "--resume"]) == 0 and json.loads(results.read_text())["rows"] == rows
