"""`restore(only=...)`: weights of a checkpoint in a state that keeps everything else."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import gshard

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore:.*min_shard_size changes nothing"),
]


COLLECTIONS = ("params", "batch_stats")


class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=True)(nn.Dense(self.width)(x))
        return nn.Dense(3, name="head")(x)


IN_8_BITS = gshard.Precision(state_dtype="int8", state_exceptions={"kernel": "int8"})


class State(TrainState):
    batch_stats: Any
    average: Any
    key: jax.Array


def state(seed: int, tx: optax.GradientTransformation, width: int = 10) -> State:
    """A state of which every array depends on the seed."""
    net = Net(width)
    variables = jax.jit(net.init)(jax.random.key(seed), jnp.ones((1, 5)))
    params, stats = (jax.tree.map(lambda x: x + seed, variables[name]) for name in COLLECTIONS)
    average = jax.tree.map(lambda x: x + 0.5, params)
    more = {"batch_stats": stats, "average": average, "key": jax.random.key(seed)}
    return State.create(apply_fn=net.apply, params=params, tx=tx, **more)


def shard(plain, level="os", devices=3, **how):
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    return gshard.shard_train_state(plain, mesh, level, min_shard_size=0, **how)


def loss(params, batch):
    hidden = batch["x"] @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    return jnp.mean((hidden @ params["head"]["kernel"] - batch["y"]) ** 2)


def batch():
    draw = np.random.default_rng(0)
    return {k: draw.normal(size=(15, n)).astype(np.float32) for k, n in (("x", 5), ("y", 3))}


def assert_equal(found, expected):
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint of step 7, of a state that was made with seed 1."""
    directory = tmp_path_factory.mktemp("written") / "run"
    sharded, _ = shard(state(1, optax.sgd(0.1, momentum=0.9)), "p_g_os", 4)
    with gshard.Checkpointer(directory) as checkpointer:
        checkpointer.save(7, sharded, metadata={"loss": 0.5})
    return directory


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"level": "p_g_os", "devices": 5, "frozen": "Dense_0"},
        {"precision": gshard.Precision(compute_dtype="bfloat16")},
        {"level": "p_g_os", "precision": IN_8_BITS},
    ],
    ids=["another optimizer", "frozen", "master copies", "moments in 8 bits"],
)
def test_all_weights_and_nothing_else(written, how):
    """The next steps are those of a new state that has these weights."""
    tx = optax.adamw(0.1)
    own, plan = shard(state(2, tx), **how)
    found = gshard.Checkpointer(written).restore(like=own, only=".")
    assert (found.step, found.metadata) == (7, {"loss": 0.5})
    new, theirs = found.state, state(1, tx)
    assert_equal(gshard.full_params(new), theirs.params)
    plain = plan.unwrap(new)
    assert_equal((plain.batch_stats, plain.average), (theirs.batch_stats, theirs.average))
    assert int(new.step) == 0 and jax.random.key_data(new.key).tolist() == [0, 2]

    expected, _ = shard(theirs, **how)
    step = gshard.make_train_step(loss, plan, donate=False)
    for _ in range(2):
        new, expected = (step(x, batch())[0] for x in (new, expected))
    assert_equal(gshard.full_params(new), gshard.full_params(expected))
    assert_equal(new.opt_state, expected.opt_state)


def test_patterns_choose_weights_and_the_others_stay(written):
    own, _ = shard(state(2, optax.adam(1e-3)))
    checkpointer = gshard.Checkpointer(written)
    new = checkpointer.restore(7, like=own, only=["^head", "^average/head"]).state
    found, theirs = gshard.full_params(new), state(1, optax.adam(1e-3))
    assert_equal(
        (found["head"], new.average["head"]), (theirs.params["head"], theirs.average["head"])
    )
    assert_equal(found["Dense_0"], gshard.full_params(own)["Dense_0"])
    assert new.average["Dense_0"]["kernel"] is own.average["Dense_0"]["kernel"]
    assert new.opt_state.inner[0].mu["head"]["bias"] is own.opt_state.inner[0].mu["head"]["bias"]


