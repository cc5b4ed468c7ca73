"""Steps with a loss of the global batch: the numbers of plain JAX and optax on one device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard._util.jaxpr import all_equations
from tests.tiers import quick

STEPS, INPUTS, HIDDEN, CLASSES = 3, 7, 26, 5
LEVELS = ("dp", "os", "os_g", "p_g_os")
KEY = jax.random.key(5)


def params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"w": (INPUTS, HIDDEN), "v": (HIDDEN, CLASSES), "s": (HIDDEN,)}
    return {k: jnp.asarray(rng.normal(size=s) / 3, jnp.float32) for k, s in shapes.items()}


def batch(step: int, examples: int) -> dict[str, np.ndarray]:
    """Counted examples are rare at the start of the batch: devices have different counts."""
    rng = np.random.default_rng(1 + step)
    return {
        "x": rng.normal(size=(examples, INPUTS)).astype(np.float32),
        "y": rng.integers(0, CLASSES, examples),
        "mask": (rng.random(examples) < np.linspace(0.05, 1, examples)).astype(np.float32),
    }


def hidden(p: Any, b: Any) -> jax.Array:
    return jnp.tanh(b["x"] @ p["w"]) * p["s"]


def logits(p: Any, b: Any) -> jax.Array:
    return hidden(p, b) @ p["v"]


def losses(p: Any, b: Any, z: Any = None) -> jax.Array:
    z = logits(p, b) if z is None else z
    return optax.softmax_cross_entropy_with_integer_labels(z, b["y"])


def masked(p: Any, b: Any) -> jax.Array:
    return (losses(p, b) * b["mask"]).sum() / b["mask"].sum()


def penalized(p: Any, b: Any) -> jax.Array:
    count = jnp.maximum(b["mask"].sum(), 1)
    return (losses(p, b) * b["mask"]).sum() / count + 0.1 * jnp.square(p["w"]).sum()


def integer_count(p: Any, b: Any) -> jax.Array:
    return jnp.sum(losses(p, b), where=b["mask"] > 0) / (b["mask"] > 0).sum()


def numbered(p: Any, b: Any) -> jax.Array:
    return (losses(p, b) * jnp.arange(len(b["y"]))).mean()


def dropped(p: Any, b: Any) -> jax.Array:
    h = hidden(p, b)
    h = jnp.where(jax.random.bernoulli(KEY, 0.7, h.shape), h / 0.7, 0)
    return (losses(p, b, h @ p["v"]) * b["mask"]).sum() / b["mask"].sum()


def normalized(p: Any, b: Any) -> jax.Array:
    h = b["x"] @ p["w"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1)
    return losses(p, b, (h * p["s"]) @ p["v"]).mean()


def contrastive(p: Any, b: Any) -> jax.Array:
    z = logits(p, b)
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


def rematerialized(p: Any, b: Any) -> jax.Array:
    """A scan over time of checkpointed cells, and a mean over valid steps."""
    x = jnp.broadcast_to(b["x"], (4, *b["x"].shape))
    valid = jnp.arange(4)[:, None] < 1 + b["y"]

    @jax.checkpoint
    def cell(h: Any, x: Any) -> Any:
        h = jnp.tanh(x @ p["w"] + h) * p["s"]
        return h, losses(p, b, h @ p["v"])

    found = jax.lax.scan(cell, jnp.zeros((len(b["y"]), HIDDEN)), x)[1]
    return jnp.sum(found, where=valid) / valid.sum()


def balanced(p: Any, b: Any, fractions_first: bool = True) -> jax.Array:
    """Adds the balancing loss of a mixture of experts: chosen fractions times probabilities."""
    chances = jax.nn.softmax(logits(p, b))
    fractions = jax.nn.one_hot(chances.argmax(-1), CLASSES).mean(0)
    factors = (fractions, chances.mean(0)) if fractions_first else (chances.mean(0), fractions)
    return losses(p, b).mean() + CLASSES * (factors[0] * factors[1]).sum()


# Each loss, and whether it is a sum or quotient of sums over examples.
LOSSES: dict[str, tuple[Callable[..., Any], bool]] = {
    "mean": (lambda p, b: losses(p, b).mean(), True),
    "masked mean": (masked, True),
    "penalized": (penalized, True),
    "integer count": (integer_count, True),
    "balanced": (balanced, True),
    "balanced, in the other order": (partial(balanced, fractions_first=False), True),
    "sum": (lambda p, b: losses(p, b).sum() / 9, True),
    "numbered": (numbered, True),
    "dropout": (dropped, True),
    "scan": (rematerialized, True),
    "rmse": (lambda p, b: jnp.sqrt(jnp.square(losses(p, b)).mean()), False),
    "batch statistics": (normalized, False),
    "contrastive": (contrastive, False),
    "largest": (lambda p, b: losses(p, b).max(), False),
    "sorted": (lambda p, b: jnp.sort(losses(p, b))[: len(b["y"]) // 2].mean(), False),
}


def with_aux(loss: Callable[..., Any], p: Any, b: Any) -> Any:
    """Scalars, integers, booleans and entries of examples, of the whole batch."""
    right = logits(p, b).argmax(-1) == b["y"]
    return loss(p, b), {
        "accuracy": (right * b["mask"]).sum() / b["mask"].sum(),
        "right": right.sum(),
        "examples": len(right),
        "counted": (b["mask"] > 0).sum(),
        "mean": losses(p, b).mean(),
        "penalty": jnp.square(p["w"]).sum(),
        "by class": jax.ops.segment_sum(losses(p, b), b["y"], CLASSES),
    }


def with_all_aux(loss: Callable[..., Any], p: Any, b: Any) -> Any:
    """Also what needs all examples at once."""
    value, aux = with_aux(loss, p, b)
    z = logits(p, b)
    more = {"top": z.max(), "any": jnp.any(z > 1), "each": z.argmax(-1), "std": z.std()}
    return value, {**aux, **more}


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-4))


@cache
def on_one_device(loss: Callable[..., Any], examples: int) -> Any:
    """Losses and aux of the steps, and the parameters after them."""
    tx, p = optimizer(), params()
    gradient, update = jax.jit(jax.value_and_grad(loss, has_aux=True)), jax.jit(tx.update)
    state, seen = tx.init(p), []
    for i in range(STEPS):
        found, grads = gradient(p, batch(i, examples))
        updates, state = update(grads, state, p)
        p = optax.apply_updates(p, updates)
        seen.append(found)
    return seen, p


def close(found: Any, wanted: Any, tolerance: float = 2e-5) -> None:
    """Integers and booleans are equal; floats differ by a fraction of the leaf's largest entry."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True)
    for (path, x), y in pairs:
        x, y = np.asarray(x), np.asarray(y)
        if not np.issubdtype(y.dtype, np.floating):
            np.testing.assert_array_equal(x, y, err_msg=str(path))
        else:
            bound = tolerance * max(np.abs(y).max(), 1e-6)
            np.testing.assert_allclose(x, y, rtol=0, atol=bound, err_msg=str(path))


