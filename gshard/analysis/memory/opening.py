"""Turns a jaxpr into the program of one device, whose shapes a `shard_map` has already."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core

from gshard._util.jaxpr import CHECKPOINT, called, opened, scan_sizes
from gshard.analysis.memory.liveness import with_own_zeros
from gshard.analysis.memory.program import (
    FREE,
    Op,
    TracedProgram,
    Value,
    factors_in,
    factors_of,
    local_value,
    out_factors,
)

# Operations that return their operand as it is, perhaps with another sharding or a name.
_SAME = (
    "sharding_constraint", "reshard", "stop_gradient", "copy", "name", "pvary",
    "device_put", "reduce_precision", "optimization_barrier", "layout_constraint",
)  # fmt: skip
# Collectives along a dimension want it to be the major one: those of NCCL, and those of XLA:CPU.
_MAJOR = {"all_gather": "all_gather_dimension", "reduce_scatter": "scatter_dimension"}
_SIZE_1 = (  # operands may have dimensions of size 1
    "add", "add_any", "sub", "mul", "div", "max", "min", "pow", "rem", "select_n", "and", "or",
    "eq", "ne", "lt", "le", "gt", "ge", "atan2", "clamp", "xor",
)  # fmt: skip


def program_of(
    closed: Any, shardings: Sequence[Any], barriers: bool, platform: str
) -> TracedProgram:
    """Returns the program of one device.

    Args:
      closed: a closed jaxpr in the global view.
      shardings: the shardings of its inputs; None for a replicated input.
      barriers: whether the compiler honors optimization barriers.
      platform: `cpu`, `gpu` or `tpu`. On the first two, a collective wants its dimension first.
    """
    pairs = zip(opened(closed)[0].invars, shardings, strict=True)
    ins = [local_value(v.aval, factors_of(x, len(v.aval.shape))) for v, x in pairs]
    return with_own_zeros(_built(closed, ins, barriers, platform).live())


def _built(
    body: Any, ins: Sequence[Value | None], barriers: bool, platform: str, inside: bool = False
) -> TracedProgram:
    jaxpr, consts = opened(body)
    program = TracedProgram()
    builder = _Builder(program, barriers, platform)
    for v, value in zip(jaxpr.invars, ins, strict=True):
        builder.env[v] = program.new(local_value(v.aval) if value is None else value)
    program.inputs = [builder.env[v] for v in jaxpr.invars]
    builder.constants(jaxpr.constvars, consts)
    builder.walk(jaxpr.eqns, inside)
    program.outputs = [builder.read(v) for v in jaxpr.outvars]
    return program


class _Free(int):
    """`FREE`, and what tells this constant from others: its value, or the identity of its array."""

    constant: Any

    def __new__(cls, constant: Any) -> _Free:
        found = super().__new__(cls, FREE)
        found.constant = constant
        return found


class _Builder:
    """Builds a program from the equations of a jaxpr."""

    def __init__(self, program: TracedProgram, barriers: bool, platform: str):
        self.program, self.barriers, self.platform = program, barriers, platform
        self.env: dict[Any, int] = {}
        self.known: dict[Any, list[int]] = {}
        self.scope = ""  # the name stack of the call that is being opened

    def read(self, v: Any) -> int:
        return _Free(_plain(v.val)) if isinstance(v, core.Literal) else self.env[v]

    def constants(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        for v, value in zip(variables, values, strict=True):
            one = isinstance(value, np.ndarray) and value.size == 1
            known = value.item() if one else id(value)
            self.env[v] = _Free(known) if one or not v.aval.shape else self._constant(v.aval)

    def _constant(self, aval: Any) -> int:
        i = self.program.new(local_value(aval))
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
                outer, self.scope = self.scope, self._where(eqn)
                outs = self._inline(*body, ins, inside)
                self.scope = outer
            elif name in _SAME:
                outs = self._same(eqn, ins)
            elif name == "scan" and eqn.params["length"] == 1 and (inside or not _slices(eqn)):
                outs = self._inline(*opened(eqn.params["jaxpr"]), ins, inside)  # it is no loop
            elif name == "scan":
                outs = self._scan(eqn, ins)
            elif name == "while":
                outs = self._while(eqn, ins)
            elif name == "cond":
                outs = self._cond(eqn, ins, inside)
            else:
                outs = self._op(eqn, ins, inside)
            self.env.update(zip(eqn.outvars, outs, strict=True))

    def _where(self, eqn: Any) -> str:
        """The name stack of an equation; that in a call is relative to the call's own."""
        return "/".join(filter(None, (self.scope, str(eqn.source_info.name_stack))))

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
        if eqn.primitive.name != CHECKPOINT or not self.barriers:
            return ins
        if not (eqn.params.get("prevent_cse") and eqn.params.get("differentiated")):
            return ins
        return self._barrier(ins, eqn)

    def _barrier(self, ins: list[int], eqn: Any) -> list[int]:
        held = [i for i in dict.fromkeys(ins) if i != FREE]
        outs = {i: self.program.new(self.program.values[i]) for i in held}
        where = self._where(eqn)
        self.program.ops.append(Op("optimization_barrier", held, list(outs.values()), {}, where))
        return [outs.get(i, i) for i in ins]

    def _same(self, eqn: Any, ins: list[int]) -> list[int]:
        name = eqn.primitive.name
        if name == "optimization_barrier" and self.barriers:
            return self._barrier(ins, eqn)
        if name == "sharding_constraint" and ins[0] != FREE:
            value = self.program.values[ins[0]]
            ndim = len(eqn.outvars[0].aval.shape)
            factors = factors_of(eqn.params["sharding"], ndim)
            if factors != value.factors:
                return [
                    self._add("reshard", ins, [local_value(eqn.outvars[0].aval, factors)], eqn)[0]
                ]
        return list(ins)

    def _shard_map(self, eqn: Any, ins: list[int]) -> list[int]:
        jaxpr, consts = opened(eqn.params["jaxpr"])
        sizes = eqn.params["mesh"].shape
        outs = self._inline(jaxpr, consts, ins, True)
        for i, v, spec in zip(outs, eqn.outvars, eqn.params["out_specs"], strict=True):
            if i != FREE:
                factors = factors_in(spec, sizes, len(v.aval.shape))
                self.program.values[i] = dataclasses.replace(
                    self.program.values[i], factors=factors
                )
        return outs

    def _results(self, eqn: Any, ins: list[int], inside: bool) -> list[Value]:
        values = self.program.values
        return [
            local_value(v.aval, None if inside else out_factors(eqn, ins, v.aval, values))
            for v in eqn.outvars
        ]

    def _op(self, eqn: Any, ins: list[int], inside: bool) -> list[int]:
        values = self._results(eqn, ins, inside)
        if len(ins) > 1 and len(values) == 1 and eqn.primitive.name in _SIZE_1:
            ins = [self._wide(v, i, values[0], eqn) for v, i in zip(eqn.invars, ins, strict=True)]
        if self.platform in ("cpu", "gpu") and eqn.primitive.name in _MAJOR:
            return self._along_major(eqn, ins, values)
        return self._add(eqn.primitive.name, ins, values, eqn)

    def _along_major(self, eqn: Any, ins: list[int], values: Sequence[Value]) -> list[int]:
        """Reorders the operands of a collective along a dimension that is not the major one."""
        name, dim = eqn.primitive.name, eqn.params[_MAJOR[eqn.primitive.name]]
        if math.prod(eqn.invars[0].aval.shape[:dim]) == 1:
            return self._add(name, ins, values, eqn)
        if name == "reduce_scatter":
            return self._add(name, [self._reordered(ins[0], eqn)], values, eqn)
        return [self._reordered(out, eqn) for out in self._add(name, ins, values, eqn)]

    def _reordered(self, i: int, eqn: Any) -> int:
        """Returns the value with its dimensions in another order in memory."""
        return i if i == FREE else self._add("reorder", [i], [self.program.values[i]], eqn)[0]

    def _add(
        self, name: str, ins: list[int], values: Sequence[Value], eqn: Any, **more: Any
    ) -> list[int]:
        key = None
        # That it names a mesh axis is the one effect of a collective: equal ones are one.
        if not more and all(type(e).__name__ == "NamedAxisEffect" for e in eqn.effects):
            key = (name, tuple(ins), _text(eqn, ins), tuple(v.shape for v in values))
            if key in self.known:
                return self.known[key]
        outs = [self.program.new(value) for value in values]
        where = self._where(eqn)
        self.program.ops.append(Op(name, list(ins), outs, eqn.params, where, **more))
        if key is not None:
            self.known[key] = outs
        return outs

    def _wide(self, v: Any, i: int, out: Value, eqn: Any) -> int:
        """Returns an operand with its size-1 dimensions broadcast, as the compiler sees it."""
        if i == FREE or len(v.aval.shape) != len(eqn.outvars[0].aval.shape):
            return i
        if v.aval.shape == eqn.outvars[0].aval.shape:
            return i
        value = dataclasses.replace(out, dtype=v.aval.dtype)
        key = ("broadcast_in_dim", i, value)
        if key not in self.known:
            self.known[key] = [self.program.new(value)]
            where = self._where(eqn)
            self.program.ops.append(Op("broadcast_in_dim", [i], self.known[key], {}, where))
        return self.known[key][0]

    def _body(self, body: Any, ins: Sequence[Value | None]) -> TracedProgram:
        return _built(body, ins, self.barriers, self.platform, inside=True)

    def _scan(self, eqn: Any, ins: list[int]) -> list[int]:
        fixed, carried, scanned = scan_sizes(eqn)
        program = self._body(eqn.params["jaxpr"], [None] * len(ins))
        # A step reads its slice of what is scanned, and writes its slice of what is stacked.
        first = fixed + carried
        stacks = [local_value(v.aval) for v in eqn.invars[first:]]
        for k, value in enumerate(stacks):
            whole = program.new(value)
            slice_ = program.inputs[first + k]
            program.inputs[first + k] = whole
            program.ops.insert(0, Op("dynamic_slice", [whole], [slice_], {}, ""))
        for k, v in enumerate(eqn.outvars[carried:]):
            at = carried + k
            out = program.new(local_value(v.aval))
            op = Op("stack_slice", [program.outputs[at]], [out], {}, "")
            program.ops.append(op)
            program.outputs[at] = out
        program.kept = [(k, fixed + k) for k in range(carried)]
        pairs = [(fixed + k, k) for k in range(carried)]
        values = [local_value(v.aval) for v in eqn.outvars]
        return self._add(
            "scan", ins, values, eqn,
            bodies=[program.live()], trips=eqn.params["length"], carried=pairs,
        )  # fmt: skip

    def _while(self, eqn: Any, ins: list[int]) -> list[int]:
        tested, fixed = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        program = self._body(eqn.params["body_jaxpr"], [None] * (len(ins) - tested))
        carried = len(eqn.outvars)
        program.kept = [(k, fixed + k) for k in range(carried)]
        pairs = [(tested + fixed + k, k) for k in range(carried)]
        values = [local_value(v.aval) for v in eqn.outvars]
        return self._add("while", ins, values, eqn, bodies=[program.live()], carried=pairs)

    def _cond(self, eqn: Any, ins: list[int], inside: bool) -> list[int]:
        given = [None if i == FREE else self.program.values[i] for i in ins[1:]]
        bodies = [
            _built(branch, given, self.barriers, self.platform, inside).live()
            for branch in eqn.params["branches"]
        ]
        return self._add("cond", ins, self._results(eqn, ins, inside), eqn, bodies=bodies)


def _slices(eqn: Any) -> bool:
    """Whether a scan slices or stacks arrays, which have one dimension less in its body."""
    fixed, carried, _ = scan_sizes(eqn)
    return len(eqn.invars) > fixed + carried or len(eqn.outvars) > carried


def _text(eqn: Any, ins: Sequence[int]) -> str:
    """Returns a text of everything in an equation that determines its result."""
    return repr(([getattr(i, "constant", None) for i in ins], eqn.params))


def _plain(value: Any) -> Any:
    """Returns a scalar as a Python number with its dtype: NumPy scalars are slow to print."""
    return (value.dtype.name, value.item()) if getattr(value, "shape", None) == () else value
