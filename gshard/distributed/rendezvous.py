"""Rendezvous: every process reports to the coordinator's port before JAX uses it.

If a peer does not arrive in time, JAX ends the process from C++ and does not say which processes
are missing. Here process 0 listens first, every other process sends its rank and waits for the
answer, and the port is free again when JAX starts. Nothing but these lines is ever sent.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import math
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from gshard._util.errors import CallOrderError, GShardError, OutsideError, some, warn
from gshard._util.open_files import allow_open_files
from gshard._util.validation import shown
from gshard.distributed.line_server import LONGEST, SILENCE, LineServer, Peer
from gshard.distributed.messages import line_of

LOOPBACK = "127.0.0.1"
_RETRY, _REMIND = 0.2, 10.0  # seconds
_NAME_TIMEOUT = 60.0  # seconds; resolvers may remember for 30 that a name does not exist
_OTHER_FILES = 256  # that process 0 may open besides its connections
BACKLOG = 2**15  # connections that may wait to be accepted; systems have a lower limit


class NotArrivedError(CallOrderError):
    """Some processes of the job did not come in time."""

    __module__ = "gshard.distributed"


class PortTakenError(OutsideError):
    """Another program listens where process 0 should."""


def meet(
    at: Address,
    processes: int,
    rank: int,
    timeout: float,
    port_is_reserved: bool,
    tell: Callable[[], dict[str, Any]] = dict,
) -> dict[str, Any]:
    """Waits until all processes have arrived; if some have not in time, all others raise.

    Returns what `tell` returned on process 0, a short JSON object.
    """
    reminder = Reminder(timeout)
    if rank == 0:
        roll_call = _RollCall(at, processes, reminder, port_is_reserved)
        told = tell()
        roll_call.run(told)
        return told
    return _report(at, processes, rank, reminder)


class Reminder:
    """A deadline; says every ten seconds what this process waits for until then.

    Once there are `signals`, no time is left.
    """

    def __init__(self, timeout: float, signals: Sequence[int] = ()):
        self.timeout, self._next, self._signals = timeout, _REMIND, signals
        self._end = time.monotonic() + timeout

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return -math.inf if self._signals else self._end - time.monotonic()

    def remind(self, what: Callable[[], str], say: Callable[[str], object] | None = None) -> None:
        """Says what is waited for, if it is time to."""
        if self.timeout - self.left >= self._next:
            self._next += _REMIND
            (say or _say)(f"{what()} ({max(0, self.left):.0f} s left)")


def _say(text: str) -> None:
    print(f"gshard: {text}", file=sys.stderr, flush=True)


class _RollCall(LineServer):
    """Process 0 collects the other processes, and answers all of them at once."""

    def __init__(self, at: Address, processes: int, reminder: Reminder, port_is_reserved: bool):
        self._at, self._processes, self._reminder = at, processes, reminder
        # Later JAX's coordinator and the watchdog's server each keep a connection to every process.
        needed = 2 * processes + _OTHER_FILES
        self._limit = allow_open_files(needed)
        if self._limit < needed - _OTHER_FILES // 2:
            warn(
                f"Process 0 of {processes} processes may open {self._limit} files, and needs about "
                f"{needed}, for two connections to each. Raise the hard limit (`ulimit -Hn`)."
            )
        await_name(at.host, reminder.timeout)
        super().__init__(listen(at, reserved=port_is_reserved))
        self._ranks = {0}

    def run(self, tell: dict[str, Any]) -> None:
        try:
            while len(self.peers) < self._processes - 1:
                if self._reminder.left <= 0:
                    error = (
                        f"not all of {self._processes} processes reached {self._at} within "
                        f"{self._reminder.timeout:g} s; {self._state()}. Look at the logs of those "
                        "that are missing, and check that their machines can reach this address."
                    )
                    self._fail(NotArrivedError(error))
                self.receive(min(self._reminder.left, _RETRY))
                self._reminder.remind(lambda: f"process 0 waits at {self._at}: {self._state()}")
            self.answer(line_of({"go": tell}))
        finally:
            self.close()

    def _state(self) -> str:
        missing = sorted({*range(self._processes)} - self._ranks)
        return f"arrived: {some(sorted(self._ranks), 16)}; missing: {some(missing, 16)}"

    def no_room(self, error: OSError) -> None:
        fault = (
            f"process 0 cannot open a connection to each of {self._processes} processes: "
            f"{error.strerror} (EMFILE), with {len(self.peers)} connected and a limit of "
            f"{self._limit}. Raise the hard limit of its machine (`ulimit -Hn`)."
        )
        self._fail(GShardError(fault))

    def dropped(self, peer: Peer) -> None:
        self._ranks.discard(peer.who)

    def take(self, peer: Peer, line: bytes) -> None:
        if peer.who is not None:  # it has nothing more to say
            return
        try:
            message = json.loads(line)
            rank, processes = message["gshard_rank"], message["of"]
        except (ValueError, TypeError, KeyError, RecursionError):
            rank = processes = None
        if type(rank) is not int or type(processes) is not int or not 0 < rank < processes:
            self.drop(peer)  # another program
            return
        fault = ""
        if processes != self._processes:
            fault = (
                f"process {rank} was started for a job of {processes} processes, and process 0 for "
                f"one of {self._processes}. Start all of them with the same number."
            )
        elif rank in self._ranks:
            other = next(x.host for x in self.peers if x.who == rank)
            fault = (
                f"two processes say that they are rank {rank} of {processes}, at {other} and "
                f"{peer.host}. Give every process a rank of its own, and every machine its own "
                "--rank of gshard launch."
            )
        self.admit(peer, rank)
        self._ranks.add(rank)
        if fault:
            self._fail(GShardError(fault))

    def _fail(self, error: GShardError) -> NoReturn:
        answer = {"error": str(error), "late": isinstance(error, NotArrivedError)}
        self.answer(line_of(answer))
        raise error


def _report(at: Address, processes: int, rank: int, reminder: Reminder) -> dict[str, Any]:
    line = line_of({"gshard_rank": rank, "of": processes})
    connection, answer, _ = ask(at, line, reminder, f"process {rank} of {processes}")
    connection.close()
    return answer


def ask(
    at: Address,
    line: bytes,
    reminder: Reminder,
    who: str,
    whom: str = "process 0",
    hint: str = "",
) -> tuple[socket.socket, dict[str, Any], bytes]:
    """Sends a line to a `LineServer`, again and again until somebody answers or time is up.

    Returns the connection, the answer (`"go"`), and what came after it. Reminders end with `hint`.

    Raises:
      NotArrivedError: nobody answered in time, or the answer says so of others.
      GShardError: the answer is an error.
    """
    reason = "nobody answered"

    def waiting() -> str:
        return f"{who} waits for {whom} at {at}: {reason}{hint}"

    while (left := reminder.left) > 0:
        reminder.remind(waiting)
        try:
            connection = socket.create_connection(at, min(left, SILENCE))
            with contextlib.ExitStack() as unless_answered:
                unless_answered.enter_context(connection)
                connection.sendall(line)
                waits = f"{who} is at {at} and waits for the others{hint}"
                answer, rest = _read_answer(connection, reminder, waits)
                if "go" in answer:
                    unless_answered.pop_all()
                    return connection, answer["go"], rest
            if "error" in answer:
                raise (NotArrivedError if answer.get("late") else GShardError)(answer["error"])
            reason = "it closed the connection, so something else than gshard listens there"
        except OSError as error:
            reason = error.strerror or str(error)
        time.sleep(min(_RETRY, max(0.0, reminder.left)))
    raise NotArrivedError(
        f"{who} did not reach {whom} at {at} within {reminder.timeout:g} s: {reason}. Check that "
        f"{whom} has started (its log says why, if not), that the address is that of its machine, "
        "and that the port is open between the machines."
    )


def _read_answer(
    connection: socket.socket, reminder: Reminder, state: str
) -> tuple[dict[str, Any], bytes]:
    """Returns the answer, and what came after it; no answer of one that left, or of a stranger."""
    received = b""
    connection.settimeout(1.0)
    while b"\n" not in received:
        try:
            more = connection.recv(LONGEST * 8)
        except TimeoutError:
            if reminder.left < -SILENCE:  # process 0's own deadline comes first
                return {}, b""
            reminder.remind(lambda: state)
            continue
        if not more or len(received) > 64 * LONGEST:
            return {}, b""
        received += more
    line, _, rest = received.partition(b"\n")
    with contextlib.suppress(ValueError):
        answer = json.loads(line)
        if isinstance(answer, dict) and ("error" in answer or isinstance(answer.get("go"), dict)):
            return answer, rest
    return {}, b""


# ---- addresses and ports -------------------------------------------------------------------------


class Address(NamedTuple):
    """The address at which process 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(value: object, where: str) -> Address:
    """Reads `host:port` or `[IPv6]:port`; `where` names the argument or variable for errors."""
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    in_brackets = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if in_brackets else host
    is_host = bool(host) and (in_brackets or ":" not in host)  # else IPv6, with or without a port
    if not colon or not is_host or not port.isascii() or not port.isdigit():
        raise GShardError(
            f"{where}={shown(value)} must be 'host:port' of process 0, such as "
            f"'{LOOPBACK}:29500' on one machine, or '[2001:db8::5]:29500' for an IPv6 address."
        )
    if not 0 < int(port) < 2**16:
        raise GShardError(
            f"{where}={shown(value)}: {port} is not a port. Ports run from 1 to 65535."
        )
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def is_unspecified(host: str) -> bool:
    """Whether an address stands for all of a machine's own, such as 0.0.0.0."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def resolved(host: str) -> str:
    """Returns the address that this machine has for a host, or the host itself if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host


