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
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh

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


def plain(tx: optax.GradientTransformation | None = None) -> Any:
    return MODEL.state(tx or optax.adam(1e-2))


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


def explicit_mesh() -> Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))


def with_its_own_model() -> Any:
    model = NNX_MODEL.init(0)
    return model, nnx.ModelAndOptimizer(model, optax.adam(1e-2), wrt=nnx.Param)


# what is wrong -> (arguments that replace good ones, what the message must hold)
ARGUMENTS: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "p_g": (lambda: {"level": "p_g"}, ("level='p_g'", "Did you mean 'p_g_os'?")),
    "os-g": (lambda: {"level": "os-g"}, ("level='os-g'", "Did you mean 'os_g'?")),
    "zero4": (lambda: {"level": "zero4"}, ("level='zero4'", "'os'", "'os_g'", "'p_g_os'")),
    "4": (lambda: {"level": 4}, ("level=4", "'os'", "'os_g'", "'p_g_os'", "'zero1'")),
    "None": (lambda: {"level": None}, ("level=None", "'os_g'")),
    "True": (lambda: {"level": True}, ("level=True", "'os_g'")),
    "shard axis": (
        lambda: {"shard_axes": "fsdp"},
        ("shard_axes", "'fsdp'", "shard=8", "make_mesh({'fsdp': 8})"),
    ),
    "one of two axes": (
        lambda: {"shard_axes": ("shard", "shrad")},
        ("shard_axes", "'shrad'", "shard=8", "Did you mean 'shard'?"),
    ),
    "replica axis": (lambda: {"replica_axes": "dcn"}, ("replica_axes", "'dcn'", "shard=8")),
    "axis twice": (
        lambda: {"shard_axes": "shard", "replica_axes": "shard"},
        ("shard_axes", "replica_axes", "'shard'"),
    ),
    "explicit": (
        lambda: {"mesh": explicit_mesh()},
        ("Explicit", "'data'", "gshard.make_mesh", "axis_types="),
    ),
    "no mesh": (lambda: {"mesh": "cpu"}, ("mesh='cpu'", "gshard.make_mesh()")),
    "no state": (lambda: {"state": {"w": 1}}, ("dict", "TrainState", "(model, optimizer)")),
    "a lone model": (lambda: {"state": NNX_MODEL.init(0)}, ("NNXMLP", "(model, optimizer)")),
    "init_args": (lambda: {"init_args": (1,)}, ("init_args", "init function")),
    "min_shard_size": (lambda: {"min_shard_size": -1}, ("min_shard_size=-1", "0 or more")),
    "min_shard_size text": (lambda: {"min_shard_size": "64"}, ("min_shard_size='64'",)),
    "the optimizer first": (
        lambda: {"state": (optax.adam(1e-2), {"w": jnp.ones(8)})},
        ("(GradientTransformationExtraArgs, dict)", "(params, optax transformation)"),
    ),
    "a model and a transformation": (
        lambda: {"state": (NNX_MODEL.init(0), optax.adam(1e-2))},
        ("(NNXMLP, GradientTransformationExtraArgs)", "nnx.Optimizer(model, tx, wrt=nnx.Param)"),
    ),
    "ModelAndOptimizer": (
        lambda: {"state": with_its_own_model()},
        ("nnx.ModelAndOptimizer", "nnx.Optimizer(model, tx, wrt=nnx.Param)"),
    ),
    "a class": (lambda: {"state": type(plain())}, ("state is a type", "TrainState")),
    "text in the state": (
        lambda: {"state": ({"w": jnp.ones(8), "name": "adam"}, optax.identity())},
        ("'adam'", "an array is expected"),
    ),
    "whole numbers as parameters": (
        lambda: {"state": ({"ids": jnp.arange(8)}, optax.identity())},
        ("ids", "leave no parameter to train"),
    ),
    "fp8 statistics": (
        lambda: {"state": plain().replace(params={"_overwrite_with_gradient": {"s": jnp.ones(3)}})},
        ("_overwrite_with_gradient", "fields of their own"),
    ),
    "level and mesh swapped": (
        lambda: {"mesh": "os", "level": gshard.make_mesh()},
        ("level=a Mesh is unknown",),
    ),
    "init_args alone": (lambda: {"init_args": jax.random.key(0)}, ("init_args", "(key,)")),
    "rule without a pattern": (lambda: {"rules": {None: 0}}, ("None", "regular expression")),
    "scan_axes a number": (lambda: {"scan_axes": 0}, ("scan_axes=0", "{'^layers/': 0}")),
    "scan_axes' pattern": (lambda: {"scan_axes": {"(": 0}}, ("'('", "regular expression")),
    "shard_axes a number": (lambda: {"shard_axes": 0}, ("shard_axes=0",)),
    "indivisible": (
        lambda: {"indivisible": "drop"},
        ("indivisible='drop'", "'pad'", "'replicate'"),
    ),
    "rules": (lambda: {"rules": 3}, ("rules=3", "mapping")),
    "rule's dimension": (
        lambda: {"rules": {"Dense_0/kernel": 2}},
        ("'Dense_0/kernel'", "2", "(7, 13)", "0 to 1"),
    ),
    "rule's pattern": (lambda: {"rules": {"(": 0}}, ("'('", "regular expression")),
    "scan_axes": (
        lambda: {"scan_axes": {"Dense_0/kernel": 5}},
        ("scan_axes['Dense_0/kernel']=5", "(7, 13)"),
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_shard_train_state(name):
    make, parts = ARGUMENTS[name]
    state = plain()
    arguments = {"state": state, "mesh": gshard.make_mesh(), "level": "os", **MODEL.options()}
    arguments |= make()
    with refused(*parts):
        gshard.shard_train_state(**arguments)
    assert_usable(state)


def assert_usable(state: Any) -> None:
    """The caller's plain state trains on."""
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


def test_a_state_that_is_already_sharded():
    state, plan = divided()
    with refused("already sharded", "plan.unwrap(state)"):
        gshard.shard_train_state(state, gshard.make_mesh(), "os")
    gshard.make_train_step(MODEL.loss, plan)(state, batch())


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


MESHES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "too large": (lambda: gshard.make_mesh({"a": 16}), ("16", "8", "virtual_devices(16)")),
    "replica": (lambda: gshard.make_mesh(replica=3), ("replica=3", "8")),
    "no replica": (lambda: gshard.make_mesh(replica=0), ("replica=0", "1 or more")),
    "size": (lambda: gshard.make_mesh({"a": 0}), ("shape['a']=0", "1 or more")),
    "named replica": (lambda: gshard.make_mesh({"replica": 2, "a": 4}), ("replica=2",)),
    "too many given": (
        lambda: gshard.make_mesh({"a": 2}, devices=jax.devices()[:3]),
        ("devices=", "3", "2", "jax.devices()[:2]"),
    ),
}


