"""What a check says, and figures as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GIB = 2**30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
      name: what it is.
      ok: `"ok"`; `"warn"` for what works, but probably not as meant; `"fail"`.
      found: what was found, on one line.
      mend: how to mend it, on one line; empty where nothing is wrong.
    """

    name: str
    ok: Literal["ok", "warn", "fail"]
    found: str
    mend: str = ""


def size(count: float) -> str:
    """Bytes as text: `1.5 GiB`, `64 MiB`."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / 2**20:,.0f} MiB"
