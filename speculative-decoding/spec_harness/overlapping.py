"""What drafting while the target checks should give, from alpha and costs. No torch, no timing.

Sequential speculation takes draft plus check a round; two devices at once take the longer of both, and one device that does
both "at once" their sum, as ever. PEARL: Liu et al. 2024 (arXiv 2408.11850); SSD: Kumar, Dao and May 2026 (arXiv 2603.03251).
All costs in target passes over one token, each as measured while the other side runs: `draft` of one draft pass, `v(n)` of a
target pass over n tokens, `wait` what handing over takes a round. `devices`: 2, or 1 where both sides share one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from spec_harness.theory import expected_tokens

DEVICES = (1, 2)


class Rounds(NamedTuple):
    """What PEARL's rounds come to in the long run."""

    tokens: float  # a round
    pending: float  # the share of rounds that begin with guesses nobody has judged


def together(a: float, b: float, devices: int) -> float:
    """The time of two pieces of work that need nothing of one another."""
    return max(a, b) if devices > 1 else a + b


def pearl_rounds(alpha: float, g: int) -> Rounds:
    """Rounds of PEARL at g guesses a round, each accepted with probability alpha: (1 - a**g) / ((1 - a)(1 + a - a**g)) tokens.

    A round that begins with nothing pending judges one guess and writes one token; with g - 1 pending it judges g and
    writes 1 + a + ... + a**(g-1). All stand with a**g, else the next round begins with nothing. At g = 1 none is ever pending.
    """
    if alpha == 1:
        return Rounds(float(g), float(g > 1))
    falls = 1 - alpha**g
    tokens = falls / ((1 - alpha) * (1 + alpha - alpha**g))
    return Rounds(tokens, alpha / (alpha + falls) if g > 1 else 0.0)


def pearl_speedup(
    alpha: float, g: int, draft: float, v: Callable[[int], float], devices: int = 2, wait: float = 0.0
) -> float:
    """Tokens a round over its mean time: with nothing pending the target reads one token, else g."""
    found = pearl_rounds(alpha, g)
    first, others = (together(g * draft, v(n), devices) for n in (1, g))
    return found.tokens / ((1 - found.pending) * first + found.pending * others + wait)


def ssd_speedup(
    alpha: float, k: int, draft: float, v: Callable[[int], float], hit: float, foresee: float, devices: int = 2,
    wait: float = 0.0,
) -> float:  # fmt: skip
    """A round writes what any chain of k guesses writes. The answers, `foresee` in all, are made while the target checks; in a
    miss (1 - `hit`) k draft passes come before the check. Kumar et al., with costs measured in place of T_p, T_b."""
    spent = together(foresee, v(k + 1), devices) + (1 - hit) * k * draft + wait
    return expected_tokens(alpha, k) / spent


def chain_speedup(alpha: float, k: int, draft: float, v: Callable[[int], float], wait: float = 0.0) -> float:
    """Draft and target taking turns: the measured-cost form without its correction terms."""
    return expected_tokens(alpha, k) / (k * draft + v(k + 1) + wait)


def balanced_g(draft: float, v: Callable[[int], float], largest: int) -> int:
    """The g from 1 to `largest` at which g draft passes take most nearly as long as the check of g tokens."""
    return min(range(1, largest + 1), key=lambda g: abs(g * draft - v(g)))


class Best(NamedTuple):
    """One scheme at its best size."""

    scheme: str
    size: int  # k or g; 0: do not
    speedup: float


def compare_schemes(
    alpha: float, draft: float, v: Callable[[int], float], largest: int, hit: float, widest: float, devices: int = 2,
    wait: float = 0.0,
) -> list[Best]:  # fmt: skip
    """Taking turns, PEARL and SSD, each at the size that is best for it at these costs. `widest`: what a draft pass over all
    answers, or over the guesses, takes in draft passes over one token."""
    sizes = range(1, largest + 1)
    chains = {0: 1.0, **{k: chain_speedup(alpha, k, draft, v) for k in sizes}}
    pearls = {g: pearl_speedup(alpha, g, draft, v, devices, wait) for g in sizes}
    ssds = {k: ssd_speedup(alpha, k, draft, v, hit, (k + 1) * widest * draft, devices, wait) for k in sizes}
    schemes = {"taking turns": chains, "pearl": pearls, "ssd": ssds}
    return [Best(name, size := max(of, key=of.get), of[size]) for name, of in schemes.items()]
