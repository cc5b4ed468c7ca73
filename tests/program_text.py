"""Texts of lowered programs, to compare."""

from __future__ import annotations

import re


def numbered_anew(text: str) -> str:
    """A lowered program with its functions numbered as they appear; JAX numbers across programs."""
    made = dict.fromkeys(re.findall(r"func\.func [^@\n]*(@[\w.]+)", text))
    names = {name: f"@{number}" for number, name in enumerate(made)}
    return re.sub(r"@[\w.]+", lambda found: names.get(found[0], found[0]), text)
