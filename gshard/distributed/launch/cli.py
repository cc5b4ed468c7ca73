"""`gshard launch`: reads its command line, runs a job, perhaps again, and reports its end."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from signal import SIGTERM, Signals

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import check_integer, with_known_spelling
from gshard.distributed.env_vars import chosen_gpus, device_shares, visible_gpus
from gshard.distributed.exit import PREEMPTED_EXIT_CODE
from gshard.distributed.initialize import HEARTBEAT_TIMEOUT, INITIALIZATION_TIMEOUT
from gshard.distributed.launch.background_writer import background_output, drain_output
from gshard.distributed.launch.compilation_cache import OFF, VARIABLE
from gshard.distributed.launch.event_log import EventLog
from gshard.distributed.launch.exit_status import first_cause, report
from gshard.distributed.launch.job import Outcome, Request, collected_signals, run_job
from gshard.distributed.launch.restarts import Failure, Restarts
from gshard.distributed.rendezvous import Address, address, is_loopback, resolved
from gshard.distributed.watchdog import HANG_TIMEOUT

_EXAMPLES = """examples:
  gshard launch --nproc_per_node 4 --virtual_devices 2 train.py --steps 100
      four processes of two virtual CPU devices each, on this machine
  gshard launch --gpus 0,1,2,3 -m my_package.train
      one process for each of four GPUs
  gshard launch --nnodes 2 --rank 0 --master 10.0.0.1:29500 train.py
      the first of two machines; the same with --rank 1 on the second
exit code:
  that of the first process to fail (128 + the signal that killed it); 75 when the job was told to
  stop (SIGTERM) and all processes did so in order; 130 after Ctrl-C
