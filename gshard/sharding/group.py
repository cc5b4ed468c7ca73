"""Groups of devices, by global index."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from gshard._util.errors import GShardError
from gshard._util.validation import dimension, shown


def new_group(devices: Sequence[int]) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """The devices with these global indices, for `make_mesh(devices=...)`.

    Raises:
      GShardError: for an index that does not exist or is named twice.
    """
    every = jax.devices()
    if not isinstance(devices, Sequence) or isinstance(devices, str):
        raise GShardError(f"new_group({shown(devices)}): pass a list of device indices.")
    indices = list(devices)
    if not indices or len(set(indices)) < len(indices):
        raise GShardError(f"new_group({indices}): name at least one device, each once.")
    for index in indices:
        if dimension(index, len(every)) != index:
            raise GShardError(
                f"new_group({indices}): {index!r} is no device. There are {len(every)}: 0 to "
                f"{len(every) - 1}."
            )
    return [every[index] for index in indices]
