"""One of two processes that do not do the same (`tests/distributed/test_agree.py`).

    python -m tests.distributed.agree_worker COORDINATOR PROCESSES RANK FILE TIER

What each case of the tier gave goes to FILE: the error's text, or what came out.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gshard
from gshard.distributed import agree


def params(seed: int = 0, dtype: str = "float32") -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(seed)
    shapes = {"w": (16, 8), "v": (8,)}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def sharded(seed: int = 0, level: str = "os", **options: Any) -> Any:
    """A sharded state and its plan, of plain arrays and Adam."""
    import optax

    own = params(seed, options.pop("dtype", "float32"))
    tx = options.pop("tx", optax.adam(1e-2))
    mesh = gshard.make_mesh(options.pop("mesh", None))
    options = {"min_shard_size": 0, **options}
    return gshard.shard_train_state((own, tx), mesh, level, **options)


def values(state: Any) -> str:
    """A checksum of the full parameters."""
    import zlib

    import jax
    import numpy as np

    leaves = jax.tree.leaves(gshard.full_params(state))
    return f"{zlib.crc32(b''.join(np.asarray(x).tobytes() for x in leaves)):08x}"


def states(rank: int) -> dict[str, Callable[[], Any]]:
    """States of two processes, by name of the case."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    def init(key: Any) -> Any:
        return {"w": jax.random.normal(key, (16, 8))}, optax.adam(1e-2)

    def made(seed: int, **options: Any) -> str:
        args = (jax.random.key(seed),)
        return values(
            gshard.shard_train_state(
                init, gshard.make_mesh(), "fsdp", init_args=args, min_shard_size=0, **options
            )[0]
        )

    def pair(seed: int) -> Any:
        return nnx.Linear(16, 8, rngs=nnx.Rngs(seed))

    def parallel(kind: Any) -> str:
        return values_of(kind(pair(rank)))

    def values_of(model: Any) -> str:
        return str([float(jnp.sum(x)) for x in jax.tree.leaves(nnx.state(model, nnx.Param))])

    return {
        "rows": lambda: dict(agree._mesh_of_processes(gshard.make_mesh()).shape),
        "equal": lambda: values(sharded()[0]),
        "seeds": lambda: sharded(rank),
        "seeds_at_p_g_os": lambda: sharded(rank, "p_g_os"),
        "broadcast": lambda: values(sharded(rank, broadcast_from=0)[0]),
        "broadcast_from_1": lambda: values(sharded(rank, broadcast_from=1)[0]),
        "broadcast_scalar": lambda: str(
            gshard.full_params(
                gshard.shard_train_state(
                    ({"w": np.ones(8), "scale": np.float32(1 + rank)}, optax.sgd(0.1)),
                    gshard.make_mesh(),
                    "os",
                    broadcast_from=0,
                )[0]
            )["scale"]
        ),
        "broadcast_equal": lambda: values(sharded(0, "p_g_os", broadcast_from=0)[0]),
        "broadcast_on_one": lambda: sharded(0, broadcast_from=[None, 0][rank]),
        "broadcast_from_nobody": lambda: sharded(0, broadcast_from=2),
        "mesh": lambda: sharded(0, mesh=[{"data": 4}, {"data": 2, "expert": 2}][rank]),
        "kept": lambda: sharded(
            0, mesh={"data": 2, "expert": 2}, keep=[{"w": ("expert", 0)}, None][rank]
        ),
        "level": lambda: sharded(0, ["os", "p_g_os"][rank]),
        "dtype": lambda: sharded(0, dtype=["float32", "float16"][rank]),
        "optimizer": lambda: sharded(0, tx=[optax.adam(1e-2), optax.sgd(1e-2)][rank]),
        "rate": lambda: sharded(0, tx=optax.adam(1e-2 * (1 + rank))),
        "b1": lambda: sharded(0, "p_g_os", tx=optax.adam(1e-2, b1=0.9 - 0.1 * rank)),
        "schedule": lambda: sharded(0, tx=optax.adam(optax.cosine_decay_schedule(0.1, 10 + rank))),
        "options": lambda: sharded(0, min_shard_size=[0, 64][rank]),
        "init": lambda: made(0),
        "init_keys": lambda: made(rank),
        "init_closure": lambda: values(
            gshard.shard_train_state(
                lambda: init(jax.random.key(rank)), gshard.make_mesh(), "fsdp", min_shard_size=0
            )[0]
        ),
        "init_broadcast": lambda: made(rank, broadcast_from=0),
        "paddle": lambda: parallel(gshard.paddle.DataParallel),
        "pytorch": lambda: parallel(gshard.pytorch.DistributedDataParallel),
        "equal_again": lambda: values(sharded()[0]),
    }


