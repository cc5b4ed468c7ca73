"""Evaluates a function with every operand held in a chosen way, and compares it with itself.

The parts are simulated by `jax.vmap(..., axis_name="data")`: no mesh, one device. JAX's derivative
of the mapped program is that of all parts together, collectives included, as in a `shard_map`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard.train.global_loss.evaluator import GlobalEvaluator
from gshard.train.global_loss.placement import PARTIAL, REPLICATED, Placement, sharded
from gshard.train.global_loss.transfers import Transfer
from gshard.train.global_loss.value import Value

AXIS = "data"
_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@dataclass(frozen=True)
class Case:
    """A function with operands.

    `free` lists placements that need no collective, as `operands > results`: R replicated, P a
    partial sum, 1 sharded on dimension 1, 1.2 the same in each of two blocks. The last result
    stands for all that follow. `like` is how close the numbers must be; `partial` is whether
    operands are also held as partial sums; `most` is how many ways of holding them are computed.
    """

    name: str
    f: Callable[..., Any]
    args: Sequence[np.ndarray]
    free: str = ""
    like: float = 2e-4
    grads: bool = True
    partial: bool = True
    most: int = 24

    def __str__(self) -> str:
        return self.name

    def ways(self, parts: int, most: int = 1000) -> list[tuple[Placement, ...]]:
        """Ways to hold the operands together: all, or those of one operand and some of the rest."""
        most = min(self.most, most)
        found = list(itertools.product(*(choices(x, parts) for x in self.args)))[1:]
        if not self.partial:
            found = [row for row in found if PARTIAL not in row]
        if len(found) <= most:
            return found
        named = [tuple(given) for given, _ in self.expected()]
        alone = [row for row in found if sum(p != REPLICATED for p in row) == 1]
        alone.sort(key=lambda row: PARTIAL not in row)
        order = np.random.default_rng(len(found)).permutation(len(found))
        wanted = [*named, *alone, *(found[i] for i in order)]
        return list(dict.fromkeys(wanted))[: max(most, len(named))]

    def expected(self) -> list[tuple[list[Placement], list[Placement]]]:
        """The rows of `free`."""
        rows = [row.split(">") for row in self.free.split(";") if row.strip()]
        return [(placements(given), placements(found)) for given, found in rows]


def placements(words: str) -> list[Placement]:
    return [placement(word) for word in words.split()]


def placement(word: str) -> Placement:
    if word in "RP":
        return {"R": REPLICATED, "P": PARTIAL}[word]
    dim, _, outer = word.partition(".")
    return sharded(int(dim), int(outer or 1))


def numbers(*shape: int, low: float = 0.1, high: float = 0.9, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, *shape])
    return rng.uniform(low, high, shape).astype(np.float32)


def integers(*shape: int, low: int = 0, high: int = 9, dtype: Any = np.int32, seed: int = 0):
    return np.random.default_rng([seed, *shape]).integers(low, high, shape).astype(dtype)


def booleans(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).random(shape) < 0.6


# ---- parts --------------------------------------------------------------------------------------


def split(x: np.ndarray, place: Placement, parts: int) -> np.ndarray:
    """What the parts hold, one after the other."""
    x = np.asarray(x)
    if place == REPLICATED:
        return np.stack([x] * parts)
    if place == PARTIAL:
        rng = np.random.default_rng(parts)
        if np.issubdtype(x.dtype, np.inexact):
            some = rng.normal(size=(parts, *x.shape)).astype(x.dtype)
        else:
            some = rng.integers(0, 50, (parts, *x.shape)).astype(x.dtype)
        some[-1] += x - some.sum(0, dtype=x.dtype)
        return some
    blocks = _blocks(x, place, parts)
    local = (*x.shape[: place.dim], -1, *x.shape[place.dim + 1 :])
    return np.stack([b.reshape(local) for b in np.moveaxis(blocks, place.dim + 1, 0)])


def joined(stacked: np.ndarray, place: Placement, parts: int) -> np.ndarray:
    """The full array, of a sharded one."""
    d, local = place.dim, stacked.shape[1:]
    sizes = (parts, *local[:d], place.outer, local[d] // place.outer, *local[d + 1 :])
    blocks = np.moveaxis(stacked.reshape(sizes), 0, d + 1)
    return blocks.reshape(*local[:d], local[d] * parts, *local[d + 1 :])


def _blocks(x: np.ndarray, place: Placement, parts: int) -> np.ndarray:
    d = place.dim
    return x.reshape(*x.shape[:d], place.outer, parts, -1, *x.shape[d + 1 :])


def choices(x: np.ndarray, parts: int) -> list[Placement]:
    """All ways to hold an array."""
    found = [REPLICATED] if x.dtype == bool else [REPLICATED, PARTIAL]
    for dim, size in enumerate(x.shape):
        found += [sharded(dim, o) for o in (1, 2) if size % (o * parts) == 0]
    return found


# ---- evaluation ---------------------------------------------------------------------------------


class Placed:
    """A function, traced for full operands."""

    def __init__(self, f: Callable[..., Any], args: Sequence[np.ndarray], parts: int):
        self.closed = jax.make_jaxpr(f)(*args)
        self.parts = parts
        self.transfers: list[Transfer] = []
        self.results: list[Placement] = []

    def part(self, places: Sequence[Placement], factors: Sequence[Any], *local: Any) -> Any:
        """Evaluates one part: its share of a linear function of the results, and the results."""
        evaluator = GlobalEvaluator((AXIS,), self.parts)
        jaxpr = self.closed.jaxpr
        values = [
            Value(place, v.aval, x, depends=jnp.issubdtype(v.aval.dtype, jnp.inexact))
            for v, place, x in zip(jaxpr.invars, places, local, strict=True)
        ]
        out = evaluator.evaluate(jaxpr, self.closed.consts, values)
        held = [evaluator.convert(x, x.placement) for x in out]
        self.transfers, self.results = [*evaluator.transfers], [x.placement for x in out]
        share = jnp.zeros(())
        for x, mine, factor in zip(out, held, factors, strict=True):
            if factor is None:
                continue
            if x.placement.is_sharded:
                factor = evaluator.partition.part_of(factor, x.placement)
            one = jnp.real(jnp.sum(mine * factor)).astype(share.dtype)
            share += one / self.parts if x.placement == REPLICATED else one
        return share, [evaluator.convert(x, REPLICATED) for x in out]

    def all_parts(self, places: Sequence[Placement], factors: Sequence[Any], stacked: Any) -> Any:
        """The sum of the shares, and the results of every part."""
        shares, full = jax.vmap(lambda *local: self.part(places, factors, *local), axis_name=AXIS)(
            *stacked
        )
        return jnp.sum(shares), full

    def held(self, args: Sequence[np.ndarray], places: Sequence[Placement]) -> None:
        """Fills `transfers` and `results`, without any computation."""
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in _all_split(args, places, self)]
        none = [None] * len(self.closed.out_avals)
        jax.eval_shape(lambda *xs: self.all_parts(places, none, xs), *shapes)


def _all_split(args: Sequence[np.ndarray], places: Sequence[Placement], placed: Placed):
    return [split(x, p, placed.parts) for x, p in zip(args, places, strict=True)]


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def check(
    f: Callable[..., Any],
    args: Sequence[np.ndarray],
    rows: Sequence[Sequence[Placement]],
    parts: int,
    like: float = 2e-4,
    grads: bool = True,
) -> None:
    """Compares results and gradients for operands that are held in these ways with `f` itself."""
    placed = Placed(f, args, parts)
    outs = placed.closed.out_avals
    factors = [
        np.asarray(numbers(*v.shape, seed=i + 1)) if grads and _is_float(v) else None
        for i, v in enumerate(outs)
    ]
    at = [i for i, x in enumerate(args) if _is_float(x)] if grads else []

    def differentiated(f: Any, given: Sequence[Any]) -> Any:
        def of_floats(floats: Any) -> Any:
            own = list(given)
            for i, x in zip(at, floats, strict=True):
                own[i] = x
            return f(own)

        if not at:
            return [], f(given)[1]
        return jax.grad(of_floats, has_aux=True)([given[i] for i in at])

    def one(own: Any) -> Any:
        out = jax.tree.leaves(f(*own))
        terms = zip(out, factors, strict=True)
        return sum((jnp.real(jnp.sum(x * c)) for x, c in terms if c is not None), 0.0), out

    def every(args: Any, stacked: Any) -> Any:
        found = [
            differentiated(lambda xs, p=places: placed.all_parts(p, factors, xs), given)
            for places, given in zip(rows, stacked, strict=True)
        ]
        return differentiated(one, args), found

    stacked = [_all_split(args, places, placed) for places in rows]
    wanted, found = jax.jit(every, compiler_options=_FAST)(list(args), stacked)
    wanted, found = jax.tree.map(np.asarray, (wanted, found))
    for places, (d_args, out) in zip(rows, found, strict=True):
        words = f"{parts} parts, {', '.join(map(str, places))}"
        for i, (x, y) in enumerate(zip(out, wanted[1], strict=True)):
            _same(x, np.stack([y] * parts), like, f"{words}: result {i}")
        for i, x, y in zip(at, d_args, wanted[0], strict=True):
            if places[i] == REPLICATED:
                x = x.sum(0)
            elif places[i] == PARTIAL:
                y = np.stack([y] * parts)
            else:
                x = joined(x, places[i], parts)
            _same(x, y, like, f"{words}: gradient of operand {i}")


def check_free(case: Case) -> None:
    """What a case says is free needs no collective, and gives the placements of its results."""
    placed = Placed(case.f, case.args, 3)
    for given, wanted in case.expected():
        placed.held(case.args, given)
        assert not placed.transfers, (given, placed.transfers)
        wanted += wanted[-1:] * (len(placed.results) - len(wanted))
        assert placed.results == wanted, given


def _same(x: np.ndarray, y: np.ndarray, like: float, words: str) -> None:
    if np.issubdtype(x.dtype, np.number):
        np.testing.assert_allclose(
            x.astype(np.complex128), y.astype(np.complex128), like, like, err_msg=words
        )
    else:
        np.testing.assert_array_equal(x, y, err_msg=words)
