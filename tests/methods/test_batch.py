"""Decoding a batch: every row gets what its request gets alone, to the token and to the count, whatever its neighbours do."""

from __future__ import annotations

import argparse
import copy
import json
import statistics

from spec_common import UserError, Watch

import pytest
import torch
import transformers as T
from hypothesis import given, settings
from hypothesis import strategies as st

import spec_batch
import tiny
from clock_world import Price, World
from spec_decode import Mismatch, counts
from spec_harness.arms import Method, run_speculative
from spec_harness.batches import BatchRun, Requests, all_rows, predicted_speedup, run_batches, seconds_by_rows
from spec_harness.theory import interpolated
from spec_loop import DecodingError
from spec_methods import batch as batch_loop
from spec_methods import rows as row_cache
from spec_methods.batch import LookupRows, ModelRows
from spec_methods.lookup import MATCHES, LookupDrafter
from spec_methods.policy import POLICIES, FixedK, make_policy
from spec_methods.rows import RowCache, check_rows, feed, mask_of, read_prompts
from spec_methods.trees import check_tree
from spec_models import checks
from spec_models.checks import Loaded
from spec_models.vocab import cut_head

LONGEST = 20
# Ids 0 and 2 are what a tokenizer calls pad and end: in a prompt they are text, and a mask must not look at them.
PROMPTS = [(7,), (0, 0, 0), (5, 9), (2, 5, 2, 9, 2), (5, 9, 3, 17, 2, 11), (0, 21, 0, 8, 0, 0), tuple(range(3, 20))]
TARGETS = {"llama": tiny.llama(dtype=torch.float64), "qwen2": tiny.qwen2().double(), "gpt2": tiny.gpt2().double()}
DRAFTS = {
    name: {"itself": target, "near": tiny.near(target), "wrong": tiny.always_wrong(target)}
    for name, target in TARGETS.items()
}
LLAMA = TARGETS["llama"]


def guessed(target, drafter, prompts, budgets, policy, ends=frozenset()):
    """A batch by any drafter and policy."""
    batch = batch_loop.prefill_rows(target, [torch.tensor([prompt]) for prompt in prompts], budgets, policy.most)
    drafter.start(batch)
    return batch_loop.speculate_rows(target, drafter, batch, policy, ends)


def speculated(target, draft, prompts, budgets, k, ends=frozenset()):
    rows = target.get_input_embeddings().weight.shape[0]
    return guessed(target, ModelRows(draft, rows), prompts, budgets, FixedK(k), ends)


def plainly(target, prompts, budgets, ends=frozenset()):
    return batch_loop.baseline_rows(
        target, batch_loop.prefill_rows(target, [torch.tensor([prompt]) for prompt in prompts], budgets, 0), ends
    )


def own_text(target, prompt: tuple, n: int, ends=frozenset()) -> list[int]:
    """What the request gets by the oracle: greedy, cut after its first end token."""
    tokens = list(tiny.greedy_once(target, prompt, LONGEST)[:n])
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))]


def texts(batch) -> list[list[int]]:
    return [done.tokens for done in batch.done]


rows = st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(0, LONGEST)), min_size=1, max_size=5)
ends_sets = st.frozensets(st.integers(0, 63), max_size=6)


# ------------------------------------------------------------------------------------------------------------ the text


@settings(max_examples=20)
@pytest.mark.parametrize("name", TARGETS)
@given(rows=rows, draft=st.sampled_from(["itself", "near", "wrong"]), k=st.integers(0, 6), ends=ends_sets)
def test_every_row_gets_its_own_text(name, rows, draft, k, ends):
    target, (prompts, budgets) = TARGETS[name], zip(*rows, strict=True)
    expected = [own_text(target, prompt, n, ends) for prompt, n in rows]
    batch = speculated(target, DRAFTS[name][draft], prompts, list(budgets), k, ends)
    assert texts(batch) == expected
    assert texts(plainly(target, prompts, list(budgets), ends)) == expected


@settings(max_examples=8)
@given(rows=rows, draft=st.sampled_from(["itself", "near", "wrong"]), k=st.integers(0, 6), ends=ends_sets)
def test_every_row_counts_what_its_request_counts_alone(rows, draft, k, ends):
    draft, (prompts, budgets) = DRAFTS["llama"][draft], zip(*rows, strict=True)
    batch = speculated(LLAMA, draft, prompts, list(budgets), k, ends)
    assert batch.done == [tiny.speculated(LLAMA, draft, prompt, n, k, ends=ends) for prompt, n in rows]
    assert plainly(LLAMA, prompts, list(budgets), ends).done == [
        tiny.plainly(LLAMA, prompt, n, ends=ends) for prompt, n in rows
    ]


@settings(max_examples=25)
@given(
    rows=rows, draft=st.sampled_from(["itself", "near", "wrong"]), name=st.sampled_from(POLICIES),
    k=st.integers(1, 6), c=st.floats(0, 0.5), ends=ends_sets,
)  # fmt: skip
def test_every_policy_gives_every_row_its_own_text_and_counts(rows, draft, name, k, c, ends):
    """Each row by a policy of its own, which knows nothing of its neighbours, nor of the batch before."""
    draft, (prompts, budgets) = DRAFTS["llama"][draft], zip(*rows, strict=True)
    policy = make_policy(name, k, [c], interpolated({1: 1.0, 9: 1.4}), overhead=0.02)
    expected = [tiny.speculated(LLAMA, draft, prompt, n, ends=ends, policy=policy) for prompt, n in rows]
    policy.learn(k, 0)  # what it knows by now must not matter
    batch = guessed(LLAMA, ModelRows(draft, 64), prompts, list(budgets), policy, ends)
    assert batch.done == expected
    assert texts(batch) == [own_text(LLAMA, prompt, n, ends) for prompt, n in rows]


