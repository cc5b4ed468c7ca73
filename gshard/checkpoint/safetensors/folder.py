"""A model in a file, or in a folder: shards and an index that says which tensor is in which.

The names are those of Hugging Face: `model.safetensors`, or `model-00001-of-00003.safetensors`,
... and `model.safetensors.index.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gshard._util.errors import GShardError, some
from gshard.checkpoint.safetensors.format import CONVERT, Stored, tensors_of
from gshard.checkpoint.safetensors.place import Place, read_range, size_of
from gshard.checkpoint.step_info import STEP, refuse_step

_FILE, _INDEX = ".safetensors", ".safetensors.index.json"
INDEX = f"model{_INDEX}"
PICKLES = (".bin", ".pt", ".pth")  # of PyTorch


def shard_names(count: int) -> list[str]:
    """The names of the files of a model."""
    if count == 1:
        return [f"model{_FILE}"]
    return [f"model-{i + 1:05d}-of-{count:05d}{_FILE}" for i in range(count)]


def models_in(folder: Place, call: str) -> list[Place]:
    """Files with weights and indexes of a folder, without the shards that an index lists."""
    there = sorted(folder.iterdir(), key=lambda x: x.name)
    files = [x for x in there if not x.name.startswith(".")]
    indexes = [x for x in files if x.name.endswith(_INDEX)]
    shards = {name for index in indexes for name in _weight_map(index, call).values()}
    alone = [x for x in files if x.name.endswith(_FILE) and x.name not in shards]
    return indexes + alone


def tensors_at(path: Place, call: str) -> dict[str, Stored]:
    """The tensors of a file, of the shards of an index, or of the one model in a folder, by name.

    The files are checked; nothing of the tensors is read.
    """
    if path.is_dir():
        models = models_in(path, call)
        if not models:
            names = sorted(x.name for x in path.iterdir())
            steps = sorted((x for x in names if STEP.fullmatch(x)), key=int)
            for folder in (path, *(path / x for x in steps[-1:])):
                refuse_step(folder, call, ", only='.'")
            pickles = [x for x in names if x.endswith(PICKLES)]
            hint = f"It has {some(pickles)}. {CONVERT}" if pickles else "Choose another."
            raise GShardError(f"{call}: the folder {path} has no safetensors file. {hint}")
        if len(models) > 1:
            raise GShardError(
                f"{call}: the folder {path} has several models: "
                f"{some((x.name for x in models), most=8)}. Pass the path of one of these files."
            )
        (path,) = models
    return _of_index(path, call) if path.name.endswith(_INDEX) else tensors_of(path, call)


def _of_index(index: Place, call: str) -> dict[str, Stored]:
    """The tensors of the shards that an index lists; each must be in its shard and no other."""
    listed = _weight_map(index, call)
    shards = {name: index.parent / name for name in sorted({*listed.values()})}
    if absent := [name for name, path in shards.items() if not path.is_file()]:
        raise GShardError(
            f"{call}: {index} lists {len(shards)} shards, and {', '.join(absent)} "
            f"{'is' if len(absent) == 1 else 'are'} missing. Copy the whole folder again."
        )
    found: dict[str, Stored] = {}
    wrong: list[str] = []
    for shard, path in shards.items():
        tensors = tensors_of(path, call)
        mine = {x for x, name in listed.items() if name == shard}
        wrong += [f"{x} is not in {shard}" for x in listed if x in mine and x not in tensors]
        wrong += [f"{x} is in {shard} too" for x in tensors if x not in mine]
        found |= tensors
    if wrong:
        raise GShardError(
            f"{call}: {index} and its shards do not belong together: {some(wrong)}. Copy the whole "
            "folder again."
        )
    return found


def _weight_map(index: Place, call: str) -> dict[str, str]:
    """The file of each tensor by an index; names of files alone, no paths."""
    try:
        content: Any = json.loads(read_range(index, 0, size_of(index)))
        listed = content["weight_map"]
        fine = all(isinstance(x, str) and x == Path(x).name for x in listed.values()) and listed
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise GShardError(f"{call}: {index} is not an index of shards: {error!r}.") from error
    if not fine:
        raise GShardError(
            f"{call}: {index} is not an index of shards: weight_map must have names of files."
        )
    return dict(listed)
