"""Writes the README's first code block and a notebook, both cut from examples/quickstart.py.

    python scripts/quickstart.py [FOLDER]

writes `README.md` and `examples/quickstart.ipynb` (or both into FOLDER). A test compares them with
the committed files byte for byte, so that the three cannot drift apart.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "# %% "  # a cell begins here; the rest of the line is its heading
START = """\
import gshard

gshard.virtual_devices(8)  # on a CPU, 8 virtual devices; GPUs and TPUs are used as they are"""


def parts(script: str) -> tuple[str, str]:
    """Returns the docstring of the script, and the code after it."""
    docstring = ast.get_docstring(ast.parse(script)) or ""
    return docstring, script.split('"""\n', 2)[-1].strip()


def readme(text: str, script: str) -> str:
    """Returns the README with the code of the script, without its last cell, as its first block."""
    code = parts(script)[1].rsplit(MARK, 1)[0].strip().replace(MARK, "# ")
    block = re.compile(r"^```python\n.*?^```$", re.DOTALL | re.MULTILINE)
    return block.sub(lambda _: f"```python\n{code}\n```", text, count=1)


def notebook(script: str) -> dict[str, Any]:
    """Returns a notebook, without outputs, whose cells are those of the script.

    What the last line of a cell prints by name, the notebook shows as a table.
    """
    docstring, code = parts(script)
    imports, *rest = code.split(MARK)
    intro = (
        f"# gshard: quickstart\n\n{docstring.splitlines()[0]}\n\n"
        "Install gshard first. Until the first release, in a clone of its repository: "
        '`pip install .`, or `".[cuda]"` or `".[tpu]"` in place of the dot.'
    )
    cells = [("markdown", intro), ("code", START), ("code", imports)]
    for cell in rest:
        heading, body = cell.split("\n", 1)
        shown = re.sub(r"^print\((\w+)\)\s*\Z", r"\1", body, flags=re.MULTILINE)
        cells += [("markdown", f"## {heading}"), ("code", shown)]
    return {
        "cells": [_cell(i, kind, text.strip()) for i, (kind, text) in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": text.splitlines(keepends=True)}


def main() -> None:
    script = (ROOT / "examples" / "quickstart.py").read_text()
    page = readme((ROOT / "README.md").read_text(), script)
    folders = [Path(sys.argv[1])] * 2 if len(sys.argv) > 1 else [ROOT, ROOT / "examples"]
    text = json.dumps(notebook(script), indent=1, ensure_ascii=False) + "\n"
    for folder, name, content in zip(
        folders, ("README.md", "quickstart.ipynb"), (page, text), strict=True
    ):
        (folder / name).write_text(content)
        print(f"wrote {folder / name}")


if __name__ == "__main__":
    main()
