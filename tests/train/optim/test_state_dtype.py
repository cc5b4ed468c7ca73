"""The optimizer state in 8 bits: one device's numbers with the same blocks, at every level."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding

import gshard
from gshard.sharding.quantized_array import QuantizedArray, decoded, encoded, is_quantized

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

LEVELS = ("dp", "os", "os_g", "p_g_os")
ROWS = 120  # a multiple of 3, 5 and 8
INT8 = gshard.Precision("float32", state_dtype="int8")
SHAPES = {"stack": (4, 40, 40), "odd": (40, 131), "last": (131, 7), "scale": (4099,)}


def params() -> dict[str, np.ndarray]:
    """Layers to scan, two matrices of which one is small, and a vector; most are padded."""
    rng = np.random.default_rng(0)
    return {k: (rng.normal(size=s) / 6).astype(np.float32) for k, s in SHAPES.items()}


def batch(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((7, step))
    return {
        "x": rng.normal(size=(ROWS, 40)).astype(np.float32),
        "y": rng.normal(size=(ROWS, 7)).astype(np.float32),
    }


def loss_fn(p: Any, b: Any) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), b["x"], p["stack"])
    x = jnp.tanh(x @ p["odd"]) @ p["last"]
    scale = 1 + (p["scale"] * b["x"][:, :1]).sum(-1) / 64
    return ((x * scale[:, None] - b["y"]) ** 2).mean()


def mesh(devices: int = 8, **options: Any) -> Any:
    return gshard.make_mesh(devices=jax.devices()[:devices], **options)


def sharded(
    level: Any,
    tx: Any,
    devices: int = 8,
    precision: Any = INT8,
    of_mesh: Any = None,
    **options: Any,
) -> Any:
    given: dict[str, Any] = {"min_shard_size": 1000, "scan_axes": {"^stack$": 0}, **options}
    return gshard.shard_train_state(
        (params(), tx), of_mesh or mesh(devices), level, precision=precision, **given
    )


def quantized(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_quantized) if is_quantized(x)]


def adamw() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))


def assert_one_step(plan: Any, before: Any, after: Any, b: Any, update: Any) -> None:
    """Compares a step with one device's, from the same state and with the same blocks."""
    old, new = plan.unwrap(before), plan.unwrap(after)
    wanted_params, wanted_state = update(old.params, old.opt_state, b)
    for name, x in new.params.items():
        np.testing.assert_allclose(x, wanted_params[name], atol=2e-6, err_msg=name)
    # Rounded up or down by the last bits of an entry, which another order of a sum changes.
    layouts, found = quantized(plan.opt_state), quantized(after.opt_state.inner)
    wanted = quantized(encoded(wanted_state, plan.opt_state))
    assert found and len(found) == len(wanted)
    for x, y, layout in zip(found, wanted, layouts, strict=True):
        codes = layout.codes.unpad(np.asarray(x.codes)).astype(int)
        off = abs(codes - np.asarray(y.codes, int))
        assert off.max() <= 1, layout.codes.path
    for x, y in zip(*map(jax.tree.leaves, (decoded(wanted_state), new.opt_state)), strict=True):
        if x.size < 4096:  # not encoded
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def one_device(tx: Any) -> Any:
    def update(p: Any, state: Any, b: Any) -> Any:
        updates, state = tx.update(jax.grad(loss_fn)(p, b), state, p)
        return optax.apply_updates(p, updates), state

    return jax.jit(update)


@pytest.mark.parametrize("devices", [1, 3, 5, 8])
@pytest.mark.parametrize("level", LEVELS)
def test_each_step_is_one_devices_with_the_same_blocks(level, devices):
    tx = adamw()
    state, plan = sharded(level, tx, devices)
    step = gshard.make_train_step(loss_fn, plan, donate=False)
    update = one_device(tx)
    for i in range(3):
        new, metrics = step(state, batch(i))
        assert np.isfinite(metrics["loss"])
        assert_one_step(plan, state, new, batch(i), update)
        state = new


@pytest.mark.parametrize("level", LEVELS)
def test_the_same_collectives_are_compiled_as_with_float32(level):
    def collectives(precision: Any) -> Any:
        state, plan = sharded(level, adamw(), precision=precision)
        step = gshard.make_train_step(loss_fn, plan)
        rows = gshard.audit(step, state, batch(0)).collectives
        return sorted((x.kind, x.dtype, x.purpose, x.count, x.elements) for x in rows)

    assert collectives(INT8) == collectives("float32")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("devices", [1, 3, 8, 64, 256])
