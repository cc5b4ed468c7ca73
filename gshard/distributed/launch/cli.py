"""`gshard launch`: reads its command line, runs a job, perhaps again, and reports its end."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import math
import os
import re
import signal
import sys
import time
from itertools import takewhile
from pathlib import Path

from gshard._util.errors import GShardError, similar_option
from gshard._util.validation import check_integer, with_known_spelling
from gshard.distributed.env_vars import chosen_gpus, device_shares, devices_of, visible_gpus
from gshard.distributed.initialize import (
    HEARTBEAT_TIMEOUT,
    INITIALIZATION_TIMEOUT,
    TIMEOUTS,
    clusters_of_several,
    read_timeouts,
)
from gshard.distributed.launch.background_writer import background_output, say
from gshard.distributed.launch.compilation_cache import OFF, VARIABLE
from gshard.distributed.launch.elastic import JOIN_TIMEOUT, MAX_RESTARTS, run_elastic
from gshard.distributed.launch.event_log import EventLog
from gshard.distributed.launch.job import Outcome, Request, collected_signals, run_job, told_to_stop
from gshard.distributed.launch.restarts import Failure, Restarts
from gshard.distributed.machines import Machines, check_batch_size, parse_machines
from gshard.distributed.rendezvous import (
    Address,
    address,
    await_name,
    is_loopback,
    is_unspecified,
    resolved,
)
from gshard.distributed.watchdog import HANG_TIMEOUT

_EXAMPLES = """examples:
  gshard launch --nproc_per_node 4 --virtual_devices 2 train.py --steps 100
      four processes of two virtual CPU devices each, on this machine
  gshard launch --gpus 0,1,2,3 -m my_package.train
      one process for each of four GPUs
  gshard launch --nnodes 2 --rank 0 --master 10.0.0.1:29500 train.py
      the first of two machines; the same with --rank 1 on the second
  gshard launch --nnodes 2:4 --master 10.0.0.1:29500 train.py
      on each of up to four machines: an elastic job, which goes on with those that are left
exit code:
  that of the first process to fail (128 + the signal that killed it); 75 when the job was told to
  stop (SIGTERM, SIGUSR1, SIGHUP) and all processes stopped cleanly; 130 after Ctrl-C
