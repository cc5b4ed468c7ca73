"""Misuses over two processes of two devices, or four of one; one job goes through all in order.

    python -m tests.misuses.several_processes COORDINATOR PROCESSES RANK FILE FOLDER

Each function is called with 1 on the last process, which does something else, and with 0 on the
others. A misuse that all processes are told of ends with an error on all of them, so the next one
can follow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gshard
from tests.misuses.table import Row, refused, right, seen_by, warned

FOLDER = Path()  # main sets it


def share() -> int:
    """How many of the 16 examples are those of one process."""
    return 16 // gshard.distributed.process_count()


def own(_: int = 0, **more: Any) -> dict[str, Any]:
    """This process's examples of the batch, with other arrays."""
    from tests.misuses.small import BATCH

    first = gshard.distributed.process_index() * share()
    return {**{name: x[first : first + share()] for name, x in BATCH.items()}, **more}


def step_of(batch: Callable[[int], Any], loss: Any = None, **options: Any) -> Callable[[int], Any]:
    """A step of a batch that differs by process."""

    def misuse(rank: int) -> Any:
        from tests.misuses import small

        state, plan = small.shard()
        step = gshard.make_train_step(loss or small.loss_fn, plan, **options)
        return gshard.full_params(step(state, batch(rank))[0])

    return misuse


def shard(rank: int, **by_rank: tuple[Any, Any]) -> Any:
    from tests.misuses import small

    return small.shard(**{name: values[rank] for name, values in by_rank.items()})


def loader(rank: int, data: Any = None, size: int = 16, **options: Any) -> Any:
    from tests.misuses import small

    data = {"x": np.arange(32, dtype=np.float32)} if data is None else data
    return list(gshard.DataLoader(data, size, small.kept()[1], **options))


class Examples:
    """A dataset as PyTorch's: what a process gets from it is its own."""

    def __init__(self, rank: int, random: bool = False):
        self._rank, self._random = rank, np.random.default_rng(rank) if random else None

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> Any:
        drawn = 0.0 if self._random is None else self._random.random()
        return {"x": np.float32(2 * i + self._rank + drawn)}


def moved_on(rank: int) -> Any:
    from tests.misuses import small

    mine = gshard.DataLoader({"x": np.arange(64.0)}, 16, small.kept()[1])
    mine.load_state_dict({**mine.state_dict(), "position": rank})
    return list(mine)


def saver(**options: Any) -> Any:
    return gshard.Checkpointer(FOLDER / "steps", asynchronous=False, **options)


def saved(number: Callable[[int], int], change: Any = None, **more: Any) -> Callable[[int], Any]:
    def misuse(rank: int) -> Any:
        from tests.misuses import small

        with saver() as mine:
            mine.save(number(rank), small.kept()[0], **{k: f(rank) for k, f in more.items()})
            return mine.metadata(), mine.all_steps()

    return misuse


def with_saver(call: Callable[[Any, int], Any]) -> Callable[[int], Any]:
    def misuse(rank: int) -> Any:
        with saver() as mine:
            return call(mine, rank)

    return misuse


def state_dict_loaded(rank: int, alone: bool = False) -> None:
    """Sets another bias on each process, or on process 0 alone."""
    from flax import nnx

    model = gshard.pytorch.DistributedDataParallel(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))
    values = {**model.state_dict(), "bias": np.full(4, rank, np.float32)}
    if alone and rank:
        gshard.distributed.barrier()
    else:
        model.load_state_dict(values)


def other_models_loaded(rank: int) -> Any:
    """The optimizers' values are equal, so that only the models differ."""
    import optax
    from flax import nnx

    def wrapped(seed: int) -> Any:
        net = nnx.Linear(16, 8, rngs=nnx.Rngs(seed))
        model, opt, _ = gshard.paddle.group_sharded_parallel(net, optax.sgd(0.1), "os")
        return model, opt

    for seed in range(2):
        model, opt = wrapped(seed)
        opt.step.set_value(opt.step.get_value() + 3)
        gshard.paddle.save_group_sharded_model(model, FOLDER / f"model{seed}", opt)
    model, opt = wrapped(2)
    try:
        gshard.paddle.load_group_sharded_model(model, FOLDER / f"model{rank}", opt)
    except gshard.GShardError as error:
        return ("the processes set different values" in str(error), int(opt.step)), (True, 0)


