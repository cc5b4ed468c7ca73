"""Plain one-device training: what every level has to equal. Nothing here imports gshard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from tests.zoo import ZOO, Model

CLIP = 0.15  # below the gradient norms of the zoo

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.05),
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(1e-3, eps=1e-5)),
}


def functional(
    model: Model, seed: int = 0, dtype: Any = None
) -> tuple[Any, Callable[[Any, Any], jax.Array]]:
    """The model as a pytree of parameters and `loss(params, batch)`; NNX: an `nnx.State`.

    `dtype` is for NNX layers that fix their compute dtype when they are made.
    """
    if model.kind == "linen":
        return model.init(seed), model.loss
    whole = model.init(seed)
    for _, module in nnx.iter_modules(whole) if dtype else ():
        if getattr(module, "dtype", None) is not None:
            module.dtype = dtype
    graph, params, rest = nnx.split(whole, nnx.Param, ...)
    return params, lambda p, batch: model.loss(nnx.merge(graph, p, rest, copy=True), batch)


def flat(tree: Any) -> dict[str, np.ndarray]:
    """Any tree of arrays (Linen boxes, NNX states and models too) as path -> host array."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree, nnx.Param)
    if isinstance(tree, nnx.State):
        tree = nnx.to_pure_dict(tree)
    leaves = jax.tree_util.tree_flatten_with_path(nn.meta.unbox(tree))[0]
    return {path_name(path): np.asarray(leaf) for path, leaf in leaves}


def path_name(path: tuple[Any, ...]) -> str:
    """`"a/b/c"` of a key path."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


@cache
def gradient(name: str, rows: int, seed: int = 0) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradient of one step over `rows` rows of step 0, float32."""
    model = ZOO[name]
    params, loss = functional(model, seed)
    value, grads = jax.jit(jax.value_and_grad(loss))(params, model.batch(seed, rows, 0))
    return float(value), flat(grads)


@cache
def train(
    name: str, optimizer: str, rows: int, steps: int = 20, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Losses and gradient norms, (`steps`,) each, and the parameters after the last, float32."""
    model, tx = ZOO[name], OPTIMIZERS[optimizer]()
    params, loss = functional(model, seed)

    @jax.jit
    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        seen = value, optax.tree.norm(grads)
        return optax.apply_updates(params, updates), opt_state, seen

    opt_state, seen = tx.init(params), []
    for i in range(steps):
        params, opt_state, last = step(params, opt_state, model.batch(seed, rows, i))
        seen.append(last)
    losses, norms = np.array(seen).T
    return losses, norms, flat(params)


@cache
def float64_gradient(name: str, rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """What `gradient` rounds: the gradient of the same parameters, computed in float64."""
    model = ZOO[name]
    params, loss = functional(model, seed, jnp.float64)
    batch = {
        key: x.astype(np.float64) if x.dtype == np.float32 else x
        for key, x in model.batch(seed, rows, 0).items()
    }
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), params)
        if "f32[" in str(jax.make_jaxpr(jax.grad(loss))(params, batch)):
            raise TypeError(f"{name}: the float64 reference computes in float32 somewhere")
        return flat(jax.jit(jax.grad(loss))(params, batch))


def zero_gradients(name: str, rows: int, seed: int = 0) -> tuple[str, ...]:
    """Paths whose true gradient is zero: below 1e-12 of the tree's largest entry in float64.

    What float32 finds there is rounding alone, on one device as on many (an attention key bias
    shifts every score of a query alike, and the softmax does not see it).
    """
    grads = float64_gradient(name, rows, seed)
    largest = largest_entry(grads)
    return tuple(path for path, g in grads.items() if np.abs(g).max() < 1e-12 * largest)


# Comparisons. All raise AssertionError that names the worst leaf.


def largest_entry(tree: Mapping[str, np.ndarray]) -> float:
    return max(float(np.abs(leaf).max()) for leaf in tree.values())


def assert_same_leaves(
    found: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    tolerance: float,
    *,
    relative_to: str,
    without: tuple[str, ...] = (),
) -> None:
    """Every entry within `tolerance` of the largest entry of its leaf or of the whole tree.

    Args:
        found, expected: path -> array, as `flat` makes them.
        tolerance: a fraction.
        relative_to: `"leaf"` or `"tree"`.
        without: paths that are excepted, by name.
    """
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    assert set(without) <= expected.keys(), f"no such leaves: {set(without) - expected.keys()}"
    tree = largest_entry(expected)
    errors = {}
    for path, want in expected.items():
        have = found[path]
        assert have.shape == want.shape, f"{path}: {have.shape}, expected {want.shape}"
        assert np.isfinite(have).all(), f"{path} is not finite"
        scale = float(np.abs(want).max()) if relative_to == "leaf" else tree
        if path not in without:
            errors[path] = float(np.abs(have.astype(np.float64) - want).max()) / scale
    worst = max(errors, key=lambda path: errors[path])
    wrong = {path: f"{error:.2g}" for path, error in errors.items() if not error <= tolerance}
    assert not wrong, (
        f"worst {worst}: {errors[worst]:.2g} > {tolerance} of the {relative_to}'s largest; {wrong}"
    )


def assert_same_values(found: Any, expected: Any, tolerance: float) -> None:
    """Every loss (or norm) within `tolerance`, relative."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    error = np.abs(found - expected) / np.abs(expected)
    assert np.isfinite(found).all() and error.max() <= tolerance, (
        f"values differ by {error.max():.2g} at step {error.argmax()}: {found} against {expected}"
    )
