"""One of two processes that load and save safetensors in an object store (`test_safetensors.py`).

    python -m tests.checkpoint.stores.safetensors_worker COORDINATOR PROCESSES RANK FILE ADDRESS

It loads ADDRESS/alone, counts the bytes that it reads, and saves ADDRESS/together.
"""

from __future__ import annotations

import sys

import gshard


def main(coordinator: str, processes: str, rank: str, file: str, address: str) -> None:
    gshard.distributed.initialize(coordinator, int(processes), int(rank))
    import numpy as np
    import optax

    from gshard.checkpoint.bucket import Bucket

    read, sizes = Bucket.read, list[int]()

    def counting(*given) -> bytes:
        found = read(*given)
        sizes.append(len(found))
        return found

    params = {name: np.zeros((256, 512), np.float32) for name in "ab"}
    state, _ = gshard.shard_train_state((params, optax.sgd(0.1)), gshard.make_mesh(), "p_g_os")
    Bucket.read = counting  # type: ignore[method-assign]
    state = gshard.load_safetensors(state, f"{address}/alone")
    total = sum(sizes)
    gshard.save_safetensors(state, f"{address}/together")
    if rank == "0":
        Bucket(address).create("bad", b"no tensors")
    gshard.distributed.barrier()
    said = ""
    try:
        gshard.load_safetensors(state, f"{address}/{'bad' if rank == '0' else 'alone'}")
    except gshard.GShardError as error:
        said = str(error)
    np.savez(file, bytes=total, said=said)


if __name__ == "__main__":
    main(*sys.argv[1:])
