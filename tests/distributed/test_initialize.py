"""How processes find each other: who says who is who, and what is said when it cannot be."""

from __future__ import annotations

import importlib
import json
import random
import socket
from pathlib import Path

import jax
import pytest

import gshard
from benchmarks.groups import free_address
from gshard.distributed.env_vars import gpus_of_task
from tests.processes import assert_all_well, run_together, variables


@pytest.fixture(autouse=True)
def not_joined_yet(monkeypatch):
    """Another test of this process may have joined a job of one."""
    monkeypatch.setattr(importlib.import_module("gshard.distributed.initialize"), "_joined", [])


def free_port_above(first: int) -> int:
    """Of the last ports, which JAX's detection computes from the number of a job."""
    ports = range(first, 2**16)
    for port in random.sample(ports, len(ports)):  # another run of the tests takes others
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    pytest.skip("no free port")


# ---- detection -----------------------------------------------------------------------------------

MEET = """
import time
import jax
import gshard
jax.config.update("jax_platforms", "cpu")
gshard.distributed.initialize()
gshard.distributed.initialize()
rank = gshard.distributed.process_index()
gshard.distributed.barrier()  # both have started
time.sleep(rank)
came = time.monotonic()
gshard.distributed.barrier()
print("SEEN", rank, gshard.distributed.process_count(), came, time.monotonic())
print("GPUS", jax.config.values["jax_cuda_visible_devices"])
"""


def meet(folder: Path, environments: list[dict[str, str]]) -> None:
    """Two processes with these variables meet, share four GPUs, and wait at a barrier."""
    gpus = {"JAX_PLATFORMS": "", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    environments = [gpus | environment for environment in environments]
    ended = run_together(folder, [["-c", MEET]] * 2, environments, limit=100)
    assert_all_well(ended)
    if not any("http_proxy" in environment for environment in environments):
        assert "proxy" not in "".join(end.said for end in ended)  # JAX warns where one is set
    seen = [end.said.split("SEEN ")[1].split()[:4] for end in ended]
    assert [tuple(map(int, words[:2])) for words in seen] == [(0, 2), (1, 2)]
    assert [end.said.split("GPUS ")[1].split()[0] for end in ended] == ["0,1", "2,3"]
    came, left = ([float(words[i]) for words in seen] for i in (2, 3))
    assert came[1] - came[0] > 0.5
    assert min(left) >= max(came)


def test_slurm_is_detected(tmp_path):
    """The variables of `srun`, and nothing else. Job numbers say the port."""
    job = 7 * 2**12 + free_port_above(61440) - 61440
    environments = [
        {
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_NODEID": "0",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "http_proxy": "http://127.0.0.1:9",  # nobody is there; gRPC would ask it, and hang
        }
        for rank in range(2)
    ]
    meet(tmp_path, environments)


def test_open_mpi_is_detected(tmp_path):
    """The variables of `mpirun` of Open MPI 4: the address is in that of its daemon."""
    job = (free_port_above(63000) - 61440) * 2**12
    environments = [
        {
            "OMPI_MCA_orte_hnp_uri": f"{job}.0;tcp://127.0.0.1:34911",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        }
        for rank in range(2)
    ]
    meet(tmp_path, environments)


def task(per_node: str, node: int, number: int, per_task: str = "") -> dict[str, str]:
    """What Slurm says of a task."""
    found = {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": str(node)}
    return found | {"SLURM_LOCALID": str(number), "SLURM_GPUS_PER_TASK": per_task}


@pytest.mark.parametrize(
    ("visible", "told", "own"),
    [
        (8, task("1(x2)", 1, 0), [0, 1, 2, 3, 4, 5, 6, 7]),
        (8, task("8(x2)", 1, 3), [3]),
        (8, task("2(x2),4", 2, 1), [2, 3]),
        (1, task("8", 0, 7, "1"), [0]),  # it sees its own
        (2, task("2", 0, 1, "h100:2"), [0, 1]),
        (4, task("2", 0, 1, "2"), [2, 3]),  # --gpu-bind=none
        (4, task("2", 0, 1) | {"SLURM_GPU_BIND": "verbose,mask_gpu:0xf,0xf0"}, [0, 1, 2, 3]),
        (4, task("2", 0, 1) | {"SLURM_GPU_BIND": "none"}, [2, 3]),
        (4, task("3", 0, 1), None),  # as JAX does
        (0, task("2", 0, 1), None),
        (8, task("", 0, 1), None),
        (8, task("8", 0, 1) | {"JAX_LOCAL_DEVICE_IDS": "5"}, None),
        (8, task("8", 0, 1) | {"GSHARD_LOCAL_PROCESS_ID": "1"}, None),  # of the launcher
        (8, {}, None),
    ],
)
def test_gpus_of_a_task(visible, told, own, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(visible))))
    assert gpus_of_task() == own


