"""Block verification writes the target's law, accepts no fewer guesses than the token rule, and its known faults are seen."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch
from test_sampling import DIFFERENT, PLAIN, PROMPT, SAME, HybridDrafter, LookupDrafter, ModelDrafter, distance

from enumerate_law import Table, law_of, processed, total_variation, true_law
from spec_loop import Pass, Proposal
from spec_methods import block
from spec_methods.block import BlockSampled, part_weights
from spec_methods.policy import Confidence
from spec_methods.sampled import Sampled, residual

TABLES = [(1, 2), (3, 4), (5, 6), (7, 8)]


def one_round(target, draft, k: int, rule=BlockSampled, law=PLAIN):
    """(law of the k + 1 tokens behind PROMPT, guesses accepted in the mean): one round over every chain that can be drawn,
    the target's own law behind what the round wrote."""
    found, accepted = defaultdict(float), 0.0
    for chain in itertools.product(range(target.rows), repeat=k):
        laws = [torch.tensor(processed(draft.logits_after((*PROMPT, *chain[:i])).tolist(), *law), dtype=torch.float64) for i in range(k)]
        drawn = float(torch.stack([row[one] for row, one in zip(laws, chain, strict=True)]).prod())
        if not drawn:
            continue
        rows = torch.stack([target.logits_after((*PROMPT, *chain[:i])) for i in range(k + 1)])[None]
        out, made = Pass(rows, (), torch.tensor(True)), Proposal(torch.tensor(chain), laws)

        def judged(chance, out=out, made=made, chain=chain):
            verdict = rule(*law, chance).judge(out, made)
            return [*(chain[i] for i in verdict.path), verdict.token]

        for written, p in law_of(judged).items():
            accepted += drawn * p * (len(written) - 1)
            behind = true_law(lambda ids: processed(target.logits_after(ids).tolist(), *law), (*PROMPT, *written), k + 1 - len(written))  # fmt: skip
            for rest, q in behind.items():
                found[(*written, *rest)] += drawn * p * q
    return dict(found), accepted


def strayed(target, draft, k: int, rule=BlockSampled, law=PLAIN) -> float:
    right = true_law(lambda ids: processed(target.logits_after(ids).tolist(), *law), PROMPT, k + 1)
    return total_variation(one_round(target, draft, k, rule, law)[0], right)


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize(("rows", "k"), [(4, 3), (3, 2), (5, 1)])
def test_a_round_writes_the_targets_law(rows, k, tables):
    assert strayed(*(Table(rows, seed) for seed in tables), k) < SAME


@pytest.mark.parametrize("law", [(0.7, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.8), (0.0, 0, 1.0)])
def test_the_settings_of_the_law_are_kept(law):
    assert strayed(Table(4, 1), Table(4, 2), 2, law=law) < SAME


@pytest.mark.parametrize("options", [{}, {"loop": "essay"}, {"ends": frozenset([1])}, {"policy": Confidence(2, 0.5)}, {"draft_law": (0.5, 2, 1.0)}, {"draft_law": "greedy"}])  # fmt: skip
def test_the_whole_loop_writes_the_targets_law(options):
    """A chain that ended early, for the text's end or the draft's doubt, is judged at the place where it ended."""
    assert distance(Table(3, 1), Table(3, 2), 3, 2, rule=BlockSampled, **options) < SAME


@pytest.mark.parametrize("hybrid", [False, True])
def test_certain_guesses_are_judged_by_the_token_rule(hybrid):
    def make(draft, rows, read_last, rule=None):
        lookup = LookupDrafter()
        return HybridDrafter(lookup, ModelDrafter(draft, rows, read_last, rule), 2) if hybrid else lookup

    assert distance(Table(3, 1), Table(3, 2), 3, 2, drafter=make, rule=BlockSampled) < SAME


def test_the_papers_two_letters():
    """Target (1/3, 2/3), draft (2/3, 1/3), two guesses: 10/9 accepted by the token rule, 11/9 by the block (section 3)."""
    target, draft = (Table(3, probs=lambda ids, row=row: [*row, 0.0]) for row in ([1 / 3, 2 / 3], [2 / 3, 1 / 3]))
    token, whole = (one_round(target, draft, 2, rule)[1] for rule in (Sampled, BlockSampled))
    assert (token, whole) == (pytest.approx(10 / 9), pytest.approx(11 / 9))


@pytest.mark.parametrize("tables", TABLES)
def test_no_fewer_guesses_stand_than_by_the_token_rule(tables):
    target, draft = (Table(4, seed) for seed in tables)
    token, whole = (one_round(target, draft, 3, rule)[1] for rule in (Sampled, BlockSampled))
    assert whole > token + 0.01


def test_equal_laws_accept_everything():
    assert one_round(Table(4, 1), Table(4, 1), 3)[1] == pytest.approx(3)


def test_weights_of_parts_by_hand():
    probs = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]])
    laws = [torch.tensor([0.25, 0.75]), torch.tensor([0.3, 0.7])]
    assert part_weights(probs, laws, [1, 0]) == pytest.approx([1, 2 / 3, 1])
    assert part_weights(probs, laws, [0, 1]) == pytest.approx([1, 1, 1 / 7])



class GivesUp(BlockSampled):
    """Parts are tried from the shortest up, and the first that does not stand ends it."""

    def judge(self, out, proposal):
        probs, laws, guesses = self.law(out.logits[0]), proposal.laws, proposal.tokens.tolist()
        weights, stands, k = part_weights(probs, laws, guesses), 0, len(guesses)
        while stands < k:
            one = stands + 1
            h = weights[k] if one == k else block.part_chance(weights[one], probs[one], laws[one])
            if not self.chance.bernoulli(h):
                break
            stands = one
        rest = probs[k] if stands == k else residual(weights[stands] * probs[stands], laws[stands], guesses[stands])
        return super().judge(out, proposal)._replace(path=list(range(stands)), token=int(self.chance.categorical(rest)))


def test_giving_up_at_the_first_part_that_fails_writes_another_law():
    assert all(strayed(*(Table(4, seed) for seed in tables), 2, GivesUp) > DIFFERENT for tables in TABLES[:2])


def test_the_token_rules_residual_behind_a_part_writes_another_law(monkeypatch):
    """Invisible below four ids and three guesses, and in some tables."""
    plain = lambda weighed, law, guess: residual(weighed / weighed.sum(), law, guess)  # noqa: E731
    monkeypatch.setattr(block, "residual", plain)
    assert max(strayed(*(Table(4, seed) for seed in tables), 3) for tables in TABLES) > DIFFERENT


@pytest.mark.parametrize("wrong", [lambda weight, following, law: weight, lambda weight, following, law: 1.0])
def test_another_chance_for_a_part_writes_another_law(wrong, monkeypatch):
    monkeypatch.setattr(block, "part_chance", wrong)
    assert max(strayed(*(Table(4, seed) for seed in tables), 3) for tables in TABLES) > DIFFERENT
