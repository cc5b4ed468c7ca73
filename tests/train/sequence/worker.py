"""One of two processes whose devices share sequences (`test_surroundings.py`).

python -m tests.train.sequence.worker COORDINATOR PROCESSES RANK FILE
"""

from __future__ import annotations

import sys

import gshard


def main(coordinator: str, processes: int, rank: int, file: str) -> None:
    gshard.distributed.initialize(coordinator, processes, rank)
    import jax
    import numpy as np

    from tests.train.sequence.models import Model, batch, init, loss_of, on_one_device, sharded

    model = Model()
    loss, params = loss_of(model), jax.tree.map(np.asarray, init(model))
    state, plan = sharded(params, devices=4, sequence=4)
    step = gshard.make_train_step(loss, plan, donate=False)
    losses = []
    data = {k: x.astype(np.float32) if k == "mask" else x for k, x in batch().items()}
    for given in (data, *gshard.DataLoader(data, 24, plan, shuffle=False)):
        placed = gshard.shard_batch(given, plan)
        losses.append(float(step(state, placed)[1]["loss"]))
    try:
        gshard.shard_batch({"x": data["x"] + rank, "mask": data["mask"]}, plan)
        message = "nothing"
    except gshard.GShardError as error:
        message = str(error)
    np.savez(
        file,
        losses=losses,
        of_one_device=on_one_device(loss, params, batch())[0],
        of_other_examples=message,
        slice=placed["x"].addressable_shards[0].data,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