MESHES |= {
    "a number": (lambda: gshard.make_mesh(8), ("shape=8", "gshard.make_mesh({'shard': 8})")),
    "a tuple": (lambda: gshard.make_mesh((2, 4)), ("shape=(2, 4)", "by name")),
    "no axes": (lambda: gshard.make_mesh({}), ("shape={}", "by name")),
    "nameless": (lambda: gshard.make_mesh({1: 8}), ("by name",)),
    "true": (lambda: gshard.make_mesh(replica=True), ("replica=True", "1 or more")),
    "no devices": (lambda: gshard.make_mesh(devices=[]), ("devices=[]", "at least one")),
    "indices": (lambda: gshard.make_mesh(devices=[0, 1]), ("devices=[0, 1]", "new_group([0, 1])")),
    "twice": (lambda: gshard.make_mesh(devices=jax.devices()[:1] * 2), ("a device twice",)),
    "group": (lambda: gshard.distributed.new_group(3), ("new_group(3)", "a list")),
    "unknown in group": (
        lambda: gshard.distributed.new_group([0, 8]),
        ("8 is no device", "0 to 7"),
    ),
    "virtual": (lambda: gshard.virtual_devices("8"), ("count='8'", "1 or more")),
}


@pytest.mark.parametrize("name", MESHES)
def test_meshes_that_cannot_be(name):
    make, parts = MESHES[name]
    with refused(*parts):
        make()


