"""One optax transformation of several groups, whose hyperparameters are arguments of `update`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax

from gshard.pytorch.param_group import ParamGroup

Labels = Sequence[int | None]  # the group of every leaf; None: not optimized
_NONE = "none"


def grouped(groups: Sequence[ParamGroup], labels: Labels) -> optax.GradientTransformationExtraArgs:
    """The groups' optimizers together, of a tree whose leaves have these labels.

    Its state is that of the optimizer where there is one group of all leaves, else that of
    `optax.multi_transform`. `update` takes `hyperparameters`: of each group those that are traced.
    """

    def together(values: Sequence[Any]) -> optax.GradientTransformationExtraArgs:
        made = [group.tx(v) for group, v in zip(groups, values, strict=True)]
        if is_plain(groups, labels):
            return made[0]
        by_label: dict[Any, Any] = {str(i): tx for i, tx in enumerate(made)} | {
            _NONE: optax.set_to_zero()
        }
        names = [_NONE if label is None else str(label) for label in labels]

        def label_of(tree: Any) -> Any:
            return jax.tree.unflatten(jax.tree.structure(tree), names)

        found: Any = optax.multi_transform(by_label, label_of)
        return found

    def init(params: Any) -> Any:
        return together([{} for _ in groups]).init(params)

    def update(
        updates: Any, state: Any, params: Any = None, *, hyperparameters: Any = None, **extra: Any
    ) -> Any:
        values = hyperparameters or [{} for _ in groups]
        return together(values).update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)


def is_plain(groups: Sequence[ParamGroup], labels: Labels) -> bool:
    """Whether the state is that of the one optimizer."""
    return len(groups) == 1 and None not in labels


def group_states(state: Any, groups: Sequence[ParamGroup], labels: Labels) -> list[Any]:
    """The state of each group's optimizer, out of that of `grouped`."""
    if is_plain(groups, labels):
        return [state]
    return [state.inner_states[str(i)].inner_state for i in range(len(groups))]
