"""Tells the processes of a job where each of them is: nothing is sent until one asks.

Process 0 serves `Places`, which every process joins over TCP with a token that the rendezvous gave
it. A process that waits long asks; process 0 then asks all, and answers with what they say, in a
few groups however many processes there are. A process that ends the job tells all of them why.
Of one that has ended only those hear who meet it: with thousands of processes, each message to all
about each of them would be too many.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gshard._util.activity import Place
from gshard.distributed.rendezvous import BACKLOG, Address

_ANSWER = 3.0  # seconds that processes have to say where they are
_GROUPS = 8  # of processes at the same place; the rest is only counted
_LONGEST = 2**16  # bytes of a line
_NO_ANSWER = "does not answer"
_GONE = "has ended without its exit functions, as by os._exit or a signal"


class Group(NamedTuple):
    """Processes at the same place.

    Attributes:
      text: the place.
      ranks: those of the processes, in order.
      seconds: for how long the longest has been there.
      is_busy: whether one of them works by itself.
      has_ended: whether they make no further call.
    """

    text: str
    ranks: list[int]
    seconds: float = 0.0
    is_busy: bool = False
    has_ended: bool = False


@dataclass
class Meeting:
    """Where processes wait for each other; `without` is one that has ended and will not come."""

    name: str  # the same on all of them
    ranks: list[int]
    over: threading.Event = field(default_factory=threading.Event)
    without: tuple[int, str] | None = None  # its rank, and how it has ended


class _Awaited(NamedTuple):
    """A meeting as process 0 knows it."""

    ranks: set[int]
    arrived: set[int]


class Server:
    """What process 0 serves."""

    def __init__(self, processes: int, listener: socket.socket, token: str):
        self._processes, self._listener, self._token = processes, listener, token
        self._joined: dict[int, asyncio.StreamWriter] = {}
        self._left: dict[int, str] = {}
        self._said: dict[int, Place] = {}
        self._gone: dict[int, str] = {}  # how they have ended
        self._meetings: dict[str, _Awaited] = {}
        self._end: str | None = None
        self._asking: asyncio.Task[list[list[Any]]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def listening(cls, processes: int, listener: socket.socket) -> Server:
        """Returns a server for a socket that listens."""
        return cls(processes, listener, secrets.token_hex(16))

    @property
    def invitation(self) -> tuple[int, str]:
        """Its port and token, which the rendezvous tells the other processes."""
        return self._listener.getsockname()[1], self._token

    async def start(self) -> None:
        """Serves in the running loop."""
        self._listener.setblocking(False)
        self._server = await asyncio.start_server(
            self._serve, sock=self._listener, limit=_LONGEST, backlog=BACKLOG
        )

    def close(self) -> None:
        """Stops to serve."""
        self._server.close()
        for writer in self._joined.values():
            writer.close()

    async def everyone_else_has_left(self, rank: int | None, seconds: float) -> None:
        """Waits until no process but `rank` is joined, or for so many seconds."""
        for _ in range(int(seconds / 0.05)):
            if len(self._joined) == (rank in self._joined):
                break
            await asyncio.sleep(0.05)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank = None
        with suppress(OSError, ValueError, TypeError, KeyError, asyncio.IncompleteReadError):
            hello = json.loads(await asyncio.wait_for(reader.readline(), 30))
            if not secrets.compare_digest(str(hello["token"]), self._token):
                writer.close()  # another program
                return
            rank = int(hello["rank"])
            self._joined[rank] = writer
            if self._end is not None:  # it comes late
                _send(writer, _line({"end": self._end}))
            while line := await reader.readline():
                self._take(rank, writer, json.loads(line))
        writer.close()
        if rank is not None:
            self._joined.pop(rank, None)
            self._gone[rank] = self._left.setdefault(rank, _GONE)
            for name in [x for x, meeting in self._meetings.items() if rank in meeting.ranks]:
                self._end_meeting(name, rank)

    def _take(self, rank: int, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
        if "place" in message:
            self._said[rank] = Place(*message["place"])
        elif "ask" in message:
            task = asyncio.ensure_future(self._answer(writer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif "end" in message:
            self._end = message["end"]
            self._tell(self._joined, {"end": self._end})
        elif "leave" in message:
            self._left[rank] = message["leave"]
        elif "meet" in message:
            name, ranks = message["meet"]
            gone = None
            if name not in self._meetings:
                meeting = self._meetings[name] = _Awaited(set(_unpacked(ranks)), set())
                gone = min(meeting.ranks & self._gone.keys(), default=None)
            meeting = self._meetings[name]
            meeting.arrived.add(rank)
            if gone is not None or len(meeting.arrived) == len(meeting.ranks):
                self._end_meeting(name, gone)

    def _end_meeting(self, name: str, gone: int | None) -> None:
        """Ends a meeting to which all have come, or one will not come."""
        without = None if gone is None else [gone, self._gone[gone]]
        self._tell(self._meetings.pop(name).arrived, {"met": [name, without]})

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        if self._asking is None or self._asking.done():  # one round for all that ask together
            self._asking = asyncio.ensure_future(self._ask_all())
        found = await asyncio.shield(self._asking)
        _send(writer, _line({"places": found}))

    async def _ask_all(self) -> list[list[Any]]:
        self._said.clear()
        self._tell(self._joined, {"where": True})
        for _ in range(int(_ANSWER / 0.02)):
            if self._joined.keys() <= self._said.keys():
                break
            await asyncio.sleep(0.02)
        groups: dict[str, Group] = {}
        for rank in range(self._processes):
            said = self._said.get(rank) or Place(self._left.get(rank, _NO_ANSWER), 0.0)
            has_ended = said.has_ended or (rank in self._left and rank not in self._joined)
            group = groups.setdefault(said.text, Group(said.text, []))
            group.ranks.append(rank)
            groups[said.text] = Group(
                said.text,
                group.ranks,
                max(group.seconds, said.seconds),
                group.is_busy or said.is_busy,
                group.has_ended or has_ended,
            )
        found = sorted(groups.values(), key=lambda x: (not x.has_ended, len(x.ranks)))
        return [[x.text, _packed(x.ranks), *x[2:]] for x in found[:_GROUPS]]

    def _tell(self, ranks: Iterable[int], message: dict[str, Any]) -> None:
        line = _line(message)
        for writer in [self._joined[rank] for rank in ranks if rank in self._joined]:
            _send(writer, line)


@dataclass
class Member:
    """A process that has joined, process 0 too.

    `place` returns where it is now, and `end` is called with why the job is to end.
    """

    rank: int
    at: Address
    token: str
    place: Callable[[], Place]
    end: Callable[[str], None]
    _writer: asyncio.StreamWriter | None = None
    _meetings: dict[str, Meeting] = field(default_factory=dict)
    _answers: list[asyncio.Future[list[Group]]] = field(default_factory=list)
    _server_has_ended: bool = False

    async def join(self, timeout: float) -> None:
        """Joins, and answers from now on in the running loop.

        Raises:
          OSError: process 0 cannot be reached.
        """
        opening = asyncio.open_connection(*self.at, limit=_LONGEST)
        reader, self._writer = await asyncio.wait_for(opening, timeout)
        descriptor = self._writer.get_extra_info("socket").fileno()
        # Otherwise a forked data worker keeps the connection of a process that has ended.
        os.register_at_fork(after_in_child=lambda: os.close(descriptor))
        self._say({"token": self.token, "rank": self.rank})
        self._reading = asyncio.ensure_future(self._read(reader))

    async def ask(self) -> list[Group]:
        """Returns where all processes are, in groups; empty if process 0 does not answer."""
        if self._writer is None or self._writer.is_closing():
            return []
        answer: asyncio.Future[list[Group]] = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._say({"ask": True})
        try:
            return await asyncio.wait_for(answer, 2 * _ANSWER)
        except TimeoutError:
            return []

    def end_all(self, why: str) -> None:
        """Tells all processes that the job is to end."""
        self._say({"end": why})

    def close(self) -> None:
        """Closes the connection, without a word."""
        if self._writer is not None:
            self._writer.close()

    def leave(self, words: str) -> None:
        """Tells process 0 that this one ends, and how."""
        self._say({"leave": words})

    def meet(self, meeting: Meeting) -> None:
        """Tells process 0 that this one has come to a meeting, which is over when all have."""
        self._meetings[meeting.name] = meeting
        self._say({"meet": [meeting.name, _packed(meeting.ranks)]})
        if self._server_has_ended:
            self._end_meeting(meeting.name, (0, "has ended"))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError, ValueError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                message = json.loads(line)
                if "where" in message:
                    self._say({"place": list(self.place())})
                elif "end" in message:
                    self.end(message["end"])
                elif "met" in message:
                    name, without = message["met"]
                    self._end_meeting(name, without and tuple(without))
                elif "places" in message:
                    groups = [Group(x, _unpacked(y), *z) for x, y, *z in message["places"]]
                    for answer in self._answers:
                        if not answer.done():
                            answer.set_result(groups)
                    self._answers.clear()
        self.close()
        self._server_has_ended = True
        for name in [*self._meetings]:
            self._end_meeting(name, (0, "has ended"))

    def _end_meeting(self, name: str, without: tuple[int, str] | None) -> None:
        meeting = self._meetings.pop(name)
        meeting.without = without
        meeting.over.set()

    def _say(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            _send(self._writer, _line(message))


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _send(writer: asyncio.StreamWriter, line: bytes) -> None:
    with suppress(OSError, RuntimeError):  # it has left
        writer.write(line)


def _packed(ranks: Sequence[int]) -> list[list[int]]:
    """Ascending ranks as ranges: first, number and stride. Most sets of ranks are one or two."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and (found[-1][1] == 1 or rank == found[-1][0] + found[-1][1] * found[-1][2]):
            first, count, stride = found[-1]
            found[-1] = [first, count + 1, stride if count > 1 else rank - first]
        else:
            found.append([rank, 1, 1])
    return found


def _unpacked(ranges: Sequence[Sequence[int]]) -> list[int]:
    return [x + i * stride for x, count, stride in ranges for i in range(count)]
