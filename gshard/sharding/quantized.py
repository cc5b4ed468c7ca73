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
from gshard._util.validation import check_integer, shown

LARGEST = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
BLOCK, SHORTEST = 256, 32  # entries of a block
_CHOICES = ", ".join(map(repr, LARGEST))
_ROUNDINGS = ("nearest", "stochastic")
_SCALE_BYTES = 2  # a scale is bfloat16
_WIDER = ("bfloat16", "float16", "bf16", "fp16")  # dtypes to compute in


@dataclass(frozen=True)
class Quantized:
    """A dtype to send arrays in, with its blocks and its rounding; for fields of `Precision`.

    The name of the dtype alone stands for blocks of at most 256 entries and the usual rounding.

    Args:
      dtype: of the codes: `"int8"`, `"int4"`, `"float8_e4m3fn"` or `"float8_e5m2"`.
      block: the most entries that share a scale, 32 to 256. The rounding error is proportional to
        the largest entry of a block, so shorter blocks are more precise; each scale takes 2 bytes.
      rounding: of gradients: `"nearest"`, or `"stochastic"`, which is up or down at random, so that
        the mean is right, for `"int8"` and `"int4"`. By default stochastic for `"int4"`, else
        nearest. Parameters are always rounded to the nearest.

    Raises:
      GShardError: an argument is not one of these, or `"stochastic"` is given with a dtype that it
        is not for.

    Example:
      >>> short = gshard.Quantized("int4", block=64)
      >>> precision = gshard.Precision("bfloat16", gather_dtype="int8", scatter_dtype=short)

    Source: ZeRO++ (Wang et al., 2023), section 4.1; stochastic rounding: Gupta et al. (2015).
    """

    dtype: str
    block: int = BLOCK
    rounding: str | None = None

    def __post_init__(self) -> None:
        found = wire_dtype(self.dtype, "dtype")
        if not isinstance(found, str):
            raise GShardError(f"dtype={self.dtype!r} of Quantized must be one of {_CHOICES}.")
        object.__setattr__(self, "dtype", found)
        block = check_integer("block", self.block, 1, " of entries")
        if not SHORTEST <= block <= BLOCK:
            raise GShardError(
                f"block={block} of Quantized must be {SHORTEST} to {BLOCK} entries. Each block "
                "sends a scale of 2 bytes, which is too much for fewer entries; in longer blocks "
                "one large entry takes the precision of too many others."
            )
        object.__setattr__(self, "block", block)
        if self.rounding not in (None, *_ROUNDINGS):
            raise GShardError(
                f"rounding={shown(self.rounding)} of Quantized must be 'nearest', 'stochastic', or "
                "None for the usual one of its dtype."
            )
        if self.rounding == "stochastic" and not found.startswith("int"):
            raise GShardError(
                f"rounding='stochastic' goes with 'int8' and 'int4'. {found!r} is rounded to the "
                "nearest: leave rounding= out."
            )

    def __repr__(self) -> str:
        given = [repr(self.dtype)]
        given += [f"block={self.block}"] if self.block != BLOCK else []
        given += [f"rounding={self.rounding!r}"] if self.rounding else []
        return f"gshard.Quantized({', '.join(given)})"

    def codes(self, dim: int, scatters: bool) -> BlockCodes:
        """Returns how an array is sent whose blocks are along `dim`, counted from the end."""
        usual = "stochastic" if self.dtype == "int4" else "nearest"
        stochastic = scatters and (self.rounding or usual) == "stochastic"
        return BlockCodes(self.dtype, dim, stochastic, self.block)


@dataclass(frozen=True)
class BlockCodes:
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
    block: int = BLOCK

    def __str__(self) -> str:
        blocks = f" in blocks of {self.block}" if self.block != BLOCK else ""
        return f"{self.dtype}{blocks}{', rounded at random' if self.stochastic else ''}"

    def blocks(self, size: int) -> tuple[int, int]:
        """Returns how many blocks `size` entries have, and the entries of each.

        All have the same length where up to twice as many allow that; else the last is shorter. Of
        shorter blocks there are no more than necessary, since each sends a scale.
        """
        least = -(-size // self.block)
        most = 2 * least if self.block == BLOCK else least + 1
        count = next((n for n in range(least, most) if size % n == 0), least)
        return count, -(-size // count)

    def code_bytes(self, size: int) -> int:
        """Returns the bytes of the codes of `size` entries along `dim`."""
        return -(-size // 2) if self.dtype == "int4" else size

    def packed_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of an array once it is packed, in bytes."""
        size, packed = shape[self.dim], list(shape)
        packed[self.dim] = self.code_bytes(size) + _SCALE_BYTES * self.blocks(size)[0]
        return tuple(packed)


def wire_dtype(value: Any, name: str) -> str | Quantized | None:
    """Checks a dtype that arrays are sent in; `name` is the argument. None: as they are.

    Raises:
      GShardError: it is not one of `LARGEST`.
    """
    if value is None or isinstance(value, Quantized):
        return value
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
    hint = did_you_mean(found.lower(), tuple(LARGEST))
    if isinstance(value, (tuple, list)):
        hint = (
            " Two dtypes are gshard.Precision('float32', gather_dtype=..., scatter_dtype=...), "
            "whose first argument is the dtype to compute in."
        )
    if found in _WIDER:
        hint = f" precision={found!r} sends parameters and gradients in it."
    raise GShardError(
        f"{name}={shown(value)} is not a dtype to send arrays in.{hint} Choose one of {_CHOICES}"
        + (", or None to send them as they are." if name != "dtype" else ".")
    )
