"""States, plans and gradients that do not belong together, and calls in a wrong order."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import gshard
from tests.misuses.small import (
    ADAM,
    BATCH,
    alone,
    kept,
    linen,
    loss_fn,
    model_loss,
    pair,
    params,
    shard,
)
from tests.misuses.table import raw, refused, right, warned


def step_with(change: Any, level: str = "os", error: Any = None) -> Any:
    """A step of a state that was changed."""
    state, plan, step = kept(level)
    return step(change(state, plan), BATCH)


def of_another_shard(**options: Any) -> Any:
    return kept()[2](shard(**options)[0], BATCH)


def nnx_kept(tx: Any = ADAM) -> Any:
    sharded, plan = shard(pair(tx))
    return sharded, plan, gshard.make_train_step(model_loss, plan)


class Averaged(TrainState):
    def apply_gradients(self, *, grads, **kwargs):
        return super().apply_gradients(grads=grads, **kwargs)


class Doubled(TrainState):
    copy: Any = None


def with_dynamic_scale(_):
    state = Doubled.create(apply_fn=None, params=params(), tx=ADAM, copy=DynamicScale())
    gshard.make_train_step(loss_fn, shard(state)[1])


def of_its_own_class(_):
    state = Averaged.create(apply_fn=None, params=params(), tx=ADAM)
    gshard.make_train_step(loss_fn, shard(state)[1])


def one_array_twice(_):
    state = Doubled.create(apply_fn=None, params=params(), tx=ADAM).replace(copy=params())
    state, plan = shard(state)
    gshard.make_train_step(loss_fn, plan)(state.replace(copy=state.params), BATCH)


def larger() -> Any:
    return jax.tree.map(lambda x: jnp.ones([n + 1 for n in x.shape]), params())


def unwrapped_with_other_padding(_):
    made = {"kernel": jnp.ones((17, 5))}, ADAM
    plans = [
        shard(made, "p_g_os", gshard.make_mesh(devices=jax.devices()[:n]), min_shard_size=0)
        for n in (3, 4)
    ]
    plans[1][1].unwrap(plans[0][0])


def used_again(_):
    state, _, step = kept()
    step(state, BATCH)
    step(state, BATCH)


def evaluated_after(_):
    state, plan, step = kept()
    step(state, BATCH)
    gshard.make_eval_step(loss_fn, plan)(state, BATCH)


def gradients_after(_):
    state, plan, step = kept()
    step(state, BATCH)
    gshard.value_and_grad(loss_fn, plan)(state.params, BATCH)


def sharded_after(_):
    state, plan, step = kept()
    step(state, BATCH)
    gshard.shard_train_state(state, plan.mesh, "p_g_os")


def partly_donated(_):
    state, _, step = kept()
    new, _ = step(state, BATCH)
    step(new.replace(opt_state=state.opt_state), BATCH)


def not_assigned(_):
    """`step(state, batch)` in a loop, without taking what it returns."""
    state, plan, _ = kept()
    step = gshard.make_train_step(loss_fn, plan, donate=False)
    for _ in range(2):
        _, metrics = step(state, BATCH)
    return metrics["loss"], loss_fn(params(), BATCH)


def made_in_the_loop(*of_each_step: dict[str, Any]) -> Any:
    state, plan = shard()
    for options in of_each_step:
        state, _ = gshard.make_train_step(loss_fn, plan, **options)(state, BATCH)
    return gshard.full_params(state), alone(steps=len(of_each_step))


def evaluated_by_a_family(kind: str) -> Any:
    """Three losses that are made by one function, or bind another number each."""

    def scaled(params: Any, batch: Any, power: float) -> Any:
        return power * loss_fn(params, batch)

    def made(power: float) -> Any:
        return lambda params, batch: scaled(params, batch, power)

    state, plan = shard()
    make = {"closures": made, "partials": lambda x: partial(scaled, power=x)}[kind]
    found = [gshard.make_eval_step(make(float(x)), plan)(state, BATCH) for x in "123"]
    return found, [x * loss_fn(params(), BATCH) for x in (1.0, 2.0, 3.0)]


def evaluated_in_the_loop(calls: int) -> Any:
    state, plan = shard()
    for _ in range(3):
        evaluate = gshard.make_eval_step(loss_fn, plan)
        found = [evaluate(state, BATCH) for _ in range(calls)]
    return found, [loss_fn(params(), BATCH)] * calls


class Dropping(nnx.Module):
    """A model that drops entries, or that only adds noise."""

    def __init__(self, rate: float):
        rngs = nnx.Rngs(0)
        self.layer = nnx.Linear(16, 8, rngs=rngs)
        self.drop, self.rngs = nnx.Dropout(rate, rngs=rngs), rngs

    def __call__(self, x: Any) -> Any:
        return self.drop(self.layer(x)) + 0 * jax.random.normal(self.rngs.noise())


def evaluated_in_train_mode(rate: float) -> Any:
    model = Dropping(rate)
    (model, _), plan = shard((model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)))
    found = gshard.make_eval_step(model_loss, plan)(model, BATCH)
    return found, model_loss(Dropping(rate), BATCH)


def returned_tuple(_):
    state, _, step = kept()
    out = step(state, BATCH)
    step(out, BATCH)


def metrics_as_state(_):
    state, _, step = kept()
    _, metrics = step(state, BATCH)
    step(metrics, BATCH)


def another_loss_same_plan(_):
    """Two steps of one plan, as for a generator of samples and its critic."""
    state, plan, step = kept()
    other = gshard.make_train_step(lambda p, b: 2 * loss_fn(p, b), plan)
    state, _ = step(state, BATCH)
    state, _ = other(state, BATCH)
    own = alone()
    grads = jax.grad(lambda p: 2 * loss_fn(p, BATCH))(own)
    inner = ADAM.init(own)
    first = jax.grad(loss_fn)(jax.tree.map(jnp.asarray, params()), BATCH)
    inner = ADAM.update(first, inner, own)[1]
    updates, _ = ADAM.update(grads, inner, own)
    return gshard.full_params(state), optax.apply_updates(own, updates)


def its_params_replaced(_):
    """A state whose parameters are the user's own full arrays."""
    return step_with(lambda s, _: s.replace(params=jax.tree.map(jnp.asarray, params())), "p_g_os")


