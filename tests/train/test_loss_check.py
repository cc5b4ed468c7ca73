"""With `per_device`, a loss that is no mean over examples is named at the first step, no other."""

from __future__ import annotations

import re
import warnings
from functools import partial
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
from benchmarks.groups import free_address
from gshard.train import loss_check
from tests.processes import run_together, variables

EXAMPLES = 48
FLAG = "--xla_force_host_platform_device_count=2"
PARAMS = {"w": jax.random.normal(jax.random.key(0), (12, 6))}
_random = np.random.default_rng(0)
BATCH = {
    "x": _random.normal(size=(EXAMPLES, 12)).astype(np.float32),
    "y": _random.integers(0, 6, EXAMPLES),
    "mask": (_random.random(EXAMPLES) < 0.6).astype(np.float32),
}
DROP = nn.Dropout(0.5, deterministic=False)
per_device = partial(gshard.make_train_step, loss_semantics="per_device")


@pytest.fixture(autouse=True)
def turned_on(monkeypatch):
    monkeypatch.setenv(loss_check.VARIABLE, "1")


def entropies(params, batch, x=None):
    logits = (batch["x"] if x is None else x) @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])


def masked(losses, batch):
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def weighted(params, batch):
    return gshard.Weighted((entropies(params, batch) * batch["mask"]).sum(), batch["mask"].sum())


def dropped(params, batch, rng):
    return entropies(params, batch, DROP.apply({}, batch["x"], rngs={"dropout": rng}))


def contrastive(params, batch):
    z = batch["x"] @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


def scanned_dropout(params, batch, rng):
    def layer(carry, key):
        x, key = carry[0], jax.random.fold_in(key, 1)
        return (jax.lax.cond(x[0, 0] > 9, lambda x: x, jax.jit(drop), x) + jax.nn.relu(x),), None

    def drop(x):
        return x * jax.random.bernoulli(rng, 0.5, x.shape)

    (x,), _ = jax.lax.scan(layer, (batch["x"],), jax.random.split(rng, 2))
    return entropies(params, batch, x)


def of_bfloat16(params, batch):
    params, x = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch["x"]))
    return entropies(params, batch, x)


def centered(params, batch):
    z = batch["x"] @ params["w"]
    return (z - z.mean(axis=-1, keepdims=True)).mean()  # nothing but rounding


WRONG = {
    "masked": lambda p, b: masked(entropies(p, b), b),
    "where": lambda p, b: jnp.mean(entropies(p, b), where=b["mask"] > 0),
    "sum": lambda p, b: entropies(p, b).sum(),
    "root of a mean": lambda p, b: jnp.sqrt(jnp.square(entropies(p, b)).mean()),
    "contrastive": contrastive,
    "masked bfloat16": lambda p, b: masked(of_bfloat16(p, b), b),
    "masked after dropout": lambda p, b, *, rng: masked(dropped(p, b, rng), b),
    "masked, dropout in a scan": lambda p, b, *, rng: masked(scanned_dropout(p, b, rng), b),
}
WRONG_WEIGHTED = {
    "divided already": lambda p, b: gshard.Weighted(masked(entropies(p, b), b), b["mask"].sum()),
    "a mean with a count": lambda p, b: gshard.Weighted(entropies(p, b).mean(), len(b["y"])),
    "a sum without a count": lambda p, b: gshard.Weighted(entropies(p, b).sum(), 1),
}
RIGHT = {
    "mean": lambda p, b: entropies(p, b).mean(),
    "weight decay": lambda p, b: entropies(p, b).mean() + 0.1 * jnp.square(p["w"]).sum(),
    "Weighted": weighted,
    "Weighted mean": lambda p, b: gshard.Weighted(entropies(p, b).mean(), 1),
    "Weighted by its own mean": lambda p, b: gshard.Weighted(
        masked(entropies(p, b), b) * b["mask"].sum(), b["mask"].sum()
    ),
    "Weighted by counts": lambda p, b: gshard.Weighted(entropies(p, b).sum(), len(b["y"])),
    "bfloat16": lambda p, b: of_bfloat16(p, b).mean(),
    "float16": lambda p, b: entropies(p, b).mean().astype(jnp.float16),
    "about zero": centered,
    "dropout": lambda p, b, *, rng: dropped(p, b, rng).mean(),
    "dropout in a scan": lambda p, b, *, rng: scanned_dropout(p, b, rng).mean(),
    "its own psum": lambda p, b: (
        (entropies(p, b) * b["mask"]).sum() * 8 / jax.lax.psum(b["mask"].sum(), "shard")
    ),
    "two at a time": lambda p, b: entropies(p, b).reshape(3, -1).mean(),  # nothing can be said
    "draws by rejection": lambda p, b, *, rng: (
        entropies(p, b) + jax.random.gamma(rng, 2.0, b["y"].shape)
    ).mean(),
}