ALONE = """
import gshard
gshard.distributed.initialize(**{arguments})
assert (gshard.distributed.process_index(), gshard.distributed.process_count()) == (0, 1)
gshard.distributed.barrier()
gshard.virtual_devices(3)  # JAX has not started
import jax
assert len(jax.devices()) == 3 and not jax.distributed.is_initialized()
gshard.distributed.initialize(**{arguments})  # again, and JAX has started
assert (gshard.distributed.process_index(), gshard.distributed.process_count()) == (0, 1)
"""


def test_without_a_word_a_process_is_alone(tmp_path):
    """Also where its address is given: then no cluster is looked for; and as a task of its own."""
    told = {"num_processes": 1, "process_id": 0}
    among, job = {"OMPI_COMM_WORLD_SIZE": "2"}, {"SLURM_JOB_ID": "1", "SLURM_LOCALID": "0"}
    job |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_PROCID": "0"}
    job |= {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
    commands = [["-c", ALONE.format(arguments=arguments)] for arguments in ({}, told, {})]
    assert_all_well(run_together(tmp_path, commands, [{}, among, job], limit=100))


UNDETECTED = """
import gshard
try:
    gshard.distributed.initialize()
except gshard.GShardError as error:
    print("SAID", error)
"""


def test_a_cluster_that_is_not_detected_is_no_reason_to_train_alone(tmp_path):
    """Open MPI 5 and MPICH say less than JAX reads; each process would train for itself."""
    environments = [{"OMPI_COMM_WORLD_SIZE": "2"}, {"PMI_SIZE": "4"}]
    environments.append({"OMPI_MCA_orte_hnp_uri": "no number"})  # JAX raises a ValueError
    ended = run_together(tmp_path, [["-c", UNDETECTED]] * 3, environments, limit=100)
    assert_all_well(ended)
    several = "says that this process is one of several"
    for end, why in zip(
        ended,
        (
            f"OMPI_COMM_WORLD_SIZE=2 {several}",
            f"PMI_SIZE=4 {several}",
            "JAX has detected a cluster, and joining its processes failed (ValueError: invalid",
        ),
        strict=True,
    ):
        assert why in end.said and "coordinator_address, num_processes and process_id" in end.said


# ---- arguments, variables, detection -------------------------------------------------------------

PRECEDENCE = """
import gshard
gshard.distributed.initialize(process_id={rank})
assert (gshard.distributed.process_index(), gshard.distributed.process_count()) == ({rank}, 2)
gshard.virtual_devices(3)  # JAX has not started
import jax
assert (jax.process_index(), jax.process_count()) == ({rank}, 2)
assert (len(jax.local_devices()), len(jax.devices())) == (3, 6)
assert (gshard.distributed.process_index(), gshard.distributed.process_count()) == ({rank}, 2)
gshard.distributed.initialize()
gshard.distributed.initialize(num_processes=2, process_id={rank})
try:
    gshard.distributed.initialize(num_processes=3)
except gshard.GShardError as error:
    print("SAID", error)
gshard.distributed.barrier()
"""


def test_arguments_before_variables_before_a_cluster(tmp_path):
    """The variables say one rank for both, and Slurm another job on a machine that is not."""
    slurm = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "no-such-machine",
        "SLURM_STEP_NUM_TASKS": "9",
        "SLURM_NTASKS": "9",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "5",
    }
    environment = slurm | variables(free_address(), 2, 0)
    commands = [["-c", PRECEDENCE.format(rank=rank)] for rank in range(2)]
    ended = run_together(tmp_path, commands, [environment] * 2, limit=100)
    assert_all_well(ended)
    for end in ended:
        assert (
            "SAID initialize(num_processes=3) was called, but this process has already "
            "joined with num_processes=2." in end.said
        )