def test_averages_that_are_left_out_are_named(written):
    own, _ = shard(state(2, optax.adam(1e-3)))
    with pytest.warns(gshard.GShardWarning, match="not average/head/bias, average/head/kernel, "):
        new = gshard.Checkpointer(written).restore(like=own, only="^head").state
    assert new.average["head"]["bias"] is own.average["head"]["bias"]


def test_copies_that_the_optimizer_makes_are_made_of_them(written):
    tx = optax.contrib.schedule_free_sgd(0.1)
    own, plan = shard(state(2, tx))
    new = gshard.Checkpointer(written).restore(like=own, only=".").state
    assert_equal(plan.unwrap(new).opt_state.z, state(1, tx).params)

    step = gshard.make_train_step(loss, plan, donate=False)
    trained, _ = step(own, batch())
    with pytest.warns(gshard.GShardWarning, match="copies of the earlier parameters: .*z/"):
        gshard.Checkpointer(written).restore(like=trained, only=".")


def test_an_nnx_pair_is_changed_in_place(tmp_path):
    def pair(seed, tx):
        rngs = nnx.Rngs(seed)
        model = nnx.Sequential(
            nnx.Linear(5, 7, rngs=rngs), nnx.BatchNorm(7, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        )
        model.layers[1].mean[...] += seed
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    theirs = pair(1, optax.adam(0.1))
    sharded, _ = shard(theirs, "p_g_os", 4)
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(3, sharded)
    own, plan = shard(pair(2, optax.sgd(0.1)), "p_g_os", 5)
    key = np.asarray(jax.random.key_data(own[0].layers[2].rngs.key[...]))
    found = gshard.Checkpointer(tmp_path / "run").restore(like=own, only=".").state
    assert found[0] is own[0] and found[1] is own[1]
    plain = plan.unwrap(found)[0]
    for x, y in zip(plain.layers[:2], pair(1, optax.adam(0.1))[0].layers[:2], strict=True):
        assert_equal(nnx.state(x), nnx.state(y))
    assert (np.asarray(jax.random.key_data(own[0].layers[2].rngs.key[...])) == key).all()


def test_a_run_whose_weights_are_read_goes_on_where_it_was(written, tmp_path):
    own, _ = shard(state(2, optax.adam(1e-3)))
    how = {"every": 10, "local": tmp_path / "local", "local_every": 1}
    with gshard.Checkpointer(tmp_path / "run", **how) as checkpointer:
        for number in (10, 11, 12):
            checkpointer.save(number, own)
        checkpointer.wait()
        checkpointer.restore(10, like=own, only=".")
        assert checkpointer.latest_step() == 12
        checkpointer.save(12, own, force=True)
    with gshard.Checkpointer(written) as checkpointer:
        new = checkpointer.restore(like=own, only=".").state
        with pytest.raises(gshard.GShardError, match="step 7 is not after the newest one"):
            checkpointer.save(7, new)


def test_bad_input(written):
    checkpointer, adam = gshard.Checkpointer(written), optax.adam(1e-3)
    own, plan = shard(state(2, adam))
    for only, message in [
        ("nope", "only='nope' matches no weight. There are BatchNorm_0/bias"),
        ([], "chooses nothing"),
        ("(", "not a regular expression"),
        ([b"w"], "must be a regular expression as a string"),
        (re.compile("w"), "must be a regular expression as a string"),
        (3, "only=3 must be a regular expression as a string, or several"),
    ]:
        with pytest.raises(gshard.GShardError, match=message.replace("(", r"\(")):
            checkpointer.restore(like=own, only=only)
    for like in (plan, (plan.abstract_state(), plan)):
        with pytest.raises(gshard.GShardError, match="an abstract like= has no arrays"):
            checkpointer.restore(like=like, only=".")
    wider, _ = shard(state(2, adam, 11))
    shown = r"(?s)\(11,\), in the checkpoint \(10,\).*No weight that only= chooses fits. Choose"
    with pytest.raises(gshard.GShardError, match=shown):
        checkpointer.restore(like=wider, only="Dense_0")
    less, _ = shard(TrainState.create(apply_fn=None, params=state(2, adam).params, tx=adam))
    with pytest.raises(gshard.GShardError, match="average/head/bias is only in the checkpoint"):
        checkpointer.restore(like=less, only=".")
    new = checkpointer.restore(
        like=less, only="^(head|Dense_0|BatchNorm_0)/(bias|scale|kernel)"
    ).state
    assert_equal(gshard.full_params(new), state(1, adam).params)


def test_a_parameter_that_is_frozen_here_is_read_from_its_master_copy(tmp_path):
    """Also by a restore of everything: the rounded copy is not what counts."""
    params = {x: np.linspace(1, 2, 12, dtype="f4").reshape(4, 3) + i for i, x in enumerate("ab")}
    precision = gshard.Precision(compute_dtype="bfloat16")
    theirs, _ = shard((params, optax.sgd(0.1)), precision=precision)
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, theirs)
        for how in ({"only": "."}, {}):
            own = jax.tree.map(np.zeros_like, params)
            own, _ = shard((own, optax.sgd(0.1)), "p_g_os", 4, frozen="^a")
            new = checkpointer.restore(like=own, **how).state
            assert_equal(gshard.full_params(new), params)


