"""`check_replicas=`: copies of a parameter that are not equal are found, with the device."""

from __future__ import annotations

import time

import jax
import numpy as np
import optax
import pytest

import gshard
from gshard.train.late_checks import late_checks
from gshard.train.replicas import ReplicaCheck, _owners, _sum_of_bits
from tests.tiers import quick

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

PARAMS = {"w": np.full((16, 8), 0.1, np.float32), "v": np.full((8,), 0.5, np.float32)}
BATCH = {"x": np.arange(128.0, dtype=np.float32).reshape(8, 16) / 100}


def loss(params, batch):
    return ((batch["x"] @ params["w"].astype(np.float32) + params["v"]) ** 2).mean()


def made(level, replica=1, every: int | None = 2, dtype="float32", **mesh):
    params = {name: x.astype(dtype) for name, x in PARAMS.items()}
    mesh = gshard.make_mesh(replica=replica, **mesh)
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.01)), mesh, level, min_shard_size=64
    )
    return state, gshard.make_train_step(loss, plan, check_replicas=every)


def flipped(x, device, bit=0):
    """An array with one bit changed in the memory of one device alone."""
    shards = []
    for shard in x.addressable_shards:
        own = np.array(shard.data)
        if shard.device == jax.devices()[device]:
            own.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        shards.append(jax.device_put(own, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


def run(state, step, calls):
    """Runs so many calls; which one raised what."""
    for call in range(1, calls + 1):
        try:
            state, _ = step(state, BATCH)
        except gshard.GShardError as error:
            return call, str(error)
    return None, ""


CASES = [
    ("dp", 1, "w", 5, 7),
    ("dp", 2, "v", 0, 7),
    ("p_g_os", 2, "w", 6, 1),
    ("p_g_os", 4, "w", 1, 3),
    ("p_g_os", 1, "v", 3, 7),
]


@pytest.mark.parametrize(
    ("level", "replica", "name", "device", "others"), quick(CASES, [CASES[0], CASES[3]])
)
def test_a_changed_bit_is_found_with_its_device(level, replica, name, device, others):
    state, step = made(level, replica)
    state = state.replace(params={**state.params, name: flipped(state.params[name], device, 9)})
    call, said = run(state, step, 6)
    assert call == 4  # compared after call 2, checked as the second call after it begins
    where = f"the parameter {name} on {jax.devices()[device]} (process 0) is not equal"
    if others > 1:
        assert f"after call 2 of this step {where} to that on {others} other devices" in said
        assert "not known" not in said
    else:
        assert f"after call 2 of this step the parameter {name}" in said
        assert "it is not known which is right" in said


@pytest.mark.filterwarnings("ignore:parameters are float16")
@pytest.mark.parametrize("bit", [0, 7, 22, 31])
@pytest.mark.parametrize("dtype", quick(["float32", "bfloat16", "float16"], ["bfloat16"]))
def test_any_bit_is_found(dtype, bit):
    state, step = made("dp", every=1, dtype=jax.numpy.dtype(dtype))
    state = state.replace(params={**state.params, "w": flipped(state.params["w"], 2, bit)})
    step._replicas.after_call(state.params, state.step)  # of the state as it is
    with pytest.raises(gshard.GShardError, match="the parameter w on .* is not equal"):
        late_checks(step.plan).look(late=0)


@pytest.mark.parametrize(("level", "replica"), [("dp", 1), ("os", 2), ("p_g_os", 2)])
def test_equal_copies_raise_nothing(level, replica):
    state, step = made(level, replica, every=1)
    assert run(state, step, 6) == (None, "")


@pytest.mark.parametrize("size", [0, 1, 2**16 + 1, 300_001])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64"])
def test_the_sum_is_that_of_the_bits(size, dtype):
    x = np.random.default_rng(size).normal(size=size).astype(jax.numpy.dtype(dtype))
    words = {"bfloat16": np.uint16, "int8": np.uint8}.get(dtype, np.uint32)
    wanted = int(x.view(words).sum(dtype=np.uint64)) % 2**32
    assert int(jax.jit(_sum_of_bits)(x)) == wanted


def test_model_axes_are_not_replicas():
    mesh = gshard.make_mesh(extra={"model": 2})
    assert _owners(jax.P("shard"), mesh) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert _owners(jax.P(("shard", "model")), mesh) == list(range(8))
    assert _owners(jax.P(None, "model"), mesh) == [0, 1] * 4
    assert _owners(jax.P(), mesh) == [0] * 8


def test_nothing_is_saved_after_copies_differ(tmp_path):
    state, step = made("dp", every=1)
    state = state.replace(params={**state.params, "w": flipped(state.params["w"], 2)})
    state, _ = step(state, BATCH)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(gshard.GShardError, match="the parameter w"):
            checkpointer.save(1, state)
        assert checkpointer.all_steps() == []


def test_wrong_options():
    with pytest.raises(gshard.GShardError, match="check_replicas=0 must be a whole number"):
        made("dp", every=0)
    _, plan = gshard.shard_train_state(
        ({"w": PARAMS["w"]}, optax.sgd(0.1)), gshard.make_mesh(), "p_g_os", min_shard_size=1
    )
    with pytest.warns(gshard.GShardWarning, match="check_replicas=5 compares nothing"):
        gshard.make_train_step(loss, plan, check_replicas=5)


def test_inside_a_jit_nothing_is_compared():
    state, step = made("dp", every=1)
    state, _ = jax.jit(step)(state, BATCH)
    assert step._replicas._count == 0


def test_thousands_of_devices_are_compared_within_a_second():
    check, count, size = object.__new__(ReplicaCheck), 4096, 50
    check._paths = [f"p{i}" for i in range(size)]
    check._devices = [jax.devices()[0]] * count
    check._owners = [[i % (count // 2) for i in range(count)]] * size
    sums, began = np.ones((count, size), np.uint32), time.monotonic()
    assert check._fault_of(sums, 1) == ""
    assert time.monotonic() - began < 5  # each device with each: minutes
    sums[77, -1] = 2
    assert "the parameter p49 on" in check._fault_of(sums, 1)
