"""Quantized collectives next to other features, and what is refused by name."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import gshard
from gshard.sharding import mesh as mesh_module
from gshard.sharding import nodes as nodes_module
from gshard.sharding import topology
from gshard.sharding.precision import Precision
from gshard.train.same_state import plan_facts
from tests.tiers import quick
from tests.train.test_wire_dtypes import batch_of, loss_of, params_of

BOTH = Precision("float32", gather_dtype="int8", scatter_dtype="int8")
FOUR = Precision("float32", gather_dtype="int8", scatter_dtype="int4")
USUAL = gshard.Quantized("int4")


def mesh_of(n=8, **options):
    return gshard.make_mesh(devices=jax.devices()[:n], **options)


def sharded(mesh, level="p_g_os", precision=BOTH, params=None, tx=None, **options):
    given = (params or params_of(), tx or optax.sgd(1.0))
    options = {"min_shard_size": 200, "scan_axes": {"layers": 0}, **options}
    return gshard.shard_train_state(given, mesh, level, precision=precision, **options)


def on_model_axis(params, mesh):
    specs = {"layers": (None, None, "model"), "out": (), "bias": ()}
    return {k: jax.device_put(x, NamedSharding(mesh, jax.P(*specs[k]))) for k, x in params.items()}


def even_params():
    return {
        name: x[..., :96, :96] if name == "layers" else x[:96] if name == "out" else x
        for name, x in params_of().items()
    }


MESHES = {
    "replicas": (dict(replica=2), {}),
    "model axis": (dict(extra={"model": 2}), {}),
    "both": (dict(replica=2, extra={"model": 2}), {}),
    "offload": ({}, {"offload": True}),
    "accumulated": ({}, {"micro_batches": 2, "accumulate": "local"}),
    "synchronized": ({}, {"micro_batches": 2, "accumulate": "sync"}),
    "sub-groups": (dict(extra={"model": 2}), {"reshard_after_forward": 2}),
    "without buckets": ({}, {"bucket_size": 0}),
    "no prefetch": ({}, {"prefetch": False}),
}


@pytest.mark.parametrize("precision", quick([BOTH, FOUR], [FOUR]), ids=["int8", "int4"])
@pytest.mark.parametrize("level", quick(["os", "os_g", "p_g_os"], ["p_g_os"]))
@pytest.mark.parametrize("name", quick(MESHES, ["replicas", "model axis", "offload"]))
def test_next_to_other_features(name, level, precision):
    mesh_options, options = MESHES[name]
    if name in ("sub-groups", "no prefetch") and level != "p_g_os":
        pytest.skip("no parameter is gathered for the loss")
    if name == "offload" and level != "p_g_os":
        pytest.skip("SGD has no state to offload")
    mesh, params = mesh_of(**mesh_options), even_params()
    given = on_model_axis(params, mesh) if "model" in mesh.axis_names else params
    shard = {k: options[k] for k in ("offload",) if k in options}
    state, plan = sharded(mesh, level, precision, given, **shard)
    options = {k: x for k, x in options.items() if k not in shard}
    step = gshard.make_train_step(loss_of, plan, **options)
    batch = batch_of(16)
    batch["x"] = batch["x"][:, :96]
    audit, exceeded = gshard.audit(step, state, batch), ()
    if "model" in mesh.axis_names:  # XLA sums activations over it: as many as without
        plain, its_plan = sharded(mesh, level, None, given)
        plain_step = gshard.make_train_step(loss_of, its_plan, **options)
        exceeded = gshard.audit(plain_step, plain, batch).exceeded
    assert audit.exceeded == exceeded
    assert any(row.dtype == "u8" and row.purpose == "scatter" for row in audit.collectives)
    new, metrics = step(state, batch)
    value, exact = jax.jit(jax.value_and_grad(loss_of))(params, batch)
    np.testing.assert_allclose(metrics["loss"], value, rtol=0.05)
    found = gshard.full_params(new)
    for key, g in exact.items():
        change = params[key] - found[key]
        assert np.abs(change - g).max() <= (0.05 if precision is BOTH else 0.5) * np.abs(g).max()
        assert np.corrcoef(change.ravel(), np.asarray(g).ravel())[0, 1] > 0.9
        copies = [np.asarray(x.data) for x in new.params[key].addressable_shards]
        by_index = {}
        for x, data in zip(new.params[key].addressable_shards, copies, strict=True):
            np.testing.assert_array_equal(by_index.setdefault(str(x.index), data), data)


def test_layers_of_a_model_share_a_collective():
    rng = np.random.default_rng(0)
    params = {
        f"block_{i}": {name: rng.normal(size=(80, 80)).astype(np.float32) / 9 for name in "ab"}
        for i in range(2)
    }

    def loss(p, b):
        x = b["x"]
        for block in p.values():
            x = jnp.tanh(x @ block["a"]) @ block["b"]
        return jnp.mean(x**2)

    batch = {"x": batch_of(16)["x"][:, :80]}

    def found(size, precision=BOTH):
        state, plan = sharded(mesh_of(), precision=precision, params=params, scan_axes=None)
        step = gshard.make_train_step(loss, plan, bucket_size=size)
        audit = gshard.audit(step, state, batch)
        assert audit.exceeded == ()
        count = sum(x.count for x in audit.collectives if x.purpose == "scatter")
        return count, gshard.full_params(step(state, batch)[0])

    together, alone = found(2**20), found(0)
    assert (together[0], alone[0]) == (2, 4)
    jax.tree.map(np.testing.assert_array_equal, together[1], alone[1])
    four = [found(size, FOUR)[1] for size in (2**20, 0)]
    jax.tree.map(np.testing.assert_array_equal, *four)


def test_an_nnx_pair_and_its_evaluation():
    model = nnx.Linear(96, 80, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])
    pair = (model, nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param))
    (model, optimizer), plan = gshard.shard_train_state(
        pair, mesh_of(5), "p_g_os", min_shard_size=200, wire="int8"
    )

    def loss(model, batch):
        return jnp.mean(model(batch["x"]) ** 2)

    batch = {"x": batch_of(20)["x"][:, :96]}
    evaluated = gshard.make_eval_step(loss, plan)(model, batch)
    metrics = gshard.make_train_step(loss, plan)(model, optimizer, batch)
    np.testing.assert_allclose(evaluated, metrics["loss"], rtol=1e-6)  # of the same parameters
    exact = np.mean((batch["x"] @ kernel) ** 2)
    assert 0 < abs(float(evaluated) - exact) < 0.02 * exact


def test_frozen_parameters_are_sent_as_they_are():
    state, plan = sharded(mesh_of(4), frozen="layers")
    audit = gshard.audit(gshard.make_train_step(loss_of, plan), state, batch_of(8))
    assert audit.exceeded == ()
    assert {x.dtype for x in audit.collectives if x.purpose == "non_trainable"} == {"f32"}
    assert {x.dtype for x in audit.collectives if x.purpose == "gather"} == {"u8"}


def test_your_own_loop_quantizes_too():
    state, plan = sharded(mesh_of(4), "os_g")
    grad = jax.jit(gshard.value_and_grad(loss_of, plan))
    _, grads = grad(state.params, gshard.shard_batch(batch_of(8), plan))
    exact = jax.grad(loss_of)(params_of(), batch_of(8))
    found = plan.grads["out"].unpad(np.asarray(grads["out"]))
    error = np.abs(found - exact["out"]).max()
    assert 0 < error < 0.02 * np.abs(exact["out"]).max()

    _, plan = sharded(mesh_of(4), "os_g", FOUR)
    with pytest.raises(gshard.GShardError, match=r"int4.* number of the step.*make_train_step"):
        gshard.value_and_grad(loss_of, plan)(state.params, gshard.shard_batch(batch_of(8), plan))


def test_a_mixed_precision_state_is_sent_in_fewer_bits():
    precision = Precision("bfloat16", gather_dtype="int8", scatter_dtype="int8")
    state, plan = sharded(mesh_of(4), "p_g_os", precision)
    assert state.params["out"].dtype == jnp.bfloat16
    step = gshard.make_train_step(loss_of, plan, reshard_after_forward=2)
    batch = batch_of(8)
    assert gshard.audit(step, state, batch).exceeded == ()
    new, _ = step(state, batch)
    exact = jax.grad(loss_of)(params_of(), batch)["out"]
    change = params_of()["out"] - gshard.full_params(new)["out"]
    assert np.abs(change - exact).max() < 0.1 * np.abs(exact).max()


# ---- the plan -----------------------------------------------------------------------------------


def test_the_plan_says_what_is_sent_and_why_not():
    params = params_of() | {
        "flat": np.zeros(9000, np.float32),
        "short": np.zeros((400, 20), np.float32),
        "router": np.zeros((80, 80), np.float32),
        "small": np.zeros((50, 40), np.float32),
    }
    precision = dataclasses.replace(BOTH, wire_exceptions={"router": None, "out": "float8_e5m2"})
    with pytest.warns(gshard.GShardWarning, match="31% of the sharded parameters") as seen:
        _, plan = sharded(mesh_of(4), precision=precision, params=params)
    assert "flat [9000]" in str(seen[0].message)
    text = " ".join(str(plan).split())
    by_path = {x.path: x for x in jax.tree.leaves(plan.grads)}
    assert by_path["out"].scattered_as.dtype == "float8_e5m2"
    assert by_path["layers"].scattered_as.dtype == "int8"
    reasons = {
        "flat": "no unsharded dimension of 32 or more",
        "short": "no unsharded dimension of 32 or more",
        "router": "no dtype is given for it",
        "small": "fewer than 4,096 elements",
    }
    for path, reason in reasons.items():
        assert by_path[path].scattered_as is None
        assert by_path[path].reason.endswith(f"sent as it is: {reason}")
    assert "sent as int8" in text


def test_of_gathers_alone_the_plan_says_why_not():
    params = {"big": np.zeros((256, 256), np.float32), "small": np.zeros((48, 64), np.float32)}
    precision = Precision("float32", gather_dtype="int8")
    _, plan = sharded(mesh_of(4), precision=precision, params=params, scan_axes=None)
    assert plan.params["big"].gathered_as and "sent as it is" not in plan.grads["big"].reason
    assert plan.grads["small"].reason.endswith("sent as it is: fewer than 4,096 elements")


def test_a_stack_and_its_layers_have_the_same_blocks():
    shape = jax.ShapeDtypeStruct((500, 64, 64), jnp.float32)
    _, plan = sharded(mesh_of(4), params={"w": shape}, scan_axes=None)
    stack = plan.params["w"]
    assert stack.gathered_as.dim == -3  # nobody says that it is scanned
    assert stack.layer().gathered_as is None
    _, plan = sharded(mesh_of(4), params={"w": shape}, scan_axes={"": 0})
    stack = plan.params["w"]
    assert stack.gathered_as == stack.layer().gathered_as
    assert stack.gathered_as.dim in (-1, -2)


@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_layers_that_are_sent_as_they_are_are_named(level):
    def loss(p, b):
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x * w), None), b, p["norms"])[0]
        return (jnp.tanh(x @ p["w"]) ** 2).mean()

    params = {"norms": np.ones((45, 96), np.float32), "w": np.ones((96, 96), np.float32)}
    state, plan = sharded(mesh_of(4), level, params=params, scan_axes=None)
    assert plan.grads["norms"].scattered_as.dim == -2
    step = gshard.make_train_step(loss, plan)
    with pytest.warns(gshard.GShardWarning, match=r"blocks .*scan_axes={'\^norms\$': 0}"):
        audit = gshard.audit(step, state, np.ones((8, 96), np.float32))
    assert {row.dtype for row in audit.collectives if row.purpose == "scatter"} == {"f32", "u8"}
    assert audit.exceeded[0] == (
        "reduce-scatter for scatter: the budget of what is not quantized is 0 elements, found 4,320"
    )
    assert len(audit.exceeded) == (2 if level == "p_g_os" else 1)  # and of what is gathered


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given, said",
    [
        ("fp8", r"wire='fp8' may be one of two: 'float8_e4m3fn'.*or 'float8_e5m2'"),
        (
            "int7",
            r"wire='int7' is not a dtype to send arrays in\. Did you mean 'int\d'.*Choose one",
        ),
        ("INT8", r"wire='INT8' is not a dtype to send arrays in\. Did you mean 'int8'"),
        ("bfloat16", r"wire='bfloat16' is not a dtype.* precision='bfloat16' sends.*as they are"),
        (8, r"wire=8 is not a dtype"),
        ({"a": 1}, r"wire=.* is not a dtype"),
        ({"a": "int8"}, r"wire=.* is not a dtype"),
        (("int8", "int4"), r"wire=.* is not a dtype.*Precision\('float32', gather_dtype=\.\.\."),
    ],
)
def test_unknown_dtypes_are_named(given, said):
    with pytest.raises(gshard.GShardError, match=said):
        sharded(mesh_of(4), precision=None, wire=given)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("int7",), "dtype='int7' is not a dtype to send.*Did you mean.*float8_e5m2'\\.$"),
        ((gshard.Quantized("int8"),), r"dtype=gshard.Quantized\('int8'\) of Quantized must be"),
        ((None,), "dtype=None of Quantized must be one of 'int8'"),
        (("int8", 16), "block=16 of Quantized must be 32 to 256 entries"),
        (("int8", 512), "block=512 of Quantized must be 32 to 256 entries"),
        (("int8", 64.0), r"block=64\.0 must be a whole number of entries"),
        (("int4", 64, "up"), "rounding='up' of Quantized must be 'nearest', 'stochastic'"),
        (("float8_e5m2", 64, "stochastic"), "'float8_e5m2' is rounded to the nearest: leave"),
    ],
)
def test_blocks_and_roundings_that_do_not_fit_are_named(arguments, said):
    with pytest.raises(gshard.GShardError, match=said):
        gshard.Quantized(*arguments)


def test_the_name_of_a_dtype_stands_for_the_usual_blocks():
    short, long = (sharded(mesh_of(4), precision=None, wire=x)[1] for x in ("int4", USUAL))
    assert (short.params, short.grads) == (long.params, long.grads)
    assert plan_facts(short) == plan_facts(long)
    assert short.params["out"].gathered_as.block == short.grads["out"].scattered_as.block == 256
    _, nearest = sharded(mesh_of(4), precision=None, wire=gshard.Quantized("int4", 256, "nearest"))
    assert plan_facts(nearest)["the plan"] != plan_facts(long)["the plan"]
    _, other = sharded(mesh_of(4), precision=None, wire=gshard.Quantized("int4", 64))
    how = [str(other.params["out"].gathered_as), str(other.grads["out"].scattered_as)]
    assert how == ["int4 in blocks of 64", "int4 in blocks of 64, rounded at random"]
    assert plan_facts(other)["the plan"] != plan_facts(long)["the plan"]


def test_parameters_are_not_rounded_at_random():
    random = gshard.Quantized("int4", rounding="stochastic")
    with pytest.raises(gshard.GShardError, match="gather_dtype=.*rounded to the nearest"):
        Precision(gather_dtype=random)
    with pytest.raises(gshard.GShardError, match=r"wire_exceptions\['w'\].*Leave rounding= out"):
        Precision(gather_dtype="int8", wire_exceptions={"w": random})
    with pytest.raises(gshard.GShardError, match="precision=.* is a dtype to send arrays in"):
        sharded(mesh_of(4), precision=random)
    _, plan = sharded(mesh_of(4), precision=None, wire=random)  # of gradients
    assert not plan.params["out"].gathered_as.stochastic
    assert plan.grads["out"].scattered_as.stochastic


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_the_rounding_may_be_chosen(dtype):
    """Random rounding needs the number of a step, which a user's own loop does not have."""
    x = batch_of(16)
    for rounding in ("nearest", "stochastic"):
        how = gshard.Quantized(dtype, 64, rounding)
        state, plan = sharded(mesh_of(4), "os_g", Precision("float32", scatter_dtype=how))
        assert plan.grads["out"].scattered_as.block == 64
        gradient = jax.jit(gshard.value_and_grad(loss_of, plan))
        if rounding == "nearest":
            assert np.isfinite(gradient(state.params, x)[0])
        else:
            with pytest.raises(gshard.GShardError, match="Gradients are rounded at random here"):
                gradient(state.params, x)


