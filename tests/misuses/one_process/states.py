"""What is given to `shard_train_state` as the state, and what it returns."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx, struct
from flax.training.train_state import TrainState

import gshard
from tests.misuses.small import (
    ADAM,
    BATCH,
    PARAMS,
    Tensor,
    alone,
    kept,
    linen,
    loss_fn,
    model_loss,
    pair,
    params,
    shard,
    train,
)
from tests.misuses.table import raw, refused, right, warned

BIG = 2**40
ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params())


class OfTheirOwn(struct.PyTreeNode):
    """A train state as several repositories define it, which calls the model."""

    params: Any
    tx: Any = struct.field(pytree_node=False)

    def __call__(self, x: Any) -> Any:
        return x @ self.params["w"]


def plain(**more: Any) -> Any:
    return {**params(), **more}, optax.sgd(0.1)


def all_variables(**options: Any) -> Any:
    """What `model.init` returns, as the parameters."""
    variables = {"params": params(), "batch_stats": {"mean": np.zeros(8, np.float32)}}
    return shard((variables, optax.sgd(0.1)), **options)[1].kind.frozen


def made_with(rngs: nnx.Rngs) -> Any:
    model = nnx.Linear(16, 8, rngs=rngs)
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def masked(x: np.ndarray) -> Any:
    return np.ma.masked_array(x, mask=x > 0)


def abstract() -> Any:
    return shard((ABSTRACT, optax.sgd(0.1)))


def with_its_own_model() -> Any:
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    return model, nnx.ModelAndOptimizer(model, ADAM, wrt=nnx.Param)


def of_two_models() -> Any:
    other = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0)))
    return pair()[0], nnx.Optimizer(other, ADAM, wrt=nnx.Param)


def nnx_step_of_two_models(_):
    sharded, plan = shard(of_two_models())
    gshard.make_train_step(model_loss, plan)(*sharded, BATCH)


def twice(_):
    state, plan = kept()[:2]
    return gshard.shard_train_state(state, plan.mesh, "os")


def plateau() -> Any:
    tx = optax.chain(ADAM, optax.contrib.reduce_on_plateau())
    return shard(linen(tx))[0]


def padded_again(_):
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, _ = shard(({"kernel": jnp.ones((17, 5))}, ADAM), "zero3", mesh, min_shard_size=0)
    shard((state.params, optax.sgd(1e-2)), "zero1", mesh, min_shard_size=0)


def padded_model_again(_):
    model = nnx.Linear(17, 5, use_bias=False, rngs=nnx.Rngs(0))
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    for _ in range(2):
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
        (model, _), _ = shard((model, optimizer), "zero3", mesh, min_shard_size=0)


def sharded_again(_):
    """With another optimizer at another level."""
    state, plan = shard(level="zero3", min_shard_size=0)
    return train(state=linen(optax.sgd(0.0)).replace(params=state.params))[0], params()


def committed(device: int = 3) -> Any:
    return jax.device_put(linen(), jax.devices()[device])


def changed_later(_):
    """The caller's array is written into after it was sharded."""
    own = params()
    state = shard((own, ADAM))[0]
    own["w"][:] = 7
    return gshard.full_params(state)["w"], PARAMS["w"]


def deleted(_):
    own = jax.tree.map(jnp.asarray, params())
    own["w"].delete()
    shard((own, ADAM))


def deleted_later(_):
    own = jax.tree.map(jnp.asarray, params())
    state = shard((own, ADAM))[0]
    jax.tree.map(lambda x: x.delete(), own)
    return gshard.full_params(state), params()


def complex_params(_):
    own = {"w": PARAMS["w"] * (1 + 1j), "b": np.ones(8, np.complex64)}
    loss = lambda p, b: jnp.square(jnp.abs(b["x"] @ p["w"] + p["b"])).mean()  # noqa: E731
    found = train(state=(own, optax.sgd(0.1)), loss=loss)[0]
    return found, jax.tree.map(lambda x, g: x - 0.1 * g, own, jax.grad(loss)(own, BATCH))


