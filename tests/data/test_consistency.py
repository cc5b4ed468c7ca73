"""Two real processes give batches that agree and that do not, and load the same global batches."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import gshard
from tests.data.data_worker import loaded
from tests.processes import run_workers_once

PROCESSES, DEVICES_EACH = 2, 2


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_workers_once(tmp_path_factory, "data", "data.data_worker")


FINE = {
    "equal": "{'x': (12, 2)}",
    "identical_later": "{'x': (12, 2)}",
    "scalars": "{'step': (), 'x': (8, 2)}",
    "constant": "{'x': (8, 2)}",
    "nan": "{'x': (8, 2)}",
    "same_head": "{'x': (8, 262208)}",
    "loader_fine": "5",
    "two_kinds": "{'x': (8, 2)}",
    "uneven": "{'x': (6, 2)}",
    "shared_place": "{'x': (4, 2)}",
}


@pytest.mark.parametrize("case", FINE)
def test_batches_that_agree_say_nothing(found, case):
    assert [str(process[case]) for process in found] == [FINE[case]] * PROCESSES


def test_the_dtype_of_a_python_number_stays_weak(found):
    assert [process["numbers"].tolist() for process in found] == [[True, True, False]] * PROCESSES


REFUSED = {
    "unequal_first": (
        "error in 0",
        "the same number of examples",
        "4 for 2 devices on process 0, 6",
    ),
    "unequal_later": (
        "error in 1",
        "the same number of examples",
        "4 for 2 devices on process 0, 6",
    ),
    "uneven_wrong": (
        "error in 0",
        "4 for 2 devices on process 0, 4 for 1 device on process 1",
        "Weighted",
    ),
    "one_does_not_divide": (
        "error in 0",
        "batch['x'] has 5 examples, which is not a multiple of the 2",
    ),
    "dtypes": ("error in 0", "x float32[examples, 2] on process 0, x float16[examples, 2] on"),
    "widths": ("error in 0", "x float32[examples, 2] on process 0, x float32[examples, 3] on"),
    "crosswise": ("error in 2", "the same number of examples", "4 for 2 devices on process 0, 8"),
    "trees": ("different arrays: tree ((*,)) on process 0, tree ([*]) on process 1",),
    "values": ("different arrays: step int[] = 3 on process 0, step int[] = 4 on process 1",),
    "many_arrays": (
        "different arrays: z float32[examples, 2] on process 0, z float32[examples, 3] on",
    ),
    "keys": ("error in 0", "batch['k'] contains keys of jax.random", "jax.random.key_data"),
    "one_text": ("batch['t'] is 'text'",),
    "one_object": ("has dtype object",),
    "shared_differ": ("processes 0, 1 have devices for the same examples", "gave different data"),
    "loader_seed": ("DataLoaders differ in seed: 0 on process 0, 1 on process 1",),
    "loader_length": ("length: 60 on process 0, 72 on process 1",),
    "loader_batch_size": ("differ in batch_size: 12 on process 0, 24 on process 1",),
    "loader_shuffle": ("differ in shuffle: 0 on process 0, 1 on process 1",),
    "loader_num_epochs": ("differ in num_epochs: 1 on process 0, 2 on process 1",),
    "loader_form": ("examples of", "example int64[2] on process 0, example int64[3] on process 1"),
    "loader_data": ("differ in checksum",),
    "loader_state": ("differ in position: 0 on process 0, 2 on process 1",),
    "names": ("error in 0", "a float32[examples, 2] on process 0, b float32[examples, 2] on"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_batches_that_differ_are_refused_by_every_process(found, case):
    for process in found:
        for words in REFUSED[case]:
            assert words in str(process[case])


def test_a_process_hears_of_a_batch_that_another_cannot_place(found):
    assert "process 1 cannot place its batch: batch['x']" in str(found[0]["one_does_not_divide"])
    assert "cannot place" not in str(found[1]["one_does_not_divide"])


@pytest.mark.parametrize("case", ["identical", "constant_then_same"])
def test_the_same_data_on_every_process_is_warned_about_once(found, case):
    for process in found:
        said = str(process[case])
        assert said.count("warning") == 1
        assert "processes 0, 1 gave the same data" in said


def test_what_did_not_change_is_not_compared_again(found):
    # Of 15 batches of two kinds; each change from one to the other is compared.
    assert [int(process["exchanges"]) for process in found] == [11, 11]


def test_a_process_without_a_device_in_the_mesh_is_not_waited_for(found):
    assert str(found[0]["without_the_other"]) == "{'x': (6, 2)}"


def test_a_fault_of_one_process_does_not_wait_as_long(found):
    assert "batch['x'] has 5 examples" in str(found[1]["fault_alone"])
    assert 1.9 < float(found[1]["fault_seconds"]) < 3.9


def test_local_batches_become_global_one_by_one(found):
    assert found[0]["global_batches"].tolist() == [[8, 2], [12, 2]]


def together(found, name, i):
    """A global batch from what the two processes held of it; both may hold the same rows."""
    prefix = f"loaded/{name}/{i}/"
    keys = [key for key in found[0] if key.startswith(prefix)]
    held = [{k.removeprefix(prefix): process[k] for k in keys} for process in found]
    return {k: np.where(held[0][k] != 0, held[0][k], held[1][k]) for k in held[0]}


@pytest.mark.parametrize("name", ["all", "uneven", "mixed", "shared"])
def test_loaded_batches_are_those_of_one_process(found, name):
    devices = jax.devices()[: PROCESSES * DEVICES_EACH]
    order = {"uneven": devices[:3], "mixed": [devices[i] for i in (0, 2, 1, 3)]}.get(name, devices)
    extra = {"model": 4} if name == "shared" else None
    mesh = gshard.make_mesh(devices=order, extra=extra)
    alone = loaded(mesh)
    assert len(alone) == 10
    for i, batch in enumerate(alone):
        two = together(found, name, i)
        assert set(two) == {"x", "y", "noise", "mask"}
        for key, x in batch.items():
            np.testing.assert_array_equal(two[key], x)
    # Each holds its own rows alone, and all of these are of this epoch's and no other place.
    if name != "shared":
        both = [process[f"loaded/{name}/0/noise"] != 0 for process in found]
        assert (both[0] ^ both[1]).all()
    # What two processes began one can go on with.
    rest = loaded(mesh, {"epoch": 0, "position": 3})
    assert len(rest) == 7
    for i, batch in enumerate(rest, start=3):
        np.testing.assert_array_equal(together(found, name, i)["x"], batch["x"])
