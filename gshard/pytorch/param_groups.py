"""The parameters to optimize, in one or several groups, and the hyperparameters of each group."""

from __future__ import annotations

import inspect
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util

from gshard._util.errors import ArgumentTypeError, GShardError, did_you_mean, some
from gshard._util.validation import shown
from gshard.pytorch.coupling import dependence
from gshard.sharding.plan import Plan
from gshard.wrapped.accumulation import Accumulation
from gshard.wrapped.data_parallel import DataParallel
from gshard.wrapped.wrapped_model import Wrapped, follow, keepers, kept

_HINT = (
    "Pass an nnx.Module, a gshard.pytorch.DataParallel or its parameters(), a tree or an "
    "iterable of "
    "arrays, or a list of groups such as [{'params': ..., 'lr': 1e-3}]."
)


class Tree:
    """A tree of arrays, such as Linen's `params`; with several groups a list of trees."""

    accumulation: Accumulation | None = None

    def __init__(self, tree: Any, several: bool = False):
        """Stores the tree; `several` says that it is a list with one tree per group."""
        self._several = several
        leaves, structure = jax.tree.flatten(tree)
        self._fixed = {i: x for i, x in enumerate(leaves) if not is_trained(x)}
        self.tree = structure.unflatten([x if is_trained(x) else None for x in leaves])

    def pair(self, tx: optax.GradientTransformation) -> Any:
        """Returns the argument for `shard_train_state`."""
        return self.values(), tx

    def start(self, state: Any, plan: Plan) -> Any:
        """Takes over a sharded state; returns its components."""
        parts = plan.kind.split(state)
        self.write(parts.params)
        return parts

    def values(self) -> Any:
        """Returns the current arrays."""
        return self.tree

    def group_tree(self, values: Any, labels: Sequence[int | None], group: int) -> Any:
        """Returns one group's subtree of a tree with the structure of these values."""
        return values[group] if self._several else values

    def with_group(
        self, labels: Sequence[int | None], group: Mapping[str, Any]
    ) -> tuple[Tree, list[int | None]]:
        """Adds a group: returns a new target and its labels."""
        trees = self.result() if self._several else [self.result()]
        return _target([*trees, tree_of(group)])

    def write(self, new: Any) -> None:
        """Sets the arrays."""
        self.tree = new

    def result(self) -> Any:
        """Returns the result of `step`; arrays that are not floating-point are unchanged."""
        leaves, structure = jax.tree.flatten(self.tree, is_leaf=lambda x: x is None)
        return structure.unflatten([self._fixed.get(i, x) for i, x in enumerate(leaves)])


class Variables(Tree):
    """Variables of NNX that came without their model; they are set in place."""

    def __init__(self, tree: Any, several: bool = False):
        """Stores the tree; `several` says that it is a list with one tree per group."""
        self.tree, self._several = tree, several

    def result(self) -> Any:
        """Returns the result of `step`."""
        return self.tree

    def values(self) -> Any:
        """Returns the current arrays."""
        return jax.tree.map(lambda x: x.get_value(), self.tree, is_leaf=_is_variable)

    def write(self, new: Any) -> None:
        """Sets the arrays."""
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
                    "divided already. Use that, or wrap the model by gshard.pytorch.DataParallel."
                )

    def pair(self, tx: optax.GradientTransformation) -> Any:
        """Returns the argument for `shard_train_state`."""
        return self.tree, nnx.Optimizer(self.tree, tx, wrt=self._wrt)

    def result(self) -> Any:
        """Returns the result of `step`."""
        return self.tree

    def start(self, state: Any, plan: Plan) -> Any:
        """Takes over a sharded state; returns its components."""
        nnx.update(self.tree, nnx.state(state[0]))
        if self.accumulation is not None:
            follow(self.tree, plan)
        return plan.kind.split(state)

    def values(self) -> Any:
        """Returns the current arrays."""
        return nnx.as_pure(nnx.state(self.tree, self._wrt))

    def group_tree(self, values: Any, labels: Sequence[int | None], group: int) -> Any:
        """Returns one group's subtree of a tree with the structure of these values."""
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
        """Returns the same model, and the labels with the new group's."""
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
        """Sets the arrays."""
        nnx.update(self.tree, new)


