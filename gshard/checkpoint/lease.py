"""`Lease`: one process at a time writes to an object store, where nothing can be locked.

A lease is an object, named by a number, that its holder writes again every few seconds. Who wants
to write watches it: if it changes, the holder is alive; if it does not for three times as long, it
is taken over, by creating the object of the next number, which only one can. So no clock but one's
own is read. A holder on the same machine is looked up instead. Before a step is committed, its
writer reads that the newest lease is still its own, by a token that it drew for it.

A lease that is released stays, marked as such, so that its number is not used again: a renewal that
was suspended may still write the object of its number, which must be nobody else's by then.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gshard._util.activity import doing
from gshard._util.errors import CallOrderError, GShardError
from gshard.checkpoint.bucket import Bucket
from gshard.checkpoint.step_files import InUseError, StoreError

FOLDER = ".gshard_lock"
PERIOD = 10.0  # seconds between renewals
_LOOKS = 0.5  # seconds between looks at another's lease
_RELEASED = {"released": True}  # the content of a lease that nobody holds any more
_held: set[str] = set()  # tokens of the leases of this process


class Lease:
    """The right to write, which this process takes and renews."""

    def __init__(self, bucket: Bucket):
        self._bucket = bucket
        self._number: int | None = None
        self._token, self._lost = "", threading.Event()
        self._process = os.getpid()
        self._stop: Callable[[], object] = str

    def take(self) -> None:
        """Takes the lease, unless this process has it; waits while its holder may be alive.

        Raises:
          CallOrderError: another process has it.
        """
        if self.is_held():
            return
        self.release()
        number, other = _newest(self._bucket)
        if other is not None and other != _RELEASED:
            alive = _is_alive(other)
            if alive:
                raise self._refused(other)
            if alive is None:
                self._watch(number, other)
        self._token, self._lost = secrets.token_hex(8), threading.Event()
        try:
            self._bucket.create(_name(number + 1), _content(0, self._token))
        except FileExistsError:
            raise self._refused(_newest(self._bucket)[1] or {}) from None
        if number:
            self._bucket.delete([_name(number)])
        self._number, self._process = number + 1, os.getpid()
        _held.add(self._token)
        stop = threading.Event()
        renewing = threading.Thread(
            target=_renew,
            args=(self._bucket, number + 1, self._token, stop, self._lost),
            name="gshard-lease",
            daemon=True,
        )
        renewing.start()
        # The user may forget to close.
        self._stop = weakref.finalize(
            self, _end, self._bucket, number + 1, self._token, stop, os.getpid()
        )

    def is_held(self) -> bool:
        """Whether this process has taken it, and nobody has taken it over."""
        if self._number is None or self._process != os.getpid() or self._lost.is_set():
            return False
        number, content = _newest(self._bucket)
        if number != self._number or content is None or not _is_of(content, self._token):
            self._lost.set()  # for good: its object may come back, see `_renew`
            return False
        return True

    def check(self) -> None:
        """Raises a `CallOrderError` if another process has taken it over."""
        if not self.is_held():
            other = _newest(self._bucket)[1] or {}
            now = f"now {_who(other)} writes its checkpoints there. "
            raise CallOrderError(
                f"{self._bucket}: this process did not renew its lease in time, for example "
                "because it was suspended, so another process took over: "
                f"{'it has ended since. ' if other == _RELEASED else now}"
                "This process writes nothing more. End one of the two."
            )

    def release(self) -> None:
        """Lets another process write."""
        self._stop()
        self._number, self._stop = None, str

    def _watch(self, number: int, other: dict[str, Any]) -> None:
        """Waits until it is certain that the holder of a lease has ended, or refuses."""
        print(
            f"gshard: {self._bucket}: waiting up to {3 * PERIOD:.0f} s to see whether "
            f"{_who(other)} still writes there",
            file=sys.stderr,
        )
        end = time.monotonic() + 3 * PERIOD
        with doing(f"the lease of {self._bucket}", waits=True):
            while time.monotonic() < end:
                time.sleep(_LOOKS)
                newest, now = _newest(self._bucket)
                if now is None or (newest == number and now == _RELEASED):
                    return
                if (newest, now) != (number, other):
                    raise self._refused(now)

    def _refused(self, other: dict[str, Any]) -> GShardError:
        return InUseError(
            f"{self._bucket}: {_who(other)} writes its checkpoints there. Choose another address, "
            "or end that one (in this process: checkpointer.close())."
        )


def _name(number: int) -> str:
    return f"{FOLDER}/{number}"


def _read(bucket: Bucket, number: int) -> dict[str, Any] | None:
    try:
        return json.loads(bucket.read(_name(number)))
    except FileNotFoundError:
        return None


def _newest(bucket: Bucket) -> tuple[int, dict[str, Any] | None]:
    """The number and the content of the newest lease; 0 if there is none."""
    number = max((int(x) for x in bucket.list(FOLDER) if x.isdigit()), default=0)
    content = _read(bucket, number) if number else None
    while (later := _read(bucket, number + 1)) is not None:  # a list may lag behind
        number, content = number + 1, later
    return number, content


def _is_of(content: dict[str, Any], token: str) -> bool:
    return content.get("token") == token


def _content(renewed: int, token: str) -> bytes:
    about = {"process": os.getpid(), "host": os.uname().nodename, "machine": _machine()}
    about |= {"started": _started(os.getpid()), "token": token, "renewed": renewed}
    return json.dumps(about).encode()


def _who(other: dict[str, Any]) -> str:
    if "process" not in other:
        return "another process"
    return f"process {other.get('process')} on {other.get('host')}"


def _machine() -> str:
    """Names this boot of this machine, and the name space of its process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(process: Any) -> str | None:
    """When a process of this machine was started, in ticks since the boot; None if it has ended."""
    try:
        stat = Path(f"/proc/{int(process)}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError, TypeError):
        return None
    return None if stat[0] in "ZX" else stat[19]


def _is_alive(other: dict[str, Any]) -> bool | None:
    """Whether the holder of a lease still runs; None if it is not of this machine."""
    if not _machine() or other.get("machine") != _machine():
        return None
    if other.get("process") == os.getpid() and other.get("token") not in _held:
        return False  # Ctrl-C came while it was taken
    return _started(other.get("process")) == other.get("started")


def _renew(
    bucket: Bucket, number: int, token: str, stop: threading.Event, lost: threading.Event
) -> None:
    """Writes the lease again and again, until it is released or taken over."""
    renewed = 0
    while not stop.wait(PERIOD):
        # The next one may succeed, and a commit looks at the lease itself.
        with suppress(StoreError, OSError):
            own = _read(bucket, number)
            if own is None or not _is_of(own, token):
                return lost.set()
            renewed += 1
            bucket.replace(_name(number), _content(renewed, token))
            # It may have been taken over while this process was suspended in between, or released.
            if _newest(bucket)[0] != number:
                bucket.delete([_name(number)])
                return lost.set()
            if stop.is_set():
                _write_released(bucket, number)


def _write_released(bucket: Bucket, number: int) -> None:
    bucket.replace(_name(number), json.dumps(_RELEASED).encode())


def _end(bucket: Bucket, number: int, token: str, stop: threading.Event, process: int) -> None:
    if stop.is_set() or os.getpid() != process:
        return
    stop.set()
    _held.discard(token)
    with suppress(StoreError, OSError):  # it runs out by itself
        own = _read(bucket, number)
        if own is not None and _is_of(own, token):
            _write_released(bucket, number)
