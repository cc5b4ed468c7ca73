"""`examples/cluster`: what can be run without a cluster is run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import gshard
from gshard.distributed.launch.cli import request
from tests import hosts as namespaces
from tests.hosts import NoHostsError, until
from tests.processes import clean_environment, fast_compilation

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "examples" / "cluster"
SLURM = CLUSTER / "slurm.sh"
RAY = CLUSTER / "ray_train.py"
KUBERNETES = CLUSTER / "kubernetes.yaml"
JOB_ID, MANY, LIMIT = 4711, 100_000, 240
DEVICES = "--xla_force_host_platform_device_count=2"


# ---- Kubernetes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def objects():
    found = {o["kind"]: o for o in yaml.safe_load_all(KUBERNETES.read_text())}
    assert set(found) == {"Service", "NetworkPolicy", "Job"}
    return found


def pod(objects):
    spec = objects["Job"]["spec"]["template"]["spec"]
    return spec, spec["containers"][0]


def asked_of(objects, index: int):
    """What the launcher of a pod is asked for, with the variables that Kubernetes sets."""
    _, container = pod(objects)
    variables = {"JOB_COMPLETION_INDEX": str(index), "NAMESPACE": "research"}
    set_here = {entry["name"] for entry in container["env"]} | {"JOB_COMPLETION_INDEX"}
    program, command, *words = container["command"]
    assert (program, command) == ("gshard", "launch")
    used = {name for word in words for name in re.findall(r"\$\((\w+)\)", word)}
    assert used <= set_here == set(variables)
    words = [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], word) for word in words]
    return request(words)


def test_every_pod_is_a_machine_of_the_job(objects, monkeypatch):
    monkeypatch.chdir(ROOT)
    job, service = objects["Job"], objects["Service"]
    pods = job["spec"]["completions"]
    assert pods == job["spec"]["parallelism"]
    assert job["spec"]["completionMode"] == "Indexed"
    asked = [asked_of(objects, i) for i in range(pods)]
    assert [a.rank for a in asked] == list(range(pods))
    assert {a.nnodes for a in asked} == {pods}
    # Kubernetes names a pod JOB-INDEX, in the domain of the Service that is its subdomain.
    spec, _ = pod(objects)
    name, subdomain = job["metadata"]["name"], service["metadata"]["name"]
    assert spec["subdomain"] == subdomain
    assert {a.master.host for a in asked} == {f"{name}-0.{subdomain}.research.svc.cluster.local"}
    labels = job["spec"]["template"]["metadata"]["labels"].items()
    policy = objects["NetworkPolicy"]["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= labels
    assert policy["podSelector"]["matchLabels"].items() <= labels
    assert policy["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items() <= labels


def test_the_image_of_the_page_has_the_script(objects):
    _, container = pod(objects)
    (image,) = re.findall(r"```dockerfile\n(.*?)```", (CLUSTER / "README.md").read_text(), re.S)
    folder, name, to = re.search(r"^WORKDIR (.+)\n[^$]*^COPY (\S+) (\S+)$", image, re.M).groups()
    script = next(word for word in container["command"] if word.endswith(".py"))
    assert (container["workingDir"], script) == (folder, f"{to}{name}")


def test_a_pod_that_stops_in_order_is_no_failure_and_has_time_to(objects):
    spec, container = pod(objects)
    rules = objects["Job"]["spec"]["podFailurePolicy"]["rules"]
    ignored = [r["onExitCodes"] for r in rules if r["action"] == "Ignore" and "onExitCodes" in r]
    assert ignored == [{"containerName": container["name"], "operator": "In", "values": [75]}]
    assert spec["restartPolicy"] == "Never"  # podFailurePolicy is refused without it
    grace = int(container["command"][container["command"].index("--grace") + 1])
    assert grace + 10 <= spec["terminationGracePeriodSeconds"]


def test_a_pod_may_do_little(objects):
    spec, container = pod(objects)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    words = container["command"]
    for option in ("--log_dir", "--output"):  # the rest of it cannot be written
        path = Path(words[words.index(option) + 1])
        assert {str(parent) for parent in path.parents} & mounted


# ---- Slurm ---------------------------------------------------------------------------------------

# What stands in for Slurm: `srun` runs its arguments on each node, with the variables of that node.
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
pids=()
for node in 0 1; do
    holder=HOLDERS[node]
    nsenter --target "$holder" --net --uts --mount \\
        env SLURM_NODEID="$node" SLURM_PROCID="$node" SLURM_LOCALID=0 \\
        sh -c 'cd "$0" && exec "$@"' "$PWD" "$@" &
    pids+=($!)
done
echo "${pids[@]}" > launchers
rc=0
for pid in "${pids[@]}"; do
    wait "$pid" && its=0 || its=$?
    if (( its > rc )); then rc=$its; fi
done
exit "$rc"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1 $2" in
    "show hostnames") printf 'host-a\\nhost-b\\n' ;;
    *) echo "$@" >> scontrol.log ;;
esac
"""


