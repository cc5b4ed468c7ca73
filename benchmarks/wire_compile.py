"""Compiles one program of `benchmarks.wire`, as its request on stdin says.

A process of its own: some compilers abort it for what they cannot do, and libtpu takes locks.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding

import gshard
from benchmarks.gspmd import baseline
from benchmarks.llama import Sizes, abstract_params, loss_of
from gshard._util.version import versions
from gshard.analysis.aot.child import Say, answer_request, wire_traffic
from gshard.analysis.aot.target import Target, parse_target
from gshard.analysis.hlo import read_program
from gshard.sharding import nodes, topology
from gshard.sharding.nodes import nodes_of

STACK = "layers"
_USES = ("argument_size", "temp_size", "peak_memory")


def sharded_state(params: Any, mesh: Mesh, level: str, wire: str = "") -> tuple[Any, gshard.Plan]:
    """An abstract AdamW state and its plan.

    At `p_g_os` parameters are stored in float32 and cast where they are used: gshard casts the
    shard and gathers the cast, so 2 bytes are communicated and no bfloat16 copy is stored next to
    the master (12 bytes per parameter and not 14). At the other levels parameters are replicated,
    and the stored dtype is all-gathered: with `precision=` bfloat16, 2 bytes and not 4.
    """
    state = jax.eval_shape(
        lambda: TrainState.create(
            apply_fn=None,
            params=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params),
            tx=optax.adamw(3e-4),
        )
    )
    precision = None if level == "p_g_os" else gshard.Precision("bfloat16")
    if wire:
        sent = dict(zip(("gather_dtype", "scatter_dtype"), wire.split(","), strict=False))
        precision = dataclasses.replace(precision or gshard.Precision("float32"), **sent)
    return gshard.shard_train_state(
        state,
        mesh,
        level,
        scan_axes={f"^{STACK}/": 0},
        precision=precision,
    )


def mesh_of(target: Target, wire: str) -> Mesh:
    """Quantized gradients are scattered within a node first, so nodes have an axis of their own.

    JAX knows the node of a GPU, but not of one that is only described.
    """
    devices = target.described_devices()
    if not wire or target.hosts == 1 or target.platform != "gpu":
        return gshard.make_mesh(devices=devices)
    for module in (topology, nodes):
        module.node_of = lambda device: device.id // target.devices_per_node
    sizes = {"node": target.hosts, "local": target.devices_per_node}
    return gshard.make_mesh(sizes, devices=devices)


def budgeted(plan: gshard.Plan) -> dict[str, dict[str, int]]:
    """Wire bytes of one device and step by kind: the budget, and theory.

    `budget` counts elements at every hop over the shard axes; whatever the hops are, a device
    sends (N-1)/N of the full array. Sharded arrays are communicated in bfloat16. In theory a leaf
    outside the stack of layers is gathered once, since the backward pass of the head follows its
    forward pass, and that of an embedding does not need its table.
    """
    n = plan.group.size
    hops = sum(1 / math.prod(plan.group.sizes[:i]) for i in range(len(plan.group.sizes)))
    of_whole = [x.dtype.itemsize for x in jax.tree.leaves(plan.grads) if x.dim is None]
    bytes_of: dict[str, float] = defaultdict(float)
    for moved in gshard.budget(plan).communicated:
        if moved.purpose == "reduce":
            bytes_of[moved.kind] += 2 * moved.elements * max(of_whole)
        else:
            bytes_of[moved.kind] += moved.elements / hops * 2
    theory = dict(bytes_of)
    for leaf in jax.tree.leaves(plan.params):
        if leaf.dim is not None and not leaf.path.startswith(f"{STACK}/"):
            theory["all-gather"] -= leaf.stored_size * 2
    return {
        f"{name}_bytes": {kind: round(x * (n - 1) / n) for kind, x in amounts.items()}
        for name, amounts in (("budget", bytes_of), ("theory", theory))
    }


def abstract_batch(sizes: Sizes, mesh: Mesh, spec: jax.P) -> dict[str, jax.ShapeDtypeStruct]:
    """One sequence for each device."""
    shape, batch_sharding = (mesh.size, sizes.sequence), NamedSharding(mesh, spec)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding)
    return {"tokens": tokens, "next": tokens}


def lowered(
    program: str, mesh: Mesh, level: str, sizes: Sizes, wire: str = "", reshard: int = 0
) -> jax.stages.Lowered:
    """One of the programs that are compared: gshard's, or a baseline's."""
    params, tx = abstract_params(sizes), optax.adamw(3e-4)
    if program == "gshard":
        state, plan = sharded_state(params, mesh, level, wire)
        step = gshard.make_train_step(
            partial(loss_of, sizes=sizes), plan, reshard_after_forward=reshard or True
        )
        return step.lower(state, abstract_batch(sizes, mesh, plan.batch_spec))
    batch_spec = jax.P(mesh.axis_names)
    by_hand = baseline(
        partial(loss_of, sizes=sizes, batch_sharding=NamedSharding(mesh, batch_spec)),
        tx,
        params,
        mesh,
        level,
        stacks=(STACK,),
        gather_weights=program == "gspmd, gathered weights",
        compute_dtype=jnp.bfloat16,
    )
    batch = abstract_batch(sizes, mesh, batch_spec)
    return by_hand.step.lower(params, jax.eval_shape(tx.init, params), batch)


def run(request: dict[str, Any], say: Say) -> dict[str, Any]:
    """Compiles one program and reads it."""
    target, sizes = parse_target(request["target"]), Sizes(**request["sizes"])
    program, level = request["program"], request["level"]
    wire, reshard = request["wire"], request["reshard"]
    mesh = mesh_of(target, wire if program == "gshard" else "")
    say("compiling")
    start = time.perf_counter()
    compiled = lowered(program, mesh, level, sizes, wire, reshard).compile()
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    Path(request["dump"]).write_text(text)
    memory = compiled.memory_analysis()
    params = abstract_params(sizes)
    return {
        "program": program,
        "compile_seconds": round(seconds, 1),
        "mesh": dict(mesh.shape),
        **wire_traffic(read_program(text), nodes_of(mesh, target.devices_per_node)),
        "memory_bytes": {use: getattr(memory, f"{use}_in_bytes", None) for use in _USES},
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
        **budgeted(sharded_state(params, mesh, level)[1]),
        "versions": versions(),
    }


if __name__ == "__main__":
    answer_request(run)
