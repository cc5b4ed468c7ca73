"""What the table shows, taken from the arrays and programs that ran."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from gshard.analysis.hlo.parser import read_arrays, read_module

KINDS = ("all-gather", "reduce-scatter", "all-reduce")
PARTS = ("params", "gradients", "optimizer")


@dataclasses.dataclass
class Run:
    """One training run and what was seen of it.

    Attributes:
      name: the level and what else differs from other runs, or `one device`.
      losses: one per step.
      tokens_per_second: of the training loop, compilation left out.
      bytes: on one device, of `params`, `gradients` and `optimizer`; None where there is nothing
        to measure.
      budget_bytes: the same, by the budget of the plan.
      moved: elements per step and device by kind of collective, counted in the compiled program.
      budget_elements: the same, by the budget of the plan.
      sent: bytes that a device sends in one step, counted in the compiled program.
      exchanged: how many of these are examples, sent to experts and back.
      at_most: kinds whose budget is an upper bound.
    """

    name: str
    losses: list[float] = dataclasses.field(default_factory=list)
    tokens_per_second: float = 0.0
    bytes: dict[str, int | None] = dataclasses.field(default_factory=dict)
    budget_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    moved: dict[str, int] = dataclasses.field(default_factory=dict)
    budget_elements: dict[str, int] = dataclasses.field(default_factory=dict)
    sent: int = 0
    exchanged: int = 0
    at_most: tuple[str, ...] = ()

    def off_by(self, reference: Run) -> float:
        """The largest difference of a loss from the reference's, over all steps."""
        return float(np.max(np.abs(np.subtract(self.losses, reference.losses))))


def bytes_on_first_device(tree) -> int:
    """Bytes of the shards that this process's first device holds of every array in `tree`."""
    device = jax.local_devices()[0]
    return sum(
        shard.data.nbytes
        for array in jax.tree.leaves(tree)
        for shard in array.addressable_shards
        if shard.device == device
    )


def carried_by_micro_batch_loop(compiled: jax.stages.Compiled) -> int | None:
    """Bytes that the loop over micro-batches carries from one to the next: the gradients.

    The loop is the outermost `while` of the program. What it carries is the part of its tuple that
    the body changes, without the counter, the loss and the weight, which are single numbers.
    None when there is no such loop: one micro-batch, whose gradient is used at once.
    """
    computations = read_module(compiled.as_text()).computations
    loops = (i for c in computations.values() for i in c.instructions if i.opcode == "while")
    loop = next((loop for loop in loops if loop.op_name.count("/while") == 1), None)
    if loop is None:
        return None
    body = computations[loop.names("body")[0]]
    after = [body.by_name[name] for name in body.root.operands]
    changed = [
        array
        for i, (array, value) in enumerate(zip(read_arrays(loop.shape), after, strict=True))
        # handed on as it came: an input of the loop, such as the parameters and the rows
        if not (value.opcode == "get-tuple-element" and value.attributes["index"] == str(i))
    ]
    return sum(array.bytes for array in changed if array.elements > 1)
