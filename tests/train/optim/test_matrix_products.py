"""Matrix products of an optimizer: every operand gathered once, and only where that is needed."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import gshard
from gshard._util import jaxpr_dataflow
from gshard._util.jaxpr import all_equations
from gshard._util.jaxpr_dataflow import UNKNOWN, sharded_dims
from gshard.train.optim import matrix_products
from gshard.train.optim.offload import variables_of

N = 4
AG = "all-gather"
SHAPES = {"wide": (8, 20), "tall": (24, 8), "odd": (7, 5), "stack": (3, 8, 12), "bias": (24,)}
MATRICES = contrib.MuonDimensionNumbers()
NUMBERS = {**dict.fromkeys(SHAPES, MATRICES), "bias": None}
NUMBERS["stack"] = contrib.MuonDimensionNumbers(1, 2)


def mesh():
    return gshard.make_mesh(devices=jax.devices()[:N])


def arrays(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def by_hand(x):
    """Newton-Schulz as users write it: unrolled, transposed, in bfloat16's place a cast."""
    y = x.T if x.shape[0] > x.shape[1] else x
    y = (y / (jnp.linalg.norm(y) + 1e-7)).astype(jnp.float32)
    for _ in range(2):
        a = y @ y.T
        y = 3.4 * y + (-4.8 * a + 2.0 * a @ a) @ y
    return y.T if x.shape[0] > x.shape[1] else y


def on_matrices(f):
    return optax.stateless(lambda g, _: jax.tree.map(lambda x: f(x) if x.ndim == 2 else x, g))


def muon(**options):
    return contrib.muon(1e-2, muon_weight_dimension_numbers=NUMBERS, **options)


def inverse_root(a):
    values, vectors = jnp.linalg.eigh(a + 0.1 * jnp.eye(len(a)))
    return (vectors * values**-0.25) @ vectors.T


def two_sided():
    """As Shampoo: a factor for the rows and one for the columns of every matrix."""

    def init(params):
        wide = {k: x for k, x in params.items() if x.ndim == 2}
        return {side: {k: jnp.eye(x.shape[side]) for k, x in wide.items()} for side in (0, 1)}

    def update(grads, state, params=None):
        del params
        rows = {k: a + grads[k] @ grads[k].T for k, a in state[0].items()}
        columns = {k: a + grads[k].T @ grads[k] for k, a in state[1].items()}
        new = {k: inverse_root(rows[k]) @ grads[k] @ inverse_root(columns[k]) for k in rows}
        return {**grads, **new}, {0: rows, 1: columns}

    return optax.GradientTransformation(init, update)


def every_other(tx):
    return optax.conditionally_transform(tx, lambda step, **_: step % 2 == 0)


OPTIMIZERS = {
    "muon": muon,
    "by hand": lambda: optax.chain(optax.trace(0.9, nesterov=True), on_matrices(by_hand)),
    "two-sided": two_sided,
    "every other": lambda: every_other(on_matrices(by_hand)),
    "jitted": lambda: optax.chain(optax.trace(0.9), on_matrices(jax.jit(by_hand))),
    "aol": lambda: muon(preconditioning="aol"),
    "spectral": lambda: muon(preconditioning="spectral"),
    "dion": lambda: muon(ns_coeffs="dion", adaptive=True, weight_decay=0.1),
    "partition": lambda: optax.partition(
        {2: contrib.muon(1e-2), 1: optax.adam(1e-2), 3: optax.sgd(1e-2)},
        lambda p: jax.tree.map(jnp.ndim, p),
    ),
    "MultiSteps": lambda: optax.MultiSteps(muon(), 2).gradient_transformation(),
}
MATRICES_ONLY = ("by hand", "two-sided", "every other", "jitted", "partition")
QUICK = {("muon", "os"), ("two-sided", "os_g")}


def updated(tx, level, steps=2, params=None, devices=None, **options):
    """New parameters after some updates, those of one device, the audit of an update, the plan."""
    params = arrays(0) if params is None else params
    shapes = {k: x.shape for k, x in params.items()}
    options = {
        "min_shard_size": 16,
        "scan_axes": {"stack": 0} if "stack" in params else None,
    } | options
    state, plan = gshard.shard_train_state((params, tx), devices or mesh(), level, **options)

    @jax.jit
    def step(params, opt_state, grads):
        changes, opt_state = state.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    def divided(grads):
        return jax.tree.map(
            lambda g, place: jax.device_put(place.pad(g), plan.sharding(place)), grads, plan.grads
        )

    audit = gshard.audit(step, state.params, state.opt_state, divided(arrays(1, shapes)), plan=plan)

    @jax.jit
    def on_one(params, opt_state, grads):
        changes, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, changes), opt_state

    new, opt_state, right, alone = state.params, state.opt_state, params, jax.jit(tx.init)(params)
    for i in range(steps):
        grads = arrays(1 + i, shapes)
        new, opt_state = step(new, opt_state, divided(grads))
        right, alone = on_one(right, alone, grads)
    return gshard.full_params(state.replace(params=new)), right, audit, plan


