"""What holds for every k, length, prompt and end token: the text is greedy's own, and the counts obey their identities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from spec_decode import counts
from spec_loop import LOOPS, DecodingError, Greedy, Pass, Proposal, cut_block, forward, keep_slots, new_cache

TARGET = tiny.llama()
DRAFTS = {"itself": TARGET, "near": tiny.near(TARGET), "wrong": tiny.always_wrong(TARGET)}
PROMPTS = [(7,), (5, 9), (5, 9, 3, 17, 2), tuple(range(3, 36))]
LONGEST = 24


def greedy(prompt: tuple, n: int) -> list[int]:
    return list(tiny.greedy_once(TARGET, prompt, LONGEST)[:n])


def stopped(tokens: list[int], ends) -> list[int]:
    """The text up to its first end token, that token included."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))]


cells = {
    "draft": st.sampled_from(sorted(DRAFTS)),
    "k": st.integers(0, 8),
    "n": st.integers(0, LONGEST),
    "prompt": st.sampled_from(PROMPTS),
    "loop": st.sampled_from(LOOPS),
}


@given(**cells)
def test_the_text_is_greedys_own_and_its_length_is_n(draft, k, n, prompt, loop):
    done = tiny.speculated(TARGET, DRAFTS[draft], prompt, n, k, loop=loop)
    assert done.tokens == greedy(prompt, n)


@given(**cells, ends_at=st.sets(st.integers(0, LONGEST - 1), min_size=1, max_size=3))
def test_the_text_ends_with_its_first_end_token(draft, k, n, prompt, loop, ends_at):
    ends = frozenset(greedy(prompt, LONGEST)[i] for i in ends_at)
    expected = stopped(greedy(prompt, n), ends)
    assert tiny.plainly(TARGET, prompt, n, ends=ends).tokens == expected
    done = tiny.speculated(TARGET, DRAFTS[draft], prompt, n, k, loop=loop, ends=ends)
    assert done.tokens == expected
    assert sum(done.emitted) == len(expected)
    assert all(
        kept <= count
        for kept, count in zip(done.accepted[-1:], done.emitted[-1:], strict=True)
        if done.tokens[-1] in ends
    )


@given(**cells)
def test_the_counts_obey_their_identities(draft, k, n, prompt, loop):
    done = tiny.speculated(TARGET, DRAFTS[draft], prompt, n, k, loop=loop)
    rounds, proposed, accepted = done.target_passes, sum(map(len, done.proposals)), sum(done.accepted)
    assert rounds == len(done.proposals) == len(done.accepted) == len(done.emitted)
    assert sum(done.emitted) == n
    if loop == "essay":
        assert proposed == k * rounds
        assert done.draft_passes == (rounds * (k + 1) if k else 0)
        cut = done.accepted[-1] + 1 - done.emitted[-1] if rounds else 0
        assert 0 <= cut <= k
        assert n == accepted + rounds - cut
    else:
        assert done.draft_passes == proposed
        assert n == accepted + rounds  # it never looks past n, so nothing is ever cut


@given(n=st.integers(0, LONGEST), prompt=st.sampled_from(PROMPTS))
def test_the_baseline_takes_one_pass_a_token(n, prompt):
    done = tiny.plainly(TARGET, prompt, n)
    assert done.tokens == greedy(prompt, n)
    assert done.target_passes == n


def noted(fed: list, only=None):
    """`forward`, writing down how many tokens were cached and fed in each pass (of the model `only`)."""

    def run(model, tokens, cache, *rest, **more):
        if only is None or model is only:
            fed.append((cache.get_seq_length(), tokens.shape[1]))
        return forward(model, tokens, cache, *rest, **more)

    return run


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_baseline_really_runs_the_passes_it_counts(prompt, monkeypatch):
    """And feeds each of them one token: a baseline that read its text again would be a weak one."""
    fed = []
    monkeypatch.setattr("spec_loop.forward", noted(fed))
    tiny.plainly(TARGET, prompt, 9)
    prefill = [(0, len(prompt) - 1)] if len(prompt) > 1 else []
    assert fed == prefill + [(len(prompt) - 1 + i, 1) for i in range(9)]


