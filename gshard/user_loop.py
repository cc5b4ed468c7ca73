"""`jax.value_and_grad` with the level's collectives, for users who keep their own train step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gshard.arguments import names_of
from gshard.collectives import BUFFER_MAX_SIZE
from gshard.gradients import Options, gradients
from gshard.plan import Plan, check_call
from gshard.promise import accumulation


def value_and_grad(
    loss_fn: Callable[..., Any],
    plan: Plan,
    *,
    has_aux: bool = False,
    mutable: str | Sequence[str] = (),
    micro_batches: int = 1,
    accumulate: str = "level",
    buffer_max_size: int = BUFFER_MAX_SIZE,
) -> Callable[..., Any]:
    """The loss over the global batch, and its Divided gradient.

    Call the result inside your own `jax.jit` (or `nnx.jit`), then
    `state.apply_gradients(grads=grads)` (or `optimizer.update(model, grads)`): the layouts stay
    those of the plan.

    Args:
      loss_fn: as in `make_train_step`.
      plan: of `shard_train_state`.
      has_aux: the loss returns `(loss, aux)`.
      mutable: Linen collections that the loss returns as updates.
      micro_batches: slices that each device takes its rows in, one after the other.
      accumulate: as in `make_train_step`.
      buffer_max_size: elements of one bucket.

    Returns:
      Linen: `f(params, batch, *, rng=None, **collections) -> (value, grads)`, where value is the
      loss, `(loss, aux)`, `(loss, updates)` or `(loss, (aux, updates))`. NNX: `f(model, batch)`;
      what the loss changes in the model is written into it.
    """
    check_call(loss_fn, plan, "value_and_grad(loss_fn, plan)")
    accumulation(plan, micro_batches, accumulate)  # refuses bad options now
    options = Options(has_aux, micro_batches, accumulate, buffer_max_size)
    names = names_of("mutable", mutable)

    def on_batch(target: Any, batch: Any, *, rng: Any = None, **collections: Any) -> Any:
        parts = plan.kind.split_target(target, collections)
        loss = plan.kind.loss(loss_fn, names, parts.static)
        result = gradients(loss, parts, batch, rng, plan, options)
        updates = plan.kind.absorb(target, parts, result.updates)
        more = [x for x, given in ((result.aux, has_aux), (updates, bool(names))) if given]
        value = (
            result.loss if not more else (result.loss, more[0] if len(more) == 1 else tuple(more))
        )
        return value, plan.kind.gradients(result.grads, target)

    return on_batch
