"""Functions that make a `gshard.TrainSetup`, for tests that name one as `tests.setups:...`."""

from __future__ import annotations

import dataclasses
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

import gshard


def mlp(width: int = 256, layers: int = 3, precision: str | None = None) -> gshard.TrainSetup:
    """A multilayer perceptron in Linen, as `(params, tx)`."""
    net = nn.Sequential([nn.Dense(width) for _ in range(layers)])

    def init():
        return net.init(jax.random.key(0), jnp.zeros((1, width)))["params"], optax.adamw(1e-3)

    def loss(params, x):
        return jnp.square(net.apply({"params": params}, x)).mean()

    shard = {} if precision is None else {"precision": precision}
    return gshard.TrainSetup(init, loss, jax.ShapeDtypeStruct((1, width), jnp.float32), shard)


def quantized(width: int = 256, layers: int = 3) -> gshard.TrainSetup:
    """That of `mlp`, which sends its gradients in 8 bits."""
    return dataclasses.replace(mlp(width, layers), shard={"wire": "int8"})


def contrastive(width: int = 256, layers: int = 3) -> gshard.TrainSetup:
    """That of `mlp`, with the products of all pairs of examples in its loss."""
    setup = mlp(width, layers)

    def loss(params, x):
        return setup.loss_fn(params, x) + jax.nn.logsumexp(x @ x.T, axis=1).mean()

    return dataclasses.replace(setup, loss_fn=loss)


def adapters(width: int = 1024, layers: int = 4) -> gshard.TrainSetup:
    """Small ones are trained, next to large layers that are frozen."""

    def init():
        base, own = jnp.ones((layers, width, width)), jnp.ones((layers, width))
        return {"base": base, "own": own}, optax.adamw(1e-3)

    def layer(x, p):
        return jnp.tanh((x * p["own"]) @ p["base"]), None

    def loss(params, x):
        return jax.lax.scan(layer, x, params)[0].mean()

    shard = {"frozen": "^base$", "scan_axes": {"": 0}}
    return gshard.TrainSetup(init, loss, jnp.zeros((1, width)), shard)


class _State(TrainState):
    batch_stats: dict


def norm(width: int = 200) -> gshard.TrainSetup:
    """Linen with batch statistics, in a `TrainState` of its own."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            axis = ("shard",) if not self.is_initializing() else None
            return nn.BatchNorm(use_running_average=False, axis_name=axis)(nn.Dense(width)(x))

    net = Net()

    def init():
        made = net.init(jax.random.key(0), jnp.zeros((2, width)))
        return _State.create(
            apply_fn=net.apply,
            params=made["params"],
            tx=optax.sgd(1e-2, momentum=0.9),
            batch_stats=made["batch_stats"],
        )

    def loss(params, x, *, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        y, new = net.apply(variables, x, mutable=["batch_stats"])
        return jnp.square(y - 1).mean(), new

    return gshard.TrainSetup(init, loss, jnp.zeros((2, width)), step={"mutable": ("batch_stats",)})


def norm_of_each_device() -> gshard.TrainSetup:
    """The same, where the statistics are over all devices since the model says so."""
    setup = norm()
    return dataclasses.replace(setup, step={**setup.step, "loss_semantics": "per_device"})


def pair(width: int = 192) -> gshard.TrainSetup:
    """An NNX model and its optimizer."""

    def init():
        model = nnx.Linear(width, width, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def loss(model, x):
        return jnp.square(model(x)).mean()

    return gshard.TrainSetup(init, loss, jnp.zeros((1, width)))


def fails() -> gshard.TrainSetup:
    """Cannot be made."""
    raise RuntimeError("no such data set")


def refuses() -> gshard.TrainSetup:
    """Cannot be made, and says so itself."""
    raise gshard.GShardError("Choose one of [none] or [full].")


def breaks() -> gshard.TrainSetup:
    """Has a loss that fails as it is traced."""

    def loss(params, x):
        raise ZeroDivisionError("of the loss")

    return dataclasses.replace(mlp(), loss_fn=loss)


def talks() -> gshard.TrainSetup:
    """Prints."""
    print("a setup is made")
    made = mlp()

    def loss(params, x):
        print("a loss is traced")
        return made.loss_fn(params, x)

    return gshard.TrainSetup(made.state, loss, made.batch)


def leaves() -> gshard.TrainSetup:
    """Ends the program."""
    raise SystemExit(3)


def leaves_in_loss() -> gshard.TrainSetup:
    """Its loss ends the program."""

    def loss(params, x):
        raise SystemExit(4)

    return gshard.TrainSetup(mlp().state, loss, mlp().batch)


def interrupts() -> gshard.TrainSetup:
    """As Ctrl-C does."""
    raise KeyboardInterrupt


def warns() -> gshard.TrainSetup:
    """Warns."""
    warnings.warn("this model is old", DeprecationWarning, stacklevel=1)
    return mlp()


def fails_in_loss(width: int = 256) -> gshard.TrainSetup:
    """Its loss cannot be traced."""
    made = mlp(width)

    def loss(params, x):
        return (x @ jnp.zeros((3, 3))).mean()

    return gshard.TrainSetup(made.state, loss, made.batch)


NUMBER = 3
