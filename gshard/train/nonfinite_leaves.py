"""Names the parameters whose gradient was not finite, once a step says that some was not.

A step computes the sum of squares of each gradient anyway, for the norm. It returns which of these
are finite on each device: a byte per parameter, which is not communicated.
"""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding

from gshard._util.errors import some
from gshard.distributed.agree import all_gather_text
from gshard.sharding.plan import Plan
from gshard.train_state.nonfinite import Watch

_NAMED = 3


def watch_of(plan: Plan, most: int | None, has_scaler: bool) -> Watch:
    """Returns the watch of a step, which names parameters by their paths."""
    return Watch(most, partial(describe, plan), has_scaler)


def flags_sharding(plan: Plan) -> NamedSharding:
    """The sharding of the flags, booleans (devices, parameters): each device has its own row."""
    return NamedSharding(plan.mesh, jax.P((*plan.group.axes, *dict(plan.group.model_axes))))


def describe(plan: Plan, flags: jax.Array, everywhere: bool = True) -> str:
    """Lists the first parameters whose gradient is not finite, such as `a/kernel, b/bias`.

    Args:
      plan: that of the step.
      flags: which gradients are finite, of one step.
      everywhere: on a device of any process, in which case all of the mesh must call this;
        otherwise on those of this process, where there may be none.
    """
    own = np.all([np.asarray(x.data) for x in flags.addressable_shards], axis=(0, 1))
    if everywhere:
        sent = np.packbits(own).tobytes().hex()
        texts = all_gather_text(sent, plan.mesh, what="a step that was not finite")  # pyright: ignore[reportArgumentType]
        rows = [np.frombuffer(bytes.fromhex(text), np.uint8) for text in texts.values()]
        own = np.unpackbits(np.bitwise_and.reduce(rows), count=own.size).astype(bool)
    paths = [x.path for x, ok in zip(jax.tree.leaves(plan.grads), own, strict=True) if not ok]
    if not paths:
        every_sum = "no single parameter, but the sum of all squares is too large for float32"
        return every_sum if everywhere else ""
    every = len(paths) == own.size > _NAMED
    return f"all {own.size} parameters, such as {paths[0]}" if every else some(paths, _NAMED)
