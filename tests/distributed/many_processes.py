"""Process 0 of thousands, and a stub for each of the others; started by `test_many_processes.py`.

`roll HOST PORT PROCESSES SOFT HARD` is process 0 itself, under limits of open files; `answer HOST
PORT PROCESSES` are the others, in one program, which speak the protocol of the roll call.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time


def roll_call(host: str, port: str, processes: str, soft: str, hard: str) -> None:
    from gshard.distributed.rendezvous import Address, meet

    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
    began = time.process_time()
    try:
        meet(Address(host, int(port)), int(processes), 0, 60.0, True, tell={"port": 1})
        print("all arrived")
    except Exception as error:
        print(error)
    print(f"seconds of CPU: {time.process_time() - began:.2f}")


async def answer(host: str, port: str, processes: str) -> None:
    async def report(rank: int) -> str:
        line = json.dumps({"gshard_rank": rank, "of": int(processes)}).encode() + b"\n"
        for _ in range(100):
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(line)
                told = await reader.readline()
                writer.close()
            except OSError:  # it does not listen yet, or no more
                told = b""
            if told:
                return told.decode()
            await asyncio.sleep(0.1)
        return "no answer"

    raise_limit(int(processes) + 100)
    told = await asyncio.gather(*(report(rank) for rank in range(1, int(processes))))
    print(f"{len(told)} were told {sorted(set(told))}")


def raise_limit(files: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, hard), hard))


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "roll":
        roll_call(*arguments)
    else:
        asyncio.run(answer(*arguments))