FEW = tiny.llama(vocab_size=8, dtype=torch.float64)  # its texts repeat themselves
FEW_PROMPTS = [(7,), (1, 2, 3, 1, 2), (5,) * 10, (0, 1, 2, 3, 4, 5, 6, 7), (3, 3, 1, 3, 3)]


@settings(max_examples=25)
@given(
    rows=st.lists(st.tuples(st.sampled_from(FEW_PROMPTS), st.integers(0, LONGEST)), min_size=1, max_size=5),
    sizes=st.sampled_from([(1, 1), (2, 1), (3, 1), (3, 2)]), match=st.sampled_from(MATCHES), name=st.sampled_from(POLICIES),
    k=st.integers(1, 6), ends=st.frozensets(st.integers(0, 7), max_size=2),
)  # fmt: skip
def test_look_up_gives_every_row_its_own_text_and_counts(rows, sizes, match, name, k, ends):
    """Every row copies from its own text alone, under every policy."""
    prompts, budgets = zip(*rows, strict=True)
    policy, drafter = make_policy(name, k, [], interpolated({1: 1.0, 9: 1.4})), LookupDrafter(*sizes, match)
    expected = [run_speculative(tiny.task(FEW, prompt, n, ends=ends), Method(drafter, policy)).done for prompt, n in rows]
    batch = guessed(FEW, LookupRows(drafter), prompts, list(budgets), policy, ends)
    assert batch.done == expected
    assert texts(batch) == [own_text(FEW, prompt, n, ends) for prompt, n in rows]
    assert all(done.draft_passes == 0 and done.draft_tokens_read == 0 for done in batch.done)


def test_rows_that_look_up_guess_in_some_rounds_and_not_in_others_at_once():
    """Or the test above says nothing."""
    batch = guessed(FEW, LookupRows(LookupDrafter(3, 2)), FEW_PROMPTS, [LONGEST] * 5, FixedK(4))
    first = [len(done.proposals[0]) for done in batch.done]
    assert min(first) == 0 < max(first)
    assert 0 < sum(sum(done.accepted) for done in batch.done) < sum(len(g) for done in batch.done for g in done.proposals)


def test_the_order_of_the_rows_does_not_matter():
    draft, budgets = DRAFTS["llama"]["near"], [LONGEST - i for i in range(len(PROMPTS))]
    one = speculated(LLAMA, draft, PROMPTS, budgets, 3).done
    other = speculated(LLAMA, draft, PROMPTS[::-1], budgets[::-1], 3).done
    assert one == other[::-1]
    assert speculated(LLAMA, draft, PROMPTS[2:4], budgets[2:4], 3).done == one[2:4], "nor who else is there"


def test_one_row_twice_is_twice_the_same():
    one, other = speculated(LLAMA, DRAFTS["llama"]["near"], [PROMPTS[4]] * 2, [LONGEST] * 2, 4).done
    assert one == other


# ----------------------------------------------------------------------------------------------------------- the counts


@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_model_that_drafts_for_itself_is_never_rejected(k):
    """A draft that does not read its last guess after a full acceptance is exact as well, and loses agreement."""
    batch = speculated(LLAMA, LLAMA, PROMPTS, [LONGEST] * len(PROMPTS), k)
    for done in batch.done:
        assert sum(done.accepted) == sum(map(len, done.proposals)) and not any(done.rejected)
        assert done.target_passes == -(-LONGEST // (k + 1))
    assert all(missing == (2 if number else 1) for number, (_, ahead, missing) in enumerate(batch.rounds) if ahead)


def test_a_draft_that_is_always_wrong_gives_one_token_a_pass():
    batch = speculated(LLAMA, DRAFTS["llama"]["wrong"], PROMPTS, [LONGEST] * len(PROMPTS), 3)
    for done in batch.done:
        assert sum(done.accepted) == 0 and done.target_passes == LONGEST
    assert texts(batch) == [own_text(LLAMA, prompt, LONGEST) for prompt in PROMPTS]


def test_no_row_guesses_or_writes_past_its_budget():
    budgets = [1, 2, 5, LONGEST]
    batch = speculated(LLAMA, LLAMA, PROMPTS[:4], budgets, 6)
    assert [len(done.tokens) for done in batch.done] == budgets
    assert [done.proposals and len(done.proposals[0]) for done in batch.done] == [0, 1, 4, 6]


def test_finished_rows_leave_the_batch_and_only_what_is_left_is_fed(monkeypatch):
    fed = []
    monkeypatch.setattr(
        batch_loop,
        "feed",
        lambda model, ids, cache, slots, end, rows: (
            fed.append((model is LLAMA, *slots.shape)),
            feed(model, ids, cache, slots, end, rows),
        )[1],
    )
    budgets = [3, 9, 0, LONGEST]
    assert [rows for rows, _, _ in plainly(LLAMA, PROMPTS[:4], budgets).rounds] == [3] * 3 + [2] * 6 + [1] * (
        LONGEST - 9
    )
    assert fed == [(True, 3, 1)] * 3 + [(True, 2, 1)] * 6 + [(True, 1, 1)] * (LONGEST - 9)
    fed.clear()
    batch = speculated(LLAMA, DRAFTS["llama"]["near"], PROMPTS[:4], budgets, 3)
    verified = [(rows, q) for target, rows, q in fed if target]
    assert verified == [(rows, ahead + 1) for rows, ahead, _ in batch.rounds], "ONE target pass a round"
    assert len(fed) - len(verified) == sum(ahead for _, ahead, _ in batch.rounds), "a draft pass a guess"
    assert [rows for rows, _ in verified] == sorted((rows for rows, _ in verified), reverse=True)
    assert len(batch.rounds) == max(done.target_passes for done in batch.done)
    assert sum(rows for rows, _, _ in batch.rounds) == sum(done.target_passes for done in batch.done)


@pytest.mark.parametrize("name", ["a draft model", "look-up", "a draft model that is asked how sure it is"])
def test_the_device_is_waited_for_once_a_round(name, monkeypatch):
    """And once more after a draft pass only where a policy looks at its confidences."""
    waits, asked = [], name.endswith("sure it is")
    tolist = torch.Tensor.tolist
    policy = make_policy("confidence" if asked else "fixed", 3, [], interpolated({1: 1.0}))
    batch = batch_loop.prefill_rows(LLAMA, [torch.tensor([p]) for p in PROMPTS], [LONGEST] * len(PROMPTS), 3)
    drafter = LookupRows(LookupDrafter()) if name == "look-up" else ModelRows(DRAFTS["llama"]["near"], 64)
    drafter.start(batch)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: (waits.append(1), tolist(self))[1])
    for method in ("item", "__bool__", "__float__", "__int__", "cpu"):
        monkeypatch.setattr(torch.Tensor, method, lambda self, *a, method=method: pytest.fail(f"{method} waits"))
    batch_loop.speculate_rows(LLAMA, drafter, batch, policy)
    monkeypatch.undo()
    assert len(waits) == len(batch.rounds) + (sum(ahead for _, ahead, _ in batch.rounds) if asked else 0)