def values_saved() -> None:
    gshard.paddle.save({"w": np.arange(6.0)}, FOLDER / "values")


def values_loaded(rank: int) -> Any:
    values_saved()
    loaded = gshard.paddle.load(FOLDER / "values")["w"] if rank else np.arange(6.0)
    return loaded, np.arange(6.0)


def like() -> Any:
    from tests.misuses import small

    return small.kept()[0]


def nan_of_one(rank: int) -> Any:
    from tests.misuses import small

    state, _, step = small.kept()
    x = own(rank)["x"] * (np.nan if rank else 1)
    state, metrics = step(state, own(rank, x=x))
    return (gshard.full_params(state), metrics["skipped_steps"]), (small.params(), 1)


def without_jit(call: Callable[[int], Any]) -> Callable[[int], Any]:
    def misuse(rank: int) -> Any:
        import jax

        with jax.disable_jit():
            return call(rank)

    return misuse


def gathers(_: int) -> Any:
    """What is sharded comes back, as does what is sharded from arrays of all processes."""
    from tests.misuses import small

    whole, _ = small.shard(level="dp")
    state, _ = small.shard(small.linen().replace(params=whole.params), "p_g_os")
    shape = state.params["w"].addressable_shards[0].data.shape
    return (gshard.full_params(state), shape), (small.params(), (4, 8))


def compares_replicas(rank: int) -> Any:
    import optax

    from tests.misuses import small

    state, plan = small.shard(small.linen(optax.sgd(0.1)))
    step = gshard.make_train_step(small.loss_fn, plan, check_replicas=1)
    for _ in range(3):  # the comparison after a call is read two calls later
        state, _ = step(state, own(rank))
    return int(state.step), 3


def updates_by_itself(_: int) -> Any:
    """SGD of a ZeroRedundancyOptimizer."""
    import jax
    import optax

    import gshard.pytorch
    from tests.misuses import small

    params = small.params()
    opt = gshard.pytorch.ZeroRedundancyOptimizer(params, optax.sgd, lr=1.0)
    new = opt.step(jax.tree.map(np.ones_like, params))
    return new, jax.tree.map(lambda x: x - 1, params)


def dropout_loaded(_: int) -> Any:
    """The state dict has a key of random numbers."""
    from flax import nnx

    layers = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    model = gshard.pytorch.DistributedDataParallel(nnx.Sequential(*layers))
    values = model.state_dict()
    model.load_state_dict(values)
    return model.state_dict(), values


def trains_alone(rank: int) -> Any:
    """Each process has a mesh of its own devices, and the whole batch."""
    import jax

    from tests.misuses import small

    state, plan = small.shard(mesh=gshard.make_mesh(devices=jax.local_devices()))
    state, _ = gshard.make_train_step(small.loss_fn, plan)(state, small.BATCH)
    return gshard.full_params(state), small.alone()


def of_the_old_state(rank: int) -> Any:
    """One process does not keep what the first step returns."""
    from tests.misuses import small

    state, plan = small.shard(level="p_g_os")
    step = gshard.make_train_step(small.loss_fn, plan, donate=False)
    for i in range(5):
        new, metrics = step(state, own(rank))
        state = state if rank and not i else new
    return float(metrics["loss"])


def hyperparameter(level: str, **options: Any) -> Callable[[int], Any]:
    """Each process sets a learning rate of its own."""

    def misuse(rank: int) -> Any:
        import jax.numpy as jnp
        import optax

        from tests.misuses import small

        tx = optax.inject_hyperparams(optax.sgd)(0.1)
        state, plan = small.shard(small.linen(tx), level, **options)
        step = gshard.make_train_step(small.loss_fn, plan, donate=False)
        for _ in range(4):
            inner = state.opt_state.inner
            rates = {**inner.hyperparams, "learning_rate": jnp.float32(0.1 * (1 + rank))}
            inner = inner._replace(hyperparams=rates)
            state = state.replace(opt_state=state.opt_state._replace(inner=inner))
            state, metrics = step(state, own(rank))
        return float(metrics["loss"])

    return misuse


