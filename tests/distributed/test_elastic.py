"""Elastic jobs of `gshard launch`: machines come and go, and the numbers stay the same."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import gshard
from gshard.distributed.launch import coordinator
from gshard.distributed.launch.cli import request
from gshard.distributed.launch.coordinator import Coordinator
from gshard.distributed.launch.elastic import run_elastic
from gshard.distributed.launch.machine import LONGEST_ERROR, Report
from gshard.distributed.launch.restarts import Failure
from gshard.distributed.line_server import LONGEST
from gshard.distributed.machines import Machines, parse_machines
from gshard.distributed.messages import line_of
from gshard.distributed.rendezvous import address, listen
from tests import hosts as namespaces
from tests import reference
from tests.distributed.elastic_worker import train
from tests.hosts import NoHostsError, until
from tests.jobs import launch, running
from tests.processes import fast_compilation, free_address

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

LIMIT = 240  # seconds for anything that has no bound of its own
WAITS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
words = ("GSHARD_RESTARTS", "GSHARD_PROCESS_ID", "GSHARD_NUM_PROCESSES", "GSHARD_NNODES")
with open("FOLDER/starts", "a") as file:
    print(*(os.environ[word] for word in words), file=file)
print("runs")
while not pathlib.Path("FOLDER/go").exists(): time.sleep(0.02)
print("the end")
"""


# ---- numbers of machines ------------------------------------------------------------------------


def test_the_most_machines_that_divide_the_batch():
    machines = Machines(2, 6, devices=2, batch_size=24)
    assert machines.fitting == [2, 3, 4, 6]
    assert [machines.of(here) for here in range(1, 8)] == [0, 2, 3, 4, 4, 6, 6]
    assert machines._replace(batch_size=None).of(5) == 5
    assert parse_machines("2:4") == Machines(2, 4)
    assert parse_machines("4") == 4


def test_the_report_of_a_machine_fits_a_line_whatever_the_error_says():
    """A longer line would be taken for that of another program, and the machine for lost."""
    failure = Failure(0, "\U0001f600" * LONGEST_ERROR, 10**6, (10**6, 10**6))
    line = line_of({"ended": Report(1, True, False, False, failure)})
    assert len(line) < LONGEST and json.loads(line)["ended"][4][1] == failure.error


def test_what_an_elastic_job_has_by_default(tmp_path):
    (tmp_path / "waits.py").touch()
    words = ["--master", "127.0.0.1:1", str(tmp_path / "waits.py")]
    asked = request(["--nnodes", "2:4", "--virtual_devices", "2", *words])
    assert asked.elastic == Machines(2, 4, devices=2)
    assert (asked.nnodes, asked.rank, asked.max_restarts) == (4, None, 3)
    assert (asked.join_timeout, asked.join_every) == (30, 0.0)


# ---- launchers as processes ---------------------------------------------------------------------