# ----------------------------------------------------------------------------------------------------------- the limits


def test_no_query_looks_past_the_context_of_the_longest_row():
    """GPT-2's table of 32 positions: 20 + 12 tokens beside a short row that wants many guesses at the end."""
    target = tiny.gpt2(n_positions=32)
    prompts, budgets = [tuple(range(5, 25)), (7,)], [12, 30]
    for draft in (target, tiny.near(target, 0.03), tiny.always_wrong(target)):
        expected = [tiny.greedy(target, prompt, n) for prompt, n in zip(prompts, budgets, strict=True)]
        assert texts(speculated(target, draft, prompts, budgets, 6)) == expected


def test_a_cut_head_says_only_what_it_kept():
    draft = copy.deepcopy(LLAMA)
    cut_head(draft, list(range(0, 64, 3)), 64, 64)
    batch = speculated(LLAMA, draft, PROMPTS, [LONGEST] * len(PROMPTS), 3)
    assert batch.done == [tiny.speculated(LLAMA, draft, prompt, LONGEST, 3) for prompt in PROMPTS]
    assert all(guess % 3 == 0 for done in batch.done for guesses in done.proposals for guess in guesses)
    assert sum(sum(done.accepted) for done in batch.done) > 0


@pytest.mark.parametrize("size", [16, 40])
def test_a_draft_with_a_smaller_table_falls_silent_row_by_row(size):
    """As alone: from the first id that the draft cannot read on, that row gets no guesses, and the others still do."""
    draft = tiny.llama(vocab_size=size, dtype=torch.float64)
    prompts = [(7, 3), (5, 50), (3, 4, 9), (11,)]
    batch = speculated(LLAMA, draft, prompts, [LONGEST] * 4, 3)
    assert batch.done == [tiny.speculated(LLAMA, draft, prompt, LONGEST, 3) for prompt in prompts]
    assert not any(batch.done[1].proposals) and any(any(done.proposals) for done in batch.done)


@pytest.mark.parametrize("sick", ["target", "draft"])
def test_logits_that_are_not_finite_are_refused(sick):
    models = {"target": LLAMA, "draft": LLAMA}
    models[sick] = copy.deepcopy(LLAMA)
    models[sick].get_output_embeddings().weight.data[7] = torch.nan
    with pytest.raises(DecodingError, match="not finite"):
        speculated(models["target"], models["draft"], PROMPTS[:2], [4, 4], 2)
    if sick == "target":
        with pytest.raises(DecodingError, match="not finite"):
            plainly(models["target"], PROMPTS[:2], [4, 4])


# ------------------------------------------------------------------------------------------------------------ the cache


def test_a_mask_is_a_matter_of_slots_alone():
    mask = mask_of(tiny.llama(), torch.tensor([[2, 3], [0, 0]]), 4)
    assert mask.shape == (2, 1, 2, 4)
    assert (mask == 0).int().tolist() == [[[[1, 1, 1, 0], [1, 1, 1, 1]]], [[[1, 0, 0, 0], [1, 0, 0, 0]]]]
    assert mask[mask != 0].unique().tolist() == [-torch.inf] and mask.dtype == torch.float32


def test_layers_with_a_window_get_a_mask_of_their_own():
    masks = mask_of(tiny.model("gemma3, window 8"), torch.tensor([[9], [2]]), 12)
    seen = {kind: [row.isfinite().nonzero().flatten().tolist() for row in mask[:, 0, 0]] for kind, mask in masks.items()}
    assert seen == {
        "full_attention": [list(range(10)), [0, 1, 2]],
        "sliding_attention": [list(range(2, 10)), [0, 1, 2]],
    }


