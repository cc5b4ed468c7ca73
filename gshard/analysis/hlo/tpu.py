"""What is peculiar to the TPU compiler's text: collectives in other clothes.

Three things happen there. A reduce-scatter becomes a fusion that calls `all-reduce-scatter*`: an
all-reduce whose emitter writes only one part. And a collective that overlaps with computation is
written several times over: in a fusion that starts it, in every fusion that computes meanwhile, and
in the one that waits for it. Channel ids do not tell these clones from other collectives, the
custom calls `AsyncCollectiveStart` and `AsyncCollectiveDone` do. Between slices a collective is a
send to the hosts' runtime and a receive from it.
"""

from __future__ import annotations

from gshard.analysis.hlo.parser import Computation, Instruction

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