@pytest.fixture
def cluster(tmp_path):
    """`start(*command)`: as the first of two nodes of Slurm would run it, and where it does."""
    programs, work = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    work.mkdir()
    (work / "examples").symlink_to(ROOT / "examples")

    def program(name: str, text: str) -> None:
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    program("scontrol", SCONTROL)
    program("gshard", f'#!/bin/sh\nexec {sys.executable} -m gshard "$@"\n')
    own = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    variables = {
        **own,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": fast_compilation(),
        "SLURM_JOB_ID": str(JOB_ID),
        "SLURM_JOB_NODELIST": "host-[a-b]",
        "SLURM_STEP_NODELIST": "host-[a-b]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    try:
        with namespaces.hosts(tmp_path) as hosts:
            holders = " ".join(str(host.pid) for host in hosts)
            text = SRUN.replace("holder=HOLDERS[node]", f"of=({holders}); holder=${{of[node]}}")
            program("srun", text)

            def start(*words: object) -> tuple[subprocess.Popen, Path]:
                log = tmp_path / "job.out"
                run = ("sh", "-c", 'cd "$0" && exec "$@"', work, *words)
                return hosts[0].start(log, variables, *run), log

            yield start, work
    except NoHostsError as error:
        pytest.skip(f"no network namespaces here (they need root and `ip`): {error}")


def test_the_script_parses_and_says_what_slurm_has_to_know():
    assert subprocess.run(["bash", "-n", SLURM]).returncode == 0
    text = SLURM.read_text()
    options = re.findall(r"^#SBATCH (--\S+)", text, re.MULTILINE)
    # Slurm reads no option behind the first command.
    assert text.rindex("#SBATCH") < text.index("set -euo")
    assert {"--requeue", "--signal=TERM@60", "--ntasks-per-node=1", "--open-mode=append"} <= {
        *options
    }
    assert int(re.search(r"--grace (\d+)", text)[1]) < 60


@pytest.mark.slow
def test_a_job_of_two_nodes_is_put_back_and_goes_on(cluster):
    """Slurm itself cannot run here: `srun` and `scontrol` are scripts that do what it would.

    SIGTERM goes to one launcher alone, which is harder than `--signal`, where both get it.
    """
    start, work = cluster
    script, log = start("bash", SLURM, "--steps", MANY, "--pause", 0.05, "--save_every", 10)
    until("saved", lambda: (work / "output" / "10").exists() or script.poll(), LIMIT)
    assert script.poll() is None, log.read_text()
    os.kill(int((work / "launchers").read_text().split()[1]), signal.SIGTERM)
    assert script.wait(LIMIT) == gshard.distributed.PREEMPTED_EXIT_CODE, log.read_text()
    assert (work / "scontrol.log").read_text() == f"requeue {JOB_ID}\n"
    saved = re.findall(r"saved after step (\d+)", log.read_text())[-1]
    assert {path.name for path in (work / "log" / str(JOB_ID)).iterdir()} == {
        "events.jsonl", "events-1.jsonl", "rank-0.log", "rank-1.log",
    }  # fmt: skip
    script, log = start("bash", SLURM, "--steps", int(saved) + 3)
    assert script.wait(LIMIT) == 0, log.read_text()
    assert f"from step {saved}, 2 devices, 2 processes" in log.read_text()
    assert (work / "scontrol.log").read_text() == f"requeue {JOB_ID}\n"  # not again


@pytest.mark.slow
def test_srun_alone(cluster):
    """Without the launcher: JAX reads who is who from Slurm's variables."""
    start, work = cluster
    script, log = start("srun", sys.executable, "examples/train.py", "--steps", 10)
    assert script.wait(LIMIT) == 0, log.read_text()
    assert "from step 0, 2 devices, 2 processes" in log.read_text()


# ---- JobSet and SkyPilot -------------------------------------------------------------------------


def test_the_pods_of_a_job_set_are_the_machines_of_a_job(monkeypatch):
    monkeypatch.chdir(ROOT)
    job_set = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    name, (job,) = job_set["metadata"]["name"], job_set["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    for index in range(spec["completions"]):
        words = [w.replace("$(JOB_COMPLETION_INDEX)", str(index)) for w in container["command"]]
        asked = request([w.replace("$(NAMESPACE)", "research") for w in words[2:]])
        assert (asked.rank, asked.nnodes) == (index, spec["completions"])
        # JobSet names a pod JOBSET-JOB-REPLICA-INDEX, in the domain of the JobSet. Only the full
        # name is in the pod's own /etc/hosts.
        assert asked.master is not None
        assert asked.master.host == f"{name}-{job['name']}-0-0.{name}.research.svc.cluster.local"
        assert asked.grace < pod["terminationGracePeriodSeconds"]
    assert [entry["name"] for entry in container["env"]] == ["NAMESPACE"]
    mounts = {x["name"] for x in container["volumeMounts"]}
    assert mounts == {x["name"] for x in pod["volumes"]}
    assert [r["onExitCodes"]["values"] for r in spec["podFailurePolicy"]["rules"][:1]] == [[75]]


def test_every_machine_of_skypilot_starts_a_launcher(monkeypatch):
    monkeypatch.chdir(ROOT)
    task = yaml.safe_load((CLUSTER / "sky.yaml").read_text())
    for rank in range(task["num_nodes"]):
        variables = {
            "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
        }
        said = subprocess.run(
            ["bash", "-euc", f"gshard() {{ printf '%s\\n' \"$@\"; }}\n{task['run']}"],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            check=True,
        )
        command, *words = said.stdout.splitlines()
        asked = request(words)
        assert command == "launch" and str(asked.master) == "10.0.0.7:29500"
        assert (asked.rank, asked.nnodes, asked.max_restarts) == (rank, 2, 3)


# ---- Ray -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ray_needs_two_workers():
    pytest.importorskip("ray.train.v2.jax")
    words = [sys.executable, RAY, "--workers", "1", ROOT / "examples" / "train.py"]
    ran = subprocess.run(words, env=clean_environment(), capture_output=True, text=True)
    assert ran.returncode == 2 and "Start 2 workers or more" in ran.stderr


@pytest.mark.slow
def test_ray_starts_the_workers_again_when_one_is_killed(tmp_path):
    """Its losses are those of a run that nobody killed."""
    pytest.importorskip("ray.train.v2.jax")
    (tmp_path / "scripts").mkdir()
    script, said = tmp_path / "scripts" / "script.py", {}
    script.write_text("import beside\n\nbeside.main()\n")
    script.with_name("beside.py").write_text((ROOT / "examples" / "train.py").read_text())
    for name, kills in (("undisturbed", False), ("killed", True)):
        output, log = tmp_path / name, tmp_path / f"{name}.log"
        words = [RAY, "--workers", "2", script, "--steps", "80", "--save_every", "10"]
        with log.open("w") as file:
            job = subprocess.Popen(
                [sys.executable, *words, "--pause", "0.1", "--output", name],
                env=clean_environment() | {"XLA_FLAGS": f"{DEVICES} {fast_compilation()}"},
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
            )
        try:
            if kills:
                until("saved", (output / "20").exists, LIMIT)
                (worker,) = re.findall(r"pid=(\d+)\) world_rank=1", log.read_text())
                os.kill(int(worker), signal.SIGKILL)
            assert job.wait(LIMIT) == 0, log.read_text()
        finally:
            job.kill()
            job.wait()
        said[name] = log.read_text()
        assert gshard.Checkpointer(output).latest_step() == 80
    starts = re.findall(r"from step (\d+), 4 devices, 2 processes", said["killed"])
    assert len({*starts}) == 2 and max(map(int, starts)) >= 20, starts
    ends = [{*re.findall(r"done: loss ([\d.]+)", text)} for text in said.values()]
    assert ends[0] == ends[1] and len(ends[0]) == 1
