"""Saving a wrapped model to one directory, and loading it at any level, on any devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard.paddle.grad_scaler import kept_by
from gshard.wrapped.files import load, save
from gshard.wrapped.state_dict import (
    check,
    check_optimizer_values,
    compare_values,
    differing_names,
    put_values,
    set_values,
)
from gshard.wrapped.wrapped_model import Wrapped, kept


def save_group_sharded_model(model: Any, output: str | Path, optimizer: Any = None) -> None:
    """Saves a wrapped model, and optionally its optimizer, to a directory.

    Args:
      model: what `group_sharded_parallel` or `DataParallel` returned.
      output: the directory. A model that was saved there before is replaced.
      optimizer: what `group_sharded_parallel` returned with the model.

    Raises:
      GShardError: `output` is a file, the model or optimizer is not wrapped, or the optimizer
        belongs to another model.

    Example:
      >>> from flax import nnx
      >>> net = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
      >>> model, optimizer, _ = gshard.paddle.group_sharded_parallel(net, tx, "dp")
      >>> gshard.paddle.save_group_sharded_model(model, "output", optimizer)
    """
    _check(model, optimizer, "save_group_sharded_model")
    values = {"model": model.state_dict()}
    if optimizer is not None:
        values["optimizer"] = optimizer.state_dict()
    save(values, output)


def load_group_sharded_model(model: Any, output: str | Path, optimizer: Any = None) -> None:
    """Loads what `save_group_sharded_model` wrote into a wrapped model and its optimizer.

    The level and the number of devices may differ from those of the model that was saved.

    Args:
      model: what `group_sharded_parallel` or `DataParallel` returned; changed in place.
      output: the directory that was passed to `save_group_sharded_model`.
      optimizer: what `group_sharded_parallel` returned with the model; changed in place.

    Raises:
      DamagedCheckpointError: a file does not match its checksum.
      GShardError: the directory is missing, has no optimizer state, or has the state of another
        model. Nothing is changed.

    Example:
      >>> from flax import nnx
      >>> net = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
      >>> model, _, _ = gshard.paddle.group_sharded_parallel(net, tx, "p_g_os", segment_size=0)
      >>> gshard.paddle.save_group_sharded_model(model, "output")
      >>> dp = gshard.paddle.DataParallel(net)
      >>> gshard.paddle.load_group_sharded_model(dp, "output")
    """
    call = "load_group_sharded_model"
    _check(model, optimizer, call)
    values = load(output)
    if "model" not in values:
        raise GShardError(f"{call}: {output} was not written by save_group_sharded_model.")
    if optimizer is not None and "optimizer" not in values:
        raise GShardError(
            f"{call}: {output} has no optimizer state. It was saved without optimizer=; leave it "
            "out here too, and the optimizer stays as it is."
        )
    stored = model._gshard_named()
    if strange := differing_names(*check(values["model"], stored, call), "the model"):
        raise GShardError(
            f"{call}: {output} has the state of another model: {strange}. Nothing was changed."
        )
    compare_values(values["model"], stored)
    if optimizer is not None:
        its = optimizer._gshard_named()
        check_optimizer_values(values["optimizer"], its)
        set_values(optimizer, values["optimizer"], its)
    put_values(model, values["model"], stored)


def _check(model: Any, optimizer: Any, call: str) -> None:
    if not isinstance(model, Wrapped):
        raise GShardError(
            f"{call}: {shown(model)} is not a wrapped model. Pass the one that "
            "group_sharded_parallel returned."
        )
    if optimizer is not None and kept_by(optimizer, call) is not kept(model):
        raise GShardError(
            f"{call}: the optimizer was wrapped with another model. Pass the one that "
            "group_sharded_parallel returned with this model."
        )
