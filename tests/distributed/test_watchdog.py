"""A process that waits says where the others are, and a job that hangs ends and says why."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import jax
import pytest

from gshard._util import activity
from gshard._util.activity import Place
from gshard.distributed import places, watchdog
from gshard.distributed.places import Group, Meeting, Member, Server
from gshard.distributed.rendezvous import Address, listen
from tests.jobs import launch, running
from tests.processes import run_together

WORKER = Path(__file__).with_name("hang_worker.py")
HANG_TIMEOUT = 5
STEP = "of the train step of loss_fn"


def run(folder: Path, case: str, *options: str, limit: float = 90) -> tuple[int | None, str, dict]:
    """The exit code of a launched job, what the launcher said, and the logs by rank."""
    logs = folder / "logs"
    words = ["--nproc_per_node", "2", "--virtual_devices", "2", "--log_dir", str(logs)]
    words += ["--hang_timeout", str(HANG_TIMEOUT), *options]
    job = ["-m", "gshard", "launch", *words, str(WORKER), case, str(folder / "steps")]
    (ended,) = run_together(folder, [job], limit=limit)
    return (
        ended.code,
        ended.said,
        {rank: (logs / f"rank-{rank}.log").read_text() for rank in (0, 1)},
    )


def line_of(text: str) -> str:
    """The line of the worker that contains a text, as messages name it."""
    lines = WORKER.read_text().splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.strip().startswith(text)]
    return f"{WORKER}:{found}"


def test_a_call_of_one_process_alone_ends_the_job(tmp_path):
    code, said, logs = run(tmp_path, "full_params")
    assert code == 1
    line = line_of("gshard.full_params(state)")
    assert re.search(rf"process 0 has waited \d+ s in call 7 {STEP}", logs[0])
    assert f"Process 1: in a gather of full arrays, such as full_params, at {line}" in logs[0]
    # Both have their stacks, with the line of the call.
    for log, source in ((logs[0], 'float(metrics["loss"])'), (logs[1], "full_params(state)")):
        assert "gshard: the stack of MainThread, most recent call last:" in log
        assert f"    {source}" in log or f"gshard.{source}" in log
    told = " ".join(said.replace("\ngshard: ", " ").split())
    assert "The job hangs: process" in told
    assert f"The last complete checkpoint is {tmp_path}/steps/3." in told.replace("- ", "-")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "where"),
    [
        ("save", "in save, at"),
        ("save_safetensors", "in save_safetensors, at"),
        ("barrier", "in barrier(), at"),
        ("eval step", "in the first call of the eval step of loss_fn ("),
        ("loader sleeps", f"after call 6 {STEP}"),
        ("a sum", f"after call 6 {STEP}"),
        ("smaller batch", "number of examples changed from 8 to 6, at"),
    ],
)
def test_what_one_process_does_alone_ends_the_job(tmp_path, case, where):
    code, said, logs = run(tmp_path, case)
    assert code == 1 and "trained" not in logs[0]
    assert where in logs[0] and "Process 1: " in logs[0]
    assert "gshard: The job hangs: process" in said
    assert said.count("The stacks of all processes are in the logs") == 1


@pytest.mark.slow
def test_a_step_that_runs_in_the_calling_thread_ends_the_job_too(tmp_path):
    code, said, logs = run(tmp_path, "tiny", "--virtual_devices", "1")
    assert code == 1 and "gshard: The job hangs: process" in said
    assert "process 0 has waited" in logs[0] and "in call 3 of the train step" in logs[0]


@pytest.mark.slow
def test_an_exception_is_named_while_its_process_waits_in_finally(tmp_path):
    code, said, logs = run(tmp_path, "finally")
    assert code == 1
    told = " ".join(said.replace("\ngshard: ", " ").split())
    assert re.search("Process 1: in save, at .*, while it handles ValueError: no column x. ", told)
    assert "A call in `except` or `finally` waits" in told and "if rank == 0" not in told
    assert "They wait for each other" in logs[0] and "Ignore this" not in logs[0]
    begin = logs[1].index("gshard: MainThread handles this exception:")
    assert 'raise ValueError("no column x")' in logs[1][begin:]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["break", "sys.exit(0)"])
def test_a_script_that_ends_early_ends_the_job_at_once(tmp_path, case):
    began = time.monotonic()
    code, said, logs = run(tmp_path, case, "--hang_timeout", "600")
    assert code == 1 and time.monotonic() - began < 60
    assert "has waited" in said and "Process 1: at the end of its script, after call 6" in logs[0]
    assert "No further call comes from process 1, where the script has ended" in logs[0]
    assert "raise hang_timeout" not in logs[0]


@pytest.mark.slow
def test_a_process_that_leaves_by_os_exit_is_named(tmp_path):
    code, said, _ = run(tmp_path, "os._exit(0)")
    assert code == 1
    assert "gshard: The job failed: rank 1 exited with code 0" in said and "os._exit(0)" in said


@pytest.mark.slow
def test_a_stopped_process_is_named(tmp_path):
    code, said, _ = run(tmp_path, "SIGSTOP", "--heartbeat_timeout", "3")
    assert code not in (0, None)
    assert "rank 1 was stopped" in said


@pytest.mark.slow
def test_a_disk_that_does_not_answer_is_named(tmp_path):
    code, said, logs = run(tmp_path, "disk does not answer", limit=120)
    assert code == 1
    assert "process 0 has waited" in logs[0] and "for the files of the others" in logs[0]
    assert "Process 1: busy with the end of the save of step 6, at" in logs[0]
    assert "gshard: The job hangs" in said


@pytest.mark.slow
@pytest.mark.parametrize("case", ["compiles", "slow save", "slow save behind steps", "starts late"])
def test_work_that_takes_long_does_not_end_the_job(tmp_path, case):
    patient = ["--hang_timeout", "600"] if case == "starts late" else []
    code, said, logs = run(tmp_path, case, *patient, limit=150)
    assert code == 0, said
    assert "trained" in logs[0] and "has waited" in logs[0]
    if case == "compiles":
        assert "Process 1: busy with tracing the train step of slow_to_trace" in logs[0]


ALONE = ("save", "full_params", "save_safetensors", "barrier", "loader sleeps", "a sum")
WAITS = (*ALONE, "smaller batch", "disk does not answer", "compiles", "starts late")


@pytest.mark.slow
def test_no_wait_is_silent_for_longer_than_40_seconds(tmp_path):
    """As users run it: the jobs run beside each other, and each ends when it has said something."""

    def silence(case: str) -> float:
        """Seconds between the last line before process 0 waits and the line that says so."""
        logs = tmp_path / case / "logs"
        words = ["--nproc_per_node", 2, "--virtual_devices", 2, "--log_dir", logs]
        words += ["--start_timeout", 600, WORKER, case, tmp_path / case / "steps", "patient"]
        log = logs / "rank-0.log"
        with running(launch(*words), tmp_path) as job:
            said = lambda: log.exists() and "has waited" in log.read_text()  # noqa: E731
            job.wait_until(said, f"told ({case})", 180)
            lines = log.read_text().splitlines()
        at = next(i for i, line in enumerate(lines) if "has waited" in line)
        times = (re.search(r"\d{4}-\S+Z", line) for line in lines[at - 1 : at + 1])
        last, told = (datetime.fromisoformat(time[0]) for time in times if time)
        return (told - last).total_seconds()

    with ThreadPoolExecutor(len(WAITS)) as pool:
        found = dict(zip(WAITS, pool.map(silence, WAITS), strict=True))
    assert all(20 < seconds < 40 for seconds in found.values()), found


def test_a_place_is_what_runs_and_the_line_of_the_user():
    with activity.doing("compiling"):
        place = activity.place(None)
        here = activity.main_line()
    assert place.text.startswith(f"busy with compiling, at {__file__}:") and place.is_busy
    assert here.startswith(f"{__file__}:")
    with activity.doing("save(3)", waits=True):
        assert not activity.place(None).is_busy and activity.place(None).only_waits
        with activity.doing("writing"):
            assert not activity.place(None).only_waits
        (running,) = activity.running()
        assert running.line.startswith(f"{__file__}:")
    assert not activity.running()
    done = threading.Event()
    seen = []

    def save():
        with activity.doing("the save of step 3"):
            seen.append(activity.place(None).text)
        done.set()

    threading.Thread(target=save).start()
    assert done.wait(10)
    assert seen == ["busy with the save of step 3, in the background"]


def test_a_process_that_writes_a_save_beside_its_steps_is_busy():
    with ThreadPoolExecutor(1) as pool:
        thread = pool.submit(threading.get_ident).result()
        writing = activity.doing("the save of step 3", thread=thread)
        with writing, activity.doing("save(3)", waits=True):
            assert activity.place(None).is_busy
        with writing, activity.collecting("files", waits=True, thread=thread):
            assert not activity.place(None).is_busy


def test_a_script_that_has_ended_may_have_written_its_files():
    """Which others may see later, on a network file system."""
    groups = [Group("saving", [0], 1.0), Group("at its end", [1], 1.0, has_ended=True)]
    for kind, expected in ((activity.doing, [1]), (activity.collecting, [])):
        wait = watchdog._Wait(kind("save", waits=True), "save", 40.0, "")
        assert watchdog._ended(wait, groups) == expected


def test_a_place_names_the_exception_that_is_handled_there():
    def handles(error: Exception) -> str:
        try:
            raise error
        except Exception:
            with activity.doing("save(3)", waits=True):
                return activity.place(None).handles

    assert handles(ValueError("no column x\nof 3")) == ", while it handles ValueError: no column x"
    assert handles(KeyError("x")) == ", while it handles KeyError: 'x'"
    # The text of an array waits for its devices, and the watchdog must not.
    assert handles(ValueError(jax.numpy.ones(2))) == ", while it handles ValueError"
    assert not activity.place(None).handles


class Job:
    """Processes that have joined a server, all in one event loop."""

    def __init__(self, members: int, processes: int | None = None):
        listener = listen(Address("127.0.0.1", 0))
        self.server = Server.listening(processes or members, listener)
        port, self.token = self.server.invitation
        self.at, self.ended, self.at_places = Address("127.0.0.1", port), [], {}
        self.members = [self.member(rank) for rank in range(members)]

    def member(self, rank: int, token: str | None = None) -> Member:
        place = lambda: self.at_places.get(rank, Place("training", 1.0))  # noqa: E731
        end = lambda why: self.ended.append((rank, why))  # noqa: E731
        return Member(rank, self.at, self.token if token is None else token, place, end)

    async def __aenter__(self):
        await self.server.start()
        for member in self.members:
            await member.join()
        await until(lambda: len(self.server._joined) == len(self.members))
        return self

    async def __aexit__(self, *_):
        for member in self.members:
            member.close()
        self.server.close()
        await asyncio.sleep(0.1)


async def until(condition) -> None:
    """Waits until a condition holds, for at most 5 seconds."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come")


