"""Mixed precision: what is stored, communicated and summed in which dtype, and the results."""

from __future__ import annotations

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import gshard
from tests.tiers import quick

LEVELS = ["dp", "os", "os_g", "p_g_os"]
DEVICES, ROWS = 3, 12
# bf16 keeps 8 bits: a gradient summed over three devices is rounded otherwise than one sum, by up
# to two halves of a last place in each of its terms.
BF16 = 2 * 2.0**-8


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(13, dtype=jnp.bfloat16)(x)
        x = nn.LayerNorm(dtype=jnp.bfloat16)(x)
        return nn.Dense(5, dtype=jnp.bfloat16)(jnp.tanh(x))


def batch():
    rng = np.random.default_rng(0)
    shapes = {"x": (ROWS, 7), "y": (ROWS, 5)}
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


@functools.cache
def initial():
    return Net().init(jax.random.key(0), batch()["x"])["params"]


def loss_fn(p, b):
    return ((Net().apply({"params": p}, b["x"]).astype(jnp.float32) - b["y"]) ** 2).mean()


def mesh():
    return gshard.make_mesh(devices=jax.devices()[:DEVICES])


def divided(level, tx=None, precision: Any = "bfloat16", **how):
    state = TrainState.create(apply_fn=None, params=initial(), tx=tx or optax.sgd(0.1))
    how |= {"min_shard_size": 4, "precision": precision}
    return gshard.shard_train_state(state, mesh(), level, **how)


def dtypes(tree) -> set[str]:
    return {str(x.dtype) for x in jax.tree.leaves(tree)}


def trained_on_one_device(tx, steps, keep=()):
    """Plain mixed precision: bf16 parameters of a float32 master."""

    def low(path, x):
        return x if any(k in str(path) for k in keep) else x.astype(jnp.bfloat16)

    @jax.jit
    def step(master, opt_state):
        params = jax.tree_util.tree_map_with_path(low, master)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss_fn)(params, batch()))
        updates, opt_state = tx.update(grads, opt_state, master)
        return optax.apply_updates(master, updates), opt_state

    master, opt_state = initial(), tx.init(initial())
    for _ in range(steps):
        master, opt_state = step(master, opt_state)
    return master


def moved(state) -> float:
    """The largest change of a parameter since the start."""
    changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), gshard.full_params(state), initial())
    return float(max(jax.tree.leaves(changes)))


@pytest.mark.parametrize("level", quick(LEVELS, ["os", "p_g_os"]))
def test_training_matches_single_device_and_both_loops_agree(level):
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    state, plan = divided(level, tx)
    step = gshard.make_train_step(loss_fn, plan, donate=False)
    gradient = gshard.value_and_grad(loss_fn, plan)

    @jax.jit
    def own_step(state, b):
        _, grads = gradient(state.params, b)
        return state.apply_gradients(grads=grads)

    mine = theirs = state
    for _ in range(4):
        theirs, _ = step(theirs, batch())
        mine = own_step(mine, batch())
    assert own_step._cache_size() == 1
    expected = trained_on_one_device(tx, 4)
    far = moved(theirs)
    for found in (theirs, mine):
        for x, want in zip(
            jax.tree.leaves(gshard.full_params(found)), jax.tree.leaves(expected), strict=True
        ):
            assert x.dtype == np.float32
            np.testing.assert_allclose(x, want, rtol=0, atol=BF16 * far)
        # What the loss is given is the master copy, rounded once.
        stored = [
            layout.unpad(np.asarray(x))
            for layout, x in zip(
                jax.tree.leaves(plan.params), jax.tree.leaves(found.params), strict=True
            )
        ]
        for low, x in zip(stored, jax.tree.leaves(gshard.full_params(found)), strict=True):
            np.testing.assert_array_equal(low, x.astype(jnp.bfloat16))


