"""Reads examples by index: from a tree of arrays, or an object with one example per index."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from gshard._util.errors import GShardError
from gshard._util.pytree import differences, flatten, subscript, why_not_numeric
from gshard._util.validation import shown
from gshard.data.consistency import describe_structure


class Source:
    """The user's data, whose examples are read by index and written into a batch.

    Every example must have the tree, shapes and dtypes of the first one, which is read immediately,
    so that the batches of all processes agree.

    Attributes:
      length: number of examples.
      words: the form of an example: path, dtype and shape of each array, and the tree.
      checksum: checksum of the first and the last example of arrays or of a list, before
        `transform`, uint32; 0 for an object with its own `__getitem__`, which may return another
        example each time.
    """

    def __init__(self, data: Any, transform: Callable[..., Any] | None, seed: int):
        self._data, self._structure = data, jax.tree.structure(None)
        self._transform = None if transform is None else Transform(transform, seed)
        self._arrays: list[Any] = []
        arrays = _arrays(data)
        if arrays:
            _check_arrays(arrays, transform is not None)
            self._arrays = [x for _, x in arrays]
            self._structure = jax.tree.structure(data)
        self.length = self._arrays[0].shape[0] if arrays else _length(data)
        if not self.length:
            raise GShardError("the source is empty: it has no row to make a batch of.")
        self._like = self._first()
        paths, forms, structure = self._like
        arrays_of = zip(paths, forms, strict=True)
        self.words = [f"{p or 'example'} {d}{list(s)}" for p, (s, d) in arrays_of]
        self.words.append(describe_structure(structure))
        self.checksum = self._checksum() if arrays or isinstance(data, list) else 0

    def read(self, rows: np.ndarray, epoch: int) -> Any:
        """Reads the examples with these indices and stacks them, as a tree of NumPy arrays.

        Each is copied before the next one is read, since the user's code may reuse one buffer.

        Raises:
          GShardError: an example has another form. Errors of the user's code are passed on, with a
            note that names the index.
        """
        if self._arrays and self._transform is None:
            found = [np.asarray(x[rows]) for x in self._arrays]
            return jax.tree.unflatten(self._structure, found)
        _, forms, structure = self._like
        batch = [np.empty((rows.size, *shape), dtype) for shape, dtype in forms]
        for i, row in enumerate(rows.tolist()):
            example = self._example(row, epoch)
            leaves, own = jax.tree.flatten(example)
            if own != structure:
                raise self._other(row, example)
            for column, x, (shape, dtype) in zip(batch, leaves, forms, strict=True):
                x = np.asarray(x)
                if x.shape != shape or x.dtype != dtype:
                    raise self._other(row, example)
                column[i] = x
        return jax.tree.unflatten(structure, batch)

    def _raw(self, row: int) -> Any:
        """Reads one example from the data, untransformed."""
        if self._arrays:
            return jax.tree.unflatten(self._structure, [np.asarray(x[row]) for x in self._arrays])
        return self._data[row]

    def _example(self, row: int, epoch: int) -> Any:
        """Reads and transforms one example."""
        try:
            example = self._raw(row)
            return example if self._transform is None else self._transform(example, row, epoch)
        except Exception as error:
            error.add_note(f"gshard.DataLoader was reading row {row} of the source.")
            raise

    def _first(self) -> tuple[list[str], list[tuple[tuple[int, ...], np.dtype]], Any]:
        """Returns paths, (shape, dtype) of each leaf, and structure of the first example."""
        example = self._example(0, 0)
        paths, leaves, structure = flatten(example)
        what = "source[0]" if self._transform is None else "transform(source[0])"
        if not leaves:
            raise GShardError(f"{what} is {shown(example)}: it holds no number or array.")
        forms = []
        for path, x in zip(paths, leaves, strict=True):
            dtype = getattr(x, "dtype", None)
            if dtype is None:
                dtype = np.asarray(x).dtype
            if why := why_not_numeric(dtype):
                raise GShardError(
                    f"{what}{subscript(path)} {why}. Change or leave it out in transform=."
                )
            x = np.asarray(x)
            forms.append((x.shape, x.dtype))
        return paths, forms, structure

    def _other(self, row: int, example: Any) -> GShardError:
        """Makes the error that says how an example differs in form from the first one."""
        paths, forms, structure = self._like
        found, leaves, own = flatten(example)
        mapped = self._transform is not None
        at, first = (f"transform(source[{i}])" if mapped else f"source[{i}]" for i in (row, 0))
        if own != structure:
            return GShardError(
                f"{at} is another tree than {first}: {differences(found, paths)}. All examples "
                "have the same tree, so that they can be stacked; lists are trees too, make them "
                "arrays."
            )
        for path, x, (shape, dtype) in zip(paths, map(np.asarray, leaves), forms, strict=True):
            if x.shape != shape or x.dtype != dtype:
                return GShardError(
                    f"{at}{subscript(path)} is {x.dtype}{list(x.shape)}, and that of {first} is "
                    f"{dtype}{list(shape)}. All examples have the same shapes and dtypes, so that "
                    "they can be stacked; pad or cast them with transform=."
                )
        raise RuntimeError("an example that differs in nothing")

    def _checksum(self) -> int:
        found = 0
        for row in (0, self.length - 1):
            for x in jax.tree.leaves(self._raw(row)):
                x = np.asarray(x)
                # The bytes of an object are its address, which is another one in every process.
                own = b"" if x.dtype.hasobject else np.ascontiguousarray(x).tobytes()
                found = zlib.crc32(own, found)
        return found


def _arrays(data: Any) -> list[tuple[str, Any]]:
    """Returns paths and arrays of a tree of arrays; none for an object of examples, as a list."""
    if isinstance(data, (list, Iterator)):  # JAX warns of an iterator as a leaf
        return []
    paths, leaves, _ = flatten(data)
    if not leaves or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):
        return []
    return list(zip(paths, leaves, strict=True))


def _check_arrays(arrays: list[tuple[str, Any]], transformed: bool) -> None:
    first, length = "", None
    for path, x in arrays:
        if not x.shape:
            raise GShardError(
                f"source{subscript(path)} is a single number: the arrays of a source have their "
                "rows in the leading dimension."
            )
        if length is None:
            first, length = path, x.shape[0]
        if x.shape[0] != length:
            raise GShardError(
                f"source{subscript(path)} has {x.shape[0]} rows and source{subscript(first)} has "
                f"{length}. All arrays of a source share their leading dimension."
            )
        why = why_not_numeric(x.dtype)
        if why and (not transformed or not isinstance(x, np.ndarray)):
            raise GShardError(
                f"source{subscript(path)} {why}. Leave it out, or change it in transform=."
            )


def _length(data: Any) -> int:
    kind = type(data)
    if isinstance(data, (str, bytes, dict, tuple)) or not (
        hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    ):
        lists = isinstance(data, (dict, tuple)) and any(
            isinstance(x, list) for x in (data.values() if isinstance(data, dict) else data)
        )
        hint = " The lists in it must be arrays: np.asarray." if lists else ""
        raise GShardError(
            f"source={shown(data)} has no rows that can be read by number.{hint} Pass a tree of "
            "arrays, or an object with len(source) and source[i], such as a list of examples; for "
            "batches that come one after the other use gshard.global_batches."
        )
    try:
        return len(data)
    except TypeError as error:  # PyTorch's and grain's, when they have no end
        raise GShardError(
            f"len(source) of {shown(data)} is not known ({error}). The loader needs the number of "
            "rows; for batches that come one after the other use gshard.global_batches."
        ) from error


class Transform:
    """Calls `transform(example)`, or `transform(example, rng)` if it has an argument `rng`."""

    def __init__(self, function: Callable[..., Any], seed: int):
        if not callable(function):
            raise GShardError(
                f"transform={shown(function)} is not a function. It takes an example and returns "
                "one: transform(example), or transform(example, rng)."
            )
        self._function, self._seed = function, seed
        self._random = _takes_rng(function)

    def __call__(self, example: Any, row: int, epoch: int) -> Any:
        """Transforms a copy of the example, so that the function may write into it."""
        example = jax.tree.map(_copied, example)
        if not self._random:
            return self._function(example)
        # The seed depends on the index of the example, and not on the process that reads it.
        entropy = np.random.SeedSequence(self._seed, spawn_key=(epoch, row))
        return self._function(example, rng=np.random.default_rng(entropy))


def _copied(x: Any) -> Any:
    return np.array(x) if isinstance(x, np.ndarray) else x


def _takes_rng(function: Callable[..., Any]) -> bool:
    """Whether the function takes `rng`.

    Raises:
      GShardError: it has a second required argument of another name, which it is never given.
    """
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    if isinstance(function, functools.partial) and "rng" in function.keywords:
        return False  # the user gave it
    needed = [
        name
        for name, p in found.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if more := [name for name in needed[1:] if name != "rng"]:
        raise GShardError(
            f"transform has an argument {more[0]!r} that it is not given: it is called as "
            "transform(example), or as transform(example, rng=...) where it has an argument rng. "
            "Name it rng, or give it a value (functools.partial)."
        )
    return "rng" in found
