"""Every block of queries meets exactly the blocks of keys that it attends to."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.sequence.blocks import Blocks, Masking
from gshard.sequence.order import positions_of
from gshard.sequence.ring import Ring


def ring_of(devices, tokens, block, causal, window, zigzag) -> Ring:
    blocks = Blocks.of(tokens, 2 if zigzag else 1, block)
    return Ring("sequence", devices, zigzag, False, Masking(causal, window), 1.0, blocks)


def block_positions(ring: Ring, device: int) -> list[np.ndarray]:
    """The positions of each block of a device, without padding."""
    order = "zigzag" if ring.zigzag else "contiguous"
    at = np.asarray(positions_of(device, ring.tokens, ring.devices, order))
    parts = at.reshape(ring.blocks.parts, ring.blocks.length)
    size = ring.blocks.size
    return [x[i * size : (i + 1) * size] for x in parts for i in range(ring.blocks.count)]


def visited(ring: Ring, device: int) -> dict[int, list]:
    """The pairs of blocks that a device computes, by the device that has the keys."""
    found = defaultdict(list)
    found[device] += ring.own_pairs()
    for direction, hops in ring.chains:
        for r in range(1, hops + 1):
            source, shift = device - r * direction, r * direction
            looped = ring.unrolled == 1 and 1 < r < hops
            near, wrapped = ring.pairs(np.int32(shift) if looped else shift)
            found[source % ring.devices] += near if 0 <= source < ring.devices else wrapped
    return found


def needed(ring: Ring, device: int, source: int) -> set:
    """The pairs of blocks with a query that attends to a key, by the equation."""
    found = set()
    for i, queries in enumerate(block_positions(ring, device)):
        for j, keys in enumerate(block_positions(ring, source)):
            ahead = keys[None] - queries[:, None]
            allowed = ahead <= 0 if ring.masking.causal else np.ones_like(ahead, bool)
            if ring.masking.window:
                allowed &= np.abs(ahead) < ring.masking.window
            if allowed.any():
                found.add((i, j))
    return found


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 12),
    st.integers(1, 6),
    st.booleans(),
    st.none() | st.integers(1, 60),
    st.booleans(),
)
def test_a_device_computes_what_its_queries_need_and_once(
    devices, tokens, block, causal, window, zigzag
):
    ring = ring_of(devices, tokens + tokens % 2, block, causal, window, zigzag and devices > 1)
    exact = not (window and ring.zigzag)  # there a window is only masked
    for device in range(devices):
        pairs = visited(ring, device)
        for source in range(devices):
            assert len(pairs[source]) == len(set(pairs[source]))
            wanted = needed(ring, device, source)
            assert set(pairs[source]) == wanted if exact else set(pairs[source]) >= wanted


@pytest.mark.parametrize("devices", [2, 5, 8])
def test_zigzag_order_gives_all_devices_equal_work(devices):
    def most(zigzag):
        ring = ring_of(devices, 8, 2, causal=True, window=None, zigzag=zigzag)
        work = [sum(map(len, visited(ring, i).values())) for i in range(devices)]
        return max(work), min(work)

    assert most(True)[0] == most(True)[1]
    assert most(False)[0] > most(True)[0] > most(False)[1]
