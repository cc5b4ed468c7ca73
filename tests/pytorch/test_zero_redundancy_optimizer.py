"""`ZeroRedundancyOptimizer`: the numbers of the plain optimizer; PyTorch's cases as behaviours."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from examples import pytorch_zero
from gshard._util.arrays import is_key
from gshard.pytorch.parameters import parameters
from gshard.train_state.initial import initial
from tests.ahead_of_time import found_by

PARTITIONS = ["even", "greedy"]
ZRO = gshard.pytorch.ZeroRedundancyOptimizer
SHAPES = {"first": {"kernel": (13, 6), "bias": (6,)}, "last": {"kernel": (6, 5), "scale": ()}}


def tree(seed=0, dtype=jnp.float32):
    shapes, structure = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    found = [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]
    return jax.tree.unflatten(structure, found)


def devices(n):
    return gshard.distributed.new_group(range(n))


@partial(jax.jit, static_argnums=0)
def plain_step(factory, params, state, grads, traced):
    """The unsharded optimizer with hyperparameters that are traced."""
    return update(factory(**traced), params, state, grads)


def plain(factory, params, grads, **hyper):
    """The unsharded optimizer."""
    step = jax.jit(lambda p, s, g: update(factory(**hyper), p, s, g))
    state = factory(**hyper).init(params)
    for g in grads:
        params, state = step(params, state, g)
    return params, state


def update(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def assert_equal(found, wanted, close=0.0):
    """Bit for bit, or within `close`: a last bit or two of a parameter of size 1."""
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=close, atol=close)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("n", [1, 3, 4, 8])
def test_the_numbers_of_the_plain_optimizer(partition, buckets, n):
    """9, 17. Ten steps of AdamW; XLA may round otherwise where it compiles tensors apart."""
    grads = [tree(seed) for seed in range(1, 11)]
    wanted, state = plain(optax.adamw, tree(), grads, learning_rate=0.01, weight_decay=0.1)
    opt = ZRO(
        tree(),
        optax.adamw,
        devices(n),
        parameters_as_bucket_view=buckets,
        partition=partition,
        lr=0.01,
        weight_decay=0.1,
    )
    for g in grads:
        params = opt.step(g)
    assert_equal(params, wanted, close=0 if partition == "even" else 2.4e-7)
    assert_equal(opt.state_dict()["state"][0], state)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("buckets", [False, True])
def test_traced_hyperparameters_are_those_of_a_traced_plain_optimizer(partition, buckets):
    given = {"learning_rate": 0.02, "b1": 0.8, "weight_decay": 0.2, "eps": 1e-6}
    params, state = tree(), optax.adamw(0.01).init(tree())
    opt = ZRO(tree(), optax.adamw, devices(3), buckets, partition=partition, lr=0.01)
    for name, value in given.items():
        opt.param_groups[0][name] = value
    for seed in range(1, 11):
        found = opt.step(tree(seed))
        params, state = plain_step(optax.adamw, params, state, tree(seed), given)
    assert_equal(found, params, close=0 if partition == "even" else 2.4e-7)
    assert_equal(opt.state_dict()["state"][0], state)


def test_greedy_is_bit_equal_to_each_owners_tensors_alone():
    grads = [tree(seed) for seed in range(1, 11)]
    opt = ZRO(tree(), optax.adamw, devices(3), partition="greedy", lr=0.01)
    for g in grads:
        params = opt.step(g)
    leaves, given = jax.tree.leaves(tree()), [jax.tree.leaves(g) for g in grads]
    for owner in range(3):
        mine = [i for i, x in enumerate(opt._engine.owners) if x == owner]
        alone, _ = plain(
            optax.adamw,
            [leaves[i] for i in mine],
            [[g[i] for i in mine] for g in given],
            learning_rate=0.01,
        )
        assert_equal([jax.tree.leaves(params)[i] for i in mine], alone)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_one_parameter_by_hand_and_a_state_that_is_loaded(partition):
    """1: momentum 1.0, then 1.9; the saved learning rate wins."""
    one = {"x": jnp.ones(1)}
    opt = ZRO([jnp.ones(1)], optax.sgd, partition=partition, lr=0.1, momentum=0.9)
    (x,) = opt.step([one["x"]])
    np.testing.assert_allclose(x, 0.9, rtol=1e-6)
    saved = opt.state_dict()
    assert saved["param_groups"][0]["learning_rate"] == 0.1
    assert saved["param_groups"][0]["momentum"] == 0.9
    np.testing.assert_allclose(jax.tree.leaves(saved["state"][0]), [np.ones(1)])
    other = ZRO([x], optax.sgd, partition=partition, lr=0.01, momentum=0.9)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 0.1
    (y,) = other.step([one["x"]])
    np.testing.assert_allclose(y, 0.71, rtol=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(other.state_dict()["state"][0]), [[1.9]], rtol=1e-6)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_schedule_that_writes_the_learning_rate(partition):
    """2, 11: used from the next step on, and nothing is compiled again."""
    opt = ZRO(tree(), optax.sgd, devices(3), partition=partition, lr=0.01)
    params, state = tree(), optax.sgd(0.01).init(tree())
    for i in range(5):
        g, lr = tree(i + 1), 0.01 * 0.1**i
        opt.param_groups[0]["lr"] = lr if i % 2 else np.float32(lr)
        params, state = plain_step(optax.sgd, params, state, g, {"learning_rate": lr})
        found = opt.step(g)
        assert_equal(found, params)
        if i == 0:
            before = _compiled(opt)
    assert _compiled(opt) == before


def _compiled(opt):
    engine = opt._engine
    if hasattr(engine, "_step"):
        return engine._step._cache_size()
    return [owner._update._cache_size() for owner in engine._own.values()]


def test_hyperparameters_that_are_fixed_say_so():
    opt = ZRO(tree(), optax.adamw, lr=0.01)
    (group,) = opt.param_groups
    assert {"lr", "learning_rate", "b1", "eps", "weight_decay", "nesterov"} - set(group) == {"lr"}
    assert group["lr"] == 0.01 and "lr" in group
    opt.step(tree(1))
    assert _compiled(opt) == 1
    for i in range(3):  # a constant, until it changes
        group["b1"] = 0.5 + i / 10
        group["lr"] = 0.1 / (i + 1)
        opt.step(tree(1))
    assert _compiled(opt) == 2
    with pytest.raises(gshard.GShardError, match="nesterov of adamw is fixed"):
        group["nesterov"] = True
    group["nesterov"] = False
    with pytest.raises(gshard.GShardError, match="has no hyperparameter 'momentun'"):
        group["momentun"] = 0.9
    with pytest.raises(TypeError, match="must be a number"):
        group["lr"] = "0.1"
    factor = ZRO({"w": jnp.ones((4, 4))}, optax.adafactor, learning_rate=0.01)
    assert "min_dim_size_to_factor" in factor.param_groups[0].fixed
    with pytest.raises(gshard.GShardError, match="min_dim_size_to_factor of adafactor is fixed"):
        factor.param_groups[0]["min_dim_size_to_factor"] = 2


@pytest.mark.parametrize(
    ("factory", "given", "says"),
    [
        (optax.adam, {"betas": (0.9, 0.95)}, "optax calls it b1 and b2: pass b1=0.9, b2=0.95."),
        (optax.adam, {"betas": 0.9}, "optax calls it b1 and b2: pass b1 and b2."),
        (optax.adamw, {"beta2": 0.95}, "optax calls it b2: pass b2=0.95."),
        (optax.adam, {"epsilon": 1e-6}, "optax calls it eps: pass eps=1e-06."),
        (optax.rmsprop, {"alpha": 0.99}, "optax calls it decay: pass decay=0.99."),
        (optax.sgd, {"use_nesterov": True}, "optax calls it nesterov: pass nesterov=True."),
        (optax.adam, {"weight_decay": 0.1}, "Use optax.adamw"),
        (optax.adam, {"momentum": 0.9}, "Use optax.sgd"),
        (optax.adam, {"fused": True}, "Leave it out"),
        (optax.sgd, {"betas": (0.9, 0.95)}, "It takes learning_rate, momentum"),
    ],
)
def test_names_of_pytorch_and_paddle_are_translated_to_those_of_optax(factory, given, says):
    with pytest.raises(TypeError) as caught:
        ZRO(tree(), factory, lr=0.1, **given)
    assert says in str(caught.value) and "'eps'" not in str(caught.value)
    if given == {"betas": (0.9, 0.95)} and factory is optax.adam:
        with pytest.raises(gshard.GShardError, match="pass b1=0.9, b2=0.95"):
            ZRO(tree(), factory, lr=0.1).param_groups[0]["betas"] = (0.9, 0.95)


@pytest.mark.parametrize("name", ["defaults", "optim"])
def test_attributes_of_pytorchs_optimizers_say_what_to_use_instead(name):
    opt = ZRO(tree(), optax.adam, lr=0.1)
    assert not hasattr(opt, name)
    with pytest.raises(gshard.GShardError, match=f"{name}.*(param_groups|state_dict)") as caught:
        getattr(opt, name)
    assert isinstance(caught.value, AttributeError)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = opt.nothing


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("later", [False, True])
def test_groups_have_hyperparameters_of_their_own(partition, later):
    """7, 14: upfront or added later, as plain optimizers, one a group."""
    grads = [tree(seed) for seed in range(1, 4)]

    def parted(t):
        kernels = [t["first"]["kernel"], t["last"]["kernel"]]
        return [kernels, {"bias": t["first"]["bias"], "scale": t["last"]["scale"]}]

    kernels, rest = parted(tree())
    groups = [{"params": kernels, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    given = {"learning_rate": 0.01, "b1": 0.8}
    if later:
        opt = ZRO(groups[:1], optax.adamw, devices(4), partition=partition, **given)
        opt.add_param_group(groups[1])
    else:
        opt = ZRO(groups, optax.adamw, devices(4), partition=partition, **given)
    assert [g["weight_decay"] for g in opt.param_groups] == [0.1, 0.0]
    for g in grads:
        params = opt.step(parted(g))
    for i, decay in enumerate((0.1, 0.0)):
        wanted, state = plain(
            optax.adamw,
            parted(tree())[i],
            [parted(g)[i] for g in grads],
            weight_decay=decay,
            **given,
        )
        assert_equal(params[i], wanted, close=2.4e-7)
        assert_equal(opt.state_dict()["state"][i], state, close=2.4e-7)


def test_the_recipe_says_what_a_device_holds():
    """PyTorch's own: the same parameters, and half of the state on each of two devices."""
    given = (16, 4, 2, 2)
    plain, divided = (pytorch_zero.train(*given, sharded=way) for way in (False, True))
    assert divided["parameters"] == plain["parameters"] == 4 * 4 * (16 * 16 + 16)
    assert plain["optimizer state"] == 2 * plain["parameters"] + 8
    assert 0 <= divided["optimizer state"] - plain["parameters"] < 64  # counts
    assert divided["sum of the parameters"] == plain["sum of the parameters"]