def test_what_a_block_left_behind_changes_nothing():
    ids = torch.tensor([[5, 9, 3, 17, 2, 11, 4, 8], [7, 1, 30, 6, 12, 40, 41, 42]])
    cache = read_prompts(LLAMA, ids, [5, 3], 8)
    slots = torch.tensor([[4, 5, 6], [2, 3, 4]])
    clean = feed(LLAMA, ids, cache, slots, 7, 3).logits
    feed(LLAMA, ids.flip(1), cache, slots, 7, 3)
    assert torch.allclose(feed(LLAMA, ids, cache, slots, 7, 3).logits, clean, atol=1e-12)
    assert torch.allclose(LLAMA(ids[:1, :7]).logits[0, 4:], clean[0], atol=1e-9)
    assert torch.allclose(LLAMA(ids[1:, :5]).logits[0, 2:], clean[1], atol=1e-9)


def test_rows_that_leave_take_their_keys_with_them():
    ids = torch.tensor([[5, 9, 3, 17], [7, 1, 30, 6], [8, 8, 8, 8]])
    cache = read_prompts(LLAMA, ids, [4, 4, 4], 6)
    whole = cache.row_bytes()
    expected = feed(LLAMA, ids, cache, torch.full((3, 1), 3), 4, 1).logits[[2, 0]]
    cache.select([2, 0])
    assert cache.row_bytes() == whole
    after = feed(LLAMA, ids[[2, 0]], cache, torch.full((2, 1), 3), 4, 1).logits
    assert torch.allclose(after, expected, atol=1e-12)


def test_a_pass_past_the_room_is_an_error():
    with pytest.raises(ValueError, match="slot 5 of 4"):
        RowCache(1, 4).write_at(torch.tensor([[4]]), 5)


# ----------------------------------------------------------------------------------------------------------- the checks


def loaded(model) -> Loaded:
    return Loaded(model, None, "tiny", "--target")


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "mixtral"])
def test_full_attention_serves_a_batch(name):
    check_rows(loaded(tiny.model(name)))


WINDOWED = ["mistral, window 8", "gemma2, window 8", "gemma3, window 8", "gpt-oss, window 8"]


@pytest.mark.parametrize("name", WINDOWED)
def test_a_sliding_window_that_the_text_outgrows_serves_a_batch(name):
    target = tiny.model(name)
    check_rows(loaded(target))
    prompts, budgets = [PROMPTS[4], PROMPTS[6], PROMPTS[0]], [LONGEST, 12, LONGEST]
    for draft in (target, tiny.near(target), tiny.always_wrong(target)):
        batch = speculated(target, draft, prompts, budgets, 3)
        assert texts(batch) == [own_text(target, prompt, n) for prompt, n in zip(prompts, budgets, strict=True)]
    assert texts(plainly(target, prompts, budgets)) == texts(batch)


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_that_our_mask_ignored_would_be_refused(name, monkeypatch):
    windows = row_cache.attention_windows
    monkeypatch.setattr(row_cache, "attention_windows", lambda model: dict.fromkeys(windows(model)))
    with pytest.raises(UserError, match="--target tiny: rows of different lengths do not give"):
        check_rows(loaded(tiny.model(name)))


def test_a_window_longer_than_the_text_is_no_trouble():
    check_rows(loaded(tiny.build(T.MistralConfig(**{**tiny.BASE, "sliding_window": 64, "head_dim": 8}))))


