"""What cuDNN wants of a convolution's operands."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def padded_kernel(
    image: Sequence[int], kernel: Sequence[int], params: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """The shape of a kernel's padded copy; None where there is none.

    A kernel that is larger than what it is moved over changes places with it in XLA
    (`SwapConvOperands`), and what is moved over has its padding written out for cuDNN unless that
    is the same on both sides: of a kernel of 3 x 3 for images of 2 x 2 a copy of 6 x 6.

    Args:
      image: shape of the left operand.
      kernel: shape of the right operand.
      params: of the `conv_general_dilated`.
    """
    spec = params["dimension_numbers"]
    sizes = [image[d] for d in spec.lhs_spec[2:]]
    widths = [kernel[d] for d in spec.rhs_spec[2:]]
    if math.prod(widths) <= math.prod(sizes):
        return None
    shape, even = list(kernel), True
    for d, size, width, wide, apart, (low, high) in zip(
        spec.rhs_spec[2:], sizes, widths,
        params["lhs_dilation"], params["rhs_dilation"], params["padding"], strict=True,
    ):  # fmt: skip
        moved = (size - 1) * wide - (width - 1) * apart
        even &= low == high
        shape[d] += max(0, low + moved) + max(0, high + moved)
    return None if even else tuple(shape)
