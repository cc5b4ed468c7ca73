"""Converts NNX `(model, optimizer)` pairs to `Components` and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gshard._util.errors import GShardError, some, warn
from gshard._util.jaxpr_dataflow import sources
from gshard._util.pytree import check_unique, flatten, path_of
from gshard._util.validation import shown
from gshard.train_state.components import Components, PureLoss


@dataclass(frozen=True)
class _NnxStatic:
    """The structure that rebuilds the state of an NNX model from non-trainable state by path."""

    graph: Any
    structure: Any
    paths: tuple[str, ...]

    def rest(self, non_trainable: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(self.structure, [non_trainable[path] for path in self.paths])


@dataclass(frozen=True)
class Nnx:
    """An NNX `(model, optimizer)` pair; `wrt` is the optimizer's filter for what it trains."""

    wrt: Any
    arguments: ClassVar[tuple[str, ...]] = (
        "model",
        "optimizer",
    )  # of a train step, before the batch

    def freeze(self, state: Any, frozen: Any, paths_of: Any = None) -> Nnx:
        """Refuses `frozen=`: the optimizer's `wrt=` chooses what is trained."""
        if frozen is not None:
            raise GShardError(
                f"frozen={shown(frozen)} is for Linen and plain parameters. For NNX say what is "
                "trained: nnx.Optimizer(model, tx, wrt=nnx.All(nnx.Param, "
                "nnx.PathContains('lora'))), or another filter."
            )
        paths, leaves, _ = flatten(self.split(state).params)
        fixed = [
            p
            for p, x in zip(paths, leaves, strict=True)
            if not jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        if fixed:
            raise GShardError(
                f"the parameters {some(fixed)} are not floating and have no gradient. Keep them in "
                "a Variable that the optimizer's wrt= does not choose."
            )
        return self

    def narrow(self, state: Any) -> Any:
        """Returns the pair as it is: the optimizer's `wrt=` leaves out what is not trained."""
        return state

    def trained(self, tree: Any) -> Any:
        """Returns the trained part of a tree like the parameters: all of it."""
        return tree

    def full_update(self, updates: Any, params: Any) -> Any:
        """Returns updates as `nnx.Optimizer` takes them."""
        del params
        return updates

    def plain_tx(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns the optimizer of a plain pair."""
        return tx

    def split(self, state: Any) -> Components:
        """Splits a pair into its components."""
        model, optimizer = state
        parts = self.split_model(model)
        return dataclasses.replace(
            parts, opt_state=nnx.as_pure(optimizer.opt_state), step=optimizer.step.get_value()
        )

    def split_model(self, model: nnx.Module) -> Components:
        """Splits a model into components without an optimizer."""
        graph, params, rest = nnx.split(model, self.wrt, ...)
        paths, leaves, structure = flatten(rest)
        check_unique(paths, "Variables of the model")
        non_trainable = dict(zip(paths, leaves, strict=True))
        static = _NnxStatic(graph, structure, tuple(paths))
        return Components(nnx.as_pure(params), None, None, non_trainable, static)

    def split_target(self, model: nnx.Module, collections: dict[str, Any]) -> Components:
        """Splits the model that a loss is called with."""
        if collections:
            raise GShardError(
                f"{some(collections)}: an NNX model keeps its own state. Call it with (model, "
                "batch)."
            )
        if not isinstance(model, nnx.Module):
            raise GShardError(
                f"the plan was made for an NNX model; got a {type(model).__name__}. Call it with "
                "(model, batch)."
            )
        return self.split_model(model)

    def is_inference(self, state: Any) -> bool:
        """Whether this is a model without an optimizer, which evaluation accepts."""
        return isinstance(state, nnx.Module)

    def split_inference(self, model: nnx.Module | tuple[Any, Any]) -> Components:
        """Splits a model, or the model of a pair, into components without an optimizer."""
        return self.split_model(model[0] if isinstance(model, tuple) else model)

    def merge(self, parts: Components, like: Any, tx: optax.GradientTransformation) -> Any:
        """Makes a new pair like the given one with the arrays of `parts` and the optimizer `tx`."""
        model, optimizer = like
        graph, params, _ = nnx.split(model, self.wrt, ...)
        params = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(parts.params))
        model = nnx.merge(graph, params, parts.static.rest(parts.non_trainable), copy=True)
        optimizer = nnx.clone(optimizer)
        optimizer.tx = tx
        optimizer.step = nnx.OptState(parts.step)
        optimizer.opt_state = nnx.data(jax.tree.map(nnx.OptState, parts.opt_state))
        return model, optimizer

    def check(self, state: Any) -> None:
        """Accepts every pair: all can be sharded."""

    def check_step(self, state: Any) -> None:
        """Accepts every pair: NNX has no `apply_gradients` that a train step would not call."""

    def update(self, state: Any, parts: Components) -> None:
        """Writes the arrays of `parts` into the user's model and optimizer, in place."""
        model, optimizer = state
        nnx.update(model, parts.params)
        nnx.update(model, parts.static.rest(parts.non_trainable))
        nnx.update(optimizer.opt_state, nnx.state(parts.opt_state))
        optimizer.step.set_value(parts.step)

    def call_after(self, fn: Callable[..., Any], state: Any) -> Any:
        """Calls the user's `post_update`, which changes the pair in place, and returns the pair."""
        before = nnx.graphdef(state), flatten(nnx.state(state))[0]
        out = fn(*state)
        if out is not None:
            raise GShardError(
                f"post_update(model, optimizer) returned {shown(out)}. It changes them in place "
                "(nnx.update(model.ema, ...)) and returns nothing."
            )
        graph, paths = before
        if nnx.graphdef(state) != graph and flatten(nnx.state(state))[0] == paths:
            raise GShardError(
                "post_update(model, optimizer) changes more than arrays: an attribute such as the "
                "optimizer's tx is fixed while a step is compiled. Change the values of Variables "
                "only."
            )
        return state

    def absorb(
        self, model: nnx.Module, parts: Components, updates: dict[str, Any]
    ) -> dict[str, Any]:
        """Writes what the loss changed into the model."""
        nnx.update(model, parts.static.rest({**parts.non_trainable, **updates}))
        return {}

    def params_of(self, parts: Components, template: Any) -> Any:
        """Returns the trained parameters as an `nnx.State` of Variables."""
        return self.gradients(parts.params, template[0], {})

    def random_paths(self, state: Any) -> frozenset[str]:
        """Returns the paths of the keys and counts of `nnx.Rngs`."""
        return frozenset(flatten(nnx.state(state[0], nnx.RngState))[0])

    def tx(self, state: Any) -> optax.GradientTransformation:
        """Returns the optimizer of a pair."""
        return state[1].tx

    def scan_names(self, state: Any) -> dict[str, tuple[str | None, ...]]:
        """Returns, by path, the names that Flax's metadata gives the dimensions of Variables."""
        variables, _ = jax.tree_util.tree_flatten_with_path(
            nnx.state(state[0]), is_leaf=lambda x: isinstance(x, nnx.Variable)
        )
        data = {
            path_of(keys): variable.get_metadata()
            for keys, variable in variables
            if isinstance(variable, nnx.Variable)  # a module may hold a plain array too
        }
        names = {path: d.get("out_sharding") or d.get("sharding_names") for path, d in data.items()}
        return {path: found for path, found in names.items() if found}

    def mesh_names(self, state: Any) -> dict[str, tuple[Any, ...]]:
        """Returns, by path, the mesh axes that Flax's metadata gives their dimensions."""
        return self.scan_names(state)

    def loss(self, loss_fn: Callable[..., Any], mutable: tuple[str, ...], static: Any) -> PureLoss:
        """Converts `loss_fn(model, batch)` to a pure function that returns changes of the model."""
        if mutable:
            raise GShardError(
                f"mutable={mutable!r} is for Linen: an NNX model keeps its own state. Leave it out."
            )

        def pure(params: Any, non_trainable: dict[str, Any], batch: Any, rng: Any) -> Any:
            if rng is not None:
                raise GShardError(
                    "rng= is for Linen: an NNX model carries its own nnx.Rngs. Leave it out."
                )

            def run(params: Any, non_trainable: dict[str, Any]) -> tuple[Any, Any]:
                model = nnx.merge(static.graph, params, static.rest(non_trainable), copy=True)
                out = loss_fn(model, batch)
                _, params, rest = nnx.split(model, self.wrt, ...)
                return out, (nnx.as_pure(params), dict(zip(*flatten(rest)[:2], strict=True)))

            out, (params_after, after) = run(params, non_trainable)
            given = {*flatten(params)[0], *non_trainable}
            kept = {*flatten(params_after)[0], *after}
            if given != kept:
                raise GShardError(
                    "the loss adds or removes Variables of the model: "
                    f"{some(sorted(given ^ kept))}. Make them before shard_train_state."
                )
            written, changed = _changed(
                (params, non_trainable), (params_after, after), lambda *given: run(*given)[1]
            )
            if written:
                warn(
                    f"the loss writes into the parameters {some(written)}; what it writes is used "
                    "for this loss and not kept."
                )
            return out, {path: after[path] for path in changed}

        return pure

    def gradients(self, grads: Any, model: nnx.Module, updates: dict[str, Any]) -> Any:
        """Returns gradients as the `nnx.State` of Variables that `optimizer.update` takes."""
        del updates
        structure = jax.tree.structure(nnx.state(model, self.wrt))
        return jax.tree.unflatten(structure, jax.tree.leaves(grads))


def _changed(before: Any, after: Any, run: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Finds the paths of the parameters and of the non-trainable state that the loss changes.

    NNX transforms (`nnx.remat`, `nnx.jit`, `nnx.scan`) write every Variable back even if it did not
    change; only a trace of `run`, which computes the values after from those before, can tell.
    """
    paths = [flatten(tree)[0] for tree in before]
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    if all(x is y for x, y in zip(old, new, strict=True)):
        return [], []
    found = sources(jax.make_jaxpr(run)(*before).jaxpr)
    changed = [found[i] != i for i in range(len(old))]
    count = len(paths[0])
    return (
        [path for path, yes in zip(paths[0], changed[:count], strict=True) if yes],
        [path for path, yes in zip(paths[1], changed[count:], strict=True) if yes],
    )
