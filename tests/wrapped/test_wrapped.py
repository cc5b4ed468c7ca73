"""What a user may do to wrapped models and optimizers between two calls, or during one."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import gshard

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")
ZRO = gshard.pytorch.ZeroRedundancyOptimizer


class Net(nnx.Module):
    """A kernel that three devices pad, and statistics."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(7, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.first(x))


def loss_fn(model, x):
    return (model(x) ** 2).mean()


def linear(seed=0):
    return nnx.Linear(7, 4, rngs=nnx.Rngs(seed))


def rows(seed=0, n=6):
    return np.random.default_rng(seed).normal(size=(n, 7)).astype("f4")


def three():
    return gshard.distributed.new_group([0, 1, 2])


def wrap(model, tx, level="os", **options):
    call = gshard.paddle.group_sharded_parallel
    small = {"segment_size": 0} if level == "p_g_os" else {}
    return call(model, tx, level, group=three(), **small, **options)


def ddp():
    return gshard.pytorch.DistributedDataParallel(Net(), process_group=three())


@pytest.mark.parametrize("calls", [1, 2])
def test_the_scale_may_change_while_gradients_wait(calls):
    """A second model steps, and the scale doubles: it is not the scale of what waits."""
    settings = gshard.GradScaler(init_loss_scaling=1024.0, incr_every_n_steps=1)
    model, optimizer, scaler = wrap(linear(), optax.sgd(0.1), scaler=settings)
    other, its, _ = wrap(linear(1), optax.sgd(0.1), scaler=scaler)
    plain, alone, _ = wrap(linear(), optax.sgd(0.1))
    for seed in range(calls):
        found = model.backward(scaler.scale(loss_fn), rows(seed))
        other.backward(scaler.scale(loss_fn), rows(seed))
        scaler.step(its)
        scaler.update()
        its.clear_grad()
        assert found == plain.backward(loss_fn, rows(seed))
    assert scaler.loss_scaling == 1024 * 2**calls
    scaler.step(optimizer)
    alone.step()
    wanted = plain.state_dict()
    for name, x in model.state_dict().items():
        np.testing.assert_allclose(x, wanted[name], rtol=1e-6)


def test_a_learning_rate_that_is_kept_as_an_integer():
    """optax keeps the type of learning_rate=1; 0.5 would become 0."""
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=1)
    _, optimizer, _ = wrap(linear(), tx)
    with pytest.raises(gshard.GShardError, match=r"as int32, .* Build it with a float"):
        optimizer.set_lr(0.5)
    optimizer.set_lr(2)
    assert optimizer.get_lr() == 2
    saved = optimizer.state_dict()
    (name,) = (name for name in saved if name.endswith("learning_rate"))
    with pytest.raises(gshard.GShardError, match="learning_rate has fractions, and int32"):
        optimizer.set_state_dict({**saved, name: np.float32(0.5)})
    optimizer.set_state_dict({**saved, name: np.float32(3)})
    assert optimizer.get_lr() == 3


def moved_to_one_device(model):
    model.first.kernel.set_raw_value(jax.device_put(np.ones((7, 4), "f4"), jax.devices()[0]))


def without_padding(model):
    model.first.kernel.set_raw_value(jnp.ones((7, 4)))


@pytest.mark.parametrize("act", ["backward", "call"])
def test_arrays_that_were_moved_are_named_and_put_back(act):
    model, optimizer, _ = wrap(Net(), optax.adam(0.1))
    values, sharding = model.state_dict(), model.first.kernel[...].sharding
    moved_to_one_device(model)
    with pytest.raises(gshard.GShardError, match="^first/kernel: these arrays .* other devices"):
        model(rows()) if act == "call" else model.backward(loss_fn, rows())
    model.set_state_dict(values)
    assert model.first.kernel[...].sharding == sharding
    model.backward(loss_fn, rows())
    optimizer.step()


def test_a_value_without_padding_is_padded_as_the_error_says():
    model, _, _ = wrap(Net(), optax.adam(0.1), "p_g_os", exclude_layer=["BatchNorm"])
    values, shape = model.state_dict(), model.first.kernel[...].shape
    assert shape != (7, 4)
    without_padding(model)
    with pytest.raises(gshard.GShardError, match="Set full values with model.set_state_dict"):
        model.backward(loss_fn, rows())
    model.set_state_dict(values)
    assert model.first.kernel[...].shape == shape
    model.backward(loss_fn, rows())


