"""A wrapped optimizer: an `nnx.Optimizer` with Paddle's `step()` and `clear_grad()`."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp

from gshard._util.errors import CallOrderError, GShardError
from gshard._util.validation import shown
from gshard.sharding.plan import ShardedTransformation
from gshard.wrapped.state_dict import (
    NamedArrays,
    check_optimizer_values,
    full_values,
    name_arrays,
    put_values,
    set_values,
)
from gshard.wrapped.wrapped_model import Keeping, kept

LEARNING_RATE = "learning_rate"


class StepVariable:
    """The Variable that counts the steps of an optimizer; a call runs one step."""

    def __init__(self, optimizer: WrappedOptimizer, count: Any):
        self._optimizer, self._count = optimizer, count

    def __call__(self) -> None:
        """Updates model and optimizer.

        The optimizer's old arrays are donated; the model's old arrays stay valid.
        """
        kept(self._optimizer).step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._count, name)

    @property
    def value(self) -> Any:
        """The number of steps."""
        return self._count[...]

    @value.setter
    def value(self, value: Any) -> None:
        self._count[...] = value

    def __repr__(self) -> str:
        return repr(self._count)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _of_count(operator: str) -> Any:
    return lambda self, *args: getattr(self._count, operator)(*args)


# Operators are looked up in the class, not by `__getattr__`.
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_OTHERS = ("jax_array", "eq", "getitem", "setitem", "int", "float", "index", "bool")
for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *_OTHERS):
    setattr(StepVariable, f"__{_name}__", _of_count(f"__{_name}__"))
# To functions of JAX it is the Variable, which is a pytree.
jax.tree_util.register_pytree_node(
    StepVariable, lambda step: ((step._count,), None), lambda _, children: children[0]
)


class WrappedOptimizer(Keeping):
    """The methods that an optimizer has once it is wrapped; `update(model, grads)` is NNX's."""

    __slots__ = ()
    _gshard_instead = {
        "zero_grad": "Call optimizer.clear_grad().",
        "load_state_dict": "Call optimizer.set_state_dict(values).",
        "param_groups": "Call optimizer.get_lr() and optimizer.set_lr(value).",
        "defaults": "Its hyperparameters are the arguments of optimizer.tx; the learning rate is "
        "optimizer.get_lr().",
        "state": "Call optimizer.state_dict(), or read optimizer.opt_state.",
    }

    @property
    def step(self) -> StepVariable:
        """`optimizer.step()` updates the model by the gradients of `backward`, which stay.

        `optimizer.step[...]` is the number of steps, as in NNX.

        Raises:
          GShardError: there are no gradients, or they are not reduced, or scaled.
        """
        return StepVariable(self, vars(self)["step"])

    @step.setter
    def step(self, value: Any) -> None:
        vars(self)["step"] = value

    def update(self, model: Any, grads: Any, /, **kwargs: Any) -> Any:
        """Calls `nnx.Optimizer.update`; refuses scaled gradients of `backward`, and its None."""
        if not isinstance(cast(Any, self).tx, ShardedTransformation):
            raise GShardError(
                "optimizer.tx was replaced after wrapping, and the optimizer's state is that of "
                "the first one. For another learning rate make the optimizer with "
                "optax.inject_hyperparams(optax.adamw)(learning_rate=...), and call "
                "optimizer.set_lr(value). For another optimizer wrap model and optimizer again."
            )
        keep = getattr(self, "_gshard", None)
        if keep is not None and grads is keep.grads:
            keep.take()
            keep.refuse_scaled()
            keep.refuse_missing()
        own: Any = super()
        return own.update(model, grads, **kwargs)

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Drops the gradients of the model; `set_to_zero` makes no difference."""
        del set_to_zero
        kept(self).clear()

    clear_gradients = clear_grad

    def minimize(self, *_: Any, **__: Any) -> NoReturn:
        """Raises an error: as in Paddle, a wrapped optimizer has no `minimize`."""
        raise CallOrderError(
            "a wrapped optimizer has no minimize(). Call model.backward(loss_fn, batch), "
            "optimizer.step() and optimizer.clear_grad()."
        )

    def get_lr(self) -> float:
        """Returns the learning rate of the next step; with a schedule, that of the last one."""
        return float(self._gshard_hyperparams("get_lr")[LEARNING_RATE])

    def set_lr(self, value: Any) -> None:
        """Sets the learning rate from the next step on; nothing is recompiled.

        All processes must set the same one. They compare what they have set at calls 1, 2, 4, 8,
        ..., and in `state_dict`.

        Raises:
          GShardError: the value is not a number >= 0, the optimizer keeps no rate, or the processes
            have set different ones.
        """
        number = value.item() if getattr(value, "shape", None) == () else value
        fits = isinstance(number, Real) and not isinstance(number, bool)
        if not fits or not 0 <= float(number) < math.inf:
            raise GShardError(f"set_lr({shown(value)}): a learning rate must be a number >= 0.")
        old = self._gshard_hyperparams("set_lr")[LEARNING_RATE]
        if float(number) % 1 and jnp.issubdtype(old.dtype, jnp.integer):
            raise GShardError(
                f"set_lr({shown(value)}): the optimizer keeps its learning rate as {old.dtype}, "
                "since it was built with an integer. Build it with a float, such as 1.0."
            )
        keep = kept(self)
        keep.rates.add(keep.plan, [f"{LEARNING_RATE}={float(number)}"])
        stored = {name: x for name, x in self._gshard_named().items() if x[0] is old}
        put_values(self, dict.fromkeys(stored, number), stored)

    def state_dict(self) -> dict[str, Any]:
        """Returns the optimizer's state by dotted path, as full NumPy arrays.

        All processes must call it, except at level "dp".

        Raises:
          GShardError: the processes have set different learning rates.
        """
        keep = kept(self)
        if keep.plan.level.shards_opt_state:  # at "dp" a process may call it alone
            keep.rates.compare(keep.plan)
        return full_values(self._gshard_named())

    def set_state_dict(self, state_dict: Any) -> None:
        """Sets the full state of the optimizer; its layouts stay the same.

        Raises:
          GShardError: names are missing or unknown, or a shape differs; nothing is changed.
        """
        stored = self._gshard_named()
        check_optimizer_values(state_dict, stored)
        set_values(self, state_dict, stored)

    def _gshard_named(self) -> NamedArrays:
        keep = kept(self)
        parts, layouts = keep.plan.kind.split((keep.model, self)), keep.plan.layouts

        def of_state(x: Any) -> dict[str, Any]:
            return {"step": x.step, "inner": x.opt_state.inner, "master": x.opt_state.master}

        return name_arrays((of_state(parts), of_state(layouts)))

    def _gshard_hyperparams(self, call: str) -> dict[str, Any]:
        keep = kept(self)
        inner = keep.plan.kind.split((keep.model, self)).opt_state.inner

        def has(node: Any) -> bool:
            return LEARNING_RATE in (getattr(node, "hyperparams", None) or {})

        found = [x for x in jax.tree.leaves(inner, is_leaf=has) if has(x)]
        if len(found) > 1:
            raise GShardError(
                f"{call}: this optimizer has {len(found)} injected learning rates. Inject only one."
            )
        if not found:
            raise GShardError(
                f"{call}: this optimizer keeps no learning rate, only a number or a schedule in "
                "its code. Build it as optax.inject_hyperparams(optax.adamw)(learning_rate=...), "
                "with a number or a schedule, also inside a chain."
            )
        if call == "set_lr" and LEARNING_RATE in getattr(found[0], "hyperparams_states", {}):
            raise GShardError(
                "set_lr: the learning rate follows a schedule, which would set it again at the "
                "next step. Build the optimizer with a number."
            )
        return found[0].hyperparams
