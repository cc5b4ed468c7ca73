"""Checkpoints of thousands of processes: this one is real, and the files of the others are made."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from gshard.checkpoint.background_save import BackgroundSave
from gshard.checkpoint.checksums import process_manifest


@pytest.mark.slow
def test_waiting_for_thousands_of_manifests_takes_no_hundredth_of_a_core(tmp_path: Path):
    (tmp_path / "manifests").mkdir()
    paths = [tmp_path / process_manifest(rank) for rank in range(10_000)]
    for path in paths[:5000]:
        path.touch()
    saving = BackgroundSave(tmp_path, 1, 0, len(paths), lambda: None, (), lambda: None)
    last = threading.Timer(15, lambda: [path.touch() for path in paths])
    began, cpu = time.monotonic(), time.thread_time()
    last.start()
    assert saving._all_files_written()
    waited, used = time.monotonic() - began, time.thread_time() - cpu
    assert 15 < waited < 20
    assert used < 0.01 * waited