OWN_REACH = {
    "llama4, chunks": lambda chunk, kinds=None: tiny.build(
        T.Llama4TextConfig(
            **{**tiny.BASE, "num_hidden_layers": 4, "pad_token_id": 0}, head_dim=8, num_local_experts=2,
            num_experts_per_tok=1, intermediate_size_mlp=64, attention_chunk_size=chunk, layer_types=kinds and ["full_attention"] * 4,
        )
    ),
    "gpt-neo, local": lambda window, kinds="local": tiny.build(
        T.GPTNeoConfig(
            vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, window_size=window, initializer_range=0.4,
            attention_types=[[["global", kinds], 1]], max_position_embeddings=64,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("reach", [8, 16, 40])
@pytest.mark.parametrize("name", OWN_REACH)
def test_a_reach_that_our_mask_does_not_know_is_refused_however_long_it_is(name, reach):
    """A try of a few tokens fits into a chunk of 16; the texts that follow need not."""
    with pytest.raises(UserError, match="--target tiny: rows of different lengths do not give"):
        check_rows(loaded(OWN_REACH[name](reach)))
    with pytest.raises(UserError, match="--target tiny: this architecture cannot check a tree"):
        check_tree(loaded(OWN_REACH[name](reach)))


def test_a_config_that_names_a_reach_which_no_layer_has_is_served():
    for model in (OWN_REACH["llama4, chunks"](16, "full_attention"), OWN_REACH["gpt-neo, local"](16, "global")):
        assert not checks.has_own_reach(model)
    assert not any(checks.has_own_reach(tiny.model(name)) for name in tiny.ARCHITECTURES)


def test_what_takes_no_mask_of_ours_is_refused():
    bloom = tiny.build(T.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.4))
    with pytest.raises(UserError, match="--target tiny: rows of different lengths do not give"):
        check_rows(loaded(bloom))


def test_a_model_that_counts_positions_itself_is_refused(monkeypatch):
    """The published failure in miniature: positions counted from the cache's end are wrong for every shorter row."""
    model, whole = tiny.llama(), T.LlamaForCausalLM.forward
    monkeypatch.setattr(
        T.LlamaForCausalLM, "forward", lambda self, ids, position_ids=None, **more: whole(self, ids, **more)
    )
    with pytest.raises(UserError, match="rows of different lengths"):
        check_rows(loaded(model))


# ---------------------------------------------------------------------------------------------------------- predictions


def ran(rounds: list, *laps) -> BatchRun:
    """A watched run of those rounds, with those laps on its clock."""
    watch = Watch(torch.device("cpu"))
    watch.laps = list(laps)
    return BatchRun([], rounds, 0.0, 0.0, watch=watch)


COSTS = [
    {
        "batch": size,
        "seconds": {"target 1": [one, one], "target 4": [block], "draft 1": [0.1 * one], "draft 2": [0.2 * one]},
    }
    for size, one, block in ((1, 1.0, 1.2), (3, 2.0, 4.0))
]


def test_passes_between_measured_batches_are_interpolated():
    assert [seconds_by_rows(COSTS, "target", 1)(rows) for rows in (1, 2, 3)] == [1.0, 1.5, 2.0]


def test_full_rounds_are_predicted_by_the_formula():
    """E / (T(B, k+1) / T(B, 1) + k c(B)) with k = 3: three rounds of 3 rows for 9 passes; overheads add on both sides."""
    rounds, fast_rounds = [(3, 0, 0)] * 9, [(3, 3, 1)] * 3
    assert predicted_speedup(COSTS, 3, ran(rounds), ran(fast_rounds)) == pytest.approx(3 / (4.0 / 2.0 + 3 * 0.1))
    plain = ran(rounds, ("target", 99, 0), ("keep", 2.0, 9))
    fast = ran(fast_rounds, ("keep", 1.0, 3), ("pick", 1.0, 0))
    assert predicted_speedup(COSTS, 3, plain, fast) == pytest.approx((18 + 2) / (3 * (4.0 + 0.6) + 2))


def test_a_round_is_charged_for_its_rows_its_guesses_and_what_the_draft_lacked():
    plain = ran([(1, 0, 0)])
    assert predicted_speedup(COSTS, 3, plain, ran([(1, 0, 0)])) == 1
    assert predicted_speedup(COSTS, 3, plain, ran([(1, 3, 2)])) == pytest.approx(1 / (1.2 + 0.2 + 2 * 0.1))


# ------------------------------------------------------------------------------------------- the same requests, any size


def requests_of(n: int = 5, size: int = 2, tokens: int = LONGEST, k: int = 3, **options) -> Requests:
    tasks = {f"r{i}": tiny.task(LLAMA, prompt, tokens, **options) for i, prompt in enumerate(PROMPTS[:n])}
    return Requests(tasks, DRAFTS["llama"]["near"], FixedK(k), size)


@pytest.mark.parametrize("speculative", [False, True])
def test_every_size_decodes_the_same_requests_to_the_same_texts_and_counts(speculative):
    ends = frozenset(own_text(LLAMA, PROMPTS[0], LONGEST)[7:8])
    runs = {size: run_batches(requests_of(size=size, ends=ends), speculative) for size in (1, 2, 3, 5, 8)}
    first = runs[1].done
    assert [done.tokens for done in first] == [own_text(LLAMA, prompt, LONGEST, ends) for prompt in PROMPTS[:5]]
    assert all(run.done == first for run in runs.values()), "in their order, whoever shares the batch"
    for run in runs.values():
        assert sum(rows for rows, _, _ in run.rounds) == sum(done.target_passes for done in first)
        assert run.seconds > 0 and 0 < run.first_prefill_s <= run.prefill_s
        assert run.whole_s == run.prefill_s + run.seconds
    assert runs[5].rounds == runs[8].rounds and len(runs[5].rounds) < len(runs[1].rounds)


def test_requests_are_cut_into_batches_in_order_and_the_last_may_be_smaller():
    requests = requests_of()
    prompts = [[tuple(task.prompt[0].tolist()) for task in group] for group in requests.groups()]
    assert prompts == [list(PROMPTS[:2]), list(PROMPTS[2:4]), list(PROMPTS[4:5])]
    assert max(rows for rows, _, _ in run_batches(requests, True).rounds) == 2


def test_a_policy_of_a_batch_learns_row_by_row_and_forgets_between_batches():
    requests = requests_of(k=8)
    requests.policy = make_policy("heuristic", 8, [], interpolated({1: 1.0}))
    done = run_batches(requests, True).done
    assert [len(one.proposals[0]) for one in done] == [5] * 5 and len({len(g) for one in done for g in one.proposals[:-1]}) > 2
    assert vars(requests.policy) == vars(make_policy("heuristic", 8, [], interpolated({1: 1.0}))), "its own is left alone"


@pytest.mark.parametrize("speculative", [False, True])
def test_a_watched_run_counts_every_token_on_one_clock(speculative, monkeypatch):
    World(monkeypatch).price_all(Price(8, row=1))
    run = run_batches(requests_of(), speculative, watched=True)
    assert sum(tokens for _, _, tokens in run.watch.laps) == 5 * LONGEST
    assert sum(run.watch.seconds()) == run.seconds > 0 and run.prefill_s > 0, "no lap holds a prefill"
    phase = "verify" if speculative else "target"
    assert len(run.watch.seconds(phase)) == len(run.rounds)


# ----------------------------------------------------------------------------------------------------------- the script


def strict(path) -> dict:
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} in the file"))


def refused(argv, capfd) -> str:
    try:
        code = spec_batch.main([str(word) for word in argv])
    except SystemExit as left:
        code = left.code
    said = capfd.readouterr()
    lines = said.err.strip().splitlines()
    assert code == 2 and lines[-1].startswith("error: ") and "Traceback" not in said.err + said.out, said
    return lines[-1]


def test_the_script_measures_every_batch_and_keeps_every_request(pair, results, capsys):
    assert spec_batch.main([*pair, "--batches", "1,3,6", "-k", "2", "--repeats", "2"]) == 0
    document = strict(results)
    assert (document["experiment"], document["status"]) == ("spec_batch", "complete")
    parts = {part: [row for row in document["rows"] if row["part"] == part] for part in ("alone", "costs", "batch")}
    assert [len(parts[part]) for part in ("alone", "costs", "batch")] == [6, 3, 3]
    assert [row["batch"] for row in parts["batch"]] == document["summary"]["batches"] == [1, 3, 6]
    for row in parts["batch"]:
        assert [one["request"] for one in row["requests"]] == [one["request"] for one in parts["alone"]], "at every size"
        assert [one["tokens"] for one in row["requests"]] == [one["tokens"] for one in parts["alone"]]
        assert row["exact"] and row["emitted"] == 8 * 6 == sum(one["emitted"] for one in row["requests"])
        for name in ("proposed", "accepted", "target_passes", "draft_passes", "rejections"):
            assert row[name] == sum(one[name] for one in row["requests"])
        assert row["block_efficiency"] == row["emitted"] / row["target_passes"]
        assert {len(row[f"{arm}_s"]) for arm in ("baseline", "speculative", "baseline_again", "generate")} == {2}
        for arm in ("baseline", "speculative"):
            total = row["emitted"] / statistics.median(row[f"{arm}_s"])
            assert row[f"{arm}_tokens_per_s"] == pytest.approx(total)
            assert row[f"{arm}_ttft_s"] > 0 and 1 <= row[f"{arm}_rows_a_pass"] <= row["batch"]
        assert row["row_rounds"] == row["target_passes"]
        assert row["predicted"] > 0 and row["check_cost"] > 0 and row["c"] > 0
    said = capsys.readouterr().out
    assert "every row is token for token what its request gets alone" in said
    assert "T(B, k+1) / T(B, 1)" in said and "alone, tokens/s" in said and "the same requests at every size" in said
    same = [[{**one} for one in row["requests"]] for row in parts["batch"]]
    assert same[0] == same[1] == same[2], "the counts of a request too are its own, whoever shares the batch"


def test_a_finished_sweep_is_not_measured_again(pair, results, monkeypatch):
    assert spec_batch.main([*pair, "--batches", "1,2", "-k", "2"]) == 0
    rows = strict(results)["rows"]
    for name in ("measure_batch", "batch_costs", "run_baseline"):
        monkeypatch.setattr(spec_batch, name, lambda *a: pytest.fail("measured again"))
    assert spec_batch.main([*pair, "--batches", "1,2", "-k", "2", "--resume"]) == 0
    assert strict(results)["rows"] == rows


def test_prompts_of_a_file_are_the_rows_in_order_and_end_tokens_end_them(target_folder, results, tmp_path, monkeypatch):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(" ".join(f"w{i * j % 60}" for i in range(1, 4 + j))) for j in (1, 2, 3)))
    ends = frozenset(tiny.greedy(tiny.llama(), [4 + i for i in range(1, 5)], 20)[3:4])
    monkeypatch.setattr("spec_harness.options.stopping_ids", lambda target: ends)
    options = ["--device", "cpu", "--target", target_folder, "--draft", target_folder]
    options += ["--results", str(results), "--n-tokens", "20"]
    argv = [*options, "--repeats", "1", "--warmup", "0", "--batches", "3", "--prompt-file", str(path), "--stop-at-eos"]
    assert spec_batch.main(argv) == 0
    row = next(row for row in strict(results)["rows"] if row["part"] == "batch")
    assert [one["request"] for one in row["requests"]] == ["p.jsonl:1", "p.jsonl:2", "p.jsonl:3"]
    assert len(row["requests"][0]["tokens"]) <= 4 and row["requests"][0]["tokens"][-1] in ends
    assert row["alpha"] == 1.0 and row["rejections"] == 0, "a model that drafts for itself"


