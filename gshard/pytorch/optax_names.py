"""What optax calls the hyperparameters of PyTorch's and Paddle's optimizers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gshard._util.errors import did_you_mean
from gshard._util.validation import shown

_NAMES = {
    "betas": ("b1", "b2"),
    "beta1": ("b1",),
    "beta2": ("b2",),
    "epsilon": ("eps",),
    "alpha": ("decay",),
    "rho": ("decay",),
    "use_nesterov": ("nesterov",),
}
_INSTEAD = {
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
    """A sentence that says what to pass in place of an unknown hyperparameter, or nothing.

    Args:
      name: of the hyperparameter.
      value: that was given for it.
      known: the hyperparameters that the factory takes.
    """
    names = _NAMES.get(name, ())
    if not names or not set(names) <= set(known):
        return f" {_INSTEAD[name]}" if name in _INSTEAD else did_you_mean(name, known)
    values = value if len(names) > 1 else (value,)
    text = " and ".join(names)
    if isinstance(values, (tuple, list)) and len(values) == len(names):
        text = ", ".join(f"{n}={shown(x)}" for n, x in zip(names, values, strict=True))
    return f" optax calls it {' and '.join(names)}: pass {text}."