# ---- what cannot be: refused before JAX is asked -------------------------------------------------

HERE = "127.0.0.1:29500"
FIRST_OF_TWO = {"coordinator_address": HERE, "num_processes": 2, "process_id": 0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"process_id": 1}, "num_processes is missing, and the others are {'process_id': 1}"),
        ({"num_processes": 2}, "process_id is missing, and the others are {'num_processes': 2}"),
        (
            {"coordinator_address": HERE},
            "is missing, and the others are {'coordinator_",
        ),
        ({"num_processes": 2, "process_id": 1}, "coordinator_address is missing: with 2 pro"),
        ({"num_processes": 2, "process_id": 2}, "process_id=2 is not a rank of num_processes=2"),
        ({"num_processes": 2, "process_id": -1}, "process_id=-1"),
        ({"num_processes": 0, "process_id": 0}, "num_processes=0"),
        ({"num_processes": "2", "process_id": 0}, "num_processes='2'"),
        ({"num_processes": 2, "process_id": True}, "process_id=True"),
        ({"initialization_timeout": 0}, "initialization_timeout=0"),
        ({"initialization_timeout": 0.5}, "initialization_timeout=0.5"),
        ({"heartbeat_timeout_seconds": -3}, "heartbeat_timeout_seconds=-3"),
        ({"heartbeat_timeout": 3}, "Did you mean 'heartbeat_timeout_seconds'?"),
        *(
            (
                FIRST_OF_TWO | {"coordinator_address": bad},
                f"coordinator_address={bad!r}",
            )
            for bad in ("somewhere", ":1", "host:", "host:-1", "host:0", "host:65536", "h:1x", 5)
        ),
        (
            FIRST_OF_TWO | {"coordinator_bind_address": "x"},
            "coordinator_bind_address='x' must be 'host:port'",
        ),
    ],
    ids=str,
)
def test_bad_arguments(monkeypatch, arguments, said):
    for name in variables("", 0, 0):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(gshard.GShardError) as caught:
        gshard.distributed.initialize(**arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (("", "2", ""), "process_id is missing, and the others are {'GSHARD_NUM_PROCESSES': 2}"),
        (("", "", "0"), "num_processes is missing, and the others are {'GSHARD_PROCESS_ID': 0}"),
        (("", "two", "0"), "the variable GSHARD_NUM_PROCESSES='two' must be an integer"),
        (("", "2", "2"), "GSHARD_PROCESS_ID=2 is not a rank of GSHARD_NUM_PROCESSES=2. Ranks"),
        ((HERE, "2", "0.5"), "the variable GSHARD_PROCESS_ID='0.5' must be an integer"),
        (("nowhere", "2", "0"), "='nowhere' must be 'host:port' of process 0"),
    ],
    ids=str,
)
def test_bad_variables(monkeypatch, environment, said):
    for name, value in zip(variables("", 0, 0), environment, strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(gshard.GShardError) as caught:
        gshard.distributed.initialize()
    assert said in str(caught.value)


def test_jax_has_started(monkeypatch):
    """Alone that is fine; with others it is too late."""
    jax.devices()
    for name in variables("", 0, 0):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(gshard.CallOrderError, match="JAX has already started in process 1. Call"):
        gshard.distributed.initialize(HERE, 2, 1, initialization_timeout=1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(gshard.CallOrderError, match="started, and SLURM_STEP_NUM_TASKS=2 says"):
        gshard.distributed.initialize()


# ---- the roll call -------------------------------------------------------------------------------

CALL = """
import json, pathlib, socket, sys, time
import gshard

number, folder, addresses = int(sys.argv[1]), pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])
said = {}

def all_are_at(place):
    (folder / f"{place}.{number}").touch()
    while sum((folder / f"{place}.{i}").exists() for i in range(3)) < 3:
        time.sleep(0.02)

def attempt(name, *place, limit=60):
    began = time.monotonic()
    try:
        gshard.distributed.initialize(addresses[name], *place, initialization_timeout=limit)
    except gshard.GShardError as error:
        said[name] = type(error).__name__, str(error), time.monotonic() - began

all_are_at("missing")
if number < 2:
    attempt("missing", 3, number, limit=5)
all_are_at("twice")
attempt("twice", 3, min(number, 1))
all_are_at("numbers")
if number < 2:
    attempt("numbers", 3 - number, number)
if number == 1:
    attempt("unreachable", 2, 1, limit=3)
if number == 2:
    host, port = addresses["taken"].split(":")
    with socket.create_server((host, int(port))):
        attempt("taken", 2, 0)
    attempt("not here", 2, 0)
all_are_at("end")
# None of that has left anything behind.
gshard.distributed.initialize(addresses["end"], 3, number, initialization_timeout=60)
gshard.distributed.barrier()
rank, count = gshard.distributed.process_index(), gshard.distributed.process_count()
print("SAID", json.dumps([rank, count, said]))
"""


@pytest.fixture(scope="module")
def roll_calls(tmp_path_factory):
    """What each of three processes got at roll calls that fail: name -> (type, text, s)."""
    folder = tmp_path_factory.mktemp("roll")
    names = ("missing", "twice", "numbers", "unreachable", "taken", "end")
    addresses = {name: free_address() for name in names} | {"not here": "192.0.2.1:29500"}
    commands = [["-c", CALL, str(i), str(folder), json.dumps(addresses)] for i in range(3)]
    ended = run_together(folder, commands, limit=120)
    assert_all_well(ended)
    found = [json.loads(end.said.split("SAID ")[1].splitlines()[0]) for end in ended]
    assert [each[:2] for each in found] == [[0, 3], [1, 3], [2, 3]]
    return addresses, [each[2] for each in found]


def test_who_does_not_arrive_is_named(roll_calls):
    addresses, said = roll_calls
    for rank in range(2):
        kind, text, seconds = said[rank]["missing"]
        assert kind == "NotArrivedError"
        assert f"not all of 3 processes reached {addresses['missing']} within 5 s" in text
        assert "arrived: 0, 1; missing: 2." in text
        assert 4 < seconds < 15


def test_two_processes_of_one_rank(roll_calls):
    for said in roll_calls[1]:
        kind, text, seconds = said["twice"]
        assert kind == "GShardError"
        assert "say that they are rank 1 of 3, at 127.0.0.1 and 127.0.0.1. Give" in text
        assert seconds < 30  # and not the 60 s that it may wait


def test_different_numbers_of_processes(roll_calls):
    for rank in range(2):
        kind, text, _ = roll_calls[1][rank]["numbers"]
        assert kind == "GShardError"
        assert "process 1 was started for a job of 2 processes, and process 0 for one of 3" in text


def test_an_unreachable_master(roll_calls):
    addresses, said = roll_calls
    kind, text, seconds = said[1]["unreachable"]
    assert kind == "NotArrivedError"
    at = addresses["unreachable"]
    assert f"process 1 of 2 did not reach process 0 at {at} within 3 s: Connection refused" in text
    assert 2 < seconds < 8


def test_a_port_in_use_or_an_address_of_another_machine(roll_calls):
    addresses, said = roll_calls
    kind, text, seconds = said[2]["taken"]
    port = addresses["taken"].split(":")[1]
    assert kind == "PortTakenError"
    assert f"port {port} of 127.0.0.1 is taken" in text and "Name another port" in text
    assert seconds < 30
    kind, text, seconds = said[2]["not here"]
    assert kind == "GShardError"
    assert "process 0 cannot listen at 192.0.2.1:29500" in text
    assert "one of its own machine" in text
    assert seconds < 30