def rate_of_one(at: int) -> Callable[[int], Any]:
    """One process sets another learning rate of a ZeroRedundancyOptimizer before a step."""

    def misuse(rank: int) -> Any:
        import jax
        import optax

        import gshard.pytorch
        from tests.misuses import small

        opt = gshard.pytorch.ZeroRedundancyOptimizer(small.params(), optax.adam, lr=0.1)
        for step in range(1, 5):
            if step == at:
                opt.param_groups[0]["lr"] = 0.1 * (1 + rank)
            elif step == at + 1:
                opt.param_groups[0]["lr"] = 0.1
            opt.step(jax.tree.map(np.ones_like, small.params()))

    return misuse


def rate_before_saving(rank: int) -> Any:
    """One process sets another learning rate after the last comparison of its steps."""
    import jax
    import optax

    import gshard.pytorch
    from tests.misuses import small

    opt = gshard.pytorch.ZeroRedundancyOptimizer(small.params(), optax.adam, lr=0.1)
    for step in range(3):
        if step == 2:
            opt.param_groups[0]["lr"] = 0.1 * (1 + rank)
        opt.step(jax.tree.map(np.ones_like, small.params()))
    opt.state_dict()


def zero(act: Callable[[Any, Any], Any]) -> Callable[[int], Any]:
    """Gives another tree like the parameters on each process to a ZeroRedundancyOptimizer."""

    def misuse(rank: int) -> Any:
        import jax
        import optax

        import gshard.pytorch
        from tests.misuses import small

        opt = gshard.pytorch.ZeroRedundancyOptimizer(small.params(), optax.adam, lr=0.1)
        act(opt, jax.tree.map(lambda x: np.full_like(x, rank), small.params()))

    return misuse


def greedy(factories: Any = None, **by_rank: tuple[Any, Any]) -> Callable[[int], Any]:
    """Makes another optimizer on each process; only owners keep a state."""

    def misuse(rank: int) -> Any:
        import jax
        import optax

        import gshard.pytorch
        from tests.misuses import small

        given = {name: values[rank] for name, values in by_rank.items()}
        zero = gshard.pytorch.ZeroRedundancyOptimizer
        factory = getattr(optax, factories[rank] if factories else "adamw")
        opt = zero(small.params(), factory, partition="greedy", lr=0.1, **given)
        opt.step(jax.tree.map(np.ones_like, small.params()))

    return misuse


def zero_loads(opt: Any, moments: Any) -> None:
    state = opt.state_dict()
    adam, *rest = state["state"][0]
    opt.load_state_dict({**state, "state": [(adam._replace(mu=moments), *rest)]})


def wrapped(rank: int, act: Callable[[int, Any, Any, Any], Any]) -> Any:
    """Does something with a wrapped model, its optimizer and its scaler."""
    import optax
    from flax import nnx

    import gshard.paddle

    net = nnx.BatchNorm(16, rngs=nnx.Rngs(0))
    tx = optax.inject_hyperparams(optax.sgd)(0.1)
    scaler = gshard.paddle.GradScaler(init_loss_scaling=8.0)
    return act(rank, *gshard.paddle.group_sharded_parallel(net, tx, "os", scaler=scaler))


def sets_more_rates(rank: int, _: Any, optimizer: Any, __: Any) -> None:
    for _ in range(2 + rank):
        optimizer.set_lr(0.2)
    optimizer.state_dict()


def evaluates_one(rank: int, model: Any, *_: Any) -> None:
    model.train(not rank)
    model(own()["x"])


def scales(rank: int, model: Any, _: Any, scaler: Any) -> None:
    scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0 * (1 + rank)})
    model.backward(scaler.scale(lambda model, batch: (model(batch["x"]) ** 2).mean()), own())


def reseeded(seed: Callable[[int], int]) -> Callable[[int], Any]:
    """New random keys are given to a sharded model."""

    def misuse(rank: int) -> Any:
        import optax
        from flax import nnx

        from tests.misuses import small

        model = nnx.Sequential(
            nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=1))
        )
        sharded, plan = small.shard((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)))
        nnx.reseed(sharded[0], dropout=seed(rank))
        step = gshard.make_train_step(small.model_loss, plan)
        losses = [float(step(*sharded, own(rank))["loss"]) for _ in range(4)]
        return len(losses), 4

    return misuse


