"""What is read of a tensor in an object store: what views of it need, once."""

from __future__ import annotations

import math
import random

import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.checkpoint.safetensors import fetched
from gshard.checkpoint.safetensors.fetched import Fetched
from gshard.checkpoint.safetensors.format import Stored


class Source:
    """A tensor whose reads are counted, in the place of `Stored`."""

    def __init__(self, numbers, dtype):
        self.numbers, self.dtype, self.shape = numbers, dtype, numbers.shape
        self.content, self.read_ranges = numbers.tobytes(), []

    def read(self, start, end):
        self.read_ranges.append((start, end))
        return self.content[start:end]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(fetched, "_PAGE", 16)
    monkeypatch.setattr(fetched, "_GAP", 64)
    monkeypatch.setattr(fetched, "_MOST", 256)


def a_view(x, draw):
    """As a piece of a shard: slices, single entries, and another order of the axes."""
    axes = [*range(x.ndim)]
    draw.shuffle(axes)
    x = x.transpose(axes)
    index = []
    for n in x.shape:
        ends = sorted(draw.choices(range(n + 1), k=2))
        index.append(slice(*ends) if draw.random() < 0.8 or n == 0 else draw.randrange(n))
    return x[(*index, ...)]


@pytest.mark.parametrize("seed", range(20))
def test_every_view_has_its_numbers(small, seed):
    draw = random.Random(seed)
    shape = [draw.choice([1, 2, 3, 7, 40]) for _ in range(draw.randrange(4))]
    kind, dtype = draw.choice([("F32", np.float32), ("BF16", jnp.bfloat16), ("U8", np.uint8)])
    numbers = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    source = Source(numbers, kind)
    tensor = Fetched(source)
    tensor.array.reshape(-1).view(np.uint8)[...] = 0xAA  # what memory may hold
    for _ in range(5):
        view, state = tensor.array, draw.getstate()
        found = tensor.fill(a_view(view, draw))
        draw.setstate(state)
        assert found.tobytes() == a_view(numbers, draw).tobytes()
    ranges = sorted(source.read_ranges)
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert all(0 < end - start <= 256 for start, end in ranges)


def test_rows_and_columns(small):
    numbers = np.arange(64 * 256, dtype=np.uint8).reshape(64, 256)
    source = Source(numbers, "U8")
    Fetched(source).fill(Fetched(source).array[:0])
    assert source.read_ranges == []
    tensor = Fetched(source)
    tensor.fill(tensor.array[16:18])
    assert sum(b - a for a, b in source.read_ranges) == 2 * 256
    source.read_ranges.clear()
    tensor = Fetched(source)
    tensor.fill(tensor.array[:, 128:192])  # the gaps between rows are larger than `_GAP`
    assert sum(b - a for a, b in source.read_ranges) == 64 * 64
    tensor.fill(tensor.array[:, 128:200])
    assert sum(b - a for a, b in source.read_ranges) == 64 * 80  # pages of 16
    source.read_ranges.clear()
    tensor = Fetched(source)
    tensor.fill(tensor.array[:, 48:])  # and here smaller
    assert sorted(source.read_ranges) == [
        (start, min(start + 256, numbers.size)) for start in range(48, numbers.size, 256)
    ]
    source.read_ranges.clear()
    tensor.fill(tensor.array)
    assert source.read_ranges == [(0, 48)]


def test_a_file_that_ends_early_is_told(tmp_path):
    (tmp_path / "x").write_bytes(b"1234")
    stored = Stored(tmp_path / "x", "U8", (8,), 0, 8, None)
    for read in (lambda: stored.read(0, 8), stored.view):
        with pytest.raises(gshard.GShardError, match="x was cut short while it was read"):
            read()
