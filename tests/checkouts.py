"""Code that others wrote, run from checkouts of their repositories.

The environment variable CHECKOUTS_OF_OTHERS names a folder with one checkout for each of `SOURCES`.
Training scripts import what a test does not need (TensorFlow, wandb) and start to train when they
are imported, so models and losses are taken out of them: `definitions` runs the imports that
are installed here and the functions and classes asked for, `loss_fn` the statements of a train step
up to the loss that it differentiates. Not a line of them is changed.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SOURCES = {
    "flax": "https://github.com/google/flax",
    "nanodo": "https://github.com/google-deepmind/nanodo",
    "nanogptx": "https://github.com/adonath/nanogptx",
    "gpt-jax": "https://github.com/jenkspt/gpt-jax",
}


def folder(name: str, *parts: str) -> Path:
    """A folder of a checkout; skips the test where there is none."""
    root = os.environ.get("CHECKOUTS_OF_OTHERS")
    if not root:
        pytest.skip("set CHECKOUTS_OF_OTHERS to a folder with checkouts of other projects")
    if not Path(root, name).is_dir():
        pytest.skip(f"{Path(root, name)} is missing: git clone {SOURCES[name]} {name}")
    return Path(root, name, *parts)


@contextlib.contextmanager
def importable(path: Path) -> Iterator[None]:
    """Modules of this folder can be imported; afterwards their names are free again.

    Each example has a `models.py` and a `train.py` of its own.
    """
    sys.path.insert(0, str(path))
    try:
        yield
    finally:
        sys.path.remove(str(path))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(f"{path}{os.sep}"):
                del sys.modules[name]


def module(path: Path, name: str) -> ModuleType:
    """A module of theirs."""
    with importable(path):
        return importlib.import_module(name)


@functools.cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def run(statements: list[ast.stmt], scope: dict[str, Any]) -> None:
    """Run statements of a file under its own name and line numbers, which errors then show."""
    future = ast.parse("from __future__ import annotations").body
    code = ast.Module([*future, *statements], [])
    exec(compile(code, scope["__file__"], "exec"), scope)


def definitions(path: Path, *names: str, **given: Any) -> dict[str, Any]:
    """The functions and classes of these names, with what their file imports.

    Imports that are not installed are left out. `given` are further globals.
    """
    scope: dict[str, Any] = {"__file__": str(path)}
    tree = syntax(path)
    with importable(path.parent):
        for statement in tree.body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                with contextlib.suppress(ModuleNotFoundError):
                    run([statement], scope)
    scope |= given
    wanted = [x for x in tree.body if getattr(x, "name", None) in names]
    found = {x.name for x in wanted}
    assert found == set(names), f"{path} has no {set(names) - found}"
    run(wanted, scope)
    return scope


def namespace(scope: dict[str, Any]) -> SimpleNamespace:
    """Definitions under the name of their module, for another file that imports it."""
    return SimpleNamespace(**{k: v for k, v in scope.items() if not k.startswith("__")})


def loss_fn(scope: dict[str, Any], function: str, **arguments: Any) -> Callable[..., Any]:
    """The `loss_fn` that a function of the file of `scope` defines, for these arguments.

    Assignments before it are run as well, since the loss closes over them.
    """
    tree = syntax(Path(scope["__file__"]))
    is_function = lambda x, name: isinstance(x, ast.FunctionDef) and x.name == name  # noqa: E731
    outer = next(x for x in ast.walk(tree) if is_function(x, function))
    end = next(i for i, x in enumerate(outer.body) if is_function(x, "loss_fn"))
    defaults = outer.args.defaults
    named = outer.args.args[len(outer.args.args) - len(defaults) :]
    inner = {
        **scope,
        **{x.arg: ast.literal_eval(y) for x, y in zip(named, defaults, strict=True)},
        **arguments,
    }
    run([x for x in outer.body[: end + 1] if not isinstance(x, ast.Expr)], inner)
    return inner["loss_fn"]
