"""`gshard.distributed.spawn` runs a function in several processes of this machine."""

from __future__ import annotations

import atexit
import errno
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from gshard._util.errors import (
    ArgumentTypeError,
    CallOrderError,
    GShardError,
    did_you_mean,
    without_partial,
)
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import check_integer, flag, shown
from gshard.distributed import env_vars
from gshard.distributed.env_vars import chosen_gpus, device_shares, visible_gpus
from gshard.distributed.exit import PREEMPTED_EXIT_CODE, STOP_SIGNALS, is_default
from gshard.distributed.initialize import TIMEOUTS, read_timeouts
from gshard.distributed.launch.child import Failure, Result, on_host, run
from gshard.distributed.launch.exit_status import first_cause, in_words, meaning
from gshard.distributed.launch.output import Lines, Stream
from gshard.distributed.launch.supervisor import Child, Supervisor
from gshard.distributed.rendezvous import ReservedPort

_DEVICES = ("devices", "gpus", "selected_devices", "selected_gpus")  # all mean the same
# As this process began, whatever another thread spawns meanwhile.
_IS_STARTED = bool(os.environ.get(env_vars.PROCESS_ID))
_STARTING = threading.Lock()  # the environment is one for all threads
_STOP_GRACE = 30.0  # seconds to save and stop after SIGTERM
_NAMES = ("start_method", "virtual_devices", *_DEVICES, *TIMEOUTS)


@short_traceback
def spawn(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int = -1,
    join: bool = True,
    daemon: bool = False,
    **options: Any,
) -> list[Any] | Spawned:
    """Runs `func(*args)` in several new processes of this machine; `initialize()` joins them.

    When one fails, the others are ended: SIGTERM first, then SIGKILL. None outlives this process,
    even if it is killed. While this process waits, it passes SIGTERM on to them; SIGUSR1 counts as
    SIGTERM.

    Args:
      func: a function at the top of a module; the program that calls `spawn` does so under
        `if __name__ == "__main__":`. It calls `gshard.distributed.initialize()` before it uses JAX.
      args: the arguments of `func`, the same for every process; JAX arrays as NumPy arrays.
      nprocs: number of processes; -1 starts one for each visible GPU or, without a GPU, one for
        each CPU core.
      join: whether to wait for all processes; False returns at once.
      daemon: whether the processes end when this one exits.
      **options: `devices="0,1"` (also `gpus=`, `selected_devices=`): GPUs to use, split evenly
        between the processes; `virtual_devices=2`: virtual CPU devices of each process;
        `heartbeat_timeout_seconds`, `initialization_timeout` and `hang_timeout`, as of
        `initialize`;
        `start_method="spawn"`, the only one.

    Returns:
      The return values of the function, by rank, with JAX arrays as NumPy arrays. With
      `join=False` a `Spawned`, which has `join()`, `results` and `terminate()`.

    Raises:
      ProcessFailedError: a process failed; it has the rank and the traceback.
      GShardError: an argument is wrong; nothing was started.
      CallOrderError: it was called in a process that `spawn` or `gshard launch` started, or the
        program ignores SIGCHLD.
      SystemExit: with the code 75, when the job was told to stop, and all stopped cleanly.

    Example:
      >>> gshard.distributed.spawn(max, args=(1, 2), nprocs=2, virtual_devices=1)
      [2, 2]
    """
    if _IS_STARTED:
        raise CallOrderError(
            "spawn was called in a process that spawn or launch has started. Call it in the "
            'program that starts them, under `if __name__ == "__main__":`, since every new process '
            "imports that program."
        )
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        raise CallOrderError(
            "spawn: this program ignores SIGCHLD, and so does not learn how its processes end. "
            "Call signal.signal(signal.SIGCHLD, signal.SIG_DFL) before."
        )
    for name, value in (("join", join), ("daemon", daemon)):
        flag(name, value)
    call = _call(func, args)
    for name in options:
        if name not in _NAMES:
            known = ("func", "args", "nprocs", "join", "daemon", *_NAMES)
            hint = did_you_mean(name, known)
            if name == "kwargs":
                hint = " Pass functools.partial(func, **kwargs) as the function."
            raise GShardError(f"spawn has no option {name!r}.{hint}")
    if (method := options.get("start_method", "spawn")) != "spawn":
        raise GShardError(
            f"spawn(start_method={shown(method)}): 'spawn' is the only method: JAX runs threads, "
            "which a forked process does not have."
        )
    timeouts = read_timeouts(**{name: options.get(name) for name in TIMEOUTS})
    virtual = options.get("virtual_devices")
    by = next((name for name in _DEVICES if options.get(name) is not None), "devices")
    named = options.get(by)
    devices = chosen_gpus(by, named)
    if virtual is not None and devices is not None:
        raise GShardError(
            f"spawn({by}={shown(named)}, virtual_devices={virtual}): give GPUs or CPU devices, "
            "one of the two."
        )
    shares = device_shares(_count(nprocs, devices, virtual), devices, virtual)
    with _STARTING:
        spawned = _start(call, shares, timeouts, daemon)
    if not join:
        return spawned
    try:
        return spawned.results
    except BaseException:  # Ctrl-C, or what a signal handler of the user raises
        spawned.terminate()
        raise


