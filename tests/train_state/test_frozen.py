"""Frozen and integer parameters, and further fields of a state that are sharded."""

from __future__ import annotations

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from flax.training.train_state import TrainState

import gshard
from tests.tiers import quick

LEVELS = ["dp", "os", "os_g", "p_g_os"]
OPTIONS: dict[str, Any] = {"min_shard_size": 8, "scan_axes": {"Lora_1/": 0}}
DEVICES, STEPS = 3, 3


class Lora(nn.Module):
    """A frozen kernel, a trained product of two thin ones, and a table of integers."""

    features: int

    @nn.compact
    def __call__(self, x):
        kernel, thin = nn.initializers.lecun_normal(), nn.initializers.normal(0.1)
        base = self.param("base", kernel, (x.shape[-1], self.features))
        a = self.param("lora_a", kernel, (x.shape[-1], 2))
        b = self.param("lora_b", thin, (2, self.features))
        order = self.param("order", lambda _: jnp.arange(self.features)[::-1])
        return jnp.take(x @ base + x @ a @ b, order, axis=-1)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        def layer(module, x, _):
            return nn.tanh(module(x)), None

        x = Lora(13)(x)
        stack = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        x, _ = stack(Lora(13), x, None)
        return Lora(5)(x)


def batch(rows: int = 12) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"x": (rows, 7), "y": (rows, 5)}
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


def loss_fn(params, b):
    return ((Net().apply({"params": params}, b["x"]) - b["y"]) ** 2).mean()


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(1e-2))


@functools.cache
def initial() -> dict[str, Any]:
    return Net().init(jax.random.key(0), batch()["x"])["params"]


def by_path() -> dict[str, jax.Array]:
    return traverse_util.flatten_dict(initial(), sep="/")


def fresh() -> TrainState:
    return TrainState.create(apply_fn=None, params=initial(), tx=OPTIMIZER)


def mesh() -> Any:
    return gshard.make_mesh(devices=jax.devices()[:DEVICES])


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """The trained parameters after `STEPS` steps on one device; the others are constants there."""
    rest = {path: x for path, x in by_path().items() if "lora" not in path}

    def loss(trained):
        return loss_fn(traverse_util.unflatten_dict({**trained, **rest}, sep="/"), batch())

    @jax.jit
    def step(trained, opt_state):
        updates, opt_state = OPTIMIZER.update(jax.grad(loss)(trained), opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state

    trained = {path: x for path, x in by_path().items() if "lora" in path}
    opt_state = OPTIMIZER.init(trained)
    for _ in range(STEPS):
        trained, opt_state = step(trained, opt_state)
    return jax.tree.map(np.asarray, trained)


def assert_trained_alone(state, expected):
    found = traverse_util.flatten_dict(gshard.full_params(state), sep="/")
    assert found.keys() == by_path().keys()
    for path, x in found.items():
        if path in expected:
            np.testing.assert_allclose(x, expected[path], rtol=0, atol=2e-6, err_msg=path)
        else:
            np.testing.assert_array_equal(x, by_path()[path], err_msg=path)
            assert x.dtype == by_path()[path].dtype


@pytest.mark.parametrize("level", quick(LEVELS, ["p_g_os"]))
def test_frozen_parameters_stay_and_the_rest_trains_as_on_one_device(level, expected):
    state, plan = gshard.shard_train_state(fresh(), mesh(), level, frozen="base$", **OPTIONS)
    step = gshard.make_train_step(loss_fn, plan, donate=False)
    gradient = gshard.value_and_grad(loss_fn, plan)

    @jax.jit
    def own_step(state, b):
        _, grads = gradient(state.params, b)
        return state.apply_gradients(grads=grads)

    mine = theirs = state
    for _ in range(STEPS):
        theirs, _ = step(theirs, batch())
        mine = own_step(mine, batch())
    assert own_step._cache_size() == 1
    for trained in (theirs, mine):
        assert_trained_alone(trained, expected)
    assert jax.tree.map(lambda x: x.sharding, mine) == jax.tree.map(lambda x: x.sharding, state)


@pytest.mark.parametrize("level", quick(LEVELS[1:], ["p_g_os"]))
def test_a_frozen_layer_between_trained_ones_in_bfloat16(level):
    """As in Paddle's dygraph_group_fsdp.py: gradients are summed in float32, and clipped."""
    rng, width, devices, k = np.random.default_rng(0), 13, 4, 2
    params = {f"layer{i}": rng.normal(size=(width, width)) / width**0.5 for i in range(4)}
    params = {name: x.astype(np.float32) for name, x in params.items()}
    b = {name: rng.normal(size=(devices * k * 3, width)).astype(np.float32) for name in "xy"}

    # Adam would scale up what rounding leaves of entries near 0.
    tx = optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1, momentum=0.9))

    def loss(p, b):
        x = b["x"].astype(jnp.bfloat16)
        for w in p.values():
            x = nn.tanh(x @ w.astype(jnp.bfloat16))
        return ((x.astype(jnp.float32) - 3 * b["y"]) ** 2).mean()

    trained = {name: x for name, x in params.items() if name != "layer1"}
    opt_state, shares = tx.init(trained), devices * k
    for _ in range(STEPS):
        rounded = {name: jnp.asarray(x, jnp.bfloat16) for name, x in {**params, **trained}.items()}
        each = [{n: x[i::shares] for n, x in b.items()} for i in range(shares)]
        grads = [jax.grad(loss)(rounded, part) for part in each]
        mean = {n: sum(g[n].astype(jnp.float32) for g in grads) / shares for n in trained}
        assert optax.tree.norm(mean) > 0.3  # clipping is active
        updates, opt_state = tx.update(mean, opt_state, trained)
        trained = optax.apply_updates(trained, updates)

    state, plan = gshard.shard_train_state(
        TrainState.create(apply_fn=None, params=params, tx=tx),
        gshard.make_mesh(replica=2, devices=jax.devices()[:devices]),
        level,
        frozen="layer1",
        precision=gshard.Precision("bfloat16", reduce_dtype="float32"),
        min_shard_size=8,
    )
    step = gshard.make_train_step(loss, plan, micro_batches=k)
    for _ in range(STEPS):
        state, _ = step(state, b)
    found = gshard.full_params(state)
    np.testing.assert_array_equal(found["layer1"], params["layer1"])
    for name, x in trained.items():
        error = np.abs(found[name] - x).max()
        assert error <= 0.01 * np.abs(x - params[name]).max(), name


