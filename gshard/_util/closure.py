"""What a function reads from outside its arguments, and what of that has changed."""

from __future__ import annotations

import dis
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain, takewhile
from types import CodeType, MemberDescriptorType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import core

from gshard._util.errors import some, warn

_PLAIN = (str, bytes, int, float, complex, type(None))  # no arrays are in them
_LARGE = 4096  # entries of a container that nobody searches at each step
_LOAD_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_LOAD_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_OF_ARRAYS = ("shape", "dtype", "ndim", "size", "__class__")
_STORE = ("STORE_GLOBAL", "STORE_DEREF")  # such as a counter of its calls


class _Named(NamedTuple):
    field: int


class Opened(NamedTuple):
    """A function without what wraps it.

    Attributes:
      function: the function of Python, or the object that is called.
      owner: the object whose method it is, or None.
      args: what partials have bound to its arguments.
      keywords: what partials have bound by name.
    """

    function: Any
    owner: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]


class _Variable(NamedTuple):
    name: str
    is_local: bool


_FIELDS = (MemberDescriptorType, type(vars(_Named)["field"]))  # of slots, of named tuples
_NOT_COMPARED = object()  # in place of a value that may change without harm
_NONE = object()  # in place of None, with which NumPy's numbers cannot be compared

Getters = dict[str, Callable[[], Any]]


def read_from_outside(function: Any) -> tuple[Getters, Getters]:
    """Returns what a function reads of its closure and globals, and what else, by name.

    That is what `functools.partial` has bound, and attributes of the object of a method.
    """
    function, owner, args, keywords = opened(function)
    bound = {f"argument {i + 1} of a partial": x for i, x in enumerate(args)}
    bound |= {f"{name} of a partial": x for name, x in keywords.items()}
    others: Getters = {name: partial(_same, x) for name, x in bound.items()}
    closure: Getters = {"the object of the method": partial(_same, owner)}
    code = getattr(function, "__code__", None)
    if code is None:  # not a Python function
        return closure, others
    if owner is not None:
        get = partial(_same, owner)
        read = [x for x in _read_of_owner(code, get) if x]
        others |= {f"self.{x}": partial(_attribute, get, x, _NOT_COMPARED) for x in read}
    found = [x for own in _with_inner(code) for x in dis.get_instructions(own)]
    written = {x.argval for x in found if x.opname in _STORE}
    names = dict.fromkeys(x.argval for x in found if x.opname in _LOAD_GLOBAL)
    known = function.__globals__
    closure |= {x: partial(known.get, x) for x in names if x in known and x not in written}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    closure |= {name: partial(_content, cell) for name, cell in cells if name not in written}
    return closure, others


def bound_to(function: Any) -> list[Any]:
    """Returns what a function reads of partials and of the object of a method.

    Of an object these are the attributes that the method reads, or the object itself.
    """
    function, owner, args, keywords = opened(function)
    code, get = getattr(function, "__code__", None), partial(_same, owner)
    names = [""] if owner is None or code is None else _read_of_owner(code, get)
    own = [owner] if "" in names else [_attribute(get, name) for name in names]
    return [*own, *args, *keywords.values()]


def opened(function: Any) -> Opened:
    """Opens partials, methods and wrappers such as `jax.jit`, in whatever order they are."""
    owner, args, keywords = None, (), {}
    while True:
        if isinstance(function, partial):
            args, keywords = (*function.args, *args), {**function.keywords, **keywords}
            function = function.func
            continue
        owner = getattr(function, "__self__", None) if owner is None else owner
        inner = inspect.unwrap(function, stop=lambda x: isinstance(x, partial))
        if inner is function:
            break
        function = inner
    if not hasattr(function, "__code__"):  # an object of a class with __call__
        owner, function = function, inspect.unwrap(type(function).__call__)
    return Opened(getattr(function, "__func__", function), owner, args, keywords)