def test_a_row_that_is_not_its_requests_text_fails_the_run(pair, results, monkeypatch, capsys):
    monkeypatch.setattr(batch_loop, "agreed_prefix", lambda guesses, choices: len(guesses))
    assert spec_batch.main([*pair, "--batches", "2", "-k", "3"]) == 1
    said = capsys.readouterr().out
    assert (
        said.splitlines()[-1].startswith("FAILED: not the target's own text: at token ")
        and "row 0 (code) of speculation" in said
    )
    failed = strict(results)["rows"][-1]
    assert failed["exact"] is False and {"row", "index", "expected", "got"} <= failed["mismatch"].keys()


def test_the_baseline_is_checked_too(pair, results, monkeypatch, capsys):
    def shifted(*given):
        out = feed(*given)
        return out._replace(logits=out.logits.roll(1, -1))

    monkeypatch.setattr(batch_loop, "feed", shifted)
    assert spec_batch.main([*pair, "--batches", "2"]) == 1
    assert "of the batched baseline" in capsys.readouterr().out


def test_what_memory_does_not_hold_is_left_out_with_a_remark(pair, results, monkeypatch, capsys):
    monkeypatch.setattr(spec_batch, "bytes_needed", lambda requests: 10**9 * requests.size)
    monkeypatch.setattr(spec_batch, "free_bytes", lambda device: 2.5 * 10**9)
    assert spec_batch.main([*pair, "--batches", "1,2,4", "-k", "2"]) == 0
    assert "a batch of 4 is left out: about 4.0 GB beside the weights, 2.5 GB are free" in capsys.readouterr().err
    assert strict(results)["summary"]["batches"] == [1, 2]
    monkeypatch.setattr(spec_batch, "free_bytes", lambda device: 10)
    assert spec_batch.main([*pair, "--batches", "1,2", "-k", "2"]) == 2
    assert "--batches: not even a batch of 1 fits into memory" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["measure_batch", "batch_costs"])
