"""A traced step as one device sees it: operations on numbered values, every call opened.

Inside a `shard_map` shapes are those of one device already. Outside, in the global view, a value's
factors say into how many parts each of its dimensions is divided; they follow from the layouts of
the inputs, from constraints, and from what an operation does with dimensions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend import core

from gshard.equations import CHECKPOINTS, called, opened, scan_sizes

# What returns its operand: the same numbers, or other words for them.
_SAME = (
    "sharding_constraint", "reshard", "stop_gradient", "copy", "copy_p", "name", "pvary",
    "device_put", "reduce_precision", "optimization_barrier",
)  # fmt: skip
RESHAPED = ("reshape", "squeeze", "expand_dims", "bitcast_convert_type")
_SIZE_1 = (  # operands may have dimensions of size 1
    "add", "add_any", "sub", "mul", "div", "max", "min", "pow", "rem", "select_n", "and", "or",
    "eq", "ne", "lt", "le", "gt", "ge", "atan2", "clamp", "xor",
)  # fmt: skip
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
      ops: the operations.
      values: by number.
      inputs: numbers of the inputs.
      outputs: numbers of the results, `FREE` for constants.
      kept: (place of the result, place of the input) of results that take over an input's memory.
    """

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


def factors_of(sharding: Any, ndim: int) -> tuple[int, ...]:
    """Into how many parts a sharding divides each of `ndim` dimensions."""
    spec = getattr(sharding, "spec", None)
    return _factors(spec, sharding.mesh.shape, ndim) if spec is not None else (1,) * ndim


def program_of(closed: Any, shardings: Sequence[Any], barriers: bool) -> Program:
    """The program of one device.

    Args:
      closed: a closed jaxpr in the global view.
      shardings: of its inputs; None for one that every device has whole.
      barriers: the compiler honours optimization barriers.
    """
    jaxpr, consts = opened(closed)
    program = Program()
    builder = _Builder(program, barriers)
    for v, sharding in zip(jaxpr.invars, shardings, strict=True):
        factors = factors_of(sharding, len(v.aval.shape))
        builder.env[v] = program.new(_value(v.aval, factors))
    program.inputs = [builder.env[v] for v in jaxpr.invars]
    builder.constants(jaxpr.constvars, consts)
    builder.walk(jaxpr.eqns)
    program.outputs = [builder.read(v) for v in jaxpr.outvars]
    return program.live()


