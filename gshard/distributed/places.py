"""Tells the processes of a job where each of them is: nothing is sent until one asks.

Process 0 serves `Places`, which every process joins over TCP with a token that the rendezvous gave
it. A process that waits long asks; process 0 then asks all, and answers with what they say, in a
few groups however many processes there are. A process that ends the job tells all of them why.
Before processes run a collective outside a step they meet here, each with the name of its call. A
process whose connection is lost joins again; until then the others do not wait for it here, and
their collective does. Of one that has ended only those hear who meet it: with thousands of
processes, each message to all about each of them would be too many.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from gshard._util.activity import Place
from gshard._util.open_files import closed_in_forks
from gshard.distributed.messages import line_of, packed, send, unpacked
from gshard.distributed.rendezvous import BACKLOG, Address

_ANSWER = 3.0  # seconds that processes have to say where they are
_GROUPS = 8  # of processes at the same place; the rest is only counted
_LONGEST = 2**16  # bytes of a line
_NO_ANSWER = "does not answer"
_LOST = "has lost its connection, or ended without its exit functions"
_JOIN = 10.0  # seconds in which all processes join
_PAUSE, _TRIES = 1.0, 20  # seconds between attempts to join again, and how many


class Group(NamedTuple):
    """Processes at the same place.

    Attributes:
      text: the place.
      ranks: those of the processes, in order.
      seconds: for how long the longest has been there.
      is_busy: whether one of them works by itself.
      has_ended: whether they make no further call.
      only_waits: whether they do nothing but wait for others.
      handles: the exception that one of them handles there, as in `Place`.
    """

    text: str
    ranks: list[int]
    seconds: float = 0.0
    is_busy: bool = False
    has_ended: bool = False
    only_waits: bool = False
    handles: str = ""


@dataclass
class Meeting:
    """Where processes wait for each other, before a collective.

    Attributes:
      ranks: those that meet, in order.
      number: how many meetings of these ranks there were, from 1.
      call: what they are about to do, the same on all of them.
      where: the same with the line of the user's code, for messages.
      over: set when it is over.
      without: rank and last words of a process that has ended and will not come.
      others: what they do, if it is not the same; of each thing one rank that does it.
    """

    ranks: list[int]
    number: int
    call: str
    where: str
    over: threading.Event = field(default_factory=threading.Event)
    without: tuple[int, str] | None = None
    others: dict[int, str] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """A short name of the ranks."""
        return hashlib.blake2b(str(self.ranks).encode(), digest_size=8).hexdigest()


@dataclass
class _Awaited:
    """A meeting as process 0 knows it."""

    ranks: set[int]
    number: int
    arrived: dict[int, tuple[str, str]] = field(default_factory=dict)  # the call, and where
    differs: bool = False  # the calls


class Server:
    """What process 0 serves."""

    def __init__(self, processes: int, listener: socket.socket, token: str):
        self._processes, self._listener, self._token = processes, listener, token
        self._joined: dict[int, asyncio.StreamWriter] = {}
        self._left: dict[int, str] = {}
        self._said: dict[int, Place] = {}
        self._meetings: dict[str, _Awaited] = {}
        self._met: dict[str, int] = {}  # number of the last, by their key
        self._failed: dict[tuple[str, int], tuple[Any, ...]] = {}  # the outcome, by key and number
        self._seen: set[int] = set()  # those that have joined once
        self._all_joined = False  # or have had the time to
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
        asyncio.get_running_loop().call_later(1.5 * _JOIN, self._nobody_joins_late)

    def close(self) -> None:
        """Stops serving."""
        self._server.close()
        for writer in self._joined.values():
            writer.close()

    def is_at_work(self, rank: int) -> bool:
        """Whether a process is connected, and has not said that its script has ended."""
        return rank in self._joined and rank not in self._left

    async def everyone_else_has_left(self, rank: int | None, seconds: float) -> None:
        """Waits until no process but `rank` is joined, for at most `seconds`."""
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
            self._seen.add(rank)
            if self._end is not None:  # it comes late
                send(writer, line_of({"end": self._end}))
            while line := await reader.readline():
                self._take(rank, writer, json.loads(line))
        writer.close()
        if rank is not None and self._joined.get(rank) is writer:
            del self._joined[rank]
            self._look_at_meetings()

    def _nobody_joins_late(self) -> None:
        self._all_joined = True
        self._look_at_meetings()

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
            key, number, ranks, call, where = message["meet"]
            if number <= self._met.get(key, 0):  # it comes after the end
                self._tell([rank], {"met": [key, *self._failed.get((key, number), (None, []))]})
                return
            if key not in self._meetings:
                self._meetings[key] = _Awaited(set(unpacked(ranks)), number)
            meeting = self._meetings[key]
            meeting.arrived[rank] = call, where
            meeting.differs |= call != next(iter(meeting.arrived.values()))[0]
            self._look_at_meeting(key)
        elif "withdraw" in message and message["withdraw"] in self._meetings:
            self._meetings[message["withdraw"]].arrived.pop(rank, None)

    def _look_at_meetings(self) -> None:
        for key in [*self._meetings]:
            self._look_at_meeting(key)

    def _look_at_meeting(self, key: str) -> None:
        """Ends a meeting to which all have come, or one will not come, or for different calls."""
        meeting = self._meetings[key]
        arrived, without, others = meeting.arrived, None, list[Any]()
        all_joined = len(self._joined) == self._processes  # then none is looked at
        missing = meeting.ranks - arrived.keys() if not all_joined else set[int]()
        if meeting.differs:
            first = {where: rank for rank, (_, where) in sorted(arrived.items(), reverse=True)}
            others = sorted([rank, where] for where, rank in first.items())[:_GROUPS]
        elif ended := missing & self._left.keys() - self._joined.keys():
            without = [min(ended), self._left[min(ended)]]
        elif len(arrived) < len(meeting.ranks) and (
            all_joined or not all(self._cannot_come(rank) for rank in missing)
        ):
            return
        del self._meetings[key]
        self._met[key] = meeting.number
        if without or others:  # the others may have failed again before the last one comes
            self._failed[key, meeting.number] = without, others
        self._tell(arrived, {"met": [key, without, others]})

    def _cannot_come(self, rank: int) -> bool:
        """Whether a process is not connected; its collective is waited for instead."""
        return rank not in self._joined and (rank in self._seen or self._all_joined)

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        if self._asking is None or self._asking.done():  # one round for all that ask together
            self._asking = asyncio.ensure_future(self._ask_all())
        found = await asyncio.shield(self._asking)
        send(writer, line_of({"places": found}))

    async def _ask_all(self) -> list[list[Any]]:
        self._said.clear()
        self._tell(self._joined, {"where": True})
        for _ in range(int(_ANSWER / 0.02)):
            if self._joined.keys() <= self._said.keys():
                break
            await asyncio.sleep(0.02)
        groups: dict[str, Group] = {}
        for rank in range(self._processes):
            missing = _LOST if rank in self._seen - self._joined.keys() else _NO_ANSWER
            said = self._said.get(rank) or Place(self._left.get(rank, missing), 0.0)
            has_ended = said.has_ended or (rank in self._left and rank not in self._joined)
            group = groups.setdefault(said.text, Group(said.text, [], only_waits=True))
            group.ranks.append(rank)
            groups[said.text] = Group(
                said.text,
                group.ranks,
                max(group.seconds, said.seconds),
                group.is_busy or said.is_busy,
                group.has_ended or has_ended,
                group.only_waits and said.only_waits,
                group.handles or said.handles,
            )
        found = sorted(groups.values(), key=lambda x: (not x.has_ended, len(x.ranks)))
        return [[x.text, packed(x.ranks), *x[2:]] for x in found[:_GROUPS]]

    def _tell(self, ranks: Iterable[int], message: dict[str, Any]) -> None:
        line = line_of(message)
        for writer in [self._joined[rank] for rank in ranks if rank in self._joined]:
            send(writer, line)


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
    _descriptor: int = -1
    _is_lost: bool = False  # for good

    async def join(self) -> None:
        """Joins, and answers from now on in the running loop; joins again after a lost connection.

        Raises:
          OSError: process 0 cannot be reached.
        """
        reader = await self._connect()
        self._staying = asyncio.ensure_future(self._stay(reader))

    async def _connect(self) -> asyncio.StreamReader:
        opening = asyncio.open_connection(*self.at, limit=_LONGEST)
        reader, self._writer = await asyncio.wait_for(opening, _JOIN)
        connection = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._descriptor = connection.fileno()
        closed_in_forks.add(self._descriptor)
        self._say({"token": self.token, "rank": self.rank})
        for meeting in self._meetings.values():
            self._say_meeting(meeting)
        return reader

    async def _stay(self, reader: asyncio.StreamReader) -> None:
        while not self._is_lost:
            await self._read(reader)
            self._disconnect()
            for _ in range(0 if self._is_lost else _TRIES):
                await asyncio.sleep(_PAUSE)
                with suppress(OSError, TimeoutError):
                    reader = await self._connect()
                    break
            else:
                self._is_lost = True
        for key in [*self._meetings]:
            self._end_meeting(key, None, [])

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
        """Closes the connection for good, without a word."""
        self._is_lost = True
        self._disconnect()

    def _disconnect(self) -> None:
        closed_in_forks.discard(self._descriptor)
        self._descriptor = -1  # the number may be that of another file from now on
        if self._writer is not None:
            self._writer.close()

    def leave(self, words: str) -> None:
        """Tells process 0 that this one ends, and how."""
        self._say({"leave": words})

    def meet(self, meeting: Meeting) -> None:
        """Tells process 0 that this one has come to a meeting, which is over when all have."""
        self._meetings[meeting.key] = meeting
        if self._is_lost:
            self._end_meeting(meeting.key, None, [])
        else:
            self._say_meeting(meeting)

    def withdraw(self, meeting: Meeting) -> None:
        """Tells process 0 that this one does not wait at a meeting any more."""
        if self._meetings.pop(meeting.key, None) is not None:
            self._say({"withdraw": meeting.key})

    def _say_meeting(self, meeting: Meeting) -> None:
        ranks = packed(meeting.ranks)
        self._say({"meet": [meeting.key, meeting.number, ranks, meeting.call, meeting.where]})

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError, ValueError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                message = json.loads(line)
                if "where" in message:
                    self._say({"place": list(self.place())})
                elif "end" in message:
                    self.end(message["end"])
                elif "met" in message:
                    self._end_meeting(*message["met"])
                elif "places" in message:
                    groups = [Group(x, unpacked(y), *z) for x, y, *z in message["places"]]
                    for answer in self._answers:
                        if not answer.done():
                            answer.set_result(groups)
                    self._answers.clear()

    def _end_meeting(self, key: str, without: Any, others: list[Any]) -> None:
        meeting = self._meetings.pop(key, None)
        if meeting is not None:  # else it has withdrawn
            meeting.without, meeting.others = without and tuple(without), dict(others)
            meeting.over.set()

    def _say(self, message: dict[str, Any]) -> None:
        if self._writer is not None:
            send(self._writer, line_of(message))
