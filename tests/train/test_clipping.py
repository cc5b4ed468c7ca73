"""Clipping in the user's own `tx`, of every kind, clips as on one device.

Every kind takes the same gradient, in the user's own loop, in one program for a level: what moves
a parameter is then the clipped gradient alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard

LEVELS = ("dp", "os", "os_g", "p_g_os")
ROWS = 840  # over 3 to 8 devices; over 3 to 7 with 2 micro-batches too
RATE = 0.5

# Of the largest change of a leaf. float32 rounds a parameter (of up to 3) to 1.2e-7 when it moves,
# and the least of those changes is 0.02; sums over rows in another order add less than that.
TOLERANCE = 1e-5

# Sharded as they are, sharded with padding (7 and 13 rows), and replicated (too small to shard).
SHAPES = {"even": (16, 24), "odd": (7, 5), "thirteen": (13, 7), "bias": (5,), "scale": (3,)}
SEGMENT = 16


@functools.cache
def params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in SHAPES.items()}


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    widths = {"x": 16, "z": 13, "y": 5}
    return {k: rng.normal(size=(ROWS, n)).astype(np.float32) for k, n in widths.items()}


def loss(p: Any, b: Any) -> jax.Array:
    wide = jnp.tanh(b["x"] @ p["even"]).reshape(-1, 8, 3) @ p["scale"]
    out = jnp.tanh(b["z"] @ p["thirteen"]) @ p["odd"] + p["bias"] - b["y"]
    return 3 * jnp.square(wide).mean() + jnp.square(out).mean()


def by_tensor(most: float) -> optax.GradientTransformation:
    """Each leaf by its own norm."""

    def clip(g: jax.Array, _: Any) -> jax.Array:
        return g * jnp.minimum(1, most / jnp.linalg.norm(g))

    return optax.stateless_with_tree_map(clip)


def groups(p: Any) -> Any:
    return {k: "head" if k in ("odd", "bias") else "body" for k in p}


def need_clip(p: Any) -> Any:
    """Paddle's flag of a parameter: the norm counts those that have it, and only they are cut."""
    return {k: k not in ("even", "scale") for k in p}


CLIPS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "none": optax.identity,
    "global norm": lambda: optax.clip_by_global_norm(2.0),
    "norm of each tensor": lambda: by_tensor(1.0),
    "value": lambda: optax.clip(0.1),
    "block rms": lambda: optax.clip_by_block_rms(0.2),
    "adaptive": lambda: optax.adaptive_grad_clip(0.3),
    "partition": lambda: optax.partition(
        {"head": optax.clip_by_global_norm(0.5), "body": optax.clip_by_global_norm(5.0)}, groups
    ),
    "multi_transform": lambda: optax.multi_transform(
        {"head": optax.clip(0.05), "body": optax.clip_by_block_rms(0.05)}, groups
    ),
    "need_clip": lambda: optax.masked(optax.clip_by_global_norm(0.5), need_clip),
}


def descend(name: str) -> optax.GradientTransformation:
    return optax.chain(CLIPS[name](), optax.sgd(RATE))


@functools.cache
def expected() -> tuple[dict[str, dict[str, np.ndarray]], float]:
    """On one device: by how much every kind of clipping moves each leaf; the gradient's norm."""

    @jax.jit
    def step(p: Any, b: Any) -> Any:
        grads = jax.grad(loss)(p, b)
        moved = {}
        for name in CLIPS:
            tx = descend(name)
            moved[name], _ = tx.update(grads, tx.init(p), p)
        return moved, optax.tree.norm(grads)

    moved, norm = jax.device_get(step(params(), batch()))
    return moved, float(norm)


def test_the_thresholds_bite():
    """On one device: some leaves or entries are cut and others are not, or all by one factor."""
    moved, _ = expected()
    free = moved["none"]
    kept = {name: {k: x / free[k] for k, x in tree.items()} for name, tree in moved.items()}
    for name in CLIPS.keys() - {"none"}:
        tree = kept[name]
        entries = np.concatenate([x.ravel() for x in tree.values()])
        assert entries.min() < 0.4, name
        apart = name not in ("global norm", "partition")
        assert (entries.max() > 1 - 1e-6) == apart, name
    assert np.ptp([x.min() for x in kept["global norm"].values()]) < 1e-6
    norms = {k: np.linalg.norm(x) / RATE for k, x in free.items()}
    some = [norms[k] for k, chosen in need_clip(free).items() if chosen]
    np.testing.assert_allclose(kept["need_clip"]["odd"], 0.5 / np.linalg.norm(some), 1e-5)
    assert kept["partition"]["odd"].min() < 0.9 * kept["partition"]["even"].min()


def divided(tx: optax.GradientTransformation, mesh: Any, level: str) -> tuple[Any, gshard.Plan]:
    return gshard.shard_train_state((params(), tx), mesh, level, min_shard_size=SEGMENT)


