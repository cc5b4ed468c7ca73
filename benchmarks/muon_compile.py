"""Compiles a step of Llama with Muon ahead of time, as the request of `benchmarks.muon` says."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import gshard
from benchmarks.llama import Sizes, abstract_params, loss_of
from benchmarks.wire_compile import STACK, abstract_batch
from gshard._util.version import versions
from gshard.analysis.aot.child import Say, answer_request, wire_traffic
from gshard.analysis.aot.target import parse_target
from gshard.analysis.hlo import read_program
from gshard.sharding.nodes import nodes_of
from gshard.train.optim.matrix_products import GatheredUpdate


def muon(params: Any) -> optax.GradientTransformation:
    """Muon for the matrices of layers, also of stacks; Adam for everything else."""
    found = jax.tree_util.tree_map_with_path(_dimensions, params)
    return optax.contrib.muon(3e-4, muon_weight_dimension_numbers=found)


def _dimensions(path: Any, leaf: Any) -> optax.contrib.MuonDimensionNumbers | None:
    names = jax.tree_util.keystr(path)
    if leaf.ndim < 2 or not any(x in names for x in (STACK, "block")) or "norm" in names:
        return None
    return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)


def compute_everywhere() -> None:
    """Makes every device compute the products of all matrices, as gshard did before."""
    GatheredUpdate._find_owned = lambda self: []


def run(request: dict[str, Any], say: Say) -> dict[str, Any]:
    """Compiles one program and reads it."""
    target, sizes = parse_target(request["target"]), Sizes(**request["sizes"])
    if not request["owners"]:
        compute_everywhere()
    mesh = gshard.make_mesh(devices=target.described_devices())
    params = abstract_params(sizes)
    state = jax.eval_shape(
        lambda: TrainState.create(
            apply_fn=None,
            params=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params),
            tx=muon(params),
        )
    )
    stacks = {f"^{STACK}/": 0}
    state, plan = gshard.shard_train_state(state, mesh, request["level"], scan_axes=stacks)
    step = gshard.make_train_step(partial(loss_of, sizes=sizes), plan)
    say("compiling")
    start = time.perf_counter()
    compiled = step.lower(state, abstract_batch(sizes, mesh, plan.batch_spec)).compile()
    program = read_program(compiled.as_text())
    products = plan.update_products
    return {
        "compile_seconds": round(time.perf_counter() - start, 1),
        **wire_traffic(program, nodes_of(mesh, target.devices_per_node)),
        "peak": getattr(compiled.memory_analysis(), "peak_memory_in_bytes", None),
        "flops": program.flops,
        "update_flops": products and products.flops,
        "update_flops_one_device": products and products.one_device,
        "versions": versions(),
    }


if __name__ == "__main__":
    answer_request(run)
