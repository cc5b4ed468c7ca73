"""Saving and loading a wrapped model: one directory, whole values, for any level and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard.wrapped.named_arrays import check, check_optimizer, differences, write
from gshard.wrapped.state_dict import load, save
from gshard.wrapped.wrapped_model import Wrapped, kept
from gshard.wrapped.wrapped_optimizer import WrappedOptimizer


def save_group_sharded_model(model: Any, output: str | Path, optimizer: Any = None) -> None:
    """Writes a wrapped model, and its optimizer, into a directory.

    Args:
      model: what `group_sharded_parallel` or `DataParallel` returned.
      output: the directory; one that was written so before is replaced.
      optimizer: what `group_sharded_parallel` returned with the model.

    Raises:
      GShardError: a file is in the way, or these are not wrapped.
    """
    _check(model, optimizer, "save_group_sharded_model")
    values = {"model": model.state_dict()}
    if optimizer is not None:
        values["optimizer"] = optimizer.state_dict()
    save(values, output)


def load_group_sharded_model(model: Any, output: str | Path, optimizer: Any = None) -> None:
    """Sets a wrapped model, and its optimizer, to what `save_group_sharded_model` wrote.

    The level and the number of devices may differ from those that wrote it.

    Raises:
      GShardError: the directory is missing or damaged, has no optimizer, or holds another model's
        values; nothing is changed.
    """
    call = "load_group_sharded_model"
    _check(model, optimizer, call)
    values = load(output)
    if "model" not in values:
        raise GShardError(
            f"{call}: {output} has no model. It was not written by save_group_sharded_model."
        )
    if optimizer is not None and "optimizer" not in values:
        raise GShardError(
            f"{call}: {output} has no optimizer state. It was saved without optimizer=; leave it "
            "out here too, and the optimizer stays as it is."
        )
    stored = model._gshard_named()
    if strange := differences(*check(values["model"], stored, call), "the model"):
        raise GShardError(f"{call}: {output} is of another model: {strange}. Nothing was changed.")
    if optimizer is not None:
        its = optimizer._gshard_named()
        check_optimizer(values["optimizer"], its)
        write(optimizer, values["optimizer"], its)
    write(model, values["model"], stored)


def _check(model: Any, optimizer: Any, call: str) -> None:
    if not isinstance(model, Wrapped):
        raise GShardError(
            f"{call}: {shown(model)} is no wrapped model. Pass the one that group_sharded_parallel "
            "returned."
        )
    if optimizer is None:
        return
    if not isinstance(optimizer, WrappedOptimizer):
        raise GShardError(
            f"{call}: {shown(optimizer)} is no wrapped optimizer. Pass the one that "
            "group_sharded_parallel returned."
        )
    if kept(optimizer) is not kept(model):
        raise GShardError(f"{call}: the optimizer is another model's.")
