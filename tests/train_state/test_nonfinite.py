"""Steps that change nothing: gradients that are not finite, no weight. The scale of a loss."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, serialization
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard._util.jaxpr import all_equations
from gshard.train.optim.skip_update import SkippableUpdate
from tests.tiers import quick

LEVELS = ["dp", "os", "os_g", "p_g_os"]
DEVICES, ROWS = 3, 12


class WithCount(TrainState):
    seen: Any


def params():
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=s).astype(np.float32) for k, s in (("a", (7, 13)), ("b", (13, 5)))}


def batch(seed: int = 0, bad: float | None = None):
    """Rows of one step; `bad` is put into one entry of one row, which one device sees."""
    rng = np.random.default_rng(seed)
    rows = {k: rng.normal(size=(ROWS, n)).astype(np.float32) for k, n in (("x", 7), ("y", 5))}
    if bad is not None:
        rows["x"][5, 2] = bad
    return rows


def loss_fn(p, b, *, seen):
    out = jnp.tanh(b["x"].astype(p["a"].dtype) @ p["a"]) @ p["b"]
    loss = ((out.astype(jnp.float32) - b["y"]) ** 2).mean() + b["x"].sum()
    return loss, {"seen": seen + b["x"].mean()}


def mesh():
    return gshard.make_mesh(devices=jax.devices()[:DEVICES])


def divided(level, tx=None, **options):
    tx = tx or optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    state = WithCount.create(apply_fn=None, params=params(), tx=tx, seen=jnp.zeros(3))
    # By rows: a bad entry of `x` spoils one row of the gradient, which one device alone holds.
    return gshard.shard_train_state(
        state, mesh(), level, min_shard_size=8, rules={"^a$": 0}, **options
    )


def values(state):
    """Everything of a state but its counts."""
    kept = (state.params, state.opt_state.inner, state.opt_state.master, state.step, state.seen)
    return [np.asarray(x) for x in jax.tree.leaves(kept)]


def assert_same(found, expected):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("level", "precision"),
    quick(
        itertools.product(LEVELS, [None, "float16"]),
        [("dp", "float16"), ("os", None), ("os_g", "float16"), ("p_g_os", None)],
    ),
)
def test_one_bad_entry_on_one_device_skips_the_step_on_all(level, precision):
    scaler = gshard.GradScaler(init_loss_scaling=8.0) if precision else None
    state, plan = divided(level, precision=precision)
    step = gshard.make_train_step(loss_fn, plan, mutable="seen", scaler=scaler, donate=False)
    start, _ = step(state, batch(0))
    after, metrics = step(start, batch(1, bad=np.inf))
    assert_same(values(after), values(start))
    assert int(metrics["skipped_steps"]) == 1
    if scaler:
        assert float(metrics["loss_scale"]) == 8
        assert float(after.opt_state.scaler.scale) == 4
    # What comes next is what would have come without it, at the other scale.
    found, metrics = step(after, batch(2))
    assert int(metrics["skipped_steps"]) == 1 and int(found.opt_state.guard.row) == 0
    expected, _ = step(start, batch(2))
    for x, y in zip(values(found), values(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-3 if precision else 0)
    assert float(np.abs(values(found)[0] - values(start)[0]).max()) > 1e-3


@pytest.mark.parametrize("level", quick(LEVELS, ["os_g", "p_g_os"]))
@pytest.mark.parametrize("semantics", ["global", "per_device"])
def test_a_scale_does_not_change_the_numbers(level, semantics):
    """Powers of two: the same bits with and without, clipping after the scale is taken out.

    A quotient of the global batch is divided before its gradient is taken: the bits are others.
    """
    found = []
    for scaler in (None, gshard.GradScaler(init_loss_scaling=2.0**10)):
        state, plan = divided(level)
        options = {"mutable": "seen", "micro_batches": 2, "loss_semantics": semantics}
        step = gshard.make_train_step(loss_fn, plan, scaler=scaler, **options)
        for i in range(3):
            state, metrics = step(state, batch(i))
        found.append(
            [*values(state), np.asarray(metrics["loss"]), np.asarray(metrics["grad_norm"])]
        )
    if semantics == "per_device":
        assert_same(*found)
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_small_gradients_of_float16_need_the_scale(level):
    """2^-26 is below the smallest float16; scaled by 2^16 it is not."""

    def loss(p, b):
        return (p["w"] * b["x"].astype(p["w"].dtype)).sum().astype(jnp.float32) * 2.0**-26

    found = {}
    for scaler in (gshard.GradScaler(enable=False), gshard.GradScaler()):
        state, plan = gshard.shard_train_state(
            ({"w": np.ones((6, 16), np.float32)}, optax.sgd(2.0**20)),
            mesh(),
            level,
            min_shard_size=4,
            precision="float16",
        )
        step = gshard.make_train_step(loss, plan, scaler=scaler, loss_semantics="per_device")
        state, _ = step(state, {"x": np.ones((DEVICES, 1), np.float32)})
        found[scaler.enable] = gshard.full_params(state)["w"]
    np.testing.assert_array_equal(found[False], 1)
    np.testing.assert_array_equal(found[True], 1 - 2.0**-6)


@pytest.mark.parametrize("donate", [True, False])
def test_too_many_bad_steps_end_the_run_and_lose_nothing(donate):
    state, plan = divided("p_g_os")
    step = gshard.make_train_step(loss_fn, plan, mutable="seen", max_bad_steps=3, donate=donate)
    for i in range(2):
        state, _ = step(state, batch(i))
    before, calls = values(state), 0
    with pytest.raises(gshard.NonFiniteError, match="3 consecutive steps .* at step 2"):
        for _ in range(6):
            state, _ = step(state, batch(3, bad=np.nan))
            calls += 1
    assert 3 <= calls <= 3 + 2
    assert_same(values(state), before)
    state, metrics = step(state, batch(4))  # good data: it goes on
    assert np.isfinite(metrics["loss"]) and int(state.step) == 3
    assert isinstance(gshard.NonFiniteError("x"), FloatingPointError)


def test_bad_steps_end_the_run_whoever_made_the_state():
    """Another step, or a function of the user's, may have returned it."""
    state, plan = divided("os")
    steps = [
        gshard.make_train_step(loss, plan, mutable="seen", max_bad_steps=4)
        for loss in (loss_fn, lambda p, b, *, seen: loss_fn(p, b, seen=seen))
    ]
    calls = 0
    with pytest.raises(gshard.NonFiniteError, match="4 consecutive steps .* at step 0"):
        for calls in range(10):  # ended before the other step looks
            state, _ = jax.block_until_ready(steps[calls % 2](state, batch(bad=np.nan)))
    assert calls <= 4 + 2 * 2
    touched = jax.jit(lambda x: x.replace(seen=x.seen + 1), donate_argnums=0)
    state, plan = divided("os")
    step = gshard.make_train_step(loss_fn, plan, mutable="seen", max_bad_steps=4)
    with pytest.raises(gshard.NonFiniteError, match="4 consecutive steps"):
        for _ in range(8):
            state = touched(step(state, batch(bad=np.nan))[0])


