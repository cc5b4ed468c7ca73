"""Eight virtual CPU devices for every test, set before JAX starts."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import sys

import psutil
import pytest

from tests.processes import FAST_COMPILATION, FUSE_LESS
from tests.tiers import (
    WORKER_BYTES,
    is_in_shard,
    is_slow_case,
    parse_shard,
    slow_cases,
    stale,
    too_many,
    workers,
)

DEVICES = 8
LARGE_BYTES = 0.9e9  # of a worker, which stays below tests.tiers.WORKER_BYTES
GROWTH_BYTES = 0.25e9  # since programs were freed: what else a worker holds is not freed with them
left_bytes = [0.0]  # in this worker, after programs were freed
CHOSEN = pytest.StashKey[int]()  # the number of workers, where the command does not say it
peaks: list[int] = []  # the most memory that each worker had, in bytes
FLAGS = (
    f"--xla_force_host_platform_device_count={DEVICES}",
    FAST_COMPILATION,
    # Eight devices share few cores with other work: one of them may be late by more than the 40 s
    # after which XLA's collectives end the whole process.
    "--xla_cpu_collective_call_terminate_timeout_seconds=200",
)

os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("JAX_ENABLE_X64", None)
# One more compilation for each of thousands of steps; tests/train/test_loss_check.py turns it on.
os.environ["GSHARD_CHECK_LOSS"] = "0"

SIGTERM = signal.getsignal(signal.SIGTERM)
# A shell that starts the tests in the background ignores Ctrl-C for them and their processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402

# A user's cache of compiled programs: what is read from it was compiled with other flags.
jax.config.update("jax_enable_compilation_cache", False)


def pytest_addoption(parser):
    shard = "the files of one shard, such as 1/4"
    parser.addoption("--shard", type=parse_shard, help=shard)
    site = "test the site in this folder, where `make docs` built it, and build no other"
    parser.addoption("--site", help=site)
    demo = (
        "test the smallest demo that ran into this folder (printed.txt, output/), and run no other"
    )
    parser.addoption("--demo", help=demo)


def pytest_configure(config):
    """Makes the quick tier compile in two thirds of the time, by fusing fewer operations.

    Collectives stay the same, and temporaries within 2 %. A full run fuses as users' programs do.
    JAX reads the flags at its first use of a device, which comes later.
    """
    if config.option.markexpr == "not slow" and jax.__version_info__ < (0, 11):
        os.environ["XLA_FLAGS"] += f" {FUSE_LESS}"


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers(config):
    config.stash[CHOSEN] = workers()
    return config.stash[CHOSEN]


def pytest_report_header(config):
    asked = config.getoption("numprocesses", None) or 0
    return [] if CHOSEN in config.stash else too_many(asked)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        session.config.workeroutput["peak"] = kb * (1 if sys.platform == "darwin" else 1024)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node):
    peaks.append(getattr(node, "workeroutput", {}).get("peak", 0))  # 0 of one that crashed


def pytest_terminal_summary(terminalreporter):
    if peaks:
        terminalreporter.line(
            f"largest worker that finished: {max(peaks) / 1e9:.2f} GB of memory, without the "
            f"processes that its tests started (expected: below {WORKER_BYTES / 1e9:.1f} GB)"
        )


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    for item in items:
        if is_slow_case(item.nodeid):
            item.add_marker("slow")
    # With --lf, pytest collects those tests of a file that failed.
    if not config.getoption("lf", False) and not any("::" in argument for argument in config.args):
        if unknown := stale(slow_cases(), [item.nodeid for item in items]):
            raise pytest.UsageError(f"tests/slow_cases.txt lists no test: {', '.join(unknown)}")
    if shard := config.getoption("--shard"):
        own = [is_in_shard(item.location[0], shard) for item in items]
        others = [x for x, chosen in zip(items, own, strict=True) if not chosen]
        config.hook.pytest_deselected(items=others)
        items[:] = [x for x, chosen in zip(items, own, strict=True) if chosen]


def pytest_collection_finish():
    """Python's collector leaves out what was imported, and looks for garbage less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    """Frees programs where a worker has grown: after a test file, and in between if it is large."""
    result = yield
    last = nextitem is None or nextitem.path != item.path
    (left,) = left_bytes
    most = left + GROWTH_BYTES if last else max(LARGE_BYTES, left + GROWTH_BYTES)
    if last and (known := sys.modules.get("gshard.sharding.padded_storage")):
        known._stored.clear()  # an array of a later file may look like one that this file padded
    if resident_bytes() > most:
        free_programs()
        left_bytes[:] = [resident_bytes()]
    if signal.signal(signal.SIGTERM, SIGTERM) is not SIGTERM:
        pytest.fail("the test has left a handler of SIGTERM to those after it")
    return result


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def free_programs():
    """Frees what JAX has compiled, which it keeps for good otherwise: some 4 GB in all."""
    jax.clear_caches()
    gc.collect()
    try:  # the allocator keeps what was freed, unless it is asked
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # another C library
        pass
