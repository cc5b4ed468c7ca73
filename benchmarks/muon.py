"""A step with Muon: equal matrices on one owner each, beside all of them on every device.

python -m benchmarks.muon                       # times of a GPT on 8 virtual devices, in turn
python -m benchmarks.muon --target h100:32x8    # Llama 2 7B, compiled ahead of time
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table

import gshard
from benchmarks.processes import on_cpu
from gshard.analysis.aot.target import parse_target

WHERE = {True: "on owners", False: "on every device"}


def timed(level: str, width: int, layers: int, rounds: int) -> Table:
    """Seconds of a step of a GPT, by where the matrices are computed."""
    import jax

    from benchmarks.models import gpt
    from benchmarks.muon_compile import GatheredUpdate, compute_everywhere, muon
    from benchmarks.timing import in_turn, ratio

    problem, mesh = gpt(width, layers), gshard.make_mesh()
    batch, find, programs = problem.batch(mesh.size), GatheredUpdate._find_owned, {}
    for owners, name in WHERE.items():
        if not owners:
            compute_everywhere()
        given = (problem.params, muon(problem.params))
        state, plan = gshard.shard_train_state(given, mesh, level)
        step = gshard.make_train_step(problem.loss_fn, plan, donate=False)
        rows = gshard.shard_batch(batch, plan)
        step(state, rows)

        def run(step: Any = step, state: Any = state, rows: Any = rows) -> None:
            jax.block_until_ready(step(state, rows))

        programs[name] = run
    GatheredUpdate._find_owned = find
    seconds = in_turn(programs, rounds)
    title = f"GPT of {layers} layers of width {width} at {level}, {mesh.size} devices"
    table = Table("products", "seconds", "to on owners", title=title, title_justify="left")
    for name, times in seconds.items():
        table.add_row(name, f"{min(times):.3f}", str(ratio(times, seconds[WHERE[True]])))
    return table


def compiled(target: str, level: str, sizes: dict[str, int], timeout: float) -> Table:
    """What the compiled step of Llama computes and sends, by where the matrices are computed."""
    from gshard.analysis.aot.compiled import ask

    machine = parse_target(target)
    title = f"Llama with Muon at {level} for {target}, per device and step"
    columns = ("products", "FLOP", "of these the update", "GB sent", "between nodes", "peak GB")
    table = Table(*columns, title=title, title_justify="left")
    for owners, name in WHERE.items():
        request = {"target": target, "level": level, "sizes": sizes, "owners": owners}
        found = ask("benchmarks.muon_compile", request, machine, name, timeout)
        print(json.dumps({"products": name, **found}))
        sent, between = (sum(found[key].values()) / 1e9 for key in ("wire_bytes", "network_bytes"))
        table.add_row(
            name,
            f"{found['flops']:.3g}",
            f"{found['update_flops']:.3g}",
            f"{sent:.3f}",
            f"{between:.3f}",
            f"{(found['peak'] or 0) / 1e9:.3f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--level", default="p_g_os")
    parser.add_argument("--target", help="compile ahead of time for these devices")
    parser.add_argument("--width", type=int, help="of the model")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one compilation")
    args = parser.parse_args()
    sizes = {k: x for k in ("width", "layers") if (x := getattr(args, k)) is not None}
    if args.target:
        found = compiled(args.target, args.level, sizes, args.timeout)
    else:
        on_cpu(8)
        found = timed(args.level, **({"width": 192, "layers": 4} | sizes), rounds=args.rounds)
    Console().print(found)


if __name__ == "__main__":
    main()
