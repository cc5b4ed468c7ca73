"""Rendezvous: every process reports to the coordinator's port before JAX uses it.

If a peer does not arrive in time, JAX ends the process from C++ and does not say which processes
are missing. Here process 0 listens first, every other process sends its rank and waits for the
answer, and the port is free again when JAX starts. Nothing but these lines is ever sent.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import selectors
import socket
import sys
import time
from typing import NamedTuple

from gshard._util.errors import CallOrderError, GShardError, some
from gshard._util.validation import shown

_LONGEST = 1024  # bytes of a line; whoever sends more is a stranger
_RETRY, _PATIENCE, _REMIND = 0.2, 5.0, 10.0  # seconds


class NotArrivedError(CallOrderError):
    """Some processes of the job did not come in time."""


def meet(at: Address, processes: int, rank: int, timeout: float, port_is_kept: bool) -> None:
    """Waits on every process until all have arrived.

    Raises:
      NotArrivedError: some processes have not arrived after `timeout` seconds; raised on every
        process that has.
      GShardError: two processes have the same rank, processes disagree on their number, or the port
        is taken.
    """
    deadline = time.monotonic() + timeout
    if rank == 0:
        _Roll(at, processes, timeout, port_is_kept).call(deadline)
    else:
        _answer(at, processes, rank, timeout, deadline)


# ---- process 0 -----------------------------------------------------------------------------------


class _Roll:
    """The list of arrived processes, on process 0."""

    def __init__(self, at: Address, processes: int, timeout: float, port_is_kept: bool):
        self._processes, self._timeout, self._at = processes, timeout, at
        self._listener = listening(at, kept=port_is_kept)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._said: dict[socket.socket, bytes] = {}
        self._since: dict[socket.socket, float] = {}
        self._here: dict[int, socket.socket] = {}

    def call(self, deadline: float) -> None:
        wait = _Reminder(self._timeout)
        try:
            while len(self._here) < self._processes - 1:
                left = deadline - time.monotonic()
                if left <= 0:
                    self._refuse(NotArrivedError(self._who_is_missing()))
                for key, _ in self._selector.select(min(left, _RETRY)):
                    self._hear(key.fileobj)
                self._forget_the_silent()
                wait.remind(f"process 0 waits at {self._at}: {self._state()}")
            self._tell({"go": True})
            self._until_closed()
        finally:
            for connection in (self._listener, *self._said):
                connection.close()
            self._selector.close()

    def _hear(self, connection) -> None:
        if connection is self._listener:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it has left again
                return
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._said[connection], self._since[connection] = b"", time.monotonic()
            return
        try:
            more = connection.recv(_LONGEST)
        except OSError:
            more = b""
        if connection in self._here.values():  # it has nothing more to say
            if not more:
                self._forget(connection)
            return
        self._said[connection] += more
        line, end, _ = self._said[connection].partition(b"\n")
        if not more or len(line) > _LONGEST:
            self._forget(connection)
        elif end:
            self._note(connection, line)

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._said[connection], self._since[connection]
        self._here = {r: c for r, c in self._here.items() if c is not connection}
        connection.close()

    def _forget_the_silent(self) -> None:
        """Drops connections that send nothing, so that they do not keep others out."""
        known, now = set(self._here.values()), time.monotonic()
        late = [c for c, since in self._since.items() if now - since > _PATIENCE]
        for connection in late:
            if connection not in known:
                self._forget(connection)

    def _note(self, connection: socket.socket, line: bytes) -> None:
        try:
            said = json.loads(line)
            rank, processes = said["gshard_rank"], said["of"]
        except (ValueError, TypeError, KeyError, RecursionError):
            rank = processes = None
        if type(rank) is not int or type(processes) is not int or not 0 < rank < processes:
            self._forget(connection)  # a stranger
            return
        if processes != self._processes:
            self._here[rank] = connection
            self._refuse(
                GShardError(
                    f"process {rank} was told that the job has {processes} processes, and process "
                    f"0 that it has {self._processes}. Start all of them with the same number."
                )
            )
        if self._here.get(rank, connection) is not connection:
            self._refuse(
                GShardError(
                    f"two processes say that they are rank {rank} of {processes}. Give every "
                    "process a rank of its own."
                ),
                also=connection,
            )
        self._here[rank] = connection

    def _state(self) -> str:
        here = sorted({0, *self._here})
        missing = sorted(set(range(self._processes)) - set(here))
        return f"arrived: {some(here, 16)}; missing: {some(missing, 16)}"

    def _who_is_missing(self) -> str:
        return (
            f"not all of {self._processes} processes came to {self._at} within "
            f"{self._timeout:g} s; {self._state()}. Look at the logs of those that are missing, "
            "and check that their machines reach this address."
        )

    def _refuse(self, error: GShardError, also: socket.socket | None = None) -> None:
        self._tell({"error": str(error), "late": isinstance(error, NotArrivedError)}, also)
        self._until_closed()
        raise error

    def _tell(self, answer: dict, also: socket.socket | None = None) -> None:
        line = json.dumps(answer).encode() + b"\n"
        for connection in {*self._here.values(), *([also] if also else ())}:
            try:
                connection.sendall(line)
            except OSError:
                pass  # it has left: JAX's own roll call or heartbeat will say so

    def _until_closed(self) -> None:
        """Waits for the others to close first: the side that does keeps its port busy a minute."""
        end = time.monotonic() + 1
        while self._here and time.monotonic() < end:
            for key, _ in self._selector.select(0.05):
                if key.fileobj is not self._listener:
                    self._hear(key.fileobj)


# ---- the others ----------------------------------------------------------------------------------


def _answer(at: Address, processes: int, rank: int, timeout: float, deadline: float) -> None:
    wait, reason = _Reminder(timeout), "nobody answered"
    while (left := deadline - time.monotonic()) > 0:
        wait.remind(f"process {rank} of {processes} waits for process 0 at {at}: {reason}")
        try:
            with socket.create_connection(at, min(left, _PATIENCE)) as connection:
                connection.sendall(
                    json.dumps({"gshard_rank": rank, "of": processes}).encode() + b"\n"
                )
                answer = _line(connection, deadline, wait, f"process {rank} is at {at} and waits")
            if answer is None:
                reason = "it closed the connection, so something else than gshard listens there"
        except OSError as error:
            answer, reason = None, error.strerror or str(error)
        if answer is None:
            time.sleep(min(_RETRY, max(0.0, deadline - time.monotonic())))
        elif "error" in answer:
            raise (NotArrivedError if answer.get("late") else GShardError)(answer["error"])
        else:
            return
    raise NotArrivedError(
        f"process {rank} of {processes} did not reach process 0 at {at} within {timeout:g} s: "
        f"{reason}. Check that process 0 has started (its log says why, if not), that the address "
        "is that of its machine, and that the port is open between the machines."
    )


def _line(connection: socket.socket, deadline: float, wait: _Reminder, state: str) -> dict | None:
    """Returns process 0's answer; None if it left before, or is another program."""
    said, connection_end = b"", deadline + _PATIENCE  # process 0's own deadline comes first
    while b"\n" not in said:
        connection.settimeout(1.0)
        try:
            more = connection.recv(_LONGEST * 8)
        except TimeoutError:
            if time.monotonic() > connection_end:
                return None
            wait.remind(f"{state} for the others")
            continue
        if not more or len(said) > 64 * _LONGEST:
            return None
        said += more
    try:
        answer = json.loads(said)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and {"go", "error"} & set(answer) else None


