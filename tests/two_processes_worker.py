"""One of several processes that train together; `test_two_processes.py` starts them.

    python -m tests.two_processes_worker COORDINATOR PROCESSES RANK FILE TIER

Every process makes the same batches and passes its own rows of them. What it saw goes to FILE.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any, NamedTuple

import gshard

STEPS, ROWS = 4, 24


class Run(NamedTuple):
    """One training: in two processes here, in one in the test."""

    model: str
    level: str
    micro_batches: int


RUNS = {
    "quick": (Run("linen_mlp", "os_g", 2), Run("nnx_mlp", "p_g_os", 2)),
    "slow": (Run("linen_mlp", "dp", 1), Run("linen_mlp", "os", 2), Run("linen_mlp", "p_g_os", 1)),
}


def train(run: Run, mesh: Any, rank: int, world_size: int) -> tuple[list[float], dict[str, Any]]:
    """Losses, and the whole parameters at the end, of `STEPS` steps over this process's rows."""
    from tests import reference
    from tests.zoo import ZOO

    model = ZOO[run.model]
    state = model.state(reference.OPTIMIZERS["adamw"]())
    state, plan = gshard.shard_train_state(state, mesh, run.level, **model.options())
    step = gshard.make_train_step(model.loss, plan, micro_batches=run.micro_batches)
    own = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    losses = []
    for i in range(STEPS):
        batch = {name: x[own] for name, x in model.batch(0, ROWS, i).items()}
        if model.kind == "nnx":
            metrics = step(*state, batch)
        else:
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, reference.flat(gshard.full_params(state))


def main(coordinator: str, processes: int, rank: int, file: str, tier: str) -> None:
    warnings.simplefilter("ignore", gshard.GShardWarning)  # small leaves stay whole, on purpose
    gshard.init_parallel_env(coordinator=coordinator, num_processes=processes, process_id=rank)

    import jax
    import numpy as np

    found = {
        "ranks": np.array([gshard.get_rank(), gshard.get_world_size()]),
        "devices": np.array([len(jax.local_devices()), len(jax.devices())]),
        "group": np.array([d.id for d in gshard.new_group([1, 2])]),
        "owners": np.array([d.process_index for d in gshard.new_group([1, 2])]),
    }
    for i, run in enumerate(RUNS[tier]):
        losses, params = train(run, gshard.make_mesh(), rank, processes)
        found[f"{i}/losses"] = np.array(losses)
        found |= {f"{i}/params/{path}": leaf for path, leaf in params.items()}
    np.savez(file, **found)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
