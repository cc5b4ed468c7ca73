"""`Join`: uneven inputs, against one device that sees the rows of all that have some."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from tests.pytorch.test_zero_redundancy_optimizer import Net, devices, loss_fn, rows

ZRO = gshard.pytorch.ZeroRedundancyOptimizer


def weighted_loss(model, batch):
    losses = ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)
    return gshard.Weighted(losses.sum(), losses.size)


def inputs_of(n):
    """3 + i batches on device i."""
    return [[rows(4, 100 * i + j) for j in range(3 + i)] for i in range(n)]


def on_one_device(steps, n, initial):
    """Plain training on the rows of all that have data left."""
    graph, params = nnx.split(Net(), nnx.Param)
    params = nnx.as_pure(params)
    grad = jax.jit(jax.value_and_grad(lambda p, b: loss_fn(nnx.merge(graph, p, copy=True), b)))
    tx = optax.adam(0.01)
    state, update, losses = tx.init(params), jax.jit(tx.update), []
    for batches in steps:
        batch = jax.tree.map(lambda *x: np.concatenate(x), *batches)
        loss, grads = grad(params, batch)
        share = len(batches) / n if initial else 1
        grads = jax.tree.map(partial(jnp.multiply, share), grads)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(loss * share)
    return params, losses


@pytest.mark.parametrize("partition", ["even", "greedy"])
@pytest.mark.parametrize("initial", [True, False])
@pytest.mark.parametrize("n", [3, 8])
def test_uneven_inputs_are_one_device_that_sees_all(partition, initial, n):
    """18: 3 + rank inputs."""
    inputs = inputs_of(n)
    steps = [[x[j] for x in inputs if j < len(x)] for j in range(2 + n)]
    wanted, losses = on_one_device(steps, n, initial)
    dp = gshard.paddle.DataParallel(Net(), group=devices(n))
    opt = ZRO(dp.parameters(), optax.adam, devices(n), partition=partition, lr=0.01)
    seen = []
    with gshard.pytorch.Join([dp, opt], divide_by_initial_world_size=initial) as join:
        for batch in join(*inputs):
            seen.append(dp.backward(loss_fn, batch))
            opt.step()
            opt.zero_grad()
    np.testing.assert_allclose(seen, losses, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(nnx.state(dp)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*are replicated")
@pytest.mark.parametrize("way", ["weighted", "scaled", "overlap"])
def test_other_losses_and_ways(way):
    n = 3
    inputs = inputs_of(n)
    steps = [[x[j] for x in inputs if j < len(x)] for j in range(2 + n)]
    wanted, _ = on_one_device(steps, n, False)
    settings = gshard.GradScaler(init_loss_scaling=8.0)
    net, tx = Net(), optax.adam(0.01)
    if way == "scaled":
        dp, opt, scaler = gshard.paddle.group_sharded_parallel(
            net, tx, "os_g", scaler=settings, group=devices(n)
        )
        joined = [dp]
    else:
        dp = gshard.paddle.DataParallel(net, group=devices(n))
        opt = ZRO(dp, optax.adam, devices(n), overlap_with_ddp=way == "overlap", lr=0.01)
        joined = [dp, opt]
    loss = weighted_loss if way == "weighted" else loss_fn
    with gshard.pytorch.Join(joined, divide_by_initial_world_size=False) as join:
        for batch in join(*inputs):
            dp.backward(scaler.scale(loss) if way == "scaled" else loss, batch)
            if way == "scaled":
                scaler.step(opt)
                scaler.update()
                opt.clear_grad()
            else:
                opt.step()
                opt.zero_grad()
    values = gshard.paddle.state_dict(dp)
    for (path, y), x in zip(
        jax.tree_util.tree_leaves_with_path(wanted), values.values(), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5, err_msg=str(path))


def test_one_input_for_all_devices_of_the_process():
    dp = gshard.paddle.DataParallel(Net(), group=devices(4))
    with gshard.pytorch.Join([dp]) as join:
        found = [np.asarray(b["x"]) for b in join(rows(8, seed) for seed in range(3))]
    for seed, x in enumerate(found):
        np.testing.assert_array_equal(x, rows(8, seed)["x"])
    assert len(found) == 3 and dp._gshard.joined is None


def test_a_loop_over_something_else_is_warned_of():
    dp = gshard.paddle.DataParallel(Net(), group=devices(2))
    with (
        pytest.warns(gshard.GShardWarning, match=r"not over join\(inputs\)"),
        gshard.pytorch.Join([dp]),
    ):
        pass
    with gshard.pytorch.Join([dp], enable=False):
        pass
    with pytest.raises(KeyError), gshard.pytorch.Join([dp]):
        raise KeyError


def test_an_iterator_that_was_used_up_is_warned_of():
    dp = gshard.paddle.DataParallel(Net(), group=devices(2))
    with gshard.pytorch.Join([dp]) as join:
        inputs = iter([rows(4, 0)]), [rows(4, 1)]
        assert len(list(join(*inputs))) == 1
        with pytest.warns(gshard.GShardWarning, match=r"inputs\[0\] has no batch\. .* only once"):
            assert len(list(join(*inputs))) == 1
        assert not list(join([]))  # a list without batches is one


def test_early_termination_is_an_error_where_asked_for():
    dp = gshard.paddle.DataParallel(Net(), group=devices(2))
    for given in ({"throw_on_early_termination": True}, {"enable": False}):
        seen = 0
        with (
            pytest.raises(RuntimeError, match="process 0 has no data left"),
            gshard.pytorch.Join([dp], **given) as join,
        ):
            for _ in join([rows(4, 0)], [rows(4, 1), rows(4, 2)]):
                seen += 1
        assert seen == 1 and dp._gshard.joined is None


@pytest.mark.parametrize(
    ("act", "kind", "says"),
    [
        (lambda dp: gshard.pytorch.Join([]), ValueError, "at least one"),
        (lambda dp: gshard.pytorch.Join([3]), TypeError, "neither"),
        (
            lambda dp: gshard.pytorch.Join([dp, gshard.paddle.DataParallel(Net())]),
            ValueError,
            "different devices",
        ),
        (lambda dp: gshard.pytorch.Join([dp], enable=1), ValueError, "True or False"),
        (lambda dp: list(gshard.pytorch.Join([dp])([], [], [])), ValueError, "3 inputs"),
        (lambda dp: list(gshard.pytorch.Join([dp])(3)), TypeError, "not an iterable"),
        (
            lambda dp: list(gshard.pytorch.Join([dp])([rows(4, 0), rows(2, 0)])),
            ValueError,
            "smaller last",
        ),
    ],
)
def test_bad_input(act, kind, says):
    with pytest.raises(kind, match=says):
        act(gshard.paddle.DataParallel(Net(), group=devices(2)))


def test_an_optimizer_brings_its_model_and_others_are_refused():
    dp = gshard.paddle.DataParallel(Net(), group=devices(2))
    opt = ZRO(dp, optax.adam, lr=0.01)
    with gshard.pytorch.Join([opt]) as join:
        for batch in join([rows(4, 0)], [rows(4, 1), rows(4, 2)]):
            dp.backward(loss_fn, batch)
            with pytest.raises(gshard.GShardError, match="within Join the gradients must"):
                opt.step(dp.grads)
            opt.step()
    alone = ZRO(Net(), optax.adam, devices(2), lr=0.01)
    with pytest.raises(gshard.GShardError, match="has no DistributedDataParallel"):
        gshard.pytorch.Join([alone])


def test_rows_of_a_device_without_data_are_those_of_another():
    """A loss that is not finite on old rows changes nothing."""
    dp = gshard.paddle.DataParallel(Net(), group=devices(2))
    bad, good = rows(4, 0), rows(4, 1)
    bad["x"][:] = np.nan
    seen = []
    with gshard.pytorch.Join([dp], divide_by_initial_world_size=False) as join:
        for batch in join([bad], [good, good]):
            dp.clear_gradients()
            seen.append(float(dp.backward(loss_fn, batch)))
    assert np.isnan(seen[0]) and np.isfinite(seen[1])
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(dp.grads))


def test_inputs_with_another_batch_size_are_refused():
    dp = gshard.paddle.DataParallel(Net(), group=devices(2))
    with (
        gshard.pytorch.Join([dp]) as join,
        pytest.raises(gshard.GShardError, match="different shapes"),
    ):
        list(join([rows(4, 0)], [rows(2, 0)]))


def test_no_sync_within_join_is_refused():
    dp = gshard.paddle.DataParallel(Net(), group=devices(2))
    with gshard.pytorch.Join([dp]) as join, dp.no_sync():
        for batch in join([rows(4, 0)]):
            with pytest.raises(gshard.GShardError, match="no_sync and Join"):
                dp.backward(loss_fn, batch)
    with dp.no_sync():
        dp.backward(loss_fn, rows(4, 0))
    with gshard.pytorch.Join([dp]) as join:
        for batch in join([rows(4, 0)]):
            with pytest.raises(gshard.GShardError, match="accumulation that no_sync began before"):
                dp.backward(loss_fn, batch)


def test_a_batch_that_is_none_does_not_end_the_data():
    dp = gshard.paddle.DataParallel(Net(), group=devices(2))
    with (
        pytest.raises(gshard.GShardError, match=r"a batch of inputs\[1\] is None"),
        gshard.pytorch.Join([dp]) as join,
    ):
        list(join([rows(4, 0)] * 3, [rows(4, 0), None, rows(4, 1)]))


def test_a_loss_that_is_refused_elsewhere_is_refused_alike():
    dp = gshard.paddle.DataParallel(Net(), group=devices(2))
    said = []
    for joined in (False, True):
        with pytest.raises(gshard.GShardError) as caught, gshard.pytorch.Join([dp]) as join:
            for batch in join([rows(4, 0)]) if joined else [rows(4, 0)]:
                dp.backward(lambda m, b: (loss_fn(m, b), {"x": 1}), batch)
        said.append(str(caught.value))
    assert said[0] == said[1] and "loss alone" in said[0]
