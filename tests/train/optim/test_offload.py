"""Offload: the state stays in the host's memory, and results do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

import gshard
from gshard._util.jaxpr import all_equations
from gshard.sharding import make_plan
from gshard.train.optim import matrix_products, owned_chains
from gshard.train.optim import offload as offload_module
from tests import reference
from tests.ahead_of_time import found_by
from tests.zoo import ZOO, Model

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

LEVELS = ("dp", "os", "os_g", "p_g_os")
DEVICES, ROWS, STEPS = 5, 40, 3  # 5 devices: most leaves are padded

Factory = Callable[[], optax.GradientTransformation]
OPTIMIZERS: dict[str, Factory] = {
    "adamw": reference.OPTIMIZERS["adamw"],
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "norm of the update": lambda: optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.1)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


def small_params(seed: int) -> dict[str, jax.Array]:
    """Four layers to scan, a padded matrix, a replicated vector and a scalar."""
    rng = np.random.default_rng(seed)
    shapes = {"stack": (4, 10, 10), "odd": (10, 7), "bias": (7,), "scale": ()}
    return {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def small_loss(params: Any, batch: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params["stack"])
    return jnp.mean((x @ params["odd"] * params["scale"] + params["bias"] - batch["y"]) ** 2)


def small_batch(seed: int, rows: int, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((seed, step))
    shapes = {"x": (rows, 10), "y": (rows, 7)}
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


SMALL = Model(
    "small", "linen", small_params, small_loss, small_batch, scan_axes={"^stack$": 0}
)  # fmt: skip
MODELS = {"small": SMALL, **ZOO}


def mesh():
    return gshard.make_mesh(devices=jax.devices()[:DEVICES])


def divided(name: str, level: str, tx: Any, offload: Any, **options: Any) -> Any:
    model = MODELS[name]
    options = {"offload": offload, **model.options(), **options}
    return gshard.shard_train_state(model.state(tx), mesh(), level, **options)


def assert_at_rest(state: Any, plan: gshard.Plan) -> None:
    """Every array has the memory kind and the sharding of the plan."""
    parts = plan.kind.split(state)
    for x, place in zip(jax.tree.leaves(parts), jax.tree.leaves(plan.layouts), strict=True):
        assert x.sharding.memory_kind == place.memory, (place.path, x.sharding)
        assert x.sharding.is_equivalent_to(plan.sharding(place), x.ndim), (place.path, x.sharding)


def held(tree: Any, memory: str) -> int:
    """Bytes of the first device in a memory."""
    leaves = (x for x in jax.tree.leaves(tree) if x.sharding.memory_kind == memory)
    return sum(x.addressable_shards[0].data.nbytes for x in leaves)


def trained(
    name: str, level: str, tx: Any, offload: bool, precision: Any, loops: tuple[str, ...]
) -> Any:
    """Losses and last states of `make_train_step` and of the user's own loop, as host arrays."""
    model, losses = MODELS[name], []
    states = {}
    for loop in loops:
        states[loop], plan = divided(name, level, tx, offload, precision=precision)
        assert_at_rest(states[loop], plan)
    step = gshard.make_train_step(model.loss, plan)
    gradient = gshard.value_and_grad(model.loss, plan)

    @nnx.jit
    def nnx_step(model, optimizer, batch):
        loss, grads = gradient(model, batch)
        optimizer.update(model, grads)
        return loss

    def linen_step(state, batch):
        loss, grads = gradient(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss}

    run = {"step": step, "own": jax.jit(linen_step, donate_argnums=0)}
    for loop, i in ((loop, i) for loop in loops for i in range(STEPS)):
        batch, before = model.batch(0, ROWS, i), states[loop]
        if model.kind == "nnx":
            losses += [step(*before, batch)["loss"] if loop == "step" else nnx_step(*before, batch)]
        else:
            states[loop], metrics = run[loop](before, batch)
            losses += [metrics["loss"]]
            inner = [x for x in jax.tree.leaves(before.opt_state.inner) if x.size > 1]
            assert all(x.is_deleted() for x in inner)  # donated, on the host too
    assert step.jitted._cache_size() == 1
    for state in states.values():
        assert_at_rest(state, plan)
    found = [plan.kind.split(plan.unwrap(state)) for state in states.values()]
    return jax.tree.map(np.asarray, [losses, [(x.params, x.opt_state) for x in found]])


