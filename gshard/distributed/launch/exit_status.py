"""Explains how a process ended: its exit code or signal, its meaning, and which failed first."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from gshard._util.errors import some
from gshard.distributed.exit import LOST_PEER, PREEMPTED_EXIT_CODE
from gshard.distributed.unfinished import Work
from gshard.distributed.watchdog import HANGS, LAST_SAVED

TAIL = 20  # lines
_WIDTH = 96  # of a report
_LONGEST = 500  # characters of an error in it
_TRACEBACK = "Traceback (most recent call last)"
_IN_GROUP = re.compile(r"^ +[|+] ?")  # what precedes the lines of an error of an ExceptionGroup

# Lines of C++ that do not help a user: stack frames, and what leads to them.
_FRAME = re.compile(
    r"\s+@\s+0x[0-9a-f]+|\*\*\* Check failure stack trace|"
    # Several threads write it at once, in pieces.
    r"(?=.*(Gloo|connected to|peer ranks))"
    r"(\[Gloo\] Rank |[\d\s]|is connected to |peer ranks\. |"
    r"Expected number of connected peer ranks is : )+$"
)
_MACHINERY = re.compile(r"[IWEF]\d{4} [\d:.]+\s+\d+ (coordination|preemption|client\.h)")
_CONTINUED = re.compile(
    r"[\d, ]*$|/job:\S+$|The tasks have crashed|RPC: /xla|\s*$|Error: |Additional GRPC"
)
_SILENT = re.compile(r"stopped sending heartbeats\):\n((?:(?:/job:\S*task:)?\d+\n)+)")


@dataclass(frozen=True)
class End:
    """How one process ended."""

    rank: int
    code: int  # or the negative number of the signal that ended it
    tail: Sequence[str] = field(default=(), repr=False)  # the last lines that a user should read
    text: str = field(default="", repr=False)  # the last lines, all of them
    seconds: float = 0.0  # since the start of the job
    stopped: bool = False  # by SIGSTOP, so that it had to be killed
    asked: bool = False  # told to end
    work: Work = Work()  # what it had to finish

    @property
    def failed(self) -> bool:
        """Whether it neither finished nor stopped cleanly when it was told to."""
        return self.code not in (0, PREEMPTED_EXIT_CODE) or self.cut_off

    @property
    def cut_off(self) -> bool:
        """Whether it ended in the middle of its script, as by `os._exit(0)`, with the code 0."""
        return self.code == 0 and self.work.cut_off

    @property
    def follows(self) -> bool:
        """Whether it ended because another process did."""
        if self.stopped:
            return False
        by_itself = self.code in (1, -signal.SIGABRT) and not self.asked
        return self.asked or (by_itself and LOST_PEER.search(self.text) is not None)


def first_cause(ends: Sequence[End]) -> End:
    """Returns the end that explains the others: the first one that does not follow from another."""
    # One that stopped cleanly explains nothing where another has failed.
    failed = [end for end in ends if end.failed] or [end for end in ends if end.code]
    return min(failed, key=lambda end: (end.follows, not end.stopped, end.seconds))


def raised(text: str) -> str:
    """Returns the first line of the error in a text's last traceback; empty if there is none."""
    _, found, after = text.rpartition(_TRACEBACK)
    lines = [_IN_GROUP.sub("", line) for line in after.splitlines()[1:]] if found else []
    return next((line for line in lines if line[:1].strip()), "")


