"""A process that was started with others and trains alone says so."""

from __future__ import annotations

import numpy as np
import optax
import pytest

import gshard


@pytest.mark.parametrize(("processes", "warns"), [("2", True), ("1", False), ("", False)])
def test_a_process_that_has_not_joined_the_others(monkeypatch, recwarn, processes, warns):
    monkeypatch.setenv("GSHARD_NUM_PROCESSES", processes)
    params = {"w": np.ones((8, 8), np.float32)}
    gshard.shard_train_state((params, optax.sgd(0.1)), gshard.make_mesh(), "os", min_shard_size=1)
    said = [str(x.message) for x in recwarn if "one of 2, and has not joined" in str(x.message)]
    assert len(said) == warns and all("gshard.distributed.initialize()" in x for x in said)


@pytest.mark.parametrize(
    ("launcher", "rank", "count"),
    [
        ("torchrun", "RANK", "WORLD_SIZE"),
        ("paddle.distributed.launch", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
        ("your own script", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
    ],
)
@pytest.mark.parametrize(("processes", "warns"), [("2", True), ("1", False), ("", False)])
def test_a_process_of_another_launcher(
    monkeypatch, recwarn, launcher, rank, count, processes, warns
):
    monkeypatch.setenv(count, processes)
    monkeypatch.setenv(rank, "0")
    params = {"w": np.ones((8, 8), np.float32)}
    gshard.shard_train_state((params, optax.sgd(0.1)), gshard.make_mesh(), "os", min_shard_size=1)
    said = [str(x.message) for x in recwarn if f"which {launcher} sets, say" in str(x.message)]
    assert len(said) == warns and all("`gshard launch`" in x for x in said)
