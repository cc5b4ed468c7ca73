"""A traced step as one device sees it: operations on numbered values, every call opened."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RESHAPED = ("reshape", "squeeze", "expand_dims", "bitcast_convert_type")
# Of HLO, by primitive.
COLLECTIVES = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}
FREE = -1  # number of what takes no memory: a constant


@dataclass(frozen=True)
class Value:
    """One array of one device.

    Attributes:
      shape: on this device.
      dtype: its dtype.
      factors: into how many parts each dimension of the whole is divided; 1s inside `shard_map`.
    """

    shape: tuple[int, ...]
    dtype: Any
    factors: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes; a key for random numbers counts as two words."""
        return self.size * getattr(self.dtype, "itemsize", 8)


@dataclass
class Op:
    """One operation.

    Attributes:
      name: of the primitive.
      ins: numbers of its operands, `FREE` for constants.
      outs: numbers of its results.
      params: of the equation.
      where: name stack of the equation.
      bodies: programs that it runs: of a loop or a condition.
      trips: how often; 1 where unknown.
      carried: for a loop, (place of the operand, place of the result) of each carry.
      held: its result is a buffer, whatever reads it.
    """

    name: str
    ins: list[int]
    outs: list[int]
    params: Mapping[str, Any]
    where: str
    bodies: list[Program] = field(default_factory=list)
    trips: int = 1
    carried: list[tuple[int, int]] = field(default_factory=list)
    held: bool = False


@dataclass
class Program:
    """Operations in the order of the trace.

    Attributes:
      fused: the same as kernels, by platform, once `fusion.fused` has found them.
      ops: the operations.
      values: by number.
      inputs: numbers of the inputs.
      outputs: numbers of the results, `FREE` for constants.
      kept: (place of the result, place of the input) of results that take over an input's memory.
      is_body: it is run by an operation of another program.
    """

    # Of this object alone: a copy with other operations has other kernels.
    fused: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)
    is_body: bool = False

    def new(self, value: Value) -> int:
        """The number of a new value."""
        self.values.append(value)
        return len(self.values) - 1

    def live(self) -> Program:
        """The same without operations whose results nothing needs.

        A scan is rid of what it stacks for nobody, and of what its body does not read.
        """
        needed, ops = set(self.outputs), []
        for op in reversed(self.ops):
            if needed.intersection(op.outs):
                op = _trimmed(op, needed) if op.name == "scan" else op
                needed.update(op.ins)
                ops.append(op)
        return dataclasses.replace(self, ops=ops[::-1])


def _trimmed(op: Op, needed: set[int]) -> Op:
    """A scan with the operands and results that it needs (XLA's `WhileLoopSimplifier`)."""
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
