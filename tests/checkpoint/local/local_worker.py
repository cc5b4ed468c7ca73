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
    from tests.checkpoint.test_checkpoints import Training, tx
    from tests.zoo import ZOO

    me, folder = int(rank), Path(where)
    found: dict[str, Any] = {}

    def opened(name: str, own: str) -> gshard.Checkpointer:
        where = folder / name
        return gshard.Checkpointer(
            where / "run", every=100, local=where / own, local_every=1, on_failure="raise"
        )

    def replicated() -> Training:
        run, model = Training("dp", 4), ZOO["linen_mlp"]
        run.state, run.plan = gshard.shard_train_state(
            model.state(tx()), gshard.make_mesh(replica=2), "p_g_os", min_shard_size=0
        )
        run._step = gshard.make_train_step(model.loss, run.plan)
        return run

    def lost_by_the_second(name: str, make: Any) -> None:
        """Saves two steps, takes the folder of the second machine away, and goes on."""
        run, own = make(), f"machine {me}"
        with opened(name, own) as checkpointer:
            checkpointer.save(1, run.state, data_state={"rank": me}, force=True)
            losses = run.train(0)
            checkpointer.save(2, run.state, data_state={"rank": me})
            losses += run.train(1)
        if me == 1:
            shutil.rmtree(folder / name / own)
        gshard.distributed.barrier()
        other = make()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            checkpointer = opened(name, own)
            assert checkpointer.latest_step() == 2
            restored = checkpointer.restore(like=other.state)
        other.state = restored.state
        assert restored.data_state == {"rank": me}
        again = other.train(*range(restored.step - 1, 2))
        np.testing.assert_allclose(again, losses[restored.step - 1 :], rtol=2e-6)
        found[name] = [restored.step, int(restored.source != str(folder / name / "run"))]
        found[f"{name} said"] = [str(x.message) for x in said if "incomplete" in str(x.message)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lost_by_the_second("replica", replicated)
        lost_by_the_second("sharded", lambda: Training("p_g_os", 4))

        # Two processes of one machine.
        run = Training("os", 4)
        with opened("one", "machine") as checkpointer:
            checkpointer.save(2, run.state)
            losses = run.train(0)
        other = Training("p_g_os", 4)
        checkpointer = opened("one", "machine")
        restored = checkpointer.restore(like=other.state)
        other.state = restored.state
        np.testing.assert_allclose(other.train(0), losses, rtol=2e-6)
        found["together"] = [restored.step, int(restored.source == str(folder / "one" / "machine"))]
        size = sum(x.nbytes for x in jax.tree.leaves(run.state))
        both = sum(x.stat().st_size for x in (folder / "one" / "machine").glob("*/2/shards"))
        found["bytes"] = [size, both]

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
