"""What others than the plan found: the compiler, by level, and advice."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gshard.analysis.html.markup import Markup, el, joined
from gshard.analysis.html.tables import amount, records, shown_value, table

_COLLECTIVES = ("kind", "axes", "dtype", "purpose", "count", "asynchronous", "times",
                "payload_bytes", "wire_bytes")  # fmt: skip
_VERDICTS = {True: "fits", False: "does not fit", None: "not known whether it fits"}


def by_compiler(compiled: Mapping[str, Mapping[str, Any]]) -> Markup:
    """What the compiler says of each level.

    Args:
      compiled: by level what `gshard.Audit.as_dict` gives, and `fits`. Further keys are shown as
        they are: lists of dicts as tables, everything else beside its name.
    """
    parts = []
    for name, of in compiled.items():
        verdict = of.get("fits")
        said = "does not compile" if "error" in of else _VERDICTS[verdict]
        parts.append(el("h3", name, ": ", el("strong", said)))
        parts += _level(name, {k: v for k, v in of.items() if k not in ("fits", "promise")})
    return joined(parts)


def advised(advice: Iterable[Mapping[str, Any]]) -> Markup:
    """A ranked table, the best first.

    Args:
      advice: dicts of what was compared; keys are headings, those that end with `bytes` hold bytes.
    """
    rows = [{"rank": n, **row} for n, row in enumerate(advice, 1)]
    caption = "Ways to train that were compared, the best first"
    return records(caption, rows)


def _level(name: str, of: Mapping[str, Any]) -> list[Markup]:
    made, words = [], []
    for key, value in of.items():
        if key == "memory":
            rows = [(use.replace("_", " "), amount(count)) for use, count in value.items()]
            caption = f"Memory of one device at level {name}, by the compiler"
            made.append(table(caption, ("use", "bytes"), rows))
        elif key == "collectives":
            caption = f"Collectives of the compiled step at level {name}, on one device"
            rows = [{k: row.get(k) for k in _COLLECTIVES} for row in value]
            made.append(records(caption, rows) if rows else el("p", "No collectives."))
        elif _is_records(value):
            made.append(records(f"{key.replace('_', ' ').capitalize()} at level {name}", value))
        else:
            words += [el("dt", key.replace("_", " ")), el("dd", shown_value(key, value))]
    return ([el("dl", words)] if words else []) + made


def _is_records(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return listed and all(isinstance(x, Mapping) for x in value)
