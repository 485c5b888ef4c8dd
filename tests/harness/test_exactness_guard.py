"""A text that is not the target's own fails the run; only a true near-tie in half precision can be excused, never silently."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import spec_decode
import tiny
from spec_decode import Checked, Mismatch, check_exact, check_self_draft, measure
from spec_harness.arms import run_speculative
from spec_loop import DecodingError, TextCache, forward

PLACE = 5


def tied(dtype: torch.dtype):
    """A task whose target has two ids of exactly equal logits where it writes token PLACE. Returns (task, text, twin)."""
    target = tiny.llama(dtype=dtype)
    text = tiny.plainly(target, n=12).tokens
    twin = next(i for i in range(63, 0, -1) if i > text[PLACE] and i not in text)
    with torch.no_grad():
        target.lm_head.weight[twin] = target.lm_head.weight[text[PLACE]]
    task = tiny.task(target, n=12)
    assert tiny.plainly(target, n=12).tokens == text
    return task, text, twin


def parted(text: list[int], token: int) -> list[int]:
    return [*text[:PLACE], token, *text[PLACE + 1 :]]


def followed(task, text: list[int], twin: int) -> list[int]:
    """The text with its tie taken the other way, and then what the target itself writes behind that."""
    begun = [*text[:PLACE], twin]
    return begun + tiny.plainly(task.target, (*tiny.PROMPT, *begun), len(text) - len(begun)).tokens


def report_of(task, expected, got, allow: bool) -> dict:
    with pytest.raises(Mismatch) as caught:
        check_exact(task, "speculative", expected, got, allow)
    return caught.value.report


def test_equal_texts_need_no_excuse():
    task, text, _ = tied(torch.float32)
    assert check_exact(task, "speculative", text, list(text), allow_near_ties=False) == []


def test_a_mismatch_says_where_and_both_ids():
    target = tiny.llama()
    text = tiny.plainly(target, n=12).tokens
    wrong = (text[PLACE] + 1) % 64
    report = report_of(tiny.task(target, n=12), text, parted(text, wrong), allow=True)
    assert (report["arm"], report["index"], report["expected"], report["got"]) == (
        "speculative",
        PLACE,
        text[PLACE],
        wrong,
    )
    ids = torch.tensor([[*tiny.PROMPT, *text[:PLACE]]])
    first, second = target(ids).logits[0, -1].topk(2).values.tolist()
    assert report["top2_gap"] == pytest.approx(first - second, abs=1e-3)
    assert report["row_noise"] < 1e-3


def test_in_float32_not_even_an_exact_tie_is_excused():
    task, text, twin = tied(torch.float32)
    assert report_of(task, text, parted(text, twin), allow=True)["near_tie"] is False


def test_in_half_precision_a_tie_is_excused_only_when_asked_and_is_still_reported():
    task, text, twin = tied(torch.bfloat16)
    assert report_of(task, text, parted(text, twin), allow=False)["near_tie"] is True
    (excused,) = check_exact(task, "speculative", text, followed(task, text, twin), allow_near_ties=True)
    assert (excused["index"], excused["got"], excused["dtype"]) == (PLACE, twin, "bfloat16")


def test_an_excused_tie_is_kept_for_every_run_that_wrote_it():
    """A text is looked at once; what was excused is excused of each arm and sample that wrote it."""
    task, text, twin = tied(torch.bfloat16)
    cell = Checked(task, text, True)
    for arm, tokens in (("one", text), ("two", followed(task, text, twin)), ("three", followed(task, text, twin))):
        cell.check(arm, SimpleNamespace(tokens=tokens))
    assert [tie["arm"] for tie in cell.near_ties if tie["index"] == PLACE] == ["two", "three"]


def test_in_half_precision_a_clear_gap_is_not_excused():
    target = tiny.llama(dtype=torch.bfloat16)
    text = tiny.plainly(target, n=12).tokens
    report = report_of(tiny.task(target, n=12), text, parted(text, (text[PLACE] + 1) % 64), allow=True)
    assert report["near_tie"] is False


def test_a_tie_does_not_excuse_a_third_token():
    task, text, twin = tied(torch.bfloat16)
    junk = next(i for i in range(64) if i not in (text[PLACE], twin))
    assert report_of(task, text, parted(text, junk), allow=True)["got"] == junk


def test_a_tie_does_not_excuse_a_text_that_stops_there():
    task, text, _ = tied(torch.bfloat16)
    assert report_of(task, text, text[:PLACE], allow=True)["got"] is None


def test_a_text_that_is_too_long_is_a_mismatch():
    task, text, _ = tied(torch.float32)
    assert report_of(task, text, [*text, 4], allow=False)["expected"] is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_where_rounding_parts_a_right_loop_from_greedy_it_is_a_near_tie(dtype):
    """A block and single rows round differently, so even a self-draft may part in half precision; never in float32."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}
    parted_texts = 0
    for seed in range(24 if dtype == torch.bfloat16 else 6):
        target = tiny.llama(seed, dtype, **sizes)
        prompt = torch.randint(0, 512, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
        task = tiny.task(target, prompt, n=48)
        expected = tiny.plainly(target, prompt, 48).tokens
        got = tiny.speculated(target, target, prompt, 48, 4).tokens
        ties = check_exact(task, "speculative", expected, got, allow_near_ties=True)
        assert not ties or dtype != torch.float32
        parted_texts += got != expected
    assert parted_texts or dtype != torch.bfloat16, "no text parted, so nothing was excused"


@pytest.mark.parametrize("later", [1, 3, 6])
def test_a_loop_that_breaks_behind_a_tie_is_caught(later):
    """A tie excuses its own token and no other: what follows must be the target's own choice after that prefix."""
    task, text, twin = tied(torch.bfloat16)
    right = followed(task, text, twin)
    assert len(check_exact(task, "speculative", text, right, allow_near_ties=True)) == 1
    broken = [*right]
    broken[PLACE + later] = (broken[PLACE + later] + 1) % 64
    report = report_of(task, text, broken, allow=True)
    assert report["index"] == PLACE + later and report["near_tie"] is False


@pytest.mark.parametrize("cut", [slice(0, PLACE + 1), slice(0, -2), slice(0, -1)])
def test_a_tie_does_not_excuse_a_text_that_ends_too_early(cut):
    task, text, twin = tied(torch.bfloat16)
    report_of(task, text, followed(task, text, twin)[cut], allow=True)


def test_a_tie_excuses_neither_a_text_that_is_too_long_nor_one_past_its_end_token():
    task, text, twin = tied(torch.bfloat16)
    right = followed(task, text, twin)
    more = tiny.plainly(task.target, (*tiny.PROMPT, *right), 1).tokens
    report_of(task, text, right + more, allow=True)
    task.ends = frozenset([right[PLACE + 2]])
    expected = text[: next((i + 1 for i, token in enumerate(text) if token in task.ends), len(text))]
    report_of(task, expected, right, allow=True)
    assert len(check_exact(task, "speculative", expected, right[: PLACE + 3], allow_near_ties=True)) == 1


def test_float64_is_not_half():
    task, text, twin = tied(torch.float64)
    assert report_of(task, text, parted(text, twin), allow=True)["near_tie"] is False


def test_a_self_draft_in_half_precision_has_each_rejected_guess_looked_at(monkeypatch):
    target = tiny.llama(dtype=torch.bfloat16)
    task = tiny.task(target, n=24)
    done = run_speculative(task, tiny.method(task, target, 4)).done
    assert check_self_draft(task, done, "x") == sum(done.rejected)
    keep = TextCache.keep

    # a draft's cache that is cut one slot short and filled up again with another token's keys
    def wrong(self, length, path):
        keep(self, length, path)
        for layer in self.layers:
            layer.keys[:, :, -1] = layer.keys[:, :, 0]

    monkeypatch.setattr(TextCache, "keep", wrong)
    broken = run_speculative(task, tiny.method(task, tiny.near(target, 0.5), 4)).done
    monkeypatch.setattr(TextCache, "keep", keep)
    assert any(broken.rejected)
    with pytest.raises(spec_decode.ClaimFailed, match="its cache is wrong"):
        check_self_draft(task, broken, "x")


def test_frequencies_that_change_with_length_are_not_excused_as_rounding():
    """Dynamic RoPE past its limit parts even a self-draft from greedy; at these seeds by far more than rounding."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    for seed in range(3):
        target = tiny.llama(seed, torch.bfloat16, max_position_embeddings=16, rope_parameters=rope)
        task = tiny.task(target, n=40)
        expected, got = tiny.plainly(target, n=40).tokens, tiny.speculated(target, target, n=40, k=4).tokens
        assert expected != got
        with pytest.raises(Mismatch):
            check_exact(task, "speculative", expected, got, allow_near_ties=True)


def test_rope_that_scales_by_a_fixed_factor_is_exact_past_its_original_limit():
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    target = tiny.llama(max_position_embeddings=64, rope_parameters=rope)
    assert tiny.speculated(target, target, n=40, k=4).tokens == tiny.greedy(target, tiny.PROMPT, 40)


# ------------------------------------------------------------------------------------------------ every sample is checked


def test_every_sample_that_counts_is_checked(monkeypatch):
    """Spoil one run after the other: all are caught but the uncounted warm-up."""
    target = tiny.llama()
    task = tiny.task(target, n=6)
    calls, spoil_at = [], [None]

    def spoiled(*args, **options):
        run = run_speculative(*args, **options)
        if len(calls) == spoil_at[0]:
            run.done.tokens[3] = (run.done.tokens[3] + 1) % 64
        calls.append(1)
        return run

    def caught() -> bool:
        calls.clear()
        try:
            measure(task, tiny.method(task, target, 2), tiny.turns(2, 1))
        except Mismatch:
            return True
        return False

    monkeypatch.setattr(spec_decode, "run_speculative", spoiled)
    assert not caught()
    total, found = len(calls), 0
    for spoil_at[0] in range(total):
        found += caught()
    assert total >= 4
    assert found == total - 1


def test_a_measured_row_says_it_was_exact():
    target = tiny.llama()
    task = tiny.task(target, n=8)
    row = measure(task, tiny.method(task, tiny.near(target), 2), tiny.turns(2))
    assert row["exact"] is True and row["near_ties"] == [] and row["error"] is None
    assert row["tokens"] == tiny.greedy(target, tiny.PROMPT, 8)
    assert row["tokens_checked"] == 8 * 6
    assert (row["emitted"], row["k"], row["n_tokens"], row["prompt_tokens"]) == (8, 2, 8, len(tiny.PROMPT))
    assert len(row["baseline_s"]) == len(row["speculative_s"]) == 2


# -------------------------------------------------------------------------------------------------------------- finite


def spoiled(where: str, dtype=torch.float32):
    """A model whose logits are not finite: everywhere, in one row of the head, or only after one token."""
    model = tiny.llama(3, dtype)
    with torch.no_grad():
        if where == "everywhere":
            model.model.norm.weight.fill_(float("nan"))
        elif where == "one NaN row":
            model.lm_head.weight[7] = float("nan")
        elif where == "one infinite row":
            model.lm_head.weight[7] = float("inf")
    return model


@pytest.mark.parametrize("where", ["everywhere", "one NaN row", "one infinite row"])
def test_text_is_never_made_of_logits_that_are_not_finite(where):
    """The argmax of NaN is an id like any other: both arms agree on rubbish, so exactness alone cannot see it."""
    model = spoiled(where)
    for run in (tiny.plainly, lambda model: tiny.speculated(model, model)):
        with pytest.raises(DecodingError, match="LlamaForCausalLM: logits are not finite in float32 on cpu"):
            run(model)


@pytest.mark.parametrize("k", [0, 3])
def test_a_healthy_draft_does_not_hide_a_spoiled_target(k):
    with pytest.raises(DecodingError, match="not finite"):
        tiny.speculated(spoiled("one NaN row"), tiny.llama(), k=k)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 1, 2])
def test_every_row_of_a_pass_is_looked_at(row, value):
    """Whatever the row: the first, the last, one between."""

    class Spoiled(torch.nn.Module):
        def forward(self, tokens, past_key_values=None, use_cache=True):
            logits = torch.ones(1, tokens.shape[1], 8)
            logits[0, row] = value
            return SimpleNamespace(logits=logits)

    cache, tokens = SimpleNamespace(), torch.zeros(1, 3, dtype=torch.long)
    assert not forward(Spoiled(), tokens, cache, 3).finite
    assert forward(Spoiled(), tokens, cache, 2 - row).finite if row < 2 else True


def test_a_drafts_logits_must_be_finite_too():
    with pytest.raises(DecodingError, match="not finite"):
        tiny.speculated(tiny.llama(), spoiled("everywhere"))


def test_an_infinity_that_appears_late_is_noticed():
    target = tiny.llama()
    text = tiny.greedy(target, tiny.PROMPT, 12)
    with torch.no_grad():
        target.model.embed_tokens.weight[text[8]] = float("nan")
    for run in (tiny.plainly, lambda target, n: tiny.speculated(target, target, n=n)):
        with pytest.raises(DecodingError, match="not finite"):
            run(target, n=12)