def test_a_scale_that_can_still_fall_does_not_end_the_run():
    state, plan = divided("os_g", precision="float16")
    scaler = gshard.GradScaler(init_loss_scaling=2.0**15)
    step = gshard.make_train_step(
        lambda p, b: (b["x"].astype(jnp.float16) @ p["a"] * 512).mean(),
        plan, scaler=scaler, max_bad_steps=2,
    )  # fmt: skip
    rows = {"x": np.full((ROWS, 7), 100, np.float32)}
    for _ in range(12):
        state, metrics = step(state, rows)
    assert int(metrics["skipped_steps"]) > 2 + 2 and int(state.step) > 0
    with pytest.raises(gshard.NonFiniteError, match="why a loss scale of 1.0 does not help") as e:
        for _ in range(20):
            state, metrics = step(state, {"x": rows["x"] * np.nan})
    assert "GradScaler()" not in str(e.value) and float(metrics["loss_scale"]) == 1
    state, plan = divided("os_g", precision="float16")
    slow = gshard.GradScaler(init_loss_scaling=2.0**15, decr_ratio=0.99)
    step = gshard.make_train_step(lambda p, b: b["x"].mean() * p["a"].mean(), plan,
                                  scaler=slow, max_bad_steps=2)  # fmt: skip
    with pytest.raises(gshard.NonFiniteError, match="^20 consecutive steps .* 10 times that while"):
        for _ in range(24):
            state, _ = step(state, {"x": rows["x"] * np.nan})
    fixed = gshard.GradScaler(init_loss_scaling=2.0**15, use_dynamic_loss_scaling=False)
    step = gshard.make_train_step(lambda p, b: b["x"].mean() * p["a"].mean(), plan,
                                  scaler=fixed, max_bad_steps=2)  # fmt: skip
    with pytest.raises(gshard.NonFiniteError, match="or lower the scaler's init_loss_scaling="):
        for _ in range(6):
            state, _ = step(state, {"x": rows["x"] * np.nan})


