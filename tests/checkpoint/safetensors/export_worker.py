"""One of several processes that save and load safetensors (`tests/checkpoint/safetensors`).

    python -m tests.checkpoint.safetensors.export_worker COORDINATOR PROCESSES RANK FILE FOLDER

Every process saves the parameters that it read back, and what each failing call said.
"""

from __future__ import annotations

import resource
import sys
import warnings
from pathlib import Path

import gshard


def main(coordinator: str, processes: int, rank: int, file: str, folder: Path) -> None:
    warnings.simplefilter("ignore", gshard.GShardWarning)  # small leaves are replicated, on purpose
    gshard.distributed.initialize(coordinator, processes, rank)

    import numpy as np
    import optax

    from tests.checkpoint.safetensors.export_models import NAMES, SHARD_BYTES, divided
    from tests.reference import flat

    mesh = gshard.make_mesh()
    found, said = {}, []
    for name, level, its_mesh, options in (
        ("p_g_os", "p_g_os", mesh, {}),
        ("bfloat16", "os", mesh, {"precision": "bfloat16"}),
        ("replica", "os", gshard.make_mesh(replica=2), {}),
    ):
        state, _, _ = divided("linen", level, its_mesh, **options)
        gshard.save_safetensors(state, folder / name)
        other, _, _ = divided("linen", "p_g_os", mesh, seed=5)
        back = gshard.full_params(gshard.load_safetensors(other, folder / name))
        found |= {f"{name}/{path.replace('/', '.')}": x for path, x in flat(back).items()}

    shards = {"name_map": NAMES, "max_shard_bytes": SHARD_BYTES}
    if rank == 0:
        (folder / "shards").mkdir()
    gshard.distributed.barrier()
    state, _, _ = divided("linen", "p_g_os", mesh)
    gshard.save_safetensors(state, folder / "shards", **shards)
    other, _, _ = divided("linen", "os", mesh, seed=5)
    other = gshard.load_safetensors(other, folder / "shards", name_map=NAMES)
    back = flat(gshard.full_params(other))
    found |= {f"shards/{path.replace('/', '.')}": x for path, x in back.items()}

    def fails(call, *args, **options) -> None:
        try:
            call(*args, **options)
        except gshard.GShardError as error:
            said.append(str(error).replace("\n", " "))

    state, _, _ = divided("linen", "p_g_os", mesh)
    fails(gshard.save_safetensors, state, folder / "none" / "x")
    fails(
        gshard.save_safetensors,
        state,
        folder / "bad",
        metadata={"a": "1"} if rank == 0 else {"a": 1},
    )
    full = folder / "full"
    if rank == 0:
        full.write_text("old")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    gshard.distributed.barrier()
    large = {name: np.ones(20_001, np.float32) for name in "abcde"}  # fails at the first of them
    fails(
        gshard.save_safetensors, gshard.shard_train_state((large, optax.sgd(0.1)), mesh, 3)[0], full
    )
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    fails(gshard.load_safetensors, state, folder / ("p_g_os" if rank == 0 else "none"))
    fails(gshard.save_safetensors, state, folder / "shards", **shards)
    gshard.save_safetensors(state, folder / "after")  # and nobody hangs
    np.savez(file, said="\n".join(said), **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
