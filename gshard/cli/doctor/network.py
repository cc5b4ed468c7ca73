"""Whether this machine talks to itself: a port on loopback, and the address of its own name."""

from __future__ import annotations

import socket

from gshard._util.errors import GShardError
from gshard.cli.doctor.check import Check
from gshard.distributed.rendezvous import LOOPBACK, Address, found_at, is_loopback, listening

SECONDS = 5.0  # that somebody has to answer


def network() -> list[Check]:
    """A port, and the machine's name."""
    return [_loopback(), _own_name()]


def _loopback() -> Check:
    try:
        with listening(Address(LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
            with socket.create_connection((LOOPBACK, port), timeout=SECONDS) as sender:
                listener.settimeout(SECONDS)
                receiver, _ = listener.accept()
                with receiver:
                    receiver.settimeout(SECONDS)
                    sender.sendall(b"x")
                    heard = receiver.recv(1)
        if heard != b"x":
            raise OSError("the connection was closed")
    except (OSError, GShardError) as error:
        mend = f"let a firewall or sandbox pass connections of {LOOPBACK} to itself"
        return Check("loopback", "fail", f"{LOOPBACK}: {error}", mend)
    return Check("loopback", "ok", f"port {port} of {LOOPBACK} listens and answers")


def _own_name() -> Check:
    name = socket.gethostname()
    at = found_at(name)
    if at == name:
        mend = f"write a line with its address and {name} into /etc/hosts"
        return Check("own name", "warn", f"{name} has no address; Gloo looks for one", mend)
    alone = " (loopback: enough for one machine)" if is_loopback(at) else ""
    return Check("own name", "ok", f"{name} is {at}{alone}")
