"""Texts of lowered programs, to compare."""

from __future__ import annotations

import re
from functools import cache
from hashlib import md5


def named_by_content(text: str) -> str:
    """A lowered program with functions named by what they do; JAX numbers across programs.

    Of two equal functions JAX may make one, if it has met them before.
    """
    head, *functions = re.split(r"(?m)^(?=  func\.func )", text)
    found = {re.search(r"@([\w.]+)", x)[1]: x for x in functions}

    def renamed(name: str) -> str:
        def other(match: re.Match[str]) -> str:
            if match[1] == name:
                return "@"
            return f"@{digest(match[1])}" if match[1] in found else match[0]

        own = found[name].removesuffix("}\n") if name == last else found[name]
        return re.sub(r"@([\w.]+)", other, own)

    @cache
    def digest(name: str) -> str:
        return md5(renamed(name).encode()).hexdigest()[:8]

    last = [*found][-1]
    named = {digest(name): renamed(name) for name in found}
    return head + "".join(f"{name}{named[name]}" for name in sorted(named))
