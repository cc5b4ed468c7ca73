"""JAX's persistent compilation cache for the processes of a job, so that a restart is faster."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from gshard._util.errors import GShardError
from gshard.distributed.env_vars import visible_gpus

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
OFF = "off"
_FOLDER = "compilation_cache"  # within the folder of the logs


def cache_variables(
    chosen: str | None, log_dir: Path, machines: int, on_cpu: bool
) -> dict[str, str]:
    """The variables for JAX's cache of compiled programs; empty where it keeps its own settings.

    JAX keeps those that took a second or more to compile: reading the hundreds of small ones from
    a shared disk would not be faster. By default it is on where compiling takes long, on GPUs and
    TPUs. On several machines the folder must be shared: processes that compile on GPUs autotune
    together, and may wait for one that has found the program and compiles nothing.

    Args:
      chosen: the user's folder, or `OFF`; None for the default.
      log_dir: the folder of the logs.
      machines: their number.
      on_cpu: whether the processes have virtual devices.
    """
    if chosen == OFF:  # also where VARIABLE is set, or the script names a folder
        return {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    if chosen is None and VARIABLE in os.environ:
        return {}
    if chosen is None and (machines > 1 or on_cpu or not _has_accelerator()):
        return {}
    folder = (log_dir / _FOLDER if chosen is None else Path(chosen)).absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # JAX runs what it finds there
    except OSError as error:
        option = "--log_dir" if chosen is None else "--compilation_cache"
        raise GShardError(
            f"{option}: {folder} cannot be created ({error.strerror}). Name another folder"
            f"{'' if chosen is None else f', or {OFF}'}."
        ) from error
    return {VARIABLE: str(folder)}


def _has_accelerator() -> bool:
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return False
    return bool(visible_gpus()) or importlib.util.find_spec("libtpu") is not None
