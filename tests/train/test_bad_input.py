"""Wrong input: a `GShardError` with value, place and fix; nothing compiled, nothing lost."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import AxisType

import gshard
from tests.zoo import ZOO

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

MODEL, NNX_MODEL = ZOO["linen_mlp"], ZOO["nnx_mlp"]
ROWS = 16

compiled: list[str] = []  # one entry per program that XLA compiled
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
)


@contextmanager
def refused(*parts: str, error: type[Exception] = gshard.GShardError) -> Iterator[None]:
    """The block raises `error` with all `parts` in its message, and compiles nothing."""
    before = len(compiled)
    with pytest.raises(error) as found:
        yield
    message = str(found.value)
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"
    assert len(compiled) == before, f"compiled before it refused: {message}"


def plain() -> Any:
    return MODEL.state(optax.adam(1e-2))


def batch(rows: int = ROWS) -> dict[str, np.ndarray]:
    return MODEL.batch(0, rows, 0)


def divided(level: str = "os_g", **options: Any) -> tuple[Any, gshard.Plan]:
    return gshard.shard_train_state(
        plain(), gshard.make_mesh(), level, **(MODEL.options() | options)
    )


def test_compilations_are_counted():
    before = len(compiled)
    jax.jit(lambda x: x * 3.25 + 1)(jnp.arange(19.0)).block_until_ready()
    assert len(compiled) > before


# shard_train_state


def test_a_refused_state_trains_on():
    state = plain()
    for wrong in ({"level": "p_g"}, {"shard_axes": "fsdp"}, {"rules": {"Dense_0/kernel": 2}}):
        with refused():
            gshard.shard_train_state(state, gshard.make_mesh(), **{"level": "os", **wrong})
    grads = jax.grad(MODEL.loss)(state.params, batch())
    state.apply_gradients(grads=grads)
    ours, plan = gshard.shard_train_state(state, gshard.make_mesh(), "os", **MODEL.options())
    gshard.make_train_step(MODEL.loss, plan)(ours, batch())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (1, "os"),
        (2, "os_g"),
        (3, "p_g_os"),
        ("1", "os"),
        ("zero1", "os"),
        ("zero2", "os_g"),
        ("zero3", "p_g_os"),
        ("ZeRO-3", "p_g_os"),
        ("OS_G", "os_g"),
    ],
)
def test_other_names_of_levels(given, name):
    _, plan = divided(given)
    assert plan.level.name == name
    _, expected = divided(name)
    assert jax.tree.leaves(plan.layouts) == jax.tree.leaves(expected.layouts)


# Meshes


def test_unused_devices_are_one_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mesh = gshard.make_mesh({"a": 3})
        gshard.shard_train_state(plain(), mesh, "os", min_shard_size=8)
    assert len(caught) == 1, [str(w.message) for w in caught]
    assert issubclass(caught[0].category, gshard.GShardWarning)
    for part in ("3 of 8", "5", "devices=jax.devices()[:3]"):
        assert part in str(caught[0].message)
    assert caught[0].filename == __file__
    assert mesh.size == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: gshard.make_mesh(),
        lambda: gshard.make_mesh(replica=2),
        lambda: gshard.make_mesh({"a": 2, "b": 4}),
        lambda: gshard.make_mesh(devices=jax.devices()[:3]),
        lambda: gshard.make_mesh({"a": 3}, devices=jax.devices()[:3]),
        lambda: gshard.make_mesh(replica=2, devices=jax.devices()[:6]),
    ],
)
def test_no_warning_when_all_or_the_named_devices_are_used(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = make()
    assert all(t == AxisType.Auto for t in mesh.axis_types)


# Batches


@pytest.mark.parametrize(
    ("rows", "micro_batches", "parts"),
    [
        (13, 1, ("'x'", "13 examples, which is not a multiple of the 8 devices. Use 8 or 16")),
        (24, 2, ("'x'", "24 examples", "8 devices x 2 micro-batches = 16. Use 16 or 32")),
        (4, 1, ("'x'", "4 examples", "8 devices", "8")),
        (0, 1, ("'x'", "has no examples. Use 8 or 16 examples.")),
    ],
)
def test_rows_that_do_not_divide(rows, micro_batches, parts):
    state, plan = divided()
    step = gshard.make_train_step(MODEL.loss, plan, micro_batches=micro_batches)
    with refused(*parts):
        step(state, batch(rows))
    step(state, batch(32))


def test_rows_that_do_not_divide_in_the_users_loop():
    state, plan = divided()
    train_step = jax.jit(gshard.value_and_grad(MODEL.loss, plan, micro_batches=2))
    with refused("'x'", "24 examples", "8 devices", "2 micro-batches"):
        train_step(state.params, batch(24))
    train_step(state.params, batch(32))


def test_rows_that_do_not_divide_in_evaluation():
    state, plan = divided()
    evaluate = gshard.make_eval_step(MODEL.loss, plan)
    with refused("'x'", "13 examples", "8 devices"):
        evaluate(state, batch(13))
    evaluate(state, batch())


def test_arrays_of_a_batch_that_disagree():
    state, plan = divided()
    step = gshard.make_train_step(MODEL.loss, plan)
    with refused("'x'", "has 16", "'y'", "has 8"):
        step(state, {"x": batch(16)["x"], "y": batch(8)["y"]})
    with refused("no array"):
        step(state, {})
    step(state, batch())


# States


def renamed(state: Any) -> Any:
    params = dict(state.params)
    params["Dense_9"] = params.pop("Dense_1")
    return state.replace(params=params)


def test_a_state_of_another_structure():
    state, plan = divided()
    step = gshard.make_train_step(MODEL.loss, plan)
    with refused("missing", "Dense_1/kernel", "added", "Dense_9/kernel"):
        step(renamed(state), batch())
    state, _ = step(state, batch())  # neither the refusal nor the good call hides the next
    with refused("missing", "Dense_1/kernel", "added", "Dense_9/kernel"):
        step(renamed(state), batch())
    step(state, batch())


def test_another_optimizer_put_into_the_state():
    """It would not be used: the plan's would."""
    state, plan = divided()
    step = gshard.make_train_step(MODEL.loss, plan)
    with refused("the optimizer of this state", "plan.unwrap(state)", "inject_hyperparams"):
        step(state.replace(tx=optax.adam(0.0)), batch())
    step(state, batch())
    pair, plan = gshard.shard_train_state(
        NNX_MODEL.state(optax.adam(1e-2)), gshard.make_mesh(), "os", **NNX_MODEL.options()
    )
    pair[1].tx, ours = optax.adam(0.0), pair[1].tx
    step = gshard.make_train_step(NNX_MODEL.loss, plan)
    with refused("the optimizer of this state"):
        step(*pair, batch())
    pair[1].tx = ours
    step(*pair, batch())