def parameters(params: Any) -> tuple[Tree, list[int | None], list[dict[str, Any]]]:
    """Splits the `params` argument of an optimizer into arrays, labels and hyperparameters.

    Returns:
      The target with the arrays; the group of each leaf; the hyperparameters that each group sets.

    Raises:
      ArgumentTypeError: `params` is a bare array, has no parameters, or is a mixture.
      GShardError: there is nothing to optimize, or a parameter is given twice.
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
    """Returns the parameters of a group that the user gives."""
    found = group["params"]
    if isinstance(found, nnx.Module):
        return jax.tree.leaves(nnx.state(found, nnx.Param), is_leaf=_is_variable)
    if _is_array(found) or _is_variable(found):
        return [found]
    if not _is_container(found):
        raise ArgumentTypeError(f"params={shown(found)} of a group are no parameters. {_HINT}")
    return found if isinstance(found, (Mapping, list)) else _listed(found)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters that a group of the user sets."""
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


_ALIASES = {"lr": "learning_rate"}


class ParamGroup(MutableMapping[str, Any]):
    """The parameters and hyperparameters of one group, as in `torch.optim`.

    `group["lr"] = 1e-4` holds from the next step on, and nothing is recompiled. Other numbers
    that the factory lets be traced are constants of the compiled step (XLA rounds as in the plain
    optimizer) until they change; then it is compiled once more. What cannot be traced is fixed, and
    says so.

    Attributes:
      name: name of the factory.
      live: hyperparameters that may change, by the factory's own names.
      fixed: hyperparameters that may not change.
      tree: the abstract tree of the group's arrays.
      state: the abstract state that its plain optimizer keeps for them.
    """

    def __init__(
        self,
        factory: Callable[..., Any],
        defaults: Mapping[str, Any],
        own: Mapping[str, Any],
        tree: Any,
        params: Callable[[], list[Any]],
    ):
        """A group of a new optimizer.

        Args:
          factory: makes an optax transformation.
          defaults: its arguments, but for those that
          own: the group names itself.
          tree: of the group's arrays, abstract.
          params: returns them as they are now.
        """
        self._factory, self._params, self.tree = factory, params, tree
        self.name = getattr(factory, "__name__", repr(factory))
        known, takes_any = _defaults(factory, self.name)
        given = {**_named(defaults, known, takes_any), **_named(own, known, takes_any)}
        for name, value in given.items():
            if not takes_any and name not in known:
                raise ArgumentTypeError(
                    f"{self.name} has no hyperparameter {name!r}.{in_optax(name, value, known)} It "
                    f"takes {', '.join(known)}."
                )
        lacking = [name for name, value in known.items() if value is inspect.Parameter.empty]
        lacking = [name for name in lacking if name not in given]
        if lacking:
            raise ArgumentTypeError(
                f"{self.name} needs {', '.join(lacking)}. Pass it by name, such as lr=1e-3."
            )
        every = {name: _python(x) for name, x in {**known, **given}.items()}
        self.live, self.fixed = {}, every
        wanted = self._state_after()
        self.state = jax.eval_shape(self._make().init, tree)
        numbers = {name: x for name, x in every.items() if _is_number(x)}
        traced = list(numbers)
        if not self._traces(traced, every, wanted):
            traced = []
            for name in numbers:
                if self._traces([*traced, name], every, wanted):
                    traced.append(name)
        self.live = {  # a float may follow an integer, and would be compiled again
            name: numbers[name] if isinstance(known.get(name), int) else float(numbers[name])
            for name in traced
        }
        self.fixed = {name: x for name, x in every.items() if name not in self.live}
        self._traced = {*_ALIASES, *_ALIASES.values()} & set(self.live)

    def tx(self, values: Mapping[str, Any] | None = None) -> optax.GradientTransformationExtraArgs:
        """Returns the group's optimizer with its current hyperparameters; some may be traced."""
        return self._make(**{**self.live, **(values or {})})

    def traced(self) -> dict[str, Any]:
        """Returns the arguments of the compiled step: the learning rate, and what has changed."""
        return {name: self.live[name] for name in sorted(self._traced)}

    def hyperparameters(self) -> dict[str, Any]:
        """Returns all hyperparameters, by the factory's own names."""
        return {**self.fixed, **self.live}

    def saved(self) -> dict[str, Any]:
        """Returns the hyperparameters that are numbers or text."""
        every = self.hyperparameters()
        return {name: x for name, x in every.items() if isinstance(x, (bool, int, float, str))}

    def check(self, saved: Mapping[str, Any], where: str) -> None:
        """Refuses saved hyperparameters that this group cannot take.

        Raises:
          GShardError: a hyperparameter does not fit; the message names it.
        """
        for name, value in saved.items():
            if name in self.live and not _is_number(value):
                raise ArgumentTypeError(f"{where}: {name}={shown(value)} is not a number.")
            if name in self.saved() and name in self.fixed and not _equal(self.fixed[name], value):
                raise GShardError(
                    f"{where} has {name}={shown(value)}, and this optimizer was built with "
                    f"{shown(self.fixed[name])}. Build it alike. Nothing was changed."
                )

    def __getitem__(self, name: str) -> Any:
        if name == "params":
            return self._params()
        return self.hyperparameters()[self._own(name)]

    def __setitem__(self, name: str, value: Any) -> None:
        own = self._own(name)
        if own in self.live:
            if not _is_number(value):
                raise ArgumentTypeError(f"{name}={shown(value)} must be a number.")
            value = _python(value)
            value = float(value) if isinstance(self.live[own], float) else value
            if value != self.live[own]:
                self._traced.add(own)
            self.live[own] = value
        elif name == "params":
            raise GShardError("the parameters of a group are fixed. Use add_param_group.")
        elif own not in self.fixed:
            raise GShardError(
                f"{self.name} has no hyperparameter {name!r}.{in_optax(name, value, list(self))}"
            )
        elif not _same(self.fixed[own], value):
            raise GShardError(
                f"{name} of {self.name} is fixed: how the optimizer is built depends on it. Make a "
                f"new ZeroRedundancyOptimizer with {name}={shown(value)}, and load the state dict "
                "of this one where it fits."
            )

    def __delitem__(self, name: str) -> None:
        raise GShardError(f"{name!r} cannot be taken out of a parameter group.")

    def __iter__(self) -> Iterator[str]:
        return iter(["params", *self.hyperparameters()])

    def __len__(self) -> int:
        return 1 + len(self.live) + len(self.fixed)

    def __contains__(self, name: object) -> bool:
        return name == "params" or self._own(str(name)) in self.hyperparameters()

    def __repr__(self) -> str:
        own = ", ".join(f"{name}={shown(x)}" for name, x in self.hyperparameters().items())
        return f"ParamGroup({self.name}, {len(self._params())} parameters, {own})"

    def _own(self, name: str) -> str:
        own = _ALIASES.get(name, name)
        return own if own in self.live or own in self.fixed else name

    def _make(self, **values: Any) -> optax.GradientTransformationExtraArgs:
        made = self._factory(**{**self.fixed, **values})
        if not isinstance(made, optax.GradientTransformation):
            inner = hasattr(made, "gradient_transformation")
            raise ArgumentTypeError(
                f"optimizer_class={self.name} returned {shown(made)}, which is no optax "
                "transformation. "
                + (
                    "Return its .gradient_transformation()."
                    if inner
                    else "Pass a factory such as optax.adamw."
                )
            )
        return optax.with_extra_args_support(made)

    def _traces(self, names: list[str], every: dict[str, Any], wanted: Any) -> bool:
        """Whether these can be traced without a change of the optimizer's state."""

        def run(values: dict[str, Any], state: Any, params: Any) -> Any:
            return self._make(**values).update(params, state, params)

        values = {name: every[name] for name in names}
        try:
            closed, found = jax.make_jaxpr(run, return_shape=True)(values, self.state, self.tree)
        except Exception:  # whatever a factory does with what is no number yet
            return False
        rest = len(closed.jaxpr.invars) - len(names)
        inputs = [frozenset({i}) for i in range(len(names))] + [frozenset()] * rest
        # What an update does not read is in its state: optax.inject_hyperparams keeps it there.
        read = frozenset().union(*dependence(closed.jaxpr, inputs, []))
        return len(read) == len(names) and _described(found[1]) == wanted

    def _state_after(self) -> Any:
        """Returns the abstract state of the optimizer after an update."""
        tx = self._make()
        try:
            state = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p)[1], self.tree)
        except Exception as error:
            raise GShardError(
                f"{self.name} does not update these parameters from their gradients alone: {error}"
            ) from error
        return _described(state)


