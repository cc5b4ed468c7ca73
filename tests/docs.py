"""Runs the Python code blocks of the documents: what a reader copies must work."""

from __future__ import annotations

from pathlib import Path

FENCE = "```"


def python_blocks(text: str) -> list[tuple[int, str]]:
    """Blocks fenced as exactly `python`, each with the number of the line before its first.

    Any other word after `python` (such as `python fragment`) marks a block that cannot run alone.
    """
    blocks: list[tuple[int, str]] = []
    lines: list[str] | None = None
    language = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip().startswith(FENCE):
            if lines is None:
                lines, start = [], number
                language = line.strip().removeprefix(FENCE).strip()
            else:
                if language == "python":
                    blocks.append((start, "\n".join(lines)))
                lines = None
        elif lines is not None:
            lines.append(line)
    return blocks


def run_blocks(path: Path) -> dict:
    """Execute a document's blocks top to bottom in one namespace, which is returned.

    A traceback names the document and the line in it.
    """
    namespace: dict = {"__name__": "__main__"}
    for start, source in python_blocks(path.read_text()):
        exec(compile("\n" * start + source, str(path), "exec"), namespace)
    return namespace
