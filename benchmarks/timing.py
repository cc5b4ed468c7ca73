"""Times of programs that run in turn, and ratios that hold on a noisy machine."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

WARM_UP = 3  # rounds that are not counted


class Ratio(NamedTuple):
    """The median of paired ratios, and bounds that hold it with 95 % confidence.

    Fewer than six ratios have no such bounds: these are infinite.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.median:.2f} (no bounds: fewer than 6 rounds)"
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def in_turn(programs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every program, each run once a round in an order that changes.

    What slows a machine down for a while slows all programs of that round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    order = list(programs)
    shuffle = random.Random(0).shuffle
    for i in range(WARM_UP + rounds):
        shuffle(order)
        for name in order:
            start = time.perf_counter()
            programs[name]()
            if i >= WARM_UP:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(times: list[float], base: list[float]) -> Ratio:
    """Of `times` to `base`, round by round.

    The bounds are order statistics: of n ratios fewer than k are below the true median with the
    probability that fewer than k of n fair coins fall on heads.
    """
    ratios = sorted(a / b for a, b in zip(times, base, strict=True))
    n, tail, k = len(ratios), 0.0, 0
    while tail + math.comb(n, k) / 2**n <= 0.025:
        tail += math.comb(n, k) / 2**n
        k += 1
    low, high = (ratios[k - 1], ratios[n - k]) if k else (-math.inf, math.inf)
    return Ratio(statistics.median(ratios), low, high)
