"""One of several processes that train together (`tests/distributed/test_processes.py`).

    python -m tests.distributed.processes_worker COORDINATOR PROCESSES RANK FILE DEVICES_EACH TIER

Every process makes the same batches and passes its own rows of them. What it saw goes to FILE.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import gshard

LEVELS = ("dp", "os", "os_g", "p_g_os")
GROUPS = ((2, 1), (2, 2), (4, 1), (4, 2), (3, 1))  # processes, devices of each
STEPS, ROWS, BAD = 3, 48, 1  # BAD: the step with an inf in the last row


class Run(NamedTuple):
    """One training: in several processes here, in one in the test.

    Attributes:
        kind: a key of `KINDS`.
        model: in the zoo.
        level, micro_batches, accumulate: gshard's.
        replica: copies of the divided state, each on processes of its own.
    """

    kind: str
    model: str
    level: str
    micro_batches: int = 1
    accumulate: str = "level"
    replica: int = 1


def runs(tier: str, group: tuple[int, int]) -> list[Run]:
    """What a group of processes trains, one after the other."""
    if tier == "quick":
        return QUICK.get(group, [])
    turn, found = GROUPS.index(group), []
    models = ["linen_mlp", "nnx_mlp"][:: (-1) ** turn]
    replica = 2 if group in ((2, 2), (4, 2)) else 1
    for i, level in enumerate(LEVELS):
        how = ("level", "local", "scatter", "sync")[(i + turn) % 4]
        found += [Run("step", models[0], level), Run("step", models[1], level, 2, how, replica)]
        if (i + turn) % 2:
            found.append(Run("bad step", models[i // 2], level, 1 + i % 2))
        else:
            separately = ("level", "local", "scatter")[(i + turn) % 3]
            found.append(Run("own loop", models[i // 2], level, 1, separately))
    found += [Run("step", "linen_gpt_scan_remat", "p_g_os", 2), Run("no_sync", "nnx_mlp", "dp")]
    return [run for run in found if run not in QUICK.get(group, [])]


QUICK = {
    (2, 2): [
        Run("step", "linen_mlp", "os_g", 2, "level", 2),
        Run("bad step", "linen_mlp", "p_g_os", 2),
    ],
}


def train(run: Run, mesh: Any, rank: int, world_size: int) -> dict[str, Any]:
    """What `STEPS` steps over this process's examples gave: losses, full parameters, and more."""
    from tests import reference
    from tests.zoo import ZOO

    model = ZOO[run.model]
    mesh = gshard.make_mesh(replica=run.replica, devices=list(mesh.devices.flat))
    own = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)

    def rows(step: int) -> dict[str, Any]:
        batch = model.batch(0, ROWS, step)
        if run.kind == "bad step" and step == BAD:
            batch["x"][-1] = float("inf")  # the last process sees it
        return {name: x[own] for name, x in batch.items()}

    # Clipped by the norm over all parameters: it couples the shards of different processes.
    found, params = KINDS[run.kind](run, model, reference.OPTIMIZERS["adamw"](), mesh, rows)
    return found | {f"params/{path}": x for path, x in reference.flat(params).items()}


def by_step(run: Run, model: Any, tx: Any, mesh: Any, rows: Callable) -> tuple[dict, Any]:
    """`make_train_step`, with a scaler for a bad step."""
    import numpy as np

    from tests import reference

    bad = run.kind == "bad step"
    scaler = gshard.GradScaler(init_loss_scaling=8.0) if bad else None
    state, plan = gshard.shard_train_state(model.state(tx), mesh, run.level, **model.options())
    step = gshard.make_train_step(
        model.loss,
        plan,
        micro_batches=run.micro_batches,
        accumulate=run.accumulate,
        scaler=scaler,
    )
    seen, before = [], None
    for i in range(STEPS):
        if bad and i == BAD:
            before = reference.flat(gshard.full_params(state))
        if model.kind == "nnx":
            metrics = step(*state, rows(i))
        else:
            state, metrics = step(state, rows(i))
        seen.append({name: float(x) for name, x in metrics.items()})
        if before is not None:
            after = reference.flat(gshard.full_params(state))
            assert all(np.array_equal(after[path], x) for path, x in before.items())
            before = None
    found = {name: np.array([metrics[name] for metrics in seen]) for name in seen[0]}
    if bad:
        assert not np.isfinite(found["loss"][BAD]) or not np.isfinite(found["grad_norm"][BAD])
        found |= {name: np.delete(found[name], BAD) for name in ("loss", "grad_norm")}
    return found, gshard.full_params(state)


