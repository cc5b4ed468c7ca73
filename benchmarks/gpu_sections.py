"""What `benchmarks.gpu` measures: each section is a function that runs in a process of its own.

A section yields after every row, so that those before a failure are kept: a dict of `rows` (dicts),
a `note` that says what they are, and `wrong`: what should not be so, or None. A row that fails has
its `error` and the others go on.
"""

from __future__ import annotations

import collections
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import optax

import gshard
from benchmarks.calibration import calibration  # noqa: F401 (a section, found by its name)
from benchmarks.footprint import compiled_peak
from benchmarks.gpu_ranks import RANKS, cases, distance, loss_distance
from benchmarks.gpu_rows import (
    Found,
    done,
    failed,
    not_offloaded,
    not_traced,
    row_seconds,
    tried,
    unlike_jit,
    untrained,
)
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
from gshard.cli.doctor.devices import (
    probe_two_processes,
    run_probe,
    sum_over_processes,
    unused_devices,
)
from gshard.cli.doctor.machine import hardware
from gshard.distributed.env_vars import visible_gpus
from gshard.sharding.level import LEVELS

JIT = "jit"
PLANNED = [("gpt-scan", level) for level in reversed(LEVELS)]
PLANNED += [(name, level) for name in ("gpt-remat", "mlp") for level in ("dp", "p_g_os")]
_TRACED = 3  # steps, and as many before them
_LARGE = 60 * 10**9  # bytes of a device that has room for the examples of the large models


def run(section: str, small: bool, devices: int, until: float) -> Any:
    """Runs a section by its name, on so many virtual devices where there is no accelerator.

    `until` is the `time.time()` at which the section is ended.
    """
    with suppress(gshard.GShardError):  # XLA_FLAGS says how many
        gshard.virtual_devices(devices)
    given = {"planned": {"devices": devices, "until": until}, "ranks": {"until": until}}
    return globals()[section](small, **given.get(section, {}))


def machine(small: bool) -> Found:
    """The devices, their memory, all versions, and what is wrong with the machine."""
    device = jax.devices()[0]
    here, checks = hardware()
    checks += unused_devices(device.platform, jax.local_device_count(), here)
    row = {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": jax.device_count(),
        "memory": memory_of(device),
        "driver": here.driver or None,
        "runtime": device.client.platform_version.removeprefix("PJRT C API\n").splitlines()[0],
    }
    rows = [{"name": name, "value": value} for name, value in (row | versions()).items()]
    pip, wrong = f"{sys.executable} -m pip ", []  # another one may be first in PATH
    for check in checks:
        if check.ok != "ok":
            fix = check.fix.replace("pip ", pip) if check.fix.startswith("pip ") else check.fix
            rows.append({"name": check.name, "value": f"{check.found}: {fix}"})
            wrong += [rows[-1]["value"]] if check.ok == "fail" else []
    return {"rows": rows, "machine": row | versions(), "wrong": "; ".join(wrong) or None}


def correctness(small: bool) -> Iterator[Found]:
    """Training at every level on all devices, next to plain `jit` on one."""
    mesh, steps, rows = gshard.make_mesh(), 3, []
    note = "largest relative difference of a loss; distance of parameters over what training moved"
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
            with tried(rows, model=name, level=JIT):
                plain = on_one_device(problem, examples)
                losses = [plain.run() for _ in range(steps)]
                wanted = plain.state()[0]
                for level in LEVELS:
                    with tried(rows, model=name, level=level):
                        program = by_gshard(problem, examples, level, mesh, min_shard_size=0)
                        own = [program.run() for _ in range(steps)]
                        off = distance(program.state()[0], wanted, problem.params)
                        about = {"model": name, "level": level, "loss": own[-1]}
                        about["loss_off"] = loss_distance(own, losses)
                        rows.append(about | {"params_off": off})
                    yield {"rows": rows, "note": note, "wrong": unlike_jit(rows)}
    with tried(rows, model="one buffer", level="dp"):
        rows.append(one_buffer(mesh, small))
    yield {"rows": rows, "note": note, "wrong": unlike_jit(rows)}