def _with_inner(code: CodeType) -> list[CodeType]:
    """The code of a function, and of those that are defined in it."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    return [code, *(y for x in inner for y in _with_inner(x))]


def _same(x: Any) -> Any:
    return x


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return _NOT_COMPARED


def _read_of_self(code: CodeType) -> list[str]:
    """The attributes of its object that a method reads, such as the teacher of a trainer.

    An empty name stands for the object itself, of which anything may be read.
    """
    if not code.co_argcount:  # `def loss(*args)`
        return [""]
    own = code.co_varnames[0]
    inner = [x for x in _with_inner(code) if x is code or own not in x.co_varnames]
    by_super = [""] * ("__class__" in code.co_freevars)  # `super()`
    uses = _uses(inner)
    read = [x for is_local in (True, False) for x in uses.get(_Variable(own, is_local), [])]
    return list(dict.fromkeys([*read, *by_super]))


def _read_of_owner(code: CodeType, get: Callable[[], Any]) -> list[str]:
    """The attributes of an object that a method reads, itself or by other methods."""
    seen: set[str] = set()
    names = _read_of_self(code)
    return [x for name in names for x in (_without_methods(get, name, seen) if name else [""])]


def _uses(codes: Iterable[CodeType]) -> dict[_Variable, list[str]]:
    """By variable the attributes of it that code reads, such as `config.scale` of a trainer.

    An empty name stands for the variable itself. What the code also writes, such as a counter or a
    cache, is left out. Where another variable is only a name for an attribute, as after
    `config = self.config`, its uses count.
    """
    found: defaultdict[_Variable, list[str]] = defaultdict(list)
    written: defaultdict[_Variable, set[str]] = defaultdict(set)
    names: list[tuple[_Variable, str, _Variable]] = []  # a variable, its attributes, their name
    stored: Counter[_Variable] = Counter()
    for code in codes:
        read = [x for x in dis.get_instructions(code) if x.opname != "EXTENDED_ARG"]
        for i, now in enumerate(read):
            stored.update(_stored(now))
            if not (loaded := _loaded(now, code)):
                continue
            *others, one = loaded
            for other in others:
                found[other].append("")
            after = [*takewhile(lambda x: x.opname in _LOAD_ATTRIBUTE, read[i + 1 :])]
            chain, then = _chain(*(x.argval for x in after)), read[i + 1 + len(after) :]
            # `self.calls += 1` loads the object once.
            adds = then[0].opname == "COPY" and then[1].opname in _LOAD_ATTRIBUTE
            if adds or then[0].opname == "STORE_ATTR":
                written[one].add(_chain(chain, then[adds].argval))
            elif given := _stored(then[0]):
                names.append((one, chain, given[0]))
            else:
                found[one].append(chain)
    for one, chain, name in reversed(names):  # a name may be given to a part of another one
        uses = found[name] if stored[name] == 1 else [""]
        found[one] += [_chain(chain, use) for use in uses]
        written[one] |= {_chain(chain, use) for use in written[name]}
    return {
        one: [x for x in uses if not any(f"{x}.".startswith(f"{y}.") for y in written[one])]
        for one, uses in found.items()
    }


def _chain(*names: str) -> str:
    return ".".join(filter(None, names))


def _loaded(now: dis.Instruction, code: CodeType) -> list[_Variable]:
    """The variables that an instruction loads, in order."""
    names = _names(now)
    if now.opname == "STORE_FAST_LOAD_FAST":  # Python 3.13
        names = names[1:]
    if "LOAD_FAST" in now.opname:  # not the cells with which 3.13 makes a function
        return [_Variable(x, True) for x in names if x not in code.co_cellvars + code.co_freevars]
    is_outer = now.opname.startswith((*_LOAD_GLOBAL, "LOAD_DEREF"))
    return [_Variable(name, False) for name in names] if is_outer else []


def _stored(now: dis.Instruction) -> list[_Variable]:
    """The local variables that an instruction stores."""
    if now.opname == "STORE_DEREF":
        return [_Variable(name, False) for name in _names(now)]
    return [_Variable(name, True) for name in _names(now)[: now.opname.count("STORE_FAST")]]


def _names(now: dis.Instruction) -> tuple[str, ...]:
    return now.argval if isinstance(now.argval, tuple) else (now.argval,)


def _without_methods(get: Callable[[], Any], use: str, seen: set[str] | None = None) -> list[str]:
    """A chain of attributes; if it ends at a method or property, what that reads of its object."""
    seen = set() if seen is None else seen
    if use in seen:
        return []
    seen.add(use)
    head, _, name = use.rpartition(".")
    x = _attribute(get, head) if head else get()
    if isinstance(x, (jax.Array, np.ndarray)) or name in getattr(x, "__dict__", {}):
        return [use]
    method = inspect.getattr_static(type(x), name, None)
    if isinstance(method, (staticmethod, classmethod)):
        return []
    code = getattr(inspect.unwrap(getattr(method, "fget", method)), "__code__", None)
    if code is None or "" in (read := _read_of_self(code)):  # it may read anything
        return [use]
    return [x for other in read for x in _without_methods(get, _chain(head, other), seen)]


def _parts(function: Any, getters: Getters) -> Getters:
    """Where a function only reads attributes of a value, those in place of it."""
    code = getattr(opened(function).function, "__code__", None)
    codes = [] if code is None else _with_inner(code)
    uses = _uses(codes)
    found: Getters = {}
    for name, get in getters.items():
        if "" in (attributes := uses.get(_Variable(name, False), [""])):
            found[name] = get
        else:
            seen: set[str] = set()
            read = [x for use in attributes for x in _without_methods(get, use, seen)]
            found |= {f"{name}.{x}": partial(_attribute, get, x) for x in read}
    return found


def _attribute(get: Callable[[], Any], names: str, without: Any = None) -> Any:
    """The value of a chain of attributes, up to the first method or property: none is called.

    If the first attribute is one already, the value is `without`, if given. The shape and the dtype
    of an array are not compared: another array may have the same.
    """
    x = get()
    found = x if without is None else without
    for name in names.split("."):  # `getattr` would run properties
        own = getattr(x, "__dict__", {})
        bases = x.__mro__[1:] if isinstance(x, type) else type(x).__mro__
        # One by one, since each step looks: most attributes are the object's own.
        place = next((place for place in chain([own], map(vars, bases)) if name in place), None)
        value: Any = _NOT_COMPARED if place is None else place[name]
        if isinstance(value, _FIELDS) and not isinstance(x, type):
            try:
                x = found = value.__get__(x)
            except AttributeError:  # not set
                return _NOT_COMPARED
        elif place is None or (place is not own and hasattr(type(value), "__get__")):
            if name in _OF_ARRAYS or isinstance(value, (staticmethod, classmethod)):
                return _NOT_COMPARED
            break
        else:
            x = found = value
    return found


_IN_A_BATCH = (
    "(There is one program for each shape of the batch; backward has another while gradients add "
    'up.) Pass a number in the batch, as a scalar array (batch["scale"] = np.float32(scale)), and '
    "make another model a part of the one that is trained"
)


class OutsideValues:
    """Warns of numbers and arrays that a function reads from outside, and that have changed.

    A compiled function goes on with those that it had when it was compiled.

    Args:
      function: the user's function.
      what: its name in the message.
      advice: what to do instead.
    """

    def __init__(self, function: Callable[..., Any], what: str, advice: str = _IN_A_BATCH):
        self._function, self._what, self._advice = function, what, advice
        self._getters: Getters | None = None
        self._before: dict[str, Any] = {}
        self._has_run = False

    def look(self, arguments: Any, donated: Iterable[Any] = ()) -> None:
        """Compares with the last call; nothing inside a trace, where all is compiled again.

        `donated` are the arrays of the state that this call donates.
        """
        if self._getters is not None and not self._getters:
            return
        if any(isinstance(x, core.Tracer) for x in jax.tree.leaves(arguments)):
            return
        if self._getters is None:
            closure, others = read_from_outside(self._function)
            del closure["the object of the method"]
            getters = _parts(self._function, closure) | others
            found = {name: (get, _compared(get())) for name, get in getters.items()}
            self._getters = {k: get for k, (get, x) in found.items() if x is not None}
            self._before = {k: x for k, (_, x) in found.items() if x is not None}
            ids = {*map(id, donated)}
            arrays = {k: x for k, x in self._before.items() if isinstance(x, tuple)}
            if gone := [name for name, x in arrays.items() if ids.intersection(x)]:
                warn(
                    f"{self._what} reads {some(gone)} from outside: arrays of the state that this "
                    "step donates. The compiled program keeps their present values, and cannot be "
                    "compiled again once they are deleted. Read what changes from the arguments, "
                    "and copy what stays as it is: jax.tree.map(jnp.copy, ...)."
                )
            return
        now = {name: _compared(get()) for name, get in self._getters.items()}
        before, self._before = self._before, now
        if not self._has_run:  # what was None until then may be a cache, which that call has filled
            self._has_run = True
            before = {name: now[name] if x is _NONE else x for name, x in before.items()}
        if changed := [name for name, x in now.items() if _differ(before[name], x)]:
            warn(
                f"{self._what} reads {some(changed)} from outside, and that has changed since the "
                "last call. The compiled program still uses the value from when it was compiled. "
                f'{self._advice} (the page "Losses" of the documentation).'
            )


def _compared(x: Any) -> Any:
    """A number, or the identities of a tree's arrays; None for what else a function may read."""
    if isinstance(x, (bool, int, float, complex, np.generic)):
        return x
    if x is None:  # what comes in its place is a change
        return _NONE
    arrays = _arrays(x)
    if not arrays or any(isinstance(y, core.Tracer) for y in arrays):
        return None
    return tuple(map(id, arrays))


def _arrays(x: Any) -> list[Any]:
    """The arrays of a tree, except in containers of thousands, since each step calls this.

    `jax.tree.leaves` alone would fail at keys that have no order, and leave the interpreter near
    its recursion limit (JAX 0.10.2).
    """
    found: list[Any] = []
    seen: dict[int, Any] = {}  # kept, so that no other object gets its number
    left = [x]
    while left:
        x = left.pop()
        if isinstance(x, (jax.Array, np.ndarray)):
            found.append(x)
        elif id(x) not in seen:  # a list may contain itself
            seen[id(x)] = x
            if isinstance(x, (dict, list, tuple)):
                if len(x) <= _LARGE:
                    inside = x.values() if isinstance(x, dict) else x
                    left += [y for y in inside if not isinstance(y, _PLAIN)]
            elif not isinstance(x, _PLAIN):  # one level of what is registered
                left += jax.tree.leaves(x, is_leaf=lambda y, x=x: y is not x)
    return found


def _differ(before: Any, now: Any) -> bool:
    if before is _NONE or now is _NONE:
        return before is not now and now is not None  # None: a function and the like
    is_nan = before != before and now != now
    return isinstance(before, tuple) is not isinstance(now, tuple) or bool(
        before != now and not is_nan
    )