def assert_close(found, right):
    for path, x in right.items():
        np.testing.assert_allclose(found[path], x, atol=2e-5 * np.abs(x).max(), err_msg=path)


def moved(audit):
    """Elements by kind that are the optimizer's own, scalars apart."""
    rows = [r for r in audit.collectives if not r.scalar and r.purpose != "update"]
    assert {row.purpose for row in rows} <= {"optimizer"}
    return {
        kind: sum(r.elements for r in rows if r.kind == kind) for kind in {r.kind for r in rows}
    }


@pytest.mark.parametrize(
    "name, level",
    [
        pytest.param(name, level, marks=() if (name, level) in QUICK else pytest.mark.slow)
        for name in OPTIMIZERS
        for level in ("os", "os_g", "p_g_os")
    ],
)
def test_every_operand_is_gathered_once(name, level):
    found, right, audit, plan = updated(OPTIMIZERS[name](), level)
    assert_close(found, right)
    places = [x for x in jax.tree.leaves(plan.grads) if len(x.shape) == 2]
    if name == "two-sided":  # its factors too
        places += [x for x in jax.tree.leaves(plan.opt_state) if x.dim is not None]
    gathered = {AG: sum(place.stored_size for place in places)}
    # The layers of the stack are equal: each goes to one of four devices, and back.
    shared = {} if name in MATRICES_ONLY else {"all-to-all": 2 * 8 * 12}
    assert moved(audit) == gathered | shared


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_an_elementwise_optimizer_communicates_nothing(level):
    _, _, audit, _ = updated(optax.adamw(1e-2), level, steps=0)
    assert {row.purpose for row in audit.collectives} == ({"update"} if level == "os" else set())


def test_matrices_are_gathered_in_buckets_and_where_a_branch_needs_them(monkeypatch):
    monkeypatch.setattr(matrix_products, "BUCKET_SIZE", 200)
    found, right, audit, plan = updated(OPTIMIZERS["every other"](), "p_g_os")
    assert_close(found, right)
    matrices = [x for x in jax.tree.leaves(plan.grads) if len(x.shape) == 2]
    (row,) = audit.collectives
    assert row.conditional and row.count == len(matrices)
    assert moved(audit) == {AG: sum(place.stored_size for place in matrices)}


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="XLA of JAX 0.10 drops the barrier on CPU, then schedules",
)
@pytest.mark.parametrize("clip", [False, True])
def test_two_buckets_are_gathered_at_a_time(monkeypatch, clip):
    shapes = {f"w{i}": (32, 64 + i) for i in range(8)}  # no two are equal
    temporaries = []
    for size in (32 * 64, 9 * 32 * 64):
        monkeypatch.setattr(matrix_products, "BUCKET_SIZE", size)
        tx = OPTIMIZERS["by hand"]()
        tx = optax.chain(tx, optax.clip_by_global_norm(0.1)) if clip else tx
        _, _, audit, _ = updated(tx, "p_g_os", steps=0, params=arrays(0, shapes))
        temporaries.append(audit.memory["temp"])
    assert temporaries[0] < temporaries[1] / 2


def test_what_follows_the_last_product_is_sharded(monkeypatch):
    """A clip needs a norm over all results; no full matrix may be kept until then."""
    monkeypatch.setattr(matrix_products, "BUCKET_SIZE", 200)
    tx = optax.chain(OPTIMIZERS["by hand"](), optax.clip_by_global_norm(0.1))
    params = {k: x for k, x in arrays(0).items() if x.ndim == 2}
    found, right, audit, plan = updated(tx, "p_g_os", 1, params)
    assert_close(found, right)
    assert moved(audit) == {AG: sum(x.stored_size for x in jax.tree.leaves(plan.grads))}
    state, _ = gshard.shard_train_state((params, tx), mesh(), "p_g_os", min_shard_size=16)
    program = jax.make_jaxpr(state.tx.update)(state.params, state.opt_state, state.params)
    wholes, placed = set(), []
    for eqn in all_equations(program.jaxpr):
        reads = wholes.intersection(variables_of(eqn.invars))
        if eqn.primitive.name == "shard_map":
            assert not reads
            wholes.update(v for v in eqn.outvars if v.aval.size > 1)
        elif reads and eqn.primitive.name == "sharding_constraint":
            placed.append(eqn.params["sharding"].spec)
        elif reads:
            assert eqn.primitive.name in ("optimization_barrier", "pad", "jit"), eqn
            wholes.update(eqn.outvars)
    assert placed and all("shard" in spec for spec in placed)