def test_processes_at_the_same_place_are_one_group():
    async def ask():
        async with Job(300) as job:
            job.at_places[7] = Place("compiling", 40.0, is_busy=True)
            job.at_places[9] = Place("compiling", 50.0, is_busy=True, handles=", while x")
            job.members[11].close()  # without a word
            await until(lambda: 11 not in job.server._joined)
            together = await asyncio.gather(*(x.ask() for x in job.members[:5]))
            assert all(groups == together[0] for groups in together)
            return together[0]

    gone, compiling, training = asyncio.run(ask())
    assert gone.ranks == [11] and not gone.has_ended and "lost its connection" in gone.text
    assert compiling == ("compiling", [7, 9], 50.0, True, False, False, ", while x")
    assert training.ranks == [r for r in range(300) if r not in (7, 9, 11)]


def test_a_process_is_at_work_until_it_leaves():
    async def leave():
        async with Job(3, processes=4) as job:
            own = watchdog.Watchdog(0, 600, job.at, job.token, job.server)
            assert own.are_at_work([0, 1, 2]) and not own.are_at_work([0, 3])
            job.members[1].leave("at the end of its script")
            await until(lambda: not own.are_at_work([1]))
            job.members[2].close()
            await until(lambda: not own.are_at_work([2]))
            assert own.are_at_work([0])

    asyncio.run(leave())
    assert not watchdog.Watchdog(1, 600).are_at_work([0])  # as far as it knows


