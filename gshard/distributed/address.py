"""Addresses of the coordinator: what they say, and ports that are kept for it."""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import NamedTuple

from gshard._util.errors import GShardError
from gshard._util.validation import shown

LOOPBACK = "127.0.0.1"


class Address(NamedTuple):
    """Where process 0 listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(value: object, where: str) -> Address:
    """`host:port`, `[IPv6]:port`.

    Raises:
      GShardError: for anything else; `where` names the argument or variable.
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
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def found_at(host: str) -> str:
    """The address that this machine has for a host; the host itself where it knows none."""
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
