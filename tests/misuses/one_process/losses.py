"""What the loss returns, reads and does."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.training.train_state import TrainState

import gshard
from tests.misuses.small import (
    ADAM,
    BATCH,
    EXAMPLES,
    alone,
    as_alone,
    kept,
    loss_fn,
    model_loss,
    pair,
    params,
    shard,
    train,
)
from tests.misuses.table import raw, refused, right, warned

CLOSED = {"w": np.ones((16, 8), np.float32), "b": np.zeros(8, np.float32)}


def one(loss: Any, **options: Any) -> Any:
    return train(BATCH, loss, **options)


class WithStatistics(TrainState):
    batch_stats: Any = None


def statistics_in_aux(aux: Any) -> Any:
    old = {"mean": np.ones(8)}
    state = WithStatistics.create(apply_fn=None, params=params(), tx=ADAM, batch_stats=old)
    new = lambda p, b: (loss_fn(p, b), aux({"mean": b["y"].mean(0)}))  # noqa: E731
    return train(BATCH, new, state, has_aux=True)


def with_dropout(p, b, rng=None):
    kept = 1 if rng is None else jax.random.bernoulli(rng, 0.5, b["x"].shape)
    return loss_fn(p, {**b, "x": b["x"] * kept})


class WithCache(WithStatistics):
    cache: Any = None


def one_of_two_fields(_):
    fields = {"batch_stats": jnp.zeros(8), "cache": jnp.zeros(3)}
    state = WithCache.create(apply_fn=None, params=params(), tx=ADAM, **fields)

    def loss(p, b, *, batch_stats, cache):
        return loss_fn(p, b), {"batch_stats": batch_stats + 1, "cache": cache + 1}

    train(BATCH, loss, state, mutable="batch_stats")


class WithMean(TrainState):
    mean: Any = None


def binds_a_field(make: Any) -> Any:
    """A partial gives the loss another mean than that of the state."""
    state = WithMean.create(apply_fn=None, params=params(), tx=ADAM, mean=jnp.zeros(8))
    state, plan = shard(state)
    found = gshard.make_eval_step(make(mean=np.full(8, 7.0, np.float32)), plan)(state, BATCH)
    return found, make(mean=np.full(8, 7.0, np.float32))(params(), BATCH)


def around_a_mean(p, b, *, mean):
    return loss_fn(p, b) + jnp.square(b["y"] - mean).mean()


def with_aux(aux: Any, **options: Any) -> Any:
    return one(lambda p, b: (loss_fn(p, b), aux(b)), has_aux=True, **options)


def per_device(loss: Any, **options: Any) -> Any:
    return one(loss, loss_semantics="per_device", **options)


def nnx_step(loss: Any) -> Any:
    sharded, plan = shard(pair())
    return gshard.make_train_step(loss, plan)(*sharded, BATCH)


def constrained(spec: Any) -> Any:
    def loss(p: Any, b: Any) -> Any:
        return loss_fn(p, {**b, "x": jax.lax.with_sharding_constraint(b["x"], spec)})

    return loss


def adds(model, batch):
    model.extra = nnx.Param(jnp.ones(()))
    return model_loss(model, batch)


def removes(model, batch):
    loss = model_loss(model, batch)
    del model.bias
    return loss


def by_numpy(p, b):
    return np.mean(np.asarray(b["x"]) @ np.asarray(p["w"]))


def by_python(p, b):
    return loss_fn(p, b) if float(b["x"].mean()) > 0 else 0.0


def by_if(p, b):
    return loss_fn(p, b) if b["x"].mean() > 0 else 0.0


def fetches(p, b):
    return loss_fn(p, jax.device_put(b, jax.devices()[0]))


def leaks(_):
    seen = []

    def loss(p, b):
        seen.append(p["w"])
        return loss_fn(p, b)

    one(loss)
    jnp.sum(seen[0])


def changes_its_parameters(p, b):
    p["w"] = p["w"] * 2
    return loss_fn(p, b)


def doubled(p, b):
    return loss_fn({**p, "w": p["w"] * 2}, b)


def changes_its_batch(p, b):
    b["x"] = b["x"] * 2
    return loss_fn(p, b)


def twice_the_batch(p, b):
    return loss_fn(p, {**b, "x": b["x"] * 2})


def closed_over(_):
    """Arrays of the caller's that the loss closes over."""
    offset = jnp.ones(8) * 3
    return as_alone(loss=lambda p, b: loss_fn({**p, "b": p["b"] + offset}, b))


def closed_over_metric(_):
    """An NNX object of the caller's that the loss changes."""
    metric = nnx.metrics.Average()

    def loss(p, b):
        metric.update(values=b["x"])
        return loss_fn(p, b)

    return one(loss)