def mesh_of(devices: int, replica: int = 1) -> Any:
    return gshard.make_mesh(devices=jax.devices()[:devices], replica=replica)


def sharded(level: Any, devices: int, replica: int = 1, **options: Any) -> Any:
    state = (params(), optimizer())
    return gshard.shard_train_state(
        state, mesh_of(devices, replica), level, min_shard_size=16, **options
    )


# Level, devices, replicas, micro-batches.
LAYOUTS = [(level, n, r, 1) for level in LEVELS for n, r in ((3, 1), (5, 1), (8, 2))]
LAYOUTS += [(level, n, r, 4) for level in LEVELS for n, r in ((2, 1), (8, 2))]
CASES = [(name, *layout) for name in LOSSES for layout in LAYOUTS]
QUICK = [
    ("penalized", "p_g_os", 2, 1, 4),
    ("balanced", "p_g_os", 2, 1, 4),
    ("dropout", "p_g_os", 8, 2, 4),
    ("scan", "p_g_os", 5, 1, 1),
    ("batch statistics", "p_g_os", 8, 2, 1),
    ("batch statistics", "os_g", 2, 1, 4),
    ("contrastive", "dp", 5, 1, 1),
]


@pytest.mark.filterwarnings("ignore:micro_batches=.* runs forward once more")  # "balanced"
@pytest.mark.parametrize(("name", "level", "devices", "replica", "k"), quick(CASES, QUICK))
def test_steps_are_those_of_one_device(name, level, devices, replica, k):
    loss, adds_up = LOSSES[name]
    examples = devices * k * 3
    aux = partial(with_aux if k > 1 else with_all_aux, loss)
    state, plan = sharded(level, devices, replica)
    step = gshard.make_train_step(aux, plan, has_aux=True, micro_batches=k, donate=False)
    if k > 1 and not adds_up:
        with pytest.raises(gshard.GShardError, match=rf"{__file__}:\d+ needs all examples"):
            step(state, batch(0, examples))
        return
    seen = []
    for i in range(STEPS):
        state, metrics = step(state, batch(i, examples))
        seen.append((metrics["loss"], metrics["aux"]))
    wanted, last = on_one_device(aux, examples)
    close(seen, [(value, jax.tree.map(jnp.asarray, aux)) for value, aux in wanted])
    close(plan.unwrap(state).params, last, 1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mean_in_half_precision_over_micro_batches_says_where_float32_belongs(dtype):
    def loss(p, x):
        return jnp.square(x @ p["w"]).mean(1).astype(dtype)

    given = {"w": np.ones((4, 4), np.float32)}, optax.sgd(0.1)
    state, plan = gshard.shard_train_state(given, gshard.make_mesh(), "os_g", min_shard_size=0)
    x = np.ones((24, 4), np.float32)
    step = gshard.make_train_step(lambda p, x: loss(p, x).mean(), plan, micro_batches=3)
    with pytest.raises(gshard.GShardError, match=f"rounds a sum over the batch to {dtype}"):
        step(state, x)
    exact = lambda p, x: loss(p, x).astype(jnp.float32).mean()  # noqa: E731
    _, metrics = gshard.make_train_step(exact, plan, micro_batches=3)(state, x)
    assert float(metrics["loss"]) == 16.0


@pytest.mark.parametrize(
    ("dtype", "devices", "options"),
    [
        ("bfloat16", 3, {}),
        ("float16", 5, {}),
        ("bfloat16", 2, {"micro_batches": 3, "loss_semantics": "per_micro_batch"}),
    ],
    ids=["3 devices", "5 devices", "3 micro-batches"],
)
def test_a_loss_that_is_cast_at_its_end_has_the_gradient_of_one_device(dtype, devices, options):
    """A third, or a fifth, of the loss is not exact in these types."""

    def loss(p, x):
        return jnp.square(jnp.tanh(x @ p["w"])).mean().astype(dtype)

    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 8)).astype(np.float32)}
    x = rng.normal(size=(6 * devices, 4)).astype(np.float32)
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    given = params, optax.sgd(0.1)
    state, plan = gshard.shard_train_state(given, mesh, "os", min_shard_size=0)
    _, found = jax.jit(gshard.value_and_grad(loss, plan, **options))(state.params, x)
    np.testing.assert_allclose(
        found["w"][:4, :8], jax.grad(loss)(params, x)["w"], rtol=1e-5, atol=1e-6
    )