def with_hyperparameter(name: str, value: Any) -> None:
    state, plan = shard((params(), optax.inject_hyperparams(optax.adam)(0.1)))
    state.opt_state.hyperparams[name] = value
    gshard.make_train_step(loss_fn, plan)(state, BATCH)


def learning_rate_changed(_):
    state, plan, step = kept()
    plan.tx = optax.adam(1.0)


def plan_replaced(_):
    plan = kept()[1]
    other = dataclasses.replace(plan, level=kept("p_g_os")[1].level)
    state, metrics = gshard.make_train_step(loss_fn, other)(kept()[0], BATCH)
    return gshard.full_params(state), alone()


def model_changed(_):
    """A Variable of a sharded NNX model is set to an array of another shape."""
    (model, optimizer), _, step = nnx_kept()
    model.kernel = nnx.Param(jnp.zeros((3, 3)))
    step(model, optimizer, BATCH)


def model_extended(_):
    (model, optimizer), _, step = nnx_kept()
    model.extra = nnx.Param(jnp.zeros(3))
    step(model, optimizer, BATCH)


def tx_of_pair(_):
    (model, optimizer), _, step = nnx_kept()
    optimizer.tx = optax.adam(0.0)
    step(model, optimizer, BATCH)


def new_optimizer(tx: Any) -> None:
    (model, _), _, step = nnx_kept()
    step(model, nnx.Optimizer(model, tx, wrt=nnx.Param), BATCH)


def wrt_of_pair(_):
    (model, optimizer), _, step = nnx_kept()
    optimizer.wrt = nnx.All(nnx.Param, nnx.PathContains("kernel"))
    step(model, optimizer, BATCH)


STEPS = (5, np.int64(5), np.array(5), jnp.int32(5))


class Clipped(nnx.Optimizer):
    def update(self, model, grads, **kwargs):
        super().update(model, jax.tree.map(lambda g: g / 2, grads), **kwargs)


