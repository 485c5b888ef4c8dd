"""On every architecture, with every draft, the text is the target's own. Windows of 8 are passed several times over."""

from __future__ import annotations

import pytest
import torch

import tiny
from spec_loop import LOOPS

N, K = 30, 3


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_target_that_drafts_for_itself_is_always_accepted(name, loop):
    target = tiny.model(name)
    done = tiny.speculated(target, target, n=N, k=K, loop=loop)
    assert tuple(done.tokens) == tiny.greedy_once(target, tiny.PROMPT, N)
    assert sum(done.rejected) == 0
    assert sum(done.accepted) == sum(map(len, done.proposals))
    assert done.target_passes == -(-N // (K + 1))


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_draft_that_is_always_wrong_changes_nothing(name, loop):
    target = tiny.model(name)
    done = tiny.speculated(target, tiny.always_wrong(target), n=N, k=K, loop=loop)
    assert tuple(done.tokens) == tiny.greedy_once(target, tiny.PROMPT, N)
    assert set(done.accepted) == {0}
    assert done.target_passes == N


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_draft_that_is_sometimes_wrong_changes_nothing(name, loop):
    target = tiny.model(name)
    done = tiny.speculated(target, tiny.near(target, 0.03), n=N, k=K, loop=loop)
    assert tuple(done.tokens) == tiny.greedy_once(target, tiny.PROMPT, N)
    assert 0 < sum(done.rejected) < done.target_passes, (
        "this draft is meant to be right in some rounds and wrong in others"
    )


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_the_baseline_is_plain_greedy_text(name):
    target = tiny.model(name)
    assert tuple(tiny.plainly(target, n=N).tokens) == tiny.greedy_once(target, tiny.PROMPT, N)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_target_with_more_rows_than_its_draft_stays_exact(loop):
    """Tables of one family are padded differently; the id 168 that this target writes has no row in the draft."""
    target, draft = tiny.qwen2(vocab_size=176), tiny.qwen2(seed=1, vocab_size=160)
    expected = tiny.greedy(target, tiny.PROMPT, 60)
    assert max(expected) >= 160, "the target must write an id that the draft cannot read"
    assert tiny.speculated(target, draft, n=60, loop=loop).tokens == expected


@pytest.mark.parametrize("loop", LOOPS)
def test_a_draft_with_more_rows_than_its_target_proposes_only_what_the_target_has(loop):
    target, draft = tiny.qwen2(seed=1, vocab_size=160), tiny.qwen2(vocab_size=176)
    ids = tiny.greedy(draft, tiny.PROMPT, 60)
    assert max(ids) >= 160, "left alone, the draft must write an id that the target cannot read"
    done = tiny.speculated(target, draft, n=60, loop=loop)
    assert done.tokens == tiny.greedy(target, tiny.PROMPT, 60)
    assert all(guess < 160 for guesses in done.proposals for guess in guesses)


def test_a_padded_pair_is_still_accepted():
    """The same weights under a larger table: padding alone costs no acceptance."""
    target = tiny.qwen2(vocab_size=160)
    draft = tiny.qwen2(vocab_size=176)
    state = target.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], torch.full((16, 32), 9.0)])
    draft.load_state_dict(state)
    done = tiny.speculated(target, draft, n=24)
    assert done.tokens == tiny.greedy(target, tiny.PROMPT, 24)
    assert sum(done.rejected) == 0


def test_a_prompt_id_the_draft_has_no_row_for_silences_the_draft():
    target, draft = tiny.qwen2(vocab_size=176), tiny.qwen2(seed=1, vocab_size=160)
    prompt = (5, 170, 9)
    done = tiny.speculated(target, draft, prompt, n=12)
    assert done.tokens == tiny.greedy(target, prompt, 12)
    assert done.draft_passes == 0
