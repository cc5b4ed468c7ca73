"""Another optimizer at a restore is one warning that says what is known of the difference."""

from __future__ import annotations

import json
import re
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.train.optim.optimizer_info import difference, optimizer_info


def shard(tx, level="dp", devices=1, **options):
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    params = {"w": jnp.ones((16, 24)), "b": jnp.ones(8)}
    return gshard.shard_train_state((params, tx), mesh, level, min_shard_size=0, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("steps")
    with gshard.Checkpointer(folder) as checkpointer:
        checkpointer.save(1, shard(optax.adam(1e-3))[0])
    return folder


THERE = "only in the checkpoint"


@pytest.mark.parametrize(
    ("tx", "said"),
    [
        (optax.adam(3e-3), rf"numbers of the update: -0\.001.*{THERE}, -0\.003.* only in like="),
        (optax.adam(1e-3, b1=0.8), rf": 0\.1, 0\.9 {THERE}, 0\.2, 0\.8 only in like="),
        (optax.adam(1e-3, b1=0.999, b2=0.9), "order of operations and numbers of the update"),
        (optax.nadam(1e-3), "parameters and moments to which the update applies"),
        (optax.adamax(1e-3), f"operations of the update: .* {THERE}, .*max.* only in like="),
        (optax.adam(optax.constant_schedule(1e-3)), "state: ScaleByScheduleState only in like="),
    ],
)
def test_another_optimizer_is_one_warning(saved, tx, said):
    like = shard(tx)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            gshard.Checkpointer(saved).restore(like=like)
        except gshard.GShardError as error:
            assert "opt_state" in str(error)  # of another tree
            return
    assert len(seen) == 1, [str(x.message) for x in seen]
    assert "was saved with another optimizer" in str(seen[0].message)
    assert re.search(said, str(seen[0].message)), str(seen[0].message)


@pytest.mark.parametrize(
    ("level", "devices", "options"),
    [("os", 8, {}), ("p_g_os", 3, {}), ("dp", 2, {"precision": "bfloat16"})],
)
def test_the_same_optimizer_is_none(saved, level, devices, options):
    gshard.Checkpointer(saved).restore(like=shard(optax.adam(1e-3), level, devices, **options))


def test_two_groups_that_change_places_are_another_optimizer():
    """With the same operations and numbers."""

    def info(*labels):
        tx = optax.multi_transform(
            {"fast": optax.sgd(1e-2), "slow": optax.sgd(1e-3)}, dict(zip("vw", labels, strict=True))
        )
        params = {"v": jnp.ones((8, 8)), "w": jnp.ones((8, 8))}
        mesh = gshard.make_mesh()
        _, plan = gshard.shard_train_state((params, tx), mesh, "zero1", min_shard_size=0)
        return optimizer_info(plan)

    one, other = info("fast", "slow"), info("slow", "fast")
    assert "to which the update applies" in difference(one, other)
    assert difference(one, info("fast", "slow")) == ""


def test_steps_that_say_nothing_of_it_are_read(saved, tmp_path):
    like = shard(optax.adam(2e-3))
    description = saved / "1" / "gshard.json"
    text = description.read_text()
    table = json.loads(text)
    table["optimizer"] = None
    try:
        description.write_text(json.dumps(table))
        gshard.Checkpointer(saved).restore(1, like=like, verify=False)
    finally:
        description.write_text(text)


def test_in_other_versions_only_the_state_is_compared():
    one, other = (optimizer_info(shard(optax.adam(x))[1]) for x in (1e-3, 2e-3))
    assert "numbers" in difference(one, other)
    assert difference(one | {"versions": ["1", "2"]}, other) == ""
    sgd = optimizer_info(shard(optax.sgd(1e-3, momentum=0.9))[1])
    assert "ScaleByAdamState" in difference(one | {"versions": ["1", "2"]}, sgd)


def test_what_is_known_of_it_has_no_nan():
    """NaN has no place among sorted numbers, so that their order would differ on each process."""
    _, plan = shard(optax.contrib.schedule_free_sgd(1e-3))
    numbers = optimizer_info(plan)["numbers"]
    assert numbers == sorted(numbers) and all(x == x for x in numbers)


def test_a_key_that_an_optimizer_closes_over_is_no_number():
    key = jax.random.key(0)

    def update(grads, count, params=None):
        own = jax.random.fold_in(key, count)
        noise = jax.tree.map(lambda x: jax.random.normal(own, x.shape), grads)
        return jax.tree.map(lambda g, n: g + 0.25 * n, grads, noise), count + 1

    tx = optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)
    start = ({"w": jnp.ones((4, 4))}, optax.chain(tx, optax.sgd(0.1)))
    _, plan = gshard.shard_train_state(start, gshard.make_mesh(), "os", min_shard_size=0)
    assert {0.25, -0.1} <= set(optimizer_info(plan)["numbers"])