class _Builder:
    """Walks a jaxpr into a program."""

    def __init__(self, program: Program, barriers: bool, env: dict[Any, int] | None = None):
        self.program, self.barriers = program, barriers
        self.env: dict[Any, int] = {} if env is None else env
        self.known: dict[Any, list[int]] = {}

    def read(self, v: Any) -> int:
        return FREE if isinstance(v, core.Literal) else self.env[v]

    def constants(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for v, value in zip(variables, values, strict=True):
            one = isinstance(value, np.ndarray) and value.size == 1
            self.env[v] = FREE if one or not v.aval.shape else self._constant(v.aval)

    def _constant(self, aval: Any) -> int:
        i = self.program.new(_value(aval))
        self.program.ops.append(Op("constant", [], [i], {}, ""))
        return i

    def walk(self, eqns: Sequence[Any], inside: bool = False) -> None:
        for eqn in eqns:
            name, ins = eqn.primitive.name, [self.read(v) for v in eqn.invars]
            body = called(eqn)
            if name == "shard_map":
                outs = self._shard_map(eqn, ins)
            elif body is not None:
                ins = self._behind_barrier(eqn, ins)
                outs = self._inline(*body, ins, inside)
            elif name in _SAME:
                outs = self._same(eqn, ins)
            elif name == "scan" and eqn.params["length"] > 1:
                outs = self._scan(eqn, ins)
            elif name == "scan":
                outs = self._once(eqn, ins, inside)
            elif name == "while":
                outs = self._while(eqn, ins)
            elif name == "cond":
                outs = self._cond(eqn, ins)
            else:
                outs = self._op(eqn, ins, inside)
            self.env.update(zip(eqn.outvars, outs, strict=True))

    def _inline(
        self, jaxpr: Any, consts: Sequence[Any], ins: Sequence[int], inside: bool
    ) -> list[int]:
        outer, self.env = self.env, dict(zip(jaxpr.invars, ins, strict=True))
        self.constants(jaxpr.constvars, consts)
        self.walk(jaxpr.eqns, inside)
        outs = [self.read(v) for v in jaxpr.outvars]
        self.env = outer
        return outs

    def _behind_barrier(self, eqn: Any, ins: list[int]) -> list[int]:
        if eqn.primitive.name not in CHECKPOINTS or not self.barriers:
            return ins
        if not (eqn.params.get("prevent_cse") and eqn.params.get("differentiated")):
            return ins
        return self._barrier(ins, eqn)

    def _barrier(self, ins: list[int], eqn: Any) -> list[int]:
        held = [i for i in dict.fromkeys(ins) if i != FREE]
        outs = {i: self.program.new(self.program.values[i]) for i in held}
        where = str(eqn.source_info.name_stack)
        self.program.ops.append(Op("optimization_barrier", held, list(outs.values()), {}, where))
        return [outs.get(i, FREE) for i in ins]

    def _same(self, eqn: Any, ins: list[int]) -> list[int]:
        name = eqn.primitive.name
        if name == "optimization_barrier" and self.barriers:
            return self._barrier(ins, eqn)
        if name == "sharding_constraint" and ins[0] != FREE:
            value = self.program.values[ins[0]]
            ndim = len(eqn.outvars[0].aval.shape)
            factors = factors_of(eqn.params["sharding"], ndim)
            if factors != value.factors:
                return [self._add("reshard", ins, [_value(eqn.outvars[0].aval, factors)], eqn)[0]]
        return list(ins)

    def _shard_map(self, eqn: Any, ins: list[int]) -> list[int]:
        jaxpr, consts = opened(eqn.params["jaxpr"])
        sizes = eqn.params["mesh"].shape
        outs = self._inline(jaxpr, consts, ins, True)
        for i, v, spec in zip(outs, eqn.outvars, eqn.params["out_specs"], strict=True):
            if i != FREE:
                factors = _factors(spec, sizes, len(v.aval.shape))
                self.program.values[i] = dataclasses.replace(
                    self.program.values[i], factors=factors
                )
        return outs

    def _op(self, eqn: Any, ins: list[int], inside: bool) -> list[int]:
        values = [
            _value(v.aval, None if inside else self._out_factors(eqn, ins, v.aval))
            for v in eqn.outvars
        ]
        if len(ins) > 1 and len(values) == 1 and eqn.primitive.name in _SIZE_1:
            ins = [self._wide(v, i, values[0], eqn) for v, i in zip(eqn.invars, ins, strict=True)]
        return self._add(eqn.primitive.name, ins, values, eqn)

    def _add(
        self, name: str, ins: list[int], values: Sequence[Value], eqn: Any, **more: Any
    ) -> list[int]:
        key = None
        if not more and not getattr(eqn, "effects", ()):
            key = (name, tuple(ins), _text(eqn, ins), tuple(v.shape for v in values))
            if key in self.known:
                return self.known[key]
        outs = [self.program.new(value) for value in values]
        where = str(eqn.source_info.name_stack)
        self.program.ops.append(Op(name, list(ins), outs, eqn.params, where, **more))
        if key is not None:
            self.known[key] = outs
        return outs

    def _wide(self, v: Any, i: int, out: Value, eqn: Any) -> int:
        """An operand whose dimensions of size 1 go with larger ones, as the compiler sees it."""
        if i == FREE or len(v.aval.shape) != len(eqn.outvars[0].aval.shape):
            return i
        if v.aval.shape == eqn.outvars[0].aval.shape:
            return i
        value = dataclasses.replace(out, dtype=v.aval.dtype)
        key = ("broadcast_in_dim", i, value)
        if key not in self.known:
            self.known[key] = [self.program.new(value)]
            where = str(eqn.source_info.name_stack)
            self.program.ops.append(Op("broadcast_in_dim", [i], self.known[key], {}, where))
        return self.known[key][0]

    def _out_factors(self, eqn: Any, ins: list[int], aval: Any) -> tuple[int, ...]:
        """How a result lies in the global view: as its operands, dimension by dimension."""
        ndim, name, found = len(aval.shape), eqn.primitive.name, [1] * len(aval.shape)
        for place, i in enumerate(ins):
            if i == FREE:
                continue
            factors = self.program.values[i].factors
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

    def _body(self, body: Any, ins: Sequence[Value | None]) -> Program:
        jaxpr, consts = opened(body)
        program = Program()
        builder = _Builder(program, self.barriers)
        for v, value in zip(jaxpr.invars, ins, strict=True):
            builder.env[v] = program.new(_value(v.aval) if value is None else value)
        program.inputs = [builder.env[v] for v in jaxpr.invars]
        builder.constants(jaxpr.constvars, consts)
        builder.walk(jaxpr.eqns, True)
        program.outputs = [builder.read(v) for v in jaxpr.outvars]
        return program

    def _scan(self, eqn: Any, ins: list[int]) -> list[int]:
        fixed, carried, scanned = scan_sizes(eqn)
        program = self._body(eqn.params["jaxpr"], [None] * len(ins))
        # A step reads its slice of what is scanned, and writes its slice of what is stacked.
        first = fixed + carried
        stacks = [_value(v.aval) for v in eqn.invars[first:]]
        for k, value in enumerate(stacks):
            whole = program.new(value)
            slice_ = program.inputs[first + k]
            program.inputs[first + k] = whole
            program.ops.insert(0, Op("dynamic_slice", [whole], [slice_], {}, ""))
        for k, v in enumerate(eqn.outvars[carried:]):
            at = carried + k
            out = program.new(_value(v.aval))
            op = Op("stack_slice", [program.outputs[at]], [out], {}, "")
            program.ops.append(op)
            program.outputs[at] = out
        program.kept = [(k, fixed + k) for k in range(carried)]
        pairs = [(fixed + k, k) for k in range(carried)]
        values = [_value(v.aval) for v in eqn.outvars]
        return self._add(
            "scan", ins, values, eqn,
            bodies=[program.live()], trips=eqn.params["length"], carried=pairs,
        )  # fmt: skip

    def _once(self, eqn: Any, ins: list[int], inside: bool) -> list[int]:
        """A scan of one step is no loop."""
        fixed, carried, _ = scan_sizes(eqn)
        jaxpr, consts = opened(eqn.params["jaxpr"])
        return self._inline(jaxpr, consts, ins, inside)

    def _while(self, eqn: Any, ins: list[int]) -> list[int]:
        tested, fixed = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        program = self._body(eqn.params["body_jaxpr"], [None] * (len(ins) - tested))
        carried = len(eqn.outvars)
        program.kept = [(k, fixed + k) for k in range(carried)]
        pairs = [(tested + fixed + k, k) for k in range(carried)]
        values = [_value(v.aval) for v in eqn.outvars]
        return self._add("while", ins, values, eqn, bodies=[program.live()], carried=pairs)

    def _cond(self, eqn: Any, ins: list[int]) -> list[int]:
        bodies = [
            self._body(branch, [None if i == FREE else self.program.values[i] for i in ins[1:]])
            for branch in eqn.params["branches"]
        ]
        values = [_value(v.aval, self._out_factors(eqn, ins, v.aval)) for v in eqn.outvars]
        return self._add("cond", ins, values, eqn, bodies=[b.live() for b in bodies])


def _value(aval: Any, factors: tuple[int, ...] | None = None) -> Value:
    factors = factors or (1,) * len(aval.shape)
    shape = tuple(-(-size // f) for size, f in zip(aval.shape, factors, strict=True))
    return Value(shape, aval.dtype, factors)


def _factors(spec: Any, sizes: Mapping[str, int], ndim: int) -> tuple[int, ...]:
    found = [1] * ndim
    for d, names in enumerate(spec):
        for name in (names,) if isinstance(names, str) else names or ():
            found[d] *= sizes[name]
    return tuple(found)


def _text(eqn: Any, ins: Sequence[int]) -> str:
    """What of an equation besides its operands decides its result."""
    literals = [v.val if isinstance(v, core.Literal) else None for v in eqn.invars]
    return repr((literals, eqn.params))


def _dot_dims(numbers: Any, place: int, ndim: int, out_ndim: int) -> list[int | None]:
    """Where the dimensions of an operand of a `dot_general` are in its result."""
    contract, batch = numbers
    taken = {*contract[place], *batch[place]}
    free = [d for d in range(ndim) if d not in taken]
    to = {d: k for k, d in enumerate(batch[place])}
    first = len(batch[0]) if place == 0 else out_ndim - len(free)
    to |= {d: first + k for k, d in enumerate(free)}
    return [to.get(d) for d in range(ndim)]


def _reshaped(old: Sequence[int], new: Sequence[int]) -> list[int | None]:
    """Where the dimensions of an array are after a reshape; None for one that is split or merged.

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
