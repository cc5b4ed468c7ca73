"""Random keys: folded with step, micro-batch and device, and traced to the inputs they come from.

A loss of the global batch draws what one device draws, so its keys are folded with the step alone.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp

from gshard._util.arrays import is_key
from gshard._util.errors import GShardError, some
from gshard._util.jaxpr import VIEWS
from gshard._util.jaxpr_dataflow import flow, flow_inside
from gshard._util.pytree import flatten
from gshard._util.validation import shown

DEVICE = -1  # stands for the index of the device, among the positions of inputs
_DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator")


def typed_key(rng: Any) -> Any:
    """Converts `rng=` to a typed key; an old-style key (uint32) of the default kind is wrapped."""
    if rng is None or (isinstance(rng, jax.Array) and is_key(rng) and not rng.shape):
        return rng
    kind = jnp.shape(jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))))
    if getattr(rng, "dtype", None) == jnp.uint32 and jnp.shape(rng) == kind:
        return jax.random.wrap_key_data(jnp.asarray(rng))
    if isinstance(rng, jax.Array) and is_key(rng):
        raise GShardError(f"rng= holds keys of shape {rng.shape}. Pass one of them.")
    if getattr(rng, "dtype", None) == jnp.uint32:
        raise GShardError(
            f"rng= is uint32{list(jnp.shape(rng))}; an old-style key must be uint32{list(kind)}, "
            "as for JAX's default generator. Pass a typed key: jax.random.key(0), or "
            'jax.random.key(0, impl="rbg") for another generator.'
        )
    raise GShardError(f"rng={shown(rng)} is not a PRNG key. Pass one, such as jax.random.key(0).")


def fold_keys(tree: Any, *numbers: Any) -> Any:
    """Folds every typed key of a tree with `numbers`, such as device and micro-batch."""

    def fold(x: Any) -> Any:
        if not is_key(x):
            return x
        flat = x.reshape(-1)
        for number in numbers:
            flat = jax.vmap(jax.random.fold_in, (0, None))(flat, number)
        return flat.reshape(x.shape)

    return jax.tree.map(fold, tree)


def refuse_keys(updates: Any, raw: Set[str] = frozenset()) -> None:
    """Refuses keys that the loss changes; `raw` are paths of arrays used as old-style keys."""
    paths, leaves, _ = flatten(updates)
    keys = [path for path, x in zip(paths, leaves, strict=True) if is_key(x) or path in raw]
    if keys:
        raise GShardError(
            f"the loss changes the PRNG key {some(keys)}, which would differ between devices and "
            "micro-batches. Linen: pass rng= to make_train_step, which folds it with the step "
            "and, under 'per_device', also with device and micro-batch. NNX: draw from nnx.Rngs, "
            "which counts its draws and keeps its key."
        )


@dataclass(frozen=True)
class _Origin:
    """The inputs that a value is computed from, and the position of the one that it equals.

    The inputs are the bits of an integer: sets of thousands of parameters would be copied at every
    equation.
    """

    inputs: int = 0
    itself: int | None = None


@dataclass
class Draws:
    """The random numbers of a traced loss: each draw's inputs, by position, and its shape."""

    raw: set[int] = field(default_factory=set)  # inputs that are used as old-style keys
    drawn: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def without(self, inputs: set[int]) -> list[tuple[int, ...]]:
        """Returns the shapes of the draws whose key is computed from none of these inputs."""
        bits = sum(map(_bit, inputs))
        return [shape for origin, shape in self.drawn if not origin & bits]


def _bit(position: int) -> int:
    return 1 << (position - DEVICE)


def draws_of(jaxpr: Any) -> Draws:
    """Returns the draws of a jaxpr, including those of its inner jaxprs."""
    found = Draws()
    inputs = [_Origin(_bit(i), i) for i in range(len(jaxpr.invars))]
    flow(jaxpr, inputs, partial(_through, found), _Origin())
    return found


def _through(found: Draws, eqn: Any, given: Sequence[_Origin]) -> list[_Origin]:
    """Returns the origins of an equation's results, and adds its draws to `found`."""
    name, inside = eqn.primitive.name, list[Draws]()

    def follow(jaxpr: Any, origins: Sequence[_Origin]) -> list[_Origin]:
        inside.append(Draws())
        return flow(jaxpr, origins, partial(_through, inside[-1]), _Origin())

    outs = flow_inside(eqn, given, follow, _joined, slice_of=lambda x: _Origin(x.inputs))
    if outs is not None:
        # A loop is followed several times; the last pass counts.
        for draws in inside if name == "cond" else inside[-1:]:
            found.raw |= draws.raw
            found.drawn += draws.drawn
        return outs
    if name == "random_wrap" and given[0].itself is not None:
        found.raw.add(given[0].itself)
    inputs = reduce(or_, (x.inputs for x in given), 0)
    if name == "axis_index":
        inputs |= _bit(DEVICE)
    if name in _DRAWS:
        found.drawn.append((inputs, eqn.outvars[0].aval.shape))
    itself = given[0].itself if name in VIEWS and len(given) == 1 else None
    return [_Origin(inputs, itself) for _ in eqn.outvars]


def _joined(*origins: _Origin) -> _Origin:
    same = len({x.itself for x in origins}) == 1
    inputs = reduce(or_, (x.inputs for x in origins), 0)
    return _Origin(inputs, origins[0].itself if same else None)