def cases() -> list[Any]:
    """A few now, the table of levels, optimizers, models and precisions when there is time."""
    both = ("step", "own")
    now = [
        ("small", "os", "adamw", "bfloat16", ("step",)),
        ("small", "p_g_os", "adamw", None, both),
    ]
    pairs = [("small", x) for x in OPTIMIZERS]
    pairs += [
        (x, "adamw") for x in ("linen_mlp", "nnx_mlp", "nnx_gpt_scan", "linen_gpt_scan_remat")
    ]
    table = [
        (name, level, tx, precision, both)
        for i, (name, tx) in enumerate(pairs)
        for j, level in enumerate(LEVELS)
        for k, precision in enumerate((None, "bfloat16"))
        if (i + j + k) % 2 == 0  # every pair of values of two of these meets
    ]
    return now + [pytest.param(*x, marks=pytest.mark.slow) for x in table if x not in now]


@pytest.mark.parametrize(("name", "level", "optimizer", "precision", "loops"), cases())
def test_numbers_are_those_without_offload(name, level, optimizer, precision, loops, monkeypatch):
    monkeypatch.setattr(offload_module, "GROUP_SIZE", 512)  # several groups, and stacks in turns
    tx = OPTIMIZERS[optimizer]()
    found, wanted = (trained(name, level, tx, x, precision, loops) for x in (True, False))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_stored_where(level):
    tx = optax.adamw(1e-3)
    state, plan = divided("small", level, tx, True, precision="bfloat16")
    on_host = {
        name: {x.path for x in jax.tree.leaves(tree) if x.on_host}
        for name, tree in (("params", plan.params), ("master", plan.master))
    }
    assert on_host["master"] == {"stack", "odd", "bias"}  # not the number
    assert on_host["params"] == ({"stack", "odd"} if level == "p_g_os" else set())
    assert {x.path for x in jax.tree.leaves(plan.opt_state) if not x.on_host} == {
        "0/count", "0/mu/scale", "0/nu/scale"
    }  # fmt: skip
    assert not any(x.on_host for x in jax.tree.leaves(plan.grads))
    parts = plan.kind.split(state)
    budgeted, at_rest = gshard.budget(plan), plan.bytes_per_device
    names = {"params": "params", "optimizer": "opt_state", "non_trainable": "non_trainable"}
    for name, field in names.items():
        tree = getattr(parts, field)
        assert budgeted.resident[name] == at_rest[field] == held(tree, "device")
        assert budgeted.host[name] == held(tree, "pinned_host")
    assert at_rest["host"] == sum(budgeted.host.values()) == held(parts, "pinned_host")
    abstract = plan.kind.split(plan.abstract_state())
    assert jax.tree.map(lambda x: x.sharding, abstract.opt_state) == plan.shardings.opt_state
    assert f"host {at_rest['host']:,} B" in str(plan)
    assert (", on host" in str(plan)) == (level == "p_g_os")
    # The other memory is refused.
    step = gshard.make_train_step(small_loss, plan)
    moved = jax.device_put(state.opt_state, jax.sharding.NamedSharding(plan.mesh, jax.P()))
    with pytest.raises(gshard.GShardError, match="pinned_host memory"):
        step(state.replace(opt_state=moved), small_batch(0, ROWS, 0))
    with pytest.raises(gshard.GShardError, match="NumPy array, not .* pinned_host memory"):
        host = jax.tree.map(np.asarray, state.opt_state)
        step(state.replace(opt_state=host), small_batch(0, ROWS, 0))


def test_an_nnx_pair():
    pair, plan = divided("nnx_mlp", "p_g_os", optax.adam(1e-3), True)
    assert_at_rest(pair, plan)
    parts = plan.kind.split(pair)
    assert held(parts, "pinned_host") == plan.bytes_per_device["host"] > 0
    wanted = ZOO["nnx_mlp"].state(optax.adam(1e-3))[0]
    reference.assert_same_leaves(
        reference.flat(gshard.full_params(pair)), reference.flat(wanted), 0.0, relative_to="tree"
    )


def test_without_offload_nothing_stays_on_the_host():
    state, plan = divided("small", "p_g_os", optax.adamw(1e-3), False)
    assert plan.bytes_per_device["host"] == 0 and plan.fetched_at_once == ()
    assert held(state, "pinned_host") == 0 and "fetches" not in str(plan)
    assert set(gshard.budget(plan).host.values()) == {0}


# Bytes per device of what only a parameter's own update needs: two moments of 4 bytes per entry of
# the replicated bias; two rows of each layer and two padded ones of `odd`, the parameter too.
BIAS, ODD, LAYER = 7 * 8, 2 * 7 * 12, 2 * 10 * 12
APART = (BIAS + ODD, LAYER, LAYER, LAYER, LAYER)
FETCHED: dict[str, tuple[Factory, tuple[int, ...]]] = {
    "adamw": (lambda: optax.adamw(1e-3), APART),
    "a norm of the gradients": (reference.OPTIMIZERS["adamw"], APART),
    "inject_hyperparams": (lambda: optax.inject_hyperparams(optax.adamw)(1e-3), APART),
    "within jit": (
        lambda: optax.GradientTransformation(
            optax.adam(1e-3).init, jax.jit(optax.adam(1e-3).update)
        ),
        APART,
    ),
    "a norm of each parameter": (OPTIMIZERS["lamb"], (BIAS + ODD, 4 * LAYER)),
    "a norm of the update": (OPTIMIZERS["norm of the update"], (BIAS + ODD + 4 * LAYER,)),
}


