"""Processes that JAX itself has joined know of each other what the launcher's know."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks.groups import free_address
from gshard.distributed.introduce import _own_address
from tests.processes import run_together

WORKER = Path(__file__).with_name("joined_by_jax_worker.py")


@pytest.mark.parametrize("before", [[], ["alone before"]])
def test_a_wait_says_where_the_others_are_and_different_calls_are_errors(tmp_path, before):
    address = free_address()
    commands = [[str(WORKER), address, "2", str(rank), *before] for rank in range(2)]
    ended = run_together(tmp_path, commands, to_the_end=True, limit=90)
    lines = WORKER.read_text().splitlines()
    sleeps, gathers, waits = (
        f"{WORKER}:{number}"
        for text in ("time.sleep(6)", "gshard.full_params(state)", "gshard.distributed.barrier()")
        for number, line in enumerate(lines, 1)
        if line.strip() == text
    )
    assert [end.code for end in ended] == [1, 1], ended
    assert f"s in barrier(), at {waits}. Process 1: after call 3 of the train step" in ended[0].said
    assert f", at {sleeps} for " in ended[0].said
    both = (
        f"process 0: barrier(), at {waits}; process 1: a gather of full arrays, such as "
        f"full_params, at {gathers}. All processes must make the same calls"
    )
    assert all(both in " ".join(end.said.split()) for end in ended)


def test_process_0_serves_at_the_address_that_the_others_reach():
    here = socket.gethostname()
    assert _own_address({0: here, 1: here}) == "127.0.0.1"
    assert _own_address({0: here, 1: "127.0.0.7"}) == "127.0.0.1"  # the route to that one
