"""One pass for k guesses: masks change nothing before them, a cached pass is an uncached one, training rows are such passes."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import DynamicCache

import tiny
from draft_training.parallel import chain_states, guess, hits, may_see, rows_of, thinned, walk
from draft_training.shards import Shards

IDS = list(tiny.PROMPT)


@pytest.fixture(scope="module")
def draft():
    return tiny.llama()


@pytest.fixture(scope="module")
def mask():
    return torch.randn(32, generator=torch.Generator().manual_seed(1))


def fresh(draft, mask, ids, k):
    return guess(draft, mask, ids, k, DynamicCache())


@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_first_guess_is_the_ordinary_drafts(draft, mask, k):
    with torch.inference_mode():
        ordinary = draft(torch.tensor([IDS])).logits[0, -1]
    logits = fresh(draft, mask, IDS, k)
    assert logits.shape == (k, 64)
    torch.testing.assert_close(logits[0], ordinary)


def test_a_cached_pass_is_an_uncached_one_and_keeps_no_mask(draft, mask):
    cache = DynamicCache()
    for first, last in ((0, 3), (3, 4), (4, 6)):  # one pass a round, the cache between them
        logits = guess(draft, mask, IDS[first:last], 4, cache)
        assert cache.get_seq_length() == last
        torch.testing.assert_close(logits, fresh(draft, mask, IDS[:last], 4))


def test_later_guesses_depend_on_the_mask(draft, mask):
    here, there = fresh(draft, mask, IDS, 3), fresh(draft, -mask, IDS, 3)
    torch.testing.assert_close(here[0], there[0])
    assert (here[1:] - there[1:]).abs().amax(dim=1).min() > 1e-2


def test_training_rows_are_the_rows_of_the_pass(draft, mask):
    """Every row of two padded texts, at every depth, against the pass that it stands for."""
    texts, depths = [IDS, IDS[::-1][:4]], 3
    ids = torch.tensor([text + [0] * (6 - len(text)) for text in texts])
    places = torch.tensor([[True] * len(text) + [False] * (6 - len(text)) for text in texts])
    anchors, below = thinned(places, [len(text) for text in texts], depths)
    with torch.inference_mode():
        logits = draft.lm_head(rows_of(draft, mask, ids, anchors, below))
    compared = 0
    for text, ids in enumerate(texts):
        for row, (anchor, depth) in enumerate(zip(anchors[text].tolist(), below[text].tolist(), strict=True)):
            if anchor >= 0:
                expected = fresh(draft, mask, ids[: anchor + 1], depths)
                torch.testing.assert_close(logits[text, 6 + row], expected[depth], msg=f"text {text}, row {row}")
                torch.testing.assert_close(logits[text, anchor], expected[0])
                compared += 1
    assert compared == (5 + 4) + (3 + 2)  # depths 1 and 2 of either text, whose last token has nothing to learn below


def test_thinning_keeps_the_chain_above_every_row():
    places = torch.ones(1, 2000, dtype=torch.bool)
    anchors, depths = thinned(places, [2000], 8, torch.Generator().manual_seed(0))
    kept = [set(anchors[0][depths[0] == depth].tolist()) for depth in range(8)]
    assert all(deeper <= above for above, deeper in zip(kept[1:], kept[2:], strict=False))
    shares = [len(anchors) / 2000 for anchors in kept[1:]]
    assert shares == pytest.approx([0.7, 0.49, 0.343, 0.24, 0.2, 0.2, 0.2], abs=0.04)


def test_anchors_stand_only_where_they_may():
    places = torch.tensor([[False, False, True, True, True], [True, False, False, False, False]])
    anchors, depths = thinned(places, [5, 2], 4)
    assert sorted(zip(anchors[0].tolist(), depths[0].tolist(), strict=True)) == [(2, 1), (2, 2), (3, 1)]
    assert [pair for pair in zip(anchors[1].tolist(), depths[1].tolist(), strict=True) if pair[0] >= 0] == [(0, 1)]


def test_a_mask_sees_its_own_chain_and_nothing_later():
    anchors, depths = torch.tensor([[0, 1, 2, 1, 1, 0]]), torch.tensor([[0, 0, 0, 1, 2, 1]])
    seen = may_see(anchors, depths)[0, 0].tolist()
    assert seen[4] == [True, True, False, True, True, False]  # tokens 0 and 1, the mask above, itself
    assert seen[1] == [True, True, False, False, False, False]  # a real token sees no mask


def test_held_out_hits_are_those_of_the_pass(draft, mask):
    draft.mask = torch.nn.Parameter(mask)
    row = {"prompt": IDS[:3], "continuation": IDS[3:] + [7, 4]}
    with torch.inference_mode():
        right = hits(draft, row, 3)
    text = row["prompt"] + row["continuation"]
    for token in range(5):
        logits = fresh(draft, mask, text[: 3 + token], 3)
        for place, said in enumerate(logits.argmax(-1).tolist()):
            assert right[token, place] == (3 + token + place < len(text) and said == text[3 + token + place])


def test_a_walk_counts_rounds_as_a_decoder_does():
    right = torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 0], [1, 1, 0], [0, 1, 0], [1, 0, 0]]).bool()
    # one pass: token 0 right, 1 wrong (its row says 0) -> on to 2: wrong at once -> on to 3: right, right, wrong -> the end
    assert walk(right, True) == ([2, 1, 0], [3, 2, 1])
    # a pass a guess, from column 0 alone: 1 1 0 | 1 0 | 1
    assert walk(right, False) == ([3, 1, 0], [3, 2, 1])


def test_a_step_learns_every_depth_of_the_continued_part(draft, mask, tmp_path):
    """Rows against the teacher's place: with the teacher's best id written as its place, every row must carry its own."""
    lengths, prompts = [6, 5], [2, 4]
    places = torch.cat([torch.arange(length) for length in lengths]).to(torch.int32)
    shard = {
        "ids": torch.arange(11, dtype=torch.int32),
        "hidden": places[:, None].expand(-1, 32).half().contiguous(),
        "top": places[:, None].expand(-1, 16).contiguous(),
        "lengths": torch.tensor(lengths),
        "prompt_lengths": torch.tensor(prompts),
        "kinds": torch.tensor([0, 0]),
    }
    save_file(shard, tmp_path / "shard-0.safetensors")
    shards = Shards(tmp_path, 1.0)
    draft.mask = torch.nn.Parameter(mask)
    with torch.no_grad():
        states, hidden, top = chain_states(draft, shards, shards.index, 3, None)
    assert len(states) == len(hidden) == len(top) == 11 + (4 + 3) + (1 + 0)
    assert top[:, 0].tolist() == places.tolist() + [2, 3, 4, 5, 3, 4, 5, 4]
    assert torch.equal(hidden[:, 0].long(), top[:, 0])
    expected = rows_of(draft, mask, torch.arange(6)[None], torch.tensor([[1, 1]]), torch.tensor([[1, 2]]))
    torch.testing.assert_close(states[11 + 4].float(), expected[0, 7], atol=0.1, rtol=0.1)  # bfloat16
