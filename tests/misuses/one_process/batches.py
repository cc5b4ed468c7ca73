"""What is given to a step as the batch."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gshard
from tests.misuses.small import (
    BATCH,
    Frame,
    Tensor,
    alone,
    as_alone,
    kept,
    loss_fn,
    params,
    shard,
    train,
)
from tests.misuses.table import raw, refused, right

BIG = 2**40
X, Y = BATCH["x"], BATCH["y"]


@dataclass
class Row:
    x: Any
    y: Any


class OnDisk:
    """As an array of h5py or zarr: NumPy can read it, and JAX does not know it."""

    def __init__(self, x: np.ndarray):
        self._x, self.shape, self.dtype, self.ndim = x, x.shape, x.dtype, x.ndim

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        return self._x


def examples(count: int) -> dict[str, np.ndarray]:
    return {"x": np.resize(X, (count, 16)), "y": np.resize(Y, (count, 8))}


def by_column(params: Any, batch: Any) -> jax.Array:
    x, y = batch
    return loss_fn(params, {"x": x, "y": y})


def with_scale(params: Any, batch: Any) -> jax.Array:
    return loss_fn(params, batch) * batch["scale"]


def in_the_users_loop(count: int) -> Any:
    state, plan, _ = kept()
    grad = gshard.value_and_grad(loss_fn, plan, micro_batches=2)
    return jax.jit(grad)(state.params, examples(count))


def in_evaluation(batch: Any) -> Any:
    state, plan, _ = kept()
    return gshard.make_eval_step(loss_fn, plan)(state, batch)


def half_global(beside: Any) -> Any:
    plan = kept()[1]
    given = {"x": gshard.shard_batch(np.ones((16, 2)), plan), "y": beside}
    return gshard.shard_batch(given, plan)


def nan_step(x):
    """A step that is not finite changes nothing, and is counted."""
    found, metrics = train({"x": x, "y": Y})
    return (found, metrics["skipped_steps"]), (params(), 1)


def reused(_):
    """The caller's buffer is filled with the next batch while the step runs."""
    state, _, step = kept()
    buffer = {k: v.copy() for k, v in BATCH.items()}
    state, _ = step(state, buffer)
    for x in buffer.values():
        x[:] = 9
    return gshard.full_params(state), alone()


def a_state_in_it(_):
    state, plan, _ = kept()
    step = gshard.make_train_step(lambda p, b: loss_fn(p, b) + 0.0 * b["step"], plan)
    step(state, {**BATCH, "step": state.step})


def deleted(_):
    x = jnp.asarray(X)
    x.delete()
    train({"x": x, "y": Y})


def deleted_when_global(*names: str) -> None:
    state, plan, step = kept()
    batch = gshard.shard_batch(BATCH, plan)
    batch["x"].delete()  # as by a jit with donate_argnums=
    step(state, {**BATCH, **{name: batch[name] for name in names}})


def of_another_mesh(_):
    fewer = gshard.make_mesh(devices=jax.devices()[:4])
    plan = shard(mesh=fewer)[1]
    return as_alone(gshard.shard_batch(BATCH, plan))


def reversed_devices(_):
    mesh = jax.make_mesh((8,), ("shard",), devices=jax.devices()[::-1])
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("shard")))
    return train({"x": x, "y": Y})[0], alone()


def key_per_example(_):
    batch = {**BATCH, "key": jax.random.split(jax.random.key(0), 16)}
    loss = lambda p, b: loss_fn(p, b) + jax.vmap(jax.random.uniform)(b["key"]).mean()  # noqa: E731
    return as_alone(batch, loss)


Pair = namedtuple("Pair", "x y")