def of_its_own_update(_):
    model, _ = pair()
    state, plan = shard((model, Clipped(model, ADAM, wrt=nnx.Param)))
    gshard.make_train_step(model_loss, plan)


class Warm(nnx.Linear):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.warm = False


def sets_an_attribute(_):
    """The loss initialises something at its first call."""
    model = Warm(16, 8, rngs=nnx.Rngs(0))
    sharded, plan = shard((model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)))

    def loss(model, batch):
        model.warm = True
        return model_loss(model, batch)

    gshard.make_train_step(loss, plan)(*sharded, BATCH)


def keys_in_the_batch(_):
    (model, optimizer), _, step = nnx_kept()
    step(model, optimizer, {**BATCH, "rngs": nnx.Rngs(0)})


class Measured(nnx.Linear):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.metric = nnx.metrics.Average()


def metrics_in_evaluation(_):
    model = Measured(16, 8, rngs=nnx.Rngs(0))
    sharded, plan = shard((model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)))

    def evaluate(model, batch):
        loss = model_loss(model, batch)
        model.metric.update(values=loss)
        return loss

    gshard.make_eval_step(evaluate, plan)(sharded[0], BATCH)


def nothing_to_train(_):
    model, _ = pair()
    shard((model, nnx.Optimizer(model, ADAM, wrt=nnx.PathContains("heads"))))


def reseeded(_):
    """New random keys are given to a sharded model."""
    model = nnx.Sequential(
        nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1))
    )
    other = nnx.clone(model)
    sharded, plan = shard((model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)))
    nnx.reseed(sharded[0], dropout=7)
    gshard.make_train_step(model_loss, plan)(*sharded, BATCH)
    nnx.reseed(other, dropout=7)
    own = nnx.Optimizer(other, ADAM, wrt=nnx.Param)
    own.update(other, nnx.grad(model_loss)(other, BATCH))
    return gshard.full_params(sharded), nnx.state(other, nnx.Param)


def model_given_to_shard(_):
    """`_, plan = shard_train_state((model, optimizer), ...)`, or the old name in the loop."""
    model, optimizer = pair()
    sharded, plan = shard((model, optimizer))
    gshard.make_train_step(model_loss, plan)(model, sharded[1], BATCH)


def state_given_to_shard(level):
    state = linen()
    _, plan = shard(state, level)
    gshard.make_eval_step(loss_fn, plan)(state, BATCH)


def another_models_weights(_):
    """Weights of a model that is used after the step, such as a frozen reference."""
    reference, (sharded, _, step) = pair(seed=3)[0], nnx_kept()
    wanted = model_loss(reference, BATCH)
    nnx.update(sharded[0], nnx.state(reference))
    return (step(*sharded, BATCH)["loss"], model_loss(reference, BATCH)), (wanted, wanted)


