"""Auxiliary and evaluation outputs that say how they are reduced: `gshard.Reduced`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard import Reduced

ROWS, CALLS = 24, 3


def rows(seed: int = 0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.normal(size=(ROWS, 5)).astype(np.float32),
        "n": (2**24 + rng.integers(0, 2**20, ROWS)).astype(np.int32),  # odd ones: no float32
        "small": rng.integers(90, 120, ROWS).astype(np.int8),
        "w": rng.integers(1, 4, ROWS).astype(np.float32),
    }


def joined(batches):
    return jax.tree.map(lambda *xs: np.concatenate(xs), *batches)


def measures(b):
    """All of them are the same function of one device's examples and of the global batch."""
    low = b["n"].min()
    return {
        "count": Reduced((b["x"][:, 0] > 0).sum(), "sum"),
        "ids": [Reduced(b["n"].sum(), "sum"), Reduced(b["n"].max(), "max"), Reduced(low, "min")],
        "small": Reduced(b["small"].max() - jnp.int8(0), "max"),
        "bytes": Reduced(b["small"].min() * jnp.int8(1), "sum"),
        "table": Reduced((b["n"][:, None] % np.arange(2, 7) == 0).sum(0), "sum"),
        "top": Reduced(-jnp.abs(b["x"]).max(0), "min"),
        "bottom": Reduced(-jnp.abs(b["x"]).min(0), "max"),
        "half": Reduced(b["x"].max().astype(jnp.bfloat16), "max"),
        "any": Reduced((b["n"] == rows()["n"].min()).any(), "any"),
        "all": Reduced((b["x"][:, 0] < 1).all(), "all"),
        "yes": Reduced((b["w"] > 0).all(), "all"),
        "no": Reduced((b["w"] < 0).any(), "any"),
    }


def loss_fn(p, b):
    errors = ((b["x"] @ p["w"]) ** 2).mean(-1)
    out = gshard.Weighted((errors * b["w"]).sum(), b["w"].sum())
    mean = Reduced((b["w"] * b["small"]).sum() / b["w"].sum(), "mean")
    share = Reduced(b["small"].max() > 100, "mean")
    return out, {**measures(b), "mean": mean, "share": share, "loss": errors.mean()}


def divided(level="os", replica=None, **options):
    devices = jax.devices()[:4] if replica else jax.devices()[:3]
    weights = np.random.default_rng(9).normal(size=(5, 6)).astype(np.float32)
    return gshard.shard_train_state(
        ({"w": weights}, optax.sgd(0.1)),
        gshard.make_mesh(devices=devices, replica=replica or 1),
        level,
        min_shard_size=4,
        **options,
    )


def assert_whole(found, everything, devices, slices):
    """`slices`: how many a device takes its rows in, over all calls."""
    expected = jax.jit(measures)(everything)
    for name, want in expected.items():
        for x, y in zip(jax.tree.leaves(found[name]), jax.tree.leaves(want), strict=True):
            if name == "bytes":  # a sum of each slice's least: int8 has no place for it
                assert x.dtype == jnp.int32 and x >= devices * slices * 90
                continue
            assert x.dtype == y.dtype, name
            np.testing.assert_array_equal(x, y, err_msg=name)
    mean = (everything["w"] * everything["small"]).sum() / everything["w"].sum()
    np.testing.assert_allclose(found["mean"], mean, rtol=1e-6)
    assert found["mean"].dtype == found["share"].dtype == jnp.float32
    assert 0 < found["share"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("level", "replica", "k"), [("p_g_os", None, 4), ("os", 2, 1)])
def test_over_devices_and_micro_batches(level, replica, k):
    state, plan = divided(level, replica)
    options = {"has_aux": True, "micro_batches": k, "loss_semantics": "per_device"}
    _, metrics = gshard.make_train_step(loss_fn, plan, **options)(state, rows())
    assert_whole(metrics["aux"], rows(), plan.group.devices, k)