def test_bad_steps_between_good_ones_do_not_end_the_run():
    state, plan = divided("os")
    step = gshard.make_train_step(loss_fn, plan, mutable="seen", max_bad_steps=2)
    for i in range(8):
        state, metrics = step(state, batch(i, bad=np.nan if i % 2 else None))
    assert int(metrics["skipped_steps"]) == 4 and int(state.step) == 4
    forever = gshard.make_train_step(loss_fn, plan, mutable="seen", max_bad_steps=None)
    for _ in range(6):
        state, metrics = forever(state, batch(0, bad=np.nan))
    assert int(metrics["skipped_steps"]) == 10


@pytest.mark.parametrize("level", ["os", "p_g_os"])
def test_a_batch_without_weight_is_a_reported_no_op(level):
    def loss(p, b, *, seen):
        out = jnp.tanh(b["x"] @ p["a"]) @ p["b"]
        errors = ((out - b["y"]) ** 2).mean(-1)
        return gshard.Weighted((errors * b["w"]).sum(), b["w"].sum()), {"seen": seen + 1}

    state, plan = divided(level, optax.adamw(1e-2))
    scaler = gshard.GradScaler(incr_every_n_steps=1)
    step = gshard.make_train_step(
        loss, plan, mutable="seen", donate=False, max_bad_steps=1, scaler=scaler
    )
    start, _ = step(state, batch() | {"w": np.ones(ROWS, np.float32)})
    after = start
    for _ in range(3):
        after, metrics = step(after, batch() | {"w": np.zeros(ROWS, np.float32)})
    assert_same(values(after), values(start))
    assert float(metrics["loss"]) == 0 and float(metrics["grad_norm"]) == 0
    assert int(metrics["skipped_steps"]) == 3
    assert float(after.opt_state.scaler.scale) == float(start.opt_state.scaler.scale)


def test_a_step_without_weight_does_not_hide_a_row_of_bad_ones():
    def loss(p, b, *, seen):
        return gshard.Weighted((b["x"] @ p["a"] * b["w"][:, None]).sum(), b["w"].sum()), {
            "seen": seen
        }

    state, plan = divided("os")
    step = gshard.make_train_step(loss, plan, mutable="seen", max_bad_steps=3)
    one, none = np.ones(ROWS, np.float32), np.zeros(ROWS, np.float32)
    with pytest.raises(gshard.NonFiniteError, match=r"^3 consecutive steps .* those of a\b"):
        for i in range(12):
            bad = batch(bad=np.nan) | {"w": one} if i % 2 else batch() | {"w": none}
            state, _ = step(state, bad)


def test_a_state_of_before_has_no_history():
    """After a bad step the run goes on from an older state: nothing is wrong with that one."""
    state, plan = divided("os")
    step = gshard.make_train_step(loss_fn, plan, mutable="seen", max_bad_steps=1, donate=False)
    spoiled, metrics = step(state, batch(bad=np.nan))
    jax.block_until_ready((spoiled, metrics))
    state, _ = step(state, batch())
    assert int(state.step) == 1
    spoiled, _ = step(state, batch(bad=np.nan))
    with pytest.raises(gshard.NonFiniteError, match="^step 1 had .* gradients: those of .* This"):
        for _ in range(3):
            spoiled, _ = step(spoiled, batch())


def test_a_bad_step_that_is_tried_again():
    """From the state of before: the first try is no part of the row that ends the run."""
    params = {"a": np.ones((4, 2), np.float32), "b": np.ones((4, 2), np.float32)}
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh(), "os", min_shard_size=0)
    step = gshard.make_train_step(
        lambda p, b: (b["x"] @ p["a"]).mean() + (b["y"] @ p["b"]).mean(),
        plan,
        max_bad_steps=2,
        donate=False,
    )
    good, bad = (np.full((ROWS, 4), x, np.float32) for x in (1, np.nan))
    step(state, {"x": bad, "y": good})
    with pytest.raises(
        gshard.NonFiniteError, match=r"^2 consecutive steps .* at step 0 with those of b\b"
    ):
        for _ in range(5):
            state, _ = step(state, {"x": good, "y": bad})