@pytest.mark.parametrize("level", quick(LEVELS, ["os_g", "p_g_os"]))
def test_frozen_parameters_cost_no_state_and_no_gradient(level):
    state, plan = gshard.shard_train_state(fresh(), mesh(), level, frozen="base$", **OPTIONS)
    moments = [p for p, _ in jax.tree_util.tree_flatten_with_path(state.opt_state)[0]]
    assert not [path for path in moments if "base" in str(path) or "order" in str(path)]
    # Between steps a frozen kernel is sharded like parameters; a stack not along its layers.
    stack = state.params["Lora_1"]["base"]
    divided = level == "p_g_os"
    assert stack.sharding.spec == (jax.P(None, "shard") if divided else jax.P())
    step = gshard.make_train_step(loss_fn, plan, donate=False)
    found = gshard.audit(step, state, batch())
    for kind in ("reduce-scatter", "all-reduce"):
        assert found.elements(kind) == step.budget.elements(kind)
    rows = [row for row in found.collectives if row.purpose == "non_trainable"]
    bound = sum(m.elements for m in step.budget.communicated if m.purpose == "non_trainable")
    # Layer by layer, forward and backward; the first kernel's input needs no gradient.
    assert 0.7 * bound <= sum(row.elements or 0 for row in rows) <= bound
    assert bool(rows) == divided
    # Some in the body of a loop over layers: more often than they are written.
    assert not divided or any((row.times or 0) > row.count for row in rows)


def test_a_scanned_frozen_stack_is_never_fully_gathered():
    """A stack of 16 frozen layers: temporaries far below its size, at one layer each."""
    width, layers = 64, 16

    def loss(p, b):
        def layer(x, kernels):
            return jnp.tanh(x @ kernels["base"] + x * kernels["scale"]), None

        return jax.lax.scan(layer, b["x"], p["layers"])[0].mean()

    params = {
        "layers": {
            "base": jnp.ones((layers, width, width)),
            "scale": jnp.ones((layers, width)),
        }
    }
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)),
        gshard.make_mesh(),
        "p_g_os",
        frozen="base",
        min_shard_size=16,
        scan_axes={"layers": 0},
    )
    step = gshard.make_train_step(loss, plan)
    rows = {"x": jnp.ones((16, width))}
    assert gshard.audit(step, state, rows).memory["temp"] < layers * width * width * 4 / 2


