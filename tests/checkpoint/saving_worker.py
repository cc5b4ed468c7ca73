"""One of several processes that save and restore (`tests/checkpoint/test_processes.py`).

    python -m tests.checkpoint.saving_worker COORDINATOR PROCESSES RANK FILE DEVICES_EACH DIRECTORY

It restores what the test wrote into DIRECTORY/alone, and writes DIRECTORY/together. DIRECTORY may
be the address of an object store.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import Any

import gshard

BEFORE, AFTER = (0, 1), (2, 3)
REPLACED: dict[str, Any] = {
    "first value": lambda x: x.at[(0,) * x.ndim].set(3),
    "all": lambda x: x * 0 + 2,
}


def main(coordinator: str, processes: str, rank: str, file: str, each: str, folder: str) -> None:
    gshard.distributed.initialize(coordinator, int(processes), int(rank))
    gshard.virtual_devices(int(each))
    import fsspec
    import jax
    import numpy as np

    from tests.checkpoint.test_checkpoints import Training

    warnings.simplefilter("ignore", gshard.GShardWarning)
    devices = int(processes) * int(each)
    me = int(rank)
    found: dict[str, Any] = {}

    # What one process wrote, at other levels.
    run = Training("os_g", devices)
    checkpointer = gshard.Checkpointer(f"{folder}/alone")
    restored = checkpointer.restore(like=run.state)
    run.state = restored.state
    found["alone"] = run.train(*AFTER)
    found["alone data"] = [restored.data_state["position"]]

    # What these write, and go on with.
    run = Training("p_g_os", devices)
    run.train(*BEFORE)
    together = gshard.Checkpointer(f"{folder}/together", keep_last=1)
    for step in (1, 2):
        together.save(step, run.state, data_state={"rank": me}, metadata={"writer": me})
    rewrapped = [
        jax.make_array_from_single_device_arrays(
            x.shape, x.sharding, [part.data for part in x.addressable_shards]
        )
        for x in jax.tree.leaves(run.state)
    ]
    same = jax.tree.unflatten(jax.tree.structure(run.state), rewrapped)
    together.save(2, run.state)  # written already
    together.save(2, same if me else run.state)  # and so are these: other objects in one process
    found["after"] = run.train(*AFTER)
    try:
        together.save(2, run.state)
    except gshard.GShardError as error:
        found["other"] = [str(error)]
    together.wait()
    found["steps"] = together.all_steps()
    again = Training("dp", devices)
    restored = together.restore(like=again.state)
    again.state = restored.state
    found["again"] = again.train(*AFTER)
    found["rank"] = [restored.data_state["rank"]]
    found["writer"] = [restored.metadata["writer"]]

    # What only one of them does wrong, all hear of.
    said = []
    for wrong in (
        lambda: together.save(10 + me, run.state),
        lambda: together.save(10, run.state, metadata={"x": object()} if me else None),
        lambda: together.save(1, run.state),
        lambda: gshard.Checkpointer(f"{folder}/own {me}").save(1, run.state),
        lambda: together.restore(2 if me else 1, like=run.state),
        lambda: together.restore(2, like=None if me else run.state),
        lambda: together.restore(2, like=run.state, verify=bool(me)),
        lambda: together.delete(5 if me else 2),
    ):
        try:
            wrong()
            said.append("nothing")
        except gshard.GShardError as error:
            said.append(str(error))
    found["said"] = said

    # New values of parameters that have master copies; one value is of one process alone.
    for level in ("os", "p_g_os"):
        run = Training(level, devices, precision="bfloat16")
        shardings = jax.tree.map(lambda x: x.sharding, run.state.params)
        for name, change in REPLACED.items():
            changed = jax.jit(partial(jax.tree.map, change), out_shardings=shardings)
            run.state = run.state.replace(params=changed(run.state.params))
            full = gshard.full_params(run.state)
            with gshard.Checkpointer(f"{folder}/{name} at {level}") as checkpointer:
                checkpointer.save(0, run.state)
                again = checkpointer.restore(like=run.state).state
            for how, params in (("full", full), ("restored", gshard.full_params(again))):
                leaves = map(np.ravel, jax.tree.leaves(params))
                found[f"{how}, {name} at {level}"] = np.concatenate([*leaves])
    gshard.distributed.barrier()
    if me == 0:
        fs, path = fsspec.url_to_fs(f"{folder}/together", use_listings_cache=False)
        # From an object store a process reads what it needs, and all need the files of all.
        whose = "d" if "://" in folder else "ocdbt.process_1/d"
        damaged = max(fs.glob(f"{path}/2/arrays/{whose}/*"), key=fs.size)
        content = fs.cat_file(damaged)
        at = len(content) // 3
        fs.pipe_file(damaged, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    gshard.distributed.barrier()
    try:
        together.restore(2, like=run.state)
    except gshard.DamagedCheckpointError as error:
        found["damaged"] = [error.damages[2][0].file]
    together.save(3, run.state, data_state={"rank": me})
    together.close()
    if me == 0:
        found["left"] = sorted(x.rsplit("/", 1)[1] for x in fs.ls(path, detail=False))
    np.savez(file, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
