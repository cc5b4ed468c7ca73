"""Sums host arrays over processes; by such sums it broadcasts them, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from gshard._util.arrays import replicated_value

PIECE = 1 << 24  # bytes in device memory at a time, and as many for each process's summand


def broadcast(arrays: Sequence[np.ndarray], source: int, mesh: Mesh) -> list[np.ndarray]:
    """Returns the arrays of process `source`, on every process of the mesh.

    Every process of the mesh must call it with arrays of the same shapes and dtypes.
    """
    by_process = {d.process_index: d for d in reversed(list(mesh.devices.flat))}
    flat = Mesh(np.array([by_process[rank] for rank in sorted(by_process)]), ("all",))
    out = [np.array(x, order="C") for x in arrays]  # writable
    own = jax.process_index() == source
    size = min(PIECE, -(-sum(x.nbytes for x in out) // 4) * 4)
    for pieces in _pieces([x.reshape(-1).view(np.uint8) for x in out], size):
        mine = np.zeros(size, np.uint8)
        if own:
            joined = np.concatenate(pieces)
            mine[: joined.size] = joined
        got = sum_over_devices(mine.view(np.uint32), flat).view(np.uint8)
        ends = np.cumsum([len(piece) for piece in pieces])
        for piece, end in zip(pieces, ends, strict=True):
            piece[:] = got[end - len(piece) : end]
    return out


def _pieces(rows: Sequence[np.ndarray], size: int) -> Iterator[list[np.ndarray]]:
    """Yields views of consecutive bytes of all rows, `size` in total."""
    found: list[np.ndarray] = []
    room = size
    for row in rows:
        start = 0
        while start < len(row):
            found.append(row[start : start + room])
            start, room = start + len(found[-1]), room - len(found[-1])
            if not room:
                yield found
                found, room = [], size
    if found:
        yield found


def sum_over_devices(mine: np.ndarray, mesh: Mesh) -> np.ndarray:
    """Adds up what the processes give, once for each device that they have in a mesh of one axis.

    It waits for all of them.
    """
    with jax.set_mesh(mesh), jax.transfer_guard("allow"):  # whatever the context of the caller is
        return _sum_over_devices(mine, mesh)


def _sum_over_devices(mine: np.ndarray, mesh: Mesh) -> np.ndarray:
    sharded, full = NamedSharding(mesh, jax.P(mesh.axis_names)), NamedSharding(mesh, jax.P())
    shape = (mesh.size, *mine.shape)
    sent = jax.make_array_from_callback(shape, sharded, lambda _: mine[None])
    total = jax.jit(_add_up, out_shardings=full)(sent)
    return np.array(replicated_value(total))


def _add_up(x: jax.Array) -> jax.Array:  # one function, so that it is compiled once
    return jnp.sum(x, axis=0, dtype=x.dtype)
