"""A mesh axis of the user's own (tensor parallelism) next to the data axes, at every level."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding

import gshard
from tests.reference import assert_same_leaves, flat

LEVELS = ["dp", "os", "os_g", "p_g_os"]
MESHES = {"4x2": (1, 2), "2x4": (1, 4), "2x2x2": (2, 2)}  # replicas, and devices of the model axis
LAYERS, ROWS = 4, 16
STEPS = 3


def dense(width: int, *names, **more):
    kernel = nn.with_partitioning(nn.initializers.lecun_normal(), names)
    bias = nn.with_partitioning(nn.initializers.normal(), names[1:])
    return nn.Dense(width, kernel_init=kernel, bias_init=bias, **more)


class Block(nn.Module):
    """A column-parallel layer, then a row-parallel one."""

    @nn.compact
    def __call__(self, x, _=None):
        h = dense(40, None, "model", name="up")(nn.LayerNorm(name="norm")(x))
        return x + dense(13, "model", None, name="down")(jnp.tanh(h)), None


class Stacked(nn.Module):
    """Scanned and rematerialised; 13 does not divide."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(13, name="first")(x)
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(name="layers")(x, None)
        return nn.Dense(5, name="last")(x)


def batch(seed: int = 0):
    rng = np.random.default_rng(seed)
    shapes = {"x": (ROWS, 7), "y": (ROWS, 5)}
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


def loss_fn(params, b):
    return jnp.mean((Stacked().apply({"params": params}, b["x"]) - b["y"]) ** 2)


@functools.cache
def boxed():
    return Stacked().init(jax.random.key(0), batch()["x"])["params"]


def initial():
    return nn.meta.unbox(boxed())


TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-5))


def mesh_of(name: str):
    replica, model = MESHES[name]
    return gshard.make_mesh(replica=replica, extra={"model": model})


def divided(name: str, level: str, params=None, tx=TX, **options):
    params = boxed() if params is None else params
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    options = {"min_shard_size": 8, "scan_axes": {"^layers/": 0}, **options}
    return gshard.shard_train_state(state, mesh_of(name), level, **options)


@pytest.fixture(scope="module")
def expected():
    params, opt_state = initial(), TX.init(initial())

    @jax.jit
    def step(params, opt_state, b):
        grads = jax.grad(loss_fn)(params, b)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for i in range(STEPS):
        params, opt_state = step(params, opt_state, batch(i))
    return flat(params)


def assert_laid_out(state, plan):
    for x, wanted in zip(
        jax.tree.leaves(plan.kind.split(state)),
        jax.tree.leaves(plan.abstract_components()),
        strict=True,
    ):
        assert x.sharding.is_equivalent_to(wanted.sharding, x.ndim), (x.sharding, wanted)


def over_the_users_axis(audit):
    """(kind, elements) of what moves over it, but single numbers."""
    return sorted(
        (row.kind, row.dtype, row.elements)
        for row in audit.collectives
        if "model" in (row.axes or ()) and not row.scalar
    )


QUICK = {("4x2", "p_g_os"), ("2x4", "os_g")}
ALL = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow], id="-".join(case))
    for case in [(mesh, level) for mesh in MESHES for level in LEVELS]
]


