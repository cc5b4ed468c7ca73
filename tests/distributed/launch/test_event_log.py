"""`events.jsonl`: what a program that watches a job reads there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gshard._util import events
from gshard.distributed import unfinished
from gshard.distributed.launch.event_log import EventLog, Status
from tests.jobs import ROOT, launch, running

WORKER = ROOT / "tests" / "distributed" / "launch" / "seen_worker.py"


def read(folder: Path, name: str = "events.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def kinds(found: list[dict], rank: int | None) -> list[str]:
    return [event["event"] for event in found if event["rank"] == rank]


@pytest.fixture
def status(tmp_path, monkeypatch):
    log = EventLog(tmp_path, 0, 2**20)
    made = Status(tmp_path / "status", 3, log)
    monkeypatch.setattr(events, "_path", str(made.path))
    monkeypatch.setattr(events, "_map", events._mapped())
    monkeypatch.setattr(events, "_has_stepped", True)
    yield made
    made.close()
    log.close()


def test_an_event_has_time_rank_step_and_seconds(status, tmp_path):
    events.tell("save", 7, 1.23456, what="x")
    events.tell("skip", 8)
    status.update()
    save, skip = read(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", save.pop("time"))
    assert save == {"event": "save", "rank": 3, "step": 7, "seconds": 1.235, "what": "x"}
    assert skip.keys() == {"time", "event", "rank", "step"}


def test_a_line_that_has_begun_is_read_when_it_ends(status, tmp_path):
    with status.path.open("ab") as file:
        for piece in (b'{"event": "a', b'", "time": "now"}\nno JSON\n[1]\n{"rank": 1}\n', b"{"):
            file.write(piece)
            file.flush()
            status.update()
    assert read(tmp_path) == [{"time": "now", "event": "a", "rank": 3}]


def test_a_disk_that_was_full_loses_no_later_event(status, tmp_path):
    with status.path.open("ab") as file:
        file.write(b'{"event": "sa')  # what fitted
    events.tell("skip", 8)
    status.update()
    assert kinds(read(tmp_path), 3) == ["skip"]


def test_a_process_that_leaves_while_the_disk_is_full_is_not_cut_off(status, monkeypatch):
    assert not status.work.cut_off
    events.tell_joined(True)
    assert status.work.cut_off
    monkeypatch.setattr(events, "_path", "/dev/full")
    events.tell_joined(False)
    status.update()
    assert not status.work.cut_off


def test_the_end_of_a_script_is_for_the_launcher_alone(status, tmp_path):
    """It may be read, or the process may be gone before."""
    assert status.left is None
    with status.path.open("ab") as file:
        file.write(b'{"event": "end"}\n')
    status.update()
    assert read(tmp_path) == [] and status.left is not None


def test_the_last_step_is_known_without_an_event(status, tmp_path):
    assert status.work.step is None
    number = events.StepNumber()
    for _ in range(3):
        number.begin(41)  # read at the first call alone
        number.end(None)
    assert status.work.step == events.last_step() == 44
    events.restored(20, 0.1)
    number.begin(20)
    number.end(None)
    assert status.work.step == 21
    status.update()
    assert kinds(read(tmp_path), 3) == ["restore"]


def test_a_save_that_fails_is_no_checkpoint(status, tmp_path):
    for step, error in ((1, {}), (2, {"error": "no room"})):
        with unfinished.finished_first("a save", step=step) as event:
            event |= error
    status.update()
    assert status.work.saved == 1
    assert [event.get("error") for event in read(tmp_path)] == [None, None, None, "no room"]


def test_a_job_is_seen_from_outside(tmp_path):
    with running(launch("--virtual_devices", 2, WORKER, 8, "bad", 6), tmp_path) as job:
        assert job.code() == 0, job.err
    found = read(tmp_path / "log")
    assert kinds(found, None) == ["start", "exit"]
    assert (tmp_path / "log" / "events.jsonl").stat().st_mode & 0o777 == 0o600
    seen = {event["event"]: event for event in found if event["rank"] == 0}
    assert seen.keys() == {
        "start", "compile", "first_step", "save_begin", "save", "skip", "exit",
    }  # fmt: skip
    assert "seen_worker.py" in seen["compile"]["what"]
    assert 0 < seen["compile"]["seconds"] < seen["first_step"]["seconds"]
    assert [seen[name].get("step") for name in ("first_step", "skip", "save")] == [1, 5, 7]
    assert (seen["exit"]["step"], seen["exit"]["code"]) == (7, 0)
    assert (seen["skip"]["row"], seen["skip"]["leaves"]) == (1, "w")


def test_a_program_that_a_process_starts_tells_no_steps_as_its(tmp_path):
    script = tmp_path / "script.py"
    step = "from gshard._util import events; n = events.StepNumber(); n.begin({}); n.end(0)"
    script.write_text(
        f"import subprocess, sys\n{step.format(6)}\n"
        f"subprocess.run([sys.executable, '-c', {step.format(40)!r}], check=True)\n"
    )
    with running(launch(script), tmp_path) as job:
        assert job.code() == 0, job.err
    assert {event.get("step") for event in read(tmp_path / "log")} == {None, 7}


@pytest.mark.slow
def test_steps_that_are_not_finite_are_seen_from_outside(tmp_path):
    """All processes name a parameter of which one alone stores the bad entry."""
    command = launch("--nproc_per_node", 2, "--virtual_devices", 1, WORKER, 30, "bad")
    with running([*command, *map(str, range(5, 30))], tmp_path) as job:
        assert job.code() == 1
        for rank in (0, 1):
            said = rf"\[rank {rank}\] .*NonFiniteError: 5 .* at step 4 with those of w\."
            assert re.search(said, job.err), job.err
    skips = [event for event in read(tmp_path / "log") if event["event"] == "skip"]
    assert {(x["rank"], x["step"], x.get("leaves")) for x in skips} == {(0, 4, None), (1, 4, "w")}
    assert sorted(x["row"] for x in skips) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.slow
def test_a_job_that_hangs_is_seen_from_outside(tmp_path):
    command = launch(
        "--nproc_per_node", 2, "--virtual_devices", 1, "--hang_timeout", 3, WORKER, 40, "hang", 6
    )
    with running(command, tmp_path) as job:
        assert job.code() == 1, job.err
    found = read(tmp_path / "log")
    for rank in (0, 1):
        assert {"join", "compile", "first_step", "save", "hang"} <= {*kinds(found, rank)}
    hang = next(event for event in found if event["event"] == "hang")
    assert "has waited" in hang["why"]
    assert hang["step"] >= 6


@pytest.mark.parametrize("what", ["folder", pytest.param("link", marks=pytest.mark.slow)])
def test_a_job_runs_without_its_events(tmp_path, what):
    path = tmp_path / "log" / "events.jsonl"
    path.mkdir(parents=True)
    if what == "link":
        path.rmdir()
        path.symlink_to(tmp_path / "elsewhere")
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    with running(launch(script), tmp_path) as job:
        assert job.code() == 0
        assert job.out == "done\n"
        assert re.fullmatch(r"gshard: log/events\.jsonl cannot be written .*\n", job.err)
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_as_the_log_folder_is_one_error(tmp_path):
    (tmp_path / "log").write_text("")
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    with running(launch(script), tmp_path) as job:
        assert job.code() == 2
        assert re.fullmatch("error: --log_dir log: .*(File exists).*\n", job.err)


def test_two_jobs_with_one_log_folder_are_warned_of(tmp_path, capsys):
    first = EventLog(tmp_path, 0, 2**20)
    assert not capsys.readouterr().err
    EventLog(tmp_path, 0, 2**20).close()
    assert re.search("another job writes into .*--log_dir of its own", capsys.readouterr().err)
    first.close()
    EventLog(tmp_path, 0, 2**20).close()
    assert not capsys.readouterr().err


def test_each_machine_has_its_events(tmp_path):
    for machine in (0, 1):
        log = EventLog(tmp_path, machine, 2**20)
        log.write("start", machine)
        log.close()
    assert kinds(read(tmp_path), 0) == ["start"]
    assert kinds(read(tmp_path, "events-1.jsonl"), 1) == ["start"]


ONE_STEP = """
import jax.numpy as jnp, optax, gshard
params = {"w": jnp.ones((64, 64))}
state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), gshard.make_mesh(), "os")
gshard.make_train_step(lambda p, x: jnp.square(x @ p["w"]).mean(), plan)(state, jnp.ones((8, 64)))
"""


@pytest.mark.slow
def test_a_script_that_ends_after_its_first_step_ends_well(tmp_path):
    """A thread waits for the result then; Python ended it inside of XLA, which aborted."""
    (tmp_path / "script.py").write_text(ONE_STEP)
    for _ in range(5):
        with running(launch("--virtual_devices", 1, "script.py"), tmp_path) as job:
            assert job.code(limit=60) == 0, job.err