ROWS = {
    "13 examples on 8 devices": refused(
        lambda _: train(examples(13)),
        "13 examples, which is not a multiple of the 8 devices. Use 8 or 16",
    ),
    "4 examples on 8 devices": refused(lambda _: train(examples(4)), "4 examples", "8 devices"),
    "no examples": refused(lambda _: train(examples(0)), "has no examples. Use 8 or 16 examples."),
    "24 examples in 2 micro-batches": refused(
        lambda _: train(examples(24), micro_batches=2),
        *("24 examples", "8 devices x 2 micro-batches = 16. Use 16 or 32"),
    ),
    "24 examples in 2 micro-batches of your own loop": refused(
        lambda _: in_the_users_loop(24), "24 examples", "8 devices", "2 micro-batches"
    ),
    "13 examples in evaluation": refused(
        lambda _: in_evaluation(examples(13)), "13 examples", "8 devices"
    ),
    "arrays of different numbers of examples": refused(
        lambda _: train({"x": X, "y": Y[:8]}), "'x'", "has 16", "'y'", "has 8"
    ),
    "examples in the second dimension": refused(
        lambda _: train({"x": X.T[:3], "y": Y}), "'x'", "'y'", "leading dimension"
    ),
    "an empty dict": refused(lambda _: train({}), "no array", "draws its own samples"),
    "None": refused(lambda _: train(None), "no array"),
    "an empty list": refused(lambda _: train([]), "no array"),
    "a scalar": refused(lambda _: train(3.0), "no array"),
    "numbers in a list": refused(
        lambda _: train([1.0, 2.0]), "no array with examples", "make them arrays"
    ),
    "lists of lists instead of arrays": refused(
        lambda _: train({"x": X.tolist(), "y": Y.tolist()}), "make them arrays"
    ),
    "a list of examples": refused(
        lambda _: train([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]), "leading"
    ),
    "text": refused(lambda _: train("batch"), "'batch'", "arrays"),
    "texts in an array": refused(
        lambda _: train({**BATCH, "t": np.array(["a"] * 16)}), "'t'", "<U1", "numbers"
    ),
    "texts in a list": refused(lambda _: train({"t": ["a"] * 8}), "'t/0'", "'a'", "arrays"),
    "bytes": refused(lambda _: train({**BATCH, "t": b"abc"}), "'t'", "arrays"),
    "objects in an array": refused(lambda _: train({"x": np.array([None] * 8)}), "'x'", "object"),
    "a structured array": refused(
        lambda _: train({"x": np.zeros(8, [("a", float)])}), "'x'", "has dtype [('a',"
    ),
    "dates": refused(
        lambda _: train({**BATCH, "t": np.zeros(16, "datetime64[s]")}), "'t'", "datetime64"
    ),
    "a generator": refused(
        lambda _: train(x for x in (BATCH,)), "a generator", "gshard.global_batches"
    ),
    "a set of arrays' names": refused(lambda _: train({"x", "y"}), "a set"),
    "a whole data loader": refused(
        lambda _: train(gshard.DataLoader(BATCH, 16, kept()[1])), "a DataLoader"
    ),
    "a mapping that is no dict": refused(
        lambda _: train(MappingProxyType(BATCH)), "a mappingproxy"
    ),
    "a dataclass that is no pytree": refused(
        lambda _: train(Row(X, Y)), "batch is a Row", "jax.tree_util.register_dataclass"
    ),
    "a tuple, as of PyTorch's loader": right(lambda _: (train((X, Y), by_column)[0], alone())),
    "a named tuple": right(lambda _: (train(Pair(X, Y), by_column)[0], alone())),
    "None beside arrays": right(lambda _: as_alone({**BATCH, "mask": None})),
    "a number beside arrays": right(lambda _: as_alone({**BATCH, "scale": 3}, with_scale)),
    "PyTorch's tensors": refused(
        lambda _: train({"x": Tensor(X), "y": Y}), "batch['x']", "a Tensor", "np.asarray"
    ),
    "a table of pandas": refused(
        lambda _: train({"x": Frame(X), "y": Y}), "batch['x']", "a Frame", "arrays"
    ),
    "a masked array": refused(
        lambda _: train({"x": np.ma.masked_array(X, mask=X > 0), "y": Y}),
        *("batch['x']", "masked", "filled(0)"),
    ),
    "an array of a file, such as of h5py": refused(
        lambda _: train({"x": OnDisk(X), "y": Y}), "batch['x'] is a OnDisk", "np.asarray"
    ),
    "labels as a Python list": refused(
        lambda _: train({"x": X, "y": Y, "label": [0, 1] * (len(X) // 2)}),
        f"batch['label'] is a list with an entry for each of the {len(X)} examples",
    ),
    "lists of nothing beside arrays": right(
        lambda _: as_alone({**BATCH, "unused": [None] * len(X), "none": []})
    ),
    "a number of bfloat16": right(
        lambda _: as_alone({**BATCH, "scale": jnp.ones(1, jnp.bfloat16)[0]}, with_scale)
    ),
    "a module of NNX": refused(
        lambda _: train({**BATCH, "teacher": nnx.Linear(8, 8, rngs=nnx.Rngs(0))}),
        *("batch['teacher'] is of NNX (Linear)", "Make it a part of the model"),
    ),
    "an NNX variable": right(lambda _: as_alone({"x": nnx.Variable(jnp.asarray(X)), "y": Y})),
    "a NumPy matrix": right(lambda _: as_alone({"x": np.asmatrix(X), "y": Y})),
    "a memory map that is read only": right(lambda path: as_alone({"x": mapped(path), "y": Y})),
    "an array in Fortran order, and one with negative strides": right(
        lambda _: as_alone({"x": np.asfortranarray(X), "y": Y[::-1][::-1]})
    ),
    "numbers of the other byte order": refused(
        lambda _: train({"x": X.astype(">f4"), "y": Y}), "batch['x'] has dtype >f4", "astype"
    ),
    "float64": right(lambda _: as_alone({"x": X.astype(np.float64), "y": Y})),
    "float64 beyond float32": right(lambda _: nan_step(X * 1e300)),
    "long doubles": refused(
        lambda _: train({"x": X.astype(np.longdouble), "y": Y}),
        "batch['x'] has dtype <f16",
        "astype",
    ),
    "booleans": right(lambda _: as_alone({"x": X > 0, "y": Y})),
    "NaN": right(lambda _: nan_step(X * np.nan)),
    "int64 beyond 32 bits": refused(
        lambda _: train({**BATCH, "id": np.full(16, BIG)}), "batch['id'] contains", str(BIG)
    ),
    "uint64 beyond 32 bits": refused(
        lambda _: train({**BATCH, "id": np.full(16, BIG, np.uint64)}),
        *("batch['id'] contains", str(BIG), "uint32"),
    ),
    "a number beyond 32 bits": refused(
        lambda _: train({**BATCH, "id": BIG}), "batch['id'] contains", str(BIG), "int32"
    ),
    "a number beyond 64 bits": refused(
        lambda _: train({**BATCH, "id": 2**70}), "batch['id'] contains", str(2**70)
    ),
    "abstract arrays": refused(
        lambda _: train({"x": jax.ShapeDtypeStruct((16, 16), np.float32), "y": Y}),
        "batch['x'] is abstract",
    ),
    "arrays on one device": right(lambda _: as_alone(jax.device_put(BATCH, jax.devices()[5]))),
    "arrays of two devices": right(
        lambda _: (
            train({"x": jax.device_put(X, jax.devices()[1]), "y": jax.device_put(Y)})[0],
            alone(),
        )
    ),
    "arrays placed on half of the devices": right(of_another_mesh),
    "arrays placed on the devices in another order": right(reversed_devices),
    "global arrays beside text": refused(lambda _: half_global("text"), "'y'", "'text'", "arrays"),
    "global arrays beside fewer examples": refused(
        lambda _: half_global(np.ones(8)), "global array of 16 examples", "global batch of 8"
    ),
    "global arrays beside 12 examples": refused(
        lambda _: half_global(np.ones(12)), "'y'", "12 examples", "8 devices"
    ),
    "an array that was deleted": refused(deleted, "deleted"),
    "a global batch of which an array was deleted": refused(
        lambda _: deleted_when_global("x", "y"), "batch['x'] was deleted", "donate_argnums="
    ),
    "a global array that was deleted, next to an array on the host": refused(
        lambda _: deleted_when_global("x"), "batch['x'] was deleted"
    ),
    "an array of the state": refused(
        a_state_in_it, "step and an array of the batch", "jnp.copy", "donate=False"
    ),
    "the caller's buffer is filled again": right(reused),
    "a key": right(
        lambda _: as_alone(
            {**BATCH, "key": jax.random.key(1)},
            lambda p, b: loss_fn(p, b) * jax.random.uniform(b["key"]),
        )
    ),
    "an old-style key": refused(
        lambda _: train({**BATCH, "key": jax.random.PRNGKey(1)}), "'key'", "jax.random.key(seed)"
    ),
    "a key for every example": right(key_per_example),
    "the batch and the plan are swapped": refused(
        lambda _: gshard.shard_batch(kept()[1], BATCH), "shard_batch(batch, plan)", "a dict"
    ),
    "shard_batch with a mesh": refused(
        lambda _: gshard.shard_batch(BATCH, gshard.make_mesh()), "shard_batch", "a Mesh"
    ),
    "keys that the loss does not know": raw(
        lambda _: train({"inputs": X, "labels": Y}), KeyError, "x"
    ),
    "other shapes than the model takes": raw(
        lambda _: train({"x": X[:, :3], "y": Y}), TypeError, "dot_general"
    ),
    "another number of examples at every step": right(lambda _: as_alone(examples(8 * 3))),
}


def mapped(path: Any) -> Any:
    np.save(path / "x.npy", X)
    return np.load(path / "x.npy", mmap_mode="r")