def _start(
    call: tuple[Callable[..., Any], tuple[Any, ...]],
    shares: list[dict[str, str]],
    timeouts: dict[str, int],
    daemon: bool,
) -> Spawned:
    context = multiprocessing.get_context("spawn")
    try:
        with ExitStack() as unless_started:
            keep = unless_started.enter_context
            unless_started.callback((port := ReservedPort()).release)
            unless_started.callback((supervisor := Supervisor()).close)  # ends what has started
            for rank, variables in enumerate(shares):
                position = env_vars.process_variables(
                    port.address, len(shares), rank, rank, port_is_kept=True, **timeouts
                )
                result, to = map(keep, context.Pipe(duplex=False))
                stderr, err = map(keep, context.Pipe(duplex=False))
                process = context.Process(
                    target=run, args=(*call, to, err), daemon=daemon, name=f"gshard rank {rank}"
                )
                # Set before it starts, since it imports the user's program before gshard.
                before = dict(os.environ)
                os.environ.update({**variables, **position})
                try:
                    process.start()
                finally:
                    for name in {**variables, **position}:
                        del os.environ[name]
                        if name in before:
                            os.environ[name] = before[name]
                to.close()
                err.close()
                supervisor.add(_Child(rank, process, result, stderr))
            try:
                spawned = Spawned(supervisor, port, daemon)
            except RuntimeError as error:  # of a thread
                raise OSError(errno.EAGAIN, str(error)) from error
            unless_started.pop_all()
    except GShardError:  # some are OSErrors
        raise
    except OSError as error:
        fault = f"spawn cannot start {len(shares)} processes: {error.strerror or error}."
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
            fault += (
                " Start fewer, or raise the limit of this program (`ulimit -n` for open files, "
                "`ulimit -u` for processes)."
            )
        raise GShardError(fault) from error
    return spawned


# ---- the processes that have started -------------------------------------------------------------


class ProcessFailedError(GShardError, RuntimeError):
    """A spawned process failed; its own exception is the cause, where it could be sent.

    Attributes:
      rank: of the first process that failed.
      exit_code: its exit code; a signal's number, negative, where one ended it.
    """

    __module__ = "gshard.distributed"

    def __init__(self, message: str, rank: int, exit_code: int):
        super().__init__(message)
        self.rank: int = rank
        self.exit_code: int = exit_code


