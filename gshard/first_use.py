"""Gather at first use: a loss on whole parameters, evaluated with divided ones.

The loss is traced to a jaxpr and evaluated equation by equation. A divided leaf stays divided
through casts (so that the compute dtype travels), into `jit`, `checkpoint` and the scanned inputs
of `scan`, and is gathered where something first needs it whole. Hence a scanned model holds one
layer at a time, and a `checkpoint` gathers again in the backward pass. The model is not changed.

The gradient of a leaf arrives at its *tap*, a second input of zeros that nothing reads: shaped like
the part, it receives the gradient scattered where it arises; shaped like the whole, the local one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from gshard import constraints
from gshard.collectives import gather, scatter
from gshard.equations import CHECKPOINTS, JITS, bind, body_of, scan_sizes
from gshard.errors import some, warn
from gshard.layout import DEVICE, Layout
from gshard.places import Places

_VIEWS = ("transpose", "reshape", "squeeze", "convert_element_type", "reduce_precision", "copy")


@dataclass(frozen=True)
class Use:
    """How a leaf becomes whole, and how its gradient leaves.

    Attributes:
      stored: the layout at rest; gathered when it is divided.
      reduced: the layout of the gradient at the tap; scattered when it is divided.
      purpose: what the gather is counted as.
      converts: the gradient is scattered in the dtype of `reduced`; else in the one it arises in.
    """

    stored: Layout
    reduced: Layout
    purpose: str = "gather"
    converts: bool = False

    @property
    def pointless(self) -> bool:
        """Nothing to gather and nothing to scatter."""
        return self.stored.dim is None and self.reduced.dim is None

    @property
    def scannable(self) -> bool:
        """A scan over dimension 0 can take the leaf divided."""
        others = self.stored.user and self.stored.user[0]
        return self.stored.dim != 0 and self.reduced.dim != 0 and not others

    def layer(self) -> Use:
        """The use of one layer of a stack."""
        return dataclasses.replace(self, stored=self.stored.layer(), reduced=self.reduced.layer())

    def tap(self) -> jax.Array:
        """Zeros that receive the gradient."""
        return jnp.zeros(self.reduced.part_shape, self.reduced.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(use: Use, stored: jax.Array, tap: jax.Array) -> jax.Array:
    del tap
    return gather(stored, use.stored, use.purpose)


def _whole_forward(use: Use, stored: jax.Array, tap: jax.Array) -> tuple[jax.Array, None]:
    return _whole(use, stored, tap), None


def _whole_backward(use: Use, _: None, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The stored leaf is never differentiated; its cotangent is dead code.
    nothing = jnp.zeros(use.stored.part_shape, cotangent.dtype)
    summed = cotangent.astype(use.reduced.dtype) if use.converts else cotangent
    return nothing, scatter(summed, use.reduced)


_whole.defvjp(_whole_forward, _whole_backward)


class _Divided:
    """A leaf that is not whole yet. Made whole once per scope, however often it is used there."""

    def __init__(self, use: Use, stored: jax.Array, tap: jax.Array):
        self.use, self.stored, self.tap = use, stored, tap
        self._result: jax.Array | None = None

    def whole(self) -> jax.Array:
        result = self._result
        if result is None:
            result = self._result = _whole(self.use, self._fetched(), self.tap)
        return result

    def cast(self, dtype: Any) -> _Divided:
        tap = self.tap if self.use.converts else self.tap.astype(dtype)
        use = dataclasses.replace(self.use, stored=self.use.stored.at(DEVICE))
        return _Divided(use, self._fetched().astype(dtype), tap)

    def _fetched(self) -> jax.Array:
        """The part, on the device."""
        if not self.use.stored.on_host:
            return self.stored
        return jax.device_put(self.stored, jax.memory.Space.Device)


def with_divided(
    fun: Callable[..., Any],
    uses: Sequence[Use | None],
    axes: Sequence[str],
    leaves: Sequence[jax.Array],
    taps: Sequence[jax.Array],
    *args: Any,
) -> Any:
    """`fun(whole leaves, *args)`, its leaves made whole at their first use.

    Runs inside a `shard_map` over the data axes.

    Args:
      fun: takes a list of whole leaves, then `args`; returns a pytree of arrays.
      uses: one per leaf; None for a leaf that is given whole and differentiated as it is.
      axes: the data axes, which `fun` may not constrain.
      leaves: this device's parts (or wholes).
      taps: one per leaf, `use.tap()`; ignored where the use is None.
      *args: further pytrees of arrays, for `fun`.
    """
    values = [
        leaf if use is None else _Divided(use, leaf, tap)
        for use, leaf, tap in zip(uses, leaves, taps, strict=True)
    ]
    abstract = [
        jax.ShapeDtypeStruct(leaf.shape if use is None else use.stored.shape, leaf.dtype)
        for use, leaf in zip(uses, leaves, strict=True)
    ]
    try:
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(abstract, *args)
    except ValueError as error:
        constraints.explain(error, axes)
        raise
    constraints.refuse(closed.jaxpr, axes)
    out = _evaluate(closed.jaxpr, closed.consts, [*values, *jax.tree.leaves(args)])
    return jax.tree.unflatten(jax.tree.structure(shapes), out)


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates one scope; the results are whole."""
    env: dict[Any, Any] = {}
    places = Places(jaxpr)

    def write(variables: Sequence[Any], values: Sequence[Any]) -> None:
        for v, value in zip(variables, values, strict=True):
            once = isinstance(value, _Divided) and places.several(v)
            env[v] = value.whole() if once else value

    def read(v: Any) -> Any:
        return v.val if isinstance(v, core.Literal) else env[v]

    write([*jaxpr.constvars, *jaxpr.invars], [*consts, *args])
    for eqn in jaxpr.eqns:
        with jax.named_scope(str(eqn.source_info.name_stack) or "loss"):
            results = _evaluate_equation(eqn, [read(v) for v in eqn.invars])
        write(eqn.outvars, results)
    return [_make_whole(read(v)) for v in jaxpr.outvars]


