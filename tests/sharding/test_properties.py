"""Any tree of parameters on any mesh: what holds of all of them, sought with hypothesis.

Each property is one function; the quick tier gives it few examples, the slow one many.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard.sharding.group import data_group
from gshard.sharding.layout import Layout
from gshard.train.comm import collectives
from tests.reference import path_name
from tests.sharding.random_states import (
    DTYPES,
    LEVELS,
    MESHES,
    PRIMES,
    SIZES,
    Case,
    cases,
    mesh_of,
    pattern_of,
    shapes,
    states,
    trees,
)


def tiers(quick: int, slow: int) -> Any:
    """How many examples each tier looks at."""
    return pytest.mark.parametrize(
        "examples",
        [pytest.param(quick, id="few"), pytest.param(slow, id="many", marks=pytest.mark.slow)],
    )


def explore(check: Callable[[Any], None], drawn: st.SearchStrategy, examples: int) -> None:
    """Runs a check on examples that are the same in every run."""
    settings(max_examples=examples, deadline=None, derandomize=True)(given(drawn)(check))()


def assert_same_bits(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# ---- there and back -----------------------------------------------------------------------------


def check_round_trip(case: Case) -> None:
    """Placed and fetched back, all is as it was; the caller's arrays are copied, not taken."""
    state = case.concrete()
    mine = state.params, state.opt_state
    before = jax.tree.map(lambda x: np.array(x), mine)
    divided, plan = case.divide(state)
    assert_same_bits(mine, before)
    on_host = [x for x in jax.tree.leaves(mine) if isinstance(x, np.ndarray)]
    for x in on_host:
        x.fill(0)  # what is placed may not change with it
    plain = plan.unwrap(divided)
    assert_same_bits(gshard.full_params(divided), before[0])
    assert_same_bits((plain.params, plain.opt_state), before)
    assert plain.tx is state.tx and plain.step == 0
    for x in jax.tree.leaves(divided):
        x.delete()  # as a step does that takes over its memory
    if not on_host:
        assert_same_bits(mine, before)


@tiers(quick=50, slow=500)
def test_a_state_comes_back_bit_by_bit(examples):
    explore(check_round_trip, states(), examples)


# ---- which leaves are sharded, and along what ---------------------------------------------------


def allowed(case: Case, path: str, shape: tuple[int, ...]) -> set[int | None]:
    """The dimensions that a parameter may be sharded along; None: it may be replicated."""
    scan_dim = case.scan_axes.get(pattern_of(path))
    scanned = set() if scan_dim is None else {scan_dim % len(shape)}
    layers = max(1, math.prod(shape[d] for d in scanned))
    dims = set(range(len(shape))) - scanned
    if not case.divides or math.prod(shape) // layers <= case.min_shard_size or not dims:
        return {None}
    even = {d for d in dims if shape[d] % case.parts == 0}
    if even or case.indivisible == "replicate":
        return even or {None}
    waste = {d: -shape[d] % case.parts / shape[d] for d in dims}
    return {d for d in dims if waste[d] == min(waste.values())}


def check_division(case: Case) -> None:
    """Large divisible arrays are sharded without padding, and their moments alike."""
    _, plan = case.divide(case.abstract())
    pairs, structure = jax.tree_util.tree_flatten_with_path(case.tree)

    def is_like_params(x: Any) -> bool:
        return jax.tree.structure(x) == structure

    moments = filter(is_like_params, jax.tree.leaves(plan.opt_state, is_leaf=is_like_params))
    moments = [jax.tree.leaves(tree) for tree in moments]
    stored, reduced = jax.tree.leaves(plan.params), jax.tree.leaves(plan.grads)
    assert len(stored) == len(reduced) == len(pairs)
    for i, (keys, leaf) in enumerate(pairs):
        found = reduced[i].dim
        assert found in allowed(case, path_name(keys), leaf.shape)
        assert stored[i].dim == (found if case.level == "p_g_os" else None)
        like = [leaves[i] for leaves in moments if leaves[i].shape == leaf.shape]
        assert like, "an optimizer without a moment of this parameter"
        assert [x.dim for x in like] == [found] * len(like)


@tiers(quick=300, slow=1500)
def test_large_divisible_arrays_are_sharded(examples):
    explore(check_division, states().map(lambda case: case._replace(as_pair=False)), examples)


# ---- bytes --------------------------------------------------------------------------------------


def check_bytes(case: Case) -> None:
    """Every device holds 1/N of what is sharded, all of what is replicated, and the padding."""
    state = case.concrete()
    divided, plan = case.divide(state)
    counts = jax.tree.leaves((divided.opt_state.scaler, divided.opt_state.guard))
    for name, held, plain, layouts, beside in (
        ("params", divided.params, state.params, plan.params, 0),
        (
            "opt_state",
            divided.opt_state.inner,
            state.opt_state,
            plan.opt_state,
            sum(x.nbytes for x in counts),  # of scale and guard, replicated
        ),
    ):
        at_rest = dict.fromkeys(plan.mesh.devices.flat, 0)
        expected = 0  # N times what is expected, to stay an integer
        for x, y, layout in zip(*map(jax.tree.leaves, (held, plain, layouts)), strict=True):
            for shard in x.addressable_shards:
                assert shard.data.nbytes == layout.bytes_per_device
                at_rest[shard.device] += shard.data.nbytes
            logical = math.prod(y.shape) * y.dtype.itemsize
            expected += logical * (case.parts if layout.dim is None else 1)
            assert 0 <= layout.padding < case.parts
            if layout.padding:
                expected += logical // y.shape[layout.dim] * layout.padding
        assert set(at_rest.values()) == {plan.bytes_per_device[name] - beside}
        assert (plan.bytes_per_device[name] - beside) * case.parts == expected