class Spawned:
    """The running processes that `gshard.distributed.spawn(..., join=False)` returns.

    Attributes:
      processes: by rank; each has `pid`, `exitcode`, `is_alive()`.

    Example:
      >>> job = gshard.distributed.spawn(max, (1, 2), nprocs=1, virtual_devices=1, join=False)
      >>> job.join(), job.results
      (True, [2])
    """

    def __init__(self, supervisor: Supervisor, port: ReservedPort, daemon: bool):
        self._supervisor, self._port = supervisor, port
        self._children = [c for c in supervisor.children if isinstance(c, _Child)]
        self.processes: list[SpawnProcess] = [child.process for child in self._children]
        self._end = threading.Event()
        self._grace = _STOP_GRACE  # after the next signal to stop
        self._terminated, self._error = False, None
        # Results are read as they come, and a failure ends the others, whoever waits or not.
        self._watch = threading.Thread(
            target=self._run, name="gshard.distributed.spawn", daemon=True
        )
        self._watch.start()
        if daemon:  # multiprocessing would ask them to end, which JAX does not hear, and wait
            atexit.register(self.terminate)

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the processes; returns whether all have ended.

        Args:
          timeout: seconds; None waits as long as it takes.

        Raises:
          ProcessFailedError: one failed. The others have been ended.
          SystemExit: with the code 75, when the job was told to stop, and all stopped cleanly.
        """
        seconds = math.inf if timeout is None else timeout
        deadline = time.monotonic() + seconds
        with self._passing_on_sigterm():
            # In turns, since Python handles a signal between them.
            while self._watch.is_alive() and time.monotonic() < deadline:
                self._watch.join(min(0.1, seconds))
        if self._watch.is_alive():
            return False
        self._raise()
        return True

    @property
    def results(self) -> list[Any]:
        """Return values of the function, by rank; waits for all processes."""
        self.join()
        sent = (child.sent for child in self._children)
        return [entry.value if isinstance(entry, Result) else None for entry in sent]

    def terminate(self) -> None:
        """Ends all processes that still run: SIGTERM, and SIGKILL after three seconds."""
        self._terminated |= self._watch.is_alive()
        self._end.set()
        self._watch.join()

    def _run(self) -> None:
        supervisor = self._supervisor
        try:
            while supervisor.running:
                supervisor.tick()
                if supervisor.failed and not self._end.is_set():
                    supervisor.settle()
                if supervisor.failed or self._end.is_set():
                    supervisor.end_rest()
        except BaseException as error:  # raised by whoever waits
            self._error = error
        finally:
            supervisor.close()
            self._port.release()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        ends = self._supervisor.ends
        codes = {end.code for end in ends.values()}
        unread = [child.rank for child in self._children if isinstance(child.sent, Failure)]
        left = [rank for rank, end in ends.items() if end.code == 0 and not end.asked]
        unsent = [x.rank for x in self._children if x.sent is None and x.rank in left]
        if self._terminated or (codes == {0} and not unread and not unsent):
            return
        if unsent:  # the others have lost it
            raise ProcessFailedError(
                f"process {unsent[0]} of {len(self.processes)} ended with the exit code 0 before "
                "its function returned, as after os._exit(0).",
                unsent[0],
                0,
            )
        if codes <= {0, PREEMPTED_EXIT_CODE} and not unread:
            raise SystemExit(PREEMPTED_EXIT_CODE)
        failed = [end for end in ends.values() if end.code]
        first = first_cause(failed) if failed else ends[unread[0]]
        sent = self._children[first.rank].sent
        of = f"process {first.rank} of {len(self.processes)}"
        if isinstance(sent, Failure):
            message = f"{of} failed:\n\n{sent.text}"
            raise ProcessFailedError(message, first.rank, first.code) from _unpacked(sent.error)
        message = f"{of} {in_words(first.code)} after {first.seconds:.1f} s. {meaning(first)}"
        if first.code == 1 and not first.tail:
            message += "It failed before the function ran: its output is above."
        if first.tail:
            message += "\nIts last lines on stderr:\n" + "\n".join(first.tail)
        raise ProcessFailedError(message.strip(), first.rank, first.code)

    @contextmanager
    def _passing_on_sigterm(self) -> Iterator[None]:
        """While the main thread waits, signals to stop are for the processes: they save first."""
        main = threading.current_thread() is threading.main_thread()
        mine = [number for number in STOP_SIGNALS if main and is_default(number)]

        def pass_on(number: int, frame: object) -> None:
            self._supervisor.send(signal.SIGTERM)
            timer = threading.Timer(self._grace, self._end.set)
            self._grace = 0.0
            timer.daemon = True
            timer.start()

        for number in mine:
            signal.signal(number, pass_on)
        try:
            yield
        finally:
            for number in mine:
                signal.signal(number, signal.SIG_DFL)


class _Child(Child):
    """A process that runs the function, with a pipe for its result or its failure."""

    def __init__(self, rank: int, process: SpawnProcess, result: Connection, err: Connection):
        self.process, self._result = process, result
        self.sent: Result | Failure | None = None
        lines = Lines()
        stream = Stream(err.fileno(), sys.stderr, "", lines, lambda raw: None)
        super().__init__(rank, process.pid or 0, {err: stream}, lines)

    def exit_code(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> None:
        self.process.join()

    def readers(self) -> dict[Any, Callable[[], bool]]:
        # Nothing is read from the sentinel: it only says that the process has ended.
        own = {self._result: self._receive, self.process.sentinel: lambda: False}
        return {**super().readers(), **own}

    def _receive(self) -> bool:
        try:
            self.sent = self._result.recv()
            self.script_ended = time.monotonic()
        except (EOFError, OSError):  # it has ended, with or without a result
            pass
        except BaseException as error:  # what unpacking it does is the user's
            self.sent = Failure(f"its result cannot be read: {error!r}", None)
        return False

    def drain(self) -> None:
        if self.sent is None and self._result.poll():
            self._receive()
        super().drain()

    def text(self) -> str:
        return self.sent.text if isinstance(self.sent, Failure) else super().text()

    def close(self) -> None:
        super().close()
        self._result.close()


def _unpacked(error: bytes | None) -> BaseException | None:
    """Returns the child's exception, if its type can be created here."""
    try:
        found = None if error is None else ForkingPickler.loads(error)  # pyright: ignore[reportAttributeAccessIssue]
    except Exception:  # such as one whose arguments are not its message
        return None
    return found if isinstance(found, BaseException) else None


