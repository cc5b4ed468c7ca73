"""`export`: the weights of a divided state as one safetensors file of whole values."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard._util.version import __version__
from gshard.checkpoint.safetensors.format import Tensor, header, in_file_order, refuse_strange
from gshard.checkpoint.safetensors.new_file import NewFile, file_path, row_major
from gshard.checkpoint.safetensors.weights import Weight, weights_of
from gshard.distributed.agree import together
from gshard.sharding.host_arrays import plan_of, stored_on_host, to_host

FORMAT = "1"  # of the names and of what is in the metadata


def export(
    state: Any, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the weights of a divided state into a safetensors file, whole and by name.

    The parameters, frozen ones among them, and the collections beside them (`batch_stats`, an EMA,
    other Variables of an NNX model), in logical shapes; with a `Precision` the master copies. Names
    are paths joined by `.`: `Dense_0.kernel`, `batch_stats.BatchNorm_0.mean`. Not the optimizer's
    state, and nothing that random numbers are drawn from (keys of `jax.random`, `nnx.Rngs`).

    One weight at a time is gathered to the host, written, and let go. The file takes its name when
    it is complete, and replaces one that was there. Over several processes all call this; the first
    of the mesh writes, and all return when the file is in place.

    Args:
      state: of `shard_train_state`, at any level; for NNX the `(model, optimizer)` pair.
      path: of the file, in a folder that exists.
      metadata: texts by name for the file's metadata, beside `gshard_format`, `gshard_version` and
        `step`.

    Raises:
      GShardError: for a state that `shard_train_state` did not make; a dtype that the format does
        not have; two weights of one name; metadata that are no texts; or the file system refuses.
        Then the path is as it was, and every process raises.
    """
    plan = plan_of(state, "export")
    if isinstance(plan.mesh, jax.sharding.AbstractMesh):
        raise GShardError("export: the plan has an abstract mesh: its state has no values.")
    writes = jax.process_index() == min(d.process_index for d in plan.mesh.devices.flat)
    several = plan.mesh.is_multi_process
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[list[Weight], NewFile | None]:
            target = file_path(path, "export")
            parts = plan.kind.split(state)
            found = weights_of(parts, plan, "export")
            tensors = [Tensor(name, x.dtype, x.shape) for name, (_, x) in found.items()]
            refuse_strange(tensors, "export")
            tensors.sort(key=in_file_order)
            step = int(to_host(parts.step, plan.layouts.step))
            beginning = header(tensors, _all_metadata(metadata, step))
            weights = [found[tensor.name] for tensor in tensors]
            if not writes:
                return weights, None
            file = stack.enter_context(NewFile(target, "export"))
            file.write(beginning)
            return weights, file

        weights, file = together(begin, plan.mesh)
        together(lambda: _stream(weights, file, several), plan.mesh)


def _stream(weights: Sequence[Weight], file: NewFile | None, several: bool) -> None:
    """Gathers one weight after the other, and writes them where there is a file."""
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
    whole = stored_on_host(*weight)  # on every process: this may be a gather
    if file is not None:
        for block in row_major(weight.layout.cut(whole)):
            file.write(block)


def _all_metadata(given: Any, step: int) -> dict[str, str]:
    own = {"gshard_format": FORMAT, "gshard_version": __version__, "step": str(step)}
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise GShardError(
            f"export: metadata={shown(given)} must be a mapping from names to texts, such as "
            "{'model': 'gpt'}."
        )
    for name, text in given.items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise GShardError(
                f"export: metadata has {shown(text)} by the name {shown(name)}. The format takes "
                "texts alone: give str(...) or json.dumps(...) of it."
            )
        if name in own:
            raise GShardError(f"export: metadata[{name!r}] is gshard's own. Use another name.")
    return {**own, **given}
