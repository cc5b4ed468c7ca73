"""`ParamGroup`: the hyperparameters of one group of parameters, as in `torch.optim`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gshard._util.errors import (
    ArgumentTypeError,
    GShardError,
    did_you_mean,
    some,
    warn,
    without_partial,
)
from gshard._util.validation import flag, shown
from gshard.pytorch.coupling import dependence

_RATE = "learning_rate"  # PyTorch's `lr`
_MAXIMIZE = "maximize"  # an option of PyTorch's optimizers, which optax's lack


class ParamGroup(MutableMapping[str, Any]):
    """The parameters and hyperparameters of one group, as in `torch.optim`.

    `group["lr"] = 1e-4` is used from the next step on, and nothing is recompiled. Other numbers
    that can be traced are constants of the compiled step (XLA rounds as in the plain optimizer)
    until they change; then it is compiled once more. Other hyperparameters are fixed.

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
        """`own` arguments of the optax factory replace its `defaults`; `params` returns arrays."""
        self._factory, self._params = factory, params
        self.tree: Any = tree
        # Without an address, since processes compare it.
        function = without_partial(factory)
        self.name: str = getattr(function, "__name__", type(function).__name__)
        known, takes_any = _signature(factory, self.name)
        given = {k: x for of in (defaults, own) for k, x in _renamed(of, known, takes_any).items()}
        self._own = {_MAXIMIZE} - set(known)  # what the factory is not given
        for name in self._own & set(given):
            flag(name, given[name])
        for name, value in given.items():
            if not takes_any and name not in {*known, *self._own}:
                advice = _in_optax(name, value, known)
                raise ArgumentTypeError(
                    f"{self.name} has no hyperparameter {name!r}.{advice} It takes "
                    f"{', '.join(known)}."
                )
        every = known | given
        lacking = [name for name, value in every.items() if value is inspect.Parameter.empty]
        if lacking:
            raise ArgumentTypeError(
                f"{self.name} needs {', '.join(lacking)}. Pass it by name, such as lr=1e-3."
            )
        lr = every.get(_RATE)
        # Without a rate optax does not negate the update: the loss would rise.
        if isinstance(lr, (str, bool)) or (lr is None and known.get(_RATE) is not None):
            raise ArgumentTypeError(f"lr={lr!r} must be a number or an optax schedule.")
        every = {name: _python(x) for name, x in every.items()}
        for rate in {"lr", _RATE} & {name for name, x in every.items() if _is_number(x)}:
            _check_rate("lr", every[rate])
        self.live = {}
        self.fixed: dict[str, Any] = every
        tx = self._make()
        try:
            self.state: Any = jax.eval_shape(tx.init, tree)
            _, wanted = self._trace({})
        except Exception as error:
            raise GShardError(
                f"{self.name} does not update these parameters from their gradients alone: {error}"
            ) from error
        numbers = {name: x for name, x in every.items() if _is_number(x)}
        traced = numbers
        if not self._can_trace(numbers, wanted):
            traced = {}
            for name, x in numbers.items():
                if self._can_trace(traced | {name: x}, wanted):
                    traced[name] = x
        self.live: dict[str, Any] = {  # a float that replaces an integer would need a compilation
            name: x if isinstance(known.get(name), int) else float(x) for name, x in traced.items()
        }
        self.fixed = {name: x for name, x in every.items() if name not in self.live}
        self._traced = {"lr", _RATE} & set(self.live)

    def tx(self, values: Mapping[str, Any] | None = None) -> optax.GradientTransformationExtraArgs:
        """Returns the group's optimizer with its current hyperparameters; some may be traced."""
        return self._make(**self.live | dict(values or {}))

    def traced(self) -> dict[str, Any]:
        """Returns the arguments of the compiled step: the learning rate, and what has changed."""
        return {name: self.live[name] for name in sorted(self._traced)}

    def saved(self) -> dict[str, Any]:
        """Returns the hyperparameters that are numbers or text."""
        every = self.fixed | self.live
        return {name: x for name, x in every.items() if isinstance(x, (bool, int, float, str))}

    def check(self, saved: Mapping[str, Any], where: str) -> None:
        """Refuses saved hyperparameters that do not fit this group."""
        named = self._spelled(saved)
        if strange := set(named) - {*self.fixed, *self.live}:
            warn(
                f"{where} has {some(sorted(map(str, strange)))}, which {self.name} does not take, "
                f"and which are ignored. It takes {some([*self.live, *self.fixed], 9)}."
            )
        for name, value in named.items():
            if name in self.live and not _is_number(value):
                raise ArgumentTypeError(f"{where}: {name}={shown(value)} is not a number.")
            if name in self.live and name in ("lr", _RATE):
                _check_rate(f"{where}: {name}", value)
            # A file may change the type of a value.
            if name in self.saved().keys() & self.fixed and not np.all(self.fixed[name] == value):
                raise GShardError(
                    f"{where} has {name}={shown(value)}, but this optimizer was built with "
                    f"{name}={shown(self.fixed[name])}. Build it with the same value. Nothing was "
                    "changed."
                )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Sets those saved hyperparameters that may change."""
        self.update({k: x for k, x in self._spelled(saved).items() if k in self.live})

    def _spelled(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Saved hyperparameters by the factory's names; an `lr` among them was added later."""
        named = {name: x for name, x in saved.items() if name != "params"}
        if _RATE in named and "lr" in self.live:  # a factory with PyTorch's name
            named = {"lr": named.pop(_RATE)} | named
        lr = {self._known("lr"): named.pop("lr")} if "lr" in named else {}
        return named | lr

    def __getitem__(self, name: str) -> Any:
        return self._params() if name == "params" else (self.fixed | self.live)[self._known(name)]

    def __setitem__(self, name: str, value: Any) -> None:
        own = self._known(name)
        if own in self.live:
            if not _is_number(value):
                raise ArgumentTypeError(f"{name}={shown(value)} must be a number.")
            value = _python(value)
            if own in ("lr", _RATE):
                _check_rate(name, value)
            value = float(value) if isinstance(self.live[own], float) else value
            if value != self.live[own]:
                self._traced.add(own)
            self.live[own] = value
        elif name == "params":
            raise GShardError("the parameters of a group are fixed. Use add_param_group.")
        elif own not in self.fixed:
            raise GShardError(
                f"{self.name} has no hyperparameter {name!r}.{_in_optax(name, value, list(self))}"
            )
        elif type(value) is not type(self.fixed[own]) or not np.all(value == self.fixed[own]):
            new = shown(value)
            if callable(self.fixed[own]) and _is_number(value):  # whose state has a count too
                new = f"optax.constant_schedule({new})"
            raise GShardError(
                f"{name} of {self.name} is fixed: {_why_fixed(self.fixed[own])}. Make a "
                f"new ZeroRedundancyOptimizer with {name}={new}, and load the state dict of this "
                "one where it fits."
            )

    def __delitem__(self, name: str) -> None:
        raise GShardError(f"{name!r} cannot be removed from a parameter group.")

    def __iter__(self) -> Iterator[str]:
        return iter(["params", *self.fixed, *self.live])

    def __len__(self) -> int:
        return 1 + len(self.live) + len(self.fixed)

    def __repr__(self) -> str:
        own = ", ".join(f"{name}={shown(x)}" for name, x in (self.fixed | self.live).items())
        return f"ParamGroup({self.name}, {len(self._params())} parameters, {own})"

    def _known(self, name: str) -> str:
        return _RATE if name == "lr" and _RATE in self.fixed | self.live else name

    def _make(self, **values: Any) -> optax.GradientTransformationExtraArgs:
        every = self.fixed | values
        made = self._factory(**{name: x for name, x in every.items() if name not in self._own})
        if isinstance(made, optax.GradientTransformation):
            made = optax.with_extra_args_support(made)
            maximizes = _MAXIMIZE in self._own and every.get(_MAXIMIZE)
            return _of_negative(made) if maximizes else made
        fix = "Pass a factory such as optax.adamw."
        if hasattr(made, "gradient_transformation"):
            fix = "Return its .gradient_transformation()."
        raise ArgumentTypeError(
            f"optimizer_class={self.name} returned {shown(made)}, which is not an optax "
            f"transformation. {fix}"
        )

    def _trace(self, values: dict[str, Any]) -> tuple[Any, Any]:
        """Returns the traced update, and the structure and the shapes of the state after it."""

        def update(values: dict[str, Any], state: Any, params: Any) -> Any:
            return self._make(**values).update(params, state, params)

        closed, out = jax.make_jaxpr(update, return_shape=True)(values, self.state, self.tree)
        leaves, structure = jax.tree.flatten(out[1])
        return closed.jaxpr, (structure, [(x.shape, x.dtype) for x in leaves])

    def _can_trace(self, values: dict[str, Any], wanted: Any) -> bool:
        """Whether an update reads all these values, and its state has the shapes that it had."""
        try:
            jaxpr, state = self._trace(values)
        except Exception:  # a factory may raise anything for a tracer
            return False
        inputs = [frozenset({i} if i < len(values) else ()) for i in range(len(jaxpr.invars))]
        # What an update does not read is in its state: optax.inject_hyperparams keeps it there.
        read = frozenset().union(*dependence(jaxpr, inputs, []))
        return len(read) == len(values) and state == wanted