@pytest.mark.parametrize("draft", ["near", "wrong", "itself"])
@pytest.mark.parametrize("loop", LOOPS)
def test_no_pass_reads_a_token_twice(draft, loop, monkeypatch):
    """A cache cut too short is exact as well, and pays for it: every pass feeds what is new and nothing else."""
    target, cheap = TARGET, tiny.near(TARGET, 0) if draft == "itself" else DRAFTS[draft]
    fed = {id(target): [], id(cheap): []}

    def counted(model, tokens, cache, *rest, **more):
        fed[id(model)].append(tokens.shape[1])
        return forward(model, tokens, cache, *rest, **more)

    monkeypatch.setattr("spec_loop.forward", counted)
    done = tiny.speculated(target, cheap, n=LONGEST, k=3, loop=loop)
    prefill = len(tiny.PROMPT) - 1
    assert fed[id(target)] == [prefill, *(len(guesses) + 1 for guesses in done.proposals)]
    first, *passes = fed[id(cheap)]
    assert first == prefill and len(passes) == done.draft_passes and sum(passes) == done.draft_tokens_read
    all_kept = [kept == len(guesses) for kept, guesses in zip(done.accepted, done.proposals, strict=True)]
    twos = sum(
        kept and bool(after) for kept, after in zip(all_kept, done.proposals[1:], strict=False)
    )  # the last guess and the correction
    assert sorted(passes) == [1] * (len(passes) - (twos if loop == "lean" else 0)) + [2] * (
        twos if loop == "lean" else 0
    )


