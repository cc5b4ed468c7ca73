"""The watchdog: a thread that says what its process waits for, and ends a job that hangs.

It looks once a second at what the process does (`activity`) and communicates only when something
has waited long: then it asks where the other processes are (`places`), and prints one line. After
`hang_timeout` it ends all processes of the job, each with the stacks of its threads.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from gshard._util import activity
from gshard._util.activity import Call, Place, at, calling, doing, handled
from gshard._util.errors import GShardError, some
from gshard._util.events import last_step, tell, tell_joined
from gshard.distributed import unfinished
from gshard.distributed.places import Group, Meeting, Member, Server
from gshard.distributed.rendezvous import Address

HANG_TIMEOUT = 600  # seconds
REMIND = 30.0  # seconds that something waits before a line says so
HANGS = "gshard: the job hangs: "  # how the line of a job that was ended begins
LAST_SAVED = "gshard: the last complete checkpoint is "

_THREAD, _DEVICES_THREAD = "gshard-watchdog", "gshard-devices"
_TICK = 1.0  # seconds between looks
_AGAIN = 60.0  # seconds until the second line; each later one takes twice as long
_LONG_STEP = 3.0  # times the longest call so far, which a call of all may take before a line
_BUSY = 6  # times `hang_timeout`, where it is not certain that a job hangs
_LAST_WORK = 30.0  # seconds that a save may go on when the job is ended


class _Wait(NamedTuple):
    """Something that waits for other processes."""

    what_runs: doing | Call
    text: str
    seconds: float
    handles: str  # the exception that the thread handles


class Watchdog:
    """The watchdog of one process.

    Args:
      rank: that of this process; None if it is not known.
      hang_timeout: seconds after which a wait ends the job; 0 for never.
      at: address of process 0's `Server`; None where no rendezvous gave one, see `introduce`.
      token: what the server asks for.
      server: that of process 0; None in the others.
    """

    def __init__(
        self,
        rank: int | None,
        hang_timeout: float,
        at: Address | None = None,
        token: str = "",
        server: Server | None = None,
    ):
        self._rank, self._hang_timeout, self._server = rank, hang_timeout, server
        self._member: Member | None = None
        if at is not None and rank is not None:
            self._member = Member(rank, at, token, self._place, self._end_soon)
        self.knows_others: bool = self._member is not None  # or did, until that failed
        self._devices = _Devices()
        self._due: dict[object, float] = {}  # when a wait is mentioned, in seconds of its age
        self._at_end: doing | None = None  # the end of the script
        self._ending = False
        self._joining = threading.Event()  # set when `_member` can be asked, or never will be
        self._met: dict[tuple[int, ...], int] = {}  # how many meetings, by ranks

    def start(self) -> None:
        """Starts the thread."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
        self._thread.start()
        tell_joined(True)
        atexit.register(self._leave)
        activity.meeting_points.append(self._meet)

    def introduce(self, rank: int, at: Address, token: str, server: Server | None) -> None:
        """Tells a watchdog that has started without an address where process 0 serves."""
        self.knows_others = True
        self._rank, self._server = rank, server
        self._member = Member(rank, at, token, self._place, self._end_soon)
        self._joining.clear()
        asyncio.run_coroutine_threadsafe(self._join(), self._loop)

    def are_at_work(self, ranks: Iterable[int]) -> bool:
        """Whether these processes are known not to have ended, which only process 0 knows."""
        return self._server is not None and all(map(self._server.is_at_work, ranks))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._watch())

    async def _join(self) -> None:
        try:
            if self._server is not None:
                await self._server.start()
            if self._member is not None:
                await self._member.join()
        except (OSError, TimeoutError) as error:
            where = "" if self._member is None else f" at {self._member.at}"
            _say(
                f"gshard: process {self._rank} cannot reach the watchdog of process 0{where} "
                f"({error or 'no answer'}). Reports of long waits will not say where the other "
                "processes are. Allow TCP connections between the machines."
            )
            self._member = None
        finally:
            self._joining.set()

    async def _watch(self) -> None:
        await self._join()
        while True:
            await asyncio.sleep(_TICK)
            try:
                await self._look()
            except Exception:  # of the watchdog itself: the job goes on
                _say(f"gshard: the watchdog failed:\n{traceback.format_exc()}")

    async def _look(self) -> None:
        self._devices.look()
        waits = self._waits()
        self._due = {x.what_runs: self._due[x.what_runs] for x in waits if x.what_runs in self._due}
        spoke = False
        for wait in waits:
            due = self._due.get(wait.what_runs)
            if due is None:
                due = self._due[wait.what_runs] = REMIND
            hangs = 0 < self._hang_timeout <= wait.seconds
            if not hangs and wait.seconds < due:
                continue
            groups = await self._member.ask() if self._member is not None else []
            usual = _LONG_STEP * self._devices.longest
            is_call = isinstance(wait.what_runs, Call | calling)
            if self._ends(wait, groups):
                await self._end_all(wait, groups)
            elif len(groups) == 1 and is_call and wait.seconds < usual:
                self._due[wait.what_runs] = usual  # all are in a call that takes long
            elif wait.seconds >= due:
                self._due[wait.what_runs] = wait.seconds + max(_AGAIN, wait.seconds)
                tell("wait", last_step(), wait.seconds, what=wait.text)
                if self._speaks(groups) and not spoke:
                    spoke = True  # of several waits at once, as of a save and the call for its end
                    _say(f"gshard: {self._sentence(wait, groups)} {self._outlook(wait, groups)}")

    def _waits(self) -> list[_Wait]:
        now = time.monotonic()
        waits = [
            _Wait(
                x,
                x.what if x is self._at_end else f"{x}{at(x.line)}",
                now - x.began,
                handled(x.thread),
            )
            for x in activity.running()
            if x.waits
        ]
        call = self._devices.unfinished
        if call is not None:
            text, main = f"in {call}{at(activity.main_line())}", threading.main_thread().ident
            waits.append(_Wait(call, text, now - self._devices.since, handled(main)))
        return waits

    def _ends(self, wait: _Wait, groups: list[Group]) -> bool:
        """Whether a wait ends the job."""
        if not self._hang_timeout or wait.what_runs is self._at_end:  # JAX ends that one
            return False
        if _ended(wait, groups):
            return True
        return wait.seconds >= self._limit(groups)

    def _limit(self, groups: list[Group]) -> float:
        # A process may compile or write, all may be in one long call, or nothing is known.
        uncertain = len(groups) < 2 or any(group.is_busy for group in groups)
        return self._hang_timeout * (_BUSY if uncertain else 1)

    def _speaks(self, groups: list[Group]) -> bool:
        """Whether this process speaks for those that are at the same place."""
        return not any(self._rank in group.ranks[1:] for group in groups)

    def _sentence(self, wait: _Wait, groups: list[Group]) -> str:
        who = "this process" if self._rank is None else f"process {self._rank}"
        said = f"{who} has waited {wait.seconds:.0f} s {wait.text}{wait.handles}."
        others = [Group(x.text, [r for r in x.ranks if r != self._rank], *x[2:]) for x in groups]
        others = [group for group in others if group.ranks]
        if len(groups) == 1 and others:
            return f"{said} All processes are in this call."
        for group in others:
            seconds = f" for {group.seconds:.0f} s" if group.seconds >= 1 else ""
            many = "processes" if len(group.ranks) > 1 else "process"
            said += f" {many.capitalize()} {some(group.ranks, 8)}: "
            said += f"{group.text}{seconds}{group.handles}."
        if not groups and self._member is not None:
            said += " Process 0 does not answer."
        return said

    def _outlook(self, wait: _Wait, groups: list[Group]) -> str:
        limit = self._limit(groups)
        end = f" If this lasts {limit:g} s, the job is ended (hang_timeout)." if limit else ""
        if wait.what_runs is self._at_end:
            return "JAX waits 5 minutes at the end of a script for the others, then it fails."
        if len(groups) == 1:
            return (
                "Either the computation is slow, or a collective waits for a call that one process "
                f"did not make.{end}"
            )
        if groups and all(group.only_waits for group in groups):
            meet = "They wait for each other: unless a computation is just slow, this never ends."
        else:
            meet = "Ignore this if one process is meant to work alone here."
        return f"{_SAME_CALLS} {meet}{end}"

    def _place(self) -> Place:
        return activity.place(self._devices.not_known_finished())

    def _meet(self, ranks: Iterable[int], call: str) -> None:
        self._joining.wait()
        member, found = self._member, sorted({*ranks})
        if member is None:
            return
        key = tuple(found)
        self._met[key] = number = self._met.get(key, 0) + 1
        own = [x.what for x in activity.running() if x.thread == threading.get_ident() and x.waits]
        where = f"{[call, *own][-1]}{at(activity.user_line(sys._getframe()))}"
        meeting = Meeting(found, number, call, where)
        self._loop.call_soon_threadsafe(member.meet, meeting)
        try:
            # With a timeout, so that Ctrl-C ends it.
            while not meeting.over.wait(1.0) and self._thread.is_alive():
                pass
        except BaseException:
            self._met[key] -= 1
            self._loop.call_soon_threadsafe(member.withdraw, meeting)
            raise
        if meeting.others:
            calls = "; ".join(f"process {rank}: {text}" for rank, text in meeting.others.items())
            raise GShardError(f"the processes do not make the same call: {calls}. {_SAME_CALLS}")
        if meeting.without is not None:
            rank, words = meeting.without
            raise ConnectionError(f"process {rank} has left the job: {words}")

    async def _end_all(self, wait: _Wait, groups: list[Group]) -> None:
        if not any(x.what_runs is wait.what_runs for x in self._waits()):
            return  # it has ended just now
        why = self._sentence(wait, groups)
        handle = [bool(group.handles) for group in groups]
        if any(handle) and not all(handle):
            advice = (
                "A call in `except` or `finally` waits for processes that had no such exception. "
                "The exception is with the stacks, in the log of that process."
            )
        elif ended := _ended(wait, groups):
            advice = (
                f"No further call comes from process{'es' if len(ended) > 1 else ''} "
                f"{some(ended, 8)}, where the script has ended: look for a loop that ended earlier "
                "there, or a call under `if rank == 0`."
            )
        else:
            advice = (
                "Look for a call under `if rank == 0`, a loop that ends earlier or a batch that is "
                "smaller on one process, or data and disks that do not answer. If it is meant to "
                "take so long, raise hang_timeout (gshard launch --hang_timeout SECONDS)."
            )
        why = f"{why} {_SAME_CALLS} {advice}"
        if self._member is not None:
            self._member.end_all(why)
            await asyncio.sleep(2 * _TICK)  # this one is told too
        self._end_soon(why)

    def _end_soon(self, why: str) -> None:
        if not self._ending:
            self._ending = True
            self._last_task = asyncio.ensure_future(self._end(why))

    async def _end(self, why: str) -> None:
        unfinished.exits_with_error()
        tell("hang", last_step(), why=why)
        _say_stacks()
        if path := activity.last_saved():
            _say(f"{LAST_SAVED}{path}")
        _say(f"{HANGS}{why}")
        began = time.monotonic()
        if self._server is not None:  # the others end when it does
            await self._server.everyone_else_has_left(self._rank, _LAST_WORK)
        unfinished.wait(began, _LAST_WORK)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(1)

    def _leave(self) -> None:
        """Tells the others that the script of this process has ended."""
        failed = unfinished.is_exiting()
        while not failed and self._devices.is_working():  # a thread of JAX must not outlive Python
            time.sleep(0.02)
        activity.script_has_ended(failed)
        tell_joined(False)
        if not failed:
            self._at_end = doing("at the end of its script", waits=True)
            self._at_end.__enter__()
        if self._member is None or not self._thread.is_alive():
            return
        told = threading.Event()
        self._loop.call_soon_threadsafe(self._member.leave, activity.last_words())
        self._loop.call_soon_threadsafe(told.set)
        told.wait(0.5)


