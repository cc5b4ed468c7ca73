"""`gshard launch`, with real processes: what it starts, shows, keeps and says when it fails."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import gshard
from gshard.cli.main import main
from gshard.distributed.exit import STOP_SIGNALS
from gshard.distributed.launch import output, restarts, supervisor
from gshard.distributed.launch.cli import request, say_misplaced, say_started_often
from gshard.distributed.launch.event_log import EventLog, Status
from gshard.distributed.launch.exit_status import (
    End,
    Readable,
    first_cause,
    in_words,
    meaning,
    report,
    silent_ranks,
)
from gshard.distributed.launch.job import Outcome, Worker
from gshard.distributed.launch.log_file import Log
from gshard.distributed.launch.output import Lines, Stream
from gshard.distributed.launch.restarts import error_of
from gshard.distributed.launch.supervisor import Supervisor, is_stopped
from gshard.distributed.unfinished import Work
from tests.jobs import ROOT, assert_port_is_free, launch, running

WORKER = ROOT / "tests" / "distributed" / "launch" / "job_worker.py"


# ---- a job that ends well -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """One job of two processes, run twice into the same logs."""
    folder = tmp_path_factory.mktemp("job")
    command = launch(
        "--nproc_per_node", 2, "--virtual_devices", 3, WORKER, "describe", "--", "a", "-b"
    )
    for _ in range(2):
        with running(command, folder) as job:
            assert job.code() == 0, job.err
            job.assert_nobody_left()
            out, err = job.out, job.err
    found = {}
    for rank, text in re.findall(r"^\[rank (\d)\] .*?(\{.*\})$", out, re.MULTILINE):
        found[int(rank)] = json.loads(text)
    return folder, found, err


def test_every_process_knows_its_rank(described):
    _, found, _ = described
    assert sorted(found) == [0, 1]
    for rank, process in found.items():
        assert (process["rank"], process["world_size"], process["local"]) == (rank, 2, str(rank))
        assert (process["local_devices"], process["devices"]) == (3, 6)


def test_the_script_runs_as_python_runs_it(described):
    for process in described[1].values():
        assert process["arguments"] == ["--", "a", "-b"]
        assert process["main"] == str(WORKER)
        assert process["path"] == str(WORKER.parent)


def test_the_coordinator_listens_on_loopback_alone(described):
    _, found, _ = described
    host, _, port = found[0]["coordinator"].partition(":")
    every = [a for listeners in found[0]["listeners"].values() for a in listeners]
    assert host == "127.0.0.1"
    assert every
    for address in every:  # little-endian words of 127.0.0.1, as IPv4 or mapped into IPv6
        assert address.split(":")[0] in ("0100007F", "0000000000000000FFFF00000100007F")
    assert_port_is_free(int(port))


def test_output_is_tagged_and_logs_are_the_owners(described):
    folder, _, err = described
    assert sorted(err.splitlines()) == [f"[rank {rank}] to stderr" for rank in range(2)]
    for rank in range(2):
        log = folder / "log" / f"rank-{rank}.log"
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        text = log.read_text()
        assert text.count("to stderr") == 2, "each run is appended"
        assert len(re.findall(rf"^--- \d{{4}}-.* rank {rank} ---$", text, re.MULTILINE)) == 2


def test_a_process_that_does_not_exit_is_named(tmp_path, monkeypatch, capsys):
    """Its watchdog has ended with Python, so nothing in it can say so."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os, time, gshard\n"
        "if os.environ['GSHARD_PROCESS_ID'] == '1':\n"
        "    atexit.register(time.sleep, 4)\n"  # before that of gshard, and so after it
        "gshard.distributed.initialize()\n"
    )
    monkeypatch.setattr(supervisor, "_LATE_EXIT", 1.5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert main(["launch", "--nproc_per_node", "2", "--virtual_devices", "1", str(script)]) == 0
    err = capsys.readouterr().err
    assert err.count("have not exited") == 1 and re.search(
        r"exited: rank 1 \(process id \d+\)\.", err
    )


def test_one_process_needs_no_tag_and_a_bar_is_one_line(tmp_path):
    with running(launch(WORKER, "bar"), tmp_path) as job:
        assert job.code() == 0, job.err
        assert job.out == "100%\ndone\n"
        _, bar, done = (tmp_path / "log" / "rank-0.log").read_bytes().split(b"\n")
        assert bar.endswith(b"Z 10%\r50%\r100%")
        assert done.endswith(b"Z done")


def test_lines_of_several_processes_do_not_mix(tmp_path):
    """Gloo's threads write to the script's stdout, as the child does here."""
    line = "os.write(1, b'noise\\n')"
    noise = f"import os; {line}; os.write(2, b'begun')\nwhile True: {line}"
    script = tmp_path / "prints.py"
    script.write_text(
        "import subprocess, sys\n"
        f"noise = [sys.executable, '-c', {noise!r}]\n"
        "child = subprocess.Popen(noise, stderr=subprocess.PIPE)\n"
        "child.stderr.read(5)\n"
        "for i in range(1000): print('line', i)\n"
        "child.kill()\n"
    )
    with running(launch(script), tmp_path) as job:
        assert job.code() == 0, job.err
        assert set(job.out.splitlines()) == {"noise", *(f"line {i}" for i in range(1000))}


@pytest.mark.slow
def test_a_module_of_the_folder_runs(tmp_path):
    (tmp_path / "mine.py").write_text("import sys; print(__name__, sys.argv[1:])")
    with running(launch("--nproc_per_node", 1, "-m", "mine", "x"), tmp_path) as job:
        assert job.code() == 0, job.err
        assert job.out == "__main__ ['x']\n"


@pytest.mark.slow
def test_a_web_proxy_is_not_asked_for_the_coordinator(tmp_path):
    """gRPC would, and hang."""
    nobody = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    command = launch("--nproc_per_node", 2, WORKER, "steps", 3)
    with running(command, tmp_path, **nobody, no_proxy="example.org") as job:
        assert job.code(60) == 0, job.err


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_end_the_job(tmp_path):
    command = " ".join([*launch("--nproc_per_node", 2, WORKER, "steps", 50), "| head -n 1"])
    with running(["bash", "-o", "pipefail", "-c", command], tmp_path) as job:
        assert job.code() == 0, job.err
        assert "all steps" in (tmp_path / "log" / "rank-1.log").read_text()


# ---- a job that fails ---------------------------------------------------------------------------


def test_a_failure_is_reported_once_with_its_last_lines(tmp_path):
    command = launch("--nproc_per_node", 2, WORKER, "steps", 1000, 1)
    with running(command, tmp_path) as job:
        assert job.code() == 1
        job.assert_nobody_left()
        report = [x for x in job.err.splitlines() if x.startswith("gshard: ")]
        assert re.match(r"gshard: The job failed: rank 1 exited with code 1 after", report[0])
        assert "gshard:     | ValueError: a rank that failed" in report
        assert "runpy" not in job.err, "frames that are not the user's"
        assert "rank 0 exited with code 1, since it had lost a peer" in job.err
        assert job.err.count("Traceback") == 2, "live, and in the report: of rank 1 alone"
        assert "lost its connection" in job.err


@pytest.mark.slow
def test_a_code_of_sys_exit_ends_the_job_with_it(tmp_path):
    command = launch("--nproc_per_node", 2, WORKER, "steps", 1000, 0, 3)
    with running(command, tmp_path) as job:
        assert job.code() == 3
        assert "rank 0 exited with code 3" in job.err
        job.assert_nobody_left()


@pytest.mark.slow
def test_a_last_hook_that_fails_is_reported(tmp_path):
    script = tmp_path / "hook.py"
    script.write_text(
        "import time, gshard\n"
        "gshard.distributed.initialize()\n"
        "gshard.distributed.barrier()\n"
        "print('first step', flush=True)\n"
        "def last():\n"
        "    if gshard.distributed.process_index() == 0: raise OSError('disk full while saving')\n"
        "    gshard.distributed.barrier()\n"
        "def steps():\n"
        "    while True:\n"
        "        time.sleep(0.05)\n"
        "        yield 1\n"
        "for _ in gshard.distributed.until_preempted(steps(), last): pass\n"
    )
    with running(launch("--nproc_per_node", 2, script), tmp_path) as job:
        job.until_training()
        job.process.send_signal(signal.SIGTERM)
        assert job.code(20) == 1
        assert "rank 0 exited with code 1" in job.err
        assert "disk full while saving" in job.err
        job.assert_nobody_left()


@pytest.mark.slow
def test_a_restart_needs_no_reader(tmp_path):
    script = tmp_path / "second.py"
    script.write_text(
        "import os, pathlib\n"
        "first = os.environ['GSHARD_RESTARTS'] == '0'\n"
        "print('x' * 100, flush=True)\n"
        "pathlib.Path('done').touch() if not first else 1 / 0\n"
    )
    command = " ".join([*launch("--max_restarts", 1, script), "2>&1 | head -c 1"])
    with running(["bash", "-o", "pipefail", "-c", command], tmp_path) as job:
        assert job.code() == 0
        assert (tmp_path / "done").exists()


@pytest.mark.slow
def test_a_log_on_a_full_disk_ends_and_the_job_does_not(tmp_path):
    script = tmp_path / "much.py"
    script.write_text("for i in range(2000): print(i, 'x' * 40)\nprint('the end')")
    command = "ulimit -f 8; " + " ".join(launch(script))
    with running(["bash", "-c", command], tmp_path) as job:
        # The output of this test is a file too: what is left of it is no matter here.
        assert job.code() == 0
        assert "rank-0.log ends here: File too large" in job.err


def test_a_job_starts_again(tmp_path):
    kill = -int(signal.SIGKILL)
    command = launch("--nproc_per_node", 2, "--max_restarts", 1, WORKER, "steps", 60, 1, kill)
    with running(command, tmp_path) as job:
        assert job.code() == 0, job.err
        assert "rank 1 was killed by SIGKILL" in job.err
        assert "starting all processes again in 1 s (1 of 1)" in job.err
        assert job.out.count("all steps") == 2
        job.assert_nobody_left()


def test_an_error_of_the_launcher_at_a_restart_is_a_failure_of_the_job(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import os\nos.remove('log/rank-0.log')\nos.mkdir('log/rank-0.log')\n"
        "raise ConnectionError('lost')\n"
    )
    with running(launch("--max_restarts", 2, script), tmp_path) as job:
        assert job.code() == 1, job.err
        assert "gshard: not starting again: --log_dir" in job.err
    events = [json.loads(x) for x in (tmp_path / "log" / "events.jsonl").read_text().splitlines()]
    assert [x["event"] for x in events][-2:] == ["give_up", "exit"] and events[-1]["code"] == 1


def test_a_restart_that_finds_no_room_is_tried_again(tmp_path, monkeypatch, capsys):
    """Here its folder for temporary files is gone until the launcher has told of that."""
    script, folder = tmp_path / "script.py", tmp_path / "temporary"
    seen = "[ $(grep -c '\"restart\"' log/events.jsonl) -ge 2 ]"
    back = f"for i in $(seq 3000); do {seen} && break; sleep 0.02; done; mkdir "
    script.write_text(
        "import os, shutil, signal, subprocess\n"
        "if os.environ['GSHARD_RESTARTS'] == '0':\n"
        f"    shutil.rmtree({str(folder)!r})\n"
        f"    subprocess.Popen(['sh', '-c', {back + str(folder)!r}], start_new_session=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(restarts, "_LONGEST", 0.2)
    monkeypatch.chdir(tmp_path)
    words = ["--max_restarts", "99", "--nproc_per_node", "1", "--virtual_devices", "1"]
    assert main(["launch", *words, str(script)]) == 0
    said = capsys.readouterr().err
    assert re.search(rf"cannot be started: {folder}/.*: No such file or directory\.\n", said)
    assert "starting all processes again in 0 s (2 of 99)" in said


def test_an_error_while_the_processes_run_is_not_one_of_their_start(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("")

    def fails(of):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Supervisor, "tick", fails)
    monkeypatch.chdir(tmp_path)
    words = ["--max_restarts", "9", "--nproc_per_node", "1", "--virtual_devices", "1"]
    with pytest.raises(OSError, match="Input/output"):
        main(["launch", *words, str(script)])


@pytest.mark.slow
def test_a_job_that_fails_again_is_given_up(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os; print('start', os.environ['GSHARD_RESTARTS']); 1 / 0")
    with running(launch("--max_restarts", 2, script), tmp_path) as job:
        assert job.code() == 1
        assert job.out.split() == ["start", "0", "start", "1"]
        assert job.err.count("The job failed") == 2


# ---- signals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_told_to_stop_all_stop_at_the_same_step(tmp_path, number):
    with running(launch("--nproc_per_node", 2, WORKER, "until_told"), tmp_path) as job:
        job.until_training()
        job.process.send_signal(number)
        assert job.code() == gshard.distributed.PREEMPTED_EXIT_CODE == 75, job.err
        saved = re.findall(r"\[rank (\d)\] saved at (\d+)", job.out)
        assert sorted(rank for rank, _ in saved) == ["0", "1"]
        assert len({step for _, step in saved}) == 1
        assert "told to stop, and all processes stopped cleanly" in job.err
        job.assert_nobody_left()


def test_a_scheduler_that_signals_every_process_is_no_failure():
    """Slurm sends SIGUSR1 to the launcher and to its processes, which may not listen yet."""
    ends = [End(rank, -signal.SIGUSR1) for rank in range(2)]
    outcome = Outcome(ends, signal.SIGTERM, 0)
    assert not outcome.failed
    assert outcome.summary == (143, "gshard: the job was ended by SIGTERM")
    assert Outcome(ends, None, 0).failed
    assert Outcome(ends, signal.SIGINT, 0).failed


def test_scripts_that_handle_ctrl_c_do_not_let_the_next_job_start(tmp_path):
    """`gshard launch train.py && gshard launch eval.py`."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time\ntry:\n    print('ready', flush=True)\n    time.sleep(100)\n"
        "except KeyboardInterrupt:\n    print('saved', flush=True)\n"
    )
    with running(launch("--nproc_per_node", 2, script), tmp_path) as job:
        job.wait_until(lambda: job.out.count("ready") == 2, "both scripts to run")
        job.process.send_signal(signal.SIGINT)
        assert job.code() == 130, job.err
        assert job.out.count("saved") == 2
        assert "ended by SIGINT, and all processes stopped cleanly" in job.err


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_told_to_stop_between_two_starts(tmp_path, number, code):
    """All that was saved is there, and the job may go on from it: a scheduler tries again at 75."""
    script = tmp_path / "fails.py"
    script.write_text("raise ConnectionError('lost')")
    with running(launch("--max_restarts", 9, script), tmp_path) as job:
        job.wait_until(lambda: "again in 2 s" in job.err, "the second pause")
        job.process.send_signal(number)
        assert job.code() == code, job.err
        assert (code == 75) == ("told to stop, and no processes ran" in job.err)
    events = [json.loads(x) for x in (tmp_path / "log" / "events.jsonl").read_text().splitlines()]
    assert [x["event"] for x in events if x["rank"] is None][-2:] == ["restart", "exit"]


def test_a_signal_to_one_process_stops_all(tmp_path):
    with running(launch("--nproc_per_node", 2, WORKER, "until_told"), tmp_path) as job:
        job.until_training()
        os.kill(job.ranks()[1], signal.SIGUSR1)
        assert job.code() == gshard.distributed.PREEMPTED_EXIT_CODE, job.err
        assert len(set(re.findall(r"saved at (\d+)", job.out))) == 1


@pytest.mark.slow
def test_a_single_process_is_preempted_too(tmp_path):
    with running(launch(WORKER, "until_told"), tmp_path) as job:
        job.until_training(1)
        job.process.send_signal(signal.SIGTERM)
        assert job.code() == gshard.distributed.PREEMPTED_EXIT_CODE, job.err
        assert job.out.count("saved at") == 1


@pytest.fixture
def hears_sighup():
    """Also where the tests themselves run under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hears_sighup")
def test_a_terminal_that_is_closed_stops_the_job_in_order(tmp_path):
    with running(launch("--nproc_per_node", 2, WORKER, "until_told"), tmp_path) as job:
        job.until_training()
        for _ in range(2):  # of the shell, and of the kernel
            job.process.send_signal(signal.SIGHUP)
            time.sleep(0.05)
        assert job.code() == gshard.distributed.PREEMPTED_EXIT_CODE, job.err
        assert len(set(re.findall(r"saved at (\d+)", job.out))) == 1


@pytest.mark.usefixtures("hears_sighup")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGCHLD])
def test_signals_that_the_parent_ignores(tmp_path, number):
    """As under `nohup`, where the job goes on; and where children leave no exit code."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time\nos.kill(os.getppid(), signal.SIGHUP)\ntime.sleep(0.3)\nexit(3)"
    )
    start = f"import os, signal, sys; signal.signal({int(number)}, signal.SIG_IGN); "
    start += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    words = ["-m", "gshard", "launch", "--virtual_devices", "1", str(script)]
    done = subprocess.run(
        [sys.executable, "-c", start, *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == (3 if number == signal.SIGHUP else 143)


@pytest.mark.slow
def test_who_does_not_listen_is_killed_after_a_while(tmp_path):
    command = launch("--nproc_per_node", 2, "--grace", 1, WORKER, "until_told", "False")
    with running(command, tmp_path) as job:
        job.until_training()
        job.process.send_signal(signal.SIGTERM)
        assert job.code(limit=1 + 5) == 128 + signal.SIGTERM
        assert "ranks [0, 1] had not stopped and were killed. Scripts stop" in job.err
        job.assert_nobody_left()


@pytest.mark.slow
def test_ctrl_c_ends_all(tmp_path):
    with running(launch("--nproc_per_node", 2, WORKER, "steps"), tmp_path) as job:
        job.until_training()
        job.process.send_signal(signal.SIGINT)
        assert job.code(limit=10) == 128 + signal.SIGINT
        job.assert_nobody_left()


def test_nobody_outlives_the_launcher(tmp_path):
    with running(launch("--nproc_per_node", 2, WORKER, "with_children"), tmp_path) as job:
        job.until_training()
        assert len(job.pids()) == 5, "two ranks, a process of each, and the guardian"
        os.kill(job.ranks()[0], signal.SIGSTOP)
        job.process.kill()
        job.assert_nobody_left()


@pytest.mark.slow
def test_what_a_process_started_ends_with_it(tmp_path):
    with running(launch("--nproc_per_node", 2, WORKER, "with_children"), tmp_path) as job:
        job.until_training()
        os.kill(job.ranks()[1], signal.SIGKILL)
        assert job.code(limit=10) == 128 + signal.SIGKILL
        job.assert_nobody_left()


# ---- bad input ----------------------------------------------------------------------------------

SCRIPT = str(WORKER)
RANGE = ("--nnodes", "2:4", "--master", "127.0.0.1:1")
BAD = {
    "no script": ([], "name the script"),
    "no such file": (["no.py"], "there is no file 'no.py'"),
    "a folder": ([str(WORKER.parent)], "is a folder without __main__.py. Name a script"),
    "no such module": (["-m", "nowhere.train"], "-m nowhere.train: it is neither in this folder"),
    "the main module": (["-m", "__main__"], "it is neither in this folder"),
    "a package as a module": (["-m", "json"], "it is a package without __main__.py"),
    "a file as a module": (["-m", SCRIPT], "it is a file. Leave out -m"),
    "a path as a module": (["-m", "a/b.py"], "a module is named with dots: a.b."),
    "standard input": (["/dev/stdin"], "'/dev/stdin' is not a file that every process can read"),
    "standard input as a dash": (
        ["-"],
        "'-' is not an option of gshard launch. Save the program in a",
    ),
    "code": (
        ["-c", "print(1)"],
        "'-c' is not an option of gshard launch. Save the program in a file",
    ),
    "python": (["python3", SCRIPT], "leave out 'python3': gshard launch itself starts Python"),
    "no suffix": ([SCRIPT.removesuffix(".py")], "job_worker.py'?"),
    "GPUs by another name": (
        ["--selected-gpus=9", SCRIPT],
        "--selected_gpus='9': 9 is not a visible",
    ),
    "a module without -m": (["my.module"], "For a module say -m"),
    "unknown option": (["--nproc_per_nod", "2", SCRIPT], "Did you mean '--nproc_per_node'?"),
    "unknown option with =": (["--restarts=2", SCRIPT], "Did you mean '--max_restarts'?"),
    "an option like none": (
        ["--endpoint", "x", SCRIPT],
        "'--endpoint' is not an option of gshard launch. Options of the script come",
    ),
    "an option of DeepSpeed": (
        ["--hostfile", "x", SCRIPT],
        "Start the launcher on every machine, with --nnodes N --rank R",
    ),
    "no number": (
        ["--nproc_per_node", "two", SCRIPT],
        "--nproc_per_node: invalid int value: 'two'",
    ),
    "no processes": (["--nproc_per_node", "0", SCRIPT], "--nproc_per_node=0"),
    "rank alone": (["--rank", "1", SCRIPT], "give --nnodes N too, or leave them out"),
    "rank 0 alone": (["--rank", "0", SCRIPT], "--rank and --master are for a job of several"),
    "an address alone": (["--master", "10.0.0.1:1", SCRIPT], "--rank and --master are for a job"),
    "one machine of several": (
        ["--nnodes", "1", "--rank", "1", SCRIPT],
        "--rank 1 is out of range: with --nnodes 1 ranks run from 0 to 0",
    ),
    "one for each GPU": (
        ["--nproc_per_node", "auto", SCRIPT],
        "Leave it out for one process per GPU",
    ),
    "a range from more to fewer": (["--nnodes", "4:2", SCRIPT], "Write 2:4."),
    "a range from no machine": (["--nnodes", "0:3", SCRIPT], "at least one machine. Write 1:3."),
    "a range of words": (
        ["--nnodes", "a:b", SCRIPT],
        "--nnodes 'a:b' must be a number of machines",
    ),
    "half a range": (["--nnodes", "2:", SCRIPT], "or MIN:MAX for an elastic job, such as 2:4"),
    "no machines": (["--nnodes", "0", SCRIPT], "--nnodes '0' must be a number of machines"),
    "a range without an address": (["--nnodes", "2:4", SCRIPT], "2:4 also needs --master, 'host"),
    "rank outside of a range": (
        ["--nnodes", "2:4", "--rank", "4", "--master", "h:1", SCRIPT],
        "--rank 4 is out of range: with --nnodes 2:4 ranks run from 0 to 3",
    ),
    "a batch that no machines divide": (
        [*RANGE, "--virtual_devices", "2", "--batch_size", "10", SCRIPT],
        "no number of machines in --nnodes 2:4, of 2 devices each, divides --batch_size 10",
    ),
    "joins without a range": (
        ["--join_every", "5", SCRIPT],
        "--join_every 5 is for an elastic job: give a range of machines, --nnodes MIN:MAX",
    ),
    "negative joins": ([*RANGE, "--join_every", "-1", SCRIPT], "must be a number of minutes"),
    "joins of no number": ([*RANGE, "--join_every", "nan", SCRIPT], "must be a number of minutes"),
    "no time to join": ([*RANGE, "--join_timeout", "-1", SCRIPT], "--join_timeout=-1"),
    "machines alone": (["--nnodes", "2", SCRIPT], "also needs --rank, the number"),
    "machines without an address": (
        ["--nnodes", "2", "--rank", "0", SCRIPT],
        "--nnodes 2 also needs --master, 'host:port'",
    ),
    "the addresses of Paddle": (["--ips", "a,b", SCRIPT], "with --nnodes N --rank R --master"),
    "the port of torchrun": (["--master-port=1", SCRIPT], "Give --master HOST:PORT instead"),
    "what torchrun alone needs": (
        ["--standalone", SCRIPT],
        "option of gshard launch. Leave it",
    ),
    "rank outside": (
        ["--nnodes", "2", "--rank", "2", "--master", "h:1", SCRIPT],
        "out of range: with --nnodes 2 ",
    ),
    "loopback for machines": (
        ["--nnodes", "2", "--rank", "0", "--master", "127.0.0.1:1", SCRIPT],
        "is this machine alone",
    ),
    "no address of a machine": (
        ["--nnodes", "2", "--rank", "0", "--master", "0.0.0.0:1", SCRIPT],
        "--master 0.0.0.0:1 is not an address that other machines can reach",
    ),
    "no address of a machine for a range": (
        ["--nnodes", "2:4", "--master", "[::]:1", SCRIPT],
        "is not an address that other machines can reach",
    ),
    "no port": (["--master", "here", SCRIPT], "'host:port'"),
    "port too high": (["--master", "here:70000", SCRIPT], "70000 is not a port"),
    "no GPU": (["--gpus", "0", SCRIPT], "--gpus='0': 0 is not a visible device"),
    "GPUs and CPUs": (["--gpus", "0", "--virtual_devices", "2", SCRIPT], "--gpus 0 names GPUs"),
    "no heartbeat": (["--heartbeat_timeout", "0", SCRIPT], "--heartbeat_timeout=0"),
    "no devices": (["--virtual_devices", "0", SCRIPT], "--virtual_devices=0"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_words(case, monkeypatch, capsys):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words, said = BAD[case]
    assert main(["launch", *words]) == 2
    found = capsys.readouterr().err
    assert found.startswith("error: ")
    assert said in found


def test_a_script_for_several_machines_runs_on_one():
    words = ["--nnodes", "1", "--rank", "0", "--master", "10.0.0.1:1", SCRIPT]
    assert request(words).world_size == 1
    assert request(["--master", "127.0.0.1:1", SCRIPT]).world_size == 1


def test_it_can_be_started_as_pytorchs_and_paddles_are():
    words = [sys.executable, "-m", "gshard.distributed.launch", "--nprocs", "2", "x.py"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "Give --nproc_per_node N" in done.stderr


def test_timeouts_of_the_users_variables_are_the_defaults(monkeypatch):
    monkeypatch.setenv("GSHARD_HANG_TIMEOUT", "0")
    monkeypatch.setenv("GSHARD_START_TIMEOUT", "20")
    asked = request(["--start_timeout", "30", SCRIPT])
    assert (asked.hang_timeout, asked.start_timeout, asked.heartbeat_timeout) == (0, 30, 10)
    monkeypatch.setenv("GSHARD_HEARTBEAT_TIMEOUT", "soon")
    with pytest.raises(gshard.GShardError, match="variable GSHARD_HEARTBEAT_TIMEOUT='soon' must"):
        request([SCRIPT])


def test_options_after_the_script_are_named(capsys):
    say_misplaced(request([SCRIPT, "--log_dir", "x"]))
    assert not capsys.readouterr().err
    say_misplaced(request([SCRIPT, "--nproc_per_node=2", "--nnodes", "3"]))
    said = capsys.readouterr().err
    assert f"after {SCRIPT} is given to the script: --nnodes and --nproc_per_node." in said
    say_misplaced(request([SCRIPT, "--", "--nnodes"]))
    assert not capsys.readouterr().err


def test_an_unknown_command_is_named(capsys):
    assert main(["lunch"]) == 2
    assert "Did you mean 'launch'?" in capsys.readouterr().err
    assert main([]) == 0
    assert "gshard launch" in capsys.readouterr().out
    assert main(["launch", "--help"]) == 0
    assert "--nproc_per_node" in capsys.readouterr().out


def test_a_port_that_is_taken_is_said_at_once(tmp_path):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as another job's would
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = ("--nproc_per_node", 2, "--master", f"127.0.0.1:{port}", WORKER, "steps", 1)
        with running(launch(*words), tmp_path) as job:
            assert job.code() == 2
            assert f"port {port} of 127.0.0.1 is taken" in job.err


def test_a_log_that_is_a_pipe_is_refused(tmp_path):
    (tmp_path / "log").mkdir()
    os.mkfifo(tmp_path / "log" / "rank-0.log")
    with running(launch(WORKER, "bar"), tmp_path) as job:
        assert job.code(30) == 2
        assert "rank-0.log cannot be written" in job.err


def test_a_process_that_has_just_ended_is_not_stopped(tmp_path):
    for rank in range(3):
        events = EventLog(tmp_path, 0, 2**20)
        status, log = Status(tmp_path / str(rank), rank, events), Log(tmp_path, rank, 2**20)
        command = ["file", os.devnull]
        worker = Worker(rank, command, dict(os.environ), log, "", status, events)
        while Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        assert is_stopped(worker.pid) is False
        assert worker.exit_code() == 0
        worker.close()
        events.close()


def test_a_pipe_that_somebody_else_fills_is_not_read_for_ever():
    reading, writing = os.pipe()
    other = subprocess.Popen(["yes"], stdout=writing)
    try:
        lines = Lines()
        Stream(reading, None, "", lines, lambda raw: None).drain()
        assert set(lines.every) <= {"y", ""}
    finally:
        other.kill()
        other.wait()
        os.close(reading)
        os.close(writing)


def test_what_was_read_is_passed_on_however_late_it_is(monkeypatch):
    monkeypatch.setattr(output, "_DRAIN", 0.0)  # as on a machine that stands still for a while
    reading, writing = os.pipe()
    os.write(writing, b"one\ntwo")
    os.close(writing)
    lines = Lines()
    Stream(reading, None, "", lines, lambda raw: None).drain()
    os.close(reading)
    assert list(lines.every) == ["one", "two"]


def test_letters_that_a_terminal_has_not_are_spelt():
    reading, writing = os.pipe()
    os.write(writing, "one\nü\u2028€\nthree\n".encode())
    os.close(writing)
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Stream(reading, screen, "> ", Lines(), lambda raw: None).drain()
    os.close(reading)
    said = screen.buffer.getvalue().decode().split("\n")
    assert said == ["> one", "> \\xfc\\u2028\\u20ac", "> three", ""]


def test_a_log_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "log").write_text("mine")
    with running(launch(WORKER, "bar"), tmp_path) as job:
        assert job.code() == 2
        assert "rank-0.log cannot be written" in job.err
    assert (tmp_path / "log").read_text() == "mine"


# ---- devices ------------------------------------------------------------------------------------


def variables_of(monkeypatch, visible, *words, platforms=""):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    asked = request([*words, SCRIPT])
    return asked.nproc_per_node, [v.get("CUDA_VISIBLE_DEVICES") for v in asked.variables]


def test_gpus_are_split_between_processes(monkeypatch):
    found = variables_of(monkeypatch, "4,5,6,7")
    assert found == (4, ["4", "5", "6", "7"])
    found = variables_of(monkeypatch, "4,5,6,7", "--gpus", "4,6,7", "--nproc_per_node", "3")
    assert found == (3, ["4", "6", "7"])
    found = variables_of(monkeypatch, "4,5,6,7", "--nproc_per_node", "2")
    assert found == (2, ["4,5", "6,7"])
    found = variables_of(monkeypatch, "4,5", "--selected_gpus", "5")
    assert found == (1, ["5"])


def test_no_gpu_is_seen_where_jax_uses_the_cpu_or_the_scheduler_names_none(monkeypatch):
    assert variables_of(monkeypatch, "NoDevFiles", "--nproc_per_node", "2") == (2, [None, None])
    assert variables_of(monkeypatch, "4,5", platforms="cpu") == (1, [None])


def test_a_driver_that_does_not_answer_is_said(tmp_path, monkeypatch, capsys):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 100\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("gshard.distributed.env_vars._DRIVER_TIMEOUT", 0.2)
    assert main(["launch", SCRIPT]) == 2
    said = capsys.readouterr().err
    assert f"{program} -L, which lists the GPUs, does not answer. `gshard doctor`" in said
    program.write_text("no program")
    assert main(["launch", SCRIPT]) == 2
    assert f"{program} -L, which lists the GPUs, cannot run (" in capsys.readouterr().err


def test_a_cluster_that_starts_the_launcher_several_times_is_said(monkeypatch, capsys):
    for tasks, words, several in (
        ("2", [SCRIPT], True),
        ("1", [SCRIPT], False),
        ("2", ["--nnodes", "2", "--rank", "0", "--master", "10.0.0.1:1", SCRIPT], False),
    ):
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
        say_started_often(request(words))
        said = capsys.readouterr().err
        assert ("SLURM_STEP_NUM_TASKS=2: if this launcher was started" in said) == several


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "0"], "0 is not a visible device. This process sees 4, 5, 6"),
        (["--gpus", "4,4"], "each once"),
        (["--gpus", "4,5,6", "--nproc_per_node", "2"], "split evenly between 2 processes"),
        (["--nproc_per_node", "100"], "100 processes need a GPU each"),
    ],
)
def test_gpus_that_cannot_be_split_evenly(monkeypatch, words, said):
    with pytest.raises(gshard.GShardError, match=said):
        variables_of(monkeypatch, "4,5,6", *words)


def test_virtual_devices_replace_a_flag(monkeypatch):
    flag = "--xla_force_host_platform_device_count=8"
    monkeypatch.setenv("XLA_FLAGS", f"{flag} --xla_cpu_enable_fast_math=false")
    asked = request(["--virtual_devices", "3", SCRIPT])
    assert asked.variables[0]["JAX_NUM_CPU_DEVICES"] == "3"
    assert asked.variables[0]["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"


def test_virtual_devices_of_a_script_give_way_to_the_launchers(monkeypatch, recwarn):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    gshard.virtual_devices(8)  # a variable of the user's is a default
    monkeypatch.setenv("GSHARD_LOCAL_PROCESS_ID", "0")
    monkeypatch.setenv("GSHARD_PROCESS_ID", "1")  # one process of a job warns
    gshard.virtual_devices(8)
    monkeypatch.setenv("GSHARD_PROCESS_ID", "0")
    gshard.virtual_devices(3)
    assert not recwarn.list
    with pytest.warns(
        gshard.GShardWarning, match=r"virtual_devices\(8\) has no effect: .* 3 virtual"
    ):
        gshard.virtual_devices(8)


# ---- words --------------------------------------------------------------------------------------

# What rank 0 of two wrote when rank 1 was stopped, on JAX 0.10.2; the stack is cut.
ABORTED = """step 7
E1122 17:29:05.039004   20105 coordination_service.cc:1549] [52468] Use error polling to propagate \
the following error to all tasks: UNAVAILABLE: The following tasks are unhealthy (stopped sending \
heartbeats):
1
The tasks have crashed. Check the task logs for an earlier error, or scheduler events (e.g. \
preemption, eviction) to debug further. [type.googleapis.com/tensorflow.CoordinationServiceError='']
a line of the script
E1122 17:29:05.039621   20116 coordination_service_agent.cc:289] Polled an error from coordination \
service (this can be an error from this or another task).
F1122 17:29:05.039784   20116 client.h:80] Terminating process because the JAX distributed service \
detected fatal errors. This most likely indicates that another task died.
1
*** Check failure stack trace: ***
    @     0x7f5b04e40634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
    @     0x7f5b0c4a71f5  (unknown)
