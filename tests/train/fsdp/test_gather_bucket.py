"""Small leaves of a layer share collectives where they are gathered and scattered."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard._util.jaxpr import all_equations
from gshard.analysis.hlo import read_program
from gshard.train.comm.buckets import layer_names
from tests.tiers import quick

WIDTH, LAYERS = 12, 3


def layer(x, p):
    """Products, a scale and a bias; the last product is used through a view and a cast."""
    y = jnp.tanh(x * p["scale"] @ p["up"] + p["bias"])
    return x + (y.astype(jnp.bfloat16) @ p["down"].astype(jnp.bfloat16).T).astype(x.dtype)


def unrolled(p, batch):
    x = batch
    for i in range(LAYERS):
        x = layer(x, p[f"block_{i}"])
    return jnp.square(x @ p["head"]["kernel"]).mean()


def checkpointed(p, batch):
    x = batch
    for i in range(LAYERS):
        x = jax.checkpoint(layer)(x, p[f"block_{i}"])
    return jnp.square(x @ p["head"]["kernel"]).mean()


def scanned(p, batch):
    x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), batch, p["blocks"])
    return jnp.square(x @ p["head"]["kernel"]).mean()


def params(stacked=False):
    rng = np.random.default_rng(0)

    def random(*shape):
        return (rng.normal(size=shape) / np.sqrt(WIDTH)).astype(np.float32)

    blocks = [
        {
            "scale": 1 + random(WIDTH),
            "up": random(WIDTH, 25),  # divides by 5 alone: padded
            "bias": random(25),
            "down": random(WIDTH, 25),
        }
        for _ in range(LAYERS)
    ]
    head = {"head": {"kernel": random(WIDTH, 7)}}
    if stacked:
        return head | {"blocks": jax.tree.map(lambda *x: np.stack(x), *blocks)}
    return head | {f"block_{i}": block for i, block in enumerate(blocks)}


LOSSES = {"unrolled": unrolled, "checkpoint": checkpointed, "scan": scanned}


def rows(n):
    return np.random.default_rng(1).normal(size=(4 * n, WIDTH)).astype(np.float32)


def made(name, level, shape, stacked=False, **options):
    """`(params, batch) -> (loss, gradient)` of a loss or a name, sharded parameters and a batch."""
    n = int(np.prod(list(shape.values())))
    mesh = gshard.make_mesh(shape, devices=jax.devices()[:n])
    stacked = stacked or name == "scan"
    state, plan = gshard.shard_train_state(
        (params(stacked), optax.sgd(0.1)),
        mesh,
        level,
        min_shard_size=4,
        scan_axes={"blocks/": 0} if stacked else None,
    )
    loss = LOSSES.get(name, name)
    fun = jax.jit(gshard.value_and_grad(loss, plan, **options))
    return fun, state, plan, rows(n)


def counts(text):
    kinds = ("all_gather", "reduce_scatter")
    return tuple(text.count(f'"stablehlo.{kind}"') for kind in kinds)


MESHES = [{"a": 4}, {"a": 3}, {"a": 7}, {"a": 2, "b": 4}]


@pytest.mark.parametrize(
    "level, shape, name",
    quick(
        itertools.product(["os_g", "p_g_os"], MESHES, LOSSES),
        [
            ("os_g", {"a": 4}, "unrolled"),
            ("p_g_os", {"a": 3}, "unrolled"),
            ("os_g", {"a": 3}, "checkpoint"),
            ("p_g_os", {"a": 4}, "checkpoint"),
            ("os_g", {"a": 2, "b": 4}, "scan"),
            ("p_g_os", {"a": 3}, "scan"),
        ],
    ),
    ids=str,
)
def test_they_change_no_bit(name, level, shape):
    """Those of one device, to rounding; and those of leaf by leaf exactly."""
    found = []
    for size in (0, 2**23):
        fun, state, plan, batch = made(name, level, shape, bucket_size=size)
        # Otherwise XLA may leave out a rounding to bfloat16 in one program and not in another.
        exact = {"xla_allow_excess_precision": False}
        compiled = fun.lower(state.params, batch).compile(compiler_options=exact)
        value, grads = compiled(state.params, batch)
        whole = jax.tree.map(lambda x, g: x.unpad(np.asarray(g)), plan.grads, grads)
        found.append((value, whole))
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    expected = jax.value_and_grad(LOSSES[name])(params(stacked=name == "scan"), batch)
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())  # bfloat16 within


def test_a_layer_is_one_collective_each_way():
    """The kernel that moves in bfloat16 shares none: a bucket has one dtype."""
    fun, state, _, batch = made("unrolled", "p_g_os", {"a": 4})
    # Forward two for a layer and the head; again for a layer both, but for the last product's.
    assert counts(fun.lower(state.params, batch).as_text()) == (4 * LAYERS + 1, 2 * LAYERS + 1)
    fun, state, _, batch = made("unrolled", "p_g_os", {"a": 4}, bucket_size=0)
    # The scale is no operand of a product: it stays gathered. So does the bias.
    assert counts(fun.lower(state.params, batch).as_text()) == (6 * LAYERS + 1, 4 * LAYERS + 1)


def test_parameters_that_are_cast_share_a_bucket_of_their_compute_dtype():
    def half(p, batch):
        x = batch.astype(jnp.bfloat16)
        for i in range(LAYERS):
            block = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p[f"block_{i}"])
            x = x + jnp.tanh(x * block["scale"] @ block["up"] + block["bias"]) @ block["down"].T
        return jnp.square(x.astype(jnp.float32) @ p["head"]["kernel"]).mean()

    fun, state, _, batch = made(half, "p_g_os", {"a": 4})
    text = fun.lower(state.params, batch).as_text()
    assert counts(text) == (2 * LAYERS + 1, LAYERS + 1)
    gathered = [line for line in text.splitlines() if '"stablehlo.all_gather"' in line]
    assert sum("bf16" in line.rsplit("->", 1)[1] for line in gathered) == 2 * LAYERS


@pytest.mark.parametrize("level", ["os", "os_g"])
def test_gradients_alone_where_parameters_are_replicated(level):
    fun, state, _, batch = made("unrolled", level, {"a": 4})
    assert counts(fun.lower(state.params, batch).as_text()) == (0, 2 * LAYERS + 1)


@pytest.mark.parametrize("name", ["scan", "checkpoint"])
def test_the_backward_pass_of_a_layer_gathers_them_together_too(name):
    fun, state, plan, batch = made(name, "p_g_os", {"a": 4})
    program = fun.lower(state.params, batch)
    turns = 1 if name == "scan" else LAYERS
    assert counts(program.as_text()) == (4 * turns + 1, 2 * turns + 1)
    report = gshard.audit(fun, state.params, batch, plan=plan)
    budgeted = gshard.budget(plan)
    assert report.elements("all-gather") <= budgeted.elements("all-gather")
    assert report.elements("reduce-scatter") == budgeted.elements("reduce-scatter")
    if name == "scan":
        found = read_program(program.compile().as_text()).collectives
        inside = [c for c in found if c.kind == "all-gather" and c.times == LAYERS]
        stored = {k: x.layer().stored_size for k, x in plan.params["blocks"].items()}
        bucket = stored["scale"] + stored["up"] + stored["bias"]
        assert sorted(c.elements for c in inside) == sorted([bucket, stored["down"]] * 2)


def test_a_bucket_ends_where_it_is_full():
    fun, state, _, batch = made("unrolled", "p_g_os", {"a": 4}, bucket_size=400)
    whole, *_ = made("unrolled", "p_g_os", {"a": 4})
    assert counts(fun.lower(state.params, batch).as_text()) > counts(
        whole.lower(state.params, batch).as_text()
    )


def test_parameters_that_a_sub_group_keeps_are_gathered_one_by_one():
    fun, state, _, batch = made("unrolled", "p_g_os", {"a": 4}, reshard_after_forward=2)
    value, grads = fun(state.params, batch)
    expected, _ = jax.value_and_grad(unrolled)(params(), batch)
    np.testing.assert_allclose(value, expected, rtol=1e-2)
    assert counts(fun.lower(state.params, batch).as_text())[1] == 4 * LAYERS + 1


def test_leaves_over_an_axis_of_the_user_share_a_bucket_in_their_local_shapes():
    """Rows of data over `data`, columns of every kernel over `model`."""
    mesh = gshard.make_mesh(extra={"model": 2}, devices=jax.devices()[:6])
    sharding = jax.NamedSharding(mesh, jax.P(None, "model"))
    rng = np.random.default_rng(2)
    given = {
        f"block_{i}": {
            name: jax.device_put(rng.normal(size=(6, 8)).astype(np.float32) / 3, sharding)
            for name in ("up", "gate")
        }
        for i in range(LAYERS)
    }

    def loss(p, batch):
        x = batch
        for block in p.values():
            x = x + (jnp.tanh(x @ block["up"]) * (x @ block["gate"])) @ jnp.ones((8, 6)) / 8
        return jnp.square(x).mean()

    state, plan = gshard.shard_train_state(
        (given, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=4
    )
    assert plan.params["block_0"]["up"].model_axes == ((), ("model",))
    batch = rng.normal(size=(6, 6)).astype(np.float32)
    fun = jax.jit(gshard.value_and_grad(loss, plan))
    value, grads = fun(state.params, batch)
    expected_value, expected = jax.value_and_grad(loss)(jax.tree.map(np.asarray, given), batch)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    moved = {row.kind: row.count for row in gshard.audit(fun, state.params, batch).collectives}
    assert moved["reduce-scatter"] == LAYERS
    # Again all but the last one, and the first, before which nothing needs a gradient; JAX 0.10 on
    # CPU merges them with those of the forward pass.
    assert moved["all-gather"] in (LAYERS, 2 * LAYERS - 2)


def square_blocks():
    rng = np.random.default_rng(4)
    return {
        f"block_{i}": {
            "w": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 4,
            "b": rng.normal(size=(WIDTH,)).astype(np.float32),
        }
        for i in range(LAYERS)
    }


def of_square_blocks(loss, **options):
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state(
        (square_blocks(), optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=4
    )
    return jax.jit(gshard.value_and_grad(loss, plan, **options)), state, plan


def test_a_leaf_used_in_one_layer_and_again_in_another_is_gathered_once():
    """Tied over layers, with a bias that is used twice within one; the last layer is not used."""

    def loss(p, batch):
        x = jnp.tanh(batch @ p["block_0"]["w"] + p["block_0"]["b"])
        x = jnp.tanh(x @ p["block_1"]["w"] + p["block_1"]["b"] + p["block_0"]["b"])
        return jnp.square(x @ p["block_0"]["w"]).mean()

    fun, state, plan = of_square_blocks(loss)
    value, grads = fun(state.params, rows(4))
    expected_value, expected = jax.value_and_grad(loss)(square_blocks(), rows(4))
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    moved = gshard.audit(fun, state.params, rows(4), plan=plan)
    budgeted = gshard.budget(plan)
    for kind in ("all-gather", "reduce-scatter"):
        assert moved.elements(kind) <= budgeted.elements(kind)


def test_a_parameter_given_twice_to_a_checkpoint_is_gathered_once():
    @jax.checkpoint
    def there_and_back(x, w, again, b):
        return jnp.tanh(jnp.tanh(x @ w + b) @ again.T)

    def loss(p, batch):
        x = batch
        for block in p.values():
            x = there_and_back(x, block["w"], block["w"], block["b"])
        return jnp.square(x).mean()

    fun, state, plan = of_square_blocks(loss)
    _, grads = fun(state.params, rows(4))
    expected = jax.grad(loss)(square_blocks(), rows(4))
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    moved, budgeted = gshard.audit(fun, state.params, rows(4)), gshard.budget(plan)
    for kind in ("all-gather", "reduce-scatter"):
        assert moved.elements(kind) <= budgeted.elements(kind)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_parameter_that_is_gathered_early_gathers_no_layer(dtype):
    """The bias, which its own layer needs and a checkpoint: it moves once for both, at its cast."""

    def loss(p, batch):
        half = jax.tree.map(lambda w: w.astype(dtype), p)
        x = batch.astype(dtype)
        for block in half.values():
            x = jnp.tanh(x @ block["w"])
            x = jax.checkpoint(lambda x, b: jnp.sin(x * b))(x + block["b"], block["b"])
        return jnp.square(x.astype(jnp.float32)).mean()

    fun, state, _ = of_square_blocks(loss)
    lines = fun.lower(state.params, rows(4)).as_text().splitlines()
    first = ("stablehlo.dot_general", "call @repeated")  # layers that repeat may be calls
    product = next(i for i, line in enumerate(lines) if any(word in line for word in first))
    early = [line for line in lines[:product] if '"stablehlo.all_gather"' in line]
    assert len(early) == LAYERS + 1 and sum("-> tensor<12x12x" in line for line in early) == 1


def test_a_bucket_waits_though_its_first_use_is_a_broadcast():
    """Which is used with nothing: what came before counts. A leaf used twice waits too."""

    def loss(p, batch):
        x = batch
        for block in p.values():
            x = jnp.tanh(((x + block["b"]) * block["b"]) @ block["w"])
        return jnp.square(x).mean()

    for sync in (False, True):
        fun, state, _ = of_square_blocks(loss, prefetch=not sync)
        text = fun.lower(state.params, rows(4)).as_text()
        assert counts(text) == (2 * LAYERS - 1, LAYERS)
        # Forward all but the first layer (or two), backward all but the last.
        waits = LAYERS - 1 if sync else LAYERS - 2
        assert text.count("stablehlo.optimization_barrier") == waits + LAYERS - 1


def test_a_scan_computes_nothing_of_the_user_again():
    """A function with a derivative of its own has the form of what gathers layers."""

    @jax.custom_vjp
    def own(x):
        return jnp.tanh(x)

    def forward(x):
        y = own(x)
        return y, y

    own.defvjp(forward, lambda y, g: (g * (1 - y**2),))

    def loss(p, batch):
        def body(x, p):
            return x + own(x @ p["up"] * 2) @ p["down"].T, None

        x, _ = jax.lax.scan(body, batch, p["blocks"])
        return jnp.square(x @ p["head"]["kernel"]).mean()

    found = []
    for reshard in (False, True):
        options = {"stacked": True, "reshard_after_forward": reshard}
        fun, state, *_ = made(loss, "p_g_os", {"a": 4}, **options)
        jaxpr = jax.make_jaxpr(fun)(state.params, rows(4)).jaxpr
        found.append(sum(eqn.primitive.name == "tanh" for eqn in all_equations(jaxpr)))
    assert found == [1, 1]


@pytest.mark.parametrize(
    "path, expected",
    [
        ("params/block_3/up/kernel", "params/block_3"),
        ("params/block_3/norm_1/scale", "params/block_3"),
        ("bert12/layer/0/query", "bert12/layer/0"),
        ("embed/table", "embed"),
        ("w1", "w1"),
        ("table", ""),
    ],
)
def test_the_layer_of_a_path(path, expected):
    others = ["params/block_4/up/kernel", "bert12/layer/1/query", "w2", "b2", "norm_0/scale"]
    assert layer_names([path, *others])[0] == expected