def _of_negative(
    tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer with the same state for the negative gradients."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        return tx.update(jax.tree.map(jnp.negative, updates), state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def _signature(factory: Any, name: str) -> tuple[dict[str, Any], bool]:
    """Returns arguments with their defaults by name, and whether the factory takes any others."""
    if isinstance(factory, optax.GradientTransformation):
        raise ArgumentTypeError(
            "optimizer_class is an optax transformation already. Pass the factory, and its "
            "arguments by name: ZeroRedundancyOptimizer(params, optax.adamw, lr=1e-3)."
        )
    if not callable(factory):
        raise ArgumentTypeError(
            f"optimizer_class={shown(factory)} is not an optax factory. Pass optax.adamw or "
            "another function that returns an optax transformation."
        )
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"optimizer_class={name}: {error}.") from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return {p.name: p.default for p in named}, takes_any


def _renamed(given: Mapping[str, Any], known: Mapping[str, Any], takes_any: bool) -> dict[str, Any]:
    """Returns arguments by the factory's own names."""
    if "lr" not in given or "lr" in known or not (takes_any or _RATE in known):
        return dict(given)
    if _RATE in given:
        raise GShardError(f"lr= and {_RATE}= are the same hyperparameter. Pass one.")
    return {_RATE if name == "lr" else name: x for name, x in given.items()}


