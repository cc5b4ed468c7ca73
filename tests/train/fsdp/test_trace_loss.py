"""Losses that refer to a mesh: hints over data axes, names of axes, `shard_map` inside the loss."""

from __future__ import annotations

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
    with pytest.warns(gshard.GShardWarning, match="also those over model alone"):
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


@ignored
@pytest.mark.parametrize("level", ["os", "p_g_os"])
@pytest.mark.parametrize(
    "spec, extra",
    [
        (jax.P("shard"), None),
        (jax.P(None, ("shard",)), None),
        (jax.P("shard", "model"), {"model": 2}),
    ],
)
def test_a_named_sharding_over_data_axes_is_a_hint(spec, extra, level):
    mesh = gshard.make_mesh(extra=extra)

    def hint(x):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def loss(params, x):
        y = jax.jit(hint)(hint(x @ params["w"]))
        return jax.lax.scan(lambda y, _: (hint(jnp.tanh(hint(y))), None), y, None, 2)[0].mean()

    assert_same_step(loss, plain, mesh, level=level)


@ignored
def test_what_a_hint_says_of_the_users_own_axes_stays():
    mesh = gshard.make_mesh(extra={"model": 2})

    def loss(params, x):
        sharding = NamedSharding(mesh, jax.P("shard", "model"))
        return jax.lax.with_sharding_constraint(x @ params["w"], sharding).mean()

    params = {"w": np.ones((8, 8), np.float32)}
    state, plan = gshard.shard_train_state((params, optax.sgd(1.0)), mesh, "os", min_shard_size=8)
    text = gshard.make_train_step(loss, plan).lower(state, X).as_text()
    assert '[{}, {"model"}]' in text and '[{"shard"}, {"model"}]' not in text


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
        assert_same_step(loss, plain, gshard.make_mesh())
    with (
        pytest.warns(gshard.GShardWarning, match="over the axis 'batch'"),
        pytest.raises(gshard.GShardError, match=rf"index along 'batch' \(.*{HERE}:\d+\)"),
    ):
        one_step(loss, gshard.make_mesh(replica=2), loss_semantics="per_device")


@ignored
@pytest.mark.parametrize("semantics, k", [("global", 1), ("per_device", 2)])
def test_a_shard_map_over_the_users_own_axes(semantics, k):
    def loss(params, x):
        columns = jax.shard_map(
            lambda y: jax.lax.psum(jnp.tanh(jnp.tanh(y)).sum(), "model"),
            in_specs=jax.P(None, "model"),
            out_specs=jax.P(),
            axis_names={"model"},
            check_vma=False,
        )
        return jax.checkpoint(columns)(x @ params["w"]) / x.size

    mesh = gshard.make_mesh(extra={"model": 2})
    assert_same_step(loss, plain, mesh, micro_batches=k, loss_semantics=semantics)


@ignored
@pytest.mark.parametrize("spec", [jax.P("shard"), jax.P()])
@pytest.mark.parametrize("extra", [None, {"model": 2}])
def test_a_shard_map_over_data_axes_is_refused(spec, extra):
    mesh = gshard.make_mesh(extra=extra)

    def loss(params, x):
        inside = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=spec, out_specs=spec)
        return jax.jit(inside)(x @ params["w"]).mean()

    with pytest.raises(gshard.GShardError, match="calls jax.shard_map.*leave out mesh="):
        one_step(loss, mesh)


@ignored
def test_the_line_of_a_refused_shard_map():
    mesh = gshard.make_mesh(extra={"model": 2})

    def loss(params, x):
        inside = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
        return inside(x @ params["w"]).mean()

    with pytest.raises(gshard.GShardError, match=rf"jax.shard_map \(.*{HERE}:\d+\)"):
        one_step(loss, mesh, loss_semantics="per_device")


EXPLICIT = {
    "einsum": lambda x, spec: jnp.einsum("ij->ij", x, out_sharding=spec),
    "zeros": lambda x, spec: x + jnp.zeros(x.shape, out_sharding=spec),
    "reshard": jax.sharding.reshard,
    "auto_axes": lambda x, spec: jax.sharding.auto_axes(jnp.tanh, out_sharding=spec)(x),
}


@pytest.mark.parametrize("axis", ["shard", "absent"])
@pytest.mark.parametrize("name", EXPLICIT)
def test_shardings_for_explicit_axes_are_refused(name, axis):
    def loss(params, x):
        return EXPLICIT[name](x @ params["w"], jax.P(axis, None)).mean()

    words = rf"asks for a sharding .*{HERE}:\d+\) with out_sharding=.*of type Explicit"
    with pytest.raises(gshard.GShardError, match=words):
        one_step(loss, gshard.make_mesh())


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