@pytest.mark.parametrize("level", ["os", "os_g", "ZeroRedundancyOptimizer"])
def test_gradients_have_the_shapes_of_the_parameters(level):
    def scaled(grads, params):
        return jax.tree.map(lambda g, p: g / jnp.std(g) + 0.1 * p, grads, params)

    net, x = nnx.Linear(130, 131, rngs=nnx.Rngs(0)), np.ones((6, 130), "f4")  # three devices pad
    if level.startswith("os"):
        model, optimizer, _ = wrap(net, optax.sgd(0.1), level)
    else:
        model = gshard.pytorch.DistributedDataParallel(net, process_group=three())
        optimizer = ZRO(model, optax.sgd, lr=0.1)
    assert model.plan.grads["kernel"].padding
    model.backward(loss_fn, x)
    assert model.grads is model.grads
    assert model.grads["kernel"].sharding == model.kernel[...].sharding
    model.grads = scaled(model.grads, nnx.state(model, nnx.Param))
    model.backward(loss_fn, x)  # is added
    optimizer.step()
    params, grads = nnx.state(net, nnx.Param), nnx.grad(loss_fn)(net, x)
    wanted = jax.tree.map(lambda p, s, g: p - 0.1 * (s + g), params, scaled(grads, params), grads)
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(value, wanted[name][...], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inside", [jax.jit, jax.grad, jax.vmap], ids=lambda f: f.__name__)
def test_gradients_may_be_read_inside_a_trace(inside):
    net = nnx.Linear(130, 131, rngs=nnx.Rngs(0))  # three devices pad
    model, optimizer, _ = wrap(net, optax.sgd(0.1))
    model.backward(loss_fn, np.ones((6, 130), "f4"))
    found = inside(lambda x: x.sum() * optax.tree.norm(model.grads))(jnp.ones(2))
    np.testing.assert_allclose(found.sum(), 2 * optax.tree.norm(model.grads), rtol=1e-6)
    optimizer.step()
    model.backward(loss_fn, np.ones((6, 130), "f4"))


@pytest.mark.parametrize("partition", ["even", "greedy"])
def test_parameters_that_the_user_sets_may_be_on_one_device(partition):
    model = Net()
    optimizer = ZRO(model, optax.sgd, three(), partition=partition, lr=1.0)
    moved_to_one_device(model)
    optimizer.step(jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    assert not np.any(model.first.kernel[...])


class Widths(nn.Module):
    widths: list

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.Dense(width)(x)
        return x


@pytest.mark.parametrize(
    "module", [nn.Sequential([nn.Dense(5), nn.tanh, nn.Dense(4)]), Widths([5, 4])], ids=type
)
def test_a_linen_module_may_have_lists(module):
    variables = module.init(jax.random.key(0), rows())
    model, optimizer, _ = wrap((module, variables), optax.sgd(0.1), "p_g_os")
    model.backward(loss_fn, rows())
    optimizer.step()
    assert model.backward._of_loss[loss_fn, False]._jitted._cache_size() == 1
    model.clear_gradients()
    model.backward(loss_fn, rows())
    assert model.backward._of_loss[loss_fn, False]._jitted._cache_size() == 1

    def loss(variables):
        return (module.apply(variables, rows()) ** 2).mean()

    wanted = jax.tree.map(lambda x, g: x - 0.1 * g, variables, jax.grad(loss)(variables))
    found = model.state_dict()
    for path, x in jax.tree_util.tree_leaves_with_path(wanted["params"]):
        name = ".".join(key.key for key in path)
        np.testing.assert_allclose(found[name], x, rtol=1e-5, atol=1e-6)
    with pytest.raises(gshard.GShardError, match='Pass all that .* or {"params": params}'):
        wrap((module, variables["params"]), optax.sgd(0.1))


class DropoutNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


def test_a_linen_module_with_dropout_and_batch_statistics_says_how_to_wrap_it():
    module, x = DropoutNet(), rows()
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    model, _, _ = wrap((module, variables), optax.sgd(0.1))
    with pytest.raises(
        gshard.GShardError, match=r"its collection 'batch_stats' .*mutable=\['batch"
    ):
        model.backward(loss_fn, x)

    def updated(model, x):
        return (model(x, mutable=["batch_stats"]) ** 2).mean()

    with pytest.raises(gshard.GShardError, match=r"ToNNX\(module, rngs=nnx.Rngs\(0\)\)"):
        model.backward(updated, x)
    keyed = nnx.bridge.ToNNX(module, rngs=nnx.Rngs(0)).lazy_init(x)
    model, _, _ = wrap(keyed, optax.sgd(0.1))
    before = np.asarray(model.state_dict()["BatchNorm_0.mean"])
    losses = {float(model.backward(updated, x)) for _ in range(2)}
    assert len(losses) == 2  # other random numbers
    assert np.any(np.asarray(model.state_dict()["BatchNorm_0.mean"]) != before)


def interrupted(monkeypatch, call):
    """Ctrl-C while a call waits for an earlier one."""
    other = gshard.paddle.DataParallel(linear(), group=three())
    for _ in range(4):  # so many run at the same time
        other(rows())

    def wait(x):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(jax, "block_until_ready", wait)
        call()


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupted_backward_loses_nothing(overlap, monkeypatch):
    models = {}
    for is_cut in (False, True):
        models[is_cut] = model = ddp()
        optimizer = ZRO(model.parameters(), optax.adam, overlap_with_ddp=overlap, lr=0.1)

        def call(model=model):
            model.backward(loss_fn, rows())

        with model.no_sync():
            model.backward(loss_fn, rows())
            interrupted(monkeypatch, call) if is_cut else call()
        interrupted(monkeypatch, call) if is_cut else call()
        optimizer.step()
    found, wanted = (models[is_cut].state_dict() for is_cut in (True, False))
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


def test_what_a_failed_call_has_used_up_is_said(monkeypatch):
    """As when Ctrl-C comes between a call and the storing of its results."""
    model = ddp()
    optimizer = ZRO(model.parameters(), optax.adam, lr=0.1)
    with model.no_sync():
        model.backward(loss_fn, rows())
        for x in jax.tree.leaves((model.backward._pending, model.backward._buffers)):
            x.delete()
    with pytest.raises(gshard.GShardError, match="used up .* model.clear_gradients()"):
        model.backward(loss_fn, rows())
    model.clear_gradients()
    model.backward(loss_fn, rows())

    def accept(*_):
        raise KeyboardInterrupt

    saved = optimizer.state_dict()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optimizer._engine, "accept", accept)
        optimizer.step()
    with pytest.raises(gshard.DonatedStateError, match="Make the optimizer again"):
        optimizer.step()
    optimizer = ZRO(model.parameters(), optax.adam, lr=0.1)
    optimizer.load_state_dict(saved)
    model.backward(loss_fn, rows())
    optimizer.step()


def test_a_scalar_that_differs_between_the_inputs_of_join_is_refused():
    model = ddp()
    inputs = [[{"x": rows(i), "t": float(t)} for t in range(2)] for i in range(3)]
    with gshard.pytorch.Join([model]) as join:
        assert [batch["t"] for batch in join(inputs[0], inputs[1][:1], inputs[2])] == [0, 1]
    own = [[{"x": rows(i), "t": float(i)}] for i in range(3)]
    with (
        gshard.pytorch.Join([model]) as join,
        pytest.raises(gshard.GShardError, match=r"a scalar .* differs .*: 0.0, 1.0, 2.0"),
    ):
        list(itertools.chain(join(*own)))


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_unwrap_gives_the_users_own_classes(level):
    """They have no padding, and a call leaves them as they are."""
    made = Net()
    expected = made(rows())
    model, optimizer, _ = wrap(Net(), optax.adam(0.1), level)
    plain, plain_optimizer = model.plan.unwrap((model, optimizer))
    assert type(plain) is Net and type(plain_optimizer) is nnx.Optimizer
    assert type(model) is not Net and not hasattr(plain, "plan")
    np.testing.assert_allclose(plain(rows()), expected, rtol=1e-5, atol=1e-6)
    grads = nnx.grad(loss_fn)(plain, rows())
    plain_optimizer.update(plain, grads)
    assert plain.first.kernel.shape == (7, 4)
    again, _, _ = wrap(plain, optax.adam(0.1), level)
    assert type(again) is not Net


def test_a_parameter_that_is_a_number_of_python():
    """Flax keeps it as it is, gshard makes it an array."""

    class Net(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(2.0)

        def __call__(self, x):
            return x * self.scale[...]

    for made in (
        gshard.pytorch.DistributedDataParallel(Net()),
        gshard.paddle.DataParallel(Net()),
        gshard.paddle.group_sharded_parallel(Net(), optax.sgd(0.1), "os")[0],
    ):
        np.testing.assert_array_equal(made(np.ones((8, 2), np.float32)), 2 * np.ones((8, 2)))


def test_no_sync_computes_in_float16_with_the_scale_that_the_scaler_knows():
    """A multiple of it, such as the number of examples, would overflow."""
    model = gshard.pytorch.DistributedDataParallel(
        nnx.Linear(4, 1, dtype=jnp.float16, rngs=nnx.Rngs(0)), process_group=three()
    )

    def scaled(model, x):
        return 1024 * model(x).astype("f4").mean()

    inputs = np.ones((3 * 128, 4), np.float32)
    with model.no_sync():
        model.backward(scaled, inputs)
    model.backward(scaled, inputs)
    for x in jax.tree.leaves(model.grads):
        np.testing.assert_allclose(x, 2 * 1024.0)


class Configured(nnx.Module):
    """Keeps what has no hash, as models in PyTorch do."""

    def __init__(self):
        self.channels = [4, 4]
        self.config = {"width": [7]}
        self.out = nnx.Linear(7, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.out(x) * len(self.channels)


def test_a_model_may_have_attributes_without_a_hash():
    model = gshard.pytorch.DistributedDataParallel(Configured(), process_group=three())
    plain = nnx.value_and_grad(loss_fn)(Configured(), rows())
    np.testing.assert_allclose(model.backward(loss_fn, rows()), plain[0], rtol=1e-6)
    for x, y in zip(jax.tree.leaves(model.grads), jax.tree.leaves(plain[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model(rows()), Configured()(rows()), rtol=1e-6)


class Synchronized(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.other = nnx.Linear(7, 4, rngs=rngs), nnx.Linear(7, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, axis_name="shard", rngs=rngs)

    def __call__(self, x):
        return self.norm(self.first(x))


def test_unused_parameters_are_found_next_to_a_synchronized_norm():
    model = gshard.paddle.DataParallel(Synchronized(), group=three(), find_unused_parameters=True)
    with pytest.warns(gshard.GShardWarning, match=r"does not use other/bias, other/kernel"):
        model.backward(loss_fn, rows())


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (2**32 + 5, "outside the range of int32"),
        (-(2**31) - 1, "outside the range"),
        (1.5, "fractions"),
    ],
)
def test_a_state_dict_does_not_wrap_integers(value, said):
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.calls = nnx.BatchStat(jnp.int32(3))

    model = gshard.pytorch.DistributedDataParallel(Counting(), process_group=three())
    values = {**model.state_dict(), "calls": np.asarray(value)}
    with pytest.raises(gshard.GShardError, match=said):
        model.load_state_dict(values)
    model.load_state_dict({**values, "calls": np.int64(2**31 - 1)})
    assert model.calls[...] == 2**31 - 1


def test_attributes_of_pytorch_that_would_do_nothing_cannot_be_set():
    """Setting one would make an attribute of the user's model, which nothing reads."""
    model = gshard.paddle.DataParallel(Net())
    with pytest.raises(gshard.GShardError, match=r"has no attribute 'require_backward.*no_sync"):
        model.require_backward_grad_sync = False
    with pytest.raises(gshard.GShardError, match=r"model.train\(\) and model.eval\(\)"):
        model.training = False
    model.note = "mine"

    class Trains(Net):
        training = True

    own = gshard.paddle.DataParallel(Trains())
    own.training = False
    assert not own.training and model.note == "mine"
