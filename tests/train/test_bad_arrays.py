"""Arrays that JAX takes wrongly, or not at all: refused with their path and what to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import gshard

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")
BATCH = np.ones((16, 16), np.float32)
BIG = 2**40


def params(width: int = 8) -> dict[str, Any]:
    return {"w": np.ones((16, width), np.float32), "b": np.zeros(width, np.float32)}


def loss(p: Any, b: Any) -> jax.Array:
    b = b["x"] if isinstance(b, dict) else b
    return ((b @ p["w"] + p["b"]) ** 2).mean()


def state_of(tx: Any = None) -> TrainState:
    return TrainState.create(apply_fn=None, params=params(), tx=tx or optax.adam(1e-2))


def shard(state: Any, level: Any = "os") -> Any:
    return gshard.shard_train_state(state, gshard.make_mesh(), level, min_shard_size=8)


def train(state: Any, batch: Any = BATCH, level: Any = "os") -> Any:
    state, plan = shard(state, level)
    return gshard.make_train_step(loss, plan, check_loss=False)(state, batch)


def plain(**more: Any) -> Any:
    return {**params(), **more}, optax.sgd(0.1)


class Tensor:
    """An array of another library, as PyTorch's: its dtype is none of NumPy's."""

    dtype = object()

    def __init__(self, *shape: int):
        self.shape = shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.ones(self.shape, np.float32)


def masked(x: np.ndarray) -> Any:
    return np.ma.masked_array(x, mask=x > 0)


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params())


def abstract() -> Any:
    return shard((ABSTRACT, optax.sgd(0.1)))


CASES: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "another library's": (
        lambda path: shard(plain(w=Tensor(16, 8))),
        ("the parameter w", "a Tensor", "np.asarray"),
    ),
    "another library's, in a TrainState": (
        lambda path: shard(state_of().replace(params=plain(w=Tensor(16, 8))[0])),
        ("params/w", "a Tensor", "np.asarray"),
    ),
    "another library's batch": (
        lambda path: train(plain(), {"x": Tensor(16, 16)}),
        ("batch['x']", "a Tensor", "np.asarray"),
    ),
    "masked": (
        lambda path: shard(plain(w=masked(params()["w"]))),
        ("the parameter w", "masked", "filled(0)"),
    ),
    "masked batch": (
        lambda path: train(plain(), {"x": masked(BATCH)}),
        ("batch['x']", "masked", "filled(0)"),
    ),
    "int64": (
        lambda path: shard(plain(id=np.array([5, BIG]))),
        ("id contains", str(BIG), "int32", "jax_enable_x64"),
    ),
    "negative int64": (
        lambda path: shard(plain(id=np.array([5, -BIG]))),
        ("id contains", str(-BIG), "int32"),
    ),
    "int64 of an init function": (
        lambda path: shard(lambda: plain(id=np.array([BIG]))),
        ("id contains", str(BIG), "int32"),
    ),
    "step": (
        lambda path: shard(state_of().replace(step=BIG)),
        ("the step number contains", str(BIG), "int32"),
    ),
    "int64 batch": (
        lambda path: train(plain(), {"x": BATCH, "id": np.full(16, BIG)}),
        ("batch['id'] contains", str(BIG), "int32"),
    ),
    "uint64 batch": (
        lambda path: train(plain(), {"x": BATCH, "id": np.full(16, BIG, np.uint64)}),
        ("batch['id'] contains", str(BIG), "uint32"),
    ),
    "scalar of a batch": (
        lambda path: train(plain(), {"x": BATCH, "id": BIG}),
        ("batch['id'] contains", str(BIG), "int32"),
    ),
    "state of another chain": (
        lambda path: train(
            state_of().replace(opt_state=optax.sgd(0.1, momentum=0.9).init(params()))
        ),
        ("another optimizer", "missing 0/count, 0/mu/b", "tx.init"),
    ),
    "state of other shapes": (
        lambda path: train(state_of().replace(params=params(4))),
        ("0/mu/w (16, 8), not (16, 4)", "tx.init"),
    ),
    "state of other shapes that broadcast": (
        lambda path: train(
            state_of(optax.trace(0.9)).replace(opt_state=optax.trace(0.9).init(params(1)))
        ),
        ("trace/w (16, 1), not (16, 8)", "tx.init"),
    ),
    "abstract state": (lambda path: train((ABSTRACT, optax.sgd(0.1))), ("abstract", "no values")),
    "abstract batch": (
        lambda path: train(plain(), {"x": jax.ShapeDtypeStruct((16, 16), np.float32)}),
        ("batch['x'] is abstract",),
    ),
    "abstract, full_params": (lambda path: gshard.full_params(abstract()[0]), ("abstract",)),
    "abstract, unwrap": (
        lambda path: (lambda state, plan: plan.unwrap(state))(*abstract()),
        ("abstract",),
    ),
    "abstract, eval step": (
        lambda path: gshard.make_eval_step(loss, abstract()[1])(abstract()[0], BATCH),
        ("abstract",),
    ),
    "abstract, value_and_grad": (
        lambda path: gshard.value_and_grad(loss, abstract()[1])(abstract()[0].params, BATCH),
        ("abstract",),
    ),
    "abstract, checkpoint": (
        lambda path: gshard.Checkpointer(path).save(0, abstract()[0]),
        ("abstract",),
    ),
    "abstract, safetensors": (
        lambda path: gshard.save_safetensors(abstract()[0], path / "x.safetensors"),
        ("abstract",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_refused_in_words(name, tmp_path):
    make, words = CASES[name]
    with pytest.raises(gshard.GShardError) as error:
        make(tmp_path)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


def test_what_fits_is_taken():
    """64-bit integers of small numbers, in the state and in the batch."""
    state, _ = train(
        plain(id=np.array([2**31 - 1, -(2**31)])), {"x": BATCH, "id": np.full(16, 2**31 - 1)}
    )
    assert gshard.full_params(state)["id"].tolist() == [2**31 - 1, -(2**31)]


def test_an_abstract_state_lowers():
    state, plan = abstract()
    step = gshard.make_train_step(loss, plan)
    assert step.lower(state, jax.ShapeDtypeStruct((16, 16), np.float32)).as_text()