def test_sorted_greedy_gives_what_pytorch_gives():
    """12, 13: 24 elements each; old tensors keep their owner; an owner may have none."""
    sizes = [9, 7, 5, 3] * 4
    opt = ZRO([jnp.ones((s, 1)) for s in sizes], optax.sgd, devices(4), partition="greedy", lr=1.0)
    assert opt._engine.loads() == [24] * 4
    opt = ZRO(
        [jnp.ones((s, 1)) for s in sizes[:-1]], optax.sgd, devices(4), partition="greedy", lr=1.0
    )
    before = opt._engine.owners[:]
    opt.add_param_group({"params": [jnp.ones((3, 1))]})
    assert opt._engine.owners[:-1] == before and opt._engine.loads() == [24] * 4
    assert len(opt.param_groups) == 2
    odd = [jnp.ones((s, 1)) for s in (100, 3, 5, 2, 6, 4)]
    opt = ZRO(odd, optax.sgd, devices(4), partition="greedy", lr=1.0)
    owned = [
        [x.shape[0] for g in groups for x in g["params"]] for groups in opt._partition_parameters()
    ]
    assert [sorted(x, reverse=True) for x in owned] == [[100], [6], [5, 2], [4, 3]]
    assert all(set(g) == {"params"} for groups in opt._partition_parameters() for g in groups)
    opt.add_param_group({"params": [jnp.ones((3, 1))]})
    assert opt._engine.owners[-1] == 1  # 100, 6, 7, 7: the emptiest
    one = ZRO([jnp.ones(3)], optax.adam, devices(4), partition="greedy", lr=0.1)
    one.step([jnp.ones(3)])
    assert [len(groups[0]["params"]) for groups in one._partition_parameters()] == [1, 0, 0, 0]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_state_is_sharded(partition):
    """12: what each device holds, and greedy's on its owner alone."""
    opt = ZRO(tree(), optax.adam, devices(4), partition=partition, lr=0.1)
    if partition == "even":
        held = opt.plan.bytes_per_device["opt_state"]
        moments = (
            2 * 4 * sum(-(-max(s) // 4) * (np.prod(s) // max(s)) for s in ((13, 6), (6,), (6, 5)))
        )
        assert held <= moments + 2 * 4 + 4 + 64
        assert opt._engine.loads() == [held_elements(opt)] * 4
    else:
        for place, owner in opt._engine._own.items():
            arrays = jax.tree.leaves(opt._engine.state[place])
            assert all(x.devices() == {owner.device} for x in arrays)
            moments = sum(x.size for x in arrays if x.dtype == jnp.float32)
            assert moments == 2 * opt._engine.loads()[place]


@pytest.mark.parametrize(
    ("partition", "buckets", "says"),
    [
        (
            "even",
            True,
            "updates 37 elements, 1.00 of the mean, and keeps 300 B of state; padding: 33",
        ),
        (
            "greedy",
            True,
            "updates 78 elements, 2.71 of the mean, and keeps 628 B of state; padding: 0",
        ),
        ("greedy", False, "padding: 0 elements; all-gathered: 115)"),
    ],
)
def test_what_a_partition_costs_is_shown(partition, buckets, says):
    """Load, memory and what is sent, as the compiled program has it."""
    opt = ZRO(tree(), optax.adam, devices(4), buckets, partition=partition, lr=0.1)
    assert says in repr(opt)
    rows = gshard.audit(opt.step).collectives
    assert sum(row.elements for row in rows) == opt._engine.all_gathered_elements()
    held = gshard.budget(opt.plan).resident["optimizer"]
    if partition == "even":
        assert held == opt.plan.bytes_per_device["opt_state"]


def held_elements(opt):
    return sum(np.prod(x.shard_shape, dtype=int) for x in jax.tree.leaves(opt.plan.grads))


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(optax.adamw, learning_rate=0.01),
        partial(optax.sgd, learning_rate=0.1, momentum=0.9, nesterov=True),
        partial(optax.lamb, learning_rate=0.01),
        partial(optax.lion, learning_rate=0.01),
        partial(optax.rmsprop, learning_rate=0.01),
        partial(optax.adafactor, learning_rate=0.01),
        partial(optax.adagrad, learning_rate=0.1),
        partial(optax.radam, learning_rate=0.01),
    ],
    ids=lambda x: x.func.__name__,
)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_every_optimizer(partition, optimizer):
    """17, 20: those that PyTorch's map lacks too."""
    grads = [tree(seed) for seed in range(1, 4)]
    params, state = tree(), optimizer().init(tree())
    for g in grads:
        updates, state = jax.jit(optimizer().update)(g, state, params)
        params = optax.apply_updates(params, updates)
    opt = ZRO(tree(), optimizer.func, devices(3), partition=partition, **optimizer.keywords)
    for g in grads:
        found = opt.step(g)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6)


