"""One of several processes that send and store in 8 bits (`test_quantized_processes.py`).

    python -m tests.train.quantized_worker COORDINATOR PROCESSES RANK FILE

Every process makes the same batches and passes its own rows of them. What it saw goes to FILE.
"""

from __future__ import annotations

import sys
from typing import Any

import gshard

LEVELS, STEPS, ROWS = ("os", "p_g_os"), 4, 24
KINDS = {
    "float32": {},
    "wire": {"gather_dtype": "int8", "scatter_dtype": "int4"},
    "state": {"state_dtype": "int8"},
    "both": {"gather_dtype": "int8", "scatter_dtype": "int8", "state_dtype": "int8"},
}


def train(kind: str, level: Any, rank: int, processes: int) -> tuple[Any, dict[str, Any]]:
    """The losses of some steps and the parameters after them."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    rng = np.random.default_rng(0)
    shapes = {"first": (96, 130), "bias": (130,), "second": (130, 97)}
    params = {k: (rng.normal(size=s) / 10).astype(np.float32) for k, s in shapes.items()}

    def loss(p: Any, b: Any) -> Any:
        hidden = jnp.tanh(b["x"] @ p["first"] + p["bias"])
        return jnp.mean((hidden @ p["second"] - b["y"]) ** 2)

    precision = gshard.Precision("float32", **KINDS[kind])
    state, plan = gshard.shard_train_state(
        (params, optax.adamw(1e-2)),
        gshard.make_mesh(),
        level,
        precision=precision,
        min_shard_size=100,
    )
    step, losses = gshard.make_train_step(loss, plan), []
    own = slice(rank * ROWS // processes, (rank + 1) * ROWS // processes)
    for i in range(STEPS):
        rng = np.random.default_rng(i)
        sizes = {"x": (ROWS, 96), "y": (ROWS, 97)}
        batch = {k: rng.normal(size=size).astype(np.float32) for k, size in sizes.items()}
        state, metrics = step(state, {k: x[own] for k, x in batch.items()})
        losses.append(float(metrics["loss"]))
    return np.array(losses), gshard.full_params(state)


def main(coordinator: str, processes: int, rank: int, file: str) -> None:
    """Trains in every way, and saves what came out of it."""
    if processes > 1:
        gshard.distributed.initialize(coordinator, processes, rank)
    import numpy as np

    found = {}
    for kind in KINDS:
        for level in LEVELS:
            losses, params = train(kind, level, rank, processes)
            found |= {f"{kind}/{level}/{k}": x for k, x in {**params, "losses": losses}.items()}
    np.savez(file, **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
