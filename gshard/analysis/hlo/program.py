"""The collectives of a compiled program, and how often each runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gshard.analysis.hlo.collective import KINDS, Collective
from gshard.analysis.hlo.parser import (
    Array,
    Computation,
    Instruction,
    Module,
    read_arrays,
    read_groups,
    read_module,
)
from gshard.analysis.hlo.trip_count import Frame, trip_count


@dataclass(frozen=True)
class CompiledProgram:
    """What a compiled program communicates.

    Attributes:
      name: of the HLO module.
      devices: partitions times replicas.
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
    """What holds for everything inside a computation, by the way the walk came to it."""

    times: int | None = 1
    asynchronous: bool = False
    conditional: bool = False
    op_name: str = ""

    def repeated(self, runs: int | None) -> _Context:
        times = None if runs is None or self.times is None else self.times * runs
        return dataclasses.replace(self, times=times)


class _Walk:
    """Goes through a program from its entry and yields every collective once per way there."""

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
        """What goes in, on one device. Operands tell it alike for `X`, `X-start` and fusions."""
        sources = instruction.operands
        if _kind(instruction) in ("ragged-all-to-all", "send"):
            sources = sources[:1]  # the others are an output buffer, offsets, sizes, a token
        return tuple(a for name in sources for a in read_arrays(computation.by_name[name].shape))

    def _reducer_op_name(self, instruction: Instruction) -> str:
        """The name stack that the reduction kept where a rewritten collective lost its own."""
        for name in instruction.names("to_apply"):
            for inner in self._module.computations[name].instructions:
                if inner.op_name and inner.is_root:
                    return inner.op_name
        return ""


def _kind(instruction: Instruction) -> str:
    """The collective that an instruction begins or is; empty for anything else."""
    kind = instruction.opcode.removesuffix("-start")
    if kind == "send" and not is_between_devices(instruction):
        return ""
    return kind if kind in KINDS else ""


def _waits(instruction: Instruction) -> bool:
    """Whether the GPU runs a start and its done in one go."""
    return '"is_sync":true' in instruction.attribute_text


def _called(instruction: Instruction) -> tuple[str, ...]:
    """Computations that an instruction runs; a `-done` or `-update` only repeats its start's."""
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
    """Whether an all-reduce in this computation is in truth a reduce-scatter."""
    return computation.name.startswith("all-reduce-scatter")


def started_kinds(computation: Computation) -> frozenset[str] | None:
    """The collectives that this computation starts, by name.

    Returns:
      None for a computation without a part in an asynchronous fusion: all its collectives count.
      Otherwise the only ones that count; an empty set where others' collectives go on or end.
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