def test_more_virtual_devices_than_jax_started_with():
    jax.devices()
    with refused("virtual_devices(16)", "8", "xla_force_host_platform_device_count=16"):
        gshard.virtual_devices(16)
    gshard.virtual_devices(8)
    assert len(jax.devices()) == 8


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


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"x": np.array(["a"] * 8)}, ("'x'", "<U1", "numbers")),
        ({"x": np.array([None] * 8)}, ("'x'", "object")),
        ({"x": ["a"] * 8}, ("'x/0'", "'a'", "arrays")),
        ([1.0, 2.0], ("no array with examples", "make them arrays")),
        ({"x": np.zeros(8, [("a", float)])}, ("'x'", "has dtype [('a',")),
    ],
)
def test_batches_that_cannot_be(given, parts):
    state, plan = divided()
    step = gshard.make_train_step(MODEL.loss, plan)
    with refused(*parts):
        step(state, given)
    step(state, batch())


@pytest.mark.parametrize(
    ("beside", "parts"),
    [
        ("text", ("'y'", "'text'", "arrays")),
        (np.ones(8), ("'x'", "global array of 16 examples", "global batch of 8")),
        (np.ones(12), ("'y'", "12 examples", "8 devices")),
    ],
)
def test_batches_that_are_global_in_part(beside, parts):
    plan = divided()[1]
    given = {"x": gshard.shard_batch(np.ones((16, 2)), plan), "y": beside}
    with refused(*parts):
        gshard.shard_batch(given, plan)
    gshard.shard_batch({**given, "y": np.ones(16), "n": 3}, plan)


@pytest.mark.parametrize("micro_batches", [0, -1, 1.5, "2", True])
def test_micro_batches_that_cannot_be(micro_batches):
    _, plan = divided()
    with refused(f"micro_batches={micro_batches!r}", "1 or more"):
        gshard.make_train_step(MODEL.loss, plan, micro_batches=micro_batches)
    with refused(f"micro_batches={micro_batches!r}", "1 or more"):
        gshard.value_and_grad(MODEL.loss, plan, micro_batches=micro_batches)


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


def test_a_state_with_another_optimizer():
    state, plan = divided()
    step = gshard.make_train_step(MODEL.loss, plan)
    other, _ = gshard.shard_train_state(
        plain(optax.sgd(0.1)), gshard.make_mesh(), "os_g", **MODEL.options()
    )
    with refused("missing", "mu", "Dense_0/kernel"):
        step(other, batch())
    step(state, batch())


def test_a_state_that_was_not_sharded():
    state, plan = divided()
    step = gshard.make_train_step(MODEL.loss, plan)
    with refused("gshard.shard_train_state"):
        step(plain(), batch())
    step(state, batch())


def test_a_state_of_other_shapes():
    """The same names, another width."""
    state, plan = divided()
    step = gshard.make_train_step(MODEL.loss, plan)
    wider = jax.tree.map(lambda x: jnp.concatenate([x, x], -1) if jnp.ndim(x) else x, state)
    with refused("Dense_0/bias", "26", "13"):
        step(wider, batch())
    step(state, batch())


def test_a_state_of_another_level():
    """The same leaves, lying otherwise: the step would move them silently, every time."""
    state, plan = divided("os")
    step = gshard.make_train_step(MODEL.loss, plan)
    other, _ = divided("p_g_os")
    with refused("Dense_0/kernel"):
        step(other, batch())
    step(state, batch())


@pytest.mark.parametrize("change", ["add", "remove"])
def test_an_nnx_loss_that_adds_or_removes_a_parameter(change):
    pair, plan = gshard.shard_train_state(
        NNX_MODEL.state(optax.adam(1e-2)), gshard.make_mesh(), "os", **NNX_MODEL.options()
    )

    def loss(model, rows):
        value = NNX_MODEL.loss(model, rows)
        if change == "add":
            model.extra = nnx.Param(jnp.ones(()))
        else:
            del model.temperature
        return value

    with refused("adds or removes Variables", "extra" if change == "add" else "temperature"):
        gshard.make_train_step(loss, plan)(*pair, batch())


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