# ---- arguments -----------------------------------------------------------------------------------


def _call(func: Any, args: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if not callable(func):
        raise ArgumentTypeError(f"spawn(func={shown(func)}) is not a function.")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise ArgumentTypeError(
            f"spawn(args={shown(args)}) must be a tuple of the function's arguments, such as "
            "args=(config,)."
        )
    main = getattr(sys.modules["__main__"], "__file__", None) or ""
    own = without_partial(func)
    if getattr(own, "__module__", "") == "__main__" and not os.path.exists(main):
        raise ArgumentTypeError(
            f"spawn: {getattr(own, '__name__', own)} was defined at a prompt, in a notebook or "
            "in `python -c`, where no new process finds it. Write it into a file and import it."
        )
    args = tuple(map(on_host, args))  # the new processes call initialize() before they use JAX
    for what, value in (("func", func), *((f"args[{i}]", a) for i, a in enumerate(args))):
        try:
            ForkingPickler.dumps(value)
        except Exception as error:
            fix = (
                "Define the function at the top of a module, not inside another function, and not "
                "as a lambda."
                if what == "func"
                else "Pass what can be pickled, and make the rest inside the function."
            )
            raise ArgumentTypeError(
                f"spawn: {what}={shown(value)} cannot be sent to another process ({error}). {fix}"
            ) from error
    return func, args


def _count(nprocs: Any, devices: list[str] | None, virtual: int | None) -> int:
    if isinstance(nprocs, int) and nprocs == -1:
        if virtual is None and (gpus := devices or visible_gpus()):
            return len(gpus)
        return os.cpu_count() or 1
    return check_integer("nprocs", nprocs, 1, " (-1: one for each GPU, or CPU core)")