def closed_over_sharded(_):
    """An array of a sharded state that the loss closes over."""
    other = shard(level="p_g_os")[0].params["w"]
    found = one(lambda p, b: loss_fn(p, b) + jnp.square(p["w"] - other).mean())[0]
    return found, alone(lambda p, b: loss_fn(p, b) + jnp.square(p["w"] - params()["w"]).mean())


def closed_over_key(_):
    """The same draws at every step, as with JAX on one device."""
    key = jax.random.key(7)
    return as_alone(loss=lambda p, b: loss_fn(p, b) * jax.random.uniform(key))


def closed_over_state(_):
    state, plan, _ = kept()
    step = gshard.make_train_step(lambda p, b: loss_fn(state.params, b), plan)
    step(kept()[0], BATCH)


def counts(_):
    """Python state that the loss changes is that of tracing."""
    seen = []

    def loss(p, b):
        seen.append(1)
        return loss_fn(p, b)

    return as_alone(loss=loss)


def switched(_):
    """A global that the loss reads is changed after the first step."""
    state, plan, _ = kept()
    scale = [1.0]
    step = gshard.make_train_step(lambda p, b: loss_fn(p, b) * scale[0], plan)
    state, first = step(state, BATCH)
    scale[0] = 0.0
    state, second = step(state, BATCH)
    return float(second["loss"]) > 0, True


class Callable_:
    def __call__(self, p, b):
        return loss_fn(p, b)


masked = np.arange(EXAMPLES) % 3 == 0


