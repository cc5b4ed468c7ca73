"""How an array is sent in fewer bits: as codes in blocks, with a scale for each block.

Source: ZeRO++ (Wang et al., 2023), sections 4.1 and 4.3: block-quantized all-gathers of parameters,
and reduce-scatters of gradients by all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import shown

LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
_SCALE_BYTES = 2  # a scale is bfloat16
_WIDER = ("bfloat16", "float16", "bf16", "fp16")  # dtypes to compute in


@dataclass(frozen=True)
class Quantized:
    """How the collectives of one array send it: codes and scales, packed into one array of bytes.

    Attributes:
      dtype: of the codes, a key of `LARGEST`. Two `int4` are packed into a byte.
      dim: the dimension along which the blocks are, counted from the end (-1 is the last), so that
        it is the same for a layer of a stack.
      stochastic: whether codes are rounded up or down at random, so that their mean is the value.
      block: most entries of one block.
    """

    dtype: str
    dim: int
    stochastic: bool = False
    block: int = 256

    def blocks(self, size: int) -> tuple[int, int]:
        """Returns how many blocks `size` entries have, and the entries of each.

        All have the same length where up to twice as many allow that; else the last is shorter.
        """
        least = -(-size // self.block)
        count = next((n for n in range(least, 2 * least) if size % n == 0), least)
        return count, -(-size // count)

    def code_bytes(self, size: int) -> int:
        """Returns the bytes of the codes of `size` entries along `dim`."""
        return -(-size // 2) if self.dtype == "int4" else size

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of an array once it is packed, in bytes."""
        size, packed = shape[self.dim], list(shape)
        packed[self.dim] = self.code_bytes(size) + _SCALE_BYTES * self.blocks(size)[0]
        return tuple(packed)


def wire_dtype(value: Any, name: str) -> str | None:
    """Checks a dtype that arrays are sent in; `name` is the argument. None: as they are.

    Raises:
      GShardError: it is not one of `LARGEST`.
    """
    if value is None:
        return None
    if isinstance(value, str) and value.lower().replace("_", "") in ("fp8", "float8", "f8"):
        raise GShardError(
            f"{name}={value!r} may be one of two: 'float8_e4m3fn' (3 bits of mantissa, the usual "
            "choice) or 'float8_e5m2' (2 bits, a wider range). Name one."
        )
    found = value
    if isinstance(value, (tuple, list, dict)):  # of which NumPy reads the first
        found = shown(value)
    elif not isinstance(value, str):
        try:
            found = jnp.dtype(value).name
        except (TypeError, ValueError):
            found = shown(value)
    if found in LARGEST:
        return found
    choices = ", ".join(map(repr, LARGEST))
    hint = did_you_mean(found.lower(), tuple(LARGEST))
    if isinstance(value, (tuple, list)):
        hint = " Two dtypes are gshard.Precision(gather_dtype=, scatter_dtype=)."
    if found in _WIDER:
        hint = f" precision={found!r} sends parameters and gradients in it."
    raise GShardError(
        f"{name}={shown(value)} is not a dtype to send arrays in.{hint} Choose one of {choices}, "
        "or None to send them as they are."
    )
