"""One of two processes with kept experts (`test_experts_compose.py`).

python -m tests.train.experts_worker COORDINATOR PROCESSES RANK FILE
"""

from __future__ import annotations

import sys

import gshard


def main(coordinator: str, processes: int, rank: int, file: str) -> None:
    gshard.distributed.initialize(coordinator, processes, rank)
    import jax
    import jax.numpy as jnp
    import numpy as np

    from gshard.data.batch import positions_by_process
    from tests.experts import batch, mean_loss, params, sharded

    loss, given, count = mean_loss("one-hot", balance=True), batch(), jax.device_count()
    data = {"shape": {"data": count // 2, "expert": 2}}
    state, plan = sharded(data, "p_g_os")
    step = gshard.make_train_step(loss, plan, donate=False)
    losses = [
        float(step(state, examples)[1]["loss"])
        for examples in gshard.DataLoader(given, 24, plan, shuffle=False)
    ]

    def by_position(p, given):  # other numbers for any other order of the examples
        return (given["x"].astype(jnp.float32).mean(1) * jnp.arange(24)).sum()

    mine = sorted(positions_by_process(plan)[rank])
    own = {k: x.reshape(count, -1, *x.shape[1:])[mine] for k, x in given.items()}
    own = {k: x.reshape(-1, *x.shape[2:]) for k, x in own.items()}
    found = gshard.make_eval_step(by_position, plan)(state, own)
    np.savez(
        file,
        losses=losses,
        of_one_device=float(loss(params(), given)),
        by_position=float(found),
        by_position_of_one_device=float(by_position(None, given)),
        mine=mine,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
