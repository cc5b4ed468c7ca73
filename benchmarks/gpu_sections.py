"""What `benchmarks.gpu` measures: each section is a function that runs in a process of its own.

A section returns a dict of `rows` (dicts with the same keys), a `note` that says what they are, and
`wrong`: what should not be so, or None.
"""

from __future__ import annotations

import collections
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import jax
import optax

import gshard
from benchmarks.calibration import calibration  # noqa: F401 (a section, found by its name)
from benchmarks.footprint import compiled_peak
from benchmarks.gpu_ranks import LOSS_TOLERANCE, PARAMS_TOLERANCE, cases, distance
from benchmarks.groups import ProcessGroup, free_address
from benchmarks.machine import target_of
from benchmarks.models import Problem, gpt, mlp
from benchmarks.programs import Program, by_gshard, on_one_device
from benchmarks.timing import Ratio, in_turn, ratio
from benchmarks.traces import overlap_of, read_trace
from gshard._util.chips import memory_of
from gshard._util.text import bytes_of
from gshard._util.version import versions
from gshard.analysis.forecast import footprint_of, level_forecast
from gshard.analysis.hlo import read_program
from gshard.analysis.setup import Choices, TrainSetup, batch_bytes, sharded_setup
from gshard.analysis.tune import step_cost
from gshard.cli.doctor.devices import probe_two_processes, run_probe, sum_over_processes, unused
from gshard.cli.doctor.machine import hardware
from gshard.sharding.level import LEVELS

Found = dict[str, Any]
JIT = "jit"
RANKS = 4  # processes that share a GPU
PLANNED = [("gpt-scan", level) for level in reversed(LEVELS)]
PLANNED += [(name, level) for name in ("gpt-remat", "mlp") for level in ("dp", "p_g_os")]
_TRACED = 3  # steps
_LARGE = 60 * 10**9  # bytes of a device that has room for the examples of the large models


def run(section: str, small: bool, devices: int) -> Found:
    """Runs a section by its name, on so many virtual devices where there is no accelerator."""
    with suppress(gshard.GShardError):  # XLA_FLAGS says how many
        gshard.virtual_devices(devices)
    return globals()[section](small)


def machine(small: bool) -> Found:
    """The devices, their memory, and all versions."""
    device, here = jax.devices()[0], hardware()[0]
    row = {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "memory": memory_of(device),
        "driver": here.driver or None,
        "runtime": device.client.platform_version.splitlines()[0],
    }
    rows = [{"name": name, "value": value} for name, value in (row | versions()).items()]
    wrong = None
    if here.nvidia and device.platform == "cpu":  # such as a JAX without its plugin for CUDA
        found = unused("nvidia", 0, here, os.environ)
        wrong = f"{found.found}: {found.fix}"
    return {"rows": rows, "machine": row | versions(), "wrong": wrong}


