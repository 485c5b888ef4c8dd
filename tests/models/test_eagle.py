"""A draft that reads the target's states: its rows see what a chain sees, its file comes back, and as a draft it leaves the text the target's own."""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace

from spec_common import UserError

import pytest
import torch

import tiny
from spec_harness.arms import Task, draft_model, run_baseline, run_speculative
from spec_harness.law import drawn_pairs, law_row, law_task
from spec_loop import ModelDrafter, forward, new_cache, prefill
from spec_methods.eagle import EagleDrafter
from spec_methods.sampled import Chance, Sampled
from spec_models import pairs
from spec_models.checks import Loaded
from spec_models.eagle import build_eagle, new_eagle, save_eagle
from spec_models.files import build_draft, kind_of
from spec_models.fused import FusedLlama

PROMPT = torch.tensor([tiny.PROMPT])


def greedy_texts(target, rows: int = 12, length: int = 60):
    """Texts (rows, length) that the target writes after the prompt, and after the prompt with another last token."""
    ids = PROMPT.repeat(rows, 1)
    ids[1:, -1] += torch.arange(1, rows)
    return target.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=length, max_new_tokens=length, do_sample=False)


@functools.cache
def trained(architecture, seed: int):
    """A target and a head that has learnt a little of what it writes: some guesses are right, some are not."""
    target = architecture(seed)
    torch.manual_seed(seed)
    eagle, ids = new_eagle(target, [target.config.num_hidden_layers - 1]), greedy_texts(target)
    with torch.inference_mode():
        features = features_of(target, ids)
    features, ids = features.clone(), ids.clone()
    optimizer = torch.optim.AdamW([one for one in eagle.parameters() if one.requires_grad], lr=3e-3)
    for _ in range(45):
        loss = 0
        for depth, states in enumerate(eagle.unrolled(ids, features, 3)):
            logits = eagle.get_output_embeddings()(states[:, depth:-1])
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, depth + 1 :].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return target, eagle.eval()


def head_for(target, seed: int = 1):
    """An untrained one that features move."""
    torch.manual_seed(seed)
    eagle = new_eagle(target, [target.config.num_hidden_layers - 1])
    torch.nn.init.normal_(eagle.join.weight, std=eagle.join.in_features**-0.5)
    return eagle.eval()


def of_three_layers(seed):
    return tiny.tied(3, seed)


def features_of(target, ids):
    return target.model(ids, use_cache=False).last_hidden_state


def in_pass(target, eagle, fused: bool):
    """Copies of both in one form of pass: a fused one takes the weights over."""
    target, eagle = copy.deepcopy((target, eagle))
    return (FusedLlama(target).eval(), pairs.fuse(eagle, "fused")) if fused else (target, eagle)


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("architecture", [tiny.llama, tiny.qwen2, of_three_layers])
@pytest.mark.parametrize("fused", [False, True])
def test_the_text_is_the_targets_own(architecture, k, learnt, fused):
    target, eagle = trained(architecture, 1)
    target, eagle = in_pass(target, eagle if learnt else head_for(target), fused)
    task = Task(target, PROMPT, 40)
    expected = run_baseline(task).done.tokens
    done = run_speculative(task, draft_model(task, eagle, k)).done
    assert done.tokens == expected
    assert isinstance(draft_model(task, eagle, k).drafter, EagleDrafter)


@pytest.mark.parametrize("architecture", [tiny.llama, tiny.qwen2, of_three_layers])
def test_some_guesses_are_right_and_some_are_not(architecture):
    """Otherwise the test above would look at one kind of round alone."""
    target, eagle = trained(architecture, 1)
    task = Task(target, PROMPT, 40)
    done = run_speculative(task, draft_model(task, eagle, 3)).done
    assert len(set(done.accepted)) >= 3, done.accepted


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_text_of_few_tokens_has_few_features(length):
    target = tiny.llama()
    task = Task(target, PROMPT[:, :length], 20)
    done = run_speculative(task, draft_model(task, head_for(target), 3)).done
    assert done.tokens == run_baseline(task).done.tokens
    assert all(done.proposals[:-1])  # nothing comes before a text's first token, and no feature goes with it


