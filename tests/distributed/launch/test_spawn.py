"""`gshard.distributed.spawn`, with real processes."""

from __future__ import annotations

import errno
import functools
import gc
import importlib
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from gshard.distributed.exit import STOP_SIGNALS
from gshard.distributed.launch import supervisor
from gshard.distributed.launch.child import on_host
from gshard.distributed.rendezvous import PortTakenError
from tests.distributed.launch import spawned_functions as functions
from tests.hosts import until
from tests.jobs import ROOT, launch, running

NPROCS = 2
EACH = {"virtual_devices": 2}  # devices of each process


@pytest.fixture(autouse=True)
def forget_the_devices_of_the_tests(monkeypatch):
    """The processes say themselves how many virtual devices they have."""
    jax.devices()  # this process has its eight before they are forgotten
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def sees_gpus(monkeypatch, names: str) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.a, self.b = nnx.Linear(10, 10, rngs=rngs), nnx.Linear(10, 1, rngs=rngs)

    def __call__(self, x):
        return self.b(jnp.tanh(self.a(x)))


def loss_fn(model, rows):
    return (model(rows) ** 2).mean()


def train(rows_of_all: list[np.ndarray]) -> list[float]:
    """Losses of steps of which every third reduces the gradients of all before it."""
    model = gshard.paddle.DataParallel(Net())
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    losses = []
    for step, rows in enumerate(rows_of_all):
        if step % 3 < 2:
            with model.no_sync():
                loss = model.backward(loss_fn, rows).mean()
        else:
            loss = model.backward(loss_fn, rows)
            optimizer.update(model, model.grads)
            model.clear_gradients()
        losses.append(float(loss))
    return losses


def train_on_one_device(rows_of_all: list[np.ndarray]) -> list[float]:
    model = Net()
    optimizer = nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param)
    losses, total = [], None
    for step, rows in enumerate(rows_of_all):
        loss, grads = nnx.value_and_grad(loss_fn)(model, rows)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        if step % 3 == 2:
            optimizer.update(model, total)
            total = None
        losses.append(float(loss))
    return losses


def test_results_come_back_by_rank_whatever_their_size():
    size = 3_000_000  # 12 MB each
    found = gshard.distributed.spawn(functions.place, (size,), nprocs=NPROCS, **EACH)
    assert [f["rank"] for f in found] == [0, 1]
    for rank, each in enumerate(found):
        assert (each["world_size"], each["devices"], each["sum"]) == (2, 4, 2 * 1.0 + 2 * 2.0)
        assert isinstance(each["large"], np.ndarray)
        assert each["large"].shape == (size,)
        assert (each["large"] == rank).all()


@pytest.mark.slow
def test_one_process_is_a_job_too():
    assert gshard.distributed.spawn(functions.rank_of_alone, nprocs=1, virtual_devices=1) == [
        (0, 1)
    ]


@pytest.mark.parametrize(
    ("how", "said", "code"),
    [
        ("raise", "process 1 of 2 failed:", 1),
        pytest.param("exit", "process 1 of 2 exited with code 7", 7, marks=pytest.mark.slow),
        pytest.param("kill", "process 1 of 2 was killed by SIGKILL", -9, marks=pytest.mark.slow),
        pytest.param("result", "the result of fails cannot be sent", 1, marks=pytest.mark.slow),
    ],
)
def test_a_failure_comes_back_with_rank_and_traceback(how, said, code):
    spawned = gshard.distributed.spawn(functions.fails, (how, 1), nprocs=NPROCS, join=False, **EACH)
    with pytest.raises(gshard.distributed.ProcessFailedError) as caught:
        spawned.join()
    assert said in str(caught.value)
    assert (caught.value.rank, caught.value.exit_code) == (1, code)
    if how == "raise":
        assert isinstance(caught.value.__cause__, KeyError)
        assert 'raise KeyError("of rank 1")' in str(caught.value)
        assert "child.py" not in str(caught.value), "frames that are not the user's"
    assert not any(process.is_alive() for process in spawned.processes)
    assert "GSHARD_PROCESS_ID" not in os.environ


def test_an_exception_that_cannot_be_copied_keeps_its_traceback():
    with pytest.raises(gshard.distributed.ProcessFailedError, match="NeedsTwoError: one and other"):
        gshard.distributed.spawn(functions.raises_what_needs_two, nprocs=1, virtual_devices=1)