def test_dtypes_may_be_dtypes():
    precision = Precision(gather_dtype=jnp.int8, scatter_dtype=jnp.float8_e4m3fn)
    assert (precision.gather_dtype, precision.scatter_dtype) == ("int8", "float8_e4m3fn")
    assert hash(precision) == hash(dataclasses.replace(precision))


def test_arguments_that_do_not_go_together():
    with pytest.raises(gshard.GShardError, match="wire='int8' and gather_dtype= or"):
        sharded(mesh_of(4), wire="int8")
    with pytest.raises(gshard.GShardError, match="wire_exceptions= goes with gather_dtype="):
        Precision(wire_exceptions={"a": None})
    with pytest.raises(gshard.GShardError, match=r"wire_exceptions=\['a'\] must map path patterns"):
        Precision(gather_dtype="int8", wire_exceptions=["a"])
    with pytest.raises(gshard.GShardError, match=r"wire_exceptions\['a'\]='fp8' may be one of two"):
        Precision(gather_dtype="int8", wire_exceptions={"a": "fp8"})
    precision = dataclasses.replace(BOTH, wire_exceptions={"roter": None})
    with pytest.warns(gshard.GShardWarning, match=r"wire_exceptions.*'roter'"):
        sharded(mesh_of(4), precision=precision)


