"""One pass: feed a model what its cache lacks, pick the top tokens, roll back. What everything here is made of.

`ids` is the truth and a cache is a prefix of it. So nothing is ever carried as "pending": a pass feeds the difference.
"""

from __future__ import annotations

import functools
import inspect

import torch
from transformers import DynamicCache

from spec_common import UserError


class DecodingError(UserError):
    """A pass gave something no text may be made of: logits that are not finite, or a cache that did not roll back."""


def new_cache(model):
    """An empty cache that can always roll back: the model's own kind if it has one, else a DynamicCache. Built without a
    config, that keeps every key, so sliding windows stay exact."""
    return model.new_cache() if hasattr(model, "new_cache") else DynamicCache()


@functools.cache
def forward_options(model_class: type) -> frozenset[str]:
    """Which keywords of ours that class's forward knows; cache= is the newer name of past_key_values=."""
    names = set(inspect.signature(model_class.forward).parameters)
    return frozenset({"logits_to_keep", "cache"} & names)


@torch.inference_mode()
def forward(model, ids: torch.Tensor, cache, keep: int) -> torch.Tensor:
    """Feed `ids` (1, n) from where `cache` ends, in one pass that appends to it. Returns the last `keep` rows of
    logits, (1, keep, vocabulary). Row j says what follows the fed token j; the last row what follows all of `ids`.
    """
    options = forward_options(type(model))
    keywords = {"cache" if "cache" in options else "past_key_values": cache}
    if "logits_to_keep" in options:
        keywords["logits_to_keep"] = keep
    return model(ids[:, cache.get_seq_length() :], use_cache=True, **keywords).logits[:, -keep:]


def rollback(cache, length: int) -> None:
    """Make the cache a prefix of `length` tokens; nothing to do where it is no longer than that.

    The only place that crops. Raises DecodingError if the cache did not obey.
    """
    surplus = cache.get_seq_length() - length
    if surplus > 0:
        cache.crop(-surplus)
        if cache.get_seq_length() != length:
            raise DecodingError(f"the cache holds {cache.get_seq_length()} tokens after a rollback to {length}")


def top_tokens(logits: torch.Tensor, vocabulary: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(…, vocabulary) logits to their top ids and values, each (…). Ids from `vocabulary` up are never picked.

    The value comes along because it is the cheapest test of finiteness: NaN and +inf win every maximum.
    """
    values, ids = logits[..., :vocabulary].max(-1)
    return ids, values


def check_finite(model, values: list[float]) -> None:
    if not all(-float("inf") < value < float("inf") for value in values):
        raise DecodingError(
            f"{type(model).__name__}: logits are not finite in {str(model.dtype).removeprefix('torch.')} on {model.device}; try another --dtype"
        )