@pytest.mark.parametrize("level", quick(LEVELS, ["dp", "os_g", "p_g_os"]))
def test_what_is_stored_and_communicated_in_which_dtype(level):
    state, plan = divided(level, optax.adam(1e-3))
    step = gshard.make_train_step(loss_fn, plan, donate=False, micro_batches=2)
    budgeted = step.budget.resident
    size = sum(layout.stored_size for layout in jax.tree.leaves(plan.params))
    assert dtypes(state.params) == {"bfloat16"}
    assert dtypes(state.opt_state.master) == {"float32"}
    assert set(state.opt_state.master) == {x.path for x in jax.tree.leaves(plan.params)}
    # The optimizer is given what it updates: float32.
    _, grads = jax.eval_shape(gshard.value_and_grad(loss_fn, plan), state.params, batch())
    assert dtypes(grads) == {"float32"}
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state.opt_state))
    assert budgeted["optimizer"] == held
    if level == "dp":  # 2 + 2 + 12 bytes for each parameter; counts and the scale
        assert budgeted == {
            "params": 2 * size,
            "gradients": 2 * size,
            "optimizer": 12 * size + 4 + 24,
            "non_trainable": 0,
        }
    new, _ = step(state, batch())
    assert dtypes(new.params) == {"bfloat16"}
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), new) == jax.tree.map(
        lambda x: (x.dtype, x.sharding), state.replace(step=new.step)
    )
    # Elements as budgeted; all gathers and scatters are of bf16 in the lowered program.
    found = gshard.audit(step, state, batch())
    for kind in ("reduce-scatter", "all-reduce"):
        assert found.elements(kind) == step.budget.elements(kind)
    text = step.lower(state, batch()).as_text()
    for collective in ("all_gather", "reduce_scatter"):
        pattern = rf'"stablehlo\.{collective}".*?[)>] : \(tensor<(?:\d+x)*(\w+)>'
        moving = set(re.findall(pattern, text, re.DOTALL))
        assert moving == (set() if level == "dp" else {"bf16"})


def test_a_small_update_is_not_lost():
    """Steps of 2^-12 around 1: bf16 alone would never move, the master copy does."""
    params = {"w": np.ones((6, 16), np.float32)}

    def loss(p, b):
        return (p["w"] * b["x"].mean()).sum()

    for level in LEVELS:
        state, plan = gshard.shard_train_state(
            (params, optax.sgd(2.0**-12)), mesh(), level, min_shard_size=4, precision="bfloat16"
        )
        step = gshard.make_train_step(loss, plan)
        for _ in range(32):
            state, _ = step(state, {"x": np.ones((DEVICES, 1), np.float32)})
        whole = gshard.full_params(state)["w"]
        np.testing.assert_array_equal(whole, 1 - 32 * 2.0**-12)
        np.testing.assert_array_equal(np.asarray(state.params["w"])[:6, :16], 1 - 2.0**-7)


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_the_dtype_of_the_reduction_is_a_choice(level):
    """Micro-batches of 1, then 64 times 2^-9: in bf16 the small ones vanish, in float32 not."""
    weights = np.full((65, DEVICES), 2.0**-9, np.float32)
    weights[0] = 1.0
    rows = {"x": weights.T.reshape(-1, 1)}  # a device takes one column, row after row

    def loss(p, b):
        return gshard.Weighted((p["w"] * b["x"].astype(p["w"].dtype).sum()).sum(), 1.0)

    found = {}
    for name, dtype in (("low", None), ("high", "float32")):
        precision = gshard.Precision(reduce_dtype=dtype)
        state, plan = gshard.shard_train_state(
            ({"w": np.ones((6, 16), np.float32)}, optax.sgd(1.0)),
            mesh(),
            level,
            min_shard_size=4,
            precision=precision,
        )
        gradient = gshard.value_and_grad(loss, plan, micro_batches=65, loss_semantics="per_device")
        _, grads = jax.jit(gradient)(state.params, rows)
        found[name] = float(np.asarray(grads["w"], np.float32)[0, 0]) * 65
    assert found["high"] == pytest.approx(1 + 64 * 2.0**-9, rel=1e-6)
    assert found["low"] == pytest.approx(1, rel=1e-2) and found["low"] < 1.05


