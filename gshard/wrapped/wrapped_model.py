"""A wrapped model: an instance of the user's own class with additional methods.

It is a copy with sharded arrays whose class derives from the user's: what is not defined here is
the model's own, paths have no prefix, and NNX transforms take it as it is.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, NoReturn, cast

import jax
import numpy as np
from flax import nnx
from jax import core

from gshard._util.errors import GShardError, MissingAttributeError, some, warn
from gshard._util.in_flight import limit_in_flight
from gshard._util.pytree import flatten
from gshard._util.validation import flag, shown
from gshard.data.batch import shard_batch
from gshard.distributed.agree import spans_processes
from gshard.sharding.layout import Layout
from gshard.sharding.plan import Plan
from gshard.train.non_trainable import non_trainable_layouts
from gshard.wrapped.accumulation import Accumulation
from gshard.wrapped.compiled_fns import OnModel, split_inputs
from gshard.wrapped.state_dict import (
    NamedArrays,
    advice_on_strict,
    check,
    differing_names,
    full_values,
    name_arrays,
    set_model,
    set_values,
)

_every: weakref.WeakSet[Accumulation] = weakref.WeakSet()

_SAME = "A wrapped model is an instance of your own class and has its attributes: use model itself."
_DTYPE = "Give the layers dtype=jnp.bfloat16: they then compute in it."
_PLACED = "Arrays are placed where model.plan says. Choose devices when you wrap the model."


class Keeping:
    """A wrapped object; its own data is in a slot, which NNX does not see and copies lack."""

    __slots__ = ("_gshard",)
    plan: Plan  # the layout of every array; print(model.plan) shows a table
    _gshard: Accumulation
    _gshard_forward: OnModel  # of the class, so that copies have it too
    _gshard_instead: ClassVar[Mapping[str, str]] = {}  # of what upstream has: what to use

    def __getattr__(self, name: str) -> Any:
        home = next((x for x in type(self).__mro__ if name in vars(x)), object)
        if issubclass(home, Keeping):  # a property that a copy lacks: it says why
            return object.__getattribute__(self, name)
        above: Any = super()
        try:
            return getattr(above, "__getattr__", above.__getattribute__)(name)
        except AttributeError as error:
            if name in self._gshard_instead:
                raise MissingAttributeError(
                    f"{type(self).__name__} has no attribute {name!r}. {self._gshard_instead[name]}"
                ) from error
            raise

    def __copy__(self) -> Any:
        above: Any = super()
        if hasattr(above, "__copy__"):  # the user's own
            return above.__copy__()
        made = object.__new__(type(self))
        made.__setstate__(self.__getstate__())
        return made

    def _gshard_plain(self) -> Any:
        """Returns the same object as an instance of the user's own class."""
        made = object.__new__(type(self).__bases__[1])
        vars(made).update(vars(self))
        return made

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise GShardError(
            f"a {type(self).__name__} cannot be pickled: it belongs to the devices of this "
            "process. Pickle its state_dict(), and give that to set_state_dict of another."
        )


