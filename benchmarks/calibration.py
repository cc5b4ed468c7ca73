"""Measures the rates that `gshard advise --calibration` reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

import gshard
from benchmarks.timing import in_turn

_SUMS = 32  # all-reduces in one program, so that its start does not count
# Of large arrays: on a GPU one takes 1 to 4 ms, and the start of a program 0.1 ms.
_PRODUCTS, _STREAMS, _GATHERS = 8, 16, 4


def calibration(small: bool) -> dict[str, Any]:
    """The rates of a device while all devices do the same, as in a step.

    These are products in bfloat16 and float32, the device's memory, and collectives.
    """
    mesh = gshard.make_mesh()
    axes, devices = mesh.axis_names, mesh.size
    sharded = jax.NamedSharding(mesh, jax.P(axes))
    n, count, link = (512, 2**20, 2**17) if small else (8192, 2**29, 2**26)

    def own(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        """An array with this shape on each device."""
        made = partial(jax.random.normal, jax.random.key(0), dtype=dtype)
        return jax.jit(partial(made, (devices * shape[0], *shape[1:])), out_shardings=sharded)()

    def square(dtype: str) -> jax.Array:
        """A matrix whose powers stay finite."""
        return own((n, n), dtype) / n**0.5

    def program(body: Callable[[Any], Any], x: Any) -> Callable[[], Any]:
        each = jax.shard_map(
            body, mesh=mesh, in_specs=jax.P(axes), out_specs=jax.P(axes), check_vma=False
        )
        return partial(lambda run, x: jax.block_until_ready(run(x)), jax.jit(each), x)

    def repeated(
        times: int, body: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array
    ) -> Callable[[], Any]:
        """A program of so many `y = body(x, y)`, from `y = x` on."""
        return program(lambda x: jax.lax.fori_loop(0, times, lambda _, y: body(x, y), x), x)

    programs = {
        dtype: repeated(_PRODUCTS, lambda a, b: a @ b, square(dtype))
        for dtype in ("bfloat16", "float32")
    } | {"memory": repeated(_STREAMS, lambda _, y: y + 1, own((count,)))}
    if devices > 1:
        gather = partial(jax.lax.all_gather, axis_name=axes, tiled=True)
        several = [own((link,)) for _ in range(_GATHERS)]
        programs["start"] = repeated(_SUMS, lambda _, y: jax.lax.pmean(y, axes), own((1,)))
        programs["link"] = program(lambda xs: [gather(x) for x in xs], several)
    seconds = {name: median(times) for name, times in in_turn(programs, 20).items()}
    rates: dict[str, float | None] = {
        "bfloat16_flops": _PRODUCTS * 2 * n**3 / seconds["bfloat16"],
        "float32_flops": _PRODUCTS * 2 * n**3 / seconds["float32"],
        "memory_bandwidth": _STREAMS * 2 * 4 * count / seconds["memory"],
        "collective_start": seconds["start"] / _SUMS if devices > 1 else None,
        "link": (_GATHERS * 4 * link * (devices - 1) / seconds["link"] if devices > 1 else None),
    }
    rows = [{"rate": name, "measured": rate} for name, rate in rates.items()]
    note = (
        "FLOP/s of a product of two square matrices, at JAX's default precision; bytes/s of the "
        "memory; seconds of an all-reduce of one element; bytes/s sent in an all-gather"
    )
    about = {"device_kind": jax.devices()[0].device_kind, "jax": jax.__version__, "small": small}
    return {"rows": rows, "note": note, "calibration": about | {"devices": devices} | rates}