def test_a_projection_gathers_its_small_factors_alone():
    """As GaLore: the sum over a sharded dimension is smaller than its operands."""

    def init(params):
        del params
        return {"two": jnp.eye(64, 2)}

    def update(grads, state, params=None):
        del params
        two = state["two"]
        left = two @ (two.T @ grads["left"])  # rows of both are sharded: summed
        right = (grads["right"] @ two) @ two.T  # its rows stay; the factor is gathered
        return {"left": left, "right": right}, state

    params = arrays(0, {"left": (64, 24), "right": (24, 64)})
    options = {"rules": {"left|right|two": 0}}
    tx = optax.GradientTransformation(init, update)
    found, right, audit, _ = updated(tx, "p_g_os", 1, params, **options)
    assert_close(found, right)
    assert moved(audit) == {AG: 64 * 2, "all-reduce": 2 * 24}


@pytest.mark.parametrize("rank", [8, 24, 32, 40])
def test_what_is_summed_is_counted_over_all_products(rank):
    """Of (64, 48) a result of (rank, 48), summed while twice that is no more than the matrix."""
    two = jnp.asarray(np.random.default_rng(3).normal(size=(64, rank)) / 8, jnp.float32)
    tx = optax.stateless(lambda g, _: jax.tree.map(lambda x: two @ (two.T @ x), g))
    params = arrays(0, {"w": (64, 48)})
    found, right, audit, _ = updated(tx, "p_g_os", 1, params, rules={"w": 0})
    assert_close(found, right)
    assert moved(audit) == ({"all-reduce": rank * 48} if rank <= 32 else {AG: 64 * 48})


@pytest.mark.parametrize("turns", [2, 3])
def test_what_is_summed_in_a_loop_is_counted_by_iterations(turns):
    """Of (64, 16), a result of (16, 16), twice: a quarter and a half of the matrix, each turn."""

    def twice(x):
        turn = lambda _, y: y - 0.001 * y @ (y.T @ y)  # noqa: E731
        return jax.lax.fori_loop(0, turns, turn, x)

    params = arrays(0, {"w": (64, 16)})
    found, right, audit, _ = updated(on_matrices(twice), "p_g_os", 1, params, rules={"w": 0})
    assert_close(found, right)
    assert moved(audit) == ({"all-reduce": turns * 256} if turns == 2 else {AG: 64 * 16})


@pytest.mark.parametrize(
    "product",
    [
        lambda x: (lambda w, v: (v * w[:, None, :]) @ v)(*jnp.linalg.eigh(x @ x.mT)) @ x,
        lambda x: (lambda u, s, v: (u * s[:, None, :]) @ v)(*jnp.linalg.svd(x, False)),
        lambda x: jnp.linalg.solve(x @ x.mT + jnp.eye(6), x),
        lambda x: (lambda q, r: (q @ r).mT)(*jnp.linalg.qr(x.mT)),
    ],
    ids=["eigh", "svd", "solve", "qr"],
)
def test_decompositions_of_stacks_sharded_on_their_layers_communicate_nothing(product):
    params = arrays(0, {"stack": (8, 6, 10)})
    tx = optax.stateless(lambda g, _: jax.tree.map(product, g))
    _, _, audit, plan = updated(tx, "os_g", 0, params, rules={"stack": 0})
    assert plan.grads["stack"].dim == 0
    assert moved(audit) == {}


def test_every_function_of_matrices_is_known():
    linalg = jax.lax.linalg
    public = {getattr(linalg, name).name for name in dir(linalg) if name.endswith("_p")}
    x, sizes = jnp.ones((4, 4)), jnp.array([4])
    ragged = jax.make_jaxpr(lambda x: jax.lax.ragged_dot(x, x[None], sizes))(x).jaxpr
    solve = jax.make_jaxpr(jnp.linalg.solve)(x, x).jaxpr
    names = {e.primitive.name for jaxpr in (ragged, solve) for e in all_equations(jaxpr)}
    named = {name for name in names if "dot" in name or "solve" in name}
    assert public - {"lu_pivots_to_permutation"} | named <= jaxpr_dataflow.PRODUCTS