def adapted(seed, wrt):
    """A linear layer with an adapter, whose optimizer trains what `wrt` says."""
    model = nnx.LoRALinear if hasattr(nnx, "LoRALinear") else nnx.LoRA
    model = model(6, 4, lora_rank=2, rngs=nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=wrt)


@pytest.mark.parametrize("trained", [(nnx.Param, nnx.LoRAParam), (nnx.LoRAParam, nnx.Param)])
def test_what_is_trained_there_may_be_kept_here_and_the_other_way_round(tmp_path, trained):
    theirs, _ = shard(adapted(1, trained[0]), "p_g_os", 4)
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, theirs)
    own, plan = shard(adapted(2, trained[1]), "p_g_os", 3)
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        found = checkpointer.restore(like=own, only=".").state
        checkpointer.save(2, found)  # of the same model, whatever is trained
    assert_equal(nnx.state(plan.unwrap(found)[0]), nnx.state(adapted(1, nnx.Param)[0]))


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex64", "key<fry>"])
def test_what_the_state_lacks_is_refused_unless_it_is_a_key(tmp_path, dtype):
    class More(TrainState):
        more: Any

    params, tx = {"w": np.ones((4, 2), "f4")}, optax.sgd(0.1)
    x = jax.random.key(0) if "key" in dtype else jnp.ones((4, 2), dtype)
    theirs, _ = shard(More.create(apply_fn=None, params=params, tx=tx, more={"x": x}))
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, theirs)
        own, _ = shard(TrainState.create(apply_fn=None, params=params, tx=tx))
        if "key" in dtype:
            checkpointer.restore(like=own, only=".")
            return
        with pytest.raises(gshard.GShardError, match=r"(?s)more/x is only in the checkpoint.*\^"):
            checkpointer.restore(like=own, only=".")


class Averaged(nnx.Module):
    def __init__(self):
        self.net = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
        self.mean = nnx.Dict(
            {k: nnx.Variable(getattr(self.net, k)[...]) for k in ("kernel", "bias")}
        )
        self.norm = nnx.BatchNorm(3, use_bias=False, use_scale=False, rngs=nnx.Rngs(0))


def test_averages_beside_the_network_are_named_and_statistics_are_not(tmp_path, recwarn):
    pair = Averaged()
    own, _ = shard((pair, nnx.Optimizer(pair, optax.sgd(0.1), wrt=nnx.Param)))
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, own)
        recwarn.clear()
        checkpointer.restore(like=own, only=["^net", "^mean"])
        checkpointer.restore(like=own, only="^norm")
        assert not recwarn.list
        checkpointer.restore(like=own, only="^net")
    (found,) = recwarn.list
    assert "but not mean/bias, mean/kernel, which" in str(found.message)


