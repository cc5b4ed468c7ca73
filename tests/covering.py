"""Few cases of many factors: every combination of values of two or three factors occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def covering(strength: int, factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns cases that have every combination of values of `strength` factors at least once.

    Greedy: of some random cases around a combination that is missing, the one with most of them.
    """
    rng, names = random.Random(0), list(factors)
    missing = {
        tuple(zip(chosen, values, strict=True)): None
        for chosen in itertools.combinations(names, strength)
        for values in itertools.product(*(factors[name] for name in chosen))
    }
    cases: list[dict[str, Any]] = []
    while missing:
        first = dict(next(iter(missing)))
        tried = [
            {name: first.get(name, rng.choice(factors[name])) for name in names} for _ in range(40)
        ]
        best = max(tried, key=lambda case: sum(x in missing for x in parts_of(case, strength)))
        cases.append(best)
        for part in parts_of(best, strength):
            missing.pop(part, None)
    return cases


def parts_of(case: Mapping[str, Any], strength: int) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Returns the combinations of values of `strength` factors that a case has."""
    return itertools.combinations(case.items(), strength)
