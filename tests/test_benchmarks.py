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
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import gshard
from benchmarks import first_step, gpu_ranks, gpu_sections
from benchmarks.advice import spearman
from benchmarks.gpu import SCHEMA, SECTIONS, section, write
from benchmarks.groups import ProcessGroup
from benchmarks.peers import torch_version
from benchmarks.step import cell, table
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
    assert ours < 1.32 * theirs, (ours, theirs)


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


def test_a_section_that_fails_or_hangs_is_recorded(tmp_path):
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
    assert [row["level"] for row in rows["correctness"]] == 2 * ["dp", "os", "os_g", "p_g_os"]
    assert {row["program"] for row in rows["step_time"]} == {"jit", "dp", "p_g_os"}
    assert 0.5 < rows["planned"][0]["planned_to_compiler"] < 2
    assert [row["case"] for row in rows["ranks"]] == list(gpu_ranks.cases(gpu_sections.RANKS))
    assert 0 < rows["ranks"][-1]["params_off"]  # what is sent in 8 bits is rounded
    assert "pinned_host" in rows["offload"][1]["stored"]
    for row in rows["overlap"]:
        assert row["collectives"] > 0 and row["collective_seconds"] > 0 and 0 <= row["share"] <= 1
    assert [row["dtype"] for row in rows["dtypes"]] == ["bfloat16", "bfloat16", "float8"]
    assert not any(row["error"] for row in rows["dtypes"])
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
