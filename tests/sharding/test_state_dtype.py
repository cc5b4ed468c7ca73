"""Which arrays of an optimizer state are stored in 8 bits, and what a wrong request says."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType
from optax import contrib

import gshard
from gshard.sharding.quantized_array import quantized_arrays
from tests.optimizers import OPTIMIZERS

SHAPES = {
    "Embed_0/embedding": (128, 64),
    "unembed/kernel": (64, 128),
    "wte": (128, 64),
    "Dense_0/kernel": (64, 80),
    "Dense_0/bias": (80,),
    "LayerNorm_0/scale": (8192,),
    "thin": (4, 2000),
    "ids": (64, 80),
    "temperature": (),
}  # fmt: skip


def params() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, shape in SHAPES.items():
        *keys, last = path.split("/")
        inside = found
        for key in keys:
            inside = inside.setdefault(key, {})
        inside[last] = jax.ShapeDtypeStruct(shape, jnp.int32 if path == "ids" else jnp.float32)
    return found


def plan_of(tx: Any = None, state_exceptions: Any = None, devices: int = 8) -> gshard.Plan:
    precision = gshard.Precision(
        "float32", state_dtype="int8", state_exceptions=state_exceptions or {}
    )
    mesh = AbstractMesh((devices,), ("shard",), axis_types=(AxisType.Auto,))
    pair = (params(), tx or optax.adam(1e-3))
    return gshard.shard_train_state(pair, mesh, "os", precision=precision, min_shard_size=4000)[1]


def quantized(plan: gshard.Plan) -> set[str]:
    return {x.codes.path.removesuffix("/codes") for x in quantized_arrays(plan.opt_state)}


def test_large_arrays_but_embeddings_are_stored_in_8_bits():
    plan = plan_of()
    chosen = {"unembed/kernel", "Dense_0/kernel", "LayerNorm_0/scale", "thin"}
    assert quantized(plan) == {f"0/{m}/{x}" for m in ("mu", "nu") for x in chosen}
    reasons = {"0/mu/Embed_0/embedding": "an embedding", "0/mu/wte": "an embedding"}
    assert reasons.items() <= plan.not_quantized.items()
    assert plan.not_quantized["0/nu/Dense_0/bias"] == "80 elements < 4096"
    assert "in 8 bits: 8 arrays of the optimizer state; not 0/mu/" in str(plan)


def test_exceptions_name_parameters_or_arrays_of_the_state():
    chosen = {"unembed/kernel", "Dense_0/kernel", "LayerNorm_0/scale", "thin"}
    found = quantized(plan_of(state_exceptions={"^LayerNorm": None, "nu/Dense": None}))
    assert found == {f"0/{m}/{x}" for m in ("mu", "nu") for x in chosen} - {
        "0/mu/LayerNorm_0/scale", "0/nu/LayerNorm_0/scale", "0/nu/Dense_0/kernel"
    }  # fmt: skip
    found = quantized(plan_of(state_exceptions={"mu/.*bias": None, "embedding|bias": "int8"}))
    more = {"0/mu/Embed_0/embedding", "0/nu/Embed_0/embedding", "0/nu/Dense_0/bias"}
    assert found == {f"0/{m}/{x}" for m in ("mu", "nu") for x in chosen} | more


def test_a_scalar_is_stored_as_it_is_whatever_an_exception_says():
    found = plan_of(state_exceptions={".": "int8"})
    assert found.not_quantized["0/mu/temperature"] == "1 elements < 4096"


def test_an_exception_without_effect_is_named():
    with pytest.warns(gshard.GShardWarning, match="state_exceptions: the pattern 'Dens_0' matches"):
        plan_of(state_exceptions={"Dens_0": None})


def test_blocks_are_along_a_dimension_that_is_not_sharded():
    state = plan_of().opt_state[0].mu
    dense, scale, thin = state["Dense_0"]["kernel"], state["LayerNorm_0"]["scale"], state["thin"]
    for x in (dense, scale, thin):
        assert x.codes.dim == x.scales.dim is not None
        assert x.codes.padding == x.scales.padding
    assert (dense.codes.dim, dense.axis, dense.shards, dense.scales.shape) == (0, 1, 1, (64, 1))
    # There is no other dimension, or none that is long enough: blocks end with their shards.
    assert (scale.axis, scale.shards, scale.scales.shape) == (0, 8, (32,))
    assert (thin.codes.dim, thin.axis, thin.shards, thin.scales.shape) == (1, 1, 8, (4, 8))


@pytest.mark.parametrize("name", ["schedule_free_adamw", "prodigy", "mechanize", "lookahead"])
def test_copies_of_parameters_keep_their_dtype(name):
    plan = plan_of(OPTIMIZERS[name](), {"": "int8"})
    copies = [p for p, why in plan.not_quantized.items() if "begins with" in why]
    assert copies and not quantized(plan) & {*copies}
    assert all(path.endswith(tuple(SHAPES)) for path in copies)


def test_what_an_update_replaces_keeps_its_dtype():
    plan = plan_of(OPTIMIZERS["optimistic_adam_v2"](), {"": "int8"})
    last = {p for p, why in plan.not_quantized.items() if why == "each update replaces it"}
    assert last and not any("/mu/" in path or "/nu/" in path for path in last)
    assert quantized(plan) and not quantized(plan) & last
    with pytest.warns(gshard.GShardWarning, match=r"no effect.* params/.*each update replaces it"):
        plan_of(optax.scale_by_lbfgs())
    with pytest.warns(gshard.GShardWarning, match="arguments of your own loop"):
        assert not quantized(plan_of(optax.lbfgs()))


def test_a_mean_of_parameters_keeps_its_dtype():
    mean = optax.GradientTransformation(
        lambda p: jax.tree.map(jnp.zeros_like, p),
        lambda g, s, p=None: (g, jax.tree.map(lambda s, p: 0.9 * s + 0.1 * p, s, p)),
    )
    plan = plan_of(optax.chain(mean, optax.adam(1e-3)), {"": "int8"})
    of_mean = {x.path for x in jax.tree.leaves(plan.opt_state[0]) if x.dtype == jnp.float32}
    reasons = {plan.not_quantized.get(path) for path in of_mean}
    assert of_mean and reasons == {"no gradient changes it"}
    assert any("mu/Dense_0/kernel" in path for path in quantized(plan))


CENTERED = {
    "alone": lambda: optax.rmsprop(1e-3, centered=True, momentum=0.9),
    "in a branch": lambda: optax.MultiSteps(optax.scale_by_stddev(), 4),
}


@pytest.mark.parametrize("name", CENTERED)
def test_moments_whose_difference_must_not_be_negative_keep_their_dtype(name):
    """`nu - mu**2` of a centered RMSprop became negative by rounding, and its root NaN."""
    tx: Any = CENTERED[name]()
    plan = plan_of(optax.chain(tx, optax.trace(0.9)), {"": "int8"})
    rooted = {path for path, why in plan.not_quantized.items() if "root of a difference" in why}
    assert {path.split("/")[-3] for path in rooted if "Dense_0/kernel" in path} >= {"mu", "nu"}
    assert not rooted & quantized(plan) and any("trace" in path for path in quantized(plan))


@pytest.mark.parametrize("name", ["adamw", "adabelief", "yogi", "lamb", "amsgrad", "a chain"])
def test_roots_of_what_is_never_negative_are_not_in_the_way(name):
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_trust_ratio())
    chain = optax.chain(optax.trace(0.9), optax.adabelief(1e-3), clip, optax.adaptive_grad_clip(1))
    tx = chain if name == "a chain" else getattr(optax, name)(1e-3)
    assert not any("root" in why for why in plan_of(tx).not_quantized.values())


def test_what_is_not_of_the_shape_of_a_parameter_keeps_its_dtype():
    plan = plan_of(optax.adafactor(1e-3, min_dim_size_to_factor=32, momentum=0.9))
    factors = [x for x in jax.tree.leaves(plan.opt_state) if "v_row" in x.path]
    assert factors and all(x.dtype == jnp.float32 for x in factors)
    assert any("Dense_0/kernel" in path for path in quantized(plan))
    plan = plan_of(contrib.muon(1e-3))
    assert any("mu/Dense_0/kernel" in path for path in quantized(plan))


def test_a_request_without_effect_is_reported():
    with pytest.warns(gshard.GShardWarning, match=r"no effect: the optimizer has no moments\.$"):
        plan_of(optax.sgd(0.1))
    tx = optax.masked(optax.adam(0.1), lambda p: {**jax.tree.map(lambda _: False, p), "wte": True})
    with pytest.warns(gshard.GShardWarning, match=r"8 bits: .*an embedding.* state_exceptions="):
        plan_of(tx)


@pytest.mark.parametrize(
    "name", ["int4", "fp8", "int_8", "uint8", "bfloat16", "float32", 8, "Int8"]
)
def test_other_dtypes_are_refused_with_what_is_possible(name):
    with pytest.raises(gshard.GShardError, match="state_dtype=.*Choose 'int8', or None for the"):
        gshard.Precision("float32", state_dtype=name)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"state_exceptions": {"norm": None}}, "no effect without state_dtype='int8'"),
        ({"state_dtype": "int8", "state_exceptions": ["norm"]}, "must map path patterns to dtypes"),
        ({"state_dtype": "int8", "state_exceptions": {"norm": "float32"}}, r"state_exceptions\["),
        ({"state_dtype": "int8", "state_exceptions": {"(": None}}, "regular expression"),
    ],
)
def test_wrong_exceptions_are_refused(given, said):
    with pytest.raises(gshard.GShardError, match=said):
        gshard.Precision("float32", **given)


def test_dtypes_are_accepted_as_names_and_as_types():
    for name in ("int8", jnp.int8, np.dtype("int8")):
        assert gshard.Precision(state_dtype=name).state_dtype == jnp.int8
    assert gshard.Precision().state_dtype is None
