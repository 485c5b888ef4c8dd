"""Medusa's heads: the text stays the target's own by chain and by tree, every guess is made from the state it should be, the
file comes back, the sampled law is the target's."""

from __future__ import annotations

import copy
import functools
import itertools
from types import SimpleNamespace

from spec_common import UserError

import pytest
import torch

import tiny
from enumerate_law import Table, law_of, total_variation, true_law
from spec_harness.arms import Method, Task, draft_model, run_baseline, run_speculative
from spec_harness.law import law_row
from spec_loop import Budget, Greedy, prefill, speculate
from spec_methods.medusa import MedusaDrafter, MedusaTreeDrafter, likeliest_tree
from spec_methods.policy import FixedK
from spec_methods.sampled import Chance, Sampled
from spec_models import pairs
from spec_models.checks import Loaded
from spec_models.files import build_draft, kind_of
from spec_models.fused import FusedLlama
from spec_models.medusa import Medusa, build_medusa, save_medusa
from spec_models.vocab import CutHead

PROMPT = torch.tensor([tiny.PROMPT])
RANKS = [[0.5, 0.2, 0.1], [0.3, 0.2, 0.1], [0.2, 0.1, 0.05]]
TREE_NODES = 13


@torch.inference_mode()
def written_states(target, n: int = 56):
    """The ids that the target writes after the prompt, with it, and its final states at each."""
    ids = torch.tensor([[*tiny.PROMPT, *tiny.greedy(target, tiny.PROMPT, n)]])
    return ids[0], target(ids, output_hidden_states=True, use_cache=False).hidden_states[-1][0]


@functools.cache
def learnt(architecture):
    """A target and heads that know some of its greedy text, guesses of every rank among them."""
    target = architecture()
    ids, states = (one.clone() for one in written_states(target))
    torch.manual_seed(0)
    medusa = Medusa(target, 3)
    optimizer = torch.optim.AdamW(medusa.blocks.parameters(), lr=3e-2)
    for _ in range(7):
        logits = medusa(states)
        loss = sum(torch.nn.functional.cross_entropy(logits[: -2 - head, head], ids[2 + head :]) for head in range(3))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    medusa.ranks = RANKS
    return target, medusa.eval()


def method_of(target, medusa, tree: bool, k: int = 3, rule=None):
    if not tree:
        return Method(MedusaDrafter(medusa, target, 64), FixedK(k), rule or Greedy())
    return Method(MedusaTreeDrafter(medusa, target, 64, TREE_NODES), FixedK(k), rule or Greedy())


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("architecture", [tiny.llama, tiny.qwen2, tiny.gpt2])
def test_the_text_is_the_targets_own(architecture, trained, k, tree):
    target, medusa = learnt(architecture)
    if not trained:
        medusa = Medusa(target, 3).eval()
        medusa.ranks = RANKS
    done = run_speculative(Task(target, PROMPT, 40), method_of(target, medusa, tree, k)).done
    assert done.tokens == list(tiny.greedy(target, tiny.PROMPT, 40))
    assert done.draft_passes == done.draft_tokens_read == 0 and done.target_passes == len(done.rounds)
    assert max(map(len, done.proposals)) == (
        min(k, 3) if not tree else TREE_NODES if k >= 3 else max(map(len, done.proposals))
    )


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("architecture", [tiny.llama, tiny.qwen2])
def test_a_fused_target_hands_out_the_same_state(architecture, tree):
    target, medusa = learnt(architecture)
    fused = FusedLlama(copy.deepcopy(target)).eval()
    done = run_speculative(Task(fused, PROMPT, 40), method_of(fused, medusa, tree)).done
    plain = run_speculative(Task(target, PROMPT, 40), method_of(target, medusa, tree)).done
    assert done.tokens == plain.tokens and done.proposals == plain.proposals


@pytest.mark.parametrize("tree", [False, True])
def test_guesses_are_accepted_to_every_depth_and_in_every_place(tree):
    """Otherwise the tests above would look at one kind of round alone."""
    target, medusa = learnt(tiny.llama)
    done = run_speculative(Task(target, PROMPT, 40), method_of(target, medusa, tree)).done
    assert len(set(done.accepted)) >= 3, done.accepted
    assert not tree or any(list(path) != list(range(len(path))) for path in (one.path for one in done.rounds))


