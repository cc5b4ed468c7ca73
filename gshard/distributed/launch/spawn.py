"""`gshard.distributed.spawn`: a function in several processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

from gshard._util.errors import ArgumentTypeError, CallOrderError, GShardError, did_you_mean
from gshard._util.validation import check_integer, flag, shown
from gshard.distributed import env_vars
from gshard.distributed.devices import chosen_gpus, device_shares, visible_gpus
from gshard.distributed.initialize import HEARTBEAT_TIMEOUT, INITIALIZATION_TIMEOUT
from gshard.distributed.launch.child import run
from gshard.distributed.launch.guardian import Guardian
from gshard.distributed.launch.process_group import Spawned
from gshard.distributed.rendezvous import Kept

_ALIASES = {"gpus": "devices", "selected_devices": "devices", "selected_gpus": "devices"}
_TIMEOUTS = {
    "heartbeat_timeout_seconds": HEARTBEAT_TIMEOUT,
    "initialization_timeout": INITIALIZATION_TIMEOUT,
}
_OPTIONS = {"start_method": "spawn", "devices": None, "virtual_devices": None, **_TIMEOUTS}
# As this process began, whatever another thread spawns meanwhile.
_IS_STARTED = bool(os.environ.get(env_vars.PROCESS_ID))
_STARTING = threading.Lock()  # the environment is one for all threads
_NAMES = ("func", "args", "nprocs", "join", "daemon", *_OPTIONS, *_ALIASES)


def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> list[Any] | Spawned:
    """Runs `func(*args)` in several new processes, which `initialize()` then joins.

    When one fails the others are ended, SIGTERM first; none outlives this process, also when it is
    killed. SIGTERM to this process while it waits is passed on to them.

    Args:
      func: a function at the top of a module; the program that calls `spawn` does so under
        `if __name__ == "__main__":`. It calls `gshard.distributed.initialize()` before it uses JAX.
      args: its arguments, the same for every process.
      nprocs: how many; -1 for one on each visible GPU, and without a GPU one on each CPU core.
      join: wait for all. False returns at once.
      daemon: the processes end when this one does.
      **options: `devices="0,1"` (also `gpus=`, `selected_devices=`): GPUs to use, divided over the
        processes; `virtual_devices=2`: virtual CPU devices of each process;
        `heartbeat_timeout_seconds` and `initialization_timeout`, as of `initialize`;
        `start_method="spawn"`, the only one.

    Returns:
      What the function returned, by rank, of any size; arrays of JAX come as NumPy's. With
      `join=False` a `Spawned`, with `join()`, `results` and `terminate()`.

    Raises:
      ProcessFailedError: a process failed; with its traceback and rank.
      GShardError: for arguments that cannot be, before anything starts.
    """
    if _IS_STARTED:
        raise CallOrderError(
            "spawn was called in a process that spawn or launch has started. Call it in the "
            'program that starts them, under `if __name__ == "__main__":`, since every new process '
            "imports that program."
        )
    for name, value in (("join", join), ("daemon", daemon)):
        flag(name, value)
    call = _call(func, args)
    chosen = _options(options)
    virtual = chosen["virtual_devices"]
    devices = chosen_gpus("devices", chosen["devices"])
    if virtual is not None and devices is not None:
        raise GShardError(
            f"spawn(devices={shown(chosen['devices'])}, virtual_devices={virtual}): GPUs or CPU "
            "devices, one of the two."
        )
    count = _count(nprocs, devices, virtual)
    own = device_shares(count, devices, virtual)
    timeouts = {name: chosen[name] for name in _TIMEOUTS}
    with _STARTING:
        spawned = _start(call, own, timeouts, daemon)
    if not join:
        return spawned
    try:
        return spawned.results
    except BaseException:  # Ctrl-C, or what a signal handler of the user raises
        spawned.terminate()
        raise


def _start(
    call: tuple[Callable[..., Any], tuple[Any, ...]],
    own: list[dict[str, str]],
    timeouts: dict[str, int],
    daemon: bool,
) -> Spawned:
    context, kept, guardian = multiprocessing.get_context("spawn"), Kept(), Guardian()
    started = []
    try:
        for rank, variables in enumerate(own):
            told = env_vars.process_variables(
                kept.address, len(own), rank, rank, port_is_kept=True, **timeouts
            )
            (mine, its), (heard, err) = context.Pipe(duplex=False), context.Pipe(duplex=False)
            process = context.Process(
                target=run, args=(*call, its, err), daemon=daemon, name=f"gshard rank {rank}"
            )
            # Set before it starts, since it imports the user's program before anything of gshard.
            with _variables({**variables, **told}):
                process.start()
            its.close()
            err.close()
            guardian.watch(process.pid or 0)
            started.append((process, mine, heard))
    except BaseException:
        guardian.close()  # ends those that have started
        kept.release()
        raise
    processes, results, errors = (list(each) for each in zip(*started, strict=True))
    return Spawned(processes, results, errors, guardian, kept, daemon)


@contextmanager
def _variables(told: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---- arguments -----------------------------------------------------------------------------------


def _call(func: Any, args: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if not callable(func):
        raise ArgumentTypeError(f"spawn(func={shown(func)}) is not a function.")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ArgumentTypeError(
            f"spawn(args={shown(args)}) must be a tuple of the function's arguments, such as "
            "args=(config,)."
        )
    if getattr(func, "__module__", "") == "__main__" and not _main_is_a_file():
        raise ArgumentTypeError(
            f"spawn: {getattr(func, '__name__', func)} was defined at a prompt, in a notebook or "
            "in `python -c`, where no new process finds it. Write it into a file and import it."
        )
    for what, value in (("func", func), *((f"args[{i}]", a) for i, a in enumerate(args))):
        try:
            ForkingPickler.dumps(value)
        except Exception as error:
            mend = (
                "Define the function at the top of a module, not inside another function, and not "
                "as a lambda."
                if what == "func"
                else "Pass what can be pickled, and make the rest inside the function."
            )
            raise ArgumentTypeError(
                f"spawn: {what}={shown(value)} cannot be sent to another process ({error}). {mend}"
            ) from error
    return func, tuple(args)


def _main_is_a_file() -> bool:
    return os.path.exists(getattr(sys.modules["__main__"], "__file__", None) or "")


def _options(given: dict[str, Any]) -> dict[str, Any]:
    chosen = dict(_OPTIONS)
    for name, value in given.items():
        known = _ALIASES.get(name, name)
        if known not in _OPTIONS:
            raise GShardError(f"spawn has no option {name!r}.{did_you_mean(name, _NAMES)}")
        chosen[known] = value
    if chosen["start_method"] != "spawn":
        raise GShardError(
            f"spawn(start_method={shown(chosen['start_method'])}): 'spawn' is the only way: JAX "
            "runs threads, which a forked process does not have."
        )
    for name in _TIMEOUTS:
        check_integer(name, chosen[name], 1, " of seconds")
    return chosen


def _count(nprocs: Any, devices: list[str] | None, virtual: int | None) -> int:
    if isinstance(nprocs, int) and nprocs == -1:
        if virtual is None and (gpus := devices or visible_gpus()):
            return len(gpus)
        return os.cpu_count() or 1
    return check_integer("nprocs", nprocs, 1, " (-1: one for each GPU, or CPU core)")
