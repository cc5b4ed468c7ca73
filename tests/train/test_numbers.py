"""Every level gives the numbers of one device, for every model of the zoo.

Every model is trained at every level on three numbers of devices, of which the quick tier has one.
"""

from __future__ import annotations

import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from tests import reference
from tests.covering import covering
from tests.tiers import quick
from tests.zoo import SEGMENT_SIZE, ZOO

# leaves of at most SEGMENT_SIZE elements are replicated, on purpose
pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

LEVELS = ("dp", "os", "os_g", "p_g_os")
DEVICES = (1, 2, 3, 4, 5, 8)
MICRO_BATCHES = (1, 2, 4)
STEPS = 20


class Case(NamedTuple):
    model: str
    level: str
    devices: int
    micro_batches: int
    check: str

    @property
    def rows(self) -> int:
        unit = self.devices * self.micro_batches
        return next(rows for rows in (48, 40, 64) if rows % unit == 0)


def mesh_of(devices: int) -> jax.sharding.Mesh:
    return gshard.make_mesh(devices=jax.devices()[:devices])


def check_gradient(case: Case, mesh: jax.sharding.Mesh) -> None:
    """One-step gradients within 2e-6 of the leaf's largest entry.

    The reference for sums of more than 16 parts is one device's gradient in float64. Its float32
    gradient differs from that by up to 1.2e-6, and with 32 parts ours differs from both.
    """
    model = ZOO[case.model]
    state, plan = gshard.shard_train_state(
        model.state(optax.sgd(0.1)), mesh, case.level, **model.options()
    )
    compile = nnx.jit if model.kind == "nnx" else jax.jit
    run = compile(gshard.value_and_grad(model.loss, plan, micro_batches=case.micro_batches))
    loss, grads = run(model.target(state), model.batch(0, case.rows, 0))
    expected_loss, expected = reference.gradient(case.model, case.rows)
    if case.devices * case.micro_batches > 16:
        expected = reference.float64_gradient(case.model, case.rows)
    reference.assert_same_values(loss, expected_loss, 1e-6)
    reference.assert_same_leaves(
        logical(grads, plan), expected, 2e-6, relative_to="leaf", without=model.zero
    )


def logical(grads: Any, plan: gshard.Plan) -> dict[str, np.ndarray]:
    """Divided gradients as path -> array of logical shape, after checking that padding is zero."""
    shapes = {layout.path: layout.shape for layout in jax.tree.leaves(plan.grads)}
    found = {}
    for path, stored in reference.flat(grads).items():
        found[path] = stored[tuple(slice(size) for size in shapes[path])]
        padding = np.count_nonzero(stored) - np.count_nonzero(found[path])
        assert not padding, f"{path}: {padding} entries of the padding are not zero"
    return found


def check_training(case: Case, mesh: jax.sharding.Mesh) -> None:
    """20 steps: losses, norms and parameters (relative to the tree's largest entry).

    SGD within 1e-6; AdamW's losses within 5e-6, its parameters within 1e-5.
    """
    model, optimizer = ZOO[case.model], reference.OPTIMIZERS[case.check]()
    state, plan = gshard.shard_train_state(
        model.state(optimizer), mesh, case.level, **model.options()
    )
    step = gshard.make_train_step(model.loss, plan, micro_batches=case.micro_batches)
    seen = []
    for i in range(STEPS):
        batch = model.batch(0, case.rows, i)
        if model.kind == "nnx":
            metrics = step(*state, batch)
        else:
            state, metrics = step(state, batch)
        seen.append((metrics["loss"], metrics["grad_norm"]))
    losses, norms = np.array(seen).T
    expected_losses, expected_norms, expected = reference.train(case.model, case.check, case.rows)
    sgd = case.check == "sgd"
    reference.assert_same_values(losses, expected_losses, 1e-6 if sgd else 5e-6)
    reference.assert_same_values(norms, expected_norms, 5e-6)
    reference.assert_same_leaves(
        reference.flat(gshard.full_params(state)),
        expected,
        1e-6 if sgd else 1e-5,
        relative_to="tree",
        without=model.zero,
    )


CHECKS = {"gradient": check_gradient, "sgd": check_training, "adamw": check_training}