def test_states_of_the_same_optimizer_are_taken():
    """A copy of a state, and one sharded again, are no replacement of the optimizer."""
    state, plan = divided()
    step = gshard.make_train_step(MODEL.loss, plan)
    step(copy.deepcopy(state), batch())
    plan.unwrap(copy.deepcopy(state))
    plan.unwrap(state.replace(tx=optax.adam(0.0)))
    other, _ = divided()
    with pytest.warns(gshard.GShardWarning, match="another optimizer than this plan's"):
        step(other, batch())
    step(state, batch())


def test_an_array_of_the_state_in_the_batch():
    """Donated and used in one program, it would crash the process."""
    state, plan = divided()

    def loss(params, rows):
        return MODEL.loss(params, rows) + 0.0 * rows["step"]

    step = gshard.make_train_step(loss, plan)
    state, _ = step(state, {**batch(), "step": 0})
    with refused("step and an array of the batch", "jnp.copy", "donate=False"):
        step(state, {**batch(), "step": state.step})
    step(state, {**batch(), "step": 1})


class Averaged(TrainState):
    ema: Any = None

    def apply_gradients(self, *, grads, **kwargs):
        new = super().apply_gradients(grads=grads, **kwargs)
        return new.replace(ema=jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, self.ema, new.params))


def averaged() -> Any:
    params = plain().params
    return Averaged.create(
        apply_fn=None, params=params, tx=optax.sgd(0.1), ema=jax.tree.map(jnp.copy, params)
    )