@pytest.mark.parametrize("name, level", ALL)
def test_a_level_together_with_tensor_parallelism(expected, name, level):
    """The numbers of one device, and over the user's axis what plain tensor parallelism moves."""
    state, plan = divided(name, level)
    kernel = plan.params["layers"]["up"]["kernel"].value
    assert kernel.model_axes == ((), (), ("model",))
    step = gshard.make_train_step(loss_fn, plan, donate=False)
    found = gshard.audit(step, state, batch())

    places = [NamedSharding(plan.mesh, x.model_spec) for x in jax.tree.leaves(plan.params)]
    places = jax.tree.unflatten(jax.tree.structure(initial()), places)
    rows = NamedSharding(plan.mesh, plan.batch_spec)
    plain = jax.jit(jax.value_and_grad(loss_fn), in_shardings=(places, rows))
    tensor_parallel = over_the_users_axis(gshard.audit(plain, initial(), batch(), plan=plan))
    assert tensor_parallel, "activations are summed over the model axis"
    assert over_the_users_axis(found) == tensor_parallel
    for kind in ("reduce-scatter", "all-gather", "all-reduce"):
        moved = sum(
            row.elements
            for row in found.collectives
            if row.kind == kind and not row.scalar and "model" not in row.axes
        )
        budgeted = [m for m in found.budget.communicated if m.kind == kind]
        assert moved <= sum(m.elements for m in budgeted)
        if not any(m.at_most for m in budgeted):
            assert moved == sum(m.elements for m in budgeted)

    for i in range(STEPS):
        state, _ = step(state, batch(i))
    assert_laid_out(state, plan)
    # Sums of other lengths are rounded otherwise.
    assert_same_leaves(flat(gshard.full_params(state)), expected, 2e-6, relative_to="tree")


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("level", LEVELS)
def test_micro_batches_together_with_tensor_parallelism(expected, name, level):
    state, plan = divided(name, level)
    step = gshard.make_train_step(loss_fn, plan, micro_batches=2)
    for i in range(STEPS):
        state, _ = step(state, batch(i))
    assert_laid_out(state, plan)
    assert_same_leaves(flat(gshard.full_params(state)), expected, 2e-6, relative_to="tree")


def small_loss(params, b):
    h = jnp.tanh(b["x"] @ params["up"] + params["bias"])
    return jnp.mean((h @ params["down"] - b["y"]) ** 2)


def small_params():
    rng = np.random.default_rng(3)
    shapes = {"up": (7, 26), "bias": (26,), "down": (26, 5)}
    return {k: rng.normal(size=s).astype(np.float32) / 3 for k, s in shapes.items()}


SPECS = {"up": jax.P(None, "model"), "bias": jax.P("model"), "down": jax.P("model", None)}


def placed(mesh, params=None):
    """Plain parameters whose own sharding is over the user's axis."""
    params = small_params() if params is None else params
    return {k: jax.device_put(x, NamedSharding(mesh, SPECS[k])) for k, x in params.items()}


def small_state(level, **options):
    mesh = gshard.make_mesh(extra={"model": 2}, devices=jax.devices()[:6])
    state = TrainState.create(apply_fn=None, params=placed(mesh), tx=optax.adam(1e-2))
    options = {"min_shard_size": 4, **options}
    return gshard.shard_train_state(state, mesh, level, **options)


def small_batch(rows=12):
    return {k: np.resize(x, (rows, x.shape[1])) for k, x in batch(5).items()}


def trained_small(steps: int, tx=None, frozen=()):
    tx = tx or optax.adam(1e-2)
    params = small_params()
    opt_state = tx.init(params)
    for _ in range(steps):
        grads = jax.grad(small_loss)(params, small_batch())
        grads = {k: np.zeros_like(g) if k in frozen else g for k, g in grads.items()}
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return flat(params)


@pytest.mark.parametrize("level", [pytest.param("os_g", marks=pytest.mark.slow), "p_g_os"])
def test_the_own_loop_and_separate_calls(level):
    state, plan = small_state(level)
    assert plan.params["up"].model_axes == ((), ("model",))
    part = gshard.value_and_grad(small_loss, plan, sync=False)

    @jax.jit
    def own_step(state, b):
        halves = [jax.tree.map(lambda x, i=i: x[i * 6 : i * 6 + 6], b) for i in (0, 1)]
        sums = [part(state.params, half)[1] for half in halves]
        loss, grads = gshard.reduce_gradients(sums[0] + sums[1], plan)
        return state.apply_gradients(grads=grads), loss

    for _ in range(2):
        state, _ = own_step(state, gshard.shard_batch(small_batch(), plan))
    assert_laid_out(state, plan)
    assert_same_leaves(flat(gshard.full_params(state)), trained_small(2), 2e-6, relative_to="tree")


