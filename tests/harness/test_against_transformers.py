"""An independent implementation, transformers' own `generate`, writes the same tokens in rounds of the same lengths."""

from __future__ import annotations

import copy

import pytest
import torch

import tiny
from spec_harness.reference import RoundLengths, generated, generated_rows, reference_arms, run_assisted
from spec_loop import LOOPS
from spec_models.checkpoint import overridden
from spec_models.checks import Loaded
from spec_models.fused import FusedLlama

TARGET = tiny.llama()
DRAFTS = {"itself": TARGET, "near": tiny.near(TARGET), "wrong": tiny.always_wrong(TARGET)}


def assisted(target, draft, prompt=tiny.PROMPT, n: int = 30, k: int = 3, **options):
    """What one assisted `generate` wrote, round by round."""
    return run_assisted(target, draft, tiny.task(target, prompt, n, **options), k, RoundLengths()).done


def arms_of(target, draft, n: int, k: int) -> dict:
    loaded = (Loaded(target, None, "t", "--target"), Loaded(draft, None, "d", "--draft"))
    return reference_arms(tiny.task(target, n=n), *loaded, k)


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("draft", DRAFTS)
def test_assisted_generation_writes_the_same_tokens_round_by_round(draft, k):
    theirs = assisted(TARGET, DRAFTS[draft], n=30, k=k)
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
    assert 0 in tiny.greedy(models[0], prompt, 40)
    theirs = assisted(*models, prompt=prompt, n=40, k=4)
    assert theirs.emitted == tiny.speculated(*models, prompt=prompt, n=40, k=4).emitted


@pytest.mark.parametrize("loop", LOOPS)
def test_assisted_generation_stops_at_the_same_end_token(loop):
    end = frozenset([tiny.greedy(TARGET, tiny.PROMPT, 10)[7]])
    theirs = assisted(TARGET, DRAFTS["near"], k=4, ends=end)
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
    assisted(target, DRAFTS["near"], n=20, k=k)
    return widths


@pytest.mark.parametrize("k", [2, 3])
def test_assisted_generation_really_runs_at_the_k_it_is_asked_for(k):
    """By default a confidence threshold shortens rounds: the pinned widths are k+1, but for the prompt and the end."""
    first, *rounds = verify_widths(k)
    assert first == len(tiny.PROMPT) + k
    assert set(rounds[:-2]) == {k + 1}


def test_two_runs_of_assisted_generation_keep_the_same_k():
    """Some versions leave an adapted draft length behind on the draft."""
    first, second = (assisted(TARGET, DRAFTS["near"], n=24, k=3).emitted for _ in range(2))
    assert first == second


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
    assert generated(target, tiny.task(target, n=20), None).done.tokens == expected
    assert assisted(target, tiny.near(target), n=20, k=3).tokens == expected
    assert asked.items() <= overridden(target).items()
    assert target.generation_config.repetition_penalty == 1.3, "the model's own config is put back"


def test_assisted_generation_is_left_out_where_k_is_zero():
    assert set(arms_of(TARGET, DRAFTS["near"], 30, 0)) == {"generate", "plain_baseline"}
    assert set(arms_of(TARGET, DRAFTS["near"], 30, 2)) == {
        "generate",
        "assisted",
        "plain_baseline",
        "plain_speculative",
    }


def test_our_plain_arms_run_the_very_models_that_generate_has():
    """A row that compares loops may not compare forms of the pass as well."""
    fused, draft = FusedLlama(tiny.llama()).eval(), FusedLlama(DRAFTS["near"]).eval()
    target = Loaded(fused, None, "t", "--target", plain=TARGET)
    arms = reference_arms(tiny.task(fused, n=12), target, Loaded(draft, None, "d", "--draft", plain=DRAFTS["near"]), 3)
    ran = []
    TARGET.register_forward_pre_hook(lambda *_: ran.append(1))
    for arm in arms.values():
        ran.clear()
        assert arm().done.tokens == tiny.greedy(tiny.llama(), tiny.PROMPT, 12)
        assert ran, "the plain model was not run"
    TARGET._forward_pre_hooks.clear()


def test_generate_on_a_padded_batch_writes_each_rows_own_text():
    prompts = [tiny.PROMPT, (7,), (5, 9, 3)]
    done = generated_rows(TARGET, [tiny.task(TARGET, prompt, 10) for prompt in prompts]).done
    assert [one.tokens for one in done] == [tiny.greedy(TARGET, prompt, 10) for prompt in prompts]


@pytest.mark.parametrize(("ours", "theirs"), [(176, 160), (160, 176)])
def test_a_padded_pair_can_still_be_compared(ours, theirs):
    """`generate` takes padded tables for two tokenizers, and an id past a table for an index: neither may end the run."""
    target, draft = tiny.qwen2(vocab_size=ours), tiny.qwen2(seed=1, vocab_size=theirs)
    for n in (10, 40):
        arms = arms_of(target, draft, n, 3)
        assert "generate" in arms
        for arm in arms.values():
            assert arm().done.tokens == tiny.greedy(target, tiny.PROMPT, n)
    assert (target.config.vocab_size, draft.config.vocab_size) == (ours, theirs)