"""

# Options that scripts rarely have themselves.
_OF_JOBS = {"--nproc_per_node", "--nnodes", "--virtual_devices", "--master", "--max_restarts"}


def main(words: list[str]) -> int:
    """Runs a command line; returns the exit code."""
    if words[:1] in (["-h"], ["--help"]):
        print(_parser().format_help(), end="")
        return 0
    try:
        with collected_signals() as signals, background_output(signals):
            return _run(request(words), signals)
    except GShardError as error:
        say(f"error: {error}")
        return 2


def say_misplaced(asked: Request) -> None:
    """Says which options of the launcher the script is given, as words after its name are."""
    before = takewhile(lambda word: word != "--", asked.arguments)
    given = {word.partition("=")[0] for word in before}
    if misplaced := sorted(given & _OF_JOBS):
        say(
            f"gshard: what comes after {asked.script} is given to the script: "
            f"{' and '.join(misplaced)}. Options of gshard launch come before the script's name."
        )


def say_started_often(asked: Request) -> None:
    """Says if a cluster starts this launcher several times, each with a job of its own."""
    several = clusters_of_several()
    if asked.nnodes == 1 and several:
        say(
            f"gshard: {several[0]}: if this launcher was started several times, each starts a job "
            "of its own. For one job start a launcher on each machine, with --nnodes, --rank and "
            "--master; or start the script itself, without a launcher."
        )


def _run(asked: Request, signals: list[int]) -> int:
    say_misplaced(asked)
    say_started_often(asked)
    if isinstance(asked.master, Address) and not asked.rank:  # it may be the name of this machine
        await_name(asked.master.host, asked.start_timeout, signals)
        if signals:
            return told_to_stop(signals[0])
    if asked.elastic is not None and isinstance(asked.master, Address):
        return run_elastic(asked, asked.master, signals)
    began, count, restarts = time.monotonic(), 0, Restarts(asked.max_restarts)
    events = EventLog(asked.log_dir, asked.rank or 0, asked.log_size * 2**20)
    try:
        while (outcome := run_job(asked, count, signals, events)).failed:
            say(outcome.report(asked.log_dir))
            if signals or not asked.max_restarts:
                break
            decision = restarts.after(Failure.of(outcome.ends))
            if not decision.again:
                say(f"gshard: not starting again: {decision.why}")
                events.write("give_up", why=decision.why)
                break
            count += 1
            after = f"in {decision.seconds:.0f} s ({decision.why})"
            say(f"gshard: starting all processes again {after}")
            events.write("restart", seconds=decision.seconds, why=decision.why)
            until = time.monotonic() + decision.seconds
            while time.monotonic() < until and not signals:
                time.sleep(0.05)
            if signals:
                outcome = Outcome([], signals[0], 0)
                break
        code, said = outcome.summary
        if code == 0 and outcome.signal == signal.SIGINT:  # the next command of a script waits
            code = 128 + signal.SIGINT
            said = "gshard: the job was ended by SIGINT, and all processes stopped cleanly"
        if said:
            say(said)
        events.write("exit", seconds=time.monotonic() - began, code=code)
    except GShardError as error:
        if not count:
            raise
        # No option is wrong with which the job has run before.
        say(f"gshard: not starting again: {error}")
        events.write("give_up", why=str(error))
        events.write("exit", seconds=time.monotonic() - began, code=(code := 1))
    finally:
        events.close()
    return code


# ---- the command line ----------------------------------------------------------------------------

# name: default, least, unit in messages, metavar, help
_INTEGERS = {
    "log_size": (256, 1, " of megabytes", "MB", "a log that grows larger is renamed to rank-R.log.1"
                 ", in place of the one before (default 256)"),
    "max_restarts": (None, 0, "", "N", "how many times in a row without progress to start all "
                     "processes again when one has failed, after 1, 2, 4, ... 60 seconds; not "
                     "after the same error at the same step (default 0; 3 in an elastic job)"),
    "grace": (30, 0, "", "SECONDS", "how long the processes have to save after SIGTERM, or when "
              "one has failed (default 30)"),
    "heartbeat_timeout": (None, 1, " of seconds", "SECONDS", "how long a process may "
                          f"be silent before it counts as dead (default {HEARTBEAT_TIMEOUT})"),
    "start_timeout": (None, 1, " of seconds", "SECONDS", "how long to wait for "
                      f"all processes to arrive (default {INITIALIZATION_TIMEOUT})"),
    "hang_timeout": (None, 0, " of seconds", "SECONDS", "how long a process may wait for "
                     f"the others, in a step or a call (default {HANG_TIMEOUT}; 0: no limit)"),
    "join_timeout": (None, 0, " of seconds", "SECONDS", "how long an elastic job that starts waits "
                     f"for more machines once MIN are there (default {JOIN_TIMEOUT})"),
    "batch_size": (None, 1, " of examples of the global batch", "N", "examples of the script's "
                   "global batch: an elastic job only runs on numbers of machines whose devices "
                   "divide it (default: any number)"),
}  # fmt: skip


_NEEDLESS = "Leave it out: gshard launch needs no such option."
_UPSTREAM = {  # options of torchrun and of paddle.distributed.launch, and what to do instead
    **dict.fromkeys(
        ("ips", "hostfile"),
        "Start the launcher on every machine, with --nnodes N --rank R --master HOST:PORT.",
    ),
    **dict.fromkeys(
        ("master_addr", "master_port", "rdzv_endpoint"), "Give --master HOST:PORT instead."
    ),
    **dict.fromkeys(
        "standalone rdzv_backend rdzv_id rdzv_conf tee redirects job_id run_mode host use_env "
        "no_python start_method".split(),
        _NEEDLESS,
    ),
    **dict.fromkeys(
        "n np nprocs num_processes world_size num_gpus trainer_num".split(),
        "Give --nproc_per_node N, the processes of this machine.",
    ),
    **dict.fromkeys(("", "c"), "Save the program in a file: every process runs it."),
    **dict.fromkeys(("node_rank", "machine_rank"), "Give --rank R, the number of this machine."),
    **dict.fromkeys(("num_nodes", "num_machines"), "Give --nnodes N, the machines of the job."),
    "include": "Give --devices A,B instead.",
    "mixed_precision": 'It is an argument of gshard.shard_train_state: precision="bfloat16".',
    **dict.fromkeys(
        ("elastic_level", "elastic_timeout"),
        "Give --nnodes MIN:MAX for an elastic job, or --max_restarts to start again after a "
        "failure.",
    ),
}


_DEVICES = ("--devices", "--gpus", "--selected_gpus")  # all mean the same
_NUMBERS = {  # options for which upstream takes more than a number
    "--nproc_per_node": " Leave it out for one process per GPU.",
}


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "gshard launch",
        usage="gshard launch [options] [-m] SCRIPT [ARGUMENTS ...]",
        description="Run a script in several processes, on one machine or on each of many. The "
        "script calls gshard.distributed.initialize() before it uses JAX.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add = made.add_argument
    add("--nproc_per_node", type=int, metavar="N", help="processes on this machine (default: "
        "one for each device of --devices, else for each visible GPU, else 1)")  # fmt: skip
    add("--nnodes", metavar="N|MIN:MAX", help="machines of the job (default 1); with "
        "MIN:MAX the job is elastic: it runs with as many of MAX as are there, and starts again "
        "with those that are left when one is lost")  # fmt: skip
    add("--rank", type=int, metavar="R", help="this machine's number, from 0; with --nnodes. An "
        "elastic job needs none")  # fmt: skip
    add("--master", metavar="HOST:PORT", help="address of machine 0, where process 0 listens; in "
        "an elastic job its launcher (default on one machine: loopback and a free "
        "port)")  # fmt: skip
    add("--join_every", type=float, metavar="MINUTES", help="stop the processes of an elastic job "
        "cleanly (SIGTERM) and start them again when other machines have come, at most once in "
        "this many minutes (default 0: such machines wait for the next failure)")  # fmt: skip
    add(*_DEVICES, metavar="A,B", help="GPUs of this machine to "
        "use, split evenly between its processes (default: all visible)")  # fmt: skip
    add("--virtual_devices", type=int, metavar="N", help="virtual CPU devices of each process, "
        "instead of GPUs")  # fmt: skip
    add("--log_dir", type=Path, default=Path("log"), metavar="DIR", help="folder of rank-R.log "
        "and events.jsonl, readable by their owner alone, to which each run is appended "
        "(default: log)")  # fmt: skip
    add("--compilation_cache", metavar="DIR", help="folder in which JAX keeps compiled programs "
        f"for the next start, shared by all machines; {OFF} for none (default: in the folder of "
        f"the logs, for GPUs and TPUs of one machine, unless {VARIABLE} is set)")  # fmt: skip
    for name, (default, _, _, metavar, meaning) in _INTEGERS.items():
        add(f"--{name}", type=int, default=default, metavar=metavar, help=meaning)
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    return made


def request(words: list[str]) -> Request:
    """Reads the request of a command line.

    Raises:
      GShardError: an option does not exist, or values contradict each other.
    """
    made, words = _parser(), [*words]
    takes_value = {name: a.nargs != 0 for a in made._actions for name in a.option_strings}
    at = 0  # what follows the options is the script and its arguments, which may be anything
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        words[at : at + 1] = with_known_spelling(words[at : at + 1], takes_value)
        at += 2 if takes_value.get(words[at]) else 1
    script = words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]
    try:
        asked, unknown = made.parse_known_args(words[:at], Request())
    except argparse.ArgumentError as error:
        hint = _NUMBERS.get(error.argument_name or "", "")
        raise GShardError(f"{error}.{hint} `gshard launch --help` lists the options.") from error
    if unknown:
        name = unknown[0].split("=")[0]
        known = _UPSTREAM.get(name.lstrip("-").replace("-", "_"))
        hint = f" {known}" if known else similar_option(name, takes_value)
        raise GShardError(
            f"{name!r} is not an option of gshard launch.{hint} Options of the script come after "
            "its name."
        )
    if not script:
        raise GShardError("name the script to run. `gshard launch --help` says more.")
    asked.script, *asked.arguments = script
    python = re.fullmatch(r"python[\d.]*", os.path.basename(asked.script)) is not None
    if python and asked.arguments and not asked.module:
        raise GShardError(f"leave out {asked.script!r}: gshard launch itself starts Python.")
    if not asked.module and not os.path.exists(asked.script):
        hint = " For a module say -m." if "." in asked.script and "/" not in asked.script else ""
        if os.path.isfile(f"{asked.script}.py"):
            hint = f" Did you mean {asked.script + '.py'!r}?"
        raise GShardError(f"there is no file {asked.script!r} here.{hint}")
    if os.path.isdir(asked.script) and not asked.module:
        if not os.path.exists(os.path.join(asked.script, "__main__.py")):
            raise GShardError(f"{asked.script!r} is a folder without __main__.py. Name a script.")
    if asked.module and (wrong := _wrong_module(asked.script)):
        raise GShardError(f"-m {asked.script}: {wrong}")
    if not asked.module and asked.script.startswith(("/dev/", "/proc/")):
        raise GShardError(
            f"{asked.script!r} is not a file that every process can read. Save the script in a "
            "file."
        )
    for name, (default, least, unit, _, _) in _INTEGERS.items():
        if (value := getattr(asked, name)) is not default:
            setattr(asked, name, check_integer(f"--{name}", value, least, unit))
    given = asked.heartbeat_timeout, asked.start_timeout, asked.hang_timeout
    found = read_timeouts(**dict(zip(TIMEOUTS, given, strict=True)))
    asked.heartbeat_timeout, asked.start_timeout, asked.hang_timeout = found.values()
    if asked.master is not None:
        asked.master = address(asked.master, "--master")
    _read_machines(asked)
    _check_machines(asked)
    if asked.elastic is None:
        asked.rank = asked.rank or 0
    typed = {word.partition("=")[0] for word in words[:at]}
    named = next((x for x in _DEVICES if x in typed), "--devices")
    if asked.virtual_devices is not None and asked.devices is not None:
        raise GShardError(
            f"{named} {asked.devices} names GPUs, and --virtual_devices "
            f"{asked.virtual_devices} asks for CPU devices: choose one of the two."
        )
    devices = chosen_gpus(named, asked.devices)
    if asked.nproc_per_node is None:
        on_cpu = asked.virtual_devices is not None
        asked.nproc_per_node = 1 if on_cpu else max(1, len(devices or visible_gpus()))
    count = check_integer("--nproc_per_node", asked.nproc_per_node, 1)
    asked.variables = device_shares(count, devices, asked.virtual_devices, "--")
    if asked.elastic is not None:
        each = devices_of(asked.variables)
        asked.elastic = asked.elastic._replace(devices=each, batch_size=asked.batch_size)
        check_batch_size(asked.elastic)
    return asked


def _wrong_module(name: str) -> str:
    """What is wrong with the module of `-m`; empty if the job's processes may find it.

    Nothing is imported: whether a package has the rest of the name is left to Python.
    """
    first, *rest = name.split(".")
    find = importlib.machinery.PathFinder.find_spec
    try:  # as the processes do: this folder comes first
        found = find(first, [os.getcwd(), *sys.path]) or importlib.util.find_spec(first)
    except ValueError:  # of an empty name
        found = None
    if os.path.isfile(name) and (found is None or name == f"{first}.py"):
        return "it is a file. Leave out -m."
    if found is None or first == "__main__":
        path = os.path.normpath(name.removesuffix(".py"))
        if "/" in name and not path.startswith((".", "/")):
            return f"a module is named with dots: {path.replace('/', '.')}."
        return f"it is neither in this folder nor among the packages of {sys.executable}."
    inside = found.submodule_search_locations
    if not rest and inside is not None and find("__main__", list(inside)) is None:
        return "it is a package without __main__.py. Name a module in it."
    return ""


def _read_machines(asked: Request) -> None:
    """Reads `--nnodes`, and the options that only an elastic job has."""
    if asked.nnodes is None:
        elsewhere = isinstance(asked.master, Address) and not is_loopback(asked.master.host)
        if asked.rank is not None or elsewhere:
            raise GShardError(
                "--rank and --master are for a job of several machines: give --nnodes N too, or "
                "leave them out."
            )
        asked.nnodes = 1
    found = parse_machines(str(asked.nnodes))
    asked.elastic = found if isinstance(found, Machines) else None
    asked.nnodes = found.most if isinstance(found, Machines) else found
    if asked.elastic is None:
        for name in ("join_timeout", "join_every", "batch_size"):
            if (value := getattr(asked, name)) is not None:
                raise GShardError(
                    f"--{name} {value:g} is for an elastic job: give a range of machines, --nnodes "
                    "MIN:MAX, or leave it out."
                )
    every = asked.join_every or 0.0
    if not 0 <= every < math.inf:
        raise GShardError(f"--join_every {every:g} must be a number of minutes, 0 for never.")
    asked.join_every = every
    if asked.max_restarts is None:
        asked.max_restarts = 0 if asked.elastic is None else MAX_RESTARTS
    if asked.join_timeout is None:
        asked.join_timeout = JOIN_TIMEOUT


def _check_machines(asked: Request) -> None:
    rank, machines, master = asked.rank, asked.nnodes, asked.master
    is_alone = machines == 1 and asked.elastic is None
    needs_rank = rank is None and asked.elastic is None
    if not is_alone and (needs_rank or not isinstance(master, Address)):
        meanings = {
            "rank": "--rank, the number of this machine, from 0",
            "master": "--master, 'host:port' of machine 0, the same on all machines",
        }
        if not needs_rank:
            del meanings["rank"]
        missing = [text for name, text in meanings.items() if getattr(asked, name) is None]
        given = asked.elastic or machines
        raise GShardError(f"--nnodes {given} also needs {', and '.join(missing)}.")
    if rank is not None and not 0 <= rank < machines:
        raise GShardError(
            f"--rank {rank} is out of range: with --nnodes {asked.elastic or machines} ranks run "
            f"from 0 to {machines - 1}."
        )
    if is_alone or not isinstance(master, Address):
        return
    if asked.elastic is not None and is_loopback(master.host):
        return  # to try it out: all launchers are on this machine
    if is_unspecified(master.host):
        raise GShardError(
            f"--master {master} is not an address that other machines can reach. Name the one by "
            "which they reach machine 0."
        )
    # Debian and Ubuntu write a machine's own name into its /etc/hosts as 127.0.1.1.
    found = master.host if rank else resolved(master.host)
    if is_loopback(found):
        here = "" if found == master.host else f" ({found} in its own /etc/hosts or DNS)"
        raise GShardError(
            f"--master {master} is this machine alone{here}, and the job has {machines}. Name the "
            "address by which the others reach machine 0."
        )
