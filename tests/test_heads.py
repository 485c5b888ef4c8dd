"""spec_heads.py on a tiny target: every kind of draft in the same turns, each exact, and what the table says of them."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import spec_heads
import tiny
from draft_training.parallel import add_mask
from spec_counts import Decoded
from spec_decode import counts, measure_all
from spec_harness.costs import costs_of
from spec_harness.theory import drafting_cost
from spec_loop import ModelDrafter
from spec_methods.lookup import HybridDrafter, LookupDrafter
from spec_methods.medusa import MedusaDrafter, MedusaTreeDrafter
from spec_methods.parallel import OnePassDrafter
from spec_methods.suffix import SuffixDrafter
from spec_methods.trees import TreeDrafter
from spec_models.cut import cut_layers
from spec_models.eagle import new_eagle, save_eagle
from spec_models.files import save_draft
from spec_models.medusa import Medusa, save_medusa

RANKS = [[0.6, 0.2, 0.1], [0.4, 0.2, 0.1]]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory) -> dict[str, str]:
    """A target on the disk, and a file of each kind of draft made for it, by kind."""
    folder, target = tmp_path_factory.mktemp("heads"), tiny.tied(3)
    found = {"target": tiny.save(target, folder / "target")}
    for kind in ("draft", "one-pass", "eagle", "medusa", "unjudged"):
        found[kind] = str(folder / f"{kind}.safetensors")
    draft = copy.deepcopy(cut_layers(target, [0, 2]))
    save_draft(found["draft"], draft, target, [0, 2], {"tokens": 7, "cpu_minutes": 3.0})
    add_mask(draft)
    save_draft(found["one-pass"], draft, target, [0, 2], {})
    save_eagle(found["eagle"], new_eagle(target, [1]), target, {})
    medusa = Medusa(target, 2)
    torch.manual_seed(1)
    torch.nn.init.normal_(medusa.blocks.weight, std=0.1)
    save_medusa(found["unjudged"], medusa, target, {})
    medusa.ranks = RANKS
    save_medusa(found["medusa"], medusa, target, {})
    return found


@pytest.fixture
def argv(shelf, results):
    quick = ["--n-tokens", "10", "--repeats", "1", "--warmup", "0", "--workload", "code", "-k", "3"]
    return ["--device", "cpu", "--target", shelf["target"], *quick, "--results", str(results)]


def test_every_kind_writes_the_targets_text_in_the_same_turns(shelf, argv, results, monkeypatch, capsys):
    turns = []

    def noted(cells, args):
        turns.append({name: type(cell.method.drafter) for name, cell in cells.items()})
        return measure_all(cells, args)

    monkeypatch.setattr(spec_heads, "measure_all", noted)
    drafts = [shelf[kind] for kind in ("draft", "one-pass", "eagle", "medusa")]
    assert spec_heads.main([*argv, "--drafts", *drafts, "--tree", "4", "--wide"]) == 0
    (drafters,) = turns
    assert {name.replace(".safetensors", ""): kind for name, kind in drafters.items() if "eagle" not in name} == {
        "draft": ModelDrafter, "draft, tree": TreeDrafter, "one-pass": OnePassDrafter,
        "medusa": MedusaDrafter, "medusa, tree": MedusaTreeDrafter,
        "lookup": LookupDrafter, "suffix": SuffixDrafter, "hybrid": HybridDrafter,
    }  # fmt: skip
    document = json.loads(results.read_text())
    rows = {row["method"]: row for row in document["rows"] if row["part"] == "heads"}
    assert list(rows) == list(drafters) and all(row["exact"] for row in rows.values())
    assert len({tuple(row["tokens"]) for row in rows.values()}) == 1 and document["status"] == "complete"
    assert rows["medusa.safetensors"]["draft_passes"] == 0 and rows["medusa.safetensors"]["draft_s"] > 0
    said = {row["method"]: row for row in document["summary"]["methods"]}
    assert said["draft.safetensors"]["trained_tokens"] == 7 and said["draft.safetensors"]["trained_minutes"] == 3.0
    size = sum(one.numel() for name, one in cut_layers(tiny.tied(3), [0, 2]).named_parameters() if "embed" not in name)
    assert said["draft.safetensors"]["trained"] == size and said["lookup"]["trained"] == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "token for token the target's own text" in out and "took the least time" in out and "its chain" in out


def test_a_finished_run_measures_nothing_again(shelf, argv, results):
    argv = [*argv, "--drafts", shelf["medusa"], "--copy", "suffix"]
    assert spec_heads.main(argv) == 0
    before = json.loads(results.read_text())["rows"]
    tiny.killed_at(results, before[:-1])
    assert spec_heads.main([*argv, "--resume"]) == 0
    after = json.loads(results.read_text())["rows"]
    assert after[: len(before) - 1] == before[:-1] and [row["method"] for row in after[-2:]] == ["medusa.safetensors", "suffix"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--drafts", "unjudged", "--tree", "4"], "--drafts unjudged.safetensors: its file does not say how often"),
        (["--drafts", "draft", "draft"], "--drafts: the same draft twice"),
        (["--drafts", "draft", "--copy", "none", "lookup"], "--copy none: goes with no other"),
        (["--drafts", "draft", "--loop", "essay"], "--loop essay: takes a draft pass a guess"),
        ([], "--drafts: missing; name the drafts"),
        (["--drafts", "nowhere.safetensors"], "--drafts nowhere.safetensors"),
    ],
)
def test_bad_input_gets_one_line(words, says, shelf, argv, capsys):
    try:
        code = spec_heads.main([*argv, *(shelf.get(word, word) for word in words)])
    except SystemExit as left:
        code = left.code
    last = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and says in last[-1] and not any("Traceback" in line for line in last)


def test_acceptance_by_depth_counts_the_rounds_that_judged_that_depth():
    done = Decoded()
    done.count_round([5, 6, 7], [5, 6, 9], [0, 1], wrong=True)  # two stood, the third did not
    done.count_round([5], [8, 8], [], wrong=True)
    done.count_round([5, 6], [5], [0])  # all there was stood
    done.count_round([4])  # nothing was guessed
    row = counts(done, 3)
    assert row["judged_lengths"] == [3, 1, 1, 0]
    assert spec_heads.by_depth([row]) == [2 / 3, 1.0, 0.0]
    assert spec_heads.by_depth([row, row])[0] == 2 / 3 and spec_heads.by_depth([counts(Decoded(), 3)]) == []


def test_heads_cost_their_product_once_a_round_however_many_guesses_are_made():
    costs = costs_of({1: [2.0], 4: [3.0], "draft": [0.5], "draft place 1": [0.5]}, heads=4)
    assert costs["c"] == 0.25 / 4 and costs["c2"] == costs["c_places"][0] == 0.25 and costs["one_pass"]
    assert drafting_cost(costs, [3, 4, 0], second=-7) == pytest.approx(0.5)