def batch(rank: int, rows: int = 8) -> dict[str, Any]:
    import numpy as np

    return {"x": np.random.default_rng(rank).normal(size=(rows, 16)).astype(np.float32)}


def loss(p: Any, b: Any, factor: Any = 1.0) -> Any:
    return ((b["x"] @ p["w"] + p["v"]) ** 2).mean() * factor


def programs(rank: int) -> dict[str, Callable[[], Any]]:
    """Programs of two processes, by name of the case."""
    import jax
    import numpy as np
    from flax import nnx

    def run(loss_fn: Any = loss, tx: Any = None, level: str = "os", **options: Any) -> str:
        state, plan = sharded(0, level, **({} if tx is None else {"tx": tx}))
        step = gshard.make_train_step(loss_fn, plan, **options)
        for _ in range(2):
            state, metrics = step(state, batch(rank))
        return str(float(metrics["loss"]))

    def evaluated(fn: Any) -> str:
        state, plan = sharded()
        return str(float(gshard.make_eval_step(fn, plan)(state, batch(rank))))

    def of_rank(p: Any, b: Any) -> Any:
        return loss(p, b) if rank else (p["w"] ** 2).sum() + loss(p, b)

    def printed(p: Any, b: Any) -> Any:
        found = loss(p, b)
        if rank == 0:
            jax.debug.print("loss {x}", x=found * 2)
        return found

    def backward(factor: float, sync: bool = True) -> str:
        model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
        dp = gshard.paddle.DataParallel(model)
        with nullcontext() if sync else dp.no_sync():
            found = dp.backward(lambda m, b: (m(b["x"]) ** 2).mean() * factor, batch(rank))
        return str(float(found.mean()))

    def own_loop(
        loss_fn: Any = loss, data: str = "shard_batch", alone: bool = False, second: float = 0.0
    ) -> str:
        """A loop around value_and_grad; an error comes after the number of batches used."""
        state, plan = sharded()
        grad = gshard.value_and_grad(loss_fn, plan)

        def more(p: Any, b: Any) -> Any:
            return loss(p, b, second)

        @jax.jit
        def step(state: Any, given: Any) -> Any:
            value, grads = grad(state.params, given)
            if second:
                value += gshard.value_and_grad(more, plan)(state.params, given)[0]
            return state.apply_gradients(grads=grads), value

        if alone and rank == 0:  # traces that the other process does not make
            step.lower(state, {"x": jax.ShapeDtypeStruct((24, 16), np.float32)})
            other = jax.jit(gshard.value_and_grad(of_rank, plan))
            other.lower(state.params, {"x": jax.ShapeDtypeStruct((16, 16), np.float32)})
        own = [batch(rank + 2 * i) for i in range(4)]
        spec = jax.NamedSharding(plan.mesh, plan.batch_spec)
        batches: Any = {
            "shard_batch": lambda: (gshard.shard_batch(b, plan) for b in own),
            "loader": lambda: (
                b for x in [gshard.DataLoader(batch(9, 64), 16, plan)] for _ in range(2) for b in x
            ),
            "jax": lambda: (
                {"x": jax.make_array_from_process_local_data(spec, b["x"])} for b in own
            ),
        }[data]()
        used, folder = 0, Path(sys.argv[4]).with_name(f"loop-{data}-{loss_fn.__name__}")
        try:
            for given in batches:
                state, value = step(state, given)
                used += 1
            with gshard.Checkpointer(folder, asynchronous=False) as checkpointer:
                checkpointer.save(used, state)
        except gshard.GShardError as error:
            return f"after {used}: {error}"
        return str(float(value))

    weights = np.linspace(0, 1 + rank, 8, dtype=np.float32)
    key = jax.random.key
    return {
        "equal": run,
        "losses": lambda: run(of_rank),
        "constant": lambda: run(lambda p, b: loss(p, b, factor=weights.sum())),
        "array": lambda: run(lambda p, b: ((b["x"] @ p["w"]) * weights).mean()),
        "options": lambda: run(bucket_size=[0, 100][rank]),
        "rng": lambda: run(lambda p, b, rng: loss(p, b), rng=key(rank)),
        "printed": lambda: run(printed, loss_semantics="per_device"),
        "eval": lambda: evaluated(of_rank),
        "eval_equal": lambda: evaluated(loss),
        "loop_losses": lambda: own_loop(of_rank),
        "loop_losses_in_a_loader": lambda: own_loop(of_rank, "loader"),
        "loop_second_losses": lambda: own_loop(second=2.0 + rank),
        "loop_losses_saved": lambda: own_loop(of_rank, "jax"),
        "loop_equal": own_loop,
        "loop_equal_in_a_loader": lambda: own_loop(data="loader"),
        "loop_equal_traced_alone": lambda: own_loop(data="jax", alone=True),
        "backward": lambda: backward(1.0 + rank),
        "backward_local": lambda: backward(1.0 + rank, sync=False),
        "backward_equal": lambda: backward(1.0),
        "backward_local_equal": lambda: backward(1.0, sync=False),
        "equal_again": run,
    }