def test_greedy_refuses_what_couples_tensors_and_names_it():
    def clipped(learning_rate):
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))

    with pytest.raises(gshard.GShardError, match=r"clipped.*in clip_by_global_norm"):
        ZRO(tree(), clipped, devices(3), partition="greedy", learning_rate=0.1)
    grads = [tree(seed) for seed in range(1, 4)]
    wanted, _ = plain(clipped, tree(), grads, learning_rate=0.1)
    opt = ZRO(tree(), clipped, devices(3), learning_rate=0.1)
    for g in grads:
        params = opt.step(g)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-7)

    def every_other(learning_rate):
        return optax.MultiSteps(optax.adam(learning_rate), 2).gradient_transformation()

    opt = ZRO(tree(), every_other, devices(3), partition="greedy", learning_rate=0.1)
    wanted, _ = plain(every_other, tree(), grads, learning_rate=0.1)
    for g in grads:
        params = opt.step(g)
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6)


def test_groups_that_are_clipped_each_by_itself_are_warned_of():
    def clipped(learning_rate):
        return optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(learning_rate))

    dp = gshard.paddle.DataParallel(Net(), group=devices(3))
    ZRO(dp.parameters(), clipped, lr=1.0)
    groups = [{"params": dp.first}, {"params": dp.last}]
    with pytest.warns(gshard.GShardWarning, match=r"clipped.*clip_by_global_norm, and each"):
        ZRO(groups, clipped, lr=1.0)
    opt = ZRO(groups, optax.sgd, lr=1.0)
    before = dp.state_dict()
    dp.backward(loss_fn, rows(24, 0))
    clip = optax.clip_by_global_norm(0.1)  # as the warning says
    dp.grads, _ = jax.jit(clip.update)(dp.grads, clip.init(None))
    opt.step()
    moved = jax.tree.map(jnp.subtract, dp.state_dict(), before)
    np.testing.assert_allclose(optax.tree.norm(moved), 0.1, rtol=1e-5)


def test_groups_of_which_each_skips_by_itself_are_warned_of():
    def whole_steps(learning_rate):
        tx = optax.MultiSteps(
            optax.sgd(learning_rate), 2, should_skip_update_fn=optax.skip_not_finite
        )
        return tx.gradient_transformation()

    dp = gshard.paddle.DataParallel(Net(), group=devices(3))
    with pytest.warns(gshard.GShardWarning, match=r"in MultiSteps, .* gradients alone\. If that"):
        ZRO([{"params": dp.first}, {"params": dp.last}], whole_steps, lr=1.0)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("path", [(4, 2, 3), (1, 8), (3, 1)])
def test_state_dicts_go_from_any_number_of_devices_to_any(partition, path, tmp_path):
    """15, elastic 4 to 2 to 3: through a file, with the input unchanged."""
    grads = [tree(seed) for seed in range(1, 7)]
    wanted, _ = plain(optax.adamw, tree(), grads[: 2 * len(path)], learning_rate=0.01)
    params, saved = tree(), None
    for i, n in enumerate(path):
        opt = ZRO(params, optax.adamw, devices(n), partition=partition, lr=0.01)
        if saved is not None:
            before = jax.tree.map(np.array, saved["state"])
            opt.load_state_dict(saved)
            jax.tree.map(np.testing.assert_array_equal, before, saved["state"])
        for g in grads[2 * i : 2 * i + 2]:
            params = opt.step(g)
        gshard.pytorch.save(opt.state_dict(), tmp_path / str(n))
        saved = gshard.pytorch.load(tmp_path / str(n))
    assert_equal(params, wanted, close=0 if partition == "even" else 2.4e-7)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_snapshot_is_not_torn(partition):
    opt = ZRO(tree(), optax.adam, devices(3), partition=partition, lr=0.1)
    opt.step(tree(1))
    saved = opt.state_dict()
    kept = jax.tree.map(np.array, saved["state"])
    opt.step(tree(2))
    assert_equal(saved["state"], kept)
    assert int(saved["state"][0][0].count) == 1


@pytest.mark.parametrize("partition", PARTITIONS)
def test_states_of_plain_optimizers_go_in_and_out(partition):
    """17: cross-load and one more step, both ways."""
    grads = [tree(seed) for seed in range(1, 5)]
    params, state = plain(optax.adamw, tree(), grads[:2], learning_rate=0.01)
    opt = ZRO(params, optax.adamw, devices(3), partition=partition, lr=0.01)
    opt.load_state_dict(state)
    found = opt.step(grads[2])
    hyper = {"learning_rate": 0.01}
    params, state = plain_step(optax.adamw, params, state, grads[2], hyper)
    assert_equal(found, params, close=2.4e-7)
    assert_equal(opt.state_dict()["state"][0], state)
    params, _ = plain_step(optax.adamw, params, state, grads[3], hyper)
    ours, _ = plain_step(optax.adamw, found, opt.state_dict()["state"][0], grads[3], hyper)
    assert_equal(ours, params, close=2.4e-7)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("buckets", [False, True])
