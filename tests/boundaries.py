"""Checkers for the boundaries of the design: source of a module in, offences out."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

LEVELS = {"dp", "os", "os_g", "p_g_os"}
COLLECTIVES = {
    "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "pbroadcast",
    "pmax", "pmean", "pmin", "ppermute", "pshuffle", "psum", "psum_invariant", "psum_scatter",
    "pswapaxes", "ragged_all_to_all", "reduce_scatter", "unreduced_psum_scatter",
}  # fmt: skip
PICKLES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}


class Import(NamedTuple):
    """`import module as known` or `from module import name as known`."""

    line: int
    module: str
    name: str  # empty for the former
    known: str

    @property
    def full(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def imports(tree: ast.AST) -> Iterator[Import]:
    """Everything that is imported; the module of a relative import begins with dots."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, "", alias.asname or "")
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield Import(node.lineno, module, alias.name, alias.asname or alias.name)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression made of names and attributes; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}" if dotted(node.value) else f"?.{node.attr}"
    return ""


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every name and attribute that is read, as its module calls it."""
    known = {x.known: x.full for x in imports(tree) if x.known}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            first, dot, rest = dotted(node).partition(".")
            yield node.lineno, known.get(first, first) + dot + rest


def level_tests(source: str) -> list[str]:
    """Comparisons with a level: `level == ...`, `plan.level.name in (...)`, `x == "os_g"`."""

    def about_level(node: ast.AST) -> bool:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return any(map(about_level, node.elts))
        if isinstance(node, ast.Constant):
            return node.value in LEVELS
        parts = dotted(node).split(".")
        return parts[-1] == "level" or parts[-2:] == ["level", "name"]

    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            tested = any(isinstance(op, ast.Eq | ast.NotEq | ast.In | ast.NotIn) for op in node.ops)
            if tested and any(map(about_level, [node.left, *node.comparators])):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Match) and about_level(node.subject):
            found.append(f"line {node.lineno}: match {ast.unparse(node.subject)}")
    return found


def collective_calls(source: str) -> list[str]:
    """Uses of a collective of `jax.lax`, however it was imported."""
    tree = ast.parse(source)
    found = [(x.line, x.full) for x in imports(tree)] + list(names(tree))
    return [
        f"line {line}: {name}"
        for line, name in found
        if name.split(".")[-1] in COLLECTIVES and "lax" in name.split(".")[:-1]
    ]


def imports_of(packages: Collection[str], source: str) -> list[str]:
    """Imports of these packages."""
    return [
        f"line {x.line}: import of {x.full}"
        for x in imports(ast.parse(source))
        if x.module.split(".")[0] in packages
    ]


def flax_imports(source: str) -> list[str]:
    """Imports of Flax."""
    return imports_of(["flax"], source)


def private_jax(source: str) -> list[str]:
    """`jax._src` and the retired ways to go parallel: `pjit`, `pmap`, `with mesh`."""
    tree = ast.parse(source)
    found = [
        f"line {line}: {name}"
        for line, name in [*((x.line, x.full) for x in imports(tree)), *names(tree)]
        if name.startswith("jax._src") or name.split(".")[-1] in ("pjit", "pmap")
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                name = dotted(item.context_expr)  # a call, such as jax.set_mesh(mesh), has none
                if name.split(".")[-1].endswith("mesh"):
                    found.append(f"line {node.lineno}: with {name}")
    return found


def pickles(source: str) -> list[str]:
    """Imports of modules that run code when they read data."""
    return imports_of(PICKLES, source)


def asserts(source: str) -> list[str]:
    """`assert` statements: they vanish under `python -O`."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert)
    ]


def documents(source: str) -> list[str]:
    """Texts that name a file of docs/, which an installed gshard does not have; not docstrings."""
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.search(r"\bdocs/\w", node.value)
        and id(node) not in statements
    ]
