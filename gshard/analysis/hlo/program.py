"""Finds the collectives of a compiled program, what they communicate and how often they run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gshard.analysis.hlo.parser import (
    Array,
    Computation,
    Groups,
    Instruction,
    Module,
    read_arrays,
    read_groups,
    read_module,
)
from gshard.analysis.hlo.trip_count import Frame, trip_count

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
    "send",
)


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: one of `KINDS`; `send` is what remains of a collective between TPU slices, or of a
        permute that XLA took apart.
      name: HLO name of the instruction.
      operands: the inputs on one device; several if XLA combined several collectives.
      times: executions per run of the program; None if it is in a loop of unknown length.
      groups: logical device ids that communicate together; None for all devices, and for a `send`,
        whose text names only slices.
      group_size: number of devices in one group.
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
    def scalar(self) -> bool:
        """Whether every operand has one element, as in norms and losses."""
        return all(array.elements == 1 for array in self.operands)

    @property
    def _copies(self) -> int:
        return self.group_size if self.kind == "all-gather" else 1

    @property
    def op_names(self) -> tuple[str, ...]:
        """The name stack of each operand.

        XLA writes those of a combined operation as `jit(step)/(reduce/psum:scalar/psum)`. If their
        number differs from that of the operands, every operand gets the full name.
        """
        many = len(self.operands)
        start = _last_group(self.op_name) if many > 1 else None
        if start is not None:
            parts = _split(self.op_name[start + 1 : -1])
            if len(parts) == many:
                return tuple(self.op_name[:start] + part for part in parts)
        return (self.op_name,) * many

    @property
    def wire_bytes(self) -> int | None:
        """The bytes that one device sends per run of the program, by the ring algorithms.

        With payload b and groups of g: all-gather, reduce-scatter and all-to-all b(g-1)/g,
        all-reduce twice that, permute, broadcast and send b. None when `times` is.
        """
        if self.times is None:
            return None
        if self.kind in ("collective-permute", "collective-broadcast", "send"):
            return self.times * self.payload_bytes
        hops = 2 if self.kind == "all-reduce" else 1
        return self.times * hops * self.payload_bytes * (self.group_size - 1) // self.group_size


def _last_group(op_name: str) -> int | None:
    """Returns the index at which the last parentheses open, unless they are a call as in `jvp(`."""
    depth = 0
    for i in range(len(op_name) - 1, -1, -1):
        depth += (op_name[i] == ")") - (op_name[i] == "(")
        if depth == 0:
            return i if op_name[i] == "(" and op_name[:i].endswith("/") else None
    return None


def _split(names: str) -> list[str]:
    """Splits at the colons that are outside parentheses."""
    parts, depth = [""], 0
    for character in names:
        depth += (character == "(") - (character == ")")
        if character == ":" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


@dataclass(frozen=True)
class CompiledProgram:
    """What a compiled program communicates.

    Attributes:
      name: name of the HLO module.
      devices: number of partitions times replicas.
      aliases: outputs that take over the memory of a donated argument.
      collectives: in the order of the text, each with its number of executions.
    """

    name: str
    devices: int
    aliases: int
    collectives: tuple[Collective, ...]


def read_program(text: str) -> CompiledProgram:
    """Reads the text of a compiled program.

    Args:
      text: what `jax.stages.Compiled.as_text()` returns, on CPU, GPU or TPU.

    Raises:
      GShardError: the text is not an HLO module.
    """
    module = read_module(text)
    devices = _header_number(module, "num_partitions") * _header_number(module, "replica_count")
    walk = _Walk(module, devices)
    entry = Frame(module, module.computations[module.entry])
    return CompiledProgram(
        name=module.header.split()[1].rstrip(","),
        devices=devices,
        aliases=len(re.findall(r"\{[\d,\s]*\}: \(\d+, \{[\d,\s]*\}, \w+-alias\)", module.header)),
        collectives=tuple(walk.collectives(entry, _Context())),
    )


def _header_number(module: Module, name: str) -> int:
    found = re.search(rf"\b{name}=(\d+)", module.header)
    return int(found.group(1)) if found else 1


@dataclass(frozen=True)
class _Context:
    """What holds for everything inside a computation on one path of calls to it."""

    times: int | None = 1
    asynchronous: bool = False
    conditional: bool = False
    op_name: str = ""

    def repeated(self, runs: int | None) -> _Context:
        times = None if runs is None or self.times is None else self.times * runs
        return dataclasses.replace(self, times=times)


class _Walk:
    """Iterates over a program from its entry; yields each collective once per path of calls."""

    def __init__(self, module: Module, devices: int):
        self._module = module
        self._devices = devices
        self._communicates: dict[str, bool] = {}

    def collectives(self, frame: Frame, context: _Context) -> Iterator[Collective]:
        started = started_kinds(frame.computation)
        for instruction in frame.computation.instructions:
            opcode = instruction.opcode
            if _kind(instruction):
                if started is None or instruction.name in started:
                    yield self._collective(instruction, frame.computation, context, started)
                continue
            called = [name for name in _called(instruction) if self._has_collectives(name)]
            if not called:
                continue
            inner = dataclasses.replace(
                context,
                asynchronous=context.asynchronous or opcode.endswith("-start"),
            )
            if opcode == "while":
                yield from self._loop(frame, instruction, called, inner)
            elif opcode == "conditional":
                yield from self._branch(frame, instruction, called, inner)
            else:
                inner = dataclasses.replace(inner, op_name=instruction.op_name or context.op_name)
                for name in called:
                    yield from self.collectives(frame.enter(instruction, name), inner)

    def _loop(
        self, frame: Frame, loop: Instruction, called: list[str], context: _Context
    ) -> Iterator[Collective]:
        runs = trip_count(frame, loop)
        checks = None if runs is None else runs + 1
        for name in called:
            times = checks if name in loop.names("condition") else runs
            yield from self.collectives(frame.enter(loop, name), context.repeated(times))

    def _branch(
        self, frame: Frame, conditional: Instruction, called: list[str], context: _Context
    ) -> list[Collective]:
        inner = dataclasses.replace(context, conditional=True)
        branches = [list(self.collectives(frame.enter(conditional, n), inner)) for n in called]

        def moved(branch: list[Collective]) -> float:
            wires = [collective.wire_bytes for collective in branch]
            return sum(float("inf") if wire is None else wire for wire in wires)

        return max(branches, key=moved)

    def _has_collectives(self, name: str) -> bool:
        if name not in self._communicates:
            computation = self._module.computations.get(name)
            self._communicates[name] = computation is not None and any(
                _kind(instruction) or any(map(self._has_collectives, _called(instruction)))
                for instruction in computation.instructions
            )
        return self._communicates[name]

    def _collective(
        self,
        instruction: Instruction,
        computation: Computation,
        context: _Context,
        started: frozenset[str] | None,
    ) -> Collective:
        kind = _kind(instruction)
        if kind == "all-reduce" and is_all_reduce_scatter(computation):
            kind = "reduce-scatter"
        groups = read_groups(instruction)
        group_size = max(map(len, groups)) if groups else self._devices
        if kind == "send":
            group_size = 2
        in_pair = instruction.opcode.endswith(("-start", "send"))
        return Collective(
            kind=kind,
            name=instruction.name,
            operands=self._operands(instruction, computation),
            times=context.times,
            groups=groups,
            group_size=group_size,
            asynchronous=context.asynchronous
            or bool(started)
            or in_pair
            and not _waits(instruction),
            conditional=context.conditional,
            op_name=instruction.op_name or context.op_name or self._reducer_op_name(instruction),
        )

    def _operands(self, instruction: Instruction, computation: Computation) -> tuple[Array, ...]:
        """Returns the inputs on one device, in the same way for `X`, `X-start` and fusions."""
        sources = instruction.operands
        if _kind(instruction) in ("ragged-all-to-all", "send"):
            sources = sources[:1]  # the others are an output buffer, offsets, sizes, a token
        return tuple(a for name in sources for a in read_arrays(computation.by_name[name].shape))

    def _reducer_op_name(self, instruction: Instruction) -> str:
        """Returns the name stack of the reduction, for a rewritten collective that lost its own."""
        for name in instruction.names("to_apply"):
            for inner in self._module.computations[name].instructions:
                if inner.op_name and inner.is_root:
                    return inner.op_name
        return ""


def _kind(instruction: Instruction) -> str:
    """Returns the collective that an instruction is or starts; empty for anything else."""
    kind = instruction.opcode.removesuffix("-start")
    if kind == "send" and not is_between_devices(instruction):
        return ""
    return kind if kind in KINDS else ""


def _waits(instruction: Instruction) -> bool:
    """Whether the GPU runs a start and its done without anything in between."""
    return '"is_sync":true' in instruction.attribute_text


def _called(instruction: Instruction) -> tuple[str, ...]:
    """Returns the computations that an instruction runs; none for `-done` and `-update`."""
    opcode = instruction.opcode
    if opcode.endswith(("-done", "-update")):
        return ()
    if opcode == "while":
        return instruction.names("condition") + instruction.names("body")
    if opcode == "conditional":
        names = instruction.names("branch_computations")
        return names or (
            instruction.names("true_computation") + instruction.names("false_computation")
        )
    return (
        instruction.names("calls")
        + instruction.names("called_computations")
        + instruction.names("to_apply")
    )


_START = '"AsyncCollectiveStart"'
_DONE = '"AsyncCollectiveDone"'


def is_all_reduce_scatter(computation: Computation) -> bool:
    """Whether an all-reduce in this computation is actually a reduce-scatter."""
    return computation.name.startswith("all-reduce-scatter")


def started_kinds(computation: Computation) -> frozenset[str] | None:
    """Returns the collectives that this computation starts, by name.

    Returns:
      None for a computation that is not in an asynchronous fusion: all its collectives count.
      Otherwise the only ones that count; an empty set if it continues or ends other collectives.
    """
    starts = _custom_calls(computation, _START)
    if starts:
        return frozenset(name for call in starts for name in call.operands)
    continues = computation.name.startswith("async_collective_fusion")
    return frozenset() if continues or _custom_calls(computation, _DONE) else None


def is_between_devices(send: Instruction) -> bool:
    """Whether a `send` goes to other devices, and not to a callback on this device's host."""
    to_host = send.attributes.get("is_host_transfer") == "true"
    return not to_host or "_xla_megascale_" in send.attributes.get("frontend_attributes", "")


def _custom_calls(computation: Computation, target: str) -> list[Instruction]:
    return [
        instruction
        for instruction in computation.instructions
        if instruction.opcode == "custom-call"
        and instruction.attributes.get("custom_call_target") == target
    ]