def test_dtypes_may_be_mixed(partition, buckets):
    """8, turned round: upstream refuses them."""
    trained = {"a": tree(0, jnp.bfloat16), "b": tree(1)}
    grads = [{"a": tree(s, jnp.bfloat16), "b": tree(s + 9)} for s in range(2, 5)]
    opt = ZRO(trained, optax.sgd, devices(3), buckets, partition=partition, lr=0.1, momentum=0.9)
    wanted, _ = plain(optax.sgd, trained, grads, learning_rate=0.1, momentum=0.9)
    for g in grads:
        params = opt.step(g)
    assert [x.dtype for x in jax.tree.leaves(params)] == [x.dtype for x in jax.tree.leaves(wanted)]
    for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(wanted), strict=True):
        atol = 2e-2 if x.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(np.float32(x), np.float32(y), atol=atol, rtol=atol)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_parameters_without_a_gradient_stay_with_their_state(partition):
    """17: trainability that toggles between steps."""
    opt = ZRO(tree(), optax.adam, devices(3), partition=partition, lr=0.1)
    opt.step(tree(1))
    before, state = opt._target.result(), opt.state_dict()["state"][0][0]
    g = tree(2)
    g["first"]["kernel"] = None
    after = opt.step(g)
    np.testing.assert_array_equal(after["first"]["kernel"], before["first"]["kernel"])
    now = opt.state_dict()["state"][0][0]
    np.testing.assert_array_equal(now.mu["first"]["kernel"], state.mu["first"]["kernel"])
    assert np.all(now.mu["last"]["kernel"] != state.mu["last"]["kernel"])
    assert int(now.count) == 2
    again = opt.step(tree(3))
    assert np.all(np.asarray(again["first"]["kernel"]) != np.asarray(after["first"]["kernel"]))


@pytest.mark.parametrize("partition", PARTITIONS)
def test_groups_that_train_in_turn_are_two_optimizers(partition):
    """As the networks of a GAN: the count and the schedule of each are its own."""
    rate = optax.cosine_decay_schedule(0.1, 4)
    dp = gshard.paddle.DataParallel(Net(), group=devices(3))
    groups = [{"params": dp.first}, {"params": dp.last}]
    opt = ZRO(groups, optax.adam, partition=partition, lr=rate)
    net, tx = Net(), optax.adam(rate)
    parts = ("first", "last")
    turns = [nnx.Optimizer(net, tx, wrt=nnx.All(nnx.Param, nnx.PathContains(x))) for x in parts]

    @nnx.jit
    def plain_step(net, plain_opt, batch):
        wrt = nnx.DiffState(0, plain_opt.wrt)
        plain_opt.update(net, nnx.grad(loss_fn, argnums=wrt)(net, batch))

    for seed in range(6):
        batch = rows(24, seed)
        dp.backward(loss_fn, batch)
        dp.grads[parts[1 - seed % 2]] = None
        opt.step()
        opt.zero_grad()
        plain_step(net, turns[seed % 2], batch)
    assert_equal(nnx.state(dp), nnx.state(net), close=1e-6)
    assert [int(x[0].count) for x in opt.state_dict()["state"]] == [3, 3]


def test_together_with_tensor_parallelism():
    """19: parameters that are sharded over an axis of the user's own stay so."""
    mesh = gshard.make_mesh(extra={"model": 2})
    over = jax.sharding.NamedSharding(mesh, jax.P(None, "model"))
    params = {"w": jax.device_put(tree()["last"]["kernel"].T, over), "b": jnp.ones(6)}
    grads = [{"w": tree(s)["last"]["kernel"].T, "b": tree(s)["first"]["bias"]} for s in range(3)]
    wanted, _ = plain(optax.adamw, jax.tree.map(np.asarray, params), grads, learning_rate=0.1)
    opt = ZRO(params, optax.adamw, mesh, lr=0.1)
    for g in grads:
        new = opt.step(g)
    assert_equal(new, wanted, close=2.4e-7)
    assert new["w"].sharding.spec == over.spec
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert_equal(opt.state_dict()["state"], saved["state"])
    with pytest.raises(gshard.GShardError, match="this mesh also has model"):
        ZRO(params, optax.adamw, mesh, lr=0.1, partition="greedy")


@pytest.mark.parametrize("partition", PARTITIONS)
def test_integers_come_back_as_they_went_in(partition):
    params = {"table": jnp.arange(3), "w": jnp.ones((5, 2))}

    def loss(p):
        return jnp.sum(p["w"] ** 2) * p["table"].sum()

    opt = ZRO(params, optax.sgd, devices(3), partition=partition, lr=0.1)
    for grads in (jax.grad(loss, allow_int=True)(params), {"table": None, "w": 6 * params["w"]}):
        new = opt.step(grads)
    assert new["table"] is params["table"]
    np.testing.assert_allclose(new["w"], 1 - 0.1 * 12, rtol=1e-6)
    with pytest.raises(gshard.GShardError, match="no floating-point"):
        ZRO([jnp.arange(3)], optax.sgd, lr=0.1)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_tree_with_none(partition):
    """A layer without a bias; `jax.grad` has a None there too."""
    params = {"bias": None, "table": jnp.arange(3), "w": jnp.ones((5, 2))}
    opt = ZRO(params, optax.sgd, devices(2), partition=partition, lr=0.1)
    grads = jax.grad(lambda w: jnp.sum(w["w"] ** 2))({"bias": None, "w": params["w"]})
    for _ in range(2):
        new = opt.step(grads)
    assert new["bias"] is None and new["table"] is params["table"]
    np.testing.assert_allclose(new["w"], 1 - 0.1 * 4, rtol=1e-6)


def test_a_data_parallel_says_which_devices():
    dp = gshard.paddle.DataParallel(Net(), group=devices(3))
    assert ZRO(dp, optax.adam, lr=0.1).plan.group.devices == 3
    with pytest.raises(gshard.GShardError, match="process_group= names other devices"):
        ZRO(dp, optax.adam, devices(4), lr=0.1)
    mesh = gshard.make_mesh(replica=2, devices=jax.devices()[:4])
    batches = [rows(24, seed) for seed in range(3)]
    for partition in PARTITIONS:
        dp = gshard.paddle.DataParallel(Net(), group=mesh)
        opt = ZRO(dp, optax.adam, partition=partition, lr=0.01)
        for batch in batches:
            dp.backward(loss_fn, batch)
            opt.step()
            opt.zero_grad()
        wanted = jax.tree.leaves(on_one_device(batches, learning_rate=0.01))
        for x, y in zip(jax.tree.leaves(nnx.state(dp)), wanted, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


class Net(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.first = nnx.Linear(13, 6, rngs=rngs)
        self.last = nnx.Linear(6, 5, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.first(x)))


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def rows(n, seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(n, 13)).astype("f4"), "y": rng.normal(size=(n, 5)).astype("f4")}


