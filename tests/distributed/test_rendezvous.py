"""The roll call at the coordinator's port, and strangers who come to it."""

from __future__ import annotations

import json
import os
import resource
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

import gshard
from gshard.distributed import line_server
from gshard.distributed.line_server import LineServer
from gshard.distributed.rendezvous import ReservedPort, meet


class Call:
    """Process 0 of several, in a thread."""

    def __init__(self, processes: int, timeout: float = 20.0):
        self._kept = ReservedPort()
        self.at, self._error = self._kept.address, None
        arguments = (self.at, processes, 0, timeout, True)
        self._thread = threading.Thread(target=self._run, args=arguments)
        self._thread.start()

    def _run(self, *arguments) -> None:
        try:
            meet(*arguments)
        except gshard.GShardError as error:
            self._error = error

    def end(self) -> gshard.GShardError | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._kept.release()
        return self._error

    def connect(self) -> socket.socket:
        for _ in range(500):
            try:
                return socket.create_connection(self.at, 5)
            except ConnectionRefusedError:  # it does not listen yet
                threading.Event().wait(0.01)
        raise AssertionError("nobody listens")


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"[" * 1000 + b"\n",
    b'{"gshard_rank": Infinity, "of": 2}\n',
    b'{"gshard_rank": 0, "of": 2}\n',
    b'{"gshard_rank": true, "of": 2}\n',
    b'{"gshard_rank": "1", "of": 2}\n',
    b'{"gshard_rank": 1}\n',
    b"\xff\xfe\n",
    b"x" * 5000,
    b"half a line",
    b"",
]


def test_strangers_change_nothing():
    call = Call(2)
    strangers = [call.connect() for _ in STRANGERS]
    for stranger, said in zip(strangers, STRANGERS, strict=True):
        stranger.sendall(said)
    meet(call.at, 2, 1, 20.0, False)
    assert call.end() is None
    for stranger in strangers:
        stranger.close()


def test_one_that_leaves_and_comes_again_is_let_in():
    call = Call(3)
    with call.connect() as first:
        first.sendall(json.dumps({"gshard_rank": 1, "of": 3}).encode() + b"\n")
    others = [threading.Thread(target=meet, args=(call.at, 3, r, 20.0, False)) for r in (1, 2)]
    for other in others:
        other.start()
    assert call.end() is None
    for other in others:
        other.join(20)


def test_a_process_that_comes_too_late_gets_no_answer_and_says_so():
    call = Call(2, timeout=0.5)
    error = call.end()
    assert isinstance(error, gshard.distributed.NotArrivedError)
    assert "arrived: 0; missing: 1" in str(error)
    with pytest.raises(gshard.distributed.NotArrivedError, match="did not reach process 0"):
        meet(call.at, 2, 1, 0.5, False)


class Heard(LineServer):
    """Keeps what it was told."""

    def __init__(self, listener):
        super().__init__(listener)
        self.lines, self.no_rooms = [], 0

    def take(self, peer, line):
        self.lines.append(line)

    def dropped(self, peer):
        pass

    def no_room(self, error):
        self.no_rooms += 1


def test_who_comes_when_no_file_is_left_is_told_of_once_and_let_in_later(monkeypatch):
    monkeypatch.setattr(line_server, "_PAUSE", 0.2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as rest:
        server = Heard(rest.enter_context(socket.create_server(("127.0.0.1", 0))))
        rest.callback(server.close)
        client = rest.enter_context(socket.create_connection(server._listener.getsockname()))
        client.sendall(b"x\n")
        last = os.dup(0)
        rest.callback(os.close, last)
        with ExitStack() as until_there_is_room:
            resource.setrlimit(resource.RLIMIT_NOFILE, (last + 3, hard))
            until_there_is_room.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            with suppress(OSError):
                while True:
                    until_there_is_room.callback(os.close, os.dup(0))
            looks, end = 0, time.monotonic() + 0.7
            while time.monotonic() < end:
                server.receive(0.05)
                looks += 1
            assert server.no_rooms == 1
            assert looks < 30
        end = time.monotonic() + 10
        while not server.lines and time.monotonic() < end:
            server.receive(0.05)
        assert server.lines == [b"x"]
