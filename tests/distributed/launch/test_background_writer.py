"""Somebody who stops reading the launcher's output stops nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gshard.distributed.launch import background_writer
from gshard.distributed.launch.background_writer import BackgroundWriter
from tests.jobs import launch
from tests.processes import clean_environment

LINES = 50_000  # of 100 bytes: more than wait


@pytest.fixture
def pipe():
    read, write = os.pipe()
    with os.fdopen(write, "w") as to, os.fdopen(read) as source:
        yield source, to


def test_a_writer_does_not_wait_for_its_reader(pipe):
    source, to = pipe
    writer = BackgroundWriter(to)
    began = time.monotonic()
    for number in range(LINES):
        print(f"{number:099d}", file=writer, flush=True)
    writer.drain(lambda: 0.1)
    assert time.monotonic() - began < 10
    threading.Thread(target=lambda: (writer.drain(lambda: 5.0), to.close())).start()
    *shown, said = source.read().splitlines()
    assert said == (
        f"gshard: {LINES - len(shown):,} lines are not shown, since nobody read the output in "
        "time. The logs have all."
    )
    assert [int(line) for line in shown] == list(range(len(shown)))
    # What the pipe took and what may wait, however late the thread began.
    assert 0 < 100 * len(shown) < background_writer._MOST + 2**17


def test_everything_is_written_in_order_for_one_who_reads(pipe):
    source, to = pipe
    writer = BackgroundWriter(to)
    print("one", file=writer)
    print("two \u20ac", file=writer)
    writer.drain(lambda: 5.0)
    assert [source.readline(), source.readline()] == ["one\n", "two \u20ac\n"]


def test_the_streams_are_put_back(capsys):
    before = sys.stdout
    with background_writer.background_output([]):
        assert sys.stdout is not before
        print("seen")
    assert sys.stdout is before
    assert capsys.readouterr().out == "seen\n"


@pytest.mark.slow  # real processes
def test_a_stopped_reader_stops_neither_the_job_nor_a_signal(tmp_path):
    script = tmp_path / "chatty.py"
    script.write_text(
        "import time\n"
        "for number in range(10**9):\n"
        "    print('x' * 200, number, flush=True)\n"
        "    open('progress', 'w').write(str(number))\n"
        "    time.sleep(0.001)\n"
    )
    job = subprocess.Popen(
        launch("--virtual_devices", 1, "--grace", 1, script),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=clean_environment() | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )

    def progress() -> int:
        path = tmp_path / "progress"
        return int((path.exists() and path.read_text()) or 0)

    try:
        end = time.monotonic() + 60
        while progress() < 1000 and time.monotonic() < end:  # 200 KB, and a pipe holds 64
            time.sleep(0.1)
        assert progress() >= 1000
        job.send_signal(signal.SIGTERM)
        assert job.wait(20) == 128 + signal.SIGTERM
    finally:
        job.kill()
        job.communicate()