def test_two_moments_take_at_most_2_2_bytes_for_each_parameter(level, devices):
    shapes = {"a": (1024, 4096), "b": (4096, 1024), "heads": (1024, 16, 64), "norm": (8192,)}
    shapes |= {"conv": (3, 3, 256, 512), "stack": (12, 1024, 1024)}
    abstract = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    of_mesh = AbstractMesh((devices,), ("shard",), axis_types=(AxisType.Auto,))
    plan = gshard.shard_train_state(
        (abstract, optax.adam(1e-3)), of_mesh, level, precision=INT8, scan_axes={"stack": 0}
    )[1]
    own = sum(math.prod(x.shard_shape) for x in plan.grads.values())
    assert 2 * own < plan.bytes_per_device["opt_state"] <= 2.2 * own
    assert gshard.budget(plan).resident["optimizer"] == plan.bytes_per_device["opt_state"]


def three_steps(state: Any, plan: Any, **options: Any) -> Any:
    """Compares three steps with one device's; returns the last state."""
    step = gshard.make_train_step(loss_fn, plan, donate=False, **options)
    update = one_device(plan.tx)
    for i in range(3):
        new, _ = step(state, batch(i))
        assert_one_step(plan, state, new, batch(i), update)
        state = new
    return state


@pytest.mark.parametrize(
    "options",
    [
        {"of_mesh": {"replica": 2}},
        {"offload": True},
        {"min_shard_size": 0, "rules": {"scale": "replicate", "odd": 1}},
        {"scan_axes": None},
    ],
    ids=["replicas", "offload", "rules", "stack"],
)
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_options_of_the_state_change_no_number(level, options):
    if of_mesh := options.get("of_mesh"):
        options = {**options, "of_mesh": mesh(8, **of_mesh)}
    three_steps(*sharded(level, adamw(), **options))


@pytest.mark.parametrize("options", [{"micro_batches": 3, "accumulate": "local"}, {
    "micro_batches": 5, "scaler": gshard.GradScaler()
}], ids=["local", "scaler"])  # fmt: skip
@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_options_of_the_step_change_no_number(level, options):
    three_steps(*sharded(level, adamw()), **options)


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_parameters_on_a_model_axis_have_blocks_within_their_shards(level):
    of_mesh = gshard.make_mesh(extra={"model": 2}, devices=jax.devices()[:8])
    own = NamedSharding(of_mesh, jax.P(None, "model"))
    given = params() | {"w": jax.device_put(np.ones((256, 160), np.float32), own)}

    def loss(p: Any, b: Any) -> jax.Array:
        return loss_fn(p, b) + (jnp.tanh(b["x"] @ p["w"][:40]) ** 2).mean()

    tx = optax.adamw(1e-2)
    state, plan = gshard.shard_train_state((given, tx), of_mesh, level, precision=INT8)
    w: Any = plan.opt_state[0].mu["w"]
    assert w.codes.spec == w.scales.spec == jax.P("shard", "model")
    assert (w.axis, w.shards, w.scales.shape) == (1, 2, (256, 2))
    step = gshard.make_train_step(loss, plan, donate=False)
    new, _ = step(state, batch(0))
    rows = gshard.audit(step, state, batch(0)).collectives
    plain, plain_plan = gshard.shard_train_state((given, tx), of_mesh, level)
    wanted = gshard.audit(gshard.make_train_step(loss, plain_plan), plain, batch(0)).collectives
    assert sorted((x.kind, x.elements) for x in rows) == sorted(
        (x.kind, x.elements) for x in wanted
    )
    grads = jax.grad(loss)(given, batch(0))
    state: Any = tx.update(grads, tx.init(given), given)[1]
    exact = state[0].mu["w"]
    found = plan.unwrap(new).opt_state[0].mu["w"]
    assert abs(found - exact).max() <= 0.016 * abs(exact).max()


