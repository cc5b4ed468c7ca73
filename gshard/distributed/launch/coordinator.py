"""The coordinator of an elastic job: counts the machines, and decides when the job starts again."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from signal import SIGINT

from gshard._util.errors import GShardError
from gshard.distributed.launch.background_writer import say
from gshard.distributed.launch.event_log import EventLog
from gshard.distributed.launch.job import Request, told_to_stop
from gshard.distributed.launch.machine import TICK, Report, Start, form, notice_loss, run_start
from gshard.distributed.launch.restarts import Restarts
from gshard.distributed.line_server import LineServer, Peer
from gshard.distributed.machines import Machines
from gshard.distributed.messages import line_of
from gshard.distributed.rendezvous import (
    Address,
    NotArrivedError,
    Reminder,
    ReservedPort,
    is_loopback,
)

_LATE = 15  # seconds beyond `--grace` in which the processes of a machine have ended


@dataclass(eq=False)
class Machine:
    """A machine but for the coordinator's; they are numbered in the order of arrival."""

    number: int
    rank: int  # that it was given; without one it comes after all others
    name: str
    takes_part: bool = False  # in the last start
    report: Report | None = None  # of it

    def __str__(self) -> str:
        return f"machine {self.number} ({self.name})"


class Coordinator(LineServer):
    """The launcher of machine 0, which runs processes too; its `Orders` are for all machines."""

    def __init__(self, asked: Request, at: Address, listener: socket.socket, signals: list[int]):
        super().__init__(listener)
        self._asked, self._at, self._signals = asked, at, signals
        self._sizes = asked.elastic or Machines(1, 1)
        self._events = EventLog(asked.log_dir, 0, asked.log_size * 2**20)
        self._restarts = Restarts(asked.max_restarts)
        self._arrived = self._starts = 0  # machines that have come so far; starts of the job
        self._since, self._told = 0.0, ""  # when the last start was; what its machines were told
        self._lost: list[str] = []  # machines of the last start
        self._failed_on: set[Peer] = set()  # the machines of the last failure
        self.stop, self.end = False, ""
        self._over = b""  # the last line, once the job is over

    def run(self) -> int:
        """Runs the job to its end; returns the exit code."""
        began, code, why = time.monotonic(), 1, "the launcher of machine 0 failed"
        try:
            code, why = self._run()
        except GShardError as error:
            why = str(error)
            if self._starts < 2:  # no option is wrong with which the job has run before
                raise
            self._say(why)
        finally:
            self._over = line_of({"over": code, "why": why})
            self.answer(self._over)
            self._events.write("exit", seconds=time.monotonic() - began, code=code)
            self._events.close()
        return code

    def _run(self) -> tuple[int, str]:
        """Returns the exit code, and why the job is over."""
        while True:
            chosen = self._gather()
            if self._signals:
                return told_to_stop(self._signals[0]), "machine 0 was told to stop"
            start, port = self._begin(chosen)
            shared = self._signals, self._events, self, port
            outcome, own = run_start(self._asked, self._at.host, start, *shared)
            reports = [own, *self._await_reports(chosen, own)]
            _, said = outcome.summary
            code = max(report.code for report in reports)
            leaves = any(report.leaves for report in reports)  # and others have lost it
            failed = bool(self._lost) or any(
                report.failed and not (leaves and report.follows) for report in reports
            )
            is_over = code == 0 or not (self.stop or leaves)
            if self._signals or (is_over and not failed):
                if said:
                    say(said)
                return code, said.removeprefix("gshard: ") or "all processes have succeeded"
            if failed and (decision := self._after_failure(reports, chosen)) is not None:
                return decision

    def _after_failure(self, reports: list[Report], chosen: list[Peer]) -> tuple[int, str] | None:
        """Waits before the next start; returns the exit code and the reason if there is none."""
        first = min(reports, key=lambda report: (not report.failed, report.follows))
        steps, saved = zip(*(report.failure.furthest for report in reports), strict=True)
        failure = first.failure._replace(furthest=(max(steps), max(saved)))
        same = self._failed_on == {*chosen} and not self._lost
        self._failed_on = {*chosen}
        decision = self._restarts.after(failure, same_machines=same)
        lost = "; ".join(f"{name} is lost" for name in self._lost)
        why = f"{lost or self.end}; {decision.why}"
        if not decision.again:
            self._say(f"not starting again: {why}")
            self._events.write("give_up", why=why)
            return first.code if first.failed else 1, f"not starting again: {why}"
        self._say(f"starting all processes again in {decision.seconds:.0f} s ({why})")
        self._events.write("restart", seconds=decision.seconds, why=why)
        until = time.monotonic() + decision.seconds
        while time.monotonic() < until and not self._signals:
            self.receive(TICK)
        return None

    # ---- one start -------------------------------------------------------------------------------

    def _gather(self) -> list[Peer]:
        """Waits for machines; returns those that take part, without this one."""
        for peer in self.peers:
            peer.who.takes_part, peer.who.report = False, None
        waits, enough, sizes = Reminder(self._asked.start_timeout), None, self._sizes
        while not self._signals:
            count = sizes.of(len(self.peers) + 1)
            if count and (self._starts or count == sizes.fitting[-1]):
                break
            if count:
                enough = enough or Reminder(self._asked.join_timeout or 0)
                enough.remind(lambda: f"{self._here}, waiting for others", self._say)
                if enough.left <= 0:
                    break
            else:
                enough = None
                least = sizes.fitting[0]
                waits.remind(lambda n=least: f"{self._here}, waiting for at least {n}", self._say)
                if waits.left <= 0:
                    alone = f" {self._at.host} is this machine alone."
                    raise NotArrivedError(
                        f"{self._here} after {waits.timeout:g} s (--start_timeout), and the job "
                        f"needs {least}. Check the launchers of the other machines: each must "
                        "be started with the same command, and must be able to reach machine 0 "
                        f"at {self._at}."
                        f"{alone if is_loopback(self._at.host) else ''}"
                    )
            self.receive(TICK)
        by_rank = sorted(self.peers, key=lambda peer: (peer.who.rank, peer.who.number))
        return by_rank[: max(0, sizes.of(len(by_rank) + 1) - 1)]

    @property
    def _here(self) -> str:
        return f"{len(self.peers) + 1} of {self._sizes} machines are here"

    def _begin(self, chosen: list[Peer]) -> tuple[Start, ReservedPort]:
        self.stop, self.end, self._told, self._lost = False, "", "", []
        try:
            port = ReservedPort(self._at.host)  # a new one, which nobody of the start before knows
        except GShardError:  # some are OSErrors
            raise
        except OSError as error:
            fault = f"machine 0 cannot reserve a port for process 0: {error.strerror or error}."
            raise GShardError(fault) from error
        start = Start(self._starts, len(chosen) + 1, 0, port.address.port)
        self._starts, self._since = self._starts + 1, time.monotonic()
        names = ", ".join([socket.gethostname(), *(peer.who.name for peer in chosen)])
        self._say(f"starting with {start.machines} of {self._sizes} machines: {names}")
        for rank, peer in enumerate(chosen, 1):
            peer.who.takes_part = True
            self.tell(line_of({"start": start._replace(rank=rank)}), peer)
        return start, port

    def poll(self) -> None:
        """Serves the others while processes run; stops all cleanly for machines that have come."""
        self._serve()
        every, running = self._asked.join_every, 1 + len(self._taking_part)
        is_due = every and time.monotonic() > self._since + 60 * every
        if is_due and not self.end and not self.stop:
            if self._sizes.of(len(self.peers) + 1) > running:
                self.stop = True
                self._say("other machines have come: stopping all processes cleanly")
                self._events.write("restart", why="other machines have come")

    @property
    def _taking_part(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.who.takes_part]

    def _serve(self) -> None:
        self.receive(0.0)
        for machine in (x.who for x in self._taking_part if x.who.report is not None):
            if machine.report.failed:
                self.end = self.end or f"processes of {machine} have failed"
            self.stop = self.stop or machine.report.leaves
        if self._signals:
            self.stop = True
            if SIGINT in self._signals:  # others have no reason to save
                self.end = self.end or "machine 0 was interrupted"
        order = "end" if self.end else "stop" if self.stop else ""
        if order != self._told:
            self._told = order
            for peer in self._taking_part:
                self.tell(line_of({order: self.end}), peer)

    def _await_reports(self, chosen: list[Peer], own: Report) -> list[Report]:
        """Waits until the processes of every machine have ended, or the machine is lost."""
        if own.failed and not self.end:
            self.end = "processes of machine 0 have failed"
        waits = None
        while late := [x for x in chosen if x in self.peers and x.who.report is None]:
            self._serve()
            if waits is None or not (self.end or self.stop or self._signals):  # they may save
                waits = Reminder(self._asked.grace + _LATE)
            waits.remind(lambda x=late[0].who: f"waiting for {x} to end its processes", self._say)
            if len(self._signals) > 1 or waits.left <= 0:
                for peer in late:
                    self.drop(peer)
            time.sleep(TICK)
        for peer in (x for x in chosen if x.who.report is not None and x.who.report.leaves):
            self._say(f"{peer.who} was told to stop, and leaves the job")
            self.drop(peer)
        return [peer.who.report for peer in chosen if peer.who.report is not None]

    # ---- connections -----------------------------------------------------------------------------

    def take(self, peer: Peer, line: bytes) -> None:
        """Takes a line of another launcher."""
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            message = json.loads(line)
            if peer.who is None:
                self._admit(peer, message["gshard_form"], message["name"], message["rank"])
            else:
                peer.who.report = Report.read(message["ended"])
            return
        self.drop(peer)  # another program

    def _admit(self, peer: Peer, given: str, name: str, rank: int | None) -> None:
        if given != (own := form(self._asked)):
            fault = (
                f"this launcher was started with {given}, and that of machine 0, at {self._at}, "
                f"with {own}. Start all machines of a job with the same command; pass what differs "
                "between them, such as a folder, in an environment variable. Give another job a "
                "--master of its own."
            )
            say(f"gshard: {name} ({peer.host}) is refused: it was started with {given}")
            self.tell(line_of({"error": fault}), peer)
            self.drop(peer)
            return
        notice_loss(peer.connection, self._asked.heartbeat_timeout)
        self._arrived += 1
        last = self._sizes.most
        self.admit(peer, Machine(self._arrived, last if rank is None else int(rank), str(name)))
        self.tell(line_of({"go": {"machine": self._arrived}}), peer)
        if self._over:  # it has come too late
            self.tell(self._over, peer)
            return
        every = f" (--join_every {self._asked.join_every:g})" if self._asked.join_every else ""
        later = f". It takes part from the next start of the job on{every}" if self._starts else ""
        self._say(f"{peer.who} has come: {self._here}{later}")

    def dropped(self, peer: Peer) -> None:
        """Learns that a machine is lost, or has left."""
        machine: Machine = peer.who
        if self._over or (machine.report is not None and machine.report.leaves):
            return
        if machine.takes_part and machine.report is None:
            self._lost.append(str(machine))
            self.end = self.end or f"{machine} is lost"
        self._say(f"{machine} {'is lost' if machine.takes_part else 'has left'}: {self._here}")

    def no_room(self, error: OSError) -> None:
        """Says that no machine can join for want of files."""
        say(f"gshard: no other machine can join: {error.strerror} (EMFILE)")

    def _say(self, text: str) -> None:
        """Says something here and on all machines that are connected."""
        say(f"gshard: {text}")
        self.tell(line_of({"say": f"gshard: {text}"}))