@pytest.mark.parametrize(
    "frozen",
    [
        ["Lora_0/base", "(Lora_1|Lora_2)/base"],
        lambda leaf: leaf.path.endswith("base"),
        "a tree",
    ],
    ids=["patterns", "function", "tree"],
)
def test_every_way_to_say_what_is_frozen(frozen):
    if frozen == "a tree":
        is_base = lambda keys, _: "base" in str(keys)  # noqa: E731
        frozen = jax.tree_util.tree_map_with_path(is_base, initial())
    _, plan = gshard.shard_train_state(fresh(), mesh(), "p_g_os", frozen=frozen, **OPTIONS)
    _, same = gshard.shard_train_state(fresh(), mesh(), "p_g_os", frozen="base$", **OPTIONS)
    assert str(plan) == str(same)
    assert "Lora_1/base" in str(plan)


def test_an_init_function_and_the_plain_state_back(expected):
    state, plan = gshard.shard_train_state(fresh, mesh(), "p_g_os", frozen="base$", **OPTIONS)
    step = gshard.make_train_step(loss_fn, plan)
    state, _ = step(state, batch())
    plain = plan.unwrap(state)
    assert plain.params["Lora_0"]["base"].shape == (7, 13)
    # The plain state trains on, alone and sharded again.
    grads = jax.grad(loss_fn, allow_int=True)(plain.params, batch())
    alone = plain.apply_gradients(grads=grads)
    again, plan = gshard.shard_train_state(plain, mesh(), "os", frozen="base$", **OPTIONS)
    again, _ = gshard.make_train_step(loss_fn, plan)(again, batch())
    found = gshard.full_params(again)
    for path, x in traverse_util.flatten_dict(alone.params, sep="/").items():
        same = traverse_util.flatten_dict(found, sep="/")[path]
        np.testing.assert_allclose(same, x, rtol=0, atol=2e-6, err_msg=path)
        if path not in expected:
            np.testing.assert_array_equal(x, by_path()[path], err_msg=path)


def test_thawing_needs_an_optimizer_state():
    state, plan = gshard.shard_train_state(fresh(), mesh(), "os", frozen="base$", **OPTIONS)
    plain = plan.unwrap(state)
    for frozen in (None, "Lora_0/base"):
        with pytest.raises(gshard.GShardError, match=r"Lora_1/base.*tx\.init\(state\.params\)"):
            gshard.shard_train_state(plain, mesh(), "os", frozen=frozen, **OPTIONS)
    more, plan = gshard.shard_train_state(
        plain, mesh(), "os", frozen=["base$", "lora_a$"], **OPTIONS
    )
    more, _ = gshard.make_train_step(loss_fn, plan)(more, batch())
    assert {x.path for x in jax.tree.leaves(plan.grads)} == {f"Lora_{i}/lora_b" for i in range(3)}
    thawed = plain.replace(tx=OPTIMIZER, opt_state=OPTIMIZER.init(plain.params))
    _, plan = gshard.shard_train_state(thawed, mesh(), "os", **OPTIONS)
    assert "Lora_1/base" in {x.path for x in jax.tree.leaves(plan.grads)}


def test_frozen_parameters_travel_in_the_dtype_of_the_computation():
    state, plan = gshard.shard_train_state(
        fresh(), mesh(), "p_g_os", frozen="base$", precision="bfloat16", **OPTIONS
    )
    assert state.params["Lora_1"]["base"].dtype == jnp.float32
    step = gshard.make_train_step(loss_fn, plan, donate=False)
    text = step.lower(state, batch()).as_text()
    moved = re.findall(r'"stablehlo.all_gather".*?[)>] : \(tensor<(?:\d+x)*(\w+)>', text, re.DOTALL)
    assert moved and set(moved) <= {"bf16", "i32"}
    state, metrics = step(state, batch())
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(
        gshard.full_params(state)["Lora_1"]["base"], by_path()["Lora_1/base"]
    )


def test_integers_are_carried_without_being_named(expected):
    state, plan = gshard.shard_train_state(fresh(), mesh(), "p_g_os", **OPTIONS)
    assert state.params["Lora_1"]["order"].sharding.spec == jax.P(None, "shard")
    state, _ = gshard.make_train_step(loss_fn, plan)(state, batch())
    found = gshard.full_params(state)
    np.testing.assert_array_equal(found["Lora_1"]["order"], by_path()["Lora_1/order"])
    assert np.abs(found["Lora_1"]["base"] - by_path()["Lora_1/base"]).max() > 0