def set_lr(rank: int) -> Any:
    """Each process sets a learning rate of its own, as a plateau of its own loss suggests."""
    import optax
    from flax import nnx

    import gshard.paddle

    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    tx = optax.inject_hyperparams(optax.sgd)(0.1)
    _, optimizer, _ = gshard.paddle.group_sharded_parallel(model, tx, "os")
    optimizer.set_lr(0.1 * (1 + rank))


def arrays_here(rank: int) -> Any:
    """Arrays of JAX on a device of this process."""
    import jax

    from tests.misuses import small

    mine = jax.device_put(own(rank), jax.local_devices()[-1])
    return step_of(lambda _: mine)(rank), small.alone()


def scaled(params: Any, batch: Any) -> Any:
    from tests.misuses.small import loss_fn

    return loss_fn(params, batch) * batch["scale"]


def scalars_from(first: int) -> Callable[[int], Any]:
    """One process gives another scalar from a step on."""

    def misuse(rank: int) -> Any:
        from tests.misuses import small

        state, plan = small.shard()
        step = gshard.make_train_step(scaled, plan)
        for i in range(6):
            batch = gshard.shard_batch(own(rank, scale=1.0 + i + rank * (i >= first)), plan)
            state, metrics = step(state, batch)
        return float(metrics["loss"])

    return misuse


def evaluated(batch: Callable[[int], Any]) -> Callable[[int], Any]:
    def misuse(rank: int) -> Any:
        from tests.misuses import small

        state, plan, _ = small.kept()
        return float(gshard.make_eval_step(small.loss_fn, plan)(state, batch(rank)))

    return misuse


def exported(name: Callable[[int], str]) -> Callable[[int], Any]:
    def misuse(rank: int) -> Any:
        gshard.save_safetensors(like(), FOLDER / name(rank))
        return gshard.load_safetensors(like(), FOLDER / name(rank)).step, 0

    return misuse


def key_of_rank(rank: int) -> Any:
    import jax

    return step_of(lambda r: own(r, key=jax.random.key(r)))(rank)


def all_see_the_same_sums(rank: int) -> Any:
    from tests.misuses import small

    return step_of(own)(rank), small.alone()


def prints(rank: int) -> Any:
    """The loss does something in Python on one process alone."""
    from tests.misuses import small

    def loss(params: Any, batch: Any) -> Any:
        print("traced") if rank == 0 else None
        return small.loss_fn(params, batch)

    return step_of(own, loss)(rank), small.alone()


def micro_batches(rank: int) -> Any:
    return step_of(own, micro_batches=1 + rank)(rank)


def post_update(rank: int) -> Any:
    import jax

    scale = 1.0 - 0.5 * rank
    change = lambda s: s.replace(params=jax.tree.map(lambda x: x * scale, s.params))  # noqa: E731
    return step_of(own, post_update=change)(rank)


def swapped_steps(rank: int) -> Any:
    """Train and eval step in another order."""
    from tests.misuses import small

    state, plan = small.shard()
    make = (gshard.make_train_step, gshard.make_eval_step)[rank]
    return make(small.loss_fn, plan)(state, own(rank))


def evaluates_alone(rank: int) -> None:
    from tests.misuses import small

    state, plan = small.shard()
    batch = gshard.shard_batch(own(), plan)
    if rank:
        gshard.make_eval_step(small.loss_fn, plan)(state, batch)
    else:
        gshard.distributed.barrier()


def with_another_setting(rank: int) -> Any:
    """As `JAX_DEFAULT_MATMUL_PRECISION` in the environment of one process."""
    import jax

    with jax.default_matmul_precision(("default", "float32")[rank]):
        return shard(rank)


def in_another_order(rank: int) -> Any:
    import jax

    from tests.misuses import small

    # All but one where a process has two: which of the two compares must be the same on all.
    taken = jax.device_count() - (jax.local_device_count() > 1)
    order = jax.devices()[:taken][:: (1, -1)[rank]]
    return small.shard(mesh=gshard.make_mesh(devices=order))


