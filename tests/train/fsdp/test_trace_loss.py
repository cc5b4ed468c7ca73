"""Losses that refer to a mesh: hints over data axes, names of axes, `shard_map` inside the loss."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding

import gshard

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 32, (16, 8))
X = RNG.normal(size=(16, 8)).astype(np.float32)
HERE = __file__.rsplit("/", 1)[-1]
ignored = pytest.mark.filterwarnings("ignore:.*(metadata of|no parameter is sharded over)")


def names(axis):
    """The layers' initializers in the style of nanodo, annotated for an FSDP of the model's own."""
    init = nn.initializers.lecun_normal()
    return lambda *dims: nn.with_partitioning(init, tuple(axis if d else None for d in dims))


class Annotated(nn.Module):
    """An attention and an MLP whose every kernel and activation names the axis `axis`."""

    axis: str

    @nn.compact
    def __call__(self, t):
        init, heads = names(self.axis), (2, 8)
        x = nn.Embed(32, 16, embedding_init=init(0, 1))(t)
        q, k, v = (nn.DenseGeneral(heads, kernel_init=init(1, 0, 0))(x) for _ in range(3))
        weights = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k))
        out = jnp.einsum("bhlm,bmhd->blhd", weights, v)
        x += nn.DenseGeneral(16, axis=(-2, -1), kernel_init=init(0, 0, 1))(out)
        x += nn.Dense(16, kernel_init=init(0, 1))(nn.gelu(nn.Dense(32, kernel_init=init(1, 0))(x)))
        x = nn.with_logical_constraint(x, ("b", "l", "d"), rules=[("b", self.axis)])
        return nn.Dense(32, kernel_init=init(1, 0))(x)


def next_token(axis):
    model = Annotated(axis)

    def loss(params, t):
        logits = model.apply({"params": params}, t)
        return optax.softmax_cross_entropy_with_integer_labels(logits, (t + 1) % 32).mean()

    return loss, model.init(jax.random.key(0), TOKENS)["params"]


@cache
def on_one_device(axis, steps=3):
    loss, params = next_token(axis)
    for _ in range(steps):
        grads = jax.jit(jax.grad(loss))(params, TOKENS)
        params = jax.tree.map(lambda x, g: x - 0.5 * g, params, grads)
    return jax.tree.leaves(params)


def train_annotated(axis, mesh, level, **options):
    loss, params = next_token(axis)
    state, plan = gshard.shard_train_state((params, optax.sgd(0.5)), mesh, level, min_shard_size=8)
    step = gshard.make_train_step(loss, plan, **options)
    for _ in range(3):
        state, _ = step(state, TOKENS)
    params = jax.tree.leaves(plan.unwrap(state).params)
    for found, wanted in zip(params, on_one_device(axis), strict=True):
        np.testing.assert_allclose(found, wanted, atol=3e-6)


@ignored
@pytest.mark.parametrize("level", ["dp", "os", "os_g", "p_g_os"])
def test_a_model_annotated_over_the_data_axis_trains_unchanged(level):
    train_annotated("data", gshard.make_mesh({"data": 8}), level, micro_batches=2)


@ignored
def test_an_annotation_over_an_axis_that_the_mesh_lacks_warns_and_is_ignored():
    with pytest.warns(gshard.GShardWarning, match=rf"{HERE}:\d+\), and the mesh has no axis 'dat"):
        train_annotated("data", gshard.make_mesh(), "p_g_os")


@ignored
def test_ignored_constraints_over_model_axes_are_said():
    with pytest.warns(gshard.GShardWarning, match="including those over model alone"):
        train_annotated("shard", gshard.make_mesh(extra={"model": 2}), "p_g_os")


def one_step(loss, mesh, level="p_g_os", **options):
    """The parameters after one step, and the step's plan."""
    params = {"w": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)}
    state, plan = gshard.shard_train_state((params, optax.sgd(1.0)), mesh, level, min_shard_size=8)
    state, _ = gshard.make_train_step(loss, plan, **options)(state, X)
    return params, np.asarray(plan.unwrap(state).params["w"])


def assert_same_step(loss, plain, mesh, **options):
    params, found = one_step(loss, mesh, **options)
    wanted = params["w"] - jax.grad(plain)(params, X)["w"]
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def plain(params, x):
    return jnp.tanh(jnp.tanh(x @ params["w"])).mean()


SPECS = [
    jax.P("shard"),
    jax.P(None, ("shard",)),
    jax.P("shard", "model"),
    jax.P(("shard", "model")),
]


