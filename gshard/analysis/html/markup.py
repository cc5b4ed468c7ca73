"""HTML and SVG elements as text that cannot be broken out of: whatever is no element is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

_VOID = {"meta", "link", "br", "hr", "col"}


class Markup(str):
    """Text that is markup already; made by `el` and `joined`, or written in the program itself."""

    __slots__ = ()


def el(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """One element.

    Args:
      name: of the element.
      *children: elements stay as they are, an iterable gives its members, None gives nothing, and
        everything else becomes text, escaped.
      **attributes: `class_` is `class`, `stroke_width` is `stroke-width`; one that is None or False
        is left out, and one that is True has no value.
    """
    words = [name]
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        words.append(key if value is True else f'{key}="{html.escape(str(value))}"')
    start = f"<{' '.join(words)}>"
    return Markup(start if name in _VOID else f"{start}{joined(children)}</{name}>")


def joined(children: Iterable[Any]) -> Markup:
    """Elements and texts in a row, as the children of `el`."""
    return Markup("".join(map(_child, children)))


def _child(child: Any) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, Iterable) and not isinstance(child, str):
        return joined(child)
    return html.escape(str(child))