def test_the_gradient_of_a_float8_parameter_is_divided_in_float32():
    def loss(p, b):
        y = jnp.square(jnp.tanh(b["x"] @ p["w"].astype(jnp.float32))).mean(1)
        return (y * b["mask"]).sum() / b["mask"].sum()

    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.normal(size=(4, 8)), jnp.float8_e4m3fn)}
    b = {"x": rng.normal(size=(6, 4)).astype(np.float32), "mask": np.float32([1, 0, 1, 1, 0, 1])}
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "os", min_shard_size=0)
    _, found = jax.jit(gshard.value_and_grad(loss, plan))(state.params, b)
    assert found["w"].dtype == jnp.float8_e4m3fn
    wanted = jax.grad(loss)(params, b)["w"].astype(np.float32)
    np.testing.assert_allclose(found["w"].astype(np.float32), wanted, atol=0.1 * abs(wanted).max())


@jax.custom_vjp
def clipped(x: Any) -> Any:
    """An identity, whose gradient is clipped."""
    return x * 1


clipped.defvjp(lambda x: (x * 1, None), lambda _, d: (jnp.clip(d, -0.002, 0.003),))


def rolled(p: Any, b: Any) -> jax.Array:
    """A loop over the examples, which needs all of them."""
    return jax.lax.scan(lambda h, x: (jnp.tanh(x + h * clipped(p["s"])), h), p["s"], hidden(p, b))[
        1
    ]


