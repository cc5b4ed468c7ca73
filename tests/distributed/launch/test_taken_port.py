"""A launcher without `--rank` whose address another program has says so while it waits."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading

import pytest

from gshard.distributed import rendezvous
from gshard.distributed.exit import PREEMPTED_EXIT_CODE
from gshard.distributed.launch.cli import request
from gshard.distributed.launch.elastic import run_elastic
from tests.hosts import until


@pytest.mark.parametrize("closes", [False, True], ids=["it is silent", "it closes"])
def test_another_port_is_advised_while_it_waits(tmp_path, capsys, monkeypatch, closes):
    """It may be that of another launcher on this machine, so this is no error yet."""
    monkeypatch.setattr(rendezvous, "_REMIND", 0.1)
    (tmp_path / "script.py").touch()
    signals, codes, taken, said = [], [], [], []
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0.1)
        at = f"127.0.0.1:{stranger.getsockname()[1]}"
        words = ["--nnodes", "2:3", "--master", at, "--log_dir", str(tmp_path / "logs")]
        asked = request([*words, str(tmp_path / "script.py")])
        launcher = threading.Thread(
            target=lambda: codes.append(run_elastic(asked, asked.master, signals))
        )
        launcher.start()

        def told() -> bool:
            with contextlib.suppress(TimeoutError):
                taken.append(stranger.accept()[0])
            if closes and taken:
                taken[-1].close()
            said.append(capsys.readouterr().err)
            return "Name another port, or end that program. (" in "".join(said)

        try:
            until("a reminder that names another port", told, 10)
        finally:
            signals.append(signal.SIGTERM)
            for connection in taken:
                connection.close()
            launcher.join(20)
    assert codes == [PREEMPTED_EXIT_CODE]
