"""Type checkers report the lines of `tests/typing` that are marked `# wrong`, and no other."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "typing"
ROOT = FOLDER.parents[1]
COMMANDS = {
    "pyright": [str(Path(sys.executable).with_name("pyright")), "--pythonpath", sys.executable],
    "mypy": [
        *(str(Path(sys.executable).with_name("mypy")), "--python-executable", sys.executable),
        *(
            "--follow-imports=silent",
            "--disable-error-code=import-untyped",
            "--cache-dir",
            "/dev/null",
            "--no-error-summary",
        ),
    ],
}


def marked(script: Path) -> list[int]:
    """The numbers of the lines that end with `# wrong`."""
    lines = script.read_text().splitlines()
    return [n for n, line in enumerate(lines, 1) if line.endswith("# wrong")]


@pytest.fixture(scope="module", params=COMMANDS)
def reported(request):
    """What one type checker reports of all scripts, by name: the numbers of the lines."""
    command = COMMANDS[request.param]
    if not Path(command[0]).exists():
        pytest.skip(f"{request.param} is not installed: pip install -e '.[dev]'")
    scripts = sorted(FOLDER.glob("*.py"))
    done = subprocess.run(
        [*command, *map(str, scripts)], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"typing/(\w+\.py):(\d+):.*error", done.stdout)
    return {x.name: sorted({int(n) for name, n in found if name == x.name}) for x in scripts}


@pytest.mark.parametrize("name", ["ok.py", "bad_level.py", "bad_use.py"])
def test_exactly_the_wrong_lines_are_reported(reported, name):
    assert reported[name] == marked(FOLDER / name)


def test_what_is_wrong_is_marked():
    assert not marked(FOLDER / "ok.py")
    assert marked(FOLDER / "bad_level.py") and marked(FOLDER / "bad_use.py")
