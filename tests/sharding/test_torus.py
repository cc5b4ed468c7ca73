"""`make_mesh` on a TPU slice: one shard axis for each dimension of its torus."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
import pytest

import gshard
from gshard.sharding.topology import ring_of, torus_of
from tests.ahead_of_time import found_by


def test_other_machines_have_none():
    assert torus_of(jax.devices()) is None
    assert dict(gshard.make_mesh().shape) == {"shard": len(jax.devices())}


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_a_ring_has_every_device_once_next_to_the_one_before(dimensions):
    """A ring of neighbours exists through an even number of devices that are no line."""
    for sizes in itertools.product(range(2, 7), repeat=dimensions):
        ring = ring_of(sizes)
        assert sorted(ring) == list(np.ndindex(sizes))
        ends = zip(ring, [*ring[1:], ring[0]], strict=True)
        hops = max(sum(abs(a - b) for a, b in zip(x, y, strict=True)) for x, y in ends)
        neighbours = dimensions > 1 and math.prod(sizes) % 2 == 0
        assert hops == (1 if neighbours or sizes == (2,) else 2), sizes


def test_other_devices_share_sequences_in_their_order():
    mesh = gshard.make_mesh(sequence=4)
    assert list(mesh.devices.flat) == jax.devices()


@pytest.mark.slow
def test_on_a_torus_every_gradient_is_reduce_scattered():
    """Compiled for slices that are not there, their devices given in any order."""
    found = found_by("sharding.torus_on_tpu", "tpu-v5e:4x4")
    assert {name: one["mesh"] for name, one in found.items()} == {
        "tpu-v5e:2x4": {"shard": 8},
        "tpu-v5e:4x4": {"shard_x": 4, "shard_y": 4},
        "tpu-v5p:2x2x2": {"shard_x": 2, "shard_y": 2, "shard_z": 2},
        "tpu-v5p:2x2x4": {"shard_x": 2, "shard_y": 2, "shard_z": 4},
        "tpu-7x:2x2x2": {"shard": 16},
        "tpu-v5e:4x4 in 2 replicas": {"replica": 2, "shard": 8},
        "tpu-v5e:4x8 with an axis": {"shard_x": 4, "shard_y": 4, "model": 2},
        "tpu-v5e:4x4 and another": {"shard_slice": 2, "shard_x": 4, "shard_y": 4},
        "tpu-v5e:4x4 and another in 2 replicas": {"replica": 2, "shard_x": 4, "shard_y": 4},
    }
    for name, one in found.items():
        if "error" in one:  # libtpu 0.0.52 compiles these and cannot print the programs
            assert "v5e" not in name and "async-update" in one["error"], (name, one)
            continue
        assert one["in order"] or "an axis" in name, name  # of every line it has half
        if one["mesh"].get("shard_slice"):  # between slices XLA sends, and adds
            one["promised"] -= one["promised"] // 21
        assert one["scattered"] == one["promised"] > 0, (name, one)
        assert "replicas" in name or not one["reduced"], (name, one)
        assert one["nodes"] == (2 if "another" in name else 1)
        sent, budget = one["network"]
        assert abs(sent - budget) < 2000, (name, one)  # scalars have no budget
