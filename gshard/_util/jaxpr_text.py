"""A traced program as lines of text that are the same in every process that traced the same.

JAX's own text has addresses of functions and orders that depend on the process. Here what is not
known to be a plain value counts by its type alone in `lines_of`: rather a difference that is missed
than an alarm about none. `exact_text` compares such values, within one process.
"""

from __future__ import annotations

import enum
import hashlib
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import core
from jax.extend.core import Literal
from jax.sharding import NamedSharding

from gshard._util.jaxpr import opened

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NAMES = ("name", "jaxpr_thunk", "debug_info")  # parameters without an effect on values
_OF_DEBUGGING = "DebugEffect"  # ends the types of effects that print: one process may do so alone


class Line(NamedTuple):
    """One line of a program; `eqn` is the equation that it describes, if it is one."""

    text: str
    eqn: Any = None


def lines_of(closed: Any) -> list[Line]:
    """Returns a closed jaxpr with the values of its constants, one equation a line.

    What only `jax.debug` callbacks use is left out, since one process may print alone.
    """
    program = _Program()
    return list(program.printed(program.add(closed), "", set()))


def exact_text(closed: Any, known: dict[Any, Any]) -> str:
    """Returns a text that two closed jaxprs share only if they compute the same.

    What is not plain is compared by `==`, apart from the derivatives of custom functions. `known`
    keeps such values, so it must be the same dictionary for texts that are compared.
    """
    program = _Program(partial(_exactly, known))
    return "\n".join(line.text for line in program.printed(program.add(closed), "", set()))


def _exactly(known: dict[Any, Any], x: Any) -> str:
    if isinstance(x, (jax.Array, np.ndarray)):
        if isinstance(x, core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
            known[id(x)] = x  # kept, so that no other object gets its id
            return f"array {id(x)}"
        digest = hashlib.blake2b(_on_host(x).tobytes(), digest_size=16).hexdigest()
        return f"{plain(x)} {digest}"
    text = plain(x)
    if text != type(x).__name__:
        return text
    try:
        return f"{text} {known.setdefault(('equal', x), len(known))}"
    except TypeError:  # it has no hash
        known[id(x)] = x
        return f"{text} at {id(x)}"


class _Program:
    """A jaxpr and its inner ones, each described once although a program calls it often.

    They are known by a hash of their text. Whether equal jaxprs are one object depends on JAX's
    caches, so identity only saves time. `text` describes values, by default `plain`.
    """

    def __init__(self, text: Callable[[Any], str] | None = None) -> None:
        self._plain = text or plain
        self._hashes: dict[int, tuple[Any, str]] = {}  # by identity, which the object keeps
        self._lines: dict[str, list[Line]] = {}  # an inner jaxpr is its hash between two \0

    def add(self, program: Any) -> str:
        """Describes a jaxpr and returns its hash."""
        if id(program) not in self._hashes:
            lines = list(self._describe(*opened(program)))
            text = "\n".join(line.text for line in lines)
            found = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
            self._lines.setdefault(found, lines)
            self._hashes[id(program)] = program, found
        return self._hashes[id(program)][1]

    def printed(self, program: str, indent: str, known: set[str]) -> Iterator[Line]:
        """Yields the lines of a program; those of an inner one follow its first use alone."""
        for text, eqn in self._lines[program]:
            pieces, new = text.split("\0"), []
            for i, inner in enumerate(pieces[1::2]):
                pieces[2 * i + 1] = f"program {inner}" if inner in known else "program"
                new += [inner] * (inner not in known)
                known.add(inner)
            yield Line(indent + "".join(pieces), eqn)
            for inner in new:
                yield from self.printed(inner, indent + "  ", known)

    def _describe(self, jaxpr: Any, consts: Sequence[Any]) -> Iterator[Line]:
        names: dict[Any, str] = {}

        def name(v: Any) -> str:
            if isinstance(v, Literal):
                return plain(v.val)
            return names.setdefault(v, f"v{len(names)}:{v.aval.str_short()}")

        live = _live(jaxpr)
        yield Line(f"inputs {' '.join(map(name, jaxpr.invars))}")
        used = {id(v) for eqn in live for v in eqn.invars} | {id(v) for v in jaxpr.outvars}
        for v, x in zip(jaxpr.constvars, consts, strict=False):
            if id(v) in used:
                yield Line(f"constant {name(v)} = {self._plain(x)}")
        for eqn in live:
            items = sorted((k, x) for k, x in eqn.params.items() if k not in _NAMES)
            # The parameters of a custom derivative are functions, new in each trace.
            text = plain if eqn.primitive.name.startswith("custom_") else self._plain
            params = ", ".join(f"{key}={self._value(x, text)}" for key, x in items)
            given, out = (" ".join(map(name, vs)) for vs in (eqn.invars, eqn.outvars))
            yield Line(f"{out} = {eqn.primitive.name} {given} [{params}]", eqn)
        yield Line(f"outputs {' '.join(map(name, jaxpr.outvars))}")

    def _value(self, x: Any, text: Callable[[Any], str]) -> str:
        """A parameter of an equation."""
        if hasattr(opened(x)[0], "eqns"):
            return f"\0{self.add(x)}\0"
        if isinstance(x, Mapping):
            return f"{{{', '.join(sorted(f'{k}: {self._value(v, text)}' for k, v in x.items()))}}}"
        if isinstance(x, (tuple, list)):  # also of named fields
            return f"({', '.join(self._value(v, text) for v in x)})"
        return text(x)


def _live(jaxpr: Any) -> list[Any]:
    """The equations that results depend on, or that have another effect than to print."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    found = []
    for eqn in reversed(jaxpr.eqns):
        effects = [x for x in eqn.effects if not type(x).__name__.endswith(_OF_DEBUGGING)]
        if any(v in needed for v in eqn.outvars) or effects:
            found.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found[::-1]


def plain(x: Any) -> str:
    """A value as text: exactly if it is plain, else by its type alone."""
    if isinstance(x, core.Tracer):  # of a trace around this one
        return x.aval.str_short()
    if isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return _array(x)
    if isinstance(x, (set, frozenset)):
        return f"{{{', '.join(sorted(map(plain, x)))}}}"
    if x is None or isinstance(x, (bool, int, float, complex, bytes, enum.Enum, np.dtype)):
        return str(x)
    if isinstance(x, str):
        return _ADDRESS.sub("", x).replace("\0", "")
    if isinstance(x, (NamedSharding, jax.sharding.PartitionSpec, jax.ShapeDtypeStruct)):
        return str(getattr(x, "spec", x))
    return type(x).__name__


def _array(x: Any) -> str:
    form = f"{x.dtype}{list(np.shape(x))}"
    if isinstance(x, jax.Array) and not x.is_fully_addressable:  # one array of all processes
        return form
    host = _on_host(x)
    if np.ndim(x) == 0 and host.size == 1 and host.dtype.kind in "biufc":  # a key has several
        return f"{form} {host.item()}"
    return f"{form} checksum {zlib.crc32(host.tobytes()):08x}"


def _on_host(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.ascontiguousarray(x)
