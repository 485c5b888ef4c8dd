"""transformers' own `generate`, greedy and assisted, as further arms of the same run: the independent oracle.

Assisted generation is pinned to a fixed k (its defaults adapt k and stop at a confidence threshold), and a streamer
reads the tokens of each round, so that not only the text but every round's length can be compared with ours.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from typing import NamedTuple

from spec_common import ClaimFailed, first_line, say, timed

import torch
import torch.nn.functional as F
from transformers import GenerationConfig

from spec_counts import Decoded, Round
from spec_harness.arms import Method, Run, Task, draft_model, run_baseline, run_speculative
from spec_loop import cut_block
from spec_models.checks import Loaded
from spec_models.eagle import Eagle

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


def generated(target, task: Task, streamer: RoundLengths | None, **options) -> Run:
    """One greedy `generate` of the target, its own prefill included, with those further options. The rounds are counted
    where a streamer listens, which timed runs leave out."""
    with generation_config(target, plain_config(task.n_tokens, task.ends)):
        mask = torch.ones_like(task.prompt)
        written, seconds = timed(
            lambda: target.generate(task.prompt, attention_mask=mask, streamer=streamer, **options), task.device
        )
    rounds = [Round([], [], 0, emitted, 0) for emitted in (streamer.rounds if streamer else [])]
    return Run(Decoded(written[0, task.prompt.shape[1] :].tolist(), len(rounds), rounds=rounds), 0.0, seconds)


def run_assisted(target, draft, task: Task, k: int, streamer: RoundLengths | None = None) -> Run:
    """One `generate` with an assistant, always k guesses."""
    # A model that drafts for itself needs a second generation config: a shallow copy has one and shares the weights.
    draft = copy.copy(draft) if draft is target else draft
    with generation_config(draft, assistant_config(k)), same_width(draft, target):
        return generated(target, task, streamer, assistant_model=draft)


def check_assisted(task: Task, ours: Method, lengths: list[int]) -> None:
    """Our lean loop with the draft that assisted generation had must write the same number of tokens in every round.
    Raises ClaimFailed. The draft in the form that is measured may guess otherwise; the text is compared all the same."""
    done = run_speculative(task, ours).done
    if done.emitted != lengths:
        raise ClaimFailed(f"rounds of assisted generation wrote {lengths} tokens, ours {done.emitted}")


def reference_arms(task: Task, target: Loaded, draft: Loaded, k: int) -> dict:
    """The arms of --vs-transformers, once the rounds of assisted generation have been checked against ours: `generate`,
    plain and assisted, and our own loop on the very models that they run (`plain_...`: transformers' form of the pass, the
    whole head), so that one row compares loops alone.

    The assisted arm is left out, and said so, where `generate` cannot run it: for k=0, and for padded tables once an id
    is met that only one of them has.
    """
    theirs = target.plain or target.model
    same = replace(task, target=theirs, loop="lean")
    arms = {"generate": lambda: generated(theirs, task, None), "plain_baseline": lambda: run_baseline(same)}
    if k == 0:
        return arms
    assistant = draft.plain or draft.model
    if isinstance(assistant, Eagle):
        say(f"assisted generation is left out: `generate` takes no head that reads the target's states ({draft.name})")
        return arms
    try:
        counted = run_assisted(theirs, assistant, task, k, RoundLengths()).done
    except (IndexError, ValueError) as error:
        say(f"assisted generation is left out: transformers cannot run it on this pair ({first_line(error)})")
        return arms
    ours = draft_model(same, assistant, k)
    check_assisted(same, ours, counted.emitted)
    return {
        **arms,
        "assisted": lambda: run_assisted(theirs, assistant, task, k),
        "plain_speculative": lambda: run_speculative(same, ours),
    }


def run_prompt_lookup(target, task: Task, k: int, ngram_max: int, streamer: RoundLengths | None = None) -> Run:
    """One `generate` that guesses by prompt look-up, at the same k, with n-grams of `ngram_max` down to 1."""
    return generated(target, task, streamer, prompt_lookup_num_tokens=k, max_matching_ngram_size=ngram_max)


def prompt_lookup_rounds(target, task: Task, k: int, ngram_max: int) -> list[int] | None:
    """The tokens that each round of it writes; None where `generate` cannot run it on that model."""
    try:
        return run_prompt_lookup(target, task, k, ngram_max, RoundLengths()).done.emitted
    except (IndexError, ValueError, RuntimeError, MemoryError) as error:
        say(f"generate's prompt look-up is left out: transformers cannot run it on this model ({first_line(error)})")
        return None


class Generated(NamedTuple):
    """What `generate` wrote for every row of a batch, and its seconds."""

    done: list[Decoded]
    seconds: float


def generated_rows(target, tasks: list[Task]) -> Generated:
    """One greedy `generate` of a batch, prompts padded on the left. A row's text ends with its first end token."""
    first = tasks[0]
    width = max(task.prompt.shape[1] for task in tasks)
    padded = torch.cat([F.pad(task.prompt, (width - task.prompt.shape[1], 0)) for task in tasks])
    mask = torch.cat([F.pad(torch.ones_like(task.prompt), (width - task.prompt.shape[1], 0)) for task in tasks])
    config = plain_config(max(task.n_tokens for task in tasks), first.ends)
    config.pad_token_id = 0  # behind an end token; a batch needs one that exists
    with generation_config(target, config):
        written, seconds = timed(lambda: target.generate(padded, attention_mask=mask), first.device)
    rows = [cut_block(row[width:].tolist(), task.n_tokens, task.ends) for row, task in zip(written, tasks, strict=True)]
    return Generated([Decoded(row) for row in rows], seconds)