def test_inner_products_are_summed_not_gathered():
    def update(g, _):
        sizes = {k: x.ravel() @ x.ravel() if x.ndim == 1 else jnp.sum(x * x) for k, x in g.items()}
        return jax.tree.map(lambda x, n: x / n, g, sizes)

    found, right, audit, _ = updated(optax.stateless(update), "p_g_os", steps=1)
    assert_close(found, right)
    assert moved(audit) == {}


def test_a_product_with_a_replicated_factor_stays_where_its_rows_are():
    factor = np.random.default_rng(3).normal(size=(8, 8)).astype(np.float32)
    tx = optax.stateless(lambda g, _: {"tall": g["tall"] @ factor})
    found, right, audit, plan = updated(tx, "p_g_os", 1, {"tall": arrays(0)["tall"]})
    assert plan.grads["tall"].dim == 0
    assert_close(found, right)
    assert moved(audit) == {}


def test_what_the_user_places_is_left_to_the_compiler():
    """A constraint cannot be inside a `shard_map`; nor does a print happen once for each device."""
    seen = []

    def product(x):
        spec = jax.P("shard" if len(x) % N == 0 else None)
        x = jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh(), spec))
        jax.debug.callback(lambda n: seen.append(float(n)), jnp.sum(x))
        return x @ x.T @ x

    found, right, _, _ = updated(on_matrices(product), "p_g_os", steps=1)
    assert_close(found, right)
    jax.effects_barrier()
    assert len(seen) == 2 * 3


@pytest.mark.parametrize(
    "make",
    [lambda: contrib.muon(1e-2), lambda: on_matrices(lambda x: jax.nn.silu(x @ x.T) @ x)],
    ids=["muon", "silu"],
)
def test_a_derivative_through_the_update(make):
    """Calls and loops that are traced outside the `shard_map` are differentiated inside it."""
    params, tx = {k: x for k, x in arrays(0).items() if x.ndim == 2}, make()
    state, plan = gshard.shard_train_state((params, tx), mesh(), "os", min_shard_size=16)
    grads = arrays(1, {k: x.shape for k, x in params.items()})

    def sines(update, opt_state, params):
        return lambda g: sum(jnp.sum(jnp.sin(x)) for x in update(g, opt_state, params)[0].values())

    stored = {k: place.pad(grads[k]) for k, place in plan.grads.items()}
    stored = {k: jax.device_put(x, plan.sharding(plan.grads[k])) for k, x in stored.items()}
    found = jax.jit(jax.grad(sines(state.tx.update, state.opt_state, state.params)))(stored)
    right = jax.jit(jax.grad(sines(tx.update, tx.init(params), params)))(grads)
    assert_close({k: place.unpad(np.asarray(found[k])) for k, place in plan.grads.items()}, right)


# Stacked layers.


def layers(p, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    x, _ = jax.lax.scan(layer, x, (p["up"], p["down"]))
    return jnp.square(x).mean()


@pytest.mark.parametrize(
    "level, count, k",
    [
        ("os_g", 6, 2),
        pytest.param("os", 6, 1, marks=pytest.mark.slow),
        pytest.param("os", 8, 2, marks=pytest.mark.slow),
        pytest.param("os_g", 8, 1, marks=pytest.mark.slow),
    ],
)
def test_a_stack_sharded_on_its_layers_communicates_nothing_for_muon(level, count, k):
    """The user's rule may shard the scanned dimension where parameters are replicated."""
    start = arrays(0, {"up": (count, 8, 12), "down": (count, 12, 8)})
    start = {name: x / 4 for name, x in start.items()}
    tx = contrib.muon(
        1e-2, muon_weight_dimension_numbers=dict.fromkeys(start, contrib.MuonDimensionNumbers(1, 2))
    )
    state, plan = gshard.shard_train_state(
        (start, tx), mesh(), level, min_shard_size=8, scan_axes={"up|down": 0}, rules={"up|down": 0}
    )
    assert {x.dim for x in jax.tree.leaves(plan.grads)} == {0}
    step = gshard.make_train_step(layers, plan, micro_batches=k, donate=False)
    rows = np.random.default_rng(5).normal(size=(4 * N, 8)).astype(np.float32)
    audit = gshard.audit(step, state, rows)
    assert not [row for row in audit.collectives if row.purpose == "optimizer"]
    for kind in (AG, "reduce-scatter", "all-reduce"):
        assert audit.elements(kind) == step.budget.elements(kind)

    alone, right = tx.init(start), start
    for _ in range(2):
        state, _ = step(state, rows)
        changes, alone = jax.jit(tx.update)(jax.grad(layers)(right, rows), alone, right)
        right = optax.apply_updates(right, changes)
    assert_close(gshard.full_params(state), right)


def test_no_rule_shards_the_layers_where_parameters_are_stored_sharded():
    with pytest.raises(gshard.GShardError, match="at 'os' and 'os_g' this one is possible"):
        gshard.shard_train_state(
            (arrays(0), optax.sgd(1.0)),
            mesh(),
            "p_g_os",
            scan_axes={"stack": 0},
            rules={"stack": 0},
        )


# How a sharded dimension passes through.


def followed(f, dims, *shapes):
    jaxpr = jax.make_jaxpr(lambda *xs: jax.jit(f)(*xs))(*(jnp.zeros(s) for s in shapes)).jaxpr
    (eqn,) = jaxpr.eqns
    outs, cost = sharded_dims(eqn, dims)
    return outs[0], cost


def loop(x, w):
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w), x)