ROWS = {
    "it returns one number per example": refused(
        lambda _: one(lambda p, b: loss_fn(p, b) + b["x"][:, 0]),
        *("scalar", "(16,)", "gshard.Weighted"),
    ),
    "it returns an array of one number": refused(
        lambda _: one(lambda p, b: loss_fn(p, b)[None]), "scalar", "(1,)"
    ),
    "it returns an integer": refused(
        lambda _: one(lambda p, b: (b["x"] > 0).sum()), "floating", "int32"
    ),
    "it returns a complex number": refused(
        lambda _: one(lambda p, b: loss_fn(p, b) + 0j), "floating", "complex64"
    ),
    "it returns a boolean": refused(lambda _: one(lambda p, b: True), "floating", "bool"),
    "it returns text": refused(lambda _: one(lambda p, b: "loss"), "floating scalar", "'loss'"),
    "it returns a tuple without has_aux": refused(
        lambda _: one(lambda p, b: (loss_fn(p, b), {})), "tuple", "has_aux=True"
    ),
    "it returns a list": refused(lambda _: one(lambda p, b: [loss_fn(p, b)]), "a list"),
    "it returns nothing": refused(lambda _: one(lambda p, b: None), "floating scalar", "None"),
    "it returns a dict": refused(
        lambda _: one(lambda p, b: {"loss": loss_fn(p, b)}), "floating scalar", "a dict"
    ),
    "it returns a float": refused(lambda _: one(lambda p, b: 1.0), "does not depend on"),
    "it returns gradients, as value_and_grad does": refused(
        lambda _: one(jax.value_and_grad(loss_fn)), "tuple", "has_aux=True"
    ),
    "it needs rng": refused(
        lambda _: one(lambda p, b, *, rng: loss_fn(p, b)), "requires rng", "make_train_step(rng="
    ),
    "it needs a field that the state has not": refused(
        lambda _: one(lambda p, b, *, stats: loss_fn(p, b)), "requires stats"
    ),
    "it takes the batch first": raw(lambda _: one(lambda b, p: loss_fn(p, b)), KeyError, "x"),
    "it takes three arguments": refused(
        lambda _: one(lambda p, x, y: loss_fn(p, {"x": x, "y": y})), "requires y"
    ),
    "it takes one argument": refused(
        lambda _: one(lambda p: p["w"].sum()), "too many positional arguments"
    ),
    "it takes a state": refused(
        lambda _: one(lambda s, b: loss_fn(s.params, b)), "reads .params", "f(params, batch)"
    ),
    "it is the value of a loss": refused(
        lambda _: gshard.make_train_step(loss_fn(params(), BATCH), kept()[1]), "make_train_step"
    ),
    "it is None": refused(lambda _: gshard.make_train_step(None, kept()[1]), "make_train_step"),
    "it is a coroutine": refused(lambda _: one(waits), "coroutine"),
    "it is a generator": refused(lambda _: one(yields), "a generator"),
    "it is a partial function": right(lambda _: (one(functools.partial(scaled, 1.0))[0], alone())),
    "it is a partial function that binds a field of the state": right(
        lambda _: binds_a_field(lambda **bound: functools.partial(around_a_mean, **bound))
    ),
    "it is a jitted partial function that binds a field of the state": right(
        lambda _: binds_a_field(lambda **bound: jax.jit(functools.partial(around_a_mean, **bound)))
    ),
    "it is an object with __call__": right(lambda _: (one(Callable_())[0], alone())),
    "it is jitted": right(lambda _: (one(jax.jit(loss_fn))[0], alone())),
    "it closes over arrays": right(closed_over),
    "it closes over an array of a sharded state": right(closed_over_sharded),
    "it closes over the batch": warned(
        lambda _: one(lambda p, _: loss_fn(p, BATCH)), "reads no array of its batch", "every device"
    ),
    "it updates a metric that it closes over": refused(
        closed_over_metric, "MetricState of an NNX object", "losses.py", "has_aux=True"
    ),
    "it closes over a key": right(closed_over_key),
    "it reads other parameters than its own": refused(closed_over_state, "does not depend on"),
    "it reads constants instead of its parameters": refused(
        lambda _: one(lambda p, b: loss_fn(CLOSED, b)), "does not depend on", "frozen="
    ),
    "it stops all gradients": refused(
        lambda _: one(lambda p, b: loss_fn(jax.lax.stop_gradient(p), b)), "does not depend on"
    ),
    "it counts its calls": right(counts),
    "a global that it reads changes": right(switched),
    "it uses NumPy": raw(lambda _: one(by_numpy), jax.errors.TracerArrayConversionError, "numpy"),
    "it asks for a number with float()": raw(
        lambda _: one(by_python), jax.errors.ConcretizationTypeError, "concrete"
    ),
    "it asks if": raw(lambda _: one(by_if), jax.errors.TracerBoolConversionError, "boolean"),
    "it moves the batch to a device": right(lambda _: (one(fetches)[0], alone())),
    "it keeps a tracer": raw(leaks, jax.errors.UnexpectedTracerError, "leaked"),
    "it changes its dict of parameters": right(
        lambda _: (one(changes_its_parameters)[0], alone(doubled))
    ),
    "it changes its batch": right(lambda _: (one(changes_its_batch)[0], alone(twice_the_batch))),
    "it is a sum": right(lambda _: as_alone(loss=lambda p, b: EXAMPLES * loss_fn(p, b))),
    "it is a masked mean": right(
        lambda _: as_alone(
            {**BATCH, "mask": masked},
            lambda p, b: (
                jnp.sum(jnp.square(b["x"] @ p["w"] - b["y"]).mean(-1) * b["mask"]) / b["mask"].sum()
                + 0 * p["b"].sum()
            ),
        )
    ),
    "it sums over devices itself": refused(
        lambda _: one(lambda p, b: jax.lax.psum(loss_fn(p, b), "shard")), "psum"
    ),
    "it gathers its own value from all devices": refused(
        lambda _: one(lambda p, b: jax.lax.all_gather(loss_fn(p, b), "shard").sum()),
        *("all_gather", "runs over 'shard', a data axis"),
    ),
    "it averages over an axis that is not there": warned(
        lambda _: one(lambda p, b: jax.lax.pmean(loss_fn(p, b), "batch")),
        *("axis 'batch'", "axis_name=plan.data_axes"),
    ),
    "it averages over devices itself, with per_device": right(
        lambda _: (per_device(lambda p, b: jax.lax.pmean(loss_fn(p, b), "shard"))[0], alone())
    ),
    "it shards its batch by the axis of data": right(
        lambda _: (one(constrained(jax.P("shard")))[0], alone())
    ),
    "it replicates its batch": right(lambda _: (one(constrained(jax.P()))[0], alone())),
    "it is divided already, in a Weighted": right(
        lambda _: (one(lambda p, b: gshard.Weighted(loss_fn(p, b), 1))[0], alone())
    ),
    "the weight of a Weighted is an array": refused(
        lambda _: one(lambda p, b: gshard.Weighted(loss_fn(p, b), b["x"][:, 0])), "weight", "scalar"
    ),
    "the weight of a Weighted is None": refused(
        lambda _: one(lambda p, b: gshard.Weighted(loss_fn(p, b), None)), "weight", "None"
    ),
    "a number is added to a Weighted": refused(
        lambda _: one(
            lambda p, b: 1e-2 * jnp.abs(p["w"]).sum() + gshard.Weighted(loss_fn(p, b), 1)
        ),
        *("a sum and a weight", "w.sum + x * w.weight"),
    ),
    "it takes step= with a default, as if gshard passed it": warned(
        lambda _: one(lambda p, b, *, step=0: loss_fn(p, b) * (1 + step)), "step=", "its default"
    ),
    "it takes rng=None, and make_train_step has no rng=": warned(
        lambda _: gshard.make_train_step(with_dropout, kept()[1]), "takes rng=", "jax.random.key(0)"
    ),
    "it takes rng=None, and a partial has bound that": right(
        lambda _: (one(functools.partial(with_dropout, rng=None))[0], alone())
    ),
    "a Weighted is printed as a number": refused(
        lambda _: float(gshard.Weighted(jnp.ones(()), 2)), "not a number", "w.sum / w.weight"
    ),
    "a Weighted in a Weighted": refused(
        lambda _: one(lambda p, b: gshard.Weighted(gshard.Weighted(loss_fn(p, b), 1), 1)),
        "a Weighted",
    ),
    "it returns a Reduced": refused(
        lambda _: one(lambda p, b: gshard.Reduced(loss_fn(p, b), "sum")), "Reduced"
    ),
    "has_aux without aux": refused(
        lambda _: one(loss_fn, has_aux=True), "has_aux=True", "(loss, aux)"
    ),
    "aux is text": refused(lambda _: with_aux(lambda b: {"name": "a"}), "'name'", "'a'"),
    "aux is None": right(lambda _: (with_aux(lambda b: None)[0], alone())),
    "aux with a weight per example": refused(
        lambda _: with_aux(lambda b: {"m": gshard.Weighted(1.0, b["x"])}), "'m'", "scalar weight"
    ),
    "aux is integers, with per_device": refused(
        lambda _: with_aux(lambda b: {"ids": (b["x"] > 0).sum()}, loss_semantics="per_device"),
        *("'ids'", "int32", 'gshard.Reduced(x, "sum")'),
    ),
    "aux has one entry per example, with per_device": warned(
        lambda _: with_aux(lambda b: {"x": b["x"]}, loss_semantics="per_device"),
        "'x' has shape (2, 16)",
    ),
    "an unknown reduction of aux": refused(
        lambda _: with_aux(lambda b: gshard.Reduced(b["x"].sum(), "average")), "'average'", "mean"
    ),
    "mutable= names what the state has not": refused(
        lambda _: one(lambda p, b: (loss_fn(p, b), {"batch_stats": {}}), mutable="batch_stats"),
        *("'batch_stats'", "not a field of the state", "has_aux=True"),
    ),
    "batch statistics are returned in aux, and mutable= is forgotten": warned(
        lambda _: statistics_in_aux(lambda new: ({"batch_stats": new}, 3)),
        *("mutable='batch_stats'", "keeps its old value"),
    ),
    "batch statistics are aux, without a name": warned(
        lambda _: statistics_in_aux(lambda new: new), "mutable='batch_stats'"
    ),
    "batch statistics are returned deep in aux": warned(
        lambda _: statistics_in_aux(lambda new: {"loss": 1.0, "updates": {"batch_stats": new}}),
        "mutable='batch_stats'",
    ),
    "all updates are returned in aux as batch statistics": warned(
        lambda _: statistics_in_aux(lambda new: {"batch_stats": {"batch_stats": new}}),
        "mutable='batch_stats'",
    ),
    "metrics in aux have the keys of batch statistics": right(
        lambda _: (
            statistics_in_aux(lambda new: {"y": {"mean": new["mean"].mean()}})[0],
            alone(),
        )
    ),
    "mutable= names one of two fields for which the loss returns new values": warned(
        one_of_two_fields, "mutable=('batch_stats', 'cache')", "keeps its old ones"
    ),
    "mutable= of a loss that returns none": refused(
        lambda _: one(loss_fn, mutable="batch_stats"), "batch_stats"
    ),
    "an NNX loss adds a parameter": refused(
        lambda _: nnx_step(adds), "adds or removes Variables", "extra"
    ),
    "an NNX loss removes a parameter": refused(
        lambda _: nnx_step(removes), "adds or removes Variables", "bias"
    ),
    "rng= for an NNX loss": refused(
        lambda _: gshard.make_train_step(model_loss, shard(pair())[1], rng=jax.random.key(0))(
            *shard(pair())[0], BATCH
        ),
        *("rng=", "nnx.Rngs"),
    ),
    "an NNX loss that takes rng": refused(
        lambda _: nnx_step(lambda m, b, *, rng: model_loss(m, b)), "'rng'", "nnx.Rngs", "'key'"
    ),
    "a Linen loss for an NNX model": raw(lambda _: nnx_step(loss_fn), TypeError, "Linear"),
    "an NNX loss for a Linen state": raw(lambda _: one(model_loss), TypeError, "not callable"),
    "a loss whose error is its own": raw(
        lambda _: one(lambda p, b: 1 / 0), ZeroDivisionError, "division"
    ),
    "a frozen parameter is all that it reads": refused(
        lambda _: reads_frozen(lambda p, b: jnp.mean(b["x"] @ p["w"])), "does not depend on"
    ),
}


def reads_frozen(loss: Any) -> Any:
    state, plan = shard(frozen="^w$")
    return gshard.make_train_step(loss, plan)(state, BATCH)


async def waits(p, b):
    return loss_fn(p, b)


def yields(p, b):
    yield loss_fn(p, b)


def scaled(scale, p, b):
    return scale * loss_fn(p, b)