def test_the_end_of_the_job_reaches_every_process():
    async def end():
        async with Job(5) as job:
            job.members[3].end_all("why")
            await until(lambda: len(job.ended) == 5)
            late = job.member(5)  # it has not joined before
            await late.join()
            await until(lambda: len(job.ended) == 6)
            late.close()
            return sorted(job.ended)

    assert asyncio.run(end()) == [(rank, "why") for rank in range(6)]


def meeting(ranks: list[int], number: int, call: str = "save") -> Meeting:
    return Meeting(ranks, number, call, f"{call}, at train.py:3")


def test_of_many_processes_the_one_that_makes_another_call_is_named():
    async def meet():
        async with Job(12) as job:
            ranks = list(range(12))
            meetings = [meeting(ranks, 1, "save" if r < 11 else "barrier") for r in ranks]
            for member, each in zip(job.members, meetings, strict=True):
                member.meet(each)
                await asyncio.sleep(0.02)
            await until(lambda: all(each.over.is_set() for each in meetings))
            told = {0: "save, at train.py:3", 11: "barrier, at train.py:3"}
            assert all(each.others == told for each in meetings)

    asyncio.run(meet())


def test_a_meeting_is_over_when_all_of_its_ranks_have_come_or_one_has_ended():
    async def meet():
        async with Job(4) as job:
            first, other = meeting([1, 3], 1), meeting([1, 3], 1)
            job.members[1].meet(first)
            job.members[0].meet(meeting([0, 2], 1))
            await asyncio.sleep(0.1)
            assert not first.over.is_set()
            job.members[3].meet(other)
            await until(lambda: first.over.is_set() and other.over.is_set())
            assert first.without is None and not first.others
            late = meeting([1, 3], 2)
            job.members[1].meet(late)
            job.members[3].leave("has ended with an error")
            job.members[3].close()
            await until(late.over.is_set)
            assert late.without == (3, "has ended with an error")
            later = meeting([1, 3], 3)
            job.members[1].meet(later)
            await until(later.over.is_set)
            assert later.without == (3, "has ended with an error")

    asyncio.run(meet())


