"""The formulas: what speculation should give, from acceptance and measured costs. No torch, no timing.

alpha: chance that a judged guess is accepted. c: one draft pass over one target pass, both of one token. V(n): a target
pass over n tokens over a pass over one. All fractions and ratios. Source: Leviathan et al. 2023 (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens a round, (1 - alpha**(k+1)) / (1 - alpha). Leviathan et al., equation 1."""
    return float(k + 1) if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def alpha_of_acceptance(acceptance: float, k: int) -> float:
    """The alpha under which accepted / proposed comes to `acceptance` at a fixed k: expected_tokens(alpha, k) - 1 over k,
    turned round by halving. Acceptance falls with k at one alpha, so it must not stand in for it."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (expected_tokens(middle, k) - 1) / k < acceptance else (low, middle)
    return (low + high) / 2


def ceiling(alpha: float) -> float | None:
    """Tokens a round for unbounded k, 1 / (1 - alpha); None (no ceiling) at alpha 1."""
    return None if alpha == 1 else 1 / (1 - alpha)


def leviathan_speedup(alpha: float, c: float, k: int, passes: int | None = None) -> float:
    """Closed form, checking taken as free: E / (k c + 1). Leviathan et al., theorem 3.8.

    `passes`: draft passes a round where it is not k (the essay's loop takes k + 1).
    """
    return expected_tokens(alpha, k) / ((k if passes is None else passes) * c + 1)


def cost_speedup(
    tokens: int,
    draft_cost: float,
    verified: Sequence[int],
    v: Callable[[int], float],
    overhead: float = 0.0,
    plain_overhead: float = 0.0,
) -> float:
    """The measured-cost form, E_k / (k c + V(k+1) + o), summed over the rounds that a run really took.

    `draft_cost` is what all drafting took, `verified` holds the tokens in each round's target pass. `overhead` is the
    loop's own time a round, `plain_overhead` that of plain decoding a token. All in target passes over one token.
    """
    spent = draft_cost + sum(v(n) for n in verified) + overhead * len(verified)
    return tokens * (1 + plain_overhead) / spent


def drafting_cost(costs: dict, passes: Iterable[int], second: float = 0.0) -> float:
    """What rounds of so many draft passes take, in target passes over one token; `second` of their first ones read two
    tokens. `costs` as `costs_at` gives them; 0 where no model drafts. Of a draft that guesses in one pass: rounds of so many
    guesses, which read `second` tokens beyond their first."""
    if not costs["c"]:
        return 0.0
    rounds = sum(cost_of_place(costs["c_places"], i) for count in passes for i in range(count))
    return rounds + second * (costs["c2"] - costs["c_places"][0])


def cost_of_place(places: Sequence[float], i: int) -> float:
    """What the draft pass number `i`, from 0, of a round costs: as the last of those measured where it is further on."""
    return places[min(i, len(places) - 1)]


def forecast_speedup(
    alpha: float, k: int, passes: int, costs: dict, overhead: float = 0.0, plain_overhead: float = 0.0
) -> float:
    """The measured-cost form for rounds that nobody has seen: E / (drafting + V(k+1) + o).

    `passes`: draft passes a round. `costs` as `costs_at` gives them; where all k guesses stood and the draft has not read the
    last one (passes = k), its next pass reads two tokens; one that guesses in one pass reads all that was written. The overheads
    as in `cost_speedup`.
    """
    second = expected_tokens(alpha, k) - 1 if costs.get("one_pass") else alpha**k if passes == k else 0.0
    drafting = drafting_cost(costs, [k if costs.get("one_pass") else passes], second)
    spent = drafting + measured_v(costs)(k + 1) + overhead
    return expected_tokens(alpha, k) * (1 + plain_overhead) / spent


def interpolated(costs: dict[int, float]) -> Callable[[int], float]:
    """V(n) for any n from the measured ones: straight lines between them, the last slope carried on past the end."""
    points = sorted(costs.items())

    def v(n: int) -> float:
        after = next((i for i, (size, _) in enumerate(points) if size >= n), len(points) - 1)
        if points[after][0] == n or len(points) == 1:
            return points[after][1]
        (n0, v0), (n1, v1) = points[max(after, 1) - 1], points[max(after, 1)]
        return v0 + (v1 - v0) * (n - n0) / (n1 - n0)

    return v


def measured_v(costs: dict) -> Callable[[int], float]:
    """V(n) from what spec_costs measured, whose sizes a result file holds as strings."""
    return interpolated({int(n): cost for n, cost in costs["v"].items()})


def even_costs(c: float, v: dict[int, float]) -> dict:
    """Costs as `costs_at` gives them, where every draft pass costs the same."""
    return {"v": v, "c": c, "c_places": [c], "c2": c}


def best_k(alpha: float, costs: dict, largest: int) -> tuple[int, float]:
    """The k from 0 to `largest` of the highest predicted speedup (`forecast_speedup` of k draft passes a round), and that
    speedup. 0, at 1.0, means: do not."""
    predicted = {k: forecast_speedup(alpha, k, k, costs) for k in range(1, largest + 1)}
    best = max(predicted, key=predicted.get, default=0)
    return (best, predicted[best]) if best and predicted[best] > 1 else (0, 1.0)
