"""`opt.state`: the state of each parameter, in the form that PyTorch's optimizers have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from gshard._util.errors import ArgumentTypeError, did_you_mean
from gshard._util.pytree import flatten
from gshard._util.validation import shown
from gshard.pytorch.param_group import ParamGroup
from gshard.pytorch.state_dict import parameter_of

# What PyTorch calls the fields of optax's states.
_TORCH_NAMES = {
    "count": "step",
    "mu": "exp_avg",
    "nu": "exp_avg_sq",
    "nu_max": "max_exp_avg_sq",
    "trace": "momentum_buffer",
    "sum_of_squares": "sum",
}
_OF_RMSPROP = {"mu": "grad_avg", "nu": "square_avg"}


class Snapshot(dict[str, Any]):
    """The fields of one parameter's state, which cannot be set: training would not see it."""

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ArgumentTypeError(
            "opt.state is a snapshot: what is set in it does not reach the optimizer. Take "
            "state = opt.state_dict(), change state['state'][i], the optax state of group i, and "
            "call opt.load_state_dict(state)."
        )

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # copies are plain


for _name in ("__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(Snapshot, _name, Snapshot._refuse)
jax.tree_util.register_pytree_node(
    Snapshot,
    lambda fields: (list(fields.values()), tuple(fields)),
    lambda names, values: Snapshot(zip(names, values, strict=True)),
)


class ParamStates(Mapping[Any, Mapping[str, Any]]):
    """The state of each parameter: a snapshot of full arrays in host memory.

    A key is the parameter's path such as `layers/0/kernel`, or its number, as in the state dict of
    PyTorch. A value has the fields of optax's state under PyTorch's names where it has them
    (`exp_avg` for `mu`, `step` for `count`), else under optax's.
    """

    def __init__(self, groups: Sequence[ParamGroup], states: Sequence[Any]):
        """`states` has the full state of each group."""
        self._by_path: dict[str, Snapshot] = {}
        for i, (group, state) in enumerate(zip(groups, states, strict=True)):
            names = _TORCH_NAMES | (_OF_RMSPROP if group.name == "rmsprop" else {})
            paths = flatten(group.tree)[0]
            fields: list[dict[str, Any]] = [{} for _ in paths]
            owners = parameter_of(group.state, group.tree)
            leaves = zip(flatten(group.state)[0], jax.tree.leaves(state), owners, strict=True)
            for path, x, owner in leaves:
                own = range(len(paths)) if owner is None else [owner]
                end = "" if owner is None else paths[owner]
                field = path.removesuffix(end).rstrip("/").rpartition("/")[2]
                for at in own:
                    fields[at].setdefault(names.get(field, field), _fixed(x))
            several = any(path in self._by_path for path in paths)
            self._by_path |= {
                f"{i}/{path}" if several else path: Snapshot(of)
                for path, of in zip(paths, fields, strict=True)
            }

    def __getitem__(self, parameter: Any) -> Mapping[str, Any]:
        key = parameter
        if isinstance(key, int) and 0 <= key < len(self._by_path):
            key = list(self._by_path)[key]
        if not isinstance(key, str) or key not in self._by_path:
            raise KeyError(
                f"opt.state has no parameter {shown(parameter)}. A key is a path such as "
                f"{next(iter(self._by_path), '')!r}, or a number below {len(self._by_path)}."
                f"{did_you_mean(shown(parameter), self._by_path)}"
            )
        return self._by_path[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_path)

    def __len__(self) -> int:
        return len(self._by_path)


def _fixed(x: Any) -> Any:
    """Returns an array that cannot be written to, since the optimizer would not see it."""
    if isinstance(x, np.ndarray):
        x = x.view()
        x.flags.writeable = False
    return x