def test_offloaded_codes_and_scales_are_on_the_host():
    plans = [sharded("p_g_os", adamw(), offload=True, precision=p)[1] for p in (INT8, "float32")]
    layouts = quantized(plans[0].opt_state)
    assert layouts and all(x.codes.on_host and x.scales.on_host for x in layouts)
    for plan in plans:
        stored = jax.tree.leaves((plan.params, plan.opt_state))
        assert sum(plan.fetched_at_once) == sum(x.bytes_per_device for x in stored if x.on_host)
    small = sum(x.bytes_per_device for x in jax.tree.leaves(layouts))
    large = sum(4 * x.codes.bytes_per_device for x in layouts)
    assert 0.25 < small / large < 0.27
    assert plans[1].bytes_per_device["host"] - plans[0].bytes_per_device["host"] == large - small


def test_nnx_models_keep_codes_in_their_optimizer():
    model = nnx.Linear(64, 80, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    pair, plan = gshard.shard_train_state(
        (model, optimizer), mesh(), "p_g_os", precision=INT8, min_shard_size=0
    )
    step = gshard.make_train_step(lambda m, b: (m(b) ** 2).mean(), plan)
    x = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    exact: Any = nnx.clone(model)
    tx: Any = optax.adam(1e-2)
    for _ in range(3):
        step(*pair, x)
    assert quantized(plan.kind.split(pair).opt_state.inner)
    mu = plan.unwrap(pair)[1].opt_state[0].mu["kernel"]
    assert mu.get_value().shape == (64, 80)
    split: Any = nnx.split(exact)
    graph, p = split
    state = tx.init(p)
    for _ in range(3):
        updates, state = tx.update(
            jax.grad(lambda p: (nnx.merge(graph, p)(x) ** 2).mean())(p), state
        )
        p: Any = optax.apply_updates(p, updates)
    off = np.abs(np.asarray(pair[0].kernel[...] - p["kernel"][...]))
    assert off.mean() <= 3e-4 and off.max() <= 4e-3  # of 3e-2 that an entry moves


@pytest.mark.parametrize("narrow", [None, "bfloat16"])
def test_a_skipped_step_keeps_every_code(narrow):
    state, plan = sharded("os_g", optax.adamw(1e-3, mu_dtype=narrow))
    step = gshard.make_train_step(loss_fn, plan, donate=False)
    state, _ = step(state, batch(0))
    bad = batch(1)
    bad["x"][5, 5] = np.inf
    after, metrics = step(state, bad)
    assert metrics["skipped_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, after.opt_state.inner, state.opt_state.inner)


@pytest.mark.parametrize("offload", [False, True])
def test_a_skipped_step_keeps_every_code_that_post_update_would_change(offload):
    def halve(state):
        adam, *rest = state.opt_state
        adam = adam._replace(mu=jax.tree.map(lambda x: x / 2, adam.mu))
        return state.replace(opt_state=(adam, *rest))

    def loss(p, x):
        return jnp.square(jnp.tanh(x @ p["w"])).mean()

    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=(n, 128)).astype(np.float32) for n in (128, 8))
    pair = ({"w": w}, optax.adamw(1e-3, mu_dtype="bfloat16"))
    state, plan = gshard.shard_train_state(pair, mesh(2), "os", precision=INT8, offload=offload)
    step = gshard.make_train_step(loss, plan, post_update=halve, donate=False)
    state, _ = step(state, x)
    after, metrics = step(state, np.where(x == x[0, 0], np.inf, x))
    assert metrics["skipped_steps"] == 1
    jax.tree.map(np.testing.assert_array_equal, after.opt_state.inner, state.opt_state.inner)


def test_a_block_is_kept_as_a_whole_or_not_at_all():
    x = np.random.default_rng(0).normal(size=(4, 512)).astype(jnp.bfloat16)
    before = QuantizedArray.encode(x, 1, 1, "bfloat16")
    x = np.array(before.decode())
    x[2, 300] *= 1.5
    other = QuantizedArray.encode(x, 1, 1, "bfloat16")
    assert (other.codes != before.codes).any((0, 1)).any()
    kept = other.keeping(before, x)
    wanted = np.array(before.codes)
    wanted[2, 256:] = other.codes[2, 256:]
    np.testing.assert_array_equal(kept.codes, wanted)
    np.testing.assert_array_equal(kept.scales[:, 0], before.scales[:, 0])