@pytest.mark.parametrize("name", ["prodigy", "dog"])
def test_the_first_state_of_an_optimizer_is_made_of_what_is_trained(name):
    """It has a scalar of all parameters: a norm, or one of their common dtype, which was int32."""
    rng = np.random.default_rng(0)
    trained = {"w": rng.normal(size=(8, 4)).astype(np.float32)}
    fixed = {"base": 100 * np.ones((8, 8), np.float32), "order": np.arange(8)[::-1].copy()}

    def loss(params, x):
        x = (x @ fixed["base"])[:, params.get("order", fixed["order"])]
        return jnp.square(jnp.tanh(x @ params["w"]) - 1).mean()

    tx, x = getattr(optax.contrib, name)(), rng.normal(size=(9, 8)).astype(np.float32) / 100
    wanted, opt_state = trained, tx.init(trained)
    options = {"frozen": "base", "min_shard_size": 0}
    state, plan = gshard.shard_train_state(({**trained, **fixed}, tx), mesh(), "os", **options)
    step = gshard.make_train_step(loss, plan)
    for _ in range(3):
        grads = jax.grad(loss)(wanted, x)
        updates, opt_state = tx.update(grads, opt_state, wanted)
        wanted = optax.apply_updates(wanted, updates)
        state, _ = step(state, x)
    assert np.abs(wanted["w"] - trained["w"]).max() > 1e-7
    moved = gshard.full_params(state)["w"] - trained["w"]
    np.testing.assert_allclose(moved, wanted["w"] - trained["w"], rtol=1e-3, atol=1e-9)


def test_a_state_whose_scalars_were_made_of_integers_is_refused():
    params = {"w": np.ones((8, 4), np.float32), "order": np.arange(8)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.contrib.prodigy())
    with pytest.raises(gshard.GShardError, match=r"estim_lr.*Pass \(params, tx\)"):
        gshard.shard_train_state(state, mesh(), "os", min_shard_size=0)


def test_an_optimizer_may_have_an_array_that_the_init_function_made():
    """Its state is made when the function has returned."""

    def init():
        params = {"w": jnp.ones((8, 4))}
        return params, optax.inject_hyperparams(optax.sgd)(params["w"][0, 0] / 10)

    state, _ = gshard.shard_train_state(init, mesh(), "os", min_shard_size=0)
    assert abs(float(state.opt_state.inner.hyperparams["learning_rate"]) - 0.1) < 1e-7