def test_parameters_without_a_float32_copy_are_refused():
    precision = Precision("bfloat16", param_dtype="bfloat16", gather_dtype="int8")
    with pytest.raises(gshard.GShardError, match=r"layers \(bfloat16\).* no float32 copy"):
        sharded(mesh_of(4), precision=precision)
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of())
    with pytest.raises(gshard.GShardError, match="precision='bfloat16'"):
        sharded(mesh_of(4), "os_g", None, low, wire="int8")


def test_four_bits_and_a_loss_scale_are_refused():
    _, plan = sharded(mesh_of(4), "os_g", FOUR)
    with pytest.raises(gshard.GShardError, match="scaler= with scatter_dtype='int4'"):
        gshard.make_train_step(loss_of, plan, scaler=gshard.GradScaler())
    gshard.make_train_step(loss_of, plan, scaler=gshard.GradScaler(enable=False))
    _, plan = sharded(mesh_of(4), "os_g", BOTH)
    gshard.make_train_step(loss_of, plan, scaler=gshard.GradScaler())


@pytest.mark.parametrize(
    "level, options, said",
    [
        ("dp", {"wire": "int8"}, "wire='int8' changes nothing: no array is sharded at level 'dp'"),
        ("os_g", {"gather": "int8"}, "gather_dtype='int8' changes nothing at level 'os_g'"),
        ("os_g", {"wire": "int8"}, ""),
        ("p_g_os", {"gather": "int8"}, ""),
        ("p_g_os", {"scatter": "int8"}, ""),
    ],
)
def test_what_changes_nothing_is_said(level, options, said):
    names = {f"{k}_dtype": x for k, x in options.items() if k != "wire"}
    precision = Precision("float32", **names) if names else None
    wire = {"wire": options["wire"]} if "wire" in options else {}
    expected = pytest.warns(gshard.GShardWarning, match=said) if said else nullcontext()
    with expected:
        sharded(mesh_of(4), level, precision, **wire)


