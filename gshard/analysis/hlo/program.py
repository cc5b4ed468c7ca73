"""Finds the collectives of a compiled program, what they communicate and how often they run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gshard.analysis.hlo.parser import (
    Array,
    Computation,
    Groups,
    Instruction,
    Module,
    read_arrays,
    read_groups,
    read_module,
    read_pairs,
    split_top_level,
)
from gshard.analysis.hlo.products import is_product, product_flops
from gshard.analysis.hlo.trip_count import Frame, trip_count
from gshard.sharding.nodes import KINDS, Nodes, sent_share


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: one of `KINDS`; `send` is what remains of a collective between TPU slices, or of a
        permute that XLA took apart.
      operands: the inputs on one device; several if XLA combined several collectives.
      times: executions per run of the program; None if it is in a loop of unknown length.
      groups: logical device ids that communicate together; None for all devices, and for a `send`,
        whose text names only slices.
      pairs: of a permute, which device sends to which; None for anything else.
      asynchronous: whether it is started and awaited separately, so that computation can overlap.
      conditional: whether it is in a branch that not every run takes. Of the branches of a
        conditional, only the one that transfers most is in the program.
      op_name: the JAX name stack, such as `jit(step)/gshard/gather/all_gather`; for a combined
        operation XLA's sum of several, which `op_names` takes apart.
    """

    kind: str
    name: str
    operands: tuple[Array, ...]
    times: int | None
    groups: Groups | None
    pairs: Groups | None
    group_size: int
    asynchronous: bool
    conditional: bool
    op_name: str

    @property
    def dtype(self) -> str:
        """XLA's name of the dtype; several, joined by `+`, for a combined operation."""
        return "+".join(sorted({array.dtype for array in self.operands}))

    @property
    def elements(self) -> int:
        """The payload of one execution on one device, in elements.

        This is the output of an all-gather, or the input of everything else, summed over the
        operands. Padding that the compiler adds is transferred, so it counts.
        """
        return self._copies * sum(array.elements for array in self.operands)

    @property
    def payload_bytes(self) -> int:
        """The payload of one execution on one device, in bytes."""
        return self._copies * sum(array.bytes for array in self.operands)

    @property
    def _copies(self) -> int:
        return self.group_size if self.kind == "all-gather" else 1

    @property
    def op_names(self) -> tuple[str, ...]:
        """The name stack of each operand.

        XLA writes those of a combined operation as `jit(step)/(reduce/psum:scalar/psum)`. If their
        number differs from that of the operands, every operand gets the full name.
        """
        many, start = len(self.operands), _last_group(self.op_name)
        if many > 1 and start is not None:
            names = split_top_level(self.op_name[start + 1 : -1], ":")
            if len(names) == many:
                return tuple(self.op_name[:start] + name for name in names)
        return (self.op_name,) * many

    @property
    def wire_bytes(self) -> int | None:
        """The bytes that one device sends per run of the program (`sent_share`).

        None when `times` is.
        """
        if self.times is None:
            return None
        return int(self.times * self.payload_bytes * sent_share(self.kind, self.group_size))

    def network_bytes(self, nodes: Nodes) -> int | None:
        """How many bytes a device sends to other nodes per run: the mean over a node's devices."""
        if self.times is None:
            return None
        share = nodes.network_share(self.kind, self.pairs or self.groups)
        return int(self.times * self.payload_bytes * share)


def _last_group(op_name: str) -> int | None:
    """Returns the index at which the last parentheses open, unless they are a call as in `jvp(`."""
    depth = 0
    for i in range(len(op_name) - 1, -1, -1):
        depth += (op_name[i] == ")") - (op_name[i] == "(")
        if depth == 0:
            return i if op_name[i] == "(" and op_name[:i].endswith("/") else None
    return None


@dataclass(frozen=True)
class CompiledProgram:
    """What a compiled program communicates and multiplies.

    Attributes:
      collectives: in the order of the text.
      flops: FLOP of matrix products and convolutions per run on one device, two for each
        multiply-add; None if one is in a loop of unknown length.
    """

    collectives: tuple[Collective, ...]
    flops: int | None


def read_program(text: str) -> CompiledProgram:
    """Reads the text of a compiled program, `jax.stages.Compiled.as_text()`, on CPU, GPU or TPU."""
    module = read_module(text)

    def number(name: str) -> int:
        found = re.search(rf"\b{name}=(\d+)", module.header)
        return int(found[1]) if found else 1

    devices = number("num_partitions") * number("replica_count")
    entry = Frame(module, module.computations[module.entry])
    collectives = _Walk(
        module,
        lambda x: bool(_kind(x)),
        _Collectives(module, devices).make,
        lambda x: x.wire_bytes,
    )
    products = _Walk(module, is_product, _product, lambda flops: flops)
    flops = sum(products.walk(entry, _Context()))
    return CompiledProgram(
        collectives=tuple(collectives.walk(entry, _Context())),
        flops=None if flops == math.inf else int(flops),
    )


@dataclass(frozen=True)
class _Context:
    """What holds for everything inside a computation on one path of calls to it."""

    times: int | None = 1
    asynchronous: bool = False
    conditional: bool = False
    op_name: str = ""


