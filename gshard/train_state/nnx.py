"""Converts NNX `(model, optimizer)` pairs to `Components` and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from gshard._util.errors import GShardError, some, warn
from gshard._util.jaxpr_dataflow import sources
from gshard._util.pytree import check_unique, flatten, path_of
from gshard._util.tracebacks import named_as
from gshard._util.validation import check_takes, shown
from gshard.train_state.components import Components, Kind, PureLoss
from gshard.train_state.initial import initial


@dataclass(frozen=True)
class _NnxStatic:
    """The structure that rebuilds the state of an NNX model from non-trainable state by path."""

    graph: Any
    structure: Any
    paths: tuple[str, ...]

    def rest(self, non_trainable: Mapping[str, Any]) -> Any:
        return jax.tree.unflatten(self.structure, [non_trainable[path] for path in self.paths])


def new_optimizer(
    model: nnx.Module, tx: optax.GradientTransformation, wrt: Any
) -> nnx.Optimizer[Any]:
    """Makes an optimizer that will be sharded: its zeros take no memory of the devices."""
    made = nnx.Optimizer(model, tx._replace(init=partial(initial, tx)), wrt=wrt)
    made.tx = tx
    return made


@dataclass(frozen=True)
class Nnx(Kind):
    """An NNX `(model, optimizer)` pair; `wrt` is the optimizer's filter for what it trains."""

    wrt: Any
    arguments: ClassVar[tuple[str, ...]] = ("model", "optimizer")
    counts_draws: ClassVar[bool] = True

    def freeze(self, state: Any, frozen: Any, paths_of: Any = None) -> Nnx:
        if frozen is not None:
            raise GShardError(
                f"frozen={shown(frozen)} is for Linen and plain parameters. For NNX say what is "
                "trained: nnx.Optimizer(model, tx, wrt=nnx.All(nnx.Param, "
                "nnx.PathContains('lora'))), or another filter."
            )
        paths, leaves, _ = flatten(self.split(state).params)
        if not paths:
            every = flatten(nnx.state(state[0]))[0]
            raise GShardError(
                f"the optimizer's wrt={self.wrt} chooses no Variable of the model: nothing would "
                f"be trained. The model has {some(every)}."
            )
        trained = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
        if not all(trained):
            fixed = [path for path, yes in zip(paths, trained, strict=True) if not yes]
            raise GShardError(
                f"the parameters {some(fixed)} are not floating and have no gradient. Keep them in "
                "a Variable that is not trained, such as a plain nnx.Variable."
            )
        return self

    def split(self, state: Any) -> Components:
        model, optimizer = state
        parts = self.split_inference(model)
        return dataclasses.replace(
            parts, opt_state=nnx.as_pure(optimizer.opt_state), step=optimizer.step.get_value()
        )

    def trains_the_same(self, state: Any) -> bool:
        return state[1].wrt is self.wrt or state[1].wrt == self.wrt

    def check_step(self, state: Any, loss_fn: Callable[..., Any], rng: Any) -> None:
        del loss_fn, rng
        kinds = (x for x in type(state[1]).__mro__ if not x.__module__.startswith("gshard."))
        if next(x for x in kinds if "update" in vars(x)) is not nnx.Optimizer:
            raise GShardError(
                f"{type(state[1]).__name__} has an update of its own, which make_train_step would "
                "not call. Keep your own nnx.jit step and take the gradient with "
                'gshard.value_and_grad(loss_fn, plan): see the page "Your own loop" of the '
                "documentation."
            )

    def split_inference(self, state: Any) -> Components:
        model = state[0] if isinstance(state, tuple) else state
        graph, params, rest = nnx.split(model, self.wrt, ...)
        paths, leaves, structure = flatten(rest)
        check_unique(paths, "Variables of the model")
        non_trainable = dict(zip(paths, leaves, strict=True))
        static = _NnxStatic(graph, structure, tuple(paths))
        return Components(nnx.as_pure(params), None, None, non_trainable, static)

    def split_target(self, model: nnx.Module, collections: dict[str, Any]) -> Components:
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
        return self.split_inference(model)

    def is_inference(self, state: Any) -> bool:
        return isinstance(state, nnx.Module)

    def merge(self, parts: Components, like: Any, tx: optax.GradientTransformation) -> Any:
        model, optimizer = like
        _, params, _ = nnx.split(model, self.wrt, ...)
        params = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(parts.params))
        model = nnx.merge(
            parts.static.graph, params, parts.static.rest(parts.non_trainable), copy=True
        )
        optimizer = nnx.clone(optimizer)
        optimizer.tx = tx
        optimizer.step = nnx.OptState(parts.step)
        optimizer.opt_state = nnx.data(jax.tree.map(nnx.OptState, parts.opt_state))
        return model, optimizer

    def plain(self, state: Any) -> Any:
        return tuple(x._gshard_plain() if hasattr(x, "_gshard_plain") else x for x in state)

    def update(self, state: Any, parts: Components) -> None:
        model, optimizer = state
        nnx.update(model, parts.params)
        nnx.update(model, parts.static.rest(parts.non_trainable))
        nnx.update(optimizer.opt_state, nnx.state(parts.opt_state))
        optimizer.step.set_value(parts.step)

    def call_after(self, fn: Callable[..., Any], state: Any) -> Any:
        graph, paths = nnx.graphdef(state), flatten(nnx.state(state))[0]
        out = fn(*state)
        if out is not None:
            raise GShardError(
                f"post_update(model, optimizer) returned {shown(out)}. It changes them in place "
                "(nnx.update(model.ema, ...)) and returns nothing."
            )
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
        nnx.update(model, parts.static.rest({**parts.non_trainable, **updates}))
        return {}

    def untrained(self, state: Any) -> Collection[str]:
        return flatten(nnx.state(state[0], nnx.All(nnx.Param, nnx.Not(self.wrt))))[0]

    def params_of(self, parts: Components, template: Any) -> Any:
        paths, _, structure = flatten(nnx.state(template[0], nnx.Any(self.wrt, nnx.Param)))
        found = dict(zip(*flatten(parts.params)[:2], strict=True)) | parts.non_trainable
        return jax.tree.unflatten(structure, [found[path] for path in paths])

    def random_paths(self, state: Any) -> frozenset[str]:
        return frozenset(flatten(nnx.state(state[0], nnx.RngState))[0])

    def dropouts(self, parts: Components) -> list[str]:
        rest = parts.static.rest(parts.non_trainable)
        modules = nnx.iter_modules(nnx.merge(parts.static.graph, parts.params, rest, copy=True))
        found = [(path, vars(module)) for path, module in modules]
        return [
            "/".join(map(str, path)) or "the model"
            for path, own in found
            if own.get("deterministic") is False
            and own.get("rate", own.get("dropout_rate")) not in (None, 0)
        ]

    def tx(self, state: Any) -> optax.GradientTransformation:
        return state[1].tx

    def scan_names(self, state: Any) -> dict[str, tuple[str | None, ...]]:
        found = {}
        for path, x in nnx.to_flat_state(nnx.state(state[0])):
            # A module may hold a plain array too.
            data = x.get_metadata() if isinstance(x, nnx.Variable) else {}
            if names := data.get("out_sharding") or data.get("sharding_names"):
                found["/".join(map(str, path))] = names
        return found

    def loss(
        self,
        loss_fn: Callable[..., Any],
        mutable: tuple[str, ...],
        static: Any,
        by_name: Collection[str] = (),
        what: str = "the loss",
    ) -> PureLoss:
        del by_name
        if mutable:
            raise GShardError(
                f"mutable={mutable!r} is for Linen: an NNX model keeps its own state. Leave it out."
            )

        advice = (
            "It is called with (model, batch): make several arrays one batch, such as a tuple. For "
            "random numbers use the model's own nnx.Rngs, or a key in the batch, {**batch, 'key': "
            "jax.random.key(0)}."
        )
        check_takes(loss_fn, advice, None, None)

        def pure(params: Any, non_trainable: dict[str, Any], batch: Any, rng: Any) -> Any:
            if rng is not None:
                raise GShardError(
                    "rng= is for Linen: an NNX model carries its own nnx.Rngs. Leave it out."
                )

            def run(params: Any, non_trainable: dict[str, Any]) -> tuple[Any, Any]:
                model = nnx.merge(static.graph, params, static.rest(non_trainable), copy=True)
                before = _attributes(model)
                out = loss_fn(model, batch)
                graph, params, rest = nnx.split(model, self.wrt, ...)
                if graph != static.graph:
                    _warn_of_attributes(before, _attributes(model), what)
                return out, (nnx.as_pure(params), dict(zip(*flatten(rest)[:2], strict=True)))

            refuse_modules(batch)
            out, (params_after, after) = run(params, non_trainable)
            given = {*flatten(params)[0], *non_trainable}
            kept = {*flatten(params_after)[0], *after}
            if given != kept:
                raise GShardError(
                    f"{what} adds or removes Variables of the model: "
                    f"{some(sorted(given ^ kept))}. Make them before the model is sharded (a cache "
                    "of attention by init_cache). To read what `sow` stores, call "
                    "nnx.capture(model, nnx.Intermediate)(x) in a loss or in the function of "
                    "make_eval_step; to drop it, nnx.pop(model, nnx.Intermediate)."
                )
            changed = _changed(
                (params, non_trainable), (params_after, after), lambda *given: run(*given)[1]
            )
            if written := [path for path in changed if path not in after]:
                warn(
                    f"{what} writes into the parameters {some(written)}, as nnx.SpectralNorm "
                    "and nnx.WeightNorm do. What it writes is used for this call and then dropped, "
                    "where one device would keep it, so training differs from that on one device. "
                    "Assign the new values to a Variable of another type, or use a new array."
                )
            return out, {path: after[path] for path in changed if path in after}

        return named_as(loss_fn, pure)

    def gradients(self, grads: Any, model: nnx.Module, updates: dict[str, Any]) -> Any:
        del updates
        structure = jax.tree.structure(nnx.state(model, self.wrt))
        return jax.tree.unflatten(structure, jax.tree.leaves(grads))