def test_a_batch_that_runs_out_of_memory_is_recorded_and_the_others_stand(part, pair, results, monkeypatch, capsys):
    work = getattr(spec_batch, part)

    def scarce(first, *more):
        size = first.size if part == "measure_batch" else more[2]
        if size > 1:
            raise torch.OutOfMemoryError("out of memory")
        return work(first, *more)

    monkeypatch.setattr(spec_batch, part, scarce)
    assert spec_batch.main([*pair, "--batches", "1,2", "-k", "2"]) == 1, "the file says failed, and so does the run"
    document, said = strict(results), capsys.readouterr()
    assert document["status"] == "failed" and document["summary"]["batches"] == [1]
    assert "out of memory" in said.out + said.err


def test_room_for_a_batch_grows_with_its_rows():
    tasks = {str(i): tiny.task(LLAMA, (5,) * 10, 20) for i in range(4)}
    needed = [spec_batch.bytes_needed(Requests(tasks, LLAMA, FixedK(3), size)) for size in (1, 2, 4, 9)]
    assert needed[2] == 2 * needed[1] == 4 * needed[0]
    assert needed[3] == needed[2], "no more rows than requests"
    slot = 2 * 2 * 2 * 8 * 8  # keys and values, layers, heads, head size, bytes
    assert needed[0] == 2 * (10 + 20 + 4) * 2 * slot + 4 * 64 * (4 + 8)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--batches", "0"], "'0' is not a whole number of 1 or more"),
        (["--batches", "4096"], "a batch larger than the prompts (--workload all gives "),
        (["--loop", "essay"], "--loop essay: a batch is decoded by the lean loop"),
        (["--k-policy", "cost"], "--k-policy cost: knows what single requests cost"),
        (["--prompt", "w1", "--batches", "2"], "a batch larger than the prompts (one --prompt is 1)"),
        (["-k", "0"], "-k/--k"),
        (["--prompt-file", "/no/such/file.jsonl"], "--prompt-file file.jsonl"),
        (["--target", "somewhere/else"], "--draft: missing"),
        (["--device", "gpu"], "--device gpu: unknown"),
    ],
)
def test_a_wrong_option_is_refused_before_loading(argv, words, monkeypatch, capfd):
    monkeypatch.setattr("spec_harness.options.load_pair", lambda *a, **b: pytest.fail("models were loaded first"))
    assert words in refused(argv, capfd)


def test_a_batch_larger_than_the_prompts_is_refused(tmp_path, capfd):
    path = tmp_path / "two.jsonl"
    path.write_text('"w1"\n"w2"\n')
    line = refused(["--batches", "1,3", "--prompt-file", path], capfd)
    assert line.startswith("error: --batches 3: a batch larger than the prompts (--prompt-file two.jsonl has 2)")


def test_a_window_that_the_text_outgrows_is_served(disk, results):
    folder = tiny.save(tiny.model("mistral, window 8"), disk / "window")
    options = ["--device", "cpu", "--target", folder, "--draft", folder, "--results", str(results), "--repeats", "1"]
    assert spec_batch.main([*options, "--warmup", "0", "--n-tokens", "16", "--batches", "1,3"]) == 0
    assert strict(results)["summary"]["exact"]


def test_what_cannot_serve_a_batch_is_refused_in_one_line(target_folder, draft_folder, results, capfd, monkeypatch):
    monkeypatch.setattr(row_cache, "ragged_error", lambda model: 1.0)
    options = ["--device", "cpu", "--target", target_folder, "--draft", draft_folder, "--results", results]
    assert "rows of different lengths do not give what each gives alone" in refused([*options, "--batches", "1"], capfd)


@pytest.mark.parametrize("policy", ["heuristic", "confidence"])
def test_a_k_policy_changes_the_rounds_and_never_a_text(policy, pair, results):
    assert spec_batch.main([*pair, "--batches", "1,3", "-k", "4", "--k-policy", policy]) == 0
    rows = strict(results)["rows"]
    alone = [row["tokens"] for row in rows if row["part"] == "alone"]
    batches = [row for row in rows if row["part"] == "batch"]
    assert all(row["exact"] and [one["tokens"] for one in row["requests"]] == alone for row in batches)
    assert batches[0]["proposed"] == batches[1]["proposed"] and batches[0]["proposed_lengths"] == batches[1]["proposed_lengths"]


def test_the_workloads_give_many_prompts_and_no_two_alike():
    prompts = list(spec_batch.later_starts())
    assert [name for name, _ in prompts[:6]] == [*spec_batch.WORKLOADS, "code, from word 2"]
    assert len({text for _, text in prompts}) == len({name for name, _ in prompts}) == len(prompts) >= 64
    assert all(len(text.split()) >= 4 for _, text in prompts)


def test_the_texts_of_a_batch_are_those_that_were_asked_for():
    every = spec_batch.row_prompts(spec_batch.parse_args(["--batches", "6"]))
    code = spec_batch.row_prompts(spec_batch.parse_args(["--batches", "6", "--workload", "code"]))
    assert [name for name, _ in every] == [*spec_batch.WORKLOADS, "code, from word 2"]
    assert [name for name, _ in code] == ["code", *(f"code, from word {n}" for n in range(2, 7))]
    with pytest.raises(UserError, match="--workload nope: unknown; choose all, code"):
        spec_batch.row_prompts(spec_batch.parse_args(["--workload", "nope"]))