"""


def test_lines_of_the_machinery_are_left_out():
    readable = Readable()
    shown = [line for line in ABORTED.splitlines() if readable.shows(line)]
    assert shown == ["step 7", "a line of the script"]


def test_pieces_of_gloo_are_left_out_and_numbers_of_the_user_are_not():
    readable = Readable()
    pieces = ["[Gloo] Rank [Gloo] Rank 1 is connected to 01 is connected to ", " peer ranks. 2 "]
    assert not any(map(readable.shows, pieces))
    assert readable.shows("42")
    assert readable.shows("rank 1 is connected to the database")


def test_who_was_silent_is_read_off():
    assert silent_ranks(ABORTED) == [1]
    end = End(0, -signal.SIGABRT, (), ABORTED)
    assert end.follows
    assert "rank 1 had not answered" in meaning(end)


def test_the_first_cause_is_not_who_follows():
    lost = End(0, 1, (), "UNKNOWN: Gloo AllReduce failed: Connection reset by peer", 1.0)
    raised = End(1, 1, (), "ValueError: mine", 1.2)
    ended = End(2, -9, (), "", 0.5, asked=True)
    stopped = End(3, -9, (), "", 9.0, stopped=True)
    assert first_cause([ended, lost, raised]) is raised
    assert first_cause([ended, lost, raised, stopped]) is stopped
    assert first_cause([ended, lost]) is lost or first_cause([ended, lost]) is ended
    left = End(4, 0, seconds=0.9, work=Work(cut_off=True))  # by os._exit(0)
    assert left.failed and first_cause([lost, left]) is left
    in_order = End(6, 75, seconds=0.1)
    assert first_cause([in_order, raised]) is raised and first_cause([in_order]) is in_order
    assert Outcome([in_order, raised], None, 0).summary[0] == 1
    finished = End(5, 0, seconds=0.5)
    assert not finished.failed and first_cause([finished, lost]) is lost


def test_that_others_come_and_go_is_no_lost_peer():
    """TF_CPP_MIN_LOG_LEVEL=0 shows such lines, on process 0."""
    line = "{}0000 00:00:1796000000.000000    1234 coordination_service.cc:690] task:1 has {}"
    came = line.format("I", "connected to coordination service. Incarnation: 42")
    text = f"{came}\nTraceback (most recent call last):\nZeroDivisionError: division by zero"
    assert not End(0, 1, text=text).follows
    assert error_of(End(0, 1, text=text)) == "ZeroDivisionError: division by zero"
    assert End(0, 1, text=line.format("E", "lost the coordination service")).follows


def test_a_job_that_leaves_by_os_exit_on_all_ranks_has_finished_unless_a_save_is_lost():
    left = [End(rank, 0, work=Work(cut_off=True)) for rank in range(2)]
    assert not Outcome(left, None, 0).failed and Outcome(left, None, 0).summary == (0, "")
    assert Outcome(left, None, 0, is_whole=False).failed, "other machines may have gone on"
    left[0] = End(0, 0, work=Work(("the save of step 3",), cut_off=True))
    assert Outcome(left, None, 0).failed and Outcome(left, None, 0).summary[0] == 1


def test_an_error_before_a_long_list_is_shown_and_explained():
    """XLA lists its largest buffers after the error."""
    error = "jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."
    buffers = [f"\tBuffer {i}:\n\t\tShape: f32[9]" for i in range(60)]
    text = "\n".join(["Traceback (most recent call last):", "  File ...", error, *buffers])
    end = End(0, 1, tuple(text.splitlines()[-20:]), text)
    assert "ran out of memory" in meaning(end)
    assert error in " ".join(report([end], 0, "log").replace("\ngshard: ", " ").split())


def test_an_error_that_a_process_survived_is_not_that_of_its_end():
    text = "Traceback (most recent call last):\nConnectionError: lost the metrics\nstep 7"
    for code in (-9, 3):
        assert "Its error" not in report([End(0, code, (), text)], 0, "log")
    assert error_of(End(0, 3, (), text)) == "exited with code 3"


def test_a_job_that_hung_is_reported_by_what_its_watchdog_said():
    said = "gshard: the last complete checkpoint is steps/3\ngshard: the job hangs: process 0 waits"
    hung = End(0, 1, ("a stack",), f"{said}\nGloo AllReduce failed", 9.0)
    told = report([hung, End(1, 1, (), "Gloo AllReduce failed", 8.0)], 0, "log/rank-*.log")
    assert "gshard: The job hangs: process 0 waits The last complete checkpoint is steps/3." in told
    assert "a stack" not in told and "lost its connection" not in told
    stopped = End(1, -9, (), "", 9.5, stopped=True)  # which is why the others waited
    assert "rank 1 was stopped" in report([hung, stopped], 0, "log/rank-*.log")


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (End(0, -9), "kill -9"),
        (End(0, -9, asked=True), "It had not stopped when it was told to."),
        (End(0, 1, (), "jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory"), "smaller"),
        (End(0, 1, (), "RESOURCE_EXHAUSTED: x: No space left on device"), "A disk is full"),
        (End(0, 1, (), "OSError: [Errno 122] Disk quota exceeded: 'x'"), "a quota is used up"),
        (End(0, 1, (), "gshard...PortTakenError: port 3 is taken"), "another program"),
        (End(0, 1, (), "gshard...NotArrivedError: not all"), "see which are missing"),
        (End(0, 1, (), "raise (NotArrivedError if late else GShardError)(why)\nGShardError"), ""),
        (End(0, 0, work=Work(cut_off=True)), "os._exit(0)"),
        (End(0, -6, (), "Is there a distributed collective mismatch in your code?"), "rank == 0"),
        (End(0, 1, (), "KeyError: 'RANK'"), "gshard.distributed.process_index()"),
        (End(0, 1, (), "ValueError: coordinator_address should be defined."), "gshard.distributed"),
        (End(0, 1, (), "Error: distributed.initialize should only be called once."), "instead"),
        (End(0, 1, (), "ValueError: of the user"), ""),
    ],
)
def test_what_an_end_means(end, said):
    assert said in meaning(end)
    assert bool(said) == bool(meaning(end))


def test_what_a_script_survived_does_not_explain_its_end():
    text = "batch 64: RESOURCE_EXHAUSTED: Out of memory; now 32\n"
    text += "Traceback (most recent call last):\nKeyError: 'loss'"
    assert meaning(End(0, 1, (), text)) == ""


def test_a_connection_of_the_users_own_is_no_lost_peer():
    end = End(
        0, 1, (), "Traceback (most recent call last):\nBrokenPipeError: [Errno 32] Broken pipe"
    )
    assert not end.follows
    assert meaning(end) == ""


def test_the_kernel_that_killed_for_memory_is_named():
    assert "ran out of memory" in meaning(End(0, -9), memory_kills=1)
    assert in_words(-9) == "was killed by SIGKILL"
    assert in_words(3) == "exited with code 3"


@pytest.mark.slow
def test_help_is_quick_and_needs_no_devices(tmp_path):
    began = time.monotonic()
    with running(launch("--help"), tmp_path, JAX_PLATFORMS="none") as job:
        assert job.code() == 0, job.err
    assert time.monotonic() - began < 60
