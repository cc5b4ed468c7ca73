"""Checkpoints of moments in 8 bits: into float32 and back, other blocks, and less on the disk."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

import gshard
from gshard.checkpoint import matching
from gshard.sharding.quantized_array import quantized_arrays

PRECISIONS = {"int8": gshard.Precision("float32", state_dtype="int8"), "float32": None}
SHAPES = {"a": (64, 300), "b": (301, 77), "small": (5, 3), "vector": (5001,)}


@cache
def params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def make(precision: str, level: Any, devices: int, **options: Any) -> Any:
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    return gshard.shard_train_state(
        (params(), optax.adam(1e-2)), mesh, level, precision=PRECISIONS[precision],
        min_shard_size=100, **options,
    )  # fmt: skip


@cache
def trained(precision: str, level: Any, devices: int) -> Any:
    """A state after an update with gradients of many sizes."""
    state, plan = make(precision, level, devices)
    grads = {k: jnp.asarray(x * np.exp(3 * np.sin(40 * x))) for k, x in params().items()}
    return jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads), plan


def moments(state: Any, plan: Any) -> dict[str, np.ndarray]:
    paths, leaves = zip(
        *jax.tree_util.tree_flatten_with_path(plan.unwrap(state).opt_state)[0], strict=True
    )
    return dict(zip(map(jax.tree_util.keystr, paths), leaves, strict=True))


def assert_placed(state: Any, plan: Any) -> None:
    wanted = jax.tree.leaves(plan.abstract_components())
    for x, y in zip(jax.tree.leaves(plan.kind.split(state)), wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        assert x.sharding.memory_kind == y.sharding.memory_kind


def bytes_in(folder: Path) -> int:
    return sum(x.stat().st_size for x in folder.rglob("*") if x.is_file())


# Whether values stay as they were: blocks of 8 devices at os_g are those of p_g_os.
TARGETS = {
    "other level": (("int8", "p_g_os", 8), True),
    "float32": (("float32", "p_g_os", 3), True),
    "one device, float32": (("float32", "dp", 1), True),
    "3 devices": (("int8", "os", 3), False),
    "5 devices": (("int8", "p_g_os", 5), False),
    "offload": (("int8", "os", 8), True),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("source", PRECISIONS)
def test_moments_are_restored_in_the_form_that_the_plan_has(source, name, tmp_path, monkeypatch):
    monkeypatch.setattr(matching, "AT_ONCE", 8000)  # several groups
    (precision, level, devices), exact = TARGETS[name]
    state, plan = trained(source, "os_g", 8)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        other, its_plan = make(precision, level, devices, offload=name == "offload")
        restored = checkpointer.restore(like=other).state
        checkpointer.save(1, restored)  # it is what was saved, in another form
        with pytest.raises(gshard.GShardError, match="another state under this number: params"):
            checkpointer.save(1, other)
    assert_placed(restored, its_plan)
    assert bool(quantized_arrays(its_plan.opt_state)) == (precision == "int8")
    before, after = moments(state, plan), moments(restored, its_plan)
    for path, x in before.items():
        if (exact and source == "int8") or precision == "float32":
            np.testing.assert_allclose(after[path], x, rtol=1e-6, err_msg=path)
        else:  # a step of a square root
            assert abs(after[path] - x).max() <= 0.016 * abs(x).max(), path
    for x, y in zip(
        *map(jax.tree.leaves, (plan.unwrap(state), its_plan.unwrap(restored))), strict=True
    ):
        assert x.dtype == y.dtype


def test_of_parameters_in_boxes_of_flax(tmp_path):
    def make(precision, boxed, devices):
        found = {
            k: nn.Partitioned(x, (None,) * x.ndim) if boxed else x for k, x in params().items()
        }
        mesh = gshard.make_mesh(devices=jax.devices()[:devices])
        tx, options = optax.adam(1e-2), {"precision": PRECISIONS[precision], "min_shard_size": 100}
        return gshard.shard_train_state((found, tx), mesh, "p_g_os", **options)

    state, plan = make("int8", True, 8)
    grads = jax.tree.map(jnp.cos, state.params)
    state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        for target in (("int8", True, 8), ("int8", False, 3), ("float32", True, 3)):
            other, its_plan = make(*target)
            restored = checkpointer.restore(like=other).state
            wanted, found = (
                nn.unbox(p.unwrap(s)) for p, s in ((plan, state), (its_plan, restored))
            )
            wanted, found = jax.tree.leaves(wanted.opt_state), jax.tree.leaves(found.opt_state)
            for x, y in zip(found, wanted, strict=True):
                np.testing.assert_allclose(x, y, atol=0.016 * np.abs(y).max(), err_msg=str(target))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_blocks_along_the_experts_are_restored_where_these_are_kept(precision, tmp_path):
    shape = (128, 8, 8)  # blocks are along the longest dimension, that of the experts
    experts = {"experts": np.random.default_rng(0).normal(size=shape).astype(np.float32)}

    def make(precision, devices, **options):
        mesh = gshard.make_mesh(expert=devices, devices=jax.devices()[:devices])
        pair, precision = (experts, optax.adam(1e-2)), PRECISIONS[precision]
        return gshard.shard_train_state(pair, mesh, "os", precision=precision, **options)

    state, plan = make("int8", 1)
    state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, jax.tree.map(jnp.sin, experts))
    assert state.opt_state.inner[0].mu["experts"].scales.shape == (1, 8, 8)
    other, its_plan = make(precision, 4, keep={"experts": ("expert", 0)})
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        restored = checkpointer.restore(like=other).state
    assert_placed(restored, its_plan)
    before, after = moments(state, plan), moments(restored, its_plan)
    error = 0.016 if precision == "int8" else 1e-6  # in 8 bits, a step of a square root
    for path, x in before.items():
        assert abs(after[path] - x).max() <= error * abs(x).max(), path


def test_what_is_written_falls_with_the_state(tmp_path):
    # Large, since the indices that Orbax writes vary by some 50 kB from save to save.
    large = np.random.default_rng(0).normal(size=(512, 1024)).astype(np.float32)
    size, grads = large.nbytes, {"w": large * np.exp(3 * np.sin(40 * large))}
    for name, precision in PRECISIONS.items():
        pair = ({"w": large}, optax.adam(1e-2))
        state, _ = gshard.shard_train_state(pair, gshard.make_mesh(), "p_g_os", precision=precision)
        state = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
        with gshard.Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save(1, state)
    saved = bytes_in(tmp_path / "float32") - bytes_in(tmp_path / "int8")
    assert saved > 0.6 * 2 * size  # of 0.73: what is written is compressed


def test_plans_name_what_no_checkpoint_has(tmp_path):
    state, _ = trained("int8", "os", 2)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        mesh = gshard.make_mesh(devices=jax.devices()[:2])
        pair = (params(), optax.sgd(0.1))
        other, _ = gshard.shard_train_state(pair, mesh, "os", min_shard_size=0)
        with pytest.raises(gshard.GShardError, match="0/mu/a/codes is only in the checkpoint"):
            checkpointer.restore(like=other)


@pytest.mark.parametrize("blocks", [[7, 1], [0, 0], ["0", 1], [0], 3])
def test_a_damaged_description_of_blocks_is_refused(blocks, tmp_path):
    state, _ = trained("int8", "os", 2)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        checkpointer.wait()
        path = next(tmp_path.rglob("gshard.json"))
        table = json.loads(path.read_text())
        table["arrays"]["opt_state/inner/0/mu/a/codes"][2] = blocks
        path.write_text(json.dumps(table))
        with pytest.raises(gshard.GShardError, match="damaged"):
            checkpointer.restore(1, like=state, verify=False)
