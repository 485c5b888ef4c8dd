"""Many requests at once: a closed loop (so many in flight), or an open one (arrivals of a Poisson process)."""

from __future__ import annotations

import random
import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from spec_common import Timed, timed

from spec_harness.engine import CPU, Answer

MOST_IN_FLIGHT = 256  # of an open loop: an engine that falls this far behind is not measured any further
DEAD_AFTER = 3  # requests in a row that nobody took end an arm


class Load(NamedTuple):
    """How requests come: `concurrency` at a time, or `rate` a second whatever is still under way."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} a second"


class Tally:
    """Whether the engine still lives, looked at by every request before it is sent."""

    def __init__(self):
        self.lock, self.refused = threading.Lock(), 0

    @property
    def dead(self) -> bool:
        return self.refused >= DEAD_AFTER

    def note(self, answer: Answer) -> None:
        with self.lock:
            nobody = answer.error is not None and "refused" in answer.error.lower()
            self.refused = self.refused + 1 if nobody else 0 if answer.error is None else self.refused


def not_sent(name: str, why: str) -> Answer:
    return Answer(name, error=f"not sent: {why}")


def run_load(send: Callable[[str, str], Answer], requests: Sequence[tuple[str, str]], load: Load, seed: int = 0) -> Timed:
    """Send every request, (name, prompt), once. Gives their answers in that order, and the seconds from the first to the end of
    the last. `send(name, prompt)` gives an Answer and never raises."""
    tally = Tally()

    def one(request: tuple[str, str]) -> Answer:
        if tally.dead:
            return not_sent(request[0], f"the engine took none of the {DEAD_AFTER} before it")
        answer = send(*request)
        tally.note(answer)
        return answer

    def closed() -> list[Answer]:
        with ThreadPoolExecutor(load.concurrency) as pool:
            return list(pool.map(one, requests))

    def opened() -> list[Answer]:
        gaps, free, clock = arrivals(len(requests), load.rate, seed), threading.Semaphore(MOST_IN_FLIGHT), threading.Event()

        def counted(request: tuple[str, str]) -> Answer:
            try:
                return one(request)
            finally:
                free.release()

        with ThreadPoolExecutor(MOST_IN_FLIGHT) as pool:
            sent = []
            for request, gap in zip(requests, gaps, strict=True):
                clock.wait(gap)
                if free.acquire(blocking=False):
                    sent.append(pool.submit(counted, request).result)
                else:
                    sent.append(lambda name=request[0]: not_sent(name, f"{MOST_IN_FLIGHT} were in flight"))
            return [result() for result in sent]

    return timed(closed if load.rate is None else opened, CPU)


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """The gaps of a Poisson process in seconds, the first request at once; the same for every arm."""
    draw = random.Random(seed)
    return [0.0, *(draw.expovariate(rate) for _ in range(count - 1))]


def percentile(values: Sequence[float], share: float) -> float:
    """The value at that share of the sorted ones (nearest rank)."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -(-len(ranked) * share // 1).__int__() - 1))]


def summary_of(answers: Sequence[Answer], seconds: float, ttft_s: float | None, tpot_s: float | None) -> dict:
    """What a run of a load came to, under the names of `vllm bench serve` (times in ms). goodput: requests a second that
    met both bounds."""
    good = [answer for answer in answers if answer.error is None]
    tokens = sum(answer.tokens for answer in good)
    row = {"duration": seconds, "completed": len(good), "failed": len(answers) - len(good), "request_throughput": len(good) / seconds,
           "output_throughput": tokens / seconds, "total_output_tokens": tokens}  # fmt: skip
    times = {
        "ttft": [answer.ttft_s for answer in good],
        "tpot": [answer.tpot_s for answer in good if answer.tpot_s is not None],
        "itl": [gap for answer in good for gap in answer.itl_s],
        "e2el": [answer.whole_s for answer in good],
    }
    for name, values in times.items():
        for kind, take in (("mean", statistics.fmean), ("median", statistics.median), ("p99", lambda all_of: percentile(all_of, 0.99))):
            row[f"{kind}_{name}_ms"] = 1000 * take(values) if values else None
    met = [one for one in good if one.ttft_s <= (ttft_s or float("inf")) and (one.tpot_s or 0) <= (tpot_s or float("inf"))]
    row["goodput"] = len(met) / seconds if ttft_s or tpot_s else None
    return row


def compared(mine: Sequence[Answer], theirs: Sequence[Answer]) -> dict:
    """How many answers of two arms are the same: by ids where both engines gave them, else by text."""
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a.error is None and b.error is None]
    by_ids = bool(pairs) and all(a.ids and b.ids for a, b in pairs)
    same = [(a.ids == b.ids) if by_ids else (a.text == b.text) for a, b in pairs]
    return {"compared": len(pairs), "same": sum(same), "by": "token ids" if by_ids else "text",
            "different": [a.name for (a, _), equal in zip(pairs, same, strict=True) if not equal]}  # fmt: skip