def in_words(code: int) -> str:
    """Describes an exit code: `exited with code 3`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"exited with code {code}"
    known = -code in list(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def meaning(end: End, memory_kills: int = 0) -> str:
    """Says what an end probably means, and what to do; empty if nothing is known."""
    if said := hang([end]):
        return said
    if end.stopped:
        return "It was stopped (SIGSTOP, or a debugger), so the others stopped waiting for it."
    if end.cut_off:
        return (
            "It ended in the middle of its script, without an error and without its exit "
            "functions, as os._exit(0) does, while the others went on."
        )
    if end.code == -signal.SIGKILL:
        if end.asked:
            return "It had not stopped when it was told to."
        if memory_kills:
            return f"Its machine's kernel killed {memory_kills} process(es). {_OUT_OF_MEMORY}"
        return "It was killed by hand (kill -9), or by a memory limit of its container."
    said = end.text.rpartition(_TRACEBACK)[2]  # not what it survived
    said = "\n".join([raised(end.text), *said.splitlines()[-2 * TAIL :]])
    for pattern, explanation in _MEANINGS:
        if re.search(pattern, said):
            return explanation
    if not end.follows:
        return ""
    if silent := silent_ranks(end.text):
        return (
            f"It gave up because rank {some(silent)} had not answered for the heartbeat timeout: "
            "look there."
        )
    return (
        "It lost its connection to another process, which ended before it, on this machine or "
        "another: look there."
    )


def report(ends: Sequence[End], memory_kills: int, logs: str) -> str:
    """Which process failed first, how, its last lines, what it means, and what the others did."""
    if not any(end.stopped for end in ends) and (said := hang(ends)):
        lines = [*textwrap.wrap(said, _WIDTH), *(line for end in ends for line in _work(end, ends))]
        where = f"The stacks of all processes are in the logs: {logs}"
        return "\n".join(f"gshard: {line}" for line in [*lines, where])
    first = first_cause(ends)
    how = "was stopped and had to be killed" if first.stopped else in_words(first.code)
    said = f"The job failed: rank {first.rank} {how} after {first.seconds:.1f} s. "
    lines = textwrap.wrap(said + meaning(first, memory_kills), _WIDTH)
    error = raised(first.text)[:_LONGEST] if first.code == 1 else ""
    if error and not any(error in line for line in first.tail):  # before a list, as of buffers
        lines += textwrap.wrap(f"Its error: {error}", _WIDTH)
    if first.tail:
        lines += [f"Last lines of rank {first.rank}:", *(f"    | {line}" for line in first.tail)]
    lines += [line for end in ends for line in _work(end, ends)]
    others = "; ".join(_other(end) for end in ends if end is not first)
    if others:
        lines += textwrap.wrap(f"The others: {others}.", _WIDTH)
    return "\n".join(f"gshard: {line}" for line in [*lines, f"Logs: {logs}"])


def hang(ends: Sequence[End]) -> str:
    """Why the watchdog ended the job, and the last checkpoint; empty if it did not."""
    said = {begin: "" for begin in (HANGS, LAST_SAVED)}
    for line in (line for end in ends for line in end.text.splitlines()):
        for begin in said:
            said[begin] = line.removeprefix("gshard: ") if line.startswith(begin) else said[begin]
    why, saved = said.values()
    return f"T{why[1:]}" + (f" T{saved[1:]}." if saved else "") if why else ""


def _work(end: End, ends: Sequence[End]) -> list[str]:
    """Says what became of the saves that were under way when the job failed."""
    said = [f"Rank {end.rank} finished {x} before it ended." for x in end.work.finished_late]
    # Without process 0 no save can be completed, so that none is waited for.
    lost = any(e.rank == 0 and e.failed and not e.asked for e in ends if e is not end)
    if (end.code > 0 or end.asked) and not lost:
        how, limit = "ended before {} was finished", ": --grace is the limit for it."
    else:
        how, limit = f"{in_words(end.code)} in the middle of {{}}", "."
    return said + [f"Rank {end.rank} {how.format(x)}{limit}" for x in end.work.running]


def _other(end: End) -> str:
    if not end.code and not end.failed:
        return f"rank {end.rank} had finished"
    if end.asked:
        return f"rank {end.rank} was ended"
    why = ", since it had lost a peer" if end.follows else ""
    return f"rank {end.rank} {in_words(end.code)}{why}"


def silent_ranks(text: str) -> list[int]:
    """Returns the ranks that JAX's coordinator gave up because they were silent."""
    found = _SILENT.search(text)
    return sorted({int(line.split(":")[-1]) for line in found[1].split()}) if found else []


class Readable:
    """Filters out, line by line, what C++ prints about the end of other processes."""

    def __init__(self) -> None:
        self._inside = self._fatal = False

    def shows(self, line: str) -> bool:
        """Whether a user should see the next line."""
        if _FRAME.match(line) or self._fatal:
            return False
        if _MACHINERY.match(line):
            self._inside, self._fatal = True, line[0] == "F"
            return False
        self._inside = self._inside and _CONTINUED.match(line) is not None
        return not self._inside


_OUT_OF_MEMORY = (
    "It ran out of memory. Use a smaller batch, more micro-batches, fewer virtual devices, or a "
    "level that shards more; print(plan) shows what the state needs."
)
_MEANINGS = (
    (
        r"No space left on device|Disk quota exceeded",
        "A disk is full, or a quota is used up: make room where the error says.",
    ),
    (
        r"distributed collective mismatch",
        "The processes ran different collectives at the same time: one of them made a call that "
        "another did not make, such as a computation with the state under `if rank == 0`.",
    ),
    (r"RESOURCE_EXHAUSTED|Out of memory|MemoryError|std::bad_alloc", _OUT_OF_MEMORY),
    (
        r"PortTakenError|Address already in use|address already in use",
        "Its port is taken by another program, perhaps a job that still runs.",
    ),
    (
        r"NotArrivedError:",  # the error, not a line of code in its traceback
        "Not all processes of the job came in time: see which are missing, and their logs.",
    ),
    (
        r"Gloo context initialization failed[^\n]*remote=\[(127\.|::1)",
        "On CPUs the processes connect to the address of each machine's own hostname, and on one "
        "of the machines that is a loopback address. On every machine make "
        "`getent hosts $(hostname)` print the address by which the others reach it (/etc/hosts).",
    ),
    (
        r"BarrierError|Barrier failed|barrier.{0,80}(timed out|timeout)",
        "At exit it waited for the others, which did not come: the processes did not run the same "
        "number of steps, so one finished while others were still running.",
    ),
    (
        r"KeyError: '(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'",
        "gshard launch does not set the variables of torchrun. Call gshard.distributed.initialize()"
        ", then gshard.distributed.process_index() and process_count().",
    ),
    (
        r"Error: (coordinator_address should be defined|distributed\.initialize should only)",
        "The script calls jax.distributed.initialize(). Under gshard launch call "
        "gshard.distributed.initialize() instead.",
    ),
    (
        r"ModuleNotFoundError|No module named",
        "A package is missing in the Python that runs the job.",
    ),
)
