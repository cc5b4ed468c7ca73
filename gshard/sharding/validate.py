"""Checks that the arrays of a state match the plan: not deleted, with its shapes and shardings.

This runs at every call, before anything is compiled. JAX would silently reshard an array with
another sharding at every step, or fail deep inside a compiled program.
"""

from __future__ import annotations

import weakref
from numbers import Complex, Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, dtypes
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gshard._util.errors import DonatedStateError, GShardError, some
from gshard._util.pytree import check_fits, flatten, same_leaves
from gshard.sharding.layout import DEVICE, HOST

_NUMBERS: tuple[type, ...] = (int, float, complex, np.generic, np.ndarray)


class TreeChecker:
    """Checks trees of arrays against an abstract tree with shardings.

    `what` begins a message, such as `the state is`; with `donated` the program reuses the memory of
    the arrays.
    """

    def __init__(self, wanted: Any, what: str, donated: bool = False):
        self._donated = donated
        self._paths, self._leaves, _ = flatten(wanted)
        self._what = what
        self._structure: Any = None  # the structure that last passed the check
        self._trusted: list[int] = []  # identities of the leaves that the program returned
        self._ends: list[weakref.ref[Any]] = []  # its first leaf and its last

    def __call__(
        self, tree: Any, others: Any = None, abstract: bool = False
    ) -> tuple[list[Any], Any]:
        """Checks a tree and returns its leaves and its structure.

        `others` are further arguments of the program, which must not contain a donated array;
        `abstract` allows arrays without values.
        """
        more = jax.tree.leaves(others)
        leaves = self._trusted_leaves(tree)
        if leaves:
            # A program returns no array twice, so only the batch can share one with these.
            if self._donated and any(id(x) in self._trusted for x in more):
                self._refuse_shared(leaves, more)
            return leaves, self._structure
        leaves, structure = jax.tree.flatten(tree)
        if self._structure is None or structure != self._structure:
            same_leaves(tree, self._paths, self._what)
            self._structure = structure
        if not abstract:
            refuse_abstract(leaves)
        refuse_donated(leaves)
        if self._donated:
            self._refuse_shared(leaves, more)
        wrong = [
            f"{path} {fault}"
            for path, x, wanted in zip(self._paths, leaves, self._leaves, strict=True)
            if (fault := _fault(x, wanted))
        ]
        if wrong:
            advice = (
                "Shard a restored state with jax.device_put(state, jax.tree.map(lambda x: "
                "x.sharding, plan.abstract_state()))."
            )
            if any("/hyperparams/" in text for text in wrong):
                advice = "Set a hyperparameter to a number, such as 1e-3."
            elif any(", stored as " in text for text in wrong):
                advice = (
                    "To go on with full weights that were put into it, shard plan.unwrap(state) "
                    "again."
                )
            it = "them" if self._what.endswith(" are") else "it"
            raise GShardError(
                f"{self._what} not as the plan stores {it}: {some(wrong, most=3)}. Pass what "
                f"gshard.shard_train_state or a step of this plan returned. {advice}"
            )
        with jax.transfer_guard("allow"):  # these are asked for
            leaves = [
                placed(x, wanted, path) if self._donated or not np.ndim(x) else x
                for path, x, wanted in zip(self._paths, leaves, self._leaves, strict=True)
            ]
        return leaves, structure

    def trust(self, leaves: list[Any]) -> None:
        """Remembers the leaves that the checked program returned, which need no further check.

        No leaf is kept alive, so that a dropped state is freed. Another object can then have the
        same `id`: weak references to two leaves detect that; to all, they would cost too much.
        """
        if leaves and _is_array(leaves[-1]):  # not within a trace
            self._trusted = list(map(id, leaves))
            self._ends = [weakref.ref(leaves[0]), weakref.ref(leaves[-1])]

    def _trusted_leaves(self, tree: Any) -> list[Any]:
        """Returns the leaves if the checked program returned them, else an empty list."""
        if not self._trusted:
            return []
        try:  # this takes half the time of flattening
            leaves = self._structure.flatten_up_to(tree)
        except (ValueError, TypeError):
            return []
        if list(map(id, leaves)) != self._trusted:
            return []
        if self._ends[0]() is not leaves[0] or self._ends[1]() is not leaves[-1]:
            return []
        try:
            deleted = any(map(type(leaves[0]).is_deleted, leaves))  # a generator takes twice that
        except TypeError:  # PRNG keys have another type
            deleted = True
        if deleted:
            refuse_donated(leaves)
        return leaves

    def _refuse_shared(self, leaves: list[Any], others: list[Any]) -> None:
        """Refuses an array that is passed twice: JAX crashes when it is donated and used."""
        names: dict[int, str] = {}
        of_state = zip(self._paths, leaves, strict=True)
        for name, x in [*of_state, *(("an array of the batch", x) for x in others)]:
            if _is_array(x) and (first := names.setdefault(id(x), name)) != name:
                raise GShardError(
                    f"{first} and {name} are the same array, and the step reuses the memory of the "
                    "state. Copy it (jax.tree.map(jnp.copy, ...)), or make the step with "
                    "donate=False."
                )


