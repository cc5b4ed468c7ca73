"""The benchmarks run, compare what they say they compare, and say what is missing."""

from __future__ import annotations

import cProfile
import importlib.util
import json
import math
import os
import pstats
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import gshard
from benchmarks import first_step, gpu, gpu_ranks, gpu_rows, gpu_sections, quantized
from benchmarks.advice import spearman
from benchmarks.gpu import SCHEMA, SECTIONS, section, write
from benchmarks.groups import ProcessGroup
from benchmarks.models import mlp
from benchmarks.peers import torch_version
from benchmarks.processes import mesh_of
from benchmarks.programs import by_gshard
from benchmarks.step import ONE, _line, cell, table
from benchmarks.timing import ratio
from benchmarks.traces import overlap_of, read_trace
from gshard.analysis.aot.target import parse_target
from gshard.analysis.calibration import read_calibration
from gshard.analysis.hlo import read_program
from gshard.checkpoint.bucket import Bucket
from gshard.train.tracing import paused_collector
from tests.checkpoint.stores.servers import serving

ROOT = Path(__file__).parents[1]


def run(*args, timeout=600, **variables):
    command = [sys.executable, "-m", *args]
    env = os.environ | {"JAX_PLATFORMS": "cpu"} | variables
    env.pop("XLA_FLAGS", None)
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )
    return done.returncode, done.stdout + done.stderr


