"""Checks of arguments."""

from __future__ import annotations

import ast
from pathlib import Path

import gshard


def test_the_number_that_is_checked_is_the_one_that_is_used():
    """NumPy's unsigned numbers, which `check_integer` makes an `int`, have no negative."""
    dropped = [
        f"{path}:{node.lineno}"
        for path in Path(gshard.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if isinstance(node.value.func, ast.Name) and node.value.func.id == "check_integer"
    ]
    assert not dropped