@pytest.mark.parametrize("level", quick(["dp", "os", "p_g_os"], ["p_g_os"]))
def test_the_gradient_of_a_complex_parameter_stays_complex(level):
    params = {"c": np.arange(6) + 1j * np.arange(6, 0, -1), "w": np.ones(6)}
    params = {"c": params["c"].astype(np.complex64), "w": params["w"].astype(np.float32)}

    def loss(p, b):
        return jnp.abs(b["x"][:, :6] * p["c"] * p["w"]).mean()

    precision = gshard.Precision("float32", reduce_dtype="float32")
    _, plan = made = gshard.shard_train_state(
        (params, optax.sgd(1.0)), mesh(), level, min_shard_size=4, precision=precision
    )
    state, _ = gshard.make_train_step(loss, plan)(made[0], batch())
    grads = jax.grad(loss)(params, batch())
    for name, x in gshard.full_params(state).items():
        np.testing.assert_allclose(x, params[name] - np.asarray(grads[name]), rtol=1e-6)


def test_exceptions_stay_and_need_no_copy():
    precision = gshard.Precision(exceptions={"LayerNorm": "float32"}, reduce_dtype=jnp.float32)
    tx = optax.sgd(0.1)
    state, plan = divided("p_g_os", tx, precision)
    assert dtypes(state.params["LayerNorm_0"]) == {"float32"}
    assert not [path for path in state.opt_state.master if "LayerNorm" in path]
    step = gshard.make_train_step(loss_fn, plan)
    for _ in range(3):
        state, _ = step(state, batch())
    expected = trained_on_one_device(tx, 3, keep=("LayerNorm",))
    far = moved(state)
    for x, want in zip(
        jax.tree.leaves(gshard.full_params(state)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(x, want, rtol=0, atol=BF16 * far)


@pytest.mark.parametrize("level", quick(["os", "p_g_os"], ["p_g_os"]))
def test_parameters_that_are_replaced_count(level, tmp_path):
    """Loaded weights, a clipped norm: not undone by the copy."""
    state, plan = divided(level)
    kernel = np.array(initial()["Dense_0"]["kernel"])
    kernel[0, 0] = 2  # the others are still those of the copy
    first = state.params["Dense_0"] | {"kernel": state.params["Dense_0"]["kernel"].at[0, 0].set(2)}
    one = state.replace(params=state.params | {"Dense_0": first})
    np.testing.assert_array_equal(gshard.full_params(one)["Dense_0"]["kernel"], kernel)
    state = state.replace(params=jax.tree.map(lambda x: jnp.full_like(x, 2), state.params))
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
        plain = checkpointer.restore(like=divided(level, precision=None)[0]).state
    full = gshard.full_params(state), plan.unwrap(state).params, gshard.full_params(plain)
    for x in jax.tree.leaves(full):
        np.testing.assert_array_equal(x, np.float32(2))
    state, _ = gshard.make_train_step(loss_fn, plan)(state, batch())
    for x in jax.tree.leaves(gshard.full_params(state)):
        assert np.abs(x - 2).max() < 1.5
    assert moved(state) > 0.5


def test_parameters_that_are_replaced_count_with_master_copies_in_host_memory():
    state, plan = divided("p_g_os", optax.adam(1e-2), offload=True)
    state, _ = gshard.make_train_step(loss_fn, plan)(state, batch())
    state = state.replace(params=jax.tree.map(lambda x: x * 0 + 2, state.params))
    for x in jax.tree.leaves(gshard.full_params(state)):
        np.testing.assert_array_equal(x, np.float32(2))


def test_init_function_abstract_state_and_the_plain_state_back():
    params = initial()  # is cached: not first called in a trace

    def init():
        return TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-2))

    made, plan = gshard.shard_train_state(
        init, mesh(), "p_g_os", min_shard_size=4, precision="bfloat16"
    )
    placed, _ = divided("p_g_os", optax.adam(1e-2))
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(placed), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    abstract = jax.tree.map(lambda x: (x.shape, x.dtype), plan.abstract_state())
    assert abstract == jax.tree.map(lambda x: (x.shape, x.dtype), made)
    plain = plan.unwrap(gshard.make_train_step(loss_fn, plan)(made, batch())[0])
    assert dtypes(plain.params) == {"float32"}
    again, _ = gshard.shard_train_state(plain, mesh(), "os", min_shard_size=4, precision="bfloat16")
    for x, y in zip(
        jax.tree.leaves(gshard.full_params(again)), jax.tree.leaves(plain.params), strict=True
    ):
        np.testing.assert_array_equal(x, y)
    plain.apply_gradients(grads=jax.grad(loss_fn)(plain.params, batch()))


