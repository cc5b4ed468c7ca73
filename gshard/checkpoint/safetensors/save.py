"""`save_safetensors`: the weights of a sharded state, gathered into safetensors files."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard._util.errors import GShardError, some
from gshard._util.tracebacks import short_traceback
from gshard._util.validation import shown
from gshard._util.version import __version__
from gshard.checkpoint.safetensors.folder import INDEX, models_in, shard_names
from gshard.checkpoint.safetensors.format import (
    check_writable,
    header,
    nbytes,
    rounded,
    row_major,
)
from gshard.checkpoint.safetensors.name_map import NameMap
from gshard.checkpoint.safetensors.name_maps import name_map_of
from gshard.checkpoint.safetensors.place import Place, new_file, place_of
from gshard.checkpoint.safetensors.tensors import Group, Tensor, groups_of, pieces_of
from gshard.checkpoint.step_files import store_errors_explained
from gshard.checkpoint.weights import Weight, chosen, named, weights_of
from gshard.distributed.agree import run_on_all
from gshard.distributed.traced_losses import compare_losses
from gshard.sharding.host_arrays import full_on_host, plan_of, stored_on_host
from gshard.sharding.precision import floating_dtype, is_floating
from gshard.sharding.validate import refuse_abstract_mesh
from gshard.train.late_checks import late_checks

FORMAT = "1"  # version of the names and the metadata
_CALL = "save_safetensors"


@short_traceback
def save_safetensors(
    state: Any,
    path: str | os.PathLike[str],
    *,
    name_map: NameMap | str | None = None,
    only: str | Sequence[str] | None = None,
    dtype: Any = None,
    max_shard_bytes: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes the weights of a sharded state into safetensors files, gathered and by name.

    These are the parameters, frozen ones included, and the collections next to them (`batch_stats`,
    an EMA, other Variables of an NNX model), in logical shapes; with a `Precision` the master
    copies. Names are paths joined by `.`: `Dense_0.kernel`, `batch_stats.BatchNorm_0.mean`, or
    those of `name_map`. The optimizer's state and random keys (`jax.random` keys, `nnx.Rngs`) are
    not written.

    One weight at a time is gathered to the host and written; weights that share a tensor are on the
    host together. A file gets its name when it is complete, and replaces one of that name. With
    several processes all call this; the first of the mesh writes, and all return when the file is
    there.

    Args:
      state: what `shard_train_state` or a step returned, at any level; for NNX the
        `(model, optimizer)` pair.
      path: the path of the file, in a folder that exists; with `max_shard_bytes` the path of a
        folder that exists and has no weights yet. Or an address in an object store, such as
        `gs://bucket/model.safetensors` or `s3://...`: it is uploaded while it is gathered.
      name_map: the names and layouts of another program: `"gpt2"`, `"llama"`, `"gemma"`,
        `"gemma3"`, or a `gshard.NameMap`. None for gshard's own.
      only: a regular expression, or several: only weights whose path contains a match are written,
        such as `"^adapters/"`.
      dtype: a floating dtype, such as `"bfloat16"`, into which floating weights are rounded. None
        writes those of the state; with a `Precision` these are of the master copies.
      max_shard_bytes: writes a folder as Hugging Face's `from_pretrained` reads it, with
        `name_map` and the model's `config.json`: `model.safetensors`, or if that would have more
        bytes than this (5e9 is usual) shards and `model.safetensors.index.json`.
      metadata: strings by name for the metadata of each file, in addition to `gshard_format`,
        `gshard_version` and `step`.

    Raises:
      GShardError: `shard_train_state` did not make the state, the format does not have a dtype, two
        weights have the same name, the map is unknown or has no rule for a weight, metadata are not
        strings, the folder has weights, or the file system or the store refuses. Then the path
        is unchanged, and every process raises.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "p_g_os", min_shard_size=0)
      >>> gshard.save_safetensors(state, "weights.safetensors", metadata={"model": "linear"})
      >>> from safetensors.numpy import load_file
      >>> {name: x.shape for name, x in load_file("weights.safetensors").items()}
      {'b': (32,), 'w': (64, 32)}
    """
    plan = plan_of(state, _CALL)
    refuse_abstract_mesh(plan.mesh, _CALL)
    writes = jax.process_index() == min(d.process_index for d in plan.mesh.devices.flat)
    several = plan.mesh.is_multi_process
    with contextlib.ExitStack() as stack:

        @store_errors_explained()
        def begin() -> tuple[dict[str, Weight], list[Group], _Files | None]:
            late_checks(plan).look(late=0)
            most = _limit(max_shard_bytes)
            if most is None and str(path).endswith("/"):
                raise GShardError(
                    f"{_CALL}: {path} ends with a slash, so it names a folder. Name the file, such "
                    f"as {path}model.safetensors, or pass max_shard_bytes=5e9 to write a model "
                    "into the folder."
                )
            target = place_of(path, _CALL)
            names = name_map_of(name_map, _CALL)
            components = plan.kind.split(state)
            weights = chosen(named(weights_of(components, plan, _CALL), _CALL), only, _CALL)
            dtypes = {name: layout.dtype for name, (_, layout) in weights.items()}
            if dtype is not None:
                new = floating_dtype(dtype, f"{_CALL}: dtype")
                dtypes = {name: new if is_floating(x) else x for name, x in dtypes.items()}
            check_writable(dtypes, _CALL)
            groups = groups_of(dtypes, pieces_of(weights, names, _CALL), _CALL)
            step = int(full_on_host(components.step, plan.layouts.step))
            said = _all_metadata(metadata, step)
            if names is not None:
                said = {"format": "pt"} | said  # transformers refuses files without
            if not writes:
                return weights, groups, None
            return weights, groups, _Files(stack, target, most, groups, said)

        weights, groups, files = run_on_all(begin, plan.mesh, call=_CALL)
        compare_losses(plan)
        run_on_all(lambda: _stream(weights, groups, files, several), plan.mesh, call=_CALL)