@tiers(quick=50, slow=500)
def test_bytes_on_a_device(examples):
    explore(check_bytes, states(), examples)


# ---- one step -----------------------------------------------------------------------------------

STEPPERS = [optax.sgd(0.5), optax.adamw(0.5, eps=0.1)]  # this eps: smooth where a gradient is small


@st.composite
def steps(draw: st.DrawFn, level: str) -> tuple[Case, int, int]:
    """A small state, the power of its parameters in the loss, the number of micro-batches."""
    sizes = [12, 3, 8, 1, 12, 3, 8, 16, 5, 7, 0]
    tree = draw(trees(shapes(sizes, most=200, max_rank=3), most=3))
    case = draw(cases(tree, {}, st.sampled_from(STEPPERS)))
    case = case._replace(
        level=level, min_shard_size=draw(st.sampled_from([0, 20])), indivisible="pad"
    )
    return case, draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))


def loss_of(power: int) -> Callable[[Any, Any], jax.Array]:
    """Linear or quadratic in every entry of every leaf, each with a weight of its own."""

    def loss(params: Any, batch: Any) -> jax.Array:
        total = jnp.zeros(())
        for x in jax.tree.leaves(params):
            entries = x.astype(jnp.float32).ravel() ** power
            total += jnp.vdot(1.5 + jnp.sin(jnp.arange(x.size)), entries)
        return jnp.mean(batch["weight"]) * total

    return loss


def check_step(drawn: tuple[Case, int, int]) -> None:
    """A step with other rows on every device is that of one device with plain JAX."""
    case, power, micro_batches = drawn
    rng, loss, tx = np.random.default_rng(case.seed), loss_of(power), case.tx
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), case.tree)
    before = jax.tree.map(lambda x: np.array(x), params)
    state = case.abstract().replace(params=params, opt_state=tx.init(params))
    divided, plan = case.divide(state)
    rows = 2 * micro_batches * plan.group.devices
    batch = {"weight": rng.uniform(0.5, 1.5, rows).astype(np.float32)}

    @jax.jit
    def plain(params: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, tx.init(params), params)
        return value, (optax.apply_updates(params, updates), opt_state)

    value, expected = plain(params)
    meant = gshard.GradScaler(enable=False)  # float16 without a copy
    step = gshard.make_train_step(loss, plan, micro_batches=micro_batches, scaler=meant)
    divided, metrics = step(divided, batch)
    found = plan.unwrap(divided)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5, atol=1e-5)
    found = jax.tree.leaves((found.params, found.opt_state))
    for x, y in zip(found, jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        eps = jnp.finfo(x.dtype).eps if jnp.issubdtype(x.dtype, jnp.inexact) else 0
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=8 * eps * np.abs(y).max(initial=1.0))
    assert_same_bits(params, before)  # alive, though the step took over the state


@tiers(quick=3, slow=30)
@pytest.mark.parametrize("level", LEVELS)
def test_a_step_is_that_of_one_device(level, examples):
    explore(check_step, steps(level), examples)


# ---- collectives --------------------------------------------------------------------------------


class Move(NamedTuple):
    """One leaf sharded along `dim`, over shard axes in an order of its own."""

    shape: tuple[int, ...]
    dim: int
    dtype: Any
    mesh: tuple[dict[str, int], int]
    shard_axes: tuple[str, ...]
    seed: int


@st.composite
def moves(draw: st.DrawFn) -> Move:
    shape = draw(shapes(SIZES + PRIMES, most=2**9, max_rank=4).filter(any))
    mesh = draw(MESHES)
    return Move(
        shape,
        draw(st.sampled_from([d for d, size in enumerate(shape) if size])),  # JAX gathers no 0 rows
        draw(st.sampled_from(DTYPES)),
        mesh,
        tuple(draw(st.permutations(sorted(mesh[0])))),
        draw(st.integers(0, 2**32)),
    )


def check_collectives(move: Move) -> None:
    """All-gathering the shards gives the full array; scattering sums inside each replica."""
    mesh, rng = mesh_of(*move.mesh), np.random.default_rng(move.seed)
    group = data_group(mesh, shard_axes=move.shard_axes)
    layout = Layout("x", move.shape, move.dtype, move.dim, group, None, "")
    whole = rng.integers(-9, 9, move.shape).astype(move.dtype)
    each = rng.integers(-9, 9, (group.devices, *move.shape)).astype(move.dtype)  # sums are exact

    def on_device(whole: jax.Array, mine: jax.Array) -> list[jax.Array]:
        (part,) = collectives.slice_shards([whole], [layout])
        moved = [part, collectives.gather(part, layout), collectives.scatter(mine[0], layout)]
        return [x[None] for x in moved]

    rows = jax.P(group.axes)
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=(jax.P(), rows), out_specs=rows, check_vma=False
    )
    parts, wholes, sums = map(np.asarray, jax.jit(mapped)(whole, each))

    def cut(x: np.ndarray) -> list[np.ndarray]:
        """The parts of one shard group, in order."""
        widths = [(0, -n % group.size if d == move.dim else 0) for d, n in enumerate(x.shape)]
        return np.split(np.pad(x, widths), group.size, axis=move.dim)

    np.testing.assert_array_equal(wholes, np.stack([whole] * group.devices))
    np.testing.assert_array_equal(parts, np.stack(cut(whole) * group.replicas))
    totals = each.reshape(group.replicas, group.size, *move.shape).sum(1, dtype=move.dtype)
    np.testing.assert_array_equal(sums, np.stack([part for total in totals for part in cut(total)]))


@tiers(quick=25, slow=200)
def test_gather_and_scatter_of_any_leaf(examples):
    explore(check_collectives, moves(), examples)