# Each loss, and the micro-batches. A clipped sum over devices is no sum of what each one clips.
CLIPPED: dict[str, tuple[Callable[..., Any], int]] = {
    "parameter": (lambda p, b: losses({**p, "v": clipped(p["v"])}, b).mean(), 1),
    "mean": (lambda p, b: (hidden(p, b) * clipped(hidden(p, b).mean(0))).sum(), 1),
    "checkpoint": (
        lambda p, b: losses({**p, "v": jax.checkpoint(clipped)(p["v"])}, b).mean(),
        1,
    ),
    "loop over examples": (lambda p, b: (rolled(p, b) * hidden(p, b)).sum(), 1),
    "masked mean": (lambda p, b: masked({**p, "v": clipped(p["v"])}, b), 1),
    "examples": (lambda p, b: (losses(p, b, clipped(logits(p, b))) * b["mask"]).sum(), 2),
    "masked mean of examples": (
        lambda p, b: (losses(p, b, clipped(logits(p, b))) * b["mask"]).sum() / b["mask"].sum(),
        2,
    ),
    "weighted": (
        lambda p, b: gshard.Weighted(
            (losses(p, b, clipped(logits(p, b))) * b["mask"]).sum(), b["mask"].sum()
        ),
        2,
    ),
}


@pytest.mark.parametrize(
    "name",
    quick(
        CLIPPED,
        ["parameter", "checkpoint", "loop over examples", "masked mean of examples", "weighted"],
    ),
)
def test_a_backward_pass_that_is_not_linear_gets_the_gradient_of_one_device(name):
    loss, k = CLIPPED[name]
    b = batch(0, 18)
    state, plan = sharded("p_g_os", 3)
    run = gshard.value_and_grad(loss, plan, micro_batches=k)
    value, found = jax.jit(run)(state.params, gshard.shard_batch(b, plan))

    def alone(p: Any) -> Any:
        out = loss(p, b)
        return out.sum / out.weight if isinstance(out, gshard.Weighted) else out

    wanted = jax.jit(jax.value_and_grad(alone))(params())
    found = jax.tree.map(lambda x, y: x[tuple(map(slice, y.shape))], found, wanted[1])
    close((value, found), wanted, 5e-5)


@pytest.mark.parametrize("axis", quick(["sequence", "expert"], ["expert"]))
def test_a_clipped_masked_mean_is_divided_by_the_mask_of_all_axes(axis):
    rng = np.random.default_rng(0)
    params = {"v": np.ones(4, np.float32), "e": rng.normal(size=(2, 4, 4)).astype(np.float32)}
    b = {
        "x": rng.normal(size=(8, 4, 4)).astype(np.float32),
        "y": rng.integers(0, 2, (8, 4)),
        "mask": np.arange(32).reshape(8, 4) % 7 < 3,
    }

    def loss(p: Any, b: Any) -> Any:
        tokens, expert = clipped(b["x"] * p["v"]), jax.nn.one_hot(b["y"], 2)
        z = jnp.einsum("bte,btf,efg->btg", expert, tokens, p["e"])
        return jnp.square(z).mean(-1).mean(where=b["mask"])

    mesh = gshard.make_mesh(devices=jax.devices()[:4], **{axis: 2})
    keep = {"^e$": ("expert", 0)} if axis == "expert" else None
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)), mesh, "os", keep=keep, min_shard_size=0
    )
    found = jax.jit(gshard.value_and_grad(loss, plan))(state.params, gshard.shard_batch(b, plan))
    close(found, jax.value_and_grad(loss)(params, b), 5e-5)