def until_small(x):
    return jax.lax.while_loop(lambda x: jnp.max(x @ x.T) > 1, lambda x: x / 2, x)


@pytest.mark.parametrize(
    "f, dims, shapes, dim, cost",
    [
        (lambda x: x.T * 2, [0], [(4, 6)], 1, 0),
        (lambda x: x.reshape(3, 2, 6), [1], [(6, 6)], 2, 0),
        (lambda x: x.reshape(24), [1], [(4, 6)], UNKNOWN, 0),
        (lambda x: x[None], [1], [(4, 6)], 2, 0),
        (lambda x: x.sum(0), [1], [(4, 6)], 0, 0),
        (lambda x: x.sum(0), [0], [(4, 6)], None, 0),
        (lambda x, y: x + y, [0, 1], [(4, 4), (4, 4)], UNKNOWN, 0),
        (lambda x, y: x + y, [0, None], [(4, 4), (4, 4)], 0, 0),
        (lambda x: jnp.concatenate([x, x]), [1], [(4, 6)], 1, 0),
        (lambda x: jnp.concatenate([x, x]), [0], [(4, 6)], UNKNOWN, 0),
        (lambda x: x @ x.T, [0], [(4, 6)], UNKNOWN, math.inf),
        (lambda x: x.T @ x, [0], [(4, 6)], None, 2 * 36),
        (lambda x: x.T @ x, [0], [(512, 2)], None, 2 * 4),
        (lambda x, y: x @ y, [0, None], [(4, 6), (6, 5)], 0, 0),
        (lambda x, y: x @ y, [0, None], [(4, 6), (6,)], 0, 0),
        (lambda x, y: x @ y, [0, 0], [(6,), (6,)], None, 0),
        (lambda x, y: x @ y, [0, 0], [(3, 4, 6), (3, 6, 5)], 0, 0),
        (lambda x, y: x @ y, [1, 0], [(3, 4, 6), (3, 6, 5)], UNKNOWN, math.inf),
        (lambda x: jnp.linalg.cholesky(x), [0], [(3, 4, 4)], 0, 0),
        (lambda x: jnp.linalg.cholesky(x), [1], [(3, 4, 4)], UNKNOWN, math.inf),
        (lambda x: jnp.linalg.eigh(x)[0], [0], [(3, 4, 4)], 0, 0),
        (lambda x: jnp.linalg.svd(x)[1], [2], [(3, 4, 5)], UNKNOWN, math.inf),
        (lambda x, y: jnp.linalg.solve(x, y), [0, 0], [(3, 4, 4), (3, 4, 5)], 0, 0),
        (lambda x, y: jnp.linalg.solve(x, y), [0, 2], [(3, 4, 4), (3, 4, 5)], UNKNOWN, math.inf),
        (until_small, [0], [(4, 6)], 0, math.inf),
        (loop, [0, None], [(4, 6), (6, 6)], 0, 0),
        (loop, [1, None], [(4, 6), (6, 6)], None, 3 * 2 * 24),
        (lambda x: jax.lax.scan(lambda c, y: (c, y * 2), 0.0, x)[1], [1], [(3, 4)], 1, 0),
        (
            lambda x: jax.lax.scan(lambda c, y: (c + y, y), x[0], x)[0],
            [0],
            [(3, 4)],
            UNKNOWN,
            0,
        ),
        (
            lambda x: jax.lax.while_loop(lambda y: y.sum() < 9, lambda y: y.T, x),
            [0],
            [(4, 4)],
            UNKNOWN,
            0,
        ),
        (
            lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y, lambda y: y @ y, x),
            [0],
            [(4, 4)],
            0,
            math.inf,
        ),
    ],
)
def test_how_a_sharded_dimension_passes_through(f, dims, shapes, dim, cost):
    assert followed(f, dims, *shapes) == (dim, cost)