def hinted(hint):
    """`plain`, with hints at every place that a loss has."""

    @jax.custom_vjp
    def tanh(x):
        return hint(jnp.tanh(hint(x)))

    tanh.defvjp(lambda x: (tanh(x), tanh(x)), lambda y, g: (hint(g * (1 - y * y)),))

    def twice(y, w):
        # the loop over the parameters alone runs as it was traced
        w = jax.lax.scan(lambda w, _: (jax.jit(hint)(hint(w)), None), w, None, 2)[0]
        return tanh(hint(y)) + 0 * w[0, 0]

    def loss(params, x):
        y = jax.jit(hint)(hint(x @ params["w"]))
        step = jax.checkpoint(lambda y: twice(y, params["w"]))
        return jax.lax.scan(lambda y, _: (step(y), None), y, None, 2)[0].mean()

    return loss


@ignored
@pytest.mark.parametrize("level", ["dp", "os_g", "p_g_os"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("bare", [True, False])
def test_a_constraint_over_data_axes_is_a_hint(bare, spec, level):
    mesh = gshard.make_mesh(extra={"model": 2})
    sharding = spec if bare else NamedSharding(mesh, spec)
    loss = hinted(lambda x: jax.lax.with_sharding_constraint(x, sharding))
    assert_same_step(loss, plain, mesh, level=level)


@ignored
def test_a_hint_in_a_branch():
    def loss(params, x):
        hint = lambda y: jax.lax.with_sharding_constraint(y, jax.P("shard"))  # noqa: E731
        y = jax.lax.cond(params["w"][0, 0] > 5, hint, lambda y: jnp.tanh(hint(y)), x @ params["w"])
        return jnp.tanh(jax.nn.relu(y) - jax.nn.relu(-y)).mean()

    assert_same_step(loss, plain, gshard.make_mesh(extra={"model": 2}))


@ignored
@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"loss_semantics": "per_device"}])
def test_a_hint_of_another_kind_of_loss(options):
    loss = hinted(lambda x: jax.lax.with_sharding_constraint(x, jax.P("shard", "model")))
    assert_same_step(loss, plain, gshard.make_mesh(extra={"model": 2}), **options)


@ignored
def test_a_constraint_over_an_axis_that_the_mesh_lacks_warns_and_is_ignored():
    loss = hinted(lambda x: jax.lax.with_sharding_constraint(x, jax.P("data", "model")))
    with pytest.warns(gshard.GShardWarning, match=rf"{HERE}:\d+\), and the mesh has no axis 'dat"):
        assert_same_step(loss, plain, gshard.make_mesh(extra={"model": 2}))


@ignored
@pytest.mark.parametrize("level", ["dp", "p_g_os"])
def test_a_hint_in_evaluation_and_in_a_loop_of_your_own(level):
    loss = hinted(lambda x: jax.lax.with_sharding_constraint(x, jax.P("shard", "model")))
    params = {"w": np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)}
    mesh = gshard.make_mesh(extra={"model": 2})
    state, plan = gshard.shard_train_state((params, optax.sgd(1.0)), mesh, level, min_shard_size=8)
    value, grads = jax.value_and_grad(plain)(params, X)
    np.testing.assert_allclose(gshard.make_eval_step(loss, plan)(state, X), value, atol=1e-6)
    found, found_grads = jax.jit(gshard.value_and_grad(loss, plan))(state.params, X)
    np.testing.assert_allclose(found, value, atol=1e-6)
    np.testing.assert_allclose(found_grads["w"], grads["w"], atol=1e-6)


@ignored
def test_a_constraint_to_another_mesh_is_ignored():
    other = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    loss = hinted(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(other, jax.P("x"))))
    assert_same_step(loss, plain, gshard.make_mesh())


AFTER_A_CONSTRAINT = {
    "relu": jax.nn.relu,
    "full_like": lambda y: y * jnp.full_like(y, 2.0),
    "dropout": lambda y: nn.Dropout(0.5, deterministic=False).apply(
        {}, y, rngs={"dropout": jax.random.key(3)}
    ),
}


