"""Paths of the leaves of a tree."""

from __future__ import annotations

import time

import pytest

from gshard._util.errors import GShardError
from gshard._util.pytree import check_unique, differences

MANY = [f"layer_{i}/kernel" for i in range(20_000)]


def test_many_paths_take_no_time():
    began = time.monotonic()
    check_unique(MANY, "parameters")
    assert "missing layer_7/kernel; added none" in differences([*MANY[:7], *MANY[8:]], MANY)
    assert time.monotonic() - began < 2  # each path with each: a minute


def test_paths_that_occur_twice_are_named():
    with pytest.raises(GShardError, match="two parameters have the same path: a, c. Rename"):
        check_unique(["c", "a", "b", "a", "c"], "parameters")
