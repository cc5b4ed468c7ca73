"""What is to be trained, without arrays, and with which options: `TrainSetup`, `Choices`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.tracebacks import at_line
from gshard._util.validation import MOST, check_integer_field, flag, shown
from gshard.analysis.allowed_imports import ModelOfFile, find_modules_here
from gshard.sharding.level import check_accumulate, parse_level
from gshard.sharding.plan import Plan
from gshard.sharding.topology import EXPERT
from gshard.train.shard_train_state import shard_train_state
from gshard.train.train_step import TrainStep, make_train_step
from gshard.train_state import abstract, abstract_like, as_state, is_init, kind_of


@dataclass(frozen=True)
class TrainSetup:
    """A model, optimizer, loss and batch, described without arrays: the input of `forecast`.

    Attributes:
      state: a train state as `shard_train_state` takes it: an init function without arguments, or
        a state, concrete or abstract.
      loss_fn: the loss as `make_train_step` takes it; None if only the state matters.
      batch: a tree of arrays, concrete or abstract, with at least one example: the size of
        dimension 0 is replaced by the number of examples in a step. None without a loss.
      shard: further arguments of `shard_train_state`, such as `scan_axes` and `precision`.
      step: further arguments of `make_train_step`, such as `rng`, `mutable` and `has_aux`.

    Raises:
      GShardError: `shard` or `step` is not a mapping, or names an argument that the function does
        not have or that something else gives.

    Example:
      >>> setup = gshard.TrainSetup(
      ...     state=lambda: (params, tx),
      ...     loss_fn=loss_fn,
      ...     batch={
      ...         "x": jax.ShapeDtypeStruct((1, 64), jnp.float32),
      ...         "y": jax.ShapeDtypeStruct((1, 32), jnp.float32),
      ...     },
      ...     shard={"min_shard_size": 0},
      ... )
      >>> gshard.forecast(setup, devices=16).devices
      16
    """

    state: Any
    loss_fn: Callable[..., Any] | None = None
    batch: Any = None
    shard: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_further("shard", self.shard, shard_train_state)
        _check_further("step", self.step, make_train_step)


# Arguments that shard= and step= do not take, and what gives them instead.
_GIVEN_BY = dict.fromkeys(
    ("micro_batches", "accumulate", "reshard_after_forward", "offload", "level"),
    "CONFIG or an argument of gshard.forecast gives it",
) | {
    "mesh": "the number of devices gives it",
    "plan": "gshard makes one for every level",
    "state": "it is state= of gshard.TrainSetup",
    "loss_fn": "it is loss_fn= of gshard.TrainSetup",
    "init_args": "state= is called without arguments; bind them with functools.partial",
}


def _check_further(name: str, given: Any, of: Callable[..., Any]) -> None:
    """Checks that the function `of` takes these further arguments, and nothing else gives them."""
    if not isinstance(given, Mapping):
        raise GShardError(
            f"{name}= of gshard.TrainSetup is {shown(given)}; give further arguments of "
            f"{of.__name__} by name, such as {{}}."
        )
    parameters = inspect.signature(of).parameters
    known = [x for x in parameters if x not in _GIVEN_BY]
    for key in given:
        if key not in known:
            why = (
                f": {_GIVEN_BY[key]}."
                if key in parameters
                else f".{did_you_mean(key, known)} It takes {', '.join(known)}."
            )
            raise GShardError(f"{name}= of gshard.TrainSetup has no {key!r}{why}")


def sharded_setup(
    setup: TrainSetup, mesh: Mesh | AbstractMesh, level: str, choices: Choices
) -> tuple[Any, Plan]:
    """The abstract state of a setup, sharded over a mesh, and its plan."""
    return initialized_setup(without_arrays(setup), mesh, level, choices)


def initialized_setup(
    setup: TrainSetup, mesh: Mesh | AbstractMesh, level: str, choices: Choices
) -> tuple[Any, Plan]:
    """The state of a setup, initialized and sharded over a mesh, and its plan."""
    arguments = {**setup.shard, **choices.of_state}
    return shard_train_state(setup.state, mesh, parse_level(level), **arguments)


def step_of(setup: TrainSetup, plan: Plan, choices: Choices) -> TrainStep:
    """The train step of a setup, which must have a loss and a batch."""
    if setup.loss_fn is None or setup.batch is None:
        raise GShardError(
            "this setup has no loss_fn= or no batch=, so it has no step. Give both to "
            "gshard.TrainSetup."
        )
    return make_train_step(setup.loss_fn, plan, **choices.of_step, **setup.step)


def batch_of(setup: TrainSetup, plan: Plan, choices: Choices) -> Any:
    """The abstract global batch of one step, sharded over the data axes."""
    if not jax.tree.leaves(setup.batch):
        raise GShardError(
            "batch= of gshard.TrainSetup has no arrays. Give the batch that loss_fn takes, with at "
            "least one example."
        )
    examples = plan.group.batch_shards * choices.micro_batch_size * choices.micro_batches

    def with_examples(x: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if shape is None or dtype is None:
            raise GShardError(
                f"batch= of gshard.TrainSetup has {shown(x)}; give arrays of at least one example, "
                "such as jax.ShapeDtypeStruct((1, 2048), jnp.int32)."
            )
        if not shape:  # a scalar, such as a random key, is one value of the whole batch
            return jax.ShapeDtypeStruct((), dtype)
        if examples * math.prod(shape[1:]) >= 2**63:
            raise GShardError(
                f"{examples:,} examples of {shown(list(shape[1:]))} are too many for one array. "
                "Give fewer devices, micro_batches= or micro_batch_size=."
            )
        return jax.ShapeDtypeStruct((examples, *shape[1:]), dtype)

    batch = jax.tree.map(with_examples, setup.batch)
    shardings = jax.tree.map(partial(NamedSharding, plan.mesh), plan.batch_specs(batch))
    return jax.tree.map(lambda x, s: x.update(sharding=s), batch, shardings)


def batch_bytes(setup: TrainSetup, plan: Plan, choices: Choices) -> int:
    """Bytes of the batch on one device; 0 without a batch."""
    if setup.batch is None:
        return 0
    leaves = jax.tree.leaves(batch_of(setup, plan, choices))
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def module_at(path: str) -> str:
    """The module that a file is in the current folder; empty if it is in another one."""
    parts = Path(os.path.relpath(path)).with_suffix("").parts
    return "" if ".." in parts else ".".join(parts)


def load_setup(name: str, arguments: Mapping[str, Any] | None = None) -> TrainSetup:
    """Calls a function that returns a `TrainSetup`, or a state as `shard_train_state` takes it.

    `name` is `module:function`; the module may be in the current folder. `arguments` are passed by
    name.
    """
    where, _, attribute = name.partition(":")
    if not (where and attribute):
        raise GShardError(
            f"model={shown(name)} must be 'module:function', such as 'gshard.models.llama:setup'."
        )
    by_name = isinstance(arguments, Mapping | None)
    if not by_name or not all(isinstance(key, str) for key in arguments or ()):
        raise GShardError(
            f"arguments={shown(arguments)} must be values by name, such as {{'layers': 4}}."
        )
    find_modules_here()
    try:
        module = importlib.import_module(where)
    except GShardError as error:
        raise GShardError(f"model={name!r}: {error}") from error
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        module = module_at(where) if "/" in where or where.endswith(".py") else ""
        hint = f" Did you mean '{module}:{attribute}'?" if module else ""
        raise GShardError(
            f"model={name!r} cannot be imported: {said}.{hint} Modules are looked for in the "
            f"current folder ({os.getcwd()}), in PYTHONPATH and in installed packages."
            if isinstance(error, ImportError) or where.startswith(".")
            else f"model={name!r}: its module fails on import: {said}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise GShardError(
            f"model={name!r}: {where} has no function {attribute!r}."
            f"{did_you_mean(attribute, functions)}"
        )
    if isinstance(name, ModelOfFile):
        name.check(function)
    _check_arguments(name, function, arguments or {})
    try:
        return as_setup(function(**(arguments or {})))
    except GShardError as error:
        raise GShardError(f"{name}: {error}") from error
    except Exception as error:
        given = ", ".join(f"{k}={v!r}" for k, v in (arguments or {}).items())
        said = f"{name}({given}) fails{at_line(error)}: {type(error).__name__}: {error}"
        raise GShardError(said) from error


def _check_arguments(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuses arguments of the model that its function does not have."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # it has no signature
        return
    if any(x.kind is x.VAR_KEYWORD for x in parameters.values()):
        return
    for key in given:
        if key not in parameters:
            takes = f"It takes {', '.join(parameters)}." if parameters else "It takes none."
            raise GShardError(
                f"{name} has no argument {key!r}.{did_you_mean(key, parameters)} {takes}"
            )


def as_setup(given: Any) -> TrainSetup:
    """Returns a setup as it is, and a state or init function as a setup without a loss."""
    return given if isinstance(given, TrainSetup) else TrainSetup(given)


def _made(init: Callable[[], Any]) -> Any:
    made = init()
    if isinstance(made, TrainSetup):
        raise GShardError(
            "this function returns a TrainSetup, not a train state. Pass its result: setup() in "
            "place of setup."
        )
    return made


def without_arrays(setup: TrainSetup) -> TrainSetup:
    """The same setup with an abstract state: an init function is traced once, for all plans."""
    if is_init(setup.state):
        try:
            return dataclasses.replace(setup, state=abstract(partial(_made, setup.state)))
        except GShardError:
            raise
        except Exception as error:
            first = "".join(str(error).strip().splitlines()[:1])
            raise GShardError(
                f"the init function of this setup fails{at_line(error)}: "
                f"{type(error).__name__}: {first}"
            ) from error
    state = as_state(setup.state)
    kind_of(state)  # or it raises
    return dataclasses.replace(setup, state=abstract_like(state))


@dataclass(frozen=True)
class Choices:
    """Options of a run, as in `make_train_step` and `shard_train_state`.

    `micro_batch_size` is the number of examples of one micro-batch on one device. Without `keep`
    that of the setup counts.
    """

    micro_batch_size: int = 1
    micro_batches: int = 1
    accumulate: str = "level"
    reshard_after_forward: bool | int = True
    offload: bool = False
    keep: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def of_state(self) -> dict[str, Any]:
        """The options that `shard_train_state` takes, by name; not those that are off."""
        return {name: x for name in ("offload", "keep") if (x := getattr(self, name))}

    def examples(self, sharing: int = 1) -> str:
        """Readable examples of a step, on one device or on `sharing` that share sequences."""
        return f"{self.micro_batches} x {self.micro_batch_size} examples {on_each(sharing)}"

    @property
    def of_step(self) -> dict[str, Any]:
        """The options that `make_train_step` and `budget` take, by name."""
        names = ("micro_batches", "accumulate", "reshard_after_forward")
        return {name: getattr(self, name) for name in names}

    def __post_init__(self) -> None:
        check_integer_field(self, "micro_batch_size", 1, " of examples", most=MOST)
        check_integer_field(self, "micro_batches", 1, most=MOST)
        check_accumulate(self.accumulate)
        if not isinstance(self.reshard_after_forward, (bool, np.bool_)):
            devices = " of devices of a sub-group (or True or False)"
            check_integer_field(self, "reshard_after_forward", 1, devices)
        flag("offload", self.offload)
        if not isinstance(self.keep, Mapping):
            raise GShardError(
                f"keep={shown(self.keep)} must map path patterns to a shard axis and a dimension, "
                "such as {'experts/': ('expert', 0)}; in a config file it is a table [keep] with "
                "lines such as 'experts/' = ['expert', 0]."
            )


def on_each(sharing: int) -> str:
    """Readable place of examples, of which `sharing` devices share each sequence."""
    return "on each device" if sharing == 1 else f"on every {sharing} devices that share sequences"


def check_kept_axis(expert: int, choices: Choices) -> None:
    """Checks that there is an expert axis if parameters are kept on it."""
    pairs = {text: x for text, x in choices.keep.items() if isinstance(x, list | tuple)}
    on_it = [text for text, x in pairs.items() if EXPERT in x[:1]]
    if on_it and expert == 1:
        raise GShardError(
            f"keep: {on_it[0]!r} names the axis {EXPERT!r}, and there is none with expert=1. Give "
            "the number of devices that share the experts, such as expert=8, or leave keep out."
        )
