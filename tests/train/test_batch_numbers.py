"""The numbers of the batches ride in the reduction of the loss: no collective is added."""

from __future__ import annotations

import gc
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard.analysis.hlo.program import read_program
from gshard.data.batch_number import _numbers, number_of, set_number
from gshard.train.batch_numbers import _bits, _Call, _checksum, _fault_of, with_scalars
from gshard.train.late_checks import late_checks
from gshard.train_state import Components
from tests.tiers import quick

PARAMS = {f"w{i}": np.full((8, 8), 0.1 + i, np.float32) for i in range(6)}
BATCH = {"x": np.arange(128.0, dtype=np.float32).reshape(16, 8)}
LEVELS = ("dp", "os", "os_g", "p_g_os")
CASES = [(level, size, k) for level in LEVELS for size in (0, 128) for k in (1, 2)]


def loss(params, batch):
    x = batch["x"]
    for w in params.values():
        x = x @ w
    return (x**2).mean()


def made(level, numbers, **options):
    """A step, whose numbers are on although there is one process."""
    state, plan = gshard.shard_train_state(
        (PARAMS, optax.sgd(0.1)), gshard.make_mesh(replica=2), level, min_shard_size=0
    )
    step = gshard.make_train_step(loss, plan, **options)
    step.numbers.is_on = numbers
    return state, plan, step


def collectives(level, numbers, size, k):
    state, _, step = made(level, numbers, bucket_size=size, micro_batches=k)
    program = read_program(step.lower(state, BATCH).compile().as_text())
    return Counter((x.kind, x.times) for x in program.collectives if x.group_size > 1)


@pytest.mark.parametrize(("level", "size", "k"), quick(CASES, [("dp", 128, 1), ("p_g_os", 128, 1)]))
def test_no_collective_is_added(level, size, k):
    assert collectives(level, True, size, k) == collectives(level, False, size, k)


def test_the_numbers_change_no_result_and_arrive():
    results = []
    for numbers in (False, True):
        state, plan, step = made("os", numbers)
        batch = gshard.shard_batch(BATCH, plan)
        set_number(batch, 70)
        state, metrics = step(state, batch)
        results.append([float(metrics["loss"]), *map(np.asarray, jax.tree.leaves(state.params))])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)
    sums = np.asarray(late_checks(plan)._due[0][1].args[0].sums)
    np.testing.assert_array_equal(sums[:5], 8 * np.array([1, 70 % 64, (70 % 64) ** 2, 0, 0]))


@pytest.mark.parametrize(("devices", "modulus"), [(2, 64), (8, 64), (4096, 64), (65_536, 16)])
@pytest.mark.parametrize(("own", "other"), [(5, 6), (64, 63), (63, 64), (10, 40), (129, 127)])
def test_two_numbers_are_told_apart_and_named(devices, modulus, own, other):
    if abs(own - other) >= modulus / 2:
        other = own + 7  # further apart they have other names

    def fault(numbers):
        rows = [[1, x % modulus, (x % modulus) ** 2, 3, 9, 2, 4, 5, 25] for x in numbers]
        sums = np.sum(rows, axis=0, dtype=np.float32)
        return _fault_of(_Call(1, own, 3, sums), devices)  # pyright: ignore

    assert not fault([own] * devices)
    for many in {1, devices // 2, devices - 1}:
        said = fault([own] * (devices - many) + [other] * many)
        assert f"gave batch {own} of its loader and another process gave batch {other}:" in said


@pytest.mark.parametrize("devices", [1, 2, 4096, 4097, 16_384, 16_385, 2**20])
def test_sums_of_squares_are_exact_on_any_number_of_devices(devices):
    largest = (1 << _bits(devices)) - 1
    assert 1 <= largest < 64 and devices * largest**2 < 2**24


def test_a_batch_without_a_number_fits_any():
    rows = [[1, 5, 25, 1, 1, *[0] * 4]] * 3 + [[0, 0, 0, 1, 1, *[0] * 4]] * 5
    assert not _fault_of(_Call(1, None, 1, np.sum(rows, axis=0, dtype=np.float32)), 8)  # pyright: ignore


def test_other_scalars_of_state_and_batch_are_told_apart():
    def numbers(count, rate, batch):
        parts = Components({}, {"count": jnp.int32(count), "rate": jnp.float32(rate)}, count, {})
        return np.asarray(with_scalars(jnp.zeros((8, 5)), parts, batch, plan))[0, 5:].tolist()

    def fault(last):
        rows = [[0, 0, 0, 1, 1, *first]] * 7 + [[0, 0, 0, 1, 1, *last]]
        return _fault_of(_Call(4, None, 1, np.sum(rows, axis=0, dtype=np.float32)), 8)  # pyright: ignore

    _, plan, _ = made("os", False)
    found = [numbers(jnp.int32(i), rate, BATCH) for i in range(4) for rate in (0.1, 0.2, 1e-3)]
    assert all(a != b for a, b in itertools.pairwise(found))
    assert all(n**2 == square < 64**2 for n, square, *_ in found)
    first, other = found[:2]
    assert fault(other).startswith("in call 4 of this step the processes gave different states")
    assert not fault(numbers(jnp.int32(0), 0.1, {"x": BATCH["x"] + 1}))

    scalars = [1.0, 2.0, np.int32(3), True, False, jnp.bfloat16(0.5), 1 + 2j, 32 + 1j]
    scalars.append(jax.random.key(1))
    found = [numbers(jnp.int32(0), 0.1, {**BATCH, "scale": jnp.asarray(x)}) for x in scalars]
    assert all(x[:2] == first[:2] for x in found)
    assert all(a[2:] != b[2:] for a, b in itertools.pairwise(found))
    assert fault(found[0]).startswith("in call 4 of this step the processes gave batches with diff")


def test_scalars_with_one_checksum_have_two_at_the_next_step():
    def checksum(scalars, step):
        return _checksum(tuple(map(jnp.float32, scalars)), jnp.int32(step), 6)

    first = checksum((0.0, 2.0), 0)
    equal = [x for x in range(1, 500) if checksum((x, 2.0), 0) == first]
    assert 1 <= len(equal) <= 30
    for step in (1, 2):
        assert not all(checksum((x, 2.0), step) == checksum((0.0, 2.0), step) for x in equal)
    differ = [checksum((1.0, 2.0), step) != checksum((-1.0, -2.0), step) for step in range(8)]
    assert sum(differ) >= 6


def test_numbers_are_those_of_the_loader_and_of_no_other_array():
    _, plan, _ = made("os", False)
    loader = gshard.DataLoader({"x": np.zeros((48, 8), np.float32)}, 16, plan, num_epochs=2)
    before = len(_numbers)
    assert [number_of(batch) for batch in loader] == [0, 1, 2, 3, 4, 5]
    batches = list(gshard.global_batches([BATCH] * 3, plan))
    assert [number_of(batch) for batch in batches] == [0, 1, 2]
    positions = gshard.shard_batch(np.arange(16), plan)  # all batches have this array
    shared = gshard.global_batches([{"a": positions, **BATCH}] * 3, plan)
    assert [number_of(batch) for batch in shared] == [0, 1, 2]
    assert number_of(jax.tree.map(lambda x: x + 1, batches[1])) is None
    assert number_of(BATCH) is None
    del batches, loader, positions, shared
    gc.collect()
    assert len(_numbers) == before