def batches(rank: int) -> dict[str, Callable[[], Any]]:
    """Batches that one process skips or repeats, by name of the case."""
    import jax
    import numpy as np

    x = np.random.default_rng(5).normal(size=(80, 16)).astype(np.float32)

    def source(plan: Any, kind: str) -> Any:
        if kind == "loader":
            return gshard.DataLoader({"x": x}, 8, plan, shuffle=False)
        return gshard.global_batches(({"x": x[i * 8 : i * 8 + 4]} for i in range(10)), plan)

    def trained(
        kind: str = "loader",
        skips: Any = (),
        repeats: Any = (),
        level: str = "os",
        evaluates: bool = False,
        **options: Any,
    ) -> Any:
        """Trains, and says at which call an error came."""
        state, plan = sharded(0, level)
        step = gshard.make_train_step(loss, plan, **options)
        evaluate = gshard.make_eval_step(loss, plan)
        calls = 0
        try:
            for i, given in enumerate(source(plan, kind)):
                if (rank, i) in skips:
                    continue
                for _ in range(1 + ((rank, i) in repeats)):
                    calls += 1
                    state, metrics = step(state, given)
                    if evaluates and calls % 3 == 0:
                        evaluate(state, batch(rank))
                if calls == 8:
                    break
        except gshard.GShardError as error:
            return f"error in call {calls}: {error}"
        return float(metrics["loss"])

    def saved() -> str:
        """A save right after the fault, which no step has noticed yet."""
        folder = Path(sys.argv[4]).with_name("checkpoints")
        state, plan = sharded()
        step = gshard.make_train_step(loss, plan)
        loader = iter(source(plan, "loader"))
        with gshard.Checkpointer(folder, asynchronous=False) as checkpointer:
            state, _ = step(state, next(loader))
            checkpointer.save(1, state)
            if rank == 1:
                next(loader)
            state, _ = step(state, next(loader))
            said = []
            for number in (2, 3):
                try:
                    checkpointer.save(number, state)
                except gshard.GShardError as error:
                    said.append(str(error))
            steps = checkpointer.all_steps()
            state = checkpointer.restore(like=state).state
            state, _ = step(state, next(iter(source(plan, "loader"))))
            checkpointer.save(4, state)
            steps += checkpointer.all_steps()
        return f"{len(said)} {steps} {said[0]}"

    def alternating(fault: bool) -> str:
        """Two steps of one form that take turns, of which process 1 leaves one out."""
        state, plan = sharded()
        steps = [gshard.make_train_step(lambda p, b, f=f: loss(p, b, f), plan) for f in (1.0, 2.0)]
        for i in range(8 + (rank and fault)):
            if not (fault and rank and i == 4):
                state, metrics = steps[i % 2](state, batch(rank))
        return str(float(metrics["loss"]))

    def evaluated(fault: bool) -> float:
        """Two eval steps of one form, which process 1 calls in another order the second time."""
        state, plan = sharded()
        step = gshard.make_train_step(loss, plan)
        evals = [gshard.make_eval_step(lambda p, b, f=f: loss(p, b, f), plan) for f in (1.0, 2.0)]
        for order in (evals, evals[::-1] if rank and fault else evals):
            for evaluate in order:
                evaluate(state, batch(rank))
        for _ in range(4):
            state, metrics = step(state, batch(rank))
        return float(metrics["loss"])

    def own_data() -> float:
        """Without a loader nobody knows which batch it is."""
        state, plan = sharded()
        step = gshard.make_train_step(loss, plan)
        for i in range(6):
            state, metrics = step(state, batch(rank + 2 * i))
        return float(metrics["loss"])

    def jitted() -> float:
        state, plan = sharded()
        step = jax.jit(gshard.make_train_step(loss, plan, donate=False))
        for given in source(plan, "loader"):
            state, metrics = step(state, given)
        return float(metrics["loss"])

    def replicas(fault: bool) -> float:
        """A changed bit on the first device of process 1."""
        state, plan = sharded(0, "dp")
        step = gshard.make_train_step(loss, plan, check_replicas=1)
        copies = [np.array(shard.data) for shard in state.params["w"].addressable_shards]
        copies[0].view(np.uint8)[0, 0] ^= rank and fault
        w = jax.make_array_from_single_device_arrays(
            (16, 8),
            state.params["w"].sharding,
            list(map(jax.device_put, copies, plan.mesh.local_devices)),
        )
        state = state.replace(params={**state.params, "w": w})
        for _ in range(4):
            state, metrics = step(state, batch(rank))
        return float(metrics["loss"])

    skip = {"skips": {(1, 4)}}
    return {
        "equal": lambda: trained(evaluates=True),
        "equal_without_a_number": own_data,
        "equal_in_a_jit": jitted,
        "equal_in_global_batches": lambda: trained("global_batches"),
        "equal_skipped_by_all": lambda: trained(skips={(0, 3), (1, 3)}),
        "equal_alternating": lambda: alternating(False),
        "skips": lambda: trained(evaluates=True, **skip),
        "skips_at_p_g_os": lambda: trained(level="p_g_os", micro_batches=2, **skip),
        "skips_at_dp": lambda: trained(level="dp", max_bad_steps=None, **skip),
        "skips_in_global_batches": lambda: trained("global_batches", **skip),
        "repeats": lambda: trained(repeats={(0, 2)}),
        "saves": saved,
        "alternating": lambda: alternating(True),
        "equal_evaluated": lambda: evaluated(False),
        "evaluated": lambda: evaluated(True),
        "equal_replicas": lambda: replicas(False),
        "replicas": lambda: replicas(True),
        "equal_again": trained,
    }


PARTS = {"states": states, "programs": programs, "batches": batches}
# What the quick tier leaves out.
SLOW = {
    *("programs/loop_equal", "programs/loop_equal_in_a_loader", "programs/loop_losses"),
    *("programs/backward_equal", "programs/equal_again"),
    *("batches/equal_without_a_number", "batches/equal_in_a_jit"),
    *("batches/equal_in_global_batches", "batches/equal_evaluated", "batches/equal_replicas"),
    *("batches/skips_at_dp", "batches/equal_again"),
}


def main(coordinator: str, processes: int, rank: int, file: str, tier: str) -> None:
    warnings.simplefilter("ignore", gshard.GShardWarning)  # small leaves are replicated, on purpose
    gshard.distributed.initialize(coordinator, processes, rank)

    import numpy as np

    found = {}
    cases = {f"{part}/{x}": run for part, of in PARTS.items() for x, run in of(rank).items()}
    assert cases.keys() >= SLOW
    for name, run in cases.items():
        if (name in SLOW) != (tier == "slow"):
            continue
        try:
            found[name] = np.array(str(run()))
        except gshard.GShardError as error:
            found[name] = np.array(f"error: {error}")
        print(name, found[name], flush=True)
    np.savez(file, **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
