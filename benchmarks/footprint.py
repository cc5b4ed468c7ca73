"""The analytic footprint of a train step and what the compiler reports, model by model.

    python -m benchmarks.footprint --target h100:1x8 --models gpt llama --levels p_g_os

Prints a line for each model and level: estimated peak, the compiler's, their ratio. Nothing is run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from typing import Any

from gshard._util.errors import GShardError
from gshard.analysis.aot.target import Target, parse_target

LEVELS = ("dp", "os", "os_g", "p_g_os")


def main() -> None:
    """Starts a process for the target, whose environment JAX must find when it starts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="cpu:8", help="such as h100:1x8 or cpu:8")
    parser.add_argument("--models", nargs="+", default=[], help="by default all")
    parser.add_argument("--levels", nargs="+", default=LEVELS, choices=LEVELS)
    parser.add_argument("--json", action="store_true", help="one line of JSON for each")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        target = parse_target(args.target)
        if args.here:
            _table(target, args)
            return
    except GShardError as error:
        sys.exit(f"error: {error}")
    command = [sys.executable, "-m", "benchmarks.footprint", "--here", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=os.environ | target.environment).returncode)


def _table(target: Target, args: argparse.Namespace) -> None:
    from benchmarks.footprint_held_out import HELD_OUT
    from benchmarks.footprint_models import CASES
    from benchmarks.footprint_unseen import UNSEEN

    cases = {**CASES, **HELD_OUT, **UNSEEN}
    unknown = [name for name in args.models if name not in cases]
    if unknown:
        raise GShardError(f"{unknown[0]!r} is no model; there are {', '.join(cases)}.")
    for name in args.models or cases:
        for level in args.levels:
            row = {"model": name, "level": level, **compared(cases[name](), level, target)}
            if args.json:
                print(json.dumps(row), flush=True)
                continue
            off = "" if abs(row["ratio"] - 1) <= 0.1 else "  off"
            print(
                f"{name:16} {level:7} estimated {row['estimated'] / 1e6:9.2f} MB"
                f"  compiler {row['compiler'] / 1e6:9.2f} MB  ratio {row['ratio']:.3f}"
                f"  arguments {row['arguments'] / 1e6:9.2f} MB"
                f"  walk {row['seconds']:.2f} s{off}",
                flush=True,
            )


def compared(case: Any, level: str, target: Target) -> dict[str, Any]:
    """The estimate and the compiler's figure for one case, on this process's devices."""
    import gshard
    from gshard.analysis.memory.footprint import footprint

    mesh = gshard.make_mesh(devices=target.described_devices())
    traced, plan = traced_case(case, level, mesh)
    start = time.perf_counter()
    found = footprint(traced, plan, target.platform)
    seconds = time.perf_counter() - start
    compiled = traced.lower().compile()
    peak = compiled_peak(compiled, target.platform)
    return {
        "estimated": found.peak,
        "compiler": peak,
        "ratio": found.peak / peak,
        "arguments": found.arguments,
        "compiler_arguments": compiled.memory_analysis().argument_size_in_bytes,
        "seconds": seconds,
    }


def compiled_peak(compiled: Any, platform: str) -> int:
    """Returns the bytes that a compiled step needs on one device at its peak, as XLA reports them.

    On GPU and TPU `peak_memory_in_bytes`: the largest sum of live buffers, arguments included. On
    CPU that leaves temporaries out (JAX 0.10 and 0.12: the peak of an MLP with 61 MB of them was
    530 bytes above its arguments), and a program from JAX's compilation cache has none (0, on an
    H200 with JAX 0.11.2). There it is arguments + results - aliased + temporaries: what is
    allocated.
    """
    from gshard.analysis.audit import compiled_memory

    found = compiled_memory(compiled, platform)
    kept = found["argument"] + found["output"] - found["alias"]
    return found.get("peak", kept + found["temp"])


def prepared(case: Any, level: str, mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    """A case's step on a mesh, concrete or abstract, and its abstract arguments."""
    import jax
    from jax.sharding import NamedSharding

    import gshard

    with warnings.catch_warnings():  # of small leaves that stay replicated
        warnings.simplefilter("ignore", gshard.GShardWarning)
        state, plan = gshard.shard_train_state(case.state, mesh, level, **case.shard)
    step = gshard.make_train_step(case.loss_fn, plan, **case.step)
    sharding = NamedSharding(plan.mesh, plan.batch_spec)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        case.batch(case.examples * mesh.size),
    )
    return step, (state, batch)


def traced_case(case: Any, level: str, mesh: Any) -> tuple[Any, Any]:
    """The trace of a case's step, and its plan."""
    from gshard.analysis.memory.footprint import trace_step

    step, arguments = prepared(case, level, mesh)
    return trace_step(step, *arguments), step.plan


if __name__ == "__main__":
    main()