@pytest.mark.parametrize("case", FETCHED)
def test_what_is_fetched_together(case, monkeypatch):
    monkeypatch.setattr(offload_module, "GROUP_SIZE", LAYER)
    make, wanted = FETCHED[case]
    _, plan = divided("small", "p_g_os", make(), True)
    assert plan.fetched_at_once == wanted
    assert f"{len(wanted)} group" in str(plan)
    assert f"the largest of {max(wanted):,} B" in str(plan)


def orthogonal(grads: Any, _: Any) -> Any:
    return jax.tree.map(lambda x: 1.5 * x - 0.5 * (x @ x.T) @ x, grads)


PRODUCTS: dict[str, tuple[Factory, int]] = {  # and how often a round waits for another
    "muon": (lambda: contrib.muon(1e-2), 0),
    "of momentum": (lambda: optax.chain(optax.trace(0.9), optax.stateless(orthogonal)), 0),
    "of gradients": (lambda: optax.chain(optax.stateless(orthogonal), optax.trace(0.9)), 1),
}


@pytest.mark.parametrize("case", PRODUCTS)
def test_matrices_that_are_multiplied_are_fetched_one_for_each_device(case, monkeypatch):
    """Neither coefficients that all share nor the order of groups ties more of them together."""
    make, wait = PRODUCTS[case]
    monkeypatch.setattr(offload_module, "GROUP_SIZE", 1)
    for module in (matrix_products, owned_chains):
        monkeypatch.setattr(module, "BUCKET_SIZE", 64)
    own = mesh().size
    start = {f"w{i:02}": np.ones((10, 10), np.float32) for i in range(2 * own + 2)}
    state, plan = gshard.shard_train_state(
        (start, make()), mesh(), "os_g", min_shard_size=16, offload=True
    )
    on_host = {x.path.split("/")[-1] for x in jax.tree.leaves(plan.opt_state) if x.on_host}
    assert on_host == set(start)
    rounds = (1,) * len(start) if case == "of gradients" else (own, own, 2)
    assert plan.fetched_at_once == tuple(many * 2 * 10 * 4 for many in rounds)
    grads = jax.tree.map(plan.abstract, plan.grads)
    program = jax.make_jaxpr(state.tx.update)(grads, state.opt_state, state.params)
    names = [eqn.primitive.name for eqn in all_equations(program.jaxpr)]
    barriers = names.count("optimization_barrier")
    assert barriers == len(rounds) + 3 + wait  # before each copy, and after each round of owners


def test_a_group_waits_for_the_one_before(monkeypatch):
    monkeypatch.setattr(offload_module, "GROUP_SIZE", ODD)
    barriers = []
    for offload in (False, True):
        state, plan = divided("small", "p_g_os", optax.adamw(1e-3), offload)
        step = gshard.make_train_step(small_loss, plan)
        program = step.lower(state, small_batch(0, ROWS, 0)).as_text()
        barriers.append(program.count("optimization_barrier"))
    assert barriers[1] - barriers[0] == 3  # the bias, odd, the stack; gathers have their own
    assert "budget: optimizer on host" in str(gshard.audit(step, state, small_batch(0, ROWS, 0)))


def test_small_groups_are_fetched_together():
    _, plan = divided("small", "p_g_os", optax.adamw(1e-3), True)
    assert plan.fetched_at_once == (BIAS + ODD + 4 * LAYER,)
    assert plan.bytes_per_device["host"] == BIAS + ODD + 4 * LAYER


@pytest.mark.parametrize("offload", ["yes", 1, None])
def test_offload_is_a_yes_or_a_no(offload):
    with pytest.raises(gshard.GShardError, match=f"offload={offload!r} must be True or False"):
        divided("small", "os", optax.adam(1e-3), offload)


def test_devices_without_such_memory_are_refused(monkeypatch):
    monkeypatch.setattr(make_plan, "HOST", "moon")  # no device has it
    with pytest.raises(gshard.GShardError, match="reach memory of the kind 'moon'"):
        divided("small", "os", optax.adam(1e-3), True)


def test_nothing_to_offload_is_said():
    with pytest.warns(gshard.GShardWarning, match="offload=True puts nothing into the host"):
        divided("small", "os", optax.sgd(0.1), True)