def test_over_calls():
    state, plan = divided("os_g", replica=2)
    options = {"has_aux": True, "micro_batches": 2, "loss_semantics": "per_device"}
    call = gshard.value_and_grad(loss_fn, plan, sync=False, **options)
    batches = [rows(seed) for seed in range(CALLS)]

    @jax.jit
    def end(p, batches):
        total = sum(call(p, b)[1] for b in batches)
        return gshard.reduce_gradients(total, plan)[0], total

    (_, aux), total = end(state.params, batches)
    assert_whole(aux, joined(batches), plan.group.devices, 2 * CALLS)
    other = dataclasses.replace(total, aux={**total.aux, "yes": Reduced(aux["yes"], "max")})
    with pytest.raises(gshard.GShardError, match="same tree, aux and accumulation"):
        total + other


@pytest.mark.slow
def test_the_dtype_of_outputs_in_training():
    state, plan = divided(precision=gshard.Precision(output_dtype="float16"))
    _, metrics = gshard.make_train_step(loss_fn, plan, has_aux=True)(state, rows())
    assert metrics["aux"]["top"].dtype == metrics["aux"]["mean"].dtype == jnp.float16
    assert metrics["aux"]["ids"][0] == rows()["n"].sum()


def test_evaluation_and_the_dtype_of_outputs():
    state, plan = divided(precision=gshard.Precision(output_dtype="float16"))
    evaluate = gshard.make_eval_step(
        lambda p, b: {**measures(b), "mean": Reduced(b["x"][:2] * 0 + b["w"].mean(), "mean")}, plan
    )
    found = evaluate(state, rows())
    for name, want in jax.jit(measures)(rows()).items():
        for x, y in zip(jax.tree.leaves(found[name]), jax.tree.leaves(want), strict=True):
            if name != "bytes":
                wanted = jnp.float16 if jnp.issubdtype(y.dtype, jnp.floating) else y.dtype
                assert x.dtype == wanted, name
                np.testing.assert_array_equal(x, np.asarray(y).astype(wanted), err_msg=name)
    np.testing.assert_allclose(found["mean"], np.full((2, 5), rows()["w"].mean()), rtol=1e-3)


@pytest.mark.parametrize("semantics", ["global", "per_device"])
@pytest.mark.parametrize("device", [0, 2])
def test_a_nan_of_one_device_is_not_passed_by(device, semantics):
    state, plan = divided()
    b = rows()
    b["x"][8 * device, 1] = np.nan
    evaluate = gshard.make_eval_step(
        lambda p, b: [Reduced(b["x"].max(0), by) for by in ("max", "min", "sum")],
        plan,
        loss_semantics=semantics,
    )
    for found in evaluate(state, b):
        np.testing.assert_array_equal(np.isnan(found), [False, True, False, False, False])


