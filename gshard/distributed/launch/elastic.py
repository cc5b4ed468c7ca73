"""An elastic job: it starts with the machines that are there, and again with those that are left.

The launcher at the address of `--master` is the coordinator, on machine 0: it counts the machines
and decides. The others keep a connection to it, over which both send lines of JSON; where one ends,
a machine is lost. Lines are read between other work, in one thread.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing, suppress
from typing import Any

from gshard._util.errors import GShardError
from gshard.distributed.exit import PREEMPTED_EXIT_CODE
from gshard.distributed.launch.background_writer import say
from gshard.distributed.launch.coordinator import Coordinator
from gshard.distributed.launch.event_log import EventLog
from gshard.distributed.launch.job import Request, told_to_stop
from gshard.distributed.launch.machine import TICK, Start, form, notice_loss, run_start
from gshard.distributed.messages import line_of
from gshard.distributed.rendezvous import (
    Address,
    NotArrivedError,
    PortTakenError,
    Reminder,
    ask,
    listen,
)

JOIN_TIMEOUT, MAX_RESTARTS = 30, 3  # seconds; restarts in a row without progress
_COORDINATOR = "machine 0, whose launcher coordinates the job,"
_SILENCE = 5.0  # seconds
_LONGEST = 2**16  # bytes that are read at once


def run_elastic(asked: Request, master: Address, signals: list[int]) -> int:
    """Runs the part of an elastic job on this machine; returns the exit code."""
    listener, reason, hint = None, "", ""
    if not asked.rank:
        try:
            listener = listen(master)
        except GShardError as error:  # another machine's address, or another launcher listens
            if asked.rank == 0:
                raise
            reason = f" This machine cannot be machine 0 itself: {error}"
            if isinstance(error, PortTakenError):  # the address is its own
                hint = f".{reason}"
    try:
        if listener is None:
            return Member(asked, master, signals, hint).run()
        with closing(Coordinator(asked, master, listener, signals)) as coordinator:
            return coordinator.run()
    except NotArrivedError as error:
        say(f"gshard: {error}{reason}")
        return 1


class Member:
    """The launcher of a machine that is not the coordinator; its `Orders` come from there."""

    def __init__(self, asked: Request, at: Address, signals: list[int], hint: str = ""):
        self._asked, self._at, self._signals, self._hint = asked, at, signals, hint
        self._events: EventLog | None = None
        self._machine: int | None = None  # the number of the machine in `_events`
        self._messages: list[dict[str, Any]] = []
        self.stop, self.end, self._is_lost = False, "", False

    def run(self) -> int:
        """Takes part until the job is over, or this machine leaves; returns the exit code."""
        code = None
        try:
            return (code := self._take_part())
        finally:
            if self._events is not None:
                self._events.write("exit", code=code)
                self._events.close()

    def _take_part(self) -> int:
        name = socket.gethostname()
        hello = line_of({"gshard_form": form(self._asked), "name": name, "rank": self._asked.rank})
        while not self._signals:
            patience = Reminder(self._asked.start_timeout, self._signals)
            who = f"the launcher of {name}"
            try:
                joined = ask(self._at, hello, patience, who, _COORDINATOR, self._hint)
            except NotArrivedError:
                if self._signals:
                    break
                raise
            self._connection, welcome, self._received = joined
            with self._connection:
                code = self._follow(welcome["machine"])
            if code is not None:
                return code
            if not self._signals:
                say(f"gshard: {_COORDINATOR} is lost. Waiting for it to come back.")
        return told_to_stop(self._signals[0])

    def _follow(self, machine: int) -> int | None:
        """Does what the coordinator says; returns the exit code, or None once it is lost."""
        notice_loss(self._connection, self._asked.heartbeat_timeout)
        self._connection.setblocking(False)
        self._is_lost, limit = False, self._asked.log_size * 2**20
        self._messages.clear()
        if self._events is None or machine != self._machine:
            if self._events is not None:
                self._events.close()
            self._machine, self._events = machine, EventLog(self._asked.log_dir, machine, limit)
        events = self._events
        self._take(b"")
        while (self._messages or not self._is_lost) and not self._signals:
            if not self._messages:
                time.sleep(TICK)
                self.poll()
                continue
            message = self._messages.pop(0)
            if "over" in message:
                say(f"gshard: the job is over: {message['why']}")
                return int(message["over"])
            start, host = Start(*message["start"]), self._at.host
            outcome, ended = run_start(self._asked, host, start, self._signals, events, self)
            with suppress(OSError):
                self._connection.sendall(line_of({"ended": ended}))
            if self._signals:
                self._leave()
                code, said = outcome.summary
                in_order = code in (0, PREEMPTED_EXIT_CODE)
                leaves = "gshard: this machine leaves the job, as it was told to"
                say(said if said and not in_order else leaves)
                return code
        return None

    def poll(self) -> None:
        """Reads what the coordinator has said."""
        if self._is_lost:
            return
        try:
            more = self._connection.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        if not more:
            self._lose()
        self._take(more)

    def _lose(self) -> None:
        self._is_lost, self.end = True, self.end or "machine 0 is lost"

    def _take(self, more: bytes) -> None:
        *lines, self._received = (self._received + more).split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:  # it was cut off
                self._lose()
                return
            if "say" in message:
                say(message["say"])
            elif "stop" in message:
                self.stop = True
            elif "end" in message:
                self.end = message["end"]
            else:
                self._messages.append(message)  # to start, or that the job is over
                self.stop, self.end = False, message.get("why", "")

    def _leave(self) -> None:
        """Lets the coordinator close first, so that it gets the last line."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        until = time.monotonic() + _SILENCE
        while not self._is_lost and time.monotonic() < until:
            time.sleep(TICK)
            self.poll()
