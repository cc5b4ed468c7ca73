"""One of several processes with a `ZeroRedundancyOptimizer` (`tests/pytorch/test_processes.py`).

    python -m tests.pytorch.zero_worker COORDINATOR PROCESSES RANK FILE

Every process passes its own rows. What it saw goes to FILE.
"""

from __future__ import annotations

import sys
from functools import partial

import gshard

PARTITIONS, STEPS, ROWS, UNEVEN = ("even", "greedy"), 3, 24, 8


def main(coordinator: str, processes: int, rank: int, file: str) -> None:
    gshard.distributed.initialize(coordinator, processes, rank)

    import jax
    import numpy as np
    import optax
    from flax import nnx

    from tests.pytorch.test_zero_redundancy_optimizer import Net, loss_fn, rows

    def own(seed):
        each = ROWS // processes
        return {name: x[rank * each : (rank + 1) * each] for name, x in rows(ROWS, seed).items()}

    found = {}
    for partition in PARTITIONS:
        dp = gshard.paddle.DataParallel(Net())
        opt = gshard.pytorch.ZeroRedundancyOptimizer(
            dp.parameters(),
            # its address, which a message may name, differs between the processes
            partial(optax.adam, b1=0.9) if partition == "greedy" else optax.adam,
            parameters_as_bucket_view=partition == "greedy",
            partition=partition,
            lr=0.01,
        )
        for seed in range(STEPS - 1):
            dp.backward(loss_fn, own(seed))
            opt.step()
            opt.zero_grad()
        saved, before = opt.state_dict(), dp.state_dict()
        opt.consolidate_state_dict(to=1)
        for ranks in ([1], [0, 1]):
            if rank in ranks:  # alone too: nothing may be sent
                again = opt.state_dict()["state"]
                assert jax.tree.all(jax.tree.map(np.array_equal, again, saved["state"]))
        part = opt.state_dict(full=False)
        dp.backward(loss_fn, own(STEPS))  # a step that is undone
        opt.step()
        opt.zero_grad()
        dp.set_state_dict(before)
        opt.load_state_dict(part if partition == "even" else saved)
        dp.backward(loss_fn, own(STEPS - 1))
        opt.step()
        params = jax.tree.leaves(nnx.state(dp, nnx.Param))
        for i, x in enumerate(params):
            found[f"{partition}/params/{i}"] = np.asarray(x.addressable_data(0))
        for i, x in enumerate(jax.tree.leaves(opt.state_dict()["state"])):
            found[f"{partition}/state/{i}"] = x
    dp = gshard.paddle.DataParallel(Net())
    opt = gshard.pytorch.ZeroRedundancyOptimizer(dp, optax.adam, lr=0.01)
    with gshard.pytorch.Join([dp, opt], divide_by_initial_world_size=False) as join:
        for batch in join(rows(UNEVEN, 10 * rank + i) for i in range(1 + 2 * rank)):
            dp.backward(loss_fn, batch)
            opt.step()
            opt.zero_grad()
    for i, x in enumerate(jax.tree.leaves(nnx.state(dp, nnx.Param))):
        found[f"join/{i}"] = np.asarray(x.addressable_data(0))
    alone = gshard.paddle.DataParallel(Net(), group=jax.local_devices())
    with gshard.pytorch.Join([alone]) as join:  # not with the model of the other process
        found["own"] = np.array(sum(1 for _ in join(rows(UNEVEN, i) for i in range(3 + 2 * rank))))
    dp, bad = gshard.paddle.DataParallel(Net()), rows(UNEVEN, 0)
    bad["x"][3] = np.nan
    batches = [[bad], [rows(UNEVEN, i) for i in range(2)]][rank]
    spec = jax.NamedSharding(dp.plan.mesh, dp.plan.batch_spec)
    of_all = partial(jax.make_array_from_process_local_data, spec)
    whole = [jax.tree.map(of_all, batch) for batch in batches]
    for name, given in (("own", batches), ("global", whole)):
        with gshard.pytorch.Join([dp], divide_by_initial_world_size=False) as join:
            for batch in join(given):
                dp.clear_gradients()
                dp.backward(loss_fn, batch)
        for i, x in enumerate(jax.tree.leaves(dp.grads)):
            found[f"beside NaN/{name}/{i}"] = np.asarray(x.addressable_data(0))
    np.savez(file, **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