def test_a_plan_without_devices_says_what_is_fetched():
    abstract = AbstractMesh((8,), ("shard",), axis_types=(AxisType.Auto,))
    state = SMALL.state(optax.adamw(1e-3))
    _, plan = gshard.shard_train_state(state, abstract, "p_g_os", offload=True, min_shard_size=24)
    assert "fetches what is on the host in 1 group" in str(plan)


def test_an_init_function_and_the_way_back():
    def init(seed):
        params = jax.tree.map(lambda x: x * seed, small_params(0))
        return params, optax.adam(1e-3)

    state, plan = gshard.shard_train_state(
        init, mesh(), "p_g_os", init_args=(2.0,), offload=True, min_shard_size=24
    )
    assert_at_rest(state, plan)
    wanted = jax.tree.map(lambda x: 2 * np.asarray(x), small_params(0))
    for found in (gshard.full_params(state), plan.unwrap(state).params):
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
    fresh = state.replace(opt_state=jax.jit(state.tx.init)(state.params))
    assert_at_rest(fresh, plan)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_frozen_parameters_are_offloaded_too(precision, micro_batches):
    found = []
    for offload in (True, False):
        options = {"frozen": "^stack$", "precision": precision}
        state, plan = divided("small", "p_g_os", optax.adam(1e-2), offload, **options)
        frozen = plan.non_trainable["frozen parameters"]["stack"]
        assert frozen.on_host == offload and frozen.dim is not None
        step = gshard.make_train_step(small_loss, plan, micro_batches=micro_batches)
        for i in range(STEPS):
            state, metrics = step(state, small_batch(0, ROWS, i))
        assert_at_rest(state, plan)
        score = gshard.make_eval_step(small_loss, plan)(state, small_batch(0, ROWS, 0))
        found.append(jax.tree.map(np.asarray, (metrics["loss"], score, gshard.full_params(state))))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.slow
def test_memory_on_a_tpu():
    """Compiled for eight TPU chips, without one: bytes of both memories, and what is temporary."""
    rows = found_by("train.optim.offload_on_tpu", "tpu-v5e:2x4")
    assert rows
    for row in rows:
        plain, offload = row["plain"], row["offload"]
        assert plain["host_argument"] == 0
        for use in ("argument", "output", "alias"):
            assert offload[f"host_{use}"] == row["host"], (row, use)
        assert offload["host_temp"] == 0, row
        assert plain["argument"] - offload["argument"] == row["host"], row
        # Groups of the update, and parts of parameters, which come when the compiler likes.
        assert offload["temp"] <= plain["temp"] + 2 * row["group"] + row["params"], row


def test_chunks_are_not_taken_over_the_users_own_axis(monkeypatch):
    monkeypatch.setattr(offload_module, "GROUP_SIZE", 512)
    both = gshard.make_mesh(extra={"model": 2})
    params = {"w": jax.device_put(np.ones((32, 24), np.float32), NamedSharding(both, P("model")))}

    def loss(p, b):
        return jnp.mean((b["x"] @ p["w"]) ** 2)

    start = (params, optax.adam(1e-2))
    state, plan = gshard.shard_train_state(start, both, "p_g_os", min_shard_size=4, offload=True)
    assert plan.fetched_at_once == (plan.bytes_per_device["host"],)
    rows = {"x": np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32)}
    found = gshard.audit(gshard.make_train_step(loss, plan), state, rows)
    weights = [r for r in found.collectives if r.purpose == "compiler" and r.kind == "all-gather"]
    assert not weights
    # Not compiled by the user: JAX alone would not fetch.
    _, grads = gshard.value_and_grad(loss, plan)(state.params, gshard.shard_batch(rows, plan))
    expected = jax.grad(loss)({"w": np.ones((32, 24), np.float32)}, rows)
    np.testing.assert_allclose(grads["w"], expected["w"], rtol=1e-5, atol=1e-6)


def test_a_vector_over_columns_is_read_by_every_chunk(monkeypatch):
    """Beside a matrix that is updated some rows at a time it has the shape (1, n)."""
    monkeypatch.setattr(offload_module, "GROUP_SIZE", 512)
    rate = jnp.linspace(0.1, 1.0, 32)
    by_column = optax.stateless(lambda g, p: jax.tree.map(lambda x: x * rate, g))
    tx = optax.chain(by_column, optax.trace(0.9), optax.scale(-0.1))
    rows, found = np.ones((8, 64), np.float32), []
    for on_host in (False, True):
        state, plan = gshard.shard_train_state(
            ({"w": jnp.ones((64, 32))}, tx),
            gshard.make_mesh(devices=jax.devices()[:1]),
            "zero1",
            offload=on_host,
        )
        step = gshard.make_train_step(lambda p, x: jnp.square(x @ p["w"]).mean(), plan)
        for _ in range(2):
            state, _ = step(state, rows)
        found.append(gshard.full_params(state)["w"])
    np.testing.assert_allclose(*found, rtol=1e-6)
