"""Texts of lowered programs, to compare."""

from __future__ import annotations

import re


def numbered_anew(text: str) -> str:
    """A lowered program with its functions numbered as they appear; JAX numbers across programs."""
    names: dict[str, str] = {}
    return re.sub(r"@[\w.]+", lambda found: names.setdefault(found[0], f"@{len(names)}"), text)
