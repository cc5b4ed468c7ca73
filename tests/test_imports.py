"""The folders of the package: what stands in the root, and which way imports go."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.boundaries import imports

PACKAGE = Path(__file__).parents[1] / "gshard"

# A folder imports from itself and from those before it.
FOLDERS = [
    "_util", "sequence", "expert", "train_state", "sharding", "distributed", "data", "train",
    "checkpoint", "analysis", "wrapped", "paddle", "pytorch", "models", "cli",
]  # fmt: skip
ABOVE_ALL = ("gshard", "gshard._public", "gshard.__main__")


def sources(package: Path) -> dict[str, str]:
    """The text of every module, by dotted name; a package stands for its `__init__`."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def imports_within(texts: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
    """(module, module it imports, line); also inside functions and under TYPE_CHECKING."""
    for module, text in texts.items():
        for found in imports(ast.parse(text)):
            assert found.module[0] != ".", f"{module}, line {found.line}: a relative import"
            name = found.full if found.full in texts else found.module
            if name.split(".")[0] == "gshard":
                assert name in texts, f"{module}, line {found.line}: there is no {name}"
                yield module, name, found.line


def rank(module: str) -> int:
    """The position of a module's folder; the root comes after all of them."""
    return len(FOLDERS) if module in ABOVE_ALL else FOLDERS.index(module.split(".")[1])


def upward(texts: Mapping[str, str]) -> list[str]:
    """Imports from a folder that comes later."""
    return [
        f"{module}, line {line}: imports {name}, which comes later"
        for module, name, line in imports_within(texts)
        if rank(name) > rank(module)
        and not (name == "gshard" and module.startswith("gshard.models."))  # as users' models do
    ]


def circles(texts: Mapping[str, str]) -> list[str]:
    """Modules that import each other, directly or not."""
    wanted: dict[str, set[str]] = {module: set() for module in texts}
    for module, name, _ in imports_within(texts):
        wanted[module].add(name)
    while free := [module for module, names in wanted.items() if not names & wanted.keys()]:
        for module in free:
            del wanted[module]
    # What is left is in a circle or leads to one.
    return [f"{module} imports {sorted(names & wanted.keys())}" for module, names in wanted.items()]


def test_folders_in_the_root():
    inside = [path for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert sorted(path.name for path in inside if path.is_dir()) == sorted(FOLDERS)
    files = sorted(path.name for path in inside if path.is_file())
    assert files == ["__init__.py", "__main__.py", "_public.py", "py.typed"]


def test_tests_mirror_the_folders():
    folders = {path.name for path in (PACKAGE.parent / "tests").iterdir() if path.is_dir()}
    assert folders - {"__pycache__", "dumps", "misuses", "typing"} <= set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_each_folder_says_what_it_holds(folder):
    text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())) or ""
    assert "May import" in text, "say which folders it may import"
    assert "Start reading" in text, "say where to start reading"


def test_imports_go_one_way():
    assert not upward(sources(PACKAGE))


def test_no_circles():
    assert not circles(sources(PACKAGE))


LATER = "gshard.train.loss"
IMPORTS = {
    "plain": f"import {LATER}",
    "of a name": f"from {LATER} import x",
    "of a module": "from gshard.train import loss",
    "in a function": f"def f():\n    from {LATER} import x",
    "for annotations": f"if TYPE_CHECKING:\n    from {LATER} import x",
}


@pytest.mark.parametrize("text", IMPORTS.values(), ids=IMPORTS)
def test_an_upward_import_and_a_circle_are_found(text):
    texts = {"gshard.train": "", LATER: "", "gshard.sharding.plan": text}
    assert upward(texts)
    assert not circles(texts)
    texts = {"gshard.train": "", LATER: "import gshard.train.step", "gshard.train.step": text}
    assert circles(texts)
    assert not upward(texts)


@pytest.mark.parametrize("folder", ["tests", "benchmarks", "examples", "scripts"])
def test_every_name_that_others_import_of_gshard_exists(folder):
    """Also inside functions that only slow tests call."""
    for module, text in sources(PACKAGE.parent / folder).items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gshard":
                found = importlib.import_module(node.module or "")
                for alias in node.names:
                    exists = hasattr(found, alias.name) or importlib.util.find_spec(
                        f"{node.module}.{alias.name}"
                    )
                    assert exists, f"{module}, line {node.lineno}: no {alias.name} there"


def test_the_root_may_import_all_and_is_imported_by_none():
    assert not upward({"gshard": "import gshard.cli.main", "gshard.cli.main": ""})
    assert upward({"gshard": "", "gshard.cli.main": "import gshard"})


def test_windows_is_refused_with_what_to_do():
    script = "import sys; sys.platform = 'win32'; import gshard"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "ImportError: gshard runs on Linux and macOS. On Windows, use it in WSL 2" in done.stderr


def test_an_argument_of_a_function_that_is_not_imported_yet_is_found():
    script = "import gshard\ngshard.make_mesh(max_bad_steps=3)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "no argument max_bad_steps=. That is an argument of make_train_step." in done.stderr
