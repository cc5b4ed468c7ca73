"""What separate calls have left on each device, reduced: gradients, and extras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from gshard._util.errors import GShardError
from gshard._util.pytree import same_leaves
from gshard.sharding.plan import Plan
from gshard.train.comm.collectives import agree
from gshard.train.comm.reduce import accumulating, reduce, reduced_specs
from gshard.train.gradients import Gradients, Options
from gshard.train.local_gradients import Unreduced
from gshard.train.non_trainable import pinned


def end_reduction(sums: Unreduced, plan: Plan, options: Options) -> Gradients:
    """What `gradients` returns, from sums over one call or several."""
    targets = accumulating(plan, sums.accumulate)
    structure = same_leaves(sums.grads, (x.path for x in targets), "the gradients are")
    leaves = jax.tree.leaves(sums.grads)
    for x, target in zip(leaves, targets, strict=True):
        if x.shape != (plan.group.devices, *target.part_shape):
            raise GShardError(
                f"the Unreduced gradient of {target.path} has shape {x.shape}, and this plan makes "
                f"{(plan.group.devices, *target.part_shape)}. Reduce it with the plan that it was "
                "made with."
            )

    def end(own: Any) -> Any:
        return reduce(own, plan, sums.accumulate, options, list(range(len(leaves))))

    given = (leaves, sums.loss, sums.weight, sums.aux)
    grads, value, aux, weight, norm = _on_devices(end, given, reduced_specs(plan), plan)
    return Gradients(jax.tree.unflatten(structure, grads), value, aux, weight, norm, {})


def end_extras(own: dict[str, Any], plan: Plan, options: Options) -> dict[str, Any]:
    """One value for all devices of extras of which each has its own, in storage."""

    def end(own: Any) -> Any:
        return agree(own, plan.group, options.sync_buffers)

    return pinned(_on_devices(end, own, jax.P(), plan), plan)


def _on_devices(end: Callable[[Any], Any], given: Any, out_specs: Any, plan: Plan) -> Any:
    """`end` of what each device has of arrays with a leading axis over the devices."""
    return jax.shard_map(
        lambda own: end(jax.tree.map(lambda x: x[0], own)),
        mesh=plan.mesh,
        in_specs=(plan.batch_spec,),
        out_specs=out_specs,
        axis_names=set(plan.data_axes),
        check_vma=False,
    )(given)