def mesh(devices=8):
    return gshard.make_mesh(devices=jax.devices()[:devices])


def said(
    loss: Any, level: str = "dp", devices: int = 8, batch: Any = BATCH, **options: Any
) -> list[str]:
    """What gshard warns of at two calls of a step."""
    state = (jax.tree.map(jnp.copy, PARAMS), optax.sgd(0.1))
    state, plan = gshard.shard_train_state(state, mesh(devices), level, min_shard_size=4)
    if "rng" in loss.__code__.co_varnames:
        options["rng"] = jax.random.key(1)
    step = per_device(loss, plan, **options)
    return calls(lambda: step(state, batch)[0], lambda new: step(new, batch))


def calls(first, second) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        second(first())
    assert all(issubclass(w.category, gshard.GShardWarning) for w in found)
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


def assert_named(found: list[str]) -> None:
    assert len(found) == 1, found
    for text in ("not a mean over examples", "gshard.Weighted", "check_loss=False"):
        assert text in found[0]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_mean_is_named_once(name):
    assert_named(said(WRONG[name]))


@pytest.mark.parametrize("name", WRONG_WEIGHTED)
def test_a_weighted_that_does_not_add_up_is_named(name):
    (text,) = said(WRONG_WEIGHTED[name])
    for part in ("do not add up", "sum / weight is", "without dividing", "check_loss=False"):
        assert part in text


@pytest.mark.parametrize("name", [*WRONG, *WRONG_WEIGHTED])
def test_of_the_global_batch_all_are_right(name):
    """What is named with `per_device` is by default the loss of one device, without a warning."""
    loss: Any = {**WRONG, **WRONG_WEIGHTED}[name]
    key = jax.random.key(1) if "rng" in loss.__code__.co_varnames else None

    def alone(params, i):
        draws = {} if key is None else {"rng": jax.random.fold_in(key, i)}
        found = loss(params, BATCH, **draws)
        return found.sum / found.weight if isinstance(found, gshard.Weighted) else found

    start = (jax.tree.map(jnp.copy, PARAMS), optax.sgd(0.1))
    state, plan = gshard.shard_train_state(start, mesh(), "p_g_os", min_shard_size=4)
    step = gshard.make_train_step(loss, plan, rng=key)
    losses = []

    def run(state):
        state, metrics = step(state, BATCH)
        losses.append(metrics["loss"])
        return state

    assert calls(lambda: run(state), run) == []
    params = PARAMS
    for i, found in enumerate(losses):
        wanted, grads = jax.jit(jax.value_and_grad(alone))(params, i)
        np.testing.assert_allclose(found, wanted, rtol=1e-3 if "bfloat16" in name else 1e-5)
        params = optax.tree.add_scale(params, -0.1, grads)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_not_named(name):
    assert said(RIGHT[name]) == []


@pytest.mark.parametrize(
    ("level", "devices", "k"), [("p_g_os", 8, 2), ("os_g", 3, 1), ("os", 1, 4)]
)
def test_of_every_level_and_of_micro_batches(level, devices, k):
    loss = WRONG["masked after dropout"]
    assert_named(said(loss, level, devices, micro_batches=k))
    assert said(RIGHT["dropout"], level, devices, micro_batches=k) == []


def test_an_example_without_weight_is_not_taken_for_an_overflow():
    (text,) = said(WRONG["masked"])
    assert "the loss of one of them alone is nan" in text

    def overflows(params, batch):
        return (entropies(params, batch) / batch["mask"]).mean()

    assert said(overflows, max_bad_steps=None) == []


def test_the_two_numbers():
    one = {name: np.tile(x[:6], (8, *[1] * (x.ndim - 1))) for name, x in BATCH.items()}
    one["mask"] = np.tile(np.float32([1, 2, 3, 4, 5, 6]), 8)
    losses, mask = np.asarray(entropies(PARAMS, BATCH))[:6], one["mask"][:6]
    for name, want in (
        ("masked", ((losses * mask).sum() / mask.sum(), losses.mean())),
        ("sum", (losses.sum(), losses.sum() / 2)),
    ):
        (text,) = said(WRONG[name], batch=one)
        found = re.search(
            r"for 6 examples of one device it is (\S+), and .* of them is (\S+)\. gshard", text
        )
        np.testing.assert_allclose([float(x) for x in found.groups()], want, rtol=1e-5)


