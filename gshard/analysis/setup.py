"""`Setup`: what is to be trained, without arrays; and the program of one step of it."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import MOST, check_integer, flag, shown
from gshard.sharding.level import check_accumulate
from gshard.sharding.plan import Plan
from gshard.train.shard_train_state import shard_train_state
from gshard.train.train_step import TrainStep, make_train_step
from gshard.train_state import abstract, abstract_like, as_state, is_init, kind_of


@dataclass(frozen=True)
class TrainSetup:
    """What is to be trained, without arrays.

    Attributes:
      state: what `shard_train_state` takes: an init function without arguments, or a state,
        concrete or abstract.
      loss_fn: what `make_train_step` takes; None where only the state matters.
      batch: a tree of arrays, concrete or abstract, of one row or more: dimension 0 is replaced by
        the number of rows. None without a loss.
      shard: further arguments of `shard_train_state`, such as `scan_axes` and `precision`.
      step: further arguments of `make_train_step`, such as `rng`, `mutable` and `has_aux`.
    """

    state: Any
    loss_fn: Callable[..., Any] | None = None
    batch: Any = None
    shard: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_further("shard", self.shard, shard_train_state)
        _check_further("step", self.step, make_train_step)


# What neither of both takes here, and what says it.
_SAID_BY = dict.fromkeys(
    ("micro_batches", "accumulate", "reshard_after_forward", "offload", "level"),
    "CONFIG says it, or an argument of gshard.forecast",
) | {
    "mesh": "the number of devices says it",
    "plan": "it is made for every level",
    "state": "it is state= of gshard.TrainSetup",
    "loss_fn": "it is loss_fn= of gshard.TrainSetup",
    "init_args": "state= takes no arguments; functools.partial gives them",
}


def _check_further(name: str, given: Any, of: Callable[..., Any]) -> None:
    """Refuses further arguments that the function `of` does not take, or that are said elsewhere.

    Raises:
      GShardError: for such a one.
    """
    if not isinstance(given, Mapping):
        raise GShardError(
            f"{name}= of gshard.TrainSetup is {shown(given)}; give further arguments of "
            f"{of.__name__} by name, such as {{}}."
        )
    taken = inspect.signature(of).parameters
    known = [x for x in taken if x not in _SAID_BY]
    for key in given:
        if key in taken and key in _SAID_BY:
            raise GShardError(f"{name}= of gshard.TrainSetup has no {key!r}: {_SAID_BY[key]}.")
        if key not in known:
            raise GShardError(
                f"{name}= of gshard.TrainSetup has no {key!r}.{did_you_mean(key, known)} "
                f"It takes {', '.join(known)}."
            )


def sharded_setup(
    setup: TrainSetup, mesh: Mesh | AbstractMesh, level: str, choices: Choices
) -> tuple[Any, Plan]:
    """The state of a setup divided over a mesh, abstract, and its plan. Nothing is initialised."""
    return initialised(without_arrays(setup), mesh, level, choices)


def initialised(
    setup: TrainSetup, mesh: Mesh | AbstractMesh, level: str, choices: Choices
) -> tuple[Any, Plan]:
    """The same with arrays, where the setup makes or holds them and the mesh has devices."""
    arguments = {**setup.shard, **({"offload": True} if choices.offload else {})}
    return shard_train_state(setup.state, mesh, level, **arguments)


def step_of(setup: TrainSetup, plan: Plan, choices: Choices) -> TrainStep:
    """The train step of a setup.

    Raises:
      GShardError: it has no loss or no batch.
    """
    if setup.loss_fn is None or setup.batch is None:
        raise GShardError(
            "this setup has no loss_fn= or no batch=, so it has no step. Give both to TrainSetup."
        )
    return make_train_step(setup.loss_fn, plan, **choices.of_step, **setup.step)


def batch_of(setup: TrainSetup, plan: Plan, choices: Choices) -> Any:
    """The global batch of one step, abstract, with the rows over the data axes."""
    if not jax.tree.leaves(setup.batch):
        raise GShardError(
            "batch= of gshard.TrainSetup holds no arrays. Give what loss_fn takes, one row or more."
        )
    rows = plan.group.devices * choices.micro_batch_size * choices.micro_batches
    places = NamedSharding(plan.mesh, plan.batch_spec)

    def with_rows(x: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
        if not shape or dtype is None:
            raise GShardError(
                f"batch= of gshard.TrainSetup holds {shown(x)}; give arrays of one row or more, "
                "such as "
                "jax.ShapeDtypeStruct((1, 2048), jnp.int32)."
            )
        if rows * math.prod(shape[1:]) >= 2**63:
            raise GShardError(
                f"{rows:,} rows of {shown(list(shape[1:]))} are too many for one array. Give fewer "
                "devices, micro_batches= or micro_batch_size=."
            )
        return jax.ShapeDtypeStruct((rows, *shape[1:]), dtype, sharding=places)

    return jax.tree.map(with_rows, setup.batch)


def batch_bytes(setup: TrainSetup, plan: Plan, choices: Choices) -> int:
    """Bytes of the batch on one device; 0 of a setup without one."""
    if setup.batch is None:
        return 0
    leaves = jax.tree.leaves(batch_of(setup, plan, choices))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves) // plan.group.devices


def load_setup(name: str, arguments: Mapping[str, Any] | None = None) -> TrainSetup:
    """The setup that a function makes.

    Args:
      name: `module:function`; modules of the current folder are found too. The function returns a
        `Setup`, or a train state in one of the forms that `shard_train_state` takes.
      arguments: its keyword arguments.

    Raises:
      GShardError: there is no such module or function, or it fails.
    """
    where, colon, attribute = name.partition(":")
    if not (where and colon and attribute):
        raise GShardError(
            f"model={shown(name)} must be 'module:function', such as 'examples.models.llama:setup'."
        )
    if not isinstance(arguments, Mapping | None) or not all(map(_is_name, arguments or ())):
        raise GShardError(
            f"arguments={shown(arguments)} must be values by name, such as {{'layers': 4}}."
        )
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(where)
    except GShardError as error:
        raise GShardError(f"model={name!r}: {error}") from error
    except ImportError as error:
        raise GShardError(
            f"model={name!r} cannot be imported: {type(error).__name__}: {error}. Modules are "
            f"looked for in the current folder ({here}), in PYTHONPATH and among what is installed."
        ) from error
    except Exception as error:
        raise GShardError(
            f"model={name!r}: its module fails on import: {type(error).__name__}: {error}"
        ) from error
    made_by = getattr(module, attribute, None)
    if not callable(made_by):
        functions = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        raise GShardError(
            f"model={name!r}: {where} has no function {attribute!r}."
            f"{did_you_mean(attribute, functions)}"
        )
    try:
        made = made_by(**(arguments or {}))
    except GShardError as error:
        raise GShardError(f"{name}: {error}") from error
    except Exception as error:
        given = ", ".join(f"{k}={v!r}" for k, v in (arguments or {}).items())
        raise GShardError(f"{name}({given}) fails: {type(error).__name__}: {error}") from error
    return as_setup(made)


def _is_name(key: Any) -> bool:
    return isinstance(key, str)


def as_setup(given: Any) -> TrainSetup:
    """A setup as it is; a train state, or an init function, as a setup without a loss."""
    return given if isinstance(given, TrainSetup) else TrainSetup(given)


def without_arrays(setup: TrainSetup) -> TrainSetup:
    """The same setup, its state abstract: an init function is traced, once for all plans.

    Raises:
      GShardError: the init function fails, or the state is none.
    """
    if is_init(setup.state):
        try:
            return dataclasses.replace(setup, state=abstract(setup.state))
        except GShardError:
            raise
        except Exception as error:
            first = "".join(str(error).strip().splitlines()[:1])
            raise GShardError(
                f"the init function of this setup fails: {type(error).__name__}: {first}"
            ) from error
    state = as_state(setup.state)
    kind_of(state)  # or it raises
    return dataclasses.replace(setup, state=abstract_like(state))


@dataclass(frozen=True)
class Choices:
    """What can be chosen for a run of the same setup, beside its level and mesh.

    Attributes:
      micro_batch_size: rows that one device takes at a time.
      micro_batches: how many times in one step (k).
      accumulate: as in `make_train_step`.
      reshard_after_forward: as in `make_train_step`.
      offload: as in `shard_train_state`.
    """

    micro_batch_size: int = 1
    micro_batches: int = 1
    accumulate: str = "level"
    reshard_after_forward: bool | int = True
    offload: bool = False

    @property
    def of_step(self) -> dict[str, Any]:
        """Those that `make_train_step` and `promise` take, by name."""
        return {
            "micro_batches": self.micro_batches,
            "accumulate": self.accumulate,
            "reshard_after_forward": self.reshard_after_forward,
        }

    def __post_init__(self) -> None:
        check_integer("micro_batch_size", self.micro_batch_size, 1, " of rows", most=MOST)
        check_integer("micro_batches", self.micro_batches, 1, most=MOST)
        check_accumulate(self.accumulate)
        if not isinstance(self.reshard_after_forward, (bool, np.bool_)):
            neighbours = " of neighbours (or True or False)"
            check_integer("reshard_after_forward", self.reshard_after_forward, 1, neighbours)
        flag("offload", self.offload)
