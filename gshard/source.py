"""Random-access data as rows: a tree of arrays, or an object that gives one example at a time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from gshard.arguments import shown
from gshard.errors import GShardError
from gshard.tree import differences, flatten


class Source:
    """Rows of the user's data, read by number and stacked.

    Every example has the tree, shapes and dtypes of the first one, which is read at once: so all
    processes know that their batches agree.
    """

    def __init__(self, data: Any, transform: Callable[..., Any] | None, seed: int):
        self._data, self._transform, self._seed = data, transform, seed
        self._arrays = _arrays(data)
        self.length = _common_length(self._arrays) if self._arrays else _length(data)
        if not self.length:
            raise GShardError("the source is empty: it has no row to make a batch of.")
        if transform is not None and not callable(transform):
            raise GShardError(
                f"transform={shown(transform)} is not a function. It takes an example and returns "
                "one: transform(example), or transform(example, rng)."
            )
        self._random = transform is not None and _names_rng(transform)
        self._like = self._example(0, 0)
        if not self._like[0]:
            raise GShardError(f"source[0] is {shown(data[0])}: it holds no number or array.")

    def read(self, rows: np.ndarray, epoch: int) -> Any:
        """The examples with these numbers, as a tree of NumPy arrays that they are the rows of.

        Raises:
          GShardError: for an example of another form. What the user's code raises is passed on,
            with a note that names the row.
        """
        if self._arrays and self._transform is None:
            return jax.tree.map(lambda x: np.asarray(x[rows]), self._data)
        found = []
        for row in rows.tolist():
            try:
                found.append(self._example(row, epoch))
            except Exception as error:
                error.add_note(f"gshard.DataLoader was reading row {row} of the source.")
                raise
            self._check(row, found[-1])
        columns = zip(*(leaves for _, leaves, _ in found), strict=True)
        return jax.tree.unflatten(self._like[2], [np.stack(column) for column in columns])

    def _example(self, row: int, epoch: int) -> tuple[list[str], list[np.ndarray], Any]:
        """One example, transformed: paths, leaves and structure."""
        if self._arrays:
            example = jax.tree.map(lambda x: np.asarray(x[row]), self._data)
        else:
            example = self._data[row]
        if self._random:
            # Of the row and not of the process that reads it.
            entropy = np.random.SeedSequence((self._seed, epoch), spawn_key=(row,))
            example = self._transform(example, rng=np.random.default_rng(entropy))  # pyright: ignore[reportOptionalCall]
        elif self._transform is not None:
            example = self._transform(example)
        paths, leaves, structure = flatten(example)
        leaves = [np.asarray(x) for x in leaves]
        for path, x in zip(paths, leaves, strict=True):
            if x.dtype.kind in "OSUMm":
                raise GShardError(
                    f"source[{row}]{_at(path)} has dtype {x.dtype}: a batch holds numbers. Turn "
                    "it into numbers, or leave it out, with transform=."
                )
        return paths, leaves, structure

    def _check(self, row: int, example: tuple[list[str], list[np.ndarray], Any]) -> None:
        paths, leaves, structure = self._like
        if example[2] != structure:
            what = differences(example[0], paths)
            raise GShardError(
                f"source[{row}] is another tree than source[0]: {what}. All examples have the same "
                "tree, so that they can be stacked."
            )
        for path, x, like in zip(paths, example[1], leaves, strict=True):
            if x.shape != like.shape or x.dtype != like.dtype:
                raise GShardError(
                    f"source[{row}]{_at(path)} is {x.dtype}{list(x.shape)}, and that of source[0] "
                    f"is {like.dtype}{list(like.shape)}. All examples have the same shapes and "
                    "dtypes, so that they can be stacked; pad or cast them with transform=."
                )


def _arrays(data: Any) -> list[tuple[str, Any]]:
    """Arrays of a tree by path; none for an object that gives examples, such as a list."""
    if isinstance(data, (list, Iterator)):  # JAX warns of an iterator as a leaf
        return []
    paths, leaves, _ = flatten(data)
    if not leaves or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):
        return []
    return list(zip(paths, leaves, strict=True))


def _common_length(arrays: list[tuple[str, Any]]) -> int:
    first, length = "", None
    for path, x in arrays:
        if not x.shape:
            raise GShardError(
                f"source{_at(path)} is a single number: the arrays of a source have their rows in "
                "the leading dimension."
            )
        if length is None:
            first, length = path, x.shape[0]
        if x.shape[0] != length:
            raise GShardError(
                f"source{_at(path)} has {x.shape[0]} rows and source{_at(first)} has {length}. All "
                "arrays of a source share their leading dimension."
            )
    return int(length or 0)


def _length(data: Any) -> int:
    kind = type(data)
    if isinstance(data, (str, bytes, dict, tuple)) or not (
        hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    ):
        raise GShardError(
            f"source={shown(data)} has no rows that can be read by number. Pass a tree of arrays, "
            "or an object with len(source) and source[i], such as a list of examples; for batches "
            "that come one after the other use gshard.global_batches."
        )
    try:
        return len(data)
    except TypeError as error:  # PyTorch's and grain's, when they have no end
        raise GShardError(
            f"len(source) of {shown(data)} is not known ({error}). The loader needs the number of "
            "rows; for batches that come one after the other use gshard.global_batches."
        ) from error


def _names_rng(transform: Callable[..., Any]) -> bool:
    try:
        return "rng" in inspect.signature(transform).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return False


def _at(path: str) -> str:
    return f"[{path!r}]" if path else ""
