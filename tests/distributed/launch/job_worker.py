"""What the processes of the tests' jobs do (`tests/distributed`).

job_worker.py WHAT [ARGUMENTS ...]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gshard


def steps(count: int = 10**6, rank: int = -1, signal_or_code: int = 0, at: int = 20) -> None:
    """Meets the others over and over; one rank may end itself, in the first start of a job."""
    gshard.distributed.initialize()
    for step in range(count):
        gshard.distributed.barrier()
        if step == 0:
            print("first step", flush=True)
        if (
            step == at
            and gshard.distributed.process_index() == rank
            and os.environ["GSHARD_RESTARTS"] == "0"
        ):
            if signal_or_code > 0:
                sys.exit(signal_or_code)
            if signal_or_code:
                os.kill(os.getpid(), -signal_or_code)
            raise ValueError("a rank that failed")
        time.sleep(0.005)
    print("all steps", flush=True)


def describe(*arguments: str) -> dict[str, object]:
    """Who this process is, and how it was started."""
    import jax

    gshard.distributed.initialize()
    listeners = {}
    if gshard.distributed.process_index() == 0:
        port = int(os.environ["GSHARD_COORDINATOR"].rpartition(":")[2])
        for name in ("tcp", "tcp6"):
            rows = [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
            mine = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
            listeners[name] = mine
    gshard.distributed.barrier()
    return {
        "rank": gshard.distributed.process_index(),
        "world_size": gshard.distributed.process_count(),
        "local_devices": len(jax.local_devices()),
        "devices": len(jax.devices()),
        "local": os.environ["GSHARD_LOCAL_PROCESS_ID"],
        "coordinator": os.environ["GSHARD_COORDINATOR"],
        "listeners": listeners,
        "arguments": list(arguments),
        "main": str(getattr(sys.modules["__main__"], "__file__", None)),
        "path": sys.path[0],
    }


def until_told(polls: bool = True) -> None:
    """Trains until SIGTERM, which it hears or not."""
    gshard.distributed.initialize()
    seen = 0

    def last() -> None:
        print(f"saved at {seen}", flush=True)
        assert gshard.distributed.preempted()  # for a script that asks again

    batches = range(10**6)
    for seen in gshard.distributed.until_preempted(batches, last) if polls else batches:
        gshard.distributed.barrier()
        if seen == 0:
            print("first step", flush=True)
        time.sleep(0.005)


def with_children() -> None:
    """Starts processes of its own, which would go on for ever."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    steps()


def main(what: str, *arguments: str) -> None:
    if what == "describe":
        print(json.dumps(describe(*arguments)), flush=True)
        print("to stderr", file=sys.stderr, flush=True)
    elif what == "until_told":
        until_told(*(a == "True" for a in arguments))
    elif what == "with_children":
        with_children()
    elif what == "no_sync":
        from tests.distributed.launch.spawned_functions import no_sync
        from tests.distributed.launch.test_spawn import rows_of

        print(json.dumps(no_sync(rows_of(7)).tolist()), flush=True)
    elif what == "bar":  # a progress bar, and a line that does not end
        sys.stdout.write("10%\r50%\r100%\ndone")
    else:
        steps(*map(int, arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