@pytest.mark.parametrize("fused", [False, True])
def test_every_guess_is_what_training_would_have_it_say(fused):
    """The guesses of every round, behind accepted and rejected ones, are those of `unrolled` over the text so far: the true
    feature beside each token that stands, its own states behind it, in the places and with the sight that it was trained."""
    (plain, eagle), k = trained(of_three_layers, 1), 4
    target, running = in_pass(plain, eagle, fused)
    task = Task(target, PROMPT, 60)
    done = run_speculative(task, draft_model(task, running, k)).done
    text, looked = list(tiny.PROMPT), 0
    for one in done.rounds:
        ids = torch.tensor([[*text, *one.guesses]])
        features = features_of(plain, ids)
        states = eagle.unrolled(ids, features, max(1, len(one.guesses)))
        for depth, guess in enumerate(one.guesses):
            said = eagle.get_output_embeddings()(states[depth][0, len(text) - 1 + depth]).argmax()
            assert guess == said, (len(text), depth)
            looked += depth > 0
        text += done.tokens[len(text) - PROMPT.shape[1] :][: one.emitted]
    assert looked > 30


def test_no_row_sees_a_feature_of_its_own_token_or_a_later_one():
    """Another feature at a place changes no row up to there; the row after it reads it at depth 0, and at depth d the row d
    further on is the first that sees it, through its chain."""
    target = tiny.tied(3)
    eagle = head_for(target)
    ids = torch.tensor([[*tiny.PROMPT, *tiny.PROMPT]])
    features = features_of(target, ids)
    before = eagle.unrolled(ids, features, 3)
    for place in range(ids.shape[1] - 1):
        changed = features.clone()
        changed[:, place] += 1
        after = eagle.unrolled(ids, changed, 3)
        for depth in range(3):
            first = place + 1 + depth
            assert torch.equal(before[depth][:, :first], after[depth][:, :first])
            if first < ids.shape[1]:
                assert not torch.equal(before[depth][:, first], after[depth][:, first])


def test_no_row_sees_a_later_token():
    target = tiny.tied(3)
    eagle = head_for(target)
    ids = torch.tensor([[*tiny.PROMPT, *tiny.PROMPT]])
    features = features_of(target, ids)
    before = eagle.unrolled(ids, features, 3)
    for place in range(1, ids.shape[1]):
        other = ids.clone()
        other[:, place] = 60
        for depth, states in enumerate(eagle.unrolled(other, features, 3)):
            assert torch.equal(before[depth][:, :place], states[:, :place])
            assert not torch.equal(before[depth][:, place], states[:, place])


def test_without_its_matrix_it_is_the_ordinary_draft_of_its_layers():
    """What a trained draft is begun from: at every depth the same states, features or not."""
    target = tiny.tied(3)
    eagle, ids = new_eagle(target, [0, 2]), torch.tensor([[*tiny.PROMPT, *tiny.PROMPT]])
    alone = eagle.body.model(ids, use_cache=False).last_hidden_state
    for depth, states in enumerate(eagle.unrolled(ids, features_of(target, ids), 3)):
        torch.testing.assert_close(states[:, depth:], alone[:, depth:], atol=1e-4, rtol=1e-4)


def test_what_a_round_leaves_in_the_cache_is_a_fresh_reading(monkeypatch):
    """After every round the kept rows are those of one pass over the text with the target's true features."""
    target, eagle = trained(of_three_layers, 1)
    seen = []
    keep = EagleDrafter.keep

    def looked_at(self, state, path, features):
        keep(self, state, path, features)
        held = self.cache.get_seq_length()
        assert held + self.pending.shape[1] == state.length
        true = torch.nn.functional.pad(features_of(target, state.ids[:, : state.length]), (0, 0, 1, 0))
        assert torch.allclose(self.pending, true[:, held : state.length], atol=1e-4)
        fresh = new_cache(eagle)
        if held:
            forward(eagle, state.ids[:, :held], fresh, features=true[:, :held])
            assert torch.allclose(fresh.layers[0].keys, self.cache.layers[0].keys, atol=1e-3)
            assert torch.allclose(fresh.layers[0].values, self.cache.layers[0].values, atol=1e-3)
        seen.append(held)

    monkeypatch.setattr(EagleDrafter, "keep", looked_at)
    task = Task(target, PROMPT, 40)
    run_speculative(task, draft_model(task, eagle, 3))
    assert len(set(seen)) > 5


