"""Parameters whose dimensions are too short for the number of devices: replicas are advised."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.analysis.aot.target import parse_target
from gshard.analysis.config import Config
from gshard.analysis.forecast import abstract_mesh
from gshard.analysis.tune import advise
from gshard.sharding import padded_storage

LAYERS, WIDTH, HIDDEN, WORDS = 32, 4096, 14336, 128256


def llama_8b():
    """The matrices of Llama 3 8B, abstract."""
    layer = {
        "q": (WIDTH, WIDTH), "k": (WIDTH, 1024), "v": (WIDTH, 1024), "o": (WIDTH, WIDTH),
        "up": (WIDTH, HIDDEN), "gate": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
    }  # fmt: skip
    shapes = {f"layer_{i}": layer for i in range(LAYERS)}
    shapes |= {"embed": (WORDS, WIDTH), "head": (WIDTH, WORDS)}
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=is_shape)


def planned(params, devices, replica=1, level="p_g_os"):
    """The plan over so many devices, and the warnings that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = abstract_mesh(devices, replica)
        _, plan = gshard.shard_train_state((params, optax.adam(1e-3)), mesh, level)
    return plan, [str(x.message) for x in caught]


def factor(plan):
    leaves = jax.tree.leaves(plan.grads)
    return sum(x.stored_size for x in leaves) / sum(x.size for x in leaves)


def bytes_of_gradients(plan):
    return sum(x.bytes_per_device for x in jax.tree.leaves(plan.grads))


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_a_model_on_too_many_devices_is_told_of_replicas(level):
    params = llama_8b()
    plan, (warning,) = planned(params, 16384, level=level)
    assert factor(plan) > 1.5
    assert f"take {factor(plan):.2f} times as many elements" in warning
    assert "most of all layer_0/" in warning and "embed" not in warning
    assert "gshard.make_mesh(replica=4) shards over 4,096: 1.0" in warning
    there, none = planned(params, 16384, replica=4, level=level)
    assert factor(there) < 1.1 and none == []
    ratio = bytes_of_gradients(there) / bytes_of_gradients(plan)
    assert f"and {ratio:.2f} times the memory of each device" in warning
    assert "rules=" not in warning


def test_where_only_one_device_needs_no_padding_a_rule_is_advised():
    params = {"w": jax.ShapeDtypeStruct((8, 2_000_003), jnp.float32)}
    with pytest.warns(gshard.GShardWarning, match=r"shards over 1: .* rules= may choose"):
        gshard.shard_train_state(
            (params, optax.sgd(0.1)), abstract_mesh(7, 1), "zero3", rules=gshard.by_path("w", 0)
        )


def test_the_replicas_there_are_count():
    _, (warning,) = planned(llama_8b(), 32768, replica=2)
    assert "sharded over 16,384 devices" in warning and "make_mesh(replica=8)" in warning


@pytest.mark.parametrize(("devices", "level"), [(4096, "p_g_os"), (16384, "dp")])
def test_who_wastes_nothing_hears_nothing(devices, level):
    assert planned(llama_8b(), devices, level=level)[1] == []


@pytest.mark.filterwarnings("ignore:sharded over .* devices, parameters take")
def test_advice_prefers_replicas_to_padding():
    target = parse_target("h100:512x8")
    arguments = {"width": 1024, "layers": 2}  # 1024 rows for 4096 devices
    model = Config("tests.setups:mlp", arguments, ("p_g_os",), target.devices, target)
    found = [x for x in advise(model) if x.option.choices.reshard_after_forward is True]
    by_replica = {x.option.replica: x for x in found}
    first, better = by_replica[1], by_replica[4]
    assert found.index(better) < found.index(first)
    assert better.needs < first.needs and better.cost.wire < first.cost.wire


