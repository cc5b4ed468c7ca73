"""Parameters that are kept on a shard axis: their layouts, and what is refused."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, AxisType

import gshard
from gshard.sharding.group import data_group
from tests.experts import DATA_EXPERT, KEEP, D, E, F, params, sharded

P = jax.P


def mesh(**sizes: int) -> AbstractMesh:
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def plan_of(level, keep=KEEP, p=None, on=None, **options):
    given = (params() if p is None else p, optax.adam(1e-3))
    on = mesh(data=2, expert=4) if on is None else on
    return gshard.shard_train_state(given, on, level, keep=keep, min_shard_size=0, **options)[1]


@pytest.mark.parametrize(
    ("level", "stored", "reduced"),
    [
        ("dp", P("expert"), P("expert")),
        ("os", P("expert"), P("expert", "data")),
        ("os_g", P("expert"), P("expert", "data")),
        ("p_g_os", P("expert", "data"), P("expert", "data")),
    ],
)
def test_a_kept_array_is_sharded_on_two_dimensions(level, stored, reduced):
    plan = plan_of(level)
    up = plan.params["experts"]["up"]
    assert (up.spec, plan.grads["experts"]["up"].spec) == (stored, reduced)
    assert plan.opt_state[0].mu["experts"]["up"].spec == reduced
    assert up.group.shard == ("data",) and plan.group.shard == ("data", "expert")
    other = 2 if level == "p_g_os" else 1
    assert up.shard_shape == (E // 4, D // other, F)
    assert up.bytes_per_device == 4 * E * D * F // 4 // other
    assert plan.params["head"].group == plan.group


def test_padding_is_on_the_other_dimension():
    p = params()
    p["experts"] = {"up": np.zeros((4, 3, 5), np.float32)}
    up = plan_of("p_g_os", p=p).params["experts"]["up"]
    assert up.stored_shape == (4, 3, 6) and up.shard_shape == (1, 3, 3)
    assert up.local().shape == (1, 3, 5) and up.inside().stored_shape == (1, 3, 6)


def test_nothing_is_kept_on_an_axis_of_one_device():
    with pytest.warns(gshard.GShardWarning, match="nothing on a mesh whose axis 'expert' has one"):
        plan = plan_of("os", on=mesh(data=2, expert=1))
    assert plan.params["experts"]["up"].kept is None and plan.group.kept == ""


def test_a_mesh_without_an_expert_axis_keeps_nothing():
    """As `make_mesh(expert=n)` makes for n = 1."""
    one = gshard.make_mesh(expert=1, devices=jax.devices()[:1])
    for on in (one, mesh(data=2)):
        with pytest.warns(gshard.GShardWarning, match="keep=.* changes nothing on a mesh without"):
            plan = plan_of("os", on=on)
        assert plan.params["experts"]["up"].kept is None and plan.group.kept == ""
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plan_of("os", {}, on=on)
    with pytest.raises(gshard.GShardError, match="axis 'experts', which is not in the mesh"):
        plan_of("os", {"up": ("experts", 0)}, on=one)
    with pytest.raises(gshard.GShardError, match="'expert', which is a replica axis"):
        plan_of("os", on=mesh(data=2, expert=1), replica_axes="expert")


def test_any_shard_axis_can_keep_parameters():
    plan = plan_of("p_g_os", {"experts/up": ("data", -1)})
    assert plan.params["experts"]["up"].spec == P("expert", None, "data")
    assert plan.params["experts"]["down"].kept is None
    assert plan.batch_spec == P(("data", "expert"))


def test_examples_are_sharded_over_the_kept_axis_first():
    assert plan_of("os").batch_spec == P(("expert", "data"))
    assert plan_of("os", None, on=mesh(a=2, b=2)).batch_spec == P(("a", "b"))


def test_the_mesh_has_an_expert_axis():
    made = gshard.make_mesh(replica=2, expert=2, sequence=2)
    assert dict(made.shape) == {"replica": 2, "shard": 1, "expert": 2, "sequence": 2}
    group = data_group(made)
    assert group.shard == ("shard", "expert", "sequence") and group.replica == ("replica",)


BAD_KEEP = {
    "no pattern matches": ({"expertz/": ("expert", 0)}, "'expertz/' matches no parameter.*There"),
    "no such axis": ({"experts/": ("experts", 0)}, "axis 'experts', which is not in the mesh. Did"),
    "a replica axis": ({"experts/": ("replica", 0)}, "'replica', which is a replica axis"),
    "no such dimension": ({"experts/": ("expert", 3)}, r"dimension 3 of experts/down \[8, 24"),
    "not divisible": ({"router": ("expert", 1), "head": ("expert", 1), "embed": ("expert", 0),
                       "experts/up": ("expert", 0)}, "has 6 entries, .*a pattern that does not"),
    "no pair": ({"experts/": "expert"}, "'experts/' is mapped to 'expert'. Give the axis"),
    "no number": ({"experts/": ("expert", "0")}, "Give the axis and the dimension, such as"),
    "no mapping": ([("experts/", "expert", 0)], "must map path patterns to a shard axis"),
    "two axes": ({"up": ("expert", 0), "down": ("data", 0)}, "several axes, data, expert"),
    "two dimensions of one": (
        {"experts/": ("expert", 0), "up": ("expert", -1)},
        r"experts/up \[8, 16, 24\] matches 'experts/', .* 0 on 'exp.*'up', .*-1 on .*Change one",
    ),
    "two axes of one": ({"up": ("data", 0), "experts/": ("expert", 0)}, "'up', .* 0 on 'data'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_KEEP)
def test_bad_keep_is_refused(case):
    keep, message = BAD_KEEP[case]
    p = params()
    if case == "not divisible":
        p["router"] = p["router"][:, :6]
    with pytest.raises(gshard.GShardError, match=message):
        plan_of("os", keep, p, mesh(replica=2, data=2, expert=4))


def test_a_pattern_that_is_no_expression_is_refused():
    with pytest.raises(gshard.GShardError, match="keep"):
        plan_of("os", {"(": ("expert", 0)})


def test_patterns_that_ask_for_the_same_may_match_one_array():
    up = plan_of("os", {**KEEP, "up": ("expert", -3)}).params["experts"]["up"]
    assert up.kept.dim == 0


def test_fewer_experts_than_devices_name_the_sizes_that_fit():
    with pytest.raises(gshard.GShardError, match="has 6 entries.*such as 2, 3, 6"):
        plan_of("os", p=params(experts=6))


def test_the_scanned_dimension_is_refused():
    p = {"layers": {"up": np.zeros((4, 8, 6, 6), np.float32)}}
    with pytest.raises(gshard.GShardError, match="a scan over layers iterates over.*such as 1"):
        plan_of("os", {"up": ("expert", 0)}, p, scan_axes={"layers": 0})


def test_an_expert_axis_that_nothing_uses_is_named():
    with pytest.warns(gshard.GShardWarning, match="expert axis of 4 devices, and no parameter is"):
        plan = plan_of("os", None)
    assert plan.group.kept == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_of("os")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"extra": {"expert": 2}}, "gshard shards experts and state; say expert=2"),
        ({"shape": {"expert": 2}, "expert": 2}, "has an axis 'expert' already: leave out expert=2"),
        ({"expert": 3}, "expert=3 takes 3, which does not divide the 8 devices"),
        ({"expert": 0}, "expert=0 must be"),
    ],
)
def test_bad_meshes_are_refused(wrong, message):
    with pytest.raises(gshard.GShardError, match=re.escape(message)):
        gshard.make_mesh(**wrong)


@pytest.mark.parametrize("pattern", ["up|a", "up"])
def test_what_is_not_trained_is_named(pattern):
    class Experts(nnx.Module):
        def __init__(self):
            self.up = nnx.Param(np.ones((E, D, F), np.float32))
            self.a = nnx.LoRAParam(np.ones((E, D, 4), np.float32))

    model = Experts()
    pair = model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
    with pytest.warns(gshard.GShardWarning, match="matches up, which the optimizer does") as said:
        on, keep = mesh(data=2, expert=4), {pattern: ("expert", 0)}
        _, plan = gshard.shard_train_state(pair, on, "fsdp", keep=keep, min_shard_size=0)
    assert len(said) == 1 and (plan.params["a"].kept is not None) == (pattern == "up|a")


def test_the_sequence_axis_keeps_nothing():
    with pytest.raises(
        gshard.GShardError, match="'sequence', which holds slices.* parameters: shard;"
    ):
        plan_of("os", {"experts": ("sequence", 0)}, on=gshard.make_mesh(sequence=4))
    with pytest.raises(gshard.GShardError, match="'sequence', which is not in the mesh"):
        plan_of("os", {"experts": ("sequence", 0)})


def test_a_replica_axis_of_experts_is_refused():
    with pytest.raises(gshard.GShardError, match="expert.*replica axis"):
        sharded(DATA_EXPERT, "os", replica_axes="expert")


def test_the_table_says_what_is_kept():
    text = str(plan_of("p_g_os"))
    assert text.count("kept on expert, dim 0 / 4") == 4  # parameter and gradient of two arrays


def test_a_pattern_that_matches_more_than_experts_is_named():
    p = params()
    p["experts"]["router"] = p.pop("router")
    match = (
        r"'experts/' matches arrays with .*: 8 in experts/down .*, 16 in experts/router \[16, 8\]"
    )
    with pytest.warns(gshard.GShardWarning, match=match):
        plan_of("os", p=p)
    with warnings.catch_warnings():  # each number of experts has its own pattern
        warnings.simplefilter("error")
        plan_of("os", {"experts/(up|down)": ("expert", 0), "experts/router": ("expert", 0)}, p)


def test_rules_know_the_dimension_that_is_kept():
    with pytest.raises(gshard.GShardError, match=r"experts/up \(8, 16, 24\): .* that keep= names"):
        plan_of("p_g_os", rules={"experts/up": 0})
    with pytest.warns(gshard.GShardWarning, match=r"up \[8, 16, 24\] .* sharded only over 'exp"):
        plan = plan_of("p_g_os", rules={"experts/": "replicate"})
    assert plan.params["experts"]["up"].spec == P("expert")


@pytest.mark.parametrize("frozen", [{}, {"frozen": "experts"}])
def test_a_sub_group_has_to_divide_the_devices_of_a_kept_array_too(frozen):
    params = {"experts": np.zeros((2, 12, 8), np.float32), "w": np.zeros((12, 8), np.float32)}
    mesh = gshard.make_mesh(devices=jax.devices()[:6], expert=2)
    keep = {"experts": ("expert", 0)}
    _, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)), mesh, "zero3", keep=keep, min_shard_size=0, **frozen
    )
    with pytest.raises(gshard.GShardError, match="reshard_after_forward=2.* group of 3 devices"):
        gshard.make_train_step(lambda p, b: b.mean(), plan, reshard_after_forward=2)


@pytest.mark.parametrize("sizes", [{"expert": 4}, {"shard": 1, "expert": 4}], ids=str)
def test_a_kept_array_with_nothing_to_gather_needs_no_sub_groups(sizes):
    p = {"experts": np.zeros((4, 16, 16), np.float32), "w": np.zeros((16, 16), np.float32)}
    plan = plan_of("zero3", {"experts": ("expert", 0)}, p, mesh(**sizes))
    sent = gshard.budget(plan, reshard_after_forward=2).communicated
    # w alone: 3/4 of it for the forward pass, 1/2 again in sub-groups of 2, and its gradient
    assert {x.purpose: x.wire_bytes for x in sent} == {"gather": 768 + 512, "scatter": 768}


def test_explain_says_where_an_array_is_kept():
    params = {"experts": np.zeros((6, 12, 8), np.float32), "w": np.zeros((12, 8), np.float32)}
    mesh = gshard.make_mesh({"expert": 6}, devices=jax.devices()[:6])
    state, _ = gshard.shard_train_state(
        (params, optax.sgd(0.1)), mesh, "zero3", keep={"experts": ("expert", 0)}, min_shard_size=0
    )
    said = str(gshard.explain(state))
    assert "kept on expert, dim 0 / 6" in said
    assert "All arrays are sharded, except scalars." in said


def test_an_average_of_kept_parameters_is_kept_too():
    class State(TrainState):
        ema: Any = None

    state = State.create(apply_fn=None, params=params(), tx=optax.adam(1e-3), ema=params())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on, keep = mesh(data=2, expert=4), {**KEEP, "^ema/experts": ("expert", 0)}
        _, plan = gshard.shard_train_state(state, on, "fsdp", keep=keep, min_shard_size=0)
    of_params, of_ema = (
        {x.path.removeprefix("ema/"): x.spec for x in jax.tree.leaves(tree)}
        for tree in (plan.params, plan.non_trainable["ema"])
    )
    assert of_params == of_ema and any("expert" in spec for spec in of_ema.values())
    alone = {"^ema/experts": ("expert", 0)}
    with pytest.warns(gshard.GShardWarning, match="matches ema/.* is not kept"):
        gshard.shard_train_state(state, on, "fsdp", keep=alone, min_shard_size=0)