@ignored
@pytest.mark.parametrize("level", ["os", "p_g_os"])
@pytest.mark.parametrize("name", AFTER_A_CONSTRAINT)
@pytest.mark.parametrize("own", ["the mesh of the plan", "one with model axes", "one device"])
def test_what_follows_a_constraint_of_a_mesh_has_the_gradient_of_one_device(own, name, level):
    """The result of such a constraint has that mesh in its type, which JAX compares later."""
    after, mesh = AFTER_A_CONSTRAINT[name], gshard.make_mesh()
    if own == "one with model axes":
        mesh = gshard.make_mesh(extra={"model": 2})
    here = (
        jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]) if own == "one device" else mesh
    )

    def loss(params, x, constrained=True):
        y = x @ params["w"]
        if constrained:
            y = jax.lax.with_sharding_constraint(y, NamedSharding(here, jax.P()))
        return jnp.square(after(y)).mean()

    assert_same_step(loss, lambda p, x: loss(p, x, constrained=False), mesh, level=level)


@ignored
def test_a_constraint_to_another_mesh_beside_model_axes_is_said():
    other = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])

    def loss(params, x):
        y = jax.lax.with_sharding_constraint(x @ params["w"], NamedSharding(other, jax.P()))
        return jnp.tanh(jnp.tanh(y)).mean()

    with pytest.warns(gshard.GShardWarning, match="ignored with it.*JAX says: Closing over"):
        assert_same_step(loss, plain, gshard.make_mesh(extra={"model": 2}))


@ignored
def test_a_constraint_to_one_device_in_loops():
    """JAX compares the types of what a loop carries, with their meshes."""
    other = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    loss = hinted(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(other, jax.P())))
    assert_same_step(loss, plain, gshard.make_mesh())


def test_types_that_differ_in_a_loop_are_refused_in_the_words_of_jax():
    def loss(params, x):
        half = lambda y, _: (y.astype(jnp.bfloat16), None)  # noqa: E731
        return jax.lax.scan(half, x @ params["w"], None, 2)[0].mean()

    with pytest.raises(TypeError, match="equal types(.|\n)*float32(.|\n)* bfloat16"):
        one_step(loss, gshard.make_mesh())


@ignored
def test_a_constraint_that_does_not_fit_its_array_is_refused_in_the_words_of_jax():
    loss = hinted(lambda x: jax.lax.with_sharding_constraint(x, jax.P("shard", None, "model")))
    with pytest.raises(gshard.GShardError, match=rf"{HERE}:\d+\).*JAX says: .*rank at least 3"):
        assert_same_step(loss, plain, gshard.make_mesh(extra={"model": 2}))


@ignored
def test_an_error_of_the_loss_itself_stays():
    def loss(params, x):
        raise ValueError("values of rank 3 are needed")

    with pytest.raises(ValueError, match="^values of rank 3 are needed"):
        assert_same_step(loss, plain, gshard.make_mesh())


@ignored
@pytest.mark.parametrize("axis, bare", [("shard", True), ("shard", False), ("data", True)])
def test_what_a_hint_says_of_the_users_own_axes_stays(axis, bare):
    mesh = gshard.make_mesh(extra={"model": 2})
    spec = jax.P(axis, "model")

    def loss(params, x):
        sharding = spec if bare else NamedSharding(mesh, spec)
        return jax.lax.with_sharding_constraint(x @ params["w"], sharding).mean()

    params = {"w": np.ones((8, 8), np.float32)}
    state, plan = gshard.shard_train_state((params, optax.sgd(1.0)), mesh, "os", min_shard_size=8)
    step = gshard.make_train_step(loss, plan)
    with pytest.warns(gshard.GShardWarning) if axis == "data" else nullcontext():
        text = step.lower(state, X).as_text()
    assert '[{}, {"model"}]' in text and '{"shard"}, {"model"}]' not in text


def normalized(axis):
    """A loss of normalized activations, with their statistics over `axis`; None: of one device."""
    norm = nn.BatchNorm(use_running_average=False, axis_name=axis, momentum=0.9)

    def loss(params, x):
        variables = {"params": {"scale": jnp.ones(8), "bias": jnp.zeros(8)}}
        y, _ = norm.apply(variables, x @ params["w"], mutable=["batch_stats"])

        def most(y, _):
            largest = jax.lax.stop_gradient(jnp.abs(y).max())
            return y * (jax.lax.pmax(largest, axis) if axis else largest), None

        return jnp.tanh(jax.lax.scan(most, y, None, 1)[0] * x).mean()

    return loss


@pytest.mark.parametrize("level", ["os", "p_g_os"])
@pytest.mark.parametrize("replica", [1, 2])
def test_an_axis_name_of_the_models_own_stands_for_the_data_axes(replica, level):
    mesh = gshard.make_mesh(replica=replica)
    with pytest.warns(gshard.GShardWarning, match="over the axis 'batch'.*plan.data_axes") as said:
        assert_same_step(normalized("batch"), normalized(None), mesh, level=level)
    assert not any("not a mean" in str(one.message) for one in said)