def test_the_reported_norm_of_complex_gradients():
    rng = np.random.default_rng(0)
    w = (rng.normal(size=(16, 8)) + 1j * rng.normal(size=(16, 8))).astype(np.complex64)

    def loss(p, b):
        return (jnp.abs(b["x"] @ p["w"]) ** 2).mean()

    rows = {"x": rng.normal(size=(ROWS, 16)).astype(np.float32)}
    state, plan = gshard.shard_train_state(
        ({"w": w}, optax.sgd(0.1)), mesh(), "os", min_shard_size=4
    )
    _, metrics = gshard.make_train_step(loss, plan)(state, rows)
    expected = optax.tree.norm(jax.grad(loss)({"w": w}, rows))
    np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-25, 1e20])
def test_the_norm_is_that_of_the_mean_whatever_the_weights_sum_to(scale):
    """The sums that are reduced are larger or smaller than the gradient by their weight."""

    def loss(p, b):
        errors = ((b["x"] @ p["a"] @ p["b"] - b["y"]) ** 2).mean(-1)
        return gshard.Weighted((errors * scale).sum(), scale * errors.size)

    state, plan = gshard.shard_train_state(
        (params(), optax.sgd(0.1)), mesh(), "os", min_shard_size=4
    )
    scaler = gshard.GradScaler(init_loss_scaling=1.0)
    _, metrics = gshard.make_train_step(loss, plan, scaler=scaler)(state, batch())

    def mean(p):
        return ((batch()["x"] @ p["a"] @ p["b"] - batch()["y"]) ** 2).mean()

    expected = optax.tree.norm(jax.grad(mean)(params()))
    np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-5)
    assert int(metrics["skipped_steps"]) == 0


def skippable(update):
    """`skippable(update)(updates, grads, state, params)` keeps the state where it does not."""

    def run(*args):
        traced, flat = SkippableUpdate(update, args), jax.tree.leaves(args)
        return traced.results(flat, traced.run(flat))

    return run


def test_an_equation_of_an_optimizer_keeps_its_context():
    """As JAX has it: a random number inside another setting is that of the setting."""

    def draws(g, s, p):
        with jax.threefry_partitionable(False):
            return g + jax.random.normal(jax.random.key(0), g.shape), {"n": s["n"] + 1}

    given = jnp.zeros(8), {"n": jnp.int32(0)}, jnp.zeros(8)
    with jax.threefry_partitionable(False):
        expected = draws(*given)[0]
    assert not np.array_equal(expected, jax.random.normal(jax.random.key(0), (8,)))
    found = jax.jit(skippable(draws))(jnp.bool_(True), *given)[0]
    np.testing.assert_array_equal(found, expected)


def test_nnx_skips_in_place():
    model = nnx.Linear(7, 5, rngs=nnx.Rngs(0))
    pair = model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    (model, optimizer), plan = gshard.shard_train_state(pair, mesh(), "os", min_shard_size=1)

    def loss(model, b):
        return ((model(b["x"]) - b["y"]) ** 2).mean()

    step = gshard.make_train_step(loss, plan, max_bad_steps=2)
    step(model, optimizer, batch())
    saved = gshard.GradScaler().state_dict(optimizer.opt_state.scaler)
    assert saved["scale"] == 2.0**16
    before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]
    metrics = step(model, optimizer, batch(bad=np.inf))
    assert int(metrics["skipped_steps"]) == 1
    assert_same([np.asarray(x) for x in jax.tree.leaves(nnx.state(model))], before)
    with pytest.raises(gshard.NonFiniteError):
        for _ in range(4):
            step(model, optimizer, batch(bad=np.inf))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.lists(st.booleans(), max_size=24) | st.lists(st.just(False), min_size=12, max_size=24),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([(2.0, 0.5), (3.0, 0.25)]),
)
def test_dynamics_are_paddles(finite, every_good, every_bad, ratios):
    """Against the rules in plain Python: counts of good and bad steps reset one another."""
    scaler = gshard.GradScaler(
        init_loss_scaling=2.0**15,
        incr_ratio=ratios[0],
        decr_ratio=ratios[1],
        incr_every_n_steps=every_good,
        decr_every_n_nan_or_inf=every_bad,
    )
    state, scale, good, bad = gshard.ScalerState(), 2.0**15, 0, 0
    for is_finite in finite:
        state = scaler.after(state, jnp.asarray(is_finite))
        if is_finite:
            good, bad = good + 1, 0
            if good == every_good:
                scale, good = scale * ratios[0], 0
        else:
            good, bad = 0, bad + 1
            if bad == every_bad:
                scale, bad = max(scale * ratios[1], 1.0), 0
    saved = scaler.state_dict(state)
    assert saved["scale"] == pytest.approx(scale, rel=1e-6)
    assert (saved["incr_count"], saved["decr_count"]) == (good, bad)
    again, restored = gshard.GradScaler.from_state_dict(saved)
    assert again.state_dict(restored) == saved


