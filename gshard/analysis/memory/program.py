"""A traced step as one device runs it: operations on numbered values, with all calls inlined."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

RESHAPED = ("reshape", "squeeze", "bitcast_convert_type")
FREE = -1  # the number of a value that takes no memory: a constant


@dataclass(frozen=True)
class Value:
    """One array of one device.

    Attributes:
      shape: on this device.
      dtype: its dtype.
      factors: number of shards along each dimension of the full array; 1s inside `shard_map`.
    """

    shape: tuple[int, ...]
    dtype: Any
    factors: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The number of bytes; a random key counts as two words."""
        return self.size * getattr(self.dtype, "itemsize", 8)


@dataclass
class Op:
    """One operation.

    Attributes:
      name: name of the primitive.
      ins: numbers of its operands, `FREE` for constants.
      outs: numbers of its results.
      params: parameters of the equation.
      where: name stack of the equation.
      bodies: programs that it runs, such as those of a loop or a condition.
      trips: how often it runs them; 1 if unknown.
      carried: for a loop, (place of the operand, place of the result) of each carry.
    """

    name: str
    ins: list[int]
    outs: list[int]
    params: Mapping[str, Any]
    where: str
    bodies: list[TracedProgram] = field(default_factory=list)
    trips: int = 1
    carried: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class TracedProgram:
    """Operations in the order of the trace.

    Attributes:
      fused: the program as kernels, by platform, once `fusion.fused` has found them.
      ops: the operations.
      values: the values, by number.
      inputs: numbers of the inputs.
      outputs: numbers of the results, `FREE` for constants.
      kept: (place of the result, place of the input) of results that take over an input's memory.
    """

    # Of this object alone: a copy with other operations has other kernels.
    fused: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)

    def new(self, value: Value) -> int:
        """Adds a value and returns its number."""
        self.values.append(value)
        return len(self.values) - 1

    def live(self) -> TracedProgram:
        """Returns the program without operations whose results nothing needs.

        A scan loses the stacked outputs that nothing reads and the operands its body does not read.
        """
        needed, ops = set(self.outputs), []
        for op in reversed(self.ops):
            if needed.intersection(op.outs):
                op = _trimmed(op, needed) if op.name == "scan" else op
                needed.update(op.ins)
                ops.append(op)
        return dataclasses.replace(self, ops=ops[::-1])


@dataclass
class Kernel:
    """One kernel: an operation and everything that is computed inside it.

    Attributes:
      op: the operation whose results are written.
      reads: numbers of the buffers that it reads.
      writes: numbers of the buffers that it writes.
      elementwise: whether it may write into the memory of an operand of the same size.
      after: numbers of buffers that are written before it, by an optimization barrier.
    """

    op: Op
    reads: list[int]
    writes: list[int]
    elementwise: bool
    after: list[int]


def _trimmed(op: Op, needed: set[int]) -> Op:
    """Returns a scan with only the operands and results that it needs (`WhileLoopSimplifier`)."""
    (body,), carries = op.bodies, len(op.carried)
    outs = [k for k, out in enumerate(op.outs) if k < carries or out in needed]
    body = dataclasses.replace(body, outputs=[body.outputs[k] for k in outs]).live()
    read = {i for inner in body.ops for i in inner.ins}.union(body.outputs)
    carried = {a for a, _ in op.carried}
    ins = [k for k, i in enumerate(body.inputs) if k in carried or i in read]
    body = dataclasses.replace(
        body,
        inputs=[body.inputs[k] for k in ins],
        kept=[(out, ins.index(k)) for out, k in body.kept],
    )
    return dataclasses.replace(
        op,
        ins=[op.ins[k] for k in ins],
        outs=[op.outs[k] for k in outs],
        bodies=[body],
        carried=[(ins.index(a), b) for a, b in op.carried],
    )


# XLA:CPU from then on keeps optimization barriers and 16-bit floats. Until then barriers vanish
# before equal operations are merged, and kernels write 16-bit floats as float32.
NEW_CPU = jax.__version_info__ >= (0, 12)


def views(program: TracedProgram, platform: str) -> dict[int, int]:
    """Returns the results that are their operand's buffer in another shape."""
    view: dict[int, int] = {}
    users: dict[int, list[Op]] = defaultdict(list)
    made = {out: op for op in program.ops for out in op.outs}
    for op in program.ops:
        for i in op.ins:
            users[i].append(op)
    for op in program.ops:
        if op.name in (*RESHAPED, "optimization_barrier") or (
            op.name == "rev" and platform != "cpu"  # a convolution reads its kernel reversed
        ):
            view.update({o: i for i, o in zip(op.ins, op.outs, strict=False) if i != FREE})
        elif op.name == "reorder" and _as_it_lies(op, made, users, program):
            view[op.outs[0]] = op.ins[0]
        elif op.name == "transpose" and op.ins[0] != FREE:
            source = made.get(op.ins[0])
            # A product is written the other way round for it.
            if source is not None and source.name == "dot_general" and len(users[op.ins[0]]) == 1:
                view[op.outs[0]] = op.ins[0]
        elif op.name == "reshard" and op.ins[0] != FREE:
            a, b = program.values[op.ins[0]], program.values[op.outs[0]]
            if a.bytes == b.bytes:
                view[op.outs[0]] = op.ins[0]
    return view