@pytest.mark.parametrize("tree", [False, True])
def test_every_guess_is_its_heads_from_the_state_before_the_texts_last_token(tree):
    target, medusa = learnt(tiny.llama)
    done = run_speculative(Task(target, PROMPT, 40), method_of(target, medusa, tree)).done
    text = list(tiny.PROMPT)
    for one in done.rounds:
        state = target.model(torch.tensor([text]), use_cache=False).last_hidden_state[0, -2:-1]
        best = medusa(state)[0].topk(3).indices.tolist()
        if tree and one.guesses:
            shape = [
                guess
                for guess in likeliest_tree(RANKS, TREE_NODES)
                if guess.depth < 40 - (len(text) - len(tiny.PROMPT)) - 1
            ]
            assert list(one.guesses) == [best[guess.depth][guess.rank] for guess in shape]
        elif not tree:
            assert list(one.guesses) == [head[0] for head in best][: len(one.guesses)]
        text += done.tokens[len(text) - len(tiny.PROMPT) :][: one.emitted]


@pytest.mark.parametrize("length", [1, 2])
def test_a_text_of_one_token_has_no_state_to_guess_from(length):
    target, medusa = learnt(tiny.llama)
    for tree in (False, True):
        task = Task(target, PROMPT[:, :length], 20)
        done = run_speculative(task, method_of(target, medusa, tree)).done
        assert done.tokens == run_baseline(task).done.tokens
        assert bool(done.proposals[0]) == (length > 1) and done.proposals[1]


def test_the_tree_is_the_likeliest_of_its_size():
    """Beside all ways spelled out: the sum of values is that of the best ones, and parents come first."""
    ways = [way for depth in (1, 2, 3) for way in itertools.product(range(3), repeat=depth)]
    values = {
        way: torch.tensor([RANKS[i][rank] for i, rank in enumerate(way)], dtype=torch.float64).prod().item()
        for way in ways
    }
    for nodes in (1, 2, 5, 9, 20, 39):
        tree = likeliest_tree(RANKS, nodes)
        assert sum(one.value for one in tree) == pytest.approx(sum(sorted(values.values(), reverse=True)[:nodes]))
        spelled = []
        for i, one in enumerate(tree):
            assert one.parent < i
            spelled.append((*(spelled[one.parent] if one.parent >= 0 else ()), one.rank))
            assert len(spelled[-1]) == one.depth + 1 and values[spelled[-1]] == pytest.approx(one.value)
        assert len(set(spelled)) == len(tree) == nodes
    assert len(likeliest_tree(RANKS, 100)) == 39 and likeliest_tree([], 3) == []


def test_what_passes_cost_decides_how_many_nodes_are_offered():
    target, medusa = learnt(tiny.llama)
    dear = MedusaTreeDrafter(medusa, target, 64, 20, v=lambda n: 1 + 0.4 * (n - 1))
    assert len(dear.tree) == 1 and len(MedusaTreeDrafter(medusa, target, 64, 20).tree) == 20
    with pytest.raises(ValueError, match="train it again"):
        MedusaTreeDrafter(Medusa(target, 2), target, 64, 4)


class Heads:
    """Of a vocabulary of three: each head ranks the ids by what the feature, which is the last id that it came from, says."""

    heads, ranks = 2, [[0.5, 0.3], [0.4, 0.3]]

    def __call__(self, features):
        last = int(features[0, 0])
        return torch.tensor([[[float((3 * i + last * (head + 1)) % 5) for i in range(3)] for head in range(2)]])

    def get_output_embeddings(self):
        return None

    def get_input_embeddings(self):
        return torch.nn.Embedding(3, 1)


@pytest.mark.parametrize("tree", [False, True])
def test_the_sampled_law_is_the_targets_own_enumerated(tree):
    """All branches of three tokens: certain guesses, siblings taken out one after the other, the rest for the target."""
    target, prompt, n = Table(3, 4), (0, 2), 3

    def run(chance):
        heads, rule = Heads(), Sampled(0.9, 0, 1.0, chance)
        drafter = MedusaDrafter.__new__(MedusaTreeDrafter if tree else MedusaDrafter)
        drafter.model, drafter.ids, drafter.taps = (
            heads,
            type("Ids", (), {"sayable": None, "of": staticmethod(lambda ids: ids)}),
            (),
        )
        drafter.tree = likeliest_tree(heads.ranks, 5)
        state = prefill(target, torch.tensor([prompt]), n)
        drafter.last = torch.tensor([[float(prompt[0])]])
        drafter.keep = lambda state, path, features: setattr(
            drafter, "last", state.ids[:, state.length - 2 : state.length - 1].float()
        )
        return speculate(target, drafter, state, n, rule, FixedK(2)).tokens

    wanted = true_law(lambda ids: Sampled(0.9, 0, 1.0, None).law(target.logits_after(ids)[None])[0].tolist(), prompt, n)
    assert total_variation(law_of(run), wanted) < 1e-12


