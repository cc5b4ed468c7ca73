"""Warns of a function that counts the examples with which a loader has filled the last batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from jax.extend import core

from gshard._util.errors import some, warn
from gshard._util.jaxpr_dataflow import inputs_used
from gshard._util.pytree import flatten
from gshard.data.batch_number import MASK, is_mask, may_have_padding

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
      of_examples: which outputs have entries for each example: those of such a shape, of these
        only sharded ones, or none. They do not count: the caller selects from them.
    """

    def __init__(
        self,
        what: str,
        prefix: str = "",
        advice: str = _ADVICE,
        of_examples: Literal["shape", "sharded", "none"] = "shape",
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
        masks = {  # one that was cast is another array
            i
            for i, path, x in zip(given, paths, leaves, strict=True)
            if is_mask(x) or path.split("/")[-1] == MASK
        }
        names, outs, _ = flatten(traced.out_info)
        program: Any = traced.jaxpr
        columns = names, outs, inputs_used(program.jaxpr), _specs(program.jaxpr)
        unmasked = [
            name.removeprefix(self._prefix) or "its result"
            for name, out, used, spec in zip(*columns, strict=True)
            if name.startswith(self._prefix)
            if masks.isdisjoint(used) and not used.isdisjoint(given)
            if not self._has_examples(out.shape, spec, examples)
        ]
        if unmasked:
            warn(
                f"{self._what} computes {some(unmasked)} from the batch without batch[{MASK!r}], "
                "so the examples that fill the last batch (pad_last=True) count too. "
                f"{self._advice}"
            )

    def _has_examples(self, shape: tuple[int, ...], spec: Any, examples: int) -> bool:
        if self._of_examples == "none" or self._of_examples == "sharded" and spec == jax.P():
            return False
        return bool(shape) and shape[0] > 0 and shape[0] % examples == 0


def _specs(jaxpr: Any) -> list[Any]:
    """How the outputs of a program are sharded that are those of a `shard_map`."""
    found = {
        v: spec
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "shard_map"
        for v, spec in zip(eqn.outvars, eqn.params["out_specs"], strict=True)
    }
    return [found.get(v, jax.P()) if isinstance(v, core.Var) else jax.P() for v in jaxpr.outvars]