def test_a_meeting_of_different_calls_tells_each_what_the_others_do():
    async def meet():
        async with Job(2) as job:
            save, gather = meeting([0, 1], 1), meeting([0, 1], 1, "a gather")
            job.members[0].meet(save)
            job.members[1].meet(gather)
            await until(lambda: save.over.is_set() and gather.over.is_set())
            assert save.others == gather.others
            assert save.others == {0: "save, at train.py:3", 1: "a gather, at train.py:3"}
            again = [meeting([0, 1], 2), meeting([0, 1], 2)]
            for member, own in zip(job.members, again, strict=True):
                member.meet(own)
            await until(lambda: all(x.over.is_set() and not x.others for x in again))

    asyncio.run(meet())


def test_who_comes_late_hears_of_its_own_call_and_not_of_the_next():
    """The others may have failed once more by then."""

    async def meet():
        async with Job(3) as job:
            for number, name in enumerate(("restore", "delete"), 1):
                pair = [meeting([0, 1, 2], number, f"{name} {rank}") for rank in range(2)]
                for member, own in zip(job.members, pair, strict=False):
                    member.meet(own)
                await until(lambda pair=pair: all(x.over.is_set() for x in pair))
            for number, name in enumerate(("restore", "delete"), 1):
                late = meeting([0, 1, 2], number, f"{name} 1")
                job.members[2].meet(late)
                await until(late.over.is_set)
                told = {rank: f"{name} {rank}, at train.py:3" for rank in range(2)}
                assert late.others == told

    asyncio.run(meet())


def test_who_has_withdrawn_is_waited_for_again():
    async def meet():
        async with Job(2) as job:
            interrupted, other = meeting([0, 1], 1), meeting([0, 1], 1)
            job.members[0].meet(interrupted)
            job.members[0].withdraw(interrupted)
            job.members[1].meet(other)
            await asyncio.sleep(0.2)
            assert not other.over.is_set()
            job.members[0].meet(meeting([0, 1], 1))
            await until(other.over.is_set)

    asyncio.run(meet())


def test_a_lost_connection_is_made_again_and_ends_no_job():
    async def lose():
        async with Job(2) as job:
            first, other = meeting([0, 1], 1), meeting([0, 1], 1)
            job.members[1].meet(first)
            await asyncio.sleep(0.1)
            job.server._joined[1].close()  # as a firewall between them does
            await until(lambda: 1 not in job.server._joined)
            await until(lambda: 1 in job.server._joined)
            job.members[0].meet(other)
            await until(lambda: first.over.is_set() and other.over.is_set())
            assert first.without is None is other.without
            assert [len(x.ranks) for x in await job.members[0].ask()] == [2]

    asyncio.run(lose())


def test_a_process_that_cannot_join_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(places, "_JOIN", 0.2)

    async def meet():
        async with Job(2, processes=3) as job:  # the third cannot reach the server
            mine, other = meeting([0, 1, 2], 1), meeting([0, 1, 2], 1)
            job.members[0].meet(mine)
            job.members[1].meet(other)
            await until(lambda: mine.over.is_set() and other.over.is_set())
            assert mine.without is None and not mine.others

    asyncio.run(meet())


def test_a_forked_process_does_not_keep_the_connection():
    async def fork():
        async with Job(2) as job:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            try:
                job.members[1].close()
                await until(lambda: 1 not in job.server._joined)
            finally:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking a process that has threads
        asyncio.run(fork())


def test_another_program_is_not_admitted():
    async def intrude():
        async with Job(2) as job:
            stranger = job.member(1, token="guessed")
            await stranger.join()
            stranger.end_all("mischief")
            await until(lambda: stranger._writer.is_closing())
            assert not job.ended and len(job.server._joined) == 2

    asyncio.run(intrude())
