"""What a function reads from outside, and a warning where it has changed."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from gshard._util.closure import OutsideValues, _arrays, read_from_outside

number = 1.0
calls = 0


def test_what_is_read_has_a_name():
    local, teacher = 3, nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    class Trainer:
        def __init__(self):
            self.read, self.other = 5, 6

        def loss(self, x, bound):
            global calls
            calls += 1
            return x * number * local * self.read * bound * teacher.bias[0]

    closure, others = read_from_outside(partial(Trainer().loss, bound=4))
    values = {name: get() for name, get in (closure | others).items()}
    del values["the object of the method"]
    assert values.pop("teacher") is teacher
    assert values == {"number": 1.0, "local": 3, "self.read": 5, "bound of a partial": 4}


CHANGES = {
    "a number": (1.0, 2.0),
    "a number of NumPy": (np.float32(1.0), np.float32(2.0)),
    "an array": (np.ones(3), np.ones(3)),
    "a tree": ({"w": jnp.ones(2)}, {"w": jnp.ones(2)}),
    "a number that was an array": (jnp.ones(()), 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_warned_of_once(name):
    value, later = CHANGES[name]
    outside = OutsideValues(lambda x: (x, value), "the loss")
    outside.look(1.0)
    outside.look(1.0)
    value = later
    with pytest.warns(gshard.GShardWarning, match="the loss reads value from outside"):
        outside.look(1.0)
    outside.look(1.0)


def test_attributes_are_compared_where_nothing_else_is_read():
    class State:
        apply, params, scale = staticmethod(len), jnp.ones(2), 1.0

        def __init__(self):
            self.params, self.scale = jnp.ones(2), 1.0

    state, mean, names = State(), 0.0, {0: "a", "b": 1}

    def loss(x):
        return lambda: (x, state.apply, state.scale, x.mean(), names["b"])

    outside = OutsideValues(loss, "the loss")
    outside.look(1.0)
    state, mean = State(), mean + 1
    outside.look(1.0)
    state.scale = 2.0
    with pytest.warns(gshard.GShardWarning, match="the loss reads state.scale from outside"):
        outside.look(1.0)


class Attributes(dict):
    __getattr__ = dict.__getitem__


def test_attributes_of_attributes_are_compared():
    class Trainer:
        shared = 1.0

        def __init__(self):
            self.config = SimpleNamespace(scale=1.0, none=None)
            self.teacher = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.options = Attributes(rate=1.0)
            self.state = SimpleNamespace(apply_fn=len, step=jnp.zeros(2))

        def mean(self, x):
            return x

        def loss(self, x):
            found = self.mean(x), self.config.scale.real, self.shared, self.config.none
            more = self.options.rate, self.state.apply_fn(found), self.state.step.dtype
            return more, self.teacher.bias.sum(), run.config.steps

    trainer, run = Trainer(), SimpleNamespace(config=SimpleNamespace(steps=1))
    outside = OutsideValues(trainer.loss, "the loss")
    outside.look(1.0)
    trainer.other, trainer.config.other = jnp.ones(2), 1.0
    trainer.state = SimpleNamespace(apply_fn=len, step=jnp.ones(2))
    outside.look(1.0)
    for change, name in (
        (lambda: vars(trainer.config).update(scale=2.0), "self.config.scale.real"),
        (lambda: vars(trainer).update(shared=2.0), "self.shared"),
        (lambda: vars(run.config).update(steps=2), "run.config.steps"),
        (lambda: vars(trainer).update(teacher=nnx.Linear(2, 2, rngs=nnx.Rngs(1))), "self.teacher"),
    ):
        change()
        with pytest.warns(gshard.GShardWarning, match=f"the loss reads {name}.* from outside"):
            outside.look(1.0)
        outside.look(1.0)


@dataclass
class Config:
    scale: float = 1.0
    size: float = 1.0  # not that of an array


@dataclass(slots=True)
class Slots:
    scale: float = 1.0


class Named(NamedTuple):
    scale: float = 1.0


class Network(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def features(self, x):
        return self.inner(x)

    def all_features(self, x):
        return self.features(x)

    def error(self, x, y):
        return self.none(x - y)

    def none(self, x):
        return self.error(x, 1) if x is None else x

    @property
    def weights(self):
        return self.inner.kernel


class Derived(Network):
    def features(self, x):
        return super().features(x)

    def any(*args):
        return args


class Read:
    """What the losses below read."""

    def __init__(self):
        self.config, self.slots, self.named = Config(), Slots(), Named()
        self.scale, self.later, self.cache = 1.0, None, None
        self.array, self.tree, self.network = jnp.ones(2), {"w": jnp.ones(2)}, Network()
        self.temperature, self.derived = nnx.Param(jnp.ones(())), Derived()

    @staticmethod
    def static(x):
        return x.array

    def loss_of_a_comprehension(self, xs):  # Python 3.13 stores x and loads self in one operation
        return [self.scale * x for x in xs]

    def loss_of_a_lambda(self, x):
        return (lambda: self.scale)()

    def loss_with_a_counter(self, x):
        self.scale += 1
        return self.scale

    def loss_with_a_default(self, x):
        return x * (self.scale or 1.0)

    def loss_with_a_condition(self, x):
        return x * (self.scale and 1.0)

    def loss_with_a_walrus(self, x):
        return x if (scale := self.scale) is None else scale

    def loss_with_two_names(self, x):
        first = second = self.scale
        return first + second

    def loss_with_another_name(self, x):
        read = self
        config = read.config
        return config.size + (lambda: config.size)()

    def loss_with_another_name_for_one_line(self, x):
        config = self.config; return config.size  # noqa: E702 # fmt: skip

    def loss_with_another_name_in_a_function(self, x):
        scale = self.scale
        return (lambda y: scale * y)(x)

    def loss_with_another_name_in_a_comprehension(self, xs):
        config = self.config
        return [config.size * x for x in xs]

    def loss_with_a_counter_by_another_name(self, x):
        config = self.config
        config.size += 1
        return config.size

    def loss_with_a_name_for_two(self, x):
        config = self.config
        config = config if x else self.slots
        return config

    def loss_that_asks_for_the_class(self, x):
        return self.network.__class__(x)

    def loss_with_a_match(self, x):
        match self.scale:
            case 1.0:
                return x
            case 2.0:
                return 2 * x

    def loss_that_writes_elsewhere(self, x):
        x.scale = x.temperature.value = 1.0
        return self.scale * self.temperature.value

    def loss_with_a_cache(self, x):
        if self.cache is None:
            self.cache = 1.0
        return self.cache


LOSSES = {  # of an object, the loss; what of the object is replaced; whether that is a change
    "a method of an array": (lambda r: lambda x: r.array.reshape(-1, 1), {"array": jnp.ones(2)}, 1),
    "the shape of an array": (lambda r: lambda x: r.array.shape, {"array": jnp.ones(2)}, 0),
    "a method of a model": (lambda r: lambda x: r.network.features(x), {"network": Network()}, 1),
    "a method within a method": (
        lambda r: lambda x: r.network.all_features(x),
        {"network": Network()},
        1,
    ),
    "a property of a model": (lambda r: lambda x: r.network.weights, {"network": Network()}, 1),
    "a default": (lambda r: r.loss_with_a_default, {"scale": 2.0}, 1),
    "a condition": (lambda r: r.loss_with_a_condition, {"scale": 2.0}, 1),
    "an assignment in a condition": (lambda r: r.loss_with_a_walrus, {"scale": 2.0}, 1),
    "an assignment to two names": (lambda r: r.loss_with_two_names, {"scale": 2.0}, 1),
    "another name": (lambda r: r.loss_with_another_name, {"config": Config(1, 2)}, 1),
    "another name on one line": (
        lambda r: r.loss_with_another_name_for_one_line,
        {"config": Config(2, 1)},
        0,
    ),
    "another name in a function": (
        lambda r: r.loss_with_another_name_in_a_function,
        {"scale": 2.0},
        1,
    ),
    "another name in a comprehension": (
        lambda r: r.loss_with_another_name_in_a_comprehension,
        {"config": Config(1, 2)},
        1,
    ),
    "a counter by another name": (
        lambda r: r.loss_with_a_counter_by_another_name,
        {"config": Config(1, 2)},
        0,
    ),
    "another field under another name": (
        lambda r: r.loss_with_another_name,
        {"config": Config(2, 1)},
        0,
    ),
    "a name for two": (lambda r: r.loss_with_a_name_for_two, {"config": Config(2, 1)}, 0),
    "the class": (lambda r: r.loss_that_asks_for_the_class, {"network": Network()}, 0),
    "a match": (lambda r: r.loss_with_a_match, {"scale": 2.0}, 1),
    "super()": (lambda r: lambda x: r.derived.features(x), {"derived": Derived()}, 1),
    "a method of any arguments": (lambda r: lambda x: r.derived.any(x), {"derived": Derived()}, 1),
    "a method that reads nothing": (
        lambda r: lambda x: r.network.error(x, 1),
        {"network": Network()},
        0,
    ),
    "a name that is written elsewhere": (
        lambda r: r.loss_that_writes_elsewhere,
        {"scale": 2.0},
        1,
    ),
    "a Variable whose name is written elsewhere": (
        lambda r: r.loss_that_writes_elsewhere,
        {"temperature": nnx.Param(jnp.ones(()))},
        1,
    ),
    "a method of a dict": (lambda r: lambda x: [*r.tree.items()], {"tree": {"w": jnp.ones(2)}}, 1),
    "a field that is named size": (lambda r: lambda x: r.config.size, {"config": Config(1, 2)}, 1),
    "another field": (lambda r: lambda x: r.config.size, {"config": Config(2, 1)}, 0),
    "a field in slots": (lambda r: lambda x: r.slots.scale, {"slots": Slots(2.0)}, 1),
    "a field of a named tuple": (lambda r: lambda x: r.named.scale, {"named": Named(2.0)}, 1),
    "None at first": (lambda r: lambda x: r.later, {"later": jnp.ones(2)}, 1),
    "a static method": (lambda r: lambda x: r.static(x), {"array": jnp.ones(2)}, 0),
    "a comprehension": (lambda r: r.loss_of_a_comprehension, {"scale": 2.0}, 1),
    "a function in a method": (lambda r: r.loss_of_a_lambda, {"scale": 2.0}, 1),
    "what the loss itself counts": (lambda r: r.loss_with_a_counter, {"scale": 2.0}, 0),
    "what the loss itself writes": (lambda r: r.loss_with_a_cache, {"cache": 2.0}, 0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_counts_as_a_change(name):
    make, new, changes = LOSSES[name]
    read = Read()
    outside = OutsideValues(make(read), "the loss")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outside.look(1.0)
        outside.look(1.0)
        assert not caught
        vars(read).update(new)
        outside.look(1.0)
    assert len(caught) == changes


def test_an_array_is_compared_of_which_a_loss_calls_a_method():
    target = jnp.ones(2)
    outside = OutsideValues(lambda x: target.reshape(-1, 1), "the loss")
    outside.look(1.0)
    outside.look(1.0)
    target = jnp.ones(2)
    with pytest.warns(gshard.GShardWarning, match="the loss reads target.reshape from outside"):
        outside.look(1.0)


def test_a_cache_that_the_first_call_fills_is_no_change():
    cache = SimpleNamespace(mask=None)
    outside = OutsideValues(lambda x: cache.mask, "the loss")
    outside.look(1.0)
    cache.mask = np.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outside.look(1.0)
    cache.mask = np.ones(2)
    with pytest.warns(gshard.GShardWarning, match="the loss reads cache.mask from outside"):
        outside.look(1.0)


def test_a_loss_with_hundreds_of_names():
    """Python gives a name beyond the 255th in two instructions."""
    lines = [f"    x.name_{i}" for i in range(300)]
    known = {"state": SimpleNamespace(apply_fn=len, params=jnp.ones(2))}
    exec("\n".join(["def loss(x):", *lines, "    return state.apply_fn(x)"]), known)
    outside = OutsideValues(known["loss"], "the loss")
    outside.look(1.0)
    known["state"] = SimpleNamespace(apply_fn=len, params=jnp.ones(2))
    outside.look(1.0)


def test_methods_that_call_each_other_are_read_once():
    names = [f"method_{i}" for i in range(25)]
    calls = " + ".join(f"self.{name}(x)" for name in names)
    known: dict[str, Any] = {}
    exec("\n".join(f"def {name}(self, x): return {calls}" for name in names), known)
    model = type("Model", (), {name: known[name] for name in names})()
    began = time.monotonic()
    OutsideValues(lambda x: model.method_0(x), "the loss").look(1.0)
    assert time.monotonic() - began < 10


def test_a_counter_does_not_hide_the_other_attributes():
    run = SimpleNamespace(calls=0, scale=1.0)

    def loss(x):
        run.calls += 1
        run.calls = run.calls + 1
        return run.scale * x

    outside = OutsideValues(loss, "the loss")
    outside.look(1.0)
    run.calls = 2
    outside.look(1.0)
    run.scale = 2.0
    with pytest.warns(gshard.GShardWarning, match="the loss reads run.scale from outside"):
        outside.look(1.0)


def test_a_loss_that_reads_the_state_that_it_trains():
    """By the name outside: what it is compiled with stays, and is deleted."""
    params = {"w": np.ones((4, 8), np.float32)}
    mesh = gshard.make_mesh()
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)), mesh, "zero1", min_shard_size=0
    )
    best = state.params["w"]

    def loss(params, batch):
        return jnp.mean(batch @ params["w"]) + 0.1 * state.step

    def near(params, batch):
        return jnp.mean(batch @ (params["w"] - best))

    batch = np.ones((8, 4), np.float32)
    evaluate = gshard.make_eval_step(lambda state_, b: jnp.mean(b @ state.params["w"]), plan)
    evaluate(state, batch)
    with pytest.warns(gshard.GShardWarning, match="reads best from outside: arrays of the state"):
        state, _ = gshard.make_train_step(near, plan)(state, batch)
    with pytest.warns(gshard.GShardWarning, match=r"reads state.params from outside, and that has"):
        evaluate(state, batch)
    step = gshard.make_train_step(loss, plan, donate=False)
    state, _ = step(state, batch)
    with pytest.warns(gshard.GShardWarning, match=r"reads state.step from outside, and that has"):
        step(state, batch)


def test_an_attribute_of_the_class_is_compared():
    class Own:
        scale = 1.0

        def loss(self, x):
            return self.scale * x

    outside = OutsideValues(Own().loss, "the loss")
    outside.look(1.0)
    Own.scale = 2.0
    with pytest.warns(gshard.GShardWarning, match="the loss reads self.scale from outside"):
        outside.look(1.0)


def test_odd_containers_do_no_harm():
    """JAX's flattening of a dict with mixed keys leaks a part of the recursion limit each time."""
    names, cycle, model = (
        {0: jnp.ones(2), "b": 1},
        [jnp.ones(2)],
        {"m": nnx.Linear(2, 2, rngs=nnx.Rngs(0))},
    )
    cycle += [cycle, cycle]
    outside = OutsideValues(lambda x: (x, names, cycle, model), "the loss")
    for _ in range(200):
        outside.look(1.0)

    def deep(n):
        return deep(n - 1) if n else jax.tree.leaves({"a": 1})

    assert deep(500) == [1]
    names = {0: jnp.ones(2), "b": 1}
    model["m"].bias[...] = jnp.ones(2)
    with pytest.warns(
        gshard.GShardWarning, match="the loss reads (model, names|names, model) from"
    ):
        outside.look(1.0)


