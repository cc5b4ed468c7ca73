"""A server of each kind for the tests of this folder, and an empty prefix in it for each."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from gshard.checkpoint import lease
from tests.checkpoint.stores.failing_proxy import failing
from tests.checkpoint.stores.servers import Server, serving

_numbers = itertools.count()


@pytest.fixture(scope="module", params=["gs", "s3"])
def server(request):
    with serving(request.param) as made:
        yield made


@pytest.fixture
def address(server: Server, monkeypatch):
    """An address below which there is nothing."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lease, "PERIOD", 0.5)
    return server.address(f"run{next(_numbers)}")


@pytest.fixture
def through_proxy(server, address, monkeypatch):
    """`through_proxy(fault)`: clients reach the server through a proxy that fails so."""

    def start(fault):
        url = stack.enter_context(failing(server.url, fault))
        for name, value in server.environment.items():
            monkeypatch.setenv(name, url if value == server.url else value)

    with contextlib.ExitStack() as stack:
        yield start