def test_a_launcher_that_is_killed_is_gone_from_the_job(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(WAITS.replace("FOLDER", str(tmp_path)))
    command = launch("--nnodes", "1:2", "--master", free_address(), script)
    with (
        running(command, tmp_path) as one,
        running([*command[:-1], "--log_dir", "b", command[-1]], tmp_path) as two,
    ):
        starts = tmp_path / "starts"
        for job in (one, two):
            job.wait_until(lambda job=job: "] runs" in job.out, "both run")
        lost, left = (one, two) if "[rank 1]" in one.out else (two, one)
        lost.process.kill()
        lost.assert_nobody_left()
        left.wait_until(lambda: "1 0 1 1 of 1:2" in starts.read_text(), "one runs")
        (tmp_path / "go").touch()
        assert left.code(20) == 0, left.err
        assert re.search(r"machine 1 \(.*\) is lost: 1 of 1:2 machines are here", left.err)
        left.assert_nobody_left()


# ---- launchers as threads, whose processes wait -------------------------------------------------


class Machine:
    """A launcher in a thread, of one machine."""

    def __init__(self, folder: Path, at: str, *words: object, arguments: Sequence[str] = ()):
        self.signals: list[int] = []
        self.code: int | None = None
        self.error = ""
        name = f"{time.monotonic()}"
        options = ["--nnodes", "2:3", "--master", at, "--log_dir", folder / name, *words]
        self._asked = request([*map(str, options), str(folder / "waits.py"), *arguments])
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.code = run_elastic(self._asked, self._asked.master, self.signals)
        except gshard.GShardError as error:
            self.error = str(error)

    def end(self) -> int | None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.code


class Site:
    """Where the machines of a test are."""

    def __init__(self, folder: Path):
        self.folder, self.at, self.machines = folder, free_address(), list[Machine]()
        (folder / "waits.py").write_text(WAITS.replace("FOLDER", str(folder)))

    def machine(self, *words: object, arguments: Sequence[str] = ()) -> Machine:
        """Another machine; the first is the coordinator's."""
        self.machines.append(Machine(self.folder, self.at, *words, arguments=arguments))
        if len(self.machines) == 1:
            until("listening", lambda: self._answers() or self.machines[0].error, 5)
        return self.machines[-1]

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(tuple(address(self.at, "at"))) == 0

    def stranger(self) -> socket.socket:
        """A machine that has only a connection."""
        connection = socket.create_connection(address(self.at, "at"), 5)
        hello: dict[str, object] = {
            "gshard_form": "--nnodes 2:3 --nproc_per_node 1 waits.py",
            "name": "x",
            "rank": None,
        }
        connection.sendall(json.dumps(hello).encode() + b"\n")
        return connection

    def until_start(self, restart: int, machines: int, all_of: int | None = None) -> None:
        """Waits until the processes of a start run, on all machines that run any."""
        expected = [f"{restart} {r} {machines} {machines} of 2:3" for r in range(machines)]
        expected = expected[:all_of]
        path = self.folder / "starts"
        found: list[str] = []

        def there() -> bool:
            found[:] = path.read_text().splitlines() if path.exists() else []
            return {*expected} <= {*found}

        until(f"{expected} in {found}", there, 10)

    def go(self) -> None:
        (self.folder / "go").touch()


@pytest.fixture
def site(tmp_path):
    found = Site(tmp_path)
    yield found
    found.go()
    for machine in found.machines:
        machine.signals += [signal.SIGTERM, signal.SIGTERM]
        machine.end()


def test_machines_that_are_left_are_numbered_again(site, capsys):
    first = site.machine()
    lost = site.stranger()
    until("the second", lambda: "1 (x) has come" in capsys.readouterr().err, 5)
    last = site.machine()
    site.until_start(0, 3, all_of=1)
    lost.close()
    site.until_start(1, 2)
    site.go()
    assert (first.end(), last.end()) == (0, 0)
    said = capsys.readouterr().err
    assert "machine 1 (x) is lost: 2 of 2:3 machines are here" in said
    assert "again in 1 s (machine 1 (x) is lost; 1 of 3)" in said


def test_open_files_that_do_not_suffice_for_the_port_are_said(site, monkeypatch):
    def fails(host):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(coordinator, "ReservedPort", fails)
    for _ in range(2):
        site.machine("--join_timeout", 0)
    assert {machine.end() for machine in site.machines} <= {None, 1}
    assert "cannot reserve a port for process 0: Too many open files." in site.machines[0].error


def said_where_a_machine_comes(site, capsys, *options) -> str:
    """The processes of two machines are stopped for a third, and all three take part."""
    words = ("--join_timeout", 1, "--join_every", 0.01, *options)
    site.machine(*words)
    site.machine(*words)
    site.until_start(0, 2)
    site.machine(*words)
    site.until_start(1, 3)
    site.go()
    assert [machine.end() for machine in site.machines] == [0, 0, 0]
    return capsys.readouterr().err


def test_machines_that_come_are_taken_up_in_order(site, capsys):
    said = said_where_a_machine_comes(site, capsys)
    assert "other machines have come: stopping all processes cleanly" in said
    assert "starting all processes again in" not in said, "it is no failure"


def test_processes_that_do_not_stop_for_a_machine_that_comes_are_named(site, capsys):
    script = site.folder / "waits.py"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    script.write_text(
        script.read_text().replace("signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))", deaf)
    )
    said = said_where_a_machine_comes(site, capsys, "--grace", 1)
    assert re.search(r"ranks \[\d] had not stopped and were killed", said)


def test_a_machine_that_comes_takes_part_after_the_next_failure(site, capsys):
    """Without `--join_every` nothing is stopped for it."""
    script, fails = site.folder / "waits.py", site.folder / "fails"
    first = f"""
while os.environ["GSHARD_RESTARTS"] == "0":
    if pathlib.Path("{fails}").exists(): sys.exit(3)
    time.sleep(0.02)
"""
    script.write_text(script.read_text().replace('print("runs")', first))
    site.machine("--join_timeout", 1)
    site.machine("--join_timeout", 1)
    site.until_start(0, 2)
    site.machine("--join_timeout", 1)
    until("the third", lambda: "machine 2 (" in capsys.readouterr().err, 5)
    fails.touch()
    site.until_start(1, 3)
    site.go()
    assert [machine.end() for machine in site.machines] == [0, 0, 0]
    assert re.search(r"again in 1 s \(.*failed; 1 of 3\)", capsys.readouterr().err)


def said_of_a_machine_that_leaves(site, capsys) -> str:
    """Tells the third of three to stop; the others go on, and nothing counts as a failure."""
    first, second, third = (site.machine() for _ in range(3))
    site.until_start(0, 3)
    third.signals.append(signal.SIGTERM)
    assert third.end() == 75
    site.until_start(1, 2)
    site.go()
    assert (first.end(), second.end()) == (0, 0)
    said = capsys.readouterr().err
    assert re.search(r"machine \d \(.*\) was told to stop, and leaves the job", said)
    assert "starting all processes again in" not in said, said
    return said


def test_a_machine_that_is_told_to_stop_leaves_the_others(site, capsys):
    said_of_a_machine_that_leaves(site, capsys)


def test_a_machine_that_leaves_is_no_failure_where_others_lose_their_connection(site, capsys):
    script, left = site.folder / "waits.py", site.folder / "left"
    stops = f"""
left = pathlib.Path("{left}")
def lose(): raise ValueError("Gloo AllReduce failed: Connection closed by peer")
def stop(*_):
    if left.exists(): lose()
    left.touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
"""
    loses = """
if os.environ["GSHARD_RESTARTS"] == "0":
    while not left.exists(): time.sleep(0.01)
    lose()
"""
    text = script.read_text().replace('print("runs")', loses)
    script.write_text(text.replace("signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))", stops))
    said = said_of_a_machine_that_leaves(site, capsys)
    assert said.count("Gloo AllReduce failed") >= 2, said


def test_a_machine_that_waits_and_is_told_to_stop_does_so_in_order(site, capsys):
    first, second = site.machine("--join_timeout", 1), site.machine()
    site.until_start(0, 2)
    third = site.machine()
    until("the third", lambda: "machine 2 (" in capsys.readouterr().err, 5)
    third.signals.append(signal.SIGTERM)
    assert third.end() == 75
    site.go()
    assert (first.end(), second.end()) == (0, 0)
    assert re.search(r"machine 2 \(.*\) has left: 2 of 2:3", capsys.readouterr().err)


@pytest.mark.slow
def test_a_bug_on_one_machine_ends_the_job_on_all(site, capsys):
    script = site.folder / "waits.py"
    rank = 'os.environ["GSHARD_PROCESS_ID"]'
    script.write_text(script.read_text().replace('print("runs")', f"1 / (int({rank}) - 1)"))
    first, second = site.machine("--join_timeout", 1), site.machine("--join_timeout", 1)
    assert (first.end(), second.end()) == (1, 1)
    said = capsys.readouterr().err
    assert re.search(r"again in 1 s \(processes of machine 1 \(.*\) have failed; 1 of 3\)", said)
    why = r"not starting again: .*rank 1 failed again .* with the same error, .*ZeroDivisionError"
    assert re.search(f"the job is over: {why}", said)


@pytest.mark.slow
def test_the_coordinator_is_told_to_stop_and_all_stop(site):
    first, second = site.machine("--join_timeout", 1), site.machine("--join_timeout", 1)
    site.until_start(0, 2)
    first.signals.append(signal.SIGTERM)
    assert (first.end(), second.end()) == (75, 75)


def test_the_coordinator_is_told_to_stop_between_two_starts(site, capsys):
    (site.folder / "waits.py").write_text("raise ConnectionError('lost')")
    first, second = site.machine("--join_timeout", 1), site.machine("--join_timeout", 1)
    until("the second pause", lambda: "again in 2 s" in capsys.readouterr().err, 20)
    first.signals.append(signal.SIGTERM)
    assert (first.end(), second.end()) == (75, 75)
    assert "told to stop, and no processes ran" in capsys.readouterr().err


@pytest.mark.slow
def test_the_others_wait_for_a_coordinator_that_is_lost(site, capsys):
    with listen(address(site.at, "at")) as listener:
        site.machines.append(member := Machine(site.folder, site.at, "--rank", 1))
        connection, _ = listener.accept()
        connection.recv(1000)
        start = [0, 2, 1, 1]
        connection.sendall(json.dumps({"go": {"machine": 1}}).encode() + b"\n")
        connection.sendall(json.dumps({"start": start}).encode() + b"\n")
        until("running", lambda: (site.folder / "starts").exists(), 5)
        connection.close()
    first = site.machine("--rank", 0, "--join_timeout", 1)
    site.until_start(0, 2)
    site.go()
    assert (first.end(), member.end()) == (0, 0)
    said = capsys.readouterr().err
    assert "the processes of this machine were ended: machine 0 is lost" in said
    assert "machine 0, whose launcher coordinates the job, is lost. Waiting for it to come" in said


def test_events_go_to_the_file_of_the_number_that_the_machine_has_now(site):
    with listen(address(site.at, "at")) as listener:
        site.machines.append(member := Machine(site.folder, site.at, "--rank", 1))
        for number, more in ((1, {"say": "x"}), (2, {"over": 0, "why": "the end"})):
            connection, _ = listener.accept()
            connection.recv(1000)
            for line in ({"go": {"machine": number}}, more):
                connection.sendall(json.dumps(line).encode() + b"\n")
            connection.close()
    assert member.end() == 0
    names = {path.name: path.read_text() for path in site.folder.rglob("events-*.jsonl")}
    assert names.keys() == {"events-1.jsonl", "events-2.jsonl"}
    assert not names["events-1.jsonl"] and '"exit"' in names["events-2.jsonl"]


@pytest.mark.slow
def test_fewer_machines_than_the_least(site, capsys):
    assert site.machine("--start_timeout", 1).end() == 1
    said = capsys.readouterr().err
    assert "1 of 2:3 machines are here after 1 s (--start_timeout), and the job needs 2" in said
    member = site.machine("--rank", 1, "--start_timeout", 1)
    assert member.end() == 1
    assert "did not reach machine 0, whose launcher coordinates" in capsys.readouterr().err


def test_a_machine_that_comes_at_the_very_end_learns_that_the_job_is_over(site, monkeypatch):
    """Its line is read after the others were told, while they close."""
    told, answer = threading.Event(), Coordinator.answer

    def answered(self, line):
        late = site.stranger()
        until("connected", lambda: (self.receive(0.0), self._silent)[1], 5)
        monkeypatch.setattr(Coordinator, "_read", lambda *_: None)
        answer(self, line)
        monkeypatch.undo()
        self._read(next(iter(self._silent)))
        found.append(late.recv(2**16).decode())
        late.close()
        told.set()

    found: list[str] = []
    monkeypatch.setattr(Coordinator, "answer", answered)
    first, second = site.machine("--join_timeout", 1), site.machine("--join_timeout", 1)
    site.until_start(0, 2)
    site.go()
    assert (first.end(), second.end()) == (0, 0) and told.is_set()
    go, over = map(json.loads, found[0].splitlines())
    assert go == {"go": {"machine": 2}} and over["over"] == 0


def test_a_machine_of_another_command_is_refused(site, capsys):
    site.machine()
    other = site.machine("--nproc_per_node", 2)
    other.end()
    assert "started with --nnodes 2:3 --nproc_per_node 2 waits.py, and that of" in other.error
    assert "is refused: it was started with --nnodes 2:3 --nproc" in capsys.readouterr().err


def test_a_job_with_other_arguments_is_refused(site):
    site.machine(arguments=["--lr", "0.1"])
    other = site.machine(arguments=["--lr", "0.2"])
    other.end()
    found = re.findall(r"waits\.py ARGUMENTS \(checksum (\w{8})\)", other.error)
    assert len({*found}) == 2 and "Give another job a --master of its own" in other.error
    assert "what differs between them, such as a folder, in an environment variable" in other.error


def test_only_machines_that_divide_the_batch_take_part(site, capsys):
    words = ("--batch_size", 8, "--join_timeout", 1)
    for _ in range(3):
        site.machine(*words)
    site.until_start(0, 2)
    site.go()
    assert [machine.end() for machine in site.machines] == [0, 0, 0]
    assert "starting with 2 of 2:3 machines" in capsys.readouterr().err


# ---- on four hosts, of a training ---------------------------------------------------------------

STEPS, PAUSE = 40, 0.1  # seconds after each, so that there is something to interrupt


class Launcher:
    """`gshard launch` of an elastic job on one host."""

    def __init__(self, host, folder: Path, *words: object):
        self.host, self._log = host, folder / f"{host.name}-{time.monotonic()}.log"
        options = ["--nnodes", "2:4", "--master", "10.77.0.1:29500", "--virtual_devices", 1]
        options += ["--heartbeat_timeout", 5, "--log_dir", folder / "log", *words]
        worker = ("-m", "tests.distributed.elastic_worker", folder, STEPS, PAUSE)
        own = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
        own["XLA_FLAGS"] = fast_compilation()
        command = (sys.executable, "-m", "gshard", "launch", *options, *worker)
        self.process = host.start(self._log, own, *command)

    @property
    def said(self) -> str:
        return f"--- {self.host.name}\n{self._log.read_text()}"


def steps_of(folder: Path, start: int) -> list[dict]:
    """What process 0 wrote in one start of the job."""
    path = folder / f"{start}-0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "link", "stop"])
def test_four_hosts_and_three_and_four_again(tmp_path, how):
    try:
        with namespaces.hosts(tmp_path, 4) as hosts:
            _lose_and_bring_back(hosts, tmp_path, how)
    except NoHostsError as error:
        pytest.skip(f"no network namespaces here (they need root and `ip`): {error}")
    losses: dict[int, float] = {}
    for start, on in enumerate(([4, 2], [3, 4], [4, 2])):  # devices and micro-batches
        found = steps_of(tmp_path, start)
        assert all(x["on"] == on for x in found), found
        if how == "stop" or start == 2:  # then it was saved before, and no step is done twice
            assert losses.keys().isdisjoint(x["step"] for x in found)
        losses |= {x["step"]: x["loss"] for x in found}
    undisturbed: list[dict] = []
    (tmp_path / "alone").mkdir()
    train(tmp_path / "alone", STEPS, undisturbed.append)
    assert [x["step"] for x in undisturbed] == sorted(losses) == [*range(1, STEPS + 1)]
    expected = [x["loss"] for x in undisturbed]
    reference.assert_same_values([losses[i + 1] for i in range(STEPS)], expected, 1e-6)


def _lose_and_bring_back(hosts, folder: Path, how: str) -> None:
    launchers = [Launcher(host, folder, "--join_every", 0.05) for host in hosts]
    lost = launchers[2]

    def said() -> str:
        return "\n".join(x.said for x in launchers)

    def ended() -> list[Launcher]:
        return [x for x in launchers if x is not lost and x.process.poll() is not None]

    def until_steps(start: int, count: int = 6) -> None:
        until("training", lambda: len(steps_of(folder, start)) >= count or ended(), LIMIT)
        assert not ended(), said()

    until_steps(0)
    if how == "link":
        hosts[2].run("ip", "link", "set", "eth0", "down")
    else:
        lost.process.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGTERM}[how])
    until_steps(1)
    if how == "link":
        hosts[2].run("ip", "link", "set", "eth0", "up")
    else:
        assert lost.process.wait(LIMIT) == {"kill": -signal.SIGKILL, "stop": 75}[how], said()
        launchers[2] = Launcher(hosts[2], folder, "--join_every", 0.05)
    for launcher in launchers:
        assert launcher.process.wait(LIMIT) == 0, said()
    for host in hosts:
        until(f"empty: {host.name}", lambda host=host: not host.processes(), 2)
    events = [json.loads(x) for x in (folder / "log" / "events.jsonl").read_text().splitlines()]
    starts = [x for x in events if x["event"] == "start" and x["rank"] is None]
    assert [x["machines"] for x in starts] == [4, 3, 4]
    assert "other machines have come: stopping all processes cleanly" in said()
