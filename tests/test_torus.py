"""`make_mesh` on a TPU slice: one shard axis for each dimension of its torus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import gshard
from gshard.torus import torus_of


def test_other_machines_have_none():
    assert torus_of(jax.devices()) is None
    assert dict(gshard.make_mesh().shape) == {"shard": len(jax.devices())}


@pytest.mark.slow
def test_on_a_torus_every_gradient_is_reduce_scattered():
    """Compiled for slices that are not there, their devices given in any order."""
    python = os.environ.get("GSHARD_TPU_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import libtpu"], capture_output=True).returncode:
        pytest.skip("libtpu is not installed; GSHARD_TPU_PYTHON= names a Python that has it")
    more = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    done = subprocess.run(
        [python, "-m", "tests.torus_on_tpu"],
        env=os.environ | more | {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        cwd=Path(__file__).resolve().parents[1],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: one["mesh"] for name, one in found.items()} == {
        "v5e:2x4": {"shard": 8},
        "v5e:4x4": {"shard_x": 4, "shard_y": 4},
        "v5p:2x2x2": {"shard_x": 2, "shard_y": 2, "shard_z": 2},
        "v5p:2x2x4": {"shard_x": 2, "shard_y": 2, "shard_z": 4},
        "tpu7x:2x2x2": {"shard": 16},
    }
    for name, one in found.items():
        assert one["in order"], name
        assert one["scattered"] == one["promised"] > 0 == one["reduced"], (name, one)
