"""One of several processes that share a GPU and train next to plain `jit`, over NCCL.

NCCL refuses two processes of one machine on the same GPU, so each says that it is on a machine of
its own (`NCCL_HOSTID`), and they are connected by sockets. Collectives, placements and numbers are
those of several GPUs; their times are not. Without a GPU each process has a CPU device, and Gloo
connects them.

Run by `benchmarks.gpu_sections.ranks` as a process of a `benchmarks.groups.ProcessGroup`, with the
name of the first case.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import gshard
from benchmarks import programs
from benchmarks.groups import ADDRESS, RANK, SIZE, serve
from benchmarks.models import gpt
from gshard.distributed.env_vars import device_shares, visible_gpus

RANKS = 4  # processes that share a GPU
STEPS = 3
# AdamW divides by the size of a gradient, which enlarges rounding errors where it is almost zero.
# On CPU they reach 1e-4 of what training changes in the parameters of a GPT.
LOSS_TOLERANCE, PARAMS_TOLERANCE = 1e-5, 1e-2


class Case(NamedTuple):
    """What is trained and how.

    Attributes:
      mesh: arguments of `make_mesh`.
      options: of `shard_train_state`.
      experts: of each block, 0 for a dense one.
      loss_off, params_off: the most by which it may be off.
    """

    mesh: Mapping[str, Any]
    level: str
    options: Mapping[str, Any]
    experts: int = 0
    loss_off: float = LOSS_TOLERANCE
    params_off: float = PARAMS_TOLERANCE


def cases(processes: int) -> dict[str, Case]:
    """The cases by name, for an even number of processes."""
    eight_bits = gshard.Precision("float32", gather_dtype="int8", scatter_dtype="int8")
    kept = {"experts/(up|down)$": ("expert", 1)}  # dimension 0 is that of the layers
    return {
        **{level: Case({}, level, {}) for level in ("dp", "os", "os_g", "p_g_os")},
        "p_g_os, sequences": Case({"sequence": processes}, "p_g_os", {}),
        "p_g_os, experts": Case({"expert": 2}, "p_g_os", {"keep": kept}, experts=4),
        "p_g_os, int8 wire": Case(
            {}, "p_g_os", {"precision": eight_bits}, loss_off=0.01, params_off=0.5
        ),
    }


def make() -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A step that runs the next case and gives its row; nothing to report."""
    rank, size = int(os.environ[RANK]), int(os.environ[SIZE])
    os.environ.update(variables(rank))
    # Processes of which some find a program in the cache and others compile it wait in vain.
    jax.config.update("jax_enable_compilation_cache", False)
    gshard.distributed.initialize(os.environ[ADDRESS], size, rank)
    todo = itertools.dropwhile(lambda item: item[0] != sys.argv[1], cases(size).items())
    return (lambda: row(*next(todo))), dict


def variables(rank: int) -> dict[str, str]:
    """Of a process: one GPU for all of them, as if each were on a machine of its own."""
    nccl = {"NCCL_HOSTID": f"machine-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    nccl |= {"NCCL_NET": "Socket", "NCCL_NET_PLUGIN": "none", "NCCL_MNNVL_ENABLE": "0"}
    if not (gpus := visible_gpus()):
        return nccl
    # Each tunes its kernels itself: XLA would share that work among the processes of a machine.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_shard_autotuning=false".strip()
    return nccl | {"XLA_FLAGS": flags} | device_shares(1, gpus[:1], None)[0]


@functools.cache
def on_one_device(experts: int) -> tuple[Any, np.ndarray, list[float], Any]:
    """The problem, its batch, and the losses and parameters of plain `jit` on one device."""
    problem = gpt(32, 2, 15, scan=True, remat=True, experts=experts)
    batch = problem.batch(2 * jax.device_count())
    plain = programs.on_one_device(problem._replace(batch=lambda _: batch), len(batch))
    losses = [plain.run() for _ in range(STEPS)]
    return problem, batch, losses, plain.state()[0]


def row(name: str, case: Case) -> dict[str, Any]:
    """Trains a case, and says how far it is from plain `jit` on this process's device."""
    # Otherwise GPUs round the operands of a product to TF32.
    with jax.default_matmul_precision("highest"):
        problem, batch, wanted, trained = on_one_device(case.experts)
        state, plan = gshard.shard_train_state(
            (problem.params, optax.adamw(problem.learning_rate)),
            gshard.make_mesh(**case.mesh),
            case.level,
            scan_axes={f"{stack}/": 0 for stack in problem.stacks},
            min_shard_size=0,
            **case.options,
        )
        step, losses = gshard.make_train_step(problem.loss_fn, plan), []
        loader = gshard.DataLoader(batch, len(batch), plan, shuffle=False, num_epochs=STEPS)
        for given in loader:
            state, metrics = step(state, given)
            losses.append(float(metrics["loss"]))
        params = gshard.full_params(state)
    return {
        "case": name,
        "loss": losses[-1],
        "loss_off": loss_distance(losses, wanted),
        "params_off": distance(params, trained, problem.params),
    }


def loss_distance(own: list[float], wanted: list[float]) -> float:
    """The largest relative difference; NaN if one is NaN."""
    return float(np.max(np.abs(np.divide(own, wanted) - 1)))


def distance(own: Any, wanted: Any, start: Any) -> float:
    """The distance between trained parameters, over how far training has moved them."""

    def norm(a: Any, b: Any) -> float:
        both = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return math.sqrt(
            sum(float(np.square(np.asarray(x) - np.asarray(y)).sum()) for x, y in both)
        )

    return norm(own, wanted) / norm(wanted, start)


if __name__ == "__main__":
    serve(make)
