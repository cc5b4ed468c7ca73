"""How much memory a step needs where S devices share a sequence: about 1/S."""

from __future__ import annotations

import functools

import jax
import pytest

import gshard
from gshard.models import llama

# A multiple of 1/S of one device's. What is above 1 does not grow with the layers: a few blocks of
# the ring's scores, 512 queries by 512 keys for each head, 8 MiB each.
BOUNDS = {("ring", 2): 1.12, ("ring", 4): 1.62, ("ulysses", 2): 1.08, ("ulysses", 4): 1.08}


@functools.cache
def temporaries(attention: str, slices: int, layers: int) -> int:
    """Bytes of one device, of a step of 8,192 tokens."""
    sizes = {"width": 128, "heads": 8, "kv_heads": 2, "mlp": 256, "vocabulary": 64}
    setup = llama.setup(layers=layers, sequence=8192, attention=attention, dtype="float32", **sizes)
    mesh = gshard.make_mesh(sequence=slices, devices=jax.devices()[:slices])
    shard = {**setup.shard, "min_shard_size": 0}
    state, plan = gshard.shard_train_state(jax.eval_shape(setup.state), mesh, "fsdp", **shard)
    step = gshard.make_train_step(setup.loss_fn, plan, **setup.step)
    return gshard.audit(step, state, setup.batch).memory["temp"]


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "slices"), BOUNDS)
def test_temporaries_are_about_one_slice_of_those_of_one_device(attention, slices):
    (few, many), (one_few, one_many) = (
        [temporaries(attention, n, layers) for layers in (2, 6)] for n in (slices, 1)
    )
    assert slices * many < BOUNDS[attention, slices] * one_many
    assert slices * (many - few) < 1.02 * (one_many - one_few)  # what each layer keeps
