"""Process 0 of thousands, and a stub for each of the others; started by `test_many_processes.py`.

`roll HOST PORT PROCESSES SOFT HARD` is process 0 itself, under limits of open files; `answer HOST
PORT PROCESSES` are the others, in one program, which speak the protocol of the roll call. `serve
HOST PORT PROCESSES SOFT HARD` is process 0 that all ask where the others are, `join` the others.
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
        meet(Address(host, int(port)), int(processes), 0, 60.0, True, tell=lambda: {"port": 1})
        print("all arrived")
    except Exception as error:
        print(error)
    print(f"seconds of CPU: {time.process_time() - began:.2f}")


async def answer(host: str, port: str, processes: str) -> None:
    # One program for all is slow on a busy machine: who is connected and says nothing is dropped.
    few_at_a_time = asyncio.Semaphore(200)

    async def report(rank: int) -> str:
        line = json.dumps({"gshard_rank": rank, "of": int(processes)}).encode() + b"\n"
        for _ in range(100):
            try:
                async with few_at_a_time:
                    reader, writer = await asyncio.open_connection(host, int(port))
                    writer.write(line)
                    await writer.drain()
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


async def serve(host: str, port: str, processes: str, soft: str, hard: str) -> None:
    from gshard.distributed.places import Server
    from gshard.distributed.rendezvous import Address, listen

    raise_limit(int(hard))
    server = Server(int(processes), listen(Address(host, int(port)), reserved=True), "token")
    began = time.process_time()
    await server.start()
    while not server._joined:
        await asyncio.sleep(0.1)
    await server.everyone_else_has_left(None, 60.0)
    print(f"seconds of CPU: {time.process_time() - began:.2f}")


async def join(host: str, port: str, processes: str) -> None:
    from gshard._util.activity import Place
    from gshard.distributed.places import Meeting, Member
    from gshard.distributed.rendezvous import Address

    raise_limit(int(processes) + 100)
    ranks = list(range(int(processes)))
    place = Place("step 1", 0.0)
    at = Address(host, int(port))
    members = [Member(rank, at, "token", lambda: place, print) for rank in ranks]
    await until_listens(at)
    await asyncio.gather(*(member.join() for member in members))
    groups = await members[3].ask()
    print([(x.text, len(x.ranks)) for x in groups], groups[0].ranks == ranks)

    async def meet(number: int, coming: list[int]) -> list[Meeting]:
        meetings = [Meeting(ranks, number, "save", "save") for _ in coming]
        for rank, meeting in zip(coming, meetings, strict=True):
            members[rank].meet(meeting)
        for _ in range(600):
            if all(meeting.over.is_set() for meeting in meetings):
                break
            await asyncio.sleep(0.05)
        return meetings

    print([*{(x.over.is_set(), x.without) for x in await meet(1, ranks)}])
    members[5].leave("has left")
    members[5].close()
    rest = [rank for rank in ranks if rank != 5]
    print([*{(x.over.is_set(), x.without) for x in await meet(2, rest)}])
    for rank in rest:  # all at once, as at the end of a job
        members[rank].leave("has ended")
        members[rank].close()


async def until_listens(at) -> None:
    for _ in range(600):
        try:
            (await asyncio.open_connection(*at))[1].close()
            return
        except OSError:
            await asyncio.sleep(0.1)


def raise_limit(files: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(files, hard), hard))


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "roll":
        roll_call(*arguments)
    else:
        asyncio.run({"answer": answer, "serve": serve, "join": join}[what](*arguments))
