"""What is optimized: a tree of arrays, or the Variables of a model, in one group or several."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util

from gshard._util.errors import ArgumentTypeError, GShardError, some
from gshard._util.validation import shown
from gshard.paddle.data_parallel import DataParallel
from gshard.sharding.plan import Plan
from gshard.wrapped.accumulation import Accumulation
from gshard.wrapped.wrapped_model import Wrapped, follow, keepers, kept

_HINT = (
    "Pass an nnx.Module, a gshard.DataParallel or its parameters(), a tree or an iterable of "
    "arrays, or a list of groups such as [{'params': ..., 'lr': 1e-3}]."
)


class Tree:
    """A tree of arrays, such as Linen's `params`; with several groups a list of trees."""

    accumulation: Accumulation | None = None

    def __init__(self, tree: Any, several: bool = False):
        """`several`: the tree is a list, of one tree a group."""
        self._several = several
        leaves, structure = jax.tree.flatten(tree)
        self._fixed = {i: x for i, x in enumerate(leaves) if not is_trained(x)}
        self.tree = structure.unflatten([x if is_trained(x) else None for x in leaves])

    def pair(self, tx: optax.GradientTransformation) -> Any:
        """What `shard_train_state` takes."""
        return self.values(), tx

    def start(self, state: Any, plan: Plan) -> Any:
        """Takes a divided state over; returns its parts."""
        parts = plan.kind.split(state)
        self.write(parts.params)
        return parts

    def values(self) -> Any:
        """The arrays as they are now."""
        return self.tree

    def group_tree(self, values: Any, labels: Sequence[int | None], group: int) -> Any:
        """The part of a tree like these values that is one group's."""
        return values[group] if self._several else values

    def with_group(
        self, labels: Sequence[int | None], group: Mapping[str, Any]
    ) -> tuple[Tree, list[int | None]]:
        """With one more group: a new target, and the labels."""
        trees = self.result() if self._several else [self.result()]
        return _target([*trees, tree_of(group)])

    def write(self, new: Any) -> None:
        """Sets them."""
        self.tree = new

    def result(self) -> Any:
        """What `step` returns; numbers that are not floating are as they came."""
        leaves, structure = jax.tree.flatten(self.tree, is_leaf=lambda x: x is None)
        return structure.unflatten([self._fixed.get(i, x) for i, x in enumerate(leaves)])


class Variables(Tree):
    """Variables of NNX that came without their model; they are set in place."""

    def __init__(self, tree: Any, several: bool = False):
        """`several`: the tree is a list, of one tree a group."""
        self.tree, self._several = tree, several

    def result(self) -> Any:
        """What `step` returns."""
        return self.tree

    def values(self) -> Any:
        """The arrays as they are now."""
        return jax.tree.map(lambda x: x.get_value(), self.tree, is_leaf=_is_variable)

    def write(self, new: Any) -> None:
        """Sets them."""
        variables = jax.tree.leaves(self.tree, is_leaf=_is_variable)
        for variable, x in zip(variables, jax.tree.leaves(new), strict=True):
            variable.set_value(x)


class Model(Tree):
    """Parameters of an NNX model, set in place."""

    def __init__(self, model: nnx.Module):
        self.tree, self._wrt = model, nnx.Param
        if isinstance(model, Wrapped):
            self.accumulation = kept(model)
            self._wrt = self.accumulation.forward.wrt
            if not isinstance(model, DataParallel):
                raise GShardError(
                    "this model came from group_sharded_parallel, with an optimizer that is "
                    "divided already. Use that, or wrap the model by gshard.DataParallel."
                )

    def pair(self, tx: optax.GradientTransformation) -> Any:
        """What `shard_train_state` takes."""
        return self.tree, nnx.Optimizer(self.tree, tx, wrt=self._wrt)

    def result(self) -> Any:
        """What `step` returns."""
        return self.tree

    def start(self, state: Any, plan: Plan) -> Any:
        """Takes a divided state over; returns its parts."""
        nnx.update(self.tree, nnx.state(state[0]))
        if self.accumulation is not None:
            follow(self.tree, plan)
        return plan.kind.split(state)

    def values(self) -> Any:
        """The arrays as they are now."""
        return nnx.as_pure(nnx.state(self.tree, self._wrt))

    def group_tree(self, values: Any, labels: Sequence[int | None], group: int) -> Any:
        """The part of a tree like these values that is one group's."""
        if set(labels) == {group}:
            return values
        pairs = jax.tree_util.tree_leaves_with_path(values)
        own = {
            tuple(key.key for key in keys): x
            for (keys, x), label in zip(pairs, labels, strict=True)
            if label == group
        }
        return traverse_util.unflatten_dict(own)

    def with_group(
        self, labels: Sequence[int | None], group: Mapping[str, Any]
    ) -> tuple[Tree, list[int | None]]:
        """The same model, and the labels with one more."""
        keep, ids = self.accumulation, _ids(self.tree) if self.accumulation else []
        added = jax.tree.leaves(tree_of(group), is_leaf=_is_variable)
        where = [ids.index(id(x)) if id(x) in ids else None for x in added]
        if not added or None in where:
            raise GShardError(
                "add_param_group: these are not parameters of the optimizer's DataParallel. Pass "
                "Variables of it, or make another optimizer."
            )
        if any(i is not None and labels[i] is not None for i in where):
            raise GShardError("add_param_group: the same leaf would be in two groups, twice.")
        if keep is not None and keep.holds:
            raise GShardError(
                "add_param_group: there are gradients of backward that no step has used. Call "
                "step() or zero_grad() before."
            )
        new = max(label for label in labels if label is not None) + 1
        return self, [new if i in where else label for i, label in enumerate(labels)]

    def write(self, new: Any) -> None:
        """Sets them."""
        nnx.update(self.tree, new)