def test_any_callable_and_any_result_with_a_process_that_writes_for_ever():
    call = functools.partial(functions.mixed, "text")
    began = time.monotonic()
    found = gshard.distributed.spawn(call, nprocs=1, virtual_devices=1)[0]
    assert time.monotonic() - began < 60
    assert found["b"] == "text"
    assert (np.asarray(found[1]) == 1).all()


@pytest.mark.slow
def test_a_process_that_failed_is_not_kept_by_its_threads():
    spawned = gshard.distributed.spawn(
        functions.lags_behind, nprocs=1, virtual_devices=1, join=False
    )
    with pytest.raises(gshard.distributed.ProcessFailedError, match="and a thread goes on"):
        assert spawned.join(timeout=30), "it waits for its thread"


def test_a_function_of_a_prompt_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(functions.waits, "__module__", "__main__")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    for function in (functions.waits, functools.partial(functions.waits, 0.0)):
        with pytest.raises(gshard.ArgumentTypeError, match="waits was defined at a prompt, in a"):
            gshard.distributed.spawn(function, (0.0,), nprocs=1)


def test_arrays_of_jax_are_arguments():
    """A process that makes one before `initialize` has started JAX alone."""
    found = gshard.distributed.spawn(
        functions.kind_of, ({"w": jnp.ones(3)},), nprocs=2, virtual_devices=1
    )
    assert found == [("ndarray", 2)] * 2
    layers = {"stem": jnp.ones(1), "body": 2}
    (found,) = gshard.distributed.spawn(list, (layers,), nprocs=1, virtual_devices=1)
    assert found == ["stem", "body"]  # in the order of the caller


def test_a_function_that_leaves_by_os_exit_is_named():
    with pytest.raises(gshard.distributed.ProcessFailedError) as caught:
        gshard.distributed.spawn(os._exit, (0,), nprocs=1, virtual_devices=1)
    said = "process 0 of 1 ended with the exit code 0 before its function returned, as after os._e"
    assert str(caught.value).startswith(said) and caught.value.exit_code == 0
    assert gshard.distributed.spawn(functions.leave, nprocs=1, virtual_devices=1) == [None]


TAKEN = PortTakenError("port 1 is taken. End that program.")
STARTS = {  # what fails, with which error, and what is said
    "thread": (threading.Thread, "start", RuntimeError("can't start new thread"), "new.*-u`"),
    "disk": (supervisor.Supervisor, "add", OSError(errno.ENOSPC, "No space"), r"No space\.$"),
    "port": (supervisor.Supervisor, "add", TAKEN, r"^port 1 is taken\. End that program\.$"),
}


@pytest.mark.parametrize("case", STARTS)
def test_processes_that_cannot_be_started_say_why_and_no_wrong_advice(case, monkeypatch):
    of, name, error, said = STARTS[case]

    def fails(*given):
        raise error

    monkeypatch.setattr(of, name, fails)
    with pytest.raises(gshard.GShardError, match=said):
        gshard.distributed.spawn(max, (1, 2), nprocs=1, virtual_devices=1)


@pytest.mark.parametrize("files", [4, 25], ids=["for the guardian", "for all"])
def test_files_that_do_not_suffice_are_said_and_none_is_left_open(files):
    resource_tracker.ensure_running()
    spawn, error = gshard.distributed.spawn, gshard.GShardError  # found in files
    gc.collect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before, taken = {*os.listdir("/proc/self/fd")}, []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, before)) + 1 + files, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        for _ in range(files):
            os.close(taken.pop())
        with pytest.raises(error, match="40 processes: Too many open files.*-n`"):
            spawn(max, (1, 2), nprocs=40, virtual_devices=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in taken:
            os.close(number)
    gc.collect()  # the frames of the error
    assert {*os.listdir("/proc/self/fd")} <= before


def test_a_program_without_exit_codes_does_not_spawn(monkeypatch):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(gshard.GShardError, match="ignores SIGCHLD, and so does not learn"):
            gshard.distributed.spawn(functions.waits, (0.0,), nprocs=1)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.slow
def test_threads_may_spawn_at_once():
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(gshard.distributed.spawn, functions.rank_of_alone, (), 2, **EACH)
            for _ in range(3)
        ]
    assert [job.result() for job in jobs] == [[(0, 2), (1, 2)]] * 3