class LoadedNames(NamedTuple):
    """The names that `load_state_dict` found in one of both alone, as PyTorch names them."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Wrapped(Keeping):
    """The methods that a model has once it is wrapped."""

    __slots__ = ()
    _gshard_instead = {
        "module": _SAME,
        "_layers": _SAME,
        "zero_grad": "Call model.clear_gradients().",
        "get_all_parameters": "Call model.state_dict(); model(x) works without it.",
        "to": _PLACED,
        "cuda": _PLACED,
        "cpu": "Call model.state_dict() for the values on the host.",
        "buffers": "model.state_dict() has parameters and buffers by name.",
        "named_buffers": "model.state_dict() has parameters and buffers by name.",
        "named_parameters": "nnx.to_flat_state(nnx.state(model, nnx.Param)) has pairs of a path "
        "and a Variable; model.state_dict() has the arrays by name.",
        **dict.fromkeys(("half", "bfloat16", "float", "astype"), _DTYPE),
        "clip_grad_norm_": "Make the optimizer optax.chain(optax.clip_by_global_norm(...), ...).",
        "grad": "The gradients of all parameters are model.grads.",
        "compile": "Leave it out: backward and model(x) are compiled.",
        "forward": "Call model(x).",
        "join": "Use `with gshard.pytorch.Join([model, optimizer]):`.",
        "device": "print(model.plan) shows where arrays are.",
        "training": "NNX has a flag in each layer: model.train() and model.eval() set them.",
        **dict.fromkeys(
            ("children", "named_children", "sublayers", "named_sublayers", "apply"),
            "Call nnx.iter_modules(model).",
        ),
        "require_backward_grad_sync": "Call backward within `with model.no_sync():`.",
        "set_requires_gradient_sync": "Call backward within `with model.no_sync():`.",
        "named_modules": "Call nnx.iter_modules(model).",
        "modules": "Call nnx.iter_modules(model).",
        "requires_grad_": (
            'To freeze "head", train the rest: nnx.Optimizer(model, tx, wrt=nnx.All(nnx.Param, '
            'nnx.PathContains("body"))). With a ZeroRedundancyOptimizer set model.grads["head"] = '
            "None before each step."
        ),
        "register_comm_hook": "bucket_cap_mb= and no_sync() say how and when gradients are sent.",
    }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's output; outside jit, one compiled function computes it.

        With several processes each passes its own examples, and the output spans all of them.
        Arrays with as many entries as the first one are examples; others are equal everywhere.
        """
        own: Any = super()
        arrays = jax.tree.leaves((nnx.state(self), args, kwargs))
        if not any(isinstance(x, core.Tracer) for x in arrays):
            given, rest = split_inputs((args, kwargs))
            self._gshard_settle()
            examples = next((x.shape[0] for x in given if x.ndim), 0)
            with jax.disable_jit(False):  # else no tracer ends the recursion
                placed = [_placed(x, self.plan, examples) for x in given]
                out = self._gshard_forward(cast(Any, self), placed, fixed=rest)
            limit_in_flight(out)
            return out
        pairs = self._gshard_pairs()
        padded = _padded(pairs)
        on_host = [y.path for x, y in pairs if jax.typeof(x).memory_space == jax.memory.Space.Host]
        if padded or on_host:
            how = "with padding" if padded else "in host memory"
            raise GShardError(
                "the model cannot be called inside a transform of JAX or NNX: there it has "
                f"{some(padded or on_host)} in stored form, {how}. Compute gradients with "
                "gshard.value_and_grad(loss_fn, model.plan)(model, batch), and outputs with "
                "model(x) outside of jit."
            )
        return own.__call__(*args, **kwargs)

    @property
    def grads(self) -> Any:
        """The reduced gradients as an `nnx.State`, or None: the sum over calls of `backward`.

        They have the shapes of the parameters: at `p_g_os` they are padded with zeros where these
        are. At other levels those that are sharded with padding are all-gathered when they are
        read, so all processes must read them, and stay full until the next `backward`. They can be
        set, to others of the same structure, such as clipped ones, or to None, which drops them.
        With a `ZeroRedundancyOptimizer`, `model.grads["head"] = None` drops those of a part.

        Raises:
          GShardError: some are not reduced yet, or the optimizer updates during `backward`.
        """
        keep = kept(self)
        keep.refuse_waiting()
        if keep.updating is not None:
            raise GShardError(
                "grads: the optimizer updates during backward (overlap_with_ddp=True), which keeps "
                "no gradients. Clip in the optimizer, optax.chain(optax.clip_by_global_norm(...), "
                "...), or make it without overlap_with_ddp."
            )
        return keep.unpadded()

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "grads":
            if name in self._gshard_instead:
                getattr(self, name)  # where the model lacks it, this says what to use instead
            super().__setattr__(name, value)
            return
        keep = kept(self)
        if value is None:  # as PyTorch's users drop them
            keep.clear()
            return
        if jax.tree.structure(value) != jax.tree.structure(keep.take()):
            raise GShardError(
                "grads: the new gradients have another structure than those of backward. Make "
                "them of model.grads, such as jax.tree.map(f, model.grads)."
            )
        keep.grads = value

    def _gshard_refuse_waiting(self) -> None:
        if hasattr(self, "_gshard"):
            self._gshard.refuse_waiting()

    @property
    def backward(self) -> Accumulation:
        """`model.backward(loss_fn, batch)`: forward and backward pass; adds to `grads`."""
        return kept(self)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Keeps gradients of `backward` on their devices; the first call outside reduces them.

        Buffers that the loss changes are each device's own within the block, as batch statistics
        are in Paddle; at its end, or when `model(x)` or `state_dict` needs them, they are averaged.
        """
        return kept(self).no_sync()

    def train(self, mode: bool = True, **attributes: Any) -> None:
        """Switches to training, or with `mode=False` to evaluation, as PyTorch's `train` does.

        A `train` that the model defines itself is called as it is.
        """
        own: Any = super()
        if own.train.__func__ is not nnx.Module.train:
            return own.train(*(() if mode is True else (mode,)), **attributes)
        (own.train if flag("mode", mode) else own.eval)(**attributes)

    def clear_gradients(self) -> None:
        """Drops all gradients."""
        kept(self).clear()

    def parameters(self, include_sublayers: bool = True) -> list[Any]:
        """Returns the trained Variables."""
        state = nnx.to_flat_state(nnx.state(self, self._gshard_forward.wrt))
        return [x for path, x in state if include_sublayers or len(path) == 1]

    def state_dict(
        self, destination: dict[str, Any] | None = None, include_sublayers: bool = True
    ) -> dict[str, Any]:
        """Returns parameters and buffers by dotted path, as full NumPy arrays.

        Among the buffers are the keys and counts of an `nnx.Rngs` (a key as its data).

        Args:
          destination: a dictionary to add them to; by default a new one.
          include_sublayers: False returns only those of this module itself.
        """
        stored = self._gshard_named()
        if not include_sublayers:
            stored = {name: x for name, x in stored.items() if "." not in name}
        found = {} if destination is None else destination
        found.update(full_values(stored))
        return found

    def set_state_dict(
        self, state_dict: Any, use_structured_name: bool = True
    ) -> tuple[list[str], list[str]]:
        """Sets parameters and buffers to full values; their layouts stay the same.

        Args:
          state_dict: what `state_dict` returned, at any level and on any number of devices.
          use_structured_name: must be True: a Variable has no name but its path.

        Returns:
          Names that the state dict lacks, and names that the model does not know; a warning lists
          both.

        Raises:
          GShardError: a value has another shape; nothing is changed.
        """
        if use_structured_name is not True:
            raise GShardError(
                f"set_state_dict: use_structured_name={shown(use_structured_name)}, but an NNX "
                "Variable has no name except its path in the model. Leave it out."
            )
        return set_model(self, state_dict, self._gshard_named())

    set_dict = load_dict = set_state_dict

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> LoadedNames:
        """Sets parameters and buffers as `set_state_dict` does, with PyTorch's check of names.

        Args:
          state_dict: what `state_dict` returned, at any level and on any number of devices.
          strict: whether a missing or unknown name is an error; else the result names it.

        Returns:
          Names that the state dict lacks, and names that the model does not know.

        Raises:
          GShardError: with `strict`, names differ; or a value has another shape. Nothing is
            changed.
        """
        stored = self._gshard_named()
        found = LoadedNames(*check(state_dict, stored, "load_state_dict"))
        if flag("strict", strict) and (strange := differing_names(*found, "the model")):
            raise GShardError(
                f"load_state_dict: {strange}.{advice_on_strict(state_dict, stored)} Nothing was "
                "changed."
            )
        set_values(self, state_dict, stored)
        return found

    def _gshard_settle(self) -> None:
        """Combines the buffers that `no_sync` left on each device; a copy has none."""
        if hasattr(self, "_gshard"):
            self._gshard.settle()

    def _gshard_pairs(self) -> list[tuple[Any, Layout]]:
        """Returns the parameters with their layouts, without those added after wrapping."""
        layouts = {x.path: x for x in jax.tree.leaves(self.plan.params)}
        paths, arrays, _ = flatten(self.plan.kind.split_target(cast(Any, self), {}).params)
        pairs = zip(paths, arrays, strict=True)
        return [(x, layouts[path]) for path, x in pairs if path in layouts]

    def _gshard_named(self) -> NamedArrays:
        plan = self.plan
        self._gshard_settle()
        parts = plan.kind.split_target(cast(Any, self), {})
        layouts = non_trainable_layouts(parts.non_trainable, plan)
        return name_arrays((parts.params, plan.params), (parts.non_trainable, layouts))


def wrapped(target: Any, kind: type, keep: Accumulation) -> Any:
    """Returns the same model or optimizer as an instance of its class and of `kind`.

    `target` must not be used afterwards: both have the same Variables.
    """
    own = type(target)
    body = {
        "__doc__": own.__doc__,
        "__module__": own.__module__,
        "plan": keep.plan,
        "_gshard_forward": keep.forward,
    }
    padded = any(x.padding for x in jax.tree.leaves(keep.plan.params))
    if padded and isinstance(target, nnx.Module):
        body |= {name: _warns_of_padding(f) for name, f in _methods(own).items()}
    # NNX would make every new class a pytree.
    flags: dict[str, Any] = {"pytree": False} if jax.tree_util.all_leaves([target]) else {}
    made = object.__new__(type(f"{kind.__name__}[{own.__name__}]", (kind, own), body, **flags))
    vars(made).update(vars(target))
    object.__setattr__(made, "_gshard", keep)
    if isinstance(target, nnx.Module):
        keep.model = made
        _every.add(keep)
    else:
        keep.optimizer = made
    return made


def _padded(pairs: list[tuple[Any, Layout]]) -> list[str]:
    """Returns the paths of the parameters that have their padding; in `backward` none has."""
    return [layout.path for x, layout in pairs if x.shape != layout.shape]


def _methods(own: type) -> dict[str, Any]:
    """Returns the public methods that a model's class defines in addition to `nnx.Module`."""
    names = (x for x in dir(own) if not (x.startswith("_") or hasattr(nnx.Module, x)))
    found = {name: inspect.getattr_static(own, name) for name in names}
    return {name: x for name, x in found.items() if inspect.isfunction(x)}


