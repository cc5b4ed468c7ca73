"""Hosts on one machine: network namespaces with addresses, a host name and names of their own.

Each is held by a process whose end takes all of it away: the interfaces lie in the namespaces, and
its /etc/hosts is a file that is mounted over the machine's for its own processes alone.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Every set of hosts has namespaces of its own, so that they share the addresses and do not meet.
ADDRESSES = {f"host-{name}": f"10.77.0.{i}" for i, name in enumerate("abcd", 1)}
_HOLD = (
    'mount --bind "$1" /etc/hosts && hostname "$2" && ip link set lo up && echo held && exec cat'
)
_LISTEN = "0A"  # of the kernel's table of TCP sockets


class NoHostsError(Exception):
    """This machine does not let us make network namespaces."""


class Host:
    """One of them."""

    def __init__(self, name: str, names: Path):
        self.name, self.address = name, ADDRESSES[name]
        try:
            # `cat` ends when this program does, whatever ends it.
            self._holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-c", _HOLD, "sh", names, name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise NoHostsError(str(error)) from error
        if self._holder.stdout.readline() != "held\n":
            self._holder.wait()
            raise NoHostsError(self._holder.stderr.read().strip())
        self._net = os.readlink(f"/proc/{self.pid}/ns/net")
        self._started: list[subprocess.Popen] = []

    @property
    def pid(self) -> int:
        """Of the process that holds it."""
        return self._holder.pid

    def start(self, log: Path, environment: Mapping[str, str], *words: object) -> subprocess.Popen:
        """Starts a command there, in the root of the project; its output goes to `log`."""
        with log.open("w") as file:
            started = subprocess.Popen(
                self._command(words),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=dict(environment),
            )
        self._started.append(started)
        return started

    def _command(self, words: tuple[object, ...]) -> list[str]:
        # Programs that replace each other: the pid is that of the command.
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--mount"]
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(ROOT), *map(str, words)]

    def run(self, *words: object) -> None:
        """Runs a command there.

        Raises:
          NoHostsError: it fails.
        """
        done = subprocess.run(self._command(words), capture_output=True, text=True)
        if done.returncode:
            raise NoHostsError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")

    def knows(self, names: Path) -> None:
        """Another file for its /etc/hosts."""
        self.run("mount", "--bind", names, "/etc/hosts")

    def processes(self) -> list[int]:
        """Pids of all that run there."""
        return [pid for pid in _pids() if _net(pid) == self._net and pid != self.pid]

    def listeners(self) -> set[str]:
        """Addresses at which anything listens there, without the ports."""
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == _LISTEN:
                    words = bytes.fromhex(local.partition(":")[0])
                    # Words of four bytes, each in the order of this machine.
                    raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                    at = ipaddress.ip_address(raw)
                    found.add(str(getattr(at, "ipv4_mapped", None) or at))
        return found

    def close(self) -> None:
        """Ends whatever runs there, and with it the namespace."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        for started in self._started:
            started.wait()
        self._holder.communicate()


@contextmanager
def hosts(folder: Path, count: int = 2) -> Iterator[list[Host]]:
    """Hosts that reach each other, and nothing else: the first is the switch between them.

    Raises:
      NoHostsError: this machine does not allow it: not root, no `ip`, a container.
    """
    names = folder / "hosts"
    lines = [f"{address} {name}\n" for name, address in ADDRESSES.items()]
    names.write_text("127.0.0.1 localhost\n::1 localhost\n" + "".join(lines))
    found: list[Host] = []
    try:
        for name in [*ADDRESSES][:count]:
            found.append(Host(name, names))
        switch = found[0]
        switch.run("ip", "link", "add", "eth0", "type", "bridge")
        for i, host in enumerate(found[1:]):
            pair = ("type", "veth", "peer", "name", "eth0", "netns", host.pid)
            switch.run("ip", "link", "add", f"port{i}", *pair)
            switch.run("ip", "link", "set", f"port{i}", "master", "eth0", "up")
        for host in found:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
        yield found
    finally:
        for host in found:
            host.close()


def until(what: str, true, limit: float) -> float:
    """Waits until `true()`; the seconds that took. Fails when it takes longer than `limit`."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < limit, f"not {what} within {limit:g} s"
        time.sleep(0.05)
    return time.monotonic() - began


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _net(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return ""