@pytest.mark.parametrize(
    "step",
    [
        "a",
        pytest.param(1.5, marks=pytest.mark.slow),
        pytest.param(np.float32(1), marks=pytest.mark.slow),
        np.arange(3),
    ],
)
def test_a_step_count_that_cannot_be(step):
    state, plan = divided()
    with refused("step is"):
        gshard.make_train_step(MODEL.loss, plan)(state.replace(step=step), batch())
    for good in (5, np.int64(5), np.array(5), jnp.int32(5)):
        new, _ = gshard.make_train_step(MODEL.loss, plan, donate=False)(
            state.replace(step=good), batch()
        )
        assert int(new.step) == 6


def test_an_optimizer_that_needs_what_the_step_has_not():
    state, plan = gshard.shard_train_state(
        plain(optax.lbfgs()), gshard.make_mesh(), "os", **MODEL.options()
    )
    with refused("optimizer needs more", "make_train_step gives it value=", "state.tx.update("):
        gshard.make_train_step(MODEL.loss, plan)(state, batch())


@pytest.mark.parametrize(
    "leaf, parts",
    [
        (lambda x: 0.0, ("updates that the optimizer returns", "has ()", "for every leaf")),
        (lambda x: None, ("updates that the optimizer returns", "missing")),
        (lambda x: x.ravel()[:1], ("updates that the optimizer returns", "plan's shapes")),
    ],
)
def test_an_optimizer_that_returns_no_update_for_a_leaf(leaf, parts):
    tx = optax.stateless(lambda grads, _: jax.tree.map(leaf, grads))
    state, plan = gshard.shard_train_state(plain(tx), gshard.make_mesh(), "os", **MODEL.options())
    with refused(*parts):
        gshard.make_train_step(MODEL.loss, plan)(state, batch())


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


def test_a_state_on_the_host():
    state, plan = divided("p_g_os")
    step = gshard.make_train_step(MODEL.loss, plan)
    with refused("Dense_0/kernel", "a NumPy array"):
        step(jax.tree.map(np.asarray, state), batch())
    step(state, batch())


@pytest.mark.parametrize("call", ["make_train_step", "value_and_grad", "make_eval_step"])
def test_swapped_arguments(call):
    _, plan = divided()
    for wrong in ((plan, MODEL.loss), (MODEL.loss, plan.mesh), (None, plan)):
        with refused(call, "shard_train_state returned"):
            getattr(gshard, call)(*wrong)


def test_swapped_state_and_batch():
    state, plan = divided()
    step, evaluate = (
        make(MODEL.loss, plan) for make in (gshard.make_train_step, gshard.make_eval_step)
    )
    for call in (step, evaluate):
        with refused("step(state, batch)", "a dict", "in this order"):
            call(batch(), state)
        with refused("a dict"):
            call(state.params, batch())
    with refused("plan.unwrap(state)", "a dict"):
        plan.unwrap(state.params)
    with refused("plan.unwrap(state)", "the state is plain"):
        plan.unwrap(plain())
    with refused("budget(plan)", "a TrainState"):
        gshard.budget(state)
    with refused("shard_batch(batch, plan)", "a dict"):
        gshard.shard_batch(plan, batch())
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


def test_params_used_after_donation_in_evaluation():
    state, plan = divided()
    gshard.make_train_step(MODEL.loss, plan)(state, batch())
    evaluate = gshard.make_eval_step(MODEL.loss, plan)
    with refused("earlier step", error=gshard.DonatedStateError):
        evaluate(state, batch())
    with refused("earlier step", error=gshard.DonatedStateError):
        gshard.full_params(state)


def test_gradients_of_another_tree():
    state, _ = divided()
    grads = jax.tree.map(jnp.zeros_like, renamed(state).params)
    with refused("gradients", "missing", "Dense_1/kernel", "added", "Dense_9/kernel"):
        state.apply_gradients(grads=grads)
    state.apply_gradients(grads=jax.tree.map(jnp.zeros_like, state.params))


def test_full_params_of_a_plain_state():
    with refused("full_params", "gshard.shard_train_state"):
        gshard.full_params(plain())


# Losses


