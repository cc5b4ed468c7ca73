"""Where each array is in the files of a step, read without a leak in the training process."""

from __future__ import annotations

import subprocess

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.checkpoint import array_ranges


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    params = {f"w{number}": jnp.ones(4000 + number) for number in range(40)}
    state, _ = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "dp")
    with gshard.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, state)
    return folder / "1" / "arrays" / "ocdbt.process_0"


@pytest.fixture
def children(monkeypatch):
    """The processes that are started."""
    seen, run = [], subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: (seen.append(a), run(*a, **k))[1])
    return seen


def test_a_process_of_its_own_reads_what_is_too_much(step, monkeypatch, children):
    monkeypatch.setattr(array_ranges, "_read", 0)
    own = array_ranges.entries(step)
    assert not children and len(own) >= 40
    read = array_ranges._read
    assert read >= len(own)
    monkeypatch.setattr(array_ranges, "_MOST", read)
    assert array_ranges.entries(step) == own
    assert len(children) == 1
    assert array_ranges._read == read


def test_where_no_process_can_be_started_this_one_reads(step, monkeypatch):
    monkeypatch.setattr(array_ranges, "_MOST", 0)
    monkeypatch.setattr("sys.executable", "/no/python")
    assert len(array_ranges.entries(step)) >= 40
