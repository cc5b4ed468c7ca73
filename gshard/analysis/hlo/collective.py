"""One collective: what it moves and what that costs on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from gshard.analysis.hlo.parser import Array, Groups

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
      operands: what one device puts in; several when XLA combined several collectives.
      times: executions per run of the program; None when it lies in a loop of unknown length.
      groups: logical device ids that communicate together; None for all devices, and for a `send`,
        whose text names only slices.
      group_size: devices in one group.
      asynchronous: started and waited for apart, so that computation can run meanwhile.
      conditional: in a branch that not every run takes. Of the branches of a conditional only the
        one that moves most is in the program.
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
        """XLA's name; of a combined operation over several, joined by `+`."""
        return "+".join(sorted({array.dtype for array in self.operands}))

    @property
    def elements(self) -> int:
        """Payload of one execution on one device, in elements.

        The output of an all-gather, the input of everything else, summed over the operands. Padding
        that the compiler adds is moved, so it counts.
        """
        return self._copies * sum(array.elements for array in self.operands)

    @property
    def payload_bytes(self) -> int:
        """The same in bytes."""
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

        XLA writes those of a combined operation as `jit(step)/(reduce/psum:scalar/psum)`. Where the
        parts are not as many as the operands, every operand has the whole.
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
        """Bytes that one device sends per run of the program, by the ring algorithms.

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
    """Index of the parenthesis that closes at the end, if it is not that of a call as in `jvp(`."""
    depth = 0
    for i in range(len(op_name) - 1, -1, -1):
        depth += (op_name[i] == ")") - (op_name[i] == "(")
        if depth == 0:
            return i if op_name[i] == "(" and op_name[:i].endswith("/") else None
    return None


def _split(names: str) -> list[str]:
    """Splits at the colons that lie in no parentheses."""
    parts, depth = [""], 0
    for character in names:
        depth += (character == "(") - (character == ")")
        if character == ":" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
