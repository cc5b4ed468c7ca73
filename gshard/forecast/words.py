"""What all commands of this folder do around their work: errors and warnings as lines."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable

import jax

from gshard.errors import GShardError, GShardWarning


def leave_accelerators() -> None:
    """Keeps JAX to the CPU: nothing runs, and a job of somebody's may hold the accelerators.

    Where JAX has started it stays as it is.
    """
    jax.config.update("jax_platforms", "cpu")


def in_words(work: Callable[[], int]) -> int:
    """The exit code of `work`; an error of the user's is one line, and so is each warning, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GShardWarning)
        try:
            code = work()
        except GShardError as error:
            print(f"error: {error}", file=sys.stderr)
            code = 1
    said = [str(x.message) for x in caught if issubclass(x.category, GShardWarning)]
    # Several levels are looked at, and say the same.
    once = {re.sub(r" at level '\w+'", "", text): None for text in said}
    for text in once:
        print(f"warning: {text}", file=sys.stderr)
    return code
