"""What one device needs for a train step, from its trace alone: nothing is compiled.

The peak is that of the compiler's buffers: everything that the step is given, and what it makes on
the way. Results take over the memory of the state they replace, where the state is donated.
`compiled_peak` is the figure of a compiled step that it stands beside.

`benchmarks/footprint.py` prints every figure; docs/development/planner-accuracy.md lists them. Off
by more than 10 % are, on GPU, models that are mostly tables (0.86 times what is needed); on CPU,
with JAX 0.12, convolutions whose kernels are gathered (0.86).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard.analysis.memory.combine import Kernel
from gshard.analysis.memory.liveness import peak_of
from gshard.analysis.memory.opening import program_of
from gshard.analysis.memory.program import NEW_CPU, TracedProgram
from gshard.analysis.memory.traffic import Exchange, exchanges_of, flops_of, traffic_of
from gshard.sharding.plan import Plan
from gshard.train.train_step import TrainStep

PLATFORMS = ("cpu", "gpu", "tpu")
_LARGEST = 40  # of the buffers at the peak, as many are told


@dataclass(frozen=True)
class TracedBuffer:
    """One array that is live at the peak.

    Attributes:
      bytes: on one device.
      shape: on one device.
      dtype: its name.
      what: the primitive that makes it, and its name stack, such as `dot_general jvp(GPT/up)`.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    what: str


@dataclass(frozen=True)
class Footprint:
    """What one device needs for one step.

    Attributes:
      arguments: bytes of the state and the batch.
      temporaries: bytes of the largest sum of temporaries that are live together.
      peak: bytes, the two together and the results that take over no argument's memory.
      largest: what is live at the peak beside the arguments, largest first.
      flops: of matrix products and convolutions, by dtype (`traffic.flops_of`).
      traffic: bytes that kernels read from the device's memory and write to it, for a roofline.
      collectives: those written in the step. What XLA adds to an update in the global view, such as
        for an optimizer's matrix products, is not among them.
    """

    arguments: int
    temporaries: int
    peak: int
    largest: tuple[TracedBuffer, ...]
    flops: dict[str, float]
    traffic: int
    collectives: tuple[Exchange, ...]


def trace_step(step: TrainStep, state: Any, batch: Any) -> jax.stages.Traced:
    """The step traced for a state and a batch, concrete or abstract.

    No device is needed: a plan of an `AbstractMesh` will do, with an abstract batch.

    Args:
      step: of `make_train_step`.
      state: a train state, or for NNX the pair `(model, optimizer)`.
      batch: global arrays, or their `ShapeDtypeStruct`s.
    """
    return step.trace(*step.arguments(state, batch))


def footprint(traced: jax.stages.Traced, plan: Plan, platform: str) -> Footprint:
    """Estimates what one device needs for a step.

    Args:
      traced: of `trace_step`.
      plan: of the step.
      platform: `cpu`, `gpu` or `tpu`: whose compiler is modelled. A TPU is taken for a GPU without
        split matrix products and hidden latency, which was not compared with its compiler.

    Raises:
      GShardError: for another platform.
    """
    if platform not in PLATFORMS:
        raise GShardError(f"platform={shown(platform)} is none of {', '.join(PLATFORMS)}.")
    program = _of_device(traced, plan, platform)
    arguments = sum(program.values[i].bytes for i in program.inputs)
    found = peak_of(program, platform)
    rows = sorted(found.live, key=lambda row: -row[0])[:_LARGEST]
    return Footprint(
        arguments,
        found.bytes,
        arguments + found.bytes,
        tuple(_buffer(*row) for row in rows),
        flops_of(program),
        traffic_of(program, platform),
        exchanges_of(program, plan.mesh.shape, wide=platform == "cpu"),
    )


def compiled_peak(compiled: Any, platform: str) -> int:
    """Bytes of one device that a compiled step needs at its peak, by the compiler's own account.

    On GPU and TPU `peak_memory_in_bytes`: the largest sum of live buffers, arguments included. On
    CPU that leaves temporaries out (JAX 0.10 and 0.12: the peak of an MLP with 61 MB of them was
    530 bytes above its arguments), so here it is arguments + results - aliased + temporaries: what
    is allocated.
    """
    memory = compiled.memory_analysis()
    if platform != "cpu":
        return memory.peak_memory_in_bytes
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def _of_device(traced: jax.stages.Traced, plan: Plan, platform: str) -> TracedProgram:
    (leaves, batch, rng), _ = traced.in_avals  # pyright: ignore[reportAttributeAccessIssue]
    shardings: list[Any] = [x.sharding for x in jax.tree.leaves(plan.abstract_components())]
    rows = plan.sharding().update(spec=plan.batch_spec)
    shardings += [rows if x.shape else None for x in jax.tree.leaves(batch)]
    shardings += [None for _ in jax.tree.leaves(rng)]
    program = program_of(traced.jaxpr, shardings, platform != "cpu" or NEW_CPU, platform)
    if 0 in traced.donate_argnums:  # pyright: ignore[reportAttributeAccessIssue]
        program.kept = [(k, k) for k in range(len(leaves))]
    return program


def _buffer(size: int, i: int, kernel: Kernel, program: TracedProgram) -> TracedBuffer:
    value, op = program.values[i], kernel.op
    return TracedBuffer(size, value.shape, str(value.dtype), f"{op.name} {op.where}".strip())
