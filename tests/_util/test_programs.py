"""Programs that hang."""

from __future__ import annotations

import subprocess
import time

import pytest

from gshard._util.programs import output_of


def test_all_that_a_program_prints_and_its_exit_code():
    assert output_of(["sh", "-c", "echo one; echo two >&2; exit 3"], 20) == ("one\ntwo\n", 3)


def test_a_program_that_leaves_its_output_open_to_another_is_not_waited_for():
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        output_of(["sh", "-c", "sleep 20 & sleep 20"], 0.2)
    assert time.monotonic() - began < 10