def test_an_optimizer_that_refuses_the_parameters_of_an_init_function_is_named():
    tx = optax.partition({"a": optax.sgd(0.1)}, {"w": "b"})
    with pytest.raises(
        gshard.GShardError, match="the optimizer's init fails.*ValueError: Some parameters"
    ):
        gshard.shard_train_state(lambda: ({"w": jnp.ones((8, 4))}, tx), mesh(), "os")


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.LoRALinear(7, 13, lora_rank=2, rngs=rngs)
        self.norm = nnx.BatchNorm(13, rngs=rngs)
        self.second = nnx.LoRALinear(13, 5, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.second(jnp.tanh(self.norm(self.first(x))))


def nnx_loss(model, b):
    return ((model(b["x"]) - b["y"]) ** 2).mean()


@pytest.mark.parametrize("level", quick(["os", "p_g_os"], ["p_g_os"]))
def test_an_nnx_filter_says_what_is_trained(level):
    def pair():
        model = NnxNet(nnx.Rngs(0))
        model.eval()
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def alone(model, optimizer):
        grads = nnx.grad(nnx_loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model, batch())
        optimizer.update(model, grads)

    model, optimizer = pair()
    for _ in range(STEPS):
        alone(model, optimizer)
    divided, plan = gshard.shard_train_state(pair(), mesh(), level, min_shard_size=8)
    kernel = divided[0].first.kernel.get_value()
    assert kernel.is_fully_replicated == (level == "os")
    step = gshard.make_train_step(nnx_loss, plan)
    for _ in range(STEPS):
        step(*divided, batch())
    found = nnx.state(plan.unwrap(divided)[0])
    for (path, x), (_, y) in zip(
        jax.tree_util.tree_leaves_with_path(found),
        jax.tree_util.tree_leaves_with_path(nnx.state(model)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-6, err_msg=str(path))


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_full_params_of_an_nnx_model_include_what_is_not_trained(level):
    model = NnxNet(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam)
    sharded, _ = gshard.shard_train_state((model, optimizer), mesh(), level, min_shard_size=8)
    found, wanted = gshard.full_params(sharded), nnx.state(model, nnx.Param)
    assert [*nnx.to_flat_state(found).paths] == [*nnx.to_flat_state(wanted).paths]
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert isinstance(x, np.ndarray)
        np.testing.assert_array_equal(x, y)


class WithTeacher(TrainState):
    ema: Any
    queue: Any


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_further_fields_are_sharded_like_parameters_and_may_be_changed(micro_batches):
    """A teacher that the loss reads and a queue that it changes, too large to be replicated."""
    rng = np.random.default_rng(1)

    def weights():
        return {"a": rng.normal(size=(7, 13)), "b": rng.normal(size=(13, 5))}

    params, ema, queue = weights(), weights(), rng.normal(size=(26, 5))
    params, ema, queue = jax.tree.map(np.float32, (params, ema, queue))

    def apply(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    def loss(p, b, *, ema, queue):
        student, teacher = apply(p, b["x"]), apply(ema, b["x"])
        value = ((student - teacher) ** 2).mean() + jnp.tanh(student @ queue.T).mean()
        return value, {"queue": 0.9 * queue + 0.1 * teacher.mean()}

    def train(level, devices):
        state = WithTeacher.create(
            apply_fn=None, params=params, tx=optax.adam(1e-2), ema=ema, queue=queue
        )
        here = gshard.make_mesh(devices=jax.devices()[:devices])
        state, plan = gshard.shard_train_state(state, here, level, min_shard_size=8)
        step = gshard.make_train_step(loss, plan, mutable="queue", micro_batches=micro_batches)
        measure = gshard.make_eval_step(
            lambda p, b, *, ema, queue: loss(p, b, ema=ema, queue=queue)[0], plan
        )
        for _ in range(2):
            state, metrics = step(state, batch(12))
        return state, plan.unwrap(state), metrics["loss"], measure(state, batch(12))

    def assert_same(found, wanted):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)

    state, *found = train("p_g_os", DEVICES)
    assert state.ema["a"].sharding == state.params["a"].sharding
    assert state.queue.sharding.spec == jax.P("shard")
    # Micro-batches change the queue one after the other: other devices see other rows first.
    assert_same(found, train("dp", DEVICES)[1:])
    if micro_batches == 1:
        assert_same(found, train("dp", 1)[1:])
    assert float(np.abs(found[0].queue - queue).max()) > 0.01


BAD = {
    "structure": ({"Lora_0": True}, ("tree like the parameters", "Lora_1/base", "pattern")),
    "nothing left": (".", ("no parameter to train",)),
    "no boolean": (lambda leaf: leaf.path, ("True or False", "Lora_0/base")),
    "no pattern": ("(", ("frozen", "regular expression")),
    "number": (3, ("frozen=3", "tree like the parameters")),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_frozen_is_refused_in_words(name):
    frozen, words = BAD[name]
    with pytest.raises(gshard.GShardError) as error:
        gshard.shard_train_state(fresh(), mesh(), "os", frozen=frozen, **OPTIONS)
    for word in words:
        assert word in str(error.value)


def test_bad_frozen_for_nnx_and_a_pattern_without_a_match():
    model = nnx.Linear(7, 5, rngs=nnx.Rngs(0))
    pair = model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    with pytest.raises(gshard.GShardError, match=r"wrt=nnx\.All"):
        gshard.shard_train_state(pair, mesh(), "os", frozen="kernel")
    twice = {"a/b": jnp.ones((7, 5)), "a": {"b": jnp.ones((7, 5))}, "c": jnp.ones((7, 5))}
    with pytest.raises(gshard.GShardError, match="two parameters have the same path: a/b"):
        gshard.shard_train_state((twice, optax.sgd(0.1)), mesh(), "os", frozen="^a")
    with pytest.raises(gshard.GShardError, match="not a dimension of Lora_0/base"):
        gshard.shard_train_state(
            fresh(), mesh(), "os", frozen="base$", min_shard_size=8, scan_axes={"base": 5}
        )
    _, plan = gshard.shard_train_state(fresh(), mesh(), "os", frozen=[], **OPTIONS)
    assert "Lora_0/base" in {x.path for x in jax.tree.leaves(plan.grads)}
    with pytest.warns(gshard.GShardWarning, match=r"'bass\$' matches no path"):
        gshard.shard_train_state(fresh(), mesh(), "os", frozen="bass$", **OPTIONS)