def test_sampled_its_first_two_tokens_have_the_targets_law():
    target, medusa = learnt(tiny.llama)
    found = law_row(Task(target, PROMPT, 4), medusa, 2, Sampled(1.0, 0, 1.0, Chance(3)), 800)
    assert found["cells"] > 5 and found["p_value"] > 1e-4


def test_a_cut_head_says_the_targets_ids():
    target, medusa = learnt(tiny.llama)
    cut, kept = copy.deepcopy(medusa), torch.arange(1, 64, 2)
    cut.set_output_embeddings(CutHead(cut.get_output_embeddings(), kept))
    done = run_speculative(Task(target, PROMPT, 40), method_of(target, cut, True)).done
    assert done.tokens == list(tiny.greedy(target, tiny.PROMPT, 40))
    assert {guess % 2 for one in done.proposals for guess in one} == {1}


def test_its_file_comes_back_to_int8_and_is_no_other_kinds(tmp_path):
    target, path = tiny.tied(2), tmp_path / "heads.safetensors"
    medusa = Medusa(target, 3)
    torch.nn.init.normal_(medusa.blocks.weight)
    medusa.ranks = RANKS
    save_medusa(path, medusa, target, {"steps": 3})
    again = build_medusa(path, target)
    assert kind_of(path) == "medusa" and again.ranks == RANKS and again.heads == 3
    rounding = float(medusa.blocks.weight.detach().abs().max()) / 127
    assert torch.allclose(again.blocks.weight, medusa.blocks.weight, atol=rounding)
    with pytest.raises(ValueError):
        build_draft(path, target)
    with pytest.raises(ValueError, match="another target"):
        build_medusa(path, tiny.tied(2, 9))


def test_a_file_by_its_path_is_a_draft(tmp_path):
    target, path = tiny.tied(2), tmp_path / "heads.safetensors"
    save_medusa(path, Medusa(target, 2), target, {})
    loaded = Loaded(target, None, "tiny", "--target", {"name": "tiny"})
    draft = pairs.load_draft(loaded, str(path), "cpu", torch.float32, None, False)
    task = Task(target, PROMPT, 4)
    assert isinstance(draft.model, Medusa) and isinstance(draft_model(task, draft.model, 2).drafter, MedusaDrafter)
    other = Loaded(tiny.tied(2, 9), None, "other", "--target", {"name": "other"})
    with pytest.raises(UserError, match=r"^--draft heads.safetensors: a head that reads the states"):
        pairs.load_draft(other, str(path), "cpu", torch.float32, None, False)


def test_scripts_that_time_a_drafts_passes_refuse_it():
    target = tiny.llama()
    heads = Loaded(Medusa(target, 2), None, "heads.safetensors", "--draft", {"name": "heads"})
    with pytest.raises(UserError, match=r"^--draft heads.safetensors: Medusa's heads make no pass of their own"):
        pairs.pack(SimpleNamespace(), Loaded(target, None, "tiny", "--target", {}), [heads], "plain")


@pytest.mark.parametrize("depth", [1, 2, 3])
@torch.inference_mode()
def test_a_proposed_tree_has_the_chosen_shape_down_to_the_budget(depth):
    """Every node with the ranks on its way, as the chosen tree spells them, none deeper than was asked for."""
    target, medusa = learnt(tiny.llama)
    drafter = MedusaTreeDrafter(medusa, target, 64, TREE_NODES)
    state = prefill(target, PROMPT, 10, drafter.taps)
    drafter.start(state)
    made, best = drafter.propose(state, Budget(depth)), medusa(drafter.last)[0].topk(3).indices.tolist()
    spelled = []
    for one in likeliest_tree(RANKS, TREE_NODES):
        spelled.append((*(spelled[one.parent] if one.parent >= 0 else ()), one.rank))
    wanted = [[best[i][rank] for i, rank in enumerate(way)] for way in spelled if len(way) <= depth]
    assert [[int(made.tokens[node]) for node in made.ancestors(at)] for at in range(len(made))] == wanted
    assert len(wanted) < TREE_NODES or depth == 3