BAD = {
    "by": (lambda b: Reduced(b["x"].max(), "maximum"), ("'a/0'", "by='maximum'", "sum, mean, max")),
    "near": (lambda b: Reduced(b["x"].max(), "men"), ("Did you mean 'mean'?",)),
    "no text": (lambda b: Reduced(1.0, max), ("'a/0'", "unknown")),
    "text": (lambda b: Reduced("x", "sum"), ("'a/0'", "needs a number or an array", "'x'")),
    "list": (lambda b: Reduced([1, 2], "sum"), ("needs a number or an array", "[1, 2]")),
    "texts": (lambda b: Reduced(np.array(["x"]), "sum"), ("needs a number or an array",)),
    "complex": (lambda b: Reduced(1j, "max"), ("real numbers", "complex64")),
    "key": (lambda b: Reduced(jax.random.key(0), "max"), ("real numbers", "key")),
    "any": (lambda b: Reduced(b["n"].sum(), "any"), ("'any'", "booleans", "int32")),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_reduced_is_refused_by_path(name):
    make, words = BAD[name]
    state, plan = divided()
    step = gshard.make_train_step(lambda p, b: (p["w"].sum(), {"a": [make(b)]}), plan, has_aux=True)
    evaluate = gshard.make_eval_step(lambda p, b: {"a": [make(b)]}, plan)
    for call in (step, evaluate):
        with pytest.raises(gshard.GShardError) as error:
            call(state, rows())
        for word in words:
            assert word in str(error.value)


def test_what_was_not_said_names_the_fix():
    state, plan = divided()
    semantics = "per_device"
    evaluate = gshard.make_eval_step(lambda p, b: b["n"].sum(), plan, loss_semantics=semantics)
    with pytest.raises(gshard.GShardError, match=r'int32 .*gshard\.Reduced\(x, "sum"\)'):
        evaluate(state, rows())
    evaluate = gshard.make_eval_step(
        lambda p, b: {"rows": Reduced(b["n"], "max")}, plan, loss_semantics=semantics
    )
    with pytest.warns(gshard.GShardWarning, match=r"'rows' has shape \(8,\).*reduce them first"):
        evaluate(state, rows())
    with pytest.raises(gshard.GShardError, match="the loss must be a floating scalar.*Reduced"):
        gshard.make_train_step(lambda p, b: Reduced(p["w"].sum(), "sum"), plan)(state, rows())


def test_rows_without_weight_do_not_count():
    """Their mean is 0 / 0, on a device that has no others."""
    mask = np.r_[np.zeros(ROWS // 4), np.ones(ROWS - ROWS // 4)].astype(np.float32)

    def loss(p, b):
        total, weight = ((b["x"] @ p["w"]) ** 2).mean(-1) @ b["mask"], b["mask"].sum()
        mean = total / weight
        return gshard.Weighted(total, weight), {"plain": mean, "named": Reduced(mean, "mean")}

    params = {"w": np.ones((5, 3), np.float32)}
    given = {"x": rows()["x"], "mask": mask}
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "os", min_shard_size=4)
    _, metrics = gshard.make_train_step(loss, plan, has_aux=True)(state, given)
    expected = loss(params, given)[1]["plain"]
    np.testing.assert_allclose([*metrics["aux"].values()], [expected] * 2, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)


def added_up(aux):
    """What two calls of `value_and_grad(sync=False)` make of an auxiliary output."""
    pair = ({"w": np.ones((5, 1), np.float32)}, optax.sgd(0.1))
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state, plan = gshard.shard_train_state(pair, mesh, "os", min_shard_size=0)

    def loss(params, b):
        return (b["x"] @ params["w"]).mean(), {"it": aux(b["x"])}

    grad = gshard.value_and_grad(loss, plan, has_aux=True, sync=False)
    total = None
    for seed in (0, 1):
        _, grads = jax.jit(grad)(state.params, gshard.shard_batch(rows(seed), plan))
        total = grads if total is None else total + grads
    return gshard.reduce_gradients(total, plan)[0][1]["it"]


def test_a_float16_output_is_averaged_over_calls_without_an_overflow():
    found = added_up(lambda x: (x.mean() * 0 + 5000).astype(jnp.float16))
    np.testing.assert_allclose(found, 5000, rtol=1e-3)


def test_a_complex_output_cannot_be_averaged_over_calls():
    with pytest.raises(gshard.GShardError, match="complex auxiliary output .* imaginary part"):
        added_up(lambda x: (x + 1j * x).mean())


MAXIMA = {
    "the largest": lambda x, keep: x.max(),
    "of those that count": lambda x, keep: jnp.max(x, where=keep, initial=-9.0),
    "not differentiated": lambda x, keep: jax.lax.stop_gradient(x.max(0)),
    "constrained": lambda x, keep: jax.lax.with_sharding_constraint(x.max(), jax.P()),
    "the smallest, as a largest": lambda x, keep: -jnp.max(-x),
    "from a bound": lambda x, keep: 7.5 - x.max(),
    "clipped": lambda x, keep: jnp.maximum(jnp.minimum(x.min(), 0.5), -0.5),
    "rounded": lambda x, keep: x.max().astype(jnp.bfloat16).astype(jnp.float32),
    "a flag": lambda x, keep: jnp.any(x > 2.5).astype(jnp.float32),
    "of an exponential": lambda x, keep: jnp.exp(x.min() + 1.0),
}


@pytest.mark.parametrize("name", MAXIMA)
def test_what_keeps_the_order_of_numbers_is_taken_of_a_maximum_over_micro_batches(name):
    keep = np.arange(ROWS) % 5 > 0

    def loss(params, b):
        y = b["x"] * params["w"]
        return jnp.square(y).mean(), MAXIMA[name](y, b["keep"][:, None])

    pair = ({"w": np.linspace(0.5, 2, 5, dtype=np.float32)}, optax.sgd(0.1))
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state, plan = gshard.shard_train_state(pair, mesh, "p_g_os", min_shard_size=0)
    given = {"x": rows()["x"], "keep": keep}
    with jax.set_mesh(mesh):
        expected = jax.jit(loss)(pair[0], given)[1]
    _, metrics = gshard.make_train_step(loss, plan, has_aux=True, micro_batches=4)(state, given)
    np.testing.assert_allclose(metrics["aux"], expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn"])
def test_a_number_without_an_order_is_not_taken_of_a_part(dtype):
    state, plan = divided()
    step = gshard.make_train_step(
        lambda p, b: (jnp.square(b["x"] @ p["w"]).mean(), b["x"].max().astype(dtype)),
        plan,
        has_aux=True,
        micro_batches=2,
    )
    with pytest.raises(gshard.GShardError, match="needs all examples of the batch at once"):
        step(state, rows())


def test_an_entry_for_each_example_is_refused_with_micro_batches():
    state, plan = divided()
    step = gshard.make_train_step(
        lambda p, b: (jnp.square(b["x"] @ p["w"]).mean(), b["x"] @ p["w"]),
        plan,
        has_aux=True,
        micro_batches=2,
    )
    with pytest.raises(gshard.GShardError, match=r"output of shape .* has an entry for each"):
        step(state, rows())


def test_an_integer_that_may_wrap_is_not_taken_of_a_part():
    state, plan = divided()
    step = gshard.make_train_step(
        lambda p, b: (jnp.square(b["x"] @ p["w"]).mean(), b["small"].max() + jnp.int8(100)),
        plan,
        has_aux=True,
        micro_batches=2,
    )
    with pytest.raises(gshard.GShardError, match="needs all examples of the batch at once"):
        step(state, rows())


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_a_constraint_on_a_sum_over_micro_batches_is_the_same_loss(level):
    def loss(params, b):
        per_example = jnp.square(b["x"] @ params["w"]).mean(-1)
        total, count = (
            jax.lax.with_sharding_constraint(x, jax.P())
            for x in ((per_example * b["w"]).sum(), b["w"].sum())
        )
        return jax.lax.with_sharding_constraint(total / count, jax.P())

    pair = ({"w": np.ones((5, 3), np.float32)}, optax.sgd(0.1))
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state(pair, mesh, level, min_shard_size=0)
    with jax.set_mesh(mesh):
        expected, grads = jax.jit(jax.value_and_grad(loss))(pair[0], rows())
    state, metrics = gshard.make_train_step(loss, plan, micro_batches=3)(state, rows())
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    expected = pair[0]["w"] - 0.1 * grads["w"]
    np.testing.assert_allclose(gshard.full_params(state)["w"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_booleans_that_some_example_makes_true(k):
    if k > 1 and jax.__version_info__ >= (0, 12):
        pytest.skip("XLA:CPU 0.12 compiles no product of booleans in a loop")
    y = np.array([0, 1, 1, 3] * 6)
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    start = ({"w": np.ones((4, 4), np.float32)}, optax.sgd(0.1))
    state, plan = gshard.shard_train_state(start, mesh, "os", min_shard_size=4)

    def loss(p, b):
        occurs = (b["y"][:, None] == jnp.arange(5)).T @ (b["y"] >= 0)
        return jnp.square(b["x"] @ p["w"]).mean(), occurs

    step = gshard.make_train_step(loss, plan, has_aux=True, micro_batches=k)
    found = step(state, {"x": np.ones((24, 4), np.float32), "y": y})[1]["aux"]
    assert found.dtype == bool and found.tolist() == [True, True, False, True, False]


def named(b):
    """What is not the same function of the whole batch as of its parts."""
    return {
        "share": Reduced((b["x"][:, 0] > 1).any(), "mean"),
        "count": Reduced((b["x"][:, 0] > 0).sum(), "mean"),
        "top": Reduced(b["n"].max(), "mean"),
        "highest": Reduced(b["x"].sum() / b["w"].sum(), "max"),
        "total": Reduced(b["x"].sum() / b["w"].sum(), "sum"),
        "tops": Reduced(b["x"].max(), "sum"),
    }


def kept(b):
    """Maxima are put off where micro-batches are those of one batch."""
    return {"max": Reduced(b["x"].max(), "max"), "any": Reduced((b["x"] > 2).any(), "any")}


BY = {"share": np.mean, "count": np.mean, "top": np.mean, "highest": np.max}


def micro_batch(b, i, devices=3):
    """The examples of the i-th of two micro-batches: a part of those of each device."""
    return jax.tree.map(
        lambda x: x.reshape(devices, 2, -1, *x.shape[1:])[:, i].reshape(-1, *x.shape[1:]), b
    )


@pytest.mark.parametrize("over", ["calls", "micro-batches"])
def test_outputs_are_reduced_over_parts_as_they_say(over):
    state, plan = divided()
    given = [rows(seed) for seed in range(2)]

    def loss(p, b):
        return ((b["x"] @ p["w"]) ** 2).mean(), named(b)

    if over == "calls":
        call = gshard.value_and_grad(loss, plan, sync=False, has_aux=True)
        sums = jax.jit(lambda p, given: sum(call(p, b)[1] for b in given))(state.params, given)
        found = jax.jit(lambda x: gshard.reduce_gradients(x, plan)[0][1])(sums)
    else:
        options = {"has_aux": True, "loss_semantics": "per_micro_batch", "micro_batches": 2}
        whole = joined(given)
        found = gshard.make_train_step(loss, plan, **options)(state, whole)[1]["aux"]
        given = [micro_batch(whole, i) for i in range(2)]
    each = [jax.jit(named)(b) for b in given]
    for name, x in found.items():
        wanted = BY.get(name, np.sum)([np.float64(e[name].value) for e in each])
        np.testing.assert_allclose(np.float64(x), wanted, rtol=1e-5, err_msg=name)


def test_maxima_over_calls_of_several_micro_batches():
    state, plan = divided()
    given = [rows(seed) for seed in range(2)]
    call = gshard.value_and_grad(
        lambda p, b: (((b["x"] @ p["w"]) ** 2).mean(), kept(b)),
        plan,
        **{"sync": False, "has_aux": True, "micro_batches": 2},
    )
    sums = jax.jit(lambda p, given: sum(call(p, b)[1] for b in given))(state.params, given)
    found = jax.jit(lambda x: gshard.reduce_gradients(x, plan)[0][1])(sums)
    for name, x in kept(joined(given)).items():
        np.testing.assert_array_equal(found[name], x.value)


def test_a_boolean_of_several_micro_batches_is_said_to_be_the_last_ones():
    state, plan = divided()
    step = gshard.make_train_step(
        lambda p, b: (((b["x"] @ p["w"]) ** 2).mean(), jnp.isnan(b["x"]).any()),
        plan,
        has_aux=True,
        loss_semantics="per_micro_batch",
        micro_batches=2,
    )
    with pytest.warns(gshard.GShardWarning, match=r'only the last .* gshard.Reduced\(x, "any"\)'):
        step(state, rows())
