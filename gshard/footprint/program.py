"""A traced step as one device sees it: operations on numbered values, every call opened."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

RESHAPED = ("reshape", "squeeze", "expand_dims", "bitcast_convert_type")
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
    """

    name: str
    ins: list[int]
    outs: list[int]
    params: Mapping[str, Any]
    where: str
    bodies: list[Program] = field(default_factory=list)
    trips: int = 1
    carried: list[tuple[int, int]] = field(default_factory=list)


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
    """

    # Of this object alone: a copy with other operations has other kernels.
    fused: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)

    def new(self, value: Value) -> int:
        """The number of a new value."""
        self.values.append(value)
        return len(self.values) - 1

    def live(self) -> Program:
        """The same without operations whose results nothing needs."""
        needed, ops = set(self.outputs), []
        for op in reversed(self.ops):
            if needed.intersection(op.outs):
                needed.update(op.ins)
                ops.append(op)
        return dataclasses.replace(self, ops=ops[::-1])
