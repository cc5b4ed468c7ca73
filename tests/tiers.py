"""Which cases of a table the quick tier takes."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """The whole table for `parametrize`, in its order; what is not among those chosen is slow."""
    table = list(cases)
    unknown = [case for case in chosen if case not in table]
    if unknown:
        raise ValueError(f"not in the table: {unknown}")
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            marks=() if case in chosen else pytest.mark.slow,
        )
        for case in table
    ]