def test_an_apply_gradients_of_its_own():
    """The step would pass it by, and the average would stand still."""
    state, plan = gshard.shard_train_state(averaged(), gshard.make_mesh(), "os", **MODEL.options())
    with refused("Averaged", "apply_gradients", "gshard.value_and_grad(loss_fn, plan)"):
        gshard.make_train_step(MODEL.loss, plan)

    @jax.jit
    def step(state, rows):
        _, grads = gshard.value_and_grad(MODEL.loss, plan)(state.params, rows)
        return state.apply_gradients(grads=grads)

    after = step(state, batch())
    assert float(jnp.abs(after.ema["Dense_0"]["kernel"] - state.ema["Dense_0"]["kernel"]).max()) > 0


def test_one_array_used_for_two_leaves():
    """Given away twice it would crash the process."""

    class Doubled(TrainState):
        copy: Any = None

    state = Doubled.create(apply_fn=None, params=plain().params, tx=optax.sgd(0.1), copy=0.0)
    state, plan = gshard.shard_train_state(
        state.replace(copy=plain().params), gshard.make_mesh(), "os", **MODEL.options()
    )
    step = gshard.make_train_step(MODEL.loss, plan)
    with refused(
        "params/Dense_0/bias", "non_trainable/copy/Dense_0/bias", "jnp.copy", "donate=False"
    ):
        step(state.replace(copy=state.params), batch())
    gshard.make_train_step(MODEL.loss, plan, donate=False)(
        state.replace(copy=state.params), batch()
    )
    step(state, batch())


@pytest.mark.parametrize("argument", ["rules", "scan_axes"])
def test_a_pattern_that_matches_nothing_is_a_warning(argument):
    options = MODEL.options() | {argument: {"Dens_0/kernel": 1}}
    with pytest.warns(gshard.GShardWarning, match="Did you mean 'Dense_0/kernel'") as caught:
        gshard.shard_train_state(plain(), gshard.make_mesh(), "os", **options)
    assert any(argument in str(w.message) and "'Dens_0/kernel'" in str(w.message) for w in caught)


def test_an_nnx_state_of_another_structure():
    mesh = gshard.make_mesh()
    pair, plan = gshard.shard_train_state(
        NNX_MODEL.state(optax.adam(1e-2)), mesh, "os", **NNX_MODEL.options()
    )
    other, _ = gshard.shard_train_state(
        ZOO["nnx_conv"].state(optax.adam(1e-2)), mesh, "os", **NNX_MODEL.options()
    )
    step = gshard.make_train_step(NNX_MODEL.loss, plan)
    with refused("missing", "temperature"):
        step(*other, batch())
    with refused("model", "optimizer", "batch"):
        step(pair, batch())
    step(*pair, batch())


def test_a_state_used_after_donation():
    state, plan = divided()
    step = gshard.make_train_step(MODEL.loss, plan)
    new, _ = step(state, batch())
    with refused("earlier step", "state, metrics = step(state, batch)", "donate=False"):
        step(state, batch())
    with refused(error=RuntimeError):
        step(state, batch())
    new, _ = step(new, batch())
    half = new.replace(opt_state=state.opt_state)
    with refused("earlier step", error=gshard.DonatedStateError):
        step(half, batch())
    step(new, batch())


# Losses


def constrained(spec: Any) -> Callable[[Any, Any], jax.Array]:
    def loss(params, rows):
        x = jax.lax.with_sharding_constraint(jnp.asarray(rows["x"]), spec)
        return MODEL.loss(params, {"x": x, "y": rows["y"]})

    return loss


def test_a_constraint_that_names_no_axis_is_fine():
    state, plan = divided("p_g_os")
    gshard.make_train_step(constrained(jax.P()), plan)(state, batch())