class _Reminder:
    """Prints every ten seconds what this process waits for."""

    def __init__(self, timeout: float):
        self._began, self._timeout, self._next = time.monotonic(), timeout, _REMIND

    def remind(self, what: str) -> None:
        waited = time.monotonic() - self._began
        if waited >= self._next:
            self._next += _REMIND
            left = max(0, self._timeout - waited)
            print(f"gshard: {what} ({left:.0f} s left)", file=sys.stderr, flush=True)


LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """The address at which process 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(value: object, where: str) -> Address:
    """Reads an address, `host:port` or `[IPv6]:port`.

    Raises:
      GShardError: the value is anything else; `where` names the argument or variable.
    """
    host, colon, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise GShardError(
            f"{where}={shown(value)} must be 'host:port' of process 0, such as "
            f"'{LOOPBACK}:29500' on one machine."
        )
    if not 0 < int(port) < 2**16:
        raise GShardError(f"{where}={shown(value)}: {port} is no port. Ports run from 1 to 65535.")
    return Address(host, int(port))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def found_at(host: str) -> str:
    """Returns the address that this machine has for a host, or the host itself if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host


class PortTakenError(GShardError, OSError):
    """Another program listens where process 0 should."""


def listening(at: Address, *, kept: bool = False, backlog: int = 1024) -> socket.socket:
    """A socket that listens at an address of this machine, and nowhere else.

    Args:
      at: the address.
      kept: a `Kept` of another process of this user holds the port for this one.
      backlog: connections that may wait; one for each process.

    Raises:
      PortTakenError: another program listens there.
      GShardError: it is no address of this machine.
    """
    listener = _bound(at, shared=kept)
    listener.listen(backlog)
    return listener


class Kept:
    """A port that nobody else gets until a process of this job listens at it.

    The socket is bound and never listens: `bind` of others fails, also for port 0, while a socket
    that says SO_REUSEPORT, as gRPC's does, may listen beside it. So there is no moment between
    finding a free port and using it.
    """

    def __init__(self, host: str = LOOPBACK, port: int = 0):
        self._socket = _bound(Address(host, port), shared=False)
        # Only now: a bind that shares would not see that another coordinator listens there.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.address = Address(host, self._socket.getsockname()[1])

    def release(self) -> None:
        """Gives the port back."""
        self._socket.close()


def _bound(at: Address, shared: bool) -> socket.socket:
    try:
        *kind, _, place = socket.getaddrinfo(*at, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise GShardError(f"{at.host!r} is no address that this machine knows: {error}.") from error
    # What gRPC leaves of a coordinator that was killed keeps the port for a minute, though nobody
    # listens: only who shares gets it then.
    for share in (True,) if shared else (False, True):
        if share and _answers(kind, place):
            break
        bound = socket.socket(*kind)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if share:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            bound.bind(place)
            return bound
        except OSError as error:
            bound.close()
            if error.errno != errno.EADDRINUSE:
                raise GShardError(
                    f"process 0 cannot listen at {at}: {error.strerror}. It listens at the address "
                    "that all processes are told, which must be one of its own machine."
                ) from error
    raise PortTakenError(
        f"port {at.port} of {at.host} is taken: another program, perhaps a job that still runs, "
        "uses it. Name another port, or end that program."
    )


def _answers(kind: list[int], place: tuple) -> bool:
    """Whether somebody listens there."""
    if not place[1]:
        return False
    with socket.socket(*kind) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(place) == 0