def one_buffer(mesh: Any, small: bool) -> Found:
    """A row of `correctness`: batches of one buffer, filled again while the step may still read it.

    Raises RuntimeError if a loss is not exactly that of an array of its own.
    """
    steps, total = 8, 2**16 if small else 2**25
    buffer = np.empty((mesh.size, total // mesh.size), np.float32)

    def refilled() -> Iterator[np.ndarray]:
        for i in range(steps):
            buffer[:] = i + 1
            yield buffer

    def losses(batches: Iterable[np.ndarray], read: Callable[[jax.Array], Any]) -> list[float]:
        params = {"scale": np.ones(1, np.float32)}
        state, plan = gshard.shard_train_state((params, optax.sgd(0.0)), mesh, "dp")
        step = gshard.make_train_step(lambda p, x: p["scale"][0] * x.mean(), plan)
        found = []
        for batch in batches:
            state, metrics = step(state, batch)
            found.append(read(metrics["loss"]))
        return [float(x) for x in found]

    wanted = losses((np.full_like(buffer, i + 1) for i in range(steps)), float)  # waits for each
    own = losses(refilled(), lambda x: x)
    if own != wanted:
        raise RuntimeError(f"losses {own}, and {wanted} with an array for each batch")
    about = {"model": "one buffer", "level": "dp", "loss": own[-1]}
    return about | {"loss_off": 0.0, "params_off": 0.0}


def step_time(small: bool) -> Iterator[Found]:
    """A step on one device next to plain `jit`: what gshard costs."""
    mesh, rows = gshard.make_mesh(devices=jax.devices()[:1]), []
    note = "on one device; ratios with 95 % bounds; bytes of temporaries"
    for name in ("mlp", "gpt-scan"):
        with tried(rows, model=name):
            problem, examples = _sized(name, small)
            programs = {JIT: on_one_device(problem, examples)}
            for level in ("dp", "p_g_os"):
                programs[level] = by_gshard(problem, examples, level, mesh)
            for key, to, seconds, _ in _timed(programs, small):
                about = {"model": name, "program": key, "seconds": seconds, "to_jit": to}
                rows.append(about | {"temporary": programs[key].temporary})
        yield {"rows": rows, "note": note, "wrong": failed(rows)}


def planned(small: bool, devices: int, until: float) -> Iterator[Found]:
    """Planned peak and time of models and levels on all devices, each in its own process."""
    rows = []
    note = "bytes and seconds; device_peak is the allocator's, autotuning included"
    for model, level in PLANNED[:1] if small else PLANNED:
        with tried(rows, model=model, level=level):
            given = {"model": model, "level": level, "small": small, "devices": devices}
            probe = f"{__name__}:planned_level"
            found, trouble, _ = run_probe(probe, row_seconds(until), **given)
            rows += [found] if found else []
            if trouble:
                raise RuntimeError(trouble)
        yield {"rows": rows, "note": note, "wrong": failed(rows)}


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
    # Before the compiler's figure, which may compile again. The first device had full moments at
    # the start, as `optax` makes them, so the last one tells more of the step.
    stats = jax.local_devices()[-1].memory_stats() or {}
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


def offload(small: bool) -> Iterator[Found]:
    """The optimizer state in host memory: where it is, that it trains also while it is saved."""
    mesh, rows, programs = gshard.make_mesh(), [], {}
    problem, examples = _sized("gpt-scan", small)
    for name in ("device", "host"):
        with tried(rows, **{"optimizer state": name}):
            given = {"offload": name == "host", **_shard(small)}
            program = by_gshard(problem, examples, "os_g", mesh, **given)
            program.run()  # one that fails leaves the other
            programs[name] = program
    for name, _, seconds, losses in _timed(programs, small):
        with tried(rows, **{"optimizer state": name}):
            state = jax.tree.leaves(programs[name].state()[1])
            kinds: dict[str, int] = collections.Counter()
            for x in state:
                kinds[x.sharding.memory_kind] += x.nbytes
            stored = ", ".join(f"{bytes_of(size)} in {kind}" for kind, size in kinds.items())
            about = {"optimizer state": name, "stored": stored, "seconds": seconds}
            about["while_saved"] = _seconds_while_saved(programs[name])
            rows.append(about | _trained(losses, programs[name]))
        yield {"rows": rows}
    yield {"rows": rows, "wrong": failed(rows, untrained(rows), not_offloaded(rows))}


def _seconds_while_saved(program: Program) -> float:
    """Seconds of a step that takes the memory of a state which is being written."""
    times = []
    with tempfile.TemporaryDirectory() as folder, gshard.Checkpointer(folder) as checkpointer:
        for i in range(2):
            checkpointer.save(i, program.train_state())
            began = time.perf_counter()
            program.run()
            times.append(time.perf_counter() - began)
    return max(times)


def processes(small: bool) -> Iterator[Found]:
    """Two processes that start and sum over Gloo, and over NCCL where there are two GPUs."""
    rows, two = [], [3.0, 3.0]
    starts: dict[str, tuple[Callable[[], list[float]], list[float]]] = {
        "two on the CPU (Gloo)": (lambda: probe_two_processes(60)["sums"], two)
    }
    with tried(rows, processes="devices"):
        found, trouble, _ = run_probe("probe_devices", 60)
        if trouble:
            raise RuntimeError(trouble)
        gpus = visible_gpus()[:2] if found["platform"] == "gpu" else []
        if len(gpus) == 2:
            starts["two GPUs (NCCL)"] = lambda: probe_two_processes(60, ",".join(gpus))["sums"], two
        elif found["platform"] == "gpu":
            starts["one GPU (jax.distributed)"] = _alone, [1.0]
    for name, (start, wanted) in starts.items():
        with tried(rows, processes=name):
            began = time.perf_counter()
            about = {"processes": name, "sums": start(), "wanted": wanted}
            rows.append(about | {"seconds": time.perf_counter() - began})
        wrong = ", ".join(row["processes"] for row in done(rows) if row["sums"] != row["wanted"])
        yield {"rows": rows, "wrong": failed(rows, wrong and f"wrong sums: {wrong}")}


def _alone() -> list[float]:
    jax.distributed.initialize(free_address(), 1, 0)
    return [sum_over_processes()]


def ranks(small: bool, until: float) -> Iterator[Found]:
    """Four processes that share a GPU, or have a CPU device each, next to plain `jit`."""
    group, rows = None, []
    note = "largest relative difference of a loss; distance of parameters over what training moved"
    refuse_exclusive_gpus()
    try:
        for name in cases(RANKS):
            with tried(rows, case=name):
                seconds = row_seconds(until)
                group = group or ProcessGroup("benchmarks.gpu_ranks", [name], RANKS)
                try:
                    found = group.step(seconds)
                except SystemExit:
                    group = None  # it has stopped; the next case gets new processes
                    raise
                spread = float(np.ptp([row["loss"] for row in found]))  # NaN if one is NaN
                rows.append(found[0] | {"between_ranks": spread})
            yield {"rows": rows, "note": note, "wrong": unlike_jit(rows)}
    finally:
        if group is not None:
            group.stop()


def refuse_exclusive_gpus() -> None:
    """Raises RuntimeError where the driver lets only one process at a time use a GPU."""
    program = shutil.which("nvidia-smi") if visible_gpus() else None
    if program is not None:
        ask = [program, "--query-gpu=compute_mode", "--format=csv,noheader"]
        said = subprocess.run(ask, capture_output=True, text=True, timeout=60).stdout
        if "Exclusive" in said:
            fix = "`nvidia-smi -c DEFAULT` lets several processes use one"
            raise RuntimeError(f"a GPU is in exclusive-process mode: {fix}")


def overlap(small: bool) -> Iterator[Found]:
    """A trace of three steps: how much of the collectives' time computation overlaps."""
    mesh, rows = gshard.make_mesh(), []
    problem, examples = _sized("gpt-scan", small)
    note = "seconds of a step, mean over devices; share: collective time that computation overlaps"
    note = note if mesh.size > 1 else "one device: there are no collectives"
    note = f"{note}; XLA uses no CUDA graphs while it is profiled"
    for level in ("dp", "p_g_os"):
        with tried(rows, level=level):
            program = by_gshard(problem, examples, level, mesh, **_shard(small))
            for _ in range(_TRACED):
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
                    "devices": found.devices,
                    "collectives": len(collectives),
                    "asynchronous": sum(x.asynchronous for x in collectives),
                    "collective_seconds": found.collective / _TRACED,
                    "overlapped_seconds": found.overlapped / _TRACED,
                    "compute_seconds": found.compute / _TRACED,
                    "share": found.share,
                }
            )
        yield {"rows": rows, "note": note, "wrong": failed(rows, not_traced(rows, mesh.size))}