def _as_it_lies(
    op: Op, made: Mapping[int, Op], users: Mapping[int, list[Op]], program: TracedProgram
) -> bool:
    """Whether a matrix product can read or write a matrix in either order of its dimensions."""
    source = made.get(op.ins[0])
    if len(program.values[op.ins[0]].shape) != 2 or op.outs[0] in program.outputs:
        return False
    if source is not None and source.name == "dot_general":
        return len(users[op.ins[0]]) == 1
    return bool(users[op.outs[0]]) and all(u.name == "dot_general" for u in users[op.outs[0]])


def local_value(aval: Any, factors: tuple[int, ...] | None = None) -> Value:
    """Returns the local shard of an array with these factors, padded if they do not divide it."""
    factors = factors or (1,) * len(aval.shape)
    shape = tuple(-(-size // f) for size, f in zip(aval.shape, factors, strict=True))
    return Value(shape, aval.dtype, factors)


def factors_of(sharding: Any, ndim: int) -> tuple[int, ...]:
    """Returns the number of shards along each of `ndim` dimensions of a sharding."""
    spec = getattr(sharding, "spec", None)
    return factors_in(spec, sharding.mesh.shape, ndim) if spec is not None else (1,) * ndim


def factors_in(spec: Any, sizes: Mapping[str, int], ndim: int) -> tuple[int, ...]:
    """Returns the factors of a spec on a mesh with axes of these sizes."""
    found = [1] * ndim
    for d, names in enumerate(spec):
        for name in (names,) if isinstance(names, str) else names or ():
            found[d] *= sizes[name]
    return tuple(found)


def out_factors(
    eqn: Any, ins: Sequence[int], aval: Any, values: Sequence[Value]
) -> tuple[int, ...]:
    """Returns the factors of a result in the global view: those of its operands, by dimension."""
    ndim, name, found = len(aval.shape), eqn.primitive.name, [1] * len(aval.shape)
    for place, i in enumerate(ins):
        if i == FREE:
            continue
        factors = values[i].factors
        if name == "broadcast_in_dim":
            to = eqn.params["broadcast_dimensions"]
        elif name == "transpose":
            to = [eqn.params["permutation"].index(d) for d in range(len(factors))]
        elif name.startswith("reduce_") and "axes" in eqn.params:
            rest = [d for d in range(len(factors)) if d not in eqn.params["axes"]]
            to = [rest.index(d) if d in rest else None for d in range(len(factors))]
        elif name == "dot_general":
            to = _dot_dims(eqn.params["dimension_numbers"], place, len(factors), ndim)
        elif name in RESHAPED:
            to = _reshaped(eqn.invars[0].aval.shape, aval.shape)
        else:
            to = range(len(factors)) if len(factors) == ndim else [None] * len(factors)
        for d, factor in zip(to, factors, strict=True):
            if d is not None and d < ndim and aval.shape[d] > 1:
                found[d] = max(found[d], factor)
    return tuple(found)


def _dot_dims(numbers: Any, place: int, ndim: int, out_ndim: int) -> list[int | None]:
    """Returns the position in a `dot_general`'s result of each dimension of an operand."""
    contract, batch = numbers
    taken = {*contract[place], *batch[place]}
    free = [d for d in range(ndim) if d not in taken]
    to = {d: k for k, d in enumerate(batch[place])}
    first = len(batch[0]) if place == 0 else out_ndim - len(free)
    to |= {d: first + k for k, d in enumerate(free)}
    return [to.get(d) for d in range(ndim)]


def _reshaped(old: Sequence[int], new: Sequence[int]) -> list[int | None]:
    """Returns the new position of each dimension after a reshape; None if it is split or merged.

    A dimension that is split or merged is followed to the major one of what it becomes.
    """
    found: list[int | None] = [None] * len(old)
    i = j = 0
    while i < len(old) and j < len(new):
        left, right, first, to = old[i], new[j], i, j
        while left != right:
            if left < right and i + 1 < len(old):
                i += 1
                left *= old[i]
            elif j + 1 < len(new):
                j += 1
                right *= new[j]
            else:
                return found
        found[first] = to
        i, j = i + 1, j + 1
    return found
