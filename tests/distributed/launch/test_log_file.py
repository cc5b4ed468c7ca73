"""The logs of a job's processes: times, and a limit to their size."""

from __future__ import annotations

import re
import shutil

from gshard.distributed.launch.log_file import Log, LogFile
from tests.jobs import launch, running

STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")
STAMPED = len(b"2026-01-01T00:00:00.000Z ")


def test_each_line_has_the_time_at_which_it_began(tmp_path):
    log = Log(tmp_path, 0, 2**20)
    for raw in (b"one\ntw", b"o\n", b"\nfour\r4\n", b"five"):
        log.write(raw)
    log.close()
    _, *lines = (tmp_path / "rank-0.log").read_bytes().split(b"\n")
    assert all(STAMP.match(line) for line in lines)
    assert [line[STAMPED:] for line in lines] == [b"one", b"two", b"", b"four\r4", b"five"]


def test_a_log_is_continued_in_another_file_between_two_lines(tmp_path):
    log = Log(tmp_path, 0, 1000)
    for number in range(100):
        log.write(b"%03d" % number)  # a line in two pieces
        log.write(b" end\n%03d again\n" % number)
        found = tmp_path / "rank-0.log.1"
        assert not found.exists() or found.read_bytes().endswith(b"\n")
    log.close()
    Log(tmp_path, 0, 1000).close()  # the next start appends
    old, new = ((tmp_path / name).read_bytes() for name in ("rank-0.log.1", "rank-0.log"))
    assert len(old) <= 1000 + len("2026-01-01T00:00:00.000Z 000 end\n")
    assert len(new) <= 1000
    lines = [x[STAMPED:] for x in (old + new).splitlines() if not x.startswith(b"---")]
    expected = [b"%03d %s" % (i, word) for i in range(100) for word in (b"end", b"again")]
    assert lines == expected[-len(lines) :]
    assert len(lines) > 20
    assert new.count(b"---\n") == 1


def test_a_log_that_is_deleted_begins_again(tmp_path):
    log = Log(tmp_path / "log", 0, 2**20)
    log.write(b"one\n")
    shutil.rmtree(tmp_path / "log")
    log.write(b"two\n")
    log.write(b"three\n")
    log.close()
    lines = (tmp_path / "log" / "rank-0.log").read_bytes().splitlines()
    assert [line[STAMPED:] for line in lines] == [b"two", b"three"]


def test_two_jobs_with_one_log_keep_its_last_lines(tmp_path):
    logs = [Log(tmp_path, 0, 1000) for _ in range(2)]
    for number in range(50):  # the second job writes less, and so begins no file by itself
        logs[0].write(b"%03d\n" % number)
        if number % 5 == 0:
            logs[1].write(b"another\n")
    for log in logs:
        log.close()
    kept = b"".join((tmp_path / name).read_bytes() for name in ("rank-0.log.1", "rank-0.log"))
    lines = [line[STAMPED:] for line in kept.splitlines() if b"another" not in line]
    assert [x for x in lines if x.isdigit()] == [b"%03d" % i for i in range(50)][-len(lines) :]
    assert len(kept) > 1000


def test_a_lock_is_that_of_the_files_that_follow_too(tmp_path):
    log, other = LogFile(tmp_path / "events", 100), LogFile(tmp_path / "events", 100)
    assert log.lock()
    for number in range(20):
        log.write(b"%030d\n" % number)
    other.write(b"seen\n")  # opens the file that there is now
    assert not other.lock()
    (tmp_path / "events").unlink()
    log.write(b"again\n")
    other.write(b"seen\n")
    assert not other.lock()
    log.close()
    assert other.lock()
    other.close()


def test_the_console_has_no_times_and_the_log_a_limit(tmp_path):
    script = tmp_path / "much.py"
    script.write_text("for i in range(30_000): print(i, 'x' * 60)")
    with running(launch("--log_size", 1, script), tmp_path) as job:
        assert job.code() == 0, job.err
        assert job.out.splitlines() == [f"{i} {'x' * 60}" for i in range(30_000)]
    sizes = [path.stat().st_size for path in sorted((tmp_path / "log").glob("rank-0*"))]
    assert len(sizes) == 2
    assert max(sizes) <= 2**20 + 200
    assert b"29999" in (tmp_path / "log" / "rank-0.log").read_bytes()[-200:]