def dtypes(small: bool) -> Iterator[Found]:
    """bfloat16 and float8, each next to float32."""
    mesh, rows = gshard.make_mesh(), []
    note = "float32 at JAX's default precision, which is TF32 on GPUs"
    for name, dtype in (("mlp", "bfloat16"), ("gpt-scan", "bfloat16"), ("mlp", "float8")):
        with tried(rows, model=name, dtype=dtype):
            problem, examples = _sized(name, small)
            programs = {"float32": by_gshard(problem, examples, "os_g", mesh, **_shard(small))}
            given = {"precision": dtype} if dtype == "bfloat16" else {}
            problem = problem if given else _sized(name, small, float8=True)[0]
            programs[dtype] = by_gshard(problem, examples, "os_g", mesh, **given, **_shard(small))
            _, (_, to, seconds, losses) = _timed(programs, small)
            about = {"model": name, "dtype": dtype, "seconds": seconds, "to_float32": to}
            rows.append(about | _trained(losses, programs[dtype]))
        yield {"rows": rows, "note": note, "wrong": failed(rows, untrained(rows))}


def _sized(name: str, small: bool, float8: bool = False) -> tuple[Problem, int]:
    """A model and the number of its examples, large enough to keep a GPU busy unless small.

    All devices have equally many.
    """
    examples = 16 if small or (memory_of(jax.devices()[0]) or 0) < _LARGE else 64
    examples += -examples % jax.device_count()
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
    base = next(iter(seconds.values()), [])
    for name, own in seconds.items():
        yield name, ratio(own, base), median(own), losses[name]


def _trained(losses: list[float], program: Program) -> Found:
    return {"first_loss": losses[0], "last_loss": losses[-1], "skipped": program.skipped()}
