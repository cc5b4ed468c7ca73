"""Compiles attention over eight devices that are not there, and its gradient; prints JSON.

Started by `tests/sequence/test_communication.py`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

import gshard
from gshard import sequence
from gshard.analysis.aot.target import parse_target
from gshard.analysis.hlo import read_program
from gshard.analysis.hlo.parser import read_module

TOKENS, HEADS, KV_HEADS, FEATURES = 4096, 16, 8, 128  # tokens of one device


def compiled(devices: Any, by: str, slices: int = 0) -> Any:
    """Causal attention and its gradient, for so many tokens on each device.

    `slices` of a sequence are on as many devices, by default on all.
    """
    slices = slices or len(devices)
    mesh = gshard.make_mesh(sequence=slices, devices=devices)
    spec = jax.P("shard", "sequence")
    mapped = jax.shard_map(
        partial(sequence.attention, causal=True, by=by),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )

    def both(q, k, v, d_out):
        out, back = jax.vjp(mapped, q, k, v)
        return out, back(d_out)

    q, k = (
        jax.ShapeDtypeStruct(
            (len(devices) // slices, TOKENS * slices, heads, FEATURES),
            jnp.bfloat16,
            sharding=NamedSharding(mesh, spec),
        )
        for heads in (HEADS, KV_HEADS)
    )
    return jax.jit(both).lower(q, k, k, q).compile()


def facts(program: Any) -> dict[str, Any]:
    """What a program communicates, and how many of its permutes overlap with products."""
    text = program.as_text()
    kinds, starts, beside = Counter(), 0, 0
    collectives = read_program(text).collectives
    for x in collectives:
        kinds[x.kind] += x.times or 0
    for computation in read_module(text).computations.values():
        order = computation.instructions
        for i, one in enumerate(order):
            if one.opcode == "collective-permute-start":
                end = next(j for j, x in enumerate(order) if j > i and one.name in x.operands)
                starts += 1
                beside += any(x.opcode in ("while", "conditional") for x in order[i:end])
    return {
        "kinds": kinds,
        "sent": sum(x.wire_bytes or 0 for x in collectives),
        "synchronous": sum(not x.asynchronous for x in collectives),
        "starts": starts,
        "beside_products": beside,
        "temporary": program.memory_analysis().temp_size_in_bytes,
    }


def main() -> None:
    devices = parse_target(sys.argv[1]).described_devices()
    ways = ("ring", "gather", "ulysses")
    found: dict[str, Any] = {by: facts(compiled(devices, by)) for by in ways}
    found["slice"] = TOKENS * KV_HEADS * 2 * FEATURES
    if sys.argv[1].startswith("tpu"):
        grid = parse_target("tpu-v5e:4x8").described_devices()
        found["line"] = facts(compiled(grid, "ring", slices=8))
        found["grid"] = facts(compiled(grid, "ring"))
    found["temporary_of_four"] = facts(compiled(devices[:4], "ring"))["temporary"]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