def test_large_containers_are_not_searched_at_each_step():
    array, words = np.ones(2), ["word"] * 4097
    assert _arrays({"scale": array, "words": words, "few": ["word", array]}) == [array, array]
    assert _arrays([array] * 4096) and not _arrays([array] * 4097)


def test_nan_is_no_change():
    value = float("nan")
    outside = OutsideValues(lambda x: (x, value), "the loss")
    outside.look(1.0)
    value = float("nan")
    outside.look(1.0)


def test_nothing_else_is_compared():
    text, function, shape = "a", len, (1, 2)
    outside = OutsideValues(lambda x: (x, text, function, shape), "the loss")
    outside.look(1.0)
    text, function, shape = "b", max, (2, 3)
    outside.look(1.0)

    @jax.jit
    def traced(x):  # what is read may be traced as well, and differ in every trace
        held = OutsideValues(lambda: x, "the loss")
        held.look(x)
        held.look(x)
        return x

    traced(1.0)


def sharded():
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    return gshard.shard_train_state((model, optimizer), mesh, "zero1", min_shard_size=4)


def test_steps_and_backward_look():
    batch, other, weight = np.ones((8, 4), np.float32), nnx.Linear(4, 8, rngs=nnx.Rngs(1)), 1.0

    def loss(model, b):
        return weight * jnp.mean((model(b) - other(b)) ** 2)

    (model, optimizer), plan = sharded()
    step, evaluate = gshard.make_train_step(loss, plan), gshard.make_eval_step(loss, plan)
    wrapped = gshard.pytorch.DistributedDataParallel(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    with pytest.warns(gshard.GShardWarning, match="backward: the loss reads other from outside"):
        wrapped.backward(loss, batch)
    calls = (
        lambda: step(model, optimizer, batch),
        lambda: evaluate(model, batch),
        lambda: wrapped.backward(loss, batch),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in calls * 2:
            call()
    other.bias[...] = jnp.ones(8)
    for call in calls:
        with pytest.warns(gshard.GShardWarning, match="reads other from outside, and that"):
            call()
    weight = 0.5
    for call in calls:
        with pytest.warns(gshard.GShardWarning, match="reads weight from outside, and that"):
            call()
