"""Parameter groups: an optax factory, and hyperparameters that may change between steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from numbers import Real
from typing import Any

import jax
import numpy as np
import optax

from gshard._util.errors import ArgumentTypeError, GShardError
from gshard._util.validation import shown
from gshard.pytorch.coupling import dependence
from gshard.pytorch.optax_names import in_optax

_ALIASES = {"lr": "learning_rate"}


class ParamGroup(MutableMapping[str, Any]):
    """The parameters and hyperparameters of one group, as in `torch.optim`.

    `group["lr"] = 1e-4` holds from the next step on, and nothing is compiled anew. Other numbers
    that the factory lets be traced are constants of the compiled step (XLA rounds as in the plain
    optimizer) until they change; then it is compiled once more. What cannot be traced is fixed, and
    says so.

    Attributes:
      name: of the factory.
      live: hyperparameters that may change, by the factory's own names.
      fixed: the others.
      tree: of the group's arrays, abstract.
      state: what its plain optimizer keeps for them, abstract.
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
        self.live = {  # a float may follow a whole number, and would be compiled anew
            name: numbers[name] if isinstance(known.get(name), int) else float(numbers[name])
            for name in traced
        }
        self.fixed = {name: x for name, x in every.items() if name not in self.live}
        self._traced = {*_ALIASES, *_ALIASES.values()} & set(self.live)

    def tx(self, values: Mapping[str, Any] | None = None) -> optax.GradientTransformationExtraArgs:
        """The group's optimizer, with the hyperparameters of now, of which some may be traced."""
        return self._make(**{**self.live, **(values or {})})

    def traced(self) -> dict[str, Any]:
        """What is an argument of the compiled step: the learning rate, and what has changed."""
        return {name: self.live[name] for name in sorted(self._traced)}

    def hyperparameters(self) -> dict[str, Any]:
        """All, by the factory's own names."""
        return {**self.fixed, **self.live}

    def saved(self) -> dict[str, Any]:
        """Those that are numbers or text."""
        every = self.hyperparameters()
        return {name: x for name, x in every.items() if isinstance(x, (bool, int, float, str))}

    def check(self, saved: Mapping[str, Any], where: str) -> None:
        """Refuses saved hyperparameters that this group cannot take.

        Raises:
          GShardError: names one.
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
        """Whether these can be traced, and the optimizer's state is the same then."""

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
        """The optimizer's state after an update, described."""
        tx = self._make()
        try:
            state = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p)[1], self.tree)
        except Exception as error:
            raise GShardError(
                f"{self.name} does not update these parameters from their gradients alone: {error}"
            ) from error
        return _described(state)


def factory_of(optimizer_class: Any) -> Callable[..., Any]:
    """The argument, or a `GShardError` that says what it should be."""
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
    """Arguments by name with their defaults, and whether the factory takes any others."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"optimizer_class={name}: {error}.") from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {p.name: p.default for p in named}, takes_any


def _named(given: Mapping[str, Any], known: Mapping[str, Any], takes_any: bool) -> dict[str, Any]:
    """The arguments by the factory's own names."""
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
    """A number as Python's: an array would bring its own dtype into the update."""
    if not _is_number(x):
        return x
    x = x.item() if hasattr(x, "item") else x
    return x if isinstance(x, int) else float(x)


def _equal(x: Any, y: Any) -> bool:
    """As a file gives it back."""
    return bool(np.all(x == y))


def _same(x: Any, y: Any) -> bool:
    return x is y or (type(x) is type(y) and bool(np.all(x == y)))