ROWS = {
    "the optimizer's state is read by an index, as of optax": refused(
        lambda _: kept()[0].opt_state[0].mu, "state.opt_state.inner[0]"
    ),
    "the optimizer's state is read by name, as of optax": refused(
        lambda _: kept()[0].opt_state.inner_state, "state.opt_state.inner.inner_state"
    ),
    "the optimizer has no hyperparameters": raw(
        lambda _: kept()[0].opt_state.hyperparams, AttributeError, "there are 0", "inject"
    ),
    "a model with dropout is evaluated in train mode": warned(
        lambda _: evaluated_in_train_mode(0.5), "drops entries in drop", "model.eval()"
    ),
    "a model that draws noise is evaluated": right(lambda _: evaluated_in_train_mode(0.0)),
    "make_train_step is called in the loop": warned(
        lambda _: made_in_the_loop({}, {}, {}), "3 times with loss_fn", "before the loop"
    ),
    "make_train_step is called with other options in each step": right(
        lambda _: made_in_the_loop({}, {"micro_batches": 2}, {"donate": False})
    ),
    "make_eval_step is called for each batch": warned(
        lambda _: evaluated_in_the_loop(1), "3 times with loss_fn", "before the loop"
    ),
    "make_eval_step is called for losses that one function makes": right(
        lambda _: evaluated_by_a_family("closures")
    ),
    "make_eval_step is called for partials that bind other numbers": right(
        lambda _: evaluated_by_a_family("partials")
    ),
    "make_eval_step is called for each evaluation of several batches": right(
        lambda _: evaluated_in_the_loop(2)
    ),
    "step() of the NNX model that shard_train_state was given": refused(
        model_given_to_shard, "this is the model that you gave", "that shard_train_state returned"
    ),
    "evaluation of the state that shard_train_state was given, at dp": refused(
        lambda _: state_given_to_shard("dp"),
        "this is the state that you gave",
        "that shard_train_state returned",
    ),
    "nnx.update with the weights of another model, used after the step": right(
        another_models_weights
    ),
    "an nnx.Optimizer with an update of its own": refused(
        of_its_own_update, "Clipped", "value_and_grad(loss_fn, plan)"
    ),
    "the loss sets an attribute of the model": warned(sets_an_attribute, "warm", "nnx.Variable"),
    "an nnx.Rngs in the batch": refused(keys_in_the_batch, "batch['rngs']", "part of the model"),
    "metrics of the model in an eval step": warned(
        metrics_in_evaluation, "metric/", "metrics.compute()"
    ),
    "a wrt= that chooses nothing": refused(nothing_to_train, "heads", "bias, kernel"),
    "nnx.reseed of a sharded model": right(reseeded),
    "gradient_accumulation_steps=": refused(
        lambda _: gshard.make_train_step(loss_fn, kept()[1], gradient_accumulation_steps=2),
        "micro_batches=",
        error=gshard.ArgumentTypeError,
    ),
    "stage=3": refused(
        lambda _: gshard.shard_train_state(linen(), gshard.make_mesh(), stage=3),
        "level=",
        error=gshard.ArgumentTypeError,
    ),
    "model and optimizer as two arguments": refused(
        lambda _: gshard.shard_train_state(*pair(), gshard.make_mesh(), "os"),
        "(model, optimizer)",
        error=gshard.ArgumentTypeError,
    ),
    "the loss and the plan are swapped": refused(
        lambda _: gshard.make_train_step(kept()[1], loss_fn),
        *("make_train_step", "shard_train_state returned"),
    ),
    "a mesh instead of the plan": refused(
        lambda _: gshard.make_train_step(loss_fn, gshard.make_mesh()), "shard_train_state returned"
    ),
    "a state instead of the plan": refused(
        lambda _: gshard.make_train_step(loss_fn, kept()[0]), "shard_train_state returned"
    ),
    "what shard_train_state returned instead of the plan": refused(
        lambda _: gshard.make_train_step(loss_fn, kept()[:2]), "shard_train_state returned"
    ),
    "the loss and the plan are swapped, value_and_grad": refused(
        lambda _: gshard.value_and_grad(kept()[1], loss_fn), "value_and_grad"
    ),
    "evaluation of parameters alone": refused(
        lambda _: gshard.make_eval_step(loss_fn, kept()[1])(kept()[0].params, BATCH),
        *("state is a dict", "state.replace(params=...)"),
    ),
    "evaluation with rng=": refused(
        lambda _: gshard.make_eval_step(loss_fn, kept()[1], rng=jax.random.key(0)),
        "{**batch, 'key': jax.random.key(0)}",
        error=gshard.ArgumentTypeError,
    ),
    "the loss and the plan are swapped, make_eval_step": refused(
        lambda _: gshard.make_eval_step(kept()[1], loss_fn), "make_eval_step"
    ),
    "state and batch are swapped": refused(
        lambda _: kept()[2](BATCH, kept()[0]), "step(state, batch)", "a dict", "in this order"
    ),
    "state and batch are swapped in evaluation": refused(
        lambda _: gshard.make_eval_step(loss_fn, kept()[1])(BATCH, kept()[0]), "a dict"
    ),
    "parameters instead of the state": refused(
        lambda _: kept()[2](kept()[0].params, BATCH), "a dict"
    ),
    "a step without arguments": refused(lambda _: kept()[2](), "step(state, batch)"),
    "a step without a batch": refused(lambda _: kept()[2](kept()[0]), "step(state, batch)"),
    "a step with x and y": refused(
        lambda _: kept()[2](kept()[0], BATCH["x"], BATCH["y"]),
        *("step(state, batch)", "3 arguments", "A step takes one batch"),
    ),
    "a step with the batch by name": refused(
        lambda _: kept()[2](kept()[0], batch=BATCH), "step(state, batch)", "batch= by name"
    ),
    "what a step returned, as a whole, as the state": refused(returned_tuple, "step(state, batch)"),
    "the metrics as the state": refused(metrics_as_state, "step(state, batch)", "a dict"),
    "the pair of NNX as one argument": refused(
        lambda _: (lambda p, _, step: step(p, BATCH))(*nnx_kept()), "model", "optimizer", "batch"
    ),
    "the optimizer of NNX first": refused(
        lambda _: (lambda p, _, step: step(p[1], p[0], BATCH))(*nnx_kept()),
        "step(model, optimizer, batch)",
    ),
    "a state that was not sharded": refused(
        lambda _: kept()[2](linen(), BATCH), "gshard.shard_train_state"
    ),
    "a state of another tree": refused(
        lambda _: step_with(lambda s, _: s.replace(params={"v": s.params["w"]})),
        *("missing", "params/w", "added", "params/v"),
    ),
    "a state of another optimizer": refused(
        lambda _: of_another_shard(state=linen(optax.sgd(0.1))), "missing", "mu", "w"
    ),
    "a state of another learning rate": warned(
        lambda _: of_another_shard(state=linen(optax.adam(1.0))), "another optimizer than this plan"
    ),
    "a state of other shapes": refused(
        lambda _: step_with(
            lambda s, _: jax.tree.map(lambda x: jnp.concatenate([x, x], -1) if x.ndim else x, s)
        ),
        *("float32[16,", "stored as"),
    ),
    "a state of another level": refused(
        lambda _: step_with(lambda s, _: kept("p_g_os")[0]), "is stored on", "shard"
    ),
    "a state of another mesh": refused(
        lambda _: of_another_shard(mesh=gshard.make_mesh(devices=jax.devices()[:4])),
        "4 devices",
    ),
    "a state of another dtype": refused(
        lambda _: step_with(
            lambda s, _: s.replace(params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), s.params))
        ),
        *("params/", "bfloat16", "float32"),
    ),
    "a state on the host": refused(
        lambda _: step_with(lambda s, _: jax.tree.map(np.asarray, s), "p_g_os"),
        *("params/w", "a NumPy array"),
    ),
    "a state on one device": refused(
        lambda _: step_with(lambda s, _: jax.device_put(s, jax.devices()[2]), "p_g_os"),
        *("params/w", "1 device"),
    ),
    "full parameters put into the state": refused(its_params_replaced, "params/w", "1 device"),
    "parameters that were rounded by hand": right(
        lambda _: (
            gshard.full_params(
                step_with(lambda s, _: s.replace(params=jax.tree.map(lambda x: x * 1, s.params)))[0]
            ),
            alone(),
        )
    ),
    "another optimizer put into the state": refused(
        lambda _: step_with(lambda s, _: s.replace(tx=optax.adam(0.0))),
        *("the optimizer of this state", "plan.unwrap(state)", "inject_hyperparams"),
    ),
    "another optimizer put into a pair of NNX": refused(tx_of_pair, "the optimizer of this state"),
    "a new optimizer for a sharded model of NNX": refused(
        lambda _: new_optimizer(ADAM), "the optimizer of this state was replaced", "plan.unwrap"
    ),
    "a new optimizer without state for a sharded model of NNX": refused(
        lambda _: new_optimizer(optax.sgd(0.1)), "the optimizer of this state was replaced"
    ),
    "a pair of NNX that was not sharded": refused(
        lambda _: nnx_kept()[2](*pair(), BATCH), "Pass what gshard.shard_train_state returned"
    ),
    "another wrt= put into the optimizer of NNX": refused(
        wrt_of_pair, "the wrt= of the optimizer of this state was replaced", "plan.unwrap"
    ),
    "a hyperparameter of another dtype": refused(
        lambda _: with_hyperparameter("learning_rate", np.float16([0.1])),
        *("learning_rate is float16[1], stored as float32[]", "a number, such as 1e-3"),
    ),
    "a hyperparameter that the optimizer does not have": refused(
        lambda _: with_hyperparameter("lr", 0.1),
        "added opt_state/inner/hyperparams/lr",
        "learning_rate",
    ),
    "a learning rate put into the plan": raw(learning_rate_changed, AttributeError, "tx"),
    "a step number that is text": refused(
        lambda _: step_with(lambda s, _: s.replace(step="a")), "step is"
    ),
    "a step number that is a fraction": refused(
        lambda _: step_with(lambda s, _: s.replace(step=1.5)), "step is"
    ),
    "a step number that is an array": refused(
        lambda _: step_with(lambda s, _: s.replace(step=np.arange(3))), "step is"
    ),
    "step numbers of Python and NumPy": right(
        lambda _: (
            [step_with(lambda s, _, x=x: s.replace(step=x))[0].step for x in STEPS],
            [6] * len(STEPS),
        )
    ),
    "a state after its donation": refused(
        used_again,
        *("earlier step", "state, metrics = step(state, batch)", "donate=False"),
        error=gshard.DonatedStateError,
    ),
    "a state after its donation, in evaluation": refused(
        evaluated_after, "earlier step", error=gshard.DonatedStateError
    ),
    "gradients of a state after its donation": refused(
        gradients_after, "earlier step", error=gshard.DonatedStateError
    ),
    "a state after its donation, sharded again": refused(sharded_after, "was deleted", "returned"),
    "a state that was donated in part": refused(
        partly_donated, "earlier step", error=gshard.DonatedStateError
    ),
    "what a step returns is not kept": right(not_assigned),
    "one array for two leaves": refused(
        one_array_twice,
        *("params/b", "non_trainable/copy/b", "jnp.copy", "donate=False"),
    ),
    "a DynamicScale of Flax in the state": warned(
        with_dynamic_scale, "state.copy", "scaler=gshard.GradScaler()"
    ),
    "an apply_gradients of its own": refused(
        of_its_own_class, "Averaged", "apply_gradients", "gshard.value_and_grad(loss_fn, plan)"
    ),
    "two steps of one plan": right(another_loss_same_plan),
    "a plan that was changed by dataclasses.replace": right(plan_replaced),
    "a Variable of the model gets another shape": refused(model_changed, "kernel", "3"),
    "the model gets another parameter": refused(model_extended, "added", "extra"),
    "unwrap of a plain state": refused(
        lambda _: kept()[1].unwrap(linen()), "plan.unwrap(state)", "the state is plain"
    ),
    "unwrap of parameters": refused(
        lambda _: kept()[1].unwrap(kept()[0].params), "plan.unwrap(state)", "a dict"
    ),
    "unwrap with the plan of another optimizer": refused(
        lambda _: kept()[1].unwrap(shard(linen(optax.sgd(1e-2)))[0]), "optimizer state", "missing"
    ),
    "unwrap with the plan of a smaller model": refused(
        lambda _: kept()[1].unwrap(shard((larger(), ADAM))[0]),
        *("has shape", "Pass a state of this plan"),
    ),
    "unwrap with the plan of another number of devices, which pads": refused(
        unwrapped_with_other_padding, "kernel has shape", "stored as"
    ),
    "unwrap with another level's plan": right(
        lambda _: (kept("p_g_os")[1].unwrap(kept()[0]).params, params())
    ),
    "full_params of a plain state": refused(
        lambda _: gshard.full_params(linen()), "full_params", "gshard.shard_train_state"
    ),
    "full_params of parameters": refused(
        lambda _: gshard.full_params(kept()[0].params), "full_params"
    ),
    "full_params of the plan": refused(lambda _: gshard.full_params(kept()[1]), "full_params"),
    "full_params inside a jit": refused(
        lambda _: jax.jit(gshard.full_params)(kept()[0]), "full_params", "inside jax.jit"
    ),
    "eval step with a loss that returns text": refused(
        lambda _: gshard.make_eval_step(lambda p, b: "a", kept()[1])(kept()[0], BATCH), "'a'"
    ),
    "eval step with a training state of another level": refused(
        lambda _: gshard.make_eval_step(loss_fn, kept()[1])(kept("p_g_os")[0], BATCH), "stored on"
    ),
}