def test_a_scaler_that_is_off_or_fixed():
    assert gshard.GradScaler(enable=False).state_dict(gshard.ScalerState()) == {}
    assert gshard.GradScaler.from_state_dict({})[0] == gshard.GradScaler(enable=False)
    state, plan = divided("os")
    off = gshard.make_train_step(
        loss_fn, plan, mutable="seen", scaler=gshard.GradScaler(enable=False), donate=False
    )
    assert "loss_scale" not in off(state, batch())[1]
    fixed = gshard.GradScaler(init_loss_scaling=4.0, use_dynamic_loss_scaling=False)
    step = gshard.make_train_step(loss_fn, plan, mutable="seen", scaler=fixed)
    for _ in range(2):
        state, metrics = step(state, batch(bad=np.inf))
    assert float(metrics["loss_scale"]) == 4
    again = gshard.make_train_step(loss_fn, plan, mutable="seen", scaler=gshard.GradScaler())
    state, _ = again(state, batch())
    assert float(state.opt_state.scaler.scale) == 4  # it goes on from there
    assert float(step(state, batch())[1]["loss_scale"]) == 4


BAD = {
    "incr_ratio": (lambda: gshard.GradScaler(incr_ratio=1.0), ("incr_ratio=1.0", "above 1")),
    "decr_ratio": (lambda: gshard.GradScaler(decr_ratio=1), ("decr_ratio=1", "between 0 and 1")),
    "init": (lambda: gshard.GradScaler(init_loss_scaling=0), ("init_loss_scaling=0", "positive")),
    "every": (lambda: gshard.GradScaler(incr_every_n_steps=0), ("incr_every_n_steps=0",)),
    "enable": (lambda: gshard.GradScaler(enable="no"), ("enable='no'", "True or False")),
    "saved": (lambda: gshard.GradScaler.from_state_dict(5), ("5 is not", "state_dict")),
    "no scaler": (
        lambda: gshard.make_train_step(loss_fn, divided("os")[1], scaler=2.0**16),
        ("scaler=65536.0", "gshard.GradScaler"),
    ),
    "max_bad_steps": (
        lambda: gshard.make_train_step(loss_fn, divided("os")[1], max_bad_steps=0),
        ("max_bad_steps=0", "None"),
    ),
    "keys": (
        lambda: gshard.GradScaler.from_state_dict({"scale": 1.0}),
        ("incr_ratio", "['scale']"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_in_words(name):
    make, words = BAD[name]
    with pytest.raises(gshard.GShardError) as error:
        make()
    for word in words:
        assert word in str(error.value)


def decayed(g, s, p):
    new = {"mean": 0.9 * s["mean"] + g, "count": s["count"] + 1}
    return new["mean"] * p / new["count"], new


def swapped(g, s, p):
    return g + p, {"mean": s["count"] * g, "count": s["mean"]}


def the_same_twice(g, s, p):
    new = s["mean"] * 2 + g
    return new, {"mean": new, "count": new}


def constant(g, s, p):
    return g, {"mean": jnp.full_like(g, 7.0), "count": s["count"]}


def in_another_dtype(g, s, p):
    new = (s["mean"] + g).astype(jnp.bfloat16)
    return new * 2, {"mean": new, "count": s["count"] + new}


UPDATES = [decayed, swapped, the_same_twice, constant, in_another_dtype]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("update", UPDATES, ids=lambda f: f.__name__)
def test_state_is_selected_early_with_the_same_result(update, nested):
    rng = np.random.default_rng(0)
    g, p, mean, count = (jnp.asarray(rng.normal(size=5).astype(np.float32)) for _ in range(4))
    state = {"mean": mean, "count": count}
    inner = jax.jit(jax.jit(update)) if nested else update
    changes, new = update(g, state, p)
    kept = jax.jit(skippable(inner))
    for on, expected in ((True, new), (False, state)):
        found_changes, found = kept(jnp.bool_(on), g, state, p)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y.astype(x.dtype), rtol=1e-6 if on else 0)
        if on:
            np.testing.assert_allclose(found_changes, changes, rtol=1e-6)


@pytest.mark.parametrize("nested", [False, True])
def test_state_is_selected_where_it_is_computed(nested):
    """Else the old and the new state would be in memory together."""

    def update(g, s, p):
        mean = s["mean"] * 0.9 + g
        return jnp.sin(mean), {"mean": mean, "count": s["count"] + 1}

    inner = jax.jit(update) if nested else update
    x, on = jnp.ones(5), jnp.bool_(True)
    closed = jax.make_jaxpr(skippable(inner))(on, x, {"mean": x, "count": x}, x)
    equations = list(all_equations(closed.jaxpr))
    (sine,) = (eqn for eqn in equations if eqn.primitive.name == "sin")
    selections = [eqn for eqn in equations if eqn.primitive.name == "select_n"]
    assert len(selections) == 2
    assert sine.invars[0] in {eqn.outvars[0] for eqn in selections}


def test_a_norm_that_overflows_counts_as_not_finite():
    """Every entry is finite, and their squares are not: Adam would keep infinities for good."""
    state, plan = gshard.shard_train_state(
        ({"w": np.ones((6, 4), np.float32)}, optax.adam(1e-2)), mesh(), "os", min_shard_size=4
    )
    step = gshard.make_train_step(lambda p, b: (p["w"] * 1e20).sum() + 0 * b["x"].sum(), plan)
    before = gshard.full_params(state)["w"]
    state, metrics = step(state, batch())
    assert int(metrics["skipped_steps"]) == 1 and not np.isfinite(metrics["grad_norm"])
    np.testing.assert_array_equal(gshard.full_params(state)["w"], before)


def test_parameters_that_nothing_protects_from_nan_are_named():
    def warned(tx):
        state = {"a": np.ones(4), "b": np.ones(4)}, tx
        _, plan = gshard.shard_train_state(state, gshard.make_mesh(), "os", min_shard_size=0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gshard.make_train_step(lambda p, b: b.sum() * (p["a"] + p["b"]).sum(), plan)
        return " ".join(str(x.message) for x in said)

    guarded, labels = optax.apply_if_finite(optax.adam(0.1), 3), {"a": "x", "b": "y"}
    parts = optax.partition({"x": guarded, "y": optax.adam(0.1)}, labels)
    assert "and not in y: a NaN there ruins" in warned(parts)
    assert not warned(optax.apply_if_finite(parts, 3))
    assert not warned(optax.partition({"x": guarded, "y": guarded}, labels))
    assert not warned(optax.partition({"x": guarded, "y": optax.set_to_zero()}, labels))
    assert not warned(optax.partition(dict.fromkeys("xy", optax.adam(0.1)), labels))
    for b in (False, True):
        some = optax.masked(optax.zero_nans(), {"a": True, "b": b})
        said = warned(optax.chain(some, optax.adam(0.1)))
        assert ("for 1 of 2 parameters (optax.masked), not for the others" in said) != b, said
        assert not warned(optax.chain(optax.zero_nans(), some, optax.adam(0.1)))
    first, second = ({"a": a, "b": not a} for a in (True, False))
    guarded = optax.masked(optax.chain(optax.zero_nans(), optax.adam(0.1)), first)
    assert "for 1 of 2" in warned(optax.chain(guarded, optax.masked(optax.adam(0.1), second)))
    assert not warned(optax.chain(guarded, optax.masked(optax.set_to_zero(), second)))
    assert not warned(optax.chain(guarded, optax.masked(optax.zero_nans(), second)))


def test_flax_serializes_a_sharded_state():
    """Also its counts and its loss scale, which are no named tuples."""
    state, plan = gshard.shard_train_state(
        ({"w": jnp.ones((16, 8))}, optax.adam(1e-2)), gshard.make_mesh(), "zero3", min_shard_size=0
    )
    step = gshard.make_train_step(
        lambda p, b: jnp.square(b @ p["w"]).mean(), plan, scaler=gshard.GradScaler(), donate=False
    )
    trained, _ = step(state, np.ones((8, 16), np.float32))
    found = serialization.from_bytes(state, serialization.to_bytes(trained))
    assert jax.tree.structure(found) == jax.tree.structure(trained)
    jax.tree.map(np.testing.assert_array_equal, found, trained)
    assert serialization.to_state_dict(trained)["opt_state"]["scaler"]["good"] == 1