def _evaluate_equation(eqn: Any, values: list[Any]) -> Sequence[Any]:
    if not any(isinstance(v, _Divided) for v in values):
        return bind(eqn, values)
    name = eqn.primitive.name
    if name == "convert_element_type":
        return [values[0].cast(eqn.params["new_dtype"])]
    if name in JITS:
        return _evaluate(*body_of(eqn), values)
    if name in CHECKPOINTS:
        return _evaluate_checkpoint(eqn, values)
    if name == "scan":
        return _evaluate_scan(eqn, values)
    return bind(eqn, [_make_whole(v) for v in values])


def _evaluate_checkpoint(eqn: Any, values: list[Any]) -> Sequence[Any]:
    """Rebuilt, so that the gather is inside and happens again in the backward pass."""
    body, consts = body_of(eqn)
    flat, restore = _open(values)
    again = jax.checkpoint(
        lambda *flat: _evaluate(body, consts, restore(flat)),
        policy=eqn.params["policy"],
        prevent_cse=eqn.params["prevent_cse"],
    )
    return again(*flat)


def _evaluate_scan(eqn: Any, values: list[Any]) -> Sequence[Any]:
    """Rebuilt with the gather of scanned leaves in its body; other leaves are gathered before."""
    body, consts = body_of(eqn)
    fixed, carried, _ = scan_sizes(eqn)
    before = [_make_whole(v) for v in values[: fixed + carried]]
    _warn_of_divided_stacks(values[fixed + carried :])
    layers = [
        v if not isinstance(v, _Divided) or v.use.scannable else v.whole()
        for v in values[fixed + carried :]
    ]
    flat, restore = _open(layers, layer=True)

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        out = _evaluate(body, consts, [*before[:fixed], *carry, *restore(x)])
        return out[:carried], out[carried:]

    if any(isinstance(v, _Divided) for v in layers) and not _has_checkpoint(body):
        step = jax.checkpoint(step, policy=_keep_all_but_layers(layers), prevent_cse=False)
    carry, stacked = jax.lax.scan(
        step,
        before[fixed:],
        flat,
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *stacked]


def _warn_of_divided_stacks(values: Sequence[Any]) -> None:
    """Not of those that a rule of the user divides there, knowing that a scan walks it."""
    uses = [v.use for v in values if isinstance(v, _Divided) and not v.use.scannable]
    others = [use.stored.path for use in uses if use.stored.user and use.stored.user[0]]
    if others:
        warn(
            f"a scan walks dimension 0 of {some(others)}, which lies over your own mesh axis: the "
            "stack is made whole over the data axes before the scan, and not a layer at a time."
        )
    uses = [use for use in uses if use.stored.path not in others]
    paths = [use.reduced.path for use in uses if use.reduced.scan_dim != 0]
    if paths:
        warn(
            f"a scan walks dimension 0 of {some(paths)}, which is the divided one: the stack is "
            "made whole before the scan, and not a layer at a time. Name that dimension: "
            f"shard_train_state(..., scan_axes={{'^{paths[0]}$': 0}}), or a pattern for all."
        )


def _keep_all_but_layers(layers: Sequence[Any]) -> Callable[..., bool]:
    """A `jax.checkpoint` policy: a layer made whole, and mere views of it, are made again.

    Else a scan would stack every layer that it made whole for its backward pass. A policy sees a
    primitive and the shapes it is given, so `_whole` is known by the shapes of part and tap.
    """
    uses = [v.use.layer() for v in layers if isinstance(v, _Divided)]
    known = {(use.stored.part_shape, use.reduced.part_shape) for use in uses}

    def policy(primitive: Any, *avals: Any, **_: Any) -> bool:
        if primitive.name.startswith("custom_vjp_call"):
            return tuple(aval.shape for aval in avals) not in known
        if primitive.name == "device_put":  # a part that is fetched
            return avals[0].shape not in {part for part, _ in known}
        return primitive.name not in _VIEWS

    return policy


def _has_checkpoint(jaxpr: Any) -> bool:
    """Whether the user rematerialises in this scope; then what is kept is the user's choice."""
    return any(
        eqn.primitive.name in CHECKPOINTS
        or (eqn.primitive.name in JITS and _has_checkpoint(body_of(eqn)[0]))
        for eqn in jaxpr.eqns
    )


def _open(
    values: Sequence[Any], layer: bool = False
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Flat arrays that may cross into another scope, and what makes them leaves again there."""
    uses = [v.use if isinstance(v, _Divided) else None for v in values]
    flat = [x for v in values for x in ((v.stored, v.tap) if isinstance(v, _Divided) else (v,))]

    def restore(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        return [
            next(rest)
            if use is None
            else _Divided(use.layer() if layer else use, next(rest), next(rest))
            for use in uses
        ]

    return flat, restore


def _make_whole(value: Any) -> Any:
    return value.whole() if isinstance(value, _Divided) else value