def _check_rate(name: str, value: Any) -> None:
    if not 0 <= value < math.inf:  # NaN too
        raise GShardError(f"{name}={shown(value)} must be a number >= 0.")


def _is_number(x: Any) -> bool:
    if isinstance(x, (np.ndarray, jax.Array)):
        return x.shape == () and x.dtype != bool
    return isinstance(x, Real) and not isinstance(x, bool)


def _python(x: Any) -> Any:
    """Returns a scalar as a Python number: an array would bring its dtype into the update."""
    if not _is_number(x):
        return x
    x = x.item() if hasattr(x, "item") else x
    return x if isinstance(x, int) else float(x)


def _why_fixed(value: Any) -> str:
    if callable(value):
        return "it is a schedule, which counts the steps itself"
    return "how the optimizer is built depends on it"


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
    "grad_clip": "Pass a function that returns optax.chain(optax.clip_by_global_norm(...), ...).",
    "parameters": "Pass the parameters as the first argument, params.",
    **dict.fromkeys(
        ("foreach", "fused", "capturable", "differentiable"), "Leave it out: XLA fuses the update."
    ),
}


def _in_optax(name: str, value: Any, known: Collection[str]) -> str:
    """Says what to pass in place of an unknown hyperparameter; empty where nothing is known."""
    names = _OPTAX_NAMES.get(name, ())
    if not names or not set(names) <= set(known):
        return f" {_ADVICE[name]}" if name in _ADVICE else did_you_mean(name, known)
    values = value if len(names) > 1 else (value,)
    text = given = " and ".join(names)
    if isinstance(values, (tuple, list)) and len(values) == len(names):
        given = ", ".join(f"{n}={shown(x)}" for n, x in zip(names, values, strict=True))
    return f" optax calls it {text}: pass {given}."