def test_passes_and_tokens_read_are_counted():
    """A round of k guesses takes k passes; the first reads what was written since, the others one token each."""
    (target, eagle), k = trained(of_three_layers, 1), 3
    task = Task(target, PROMPT, 40)
    done = run_speculative(task, draft_model(task, eagle, k)).done
    assert done.draft_passes == sum(map(len, done.proposals))
    drafted = [i for i, one in enumerate(done.rounds) if one.guesses]
    first = sum(done.rounds[i - 1].emitted if i else 1 for i in drafted)
    assert done.draft_tokens_read == first + done.draft_passes - len(drafted)


def test_its_file_comes_back_to_int8_and_is_no_other_kinds(tmp_path):
    target, path = tiny.tied(3), tmp_path / "head.safetensors"
    eagle = head_for(target)
    save_eagle(path, eagle, target, {"steps": 3})
    again = build_eagle(path, target)
    assert kind_of(path) == "eagle"
    for name, weight in eagle.state_dict().items():
        rounding = weight.abs().max() / 127 if weight.ndim == 2 else 0
        assert torch.allclose(again.state_dict()[name], weight, atol=float(rounding)), name
    with pytest.raises(ValueError):
        build_draft(path, target)
    with pytest.raises(ValueError, match="another target"):
        build_eagle(path, tiny.tied(3, 9))


def loaded(target) -> Loaded:
    return Loaded(target, None, "tiny", "--target", {"name": "tiny"})


def test_a_file_by_its_path_is_a_draft(tmp_path):
    target, path = tiny.tied(3), tmp_path / "head.safetensors"
    save_eagle(path, head_for(target), target, {})
    draft = pairs.load_draft(loaded(target), str(path), "cpu", torch.float32, None, False)
    assert draft.model.reads_states and draft.name == "head.safetensors" and draft.about["draft_vocab"] == 0
    assert draft.model.get_input_embeddings().weight is target.get_input_embeddings().weight
    path.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"--draft head.safetensors: not a file of draft_training"):
        pairs.load_draft(loaded(target), str(path), "cpu", torch.float32, None, False)


def test_what_it_cannot_do_is_said(tmp_path):
    target = tiny.tied(3)
    head = Loaded(head_for(target), None, "eagle", "--draft", {"name": "eagle"})
    from spec_methods.rows import check_rows
    from spec_methods.trees import check_tree

    for check in (check_tree, check_rows):
        with pytest.raises(UserError, match=r"^--draft eagle: reads the target's states"):
            check(head)
    args = SimpleNamespace(pass_form="graph")
    with pytest.raises(UserError, match="--pass graph: the passes of eagle are not captured"):
        pairs.run_fused(args.pass_form, [Loaded(target, None, "tiny", "--target", {}), head])


def test_sampled_its_first_two_tokens_have_the_targets_law():
    """Each draw begins where the prompt ends: nothing that the draft read or was given for the last one is left."""
    target, eagle = trained(of_three_layers, 1)
    rule = Sampled(1.0, 0, 1.0, Chance(3))
    found = law_row(Task(target, PROMPT, 4), eagle, 2, rule, 1500)
    assert found["cells"] > 5 and found["p_value"] > 1e-4
    task = law_task(Task(target, PROMPT, 4))
    method = draft_model(task, eagle, 2, Sampled(1.0, 0, 1.0, Chance(3)))
    for _ in drawn_pairs(task, method, range(3)):
        pass
    state = prefill(target, PROMPT, 2, method.drafter.taps)
    assert torch.equal(method.drafter.pending, state.features[0][:, -1:])


def test_an_ordinary_draft_keeps_its_own_drafter():
    target = tiny.llama()
    task = Task(target, PROMPT, 4)
    assert type(draft_model(task, tiny.llama(1), 2).drafter) is ModelDrafter
    assert prefill(target, PROMPT, 4).features == ()