class _Walk:
    """Finds instructions from the entry of a program; each once per path of calls to it.

    Of the branches of a conditional it takes the one in which they weigh most.
    """

    def __init__(
        self,
        module: Module,
        matches: Callable[[Instruction], bool],
        make: Callable[[Instruction, Computation, _Context], Any],
        weight: Callable[[Any], float | None],
    ):
        self._module, self._matches, self._make, self._weight = module, matches, make, weight
        self._found: dict[str, bool] = {}

    def walk(self, frame: Frame, context: _Context) -> Iterator[Any]:
        for instruction in frame.computation.instructions:
            if self._matches(instruction):
                made = self._make(instruction, frame.computation, context)
                if made is not None:
                    yield made
                continue
            called = [name for name in _called(instruction) if self._has_any(name)]
            if not called:
                continue
            opcode = instruction.opcode
            inner = dataclasses.replace(
                context, asynchronous=context.asynchronous or opcode.endswith("-start")
            )
            if opcode == "while":
                yield from self._loop(frame, instruction, called, inner)
            elif opcode == "conditional":
                inner = dataclasses.replace(inner, conditional=True)
                branches = [
                    list(self.walk(frame.enter(instruction, name), inner)) for name in called
                ]
                yield from max(branches, key=self._total)
            else:
                inner = dataclasses.replace(inner, op_name=instruction.op_name or context.op_name)
                for name in called:
                    yield from self.walk(frame.enter(instruction, name), inner)

    def _loop(
        self, frame: Frame, loop: Instruction, called: list[str], context: _Context
    ) -> Iterator[Any]:
        runs = trip_count(frame, loop)
        for name in called:
            times = None
            if runs is not None and context.times is not None:  # the last check ends the loop
                times = context.times * (runs + (name in loop.names("condition")))
            inner = dataclasses.replace(context, times=times)
            yield from self.walk(frame.enter(loop, name), inner)

    def _has_any(self, name: str) -> bool:
        if name not in self._found:
            computation = self._module.computations.get(name)
            self._found[name] = computation is not None and any(
                self._matches(instruction) or any(map(self._has_any, _called(instruction)))
                for instruction in computation.instructions
            )
        return self._found[name]

    def _total(self, found: list[Any]) -> float:
        weights = [self._weight(x) for x in found]
        return sum(float("inf") if weight is None else weight for weight in weights)


class _Collectives:
    """Makes the collectives of a program."""

    def __init__(self, module: Module, devices: int):
        self._module = module
        self._devices = devices
        self._starts: dict[str, frozenset[str] | None] = {}

    def make(
        self, instruction: Instruction, computation: Computation, context: _Context
    ) -> Collective | None:
        """Returns the collective of an instruction; None if another one starts it."""
        if computation.name not in self._starts:
            self._starts[computation.name] = _started(computation)
        started = self._starts[computation.name]
        if started is not None and instruction.name not in started:
            return None
        kind, groups = _kind(instruction), read_groups(instruction)
        shapes = [computation.by_name[x].shape for x in instruction.operands]
        if kind == "send":
            del shapes[1:]  # a token
        if kind == "ragged-all-to-all":  # on average, the smaller array is sent
            shapes = [min(shapes[:2], key=lambda x: sum(a.elements for a in read_arrays(x)))]
        group_size = max(map(len, groups)) if groups else self._devices
        if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"  # the TPU compiler's fusion of both
        # A start and its done that the GPU runs without anything in between are synchronous.
        overlaps = '"is_sync":true' not in instruction.attribute_text
        in_pair = instruction.opcode.endswith(("-start", "send"))
        return Collective(
            kind=kind,
            name=instruction.name,
            operands=tuple(array for shape in shapes for array in read_arrays(shape)),
            times=context.times,
            groups=groups,
            pairs=read_pairs(instruction),
            group_size=2 if kind == "send" else group_size,
            asynchronous=context.asynchronous or bool(started) or (in_pair and overlaps),
            conditional=context.conditional,
            op_name=instruction.op_name or context.op_name or self._reducer_op_name(instruction),
        )

    def _reducer_op_name(self, instruction: Instruction) -> str:
        """Returns the name stack of the reduction, for a rewritten collective that lost its own."""
        reducers = (self._module.computations[name] for name in instruction.names("to_apply"))
        roots = (i for x in reducers for i in x.instructions if i.is_root and i.op_name)
        return next((root.op_name for root in roots), "")


def _product(instruction: Instruction, computation: Computation, context: _Context) -> float:
    """The FLOP of a product; infinite in a loop of unknown length."""
    flops = product_flops(instruction, computation)
    return flops and (math.inf if context.times is None else context.times * flops)


def _kind(instruction: Instruction) -> str:
    """Returns the collective that an instruction is or starts; empty for anything else."""
    kind = instruction.opcode.removesuffix("-start")
    if kind == "send" and instruction.attributes.get("is_host_transfer") == "true":
        # To a callback on this device's host, unless it goes to another TPU slice.
        to_slice = "_xla_megascale_" in instruction.attributes.get("frontend_attributes", "")
        return kind if to_slice else ""
    return kind if kind in KINDS else ""


def _called(instruction: Instruction) -> tuple[str, ...]:
    """Returns the computations that an instruction runs; none for `-done` and `-update`."""
    opcode = instruction.opcode
    if opcode.endswith(("-done", "-update")):
        return ()
    attributes = ("calls", "called_computations", "to_apply")
    if opcode == "while":
        attributes = ("condition", "body")
    elif opcode == "conditional":
        attributes = ("branch_computations", "true_computation", "false_computation")
    return tuple(name for attribute in attributes for name in instruction.names(attribute))


def _started(computation: Computation) -> frozenset[str] | None:
    """Returns the names of the collectives that an asynchronous fusion of the TPU starts.

    Only these count: it is empty if the fusion continues or ends other collectives. None for any
    other computation, of which all collectives count.
    """
    starts, ends = (
        [
            instruction
            for instruction in computation.instructions
            if instruction.opcode == "custom-call"
            and instruction.attributes.get("custom_call_target") == f'"AsyncCollective{what}"'
        ]
        for what in ("Start", "Done")
    )
    if starts:
        return frozenset(name for call in starts for name in call.operands)
    continues = computation.name.startswith("async_collective_fusion")
    return frozenset() if continues or ends else None