@pytest.mark.parametrize("loss, sums", [(numbered, 0), (penalized, 1)])
def test_each_sum_before_the_micro_batches_takes_two_more_traces(loss, sums):
    calls = []

    def counted(p, b):
        calls.append(None)
        return loss(p, b)

    state, plan = sharded("p_g_os", 3)
    step = gshard.make_train_step(counted, plan, micro_batches=2)
    step(state, batch(0, 12))
    assert len(calls) == 1 + 2 * sums  # one that ends at the sum, and one that computes it


def test_nothing_is_kept_of_a_loss_that_needs_a_sum_before_the_micro_batches():
    """JAX keeps what a trace has read that ends by an exception."""
    shape = (INPUTS, 997)

    def train() -> None:
        teacher = jnp.ones(shape)

        def loss(p, b):
            return (b["x"] @ teacher).mean() * p["w"].mean() + penalized(p, b)

        state, plan = sharded("p_g_os", 3)
        step = gshard.make_train_step(loss, plan, micro_batches=2)
        jax.block_until_ready(step(state, batch(0, 12)))

    train()
    gc.collect()
    jax.clear_caches()
    gc.collect()
    assert not [x for x in jax.live_arrays() if x.shape == shape]


def test_a_value_that_is_put_off_is_in_no_scope_of_what_reads_it():
    """Equations of one layer would not be in one call, and a profile would show them elsewhere."""
    state, plan = sharded("os", 3)
    traced = gshard.make_train_step(masked, plan).trace(state, batch(0, 12))
    names = {str(eqn.source_info.name_stack) for eqn in all_equations(traced.jaxpr.jaxpr)}
    assert any("loss" in name for name in names)
    assert not any("loss/loss" in name for name in names)


@jax.checkpoint
def energies(x: Any, w: Any) -> jax.Array:
    """A derivative of it holds its known part as a call (`closed_call`, since JAX 0.12 another)."""
    return jnp.square(jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, w)[0]).sum(-1)


def energies_and_forces(p: Any, b: Any) -> jax.Array:
    """As of interatomic potentials."""
    of_all = lambda x: (energies(x, p["w"]).sum(), energies(x, p["w"]))  # noqa: E731
    (_, e), f = jax.value_and_grad(of_all, has_aux=True)(b["x"])
    return jnp.square(e - b["y"]).mean() + jnp.square(f).mean()


def by_classes_that_occur(p: Any, b: Any) -> jax.Array:
    """A product of booleans over the examples is their `or`."""
    occurs = (b["y"][:, None] == jnp.arange(CLASSES)).T @ (b["y"] >= 0)
    return (jnp.square(b["x"] @ p["w"][0]).mean(-1) * occurs.astype(jnp.float32)[b["y"]]).mean()


def over_unstacked(p: Any, b: Any) -> jax.Array:
    first, second = jnp.unstack((b["x"] @ p["w"][0])[:, :2], axis=1)
    return (first * second).mean()


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("loss", [energies_and_forces, by_classes_that_occur, over_unstacked])
def test_losses_that_were_refused_or_wrong(loss, k):
    if k > 1 and loss is by_classes_that_occur and jax.__version_info__ >= (0, 12):
        pytest.skip("XLA:CPU 0.12 compiles no product of booleans in a loop")
    start = {"w": np.random.default_rng(0).normal(size=(3, INPUTS, INPUTS)).astype(np.float32) / 3}
    b = batch(0, 24)
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state, plan = gshard.shard_train_state((start, optax.sgd(0.1)), mesh, "os_g", min_shard_size=4)
    step = gshard.make_train_step(loss, plan, micro_batches=k)
    new, metrics = step(state, b)
    value, grads = jax.value_and_grad(loss)(start, b)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(
        gshard.full_params(new)["w"], start["w"] - 0.1 * grads["w"], rtol=1e-4, atol=1e-6
    )
    assert all(x.kind == "sum" for x in step.loss_transfers)