def test_moments_that_an_optimizer_does_not_change_keep_their_codes():
    """Rounded to bfloat16 they lie between two codes, of which each encoding drew another one."""
    tx = optax.MultiSteps(optax.adamw(1e-3, mu_dtype="bfloat16"), 2).gradient_transformation()
    state, plan = sharded("p_g_os", tx)
    step = gshard.make_train_step(loss_fn, plan, donate=False)
    moments = []
    for i in range(4):
        state, _ = step(state, batch(i))
        mu = state.opt_state.inner.inner_opt_state[0].mu
        moments.append([np.asarray(x.codes) for x in jax.tree.leaves(mu, is_leaf=is_quantized)
                        if is_quantized(x)])  # fmt: skip
    first, updated, between, last = ([bytes(x) for x in found] for found in moments)
    assert first != updated == between != last and len(first) > 1


def test_a_state_with_other_moments_is_refused_with_what_to_do():
    state, plan = sharded("os_g", adamw())
    step = gshard.make_train_step(loss_fn, plan)
    inner = decoded(state.opt_state.inner)
    other = state.replace(opt_state=state.opt_state._replace(inner=inner))
    with pytest.raises(gshard.GShardError, match=r"stored in 8 bits: state.tx.init\(state.params"):
        step(other, batch(0))
    made = jax.eval_shape(state.tx.init, state.params)
    assert jax.tree.structure(made) == jax.tree.structure(state.opt_state)


def test_an_own_loop_does_what_the_step_does():
    state, plan = sharded("os", adamw())
    new, _ = gshard.make_train_step(loss_fn, plan, donate=False)(state, batch(0))
    _, grads = jax.jit(gshard.value_and_grad(loss_fn, plan))(state.params, batch(0))
    own = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
    for x, y in zip(*map(jax.tree.leaves, (own, new)), strict=True):
        if x.dtype == jnp.int8:
            assert abs(np.asarray(x, int) - np.asarray(y, int)).max() <= 1
        else:
            np.testing.assert_allclose(x, y, atol=1e-6)
    # A state that starts inside a jitted program.
    again = jax.jit(plan.optimizer.init)(state.params)
    jax.tree.map(np.testing.assert_array_equal, again.inner, state.opt_state.inner)


def test_an_init_function_starts_with_the_same_codes():
    given, plan = sharded("p_g_os", adamw())
    made, _ = gshard.shard_train_state(
        lambda: ({k: jnp.asarray(x) for k, x in params().items()}, plan.tx),
        mesh(), "p_g_os", precision=INT8, min_shard_size=1000, scan_axes={"^stack$": 0},
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, made.opt_state, given.opt_state)


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_post_update_sees_and_changes_values(level):
    seen = {}

    def halve(state: Any) -> Any:
        mu = state.opt_state[1][0].mu
        seen.update({k: (x.shape, x.dtype) for k, x in mu.items()})
        mu = mu | {"odd": mu["odd"] / 2}
        inner = state.opt_state[1][0]._replace(mu=mu)
        return state.replace(opt_state=(state.opt_state[0], (inner, *state.opt_state[1][1:])))

    state, plan = sharded(level, adamw())
    plain, _ = gshard.make_train_step(loss_fn, plan, donate=False)(state, batch(0))
    halved, _ = gshard.make_train_step(loss_fn, plan, post_update=halve)(state, batch(0))
    assert seen == {k: (s, jnp.float32) for k, s in SHAPES.items()}
    plain, halved = (plan.unwrap(x).opt_state[1][0] for x in (plain, halved))
    np.testing.assert_allclose(halved.mu["odd"], plain.mu["odd"] / 2, atol=1e-7)
    np.testing.assert_array_equal(halved.mu["stack"], plain.mu["stack"])
    np.testing.assert_array_equal(halved.nu["odd"], plain.nu["odd"])


def test_master_copies_stay_float32():
    precision = gshard.Precision("bfloat16", state_dtype="int8")
    state, plan = sharded("os_g", adamw(), precision=precision)
    state, _ = gshard.make_train_step(loss_fn, plan)(state, batch(0))
    assert {x.dtype.name for x in state.opt_state.master.values()} == {"float32"}
    assert len(quantized(state.opt_state.inner)) == 6
    assert {x.dtype for x in quantized(state.opt_state.inner)} == {"float32"}
