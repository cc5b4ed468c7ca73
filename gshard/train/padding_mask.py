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

_ADVICE = (
    "Mask them: (x * mask).sum() / mask.sum(), or with loss_semantics='per_device' "
    "gshard.Weighted((x * mask).sum(), mask.sum())."
)


class MaskCheck:
    """Warns once, at the first batch of `DataLoader(pad_last=True)`, of outputs without its mask.

    Args:
      what: the function, for the message.
      prefix: how the paths of its outputs that count begin.
      advice: what to do, the end of the message.
      of_examples: whether outputs may have entries for each example. Those do not count: the caller
        selects from them.
    """

    def __init__(
        self, what: str, prefix: str = "", advice: str = _ADVICE, of_examples: bool = True
    ):
        self._what, self._prefix, self._is_done = what, prefix, False
        self._advice, self._of_examples = advice, of_examples

    def __call__(self, batch: Any, trace: Callable[[], jax.stages.Traced], first: int) -> None:
        """Looks at a traced program; the leaves of the batch are its inputs from `first` on."""
        if self._is_done or not may_have_padding(batch):
            return
        self._is_done, traced = True, trace()
        paths, leaves, _ = flatten(batch)
        examples = next(x.shape[0] for x in leaves if np.ndim(x))
        given = range(first, first + len(leaves))
        mask = next((i for i, p in zip(given, paths, strict=True) if p.split("/")[-1] == MASK), -1)
        names, outs, _ = flatten(traced.out_info)
        program: Any = traced.jaxpr
        unmasked = [
            name.removeprefix(self._prefix) or "its result"
            for name, out, used in zip(names, outs, inputs_used(program.jaxpr), strict=True)
            if name.startswith(self._prefix)
            if mask not in used and not used.isdisjoint(given)
            if not self._of_examples or not out.shape or not out.shape[0] or out.shape[0] % examples
        ]
        if unmasked:
            warn(
                f"{self._what} computes {some(unmasked)} from the batch without batch[{MASK!r}], "
                "so the examples that fill the last batch (pad_last=True) count too. "
                f"{self._advice}"
            )