def test_when_one_fails_the_others_are_ended(tmp_path):
    spawned = gshard.distributed.spawn(
        functions.one_fails_others_sleep,
        (str(tmp_path / "deaf"),),
        nprocs=NPROCS,
        join=False,
        **EACH,
    )
    with pytest.raises(gshard.distributed.ProcessFailedError, match="ValueError: of rank 1"):
        spawned.join(timeout=60)
    assert [process.exitcode for process in spawned.processes] == [-signal.SIGKILL, 1]


def test_join_may_wait_later_and_processes_can_be_ended():
    spawned = gshard.distributed.spawn(
        functions.waits, (60.0,), nprocs=NPROCS, join=False, daemon=True, **EACH
    )
    assert spawned.join(timeout=0.2) is False
    assert all(process.is_alive() for process in spawned.processes)
    for _ in range(2):
        spawned.terminate()
        assert spawned.join() is True
    assert not any(process.is_alive() for process in spawned.processes)


# ---- signals to the program that spawns ---------------------------------------------------------


def program(what: str) -> list[str]:
    return [sys.executable, "-m", "tests.distributed.launch.spawned_functions", what]


def test_nobody_outlives_the_parent(tmp_path):
    with running(program("steps"), tmp_path) as job:
        job.until_training()
        os.kill(max(job.ranks().values()), signal.SIGSTOP)
        job.process.kill()
        job.assert_nobody_left()


@pytest.mark.slow
@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_parent_passes_signals_to_stop_on_and_ends_with_its_code(tmp_path, number):
    with running(program("until_told"), tmp_path) as job:
        job.until_training()
        job.process.send_signal(number)
        assert job.code() == gshard.distributed.PREEMPTED_EXIT_CODE, job.err
        saved = re.findall(r"saved at (\d+)", job.out)
        assert len(saved) == 2
        assert len(set(saved)) == 1
        job.assert_nobody_left()


def test_a_second_signal_ends_those_that_do_not_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_FAILED_GRACE", 0.2)
    deaf = tmp_path / "deaf"
    spawned = gshard.distributed.spawn(
        functions.one_fails_others_sleep, (str(deaf),), nprocs=1, join=False, virtual_devices=1
    )

    is_over = threading.Event()  # then a signal would end the tests

    def send() -> None:
        until("a deaf process", deaf.exists, 60)
        for _ in range(2):
            if not is_over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
            is_over.wait(0.5)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(gshard.distributed.ProcessFailedError, match="SIGKILL"):
            spawned.join(timeout=120)
    finally:
        is_over.set()
        sender.join()
        spawned.terminate()


@pytest.mark.slow
def test_ctrl_c_ends_all(tmp_path):
    with running(program("steps"), tmp_path) as job:
        job.until_training()
        job.process.send_signal(signal.SIGINT)
        assert job.code(limit=10) in (-signal.SIGINT, 130, 1)
        job.assert_nobody_left()


# ---- bad input ----------------------------------------------------------------------------------


def test_timeouts_of_the_users_variables_are_the_defaults(monkeypatch):
    monkeypatch.setenv("GSHARD_HANG_TIMEOUT", "60")

    def hang_timeout(**options):
        call = os.getenv, ("GSHARD_HANG_TIMEOUT",)
        return gshard.distributed.spawn(*call, nprocs=1, virtual_devices=1, **options)

    assert hang_timeout() == ["60"]
    assert hang_timeout(hang_timeout=5) == ["5"]


