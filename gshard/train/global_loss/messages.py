"""What a user reads about a loss that needs more than each device has."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from gshard._util.errors import GShardError, warn
from gshard.expert.balance import SCOPE as BALANCE
from gshard.train.global_loss.placement import size_in_bytes
from gshard.train.global_loss.registry import Converter

_EXAMPLES = (
    "Compute each example independently (wrap a kernel that does so in gshard.by_examples), "
    "raise gather_limit=, or pass loss_semantics='per_device', where each device sees only its "
    "own examples."
)
_ROWS = "To select from each example, use x[jnp.arange(n), y] or jnp.take_along_axis. "
_SAME = "An array whose dimension 0 is not that of the examples does not belong in the batch. "
_GROUPS = (
    "A loss that groups adjacent examples, such as pairs, needs whole groups on each device in "
    "each micro-batch: give a larger batch. "
)
_HINTS = {
    "gather": _ROWS,
    "scatter": _ROWS,
    "slice": _SAME,
    "dynamic_slice": _SAME,
    "reshape": _GROUPS,
}
_EXPERTS = (
    "Make the experts a dimension of both operands of a product, as gshard.expert.dispatch does, "
    "pass by='all_to_all' to gshard.expert.dropless (GPU, TPU), or raise gather_limit=."
)
_SLICES = (
    "In place of logits[:, :-1] keep the logits of all positions, shift the targets with "
    "gshard.sequence.shift_left(tokens, fill=0), and leave the last position out of the mean."
)
_POSITIONS = (
    "Attention is gshard.sequence.attention(q, k, v), which gathers nothing with by='ring' or "
    "'ulysses'. Otherwise act on each position by itself, raise gather_limit=, or use a mesh "
    "without sequence=."
)


def warn_of_kept(evaluator: Converter, eqn: Any) -> None:
    """Warns of a kept parameter that is all-gathered for an equation."""
    axis, over_layers = evaluator.axes[0], ""
    if eqn is not None and eqn.primitive.name == "scan":
        over_layers = (
            " If the scan is over layers, dimension 0 is the layers: keep the dimension of the "
            f"experts, such as keep={{'experts/': ({axis!r}, 1)}}."
        )
    warn(
        f"{evaluator.place(eqn)} all-gathers a parameter that is kept on {axis!r}: "
        "gshard cannot compute it with each device's own experts. Use a product (jnp.einsum) "
        "in which the experts are a dimension of both operands, and for jax.lax.ragged_dot "
        f"gshard.expert.dropless.{over_layers}"
    )


def one_batch_error(evaluator: Converter, eqn: Any) -> GShardError:
    """The error for what needs all examples at once, where they come in micro-batches."""
    place, count = evaluator.place(eqn), evaluator.micro_batches
    if eqn is not None and BALANCE in str(eqn.source_info.name_stack):
        return GShardError(
            f"{place}: load_balancing_loss multiplies two means over the whole batch, which comes "
            f"in {count} micro-batches. Pass by_group=True to it, which is a mean over groups, or "
            "micro_batches=1."
        )
    if eqn is not None and eqn.primitive.name == "convert_element_type":
        old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
        if jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, jnp.inexact):
            return GShardError(
                f"{place} rounds a sum over the batch to {new}, and the batch comes in {count} "
                "micro-batches: the sum of each would be rounded. Keep sums in float32, as "
                "losses.astype(jnp.float32).mean() does, or pass micro_batches=1."
            )
    if eqn is not None and eqn.primitive.name == "div" and evaluator.bodies:
        return GShardError(
            f"{place} divides inside jax.checkpoint, a loop or a branch, and the batch comes in "
            f"{count} micro-batches, whose sums are known only outside. Return both sums from "
            "there and divide them outside, or pass micro_batches=1."
        )
    if eqn is not None and eqn.primitive.name in ("debug_print", "debug_callback"):
        return GShardError(
            f"{place} needs a value computed from all examples, but the batch comes in {count} "
            'micro-batches. Print it after the step instead, such as metrics["loss"] or an '
            "auxiliary output, or pass micro_batches=1."
        )
    hint = "" if eqn is None else _HINTS.get(eqn.primitive.name.partition("-")[0], "")
    return GShardError(
        f"{place} needs all examples of the batch at once, and the batch comes in {count} "
        f"micro-batches. {hint}Sums over examples, and a loss that is a quotient of two such sums, "
        "work with micro-batches. If the result is an auxiliary output or new state, return the "
        "sums and compute it after the step. If each entry depends on one example only, wrap the "
        "function in gshard.by_examples. Otherwise pass micro_batches=1 (jax.checkpoint saves "
        "memory as well), or loss_semantics='per_micro_batch', which computes it for the examples "
        "of one micro-batch over all devices."
    )


def per_example_error(value: Any) -> GShardError:
    """The error for an auxiliary output of each example of a micro-batch."""
    return GShardError(
        f"an auxiliary output of shape {list(value.aval.shape)} has an entry for each example of a "
        "micro-batch, and those of several micro-batches are not put together. Return sums over "
        "the examples, or compute it with gshard.make_eval_step."
    )


def check_limit(evaluator: Converter, aval: Any, eqn: Any) -> None:
    """Refuses to all-gather more than `gather_limit=` allows for one operation."""
    limit, size = evaluator.limit, size_in_bytes(aval) // evaluator.batches
    if limit is None or size <= limit:
        return
    what, fix = "examples", _EXPERTS if evaluator.exchanges else _EXAMPLES
    if not evaluator.of_examples:
        what, fix = "positions of the sequence", _POSITIONS
        if eqn is not None and eqn.primitive.name == "slice":
            fix = f"{_SLICES} {_POSITIONS}"
    elif eqn is not None and eqn.primitive.name.partition("-")[0] in ("gather", "scatter"):
        fix = f"{_ROWS}{fix}"
    raise GShardError(
        f"{evaluator.place(eqn)} mixes {what}, so that gshard all-gathers "
        f"{aval.dtype}{list(aval.shape)} ({size / 1e6:.3g} MB per device) at every step, more than "
        f"gather_limit={limit / 1e6:.3g} MB. {fix}"
    )