@pytest.mark.filterwarnings("ignore:micro_batches=.* runs forward once more")
def test_the_budget_has_the_forward_passes_before_the_gradients():
    def loss(p, b):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        h = jax.lax.scan(jax.checkpoint(layer), b["x"], p["w"])[0]
        fractions = jax.nn.one_hot(h.argmax(-1), INPUTS).mean(0)
        return jnp.square(h).mean() + (fractions * jax.nn.softmax(h).mean(0)).sum()

    pair = ({"w": jnp.full((3, INPUTS, INPUTS), 0.1)}, optax.sgd(0.1))
    state, plan = gshard.shard_train_state(
        pair, mesh_of(4, 1), "p_g_os", min_shard_size=16, scan_axes={"w": 0}
    )
    step = gshard.make_train_step(loss, plan, micro_batches=4)
    found = gshard.audit(step, state, batch(0, 48))
    assert found.exceeded == ()
    gathered = found.elements("all-gather")
    assert gathered == step.budget.elements("all-gather")
    # Forward and backward pass, and one more forward pass.
    assert 2 * gathered == 3 * gshard.budget(plan, micro_batches=4).elements("all-gather")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_masked_mean_in_float16_does_not_overflow_as_its_sum_would(micro_batches):
    """With a loss scale of the user's own: the gradient of the sum is not in float16's range."""

    def loss(p, b):
        h = (b["x"].astype(jnp.float16) @ p["w"].astype(jnp.float16)).astype(jnp.float32)
        return 2.0**14 * (jnp.abs(h).sum(1) * b["mask"]).sum() / b["mask"].sum()

    mesh = mesh_of(4, 1)
    pair = ({"w": jnp.ones((INPUTS, HIDDEN))}, optax.sgd(1.0))
    state, plan = gshard.shard_train_state(pair, mesh, "os_g", min_shard_size=16)
    rows = batch(0, 4 * 64)
    rows["mask"][:] = 1
    step = gshard.make_train_step(loss, plan, micro_batches=micro_batches)
    state, metrics = step(state, rows)
    wanted = jax.grad(loss)(pair[0], rows)["w"]
    assert metrics["skipped_steps"] == 0
    np.testing.assert_allclose(1 - plan.unwrap(state).params["w"], wanted, rtol=1e-2, atol=20)


@pytest.mark.parametrize("semantics", ["global", "per_micro_batch", "per_device"])
def test_a_python_number_of_the_batch_leaves_dtypes_alone(semantics):
    """As on one device: bfloat16 times it is bfloat16, and uint8 is uint8."""
    seen = set()

    def loss(p, b):
        seen.add((b["x"] * b["scale"]).dtype.name)
        seen.add((b["pixels"] * b["n"]).dtype.name)
        return jnp.mean(b["x"] * b["scale"] @ p["w"], dtype=jnp.float32)

    given = {"x": np.ones((16, 4), jnp.bfloat16), "pixels": np.ones((16, 4), np.uint8)}
    given |= {"scale": 0.5, "n": 2}
    state = {"w": jnp.ones((4, 8), jnp.bfloat16)}, optax.sgd(0.1)
    state, plan = gshard.shard_train_state(state, gshard.make_mesh(), "fsdp", min_shard_size=0)
    step = gshard.make_train_step(loss, plan, loss_semantics=semantics, micro_batches=2)
    _, metrics = step(state, given)
    assert metrics["loss"] == 2 and seen == {"bfloat16", "uint8"}
