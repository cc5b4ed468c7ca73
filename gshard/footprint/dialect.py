"""What differs between the versions of XLA:CPU that come with a supported JAX."""

from __future__ import annotations

import jax

# It honours optimization barriers, computes in bfloat16 (collectives aside), and copies what a
# convolution outside of loops gives into another order. Up to then barriers vanish before equal
# operations are merged, and whatever is bfloat16 is computed, and kept, in float32.
NEW_CPU = jax.__version_info__ >= (0, 12)
