"""One of several processes that train as in Paddle (`tests/paddle/test_processes.py`).

    python -m tests.paddle.paddle_worker COORDINATOR PROCESSES RANK FILE LEVEL

Every process passes its own rows. What it saw goes to FILE, checkpoints beside it.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import gshard

LEVELS, STEPS, ROWS = ("os", "p_g_os"), 3, 16


def main(coordinator: str, processes: int, rank: int, file: str, level: str) -> None:
    warnings.simplefilter("ignore", gshard.GShardWarning)  # small leaves are replicated, on purpose
    gshard.distributed.initialize(coordinator, processes, rank)

    import numpy as np

    from tests.paddle.test_group_sharded import Net, loss_fn, rows, train, wrap

    def own(seed):
        each = ROWS // processes
        return {name: x[rank * each : (rank + 1) * each] for name, x in rows(ROWS, seed).items()}

    model, optimizer, _ = wrap(level)
    losses = np.array(train(model, optimizer, map(own, range(STEPS - 1))))
    folder = Path(file).with_name(level)
    gshard.paddle.save_group_sharded_model(model, folder, optimizer)
    other, its, _ = wrap("os_g", Net(7))
    gshard.paddle.load_group_sharded_model(other, folder, its)
    with other.no_sync():
        other.backward(loss_fn, own(STEPS - 1))
    gshard.paddle.fused_allreduce_gradients(other.parameters(), None)
    its.step()
    params = {f"params/{name}": x for name, x in other.state_dict().items()}
    np.savez(file, losses=losses, **params)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