def _warns_of_padding(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if padded := _padded(self._gshard_pairs()):
            warn(
                f"{method.__qualname__} sees {some(padded, 3)} as stored, padded with zeros. If it "
                "computes with them, call it in __call__: outside of backward, only model(x) "
                "removes the padding. Or wrap the model with exclude_layer= of these layers."
            )
        return method(self, *args, **kwargs)

    return call


def _placed(x: Any, plan: Plan, examples: int) -> jax.Array:
    """Shards an input by examples where they divide evenly; replicates it otherwise.

    With several processes, each passes its own `examples`, whose number must be a multiple of its
    devices.
    """
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return x
    if spans_processes(plan):  # also without an example, which is refused on all of them
        is_batch = bool(x.ndim) and x.shape[0] == examples
    else:
        is_batch = bool(x.ndim and x.shape[0]) and x.shape[0] % plan.group.batch_shards == 0
    if is_batch:
        return shard_batch(x, plan)
    try:
        # A copy, since JAX may use NumPy's memory as it is, which the caller may fill again.
        return jax.device_put(np.array(x) if isinstance(x, np.ndarray) else x, plan.sharding())
    except AssertionError as error:  # of JAX, which compares the values of the processes
        raise GShardError(
            f"model(...): an input {list(x.shape)} differs between the processes, and is not an "
            f"array of examples: the first input has {examples}. Make it equal on all of them."
        ) from error


def follow(model: Any, plan: Plan) -> None:
    """Switches a wrapped model to another plan of its parameters, and drops its gradients."""
    keep = kept(model)
    keep.follow(plan)
    type(model).plan, type(model)._gshard_forward = plan, keep.forward


def free_dropped() -> None:
    """Frees the wrapped models that the program has dropped: they are in reference cycles."""
    if _every:
        gc.collect()


def keepers(variables: list[Any]) -> list[Accumulation | None]:
    """Returns, for each Variable, the accumulation of its wrapped model, or None."""
    of = {id(x): keep for keep in _every for x in keep.model.parameters()}
    return [of.get(id(x)) for x in variables]


def kept(target: Any) -> Accumulation:
    """Returns the accumulation of a wrapped model or optimizer; refuses a copy, which has none."""
    found = getattr(target, "_gshard", None)
    if found is None or not any(target is x for x in (found.model, found.optimizer)):
        raise MissingAttributeError(  # hasattr(copy, "backward") is False
            "this is a copy of a wrapped model or optimizer, perhaps the one inside a jitted "
            "function, and keeps no gradients. Call backward and step on the original, outside "
            "jit; inside your own nnx.jit use loss, grads = gshard.value_and_grad(loss_fn, "
            "model.plan)(model, batch) and optimizer.update(model, grads)."
        )
    return found