def test_an_aux_with_one_entry_per_example_is_a_warning():
    """A vector may be as long as a device has rows by chance."""
    state, plan = divided()

    def loss(params, rows):
        return MODEL.loss(params, rows), {"logits": rows["x"]}

    with pytest.warns(gshard.GShardWarning, match=r"'logits' has shape \(2, 7\).*make_eval_step"):
        state, metrics = gshard.make_train_step(
            loss, plan, has_aux=True, loss_semantics="per_device"
        )(state, batch())
    assert metrics["aux"]["logits"].shape == (2, 7)
    # Of the global batch all entries are returned, as on one device.
    _, metrics = gshard.make_train_step(loss, plan, has_aux=True)(state, batch())
    np.testing.assert_array_equal(metrics["aux"]["logits"], batch()["x"])


class Counted(TrainState):
    stats: Any = None


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    ("new", "parts"),
    [
        ({"n": jnp.zeros(4)}, ("stats/n", "float32[4]", "float32[3]")),
        ({"n": jnp.zeros(3, jnp.bfloat16)}, ("stats/n", "bfloat16[3]", "float32[3]")),
        ({"n": jnp.zeros(3), "m": jnp.zeros(3)}, ("'stats'", "added m")),
        ({"stats": {"n": jnp.zeros(3)}}, ("added stats/n", "new['stats']")),
    ],
)
def test_mutable_fields_that_change(new, parts, micro_batches):
    """Accepted once, it would cost the state: the next step could not take it."""
    state = Counted.create(
        apply_fn=None, params=plain().params, tx=optax.sgd(0.1), stats={"n": jnp.zeros(3)}
    )
    state, plan = gshard.shard_train_state(state, gshard.make_mesh(), "os", **MODEL.options())

    def make(stats):
        def loss(params, rows):
            return MODEL.loss(params, rows), {"stats": stats}

        return gshard.make_train_step(loss, plan, mutable="stats", micro_batches=micro_batches)

    with refused(*parts):
        make(new)(state, batch())
    make({"n": jnp.ones(3)})(state, batch())


@pytest.mark.parametrize("sequence", [1, 2])
def test_a_gather_limit_without_effect_is_warned_of(sequence):
    """Over a sequence axis a loss of each device gathers too."""
    pair = ({"w": jnp.ones((8, 8))}, optax.sgd(0.1))
    mesh = gshard.make_mesh(sequence=sequence)
    _, plan = gshard.shard_train_state(pair, mesh, "os", min_shard_size=0)
    options = {"loss_semantics": "per_device", "gather_limit": 1000}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for make in (gshard.make_train_step, gshard.make_eval_step):
            make(lambda p, x: (x @ p["w"]).mean(), plan, **options)
    said = [x for x in seen if "gather_limit= changes nothing" in str(x.message)]
    assert len(said) == 2 * (sequence == 1)


@pytest.mark.parametrize("make", [gshard.make_train_step, gshard.make_eval_step])
@pytest.mark.parametrize("limit", ["1GB", -1, True])
def test_a_gather_limit_is_a_number_of_bytes(make, limit):
    pair = ({"w": jnp.ones((8, 8))}, optax.sgd(0.1))
    _, plan = gshard.shard_train_state(pair, gshard.make_mesh(), "os", min_shard_size=0)
    with pytest.raises(gshard.GShardError, match="gather_limit=.* bytes"):
        make(lambda p, x: (x @ p["w"]).mean(), plan, gather_limit=limit)


@pytest.mark.parametrize("scaler", [None, gshard.GradScaler()], ids=["no scaler", "scaler"])
def test_float16_parameters_without_a_copy_are_warned_of(scaler):
    pair = ({"w": jnp.ones((8, 8), jnp.float16)}, optax.sgd(0.1))
    _, plan = gshard.shard_train_state(pair, gshard.make_mesh(), "os", min_shard_size=0)
    with pytest.warns(gshard.GShardWarning, match=r"without a float32 copy \(w\)"):
        gshard.make_train_step(lambda p, x: (x @ p["w"]).mean(), plan, scaler=scaler)
    meant = gshard.GradScaler(enable=False)
    gshard.make_train_step(lambda p, x: (x @ p["w"]).mean(), plan, scaler=meant)
