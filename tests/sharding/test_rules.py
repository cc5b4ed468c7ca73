"""Rules choose dimensions, layouts pad and cut: pure functions, checked over random shapes."""

from __future__ import annotations

import math

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard.sharding.group import Group
from gshard.sharding.layout import lay_out
from gshard.sharding.rules import LeafInfo, as_rules, by_path, by_shape, first_of

SHAPES = st.lists(st.integers(0, 17), max_size=4).map(tuple)


def group(size: int) -> Group:
    return Group(("shard",), (), (size,), 1)


def leaf(shape: tuple[int, ...], parts: int = 4, scan_dim: int | None = None) -> LeafInfo:
    return LeafInfo("block/kernel", shape, np.dtype("float32"), scan_dim, parts)


@given(SHAPES, st.integers(1, 8), st.sampled_from(["pad", "replicate"]), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_a_layout_is_exact(shape, parts, indivisible, min_shard_size):
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    layout = lay_out("x", x, group(parts), by_shape(min_shard_size, indivisible))
    stored = layout.pad(x)
    assert stored.shape == layout.stored_shape
    np.testing.assert_array_equal(layout.unpad(stored), x)
    assert math.prod(layout.shard_shape) * (parts if layout.dim is not None else 1) == stored.size
    divides = any(size and size % parts == 0 for size in shape)
    if parts > 1 and x.size > min_shard_size and divides:
        assert layout.dim is not None and layout.padding == 0
    if x.size <= min_shard_size:
        assert layout.dim is None


@given(st.integers(2, 8), st.integers(1, 17), st.integers(1, 17), st.integers(1, 17))
@settings(max_examples=100, deadline=None)
def test_a_scanned_dimension_is_never_sharded(parts, layers, rows, columns):
    choice = by_shape(0)(leaf((layers, rows, columns), parts, scan_dim=0))
    assert choice.dim != 0


def test_segment_size_counts_one_layer():
    assert by_shape(100)(leaf((8, 10, 10), scan_dim=0)).dim is None
    assert by_shape(99)(leaf((8, 10, 10), scan_dim=0)).dim is not None
    assert by_shape(100)(leaf((8, 10, 10))).dim == 0


def test_prefers_full_tiles_then_the_leading_dimension():
    assert by_shape(0)(leaf((64, 4096), 8)).dim == 1  # 8 rows fill no tile, 512 columns do
    assert by_shape(0)(leaf((1024, 4096), 8)).dim == 0
    assert by_shape(0)(leaf((24, 40), 8)).dim == 0
    assert by_shape(0)(leaf((128, 128), 8)).dim == 0  # 16 rows fill a tile, 16 columns do not


def test_pads_the_dimension_that_wastes_least():
    assert by_shape(0)(leaf((13, 61), 4)).dim == 1


def test_rules_by_path_predicate_and_function():
    rule = first_of([by_path("kernel$", 1), by_shape(0)])
    assert rule(leaf((8, 8))).dim == 1
    rule = first_of([gshard.by_predicate(lambda x: len(x.shape) == 2, -1), by_shape(0)])
    assert rule(leaf((8, 8))).dim == 1
    own = as_rules(lambda x: "replicate" if x.path.endswith("kernel") else None)
    assert first_of([*own, by_shape(0)])(leaf((8, 8))).dim is None
    assert first_of(as_rules({"nothing": 0, "block": 1}))(leaf((8, 8))).dim == 1


@pytest.mark.parametrize("dim", [2, -3, True, "rows", 1.0])
def test_a_rule_that_names_no_dimension_is_refused(dim):
    with pytest.raises(gshard.GShardError, match="block/kernel.*0 to 1"):
        by_path("kernel", dim)(leaf((8, 8)))


def test_a_path_rule_skips_scalars_and_a_function_sees_them():
    assert by_path("kernel", 0)(leaf(())) is None
    (own,) = as_rules(lambda leaf: 0)
    with pytest.raises(gshard.GShardError, match="block/kernel .*: a scalar"):
        own(leaf(()))


def test_a_rule_may_not_divide_the_scanned_dimension():
    with pytest.raises(gshard.GShardError, match="scan"):
        by_path("kernel", 0)(leaf((4, 8, 8), scan_dim=0))


def test_a_predicate_that_takes_no_leaf_is_refused():
    with pytest.raises(gshard.GShardError, match="predicate='embed' is not a function.*by_path"):
        gshard.by_predicate("embed", 0)
    for wrong in (lambda path, shape: True, lambda path: "embed" in path):
        with pytest.raises(gshard.GShardError, match=r"by_predicate is called with one .*LeafInfo"):
            gshard.by_predicate(wrong, 0)(leaf((8, 8)))


def test_wrong_arguments_are_refused():
    for bad in (-1, 2.5, True, "many"):
        with pytest.raises(gshard.GShardError, match="min_shard_size"):
            by_shape(bad)
    with pytest.raises(gshard.GShardError, match="indivisible"):
        by_shape(0, "drop")
    with pytest.raises(gshard.GShardError, match="regular expression"):
        by_path("(", 0)
    with pytest.raises(gshard.GShardError, match="rules="):
        as_rules(3)


def test_only_keys_are_always_replicated():
    key = jax.eval_shape(lambda: jax.random.key(0))
    assert lay_out("key", key, group(4), by_shape(0)).dim is None
    count = jax.ShapeDtypeStruct((8,), np.int32)
    assert lay_out("count", count, group(4), by_shape(0)).dim == 0


def test_a_rule_for_a_parameter_that_fits_no_moment_says_how_to_leave_it_out():
    params, mesh = {"embedding": np.zeros((1000, 256), np.float32)}, gshard.make_mesh()
    with pytest.raises(gshard.GShardError, match=r"v_row/embedding .* '\^embedding\$', matches"):
        gshard.shard_train_state(
            (params, optax.adafactor(1e-3)), mesh, "zero3", rules={"embedding$": 1}
        )
    pair = (params, optax.adafactor(1e-3))
    _, plan = gshard.shard_train_state(pair, mesh, "zero3", rules={"^embedding$": 1})
    assert plan.params["embedding"].dim == 1


def sharded(**options):
    params = {"table": np.ones((24, 8)), "stack": nn.Partitioned(np.ones((6, 8, 8)), STACK)}
    pair = (params, optax.sgd(0.1))
    return gshard.shard_train_state(pair, gshard.make_mesh(), "os", min_shard_size=0, **options)[1]


STACK = ("blocks", None, None)


@pytest.mark.parametrize(
    "rules",
    [
        {"tabel$": 1},
        [{"tabel$": 1}, by_shape(0)],
        by_path("tabel$", 1),
        [by_shape(0), [by_path("tabel$", 1)]],
    ],
)
def test_a_pattern_that_matches_nothing_is_warned_of_in_a_list_too(rules):
    with pytest.warns(gshard.GShardWarning, match=r"rules: .*'tabel\$' matches no path"):
        sharded(rules=rules)


def test_names_of_scanned_dimensions_add_to_those_that_are_known():
    def scanned(plan):
        return {x.path for x in jax.tree.leaves(plan.params) if x.scan_dim == 0}

    assert scanned(sharded()) == set()
    assert scanned(sharded(scan_axes=("blocks",))) == {"stack"}
    assert scanned(sharded(scan_axes="blocks")) == {"stack"}
    params = {"w": nn.Partitioned(np.ones((6, 8)), ("layers", None))}
    both = params | {"stack": nn.Partitioned(np.ones((6, 8, 8)), STACK)}
    _, plan = gshard.shard_train_state(
        (both, optax.sgd(0.1)),
        gshard.make_mesh(),
        "os",
        min_shard_size=0,
        scan_axes=("blocks",),
    )
    assert scanned(plan) == {"w", "stack"}


@pytest.mark.parametrize("scan_axes", ["^stack", ("block",), ("blocks", "groups")])
def test_a_name_that_the_metadata_lacks_is_warned_of(scan_axes):
    with pytest.warns(gshard.GShardWarning, match=r"no dimension is named .* It has blocks\."):
        sharded(scan_axes=scan_axes)
