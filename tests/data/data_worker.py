"""One of two processes that give batches, right and wrong (`tests/data/test_consistency.py`).

    python -m tests.data.data_worker COORDINATOR PROCESSES RANK FILE

What each case gave goes to FILE: the error's text, the warnings', or the global arrays.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import gshard

LENGTH, BATCH = 60, 12


def plan_for(mesh: Any) -> Any:
    """Its plan, of the smallest state that there is."""
    import jax.numpy as jnp
    import optax

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is replicated, on purpose
        return gshard.shard_train_state(({"w": jnp.ones(3)}, optax.sgd(0.1)), mesh, "dp")[1]


def examples(length: int = LENGTH) -> dict[str, Any]:
    import numpy as np

    return {"x": np.arange(length * 2.0).reshape(length, 2), "y": np.arange(length)}


def flipped(example: dict[str, Any], rng: Any) -> dict[str, Any]:
    return {**example, "x": example["x"] * rng.choice([-1, 1]), "noise": rng.normal()}


class Examples:
    """A source of examples whose form depends on the process."""

    def __init__(self, width: int):
        self.width = width

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, i: int) -> Any:
        import numpy as np

        return np.full(self.width, i)


def begun(plan: Any, rank: int, at: int = 0, **options: Any) -> str:
    """What the first `for` over a loader gave; `at` is the position that process 1 loads."""
    source = options.pop("source", None)
    loader = gshard.DataLoader(
        examples() if source is None else source, options.pop("batch_size", BATCH), plan, **options
    )
    if rank and at:
        loader.load_state_dict({**loader.state_dict(), "position": at})
    try:
        return str(len(list(loader)))
    except gshard.GShardError as error:
        return f"error: {error}"


def loaders(plan: Any, rank: int) -> dict[str, str]:
    """Loaders that differ between the processes."""
    return {
        "loader_seed": begun(plan, rank, seed=rank),
        "loader_length": begun(plan, rank, source=examples(LENGTH + 12 * rank)),
        "loader_batch_size": begun(plan, rank, batch_size=BATCH * (1 + rank)),
        "loader_num_epochs": begun(plan, rank, num_epochs=1 + rank),
        "loader_shuffle": begun(plan, rank, shuffle=bool(rank)),
        "loader_form": begun(plan, rank, source=Examples(2 + rank)),
        "loader_data": begun(plan, rank, source={"x": examples()["x"] + rank}),
        "loader_state": begun(plan, rank, at=2),
        "loader_fine": begun(plan, rank),
    }


def loaded(mesh: Any, state: dict[str, int] | None = None) -> list[dict[str, Any]]:
    """The local parts of the global batches of two epochs, put together by their place in it."""
    options = {"seed": 3, "num_epochs": 2, "transform": flipped, "pad_last": True}
    loader = gshard.DataLoader(examples(LENGTH - 5), BATCH, plan_for(mesh), **options)
    if state:
        loader.load_state_dict({**loader.state_dict(), **state})
    return [{name: parts(x) for name, x in batch.items()} for batch in loader]


def parts(array: Any) -> Any:
    """Rows that this process holds, in their place; the others are 0."""
    import numpy as np

    found = np.zeros(array.shape, array.dtype)
    for shard in array.addressable_shards:
        found[shard.index] = shard.data
    return found


def rows(count: int, base: int = 0, width: int = 2) -> dict[str, Any]:
    import numpy as np

    return {"x": np.arange(count * width, dtype=np.float32).reshape(count, width) + base}


def cases(rank: int) -> dict[str, list[Any]]:
    """Batches in the order given to one plan, by name of the case; the last one is of interest."""
    import jax
    import numpy as np

    own = 100 * rank
    short = 4 + 2 * rank
    return {
        "equal": [rows(4, own), rows(4, own), rows(6, own)],
        "identical": [rows(4)],
        "identical_later": [rows(4, own), rows(6)],
        "scalars": [{**rows(4, own), "step": 3}],
        "constant": [{"x": np.zeros((4, 2), np.float32)}],
        "unequal_first": [rows(short, own)],
        "unequal_later": [rows(8, own), rows(short, own)],
        "one_does_not_divide": [rows(4 + rank, own)],
        "dtypes": [{"x": rows(4, own)["x"].astype([np.float32, np.float16][rank])}],
        "widths": [rows(4, own, width=2 + rank)],
        "names": [{"ab"[rank]: rows(4, own)["x"]}],
        "trees": [[(*rows(4, own).values(),), [*rows(4, own).values()]][rank]],
        "values": [{**rows(4, own), "step": 3 + rank}],
        "many_arrays": [
            {f"a_long_name_of_array_{i}": rows(4, own)["x"] for i in range(60)}
            | {"z": rows(4, own, width=2 + rank)["x"]}
        ],
        "constant_then_same": [{"x": np.zeros((4, 2), np.float32)}, rows(4)],
        "nan": [{"x": np.full((4, 2), np.nan, np.float32)}],
        "same_head": [
            {"x": np.hstack([np.arange(4 << 18).reshape(4, -1), rows(4, own, width=64)["x"]])}
        ],
        "keys": [{**rows(4, own), "k": jax.random.split(jax.random.key(rank), 4)}],
        "one_text": [{**rows(4, own), "t": ["text", 1][rank]}],
        "one_object": [{"x": np.array([[1] * 2] * 4, [object, int][rank])}],
        "crosswise": [
            rows(4, own),
            {**rows(8, own), "y": rows(8, own)["x"]},
            rows(4 + 4 * rank, own),
        ],
        "two_kinds": [rows(4, own), {**rows(8, own), "y": rows(8, own)["x"]}, rows(4, own)],
    }


def give(plan: Any, batches: list[Any]) -> str:
    """`error: ...`, `warning: ...`, or the shapes of the last global batch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i, batch in enumerate(batches):
            try:
                placed = gshard.shard_batch(batch, plan)
            except gshard.GShardError as error:
                return f"error in {i}: {error}"
    said = "; ".join(f"warning: {w.message}" for w in caught)
    return said or str({name: x.shape for name, x in placed.items()})