def refuse_modules(batch: Any) -> None:
    """Refuses modules in a batch: what a loss writes into them would be lost."""

    def is_module(x: Any) -> bool:
        return isinstance(x, (nnx.Module, nnx.Rngs, nnx.Metric)) and not isinstance(
            x, (nnx.Dict, nnx.List)
        )

    for keys, x in jax.tree.leaves_with_path(batch, is_leaf=is_module):
        if is_module(x):
            place = f"batch[{path_of(keys)!r}]" if keys else "the batch"
            raise GShardError(
                f"{place} is of NNX ({type(x).__name__}), and what the loss changes in it would be "
                "lost. Make it a part of the model."
            )


_MODES = ("deterministic", "use_running_average")  # model.train() and model.eval() set them


def _attributes(model: nnx.Module) -> dict[str, Any]:
    """Numbers, flags and texts that the modules of a model have as attributes, by path."""
    return {
        "/".join(map(str, (*path, name))): value
        for path, module in nnx.iter_modules(model)
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, complex, str, type(None))) and name not in _MODES
    }


def _warn_of_attributes(before: dict[str, Any], after: dict[str, Any], what: str) -> None:
    """Warns of attributes that the loss has changed: each step has those of `before`."""
    differing = before.items() ^ after.items()
    if changed := sorted({path for path, _ in differing}):
        warn(
            f"{what} changes the attributes {some(changed)} of the model, which are fixed while "
            "a step is compiled. Each step starts from the old value; nnx.jit on one device would "
            "keep the new one. Keep a value that changes in an nnx.Variable, as an array."
        )


def _changed(before: Any, after: Any, run: Callable[..., Any]) -> list[str]:
    """Returns the paths of the parameters and of the non-trainable state that the loss changes.

    NNX transforms (`nnx.remat`, `nnx.jit`, `nnx.scan`) write every Variable back even if it did not
    change; only a trace of `run`, which computes the values after from those before, can tell.
    """
    old, new = jax.tree.leaves(before), jax.tree.leaves(after)
    if all(x is y for x, y in zip(old, new, strict=True)):
        return []
    paths = [path for tree in before for path in flatten(tree)[0]]
    found = sources(jax.make_jaxpr(run)(*before).jaxpr)
    return [path for i, path in enumerate(paths) if found[i] != i]