@pytest.mark.parametrize(
    "average",
    [
        lambda p: p,
        lambda p: {"decay": jnp.float32(0.9), "params": p},
        lambda p: optax.ema(0.9).init(p),
    ],
)
def test_averages_are_found_in_any_field(tmp_path, average):
    class Averaging(TrainState):
        ema: Any

    params = {"enc": {"w": jnp.ones((4, 3))}, "head": {"w": jnp.ones((3, 2))}}
    own = Averaging.create(apply_fn=None, params=params, tx=optax.sgd(0.1), ema=average(params))
    own, _ = shard(own)
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, own)
        with pytest.warns(gshard.GShardWarning, match="not ema/.*enc/w, ema/.*head/w, which"):
            checkpointer.restore(like=own, only="^(enc|head)/")


def test_a_frozen_layer_is_no_average_of_another(tmp_path):
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(3)])

    model = Layers(nnx.Rngs(0))
    trained = nnx.All(nnx.Param, nnx.Not(nnx.PathContains(0)))
    own, _ = shard((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=trained)))
    with gshard.Checkpointer(tmp_path / "run") as checkpointer, warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointer.save(1, own)
        checkpointer.restore(like=own, only="^blocks/1/")


def test_no_parameter_no_word_about_the_optimizers_copies(written):
    own, plan = shard(state(2, optax.contrib.schedule_free_sgd(0.1)))
    trained, _ = gshard.make_train_step(loss, plan)(own, batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gshard.Checkpointer(written).restore(like=trained, only="^batch_stats/")


def warned_of(call) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(x.message) for x in found if "begins with the same digits" in str(x.message)]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"frozen": "Dense_1"}, "'Dense_1' also matches Dense_10/w, Dense_11/w, .*'Dense_1/' for"),
        ({"rules": {"Dense_1": 0}}, "'Dense_1' also matches Dense_10/w, Dense_11/w, where"),
        ({"rules": {"Dense_1": 0, "Dense_10": 0}}, "Dense_10/w, Dense_11/w"),
        ({"rules": {"Dense_10": 0, "Dense_1": 0}}, "also matches Dense_11/w, where"),
        ({"rules": {"x1|x2": 0}}, r"matches x10, where .*'\(\?:x1\|x2\)\(\?!\[0-9\]\)' for"),
        ({"frozen": "x1"}, r"matches x10, where .*'x1\(\?!\[0-9\]\)' for"),
        ({"frozen": ["x1", "x10"]}, None),
        ({"rules": {"Dense_1/": 0, "Dense_1[0-9]*": 1, "Dense_0": 0, "Dense_[0-9]": 0}}, None),
    ],
)
def test_a_pattern_that_ends_within_a_longer_number_is_warned_about(how, expected):
    layers = {f"Dense_{i}": {"w": np.ones((4, 4), "f4")} for i in (0, 1, 10, 11)}
    params = layers | {"x1": np.ones((4, 4), "f4"), "x10": np.ones((4, 4), "f4")}
    found = warned_of(lambda: shard((params, optax.adam(0.1)), **how))
    assert len(found) == (expected is not None)
    if expected:
        assert re.search(expected, found[0]), found[0]


def test_the_best_step(written, tmp_path):
    own, _ = shard(state(2, optax.adam(1e-3)))
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        assert checkpointer.best_step() is None
        for number, found in enumerate([3.0, 1.0, float("nan"), 1.0, float("-inf")]):
            checkpointer.save(number, own, metadata={"loss": found, "accuracy": -found})
        checkpointer.save(5, own)
    assert gshard.Checkpointer(tmp_path / "run").best_step() == 3
    highest = gshard.Checkpointer(tmp_path / "run", metric="accuracy", mode="max")
    assert highest.best_step() == 3
    with pytest.raises(gshard.GShardError, match="best_step compares.*mode='max'"):
        gshard.Checkpointer(tmp_path / "run", metric="accuracy").best_step()
    with pytest.raises(gshard.GShardError, match="number 'val_loss'.*'accuracy', 'loss'"):
        gshard.Checkpointer(tmp_path / "run", metric="val_loss").best_step()


