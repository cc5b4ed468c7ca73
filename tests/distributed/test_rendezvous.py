"""The roll call at the coordinator's port, and strangers who come to it."""

from __future__ import annotations

import json
import socket
import threading

import pytest

import gshard
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
