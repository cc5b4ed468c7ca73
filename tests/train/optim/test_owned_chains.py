"""Equal matrices of an optimizer are computed on one device each, which owns them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import gshard
from gshard._util.jaxpr import all_equations
from tests.train.optim import test_matrix_products as matrix_products
from tests.train.optim.test_matrix_products import arrays, assert_close, by_hand, inverse_root

AG, A2A = "all-gather", "all-to-all"
SHAPES = {
    **{f"q{i}": (24, 24) for i in range(5)},
    **{f"up{i}": (24, 40) for i in range(3)},
    **{f"down{i}": (40, 24) for i in range(3)},
    "alone": (50, 24),
    "first": (3, 16, 20),
    "second": (3, 16, 20),
    "experts": (3, 5, 8, 12),  # optax reshapes them to 15 matrices
    "bias": (24,),
}
STACKS = {"first|second|experts": 0}
MESHES = {
    "8": lambda: gshard.make_mesh(),
    "3": lambda: gshard.make_mesh(devices=jax.devices()[:3]),
    "5": lambda: gshard.make_mesh(devices=jax.devices()[:5]),
    "2 x 4": lambda: gshard.make_mesh({"a": 2, "b": 4}),
    "replicas": lambda: gshard.make_mesh(replica=2),
    "replicas of 2 x 2": lambda: gshard.make_mesh({"a": 2, "b": 2}, replica=2),
}


def muon(**options):
    numbers = {
        k: contrib.MuonDimensionNumbers(len(s) - 2, len(s) - 1) if len(s) > 1 else None
        for k, s in SHAPES.items()
    }
    return contrib.muon(1e-2, muon_weight_dimension_numbers=numbers, **options)


def on_all(f):
    """An optimizer that applies `f`, a function of one matrix, to all matrices and stacks."""

    def each(x):
        g = f
        for _ in range(x.ndim - 2):
            g = jax.vmap(g)
        return g(x) if x.ndim > 1 else x

    return optax.stateless(lambda g, _: jax.tree.map(each, g))


def shampoo():
    """Each matrix needs the roots of two sums, which are computed from it: two chains."""

    def init(params):
        def eye(x, d):
            return jnp.broadcast_to(jnp.eye(x.shape[d]), (*x.shape[:-2], x.shape[d], x.shape[d]))

        return [{k: eye(x, d) for k, x in params.items() if x.ndim > 1} for d in (-2, -1)]

    def update(grads, state, params=None):
        del params
        rows = {k: a + grads[k] @ grads[k].mT for k, a in state[0].items()}
        columns = {k: a + grads[k].mT @ grads[k] for k, a in state[1].items()}
        new = {}
        for k in rows:
            root = inverse_root
            for _ in range(grads[k].ndim - 2):
                root = jax.vmap(root)
            new[k] = root(rows[k]) @ grads[k] @ root(columns[k])
        return {**grads, **new}, [rows, columns]

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {
    "muon": muon,
    "by hand": lambda: on_all(by_hand),
    "shampoo": shampoo,
    "clipped": lambda: optax.chain(muon(), optax.clip_by_global_norm(0.1)),
    "every other": lambda: optax.conditionally_transform(
        on_all(by_hand), lambda step, **_: step % 2 == 0
    ),
}
QUICK = {("muon", "8", "p_g_os"), ("muon", "replicas of 2 x 2", "os"), ("by hand", "3", "os_g")}


def updated(tx, mesh, level, shapes=SHAPES, steps=2):
    """What `matrix_products.updated` returns for arrays of these shapes on a mesh."""
    options = {"devices": mesh, "scan_axes": STACKS if shapes is SHAPES else None}
    return matrix_products.updated(tx, level, steps, arrays(0, shapes), **options)


def sent(audit, kind):
    rows = [r for r in audit.collectives if r.kind == kind and r.purpose == "optimizer"]
    return sum(row.elements for row in rows if not row.scalar)


@pytest.mark.parametrize(
    "name, mesh, level",
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in (
            (name, mesh, level)
            for name in OPTIMIZERS
            for mesh in MESHES
            for level in ("os", "os_g", "p_g_os")
        )
    ],
)
def test_an_update_is_that_of_one_device(name, mesh, level):
    new, right, audit, plan = updated(OPTIMIZERS[name](), MESHES[mesh](), level)
    for path, x in right.items():
        np.testing.assert_allclose(new[path], x, atol=5e-6 * np.abs(x).max(), err_msg=path)
    products = plan.update_products
    found, counted = (audit.flops, sent(audit, A2A)), (products.flops, products.sent)
    if name == "shampoo":  # XLA computes and sends some things once that its chains have twice
        assert 0 < found[0] <= counted[0] and 0 < found[1] <= counted[1]
    else:
        assert found == counted and products.sent > 0


EQUAL = {f"w{i}": (12, 20) for i in range(11)}


@pytest.mark.parametrize("mesh, own", [("8", 2), ("3", 4), ("replicas", 2)])
def test_every_device_computes_only_its_own_matrices(mesh, own):
    _, _, audit, plan = updated(on_all(by_hand), MESHES[mesh](), "os_g", EQUAL, 0)
    products = plan.update_products
    assert products.flops * 11 == products.one_device * own
    assert audit.flops == products.flops
    rows = max(x.stored_shape[x.dim] for x in jax.tree.leaves(plan.grads))
    size = rows * (240 // plan.grads["w0"].shape[plan.grads["w0"].dim])
    assert sent(audit, A2A) == products.sent == 2 * own * size
    shared = own * plan.group.size * size // plan.group.size if mesh == "replicas" else 0
    assert sent(audit, AG) == 2 * shared  # the results of both replicas


def test_the_layers_of_stacks_are_shared_one_by_one():
    shapes = {"a": (6, 12, 20), "b": (5, 12, 20), "c": (5, 12, 20)}
    _, _, audit, plan = updated(on_all(by_hand), MESHES["8"](), "p_g_os", shapes, 0)
    products = plan.update_products
    assert audit.flops == products.flops
    assert products.flops == products.one_device // 16 * (1 + 2)  # 6 of 8, and 10 of 16
    assert sent(audit, AG) == 0


def test_layers_that_are_mixed_stay_one_matrix():
    """A norm over all layers: the two stacks are equal, and each goes to one device."""

    def of_stack(x):
        y = x / jnp.linalg.norm(x)
        return jnp.einsum("lij,lkj->lik", y, y) @ y

    shapes = {"a": (5, 12, 16), "b": (5, 12, 16)}
    tx = optax.stateless(lambda g, _: jax.tree.map(of_stack, g))
    found, right, audit, plan = updated(tx, MESHES["3"](), "os_g", shapes)
    assert_close(found, right)
    assert audit.flops == plan.update_products.flops == plan.update_products.one_device // 2


@dataclass(frozen=True)
class Scale:
    by: float  # hash(-1.0) is hash(-2.0)

    def __call__(self, x):
        return np.float32(self.by) * x


@pytest.mark.parametrize("differs", ["shape", "coefficient", "function", "constant"])
def test_matrices_of_other_programs_are_not_shared(differs):
    functions = [Scale(-1.0), Scale(-2.0)]
    factors = [jnp.asarray(x) for x in np.random.default_rng(0).normal(size=(2, 12, 12))]

    def update(grads, _):
        new = {}
        for i, (k, x) in enumerate(grads.items()):
            y = x @ x.T @ x
            if differs == "coefficient":
                y = x @ (x.T * (i + 1.0)) @ x
            if differs == "function":
                y = jax.pure_callback(functions[i], y, y, vmap_method="sequential") @ x.T @ x
            if differs == "constant":
                y = factors[i] @ y
            new[k] = y
        return new

    shapes = {"a": (12, 16), "b": (12, 20 if differs == "shape" else 16)}
    tx = optax.stateless(update)
    found, right, audit, plan = updated(tx, MESHES["3"](), "os_g", shapes)
    assert_close(found, right)
    shared = differs == "constant"  # each device reads the constants of its own matrices
    assert (sent(audit, A2A) > 0) == shared
    assert (
        plan.update_products.unshared == () if shared else len(plan.update_products.unshared) == 2
    )


def test_scalars_of_each_matrix_are_used_for_that_matrix():
    """Scalars of the state that differ by matrix, inside the chain."""

    def init(params):
        return {k: jnp.float32(i + 1) for i, k in enumerate(params)}

    def update(grads, state, params=None):
        del params
        new = {k: x @ (x.T / state[k]) @ x for k, x in grads.items()}
        return new, {k: n + 1 for k, n in state.items()}

    tx = optax.GradientTransformation(init, update)
    shapes = {f"w{i}": (12, 16) for i in range(5)}
    found, right, audit, _ = updated(tx, MESHES["3"](), "p_g_os", shapes)
    assert_close(found, right)
    assert sent(audit, A2A) > 0 == sent(audit, AG)


@pytest.mark.parametrize("own_counts", [False, True])
def test_a_branch_that_no_matrix_takes_is_not_computed(own_counts):
    """As a root that is computed every few steps; the branch is in the chain of its matrix."""

    def init(params):
        return {k: jnp.int32(i if own_counts else 0) for i, k in enumerate(params)}

    def update(grads, state, params=None):
        del params
        first = next(iter(state))

        def root(k):
            a = grads[k] @ grads[k].T
            often = state[k if own_counts else first] % 4 == 0
            return jax.lax.cond(often, lambda a: a @ a @ a @ a, lambda a: a, a) @ grads[k]

        return {k: root(k) for k in grads}, {k: n + 1 for k, n in state.items()}

    tx = optax.GradientTransformation(init, update)
    shapes = {f"w{i}": (12, 16) for i in range(6)}
    found, right, _, plan = updated(tx, MESHES["3"](), "os_g", shapes, 5)
    assert_close(found, right)
    state, plan = gshard.shard_train_state(
        (arrays(0, shapes), tx), MESHES["3"](), "os_g", min_shard_size=16
    )
    grads = jax.tree.map(plan.abstract, plan.grads)
    jaxpr = jax.make_jaxpr(state.tx.update)(grads, state.opt_state, state.params).jaxpr
    assert any(eqn.primitive.name == "cond" for eqn in all_equations(jaxpr))


def test_every_matrix_draws_from_its_own_key():
    """JAX draws for several keys of this generator from the first one alone."""

    def init(params):
        keys = jax.random.split(jax.random.key(0, impl="rbg"), len(params))
        return {k: jax.random.key_data(key) for k, key in zip(params, keys, strict=True)}

    def update(grads, state, params=None):
        del params

        def noisy(x, data):
            key = jax.random.wrap_key_data(data, impl="rbg")
            y = x @ x.T
            return (y + jax.random.normal(key, y.shape)) @ x

        return {k: noisy(x, state[k]) for k, x in grads.items()}, state

    tx = optax.GradientTransformation(init, update)
    shapes = {f"w{i}": (12, 16) for i in range(6)}
    found, right, _, _ = updated(tx, MESHES["3"](), "os_g", shapes, 1)
    assert_close(found, right)


def test_large_groups_are_computed_in_rounds(monkeypatch):
    from gshard.train.optim import owned_chains

    monkeypatch.setattr(owned_chains, "BUCKET_SIZE", 300)
    found, right, audit, plan = updated(on_all(by_hand), MESHES["3"](), "os_g", EQUAL)
    assert_close(found, right)
    (row,) = (r for r in audit.collectives if r.kind == A2A)
    assert row.count == 2 * math.ceil(11 / 3)
    shapes = {"stack": (11, 12, 20)}  # one chain: its own layers run one after the other
    found, right, audit, plan = updated(on_all(by_hand), MESHES["3"](), "os_g", shapes)
    assert_close(found, right)
    assert audit.flops == plan.update_products.flops


def test_a_budget_names_what_every_device_computes():
    _, _, _, plan = updated(muon(), MESHES["8"](), "p_g_os", steps=0)
    text = str(gshard.budget(plan, products=plan.update_products))
    assert "FLOP that every device repeats: alone " in text
    assert "q0" not in text
    ((name, flops),) = plan.update_products.unshared
    assert (name, flops) == ("alone", 5 * (4 * 24**2 * 50 + 2 * 24**3))


def test_a_step_counts_the_products_of_its_optimizer():
    params = {k: x / 8 for k, x in arrays(0, {"a": (16, 16), "b": (16, 16)}).items()}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(jnp.tanh(x @ params["a"]) @ params["b"]))

    given = (params, contrib.muon(1e-2))
    state, plan = gshard.shard_train_state(given, MESHES["8"](), "p_g_os", min_shard_size=16)
    step = gshard.make_train_step(loss, plan)
    report = gshard.audit(step, state, np.ones((16, 16), np.float32))
    of_update = step.budget.products
    assert of_update.flops == of_update.one_device // 2
    assert report.flops - of_update.flops == 5 * 2 * 2 * 16 * 16  # of the loss and its gradient
    assert "Matrix products of the optimizer" in str(report)


def test_an_optimizer_without_products_has_no_such_row():
    state, plan = gshard.shard_train_state(
        (arrays(0, EQUAL), optax.adamw(1e-3)), MESHES["3"](), "os_g", min_shard_size=16
    )
    assert plan.update_products is None
    assert "Matrix products" not in str(gshard.budget(plan, products=plan.update_products))
