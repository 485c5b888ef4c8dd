"""Trees of guesses: the text stays the target's own for every shape, on every architecture; the caches keep the right slots."""

from __future__ import annotations

import random

from spec_common import UserError

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tiny
from enumerate_law import Table, law_of, total_variation, true_law
from spec_harness.arms import Method, run_speculative
from spec_loop import Budget, Greedy, ModelDrafter, Pass, forward, keep_slots, new_cache, prefill
from spec_methods import trees
from spec_methods.policy import FixedK
from spec_methods.sampled import Sampled
from spec_methods.trees import Node, TreeDrafter, TreeProposal, best_size, check_tree, tree_geometry
from spec_models.checks import Loaded
from spec_models.fused import FusedLlama

SHAPES = {
    "single": [-1],
    "chain": [-1, 0, 1, 2],
    "wide": [-1] * 6,
    "deep": [-1, 0, 1, 2, 3, 4, 5, 6],
    "uneven": [-1, -1, 0, 0, 1, 2, 5, 5, 6],
}
ARCHITECTURES = ("llama", "qwen2", "gpt2", "gemma3, window 8", "mistral, window 8", "mixtral", "gpt-oss, window 8")


class Scripted(ModelDrafter):
    """Guesses a tree of a fixed shape: at every node the target's own token with some chance, another one otherwise, so
    that paths are accepted to every depth, siblings right in every place. It knows the text that will be written."""

    confident = False

    def __init__(self, target, text: list[int], shape: list[int], seed: int):
        super().__init__(target, 64)
        self.text, self.shape, self.draw = text, shape, random.Random(seed)

    def propose(self, state, budget):
        written, depth, tokens = state.length - self.prompt, {-1: 0}, []
        tree = TreeProposal(torch.empty(0), parents=self.shape)
        shape = self.shape if budget.depth >= max(map(tree.depth_of, range(len(self.shape)))) else []
        for node, parent in enumerate(shape):
            depth[node] = depth[parent] + 1
            right = self.text[written + depth[node] - 1] if written + depth[node] <= len(self.text) else 0
            taken = [tokens[other] for other in range(node) if shape[other] == parent]
            tokens.append(right if self.draw.random() < 0.6 and right not in taken else self.draw.choice([t for t in range(64) if t not in taken]))
        return TreeProposal(torch.tensor(tokens, dtype=torch.long), [None] * len(tokens), parents=list(shape))

    def start(self, state):
        super().start(state)
        self.prompt = state.length

    def keep(self, state, path, features):
        keep_slots(self.cache, 0)


def written(target, shape, seed: int, n: int = 24, prompt=tiny.PROMPT):
    text = list(tiny.greedy_once(target, tuple(prompt), n))
    task = tiny.task(target, prompt, n)
    return text, run_speculative(task, Method(Scripted(target, text, SHAPES[shape], seed), FixedK(8), Greedy())).done


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_text_is_the_targets_own_for_every_shape(name, shape):
    for seed in range(3):
        text, done = written(tiny.model(name), shape, seed)
        assert done.tokens == text
        assert done.target_passes == len(done.rounds) == len(done.emitted)
        assert sum(done.emitted) == len(text)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_fused_pass_checks_trees_as_well(shape):
    target = tiny.llama()
    text = list(tiny.greedy_once(target, tiny.PROMPT, 24))
    task = tiny.task(FusedLlama(tiny.llama()).eval(), n=24)
    done = run_speculative(task, Method(Scripted(task.target, text, SHAPES[shape], 1), FixedK(8), Greedy())).done
    assert done.tokens == text
    assert shape == "single" or sum(done.accepted) > 5


def test_alpha_of_a_tree_counts_a_level_once():
    _, done = written(tiny.llama(), "uneven", 0)
    for one in done.rounds:
        assert len(one.path) <= one.judged <= len(one.path) + 1
        assert one.emitted <= len(one.path) + 1
    assert 0 < sum(done.accepted) < sum(map(len, done.proposals))


@given(shape=st.sampled_from(sorted(SHAPES)), seed=st.integers(0, 10**6), n=st.integers(1, 30))
def test_after_every_round_the_cache_is_a_fresh_prefills(shape, seed, n):
    """Slots, positions and values: what the cache holds is what reading the text afresh gives."""
    target = tiny.llama()
    text = list(tiny.greedy_once(target, tiny.PROMPT, 30))[:n]
    drafter, seen = Scripted(target, text, SHAPES[shape], seed), []
    keep = drafter.keep

    def compared(state, path, features):
        keep(state, path, features)
        fresh = new_cache(target)
        forward(target, state.ids[:, : state.length - 1], fresh)
        seen.append(state.length)
        for mine, right in zip(state.cache.layers, fresh.layers, strict=True):
            assert torch.allclose(mine.keys, right.keys, atol=1e-4) and torch.allclose(mine.values, right.values, atol=1e-4)

    drafter.keep = compared
    run_speculative(tiny.task(target, n=n), Method(drafter, FixedK(8), Greedy()))
    assert seen


