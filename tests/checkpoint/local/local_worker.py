"""One of two processes with local folders (`tests/checkpoint/local/test_local_tier.py`).

python -m tests.checkpoint.local.local_worker COORDINATOR PROCESSES RANK FILE DIRECTORY
"""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import gshard


def main(coordinator: str, processes: str, rank: str, file: str, where: str) -> None:
    gshard.distributed.initialize(coordinator, int(processes), int(rank))
    import jax
    import numpy as np

    from gshard.checkpoint.local import store
    from gshard.checkpoint.local.shards import read_index
    from tests.checkpoint.test_checkpoints import tx
    from tests.zoo import ZOO

    me, folder = int(rank), Path(where)
    found: dict[str, Any] = {}

    def opened(name: str, own: str) -> gshard.Checkpointer:
        where = folder / name
        return gshard.Checkpointer(
            where / "run", every=100, local=where / own, local_every=1, on_failure="raise"
        )

    def sharded(level: Any, **axes: Any) -> Any:
        state = ZOO["linen_mlp"].state(tx())
        mesh = gshard.make_mesh(**axes)
        return gshard.shard_train_state(state, mesh, level, min_shard_size=0)

    def changed(state: Any) -> Any:
        double = jax.tree.map(lambda x: x * 2, (state.step, state.params, state.opt_state))
        return state.replace(step=double[0] + 1, params=double[1], opt_state=double[2])

    def shards(state: Any) -> list[bytes]:
        return [
            np.asarray(part.data).tobytes()
            for x in jax.tree.leaves(state)
            for part in x.addressable_shards
        ]

    def lost_by_the_second(name: str, level: Any, **axes: Any) -> None:
        """Saves two steps, takes the folder of the second machine away, and goes on."""
        own = f"machine {me}"
        state, plan = sharded(level, **axes)
        states = {1: state, 2: changed(state)}
        with opened(name, own) as checkpointer:
            checkpointer.save(1, states[1], data_state={"rank": me}, force=True)
            checkpointer.save(2, states[2], data_state={"rank": me})
        if me == 1:
            shutil.rmtree(folder / name / own)
        gshard.distributed.barrier()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            checkpointer = opened(name, own)
            latest = checkpointer.latest_step()
            restored = checkpointer.restore(like=plan)
        assert restored.step == latest and restored.data_state == {"rank": me}
        assert shards(restored.state) == shards(states[restored.step])
        found[name] = [restored.step, int(restored.source != str(folder / name / "run"))]
        found[f"{name} said"] = [str(x.message) for x in said if "machine" in str(x.message)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lost_by_the_second("replica", "p_g_os", replica=2)
        lost_by_the_second("sharded", "p_g_os")

        # Two processes of one machine.
        state, plan = sharded("os")
        with opened("one", "machine") as checkpointer:
            checkpointer.save(2, state)
        checkpointer = opened("one", "machine")
        restored = checkpointer.restore(like=plan)
        assert shards(restored.state) == shards(state)
        found["together"] = [restored.step, int(restored.source == str(folder / "one" / "machine"))]
        parts = [read_index(part) for part in (folder / "one" / "machine").glob("process-*/2")]
        kept = [key for part in parts for key in part.shards]
        found["kept"] = [len(parts), len(kept), len({*kept})]

        try:
            gshard.Checkpointer(folder / "r", every=5 + me, local=folder / "l", local_every=2)
        except gshard.GShardError as error:
            found["rhythm"] = [str(error)]

        # One folder that two machines see.
        store._BOOT = folder / f"boot {me}"
        store._BOOT.write_text(str(me))
        try:
            opened("shared", "machine")
        except gshard.GShardError as error:
            found["shared"] = [str(error)]
    np.savez(file, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
