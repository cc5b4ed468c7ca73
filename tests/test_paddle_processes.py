"""Paddle's rhythm over two real processes: the numbers of one device, one checkpoint of both."""

from __future__ import annotations

import numpy as np
import pytest

from tests.paddle_worker import LEVELS, ROWS, STEPS
from tests.test_paddle import assert_same, on_one_device, rows
from tests.test_two_processes import run_workers


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_workers(tmp_path_factory.mktemp("paddle"), "paddle_worker")


@pytest.mark.parametrize("level", LEVELS)
def test_two_processes_are_one_device(found, level):
    """Trained, saved, loaded at another level, and a last step whose gradients waited."""
    losses, wanted = on_one_device([rows(ROWS, seed) for seed in range(STEPS)])
    for process in found:
        np.testing.assert_allclose(process[f"{level}/losses"], losses[:-1], rtol=1e-5)
        start = f"{level}/params/"
        params = {k.removeprefix(start): x for k, x in process.items() if k.startswith(start)}
        assert_same(params, wanted)