def await_name(host: str, timeout: float, signals: Sequence[int] = ()) -> None:
    """Waits a while until this machine can resolve a name, as a new one may start before DNS does.

    Nothing is raised if it never can: who listens at the name says so.
    """
    patience = Reminder(min(timeout, _NAME_TIMEOUT), signals)
    while patience.left > 0:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except OSError:
            patience.remind(lambda: f"this machine cannot resolve the host {host!r} yet")
        time.sleep(_RETRY)


def listen(at: Address, *, reserved: bool = False) -> socket.socket:
    """Returns a socket that listens at an address of this machine, and nowhere else.

    With `reserved` a `ReservedPort` of another process of this user holds the port for this one.
    """
    listener = _bind(at, shared=reserved)
    listener.listen(BACKLOG)
    return listener


class ReservedPort:
    """A port that nobody else gets until a process of this job listens at it.

    The socket is bound and never listens: `bind` of others fails, also for port 0, while a socket
    with SO_REUSEPORT, as gRPC's, may listen at the same port. So there is no moment between finding
    a free port and using it.
    """

    def __init__(self, host: str = LOOPBACK, port: int = 0):
        self._socket = _bind(Address(host, port), shared=False)
        # Only now: a bind that shares would not see that another coordinator listens there.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.address: Address = Address(host, self._socket.getsockname()[1])

    def release(self) -> None:
        """Gives the port back."""
        self._socket.close()


def _bind(at: Address, shared: bool) -> socket.socket:
    try:
        *kind, _, target = socket.getaddrinfo(*at, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise GShardError(f"this machine cannot resolve the host {at.host!r}: {error}.") from error
    # A killed coordinator's gRPC connections keep the port for a minute, though nobody listens:
    # only a socket that shares can be bound then.
    for share in (True,) if shared else (False, True):
        if share and _answers(kind, target):
            break
        bound = socket.socket(*kind)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if share:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(target)
            return bound
        except OSError as error:
            bound.close()
            if error.errno != errno.EADDRINUSE:
                raise GShardError(
                    f"process 0 cannot listen at {at}: {error.strerror}. The address that all "
                    "processes are given must be one of its own machine."
                ) from error
    raise PortTakenError(
        f"port {at.port} of {at.host} is taken: another program, perhaps a job that still runs, "
        "uses it. Name another port, or end that program."
    )


def _answers(kind: list[int], target: tuple) -> bool:
    """Whether somebody listens there."""
    with socket.socket(*kind) as probe:
        probe.settimeout(1.0)
        return bool(target[1]) and probe.connect_ex(target) == 0