class _Files:
    """The new files: one at a path, or a folder's shards and index; complete after `commit`."""

    def __init__(
        self,
        stack: contextlib.ExitStack,
        path: Place,
        most: float | None,
        groups: Sequence[Group],
        metadata: Mapping[str, str],
    ):
        shards = _split([x for group in groups for x in group.tensors], most or math.inf)
        self._paths = [path]
        if most is None and path.is_dir():
            raise GShardError(
                f"{_CALL}: {path} is a folder. Choose another name for the file, or pass "
                "max_shard_bytes=5e9 to write a model into the folder."
            )
        if most is not None:
            _check_folder(path)
            self._paths = [path / name for name in shard_names(len(shards))]
        starts = [header(shard, metadata) for shard in shards]
        sizes = [sum(nbytes(x) for x in shard) for shard in shards]
        if len(shards) > 1:
            of_shards = zip(self._paths, shards, strict=True)
            listed = {x.name: file.name for file, shard in of_shards for x in shard}
            index = {"metadata": {"total_size": sum(sizes)}, "weight_map": listed}
            starts.append(json.dumps(index, indent=2).encode())
            sizes.append(0)
            self._paths.append(path / INDEX)
        self._files = []
        for place, start, size in zip(self._paths, starts, sizes, strict=True):
            file = stack.enter_context(new_file(place, len(start) + size, _CALL))
            file.write(start)
            self._files.append(file)
        of_shards = zip(self._files, shards, strict=False)
        self._of = {x.name: file for file, shard in of_shards for x in shard}

    def write(self, tensor: Tensor, x: np.ndarray) -> None:
        """Appends a tensor, in the order of the groups."""
        for block in row_major(x, tensor.dtype):
            self._of[tensor.name].write(block)

    def commit(self) -> None:
        """Gives the files their names, the index last; if that fails, to none of a folder."""
        with contextlib.ExitStack() as undo:
            for file, path in zip(self._files, self._paths, strict=True):
                file.commit()
                undo.callback(path.unlink)  # shards without an index are of no use
            undo.pop_all()


def _limit(most: Any) -> float | None:
    if most is None:
        return None
    is_number = isinstance(most, numbers.Real) and not isinstance(most, bool)
    number: Any = most
    if not is_number or not number > 0:
        raise GShardError(
            f"{_CALL}: max_shard_bytes={shown(most)} must be a number of bytes, such as 5e9."
        )
    return number


def _check_folder(folder: Place) -> None:
    """The files that a program reads from a folder must all be of one model."""
    if isinstance(folder, Path) and not folder.is_dir():
        raise GShardError(
            f"{_CALL}: with max_shard_bytes, {folder} must be a folder that exists: make it."
        )
    if there := models_in(folder, _CALL):
        raise GShardError(
            f"{_CALL}: {folder} has weights already: {some(x.name for x in there)}. Choose an "
            "empty folder, or delete them."
        )


def _split(tensors: Sequence[Tensor], most: float) -> list[list[Tensor]]:
    """Consecutive tensors of at most `most` bytes together; one tensor that has more is alone."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + nbytes(tensor) > most:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += nbytes(tensor)
    return shards


@store_errors_explained()
def _stream(
    weights: Mapping[str, Weight], groups: Sequence[Group], files: _Files | None, several: bool
) -> None:
    """Gathers one weight at a time, and writes it if there are files."""
    fault: GShardError | None = None

    def gather(name: str) -> np.ndarray:  # on every process
        return weights[name].layout.unpad(stored_on_host(*weights[name]))

    for group in groups:
        try:
            _write(group, gather, None if fault else files)
        except GShardError as error:
            if not several:
                raise
            fault = error  # raised at the end: the gathers to come need this process
    if fault is not None:
        raise fault
    if files is not None:
        files.commit()


@store_errors_explained()
def _write(group: Group, gather: Callable[[str], np.ndarray], files: _Files | None) -> None:
    if files is None:
        for name in group.weights:
            gather(name)
    elif len(group.weights) == 1:
        (name,) = group.weights
        full = gather(name)
        for tensor in group.tensors:
            files.write(tensor, tensor.pieces[name].as_tensor(full))
    else:
        merged = {x.name: np.empty(x.shape, x.dtype) for x in group.tensors}
        for name in group.weights:
            full = gather(name)
            for tensor in group.tensors:
                if piece := tensor.pieces.get(name):
                    part = rounded(piece.in_leaf(full), tensor.dtype)
                    piece.in_tensor(merged[tensor.name])[...] = part
        for tensor in group.tensors:
            files.write(tensor, merged.pop(tensor.name))


def _all_metadata(given: Any, step: int) -> dict[str, str]:
    own = {"gshard_format": FORMAT, "gshard_version": __version__, "step": str(step)}
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise GShardError(
            f"{_CALL}: metadata={shown(given)} must be a mapping from names to strings, such as "
            "{'model': 'gpt'}."
        )
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise GShardError(
                f"{_CALL}: metadata has {shown(value)} by the name {shown(name)}. The format takes "
                "only strings: pass str(...) or json.dumps(...) of it."
            )
        if name in own:
            raise GShardError(f"{_CALL}: metadata[{name!r}] is gshard's own. Use another name.")
    return {**own, **given}
