"""Large stacks are all-gathered layer by layer, into the memory of the parameters they replace."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard.analysis.audit import compiled_memory
from gshard.analysis.hlo import read_program
from gshard.train.comm import buckets
from tests.ahead_of_time import found_by

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")


def initial(layers=4, width=24, wide=40):
    rng = np.random.default_rng(0)
    return {
        "first": jnp.asarray(rng.normal(size=(width, width)) / 5, jnp.float32),
        "down": jnp.asarray(rng.normal(size=(layers, wide, width)) / 5, jnp.float32),
        "up": jnp.asarray(rng.normal(size=(layers, width, wide)) / 5, jnp.float32),
        "scale": jnp.ones((layers, width), jnp.float32),
    }


def loss(params, x):
    def layer(x, w):
        return x + jnp.tanh((w["scale"] * x) @ w["up"]) @ w["down"], None

    layers = {name: params[name] for name in ("up", "down", "scale")}
    return jnp.square(jax.lax.scan(layer, x @ params["first"], layers)[0]).mean()


def rows_of(step):
    return np.random.default_rng(step).normal(size=(210, 24)).astype(np.float32)


def divided(level, devices, params=None, **options):
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    scanned = {"^(up|down|scale)": 0}
    given = (initial() if params is None else params, optax.adamw(1e-2))
    return gshard.shard_train_state(
        given, mesh, level, scan_axes=scanned, min_shard_size=16, **options
    )


def by_layer(monkeypatch, elements):
    """On CPU too, where so small a loop ends before a collective overtakes it."""
    monkeypatch.setattr(buckets, "LARGE_LAYER", elements)
    monkeypatch.setattr(buckets, "LAYERED_PLATFORMS", ("cpu",))


@pytest.mark.parametrize("devices", [2, 3, 5, 7])
@pytest.mark.parametrize("level", ["os", "os_g"])
def test_numbers_are_those_of_one_device(level, devices, monkeypatch):
    """Neither 24 nor 40 divides by 7: what is padded is cut from every layer."""
    by_layer(monkeypatch, 64)
    state, plan = divided(level, devices)
    step = gshard.make_train_step(loss, plan)
    params, tx = initial(), optax.adamw(1e-2)
    opt_state = tx.init(params)
    for i in range(3):
        value, grads = jax.value_and_grad(loss)(params, rows_of(i))
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        state, metrics = step(state, rows_of(i))
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    for name, x in params.items():
        for shard in state.params[name].addressable_shards:
            np.testing.assert_allclose(shard.data, x, rtol=2e-4, atol=2e-6)


def compiled(level, layer, monkeypatch, devices=8, **sizes):
    by_layer(monkeypatch, layer)
    state, plan = divided(level, devices, initial(**sizes))
    batch = np.ones((devices, sizes["width"]), np.float32)
    return gshard.make_train_step(loss, plan).lower(state, batch).compile()


def published(program):
    found = read_program(program.as_text()).collectives
    return [op for op in found if "gshard/update" in op.op_name]


@pytest.mark.parametrize("level", ["os", "os_g"])
def test_a_stack_takes_the_memory_of_the_one_it_replaces(level, monkeypatch):
    """One gather for every layer, the same bytes, and no second stack."""
    sizes = {"layers": 12, "width": 64, "wide": 256}
    whole = compiled(level, 2**40, monkeypatch, **sizes)
    turns = compiled(level, 2**12, monkeypatch, **sizes)
    layer = 4 * 64 * 256

    assert [op.times for op in published(whole)] == [1, 1, 1]
    assert sorted((op.times, op.payload_bytes) for op in published(turns)) == [
        (1, 4 * (64 * 64 + 12 * 64)),
        (12, layer),
        (12, layer),
    ]
    before, after = compiled_memory(whole)["temp"], compiled_memory(turns)["temp"]
    assert after <= before + layer, (before, after)


def test_small_layers_stay_in_one_gather(monkeypatch):
    program = compiled("os", 2**15, monkeypatch, layers=12, width=64, wide=256)
    assert {op.times for op in published(program)} == {1}


def test_on_cpu_no_loop_gathers(monkeypatch):
    """A collective of the gradients could overtake it."""
    monkeypatch.setattr(buckets, "LARGE_LAYER", 64)
    state, plan = divided("os", 8)
    step = gshard.make_train_step(loss, plan, skip_nonfinite=False)
    program = step.lower(state, np.ones((8, 24), np.float32)).compile()
    assert {op.times for op in published(program)} == {1}


def test_a_gpu_holds_gathered_stacks_once():
    found = found_by("train.optim.stacks_on_gpu", "h100:1x8")
    temporaries = found["peak"] - found["arguments"]
    assert temporaries < 0.6 * found["parameters"], found
    assert 0.9 < found["estimated"] / found["peak"] < 1.1, found