def shared(_):
    """Two parameters are one array: each is a parameter of its own."""
    w = jnp.asarray(PARAMS["w"])
    own = {"w": w, "b": jnp.zeros(8), "again": w}
    loss = lambda p, b: loss_fn(p, b) + jnp.square(p["again"]).mean()  # noqa: E731
    found = train(state=(own, ADAM), loss=loss)[0]
    grads = jax.grad(loss)(own, BATCH)
    updates, _ = ADAM.update(grads, ADAM.init(own), own)
    return found, optax.apply_updates(own, updates)


def norm_loss(params: Any, batch: Any) -> jax.Array:
    return jnp.square(batch["x"] @ params["w"] + params["b"]).mean()


def init_that_has_no_key(_):
    def init(key):
        return {"w": jax.random.normal(key, (16, 8))}, ADAM

    shard(init)


def with_tracers(_):
    jax.jit(lambda own: shard((own, ADAM))[0])(params())


def a_class_with_slots(_):
    class Slots:
        __slots__ = ("w",)

    shard((Slots(), ADAM))


def a_padded_model(_):
    """At 8 devices its outputs would have 8 columns, where the model has 5."""
    model = nnx.Linear(3, 5, use_bias=False, rngs=nnx.Rngs(0))
    pair = (model, nnx.Optimizer(model, ADAM, wrt=nnx.Param))
    (model, _), _ = gshard.shard_train_state(pair, gshard.make_mesh(), "zero3", min_shard_size=0)
    outputs = model(np.ones((2, 3), np.float32))
    return outputs.shape, (2, 5)


