"""`gshard.explain`: the bytes that are alive are the plan's, and what else is alive has a name."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard._util.errors import DonatedStateError, GShardError
from gshard.sharding.level import LEVELS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore:.*min_shard_size changes nothing"),
    pytest.mark.filterwarnings("ignore:offload=True puts nothing"),
]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(40)(x))
        return nn.Dense(13)(nn.tanh(x))


class WithStatistics(TrainState):
    batch_stats: Any


class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(7, 40, rngs=rngs)
        self.norm = nnx.BatchNorm(40, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.last = nnx.Linear(40, 13, rngs=rngs)


def linen() -> Any:
    made = Net().init(jax.random.key(0), jnp.ones((1, 7)))
    return WithStatistics.create(
        apply_fn=None, params=made["params"], tx=optax.adam(1e-3), batch_stats=made["batch_stats"]
    )


def pair() -> Any:
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)


def plain() -> Any:
    return {"w": jnp.ones((41, 13)), "b": jnp.ones((300,))}, optax.adam(1e-3)


KINDS = {"linen": linen, "nnx": pair, "plain": plain}


def mesh_of(n: int):
    return gshard.make_mesh(devices=jax.devices()[:n])


def sharded(state: Any, level: str, n: int = 8, **options: Any):
    return gshard.shard_train_state(state, mesh_of(n), level, min_shard_size=24, **options)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("n", "options"),
    [
        (8, {}),
        (5, {"precision": "bfloat16"}),
        (3, {"offload": True}),
        (7, {"precision": "bfloat16", "offload": True}),
        (1, {}),
    ],
    ids=lambda x: str(x) if isinstance(x, int) else "+".join(x) or "as it is",
)
def test_live_bytes_are_the_plans(kind, level, n, options):
    state, plan = sharded(KINDS[kind](), level, n, **options)
    found = gshard.explain(state)
    assert found.exact and not found.measured.differences
    assert found.measured.state == {str(d): plan.bytes_per_device for d in plan.mesh.devices.flat}
    assert found.planned == plan.bytes_per_device
    by_part = dict.fromkeys(plan.bytes_per_device, 0)
    for x in found.leaves:
        if x.part in by_part:
            by_part["host" if x.on_host else x.part] += x.bytes
    assert by_part == plan.bytes_per_device
    assert found.levels[level].stored == found.stored
    assert set(found.levels) == set(LEVELS) and not found.impossible
    if options.get("precision"):
        assert any(x.path.startswith("opt_state/master/") for x in found.leaves)
    assert json.loads(json.dumps(found.as_dict()))["exact"] is True


def test_forecasts_of_levels_equal_states_at_these_levels():
    found = gshard.explain(sharded(linen(), "os", precision="bfloat16")[0], micro_batches=4)
    for level, forecast in found.levels.items():
        plan = sharded(linen(), level, precision="bfloat16")[1]
        sizes = plan.bytes_per_device
        assert forecast.stored == sum(sizes.values()) + 4  # the count of steps
        assert found.saves(level) == found.stored - forecast.stored
        assert forecast.wire == gshard.budget(plan, micro_batches=4).wire_bytes
    assert found.wire[4]["level"] == found.levels["os"].wire
    assert found.wire[8]["sync"] == gshard.budget(plan.at_level(LEVELS["os"]), micro_batches=8,
                                                   accumulate="sync").wire_bytes  # fmt: skip


def test_an_abstract_state_is_explained_without_measures():
    mesh = AbstractMesh((64,), ("shard",), axis_types=(AxisType.Auto,))
    state, plan = gshard.shard_train_state(lambda: linen(), mesh, "p_g_os", min_shard_size=24)
    found = gshard.explain(state, plan)
    assert found.measured is None and found.exact is None and found.group_size == 64
    assert found.planned == plan.bytes_per_device
    assert "Nothing was measured" in str(found)
    assert "Why did memory not fall" not in str(found)


def test_an_old_copy_that_a_variable_keeps_is_named():
    old = {"w": jnp.ones((211, 97)), "b": jnp.ones((97,))}
    tx = optax.adam(1e-3)
    moments = tx.init(old)
    state, _ = sharded((old, tx), "p_g_os")
    found = gshard.explain(state)
    named = {x.of: x for x in found.measured.copies}
    size = 4 * (211 * 97 + 97)
    assert named["parameters"].count == 2 and named["parameters"].bytes == size
    assert named["optimizer state"].count == 4 and named["optimizer state"].bytes == 2 * size
    assert "1 x float32[211, 97]" in named["parameters"].shapes
    home = str(jax.devices()[0])
    assert named["parameters"].placement == f"on {home}"
    assert found.measured.other_bytes[home] >= 3 * size
    kinds = {x.shape: x for x in found.measured.other_arrays}
    assert kinds[211, 97].count == 3 and kinds[211, 97].dtype == "float32"
    assert f"2 arrays on {home} have the shapes of the parameters" in str(found)
    del old, moments
    found = gshard.explain(state)
    assert not found.measured.copies
    assert (211, 97) not in {x.shape for x in found.measured.other_arrays}


def test_a_copy_of_a_sharded_state_is_found():
    state, plan = sharded(({"w": jnp.ones((211, 97))}, optax.adam(1e-3)), "p_g_os", 5)
    old = jax.tree.map(lambda x: x + 0, state)
    found = gshard.explain(state)
    assert {x.of for x in found.measured.copies} == {"parameters", "optimizer state"}
    (row,) = [x for x in found.measured.other_arrays if x.shape == (215, 97)]
    assert row.count == 3 and row.placement == "sharded over 5 devices"
    assert row.bytes == 3 * 43 * 97 * 4
    del old


def test_views_of_shards_count_once():
    """A look at the shards of an array makes arrays that share its memory."""
    state, _ = sharded(({"w": jnp.ones((211, 97))}, optax.sgd(0.1)), "p_g_os")
    views = [x.data for x in state.params["w"].addressable_shards]
    other = jax.device_put(np.ones((8, 501), np.float32), state.params["w"].sharding)
    parts = [x.data for x in other.addressable_shards]
    for _ in range(2):
        measured = gshard.explain(state).measured
        shapes = [x.shape for x in measured.other_arrays]
        assert shapes.count((8, 501)) == 1
        assert views[0].shape not in shapes and parts[0].shape not in shapes
        assert not measured.differences


def test_a_state_that_was_explained_still_trains_in_place():
    def loss(params, x):
        return jnp.square(x @ params["w"]).mean()

    state, plan = sharded(({"w": jnp.ones((64, 96))}, optax.adam(1e-3)), "os")
    step = gshard.make_train_step(loss, plan)
    rows = np.ones((8, 64), np.float32)
    state, _ = step(state, rows)
    before = gshard.explain(state)
    old = state
    state, _ = step(state, rows)
    after = gshard.explain(state)
    assert after.exact and after.measured.state == before.measured.state
    assert all(x.shape != (64, 96) for x in after.measured.other_arrays)
    with pytest.raises(DonatedStateError):
        gshard.explain(old)


def test_replicated_leaves_are_marked_with_the_setting_that_shards_them():
    params = {
        "small": jnp.ones((20,)),
        "odd": jnp.ones((9, 5)),
        "mine": jnp.ones((64, 8)),
        "layers": jnp.ones((40,)),
        "large": jnp.ones((64, 64)),
    }
    mesh = mesh_of(8)
    state, _ = gshard.shard_train_state(
        (params, optax.sgd(0.1)),
        mesh,
        "p_g_os",
        min_shard_size=0,
        rules=[{"mine": "replicate"}, gshard.by_shape(24, "replicate")],
        scan_axes={"layers": 0},
    )
    found = gshard.explain(state)
    why = {x.path: (x.reason, x.change) for x in found.marked}
    assert set(why) == {f"params/{x}" for x in ("small", "odd", "mine", "layers")}
    assert "20 elements <= min_shard_size 24" in why["params/small"][0]
    assert "min_shard_size" in why["params/small"][1]
    assert why["params/odd"][1] == "indivisible='pad'"
    assert why["params/mine"] == ("rule 'mine'", "rules=, which says so")
    assert found.leaves[0].path == "params/large" or found.leaves[0].marked
    rows = {x.path: x for x in found.leaves}
    assert (
        rows["params/mine"].saved_if_sharded == 64 * 8 * 4 * 7 // 8
        and rows["params/large"].saved_if_sharded == 0
    )
    assert "* params/mine" in str(found)


def test_a_dimension_that_a_scan_iterates_over_is_marked_so():
    state, _ = gshard.shard_train_state(
        ({"stack": jnp.ones((48,))}, optax.sgd(0.1)), mesh_of(8), "p_g_os", min_shard_size=0,
        scan_axes={"stack": 0},
    )  # fmt: skip
    (leaf,) = gshard.explain(state).marked
    assert leaf.reason == "no dimension to shard" and "scan_axes" in leaf.change


@pytest.mark.parametrize("level", LEVELS)
def test_a_replicated_component_names_the_level_that_shards_it(level):
    found = gshard.explain(sharded(linen(), level)[0])
    change = {x.path: x.change for x in found.leaves}
    whole, state = "params/Dense_0/kernel", "opt_state/inner/0/mu/Dense_0/kernel"
    divides = LEVELS[level]
    assert change[whole] == ("" if divides.shards_params else "level p_g_os")
    assert change[state] == ("" if divides.shards_opt_state else "level os")
    assert not any(x.path == whole for x in found.marked)


def test_an_array_that_no_level_shards_names_what_replicates_it_there():
    params = {"large": jnp.ones((64, 64)), "small": jnp.ones((20,)), "mine": jnp.ones((64, 8))}
    state, _ = sharded((params, optax.adam(1e-3)), "os", rules={"mine": "replicate"})
    found = gshard.explain(state)
    rows = {x.path: (x.reason, x.change) for x in found.leaves}
    whole = "level os replicates it on every device"
    assert rows["params/large"] == (whole, "level p_g_os")
    assert rows["params/small"] == (
        f"{whole}, level p_g_os too: 20 elements <= min_shard_size 24",
        "level p_g_os, with min_shard_size= below the elements of one layer",
    )
    assert rows["params/mine"][0] == f"{whole}, level p_g_os too: rule 'mine'"
    said = str(found)
    assert "Level os replicates 16.4 kB that level p_g_os shards." in said
    part = "replicated although this level shards that part of the state"
    assert f"4 arrays (4.26 kB) are {part}:" in said
    assert "2 arrays (2.13 kB) are replicated at every level:" in said


def test_levels_that_are_all_alike_are_said_to_be():
    state, _ = sharded(({"w": jnp.ones((20,))}, optax.sgd(0.1)), "os")
    found = gshard.explain(state)
    said = str(found)
    assert "Why is it replicated? 1 array (80 B) is replicated at every level:" in said
    assert f"Which level halves it? None: it is {found.stored} B at every level." in said
    state, _ = sharded(({"w": jnp.ones((64, 64))}, optax.sgd(0.1)), "os", 1)
    assert "Why is it replicated? There is one device in the shard group.\n" in str(
        gshard.explain(state)
    )


def test_a_level_that_is_impossible_changes_nothing():
    state, _ = gshard.shard_train_state(
        ({"stack": jnp.ones((48, 3))}, optax.sgd(0.1)), mesh_of(8), "os", min_shard_size=0,
        scan_axes={"stack": 0}, rules={"stack": 0},
    )  # fmt: skip
    (leaf,) = [x for x in gshard.explain(state).leaves if x.part == "params"]
    assert (leaf.reason, leaf.change) == ("level os replicates it on every device", "")


def test_what_halves_the_memory():
    found = gshard.explain(sharded(({"w": jnp.ones((64, 64))}, optax.adam(1e-3)), "dp")[0])
    assert found.halved_by == "os" and "Which level halves it? os" in str(found)
    found = gshard.explain(sharded(({"w": jnp.ones((64, 64))}, optax.adam(1e-3)), "p_g_os")[0])
    assert found.halved_by is None and "Nothing more." in str(found)


def test_a_level_that_a_rule_makes_impossible_is_said():
    state, _ = gshard.shard_train_state(
        ({"stack": jnp.ones((48, 3))}, optax.sgd(0.1)), mesh_of(8), "os", min_shard_size=0,
        scan_axes={"stack": 0}, rules={"stack": 0},
    )  # fmt: skip
    found = gshard.explain(state)
    assert set(found.impossible) == {"p_g_os"} and "a scan iterates" in found.impossible["p_g_os"]
    assert "Level p_g_os is not possible" in str(found)
    with pytest.raises(gshard.GShardError, match="a scan iterates"):
        found.saves("zero3")


def test_a_leaf_that_is_not_placed_as_planned_is_named():
    state, _ = sharded(({"w": jnp.ones((64, 64))}, optax.adam(1e-3)), "p_g_os")
    moved = state.replace(params={"w": jnp.ones((64, 64))})
    found = gshard.explain(moved)
    assert found.exact is False
    assert found.measured.differences[0].startswith("params/w: 16,384 B on ")
    assert "planned 2,048 B" in found.measured.differences[0]
    assert "is NOT placed as planned" in str(found)
    found = gshard.explain(state.replace(params={"w": np.ones((64, 64), np.float32)}))
    assert found.measured.differences == ("params/w: not on a device, a ndarray",)


def test_state_on_the_host_that_came_to_the_device_is_named():
    state, plan = sharded(({"w": jnp.ones((64, 64))}, optax.adam(1e-3)), "os", offload=True)
    here = jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("device")),
                        state.opt_state)  # fmt: skip
    found = gshard.explain(state.replace(opt_state=here), plan)
    assert found.exact is False
    assert found.measured.differences[0].startswith("opt_state/inner/0/mu/w: on the device of")


@pytest.mark.parametrize("options", [{"replica": 2}, {"extra": {"model": 2}}])
def test_replicas_of_the_sharded_state_and_an_axis_of_the_user(options):
    mesh = gshard.make_mesh(**options)
    place = NamedSharding(mesh, P(None, "model" if "extra" in options else None))
    params = {"w": jax.device_put(jnp.ones((64, 64)), place), "b": jnp.ones((64,))}
    start = (params, optax.adam(1e-3))
    state, plan = gshard.shard_train_state(start, mesh, "os_g", min_shard_size=24)
    found = gshard.explain(state)
    assert found.exact and found.group_size == 4
    assert found.measured.state[str(jax.devices()[7])] == plan.bytes_per_device


def test_what_paddles_face_wrapped():
    model, optimizer = pair()
    model, optimizer, _ = gshard.paddle.group_sharded_parallel(model, optimizer, "p_g_os")
    found = gshard.explain((model, optimizer))
    assert found.exact and found.level == "p_g_os"
    assert found.planned == model.plan.bytes_per_device


def test_the_text_lists_what_holds_most():
    found = gshard.explain(sharded(linen(), "os")[0])
    sizes = [x.bytes for x in found.leaves]
    assert sizes == sorted(sizes, reverse=True)
    assert f"(3 of {len(sizes)} arrays" in found.text(3)
    assert f"{len(sizes) - 3} smaller ones" in found.text(3)
    assert all(x.path in found.text(None) for x in found.leaves)
    assert f"{sizes[0] / sum(sizes):.1%}" in str(found)
    assert "float32[7, 40]" in str(found)  # not taken for markup


def test_what_cannot_be_explained():
    with pytest.raises(GShardError, match="explain: this state has no plan"):
        gshard.explain(linen())
    with pytest.raises(GShardError, match="explain: state is a dict"):
        gshard.explain({"w": 1})
    model, optimizer = sharded(pair(), "os")[0]
    with pytest.raises(GShardError, match=r"explain\(\(model, optimizer\)\)"):
        gshard.explain(model, optimizer)
    state, plan = sharded(linen(), "os")
    with pytest.raises(GShardError, match=r"explain\(state, plan\)"):
        gshard.explain((model, optimizer), plan)
    with pytest.raises(GShardError, match="micro_batches=0"):
        gshard.explain(state, micro_batches=0)
    nowhere = dataclasses.replace(plan, mesh=plan.mesh.abstract_mesh)
    with pytest.raises(GShardError, match="the plan was made without devices"):
        gshard.explain(state, nowhere)