# Every model at every level on 1, 3 and 5 devices or on 2, 4 and 8; micro-batches and checks take
# turns.
CASES = [
    Case(
        model,
        level,
        devices,
        MICRO_BATCHES[(i + j + k) % 3],
        tuple(CHECKS)[(i + 2 * j + k + k // 3) % 3],
    )
    for i, model in enumerate(ZOO)
    for j, level in enumerate(LEVELS)
    for k, devices in enumerate(DEVICES)
    if (i + j + k) % 2 == 0
]


def name_of(case: Case) -> str:
    return "-".join(map(str, case))


# Meshes of several axes, below, are quick at every level too.
QUICK = Case("linen_mlp", "p_g_os", 3, 1, "gradient")


@pytest.mark.parametrize("case", quick(dict.fromkeys([QUICK, *CASES]), [QUICK]), ids=name_of)
def test_numbers_are_those_of_one_device(case):
    CHECKS[case.check](case, mesh_of(case.devices))


def test_every_pair_of_values_has_a_case():
    factors = tuple(ZOO), LEVELS, DEVICES, MICRO_BATCHES, tuple(CHECKS)
    for (i, a), (j, b) in itertools.combinations(enumerate(factors), 2):
        assert {(x, y) for x in a for y in b} == {(case[i], case[j]) for case in CASES}


@pytest.mark.parametrize("name", ["linen_mlp", "nnx_conv", "linen_gpt", "nnx_gpt_scan_remat"])
def test_the_clip_is_active(name):
    """Else a norm taken over one device's part alone would go unseen."""
    assert reference.train(name, "adamw", 48)[1].max() > reference.CLIP


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_leaves_without_a_gradient_are_the_named_ones(name):
    assert set(reference.zero_gradients(name, 20)) == set(ZOO[name].zero)


# Meshes of several data axes. Sizes differ, so that the wrong order of axes changes the numbers.

MESHES = {
    "2x4": lambda: gshard.make_mesh({"a": 2, "b": 4}),
    "4x2": lambda: gshard.make_mesh({"a": 4, "b": 2}),
    "replica": lambda: gshard.make_mesh(replica=2),
    "replica-2x2": lambda: gshard.make_mesh({"a": 2, "b": 2}, replica=2),
}


@pytest.mark.parametrize(
    ("mesh", "level"),
    quick(
        itertools.product(MESHES, LEVELS),
        [
            *itertools.product(["4x2", "replica"], ["dp", "p_g_os"]),
            *itertools.product(["2x4", "replica-2x2"], ["os", "os_g"]),
        ],
    ),
)
def test_gradients_on_several_axes(mesh, level):
    micro_batches = 2 if level == "os_g" else 1
    check_gradient(Case("linen_mlp", level, 8, micro_batches, "gradient"), MESHES[mesh]())


@pytest.mark.parametrize(
    ("name", "mesh", "level"),
    quick(
        [
            *itertools.product(["linen_mlp"], ["2x4", "replica-2x2"], LEVELS[1:]),
            ("nnx_gpt_scan", "2x4", "p_g_os"),
        ],
        [
            ("linen_mlp", "2x4", "os"),
            ("linen_mlp", "2x4", "p_g_os"),
            ("linen_mlp", "replica-2x2", "os_g"),
        ],
    ),
)
def test_training_on_several_axes(name, mesh, level):
    check_training(Case(name, level, 8, 2, "adamw"), MESHES[mesh]())


SHAPES = ((16, 3), (3, 16), (13, 3))
SHAPE_FACTORS = {"shape": SHAPES, "mesh": tuple(MESHES), "level": LEVELS}


@pytest.mark.parametrize(
    ("shape", "mesh", "level"),
    quick(
        itertools.product(*SHAPE_FACTORS.values()),
        [tuple(x.values()) for x in covering(2, SHAPE_FACTORS)],
    ),
    ids=str,
)
def test_axis_order_by_value(mesh, level, shape):
    """The gradient of `mean(sum(w * x))` is the mean of x, whose entries all differ."""
    weights = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    state, plan = gshard.shard_train_state(
        ({"w": weights}, optax.sgd(1.0)), MESHES[mesh](), level, min_shard_size=8
    )
    x = np.random.default_rng(0).normal(size=(16, *shape)).astype(np.float32)

    def loss(params, batch):
        return jnp.mean(jnp.sum(params["w"] * batch["x"], axis=(1, 2)))

    value, grads = jax.jit(gshard.value_and_grad(loss, plan))(state.params, {"x": x})
    np.testing.assert_allclose(value, (weights * x).sum((1, 2)).mean(), rtol=1e-5)
    np.testing.assert_allclose(logical(grads, plan)["w"], x.mean(0), rtol=1e-5, atol=1e-6)
    step = gshard.make_train_step(loss, plan)
    state, _ = step(state, {"x": x})
    found = gshard.full_params(state)["w"]
    np.testing.assert_allclose(found, weights - x.mean(0), rtol=1e-6, atol=1e-5)


# What is sharded. A sharded layer axis would give the right numbers, at the price of memory.


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize(
    "name",
    quick(
        [name for name in ZOO if ZOO[name].stacked],
        ["linen_gpt_scan", "linen_gpt_scan_boxed", "nnx_gpt_scan_remat"],
    ),
)
def test_the_axis_of_layers_is_never_sharded(name, devices):
    model = ZOO[name]
    abstract = jax.sharding.AbstractMesh(
        (devices,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,)
    )
    _, plan = gshard.shard_train_state(
        model.state(optax.adam(1e-3)), abstract, "p_g_os", **model.options()
    )
    stacked = [x for x in jax.tree.leaves(plan.params) if re.search(model.stacked, x.path)]
    large = [x for x in stacked if np.prod(x.shape[1:]) > SEGMENT_SIZE]
    assert large
    for layout in stacked:
        assert layout.dim != 0, layout.path
    for layout in large:
        assert layout.dim is not None, layout.path
