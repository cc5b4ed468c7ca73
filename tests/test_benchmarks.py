"""The benchmarks run, compare what they say they compare, and say what is missing."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.groups import ProcessGroup
from benchmarks.peers import torch_version
from benchmarks.step import cell, table
from benchmarks.timing import ratio

ROOT = Path(__file__).parents[1]


def run(*args, timeout=600):
    command = [sys.executable, "-m", *args]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    env.pop("XLA_FLAGS", None)
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )
    return done.returncode, done.stdout + done.stderr


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


def test_without_a_gpu_nothing_is_measured():
    code, said = run("benchmarks.gpu")
    assert code == 0 and "skipped, JAX finds no GPU" in said


@pytest.mark.slow
def test_pytorch_trains_what_gshard_trains(tmp_path):
    python = os.environ.get("GSHARD_TORCH_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        pytest.skip("PyTorch is not installed; GSHARD_TORCH_PYTHON= names a Python that has it")
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
