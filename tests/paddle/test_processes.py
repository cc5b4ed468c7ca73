"""Paddle's rhythm over two real processes: the numbers of one device, one checkpoint of both."""

from __future__ import annotations

import numpy as np
import pytest

from tests.paddle.paddle_worker import LEVELS, ROWS, STEPS
from tests.paddle.test_group_sharded import assert_same, on_one_device, rows
from tests.processes import run_workers
from tests.tiers import quick


@pytest.mark.parametrize("level", quick(LEVELS, ["p_g_os"]))
def test_two_processes_are_one_device(tmp_path, level):
    """Trained, saved, loaded at another level, and a last step whose gradients waited."""
    losses, wanted = on_one_device([rows(ROWS, seed) for seed in range(STEPS)])
    for process in run_workers(tmp_path, "paddle.paddle_worker", level):
        np.testing.assert_allclose(process["losses"], losses[:-1], rtol=1e-5)
        start = "params/"
        params = {k.removeprefix(start): x for k, x in process.items() if k.startswith(start)}
        assert_same(params, wanted)
