"""What surrounds a traced program: the garbage collector, and errors of JAX's modes."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from gshard._util.errors import GShardError
from gshard._util.tracebacks import chain_of


def explain_debug_nans(error: RuntimeError) -> None:
    """Raises a readable error where `jax_debug_nans` could not run a step again."""
    config: Any = jax.config
    # JAX compiles each retry, which finds the NaN and retries (RecursionError), or no arrays.
    names = [type(x).__name__ for x in chain_of(error)]  # JAX has a FloatingPointError of its own
    is_nan = any(name.endswith("FloatingPointError") for name in names)
    tried = is_nan or re.search("donated|deleted", str(error))
    if config.jax_debug_nans and tried:
        raise GShardError(
            "a step made a NaN. With jax_debug_nans, JAX tried to run it again one operation at a "
            "time, but could not, because its state was donated. Turn jax_debug_nans off: such a "
            "step is skipped and counted. To find the operation, differentiate the loss alone: "
            "with jax.debug_nans(True): jax.grad(loss_fn)(gshard.full_params(state), batch)."
        ) from error


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pauses Python's garbage collector, while a step is traced or lowered.

    A trace keeps nearly everything that it makes, and the collector would search through that again
    and again, for a third of the time of a model with 1,000 parameters.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