class _Devices:
    """Whether the devices have finished the calls of this process; a thread waits for them."""

    def __init__(self) -> None:
        self.unfinished: Call | None = None
        self.since = 0.0
        self.longest = 0.0  # seconds, of a call that was looked at
        self._finished: Call | None = None
        self._wake, self._lock = threading.Event(), threading.Lock()
        self._is_started = False

    def look(self) -> None:
        """Begins to wait for the last call, unless one is waited for."""
        with self._lock:
            last = activity.last_call()
            if self.unfinished is not None or last is None or last is self._finished:
                return
            self.since, self.unfinished = time.monotonic(), last
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._wait, name=_DEVICES_THREAD, daemon=True).start()
            self._wake.set()

    def is_working(self) -> bool:
        """Whether the last call has not finished, as far as is known; looks again."""
        self.look()
        return self.not_known_finished() is not None

    def not_known_finished(self) -> Call | None:
        """The call that is waited for, or the last one, unless it was seen to have finished."""
        last = activity.last_call()
        return self.unfinished or (None if last is self._finished else last)

    def _wait(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            if (call := self.unfinished) is not None:
                activity.wait_until_ready(call)
                self.longest = max(self.longest, time.monotonic() - self.since)
                self.unfinished, self._finished = None, call


def _ended(wait: _Wait, groups: list[Group]) -> list[int]:
    """The ranks that a wait waits for, and whose scripts have ended: they make no further call."""
    ranks = wait.what_runs.ranks
    ended = [rank for group in groups if group.has_ended for rank in group.ranks]
    return ended if ranks is None else sorted(ranks.intersection(ended))


_SAME_CALLS = "All processes must make the same calls, in the same order."


def _say_stacks() -> None:
    """Prints where each Python thread of this process is, but for the watchdog's own."""
    names = {x.ident: x.name for x in threading.enumerate()}
    for thread, frame in sys._current_frames().items():
        name = names.get(thread, f"{thread}")
        if name not in (_THREAD, _DEVICES_THREAD):
            lines = "".join(traceback.format_stack(frame)).rstrip()
            _say(f"gshard: the stack of {name}, most recent call last:\n{lines}")
            if (error := activity.handling(thread)) is not None:
                lines = "".join(traceback.format_tb(error.__traceback__))
                _say(f"gshard: {name} handles this exception:\n{lines}{activity.name_of(error)}")


def _say(line: str) -> None:
    with suppress(Exception):  # stderr may be any object of the user's
        print(line, file=sys.stderr, flush=True)
