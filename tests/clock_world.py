"""A world whose measured numbers are known: a clock that nothing moves but models' passes, each by a counted number of ticks.

The models are the tiny ones, so texts, rounds and caches are real; only what a pass costs is made up. What a test asks of
V(n), c, a speedup or a verdict can then be worked out by hand, and is right to the digit.
"""

from __future__ import annotations

import functools
import types
from typing import NamedTuple

import spec_common
from spec_common import interleave

from transformers import LlamaForCausalLM

import spec_loop


class Price(NamedTuple):
    """Ticks of a pass: `base`, then `row` for each token fed, `seen` for each one in the cache after it, `head` for each row
    of logits computed. Of a batch every row counts."""

    base: float
    row: float = 0.0
    head: float = 0.0
    seen: float = 0.0

    def of(self, fed: int, end: int = 0, rows: int | None = None) -> float:
        """A pass over `fed` tokens that leaves `end` in the cache, with `rows` rows of logits: all that are fed if not said."""
        return self.base + self.row * fed + self.head * (fed if rows is None else rows) + self.seen * end


class World:
    """The clock, by ticks. `pace`: what a tick lasts just now, for slow minutes. `reading`: ticks that a look at the clock
    takes itself. `ticks`: what passes have cost so far, whatever the pace."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.now, self.ticks, self.pace, self.reading = monkeypatch, 0.0, 0.0, 1.0, 0.0
        monkeypatch.setattr(spec_common, "time", types.SimpleNamespace(perf_counter=self.read))

    def read(self) -> float:
        now = self.now
        self.pass_by(self.reading)
        return now

    def pass_by(self, ticks: float) -> None:
        self.now, self.ticks = self.now + ticks * self.pace, self.ticks + ticks

    def priced(self, model, price: Price):
        """The model, each of its passes costing that much."""

        def charge(module, args, kwargs, out):
            tokens = args[0] if args else kwargs["input_ids"]
            cache = kwargs.get("cache", kwargs.get("past_key_values"))
            end = 0 if cache is None else cache.get_seq_length()
            batch, rows = out.logits.shape[:2]
            self.pass_by(price.of(tokens.numel(), batch * end, batch * rows))

        model.register_forward_hook(charge, with_kwargs=True)
        return model

    def price_all(self, price: Price) -> None:
        """Every tiny model, whoever loads it, costs that much for each of its passes."""
        plain = LlamaForCausalLM.forward

        @functools.wraps(plain)
        def charged(*given, **more):
            out = plain(*given, **more)
            self.pass_by(price.of(out.logits.shape[1]))
            return out

        self.monkeypatch.setattr(LlamaForCausalLM, "forward", charged)

    def writing_takes(self, ticks: float) -> None:
        """Every write of tokens into the text takes so long: the loop's own time, of both arms."""
        write = spec_loop.State.write

        def slowly(state, block):
            self.pass_by(ticks)
            write(state, block)

        self.monkeypatch.setattr(spec_loop.State, "write", slowly)

    def turns_last(self, module, **paces) -> None:
        """The turns of a script (its module) are run at these paces: arm -> one for each turn, 1 if not named."""

        def at(name, run):
            left = iter(paces.get(name, ()))

            def once():
                self.pace = next(left, 1.0)
                try:
                    return run()
                finally:
                    self.pace = 1.0

            return once

        def paced(arms, *given, **more):
            return interleave({name: at(name, run) for name, run in arms.items()}, *given, **more)

        self.monkeypatch.setattr(module, "interleave", paced)
