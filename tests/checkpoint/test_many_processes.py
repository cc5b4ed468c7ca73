"""Checkpoints of thousands of processes: this one is real, and the files of the others are made."""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import gshard
from gshard.checkpoint.background_save import BackgroundSave
from gshard.checkpoint.checksums import verify_step
from gshard.checkpoint.data_state import data_state_name, packed_data_state, read_data_state
from gshard.checkpoint.disk import DiskDraft
from gshard.checkpoint.manifest import (
    process_manifest,
    write_combined_manifest,
    write_process_manifest,
)
from gshard.checkpoint.read_arrays import read_arrays
from gshard.checkpoint.step_files import StepFolder

PROCESSES = (3, 60)
_opened: list[str] | None = None


def _note(event: str, arguments: tuple) -> None:
    if event == "open" and _opened is not None:
        _opened.append(str(arguments[0]))


sys.addaudithook(_note)  # there is no way to remove one


@contextmanager
def opened(folder: Path) -> Iterator[list[str]]:
    """The files of a folder that Python opens in the meantime."""
    global _opened
    _opened = found = []
    try:
        yield found
    finally:
        _opened = None
        found[:] = [name for name in found if name.startswith(str(folder))]


def step_of(processes: int, directory: Path, data_states: list[bytes]) -> tuple[Path, dict]:
    """A step as so many processes would write it, the first of which has all arrays."""
    params = {"w": np.ones((8, 4), np.float32)}
    mesh = gshard.make_mesh(devices=jax.devices()[:1])
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "os")
    with gshard.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state)
    step = directory / "1"
    description = json.loads((step / "gshard.json").read_text())
    (step / "gshard.json").write_text(json.dumps(description | {"processes": processes}))
    (step / "manifest.json").unlink()
    wanted = {"params/w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=plan.sharding())}
    first = (step / process_manifest(0)).read_text()
    for rank in range(processes):
        name = f"arrays/array_metadatas/process_{rank}"
        (step / name).write_bytes((step / "arrays/array_metadatas/process_0").read_bytes())
        (step / data_state_name(rank)).write_bytes(data_states[rank % len(data_states)])
        own = [*json.loads(first.splitlines()[0])] if rank == 0 else [name]
        write_process_manifest(step, rank, [*own, data_state_name(rank)], {})
    write_combined_manifest(step, processes)
    return step, wanted


def test_what_one_process_verifies_does_not_grow_with_their_number(tmp_path):
    counts = []
    for processes in PROCESSES:
        step, _ = step_of(processes, tmp_path / str(processes), [b"{}"])
        with opened(step) as found:
            assert verify_step(StepFolder(step), (2, processes)) == []
        assert len({name for name in found if "/manifests/" in name}) == 1
        counts.append(len({*found}))
    assert counts[0] >= counts[1] > 3


@pytest.mark.parametrize("verifying", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("processes", [1, 5, 12])
def test_together_they_verify_every_file(tmp_path, processes, verifying):
    step, _ = step_of(processes, tmp_path, [b"{}"])
    with opened(step) as found:
        for rank in range(verifying):
            assert verify_step(StepFolder(step), (rank, verifying)) == []
    assert {*found} == {str(path) for path in step.rglob("*") if path.is_file()}


def test_a_process_reads_its_own_data_state_alone(tmp_path, monkeypatch):
    for processes in PROCESSES:
        states = [packed_data_state({"at": rank}) for rank in range(processes)]
        step, _ = step_of(processes, tmp_path / str(processes), states)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "process_count", lambda n=processes: n)
            patch.setattr(jax, "process_index", lambda: 2)
            with opened(step) as found:
                assert read_data_state(StepFolder(step), processes) == {"at": 2}
        assert found == [str(step / data_state_name(2))]


def test_after_a_change_of_their_number_a_process_compares_checksums(tmp_path):
    step, _ = step_of(60, tmp_path / "same", [packed_data_state({"at": 1})])
    with opened(step) as found:
        assert read_data_state(StepFolder(step), 60) == {"at": 1}
    assert found == [str(step / "manifest.json"), str(step / data_state_name(0))]
    states = [packed_data_state({"at": rank}) for rank in (1, 2)]
    step, _ = step_of(60, tmp_path / "other", states)
    with pytest.warns(gshard.GShardWarning, match="a different data state for each of the 60"):
        assert read_data_state(StepFolder(step), 60) is None


def test_arrays_are_read_without_a_file_of_every_process(tmp_path):
    step, wanted = step_of(60, tmp_path, [b"{}"])
    shutil.rmtree(step / "arrays" / "array_metadatas")
    assert (np.asarray(read_arrays(step / "arrays", wanted)["params/w"]) == 1).all()


@pytest.mark.slow
def test_waiting_for_thousands_of_manifests_takes_no_hundredth_of_a_core(tmp_path: Path):
    (tmp_path / "manifests").mkdir()
    paths = [tmp_path / process_manifest(rank) for rank in range(10_000)]
    for path in paths[:5000]:
        path.touch()
    saving = BackgroundSave(DiskDraft(tmp_path, 1), 0, len(paths), lambda: None, lambda: None)
    last = threading.Timer(15, lambda: [path.touch() for path in paths])
    began, cpu = time.monotonic(), time.thread_time()
    last.start()
    assert saving._all_files_written()
    waited, used = time.monotonic() - began, time.thread_time() - cpu
    assert 15 < waited < 20
    assert used < 0.01 * waited
