"""Reads examples by index: from a tree of arrays, or an object with one example per index."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from gshard._util.errors import GShardError
from gshard._util.pytree import (
    REGISTER,
    check_array,
    differences,
    flatten,
    lists_of_numbers,
    subscript,
    why_not_numeric,
)
from gshard._util.validation import shown
from gshard.data.batch_number import MASK
from gshard.data.consistency import describe_structure

_READS = 4  # of an example that may be random: one of two values is the same each time in 1 of 8


class Source:
    """The user's data, whose examples are read by index and written into a batch.

    Every example must have the tree, shapes and dtypes of the first one, which is read immediately,
    so that the batches of all processes agree.

    Attributes:
      length: number of examples.
      form: the form of an example: path, dtype and shape of each array, and the tree.
      checksum: checksum of the first and the last example of arrays or of a list, before
        `transform`, uint32; 0 for an object with its own `__getitem__`, which may return another
        example each time.
    """

    def __init__(self, data: Any, transform: Callable[..., Any] | None, seed: int):
        self._data, self._transform, self._seed = data, transform, seed
        self._random = transform is not None and _takes_rng(transform)
        _refuse_tables(data)
        self._has_arrays = _is_tree_of_arrays(data)
        if self._has_arrays:
            self.length = _length_of_arrays(data, transform is not None)
        else:
            self.length: int = _length(data)
        if not self.length:
            raise GShardError("the source is empty: it has no example to make a batch of.")
        self._paths, self._forms, self._structure = self._first()
        forms = zip(self._paths, self._forms, strict=True)
        self.form = [f"{path or 'example'} {dtype}{list(shape)}" for path, (shape, dtype) in forms]
        self.form.append(describe_structure(self._structure))
        self.checksum: int = self._checksum() if self._has_arrays or isinstance(data, list) else 0

    @property
    def takes_mask(self) -> bool:
        """Whether an example is a dictionary without a `"mask"`."""
        example = self._structure.unflatten(self._paths)
        return isinstance(example, dict) and MASK not in example

    def check_takes_mask(self) -> None:
        """Raises a `GShardError` unless an example is a dictionary without a `"mask"`."""
        if not self.takes_mask:
            example = self._structure.unflatten(self._paths)
            what = f"is a {type(example).__name__}"
            if isinstance(example, dict):
                what = f"has {MASK!r} already"
            elif isinstance(example, str):  # the path of an array that is not part of a tree
                what = "is one array"
            raise GShardError(
                f"pad_last=True adds an array {MASK!r} to every batch, so an example must be a "
                f"dictionary without one; {self._name(0)} {what}. Change it with transform=."
            )

    def read(self, indices: np.ndarray, epoch: int, before_each: Callable[[], None]) -> Any:
        """Reads the examples with these indices and stacks them, as a tree of NumPy arrays.

        Each is copied before the next one is read, since the user's code may reuse one buffer.
        `before_each` is called before each example of an object, and each that is transformed.
        """
        if self._has_arrays and self._transform is None:
            return self._raw(indices)
        batch = [np.empty((indices.size, *shape), dtype) for shape, dtype in self._forms]
        for i, index in enumerate(indices.tolist()):
            before_each()
            example = self._example(index, epoch)
            leaves, structure = jax.tree.flatten(example)
            if structure != self._structure:
                raise self._other_form(index, example)
            for column, x, (shape, dtype) in zip(batch, leaves, self._forms, strict=True):
                x = np.asarray(x)
                if x.shape != shape or x.dtype != dtype:
                    raise self._other_form(index, example)
                column[i] = x
        return jax.tree.unflatten(self._structure, batch)

    def _raw(self, index: Any) -> Any:
        """Reads one example from the data, untransformed; from arrays also several."""
        if self._has_arrays:
            return jax.tree.map(lambda x: _entries(x, index), self._data)
        return self._data[index]

    def _example(self, index: int, epoch: int) -> Any:
        """Reads an example; transforms copies of its NumPy arrays, which it may write into."""
        try:
            example = self._raw(index)
            if self._transform is None:
                return example
            example = jax.tree.map(_copied, example)
            if not self._random:
                return self._transform(example)
            # The seed depends on the index of the example, and not on the process that reads it.
            entropy = np.random.SeedSequence(self._seed, spawn_key=(epoch, index))
            return self._transform(example, rng=np.random.default_rng(entropy))
        except Exception as error:
            error.add_note(f"gshard.DataLoader was reading example {index} of the source.")
            raise

    def _name(self, index: int) -> str:
        return f"source[{index}]" if self._transform is None else f"transform(source[{index}])"

    def _first(self) -> tuple[list[str], list[tuple[tuple[int, ...], np.dtype]], Any]:
        """Returns paths, (shape, dtype) of each leaf, and structure of the first example."""
        example = self._example(0, 0)
        paths, leaves, structure = flatten(example)
        if not leaves:
            raise GShardError(f"{self._name(0)} is {shown(example)}: it holds no number or array.")
        for path, x in lists_of_numbers(example):
            raise GShardError(
                f"{self._name(0)}{subscript(path)} is a Python list of {len(x)}. Every number "
                "in it would be an array of its own. Make it one array: dataset.with_format("
                '"numpy"), or np.asarray(...) in transform=.'
            )
        forms = []
        for path, x in zip(paths, leaves, strict=True):
            dtype = getattr(x, "dtype", None)
            if dtype is not None and type(x) is not np.ndarray:
                check_array(x, f"{self._name(0)}{subscript(path)}", is_converted=True)
            if why := why_not_numeric(np.asarray(x).dtype if dtype is None else dtype):
                fault = f"{why}. Change or leave it out in transform=."
                if dataclasses.is_dataclass(x):
                    fault = f"is {shown(x)}: {REGISTER}"
                raise GShardError(f"{self._name(0)}{subscript(path)} {fault}")
            x = np.asarray(x)
            forms.append((x.shape, x.dtype))
        return paths, forms, structure

    def _other_form(self, index: int, example: Any) -> GShardError:
        """Makes the error that says how an example differs in form from the first one."""
        paths, leaves, structure = flatten(example)
        if structure != self._structure:
            how = f"{structure} in place of {self._structure}"  # such as another order of keys
            if sorted(paths) != sorted(self._paths):
                how = differences(paths, self._paths)
            return GShardError(
                f"{self._name(index)} is another tree than {self._name(0)}: {how}. All examples "
                "must have the same tree, so that they can be stacked; lists are trees too, make "
                "them arrays."
            )
        arrays = zip(paths, map(np.asarray, leaves), self._forms, strict=True)
        path, x, (shape, dtype) = next(
            (p, x, form) for p, x, form in arrays if (x.shape, x.dtype) != form
        )
        return GShardError(
            f"{self._name(index)}{subscript(path)} is {x.dtype}{list(x.shape)}, and that of "
            f"{self._name(0)} is {dtype}{list(shape)}. All examples must have the same shapes and "
            "dtypes, so that they can be stacked; pad or cast them with transform=."
        )

    @functools.cached_property
    def sample(self) -> int:
        """A checksum of the first and the last example, or 0 if they change from read to read."""
        if self.checksum:  # of what is the same at every read
            return self.checksum
        try:
            found = {self._checksum_of(lambda i: self._example(i, 0)) for _ in range(_READS)}
        except Exception:  # whatever it is, a batch with this example raises it
            return 0
        return found.pop() if len(found) == 1 else 0

    def _checksum(self) -> int:
        return self._checksum_of(self._raw)

    def _checksum_of(self, read: Callable[[int], Any]) -> int:
        total = 0
        for index in (0, self.length - 1):
            for x in map(np.asarray, jax.tree.leaves(read(index))):
                # The bytes of an object are its address, which is another one in every process.
                own = b"" if x.dtype.hasobject else np.ascontiguousarray(x).tobytes()
                total = zlib.crc32(own, total)
        return total


def _is_tree_of_arrays(data: Any) -> bool:
    """Whether it is a tree of arrays, and not an object of examples, as a list is."""
    if isinstance(data, (list, Iterator)):  # JAX warns of an iterator as a leaf
        return False
    leaves = jax.tree.leaves(data)
    return bool(leaves) and all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves)


def _entries(x: Any, index: Any) -> Any:
    """Reads one entry of an array, or several in the order of `index`."""
    if isinstance(x, np.ndarray | jax.Array) or not np.ndim(index):
        return np.asarray(x[index])[()]  # a number is no array, which could not be a key
    once, places = np.unique(index, return_inverse=True)  # h5py takes no other order
    return np.asarray(x[once])[places]


def _refuse_tables(data: Any) -> None:
    """Refuses tables of pandas: their `x[i]` is a column, or the entry labeled i."""
    one = isinstance(data, (list, Iterator))  # a list may hold a million examples
    for path, x in [("", data)] if one else zip(*flatten(data)[:2], strict=True):
        if hasattr(x, "iloc"):
            fix = "{name: x.to_numpy() for name, x in table.items()}"
            fix = "x.to_numpy()" if hasattr(x, "dtype") else fix
            raise GShardError(
                f"source{subscript(path) if path else ''} is {shown(x)} ({type(x).__module__}), "
                "which is indexed by labels, and not by the position of an example. Pass NumPy "
                f"arrays, such as {fix}."
            )


def _length_of_arrays(data: Any, transformed: bool) -> int:
    paths, leaves, _ = flatten(data)
    for path, x in zip(paths, leaves, strict=True):
        if not x.shape:
            raise GShardError(
                f"source{subscript(path)} is a single number: the arrays of a source have their "
                "examples in the leading dimension."
            )
        if x.shape[0] != leaves[0].shape[0]:
            raise GShardError(
                f"source{subscript(path)} has {x.shape[0]} examples and "
                f"source{subscript(paths[0])} has {leaves[0].shape[0]}. All arrays of a source "
                "share their leading dimension."
            )
        if not isinstance(x, np.ndarray) or isinstance(x, np.ma.MaskedArray):
            check_array(x, f"source{subscript(path)}", is_converted=True)
        why = why_not_numeric(x.dtype)
        if why and (not transformed or not isinstance(x, np.ndarray)):
            raise GShardError(
                f"source{subscript(path)} {why}. Leave it out, or change it in transform=."
            )
    return leaves[0].shape[0]


def _length(data: Any) -> int:
    kind = type(data)
    indexable = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    if isinstance(data, (str, bytes, Mapping, tuple)) or not indexable:
        values = data.values() if isinstance(data, dict) else data
        lists = isinstance(data, (dict, tuple)) and any(isinstance(x, list) for x in values)
        hint = " The lists in it must be arrays: np.asarray." if lists else ""
        if isinstance(data, Mapping) and not isinstance(data, dict):
            hint = " If it holds arrays by name, pass dict(source); if examples by number, a list."
        raise GShardError(
            f"source={shown(data)} has no examples that can be read by index.{hint} Pass a tree of "
            "arrays, or an object with len(source) and source[i], such as a list of examples; for "
            "batches that come one after the other use gshard.global_batches."
        )
    try:
        return len(data)
    except TypeError as error:  # PyTorch's and grain's, when they have no end
        raise GShardError(
            f"len(source) of {shown(data)} is not known ({error}). The loader needs the number of "
            "examples; for batches that come one after the other use gshard.global_batches."
        ) from error


def _copied(x: Any) -> Any:
    return np.array(x) if isinstance(x, np.ndarray) else x


def _takes_rng(function: Callable[..., Any]) -> bool:
    """Whether a transform takes `rng`; refuses a second required argument of another name."""
    if not callable(function):
        raise GShardError(
            f"transform={shown(function)} is not a function. It must take an example and return "
            "one: transform(example), or transform(example, rng)."
        )
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    if isinstance(function, functools.partial) and "rng" in function.keywords:
        return False  # the user gave it
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [n for n, p in found.items() if p.default is p.empty and p.kind not in variadic]
    if other := [name for name in required[1:] if name != "rng"]:
        raise GShardError(
            f"transform has an argument {other[0]!r} that it is not given: it is called as "
            "transform(example), or as transform(example, rng=...) if it has an argument rng. "
            "Name it rng, or give it a value (functools.partial)."
        )
    return "rng" in found