def factory_of(optimizer_class: Any) -> Callable[..., Any]:
    """Returns the argument, or raises a `GShardError` that says what it should be."""
    if isinstance(optimizer_class, optax.GradientTransformation):
        raise ArgumentTypeError(
            "optimizer_class is an optax transformation already. Pass the factory, and its "
            "arguments by name: ZeroRedundancyOptimizer(params, optax.adamw, lr=1e-3)."
        )
    if not callable(optimizer_class):
        raise ArgumentTypeError(
            f"optimizer_class={shown(optimizer_class)} is no optax factory. Pass optax.adamw or "
            "another function that returns an optax transformation."
        )
    return optimizer_class


def _defaults(factory: Callable[..., Any], name: str) -> tuple[dict[str, Any], bool]:
    """Returns arguments with their defaults by name, and whether the factory takes any others."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"optimizer_class={name}: {error}.") from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {p.name: p.default for p in named}, takes_any


def _named(given: Mapping[str, Any], known: Mapping[str, Any], takes_any: bool) -> dict[str, Any]:
    """Returns the arguments by the factory's own names."""
    found = dict(given)
    for alias, name in _ALIASES.items():
        if alias in found and alias not in known and (takes_any or name in known):
            if name in found:
                raise GShardError(f"{alias}= and {name}= are the same hyperparameter. Pass one.")
            found[name] = found.pop(alias)
    return found