def test_exceptions_that_change_nothing_are_named():
    for exceptions, said in (
        ({"bias": "int8"}, r"wire_exceptions\['bias'\]='int8' changes nothing: bias cannot be"),
        ({"": None}, "scatter_dtype='int8' changes nothing: wire_exceptions= has None for every"),
    ):
        with pytest.warns(gshard.GShardWarning, match=said):
            sharded(mesh_of(4), precision=dataclasses.replace(BOTH, wire_exceptions=exceptions))
    some = dataclasses.replace(BOTH, wire_exceptions={"bias|out": "int4"})
    sharded(mesh_of(4), precision=some)
    with pytest.warns(gshard.GShardWarning, match="no array is sharded at level 'os' on one dev"):
        sharded(mesh_of(1), "os", wire="int8", precision=None)


@pytest.fixture
def two_nodes(monkeypatch):
    """The first half of the devices is one node."""
    for module in (mesh_module, topology, nodes_module):
        monkeypatch.setattr(module, "node_of", lambda device: int(device.id >= 4), raising=False)


def test_a_flat_axis_over_several_nodes_is_refused(two_nodes):
    with pytest.raises(gshard.GShardError) as refused:
        sharded(mesh_of(), "os_g")
    said = str(refused.value)
    assert "the shard axis 'shard' has several devices of each of several nodes" in said
    assert "gshard.make_mesh({'node': 2, 'local': 4})" in said
    gathers = dataclasses.replace(BOTH, scatter_dtype=None)
    sharded(mesh_of(), "p_g_os", gathers)  # an all-gather is a ring

    mesh = gshard.make_mesh({"node": 2, "local": 4})  # as the message says
    state, plan = sharded(mesh, "os_g")
    assert plan.group.shard == ("local", "node")
    step = gshard.make_train_step(loss_of, plan)
    audit, plain = (
        gshard.audit(gshard.make_train_step(loss_of, p), s, batch_of(8))
        for s, p in ((state, plan), sharded(mesh, "os_g", None))
    )
    assert audit.exceeded == ()
    found = [
        sum(x.network_bytes for x in one.collectives if x.purpose == "scatter")
        for one in (audit, plain)
    ]
    assert 0.2 < found[0] / found[1] < 0.27  # of float32
    step(state, batch_of(8))
    with pytest.raises(gshard.GShardError, match=r"shard_axes=\('local', 'node'\)"):
        sharded(mesh, "os_g", shard_axes=("node", "local"))


def test_a_plan_of_several_nodes_refuses_what_they_would_refuse():
    w = np.zeros((512, 512), np.float32)
    setup = gshard.TrainSetup(({"w": w}, optax.sgd(0.1)), shard={"wire": "int8"})
    auto = jax.sharding.AxisType.Auto
    flat = jax.sharding.AbstractMesh((8,), ("shard",), axis_types=(auto,))
    with pytest.raises(gshard.GShardError, match="scatter_dtype=: the shard axis 'shard' has sev"):
        gshard.forecast(setup, flat, levels="os_g", devices_per_node=4)
    nodes = jax.sharding.AbstractMesh((2, 4), ("node", "local"), axis_types=(auto, auto))
    gshard.forecast(setup, nodes, levels="os_g", devices_per_node=4)
    gshard.forecast(setup, flat, levels="os_g", devices_per_node=8)