def constrained(spec: Any) -> Callable[[Any, Any], jax.Array]:
    def loss(params, rows):
        x = jax.lax.with_sharding_constraint(jnp.asarray(rows["x"]), spec)
        return MODEL.loss(params, {"x": x, "y": rows["y"]})

    return loss


def test_a_constraint_that_names_no_axis_is_fine():
    state, plan = divided("p_g_os")
    gshard.make_train_step(constrained(jax.P()), plan)(state, batch())


LOSSES: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "per row": (lambda params, rows: rows["x"][:, 0], ("scalar", f"({ROWS},)", "gshard.Weighted")),
    "integer": (lambda params, rows: rows["y"].sum(), ("floating", "int32")),
    "tuple": (lambda params, rows: (rows["x"].sum(), {}), ("tuple", "has_aux=True")),
    "nothing": (lambda params, rows: None, ("floating scalar", "None")),
    "mapping": (lambda params, rows: {"loss": rows["x"].sum()}, ("floating scalar", "a dict")),
    "rng": (lambda params, rows, *, rng: rows["x"].sum(), ("requires rng", "make_train_step(rng=")),
    "field": (lambda params, rows, *, step: rows["x"].sum(), ("requires step",)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_cannot_be(name):
    loss, parts = LOSSES[name]
    state, plan = divided()
    with refused(*parts):
        gshard.make_train_step(loss, plan)(state, batch())
    gshard.make_train_step(MODEL.loss, plan)(state, batch())


def test_a_loss_without_the_promised_aux():
    state, plan = divided()
    with refused("has_aux=True", "(loss, aux)"):
        gshard.make_train_step(MODEL.loss, plan, has_aux=True)(state, batch())
    gshard.make_train_step(MODEL.loss, plan)(state, batch())


@pytest.mark.parametrize(
    ("aux", "parts"),
    [
        (lambda rows: {"ids": rows["y"].sum()}, ("'ids'", "int32", 'gshard.Reduced(x, "sum")')),
        (lambda rows: {"name": "a"}, ("'name'", "'a'")),
        (lambda rows: {"mean": gshard.Weighted(1.0, rows["x"])}, ("'mean'", "scalar weight")),
    ],
)
def test_aux_that_cannot_be_averaged(aux, parts):
    state, plan = divided()

    def loss(params, rows):
        return MODEL.loss(params, rows), aux(rows)

    with refused(*parts):
        gshard.make_train_step(loss, plan, has_aux=True, loss_semantics="per_device")(
            state, batch()
        )
    gshard.make_train_step(MODEL.loss, plan)(state, batch())


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


def test_a_mutable_field_that_the_state_lacks():
    state, plan = divided()

    def loss(params, rows):
        return MODEL.loss(params, rows), {"batch_stats": {}}

    with refused("'batch_stats'", "Add it to the state"):
        gshard.make_train_step(loss, plan, mutable="batch_stats")(state, batch())


def test_an_rng_that_nothing_takes():
    state, plan = divided()
    with refused("rng=", "does not take it"):
        gshard.make_train_step(MODEL.loss, plan, rng=jax.random.key(0))(state, batch())
    with refused("rng=0", "jax.random.key(0)"):
        gshard.make_train_step(MODEL.loss, plan, rng=0)
    pair, plan = gshard.shard_train_state(
        NNX_MODEL.state(optax.adam(1e-2)), gshard.make_mesh(), "os", **NNX_MODEL.options()
    )
    with refused("rng=", "nnx.Rngs"):
        gshard.make_train_step(NNX_MODEL.loss, plan, rng=jax.random.key(0))(*pair, batch())


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ({"mutable": 3}, ("mutable=3",)),
        ({"accumulate": "never"}, ("accumulate='never'", "'local'", "'scatter'", "'sync'")),
        ({"bucket_size": -1}, ("bucket_size=-1", "0 or more")),
        ({"bucket_size": 0.5}, ("bucket_size=0.5",)),
    ],
)
def test_options_of_a_step(option, parts):
    _, plan = divided()
    with refused(*parts):
        gshard.make_train_step(MODEL.loss, plan, **option)
    with refused(*parts):
        gshard.value_and_grad(MODEL.loss, plan, **option)