def test_an_index_along_such_a_name_needs_one_data_axis():
    def loss(params, x):
        return plain(params, x) * (1 + 0 * jax.lax.axis_index("batch"))

    with pytest.warns(gshard.GShardWarning, match="over the axis 'batch'"):
        assert_same_step(loss, plain, gshard.make_mesh(), loss_semantics="per_device")
    with (
        pytest.warns(gshard.GShardWarning, match="over the axis 'batch'"),
        pytest.raises(gshard.GShardError, match=rf"axis_index at .*{HERE}:\d+ runs over 'shard'"),
    ):
        one_step(loss, gshard.make_mesh())
    with (
        pytest.warns(gshard.GShardWarning, match="over the axis 'batch'"),
        pytest.raises(gshard.GShardError, match=rf"axis_index\('batch'\) \(.*{HERE}:\d+\)"),
    ):
        one_step(loss, gshard.make_mesh(replica=2), loss_semantics="per_device")


@pytest.mark.parametrize("semantics", ["global", "per_device"])
def test_inputs_of_the_loss_have_the_type_of_its_results(semantics):
    """Mesh included: Equinox compares old and new state by it."""

    def loss(params, x):
        for one in (params["w"], x):
            assert jax.eval_shape(lambda x=one: x) == jax.eval_shape(lambda x=one: x + 1)
        return plain(params, x)

    one_step(loss, gshard.make_mesh(), loss_semantics=semantics)


def test_an_error_of_the_loss_itself_passes():
    def loss(params, x):
        raise ValueError("my own shard_mapping is wrong")

    with pytest.raises(ValueError, match="my own"):
        one_step(loss, gshard.make_mesh())


def loss_and_metrics(params, x):
    """A loss, and metrics that need all examples at once, of a second forward pass."""
    z = jnp.tanh(x @ params["v"]) @ params["v"].T
    other = jnp.tanh(x @ params["v"] / 2) @ params["v"].T
    return (z**2).mean(), {"rmse": jnp.sqrt((other**2).mean()), "largest": (z @ z.T).max()}


@pytest.mark.parametrize("semantics", ["global", "per_device"])
def test_metrics_that_a_loss_drops_cost_nothing(semantics):
    params = {"v": RNG.normal(size=(8, 64)).astype(np.float32)}
    mesh, found = gshard.make_mesh(devices=jax.devices()[:2]), []
    for loss in (lambda p, x: loss_and_metrics(p, x)[0], lambda p, x: dropped(p, x)):
        state, plan = gshard.shard_train_state(
            (params, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=0
        )
        step = gshard.make_train_step(loss, plan, loss_semantics=semantics)
        text = step.lower(state, X).as_text()
        found.append((text.count("all_gather"), step.loss_transfers))
    assert found[0] == found[1]


def dropped(params, x):
    """The loss without the metrics."""
    return ((jnp.tanh(x @ params["v"]) @ params["v"].T) ** 2).mean()


def test_metrics_that_a_loss_drops_are_not_refused_with_micro_batches():
    params = {"v": RNG.normal(size=(8, 64)).astype(np.float32)}
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), gshard.make_mesh(), "dp")
    step = gshard.make_train_step(
        lambda p, x: loss_and_metrics(p, x)[0], plan, micro_batches=2, gather_limit=8
    )
    _, metrics = step(state, X)
    np.testing.assert_allclose(metrics["loss"], dropped(params, X), rtol=1e-6)


ONCE = {
    "an axis that the mesh lacks": (
        lambda p, x: lax.with_sharding_constraint(x @ p, jax.P("u", "v")).mean(),
        "no axis 'u' or 'v': the constraint",
    ),
    "an axis name that nothing binds": (
        lambda p, x: lax.pmean((x @ p).mean(), ("u", "v")),
        "axis 'u' .* and the axis 'v' ",
    ),
    "a batch that is not read": (lambda p, x: p.sum(), "reads no array of its batch"),
}


@pytest.mark.parametrize("name", ONCE)
def test_several_axes_are_warned_of_once(name):
    loss, says = ONCE[name]
    mesh = gshard.make_mesh(sequence=2)
    state, plan = gshard.shard_train_state(
        (jnp.ones((8, 8)), optax.sgd(0.1)), mesh, "os", min_shard_size=0
    )
    with pytest.warns(gshard.GShardWarning, match=says) as said:
        gshard.make_train_step(loss, plan).lower(state, jnp.ones((8, 8)))
    assert len(said) == 1