@given(k=st.integers(1, 8), n=st.integers(1, LONGEST), prompt=st.sampled_from(PROMPTS), loop=st.sampled_from(LOOPS))
def test_a_model_that_drafts_for_itself_needs_the_fewest_passes(k, n, prompt, loop):
    done = tiny.speculated(TARGET, TARGET, prompt, n, k, loop=loop)
    assert sum(done.accepted) == sum(map(len, done.proposals))
    assert done.target_passes == -(-n // (k + 1))


@given(k=st.integers(1, 8), n=st.integers(1, LONGEST), loop=st.sampled_from(LOOPS))
def test_a_draft_that_is_always_wrong_gives_one_token_a_pass(k, n, loop):
    row = counts(tiny.speculated(TARGET, DRAFTS["wrong"], n=n, k=k, loop=loop), k)
    assert row["block_efficiency"] == 1
    assert row["acceptance_rate"] == (0 if row["proposed"] else None)
    assert row["alpha"] == (0 if row["proposed"] else None)


@given(**cells)
def test_acceptance_per_position_never_rises(draft, k, n, prompt, loop):
    row = counts(tiny.speculated(TARGET, DRAFTS[draft], prompt, n, k, loop=loop), k)
    shares = [share for share in row["acceptance_per_position"] if share is not None]
    assert len(row["acceptance_per_position"]) == k
    assert shares == sorted(shares, reverse=True)
    assert row["accepted"] + row["discarded"] == row["proposed"]
    assert all(share is None or 0 <= share <= 1 for share in row["acceptance_per_position_given_the_last"])


@pytest.mark.parametrize("loop", LOOPS)
def test_k_of_zero_is_plain_decoding_with_no_acceptance_to_speak_of(loop):
    done = tiny.speculated(TARGET, DRAFTS["near"], n=20, k=0, loop=loop)
    row = counts(done, 0)
    assert done.tokens == greedy(tiny.PROMPT, 20)
    assert (row["target_passes"], row["draft_passes"], row["proposed"]) == (20, 0, 0)
    assert row["acceptance_rate"] is None and row["alpha"] is None


@pytest.mark.parametrize(("n", "k"), [(1, 4), (2, 4), (12, 4), (12, 12), (12, 50), (3, 1)])
def test_the_lean_loop_guesses_no_further_than_what_remains(n, k):
    done = tiny.speculated(TARGET, TARGET, n=n, k=k)
    remaining = n
    for guesses, written in zip(done.proposals, done.emitted, strict=True):
        assert len(guesses) == min(k, remaining - 1)
        remaining -= written
    assert remaining == 0


@pytest.mark.parametrize(("place", "tokens"), [(0, 1), (2, 3), (4, 5), (5, 6)])
@pytest.mark.parametrize("loop", LOOPS)
def test_an_end_token_inside_a_block_stops_the_text_and_what_follows_is_not_counted(place, tokens, loop):
    """Place 5 is the target's own token after five accepted guesses; the others are guesses themselves."""
    text = greedy(tiny.PROMPT, LONGEST)
    assert text[place] not in text[:place]
    done = tiny.speculated(TARGET, TARGET, n=LONGEST, k=5, loop=loop, ends=frozenset([text[place]]))
    assert done.tokens == text[:tokens]
    assert done.accepted == [min(tokens, 5)]
    assert sum(done.rejected) == 0


def test_an_end_token_in_the_prompt_does_not_stop_the_text():
    ends = frozenset(set(tiny.PROMPT) - set(greedy(tiny.PROMPT, LONGEST)))
    assert ends
    assert tiny.speculated(TARGET, TARGET, n=12, k=4, ends=ends).tokens == greedy(tiny.PROMPT, 12)
    assert tiny.plainly(TARGET, n=12, ends=ends).tokens == greedy(tiny.PROMPT, 12)


def test_after_full_acceptance_the_draft_reads_what_it_lacks():
    """With a hole in the draft's cache the text stays exact and acceptance decays: 30 of 30 in 10 rounds is right."""
    done = tiny.speculated(TARGET, TARGET, n=40, k=3)
    assert (sum(done.accepted), sum(map(len, done.proposals)), done.target_passes) == (30, 30, 10)


def test_no_pass_looks_past_the_limit_of_the_context():
    """GPT-2's learned positions: a 21st token after 12 of 32 fails with an index error if anything reads too far."""
    target = tiny.gpt2(n_positions=32)
    prompt = tuple(range(5, 25))
    expected = tiny.greedy(target, prompt, 12)
    for loop in LOOPS:
        for draft in (target, tiny.near(target, 0.03)):
            assert tiny.speculated(target, draft, prompt, 12, 4, loop=loop, limit=32).tokens == expected


def tied_or_same(target, prompt, one: int, other: int) -> bool:
    """Whether two ids are the same, or within rounding of one another's logit, in half precision."""
    row = target(torch.tensor([prompt])).logits[0, -1].float()
    return one == other or float((row[one] - row[other]).abs()) <= 2 * torch.finfo(target.dtype).eps * float(
        row.max().abs()
    )


def test_the_first_token_of_both_arms_agrees_in_half_precision():
    """Both arms share one prefill with one split, so not even a tie can part them at the first token."""
    for seed in range(8):
        target = tiny.llama(
            seed, torch.bfloat16, vocab_size=512, hidden_size=64, intermediate_size=128, initializer_range=0.05
        )
        for length in (1, 2, 8, 33):
            prompt = torch.randint(0, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
            logits = []
            for n in (1, 9):  # one token alone never drafts; of nine the first round looks ahead, over a block
                ours, alone = tiny.speculated(target, target, prompt, n, 4), tiny.plainly(target, prompt, n)
                logits.append(ours.rounds[0].guesses)
                assert tied_or_same(target, prompt, ours.tokens[0], alone.tokens[0])
                assert n > 1 or ours.tokens == alone.tokens, "the very same passes"
            assert logits[0] == [] and len(logits[1]) == 4


# ---------------------------------------------------------------------------------------------------------- the pieces


@pytest.mark.parametrize(
    ("guesses", "choices", "accepted"),
    [([], [4], 0), ([4, 5, 6], [4, 5, 6, 7], 3), ([4, 9, 6], [4, 5, 6, 7], 1), ([9, 4, 5], [4, 4, 5, 6], 0)],
)
def test_row_j_of_the_verify_pass_judges_guess_j(guesses, choices, accepted):
    logits = torch.nn.functional.one_hot(torch.tensor([choices]), 12).float()
    verdict = Greedy().judge(Pass(logits, (), torch.tensor(True)), Proposal(torch.tensor(guesses, dtype=torch.long)))
    assert (verdict.path, verdict.token) == (list(range(accepted)), choices[accepted])
    assert verdict.guesses == guesses and verdict.finite


def test_a_block_is_cut_at_the_room_left_and_after_its_first_end_token():
    assert cut_block([1, 2, 3], 2, frozenset()) == [1, 2]
    assert cut_block([1, 2, 3, 2], 9, frozenset([2])) == [1, 2]
    assert cut_block([1, 2, 3], 1, frozenset([2])) == [1]


@settings(max_examples=20)
@given(fed=st.integers(1, 20), length=st.integers(0, 25))
def test_a_rollback_leaves_a_prefix(fed, length):
    ids = torch.arange(3, 3 + fed)[None]
    cache = new_cache(TARGET)
    forward(TARGET, ids, cache)
    keep_slots(cache, length)
    assert cache.get_seq_length() == min(fed, length)


def test_a_rolled_back_cache_gives_the_logits_of_a_fresh_one():
    ids = torch.tensor([[5, 9, 3, 17, 2, 11, 4, 8]])
    cache = new_cache(TARGET)
    forward(TARGET, ids.flip(1), cache)
    keep_slots(cache, 0)
    forward(TARGET, ids[:, :7], cache)
    keep_slots(cache, 4)
    again = forward(TARGET, ids[:, 4:], cache, 4).logits
    assert torch.allclose(again, TARGET(ids).logits[:, -4:], atol=1e-4)


def test_a_cache_that_does_not_obey_is_noticed():
    class Stubborn:
        def get_seq_length(self):
            return 5

        def keep(self, length, path):
            pass

    with pytest.raises(DecodingError, match="holds 5 tokens after a rollback to 3"):
        keep_slots(Stubborn(), 3)
