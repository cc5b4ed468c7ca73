"""Two processes that send or store in 8 bits train as one with as many devices."""

from __future__ import annotations

import numpy as np
import pytest

from tests.processes import run_workers_once
from tests.train.quantized_worker import KINDS, LEVELS


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What one process of 4 devices saved, and each of two with 2."""

    def of(processes):
        return run_workers_once(
            tmp_path_factory,
            f"quantized-{processes}",
            "train.quantized_worker",
            processes=processes,
            devices_each=4 // processes,
        )

    return of(1) + of(2)


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(found, kind, level):
    one, *two = found
    for name in ("first", "bias", "second", "losses"):
        name, exact = f"{kind}/{level}/{name}", one[f"float32/{level}/{name}"]
        off = np.sqrt(np.mean((one[name] - exact) ** 2))
        for process in two:
            np.testing.assert_array_equal(process[name], two[0][name], err_msg=name)
            if kind in ("state", "both"):  # what is rounded up depends on the last bits of sums
                assert np.sqrt(np.mean((process[name] - one[name]) ** 2)) <= 1.5 * off, name
            else:
                np.testing.assert_allclose(process[name], one[name], atol=1e-5, err_msg=name)
        assert (off > 0) == (kind != "float32")
    losses = (x[f"{kind}/{level}/losses"] for x in (one, two[0]))
    for x in losses:
        np.testing.assert_allclose(x, one[f"float32/{level}/losses"], rtol=0.02)