def net(**changes: Any) -> dict[str, dict[str, np.ndarray]]:
    """Parameters; a change is the width of a layer, or None for none of it."""
    widths = {"body": 4, "body.2": 4, "head": 4} | changes
    layer = lambda n: {"w": np.ones((4, n), np.float32), "b": np.ones(n, np.float32)}  # noqa: E731
    return {name: layer(n) for name, n in widths.items() if n is not None}


def without(params, layer, name):
    return params | {layer: {k: x for k, x in params[layer].items() if k != name}}


@pytest.mark.parametrize(
    ("params", "how", "said", "only"),
    [
        (net(head=8), {}, "It is of another model", r"^(?!head/)"),
        (net(body=8, added=2), {}, "It is of another model", r"^(?!added/|body/)"),
        (net(**{"body.2": None}), {}, "It is of another model", r"^(?!body\.2/)"),
        (without(net(), "head", "b"), {}, "It is of another model", r"^(?!head/b$)"),
        (net(), {"tx": optax.sgd(0.1)}, "It is of another optimizer", "."),
        (net(), {"frozen": "^body/"}, "trained in the checkpoint is frozen in like=", "."),
        (net(head=8), {"frozen": "^body/"}, "It is of another model", r"^(?!head/)"),
    ],
)
def test_the_advice_about_a_checkpoint_that_does_not_fit_works(tmp_path, params, how, said, only):
    def sharded(params, tx=None, **how):
        return shard((params, optax.adam(0.1) if tx is None else tx), **how)[0]

    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, sharded(net()))
        with pytest.raises(gshard.GShardError, match=said) as caught:
            checkpointer.restore(like=sharded(params, **how))
        assert f"restore(like=state, only={only!r})" in str(caught.value)
        if only != ".":
            with pytest.raises(gshard.GShardError, match="Leave out what differs") as caught:
                checkpointer.restore(like=sharded(params, **how), only=".")
            assert f"only={only!r}" in str(caught.value)
        assert checkpointer.restore(like=sharded(params, **how), only=only).step == 0
        other = {"all": {"w": np.ones((3, 3), np.float32)}}
        with pytest.raises(gshard.GShardError, match="no parameter fits. Choose another"):
            checkpointer.restore(like=sharded(other))


def test_the_advice_leaves_out_what_only_leaves_out(tmp_path):
    def sharded(params):
        return shard((params, optax.adam(0.1)))[0]

    with gshard.Checkpointer(tmp_path / "other") as checkpointer:
        checkpointer.save(0, sharded({"trunk": {"w": np.ones((16, 8), np.float32)}}))
        like = sharded({name: {"w": np.ones((16, 8), np.float32)} for name in ("body", "head")})
        with pytest.raises(gshard.GShardError, match="No weight that only= chooses fits"):
            checkpointer.restore(like=like, only="head")

    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, sharded(net(added=4)))
        like, advised = sharded(net(body=8, added=4)), "^(?!body/|head/)"
        with pytest.raises(gshard.GShardError, match=re.escape(f"only={advised!r}")):
            checkpointer.restore(like=like, only="^(body/|added/|body.2/)")
        assert checkpointer.restore(like=like, only=advised).step == 0


def test_the_advice_about_weights_of_nnx_that_are_not_trained(tmp_path):
    def sharded(model, wrt):
        return shard((model, nnx.Optimizer(model, optax.adam(0.1), wrt=wrt)))[0]

    rngs = nnx.Rngs(0)
    base, adapted = nnx.Linear(8, 8, rngs=rngs), nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(0, sharded(base, nnx.Param))
        like = sharded(adapted, nnx.LoRAParam)
        with pytest.raises(gshard.GShardError, match="It is of another model. To") as caught:
            checkpointer.restore(like=like)
        only = re.search("only='(.*?)'", str(caught.value))[1]
        model, _ = checkpointer.restore(like=like, only=only).state
        np.testing.assert_array_equal(model.kernel[...], base.kernel[...])
