"""The parameters to optimize: a tree of arrays, Variables of NNX, or a model."""

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
from gshard.sharding.plan import Plan
from gshard.train_state import Components
from gshard.train_state.nnx import new_optimizer
from gshard.wrapped.accumulation import Accumulation
from gshard.wrapped.data_parallel import DataParallel
from gshard.wrapped.wrapped_model import Wrapped, follow, keepers, kept

_HINT = (
    "Pass an nnx.Module, a DistributedDataParallel or its parameters(), a tree or an iterable of "
    "arrays, or a list of groups such as [{'params': ..., 'lr': 1e-3}]."
)

Labels = Sequence[int | None]


class Parameters:
    """A tree of arrays, such as Linen's `params`.

    Attributes:
      tree: the arrays; with several groups a list of trees.
      labels: the group of every leaf; None for a leaf that is not optimized.
      accumulation: the gradients of their `DistributedDataParallel`, if they belong to one.
      in_place: whether a step sets the user's own Variables.
    """

    accumulation: Accumulation | None = None
    in_place = False

    def __init__(self, tree: Any, labels: Labels):
        self.labels = labels
        leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
        self._fixed = {i: x for i, x in enumerate(leaves) if x is None or not _is_trained(x)}
        trained = [None if i in self._fixed else x for i, x in enumerate(leaves)]
        self.tree: Any = structure.unflatten(trained)

    def pair(self, tx: optax.GradientTransformation) -> Any:
        """Returns the argument for `shard_train_state`."""
        return self.values(), tx

    def start(self, state: Any, plan: Plan) -> Components:
        """Stores the sharded parameters; returns the components of the state."""
        components = plan.kind.split(state)
        self.write(components.params)
        return components

    def values(self) -> Any:
        """Returns the current arrays."""
        return self.tree

    def write(self, new: Any) -> None:
        """Sets the arrays."""
        self.tree = new

    def result(self) -> Any:
        """Returns the result of `step`; arrays that are not floating-point are unchanged."""
        leaves, structure = jax.tree.flatten(self.tree, is_leaf=lambda x: x is None)
        return structure.unflatten([self._fixed.get(i, x) for i, x in enumerate(leaves)])

    def group_tree(self, values: Any, group: int) -> Any:
        """Returns one group's subtree of a tree with the structure of these values."""
        return values[group] if self._has_several else values

    def with_group(self, group: Mapping[str, Any]) -> Parameters:
        """Returns the parameters with another group."""
        trees = self.result() if self._has_several else [self.result()]
        return _of_trees([*trees, _tree_of(group)])

    @property
    def _has_several(self) -> bool:
        return len(set(self.labels)) > 1


class Variables(Parameters):
    """Variables of NNX that were passed without their model; they are set in place."""

    in_place = True

    def __init__(self, tree: Any, labels: Labels):
        self.tree: Any = tree
        self.labels: Labels = labels

    def values(self) -> Any:
        return jax.tree.map(lambda x: x.get_raw_value(), self.tree, is_leaf=_is_variable)

    def write(self, new: Any) -> None:
        for variable, x in zip(_leaves(self.tree), jax.tree.leaves(new), strict=True):
            variable.set_raw_value(x)

    def result(self) -> Any:
        return self.tree


class Model(Parameters):
    """Parameters of an NNX model, set in place."""

    in_place = True

    def __init__(self, model: nnx.Module, label_of: Mapping[int, int | None] | None = None):
        """`label_of` has the group of each Variable by id; without it all are in one group."""
        self.tree: nnx.Module = model
        self._wrt = nnx.Param
        if isinstance(model, Wrapped):
            self.accumulation: Accumulation | None = kept(model)
            self._wrt = self.accumulation.forward.wrt
            if not isinstance(model, DataParallel):
                raise GShardError(
                    "this model came from group_sharded_parallel, together with an optimizer whose "
                    "state is sharded already. Use that one, or wrap the model that it was made "
                    "from in gshard.pytorch.DistributedDataParallel."
                )
        self.labels: Labels = [0 if label_of is None else label_of.get(i) for i in self._ids()]

    def pair(self, tx: optax.GradientTransformation) -> Any:
        return self.tree, new_optimizer(self.tree, tx, self._wrt)

    def start(self, state: Any, plan: Plan) -> Components:
        nnx.update(self.tree, nnx.state(state[0]))
        if self.accumulation is not None:
            follow(self.tree, plan)
        return plan.kind.split(state)

    def values(self) -> Any:
        return nnx.as_pure(nnx.state(self.tree, self._wrt))

    def write(self, new: Any) -> None:
        nnx.update(self.tree, new)

    def result(self) -> Any:
        return self.tree

    def group_tree(self, values: Any, group: int) -> Any:
        if set(self.labels) == {group}:
            return values
        pairs = jax.tree_util.tree_leaves_with_path(values)
        own = {
            tuple(key.key for key in keys): x
            for (keys, x), label in zip(pairs, self.labels, strict=True)
            if label == group
        }
        return traverse_util.unflatten_dict(own)

    def with_group(self, group: Mapping[str, Any]) -> Parameters:
        label_of = dict(zip(self._ids(), self.labels, strict=True))
        added = [id(x) for x in _leaves(_tree_of(group))]
        if not added or not label_of.keys() >= set(added):
            raise GShardError(
                "add_param_group: these are not parameters of the optimizer's model. Pass "
                "Variables of it, or make another optimizer."
            )
        if any(label_of[i] is not None for i in added):
            raise GShardError(
                "add_param_group: a parameter is already in another group. Leave it out here."
            )
        if self.accumulation is not None and self.accumulation.holds:
            raise GShardError(
                "add_param_group: there are gradients of backward that no step has used. Call "
                "step() or zero_grad() before."
            )
        new = max(label for label in self.labels if label is not None) + 1
        return Model(self.tree, label_of | dict.fromkeys(added, new))

    def _ids(self) -> list[int]:
        return [id(x) for x in _leaves(nnx.state(self.tree, self._wrt))]


