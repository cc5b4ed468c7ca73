"""Checks, in the reduction of the loss, that all processes are at the same batch and program.

Collectives meet in the order of the calls: the nth call of a step on one process meets the nth call
on another, whatever batches they give. So a process that skips a batch trains on, its examples one
batch ahead of the others', until it lacks a call at the end. Each device adds a few numbers to the
reduction of the loss: that of the batch, if a loader of gshard gave it, that of the program,
checksums of the scalars of state and batch, and their squares. By the Cauchy-Schwarz inequality the
numbers are equal exactly if the sum of their squares is the square of their sum, divided by how
many there are.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import NamedSharding

from gshard._util.random_bits import mixed
from gshard.data.batch_number import number_of
from gshard.distributed.agree import spans_processes
from gshard.sharding.plan import Plan
from gshard.train.late_checks import late_checks
from gshard.train_state import Components

_ADVICE = (
    "Decide on all processes alike whether a batch is used, from its number or from a value that "
    "is the same on all."
)


class _Call(NamedTuple):
    """What is known of a call until its sums are there."""

    call: int  # how many calls of this step there were
    batch: int | None
    program: int
    sums: jax.Array


class BatchNumbers:
    """The numbers of one step's calls. It is off in one process, and inside a user's trace."""

    def __init__(self, plan: Plan):
        self.is_on: bool = spans_processes(plan)
        self._modulus = 1 << _bits(plan.group.devices)
        self._plan = plan
        self._rows: dict[tuple[int | None, int], jax.Array] = {}
        self._count = 0

    def row(self, batch: Any, program: int, leaf: Any = None) -> jax.Array | None:
        """The numbers that each device adds to the reduction of the loss, in the layout of a batch.

        None inside a trace of the user's, of the batch or of the given leaf of the state.
        Every row is made once: no step waits for a copy to the devices.
        """
        if not self.is_on or any(
            isinstance(x, core.Tracer) for x in jax.tree.leaves((batch, leaf))
        ):
            return None
        number = number_of(batch)
        key = None if number is None else number % self._modulus, program % self._modulus
        if key not in self._rows:
            known, n, p = key[0] is not None, key[0] or 0, key[1]
            row = np.array([known, n, n * n, p, p * p], np.float32)
            rows = np.broadcast_to(row, (self._plan.group.devices, len(row)))
            sharding = NamedSharding(self._plan.mesh, self._plan.device_spec)
            self._rows[key] = jax.make_array_from_callback(
                rows.shape, sharding, lambda index: rows[index]
            )
        return self._rows[key]

    def add(self, batch: Any, program: int, sums: jax.Array | None) -> None:
        """Records a call, whose sums are not known yet."""
        if sums is not None:
            self._count += 1
            call = _Call(self._count, number_of(batch), program, sums)
            late_checks(self._plan).add(partial(_fault_of, call, self._plan.group.devices))


def with_scalars(row: jax.Array, parts: Components, batch: Any, plan: Plan) -> jax.Array:
    """Adds checksums of the scalars of the state and of those of the batch.

    Those of the state are the step number, random keys and hyperparameters, such as a learning
    rate. Each device computes the checksums from its own copies, inside the program.
    """
    number = partial(_checksum, step=parts.step, bits=_bits(plan.group.devices))
    state, given = number((parts.step, parts.opt_state, parts.non_trainable)), number(batch)
    columns = jnp.stack([state, state * state, given, given * given])
    return jnp.concatenate([row, jnp.broadcast_to(columns, (len(row), 4))], axis=1)


def _checksum(tree: Any, step: jax.Array, bits: int) -> jax.Array:
    """A number of `bits` bits, in float32, of the scalars and the random keys of a tree.

    It depends on the step, so that two values with the same number differ in another step.
    """
    number = mixed(jnp.asarray(step).astype(jnp.uint32))
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jnp.sum(jax.random.key_data(x), dtype=jnp.uint32)
        if jnp.ndim(x):
            continue
        for part in (x.real, x.imag) if jnp.issubdtype(x.dtype, jnp.complexfloating) else (x,):
            if part.dtype == bool or jnp.issubdtype(part.dtype, np.number):
                floats = jnp.issubdtype(part.dtype, np.floating)
                wide = part.astype(jnp.float32 if floats else jnp.int32)
                number = mixed(number ^ jax.lax.bitcast_convert_type(wide, jnp.uint32))
    return (number >> (32 - bits)).astype(jnp.float32)


def _bits(devices: int) -> int:
    """How many bits the numbers have, so that sums of their squares are exact in float32."""
    return min(6, (24 - (devices - 1).bit_length()) // 2)


def _fault_of(call: _Call, devices: int) -> str:
    sums = np.nan_to_num(np.asarray(call.sums)).astype(int).tolist()
    known, total, squares, program, program_squares, *scalars = sums
    state, state_squares, given, given_squares = scalars
    if program_squares * devices != program * program or known > devices:
        return (
            f"in call {call.call} of this step another process ran a different program, or the "
            "processes had called their train steps and eval steps in different orders. "
            f"{_ADVICE}"
        )
    if state_squares * devices != state * state:
        return (
            f"in call {call.call} of this step the processes gave different states: the step "
            "number differs, a random key, a scalar of the optimizer such as a learning rate, or a "
            "scalar field of your own. A process gave an older state, or set another value. Keep "
            "what the step returns, and set such values on all processes alike."
        )
    if given_squares * devices != given * given:
        return (
            f"in call {call.call} of this step the processes gave batches with different scalars. "
            "A scalar is one value of the whole batch: compute it alike on all processes, or give "
            "every example its own entry of an array."
        )
    if squares * known == total * total:
        return ""
    own = call.batch
    if own is None:
        return f"the processes gave different batches in call {call.call} of this step. {_ADVICE}"
    modulus = 1 << _bits(devices)
    n = own % modulus
    first = total - n * known
    apart = (squares - 2 * n * total + n * n * known) / first if first else 0
    apart = round((apart + modulus / 2) % modulus - modulus / 2)
    other = f"batch {own + apart}" if apart else "others"
    return (
        f"in call {call.call} of this step this process gave batch {own} of its loader and "
        f"another process gave {other}: one of them skipped or repeated a batch. {_ADVICE}"
    )