def test_frozen_parameters_precision_and_evaluation():
    state, plan = small_state("p_g_os", frozen="^up$", precision=gshard.Precision("float32"))
    frozen = plan.non_trainable["frozen parameters"]["up"]
    assert frozen.model_axes == ((), ("model",)) and frozen.dim == 0
    step = gshard.make_train_step(small_loss, plan)
    for _ in range(2):
        state, _ = step(state, small_batch())
    expected = trained_small(2, frozen=("up",))
    assert_same_leaves(flat(gshard.full_params(state)), expected, 2e-6, relative_to="tree")
    evaluate = gshard.make_eval_step(small_loss, plan)
    np.testing.assert_allclose(
        evaluate(state, small_batch()), small_loss(expected, small_batch()), rtol=1e-5
    )
    restored = plan.unwrap(state)
    np.testing.assert_array_equal(restored.params["up"], small_params()["up"])

    low, plan = small_state("p_g_os", precision="bfloat16")
    assert plan.master["up"].model_axes == ((), ("model",))
    low, metrics = gshard.make_train_step(small_loss, plan)(low, small_batch())
    assert_laid_out(low, plan)
    np.testing.assert_allclose(
        metrics["loss"], small_loss(small_params(), small_batch()), rtol=2 * 2.0**-8
    )


def test_examples_are_sharded_over_the_data_axes_alone():
    state, plan = small_state("os_g")
    rows = gshard.shard_batch(small_batch(3), plan)
    assert rows["x"].sharding.shard_shape(rows["x"].shape) == (1, 7)
    _, metrics = gshard.make_train_step(small_loss, plan)(state, rows)
    np.testing.assert_allclose(
        metrics["loss"], small_loss(small_params(), small_batch(3)), rtol=1e-5
    )


class Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        up = nnx.with_partitioning(init, (None, "model"))
        down = nnx.with_partitioning(init, ("model", None))
        self.up = nnx.Linear(7, 26, rngs=rngs, kernel_init=up)
        self.down = nnx.Linear(26, 5, rngs=rngs, kernel_init=down)
        self.norm = nnx.BatchNorm(5, rngs=rngs, axis_name=("shard",))

    def __call__(self, x):
        return self.norm(self.down(jnp.tanh(self.up(x))))


def nnx_loss(model, b):
    return jnp.mean((model(b["x"]) - b["y"]) ** 2)


def test_an_nnx_model_with_partitioned_layers_and_batch_statistics():
    def train(step_of, steps=2):
        with jax.set_mesh(mesh):  # Flax wants one where a Variable names its axes
            model = Nnx(nnx.Rngs(0))
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        return step_of(model, optimizer, steps)

    mesh = gshard.make_mesh(extra={"model": 2})

    def divided_steps(model, optimizer, steps):
        (model, optimizer), plan = gshard.shard_train_state(
            (model, optimizer), mesh, "p_g_os", min_shard_size=4
        )
        assert plan.params["up"]["kernel"].model_axes == ((), ("model",))
        step = gshard.make_train_step(nnx_loss, plan)
        for i in range(steps):
            step(model, optimizer, batch(i))
        model, _ = plan.unwrap((model, optimizer))
        return flat(model), np.asarray(model.norm.mean[...])

    def plain_steps(model, optimizer, steps):
        model.norm.axis_name = None

        @nnx.jit
        def step(model, optimizer, b):
            optimizer.update(model, nnx.grad(nnx_loss)(model, b))

        for i in range(steps):
            step(model, optimizer, batch(i))
        return flat(model), np.asarray(model.norm.mean[...])

    found, mean = train(divided_steps)
    expected, expected_mean = train(plain_steps)
    # A sum over examples in parts: BatchNorm divides by its root, which enlarges the rounding.
    assert_same_leaves(found, expected, 2e-5, relative_to="tree")
    np.testing.assert_allclose(mean, expected_mean, atol=1e-6)