def _described(state: Any) -> Any:
    leaves, structure = jax.tree.flatten(state)
    return structure, [(x.shape, x.dtype) for x in leaves]


def _is_number(x: Any) -> bool:
    if isinstance(x, (bool, np.bool_)):
        return False
    return isinstance(x, (Real, np.number)) or (
        isinstance(x, (np.ndarray, jax.Array)) and x.shape == () and x.dtype != bool
    )


def _python(x: Any) -> Any:
    """Returns a scalar as a Python number: an array would bring its dtype into the update."""
    if not _is_number(x):
        return x
    x = x.item() if hasattr(x, "item") else x
    return x if isinstance(x, int) else float(x)


def _equal(x: Any, y: Any) -> bool:
    """Whether two values are equal; one may be of the type that a file gives it."""
    return bool(np.all(x == y))


def _same(x: Any, y: Any) -> bool:
    return x is y or (type(x) is type(y) and bool(np.all(x == y)))


Labels = Sequence[int | None]  # the group of every leaf; None: not optimized
_NONE = "none"


def grouped(groups: Sequence[ParamGroup], labels: Labels) -> optax.GradientTransformationExtraArgs:
    """Combines the groups' optimizers into one for a tree whose leaves have these labels.

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
    """Whether the state is that of a single optimizer for all leaves."""
    return len(groups) == 1 and None not in labels


def group_states(state: Any, groups: Sequence[ParamGroup], labels: Labels) -> list[Any]:
    """Returns the state of each group's optimizer, taken from that of `grouped`."""
    if is_plain(groups, labels):
        return [state]
    return [state.inner_states[str(i)].inner_state for i in range(len(groups))]


# What optax calls the hyperparameters of PyTorch's and Paddle's optimizers.
_OPTAX_NAMES = {
    "betas": ("b1", "b2"),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "epsilon": ("eps",),
    "alpha": ("decay",),
    "rho": ("decay",),
    "use_nesterov": ("nesterov",),
}
_ADVICE = {
    "weight_decay": "Use optax.adamw, or for an L2 penalty a function that returns optax.chain("
    "optax.add_decayed_weights(...), ...).",
    "momentum": "Use optax.sgd or optax.rmsprop, which have it.",
    "amsgrad": "Use optax.amsgrad.",
    "maximize": "Minimize the negative of the loss.",
    "grad_clip": "Pass a function that returns optax.chain(optax.clip_by_global_norm(...), ...).",
    "parameters": "Pass the parameters as the first argument, params.",
    **dict.fromkeys(
        ("foreach", "fused", "capturable", "differentiable"), "Leave it out: XLA fuses the update."
    ),
}


def in_optax(name: str, value: Any, known: Collection[str]) -> str:
    """Says what to pass in place of an unknown hyperparameter; empty where nothing is known.

    Args:
      name: the unknown hyperparameter, such as `betas`.
      value: its value.
      known: the hyperparameters that the optax factory takes.
    """
    names = _OPTAX_NAMES.get(name, ())
    if not names or not set(names) <= set(known):
        return f" {_ADVICE[name]}" if name in _ADVICE else did_you_mean(name, known)
    values = value if len(names) > 1 else (value,)
    text = " and ".join(names)
    if isinstance(values, (tuple, list)) and len(values) == len(names):
        text = ", ".join(f"{n}={shown(x)}" for n, x in zip(names, values, strict=True))
    return f" optax calls it {' and '.join(names)}: pass {text}."
