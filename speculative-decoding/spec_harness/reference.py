"""transformers' own `generate`, greedy and assisted, as further arms of the same run: the independent oracle.

Assisted generation is pinned to a fixed k (its defaults adapt k and stop at a confidence threshold), and a streamer
reads the tokens of each round, so that not only the text but every round's length can be compared with ours.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from functools import partial

import torch
from transformers import GenerationConfig

from spec_common import ClaimFailed, first_line, say, timed
from spec_harness.cells import Task, run_speculative
from spec_loop import Decoded
from spec_models.checkpoint import overridden  # noqa: F401  (the scripts take it from here)

NO_PAD = -1  # no text holds it: from a real id transformers would infer a mask that hides it from the assistant


class RoundLengths:
    """A streamer that notes how many tokens each put() brings: first the prompt, then a round at a time."""

    def __init__(self):
        self.puts: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.puts.append(tokens.numel())

    def end(self) -> None:
        pass

    @property
    def rounds(self) -> list[int]:
        return self.puts[1:]


def plain_config(n_tokens: int, ends: frozenset[int]) -> GenerationConfig:
    """Greedy, nothing else: a checkpoint's repetition penalty or sampling would make it another method."""
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=n_tokens,
        use_cache=True,
        eos_token_id=sorted(ends) or None,
        pad_token_id=NO_PAD,
    )


@contextlib.contextmanager
def same_width(draft, target):
    """`generate` takes padded tables of one tokenizer for two tokenizers, by their width alone; ours compares meanings."""
    own, wanted = draft.config.get_text_config(), target.config.get_text_config().vocab_size
    width, own.vocab_size = own.vocab_size, wanted
    try:
        yield
    finally:
        own.vocab_size = width


@contextlib.contextmanager
def generation_config(model, config: GenerationConfig):
    """`generate` fills gaps from the model's own config, so that is swapped while it runs."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


def assistant_config(k: int) -> GenerationConfig:
    return GenerationConfig(
        num_assistant_tokens=k,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
        assistant_ensemble_weight=None,
        do_sample=False,
        use_cache=True,
        pad_token_id=NO_PAD,
    )


def generated(task: Task, streamer: RoundLengths | None, **options) -> tuple[tuple[Decoded, float], float]:
    """One greedy `generate` with those further options. Returns as `run_generate`."""
    with generation_config(task.target, plain_config(task.n_tokens, task.ends)):
        write = partial(
            task.target.generate, task.prompt, attention_mask=torch.ones_like(task.prompt), streamer=streamer, **options
        )
        written, seconds = timed(write, task.device)
    rounds = streamer.rounds if streamer else []
    done = Decoded(tokens=written[0, task.prompt.shape[1] :].tolist(), emitted=rounds, target_passes=len(rounds))
    return (done, 0.0), seconds


def run_generate(
    task: Task, assisted: bool, streamer: RoundLengths | None = None
) -> tuple[tuple[Decoded, float], float]:
    """One `generate`, its own prefill included. Returns ((Decoded, 0.0), seconds), as the arms of spec_compare do; the
    rounds are counted where a streamer listens, which timed runs leave out."""
    # A model that drafts for itself needs a second generation config: a shallow copy has one and shares the weights.
    draft = task.draft if task.plain_draft is None else task.plain_draft
    draft = copy.copy(draft) if draft is task.target else draft
    options = {"assistant_model": draft} if assisted else {}
    with generation_config(draft, assistant_config(task.k)), same_width(draft, task.target):
        return generated(task, streamer, **options)


def check_rounds(task: Task, lengths: list[int]) -> None:
    """Our lean loop with the draft that assisted generation had must write the same number of tokens in every round.
    Raises ClaimFailed. The draft in the form that is measured may guess otherwise; the text is compared all the same."""
    same_draft = task if task.plain_draft is None else replace(task, draft=task.plain_draft)
    (done, _), _ = run_speculative(replace(same_draft, loop="lean"))
    if done.emitted != lengths:
        raise ClaimFailed(f"rounds of assisted generation wrote {lengths} tokens, ours {done.emitted}")


def reference_arms(task: Task) -> dict:
    """The arms of --vs-transformers, once the rounds of assisted generation have been checked against ours.

    The assisted arm is left out, and said so, where `generate` cannot run it: for k=0, and for padded tables once an id
    is met that only one of them has.
    """
    arms = {"generate": lambda: run_generate(task, assisted=False)}
    if task.k == 0:
        return arms
    try:
        (counted, _), _ = run_generate(task, assisted=True, streamer=RoundLengths())
    except (IndexError, ValueError) as error:
        say(f"assisted generation is left out: transformers cannot run it on this pair ({first_line(error)})")
        return arms
    check_rounds(task, counted.emitted)
    return {**arms, "assisted": lambda: run_generate(task, assisted=True)}


def run_prompt_lookup(
    task: Task, ngram_max: int, streamer: RoundLengths | None = None
) -> tuple[tuple[Decoded, float], float]:
    """One `generate` that guesses by prompt look-up, at the same k, with n-grams of `ngram_max` down to 1. Returns as `run_generate`."""
    return generated(task, streamer, prompt_lookup_num_tokens=task.k, max_matching_ngram_size=ngram_max)


def prompt_lookup_rounds(task: Task, ngram_max: int) -> list[int] | None:
    """The tokens that each round of it writes; None where `generate` cannot run it on that model."""
    try:
        return run_prompt_lookup(task, ngram_max, RoundLengths())[0][0].emitted
    except (IndexError, ValueError, RuntimeError, MemoryError) as error:
        say(f"generate's prompt look-up is left out: transformers cannot run it on this model ({first_line(error)})")
        return None