def correctness(small: bool) -> Found:
    """Training at every level on all devices, next to plain `jit` on one."""
    mesh, steps, rows = gshard.make_mesh(), 3, []
    width = 32 if small else 128
    problems = {
        "mlp": mlp(width, 2),
        "gpt-scan-remat": gpt(width, 2 if small else 4, width // 2, scan=True, remat=True),
    }
    # Otherwise GPUs round the operands of a product to TF32.
    with jax.default_matmul_precision("highest"):
        for name, problem in problems.items():
            examples = 2 * mesh.size
            problem = _fixed(problem, examples)
            plain = on_one_device(problem, examples)
            losses = [plain.run() for _ in range(steps)]
            wanted = plain.state()[0]
            for level in LEVELS:
                program = by_gshard(problem, examples, level, mesh, min_shard_size=0)
                own = [program.run() for _ in range(steps)]
                rows.append(
                    {
                        "model": name,
                        "level": level,
                        "loss": own[-1],
                        "loss_off": max(abs(a / b - 1) for a, b in zip(own, losses, strict=True)),
                        "params_off": distance(program.state()[0], wanted, problem.params),
                    }
                )
    wrong = [
        f"{row['model']} at {row['level']}"
        for row in rows
        if not (row["loss_off"] <= LOSS_TOLERANCE and row["params_off"] <= PARAMS_TOLERANCE)
    ]
    said = f"not those of plain jit: {', '.join(wrong)}" if wrong else None
    note = "largest relative difference of a loss; distance of parameters over what training moved"
    return {"rows": rows, "note": note, "wrong": said}


def step_time(small: bool) -> Found:
    """A step on one device next to plain `jit`: what gshard costs."""
    mesh, rows = gshard.make_mesh(devices=jax.devices()[:1]), []
    for name in ("mlp", "gpt-scan"):
        problem, examples = _sized(name, small)
        programs = {JIT: on_one_device(problem, examples)}
        for level in ("dp", "p_g_os"):
            programs[level] = by_gshard(problem, examples, level, mesh)
        for key, to, seconds, _ in _timed(programs, small):
            about = {"model": name, "program": key, "seconds": seconds, "to_jit": to}
            rows.append(about | {"temporary": programs[key].temporary})
    return {"rows": rows, "note": "on one device; ratios with 95 % bounds; bytes of temporaries"}


def planned(small: bool) -> Found:
    """Planned peak and time of models and levels on all devices, each in its own process."""
    rows, troubles = [], []
    for model, level in PLANNED[:1] if small else PLANNED:
        probe = f"{__name__}:planned_level"
        given = {"model": model, "level": level, "small": small, "devices": 8}
        found, trouble, _ = run_probe(probe, 120, **given)
        rows += [found] if found else []
        troubles += [] if found else [f"{model} at {level}: {trouble}"]
    note = "bytes and seconds; device_peak is the allocator's, autotuning included"
    return {"rows": rows, "note": note, "wrong": "; ".join(troubles) or None}


def planned_level(model: str, level: str, small: bool, devices: int) -> Found:
    """A row of `planned`."""
    with suppress(gshard.GShardError):
        gshard.virtual_devices(devices)
    mesh, device = gshard.make_mesh(), jax.devices()[0]
    problem, examples = _sized(model, small)
    choices = Choices(micro_batch_size=max(1, examples // mesh.size))
    examples = choices.micro_batch_size * mesh.size
    shard = _shard(small)
    setup = TrainSetup(
        (problem.params, optax.adamw(problem.learning_rate)),
        problem.loss_fn,
        problem.batch(1),
        {"scan_axes": {f"^{stack}/": 0 for stack in problem.stacks}, **shard},
    )
    state, plan = sharded_setup(setup, mesh, level, choices)
    forecast = level_forecast(plan, choices, batch_bytes(setup, plan, choices))
    seen = footprint_of(setup, state, plan, choices, device.platform)
    target = target_of(device, mesh.size)
    seconds = None if target is None else step_cost(target, plan, forecast, seen).step
    program = by_gshard(problem, examples, level, mesh, **shard)
    times = in_turn({level: program.run}, 5 if small else 20)[level]
    stats = device.memory_stats() or {}  # before the compiler's figure, which may compile again
    compiler = compiled_peak(program.compiled(), device.platform)
    return {
        "model": model,
        "level": level,
        "planned_peak": seen.peak,
        "compiler_peak": compiler,
        "device_peak": stats.get("peak_bytes_in_use"),
        "planned_to_compiler": seen.peak / compiler,
        "planned_seconds": seconds,
        "seconds": median(times),
    }


def offload(small: bool) -> Found:
    """The optimizer state in host memory: where it is stored, that it trains, and its time."""
    mesh, rows = gshard.make_mesh(), []
    problem, examples = _sized("gpt-scan", small)
    programs = {
        name: by_gshard(problem, examples, "os_g", mesh, offload=name == "host", **_shard(small))
        for name in ("device", "host")
    }
    for name, _, seconds, losses in _timed(programs, small):
        state = jax.tree.leaves(programs[name].state()[1])
        kinds: dict[str, int] = collections.Counter()
        for x in state:
            kinds[x.sharding.memory_kind] += x.nbytes
        stored = ", ".join(f"{bytes_of(size)} in {kind}" for kind, size in kinds.items())
        rows.append(
            {
                "optimizer state": name,
                "stored": stored,
                "seconds": seconds,
                "first_loss": losses[0],
                "last_loss": losses[-1],
            }
        )
    return {"rows": rows, "wrong": _untrained(rows, "optimizer state")}


def processes(small: bool) -> Found:
    """Two processes that start and sum over Gloo, and over NCCL where there are two GPUs."""
    found, trouble, _ = run_probe("probe_devices", 60)
    if trouble:
        raise RuntimeError(trouble)
    two, gpus = [3.0, 3.0], found["count"] if found["platform"] == "gpu" else 0
    starts: dict[str, tuple[Callable[[], list[float]], list[float]]] = {
        "two on the CPU (Gloo)": (lambda: probe_two_processes(60)["sums"], two)
    }
    if gpus >= 2:
        starts["two GPUs (NCCL)"] = lambda: probe_two_processes(60, "0,1")["sums"], two
    elif gpus:
        starts["one GPU (jax.distributed)"] = _alone, [1.0]
    rows = []
    for name, (start, wanted) in starts.items():
        began = time.perf_counter()
        sums = start()
        seconds = time.perf_counter() - began
        rows.append({"processes": name, "sums": sums, "wanted": wanted, "seconds": seconds})
    wrong = ", ".join(row["processes"] for row in rows if row["sums"] != row["wanted"])
    return {"rows": rows, "wrong": f"wrong sums: {wrong}" if wrong else None}


def _alone() -> list[float]:
    jax.distributed.initialize(free_address(), 1, 0)
    return [sum_over_processes()]


def ranks(small: bool) -> Found:
    """Four processes that share a GPU, or have a CPU device each, next to plain `jit`."""
    group, rows, wrong = ProcessGroup("benchmarks.gpu_ranks", [], RANKS), [], []
    try:
        for name, case in cases(RANKS).items():
            first, *others = group.step()
            rows.append(first)
            near = first["loss_off"] <= case.loss_off and first["params_off"] <= case.params_off
            if not near or any(row["loss"] != first["loss"] for row in others):
                wrong.append(name)
        group.end()
    finally:
        group.stop()
    note = "largest relative difference of a loss; distance of parameters over what training moved"
    said = f"not those of plain jit: {', '.join(wrong)}" if wrong else None
    return {"rows": rows, "note": note, "wrong": said}


def overlap(small: bool) -> Found:
    """A trace of three steps: how much of the collectives' time computation overlaps."""
    mesh = gshard.make_mesh()
    problem, examples = _sized("gpt-scan", small)
    rows = []
    for level in ("dp", "p_g_os"):
        program = by_gshard(problem, examples, level, mesh, **_shard(small))
        program.run()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # the trace has room for a million events
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                for _ in range(_TRACED):
                    program.run()
            events = read_trace(Path(folder))
        collectives = read_program(program.compiled().as_text()).collectives
        found = overlap_of(events, {x.name for x in collectives})
        rows.append(
            {
                "level": level,
                "collectives": len(collectives),
                "asynchronous": sum(x.asynchronous for x in collectives),
                "collective_seconds": found.collective / _TRACED,
                "overlapped_seconds": found.overlapped / _TRACED,
                "compute_seconds": found.compute / _TRACED,
                "share": found.share,
            }
        )
    silent = [row["level"] for row in rows if not row["compute_seconds"]]
    lost = [row["level"] for row in rows if mesh.size > 1 and not row["collective_seconds"]]
    wrong = f"the trace has no computation: {', '.join(silent)}" if silent else None
    wrong = wrong or (f"the trace has no collectives: {', '.join(lost)}" if lost else None)
    alone = "one device: there are no collectives"
    note = "seconds of a step, mean over devices; share: collective time that computation overlaps"
    return {"rows": rows, "note": note if mesh.size > 1 else alone, "wrong": wrong}


def dtypes(small: bool) -> Found:
    """bfloat16 and float8, each next to float32; one that fails is a row with its error."""
    mesh, rows = gshard.make_mesh(), []
    for name, dtype in (("mlp", "bfloat16"), ("gpt-scan", "bfloat16"), ("mlp", "float8")):
        row = {"model": name, "dtype": dtype, "seconds": None, "to_float32": None}
        row |= {"first_loss": None, "last_loss": None, "error": None}
        try:
            problem, examples = _sized(name, small)
            programs = {"float32": by_gshard(problem, examples, "os_g", mesh, **_shard(small))}
            given = {"precision": dtype} if dtype == "bfloat16" else {}
            problem = problem if given else _sized(name, small, float8=True)[0]
            programs[dtype] = by_gshard(problem, examples, "os_g", mesh, **given, **_shard(small))
            _, (_, to, seconds, losses) = _timed(programs, small)
            row |= {"seconds": seconds, "to_float32": to}
            row |= {"first_loss": losses[0], "last_loss": losses[-1]}
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:240]
        rows.append(row)
    failed = [f"{row['model']} in {row['dtype']}: {row['error']}" for row in rows if row["error"]]
    note = "float32 at JAX's default precision, which is TF32 on GPUs"
    wrong = "; ".join(failed) or _untrained([row for row in rows if not row["error"]], "dtype")
    return {"rows": rows, "note": note, "wrong": wrong}


def _sized(name: str, small: bool, float8: bool = False) -> tuple[Problem, int]:
    """A model and the number of its examples, large enough to keep a GPU busy unless small."""
    examples = 16 if small or (memory_of(jax.devices()[0]) or 0) < _LARGE else 64
    if name == "mlp":
        made = mlp(*(64, 2) if small else (2048, 8), float8=float8)
    else:
        made = gpt(*(32, 2, 16) if small else (1024, 8, 512), scan=True, remat="remat" in name)
    return _fixed(made, examples), examples


def _fixed(problem: Problem, examples: int) -> Problem:
    """The problem with the same examples for every program."""
    batch = problem.batch(examples)
    return problem._replace(batch=lambda count: batch[:count])


def _shard(small: bool) -> dict[str, int]:
    return {"min_shard_size": 0} if small else {}


def _timed(
    programs: Mapping[str, Program], small: bool
) -> Iterator[tuple[str, Ratio, float, list[float]]]:
    """Of each program its ratio to the first one, its seconds and its losses."""
    losses: dict[str, list[float]] = {name: [] for name in programs}
    seconds = in_turn(
        {
            name: lambda own=losses[name], run=program.run: own.append(run())
            for name, program in programs.items()
        },
        8 if small else 30,
    )
    base = next(iter(seconds.values()))
    for name, own in seconds.items():
        yield name, ratio(own, base), median(own), losses[name]


def _untrained(rows: list[Found], key: str) -> str | None:
    """The rows whose loss did not fall."""
    names = ", ".join(row[key] for row in rows if not row["last_loss"] < row["first_loss"])
    return f"the loss does not fall: {names}" if names else None
