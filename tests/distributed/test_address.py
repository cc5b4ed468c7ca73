"""Addresses of the coordinator, and ports that are kept for it."""

from __future__ import annotations

import signal
import socket

import pytest

import gshard
from gshard.cli.main import main
from gshard.distributed import rendezvous
from gshard.distributed.exit import PREEMPTED_EXIT_CODE
from gshard.distributed.launch import cli
from gshard.distributed.rendezvous import (
    Address,
    PortTakenError,
    ReservedPort,
    address,
    is_loopback,
    listen,
    meet,
)


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:29500", "127.0.0.1", 29500, True),
        ("localhost:1", "localhost", 1, True),
        ("[::1]:80", "::1", 80, True),
        ("node-7.cluster:65535", "node-7.cluster", 65535, False),
        ("10.0.0.1:29500", "10.0.0.1", 29500, False),
        ("[fd00::2]:29500", "fd00::2", 29500, False),
    ],
)
def test_an_address_is_read(text, host, port, loopback):
    at = address(text, "master")
    assert at == (host, port)
    assert str(at) == text
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    "text",
    ["", "host", ":29500", "host:", "host:port", "host:0", 29500, None]
    + ["2001:db8::5", "fe80::1:29500", "[::1:80", "[]:80"],
)
def test_what_is_no_address_is_refused_by_name(text):
    with pytest.raises(gshard.GShardError, match="^master="):
        address(text, "master")


def connects(at: Address) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex(at) == 0


def test_a_kept_port_is_for_who_shares_it():
    kept = ReservedPort()
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(kept.address)
        assert not connects(kept.address), "it is bound, and nobody listens"
        with listen(kept.address, reserved=True):
            assert connects(kept.address)
    finally:
        kept.release()


def test_free_ports_differ():
    every = [ReservedPort() for _ in range(50)]
    assert len({kept.address.port for kept in every}) == 50
    for kept in every:
        kept.release()


@pytest.mark.parametrize("shares", [False, True], ids=["any program", "one that shares, as gRPC"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_port_at_which_somebody_listens_is_taken(shares, kept):
    with socket.socket() as other:
        if shares:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        at = Address(*other.getsockname())
        with pytest.raises(PortTakenError, match=f"port {at.port} of 127.0.0.1 is taken"):
            listen(at, reserved=kept)
        with pytest.raises(PortTakenError):
            ReservedPort(*at)


def test_a_port_that_waits_for_its_old_connections_is_free():
    """What gRPC leaves: connections that were accepted at a socket without SO_REUSEADDR."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        at = Address(*other.getsockname())
        with socket.create_connection(at) as client:
            accepted, _ = other.accept()
            accepted.close()  # the side that closes first waits
            assert client.recv(1) == b""
    with socket.socket() as strict, pytest.raises(OSError, match="in use"):
        strict.bind(at)
    ReservedPort(*at).release()
    with listen(at):
        assert connects(at)


def test_an_address_of_another_machine_cannot_be_listened_at():
    with pytest.raises(gshard.GShardError, match="cannot listen at 192.0.2.77:29500"):
        listen(Address("192.0.2.77", 29500))
    with pytest.raises(gshard.GShardError, match="this machine cannot resolve the host"):
        listen(Address("nobody.invalid", 29500))


@pytest.fixture
def new_machine(monkeypatch):
    """Its name, `pod-0.invalid`, which DNS knows only after a few questions."""
    asked, real = [], socket.getaddrinfo

    def getaddrinfo(host, *args, **options):
        asked.append(host)
        if host == "pod-0.invalid" and len(asked) > 4:
            host = "127.0.0.1"
        return real(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(rendezvous, "_RETRY", 0.01)
    (port := ReservedPort()).release()
    return Address("pod-0.invalid", port.address.port)


def test_process_0_waits_for_the_name_of_its_own_machine(new_machine):
    assert meet(new_machine, 1, 0, 5, False) == {}


@pytest.mark.parametrize("machines", [["2", "--rank", "0"], ["1:2", "--join_timeout", "0"]])
def test_a_launcher_waits_for_the_name_of_its_own_machine(
    new_machine, machines, tmp_path, monkeypatch
):
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    words = ["--master", str(new_machine), "--start_timeout", "5", "--virtual_devices", "1"]
    assert main(["launch", "--nnodes", *machines, *words, "script.py"]) == 0


@pytest.mark.parametrize(
    "words",
    [["--nnodes", "2", "--rank", "0"], ["--nnodes", "1:2", "--rank", "0"], ["--nnodes", "1:2"]],
)
def test_a_launcher_that_is_told_to_stop_waits_for_no_name(words, tmp_path, monkeypatch):
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    words = [*words, "--master", "nobody.invalid:29500", "script.py"]
    assert cli._run(cli.request(words), [signal.SIGTERM]) == PREEMPTED_EXIT_CODE