BAD = {
    "lambda": (lambda: gshard.distributed.spawn(lambda: 1), "top of a module"),
    "argument": (
        lambda: gshard.distributed.spawn(functions.waits, (lambda: 1,)),
        "args[0]=a function cannot",
    ),
    "no function": (lambda: gshard.distributed.spawn("train"), "func='train'"),
    "args": (lambda: gshard.distributed.spawn(functions.waits, 3), "must be a tuple"),
    "none": (lambda: gshard.distributed.spawn(functions.waits, nprocs=0), "nprocs=0"),
    "text": (lambda: gshard.distributed.spawn(functions.waits, nprocs="2"), "nprocs='2'"),
    "option": (
        lambda: gshard.distributed.spawn(functions.waits, nproc=2),
        "Did you mean 'nprocs'?",
    ),
    "kwargs": (
        lambda: gshard.distributed.spawn(functions.waits, kwargs={"seconds": 0.0}),
        "Pass functools.partial(func, **kwargs) as the function",
    ),
    "fork": (
        lambda: gshard.distributed.spawn(functions.waits, start_method="fork"),
        "'spawn' is the only method",
    ),
    "devices": (
        lambda: gshard.distributed.spawn(functions.waits, gpus="9"),
        "gpus='9': 9 is not a visible device. This process sees no GPU. For CPU devices give virt",
    ),
    "both": (
        lambda: gshard.distributed.spawn(functions.waits, devices="0", virtual_devices=2),
        "one of the two",
    ),
    "heartbeat": (
        lambda: gshard.distributed.spawn(functions.waits, heartbeat_timeout_seconds=0),
        "seconds",
    ),
    "join": (lambda: gshard.distributed.spawn(functions.waits, join=1), "join=1"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_before_anything_starts(case, monkeypatch):
    if case == "both":
        sees_gpus(monkeypatch, "0")
    call, said = BAD[case]
    with pytest.raises(gshard.GShardError) as caught:
        call()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("visible", "options", "kind", "said"),
    [
        ("0,1", {"nprocs": 100}, RuntimeError, "100 processes need a GPU each"),
        ("0,1", {"nprocs": 2, "gpus": "0"}, ValueError, "devices=0 names 1 .* 2 processes"),
        ("0,1,2", {"nprocs": 2}, ValueError, "^this process sees 3 GPUs, 0,1,2, which cannot be"),
        ("0,1", {"nprocs": 2, "gpus": "0,7"}, ValueError, "7 is not a visible device"),
        ("0,1", {"nprocs": 2, "gpus": "0,0"}, ValueError, "each once"),
    ],
)
def test_gpus_as_paddle_checks_them(monkeypatch, visible, options, kind, said):
    """Paddle's D7."""
    sees_gpus(monkeypatch, visible)
    with pytest.raises(kind, match=said):
        gshard.distributed.spawn(functions.waits, (0.0,), **options)


def test_a_spawned_process_does_not_spawn(monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("gshard.distributed.launch.spawn"), "_IS_STARTED", True
    )
    with pytest.raises(gshard.CallOrderError, match="__main__"):
        gshard.distributed.spawn(functions.waits, (0.0,), nprocs=1)


# ---- Paddle's own cases -------------------------------------------------------------------------


def rows_of(steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(8, 10)).astype(np.float32) for _ in range(steps)]


@pytest.mark.slow
def test_two_local_steps_of_three_in_launched_processes(tmp_path):
    """Paddle's D1, launched: the losses of one device."""
    worker = ROOT / "tests" / "distributed" / "launch" / "job_worker.py"
    command = launch("--nproc_per_node", NPROCS, "--virtual_devices", 2, worker, "no_sync")
    with running(command, tmp_path) as job:
        assert job.code() == 0, job.err
        found = [json.loads(x) for x in re.findall(r"\[rank \d\] .*?(\[.*\])$", job.out, re.M)]
    assert len(found) == NPROCS
    for losses in found:
        np.testing.assert_allclose(losses, train_on_one_device(rows_of(7)), rtol=1e-5)


def test_two_local_steps_of_three_in_spawned_processes():
    """Paddle's D1, spawned: the losses of one device."""
    rows = rows_of(7)
    found = gshard.distributed.spawn(functions.no_sync, (rows,), nprocs=NPROCS, **EACH)
    for losses in found:
        np.testing.assert_allclose(losses, train_on_one_device(rows), rtol=1e-5)


def test_as_many_processes_as_cores_by_default(monkeypatch):
    """Paddle's D7: on CPU."""
    from gshard.distributed.launch.spawn import _count

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _count(-1, None, 2) == os.cpu_count()
    sees_gpus(monkeypatch, "3,4,5")
    assert _count(-1, None, None) == 3


class Pair(NamedTuple):
    first: Any
    second: Any


def test_results_are_sent_with_numpy_arrays_in_the_containers_they_were_in():
    ones, key = jnp.ones(2), jax.random.key(0)
    sent = on_host(Pair({"b": ones, "a": [ones, key, "word"]}, functools))
    assert type(sent) is Pair and list(sent.first) == ["b", "a"]
    array, same, word = sent.first["a"]
    assert type(sent.first["b"]) is type(array) is np.ndarray
    assert same is key and word == "word" and sent.second is functools
    jax.jit(lambda x: on_host([x])[0])(ones)  # a traced array has no values to send
