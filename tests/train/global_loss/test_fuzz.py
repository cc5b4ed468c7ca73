"""Random losses, in parts under `jax.vmap(axis_name=)`: right as on one device, or refused."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard._util.errors import GShardError
from gshard.sharding.group import Group
from gshard.train.global_loss.shares import GlobalBatch
from gshard.train.loss import add_sums, as_sums, reduce_sums
from tests.train.global_loss.random_programs import PROGRAMS, Program, arrays_of, loss_of

AXIS = "data"
KEY = 3
# Rounding in float32, and in bfloat16 where the loss computes in it, of the largest entry.
TOLERANCE, NARROW = 1e-4, 3e-2
_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def compiled(f: Any, *args: Any) -> Any:
    return jax.jit(f).lower(*args).compile(compiler_options=_FAST)(*args)


def on_one_device(program: Program, params: Any, batch: Any) -> Any:
    def run(params: Any, batch: Any) -> Any:
        loss = partial(loss_of, program, key=jax.random.key(KEY))
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return value, aux, grads

    return compiled(run, params, batch)


def in_parts(program: Program, devices: int, micro_batches: int, params: Any, batch: Any) -> Any:
    """Loss, aux and gradient from the shares of all parts, as a train step adds them up."""
    group = Group((AXIS,), (), (devices,), 1)
    leaves, structure = jax.tree.flatten(params)

    def form(leaves: Any, batch: Any, key: Any) -> Any:
        params = jax.tree.unflatten(structure, leaves)
        loss, aux = loss_of(program, params, batch, key)
        return loss.astype(jnp.float32), (None, aux, {})

    def one_device(leaves: Any, batch: Any, key: Any) -> Any:
        parts = GlobalBatch(group, micro_batches)

        def share(leaves: Any, i: int, collects: bool = False) -> Any:
            parts.collects, parts.lacks_sum = collects, False
            own = jax.tree.map(lambda x: x[i], batch)
            return parts.shares(form, False, len(leaves), leaves, own, key, i)

        while share(leaves, 0) and parts.lacks_sum:
            sums = [share(leaves, i, collects=True) for i in range(micro_batches)]
            parts.known.append(jax.lax.psum(sum(sums), AXIS))

        def total(leaves: Any) -> Any:
            shares = [share(leaves, i) for i in range(micro_batches)]
            weights = [1 if w is None else w for _, (w, *_) in shares]
            weight = sum(weights) if shares[0][1][0] is not None else jnp.float32(1) / devices
            aux = [as_sums(aux, None) for _, (_, aux, _) in shares]
            return sum(x for x, _ in shares), (weight, reduce(add_sums, aux))

        (loss, (weight, aux)), grads = jax.value_and_grad(total, has_aux=True)(leaves)
        loss, weight, grads = jax.lax.psum((loss, weight, grads), AXIS)
        weight = jnp.where(weight == 0, 1, weight)
        aux = reduce_sums(aux, None, (AXIS,))
        return loss / weight, aux, jax.tree.map(lambda g: g / weight, grads)

    def run(leaves: Any, batch: Any) -> Any:
        split = (devices, micro_batches, -1)
        batch = jax.tree.map(lambda x: x.reshape(*split, *x.shape[1:]), batch)
        mapped = jax.vmap(one_device, (None, 0, 0), axis_name=AXIS, axis_size=devices)
        # One key for each device, all alike: vmap cannot mix bits of one key and many positions.
        keys = jnp.stack([jax.random.key(KEY)] * devices)
        value, aux, grads = mapped(leaves, batch, keys)
        return value, aux, jax.tree.unflatten(structure, grads)

    return compiled(run, leaves, batch)


def difference(found: Any, wanted: Any) -> float:
    """The largest over the leaves, relative to 1 and to the largest entry of the leaf."""
    worst = 0.0
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        y = np.asarray(y, np.float64)
        x = np.asarray(x, np.float64)
        scale = max(1.0, np.abs(y).max(initial=0))
        for part in x:  # every device has the result
            assert part.shape == y.shape
            same = (part == y) | (np.isnan(part) & np.isnan(y))
            errors = np.where(same, 0, np.abs(part - y))
            worst = max(
                worst,
                float(errors.max(initial=0)) / scale if not np.isnan(errors).any() else np.inf,
            )
    return worst


def outcome(program: Program, devices: int, micro_batches: int) -> str:
    """`right` or `refused`; anything else raises."""
    if program.sizes[0] % (devices * micro_batches):
        micro_batches = 1
    params, batch = arrays_of(program, 0, jnp.float32)
    wanted = on_one_device(program, params, batch)
    try:
        found = in_parts(program, devices, micro_batches, params, batch)
    except GShardError as error:
        assert micro_batches > 1 and "micro_batches=1" in str(error), error
        return "refused"
    narrow = "bf16" in str(
        jax.make_jaxpr(partial(loss_of, program))(params, batch, jax.random.key(0))
    )
    if (error := difference(found, wanted)) <= (NARROW if narrow else TOLERANCE):
        return "right"
    with jax.enable_x64(True):  # rounding at a kink, or a loss that amplifies it
        arrays = arrays_of(program, 0, jnp.float64)
        wide = difference(
            in_parts(program, devices, micro_batches, *arrays), on_one_device(program, *arrays)
        )
        assert wide <= 1e-6, f"{error:.2g} of float32, {wide:.2g} of float64"
    return "right in float64"


CASES = st.tuples(PROGRAMS, st.sampled_from([2, 3]), st.sampled_from([1, 1, 1, 1, 2]))


@pytest.mark.filterwarnings("ignore:micro_batches=.* runs forward once more")
@pytest.mark.filterwarnings("ignore:the loss reads no array of its batch")  # some programs do not
@pytest.mark.parametrize(
    "examples",
    [pytest.param(40, id="few"), pytest.param(200, id="many", marks=pytest.mark.slow)],
)
def test_random_losses_are_those_of_one_device(examples):
    seen = Counter[str]()

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(CASES)
    def check(case: Any) -> None:
        seen[outcome(*case)] += 1

    check()
    print(dict(seen), file=sys.stderr)
    assert seen["right"] > 0.7 * examples
