"""`level="auto"`: the level that sends least, of those that fit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import gshard
from gshard._util.chips import chip_of, memory_of
from gshard.train.auto_level import SHARE, choose_plan

MESH = {"devices": jax.devices()[:4]}


def state(elements):
    """In a hundred layers: at `p_g_os` one of them is gathered at a time."""
    layer = jax.ShapeDtypeStruct((elements // 100_000, 1000), jnp.float32)
    return {f"w{i}": layer for i in range(100)}, optax.adam(1e-3)


def elements_where(bytes_each):
    """How many parameters take so many bytes each of what a device may use for them."""
    return int(SHARE * memory_of(jax.devices()[0]) / bytes_each) // 400_000 * 400_000


@pytest.mark.parametrize(
    ("bytes_each", "level"),
    [
        (1000, "os"),  # everything fits: os sends as little as dp, and updates a part
        # One micro-batch: of Adam in float32 os takes 4 + (4 + 8)/4 bytes each, p_g_os 4 less 3
        # and what is gathered.
        (7.5, "os"),
        (6.5, "p_g_os"),
    ],
)
def test_the_level_that_fits_and_sends_least(bytes_each, level):
    _, plan = gshard.shard_train_state(
        state(elements_where(bytes_each)), gshard.make_mesh(**MESH), "auto"
    )
    assert plan.level.name == level


def test_nothing_fits_is_said():
    with pytest.warns(gshard.GShardWarning, match="even at 'p_g_os' the state"):
        _, plan = gshard.shard_train_state(
            state(elements_where(1)), gshard.make_mesh(**MESH), "AUTO"
        )
    assert plan.level.name == "p_g_os"


def test_it_trains():
    params, tx = {"w": jnp.ones((300, 200))}, optax.adam(1e-2)
    made, plan = gshard.shard_train_state((params, tx), gshard.make_mesh(**MESH), "auto")
    step = gshard.make_train_step(lambda p, x: jnp.square(x @ p["w"]).mean(), plan)
    _, metrics = step(made, jnp.ones((4, 300)))
    assert metrics["loss"] == 300.0**2


def test_an_abstract_mesh_has_no_memory():
    mesh = AbstractMesh((4,), ("shard",), axis_types=(AxisType.Auto,))
    with pytest.raises(gshard.GShardError, match="an AbstractMesh has none"):
        gshard.shard_train_state(state(400_000), mesh, "auto")


class Unknown:
    """A device of a plug-in that gshard has never heard of."""

    platform, device_kind = "other", "Other 9000"

    def memory_stats(self):
        return None


def test_a_device_that_says_nothing():
    assert chip_of(Unknown()) is None
    assert memory_of(Unknown()) is None

    class Mesh:
        local_devices = [Unknown()]

    with pytest.raises(gshard.GShardError, match="does not report how much memory"):
        choose_plan(lambda level: None, Mesh())


def test_virtual_devices_share_the_computer():
    import os

    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_of(jax.devices()[0]) == whole // 8


@pytest.mark.parametrize("devices", [3, 6, 7])
def test_padding_on_the_wire_does_not_decide(devices):
    params = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    _, plan = gshard.shard_train_state((params, optax.adam(1e-3)), mesh, "auto")
    assert plan.level.name == "os"


def test_only_what_does_not_fit_is_offloaded():
    mesh = gshard.make_mesh(**MESH)
    _, plan = gshard.shard_train_state(state(10_000_000), mesh, "auto", offload=True)
    assert plan.level.name == "os"