@pytest.mark.filterwarnings("ignore:100% of the parameters are replicated")
@pytest.mark.parametrize("in_jit", [False, True])
@pytest.mark.parametrize("indivisible", ["pad", "replicate"])
def test_a_loss_that_closes_over_an_array_with_padding_is_warned_of(indivisible, in_jit):
    """An argmax or a maximum over the zeros at its end differs from one device."""
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    ones, how = jnp.ones((7, 29)), {"min_shard_size": 0, "indivisible": indivisible}
    teacher, _ = gshard.shard_train_state(({"w": -ones}, optax.sgd(0.1)), mesh, "p_g_os", **how)
    state, plan = gshard.shard_train_state(({"w": ones}, optax.sgd(0.1)), mesh, "p_g_os", **how)
    x = jnp.ones((6, 7))

    def loss_to(target):
        return lambda p, x: ((x @ p["w"]).sum(1) - (x @ target).max(1)).mean()

    def run(target):
        if in_jit:
            grad = lambda p, t: gshard.value_and_grad(loss_to(t), plan)(p, x)[0]  # noqa: E731
            return float(jax.jit(grad)(state.params, target))
        return float(
            gshard.make_train_step(loss_to(target), plan, donate=False)(state, x)[1]["loss"]
        )

    wanted = float(loss_to(-ones)({"w": ones}, x))
    assert run(gshard.full_params(teacher)["w"]) == pytest.approx(wanted)
    if indivisible == "replicate":
        assert run(teacher.params["w"]) == pytest.approx(wanted)
    else:
        with pytest.warns(gshard.GShardWarning, match=r"closes over an array of shape \(7, 30\)"):
            assert run(teacher.params["w"]) != pytest.approx(wanted)


def test_an_error_about_the_shape_of_a_second_network_says_that_it_is_padded(monkeypatch):
    monkeypatch.setattr(padded_storage, "_stored", {})  # of what other tests have padded
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    teacher, student = ({"w": jnp.ones((7, 29)) * i} for i in range(2))
    (other, _), (state, plan) = (
        gshard.shard_train_state((x, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=0)
        for x in (teacher, student)
    )

    def loss(p, x):
        return jnp.square(x @ p["w"] - x @ other.params["w"]).mean()

    for make in (gshard.make_train_step, gshard.make_eval_step):
        with pytest.raises(TypeError, match="shape") as caught:
            make(loss, plan)(state, jnp.ones((6, 7)))
        assert "w [7, 29] as [7, 30]" in " ".join(caught.value.__notes__)


def test_padded_parameters_of_another_state_that_are_passed_by_name_are_warned_of():
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    given = {"w": jnp.ones((7, 29))}, optax.sgd(0.1)
    other, _ = gshard.shard_train_state(given, mesh, "p_g_os", min_shard_size=0)
    state, plan = gshard.shard_train_state(given, mesh, "dp")
    grad = gshard.value_and_grad(lambda p, x, *, w: (x @ p["w"] @ w.T).mean(), plan)
    with pytest.warns(gshard.GShardWarning, match=r"w= of the loss is an array of shape \(7, 30\)"):
        with pytest.raises(TypeError):  # 29 columns, and 30 with the padding
            jax.jit(lambda p, w: grad(p, jnp.ones((6, 7)), w=w))(state.params, other.params["w"])


def test_a_small_model_hears_nothing():
    params = {"w": jax.ShapeDtypeStruct((9, 5), jnp.float32)}
    mesh = gshard.make_mesh()
    _, plan = gshard.shard_train_state((params, optax.adam(1e-3)), mesh, "os", min_shard_size=0)
    assert factor(plan) > 1.1


def test_another_model_of_the_padded_shape_may_be_sharded_again(monkeypatch):
    """Its last entries are not zero, or all are, as of a new bias."""
    monkeypatch.setattr(padded_storage, "_stored", {})
    mesh = gshard.make_mesh(devices=jax.devices()[:3])

    def sharded(w, b):
        params = {"w": jnp.ones((7, w)), "b": jnp.zeros(b)}
        return gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=0)

    sharded(29, 29)
    state, _ = sharded(30, 30)
    again, _ = gshard.shard_train_state(
        ({"other": state.params}, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=0
    )
    assert again.params["other"]["b"].shape == (30,)
    gshard.shard_train_state((state.params, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=0)
