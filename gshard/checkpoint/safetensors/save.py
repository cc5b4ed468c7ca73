"""`save_safetensors`: the weights of a sharded state, gathered into one safetensors file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gshard._util.durable import NewFile, file_path
from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard._util.version import __version__
from gshard.checkpoint.safetensors.format import (
    Weight,
    header,
    in_file_order,
    row_major,
    weights_of,
)
from gshard.distributed.agree import run_on_all
from gshard.distributed.traced_losses import compare_losses
from gshard.sharding.host_arrays import full_on_host, plan_of, stored_on_host
from gshard.train.late_checks import check_now

FORMAT = "1"  # version of the names and the metadata
_CALL = "save_safetensors"


def save_safetensors(
    state: Any, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the weights of a sharded state into a safetensors file, gathered and by name.

    These are the parameters, frozen ones included, and the collections next to them (`batch_stats`,
    an EMA, other Variables of an NNX model), in logical shapes; with a `Precision` the master
    copies. Names are paths joined by `.`: `Dense_0.kernel`, `batch_stats.BatchNorm_0.mean`. The
    optimizer's state and random keys (`jax.random` keys, `nnx.Rngs`) are not written.

    One weight at a time is gathered to the host and written. The file gets its name when it is
    complete, and replaces one of that name. With several processes all call this; the first of the
    mesh writes, and all return when the file is there.

    Args:
      state: what `shard_train_state` or a step returned, at any level; for NNX the
        `(model, optimizer)` pair.
      path: the path of the file, in a folder that exists.
      metadata: strings by name for the file's metadata, in addition to `gshard_format`,
        `gshard_version` and `step`.

    Raises:
      GShardError: `shard_train_state` did not make the state, the format does not have a dtype, two
        weights have the same name, metadata are not strings, or the file system refuses. Then the
        path is unchanged, and every process raises.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "p_g_os", min_shard_size=0)
      >>> gshard.save_safetensors(state, "weights.safetensors", metadata={"model": "linear"})
      >>> from safetensors.numpy import load_file
      >>> {name: x.shape for name, x in load_file("weights.safetensors").items()}
      {'b': (32,), 'w': (64, 32)}
    """
    plan = plan_of(state, _CALL)
    if isinstance(plan.mesh, jax.sharding.AbstractMesh):
        raise GShardError(f"{_CALL}: the plan has an abstract mesh: its state has no values.")
    writes = jax.process_index() == min(d.process_index for d in plan.mesh.devices.flat)
    several = plan.mesh.is_multi_process
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[list[Weight], NewFile | None]:
            check_now(plan)
            target = file_path(path, _CALL)
            components = plan.kind.split(state)
            weights = in_file_order(weights_of(components, plan, _CALL), _CALL)
            step = int(full_on_host(components.step, plan.layouts.step))
            beginning = header(weights, _all_metadata(metadata, step))
            if not writes:
                return [*weights.values()], None
            file = stack.enter_context(NewFile(target, _CALL))
            file.write(beginning)
            return [*weights.values()], file

        weights, file = run_on_all(begin, plan.mesh, call=_CALL)
        compare_losses(plan)
        run_on_all(lambda: _stream(weights, file, several), plan.mesh, call=_CALL)


def _stream(weights: Sequence[Weight], file: NewFile | None, several: bool) -> None:
    """Gathers one weight at a time, and writes it if there is a file."""
    fault: GShardError | None = None
    for weight in weights:
        try:
            _write(weight, None if fault else file)
        except GShardError as error:
            if not several:
                raise
            fault = error  # raised at the end: the gathers to come need this process
    if fault is not None:
        raise fault
    if file is not None:
        file.commit()


def _write(weight: Weight, file: NewFile | None) -> None:
    full = stored_on_host(*weight)  # on every process: this may be a gather
    if file is not None:
        for block in row_major(weight.layout.unpad(full)):
            file.write(block)


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
