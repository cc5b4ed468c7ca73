"""A process that waits long for the others says so, with the line of the user's call."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from gshard.distributed import waiting
from tests.processes import free_address, run_together, variables

SCRIPT = """
import time, gshard
from gshard.distributed import waiting
waiting.REMIND = 1.0
gshard.distributed.initialize()
if gshard.distributed.process_index() == 1:
    time.sleep(4)
gshard.distributed.barrier()
"""


def test_a_wait_says_where_it_is(capsys, monkeypatch):
    monkeypatch.setattr(waiting, "REMIND", 0.05)
    monkeypatch.setattr(waiting, "_AGAIN", 60.0)
    with waiting.waiting_for_others():  # this line
        time.sleep(0.5)
    said = capsys.readouterr().err
    line = 1 + Path(__file__).read_text().splitlines().index(
        "    with waiting.waiting_for_others():  # this line"
    )
    assert f"for the others, at {__file__}:{line}" in said
    assert said.count("All processes must make this call") == 1
    with waiting.waiting_for_others():
        pass
    time.sleep(0.1)
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_a_barrier_that_one_process_comes_late_to(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    at = free_address()
    ended = run_together(tmp_path, [[str(script)]] * 2, [variables(at, 2, i) for i in range(2)])
    assert [end.code for end in ended] == [0, 0]
    assert f"process 0 has waited 1 s for the others, at {script}:8." in ended[0].said
    assert "has waited" not in ended[1].said
