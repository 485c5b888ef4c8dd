"""An independent implementation, transformers' own `generate`, writes the same tokens in rounds of the same lengths."""

from __future__ import annotations

import copy

import pytest
import torch

import tiny
from spec_harness.reference import RoundLengths, overridden, reference_arms, run_generate
from spec_loop import LOOPS

TARGET = tiny.llama()
DRAFTS = {"itself": TARGET, "near": tiny.near(TARGET), "wrong": tiny.always_wrong(TARGET)}


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("draft", DRAFTS)
def test_assisted_generation_writes_the_same_tokens_round_by_round(draft, k):
    task = tiny.task(TARGET, DRAFTS[draft], n=30, k=k)
    (theirs, _), _ = run_generate(task, assisted=True, streamer=RoundLengths())
    ours = tiny.speculated(TARGET, DRAFTS[draft], n=30, k=k)
    assert theirs.tokens == ours.tokens == tiny.greedy(TARGET, tiny.PROMPT, 30)
    assert theirs.emitted == ours.emitted


def test_no_id_of_the_text_is_hidden_from_the_assistant_as_padding():
    """transformers infers a mask for the assistant from the pad id: id 0 is a token like any other."""
    text = tiny.greedy(TARGET, tiny.PROMPT, 40)
    swap = {0: text[3], text[3]: 0}
    order = torch.tensor([swap.get(i, i) for i in range(64)])
    models = [copy.deepcopy(model) for model in (TARGET, DRAFTS["near"])]
    for model in models:  # the same models under other names: what was text[3] is id 0 now
        model.model.embed_tokens.weight.data = model.model.embed_tokens.weight.data[order]
        model.lm_head.weight.data = model.lm_head.weight.data[order]
    prompt = [swap.get(i, i) for i in tiny.PROMPT]
    task = tiny.task(*models, prompt=prompt, n=40, k=4)
    assert 0 in tiny.greedy(models[0], prompt, 40)
    (theirs, _), _ = run_generate(task, assisted=True, streamer=RoundLengths())
    assert theirs.emitted == tiny.speculated(*models, prompt=prompt, n=40, k=4).emitted


@pytest.mark.parametrize("loop", LOOPS)
def test_assisted_generation_stops_at_the_same_end_token(loop):
    end = frozenset([tiny.greedy(TARGET, tiny.PROMPT, 10)[7]])
    (theirs, _), _ = run_generate(
        tiny.task(TARGET, DRAFTS["near"], k=4, ends=end), assisted=True, streamer=RoundLengths()
    )
    assert theirs.tokens == tiny.speculated(TARGET, DRAFTS["near"], k=4, ends=end, loop=loop).tokens
    assert theirs.tokens[-1] in end


def verify_widths(k: int) -> list[int]:
    """How many tokens each target pass of an assisted run was fed."""
    target = tiny.llama()
    widths = []
    target.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append((kwargs.get("input_ids", args[0] if args else None)).shape[1]),
        with_kwargs=True,
    )
    run_generate(tiny.task(target, DRAFTS["near"], n=20, k=k), assisted=True, streamer=RoundLengths())
    return widths


@pytest.mark.parametrize("k", [2, 3])
def test_assisted_generation_really_runs_at_the_k_it_is_asked_for(k):
    """By default a confidence threshold shortens rounds: the pinned widths are k+1, but for the prompt and the end."""
    first, *rounds = verify_widths(k)
    assert first == len(tiny.PROMPT) + k
    assert set(rounds[:-2]) == {k + 1}


def test_two_runs_of_assisted_generation_keep_the_same_k():
    """Some versions leave an adapted draft length behind on the draft."""
    task = tiny.task(TARGET, DRAFTS["near"], n=24, k=3)
    assert (
        run_generate(task, assisted=True, streamer=RoundLengths())[0][0].emitted
        == run_generate(task, assisted=True, streamer=RoundLengths())[0][0].emitted
    )


def test_a_checkpoints_own_generation_config_is_neutralised_and_named():
    target = tiny.llama()
    expected = tiny.greedy(target, tiny.PROMPT, 20)
    asked = {"repetition_penalty": 1.3, "do_sample": True, "temperature": 0.7, "top_k": 20}
    for name, value in asked.items():
        setattr(target.generation_config, name, value)
    own = target.generate(torch.tensor([tiny.PROMPT]), max_new_tokens=20, pad_token_id=0, do_sample=False)
    assert own[0, len(tiny.PROMPT) :].tolist() != expected, (
        "the penalty must change the text, or nothing is neutralised"
    )
    for assisted in (False, True):
        (done, _), _ = run_generate(tiny.task(target, tiny.near(target), n=20), assisted=assisted)
        assert done.tokens == expected
    assert asked.items() <= overridden(target).items()
    assert target.generation_config.repetition_penalty == 1.3, "the model's own config is put back"


def test_assisted_generation_is_left_out_where_k_is_zero():
    assert set(reference_arms(tiny.task(TARGET, DRAFTS["near"], k=0))) == {"generate"}
    assert set(reference_arms(tiny.task(TARGET, DRAFTS["near"], k=2))) == {"generate", "assisted"}


@pytest.mark.parametrize(("ours", "theirs"), [(176, 160), (160, 176)])
def test_a_padded_pair_can_still_be_compared(ours, theirs):
    """`generate` takes padded tables for two tokenizers, and an id past a table for an index: neither may end the run."""
    target, draft = tiny.qwen2(vocab_size=ours), tiny.qwen2(seed=1, vocab_size=theirs)
    for n in (10, 40):
        arms = reference_arms(tiny.task(target, draft, n=n))
        assert "generate" in arms
        for arm in arms.values():
            (done, _), _ = arm()
            assert done.tokens == tiny.greedy(target, tiny.PROMPT, n)
    assert (target.config.vocab_size, draft.config.vocab_size) == (ours, theirs)
