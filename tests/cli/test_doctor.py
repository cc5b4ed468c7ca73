"""`gshard doctor`: what it says of this machine, and of faults that are really there."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

import gshard
from benchmarks.groups import free_address
from gshard._util.cgroup import memory_limit
from gshard.cli.doctor import devices
from gshard.cli.doctor.devices import reason_in, run_probe, to_install
from gshard.cli.doctor.machine import Hardware, cluster, disks, hardware, met, own_name, written
from gshard.cli.doctor.versions import check_versions, package, variables
from gshard.cli.main import main
from gshard.distributed.rendezvous import LOOPBACK, Address, address
from tests.terminal import on_terminal

ROOT = Path(__file__).parents[2]


def run(*words, path=(), cwd=None, **told):
    """The command in a process of its own; variables that are None are taken out."""
    told = {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]), "XLA_FLAGS": None} | told
    told = {"GSHARD_PROCESS_ID": None, "JAX_PLATFORMS": "cpu"} | told
    environment = {k: v for k, v in (os.environ | told).items() if v is not None}
    words = sys.executable, "-m", "gshard", "doctor", *words
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True)


def fails(done):
    """Names of the checks that fail."""
    return [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if "[fail]" in line]


def by_name(checks):
    return {check.name: check for check in checks}


# ---- the command ---------------------------------------------------------------------------------


def test_this_machine(tmp_path):
    """From another folder, without a home."""
    done = run(cwd=tmp_path, HOME=None)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith(("[ok]   ", "[warn] ", "       fix: ")) for line in lines)
    for name in ("jax", "flax", "devices", "train step", "two processes (Gloo)"):
        assert any(line.startswith(f"[ok]   {name}: ") for line in lines), f"{name}\n{done.stdout}"
    assert "dp, os, os_g, p_g_os on 4 cpu devices: matches one device to " in done.stdout
    assert "\x1b" not in done.stdout + done.stderr and not done.stderr
    assert not list(tmp_path.iterdir())


def test_json_says_the_same():
    done = run("--quick", "--json", XLA_FLAGS="--xla_no_such_flag=1")
    said = json.loads(done.stdout)
    assert done.returncode == 0 and said["ok"] is True
    assert {"name": "gshard", "ok": "ok", "found": gshard.__version__, "fix": ""} in said["checks"]
    assert "devices" not in {check["name"] for check in said["checks"]}  # JAX was not started


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "example:\n  gshard doctor\n" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["0", "-1", "soon", "inf"])
def test_a_time_that_cannot_be(word, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--timeout", word])
    assert ended.value.code == 2 and "--timeout" in capsys.readouterr().err


def test_a_terminal_shows_progress():
    code, out, shown = on_terminal("doctor", "--quick")
    assert code == 0 and "disks ..." in shown
    assert "\x1b" not in out and "disks ..." not in out


# ---- JAX does not start --------------------------------------------------------------------------


def test_a_flag_that_xla_does_not_know():
    done = run(XLA_FLAGS="--xla_no_such_flag=1")
    assert done.returncode == 1 and fails(done) == ["devices"]
    assert "Unknown flag in XLA_FLAGS: --xla_no_such_flag=1\n" in done.stdout
    assert "fix: remove the flag from XLA_FLAGS" in done.stdout


@pytest.mark.parametrize("name", ["cuda", "no_such_platform"])
def test_a_platform_that_is_not_there(name):
    if name == "cuda" and shutil.which("nvidia-smi"):
        pytest.skip("it is there")
    done = run(JAX_PLATFORMS=name)
    assert done.returncode == 1 and fails(done) == ["devices"]
    assert f"fix: JAX_PLATFORMS={name}: unset it" in done.stdout
    assert ('pip install -U "jax[cuda' in done.stdout) == (name == "cuda")
    assert "train step, processes: not tried" in done.stdout


def plugin(folder, body):
    """A plugin of JAX that runs this when JAX starts."""
    place = folder / "jax_plugins" / "ill"
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(f"import os, time\ndef initialize(): {body}\n")
    return folder


def test_a_backend_that_never_starts(tmp_path):
    pids = tmp_path / "pid"
    body = f"open({str(pids)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    began = time.monotonic()
    done = run("--timeout", "10", path=[plugin(tmp_path, body)], JAX_PLATFORMS=None)
    assert time.monotonic() - began < 60
    assert done.returncode == 1 and fails(done) == ["devices"]
    assert "devices: timed out: it had not ended after 10 s" in done.stdout
    with pytest.raises(ProcessLookupError):  # nothing is left of it
        os.kill(int(pids.read_text()), 0)


def test_a_backend_that_ends_the_process(tmp_path):
    done = run(path=[plugin(tmp_path, "os.abort()")], JAX_PLATFORMS=None)
    assert done.returncode == 1 and "devices: it was killed by SIGABRT" in done.stdout


def test_a_probe_that_raises():
    found, trouble, _ = run_probe("probe_two_processes", 60, timeout=-1)
    assert not found and trouble.startswith("GShardError: initialization_timeout=-1 must be")


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        pytest.param("os.abort()", "it was killed by SIGABRT", id="aborts"),
        pytest.param("time.sleep(600)", "timed out: it had not ended after 20 s", id="hangs"),
        pytest.param("sys.exit('NCCL failed')", "SystemExit: NCCL failed", id="exits"),
        pytest.param("yield {'a': object()}", "TypeError: Object of type object", id="no JSON"),
    ],
)
def test_what_a_probe_has_answered_is_kept(tmp_path, monkeypatch, ending, said):
    """Also if it ends badly after its last answer, as in a library that aborts at exit."""
    body = f"    yield {{'a': 1}}\n    yield {{'a': 2}}\n    {ending}\n"
    (tmp_path / "late.py").write_text(f"import os, sys, time\ndef probe():\n{body}")
    monkeypatch.syspath_prepend(tmp_path)
    found, trouble, _ = run_probe("late:probe", 20 if "sleep" in ending else 60)
    assert found == {"a": 2} and trouble.startswith(said)


@pytest.mark.parametrize("line", ["", "not JSON", "[1]", '["ab"]', '{"error": "of another"}'])
def test_a_probe_without_an_answer(tmp_path, monkeypatch, line):
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nprint({line!r}, flush=True)\nos._exit(0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run_probe("probe_devices", 60) == ({}, "it printed no answer", "")


def test_the_line_of_a_log_that_matters():
    log = "I1 fine\n\x1b[31mF1123 00:42:05.115882 7 parse.cc:234] Unknown flag: --x\x1b[0m\nbye\n"
    assert reason_in(log) == "Unknown flag: --x"
    assert reason_in("all is well\n") == ""


# ---- numbers -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::gshard.GShardWarning")
def test_numbers_of_every_level():
    found = devices.probe_train_step()
    assert found["where"] == "8 cpu devices"
    assert list(found["levels"]) == ["dp", "os", "os_g", "p_g_os"]
    assert devices.judged(found["levels"], "8").ok == "ok"


@pytest.mark.parametrize("error", [2e-5, math.nan, math.inf])
def test_other_numbers_fail(error):
    check = devices.judged({"os": 1e-8, "os_g": error}, "8 cpu devices")
    assert check.ok == "fail" and "os_g by" in check.found and "os by" not in check.found


# ---- versions ------------------------------------------------------------------------------------


def installed(folder, name, version, *lines):
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir()
    text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    (place / "METADATA").write_text(text + "\n")


def test_an_older_package(tmp_path):
    installed(tmp_path, "flax", "0.10.1")
    done = run("--quick", path=[tmp_path])
    assert done.returncode == 1 and fails(done) == ["flax"]
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("[fail] flax: 0.10.1; "))
    assert "gshard asks for flax>=0." in lines[at]
    assert lines[at + 1].startswith('       fix: pip install -U "flax>=0.')


def test_jaxlib_of_another_jax(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, "jaxlib", "99.0.0")
    check = package("jaxlib")
    assert check.ok == "fail" and "99.0.0; jax asks for jaxlib<=" in check.found


def test_a_plugin_of_another_jax(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, "jax_cuda13_plugin", "0.1.0")
    check = by_name(check_versions())["jax-cuda13-plugin"]
    assert check.ok == "warn" and 'pip install -U "jax[cuda13]==' in check.fix


def test_a_package_that_is_missing():
    check = package("no-such-package")
    assert check.ok == "fail" and "not installed" in check.found


def test_another_python(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, "gshard", "1.0", "Requires-Python: >=99")
    check = by_name(check_versions())["Python"]
    assert check.ok == "fail" and "gshard asks for Python>=99" in check.found


@pytest.mark.parametrize(
    ("specifier", "met"),
    [(">=1.2", True), ("==1.2.*", True), ("==1.2", False), (">1.2,<1.2.3", False), ("~=9", True)],
)
def test_versions_are_compared_as_pip_does(tmp_path, monkeypatch, specifier, met):
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, "numpy", "1.2.3.dev4+local")
    installed(tmp_path, "gshard", "1.0", f"Requires-Dist: numpy{specifier}")
    check = package("numpy")
    assert ("gshard asks" not in check.found) == met


# ---- accelerators --------------------------------------------------------------------------------


def nvidia_smi(folder, monkeypatch, said, code=0):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_gpus_and_who_holds_their_memory(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    rows = "NVIDIA H100, 550.54, 81559, 12\nNVIDIA H100, 550.54, 81559, 40000"
    nvidia_smi(tmp_path, monkeypatch, rows)
    here, checks = hardware(tmp_path)
    assert here == Hardware(nvidia=2, driver="550.54")
    found = by_name(checks)
    assert found["NVIDIA GPUs"].found == "2 (NVIDIA H100), driver 550.54"
    assert found["GPU memory"].found == "other programs hold GPU 1: 41.9 GB of 85.5 GB"
    for chosen, warned in (("0", False), ("", False), ("0, 1", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert ("GPU memory" in by_name(hardware(tmp_path)[1])) == warned


def test_graphics_of_the_processor_beside_a_gpu_are_not_counted(tmp_path, monkeypatch):
    for name in ("kfd", "dri/renderD128", "dri/renderD129"):
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware(tmp_path)[0] == Hardware(amd=2)
    (tmp_path / "dev" / "nvidia0").touch()
    assert hardware(tmp_path)[0] == Hardware(nvidia=1)


def test_a_driver_that_is_broken(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    (tmp_path / "dev" / "nvidiactl").touch()
    words = "Failed to initialize NVML: Driver/library version mismatch"
    nvidia_smi(tmp_path, monkeypatch, words, 18)
    here, (check,) = hardware(tmp_path)
    assert here.nvidia == 1 and check.ok == "fail" and words in check.found


def test_tpu_chips(tmp_path):
    for place, number in (("0000:00:04.0", "0x0063"), ("0000:00:05.0", "0x0042")):
        device = tmp_path / "sys/bus/pci/devices" / place  # a TPU v5e, and Google's network card
        device.mkdir(parents=True)
        (device / "vendor").write_text("0x1ae0\n")
        (device / "device").write_text(f"{number}\n")
    assert hardware(tmp_path)[0].tpu == 1


def test_a_gpu_that_jax_does_not_use():
    """A real start of JAX, on a machine that is said to have one."""
    _, checks = devices.started(Hardware(nvidia=1, driver="550.54"), 60)
    check = by_name(checks)["unused device"]
    assert check.found.startswith("JAX uses 0 of 1 NVIDIA GPU")
    platforms = os.environ["JAX_PLATFORMS"]  # of the tests
    assert (check.ok, check.fix) == ("warn", "unset JAX_PLATFORMS") and platforms in check.found


CHOSEN = "unset CUDA_VISIBLE_DEVICES, unless you chose these devices"


@pytest.mark.parametrize(
    ("used", "told", "ok", "fix"),
    [
        (0, {}, "fail", 'pip install -U "jax[cuda12]=='),
        (3, {}, "fail", "nvidia-smi"),
        (0, {"CUDA_VISIBLE_DEVICES": "0", "SLURM_LOCALID": "0"}, "fail", "pip install"),
        (1, {"CUDA_VISIBLE_DEVICES": "0"}, "warn", CHOSEN),
        (1, {"CUDA_VISIBLE_DEVICES": "0", "SLURM_LOCALID": "0"}, "ok", ""),
    ],
)
def test_unused_devices(used, told, ok, fix):
    check = devices.unused("nvidia", used, Hardware(nvidia=4, driver="550.54"), told)
    assert check.ok == ok and fix in check.fix and f"JAX uses {used} of 4" in check.found


def test_the_variable_that_hides_devices_is_named():
    told = {"JAX_PLATFORM_NAME": "cpu"}
    check = devices.unused("nvidia", 0, Hardware(nvidia=1), told)
    assert check.fix == "unset JAX_PLATFORM_NAME" and "JAX_PLATFORM_NAME=cpu" in check.found


def test_a_plugin_that_sees_no_gpu(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, "jax_cuda13_plugin", "0.1.0")
    check = devices.unused("nvidia", 0, Hardware(nvidia=1), {"CUDA_VISIBLE_DEVICES": ""})
    assert (check.ok, check.fix) == ("warn", CHOSEN)


def test_what_to_install():
    assert 'pip install -U "jax[cuda13]==' in to_install("nvidia", Hardware(1, "580.1"))
    assert "jax[tpu]==" in to_install("tpu", Hardware())


# ---- variables -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "beside"),
    [
        ("JAX_PLATFORMS", "cpu", True),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "false", True),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=8", True),
        ("CUDA_VISIBLE_DEVICES", "", True),
        ("JAX_DISABLE_JIT", "1", False),
    ],
)
def test_variables_that_switch_something_off(name, value, beside):
    doubted, rest = variables(2, {name: value})
    assert (doubted.name, doubted.ok) == (name, "warn") and doubted.fix
    assert rest.found == "none that changes anything"
    alone = variables(0, {name: value})
    assert [check.ok for check in alone] == (["ok"] if beside else ["warn", "ok"])


def test_an_empty_list_of_platforms_leaves_the_choice_to_jax():
    assert all(check.ok == "ok" for check in variables(2, {"JAX_PLATFORMS": ""}))


def test_names_that_nobody_reads():
    told = {"JAX_PLATFORM": "x", "GSHARD_START_TIMOUT": "3", "JAX_OF_ANOTHER_PROGRAM": "y"}
    found = by_name(variables(0, told | {"JAX_PLATFORMS": "cuda"}))
    assert "JAX_PLATFORMS" in found["JAX_PLATFORM"].fix
    assert "GSHARD_START_TIMEOUT" in found["GSHARD_START_TIMOUT"].fix
    assert found["variables"].found == "JAX_OF_ANOTHER_PROGRAM='y', JAX_PLATFORMS='cuda'"


# ---- machine -------------------------------------------------------------------------------------


def tree(folder, **files):
    for name, text in files.items():
        place = folder / name.replace("__", "/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


def test_limits_of_control_groups(tmp_path):
    groups = tmp_path / "sys/fs/cgroup"
    tree(tmp_path, proc__self__cgroup="0::/job/step\n")
    (groups / "job/step").mkdir(parents=True)
    (groups / "job/step/memory.max").write_text("max\n")
    (groups / "job/memory.max").write_text(f"{2**29}\n")
    assert memory_limit(tmp_path) == 2**29


def test_limits_of_version_1(tmp_path):
    groups = tmp_path / "sys/fs/cgroup"
    tree(tmp_path, proc__self__cgroup="9:name=systemd:/\n4:memory:/a\n2:cpu,cpuacct:/a\n0::/\n")
    tree(groups, memory__memory=f"{2**63 - 4096}")
    (groups / "memory/memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert memory_limit(tmp_path) is None
    (groups / "memory/memory.limit_in_bytes").write_text(f"{2**30}\n")
    assert memory_limit(tmp_path) == 2**30


# ---- disks ---------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", folder)
    if not shutil.which("mount") or subprocess.run(words, capture_output=True).returncode:
        pytest.skip("no small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk):
    check = written("here", small_disk)
    assert check.ok == "fail" and check.found == f"{small_disk}: No space left on device"
    assert not list(small_disk.iterdir())
    assert written("here", small_disk, 2**20).ok == "warn"  # less than 1 GB


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    assert written("here", tmp_path).ok == "ok" and not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch()
    assert "Not a directory" in written("here", file).found
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("TMPDIR", str(file))
    found = by_name(disks(0))
    assert found["current directory"].ok == "fail" and found["TMPDIR"].ok == "warn"


# ---- network and job -----------------------------------------------------------------------------


@pytest.fixture
def listener():
    with socket.create_server((LOOPBACK, 0)) as made:
        yield made


def in_job(monkeypatch, at, rank):
    monkeypatch.setenv("GSHARD_COORDINATOR", str(at))
    monkeypatch.setenv("GSHARD_PROCESS_ID", str(rank))
    monkeypatch.setenv("GSHARD_NUM_PROCESSES", "2")
    return by_name(cluster(0.5))


def test_the_name_of_the_machine_has_an_address(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert own_name()[0].found.startswith("localhost is ")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert own_name()[0].ok == "warn"


def test_a_process_that_is_alone():
    (check,) = cluster(0.5)
    assert check.ok == "ok" and "alone" in check.found


def test_the_port_of_process_0_is_taken(listener, monkeypatch):
    at = Address(*listener.getsockname())
    check = in_job(monkeypatch, at, 0)["coordinator"]
    assert check.ok == "fail" and f"port {at.port} of {LOOPBACK} is taken" in check.found


def test_processes_that_start_one_after_the_other_meet():
    at = address(free_address(), "at")

    def start(rank):
        time.sleep(rank / 2)
        return met(at, rank, 3, 20.0)

    with ThreadPoolExecutor() as pool:
        checks = [*pool.map(start, range(3))]
    assert {(check.ok, check.found.split(" (")[0]) for check in checks} == {
        ("ok", f"all 3 processes met at {at}")
    }
    assert "missing: 1." in met(at, 0, 2, 0.1).found
    assert "Connection refused" in met(at, 1, 2, 0.1).found


def test_a_coordinator_that_does_not_answer():
    with socket.socket() as silent:
        silent.bind((LOOPBACK, 0))
        silent.listen(0)
        at = Address(*silent.getsockname())
        with ExitStack() as full:  # of those that wait there, no more are let in
            for _ in range(3):
                waits = full.enter_context(socket.socket())
                waits.setblocking(False)
                waits.connect_ex(at)
            check = met(at, 1, 2, 0.5)
    assert check.ok == "fail" and f"did not reach process 0 at {at} within 0.5 s" in check.found
    assert "firewall" in check.fix


def test_a_coordinator_without_an_address(monkeypatch):
    check = in_job(monkeypatch, "no-such-host.invalid:29500", 1)["coordinator"]
    assert check.ok == "fail" and "process 0 at no-such-host.invalid:29500" in check.found


def test_variables_of_a_job_that_cannot_be(monkeypatch):
    assert in_job(monkeypatch, "127.0.0.1:1", 5)["job"].ok == "fail"
    done = run("--quick", GSHARD_PROCESS_ID="first")
    assert done.returncode == 1 and fails(done) == ["job"] and "'first'" in done.stdout


@pytest.mark.parametrize(
    ("told", "ok", "said"),
    [
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, "ok", "rank 1 of 4, by SLURM_PROCID"),
        ({"SLURM_NTASKS": "4"}, "warn", "srun did not start this process: it is alone"),
        ({"SLURM_NTASKS": "1"}, "ok", "this process is alone"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "warn", "WORLD_SIZE=2, which torchrun sets"),
        (
            {"PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2"},
            "warn",
            "PADDLE_TRAINERS_NUM=2, which paddle.distributed.launch sets",
        ),
        (
            {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"},
            "warn",
            "JAX_PROCESS_ID=1 and JAX_NUM_PROCESSES=2, which your own script sets: it is alone",
        ),
    ],
)
def test_launchers_of_others(told, ok, said, monkeypatch):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (check,) = cluster(0.5)
    assert check.ok == ok and said in check.found


@pytest.mark.slow
def test_in_a_launched_job(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "gshard",
            "launch",
            "--nproc_per_node",
            "2",
            "-m",
            "gshard",
            "doctor",
        ],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank 0] [ok]   job: rank 0 of 2" in done.stdout
    assert "[rank 1] [ok]   coordinator: all 2 processes met at 127.0.0.1:" in done.stdout
