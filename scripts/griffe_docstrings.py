"""What the reference shows of a docstring: see `mkdocs.yml`."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """An `Example:` is code (griffe knows `Examples:`), and arguments may be those of `__new__`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        if "__new__" in cls.members:
            made = cls.members.pop("__new__")
            made.name = "__init__"
            cls.members["__init__"] = made
