"""A headless Chromium of the system, driven through its DevTools pipe."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ERRORS = ("error", "warning", "assert")
LIMIT = 60  # seconds for an answer


def find() -> str:
    """The path of a Chromium; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or pytest.skip(f"none of {', '.join(NAMES)} is here: apt install chromium")


class Browser:
    """One tab. `errors` has what the console says is wrong, `requests` every address it loads."""

    def __init__(self, profile: Path):
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        theirs, self._to = os.pipe()
        self._from, to_us = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{to_us}', "bash", find(), *options],
            pass_fds=(theirs, to_us),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(to_us)
        self._read, self._number, self._session = b"", 0, {}
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LIMIT
        while (answer := self._next(until)).get("id") != self._number:
            self._note(answer.get("method"), answer.get("params", {}))
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            if not select.select([self._from], [], [], max(0, until - time.monotonic()))[0]:
                self._process.kill()
                self._process.wait()
                raise AssertionError(f"Chromium has not answered in {LIMIT} s")
            more = os.read(self._from, 2**16)
            assert more, "Chromium has ended"
            self._read += more
        message, self._read = self._read.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: str | None, of: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded += 1
        elif event == "Network.requestWillBeSent":
            self.requests.append(of["request"]["url"])
        elif event == "Runtime.exceptionThrown" or (
            (event == "Runtime.consoleAPICalled" and of["type"] in ERRORS)
            or (event == "Log.entryAdded" and of["entry"]["level"] in ERRORS)
        ):
            self.errors.append(json.dumps(of))

    def open(self, address: str) -> None:
        """Loads a page, and waits until it and its pictures are there."""
        before = self._loaded
        self.call("Page.navigate", url=address)
        self.wait(lambda: self._loaded > before)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page."""
        got = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in got, got
        return got["result"].get("value")

    def wait(self, holds: str | Callable[[], Any], seconds: float = 60) -> None:
        """Waits until a JavaScript expression, or a function of Python, is true."""
        until = time.monotonic() + seconds
        while not (self.run(holds) if isinstance(holds, str) else holds()):
            assert time.monotonic() < until, f"never true: {holds}"
            time.sleep(0.05)
            self.run("0")  # reads the events that came

    def show(self, width: int, scheme: str) -> None:
        """Sets the width of the window, and the colours that the user prefers."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        prefers = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=prefers)