def measured(batch: int, low: float | None, middle: float, pairs: int = 6) -> dict:
    return {"batch": batch, "error": None, "speedup": middle, "speedup_low": low, "speedup_high": low and low + 0.05, "aa_low": 0.98, "aa_high": 1.02,
            "prediction_error": -0.1, "exact": True, "baseline_s": [1.0] * pairs}  # fmt: skip


@pytest.mark.parametrize(
    ("lows", "words"),
    [
        ([1.5, 1.2], "; it pays at a batch of 1, 2;"),
        ([1.5, 0.9, 0.8], "; it pays at a batch of 1; do not speculate at a batch of 2, 3;"),
        ([0.9, 0.8], "; do not speculate at a batch of 1, 2;"),
        ([0.9, 1.2, 0.8], "; it pays at a batch of 2; do not speculate at a batch of 1, 3;"),
        # 1.01 is within what the same code gives against itself
        ([1.01, 0.8], "; no difference beyond the noise at a batch of 1; do not speculate at a batch of 2;"),
    ],
)
def test_the_verdict_names_the_batches_at_which_it_pays(lows, words):
    rows = [measured(batch, low, low) for batch, low in enumerate(lows, 1)]
    assert words in spec_batch.verdict(rows)
    few = spec_batch.verdict([measured(1, None, 2.0, pairs=5)])
    assert "; too few pairs for a verdict;" in few and "too few pairs for a verdict (5; 6 turns give one)" in few and "pays" not in few


def test_a_failed_batch_is_shown_with_its_error():
    failed = {"batch": 4, "error": "out of memory", "speedup": None}
    assert "out of memory" in spec_batch.tables([failed])
    assert spec_batch.verdict([failed]) == "nothing could be measured; see the errors in the result file"


def test_pooled_counts_are_sums():
    batch = speculated(LLAMA, DRAFTS["llama"]["near"], PROMPTS[:3], [LONGEST] * 3, 3)

    row = counts(all_rows(batch.done), 3)
    assert row["emitted"] == 3 * LONGEST and row["accepted"] == sum(sum(done.accepted) for done in batch.done)
    assert [len(done.tokens) for done in batch.done] == [LONGEST] * 3, "the rows' own counts are left alone"


@pytest.mark.parametrize("more", [["--n-tokens", "1"], ["-k", "50", "--n-tokens", "14"]])
def test_costs_are_measured_within_the_text_and_the_context(more, disk, results):
    """A context of 44 positions: a block of 51 tokens fits nowhere, and no round has one."""
    folder = tiny.save(tiny.gpt2(n_positions=44), disk / "forty-four")
    options = ["--device", "cpu", "--target", folder, "--draft", folder]
    options += ["--results", str(results), "--repeats", "1", "--warmup", "0"]
    (results.parent / "p.jsonl").write_text(json.dumps("w1 w2 w3 " * 10) + '\n"w7"\n')
    assert spec_batch.main([*options, "--batches", "2", "--prompt-file", str(results.parent / "p.jsonl"), *more]) == 0
    assert strict(results)["summary"]["exact"]


@pytest.mark.parametrize(
    ("arm", "call"), [*((False, i) for i in (1, 2, 3, 4)), *((True, i) for i in (1, 2, 3)), ("generate", 1)]
)  # fmt: skip
def test_every_run_of_every_arm_is_checked(arm, call, monkeypatch):
    """The first run, the watched one, and each timed one: a fault in the last row of any of them is found."""
    tasks = {name: tiny.task(LLAMA, prompt, 6) for name, prompt in zip("abc", PROMPTS, strict=False)}
    requests = Requests(tasks, DRAFTS["llama"]["near"], FixedK(3), 3)
    costs = [{**cost, "check_cost": 2.0, "c": 0.1} for cost in COSTS]
    calls = []

    def faulty(name, real):
        def run(first, second, **more):
            found = real(first, second, **more)
            calls.extend([1] if arm == (name or second) else [])
            if arm == (name or second) and len(calls) == call:
                found.done[2].tokens[4] += 1
            return found

        return run

    monkeypatch.setattr(spec_batch, "run_batches", faulty(None, spec_batch.run_batches))
    monkeypatch.setattr(spec_batch, "run_generated", faulty("generate", spec_batch.run_generated))
    expected = {name: own_text(LLAMA, prompt, 6) for name, prompt in zip("abc", PROMPTS, strict=False)}
    args = argparse.Namespace(repeats=1, warmup=0, allow_near_ties=False, k=3)
    with pytest.raises(Mismatch, match=r"at token 4 row 2 \(c\) of "):
        spec_batch.measure_batch(requests, LLAMA, expected, costs, args)
    assert len(calls) >= call


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("place", [0, 1])
def test_either_row_that_is_not_what_it_is_alone_is_noticed(row, place):
    """The try on a model runs two rows of different lengths; whichever of them comes out wrong, it is refused."""
    model = tiny.llama()

    def blur(module, args, out):
        if len(out.logits) == 2 and out.logits.shape[1] == 3:
            out.logits[row, place] = out.logits[row, place].roll(1)

    assert row_cache.ragged_error(model) < 1e-3
    model.register_forward_hook(blur)
    assert row_cache.ragged_error(model) > 0.5