def on_levels(levels: tuple[str, ...], devices: int) -> dict[str, dict[str, Any]]:
    """Every kind of clipping at every level, in one program: by how much each leaf moves."""
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    states = {f"{a}, {b}": divided(descend(b), mesh, a)[0] for a in levels for b in CLIPS}
    plans = {level: divided(optax.identity(), mesh, level)[1] for level in levels}

    @jax.jit
    def step(states: Any, b: Any) -> Any:
        new = {}
        for level, plan in plans.items():
            of_level = [key for key in states if key.startswith(f"{level},")]
            _, grads = gshard.value_and_grad(loss, plan)(states[of_level[0]].params, b)
            for key in of_level:
                new[key] = states[key].apply_gradients(grads=grads)
            # One level after the other: XLA on CPU starts independent collectives in any order.
            b = {**b, "y": b["y"] + 0 * optax.tree.norm(grads)}
        return new

    whole = {key: gshard.full_params(state) for key, state in step(states, batch()).items()}
    return {key: {k: x - params()[k] for k, x in tree.items()} for key, tree in whole.items()}


@pytest.mark.parametrize(
    ("levels", "devices"),
    [
        (("os", "p_g_os"), 4),  # the other two are next to these in the norms below
        *[pytest.param(LEVELS, n, marks=pytest.mark.slow) for n in (3, 4, 5, 7, 8)],
    ],
)
def test_every_clipping_is_that_of_one_device(levels, devices):
    moved, _ = expected()
    for key, tree in on_levels(levels, devices).items():
        for path, x in moved[key.partition(", ")[2]].items():
            error = np.abs(tree[path] - x).max() / np.abs(x).max()
            assert error <= TOLERANCE, f"{key}, {path}: {error:.2g}"


def test_every_kind_of_layout_is_covered():
    _, plan = divided(optax.identity(), gshard.make_mesh(devices=jax.devices()[:4]), "os")
    assert plan.grads["even"].dim is not None and not plan.grads["even"].padding
    assert plan.grads["odd"].padding and plan.grads["thirteen"].padding
    assert plan.grads["bias"].dim is None and plan.grads["scale"].dim is None


@pytest.mark.parametrize(
    ("levels", "devices", "replica", "micro_batches"),
    [
        (LEVELS, 4, 2, 2),
        *[
            pytest.param(LEVELS, n, r, k, marks=pytest.mark.slow)
            for n, r in [(3, 1), (4, 1), (4, 2), (5, 1), (6, 3), (7, 1)]
            for k in (1, 2)
        ],
    ],
)
def test_the_reported_norm_is_that_of_one_device(levels, devices, replica, micro_batches):
    """`tx` clips here, and the norm is that of the gradient before it."""
    mesh = gshard.make_mesh(devices=jax.devices()[:devices], replica=replica)
    made = {level: divided(descend("global norm"), mesh, level) for level in levels}

    @jax.jit
    def norms(states: Any, b: Any) -> Any:
        found = {}
        for level, (_, plan) in made.items():
            step = gshard.make_train_step(loss, plan, micro_batches=micro_batches, donate=False)
            _, metrics = step(states[level], b)
            found[level] = metrics["grad_norm"]
            b = {**b, "y": b["y"] + 0 * metrics["grad_norm"]}
        return found

    _, norm = expected()
    for level, x in norms({level: state for level, (state, _) in made.items()}, batch()).items():
        assert abs(float(x) - norm) <= 1e-6 * norm, (level, float(x), norm)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("value", "p_g_os"),  # a norm that bites hides a scale
        *[pytest.param(n, level, marks=pytest.mark.slow) for n in CLIPS for level in LEVELS],
    ],
)
def test_a_scaled_gradient_is_clipped_without_its_scale(name, level):
    """Unscale, then clip, then step: the order that Paddle and PyTorch ask of the user."""
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = divided(descend(name), mesh, level)
    scaler = gshard.GradScaler(init_loss_scaling=1024.0)
    steps = [gshard.make_train_step(loss, plan, donate=False, scaler=s) for s in (None, scaler)]

    @jax.jit
    def both(states: Any, b: Any) -> Any:
        plain, before = steps[0](states[0], b)
        b = {**b, "y": b["y"] + 0 * before["grad_norm"]}
        scaled, metrics = steps[1](states[1], b)
        return (plain, scaled), (before, metrics)

    states = state, state
    for _ in range(3):
        states, (plain, scaled) = both(states, batch())
        np.testing.assert_allclose(scaled["grad_norm"], plain["grad_norm"], 1e-6)
    assert float(scaled["loss_scale"]) == 1024 and int(scaled["skipped_steps"]) == 0
    plain, scaled = map(gshard.full_params, states)
    for path, x in plain.items():
        # A power of two scales without rounding; XLA may fuse, and so round, the two steps apart:
        # some units in the last place of parameters of up to 10.
        np.testing.assert_allclose(scaled[path], x, rtol=0, atol=5e-6, err_msg=path)
        assert np.abs(x - params()[path]).max() > 0.01