def test_a_single_bad_device_is_enough():
    batch = {**BATCH, "mask": np.ones(EXAMPLES, np.float32)}
    assert said(WRONG["masked"], batch=batch) == []
    batch["mask"][-1] = 0
    assert_named(said(WRONG["masked"], "p_g_os", batch=batch))


def test_an_odd_count_and_a_single_example():
    odd = {name: x[:40] for name, x in BATCH.items()}
    assert_named(said(WRONG["masked"], batch=odd))
    assert said(WRONG["masked"], batch={name: x[:8] for name, x in BATCH.items()}) == []


def test_it_can_be_switched_off(monkeypatch):
    assert said(WRONG["sum"], check_loss=False) == []
    assert said(WRONG["sum"], devices=1) == []  # that is one device
    monkeypatch.setenv(loss_check.VARIABLE, "0")
    assert said(WRONG["sum"]) == []
    with pytest.raises(gshard.GShardError, match="check_loss"):
        said(WRONG["sum"], check_loss="no")


class _WithStats(TrainState):
    batch_stats: Any


def norm(axis_name):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, init=False):
            norm = nn.BatchNorm(False, axis_name=None if init else axis_name)
            return nn.Dense(6)(norm(nn.Dense(8)(x)))

    return Net()


@pytest.mark.parametrize(("axis_name", "warns"), [(None, True), ("shard", False)])
def test_batch_norm(axis_name, warns):
    net = norm(axis_name)
    made = net.init(jax.random.key(0), BATCH["x"], init=True)
    state = _WithStats.create(apply_fn=None, tx=optax.sgd(0.1), **made)
    state, plan = gshard.shard_train_state(state, mesh(), "p_g_os", min_shard_size=4)

    def loss(params, batch, *, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = net.apply(variables, batch["x"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), ({"top": gshard.Reduced(logits.max(), "max")}, new)

    step = per_device(loss, plan, mutable="batch_stats", has_aux=True)
    found = calls(lambda: step(state, BATCH)[0], lambda new: step(new, BATCH))
    assert_named(found) if warns else None
    assert bool(found) == warns


class _Net(nnx.Module):
    def __init__(self):
        self.layer = nnx.Linear(12, 6, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))


def test_nnx_changes_nothing_of_the_model():
    """Draws, counts and parameters after two steps are those without the check."""

    def loss(model, batch):
        model.calls.set_value(model.calls.get_value() + 1)
        logits = model.layer(model.drop(batch["x"]))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return masked(losses, batch)

    compiled: list[int] = []

    def after(check: bool) -> Any:
        model = _Net()
        pair = model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        pair, plan = gshard.shard_train_state(pair, mesh(), "p_g_os", min_shard_size=4)
        step = per_device(loss, plan, check_loss=check)
        found = calls(lambda: step(*pair, BATCH), lambda _: step(*pair, BATCH))
        assert_named(found) if check else None
        assert int(pair[0].calls.get_value()) == 2
        compiled.append(step.jitted._cache_size())
        return gshard.full_params(pair)

    for a, b in zip(jax.tree.leaves(after(True)), jax.tree.leaves(after(False)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert compiled[0] == compiled[1]


def test_what_the_loss_prints_is_printed_by_the_steps_alone(capfd):
    def loss(params, batch):
        jax.debug.print("seen {}", batch["x"].shape[0])
        return entropies(params, batch).mean()

    assert said(loss) == []
    jax.effects_barrier()
    assert capfd.readouterr().out.count("seen") == 16
    assert said(lambda p, b: loss(p, b) * len(b["x"]))


WORKER = """
import sys, warnings
import gshard
gshard.distributed.initialize()
import jax, optax
from tests.train import test_loss_check as t
rank, mesh = jax.process_index(), gshard.make_mesh()
state, plan = gshard.shard_train_state((t.PARAMS, optax.sgd(0.1)), mesh, "p_g_os", min_shard_size=4)
batch = {name: x[rank * 24 : rank * 24 + 24] for name, x in t.BATCH.items()}
if rank:  # the first process alone sees it
    batch["mask"] = batch["mask"] * 0 + 1
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    state, metrics = t.per_device(t.WRONG["masked"], plan)(state, batch)
print("VERDICT", [str(w.message)[:120] for w in found], float(metrics["loss"]))
"""


def test_several_processes_come_to_one_verdict(tmp_path):
    address = free_address()
    own = [
        {**variables(address, 2, rank), "GSHARD_CHECK_LOSS": "1", "XLA_FLAGS": FLAG}
        for rank in range(2)
    ]
    ended = run_together(tmp_path, [["-c", WORKER]] * 2, own)
    assert [x.code for x in ended] == [0, 0], ended
    first, second = (re.findall("VERDICT .*", x.said) for x in ended)
    assert first == second
    assert "not a mean over examples" in first[0]