def parameters(params: Any) -> tuple[Parameters, list[dict[str, Any]]]:
    """Splits the `params` argument of an optimizer into parameters and groups' hyperparameters."""
    if isinstance(params, nnx.Module):
        if not isinstance(params, Wrapped) and any(keepers(_leaves(nnx.state(params, nnx.Param)))):
            return _of_trees([_tree_of({"params": params})]), [{}]
        model = Model(params)
        _checked(jax.tree.leaves(model.values()))
        return model, [{}]
    if isinstance(params, (str, bytes)) or _is_array(params) or not _is_container(params):
        raise ArgumentTypeError(f"params={shown(params)} are not parameters. {_HINT}")
    tree = _listed(params)
    if not isinstance(tree, list) or not any(_is_group(x) for x in tree):
        return _of_trees([tree]), [{}]
    for i, group in enumerate(tree):
        if not isinstance(group, Mapping):
            raise ArgumentTypeError(
                f"params[{i}] is {shown(group)}, but other entries are groups. {_HINT}"
            )
        if not _is_group(group):
            raise GShardError(f"params[{i}] is a group without 'params'. {_HINT}")
    return _of_trees([_tree_of(group) for group in tree]), [options_of(group) for group in tree]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters that a group of the user sets."""
    return {name: x for name, x in group.items() if name != "params"}


def _tree_of(group: Mapping[str, Any]) -> Any:
    """Returns the parameters of a group of the user."""
    found = group["params"]
    if isinstance(found, nnx.Module):
        return _leaves(nnx.state(found, nnx.Param))
    if _is_array(found) or _is_variable(found):
        return [found]
    if not _is_container(found):
        raise ArgumentTypeError(f"params={shown(found)} of a group are not parameters. {_HINT}")
    return _listed(found)


def _of_trees(trees: list[Any]) -> Parameters:
    """Returns the parameters of groups, given one tree for each."""
    leaves = [_leaves(tree) for tree in trees]
    every = _checked([x for group in leaves for x in group])
    for i, group in enumerate(leaves):
        if not any(map(_is_trained, group)):
            where = f"params[{i}]" if len(trees) > 1 else "params"
            raise GShardError(f"{where} has no floating-point array: there is nothing to optimize.")
    labels = [i for i, group in enumerate(leaves) for x in group if _is_trained(x)]
    tree = trees[0] if len(trees) == 1 else trees
    if not _is_variable(every[0]):
        return Parameters(nnx.as_pure(tree), labels)
    if len(labels) < len(every):
        raise GShardError("params has Variables of integers, which have no gradient.")
    keeps = set(keepers(every))
    if keeps == {None}:
        return Variables(tree, labels)
    keep = keeps.pop()
    if keep is None or keeps:
        raise GShardError(
            "params are not all from one wrapped model. Make one optimizer for each model."
        )
    return Model(keep.model, dict(zip(map(id, every), labels, strict=True)))


def _checked(leaves: list[Any]) -> list[Any]:
    if not leaves:
        raise GShardError(f"params are empty: there is nothing to optimize. {_HINT}")
    strange = [shown(x) for x in leaves if not (_is_variable(x) or _is_array(x))]
    if strange or len({_is_variable(x) for x in leaves}) > 1:
        what = some(strange) or "both arrays and Variables"
        raise ArgumentTypeError(f"params contains {what}. {_HINT}")
    if len({id(x) for x in leaves}) < len(leaves):
        raise GShardError(
            "params has the same leaf twice. Put each leaf into one group, once; tied parameters "
            "are one Variable, or one leaf of the tree."
        )
    return leaves


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_variable)


def _is_group(x: Any) -> bool:
    return isinstance(x, Mapping) and "params" in x


def _is_container(x: Any) -> bool:
    return isinstance(x, Iterable) or not jax.tree_util.all_leaves([x])


def _listed(x: Any) -> Any:
    """Returns an iterable that is not a tree, such as a generator, as a list."""
    return list(x) if isinstance(x, Iterable) and jax.tree_util.all_leaves([x]) else x


def _is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def _is_trained(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