def parameters(params: Any) -> tuple[Tree, list[int | None], list[dict[str, Any]]]:
    """What may be given as `params`, taken apart.

    Returns:
      Where the arrays are; the group of each leaf; the hyperparameters that each group names.

    Raises:
      ArgumentTypeError: for a bare array, no parameters at all, or a mixture.
      GShardError: nothing to optimize, or something twice.
    """
    if isinstance(params, nnx.Module):
        variables = jax.tree.leaves(nnx.state(params, nnx.Param), is_leaf=_is_variable)
        if not isinstance(params, Wrapped) and any(keepers(variables)):
            return *_target([variables]), [{}]
        model = Model(params)
        return model, [0] * len(_checked(jax.tree.leaves(model.values()))), [{}]
    if isinstance(params, (str, bytes)) or _is_array(params) or not _is_container(params):
        raise ArgumentTypeError(f"params={shown(params)} are no parameters. {_HINT}")
    tree = params if isinstance(params, (Mapping, list)) else _listed(params)
    if not isinstance(tree, list) or not any(_is_group(x) for x in tree):
        return *_target([tree]), [{}]
    for i, group in enumerate(tree):
        if not isinstance(group, Mapping):
            raise ArgumentTypeError(
                f"params[{i}] is {shown(group)}, and others are groups. {_HINT}"
            )
        if not _is_group(group):
            raise GShardError(f"params[{i}] is a group without 'params'. {_HINT}")
    target, labels = _target([tree_of(group) for group in tree])
    return target, labels, [options_of(group) for group in tree]


def tree_of(group: Mapping[str, Any]) -> Any:
    """The parameters of a group that a user gives."""
    found = group["params"]
    if isinstance(found, nnx.Module):
        return jax.tree.leaves(nnx.state(found, nnx.Param), is_leaf=_is_variable)
    if _is_array(found) or _is_variable(found):
        return [found]
    if not _is_container(found):
        raise ArgumentTypeError(f"params={shown(found)} of a group are no parameters. {_HINT}")
    return found if isinstance(found, (Mapping, list)) else _listed(found)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that a group of the user names."""
    return {name: x for name, x in group.items() if name != "params"}


def _target(trees: list[Any]) -> tuple[Tree, list[int | None]]:
    leaves = [jax.tree.leaves(tree, is_leaf=_is_variable) for tree in trees]
    every = _checked([x for group in leaves for x in group])
    for i, of in enumerate(leaves):
        if not any(map(is_trained, of)):
            where = f"params[{i}]" if len(trees) > 1 else "params"
            raise GShardError(f"{where} holds no floating numbers: there is nothing to optimize.")
    labels: list[int | None] = [i for i, of in enumerate(leaves) for x in of if is_trained(x)]
    tree = trees[0] if len(trees) == 1 else trees
    if not _is_variable(every[0]):
        return Tree(nnx.as_pure(tree), len(trees) > 1), labels
    if len(labels) < len(every):
        raise GShardError("params hold Variables of whole numbers, which have no gradient.")
    keeps = set(keepers(every))
    if keeps == {None}:
        return Variables(tree, len(trees) > 1), labels
    if None in keeps or len(keeps) > 1:
        raise GShardError("params are not all of one wrapped model. Make one optimizer for each.")
    model = next(keep.model for keep in keeps if keep is not None)
    of = dict(zip(map(id, every), labels, strict=True))
    return Model(model), [of.get(i) for i in _ids(model)]


def _ids(model: Any) -> list[int]:
    state = nnx.state(model, kept(model).forward.wrt)
    return [id(x) for x in jax.tree.leaves(state, is_leaf=_is_variable)]


def _checked(leaves: list[Any]) -> list[Any]:
    if not leaves:
        raise GShardError(f"params are empty: there is nothing to optimize. {_HINT}")
    kinds = {_is_variable(x) for x in leaves}
    strange = [shown(x) for x in leaves if not (_is_variable(x) or _is_array(x))]
    if strange or len(kinds) > 1:
        what = some(strange) or "arrays beside Variables"
        raise ArgumentTypeError(f"params hold {what}. {_HINT}")
    seen: set[int] = set()
    for x in leaves:
        if id(x) in seen:
            raise GShardError(
                "params hold the same leaf twice. Give each to one group, once; what is tied lies "
                "in one Variable, or in one place of the tree."
            )
        seen.add(id(x))
    return leaves


def _is_group(x: Any) -> bool:
    return isinstance(x, Mapping) and "params" in x


def _is_container(x: Any) -> bool:
    return isinstance(x, Iterable) or not jax.tree_util.all_leaves([x])


def _listed(x: Any) -> Any:
    return list(x) if isinstance(x, Iterable) and jax.tree_util.all_leaves([x]) else x


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def is_trained(x: Any) -> bool:
    """Whether an array, or a Variable, can have a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
