"""How the clients of stores are set up: endpoints, credentials, logs, and how long they wait."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from etils import epath

import gshard
from gshard.checkpoint import bucket
from gshard.checkpoint.bucket import Bucket
from gshard.checkpoint.step_files import StoreError


@pytest.fixture
def silent(server, address, monkeypatch):
    """A server that accepts connections, and neither reads nor answers."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for name, value in server.environment.items():
            monkeypatch.setenv(name, url if value == server.url else value)
        yield


def without_pauses(scheme, monkeypatch):
    """The store's library repeats requests at once, and the one of S3 less often."""
    Bucket(f"{scheme}://bucket")  # imports gcsfs for an emulator
    if scheme == "gs":
        import gcsfs.retry

        brief = SimpleNamespace(sleep=lambda seconds: asyncio.sleep(0))
        monkeypatch.setattr(gcsfs.retry, "asyncio", brief)
    else:
        import s3fs

        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setattr(s3fs.S3FileSystem, "retries", 2)
        monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 0.1)


def test_a_server_that_never_answers(server, address, silent, monkeypatch):
    without_pauses(server.scheme, monkeypatch)
    monkeypatch.setattr(bucket, "_SILENCE", 0.1)
    monkeypatch.setattr(bucket, "_LONGEST", 30.0)
    begin = time.monotonic()
    with pytest.raises(gshard.GShardError, match=r"cannot list .*Check the network") as error:
        gshard.Checkpointer(address).all_steps()
    assert "\n" not in str(error.value) and time.monotonic() - begin < 20
    if server.scheme == "gs":
        assert f"cannot list {address}: the server does not answer." in str(error.value)


@pytest.mark.parametrize("size", [100, 4_900_000])  # larger ones are announced first
def test_an_upload_that_nobody_reads(server, address, silent, monkeypatch, size):
    without_pauses(server.scheme, monkeypatch)
    monkeypatch.setattr(bucket, "_SILENCE", 0.1)
    monkeypatch.setattr(bucket, "_LONGEST", 0.5)
    raised = []

    def write():
        with pytest.raises(StoreError) as error:
            Bucket(address).create("x", bytes(size))
        raised.append(str(error.value))

    thread = threading.Thread(target=write, daemon=True)  # it may wait forever
    thread.start()
    thread.join(20)
    assert raised and re.match(f"cannot write {address}/x: .*Check the network", raised[0])


def test_of_a_file_few_parts_are_held_at_once(server, address, tmp_path, monkeypatch):
    """As many files are sent as there are threads, each from the memory of the host."""
    if server.scheme == "gs":
        pytest.skip("of s3fs")
    own, held, most = Bucket(address), 0, 0
    call = own._fs._call_s3

    async def counted(method, *given, Body=b"", **options):
        nonlocal held, most
        held += len(Body)
        most = max(most, held)
        try:
            return await call(method, *given, **options, **({"Body": Body} if Body else {}))
        finally:
            held -= len(Body)

    monkeypatch.setattr(own._fs, "_call_s3", counted)
    (tmp_path / "x").touch()
    os.truncate(tmp_path / "x", 5 * bucket._PART + 1)
    own.create("x", tmp_path / "x")
    assert own.size("x") == 5 * bucket._PART + 1
    assert most == 4 * bucket._PART


def test_settings_of_a_user_for_s3(server, address, monkeypatch):
    if server.scheme == "gs":
        pytest.skip("of s3fs")
    from fsspec.config import conf

    own = {"user_agent_extra": "somebody", "connector_args": {"force_close": True}}
    monkeypatch.setitem(conf, "s3", {"config_kwargs": own})
    used = Bucket(address)._fs.config_kwargs
    assert used["user_agent_extra"] == "somebody"
    assert used["connector_args"].keys() == {"force_close", "socket_factory"}


def test_no_traceback_is_logged_of_what_gshard_tells(server, address, through_proxy, caplog):
    through_proxy(lambda: "401")
    with pytest.raises(gshard.GShardError, match="401.*Check the credentials") as error:
        gshard.Checkpointer(address).all_steps()
    assert "\n" not in str(error.value) and ": ," not in str(error.value)
    assert caplog.records == []
    with pytest.raises(Exception, match="401"):  # of a user's own call, it is
        Bucket(address)._fs.ls("bucket")
    assert ("Traceback" in caplog.text) == (server.scheme == "gs")


def test_missing_credentials_are_one_sentence(server, address, monkeypatch):
    if server.scheme == "gs":
        pytest.skip("without credentials its client asks anonymously, and is refused with a 401")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, os.devnull)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(gshard.GShardError, match="Unable to locate cred.*Check the cred") as error:
        gshard.Checkpointer(address).all_steps()
    assert "\n" not in str(error.value)


def test_the_endpoint_of_s3_alone_comes_first(server, address, monkeypatch):
    if server.scheme == "s3":
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        Bucket(address).create("x", b"1")
        assert Bucket(address).read("x") == b"1"


def test_an_epath_is_an_address(address):
    checkpointer = gshard.Checkpointer(epath.Path(address))
    assert checkpointer.all_steps() == [] and str(checkpointer._store) == address
