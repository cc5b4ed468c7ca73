"""Several real processes, of one or two devices each, give the numbers of one with as many."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import gshard
from tests import reference
from tests.distributed.processes_worker import BAD, GROUPS, QUICK, ROWS, STEPS, runs, train
from tests.processes import run_workers_once
from tests.tiers import quick
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

TIERS = {
    (group, run): tier
    for tier in ("quick", "slow")
    for group in GROUPS
    for run in runs(tier, group)
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """`found(tier, group)`: what each process of a group saved of its runs."""

    @functools.cache
    def of(tier, group):
        processes, each = group
        return run_workers_once(
            tmp_path_factory,
            f"processes-{tier}-{processes}x{each}",
            "distributed.processes_worker",
            str(each),
            tier,
            processes=processes,
            devices_each=each,
            limit=300 if tier == "quick" else 1200,
        )

    return of


@pytest.mark.parametrize("group", quick([(group,) for group in GROUPS], [(g,) for g in QUICK]))
def test_ranks_devices_and_examples(found, group):
    processes, each = group
    seen = found("quick" if group in QUICK else "slow", group)
    for rank, process in enumerate(seen):
        assert process["ranks"].tolist() == [rank, processes]
        assert process["devices"].tolist() == [each, processes * each]
        assert process["owners"].tolist() == [0, 1]
        assert (process["group"] == seen[0]["group"]).all()
        # The processes' rows, in the order of their ranks, are the global batch.
        own = np.full(ROWS, np.nan)
        of_each = ROWS // processes
        own[rank * of_each : (rank + 1) * of_each] = np.arange(ROWS).reshape(processes, -1)[rank]
        np.testing.assert_array_equal(process["rows"], own)


@pytest.mark.parametrize(
    ("group", "run"),
    quick(TIERS, [case for case, tier in TIERS.items() if tier == "quick"]),
    ids=lambda x: "-".join(map(str, x)).replace(" ", "_"),
)
def test_numbers_are_those_of_one_process(found, group, run):
    tier = TIERS[group, run]
    mesh = gshard.make_mesh(devices=jax.devices()[: group[0] * group[1]])
    expected = train(run, mesh, rank=0, world_size=1)
    if run.kind == "bad step":
        assert expected["skipped_steps"].tolist() == [i >= BAD for i in range(STEPS)]
        assert expected["loss_scale"].tolist() == [8, 8, 4]
    prefix = f"{runs(tier, group).index(run)}/"
    processes = [
        {name.removeprefix(prefix): x for name, x in process.items() if name.startswith(prefix)}
        for process in found(tier, group)
    ]
    for process in processes:
        assert process.keys() == expected.keys()
        for name in expected.keys() - {"each"}:
            # The same bits on all of them: a step that branched on its own numbers would hang.
            np.testing.assert_array_equal(process[name], processes[0][name])
            if not name.startswith("params/"):
                np.testing.assert_allclose(process[name], expected[name], rtol=1e-6)
    theirs, params = (
        {name: x for name, x in found.items() if name.startswith("params/")}
        for found in (processes[0], expected)
    )
    zero = tuple(f"params/{path}" for path in ZOO[run.model].zero)
    reference.assert_same_leaves(theirs, params, 1e-6, relative_to="tree", without=zero)
    if run.kind == "step":  # and without gshard, those of one device
        losses, _, alone = reference.train(run.model, "adamw", ROWS, STEPS)
        reference.assert_same_values(processes[0]["loss"], losses, 5e-6)
        alone = {f"params/{path}": x for path, x in alone.items()}
        reference.assert_same_leaves(theirs, alone, 1e-5, relative_to="tree", without=zero)
    if "each" in expected:  # losses of the devices, each on its own process
        each = [process["each"] for process in processes]
        assert (np.sum(np.isfinite(each), axis=0) == 1).all()
        np.testing.assert_allclose(np.nansum(each, axis=0), expected["each"], rtol=1e-6)