def called(more: int) -> Callable[[int], Any]:
    """The output for as many examples as a process has devices, and `more` on the last process."""

    def misuse(rank: int) -> Any:
        import jax
        from jax.experimental import multihost_utils

        from tests.misuses import small

        model, tx = small.pair()
        count = jax.local_device_count()
        x = small.BATCH["x"][: count * gshard.distributed.process_count()]
        first = gshard.distributed.process_index() * count
        wrapped, _, _ = gshard.paddle.group_sharded_parallel(model, tx, "dp")
        out = wrapped(x[first : first + count + more * rank])
        return multihost_utils.process_allgather(out, tiled=True), small.pair()[0](x)

    return misuse


def scaled_by(_: int, first: float = 1.0, disable_jit: bool = False) -> Any:
    """A wrapped model of examples and of an array of 20 numbers, of which it takes the mean."""
    import jax
    from flax import nnx
    from jax.experimental import multihost_utils

    from tests.misuses import small

    class Scaled(nnx.Linear):
        def __call__(self, x: Any, scales: Any) -> Any:
            return super().__call__(x) * scales.sum() / scales.shape[0]

    def make() -> Any:
        return Scaled(16, 8, rngs=nnx.Rngs(0))

    scales = np.linspace(first, 3, 20, dtype=np.float32)
    wrapped, _, _ = gshard.paddle.group_sharded_parallel(make(), small.ADAM, "dp")
    with jax.disable_jit(disable_jit):
        out = wrapped(own()["x"], scales)
    out = multihost_utils.process_allgather(out, tiled=True)
    return out, make()(small.BATCH["x"], scales)


def replicas(rank: int) -> Any:
    from tests.misuses import small

    return small.shard(mesh=gshard.make_mesh(replica=1 + rank))