def main(coordinator: str, processes: int, rank: int, file: str) -> None:
    gshard.distributed.initialize(coordinator, processes, rank)

    import jax
    import numpy as np

    from gshard.data import consistency
    from gshard.distributed import agree

    found: dict[str, Any] = {}
    mesh, every = gshard.make_mesh(), jax.devices()
    for name, batches in cases(rank).items():
        found[name] = np.array(give(plan_for(mesh), batches))
    counted: list[Any] = []
    exchange = consistency.exchange_texts
    consistency.exchange_texts = lambda *args, **options: (
        counted.append(args) or exchange(*args, **options)
    )
    give(plan_for(mesh), cases(rank)["two_kinds"] * 5)
    found["exchanges"] = np.array(len(counted))
    consistency.exchange_texts = exchange
    found |= {name: np.array(x) for name, x in loaders(plan_for(mesh), rank).items()}

    uneven = gshard.make_mesh(devices=every[:3])
    found["uneven"] = np.array(give(plan_for(uneven), [rows(4 - 2 * rank, 100 * rank)]))
    found["uneven_wrong"] = np.array(give(plan_for(uneven), [rows(4, 100 * rank)]))
    own = gshard.make_mesh(devices=every[:2])
    if rank == 0:
        found["without_the_other"] = np.array(give(plan_for(own), [rows(4), rows(6)]))
    extra = gshard.make_mesh(extra={"model": 4})
    found["shared_place"] = np.array(give(plan_for(extra), [rows(4)]))
    found["shared_differ"] = np.array(give(plan_for(extra), [rows(4, 100 * rank)]))
    numbers = gshard.shard_batch({**rows(4, 100 * rank), "n": 3, "s": 0.5}, plan_for(mesh))
    found["numbers"] = np.array([numbers[name].weak_type for name in "nsx"])
    meshes = {
        "all": mesh,
        "uneven": uneven,
        "mixed": gshard.make_mesh(devices=[every[i] for i in (0, 2, 1, 3)]),
        "shared": extra,
    }
    for name, mesh in meshes.items():
        for i, batch in enumerate(loaded(mesh)):
            found |= {f"loaded/{name}/{i}/{key}": x for key, x in batch.items()}
    global_ = gshard.global_batches(
        [rows(4, 100 * rank), rows(6, 100 * rank)], plan_for(own := meshes["all"])
    )
    found["global_batches"] = np.array([parts(batch["x"]).shape for batch in global_])

    agree.FAULT_TIMEOUT, agree.FAULT_WARN_AFTER = 2.0, 0.5
    plan = plan_for(own)
    if rank == 1:  # the other one does not call it
        started = time.monotonic()
        found["fault_alone"] = np.array(give(plan, [rows(5)]))
        found["fault_seconds"] = np.array(time.monotonic() - started)
    np.savez(file, **found)
    print("done", flush=True)
    if rank == 0:  # the coordinator: without it the other one does not go on
        while not Path(file).with_name("1.npz").exists():
            time.sleep(0.1)
        time.sleep(1)
    os._exit(0)  # the other one waits in a thread


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