def refuse_abstract(leaves: list[Any]) -> None:
    """Raises a `GShardError` if there are abstract arrays where values are needed."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise GShardError(
            "this state is abstract and has no values. Give gshard.shard_train_state arrays, or a "
            "function that makes them, and a mesh of devices; or restore a checkpoint into it."
        )


def refuse_abstract_mesh(mesh: Mesh | AbstractMesh, call: str) -> None:
    """Raises a `GShardError` if a plan's mesh is abstract, for a call that needs its devices."""
    if isinstance(mesh, AbstractMesh):
        raise GShardError(
            f"{call}: the plan has an abstract mesh, which has no devices. Shard the state over "
            "gshard.make_mesh()."
        )


def refuse_traced(leaves: list[Any], call: str) -> None:
    """Raises a `GShardError` if arrays are those of a trace, for a call that needs their values."""
    if any(isinstance(x, core.Tracer) for x in leaves):
        raise GShardError(
            f"{call} was called inside jax.jit or another transform of JAX, where arrays have no "
            "values. Call it outside."
        )


def refuse_donated(leaves: list[Any]) -> None:
    """Raises a `DonatedStateError` if the memory of an array was donated."""
    if any(x.is_deleted() for x in leaves if _is_array(x)):
        raise DonatedStateError(
            "this train state, or a part of it, was given to an earlier step, which reused its "
            "memory. Continue with what that step returned (state, metrics = step(state, batch)); "
            "if Ctrl-C came before you received it, step.latest has it. An NNX model is updated in "
            "place. A step also deletes arrays that nnx.clone(model) shares with the model, and "
            "nnx.state(model) changes with it: to keep values, use copy.deepcopy(model). "
            "Or make the step with donate=False."
        )


def _fault(x: Any, wanted: jax.ShapeDtypeStruct) -> str:
    """Describes how a leaf differs from the plan, if at all. JAX replicates host values itself."""
    if not hasattr(x, "dtype") or isinstance(x, np.number):  # a hyperparameter, or a step count
        kinds = (jnp.floating, Real), (jnp.integer, Integral), (jnp.complexfloating, Complex)
        fits = any(jnp.issubdtype(wanted.dtype, d) and isinstance(x, kind) for d, kind in kinds)
        fits = isinstance(x, bool) if wanted.dtype == bool else fits and not isinstance(x, bool)
        fits = fits and wanted.shape == ()
        return "" if fits else f"is a {type(x).__name__}, stored as {_form(wanted)}"
    numpy = isinstance(x, (np.ndarray, np.generic))
    dtype = dtypes.canonicalize_dtype(x.dtype) if numpy else x.dtype
    if x.shape != wanted.shape or dtype != wanted.dtype:
        return f"is {_form(x)}, stored as {_form(wanted)}"
    sharding: Any = wanted.sharding
    if not _is_array(x):  # a NumPy array, or abstract
        wrong = numpy and (not sharding.is_fully_replicated or _on_host(sharding))
        return f"is on the host, a NumPy array, not on {_describe(sharding)}" if wrong else ""
    if x.sharding == sharding or x.sharding.is_equivalent_to(sharding, len(x.shape)):
        return ""
    if sharding.is_fully_replicated and not x.committed and not _on_host(sharding):
        return ""
    if _on_host(x.sharding) != _on_host(sharding):
        here, there = (HOST if _on_host(s) else DEVICE for s in (x.sharding, sharding))
        return f"is in {here} memory, not in {there} memory"
    here, there = _describe(x.sharding), _describe(sharding)
    if here == there:
        return f"is stored on {here} of another mesh: other devices, or these in another order"
    return f"is stored on {here}, not on {there}"


def placed(x: Any, wanted: jax.ShapeDtypeStruct, path: str) -> Any:
    """Returns a copy of a value that the user has set, placed as the program returns it.

    For a number on the host, or an array that is not committed to a device, JAX would compile
    another program, and a program that reuses the memory of its arguments would delete the user's
    own array.
    """
    if not (_is_array(x) and not x.committed or isinstance(x, _NUMBERS)):
        return x
    if jnp.issubdtype(wanted.dtype, dtypes.prng_key):
        data = np.asarray(jax.random.key_data(x))
        data = _copied(data, NamedSharding(wanted.sharding.mesh, jax.P()))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    check_fits(x, wanted.dtype, path)
    return _copied(np.asarray(x, wanted.dtype), wanted.sharding)


def _copied(value: np.ndarray, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, core.Tracer)


def _form(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _describe(sharding: Any) -> str:
    n = sharding.num_devices
    memory = f" in {sharding.memory_kind} memory" if _on_host(sharding) else ""
    form = getattr(sharding, "spec", sharding)
    return f"{n} device{'s' if n > 1 else ''} as {form}{memory}"


def _on_host(sharding: Any) -> bool:
    return sharding.memory_kind == HOST
