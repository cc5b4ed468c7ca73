"""A compiled function of a model: its parameters go in and do not come out again.

`nnx.jit` returns every array of a model, and XLA copies those that have not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx


@dataclass(frozen=True)
class _Static:
    graph: Any
    structure: Any
    fixed: Any


class OnModel:
    """`fun(model, *args)`, compiled; what it changes of the model's own state is written.

    Args:
      fun: of a model and arrays, and of `fixed` where that is given.
      wrt: the filter of the parameters, which `fun` does not change.
      donated: which of `args` are given away.
    """

    def __init__(self, fun: Callable[..., Any], wrt: Any, donated: tuple[int, ...] = ()):
        self._fun, self.wrt = fun, wrt
        numbers = tuple(3 + i for i in donated)
        self._jitted = jax.jit(self._run, static_argnums=0, donate_argnums=numbers)

    def __call__(self, model: nnx.Module, *args: Any, fixed: Any = None) -> Any:
        """Runs it; `fixed` is hashable, and each is compiled for itself."""
        static, params, rest = self._split(model, fixed)
        out, changed = self._jitted(static, params, rest, *args)
        if changed:
            leaves = [changed.get(i, x) for i, x in enumerate(rest)]
            nnx.update(model, jax.tree.unflatten(static.structure, leaves))
        return out

    def lower(self, model: nnx.Module, *args: Any, fixed: Any = None) -> jax.stages.Lowered:
        """Lowered for these arguments; nothing runs."""
        return self._jitted.lower(*self._split(model, fixed), *args)

    def _split(self, model: nnx.Module, fixed: Any) -> tuple[_Static, Any, list[Any]]:
        graph, params, rest = nnx.split(model, self.wrt, ...)
        leaves, structure = jax.tree.flatten(rest)
        return _Static(graph, structure, fixed), params, leaves

    def _run(self, static: _Static, params: Any, rest: list[Any], *args: Any) -> Any:
        state = jax.tree.unflatten(static.structure, rest)
        model = nnx.merge(static.graph, params, state, copy=True)
        more = () if static.fixed is None else (static.fixed,)
        out = self._fun(model, *args, *more)
        after = jax.tree.leaves(nnx.split(model, self.wrt, ...)[2])
        pairs = enumerate(zip(after, rest, strict=True))
        return out, {i: new for i, (new, old) in pairs if new is not old}