def test_parameters_that_come_in_bf16_get_float32_moments():
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), initial())
    state = TrainState.create(apply_fn=None, params=low, tx=optax.adam(1e-2))
    assert dtypes(state.opt_state[0].mu) == {"bfloat16"}
    state, plan = gshard.shard_train_state(
        state, mesh(), "os", min_shard_size=4, precision="bfloat16"
    )
    assert dtypes(state.opt_state.inner[0].mu) == {"float32"}
    state, metrics = gshard.make_train_step(loss_fn, plan)(state, batch())
    assert np.isfinite(metrics["loss"])


def test_nnx_and_output_dtype():
    def pair():
        model = nnx.Linear(7, 5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def loss(model, b):
        out = model(b["x"]).astype(jnp.float32)
        return ((out - b["y"]) ** 2).mean(), {"out": out.mean()}

    precision = gshard.Precision(output_dtype="bfloat16")
    (model, optimizer), plan = gshard.shard_train_state(
        pair(), mesh(), "p_g_os", min_shard_size=1, precision=precision
    )
    gradient = gshard.value_and_grad(loss, plan, has_aux=True)

    @nnx.jit
    def own_step(model, optimizer, b):
        (value, aux), grads = gradient(model, b)
        optimizer.update(model, grads)
        return value, aux

    other, plan = gshard.shard_train_state(
        pair(), mesh(), "p_g_os", min_shard_size=1, precision=precision
    )
    step = gshard.make_train_step(loss, plan, has_aux=True)
    for _ in range(3):
        value, aux = own_step(model, optimizer, batch())
        metrics = step(*other, batch())
    assert aux["out"].dtype == metrics["aux"]["out"].dtype == jnp.bfloat16
    assert value.dtype == jnp.float32
    measure = gshard.make_eval_step(lambda m, b: m(b["x"]).astype(jnp.float32), plan)
    assert measure(model, batch()).dtype == jnp.bfloat16
    measure = gshard.make_eval_step(lambda m, b: {"half": 0.5, "count": 3}, plan)
    assert {k: x.dtype for k, x in measure(model, batch()).items()} == {
        "half": jnp.bfloat16,
        "count": jnp.int32,
    }
    for x, y in zip(
        jax.tree.leaves(gshard.full_params((model, optimizer))),
        jax.tree.leaves(gshard.full_params(other)),
        strict=True,
    ):
        assert x.dtype == np.float32
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-6)


def test_patterns_without_a_match_and_other_dtypes_are_reported():
    with pytest.warns(gshard.GShardWarning, match="exceptions: the pattern 'LayrNorm'"):
        divided("os", precision=gshard.Precision(exceptions={"LayrNorm": "float32"}))
    _, plan = divided("os")
    with pytest.raises(gshard.GShardError, match="is float32, and the plan computes with bfloat16"):
        jax.jit(gshard.value_and_grad(loss_fn, plan))(initial(), batch())
    assert hash(gshard.Precision()) == hash(gshard.Precision())


BAD = {
    "a dict": (lambda: divided("os", precision={"a": "b"}), ("precision=", "is not a dtype")),
    "unknown": (lambda: divided("os", precision="b16"), ("precision='b16'", "bfloat16")),
    "near": (lambda: gshard.Precision(reduce_dtype="flaot32"), ("'flaot32'", "'float32'?")),
    "integer": (lambda: gshard.Precision(param_dtype="int32"), ("param_dtype=int32", "floating")),
    "float64": (lambda: gshard.Precision(param_dtype="float64"), ("float64", "jax_enable_x64")),
    "8 bits": (
        lambda: gshard.Precision(reduce_dtype="float8_e4m3fn"),
        ("reduce_dtype=float8_e4m3fn: sums of so few bits", "gather_dtype="),
    ),
    "none": (lambda: gshard.Precision(param_dtype=None), ("param_dtype=None", "is not a dtype")),
    "exceptions": (lambda: gshard.Precision(exceptions=["a"]), ("exceptions=['a']", "map")),
    "pattern": (lambda: gshard.Precision(exceptions={"(": "float32"}), ("regular expression",)),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_precision_is_refused_in_words(name):
    make, words = BAD[name]
    with pytest.raises(gshard.GShardError) as error:
        make()
    for word in words:
        assert word in str(error.value)