"""


def main(words: list[str]) -> int:
    """Runs a command line; returns the exit code."""
    if words[:1] in (["-h"], ["--help"]):
        print(_parser().format_help(), end="")
        return 0
    try:
        with collected_signals() as signals, background_output(signals):
            return _run(request(words), signals)
    except GShardError as error:
        _say(f"error: {error}")
        return 2


def _run(asked: Request, signals: list[int]) -> int:
    began, count, restarts = time.monotonic(), 0, Restarts(asked.max_restarts)
    events = EventLog(asked.log_dir, asked.rank or 0, asked.log_size * 2**20)
    try:
        while (outcome := run_job(asked, count, signals, events)).failed:
            _say(report(outcome.ends, outcome.memory_kills, f"{asked.log_dir}/rank-*.log"))
            if signals or not asked.max_restarts:
                break
            decision = restarts.after(Failure.of(outcome.ends))
            if not decision.again:
                _say(f"gshard: not starting again: {decision.why}")
                events.write("give_up", why=decision.why)
                break
            count += 1
            after = f"in {decision.seconds:.0f} s ({decision.why})"
            _say(f"gshard: starting all processes again {after}")
            events.write("restart", seconds=decision.seconds, why=decision.why)
            until = time.monotonic() + decision.seconds
            while time.monotonic() < until and not signals:
                time.sleep(0.05)
        code = _exit_code(outcome)
        events.write("exit", seconds=time.monotonic() - began, code=code)
    finally:
        events.close()
    return code


def _exit_code(outcome: Outcome) -> int:
    codes = {end.code for end in outcome.ends}
    if codes == {0}:
        return 0
    if codes and codes <= {0, PREEMPTED_EXIT_CODE}:
        _say("gshard: the job was told to stop, and all processes did so in order")
        return PREEMPTED_EXIT_CODE
    if outcome.signal is not None and not outcome.failed:
        said = f"gshard: the job was ended by {Signals(outcome.signal).name}"
        if late := [end.rank for end in outcome.ends if end.asked]:
            said += f"; ranks {late} had not stopped and were killed"
            if outcome.signal == SIGTERM:
                said += ". A script stops in order by gshard.distributed.until_preempted"
        _say(said)
        return 128 + outcome.signal
    code = first_cause(outcome.ends).code or 1  # a failure, though one ended it with the code 0
    return code if code > 0 else 128 - code


def _say(text: str) -> None:
    drain_output()  # of the processes, which it follows
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):  # nobody reads any more
        pass


# ---- the command line ----------------------------------------------------------------------------

# name: default, least, unit in messages, metavar, help
_INTEGERS = {
    "nnodes": (1, 1, "", "N", "machines of the job (default 1)"),
    "log_size": (256, 1, " of megabytes", "MB", "a log that grows larger is renamed to rank-R.log.1"
                 ", in place of the one before (default 256)"),
    "max_restarts": (0, 0, "", "N", "start all processes again when one has failed, at most so "
                     "often in a row without progress, after 1, 2, 4, ... 60 seconds; not after "
                     "the same error at the same step (default 0)"),
    "grace": (30, 0, "", "SECONDS", "after SIGTERM, or when one has failed, the processes have so "
              "long to save (default 30)"),
    "heartbeat_timeout": (HEARTBEAT_TIMEOUT, 1, " of seconds", "SECONDS", "a silent process "
                          f"counts as dead (default {HEARTBEAT_TIMEOUT})"),
    "start_timeout": (INITIALIZATION_TIMEOUT, 1, " of seconds", "SECONDS", "all processes have so "
                      f"long to arrive (default {INITIALIZATION_TIMEOUT})"),
    "hang_timeout": (HANG_TIMEOUT, 0, " of seconds", "SECONDS", "a process may wait so long for "
                     f"the others, in a step or a call (default {HANG_TIMEOUT}; 0: no limit)"),
}  # fmt: skip


_NEEDLESS = "Leave it out: gshard launch needs no such option."
_UPSTREAM = {  # options of torchrun and of paddle.distributed.launch, and what to do instead
    "ips": "Start the launcher on every machine, with --nnodes N --rank R --master HOST:PORT.",
    **dict.fromkeys(
        ("master_addr", "master_port", "rdzv_endpoint"), "Give --master HOST:PORT instead."
    ),
    **dict.fromkeys(
        "standalone rdzv_backend rdzv_id rdzv_conf tee redirects job_id run_mode host".split(),
        _NEEDLESS,
    ),
    **dict.fromkeys(
        ("elastic_level", "elastic_timeout"), "Give --max_restarts to start again after a failure."
    ),
}


_NUMBERS = {  # options for which upstream takes more than a number
    "--nnodes": " A job has a fixed number of machines: give one number, not a range.",
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
    add("--rank", type=int, metavar="R", help="this machine's number, from 0; with --nnodes")
    add("--master", metavar="HOST:PORT", help="address of machine 0, where process 0 listens "
        "(default on one machine: loopback and a free port)")  # fmt: skip
    add("--devices", "--gpus", "--selected_gpus", metavar="A,B", help="GPUs of this machine to "
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
        hint = f" {known}" if known else did_you_mean(name, takes_value)
        raise GShardError(
            f"{name!r} is no option of gshard launch.{hint} Options of the script come after its "
            "name."
        )
    if not script:
        raise GShardError("name the script to run. `gshard launch --help` says more.")
    asked.script, *asked.arguments = script
    if not asked.module and not os.path.exists(asked.script):
        hint = " For a module say -m." if "." in asked.script and "/" not in asked.script else ""
        raise GShardError(f"there is no file {asked.script!r} here.{hint}")
    for name, (_, least, unit, _, _) in _INTEGERS.items():
        check_integer(f"--{name}", getattr(asked, name), least, unit)
    if asked.master is not None:
        asked.master = address(asked.master, "--master")
    _check_machines(asked)
    asked.rank = asked.rank or 0
    if asked.virtual_devices is not None and asked.devices is not None:
        raise GShardError(
            f"--devices {asked.devices} names GPUs, and --virtual_devices "
            f"{asked.virtual_devices} asks for CPU devices: choose one of the two."
        )
    devices = chosen_gpus("--devices", asked.devices)
    if asked.nproc_per_node is None:
        on_cpu = asked.virtual_devices is not None
        asked.nproc_per_node = 1 if on_cpu else max(1, len(devices or visible_gpus()))
    count = check_integer("--nproc_per_node", asked.nproc_per_node, 1)
    asked.variables = device_shares(count, devices, asked.virtual_devices, "--")
    return asked


def _check_machines(asked: Request) -> None:
    rank, machines, master = asked.rank, asked.nnodes, asked.master
    if machines == 1:
        if rank not in (None, 0):
            raise GShardError(f"--rank {rank} needs --nnodes, the number of machines.")
        return
    if rank is None or not isinstance(master, Address):
        meanings = {
            "rank": "--rank, the number of this machine, from 0",
            "master": "--master, 'host:port' of machine 0, the same on all machines",
        }
        missing = [text for name, text in meanings.items() if getattr(asked, name) is None]
        raise GShardError(f"--nnodes {machines} also needs {', and '.join(missing)}.")
    if not 0 <= rank < machines:
        raise GShardError(
            f"--rank {rank} is no machine of --nnodes {machines}: they run from 0 to "
            f"{machines - 1}."
        )
    # Debian and Ubuntu write a machine's own name into its /etc/hosts as 127.0.1.1.
    found = master.host if rank else resolved(master.host)
    if is_loopback(found):
        here = "" if found == master.host else f" ({found} in its own /etc/hosts or DNS)"
        raise GShardError(
            f"--master {master} is this machine alone{here}, and the job has {machines}. Name the "
            "address by which the others reach machine 0."
        )