def by_own_loop(run: Run, model: Any, tx: Any, mesh: Any, rows: Callable) -> tuple[dict, Any]:
    """Gradients of two calls that are reduced together, in the user's own loop."""
    import jax
    import numpy as np
    from flax import nnx

    state, plan = gshard.shard_train_state(model.state(tx), mesh, run.level, **model.options())
    is_nnx = model.kind == "nnx"
    compile = nnx.jit if is_nnx else jax.jit
    call = compile(
        gshard.value_and_grad(
            model.loss,
            plan,
            sync=False,
            micro_batches=run.micro_batches,
            accumulate=run.accumulate,
        )
    )

    def end(state: Any, total: Any) -> Any:
        loss, grads = gshard.reduce_gradients(total, plan)
        if is_nnx:
            state[1].update(state[0], grads)
            return loss
        return state.apply_gradients(grads=grads), loss

    end, losses, each = compile(end), [], []
    for i in range(STEPS):
        total = None
        for j in range(2):
            of_devices, grads = call(model.target(state), gshard.shard_batch(rows(2 * i + j), plan))
            total = grads if total is None else total + grads
            each.append(placed(of_devices))
        if is_nnx:
            losses.append(float(end(state, total)))
        else:
            state, loss = end(state, total)
            losses.append(float(loss))
    return {"loss": np.array(losses), "each": np.array(each)}, gshard.full_params(state)


def by_no_sync(run: Run, model: Any, tx: Any, mesh: Any, rows: Callable) -> tuple[dict, Any]:
    """`DataParallel`: the gradient of a call that stays local, and of one that reduces both."""
    import numpy as np
    from flax import nnx

    dp = gshard.paddle.DataParallel(model.init(0), group=mesh)
    optimizer = nnx.Optimizer(dp, tx, wrt=nnx.Param)
    update = nnx.jit(lambda optimizer, dp, grads: optimizer.update(dp, grads))
    losses, each = [], []
    for i in range(STEPS):
        with dp.no_sync():
            each.append(placed(dp.backward(model.loss, rows(2 * i))))
        losses.append(float(dp.backward(model.loss, rows(2 * i + 1))))
        update(optimizer, dp, dp.grads)
        dp.clear_gradients()
    return {"loss": np.array(losses), "each": np.array(each)}, dp.state_dict()


KINDS = {"step": by_step, "bad step": by_step, "own loop": by_own_loop, "no_sync": by_no_sync}


def placed(x: Any) -> Any:
    """The entries of a global vector that this process holds, at their indices; NaN elsewhere."""
    import numpy as np

    found = np.full(x.shape, np.nan)
    for shard in x.addressable_shards:
        found[shard.index] = np.asarray(shard.data)
    return found


def main(
    coordinator: str, processes: int, rank: int, file: str, devices_each: str, tier: str
) -> None:
    warnings.simplefilter("ignore", gshard.GShardWarning)  # small leaves are replicated, on purpose
    gshard.distributed.initialize(coordinator, processes, rank)

    import jax
    import numpy as np
    import optax

    mesh, each = gshard.make_mesh(), int(devices_each)
    across = gshard.distributed.new_group([each - 1, each])
    small = ({"w": np.ones(4, np.float32)}, optax.sgd(0.1))
    _, plan = gshard.shard_train_state(small, mesh, "os", min_shard_size=1)
    own = np.arange(rank * ROWS // processes, (rank + 1) * ROWS // processes)
    found = {
        "ranks": np.array([gshard.distributed.process_index(), gshard.distributed.process_count()]),
        "devices": np.array([len(jax.local_devices()), len(jax.devices())]),
        "owners": np.array([d.process_index for d in across]),
        "group": np.array([d.id for d in across]),
        "rows": placed(gshard.shard_batch(own, plan)),
    }
    for i, run in enumerate(runs(tier, (processes, each))):
        found |= {f"{i}/{name}": x for name, x in train(run, mesh, rank, processes).items()}
        print("done", run, flush=True)
    np.savez(file, **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