def on_one_device(batches, **hyper):
    net = Net()
    graph, params = nnx.split(net, nnx.Param)
    params = nnx.as_pure(params)
    grads = jax.jit(jax.grad(lambda p, b: loss_fn(nnx.merge(graph, p), b)))
    state = optax.adam(**hyper).init(params)
    for batch in batches:
        params, state = plain_step(optax.adam, params, state, grads(params, batch), hyper)
    return params


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("given", ["model", "parameters", "groups"])
@pytest.mark.parametrize("n", [3, 8])
def test_data_parallel_gives_its_gradients(partition, given, n):
    """The seed's example: backward, step."""
    dp = gshard.paddle.DataParallel(Net(), group=devices(n))
    params = {
        "model": dp,
        "parameters": dp.parameters(),
        "groups": [{"params": [x]} for x in dp.parameters()],
    }[given]
    opt = ZRO(params, optax.adam, devices(n), partition=partition, lr=0.01)
    batches = [rows(24, seed) for seed in range(4)]
    for batch in batches[:3]:
        dp.backward(loss_fn, batch)
        assert opt.step() is dp
        opt.zero_grad()
    with dp.no_sync():
        dp.backward(loss_fn, batches[3])
    gshard.paddle.fused_allreduce_gradients(dp.parameters(), None)
    opt.step()
    wanted = on_one_device(batches, learning_rate=0.01)
    for x, y in zip(jax.tree.leaves(nnx.state(dp)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    opt.zero_grad()
    with pytest.raises(gshard.GShardError, match="no gradients"):
        opt.step()


class Doubled(nnx.Param):
    """Reads as another value than it stores."""

    def get_value(self, **kwargs):
        return 2 * super().get_value(**kwargs)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_variables_keep_what_they_store(partition):
    variable = Doubled(jnp.ones(8))
    opt = ZRO([variable], optax.sgd, partition=partition, lr=0.5)
    np.testing.assert_array_equal(variable.get_raw_value(), np.ones(8))
    opt.step([jnp.ones(8)])
    np.testing.assert_array_equal(variable.get_raw_value(), np.full(8, 0.5))


@pytest.mark.parametrize("way", ["sharded", "local", "full"])
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("kind", ["nnx", "tree"])
def test_gradients_of_the_users_own_loop(way, partition, kind):
    """9: sharded gradients, LocalGradients or full ones, of a model in place or of a tree."""
    net = Net()
    graph, params = nnx.split(net, nnx.Param)
    params = nnx.as_pure(params)
    opt = ZRO(
        net if kind == "nnx" else params, optax.adam, devices(4), partition=partition, lr=0.01
    )

    def of_tree(params, batch):
        return loss_fn(nnx.merge(graph, params, copy=True), batch)

    loss = loss_fn if kind == "nnx" else of_tree
    jit = nnx.jit if kind == "nnx" else jax.jit
    if way == "full":
        grad = jit(nnx.grad(loss) if kind == "nnx" else jax.grad(loss))
    else:
        run = gshard.value_and_grad(loss, opt.plan, sync=way == "sharded")
        grad = jit(lambda p, b: run(p, b)[1])
    batches = [rows(24, seed) for seed in range(3)]
    target = net if kind == "nnx" else params
    for batch in batches:
        target = opt.step(grad(target, batch))
    wanted = on_one_device(batches, learning_rate=0.01)
    found = nnx.state(net) if kind == "nnx" else target
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_closure_gives_loss_and_gradients(partition):
    """10."""
    params = {"w": jnp.ones((1, 1)), "b": jnp.full((1,), 2.0)}
    opt = ZRO(params, optax.sgd, devices(2), partition=partition, lr=0.1)
    x = jnp.ones((1, 1))

    def closure():
        return jax.value_and_grad(lambda p: jnp.mean(jnp.abs(x @ p["w"] + p["b"] - 4.0)))(params)

    loss, new = opt.step(closure=closure)
    assert float(loss) == 1.0
    np.testing.assert_allclose(new["w"], 1.1, rtol=1e-6)
    np.testing.assert_allclose(new["b"], 2.1, rtol=1e-6)


@pytest.mark.parametrize("n", [4, 8])
def test_two_psi_on_the_wire_with_data_parallel(n):
    """Upstream pays 3: an all-reduce, and broadcasts."""
    net = nnx.Sequential(*[nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(3)])
    size = sum(x.size for x in jax.tree.leaves(nnx.state(net, nnx.Param)))
    dp = gshard.paddle.DataParallel(net, group=devices(n))
    opt = ZRO(dp.parameters(), optax.adam, devices(n), parameters_as_bucket_view=True, lr=0.01)
    batch = {"x": np.ones((16, 16), "f4"), "y": np.ones((16, 16), "f4")}
    backward = gshard.audit(dp.backward, loss_fn, batch)
    dp.backward(loss_fn, batch)
    step = gshard.audit(opt.step)
    wires = [
        sum(c.wire_bytes for c in a.collectives if c.wire_bytes > 64) for a in (backward, step)
    ]
    assert wires[0] == pytest.approx(4 * size * (n - 1) / n, rel=0.01)
    assert wires[1] == pytest.approx(4 * size * (n - 1) / n, rel=0.01)


def test_buckets_are_fewer_collectives():
    counts = {}
    for buckets in (False, True):
        opt = ZRO(tree(), optax.sgd, devices(4), buckets, lr=0.1)
        counts[buckets] = sum(c.count for c in gshard.audit(opt.step, tree(1)).collectives)
    assert counts == {False: 3, True: 1}


def adam(**given):
    return ZRO(tree(), optax.adam, lr=0.1, **given)


ONE = [jnp.ones(3)]


@pytest.mark.parametrize(
    ("act", "kind", "says"),
    [
        (lambda: ZRO([], optax.sgd, lr=0.1), ValueError, "empty"),
        (lambda: ZRO(jnp.ones(3), optax.sgd, lr=0.1), TypeError, "not parameters"),
        (lambda: ZRO(1.2, optax.sgd, lr=0.1), TypeError, "1.2"),
        (lambda: ZRO("abc", optax.sgd, lr=0.1), TypeError, "abc"),
        (lambda: ZRO([*ONE, 42], optax.sgd, lr=0.1), TypeError, "42"),
        (lambda: ZRO([{"params": ONE}, 42], optax.sgd, lr=0.1), TypeError, "42"),
        (lambda: ZRO([{"params": ONE}, {"lr": 1.0}], optax.sgd), ValueError, "without 'params'"),
        (lambda: ZRO([{"params": 3}], optax.sgd), TypeError, "not parameters"),
        (lambda: ZRO(tree(), optax.sgd(0.1)), TypeError, "Pass the factory"),
        (lambda: ZRO(tree(), "adam", lr=0.1), TypeError, "not an optax factory"),
        (lambda: ZRO(tree(), dict, lr=0.1), TypeError, "no signature"),
        (lambda: ZRO(tree(), lambda lr: lr, lr=0.1), TypeError, "not an optax transformation"),
        (lambda: adam(betas=(0.9, 0.99)), TypeError, "no hyperparameter 'betas'"),
        (lambda: ZRO(tree(), optax.adam), TypeError, "needs learning_rate"),
        (lambda: ZRO(tree(), optax.adam, lr=None), TypeError, "lr=None must be a number"),
        (lambda: ZRO(tree(), optax.adam, lr=True), TypeError, "lr=True must be a number"),
        (lambda: adam(partition="gredy"), ValueError, "Did you mean 'greedy'"),
        (lambda: adam(parameters_as_bucket_view=1), ValueError, "True or False"),
        (lambda: adam(overlap_with_ddp="yes"), ValueError, "True or False"),
        (lambda: adam(process_group=[0, 1]), ValueError, "process_group"),
        (lambda: adam()._partition_parameters(), ValueError, "shards every tensor"),
        (lambda: adam().step(), ValueError, "needs gradients"),
        (lambda: adam().step({"first": ONE[0]}), ValueError, "not a tree like"),
        (lambda: adam().step(tree(1), closure=lambda: 1), ValueError, "not both"),
        (lambda: adam().step(closure=lambda: 1), ValueError, r"\(loss, grads\)"),
        (lambda: adam().add_param_group([1]), TypeError, "'params'"),
        (lambda: adam().step(3), TypeError, "not a tree like"),
        (lambda: adam().step(closure=3), TypeError, "not a function"),
        (lambda: jax.jit(adam().step)(tree(1)), ValueError, "inside a jitted"),
        (lambda: ZRO(tree(), optax.lbfgs), ValueError, "from their gradients alone"),
        (lambda: gshard.paddle.state_dict(adam()), ValueError, "target.state_dict"),
        (
            lambda: adam().load_state_dict(optax.sgd(0.1).init(tree())),
            ValueError,
            "missing 0/count",
        ),
        (
            lambda: adam().load_state_dict(optax.adam(0.1).init({"other": ONE[0]})),
            ValueError,
            "unknown 0/mu/other",
        ),
    ],
)
def test_bad_input(act, kind, says):
    with pytest.raises(kind, match=says) as error:
        act()
    assert isinstance(error.value, gshard.GShardError)


def test_the_same_leaf_in_two_groups():
    x = jnp.ones(3)
    with pytest.raises(gshard.GShardError, match="same leaf twice"):
        ZRO([{"params": [x]}, {"params": [x]}], optax.sgd, lr=0.1)
    opt = ZRO([{"params": [x]}], optax.sgd, lr=0.1)
    with pytest.raises(gshard.GShardError, match="twice"):
        opt.add_param_group({"params": opt.param_groups[0]["params"]})
    assert len(opt.param_groups) == 1
    opt.step([jnp.ones(3)])


@pytest.mark.parametrize("partition", PARTITIONS)
def test_what_does_not_fit_changes_nothing(partition):
    opt = ZRO(tree(), optax.adam, devices(3), partition=partition, lr=0.1)
    opt.step(tree(1))
    before = opt.state_dict()
    wrong = jax.tree.map(np.array, before["state"])
    wrong[0][0].mu["first"]["kernel"] = np.zeros((3, 3))
    with pytest.raises(gshard.GShardError, match=r"0/mu/first/kernel has shape \(3, 3\)"):
        opt.load_state_dict({"state": wrong, "param_groups": before["param_groups"]})
    assert_equal(opt.state_dict()["state"], before["state"])


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("groups", [False, True])
def test_overlap_updates_in_backward_from_the_first_step_on(n, groups):
    """20, turned round: no warm-up steps, several groups, any optimizer."""
    batches = [rows(24, seed) for seed in range(5)]
    found = []
    for overlap in (False, True):
        dp = gshard.paddle.DataParallel(Net(), group=devices(n))
        params = [{"params": [x]} for x in dp.parameters()] if groups else dp.parameters()
        opt = ZRO(params, optax.radam, devices(n), overlap_with_ddp=overlap, lr=0.01)
        seen = []
        for i, batch in enumerate(batches):
            if i == 3:
                with dp.no_sync():
                    dp.backward(loss_fn, batch)
                continue
            opt.param_groups[0]["lr"] = 0.01 / (i + 1)
            before = np.asarray(dp.first.kernel[...])
            dp.backward(loss_fn, batch)
            assert np.any(np.asarray(dp.first.kernel[...]) != before) == overlap
            opt.step()
            seen.append([np.asarray(x) for x in jax.tree.leaves(nnx.state(dp))])
            opt.zero_grad()
        found.append(seen)
    for x, y in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match="no gradients"):
        opt.step()
    with dp.no_sync():
        dp.backward(loss_fn, batches[0])
    with pytest.raises(gshard.GShardError, match="not been reduced"):
        opt.step()


def test_the_overlapped_program_reduces_and_all_gathers():
    dp = gshard.paddle.DataParallel(Net(), group=devices(4))
    ZRO(dp, optax.adam, devices(4), overlap_with_ddp=True, lr=0.01)
    kinds = [c.kind for c in gshard.audit(dp.backward, loss_fn, rows(8, 0)).collectives]
    assert {"reduce-scatter", "all-gather"} <= set(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:1x8", "tpu-v5e:2x4"])
def test_updates_overlap_with_communication(target):
    """As scheduled by the compilers of GPU (which combines scatters) and TPU."""
    found = found_by("pytorch.overlap_ahead_of_time", target)
    if target.startswith("tpu"):
        assert found["scatters"] == 8 and found["between"] >= 8
    else:
        assert found["gathers_beside"] >= 4


def test_what_is_ignored_is_reported():
    with pytest.warns(gshard.GShardWarning, match="overlap_with_ddp changes nothing"):
        ZRO(tree(), optax.adam, overlap_with_ddp=True, lr=0.1)
    with pytest.warns(gshard.GShardWarning, match="bucket_view is ignored"):
        dp = gshard.paddle.DataParallel(Net())
        ZRO(dp, optax.adam, None, True, True, lr=0.1)
    with pytest.warns(gshard.GShardWarning, match="greedy"):
        ZRO(
            gshard.paddle.DataParallel(Net()),
            optax.adam,
            overlap_with_ddp=True,
            partition="greedy",
            lr=1,
        )


@pytest.mark.parametrize("partition", PARTITIONS)
def test_local_shards_and_a_consolidated_state(partition, tmp_path):
    opt = ZRO(tree(), optax.adamw, devices(3), partition=partition, lr=0.01)
    opt.step(tree(1))
    shards, full = opt.state_dict(full=False), opt.state_dict()["state"]
    opt.consolidate_state_dict(to=0)
    assert_equal(opt.state_dict()["state"], full)
    gshard.pytorch.save({"shards": shards["shards"]}, tmp_path)
    opt.step(tree(2))
    assert int(opt.state_dict()["state"][0][0].count) == 2
    opt.load_state_dict(gshard.pytorch.load(tmp_path))
    assert_equal(opt.state_dict()["state"], full)
    other = ZRO(tree(), optax.adamw, devices(2), partition=partition, lr=0.01)
    with pytest.raises(gshard.GShardError, match="sharded differently"):
        other.load_state_dict(shards)
    with pytest.raises(gshard.GShardError, match="to=1"):
        opt.consolidate_state_dict(to=1)


def test_an_optimizer_that_keeps_a_key(tmp_path):
    def noisy(seed):
        noise = optax.add_noise(0.01, 0.55, key=jax.random.key(seed))
        opt = ZRO(tree(), lambda lr: optax.chain(noise, optax.sgd(lr)), lr=0.1)
        opt.step(tree(1))
        return opt

    def data(states):
        return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, states)

    opt = noisy(0)
    gshard.pytorch.save({"shards": opt.state_dict(full=False)["shards"]}, tmp_path)
    opt.consolidate_state_dict()
    full = opt.state_dict()
    for saved in (gshard.pytorch.load(tmp_path), full):
        other = noisy(1)
        other.load_state_dict(saved)
        assert_equal(data(other.state_dict()["state"]), data(full["state"]))
        other.step(tree(2))


@pytest.mark.parametrize("partition", PARTITIONS)
def test_shards_take_the_dtypes_of_the_optimizer(partition):
    saved = ZRO(tree(), optax.adam, partition=partition, lr=0.1, mu_dtype=jnp.bfloat16)
    saved.step(tree(1))
    opt = ZRO(tree(), optax.adam, partition=partition, lr=0.1)
    opt.load_state_dict(saved.state_dict(full=False))
    mu = opt.state_dict()["state"][0][0].mu
    assert {x.dtype.name for x in jax.tree.leaves(mu)} == {"float32"}


def test_greedy_refuses_random_numbers():
    def noisy(learning_rate):
        return optax.noisy_sgd(learning_rate, key=0)

    with pytest.raises(gshard.GShardError, match="draws random numbers.*add_noise"):
        ZRO(tree(), noisy, devices(3), partition="greedy", learning_rate=0.1)


def two_groups(partition, n=3, **given):
    params = tree()
    groups = [
        {"params": params["first"], "lr": 0.05},
        {"params": [params["last"]["kernel"], params["last"]["scale"]]},
    ]
    return ZRO(groups, optax.adam, devices(n), partition=partition, lr=0.01, **given)


def grads_of_two(seed):
    g = tree(seed)
    return [g["first"], [g["last"]["kernel"], g["last"]["scale"]]]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_states_of_several_groups_are_plain_and_load_again(partition, tmp_path):
    opt = two_groups(partition)
    for seed in range(1, 3):
        params = opt.step(grads_of_two(seed))
    saved = opt.state_dict()
    for i, lr in enumerate((0.05, 0.01)):
        assert jax.tree.structure(saved["state"][i]) == jax.tree.structure(
            optax.adam(lr).init(params[i])
        )
        optax.adam(lr).update(params[i], saved["state"][i], params[i])
    gshard.pytorch.save(saved, tmp_path)
    loaded = gshard.pytorch.load(tmp_path)
    earlier = {"state": {str(i): x for i, x in enumerate(loaded["state"])}}  # before 0.1
    for file in (loaded, earlier):
        opt.step(grads_of_two(3))
        opt.load_state_dict(file)
        assert_equal(opt.state_dict()["state"], saved["state"])
    other = two_groups(partition, 2)
    other.load_state_dict(saved)
    assert_equal(other.state_dict()["state"], saved["state"])


class Deep(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(13, 13, rngs=rngs) for _ in range(11)])
        self.last = nnx.Linear(13, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return self.last(x)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_groups_of_more_than_ten_layers(partition):
    """Names in a file sort otherwise than numbers."""
    dp = gshard.paddle.DataParallel(Deep(), group=devices(3))
    kernels, biases = ([x for x in dp.parameters() if x.ndim == ndim] for ndim in (2, 1))
    opt = ZRO([{"params": kernels}], optax.adam, partition=partition, lr=0.01)
    dp.backward(loss_fn, rows(12, 0))
    with pytest.raises(gshard.GShardError, match="no step has used"):
        opt.add_param_group({"params": biases, "lr": 0.02})
    opt.step()
    opt.zero_grad()
    opt.add_param_group({"params": biases, "lr": 0.02})
    with pytest.raises(gshard.GShardError, match="in another group"):
        opt.add_param_group({"params": biases[:1]})
    with pytest.raises(gshard.GShardError, match="not parameters of"):
        opt.add_param_group({"params": gshard.paddle.DataParallel(Net()).parameters()})
    dp.backward(loss_fn, rows(12, 1))
    opt.step()
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    assert_equal(opt.state_dict()["state"], saved["state"])
    assert len(jax.tree.leaves(saved["state"][1])) == 1 + 2 * 12


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_parameter_may_be_called_count(partition):
    params = {"count": jnp.ones(2), "w": jnp.ones(3)}
    opt = ZRO(params, optax.adam, devices(2), partition=partition, lr=0.1)
    for _ in range(3):
        new = opt.step({"count": None, "w": jnp.full(3, 2.0)})
    wanted, _ = plain(
        optax.adam, {"w": params["w"]}, [{"w": jnp.full(3, 2.0)}] * 3, learning_rate=0.1
    )
    np.testing.assert_allclose(new["w"], wanted["w"], rtol=1e-6)
    np.testing.assert_array_equal(new["count"], 1)
    assert int(opt.state_dict()["state"][0][0].count) == 3


def test_empty_groups_and_names_given_twice_are_refused():
    with pytest.raises(gshard.GShardError, match=r"params\[1\] has no floating"):
        ZRO([{"params": ONE}, {"params": []}], optax.sgd, lr=0.1)
    with pytest.raises(gshard.GShardError, match="are the same hyperparameter"):
        ZRO(tree(), optax.sgd, lr=0.1, learning_rate=0.2)
    own = ZRO([{"params": ONE, "learning_rate": 0.1}], optax.sgd, devices(2), lr=0.5)
    np.testing.assert_allclose(own.step([[jnp.ones(3)]][0]), [np.full(3, 0.9)], rtol=1e-6)


def test_what_is_loaded_is_copied():
    opt = ZRO(tree(), optax.sgd, devices(2), partition="greedy", lr=1.0, momentum=0.9)
    saved = opt.state_dict()
    opt.load_state_dict(saved)
    for x in jax.tree.leaves(saved["state"]):
        x[...] = 7
    assert all(np.all(x == 0) for x in jax.tree.leaves(opt.state_dict()["state"]))


def test_a_number_that_the_optimizer_keeps_in_its_state_is_fixed():
    opt = ZRO(tree(), optax.inject_hyperparams(optax.sgd), devices(2), learning_rate=0.1)
    with pytest.raises(gshard.GShardError, match="is fixed"):
        opt.param_groups[0]["lr"] = 0.0


def test_integer_hyperparameters_stay_integers():
    def deep(lr, depth):
        return optax.chain(*[optax.clip(1.0)] * depth, optax.sgd(lr))

    opt = ZRO(tree(), deep, devices(2), lr=1, depth=2)
    assert opt.param_groups[0]["depth"] == 2 and "depth" in opt.param_groups[0].fixed
    opt.step(tree(1))
    opt.param_groups[0]["lr"] = 4
    opt.step(tree(1))
    assert _compiled(opt) == 1


@pytest.mark.parametrize("partition", PARTITIONS)
def test_one_optimizer_of_a_data_parallel_at_a_time(partition):
    dp = gshard.paddle.DataParallel(Net(), group=devices(3))
    first = ZRO([dp.parameters()[0]], optax.adam, partition=partition, lr=0.1)
    second = ZRO([dp.parameters()[1]], optax.adam, partition="even", lr=0.1)
    dp.backward(loss_fn, rows(12, 0))
    with pytest.raises(RuntimeError, match="another optimizer"):
        first.step()
    second.step()


@pytest.mark.parametrize("partition", PARTITIONS)
def test_nothing_is_left_of_an_optimizer_that_is_gone(partition):
    dp = gshard.paddle.DataParallel(Net(), group=devices(2))
    opt = ZRO(dp, optax.adam, partition=partition, lr=0.1)
    dp.backward(loss_fn, rows(12, 0))
    opt.step()
    gone = weakref.ref(opt), weakref.ref(opt._engine), weakref.ref(dp._gshard)
    del dp, opt
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


@pytest.mark.parametrize("overlap", [False, True])
def test_a_closure_may_call_backward(overlap):
    dp = gshard.paddle.DataParallel(Net(), group=devices(2))
    opt = ZRO(dp, optax.adam, overlap_with_ddp=overlap, lr=0.01)
    before = dp.state_dict()["first.kernel"]
    loss = opt.step(lambda: dp.backward(loss_fn, rows(12, 0)))
    np.testing.assert_allclose(float(loss), loss_fn(Net(), rows(12, 0)), rtol=1e-6)
    assert np.all(dp.state_dict()["first.kernel"] != before)
    assert int(opt.state_dict()["state"][0][0].count) == 1


@pytest.mark.parametrize("partition", PARTITIONS)
def test_an_optimizer_without_state_is_saved_too(partition, tmp_path):
    opt = ZRO(tree(), optax.sgd, devices(2), partition=partition, lr=0.1)
    gshard.pytorch.save(opt.state_dict(), tmp_path)
    other = ZRO(tree(), optax.sgd, devices(3), partition=partition, lr=0.2)
    other.load_state_dict(gshard.pytorch.load(tmp_path))
    assert other.param_groups[0]["lr"] == 0.1


def test_a_state_of_another_optimizer_changes_nothing():
    opt = ZRO(tree(), optax.sgd, devices(2), lr=0.1, momentum=0.9, nesterov=True)
    opt.step(tree(1))
    other = ZRO(tree(), optax.sgd, devices(2), lr=0.2, momentum=0.9)
    before = other.state_dict()
    for saved, says in (
        (opt.state_dict(), "nesterov=True"),
        ({**before, "param_groups": [{"learning_rate": "x"}]}, "is not a number"),
        ({**before, "param_groups": 3}, "are not those of 1 groups"),
        ({"shards": 3}, "not what state_dict"),
        (3, "missing"),
    ):
        with pytest.raises(gshard.GShardError, match=says):
            other.load_state_dict(saved)
    assert_equal(other.state_dict()["state"], before["state"])
    assert other.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("factory", [optax.sgd, optax.adam, optax.adamw])
def test_maximize_takes_the_negative_gradients(partition, factory):
    """17: with `maximize=True` the state is that of the plain optimizer, too."""
    grads = [tree(seed) for seed in range(1, 6)]
    negative = [jax.tree.map(np.negative, g) for g in grads]
    wanted, state = plain(factory, tree(), negative, learning_rate=0.01)
    opt = ZRO(tree(), factory, devices(3), partition=partition, lr=0.01, maximize=True)
    for g in grads:
        params = opt.step(g)
    assert_equal(params, wanted, close=0 if partition == "even" else 2.4e-7)
    assert_equal(opt.state_dict()["state"][0], state)
    assert opt.param_groups[0]["maximize"] is True
    other = ZRO(tree(), factory, devices(2), lr=0.01, maximize=False)
    with pytest.raises(gshard.GShardError, match="maximize=True, but this optimizer was built"):
        other.load_state_dict(opt.state_dict())
    with pytest.raises(gshard.GShardError, match="maximize"):
        opt.param_groups[0]["maximize"] = False


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_state_of_a_parameter_has_pytorchs_names(partition):
    opt = ZRO(tree(), optax.amsgrad, devices(3), partition=partition, lr=0.01)
    _, state = plain(optax.amsgrad, tree(), [tree(1), tree(2)], learning_rate=0.01)
    for seed in (1, 2):
        opt.step(tree(seed))
    names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    fields = (state[0].mu, state[0].nu, state[0].nu_max)
    for i, (path, own) in enumerate(opt.state.items()):
        for name, field in zip(names, fields, strict=True):
            assert_equal(own[name], jax.tree.leaves(field)[i], close=2.4e-7)
        assert own["step"] == 2 and set(own) == {"step", *names}
        assert_equal(opt.state[i]["exp_avg"], opt.state[path]["exp_avg"])
    with pytest.raises(KeyError, match="A key is a path such as"):
        opt.state["nothing"]
    with pytest.raises(KeyError, match="a number below"):
        opt.state[99]


def test_the_states_of_several_groups_and_of_other_optimizers():
    one, two = {"w": tree()}, {"w": tree()}
    groups = [{"params": one, "lr": 0.1}, {"params": two, "lr": 0.2}]
    opt = ZRO(groups, optax.rmsprop, devices(3), momentum=0.9)
    opt.step(jax.tree.map(np.ones_like, [one, two]))
    paths = list(opt.state)
    assert len(paths) == 2 * len(jax.tree.leaves(one)) == len(set(paths))
    assert set(opt.state[0]) == {"square_avg", "momentum_buffer"}
    x = opt.state[-1 + len(paths)]["square_avg"]
    assert x.shape == jax.tree.leaves(two)[-1].shape and np.all(x > 0)


def bytes_on_devices():
    return sum(x.nbytes * len(x.sharding.device_set) for x in jax.live_arrays())


def test_moments_are_not_made_in_full():
    """Also with the replicated parameters of a `DataParallel`; a step count is on one device."""
    dp = gshard.paddle.DataParallel(Net(), group=devices(4))
    tree_of_it = nnx.as_pure(nnx.state(dp))
    gc.collect()
    before = bytes_on_devices()
    first = initial(optax.adam(0.1), tree_of_it)
    _, optimizer = parameters(dp)[0].pair(optax.adam(0.1))
    assert bytes_on_devices() - before < 100
    wanted = optax.adam(0.1).init(tree_of_it)
    assert_equal(first, wanted)
    assert_equal(nnx.as_pure(optimizer.opt_state), wanted)


@jax.tree_util.register_dataclass
@dataclass
class Called:
    """Parameters that can be called, as those of Equinox can."""

    w: Any

    def __call__(self):
        raise AssertionError("these are gradients, and no closure")


def test_gradients_that_can_be_called_are_no_closure():
    params = Called(jnp.ones((8, 4)))
    optimizer = gshard.pytorch.ZeroRedundancyOptimizer(params, optax.sgd, lr=0.5)
    new = optimizer.step(Called(jnp.ones((8, 4))))
    np.testing.assert_array_equal(new.w, 0.5 * np.ones((8, 4)))
