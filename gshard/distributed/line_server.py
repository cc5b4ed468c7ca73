"""Accepts TCP connections that send lines: of the roll call, and of an elastic job's launchers.

Everything is done in `receive`, in the thread of its caller, and nothing that it does for one
connection takes longer the more of them there are.
"""

from __future__ import annotations

import contextlib
import errno
import math
import selectors
import socket
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

LONGEST = 1024  # bytes of a line; a longer one comes from another program
SILENCE = 5.0  # seconds in which a connection has to say who it is
_PAUSE = 1.0  # seconds for which none is accepted after there was no room for one


@dataclass(eq=False)
class Peer:
    """A connection; `who` is known once it has sent a valid line."""

    connection: socket.socket
    host: str
    since: float
    received: bytes = b""
    who: Any = None


class LineServer(ABC):
    """A listener and its connections; those that do not say who they are in time are dropped."""

    def __init__(self, listener: socket.socket):
        self._listener = listener
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._accepts_at, self._is_full = 0.0, False  # while it does not, the time when it will
        self._silent: dict[Peer, None] = {}  # have not said who they are; the oldest first
        self.peers: set[Peer] = set()  # the others

    @abstractmethod
    def take(self, peer: Peer, line: bytes) -> None:
        """Takes a line of a peer; the first one admits or drops it."""

    def admit(self, peer: Peer, who: Any) -> None:
        """Keeps a connection, now that it is known whose it is."""
        peer.who = who
        del self._silent[peer]
        self.peers.add(peer)

    @abstractmethod
    def dropped(self, peer: Peer) -> None:
        """Learns that a peer that had said who it is has gone."""

    @abstractmethod
    def no_room(self, error: OSError) -> None:
        """Learns that no more connections can be opened, and all are of this job.

        It is told again once there was room in between.
        """

    def receive(self, seconds: float) -> None:
        """Waits up to `seconds` for connections and lines, and takes those that come."""
        if self._accepts_at and time.monotonic() > self._accepts_at:
            self._accepts_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)
        for key, _ in self._selector.select(seconds):
            if key.data is not None:
                self._read(key.data)
                continue
            try:
                connection, (host, *_) = self._listener.accept()
            except OSError as error:  # it has left again, or
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._make_room(error)
                continue
            self._is_full = False
            connection.setblocking(False)
            peer = Peer(connection, host, time.monotonic())
            self._silent[peer] = None
            self._selector.register(connection, selectors.EVENT_READ, peer)
        now = time.monotonic()
        while self._silent and now - (peer := next(iter(self._silent))).since > SILENCE:
            self.drop(peer)  # the silent must not keep others out

    def _make_room(self, error: OSError) -> None:
        if self._silent:
            self.drop(next(iter(self._silent)))
            return
        if not self._is_full:
            self._is_full = True
            self.no_room(error)
        self._accept_none(_PAUSE)  # it would be ready at once again

    def _accept_none(self, seconds: float) -> None:
        """Lets nobody in for `seconds`."""
        if not self._accepts_at:
            self._selector.unregister(self._listener)
        self._accepts_at = time.monotonic() + seconds

    def _read(self, peer: Peer) -> None:
        if peer.connection.fileno() < 0:  # dropped to make room, since the selector returned it
            return
        more = b""
        with contextlib.suppress(OSError):
            more = peer.connection.recv(LONGEST)
        *lines, peer.received = (peer.received + more).split(b"\n")
        for line in lines:
            if peer.connection.fileno() >= 0 and len(line) <= LONGEST:
                self.take(peer, line)
        if not more or max(map(len, (*lines, peer.received))) > LONGEST:
            self.drop(peer)

    def drop(self, peer: Peer) -> None:
        """Closes a connection."""
        if peer.connection.fileno() < 0:
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        self._silent.pop(peer, None)
        if peer in self.peers:
            self.peers.remove(peer)
            self.dropped(peer)

    def tell(self, line: bytes, *peers: Peer) -> None:
        """Sends a line to some, or to all that have said who they are."""
        for peer in peers or [*self.peers]:
            try:
                peer.connection.sendall(line)
            except BlockingIOError:  # it does not read, and may have half of the line
                self.drop(peer)
            except OSError:  # it has left, as the next read says
                pass

    def answer(self, line: bytes) -> None:
        """Sends a last line, and waits for all to close: who closes first blocks its port a minute.

        Nobody else is let in.
        """
        self.tell(line)
        self._accept_none(math.inf)
        end = time.monotonic() + 1
        while self.peers and time.monotonic() < end:
            self.receive(0.05)

    def close(self) -> None:
        """Closes the listener and all connections."""
        for connection in (self._listener, *(x.connection for x in (*self._silent, *self.peers))):
            connection.close()
        self._selector.close()
