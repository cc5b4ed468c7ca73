"""What differs between the versions of XLA:CPU that come with a supported JAX."""

from __future__ import annotations

import jax

# It honours optimization barriers, which still are there when it fuses, keeps bfloat16 (collectives
# aside), and copies what a convolution outside of loops gives into another order. Up to then
# barriers vanish before equal operations are merged, and whatever is bfloat16 is computed, and
# kept, in float32. What it computes anew for each reader is modelled for it alone: the older one
# has the pass, too, but its rematerialised loops came out up to 1.24 times too large that way.
NEW_CPU = jax.__version_info__ >= (0, 12)
