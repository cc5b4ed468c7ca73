"""`export`: the weights of a divided state as one safetensors file of whole values."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np

from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard._util.version import __version__
from gshard.checkpoint.safetensors.format import Tensor, header, in_file_order, refuse_strange
from gshard.checkpoint.safetensors.weights import Weight, weights_of
from gshard.distributed.agree import run_on_all
from gshard.sharding.host_arrays import plan_of, stored_on_host, to_host

FORMAT = "1"  # of the names and of what is in the metadata


def save_safetensors(
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

        weights, file = run_on_all(begin, plan.mesh)
        run_on_all(lambda: _stream(weights, file, several), plan.mesh)


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
        for block in row_major(weight.layout.unpad(whole)):
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


BLOCK = 2**23  # bytes that are copied at a time where an array does not lie in order


def file_path(path: Any, call: str) -> Path:
    """A user's path of a file, absolute, links followed.

    Raises:
      GShardError: it is no path.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise GShardError(f"{call}: path={shown(path)} must be the path of a file.")
    try:
        return Path(os.fsdecode(path)).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # links in a circle, no home, a NUL
        raise GShardError(f"{call}: path={shown(path)} leads nowhere: {error}.") from error


class NewFile:
    """Bytes under a hidden name beside `path`, which `commit` renames into place.

    A context that is left without `commit` leaves nothing, and what was at `path` as it was. Only a
    process that is killed leaves the hidden file, `.NAME.XXXXXXXX.new`.

    Raises:
      GShardError: (from every method) the file system refuses; says what it said.
    """

    def __init__(self, path: Path, call: str):
        self._path, self._call = path, call
        self._new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
        self._file: BinaryIO | None = None

    def __enter__(self) -> NewFile:
        try:
            # A rename would replace a device such as /dev/null too.
            if self._path.exists() and not self._path.is_file():
                what = "folder" if self._path.is_dir() else "device or the like"
                raise GShardError(
                    f"{self._call}: {self._path} is a {what}. Choose another name for the file."
                )
            self._file = self._new.open("xb")
        except OSError as error:
            raise self._refused(error) from error
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Appends bytes."""
        try:
            self._opened().write(data)
        except OSError as error:
            raise self._refused(error) from error

    def commit(self) -> None:
        """Makes sure that all is on disk, and gives the file its name."""
        file = self._opened()
        try:
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(self._new, self._path)
            _sync_folder(self._path.parent)
        except OSError as error:
            raise self._refused(error) from error

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.close()  # writes what is left, which fails again where the disk is full
        with contextlib.suppress(OSError):
            self._new.unlink()  # gone already where it was given its name

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise ValueError("NewFile is used as a context: with NewFile(...) as file.")
        return self._file

    def _refused(self, error: OSError) -> GShardError:
        return GShardError(
            f"{self._call}: {self._path} cannot be written: {error.strerror or error}. What was "
            "there is as it was. Choose a folder that exists, may be written to and has room."
        )


def row_major(x: np.ndarray) -> Iterator[memoryview]:
    """The bytes of an array in row-major order.

    One that lies in order is not copied; of another a block at a time is.
    """
    if x.flags.c_contiguous:
        yield x.reshape(-1).view(np.uint8).data
        return
    each = x.nbytes // len(x)
    if each > BLOCK:
        for row in x:
            yield from row_major(row)
        return
    rows = BLOCK // each
    for i in range(0, len(x), rows):
        yield from row_major(np.ascontiguousarray(x[i : i + rows]))


def _sync_folder(folder: Path) -> None:
    """The new name on disk too, where the system can: the file is in place already."""
    with contextlib.suppress(OSError, AttributeError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
