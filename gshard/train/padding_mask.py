"""Warns of a function that counts the examples with which a loader has filled the last batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from gshard._util.errors import some, warn
from gshard._util.jaxpr_dataflow import inputs_used
from gshard._util.pytree import flatten
from gshard.data.batch_number import MASK, may_have_padding


class MaskCheck:
    """Warns once, at the first batch of `DataLoader(pad_last=True)`, of outputs without its mask.

    Args:
      what: the function, for the message.
      output: the path of its loss; empty if all outputs count. Those with one entry for each
        example never do: the caller selects from them.
    """

    def __init__(self, what: str, output: str = ""):
        self._what, self._output, self._is_done = what, output, False

    def __call__(self, batch: Any, trace: Callable[[], jax.stages.Traced], first: int) -> None:
        """Looks at a traced program; the leaves of the batch are its inputs from `first` on."""
        if self._is_done or not may_have_padding(batch):
            return
        self._is_done, traced = True, trace()
        paths, leaves, _ = flatten(batch)
        examples = next(x.shape[0] for x in leaves if np.ndim(x))
        given, mask = range(first, first + len(leaves)), first + paths.index(MASK)
        names, outs, _ = flatten(traced.out_info)
        program: Any = traced.jaxpr
        unmasked = [
            name or "its result"
            for name, out, used in zip(names, outs, inputs_used(program.jaxpr), strict=True)
            if mask not in used and not used.isdisjoint(given) and out.shape[:1] != (examples,)
        ]
        if self._output in unmasked or (unmasked and not self._output):
            which = "" if self._output else f": {some(unmasked)}"
            warn(
                f"{self._what}{which} is computed from the batch without batch[{MASK!r}], so the "
                "examples that fill the last batch (pad_last=True) count too. Mask them, such as "
                f"(x * batch[{MASK!r}]).sum() / batch[{MASK!r}].sum()."
            )
