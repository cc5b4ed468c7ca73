"""Runs the processes of a job on this machine once, from their start to the end of the last."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from gshard._util.cgroup import contents
from gshard._util.errors import GShardError
from gshard.distributed import env_vars
from gshard.distributed.exit import PREEMPTED_EXIT_CODE, STOP_SIGNALS
from gshard.distributed.launch.background_writer import say
from gshard.distributed.launch.compilation_cache import cache_variables
from gshard.distributed.launch.event_log import EventLog, Status
from gshard.distributed.launch.exit_status import End, first_cause, report
from gshard.distributed.launch.log_file import Log
from gshard.distributed.launch.output import Lines, Stream
from gshard.distributed.launch.supervisor import Child, Supervisor
from gshard.distributed.machines import Machines
from gshard.distributed.rendezvous import LOOPBACK, Address, ReservedPort
from gshard.distributed.unfinished import Work

_RUN = Path(__file__).with_name("run_script.py")


class Request(argparse.Namespace):
    """A job as the command line asks for it: the options by name, and what follows from them."""

    script: str
    module: bool
    arguments: list[str]
    nproc_per_node: int | None
    nnodes: int  # in an elastic job the most, and in one start of it those that are there
    elastic: Machines | None
    rank: int | None
    master: str | Address | None
    devices: str | None
    virtual_devices: int | None
    log_dir: Path
    log_size: int
    compilation_cache: str | None
    max_restarts: int
    grace: int
    heartbeat_timeout: int
    start_timeout: int
    hang_timeout: int
    join_timeout: int | None
    join_every: float | None
    batch_size: int | None
    variables: list[dict[str, str]]  # those that give each process of this machine its devices

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        return self.nnodes * len(self.variables)


class Orders(Protocol):
    """What the other machines of an elastic job ask of this one while its processes run.

    Attributes:
      stop: whether the processes are to stop cleanly.
      end: why they are to be ended; empty while they are not.
    """

    stop: bool
    end: str

    def poll(self) -> None:
        """Learns what the other machines ask, without waiting."""


class Outcome(NamedTuple):
    """The outcome of a job: how its processes ended, and what happened meanwhile."""

    ends: list[End]  # in the order of the ranks
    signal: int | None  # that the processes were sent
    memory_kills: int  # processes that the kernel killed for memory
    is_whole: bool = True  # whether these are all processes of the job
    not_started: str = ""  # why the processes could not be started; then there are no `ends`

    @property
    def failed(self) -> bool:
        """Whether a process failed by itself, and not because of the signal that the job got."""
        if self.not_started:
            return True
        if self.is_whole and all(e.cut_off and not e.work.running for e in self.ends):
            return False  # all left by `os._exit(0)`, and no save is lost
        sent = STOP_SIGNALS if self.signal in STOP_SIGNALS else (self.signal,)
        by_signal = {code for n in sent if n is not None for code in (128 + n, -n)}
        return any(e.failed and e.code not in by_signal and not e.asked for e in self.ends)

    @property
    def summary(self) -> tuple[int, str]:
        """The exit code of the launcher, and what it says at last; empty if there is no more."""
        codes = {end.code for end in self.ends}
        in_order = codes <= {0, PREEMPTED_EXIT_CODE} and not self.failed
        if codes == {0} and in_order:
            return 0, ""
        if in_order and (codes or self.signal == signal.SIGTERM):
            how = "all processes stopped cleanly" if codes else "no processes ran"
            return PREEMPTED_EXIT_CODE, f"gshard: the job was told to stop, and {how}"
        if self.signal is not None and not self.failed:
            said = f"gshard: the job was ended by {signal.Signals(self.signal).name}"
            if late := [end.rank for end in self.ends if end.asked]:
                said += f"; ranks {late} had not stopped and were killed"
                if self.signal == signal.SIGTERM:
                    said += ". Scripts stop cleanly with gshard.distributed.until_preempted"
            return 128 + self.signal, said
        # A failure, though one ended it with the code 0.
        code = (first_cause(self.ends).code if self.ends else 1) or 1
        return code if code > 0 else 128 - code, ""

    def report(self, log_dir: Path) -> str:
        """What is said of a failure."""
        if self.not_started:
            return f"gshard: {self.not_started}"
        return report(self.ends, self.memory_kills, f"{log_dir}/rank-*.log")


def told_to_stop(number: int) -> int:
    """Says that a signal came while no processes ran; returns the exit code of the launcher."""
    code, said = Outcome([], number, 0).summary
    say(said)
    return code


def run_job(
    request: Request,
    restarts: int,
    signals: list[int],
    events: EventLog,
    orders: Orders | None = None,
    port: ReservedPort | None = None,
) -> Outcome:
    """Starts the processes and waits for all of them; if one fails, ends the others.

    Of the `signals` that arrive meanwhile the first is passed on, and the second ends the wait. In
    an elastic job the other machines give `orders`, and machine 0 has reserved the `port`.

    Raises:
      GShardError: an option is wrong; or the processes cannot be started, and it is not a restart.
    """
    alone, kills = request.world_size == 1, _memory_kills()
    size, machines = request.world_size, request.nnodes
    events.write("start", processes=size, machines=machines, restarts=restarts)
    on_cpu = request.virtual_devices is not None
    cache = cache_variables(request.compilation_cache, request.log_dir, request.nnodes, on_cpu)
    master = request.master if isinstance(request.master, Address) else Address(LOOPBACK, 0)
    started = False
    try:
        if port is None and not alone and not request.rank:
            port = ReservedPort(*master)
        meanwhile = orders.poll if orders else lambda: None
        with tempfile.TemporaryDirectory(prefix="gshard-", ignore_cleanup_errors=True) as folder:
            supervisor = Supervisor(None if alone else request.heartbeat_timeout, meanwhile)
            try:
                for local in range(len(request.variables)):
                    if not signals:
                        where = port, Path(folder)
                        supervisor.add(_start(request, local, restarts, *where, events, cache))
                started = True
                while supervisor.running:
                    supervisor.tick()
                    if signals or (orders and orders.stop):
                        _stop_in_order(supervisor, signals, request.grace)
                    elif supervisor.failed or (orders and orders.end):
                        if supervisor.failed:
                            supervisor.settle()
                        supervisor.let_finish(request.grace, lambda: len(signals) > 1)
                        supervisor.end_rest()
            finally:
                supervisor.close()
    except OSError as error:
        if started:
            raise
        fault = str(error)
        if not isinstance(error, GShardError):
            of = f"{error.filename}: " if error.filename else ""
            fault = f"the processes cannot be started: {of}{error.strerror or error}."
        if restarts:  # the next one may find memory, room on the disk, or the port
            return Outcome([], None, 0, not_started=fault)
        raise GShardError(fault) from error
    finally:
        if port:
            port.release()
    ends = [supervisor.ends[child.rank] for child in supervisor.children]
    sent = signals[0] if signals else signal.SIGTERM if orders and orders.stop else None
    return Outcome(ends, sent, _memory_kills() - kills, len(ends) == size)


def _start(
    request: Request,
    local: int,
    restarts: int,
    port: ReservedPort | None,
    folder: Path,
    events: EventLog,
    cache: Mapping[str, str],
) -> Worker:
    rank = (request.rank or 0) * len(request.variables) + local
    position = env_vars.process_variables(
        port.address if port else request.master or Address(LOOPBACK, 1),
        request.world_size,
        rank,
        local,
        heartbeat_timeout_seconds=request.heartbeat_timeout,
        initialization_timeout=request.start_timeout,
        hang_timeout=request.hang_timeout,
        restarts=restarts,
        port_is_kept=port is not None,
    )
    status = Status(folder / str(rank), rank, events)
    own = {
        "PYTHONUNBUFFERED": "1",
        env_vars.GRACE: str(request.grace),
        env_vars.STATUS_FILE: str(status.path),
    }
    if request.elastic is not None:
        own[env_vars.MACHINES] = f"{request.nnodes} of {request.elastic}"
    variables = {**os.environ, **request.variables[local], **position, **own, **cache}
    command = ["module" if request.module else "file", request.script, *request.arguments]
    tag = f"[rank {rank}] " if request.world_size > 1 else ""
    log = Log(request.log_dir, rank, request.log_size * 2**20)
    return Worker(rank, command, variables, log, tag, status, events)


def _stop_in_order(supervisor: Supervisor, signals: list[int], grace: float) -> None:
    """Passes a signal on once; a second signal, or a process that fails, ends the wait."""
    deadline = time.monotonic() + grace
    supervisor.send(signals[0] if signals else signal.SIGTERM)
    while supervisor.running and time.monotonic() < deadline and len(signals) < 2:
        supervisor.tick()
        if supervisor.failed:
            supervisor.settle()
            supervisor.let_finish(deadline - time.monotonic(), lambda: len(signals) > 1)
            break
    supervisor.kill()


class Worker(Child):
    """A process that runs the script, with a log, and with a file for its events."""

    def __init__(
        self,
        rank: int,
        command: list[str],
        environment: dict[str, str],
        log: Log,
        tag: str,
        status: Status,
        events: EventLog,
    ):
        self._log, self._status, self._events = log, status, events
        self._began, self._has_ended = time.monotonic(), False
        self._process = subprocess.Popen(
            [sys.executable, str(_RUN), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a group of its own, to end what it starts itself too
        )
        lines = Lines()
        pipes = (self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr)
        outputs = {
            pipe: Stream(pipe.fileno(), to, tag, lines, log.write)
            for pipe, to in pipes
            if pipe is not None
        }
        super().__init__(rank, self._process.pid, outputs, lines)
        events.write("start", rank, pid=self._process.pid)

    def exit_code(self) -> int | None:
        """Returns the exit code that the system reports, after its events were passed on."""
        code = self._process.poll()
        self._status.update()
        self.script_ended = self._status.left
        if code is not None and not self._has_ended:
            self._has_ended = True
            seconds = time.monotonic() - self._began
            self._events.write("exit", self.rank, self.work().step, seconds, code=code)
        return code

    def wait(self) -> None:
        """Waits until the process has ended."""
        self._process.wait()

    def work(self) -> Work:
        """Returns what it has to finish, as it says itself."""
        return self._status.work

    def close(self) -> None:
        """Closes its pipes and its log."""
        super().close()
        self._log.close()
        self._status.close()


def _memory_kills() -> int:
    """Counts the processes that the kernel has killed for memory since boot; 0 if unknown."""
    found = re.search(r"^oom_kill (\d+)$", contents(Path("/proc/vmstat")), re.MULTILINE)
    return int(found[1]) if found else 0


@contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT in a list instead of letting them end this program.

    SIGUSR1 counts as SIGTERM, and so does SIGHUP, of a terminal that was closed, unless it is
    ignored, as under `nohup`. A shell and the kernel may both send SIGHUP, which counts once.
    """
    signals: list[int] = []

    def collect(number: int, frame: object) -> None:
        if number != signal.SIGHUP or not signals:
            signals.append(number if number == signal.SIGINT else signal.SIGTERM)

    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else []
    before = {n: signal.signal(n, collect) for n in (*STOP_SIGNALS, signal.SIGINT, *hangup)}
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # then no exit code is known
        before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
