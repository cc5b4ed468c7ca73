"""`ZeroRedundancyOptimizer` over two real processes: the numbers of one device, on each of them."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.processes import run_workers_once
from tests.pytorch.test_zero_redundancy_optimizer import Net, loss_fn, on_one_device, rows
from tests.pytorch.zero_worker import PARTITIONS, ROWS, STEPS, UNEVEN


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_workers_once(tmp_path_factory, "zero", "pytorch.zero_worker")


@pytest.mark.parametrize("partition", PARTITIONS)
def test_two_processes_are_one_device(found, partition):
    """Trained, a step undone from local shards or from full values, and another step."""
    wanted = on_one_device([rows(ROWS, seed) for seed in range(STEPS)], learning_rate=0.01)
    for process in found:
        for i, y in enumerate(jax.tree.leaves(wanted)):
            x = process[f"{partition}/params/{i}"]
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    names = [name for name in found[0] if name.startswith(f"{partition}/state")]
    assert len(names) == 9
    for name in names:
        np.testing.assert_array_equal(found[0][name], found[1][name])


def test_uneven_inputs_of_processes(found):
    """One batch on the first process, three on the second."""
    first = jax.tree.map(lambda *x: np.concatenate(x), rows(UNEVEN, 0), rows(UNEVEN, 10))
    wanted = on_one_device([first, rows(UNEVEN, 11), rows(UNEVEN, 12)], learning_rate=0.01)
    for process in found:
        for i, y in enumerate(jax.tree.leaves(wanted)):
            np.testing.assert_allclose(process[f"join/{i}"], y, rtol=1e-5, atol=1e-6)


def test_a_last_batch_with_nan_is_not_seen_while_others_go_on(found):
    """Zero times NaN is NaN: the gradient is that of the process that has data."""
    model, batch = Net(), jax.tree.map(jnp.asarray, rows(UNEVEN, 1))
    wanted = jax.tree.leaves(nnx.jit(nnx.grad(loss_fn))(model, batch))
    for process in found:
        for name, i in itertools.product(("own", "global"), range(len(wanted))):
            x = process[f"beside NaN/{name}/{i}"]
            np.testing.assert_allclose(x, wanted[i], rtol=1e-5, atol=1e-6)


def test_a_model_of_one_process_joins_nobody(found):
    assert [int(process["own"]) for process in found] == [3, 5]