ROWS = {
    "all variables of a Linen module as the parameters": warned(
        lambda _: all_variables(), "batch_stats next to 'params'", "variables['params']"
    ),
    "all variables of a Linen module, with the statistics frozen": right(
        lambda _: (len(all_variables(frozen="^batch_stats/")), 1)
    ),
    "an init function that uses an nnx.Rngs of outside": refused(
        lambda _: shard(functools.partial(made_with, nnx.Rngs(0))),
        *("made_with", "made outside of it", "init_args="),
    ),
    "an nnx.Rngs in init_args=": refused(
        lambda _: shard(made_with, init_args=(nnx.Rngs(0),)), "made_with", "nnx.Rngs(key)"
    ),
    "an NNX model that is stored with padding is called directly": warned(
        a_padded_model, "kernel", "make_eval_step", "plan.unwrap((model, optimizer))"
    ),
    "a dict as the state": refused(
        lambda _: shard({"w": 1}), "dict", "TrainState", "(model, optimizer)"
    ),
    "parameters without an optimizer": refused(lambda _: shard(params()), "dict", "TrainState"),
    "a lone NNX model": refused(lambda _: shard(pair()[0]), "Linear", "(model, optimizer)"),
    "a Linen module": refused(lambda _: shard(nn.Dense(8)), "Dense", "TrainState"),
    "a Linen module and an optimizer": refused(
        lambda _: shard((nn.Dense(8), ADAM)), "Dense", "(params, optax transformation)"
    ),
    "a class instead of a state": refused(
        lambda _: shard(TrainState), "state is a type", "TrainState"
    ),
    "a train state of another class, which can be called": refused(
        lambda _: shard(OfTheirOwn(params(), ADAM)),
        *("OfTheirOwn from tests.misuses", "pass (state.params, state.tx)"),
    ),
    "the optimizer first": refused(
        lambda _: shard((ADAM, params())),
        *("(GradientTransformationExtraArgs, dict)", "(params, optax transformation)"),
    ),
    "an NNX optimizer first": refused(
        lambda _: shard(pair()[::-1]), "(Optimizer, Linear)", "(model, optimizer)"
    ),
    "an NNX model and an optax transformation": refused(
        lambda _: shard((pair()[0], ADAM)),
        *("(Linear, GradientTransformationExtraArgs)", "nnx.Optimizer(model, tx, wrt=nnx.Param)"),
    ),
    "nnx.ModelAndOptimizer": refused(
        lambda _: shard(with_its_own_model()),
        *("nnx.ModelAndOptimizer", "nnx.Optimizer(model, tx, wrt=nnx.Param)"),
    ),
    "an NNX optimizer of another model": refused(
        nnx_step_of_two_models, "another optimizer", "tx.init"
    ),
    "an nnx.State and its graph": refused(
        lambda _: shard(nnx.split(pair()[0])), "(GraphDef, State)", "(model, optimizer)"
    ),
    "parameters, optimizer and its state": refused(
        lambda _: shard((params(), ADAM, ADAM.init(params()))), "(params, optax transformation)"
    ),
    "parameters and an optimizer's state": refused(
        lambda _: shard((params(), ADAM.init(params()))), "(params, optax transformation)"
    ),
    "the function that makes an optimizer": refused(
        lambda _: shard((params(), optax.adam)), "(dict, function)", "optax transformation"
    ),
    "parameters and a learning rate": refused(
        lambda _: shard((params(), 1e-3)), "(dict, float)", "optax transformation"
    ),
    "None as the state": refused(lambda _: shard((None, None)), "None", "optax"),
    "a TrainState without an optimizer": refused(
        lambda _: train(state=linen().replace(tx=None), loss=loss_fn), "tx"
    ),
    "a TrainState whose optimizer's state is None": refused(
        lambda _: train(state=linen().replace(opt_state=None), loss=loss_fn), "tx.init"
    ),
    "text among the parameters": refused(
        lambda _: shard(plain(name="adam")), "'adam'", "an array is expected"
    ),
    "None among the parameters": right(
        lambda _: (train(state=({**params(), "bias": None}, ADAM))[0], alone())
    ),
    "Python numbers as parameters": right(
        lambda _: (gshard.full_params(shard(({"w": 1.5}, ADAM))[0]), {"w": 1.5})
    ),
    "lists of numbers as parameters": right(
        lambda _: (gshard.full_params(shard(({"w": [1.0, 2.0]}, ADAM))[0]), {"w": [1.0, 2.0]})
    ),
    "an array of objects": refused(
        lambda _: shard(plain(o=np.array([None, 1], object))), "parameter o", "array is expected"
    ),
    "a structured array": refused(
        lambda _: shard(plain(o=np.zeros(8, [("a", "f4")]))), "parameter o"
    ),
    "dates among the parameters": refused(
        lambda _: shard(plain(o=np.zeros(8, "datetime64[s]"))), "parameter o"
    ),
    "a function among the parameters": refused(lambda _: shard(plain(o=jnp.tanh)), "parameter o"),
    "an object with slots": refused(a_class_with_slots, "Slots"),
    "whole numbers as all parameters": refused(
        lambda _: shard(({"ids": jnp.arange(8)}, optax.identity())),
        *("ids", "leave no parameter to train"),
    ),
    "complex parameters": right(complex_params),
    "float64 parameters": right(
        lambda _: (
            train(state=(jax.tree.map(np.float64, params()), ADAM))[0],
            alone(),
        )
    ),
    "PyTorch's tensors as parameters": refused(
        lambda _: shard(plain(w=Tensor(PARAMS["w"]))), "the parameter w", "a Tensor", "np.asarray"
    ),
    "PyTorch's tensors in a TrainState": refused(
        lambda _: shard(linen(params=plain(w=Tensor(PARAMS["w"]))[0])),
        *("params/w", "a Tensor", "np.asarray"),
    ),
    "a masked array": refused(
        lambda _: shard(plain(w=masked(PARAMS["w"]))), "the parameter w", "masked", "filled(0)"
    ),
    "numbers beyond 32 bits": refused(
        lambda _: shard(plain(id=np.array([5, BIG]))),
        *("id contains", str(BIG), "int32", "jax_enable_x64"),
    ),
    "negative numbers beyond 32 bits": refused(
        lambda _: shard(plain(id=np.array([5, -BIG]))), "id contains", str(-BIG), "int32"
    ),
    "numbers beyond 32 bits from an init function": refused(
        lambda _: shard(lambda: plain(id=np.array([BIG]))), "id contains", str(BIG), "int32"
    ),
    "a step number beyond 32 bits": refused(
        lambda _: shard(linen(step=BIG)), "the step number contains", str(BIG), "int32"
    ),
    "fp8 statistics among ordinary parameters": refused(
        lambda _: shard(linen(params={"_overwrite_with_gradient": {"s": jnp.ones(3)}})),
        *("_overwrite_with_gradient", "fields of their own"),
    ),
    "an optimizer's state of another chain": refused(
        lambda _: train(
            state=linen(opt_state=optax.sgd(0.1, momentum=0.9).init(params())), loss=loss_fn
        ),
        *("another optimizer", "missing 0/count, 0/mu/b", "tx.init"),
    ),
    "an optimizer's state of other shapes": refused(
        lambda _: train(state=linen(params=params(4)), loss=norm_loss),
        *("0/mu/w (16, 8), not (16, 4)", "tx.init"),
    ),
    "an optimizer's state of other shapes, which broadcast": refused(
        lambda _: train(
            state=linen(optax.trace(0.9), opt_state=optax.trace(0.9).init(params(1))), loss=loss_fn
        ),
        *("trace/w (16, 1), not (16, 8)", "tx.init"),
    ),
    "an abstract state is trained": refused(
        lambda _: train(state=(ABSTRACT, optax.sgd(0.1)), loss=loss_fn), "abstract", "no values"
    ),
    "the full parameters of an abstract state": refused(
        lambda _: gshard.full_params(abstract()[0]), "abstract"
    ),
    "an abstract state is unwrapped": refused(
        lambda _: (lambda state, plan: plan.unwrap(state))(*abstract()), "abstract"
    ),
    "an abstract state is evaluated": refused(
        lambda _: gshard.make_eval_step(loss_fn, abstract()[1])(abstract()[0], BATCH), "abstract"
    ),
    "gradients of an abstract state": refused(
        lambda _: gshard.value_and_grad(loss_fn, abstract()[1])(abstract()[0].params, BATCH),
        "abstract",
    ),
    "an abstract state is saved": refused(
        lambda path: gshard.Checkpointer(path).save(0, abstract()[0]), "abstract"
    ),
    "an abstract state is exported": refused(
        lambda path: gshard.save_safetensors(abstract()[0], path / "x.safetensors"), "abstract"
    ),
    "parameters that are stored with padding are sharded again": refused(
        padded_again, "kernel has shape (20, 5)", "(17, 5)", "plan.unwrap(state)"
    ),
    "the model of NNX that is stored with padding gets another optimizer": refused(
        padded_model_again, "kernel has shape", "plan.unwrap((model, optimizer))"
    ),
    "parameters without padding are sharded again": right(sharded_again),
    "a number of the optimizer state by a name that gshard's own also has": right(
        lambda _: (optax.tree.get(plateau().opt_state, "scale"), 1.0)
    ),
    "a name that the optimizer state does not have, with a default": right(
        lambda _: (optax.tree.get(kept()[0].opt_state, "scale", 1.0), 1.0)
    ),
    "a state is sharded twice": refused(twice, "already sharded", "plan.unwrap(state)"),
    "a state on another device": right(
        lambda _: (gshard.full_params(shard(committed())[0]), params())
    ),
    "the caller's arrays are changed afterwards": right(changed_later),
    "the caller's arrays are deleted afterwards": right(deleted_later),
    "an array is deleted before": refused(deleted, "deleted"),
    "two parameters are the same array": right(shared),
    "a state inside a jit": refused(with_tracers, "shard_train_state", "inside jax.jit"),
    "a method of a model as the init function": refused(
        lambda _: shard(nn.Dense(8).init, init_args=(jax.random.key(0), np.ones((1, 16)))),
        *("state is a dict", "a function that makes one of these"),
    ),
    "an init function without its arguments": refused(init_that_has_no_key, "init_args"),
    "an init function with an argument too many": refused(
        lambda _: shard(lambda: plain(), init_args=(1,)), "init_args"
    ),
    "init_args= without an init function": refused(
        lambda _: shard(init_args=(1,)), "init_args", "init function"
    ),
    "a key alone as init_args=": refused(
        lambda _: shard(init_args=jax.random.key(0)), "init_args", "(key,)"
    ),
    "an init function that returns parameters alone": refused(
        lambda _: shard(params), "dict", "TrainState"
    ),
    "an init function that returns nothing": refused(lambda _: shard(lambda: None), "None"),
    "an init function of concrete arrays": right(
        lambda _: (
            gshard.full_params(shard(functools.partial(linen, ADAM))[0]),
            params(),
        )
    ),
    "an init function whose error is its own": raw(
        lambda _: shard(lambda: {}["missing"]), KeyError, "missing"
    ),
    "a sharded state is copied by deepcopy": right(
        lambda _: (gshard.full_params(copy.deepcopy(kept()[0])), params())
    ),
    "a sharded state is pickled": refused(lambda _: pickle.dumps(kept()[0]), "Checkpointer"),
}