# -------------------------------------------------------------------------------------------------------------- mutants


def wrong_mask(model, text, positions, seen, slots):
    """Every token sees all of the tree before it, its siblings too."""
    return tree_geometry(model, text, positions, [list(range(row[-1] + 1)) if row else row for row in seen], slots)


def wrong_positions(model, text, positions, seen, slots):
    """A node stands where its slot is, not where its depth says."""
    return tree_geometry(model, text, [text + i for i in range(len(positions))], seen, slots)


@pytest.mark.parametrize("wrong", [wrong_mask, wrong_positions])
def test_a_wrong_mask_or_position_is_seen(wrong, monkeypatch):
    monkeypatch.setattr(trees, "tree_geometry", wrong)
    assert any(text != done.tokens for text, done in (written(tiny.llama(), "uneven", seed) for seed in range(4)))
    with pytest.raises(UserError, match="cannot check a tree"):
        check_tree(Loaded(tiny.llama(), None, "x", "--target"))


def test_a_wrong_slot_kept_is_seen(monkeypatch):
    def wrong(cache, length, path=()):
        keep_slots(cache, length, [slot - (i == len(path) - 1 and slot > length + i) for i, slot in enumerate(path)])

    monkeypatch.setattr("spec_loop.keep_slots", wrong)
    assert any(text != done.tokens for text, done in (written(tiny.llama(), "uneven", seed) for seed in range(6)))


def test_a_sibling_taken_for_a_child_is_seen(monkeypatch):
    children = TreeProposal.children
    monkeypatch.setattr(TreeProposal, "children", lambda self, node: children(self, node) or ([node + 1] if 0 <= node + 1 < len(self) else []))
    assert any(text != done.tokens for text, done in (written(tiny.llama(), "uneven", seed) for seed in range(6)))


# -------------------------------------------------------------------------------------------------- the tree of a draft


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "gemma3, window 8"])
@pytest.mark.parametrize("nodes", [1, 3, 8, 20])
def test_the_drafts_own_tree_writes_the_targets_text(name, nodes):
    target = tiny.model(name)
    for draft in (target, tiny.near(target), tiny.always_wrong(target)):
        task = tiny.task(target, n=30)
        done = run_speculative(task, Method(TreeDrafter(draft, 64, nodes), FixedK(4), Greedy())).done
        assert done.tokens == tiny.greedy(target, tiny.PROMPT, 30)
        assert all(len(guesses) <= nodes for guesses in done.proposals)
        if draft is target and nodes >= 4:
            assert sum(done.accepted) > 0 and done.target_passes < 20


def test_the_drafts_cache_is_a_prefix_of_the_text_after_every_round():
    """Otherwise the guesses would be worse and nothing else would show it."""
    target, draft = tiny.llama(), tiny.near(tiny.llama())
    drafter, keep, rounds = TreeDrafter(draft, 64, 12), TreeDrafter.keep, []

    def compared(state, path, features):
        keep(drafter, state, path, features)
        held, fresh = drafter.cache.get_seq_length(), new_cache(draft)
        assert held < state.length
        forward(draft, state.ids[:, :held], fresh)
        for mine, right in zip(drafter.cache.layers, fresh.layers, strict=True):
            assert torch.allclose(mine.keys, right.keys, atol=1e-4)
        rounds.append(len(path))

    drafter.keep = compared
    run_speculative(tiny.task(target, n=40), Method(drafter, FixedK(4), Greedy()))
    assert max(rounds) >= 2


def test_the_best_nodes_are_the_ones_with_the_highest_way_products():
    """Every node of the tree is worth no less than any that was left out, as far as the draft was asked."""
    target = tiny.llama()
    drafter, seen = TreeDrafter(tiny.near(target), 64, 6), []
    grown = drafter.grown
    drafter.grown = lambda *given: seen.append(grown(*given)) or seen[-1]
    state = prefill(target, torch.tensor([tiny.PROMPT]), 8)
    drafter.start(state)
    made = drafter.propose(state, Budget(3))
    values = sorted((node.value for level in seen for node in level), reverse=True)
    assert len(made) == 6
    assert [node.value for node in drafter.tree] == values[:6]
    assert made.parents == [-1 if node.parent is None else drafter.tree.index(node.parent) for node in drafter.tree]