ROWS: dict[str, Row] = {
    "nothing: each process gives its own examples": right(all_see_the_same_sums),
    "all processes give the same batch": warned(
        step_of(lambda r: {"x": np.eye(share(), 16, dtype="f4"), "y": np.ones((share(), 8), "f4")}),
        "the same data",
    ),
    "one process gives another array more": refused(
        step_of(lambda r: own(r, **({"id": np.arange(share())} if r else {}))), "id"
    ),
    "one process gives float16": refused(
        step_of(lambda r: own(r, x=np.ones((share(), 16), ["f4", "f2"][r]))), "float16"
    ),
    "one process gives narrower examples": refused(
        step_of(lambda r: own(r, x=np.ones((share(), 16 - r), "f4"))), "15"
    ),
    "one process gives fewer examples": refused(
        step_of(lambda r: {k: v[: share() - 2 * r] for k, v in own(r).items()}), "6", "8"
    ),
    "one process gives a number of examples that does not divide": refused(
        step_of(lambda r: {k: v[: share() - r] for k, v in own(r).items()}), "7 examples"
    ),
    "one process gives None": refused(step_of(lambda r: None if r else own(r)), "no array"),
    "one process gives text": refused(
        step_of(lambda r: own(r, **({"t": "a"} if r else {}))), "'a'"
    ),
    "one process gives numbers beyond 32 bits": refused(
        step_of(lambda r: own(r, id=np.full(share(), 2 ** (40 * r)))), str(2**40)
    ),
    "one process gives other scalars": refused(
        step_of(lambda r: own(r, scale=1.0 + r), scaled), "scale"
    ),
    "one process gives another scalar in a later step": refused(
        scalars_from(3), "call 4", "batches with different scalars"
    ),
    "one process gives NaN": right(nan_of_one),
    "a key in the batch": refused(key_of_rank, "key", "jax.random.key_data"),
    "arrays on a device of each process": right(arrays_here),
    "another number of examples in evaluation": refused(
        evaluated(lambda r: {k: v[: share() - 2 * r] for k, v in own(r).items()}), "the same call"
    ),
    "another number of micro-batches": refused(micro_batches, "micro_batches"),
    "another post_update": refused(post_update, "program"),
    "the loss prints on one process": right(prints),
    "jax.disable_jit: full_params": right(without_jit(gathers)),
    "jax.disable_jit: check_replicas=": right(without_jit(compares_replicas)),
    "jax.disable_jit: ZeroRedundancyOptimizer": right(without_jit(updates_by_itself)),
    "jax.disable_jit: a wrapped model": right(lambda r: scaled_by(r, disable_jit=True)),
    "jax.disable_jit: load_state_dict": right(without_jit(dropout_loaded)),
    "the output of a wrapped model": right(called(0)),
    "the output of a wrapped model for an array that is no batch": right(scaled_by),
    "an array that is no batch differs": refused(
        lambda r: scaled_by(r, 1.0 + r), "[20]", "not an array of examples"
    ),
    "another number of examples for the output of a wrapped model": refused(called(-1), "examples"),
    "a train step on one process, an eval step on the other": refused(
        swapped_steps, "do not run the same program"
    ),
    "an eval step on one process, barrier() on the other": refused(
        evaluates_alone, "the same call", "the first call of the eval step of loss_fn", "barrier()"
    ),
    "another setting of JAX": refused(
        with_another_setting,
        *("JAX's settings: jax_default_matmul_precision=default on process", "JAX_..."),
    ),
    "a mesh of its own devices on each process": right(trains_alone),
    "the devices of the mesh in another order": refused(in_another_order, "mesh"),
    "another replica group": refused(replicas, "replica"),
    "another rule": refused(lambda r: shard(r, rules=(None, {"b": 0})), "plan"),
    "another precision": refused(lambda r: shard(r, precision=(None, "bfloat16")), "bfloat16"),
    "another frozen=": refused(lambda r: shard(r, frozen=(None, "^b$")), "process 1"),
    "broadcast_from=-1": refused(lambda r: shard(r, broadcast_from=(-1, -1)), "broadcast_from=-1"),
    "broadcast_from='0'": refused(lambda r: shard(r, broadcast_from=("0",) * 2), "broadcast_from="),
    "one process does not keep the state of a step": refused(
        of_the_old_state, "different states", "Keep what the step returns"
    ),
    "a learning rate of its own on each process, dp": refused(
        hyperparameter("dp"), "a learning rate"
    ),
    "a learning rate of its own on each process, os_g": refused(
        hyperparameter("os_g"), "a learning rate"
    ),
    "a learning rate of its own on each process, in host memory": refused(
        hyperparameter("os", offload=True), "a learning rate"
    ),
    "ZeroRedundancyOptimizer: another learning rate from a step on": refused(
        rate_of_one(4), "call 4", "learning_rate=0.2 in group 0 on process"
    ),
    "ZeroRedundancyOptimizer: another learning rate in one step": refused(
        rate_of_one(3), "call 4", "different hyperparameters in call 3,"
    ),
    "ZeroRedundancyOptimizer: another learning rate before a save": refused(
        rate_before_saving, "call 3", "learning_rate=0.2 in group 0 on process"
    ),
    "ZeroRedundancyOptimizer: the gradients of each process": refused(
        zero(lambda opt, own: opt.step(own)), "step: the gradients differ between the processes"
    ),
    "ZeroRedundancyOptimizer: another state in load_state_dict": refused(
        zero(zero_loads), "the processes set different values: 0/0/mu", "process 1", "broadcast"
    ),
    "ZeroRedundancyOptimizer, greedy: another weight decay": refused(
        greedy(weight_decay=(0.1, 0.2)),
        "weight_decay=0.1 in group 0 on process 0, weight_decay=0.2",
    ),
    "ZeroRedundancyOptimizer, greedy: another optimizer": refused(
        greedy(("adam", "adamax")), "optimizer_class='adam' in group 0 on process 0"
    ),
    "ZeroRedundancyOptimizer, greedy: another parameters_as_bucket_view=": refused(
        greedy(parameters_as_bucket_view=(False, True)), "as_bucket_view=False on process 0"
    ),
    "one process calls set_lr once more": refused(
        lambda r: wrapped(r, sets_more_rates), "different numbers of calls: 2 on process 0, 3 on"
    ),
    "a model that is in evaluation on one process": refused(
        lambda r: wrapped(r, evaluates_one), "not run the same program: model(...) differs"
    ),
    "another scale of the GradScaler": refused(
        lambda r: wrapped(r, scales), "scale=8.0 on process 0, scale=16.0 on process 1"
    ),
    "nnx.reseed with the same seed": right(reseeded(lambda rank: 7)),
    "nnx.reseed with the seed of each process": refused(
        reseeded(lambda rank: 7 + rank), "different states", "a random key"
    ),
    "another learning rate in set_lr": refused(
        set_lr, "set_lr", "learning_rate=0.2 on process", "all processes"
    ),
    "another seed of the loader": refused(lambda r: loader(r, seed=r), "seed"),
    "another batch_size of the loader": refused(
        lambda r: loader(r, size=16 * (1 + r)), "batch_size"
    ),
    "another order of the loader": refused(lambda r: loader(r, shuffle=bool(r)), "shuffle"),
    "other data": refused(lambda r: loader(r, {"x": np.arange(32.0) + r}), "checksum"),
    "a dataset of the process's own examples": warned(
        lambda r: loader(r, Examples(r)),
        "of the dataset differs between the processes",
        "full dataset",
    ),
    "a dataset of random examples": right(lambda r: (len(loader(r, Examples(r, random=True))), 2)),
    "data of another length": refused(lambda r: loader(r, {"x": np.zeros(32 + 16 * r)}), "length"),
    "data of another form": refused(lambda r: loader(r, {"x": np.zeros((32, 1 + r))}), "example"),
    "another position of the loader": refused(moved_on, "position"),
    "another number in save": refused(saved(lambda r: 3 + r), "3", "4"),
    "a state of one process is refused by save": refused(
        with_saver(lambda c, r: c.save(5, {"w": 1} if r else like())), "state is a dict"
    ),
    "other metadata": right(
        lambda r: (saved(lambda r: 10, metadata=lambda r: {"rank": r})(r), ({"rank": 0}, [10]))
    ),
    "data_state= of one process is refused": refused(
        saved(lambda r: 11, data_state=lambda r: object() if r else 1), "data_state"
    ),
    "another number in restore": refused(
        with_saver(lambda c, r: c.restore(10 + r, like=like())), "restore"
    ),
    "another number in delete": refused(with_saver(lambda c, r: c.delete(10 + r)), "delete"),
    "another call: one saves, the other restores": refused(
        with_saver(lambda c, r: c.restore(10, like=like()) if r else c.save(20, like())),
        "restore",
    ),
    "another verify=": refused(
        with_saver(lambda c, r: c.restore(10, like=like(), verify=bool(r))), "verify"
    ),
    "another only= in restore": refused(
        with_saver(lambda c, r: c.restore(10, like=like(), only=[".", "w"][r])), "only='w'"
    ),
    "restore without like= on one process": refused(
        with_saver(lambda c, r: c.restore(10, like=None if r else like())), "like="
    ),
    "a file that one process has not": refused(
        lambda r: gshard.load_safetensors(like(), FOLDER / f"none{r}"), "none"
    ),
    "another name in save_safetensors": refused(exported(lambda r: f"a{r}"), "a1"),
    "gshard.paddle.save on one process": refused(
        lambda r: gshard.distributed.barrier() if r else values_saved(), "the same call", "barrier"
    ),
    "gshard.paddle.save where one process cannot": refused(
        lambda r: gshard.paddle.save({"w": object() if r else 1}, FOLDER / "other"), "w is"
    ),
    "gshard.paddle.load on one process": right(values_loaded),
    "other values in load_state_dict": refused(
        state_dict_loaded, "the processes set different values: bias", "process 1", "broadcast"
    ),
    "load_group_sharded_model of different models is refused and changes nothing": right(
        other_models_loaded
    ),
    "load_state_dict on one process": refused(
        lambda r: state_dict_loaded(r, alone=True),
        *("the same call", "a comparison of the state dicts"),
    ),
}


def main(coordinator: str, processes: int, rank: int, file: str, folder: str) -> None:
    global FOLDER
    FOLDER = Path(folder)
    gshard.distributed.initialize(coordinator, processes, rank)
    found = {}
    for name, row in ROWS.items():
        print("begin", name, flush=True)
        found[name] = np.array(seen_by(lambda: row.misuse(int(rank == processes - 1))))  # noqa: B023
        print(name, found[name], flush=True)
    np.savez(file, **found)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
