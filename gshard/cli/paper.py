"""Table 1 of the ZeRO paper, by the code that plans every other model.

Source: ZeRO (Rajbhandari et al., 2020), section 5.4: GB (1e9 bytes) of model states for one device,
mixed precision with Adam.
"""

from __future__ import annotations

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import jax
import jax.numpy as jnp
import optax

from gshard.analysis.forecast import make_plan
from gshard.analysis.setup import Setup

SIZES = {"7.5B": 7_500_000_000, "128B": 128_000_000_000, "1T": 1_000_000_000_000}
DEGREES = (1, 4, 16, 64, 256, 1024)
LEVELS = ("os", "os_g", "p_g_os")


def table_1() -> dict[str, dict[int, dict[str, int]]]:
    """Bytes of model states on one device, by size of model, degree and level."""
    return {name: {n: _bytes(elements, n) for n in DEGREES} for name, elements in SIZES.items()}


def _bytes(elements: int, devices: int) -> dict[str, int]:
    params = {"parameters": jax.ShapeDtypeStruct((elements,), jnp.float32)}
    setup = Setup((params, optax.adam(1e-3)), shard={"precision": "bfloat16"})
    # Two micro-batches: the paper counts the gradient that is kept between them.
    found = make_plan(setup, devices, levels=LEVELS, micro_batches=2)
    return {name: of.params + of.gradients + of.optimizer for name, of in found.levels.items()}


def rounded(count: int) -> str:
    """Bytes in GB as the paper prints them: 7.5, 31.4, 0.12; from 100 on without a fraction."""
    amount = Decimal(count) / 10**9
    if amount >= 100:
        return str(amount.quantize(Decimal(1), ROUND_DOWN))
    digits = Decimal("0.1") if amount >= 10 else Decimal("0.01")
    text = str(amount.quantize(digits, ROUND_HALF_UP))
    return text.rstrip("0").rstrip(".")
