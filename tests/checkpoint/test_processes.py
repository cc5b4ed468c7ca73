"""Checkpoints of several real processes: each writes its part, all agree, any number restores."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from tests.checkpoint.saving_worker import AFTER, BEFORE, REPLACED
from tests.checkpoint.test_checkpoints import Training, assert_equal_bits
from tests.processes import run_workers
from tests.tiers import quick

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore:.*min_shard_size changes nothing"),
]


@pytest.mark.parametrize(("processes", "each"), quick([(2, 2), (4, 1)], [(2, 2)]))
def test_each_writes_its_shards_and_any_number_restores(tmp_path, processes, each):
    """In one test: the processes start once."""
    alone = Training("p_g_os", 8)
    alone.train(*BEFORE)
    with gshard.Checkpointer(tmp_path / "alone") as checkpointer:
        checkpointer.save(2, alone.state, data_state={"position": 17})
    arguments = (str(each), str(tmp_path))
    seen = run_workers(
        tmp_path, "checkpoint.saving_worker", *arguments, processes=processes, devices_each=each
    )
    losses = alone.train(*AFTER)
    for rank, process in enumerate(seen):
        assert_restored_what_one_wrote(process, losses)
        assert_is_what_they_had(process, rank)
        assert_was_told_what_was_wrong(process)
        assert_has_the_new_parameters(process, processes * each)
    np.testing.assert_allclose(seen[0]["after"], losses, rtol=2e-6)
    assert seen[0]["left"].tolist() == [".gshard_lock", "3"]
    assert_one_restores_what_several_wrote(tmp_path, processes)


def assert_restored_what_one_wrote(process, losses):
    np.testing.assert_allclose(process["alone"], losses, rtol=2e-6)
    assert process["alone data"].tolist() == [17]


def assert_is_what_they_had(process, rank):
    np.testing.assert_allclose(process["again"], process["after"], rtol=1e-6)
    assert process["rank"].tolist() == [rank]  # each its own data state
    assert process["writer"].tolist() == [0]  # the metadata of the first
    assert process["steps"].tolist() == [2]
    assert "another state under this number" in process["other"].tolist()[0]


def assert_was_told_what_was_wrong(process):
    """What only one does wrong, all hear."""
    steps, metadata, old, apart, *others = process["said"].tolist()
    assert "the processes made different calls: save of step 10 (process 0)" in steps
    assert "metadata holds a object" in metadata
    assert "not after the newest one, 2" in old
    assert "does not see" in apart and "one directory" in apart
    assert "process 0: restore(step=1, verify=True, cast=False), at " in others[0]
    assert "like=" in others[1]
    assert "verify=False" in others[2] and "verify=True" in others[2]
    assert "process 0: delete(step=2), at " in others[3] and "delete(step=5), at " in others[3]
    assert process["damaged"].tolist()[0].startswith("arrays/ocdbt.process_1/d/")


def assert_has_the_new_parameters(process, devices):
    """Those that `state.replace(params=...)` got, instead of their old master copies."""
    for level in ("os", "p_g_os"):
        state = Training(level, devices, precision="bfloat16").state
        params = gshard.full_params(state)
        for name, change in REPLACED.items():
            params = jax.tree.map(change, jax.tree.map(jnp.asarray, params))
            expected = np.concatenate([*map(np.ravel, jax.tree.leaves(params))])
            for how in ("full", "restored"):
                np.testing.assert_array_equal(process[f"{how}, {name} at {level}"], expected)


def assert_one_restores_what_several_wrote(folder, processes):
    run, other = Training("os", 3), Training("dp", 1)
    with gshard.Checkpointer(folder / "together") as checkpointer:
        assert checkpointer.verify(3) == []
        warning = f"a different data state for each of the {processes}"
        with pytest.warns(gshard.GShardWarning, match=warning):
            restored = checkpointer.restore(3, like=run.state)
        assert restored.data_state is None
        run.state = restored.state
        with pytest.warns(gshard.GShardWarning, match=warning):
            other.state = checkpointer.restore(3, like=other.state).state
    assert_equal_bits(run.whole(), other.whole())
