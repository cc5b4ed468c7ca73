"""Checkpoints of several real processes: each writes its part, all agree, any number restores."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import gshard
from tests.processes import run_workers
from tests.saving_worker import AFTER, BEFORE
from tests.test_checkpoints import Training, assert_equal_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the parameters stay whole"),
    pytest.mark.filterwarnings("ignore:.*segment_size changes nothing"),
]


@pytest.fixture(
    scope="module", params=[(2, 2), pytest.param((4, 1), marks=pytest.mark.slow)], ids=str
)
def found(request, tmp_path_factory):
    """The folder, what one process computed alone, and what each of several saw."""
    processes, each = request.param
    folder = tmp_path_factory.mktemp("processes")
    alone = Training("p_g_os", 8)
    alone.train(*BEFORE)
    with gshard.Checkpointer(folder / "alone") as checkpointer:
        checkpointer.save(2, alone.state, data_state={"position": 17})
    expected = alone.train(*AFTER)
    arguments = (str(each), str(folder))
    seen = run_workers(folder, "saving_worker", *arguments, processes=processes, devices_each=each)
    return folder, expected, seen


def test_several_processes_restore_what_one_wrote(found):
    _, expected, seen = found
    for process in seen:
        np.testing.assert_allclose(process["alone"], expected, rtol=2e-6)
        assert process["alone data"].tolist() == [17]


def test_what_they_wrote_is_what_they_had(found):
    _, _, seen = found
    for rank, process in enumerate(seen):
        np.testing.assert_allclose(process["again"], process["after"], rtol=1e-6)
        assert process["rank"].tolist() == [rank]  # each its own data state
        assert process["writer"].tolist() == [0]  # the metadata of the first
        assert process["steps"].tolist() == [2]


def test_one_process_restores_what_several_wrote(found):
    folder, _, seen = found
    with gshard.Checkpointer(folder / "together") as checkpointer:
        assert checkpointer.verify(3) == []
        run = Training("os", 3)
        with pytest.warns(gshard.GShardWarning, match="another data state for each"):
            new = gshard.Checkpointer(_with_data(folder)).restore(2, like=run.state, verify=False)
        assert new.data_state is None
        other = Training("dp", 1)
        run.state = checkpointer.restore(3, like=run.state).state
        other.state = checkpointer.restore(3, like=other.state).state
        assert_equal_bits(run.whole(), other.whole())
    own = Training("p_g_os", 4)
    losses = own.train(*BEFORE, *AFTER)[len(BEFORE) :]
    np.testing.assert_allclose(seen[0]["after"], losses, rtol=2e-6)


def _with_data(folder):
    """Step 2 again, under its own name: the processes have deleted it since."""
    copy = folder / "copy"
    if not copy.exists():
        shutil.copytree(folder / "together" / "3", copy / "2")
        for rank in range(4):
            path = copy / "2" / "data_state" / f"process_{rank}.json"
            path.write_text(json.dumps({"json": {"rank": rank}}))
    return copy


def test_what_one_does_wrong_all_are_told(found):
    _, _, seen = found
    for process in seen:
        steps, metadata, old, apart = process["said"].tolist()
        assert "the processes do not do the same: save of step 10 (process 0)" in steps
        assert "metadata holds a object" in metadata
        assert "not after the newest one, 2" in old
        assert "does not see" in apart or "one directory" in apart
        assert process["damaged"].tolist()[0].startswith("arrays/ocdbt.process_1/d/")
        assert process["left"].tolist() == [".gshard_lock", "3"]
