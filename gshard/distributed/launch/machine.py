"""What one machine does in a start of an elastic job, and what it then reports."""

from __future__ import annotations

import hashlib
import os
import socket
from typing import Any, NamedTuple

from gshard._util.errors import GShardError
from gshard.distributed.launch.background_writer import say
from gshard.distributed.launch.event_log import EventLog
from gshard.distributed.launch.exit_status import first_cause
from gshard.distributed.launch.job import Orders, Outcome, Request, run_job
from gshard.distributed.launch.restarts import Failure, furthest
from gshard.distributed.rendezvous import Address, ReservedPort

TICK = 0.05  # seconds between looks at what other machines say
LONGEST_ERROR = 100  # characters of an error in a report, which is one short line


class Start(NamedTuple):
    """The place of a machine in one start of the job, as the coordinator tells it."""

    restarts: int
    machines: int
    rank: int  # of the machine
    port: int  # of process 0, at the host of --master


class Report(NamedTuple):
    """How a start ended on one machine, as it tells the coordinator.

    Attributes:
      code: the exit code of a launcher of these processes alone.
      failed: whether a process failed by itself.
      follows: whether it failed because of another machine.
      leaves: whether the launcher was told to stop, and leaves the job.
      failure: that of the first process to fail; without an error if none did.
    """

    code: int
    failed: bool
    follows: bool
    leaves: bool
    failure: Failure

    @classmethod
    def of(cls, outcome: Outcome, leaves: bool) -> Report:
        """Returns what a machine reports."""
        failure, follows = Failure(-1, "", None, furthest(outcome.ends)), True
        if outcome.failed:
            failure = Failure.of(outcome.ends)
            follows = bool(outcome.ends) and first_cause(outcome.ends).follows
        failure = failure._replace(error=failure.error[:LONGEST_ERROR])
        return cls(outcome.summary[0], outcome.failed, follows, leaves, failure)

    @classmethod
    def read(cls, values: Any) -> Report:
        """Returns a report that was sent as JSON."""
        code, failed, follows, leaves, (rank, error, step, (steps, saved)) = values
        return cls(code, failed, follows, leaves, Failure(rank, error, step, (steps, saved)))


def run_start(
    asked: Request,
    host: str,
    start: Start,
    signals: list[int],
    events: EventLog,
    orders: Orders,
    port: ReservedPort | None = None,
) -> tuple[Outcome, Report]:
    """Runs this machine's processes once."""
    place = {"nnodes": start.machines, "rank": start.rank}
    request = Request(**{**vars(asked), **place, "master": Address(host, start.port)})
    outcome = run_job(request, start.restarts, signals, events, orders, port)
    if outcome.not_started and start.rank:  # the others go on without this machine
        raise GShardError(outcome.not_started)
    if outcome.failed:
        say(outcome.report(asked.log_dir))
    elif orders.end:
        say(f"gshard: the processes of this machine were ended: {orders.end}")
    elif orders.stop and not signals and any(end.asked for end in outcome.ends):
        late = [end.rank for end in outcome.ends if end.asked]
        say(
            f"gshard: ranks {late} had not stopped and were killed. Scripts stop cleanly with "
            "gshard.distributed.until_preempted"
        )
    return outcome, Report.of(outcome, leaves=bool(signals))


def form(asked: Request) -> str:
    """What must be the same on all machines, as words of their commands; it tells jobs apart.

    Of the script's arguments only a checksum, since they may be long, or secret.
    """
    words = f"--nnodes {asked.elastic} --nproc_per_node {len(asked.variables)}"
    if asked.batch_size is not None:
        words += f" --batch_size {asked.batch_size}"
    words += f" {'-m ' if asked.module else ''}{os.path.basename(asked.script)}"
    if asked.arguments:
        given = "\0".join(asked.arguments).encode(errors="surrogateescape")
        words += f" ARGUMENTS (checksum {hashlib.sha256(given).hexdigest()[:8]})"
    return words


def notice_loss(connection: socket.socket, seconds: int) -> None:
    """Lets the kernel end a connection to a machine that has been silent for `seconds`."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, seconds // 3)
    options = {
        "TCP_KEEPIDLE": every,
        "TCP_KEEPINTVL": every,
        "TCP_KEEPCNT": 2,
        "TCP_USER_TIMEOUT": 1000 * seconds,  # where something that was sent waits for its answer
    }
    for name, value in options.items():
        if hasattr(socket, name):  # Linux; elsewhere a lost link is noticed later
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
