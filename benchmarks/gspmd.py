"""The same levels by `jit` with shardings: what a good JAX engineer writes without gshard.

`wire`, `step` and `first_step` compare with these, so they are frozen: written before gshard was
tuned and not changed since. Nothing of gshard is used here.

Shardings are given for all inputs and outputs, gradients are constrained to the shardings of the
optimizer state, and the state is donated; the compiler chooses the collectives. Whether it does
better when weights are also constrained to be replicated where they are used depends on the
machine, so `p_g_os` comes in both variants, and a benchmark compares with the better one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LEVELS = ("dp", "os", "os_g", "p_g_os")


class Baseline(NamedTuple):
    """A compiled step and the placement of its arguments.

    Attributes:
      step: jitted, `(params, opt_state, batch) -> (params, opt_state, loss)`; donates the state.
      shardings: of `params`, `opt_state` and `batch`.
      init: jitted, `params -> opt_state`, placed.
    """

    step: Any
    shardings: tuple[Any, Any, NamedSharding]
    init: Any


def baseline(
    loss_fn: Callable[..., jax.Array],
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh,
    level: str,
    *,
    stacks: Sequence[str] = (),
    micro_batches: int = 1,
    gather_weights: bool = False,
    compute_dtype: Any = None,
) -> Baseline:
    """One level, by hand.

    Args:
      loss_fn: `loss_fn(params, batch)`, a mean over the examples.
      tx: an elementwise optimizer, such as AdamW.
      params: concrete or abstract.
      mesh: all its axes carry data.
      level: one of `LEVELS`.
      stacks: names of subtrees whose dimension 0 a scan iterates over; it is never sharded.
      micro_batches: slices of the batch, one after the other.
      gather_weights: weights are constrained to be replicated where they are used (`p_g_os`).
      compute_dtype: weights are cast to it, before they are all-gathered.
    """
    axes = tuple(mesh.axis_names)
    n = mesh.size

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        names = [str(getattr(key, "key", key)) for key in path]
        first = 1 if any(name in stacks for name in names) else 0
        # The largest dimension that divides; of equal ones the first.
        dims = [d for d in range(first, leaf.ndim) if leaf.shape[d] % n == 0]
        if not dims or math.prod(leaf.shape[first:]) <= 2**14:
            return PartitionSpec()
        dim = max(dims, key=lambda d: leaf.shape[d])
        return PartitionSpec(*(axes if d == dim else None for d in range(leaf.ndim)))

    def placed(spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(mesh, spec)

    replicated = jax.tree.map(lambda _: PartitionSpec(), params)
    sharded = jax.tree_util.tree_map_with_path(spec, params)
    of_params = sharded if level == "p_g_os" else replicated
    of_grads = replicated if level == "dp" else sharded
    of_sums = sharded if level in ("os_g", "p_g_os") else replicated  # between micro-batches
    of_moments = optax.tree.map_params(
        tx,
        lambda _, spec: spec,
        jax.eval_shape(tx.init, params),
        of_grads,
        transform_non_params=lambda _: PartitionSpec(),
    )
    shardings = (
        jax.tree.map(placed, of_params),
        jax.tree.map(placed, of_moments),
        placed(PartitionSpec(axes)),
    )

    def hold(tree: Any, specs: Any) -> Any:
        return jax.tree.map(
            lambda x, spec: jax.lax.with_sharding_constraint(x, placed(spec)), tree, specs
        )

    def loss_of(params: Any, batch: Any) -> jax.Array:
        if compute_dtype is not None:
            params = hold(jax.tree.map(lambda p: p.astype(compute_dtype), params), of_params)
        if gather_weights:
            params = hold(params, replicated)
        return loss_fn(params, batch)

    def gradient(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        if micro_batches == 1:
            return jax.value_and_grad(loss_of)(params, batch)

        def slices(x: jax.Array) -> jax.Array:
            # Example i of every slice stays on the device that has it.
            examples = x.reshape(n, micro_batches, -1, *x.shape[1:]).swapaxes(0, 1)
            examples = jax.lax.with_sharding_constraint(examples, placed(PartitionSpec(None, axes)))
            return examples.reshape(micro_batches, -1, *x.shape[1:])

        def add(sums: Any, batch: Any) -> tuple[Any, None]:
            loss, grads = sums
            one, more = jax.value_and_grad(loss_of)(params, batch)
            return (loss + one, hold(jax.tree.map(jnp.add, grads, more), of_sums)), None

        zeros = hold(jax.tree.map(jnp.zeros_like, params), of_sums)
        sums, _ = jax.lax.scan(add, (jnp.zeros(()), zeros), jax.tree.map(slices, batch))
        return jax.tree.map(lambda x: x / micro_batches, sums)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = gradient(params, batch)
        grads = hold(grads, of_grads)
        updates, opt_state = tx.update(grads, opt_state, hold(params, of_grads))
        # Every device updates its local shard; replicated parameters are then all-gathered.
        params = hold(optax.apply_updates(hold(params, of_grads), updates), of_grads)
        return hold(params, of_params), opt_state, loss

    jitted = jax.jit(
        step,
        in_shardings=shardings,
        out_shardings=(*shardings[:2], placed(PartitionSpec())),
        donate_argnums=(0, 1),
    )
    init = jax.jit(tx.init, out_shardings=shardings[1])
    return Baseline(jitted, shardings, init)