@pytest.mark.parametrize("level", ["os", pytest.param("dp", marks=pytest.mark.slow)])
def test_the_own_loop_compiles_once(level):
    state, plan = small_state(level)

    @jax.jit
    def own_step(state, b):
        _, grads = gshard.value_and_grad(small_loss, plan)(state.params, b)
        return state.apply_gradients(grads=grads)

    rows = gshard.shard_batch(small_batch(), plan)
    for _ in range(2):
        state = own_step(state, rows)
    assert own_step._cache_size() == 1


def boxed_state(names, level="os_g", shape=(8, 6), mesh=None, box=nn.Partitioned, **options):
    mesh = mesh or gshard.make_mesh(extra={"model": 4})
    params = {"w": box(jnp.ones(shape), names)}
    made = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    return gshard.shard_train_state(made, mesh, level, min_shard_size=0, **options)


def test_logical_names_are_followed_by_their_rules():
    with nn.logical_axis_rules([("mlp", "model"), ("embed", None)]):
        _, plan = boxed_state(("mlp", "embed"), box=nn.LogicallyPartitioned)
    assert plan.params["w"].value.model_axes == (("model",), ())


def test_what_cannot_be_is_said():
    for names, shape, said in (
        ((None, "model"), (8, 6), r"dimension 1 of w \(8, 6\).*4 devices of the mesh axis model"),
        (("model", "model"), (8, 8), "name each mesh axis once"),
        ((None, "model"), (8,), "one entry for each dimension"),
    ):
        with pytest.raises(gshard.GShardError, match=said):
            boxed_state(names, shape=shape)
    with pytest.raises(
        gshard.GShardError,
        match="dimension 0 for w .*sharded over another mesh axis already: your own",
    ):
        boxed_state(("model", None), rules={"w": 0})
    for box in (nn.Partitioned, nn.LogicallyPartitioned):
        with pytest.warns(
            gshard.GShardWarning, match="no parameter is sharded over .* model.*rules"
        ):
            boxed_state((None, "embed"), box=box)
    two = gshard.make_mesh({"x": 2, "model": 4})
    with pytest.warns(gshard.GShardWarning, match=r"metadata of w names.*'model'.*\('x',\)"):
        boxed_state((None, "model"), mesh=two)
    with pytest.raises(gshard.GShardError, match="goes with one shard axis.*shard_axes="):
        gshard.make_mesh({"data": 4}, extra={"model": 2})
    with pytest.raises(gshard.GShardError, match=r"extra=\{'model': 3\} takes 3"):
        gshard.make_mesh(extra={"model": 3})
    with pytest.raises(gshard.GShardError, match="extra=2 must give axes their sizes"):
        gshard.make_mesh(extra=2)


def attention_loss(params, b):
    names = {
        "kernel_init": nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model", None))
    }
    layer = nn.DenseGeneral((2, 4), **names)
    return layer.apply({"params": params}, b["x"]).mean()


@pytest.mark.parametrize(
    "extra, said", [({"model": 2}, "JAX refuses.*flattens its kernel"), (None, "no axis 'model'")]
)
def test_names_that_flax_cannot_apply_are_ignored_with_a_warning(extra, said):
    params = {"kernel": np.ones((7, 2, 4), np.float32), "bias": np.ones((2, 4), np.float32)}
    mesh = gshard.make_mesh(extra=extra, devices=jax.devices()[:2])
    if extra:
        params = jax.device_put(params, NamedSharding(mesh, jax.P(None)))
        params["kernel"] = jax.device_put(
            params["kernel"], NamedSharding(mesh, jax.P(None, "model"))
        )
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "os", min_shard_size=0)
    step = gshard.make_train_step(attention_loss, plan)
    with pytest.warns(gshard.GShardWarning, match=said):
        state, metrics = step(state, batch())
    wanted = attention_loss(jax.tree.map(np.asarray, params), batch())
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