def torch_python():
    """A Python with PyTorch; without one the test is skipped."""
    python = os.environ.get("GSHARD_TORCH_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip("PyTorch is not installed; GSHARD_TORCH_PYTHON= names a Python that has it")
    return python


@pytest.mark.slow
def test_the_trace_of_one_more_array_calls_little_more_python_than_that_of_gspmd():
    """Counted, so that it is the same on every machine."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    mesh = gshard.make_mesh(devices=jax.devices()[: first_step.DEVICES])

    def calls(make, layers):
        trace = make(first_step.leaves(layers), "os", tx, mesh)
        jax.clear_caches()
        profile = cProfile.Profile()
        with paused_collector():  # which would call what waits for the end of an object
            profile.runcall(trace)
        return pstats.Stats(profile).total_calls

    ours, theirs = (
        calls(make, 10) - calls(make, 6) for make in (first_step.by_gshard, first_step.by_gspmd)
    )
    assert ours < 1.39 * theirs, (ours, theirs)


@pytest.mark.slow
def test_the_first_step_is_compared_by_stage():
    models = ("--models", "gpt-scan", "--layers", "2", "--levels", "os", "--rounds", "2")
    code, said = run("benchmarks.first_step", *models)
    assert code == 0, said
    for stage in ("trace", "lower", "compile", "all"):
        assert said.count(f"{stage} ") == 1


@pytest.mark.slow
def test_the_cost_of_metrics_is_measured():
    code, said = run("benchmarks.metrics", "--rounds", "3", "--devices", "2")
    assert code == 0, said
    assert said.count("ms a step; with metrics x") == 2


def test_bounds_of_a_ratio_hold_its_median_as_often_as_they_say():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        times = rng.lognormal(mean=math.log(1.3), sigma=0.4, size=30)
        found = ratio(list(times), [1.0] * 30)
        assert found.low <= found.median <= found.high
        held += found.low <= 1.3 <= found.high
    assert (
        0.94 * 400 <= held
    )  # bounds from order statistics hold at least 95 %, less what 400 allow
    assert held < 400


@pytest.mark.parametrize("rounds", [1, 5, 6])
def test_few_rounds_have_no_bounds(rounds):
    found = ratio([float(i + 1) for i in range(rounds)], [1.0] * rounds)
    assert math.isinf(found.low) == math.isinf(found.high) == (rounds < 6)
    assert ("no bounds: fewer than 6 rounds" in str(found)) == (rounds < 6)
    assert rounds < 6 or found[1:] == (1.0, 6.0)


def test_ranks_are_correlated():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 1e9]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # Ties have the mean of their ranks, 1.5 here: the covariance is 4.5, the variances 4.5 and 5.
    assert spearman([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)


def test_a_cell_compares_every_level_with_gspmd_and_one_device():
    lines = list(cell("mlp", 2, 1, rounds=6, levels=("dp", "p_g_os")))
    assert [line.level for line in lines] == ["dp", "p_g_os"]
    for line in lines:
        for found in (line.to_gspmd, line.to_one):
            assert 0 < found.low <= found.median <= found.high
        assert line.temporary > 0 and line.temporary_gspmd > 0
    assert lines[0].to_dp.median == 1
    assert table(lines).row_count == 2


def test_the_baseline_that_is_faster_counts_for_its_memory_too():
    seconds = {ONE: [1.0] * 6, "dp": [1.0] * 6, "p_g_os": [1.0] * 6}
    seconds |= {"gspmd p_g_os False": [1.0] * 6, "gspmd p_g_os True": [3.0] * 6}
    temporary = dict(zip(seconds, (0, 0, 50, 100, 10), strict=True))
    line = _line(("gpt", 1, 4, 1, "p_g_os"), seconds, temporary)
    assert (line.to_gspmd.median, line.temporary_gspmd) == (1.0, 100)


def test_fewer_devices_than_asked_for_are_an_error():
    assert mesh_of(3).size == 3
    with pytest.raises(SystemExit, match=r"9 devices .* has 8\. Give XLA_FLAGS=--xla_force_host"):
        next(cell("mlp", 9, 1, rounds=1, levels=("dp",)))


def test_runs_of_other_lengths_are_not_compared():
    about = {"seed": 0, "last": 1.0, "seconds": 1.0}
    runs = [
        about | {"row": row, "steps": steps, "devices": devices, "validation": validation}
        for row, steps, devices, validation in (
            ("float32", 500, 8, 1.5),
            ("wire int8, int8", 500, 8, 1.53),
            ("float32", 10, 8, 5.0),
            ("float32", 500, 4, 3.0),
        )
    ]
    found = quantized.table(runs, 500, 8)
    assert [list(column.cells) for column in found.columns][1:5:3] == [
        ["1", "1"],
        ["+0.00 %", "+2.00 %"],
    ]


@pytest.mark.slow
def test_the_same_over_two_processes(tmp_path):
    out = tmp_path / "step.json"
    given = (
        "--models mlp --devices 4 --examples 2 --processes 2 --levels os p_g_os --rounds 6".split()
    )
    code, said = run("benchmarks.step", *given, "--json", str(out))
    assert code == 0, said
    found = json.loads(out.read_text())
    assert [(c["processes"], c["level"]) for c in found["cells"]] == [(2, "os"), (2, "p_g_os")]
    assert found["machine"]["jax"]
    code, said = run("benchmarks.step", "--processes", "3", "--devices", "4")
    assert code != 0 and "4 devices do not divide over 3 processes" in said


def test_a_process_that_ends_is_reported_with_its_output():
    group = ProcessGroup("benchmarks.no_such_program", [], 2)
    with pytest.raises(SystemExit, match="no_such_program"):
        group.step()


def test_without_pytorch_the_extra_is_named(tmp_path):
    if importlib.util.find_spec("torch") is not None:
        pytest.skip("PyTorch is installed")
    with pytest.raises(SystemExit, match=r"(?s)pip install 'gshard\[peers\]'.*--torch-python"):
        torch_version(sys.executable)


def test_a_python_that_is_not_there_is_named():
    with pytest.raises(SystemExit, match="--torch-python /no/python does not run"):
        torch_version("/no/python")


def event(name, start, seconds, thread, **args):
    span = {"ts": 1e6 * start, "dur": 1e6 * seconds}
    return {"ph": "X", "pid": 1, "tid": thread, "name": name, "args": args} | span


def test_overlap_on_the_streams_of_a_gpu():
    """Seconds 1 to 11 communicate, 4 to 8 and 6 to 13 compute: 7 of 10 are overlapped."""
    threads = ["Stream #1(Compute)", "Stream #2(AllGather)", "XLA Modules"]
    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        *(
            {"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": name}}
            for i, name in enumerate(threads)
        ),
        event("ncclDevKernel_AllGather_RING_LL", 1, 5, 1),
        event("an_own_kernel", 6, 5, 1, hlo_op="all-gather-start.2"),
        event("gemm", 4, 4, 0, hlo_op="dot.1"),
        event("loop_fusion", 6, 7, 0, hlo_op="fusion"),
        event("while.3", 0, 20, 0, hlo_op="while.3"),  # contains what is listed on its own
        event("jit_step", 0, 20, 2),
        {"pid": 1},
    ]
    found = overlap_of(events, {"all-gather-start.2"})
    assert found == pytest.approx((1, 10, 7, 9)) and found.share == pytest.approx(0.7)
    assert overlap_of(events[:3], ()).share is None


def test_overlap_in_a_real_trace(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P("x"))
    def step(a):
        return jax.lax.psum(a @ a, "x") + jnp.sin(a)

    a = jnp.ones((8 * 64, 64))
    step(a).block_until_ready()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(tmp_path), profiler_options=options):
        step(a).block_until_ready()
    names = {x.name for x in read_program(step.lower(a).compile().as_text()).collectives}
    assert len(names) == 1
    events = read_trace(tmp_path)
    found = overlap_of(events, names)
    assert found.devices == 8 and found.compute > 0
    # Each of the 8 devices has one all-reduce, so these are not counted twice.
    seconds = [e["dur"] / 1e6 for e in events if e.get("args", {}).get("hlo_op") in names]
    assert len(seconds) == 8 and found.collective == pytest.approx(sum(seconds) / 8)
    assert found.overlapped <= found.collective
    with pytest.raises(FileNotFoundError, match="has written no"):
        read_trace(tmp_path / "none")


def test_every_section_is_a_function():
    assert all(callable(getattr(gpu_sections, name)) for name in SECTIONS)


def test_a_section_that_fails_or_hangs_is_recorded(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(3)\n")
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        assert section("machine", 60, True, 8)["error"] == "it exited with code 3"
    late = section("machine", 0.2, True, 8)
    assert "timed out" in late["error"] and late["seconds"] < 60
    assert "took all the time" in section("machine", -1.0, True, 8)["error"]
    row = {"model": "a|b", "to_jit": ratio([2.0] * 9, [1.0] * 9), "seconds": 0.123456, "off": None}
    done = late | {"error": None, "note": "a note", "rows": [row]}
    report = {"schema": SCHEMA, "machine": None, "small": True, "calibration": None}
    write(tmp_path, report | {"sections": [late, done]})
    page = (tmp_path / "report.md").read_text()
    assert f"**{late['error']}**" in page and "say nothing about GPUs" in page
    assert "| a\\|b | 2.00 (2.00 to 2.00) | 0.1235 |  |" in page
    assert (
        json.loads((tmp_path / "report.json").read_text())["sections"][1]["rows"][0]["off"] is None
    )


def told(tmp_path, monkeypatch, found, *args):
    """What `benchmarks.gpu` does where its sections find this: the calls, and `report.json`."""
    calls = []

    def fake(name, limit, small, devices):
        calls.append((name, small, os.environ.get("XLA_FLAGS")))
        made = {"name": name, "title": name, "seconds": 1.0, "limit": limit, "error": None}
        return made | {"note": None, "rows": []} | found(name, len(calls))

    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.setenv(name, "")  # which is restored after the test
    monkeypatch.setenv("XLA_FLAGS", "--own")
    monkeypatch.setattr(gpu, "section", fake)
    monkeypatch.setattr(sys, "argv", ["gpu", "--output", str(tmp_path), *args])
    gpu.main()
    return calls, json.loads((tmp_path / "report.json").read_text())


GPU = {"platform": "gpu", "devices": 2, "memory": 10**9}


def test_a_gpu_that_starts_late_gets_the_large_models(tmp_path, monkeypatch):
    """Only a machine that is known to have none gets the small ones, compiled in a hurry."""
    late = {"error": "timed out"}
    calls, _ = told(
        tmp_path,
        monkeypatch,
        lambda name, i: late if i == 1 else {"machine": GPU} if name == "machine" else {},
        "--sections",
        "step_time",
    )
    assert calls == [("machine", False, "--own")] * 2 + [("step_time", False, "--own")]
    with pytest.raises(SystemExit, match="no other section is run"):
        told(tmp_path, monkeypatch, lambda *_: late)
    calls, _ = told(tmp_path, monkeypatch, lambda *_: {"machine": {"platform": "cpu", "memory": 1}})
    assert all(small and "level=0" in flags for name, small, flags in calls[3:])


def test_sections_of_an_earlier_report_are_kept(tmp_path, monkeypatch, capsys):
    def found(rate, machine):
        both = {"machine": {"machine": machine}, "calibration": {"calibration": {"link": rate}}}
        return lambda name, _: both.get(name, {}) | {"rows": [{"rate": rate}]}

    told(tmp_path, monkeypatch, found(1, GPU))
    given = "--sections", "calibration"
    _, report = told(tmp_path, monkeypatch, found(2, GPU | {"memory": 10**8}), *given)
    assert [one["name"] for one in report["sections"]] == list(SECTIONS)
    assert [one["rows"][0]["rate"] for one in report["sections"]] == [2, 2] + [1] * 8
    assert report["calibration"] == {"link": 2}
    _, report = told(tmp_path, monkeypatch, found(3, GPU), "--sections", "ranks")
    assert report["calibration"] == {"link": 2}
    assert "kept as" not in capsys.readouterr().out
    _, report = told(tmp_path, monkeypatch, found(4, GPU | {"devices": 4}), *given)
    assert [one["name"] for one in report["sections"]] == ["machine", "calibration"]
    (old,) = tmp_path.glob("report-*.json")
    assert json.loads(old.read_text())["calibration"] == {"link": 2}
    assert old.with_suffix(".md").exists()
    assert f"other versions or other sizes: kept as {old}." in capsys.readouterr().out


def nvidia_smi(folder, monkeypatch, said):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("JAX_PLATFORMS")


def test_what_is_wrong_with_the_gpus_is_in_the_report(tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, "NVIDIA H100, 580.1, 81559, 40000")
    found = gpu_sections.machine(True)
    assert f'JAX uses 0 of 1 NVIDIA GPU: {sys.executable} -m pip install -U "' in found["wrong"]
    rows = {row["name"]: row["value"] for row in found["rows"]}
    assert rows["GPU memory"].startswith("other programs hold GPU 0: 41.9 GB of 85.5 GB: end the")
    assert found["machine"]["driver"] == "580.1"


def test_ranks_say_that_a_gpu_is_for_one_process(tmp_path, monkeypatch):
    gpu_sections.refuse_exclusive_gpus()  # none
    nvidia_smi(tmp_path, monkeypatch, "Exclusive_Process")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(RuntimeError, match="exclusive-process mode: `nvidia-smi -c DEFAULT`"):
        gpu_sections.refuse_exclusive_gpus()


def test_ranks_share_the_first_visible_gpu(monkeypatch):
    assert "XLA_FLAGS" not in gpu_ranks.variables(0)  # on the CPU
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("XLA_FLAGS", "--own")
    found = gpu_ranks.variables(3)
    assert (found["CUDA_VISIBLE_DEVICES"], found["NCCL_HOSTID"]) == ("2", "machine-3")
    assert found["XLA_FLAGS"] == "--own --xla_gpu_shard_autotuning=false"


def test_a_row_that_fails_leaves_the_others():
    rows, late = [], SystemExit("late:\na\nb")
    raised = [None, ValueError("of\nthis"), SystemExit("ended:\nMyError: x\nb"), late]
    for i, error in enumerate(raised):
        with gpu_rows.tried(rows, model=f"m{i}", level="os"):
            if error:
                raise error
            rows.append({"model": "m0", "level": "os", "loss": 1.0})
    errors = [None, "ValueError: of this", "SystemExit: ended: MyError: x", "SystemExit: late: b"]
    assert [row.get("error") for row in rows] == errors
    assert gpu_rows.failed(rows, None, "and more") == (
        f"m1 os: {errors[1]}; m2 os: {errors[2]}; m3 os: {errors[3]}; and more"
    )
    assert gpu_rows.done(rows) == rows[:1] and gpu_rows.failed(rows[:1]) is None


def test_planned_rows_have_the_time_that_is_left(monkeypatch):
    given = []

    def fake(*args, **more):
        given.append((args[1], more["devices"]))
        return ({"model": "a", "level": "b"}, "killed", "") if len(given) == 1 else ({}, "late", "")

    monkeypatch.setattr(gpu_sections, "run_probe", fake)
    *_, found = gpu_sections.planned(False, 4, time.time() + 65)
    assert len(given) == 8 and all(55 < s <= 60 and n == 4 for s, n in given)
    assert found["rows"][:2] == [
        {"model": "a", "level": "b"},
        {"model": "gpt-scan", "level": "p_g_os", "error": "RuntimeError: killed"},
    ]
    *_, found = gpu_sections.planned(True, 4, time.time() + 600)
    assert given[-1][0] == 120
    *_, found = gpu_sections.planned(True, 4, time.time())
    assert "left out: earlier rows took all the time" in found["wrong"]


def test_a_case_of_ranks_that_ends_its_processes_leaves_the_others(monkeypatch):
    class Group:
        begun, stopped = [], []

        def __init__(self, module, args, size):
            self.begun.append(args[0])
            self.todo = list(gpu_ranks.cases(size))
            self.todo = self.todo[self.todo.index(args[0]) :]

        def step(self, seconds):
            case = self.todo.pop(0)
            if case == "os_g":
                raise SystemExit("a process of the benchmark ended:\nRuntimeError: NCCL failed")
            losses = [1.0, math.nan if case == "p_g_os" else 1.0]
            return [{"case": case, "loss": x, "loss_off": 0, "params_off": 0} for x in losses]

        def stop(self):
            self.stopped.append(self)

    monkeypatch.setattr(gpu_sections, "ProcessGroup", Group)
    *_, found = gpu_sections.ranks(True, time.time() + 600)
    assert Group.begun == ["dp", "p_g_os"] and len(Group.stopped) == 1
    assert [row["case"] for row in found["rows"]] == list(gpu_ranks.cases(4))
    ended = "os_g: SystemExit: a process of the benchmark ended: RuntimeError: NCCL failed"
    assert found["wrong"] == f"{ended}; not those of plain jit: p_g_os"


def test_processes_use_the_first_two_visible_gpus(monkeypatch):
    def fake(seconds, gpus=None):
        if gpus is None:
            raise OSError("no port")
        return {"sums": [3.0, 3.0] if gpus == "2,5" else [gpus]}

    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5,7")
    monkeypatch.setattr(gpu_sections, "run_probe", lambda *_: ({"platform": "gpu"}, "", ""))
    monkeypatch.setattr(gpu_sections, "probe_two_processes", fake)
    *_, found = gpu_sections.processes(True)
    assert found["wrong"] == "two on the CPU (Gloo): OSError: no port"
    assert found["rows"][1]["processes"] == "two GPUs (NCCL)"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    *_, found = gpu_sections.processes(True)
    assert found["wrong"].endswith("; wrong sums: two GPUs (NCCL)")


@pytest.mark.parametrize("devices", [3, 5, 8])
def test_examples_divide_over_any_number_of_devices(monkeypatch, devices):
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    problem, examples = gpu_sections._sized("mlp", True)
    assert examples % devices == 0 and 16 <= examples < 16 + devices
    assert len(problem.batch(examples)) == examples


@pytest.mark.parametrize("case", ["dp", "p_g_os, int8 wire", None])
def test_what_differs_from_plain_jit_is_said(case):
    row = {"case": case} if case else {"model": "mlp", "level": "os"}
    row |= {"loss_off": 0.0, "params_off": 0.0, "between_ranks": 0.0}
    assert gpu_rows.unlike_jit([row]) is None
    name = case or "mlp at os"
    for key in ("loss_off", "params_off", "between_ranks"):
        for value in (0.7, math.nan):
            assert gpu_rows.unlike_jit([row | {key: value}]) == f"not those of plain jit: {name}"
    coarse = row | {"loss_off": 0.009, "params_off": 0.4}  # which only 8 bits may have
    assert (gpu_rows.unlike_jit([coarse]) is None) == (case == "p_g_os, int8 wire")


def test_a_loss_that_is_not_a_number_is_far():
    assert gpu_ranks.loss_distance([1.0, 1.1], [1.0, 1.0]) == pytest.approx(0.1)
    assert math.isnan(gpu_ranks.loss_distance([1.0, math.nan, 1.0], [1.0, 1.0, 1.0]))


def test_a_batch_that_is_read_late_is_said(monkeypatch):
    mesh = gshard.make_mesh()
    assert gpu_sections.one_buffer(mesh, True)["loss"] == 8

    class Late:
        def __init__(self, batch):
            self.batch = batch

        def __float__(self):
            return float(self.batch.mean())

    def step(state, batch):
        return state, {"loss": Late(batch)}

    monkeypatch.setattr(gshard, "make_train_step", lambda *_: step)
    with pytest.raises(RuntimeError, match="with an array for each batch"):
        gpu_sections.one_buffer(mesh, True)


def test_state_that_is_not_offloaded_is_said():
    stored = {"device": "1 GB in device", "host": "1 GB in pinned_host"}
    rows = [{"optimizer state": name, "stored": at} for name, at in stored.items()]
    assert gpu_rows.not_offloaded(rows) is None
    rows[1]["stored"] = "1 GB in device"
    assert gpu_rows.not_offloaded(rows) == "state for the host: 1 GB in device"


def test_what_is_missing_in_a_trace_is_said():
    row = {"level": "dp", "devices": 4, "compute_seconds": 1.0, "collective_seconds": 1.0}
    assert gpu_rows.not_traced([row], 4) is None
    assert gpu_rows.not_traced([row | {"devices": 1}], 4) == "the trace of dp has 1 of 4 devices"
    silent = row | {"compute_seconds": 0.0, "collective_seconds": 0.0}
    assert gpu_rows.not_traced([silent], 4) == (
        "the trace of dp has no computation and no collectives"
    )
    assert gpu_rows.not_traced([silent | {"devices": 1, "compute_seconds": 1.0}], 1) is None


def test_what_does_not_train_is_said():
    row = {"model": "mlp", "dtype": "float8", "first_loss": 2.0, "last_loss": 1.0, "skipped": 0}
    assert gpu_rows.untrained([row, {"model": "gpt", "error": "x"}]) is None
    for last in (2.0, math.nan):
        said = gpu_rows.untrained([row | {"last_loss": last}])
        assert said == "mlp in float8: the loss does not fall"
    assert gpu_rows.untrained([row | {"skipped": 3}]) == "mlp in float8: 3 steps skipped"


def test_skipped_steps_of_a_program_are_counted():
    problem = mlp(8, 1)
    bad = problem._replace(loss_fn=lambda params, x: jnp.sqrt(-1 - problem.loss_fn(params, x)))
    program = by_gshard(bad, 8, "dp", gshard.make_mesh())
    assert program.skipped() == 0
    program.run(), program.run()
    assert program.skipped() == 2


@pytest.mark.slow
def test_the_gpu_check_runs_on_eight_virtual_devices(tmp_path):
    code, said = run("benchmarks.gpu", "--output", str(tmp_path), timeout=1500)
    assert code == 0, said
    assert "small models: the figures say nothing about GPUs" in said
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["schema"] == SCHEMA and found["small"] and found["machine"]["devices"] == 8
    rates = {"bfloat16_flops", "float32_flops", "memory_bandwidth", "collective_start", "link"}
    about = {"device_kind", "jax", "small", "devices"}
    assert set(found["calibration"]) == rates | about
    assert found["calibration"]["devices"] == 8
    read = read_calibration(str(tmp_path / "report.json"), parse_target("cpu:8"))
    assert all(getattr(read, name) == found["calibration"][name] > 0 for name in rates)
    rows = {one["name"]: one["rows"] for one in found["sections"]}
    assert list(rows) == list(SECTIONS)
    assert all(list(row) == list(of[0]) for of in rows.values() for row in of)  # one table each
    levels = [row["level"] for row in rows["correctness"]]
    assert levels == [*2 * ["dp", "os", "os_g", "p_g_os"], "dp"]
    assert {row["program"] for row in rows["step_time"]} == {"jit", "dp", "p_g_os"}
    assert 0.5 < rows["planned"][0]["planned_to_compiler"] < 2
    assert [row["case"] for row in rows["ranks"]] == list(gpu_ranks.cases(gpu_sections.RANKS))
    assert 0 < rows["ranks"][-1]["params_off"]  # what is sent in 8 bits is rounded
    assert "pinned_host" in rows["offload"][1]["stored"]
    for row in rows["overlap"]:
        assert row["collectives"] > 0 and row["collective_seconds"] > 0 and 0 <= row["share"] <= 1
    assert [row["dtype"] for row in rows["dtypes"]] == ["bfloat16", "bfloat16", "float8"]
    assert not any("error" in row for of in rows.values() for row in of)
    assert "| gpt-scan-remat | p_g_os |" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_pytorch_trains_what_gshard_trains(tmp_path):
    python = torch_python()
    out = tmp_path / "peers.json"
    code, said = run(
        "benchmarks.peers",
        "--rounds",
        "6",
        "--examples",
        "4",
        "--torch-python",
        python,
        "--json",
        out,
    )
    assert code == 0, said
    cells = json.loads(out.read_text())["cells"]
    assert [c["program"] for c in cells][:3] == ["DDP", "DDP + ZeRO", "FSDP2"]
    losses = [c["loss"] for c in cells]
    assert max(losses) - min(losses) <= 1e-4 * statistics.mean(losses)
    assert all(c["memory"] > 0 for c in cells)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux")
def test_a_checkpoint_takes_the_memory_of_its_local_shard(tmp_path):
    """And a buffer: saving holds a copy at most, restoring the new state and its copy."""
    code, said = run("benchmarks.checkpoints", str(tmp_path), "--megabytes", "120", "--rounds", "1")
    assert code == 0, said
    words = said.splitlines()[-1].split()
    save, restore = float(words[words.index("save") + 1]), float(words[words.index("restore") + 1])
    assert save < 1.2 and restore < 2.2, said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_checkpoints_are_measured_in_a_store_too(tmp_path):
    with serving("gs") as server:
        address = server.address("benchmark")
        given = ["--megabytes", "20", "--rounds", "1", "--store", address]
        code, said = run("benchmarks.checkpoints", tmp_path, *given, **server.environment)
        assert code == 0, said
        lines = [line.split() for line in said.splitlines() if line.startswith("store, ")]
        assert len(lines) == 5 and all(float(line[-7]) > 0 for line in lines), said
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environment.items():
                patch.setenv(name, value)
            assert not Bucket(address).find("")  # nothing is left


@pytest.mark.slow
def test_the_checkpoints_of_pytorch_are_measured_too(tmp_path):
    python = torch_python()
    given = ["--megabytes", "20", "--rounds", "1", "--torch-python", python]
    code, said = run("benchmarks.checkpoints", tmp_path, *given)
    assert code == 0, said
    assert said.count("torch.distributed.checkpoint, ") == 2
    code, said = run("benchmarks.checkpoints", tmp_path, *given[:-1], "/bin/false")
    assert code == 1 and "--torch-python failed" in said
    assert not list(tmp_path.iterdir())
