"""Writes docs/development/misuses.md: `python -m tests.misuses.page`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.misuses import several_processes
from tests.misuses.one_process import TOPICS
from tests.misuses.table import Row

PAGE = Path(__file__).parents[2] / "docs/development/misuses.md"
SEEN = {
    "refused": "an error of gshard that says what is wrong, where, and how to fix it",
    "warned": "a warning of gshard",
    "right": "it works, and the result is that of one device",
    "raw": "an error of JAX, Flax or Python, to which gshard has nothing to add",
}


def text() -> str:
    """The page, as Markdown."""
    topics = {**TOPICS, "Two and four processes": several_processes.ROWS}
    counts = Counter(row.seen for rows in topics.values() for row in rows.values())
    return "\n".join(
        [
            "# Misuses",
            "",
            "What happens when gshard is used wrongly or in an unusual way. Each row is a case of",
            "`tests/misuses`. More cases with several processes are in",
            "`tests/distributed/test_agree.py`, those that hang in",
            "`tests/distributed/test_watchdog.py`.",
            "",
            "This page is generated from the tests by `python -m tests.misuses.page`.",
            "",
            "| result | cases | meaning |",
            "|---|---:|---|",
            *(f"| {name} | {counts[name]} | {meaning} |" for name, meaning in SEEN.items()),
            *(line for topic, rows in topics.items() for line in _table(topic, rows)),
            "",
        ]
    )


def _table(topic: str, rows: Mapping[str, Row]) -> list[str]:
    lines = [f"| {_cell(n)} | {x.seen} | {_cell(_words(x))} |" for n, x in rows.items()]
    head = "| misuse | result | message contains |"
    return ["", f"## {topic}", "", head, "|---|---|---|", *lines]


def _words(row: Row) -> str:
    error = [row.error.__name__] if row.seen == "raw" else []
    return " ... ".join([*error, *row.words])


def _cell(text: str) -> str:
    escaped = {"|": "\\|", "<": "&lt;", "*": "\\*", "_": "\\_", "[": "\\[", "\n": " "}
    return "".join(escaped.get(c, c) for c in text)


if __name__ == "__main__":
    PAGE.write_text(text())