def test_how_many_nodes_pay_follows_the_costs():
    values = [0.9, 0.5, 0.3, 0.1, 0.05]
    assert best_size(values, 0.1, lambda n: 1.0)[0] == 5, "free checking: every node"
    assert best_size(values, 0.1, lambda n: 1 + 0.2 * (n - 1))[0] == 2
    assert best_size(values, 0.1, lambda n: 1 + 2 * (n - 1))[0] == 0, "too dear: none"
    steps = {1: 1.0, 2: 1.6, 3: 1.6, 4: 1.6, 5: 1.61, 6: 3}
    assert best_size([0.5, 0.4, 0.3, 0.2, 0.1], 0.0, steps.get)[0] == 4, "past a step of V the rest comes cheap"


def test_a_node_knows_its_way():
    root = Node(5, 0.5, None, 1)
    leaf = Node(7, 0.2, Node(6, 0.3, root, 2), 3)
    assert [node.token for node in leaf.way()] == [5, 6, 7]


# ------------------------------------------------------------------------------------------------------ the sampled law


def sampled_tree_law(rule, shape, n: int = 3):
    target, parents = Table(4, 1), SHAPES[shape][:3]

    class Fixed(Scripted):
        def propose(self, state, budget):
            if budget.depth < 2:
                return TreeProposal(state.ids[0, :0])
            tokens = [(state.length + 2 * node) % 4 for node in range(len(parents))]
            return TreeProposal(torch.tensor(tokens), [None] * len(tokens), parents=parents)

        def keep(self, state, path, features):
            pass

    def run(chance):
        task = tiny.task(target, (1, 2), n)
        drafter = Fixed(target, [], parents, 0)
        return run_speculative(task, Method(drafter, FixedK(3), rule(1.0, 0, 1.0, chance))).done.tokens

    right = true_law(lambda ids: target.logits_after(tuple(ids)).softmax(-1).tolist(), (1, 2), n)
    return total_variation(law_of(run), right)


@pytest.mark.parametrize("shape", ["single", "chain", "wide", "uneven"])
def test_the_law_of_a_sampled_tree_is_the_targets(shape):
    assert sampled_tree_law(Sampled, shape) < 1e-12


class NoRemoval(Sampled):
    """A rejected sibling stays in the law that the next one is judged by."""

    def accepted_child(self, proposal, guesses, node, rest):
        found = super().accepted_child(proposal, guesses, node, rest)
        return found if found.node is not None else found._replace(rest=rest)


@pytest.mark.parametrize("shape", ["single", "wide", "uneven"])
def test_a_tree_rule_without_sibling_removal_writes_another_law(shape):
    assert sampled_tree_law(NoRemoval, shape) > 1e-3


def test_greedy_judges_a_tree_by_its_children():
    logits = torch.full((1, 4, 8), -1.0)
    logits[0, 0, 3] = logits[0, 2, 5] = logits[0, 3, 6] = 1.0
    out = Pass(logits, (), torch.tensor(True))
    verdict = Greedy().judge(out, TreeProposal(torch.tensor([2, 3, 5]), [None] * 3, parents=[-1, -1, 1]))
    assert (verdict.path, verdict.token) == ([1, 2], 6)


# ------------------------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shape", ["chain", "uneven"])
def test_a_drafter_that_asks_for_features_gets_those_of_the_text_and_no_others(shape, fused):
    """Of the prompt at the start and of the kept path in every round: side by side they are what one pass over the whole
    text gives, whatever was rejected between them."""
    plain = tiny.llama()
    target = FusedLlama(tiny.llama()).eval() if fused else plain
    text = list(tiny.greedy_once(plain, tiny.PROMPT, 24))
    drafter, seen = Scripted(target, text, SHAPES[shape], 3), []
    drafter.taps = (1, 2)
    start, keep = drafter.start, drafter.keep

    def started(state):
        start(state)
        seen.append(state.features)

    def kept(state, path, features):
        keep(state, path, features)
        seen.append(features)

    drafter.start, drafter.keep = started, kept
    done = run_speculative(tiny.task(target, n=24), Method(drafter, FixedK(8), Greedy())).done
    assert done.tokens == text and sum(done.accepted) > 3
    whole = plain(torch.tensor([[*tiny.PROMPT, *text]]), output_hidden_states=True, use_cache=False).hidden_states
    for place, tap in enumerate(drafter.taps):
        got = torch.cat([features[place] for features in seen], dim=1)
        assert got.shape[1] == len(tiny.PROMPT) + 24 - 1
        assert torch.allclose(got, whole[tap][:, : got.shape[1]], atol=1e-4)
