"""Auditing steps: rows, sums, memory, the budget and what was found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from gshard._util.errors import GShardError
from gshard.analysis.audit import audit, collective_rows
from gshard.analysis.audit_report import Audit
from gshard.analysis.hlo import read_program
from gshard.sharding.budget import Budget, Traffic
from gshard.sharding.group import data_group
from tests.tiers import quick

AG, RS, AR = "all-gather", "reduce-scatter", "all-reduce"
WHOLE, BOTH = P(), P(("a", "b"))


@dataclasses.dataclass(frozen=True)
class FakePlan:
    """All axes of the mesh are data axes."""

    mesh: Mesh | AbstractMesh

    @property
    def group(self):
        return data_group(self.mesh, self.mesh.axis_names, None)


@dataclasses.dataclass(frozen=True)
class FakeStep:
    """Has what `audit` asks of a step."""

    run: jax.stages.Wrapped
    plan: FakePlan
    budget: Budget | None = None

    def lower(self, *args):
        return self.run.lower(*args)


def make_mesh(reverse: bool = False) -> Mesh:
    devices = np.array(jax.devices()[::-1] if reverse else jax.devices())
    return Mesh(devices.reshape(2, 4), ("a", "b"))


def over(mesh, f, in_specs=WHOLE, out_specs=WHOLE, **options):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(mapped, **options)


def gather(w):
    with jax.named_scope("gshard/gather"):
        for axis in ("b", "a"):
            w = lax.all_gather(w, axis, tiled=True)
    return w


def train(params, batch):
    """Gradient of a 64x64 layer, gathered and (by transposition) scattered; a loss; a norm."""

    def loss_fn(w):
        return jnp.mean((batch @ gather(w)) ** 2)

    loss, grad = jax.value_and_grad(loss_fn)(params)
    norm = jnp.sqrt(lax.psum(jnp.sum(grad**2), ("a", "b")))
    with jax.named_scope("gshard/scalar"):
        loss = lax.pmean(loss, ("a", "b"))
    return params - grad / norm, loss


def train_arguments():
    return jax.ShapeDtypeStruct((64, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)


BUDGET = Budget(
    "p_g_os",
    8,
    {"params": 2048, "gradients": 2048, "optimizer": 0},
    (
        Traffic(AG, "gather", 64 * 64 + 64 * 32, 4, at_most=True),
        Traffic(RS, "scatter", 64 * 64, 4),
        Traffic(RS, "scatter", 64 * 32, 4),
        Traffic(AG, "update", 1234567, 4),
    ),
)


@pytest.fixture(scope="module")
def found():
    mesh = make_mesh()
    run = over(mesh, train, in_specs=(BOTH, BOTH), out_specs=(BOTH, P()), donate_argnums=0)
    return audit(FakeStep(run, FakePlan(mesh), BUDGET), *train_arguments())


def rows_of(found):
    return [
        (row.kind, row.axes, row.purpose, row.scalar, row.count, row.times, row.elements)
        for row in found.collectives
    ]


def test_rows(found):
    arrays = [row for row in rows_of(found) if not row[3]]
    assert sorted(arrays) == [
        (AG, ("a",), "gather", False, 1, 1, 64 * 64),
        (AG, ("b",), "gather", False, 1, 1, 64 * 32),
        (RS, ("a",), "scatter", False, 1, 1, 64 * 64),
        (RS, ("b",), "scatter", False, 1, 1, 64 * 32),
    ]


def test_scalars_have_rows_of_their_own(found):
    scalars = [row for row in rows_of(found) if row[3]]
    assert {row[0] for row in scalars} == {AR}
    assert {row[2] for row in scalars} <= {"scalar", "compiler", "user"}
    assert sum(row[6] for row in scalars) == 2


def test_sums(found):
    assert found.elements(AG) == 64 * 64 + 64 * 32
    assert found.elements(RS) == 64 * 64 + 64 * 32
    assert found.elements(AR) == 0
    assert found.elements(AR, scalars=True) == 2
    assert found.wire_bytes(AG) == 4 * 64 * 64 * 7 // 8
    assert found.wire_bytes() == found.wire_bytes(AG) + found.wire_bytes(RS) + found.wire_bytes(AR)


def test_memory(found):
    assert found.memory["argument"] == 4 * (8 * 64 + 4 * 64)
    assert found.memory["output"] >= 4 * (8 * 64 + 1)
    assert found.memory["alias"] == 4 * 8 * 64
    assert found.memory["temp"] >= 4 * 64 * 64
    assert all(isinstance(amount, int) for amount in found.memory.values())


def test_a_step_brings_its_budget(found):
    assert found.budget is BUDGET


def test_printed(found):
    text = str(found)
    lines = [line.split() for line in text.splitlines()]
    assert ["reduce-scatter", "scatter", "6,144", "6,144"] in lines
    assert ["all-gather", "gather", "<=", "6,144", "6,144"] in lines
    assert ["all-gather", "update", "1,234,567", "0"] in lines
    assert ["argument", "3,072", "3.07", "kB"] in lines
    assert ["budget:", "params", "2,048", "2.05", "kB"] in lines
    assert max(map(len, text.splitlines())) <= 160
    assert "\x1b" not in text


def test_as_dict_is_json(found):
    back = json.loads(json.dumps(found.as_dict()))
    assert back["memory"] == found.memory
    assert back["budget"]["communicated"][1]["elements"] == 4096
    assert back["collectives"][0]["axes"] in (["a"], ["b"])
    assert len(back["collectives"]) == len(found.collectives)


# What an optimizer itself must communicate.


@pytest.mark.parametrize(
    "tx, arrays",
    [
        (optax.adamw(1e-3), None),
        (optax.clip_by_global_norm(1.0), set()),
        (optax.lamb(1e-3), set()),
        (optax.adafactor(1e-3, min_dim_size_to_factor=4), {AR, AG}),
        (optax.sm3(1e-3), {AR, AG}),
    ],
    ids=["adamw", "clip", "lamb", "adafactor", "sm3"],
)
def test_an_optimizer_has_rows_of_its_own(tx, arrays):
    """`arrays`: the kinds of collectives of more than scalars; None for no row at all."""
    params = {"w": np.ones((16, 24), np.float32), "v": np.ones((40, 8), np.float32)}
    state, plan = gshard.shard_train_state((params, tx), make_mesh(), "p_g_os", min_shard_size=16)
    update = jax.jit(state.tx.update)
    found = audit(update, state.params, state.opt_state, state.params, plan=plan)
    assert {row.purpose for row in found.collectives} == (
        set() if arrays is None else {"optimizer"}
    )
    kinds = {row.kind for row in found.collectives if not row.scalar}
    assert kinds - {"all-to-all", "collective-permute"} == (arrays or set())


def test_a_norm_that_xla_sums_with_the_loss_is_the_optimizers():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-3))
    params = {"w": np.ones((16, 24), np.float32)}
    state, plan = gshard.shard_train_state((params, tx), make_mesh(), "os", min_shard_size=16)
    step = gshard.make_train_step(lambda p, x: jnp.square(x @ p["w"]).mean(), plan)
    found = audit(step, state, np.ones((8, 16), np.float32))
    scalars = {row.purpose: row.elements for row in found.collectives if row.scalar}
    assert scalars["optimizer"] == 1


# Other things to audit.


def test_a_jitted_function_without_a_plan_takes_the_mesh_of_its_inputs():
    mesh = make_mesh(reverse=True)
    batch = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, BOTH))
    found = audit(over(mesh, lambda v: lax.psum(v, "b"), BOTH, P("a")), batch)
    assert rows_of(found) == [(AR, ("b",), "user", False, 1, 1, 4)]
    assert found.budget is None
    assert "budget" not in str(found)


def test_an_nnx_function():
    mesh = make_mesh()

    @nnx.jit
    def loss(model, batch):
        return jnp.mean(model(batch) ** 2)

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    batch = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, BOTH))
    found = audit(loss, model, batch, plan=FakePlan(mesh))
    assert rows_of(found) == [(AR, ("a", "b"), "compiler", True, 1, 1, 1)]


def test_a_plan_of_an_abstract_mesh_names_axes_too():
    run = over(make_mesh(), lambda v: lax.psum(v, "a"))
    mesh = AbstractMesh((2, 4), ("x", "y"))
    (row,) = audit(run, jnp.ones(8), plan=FakePlan(mesh)).collectives
    assert row.axes == ("x",)


def test_axes_of_size_one_are_not_named():
    mesh = Mesh(np.array(jax.devices()).reshape(1, 8), ("copies", "shard"))
    run = over(mesh, lambda v: lax.psum(v, ("copies", "shard")))
    (row,) = audit(run, jnp.ones(8), plan=FakePlan(mesh)).collectives
    assert row.axes == ("shard",)


def test_groups_that_no_axes_make_are_shown_as_unknown():
    run = over(make_mesh(), lambda v: lax.psum(v, "b"))
    mesh = AbstractMesh((4, 2), ("x", "y"))
    found = audit(run, jnp.ones(8), plan=FakePlan(mesh))
    assert found.collectives[0].axes is None
    assert "?" in str(found)


def test_a_combined_all_reduce_is_parted():
    """XLA:CPU sums a loss with the gradients; both keep their row, and the count stays exact."""

    def f(v):
        with jax.named_scope("gshard/reduce"):
            sums = lax.psum((v, v[0]), ("a", "b"))
        with jax.named_scope("gshard/scalar"):
            loss = lax.psum(v.sum(), ("a", "b"))
        return sums, loss, lax.psum(v[1], ("a", "b"))

    found = audit(over(make_mesh(), f), jnp.ones((16, 4)), plan=FakePlan(make_mesh()))
    assert sorted(row[2:] for row in rows_of(found)) == [
        ("reduce", False, 1, 1, 68),
        ("scalar", True, 1, 1, 1),
        ("user", False, 1, 1, 4),
    ]
    assert found.elements(AR) == 72


def test_one_device_moves_nothing():
    mesh = Mesh(np.array(jax.devices()[:1]), ("a",))
    found = audit(over(mesh, lambda v: lax.psum(v, "a")), jnp.ones(8), plan=FakePlan(mesh))
    assert found.collectives == ()
    assert found.wire_bytes() == 0


def test_loops_multiply():
    def f(v):
        return lax.scan(lambda h, _: (jnp.tanh(lax.psum(h, "a")), None), v, length=7)[0]

    found = audit(over(make_mesh(), f), jnp.ones((4, 4)), plan=FakePlan(make_mesh()))
    assert rows_of(found) == [(AR, ("a",), "user", False, 1, 7, 7 * 16)]


def test_what_is_not_known_is_said():
    def f(v):
        return lax.while_loop(lambda h: h.sum() < 9, lambda h: lax.psum(h, "a"), lax.psum(v, "b"))

    found = audit(over(make_mesh(), f), jnp.ones((4, 4)), plan=FakePlan(make_mesh()))
    assert {row.axes: row.elements for row in found.collectives} == {("a",): None, ("b",): 16}
    assert "?" in str(found)
    with pytest.raises(GShardError, match="loop whose length is not constant"):
        found.elements(AR)
    with pytest.raises(GShardError, match="loop whose length is not constant"):
        found.wire_bytes()
    assert found.elements(AG) == 0
    assert json.loads(json.dumps(found.as_dict()))["collectives"][0]["elements"] in (None, 16)


def test_branches_are_marked():
    def f(v):
        return lax.cond(v[0] > 0, lambda u: lax.psum(u, "a"), lambda u: u, v)

    found = audit(over(make_mesh(), f), jnp.ones(8), plan=FakePlan(make_mesh()))
    assert [row.conditional for row in found.collectives] == [True]
    assert "<= 1" in str(found)


def test_a_budget_can_be_given():
    found = audit(over(make_mesh(), lambda v: lax.psum(v, "a")), jnp.ones(8), budget=BUDGET)
    assert found.budget is BUDGET


@dataclasses.dataclass(frozen=True)
class Stored:
    """A step that was compiled elsewhere: only its text is here."""

    text: str | None

    def lower(self):
        return self

    compile = lower

    def as_text(self):
        return self.text

    def memory_analysis(self):
        return None


@pytest.mark.parametrize(
    ("name", "mesh", "rows"),
    [
        (
            "tpu-v5e-2x4-step-async",
            {"shard": 8},
            {
                (AG, ("shard",), "gather", 4, 2): 8 * 2048**2,
                (RS, ("shard",), "scatter", 2, 0): 4 * 2048**2,
            },
        ),
        (
            "tpu-v5e-2x4-step-padded",
            {"a": 2, "b": 4},
            {
                (AG, ("a",), "gather", 2, 0): 8 * 4096 * 4096,
                (AG, ("b",), "gather", 2, 0): 8 * 2048 * 4096,
                (RS, ("a",), "scatter", 1, 0): 4 * 4256 * 4096,
                (RS, ("b",), "scatter", 1, 0): 4 * 2080 * 4096,
                ("collective-permute", ("a",), "compiler", 1, 1): 4 * 80 * 4096,
                ("collective-permute", ("b",), "compiler", 1, 1): 4 * 24 * 4096,
            },
        ),
        (
            "tpu-v5e-4x4-scatter-flat",
            {"shard": 16},
            {(AR, ("shard",), "scatter", 1, 0): 1024 * 256},
        ),
        (
            "gpu-h100-1x8x1-step",
            {"shard": 8},
            {
                (AG, ("shard",), "gather", 3, 2): 8 * 256**2,
                (RS, ("shard",), "scatter", 2, 2): 4 * 256**2,
            },
        ),
    ],
)
def test_programs_of_other_machines(name, mesh, rows):
    text = (Path(__file__).parents[1] / "dumps" / f"{name}.hlo.txt").read_text()
    mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    found = audit(Stored(text), plan=FakePlan(mesh))
    assert {
        (row.kind, row.axes, row.purpose, row.count, row.asynchronous): row.elements
        for row in found.collectives
        if not row.scalar
    } == rows
    assert found.memory == {}


def test_all_devices_are_all_axes():
    text = """HloModule all, num_partitions=8

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %all-reduce = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add
}

%add (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %sum = f32[] add(%p, %q)
}
"""
    mesh = AbstractMesh((1, 2, 4), ("copies", "a", "b"))
    assert audit(Stored(text), plan=FakePlan(mesh)).collectives[0].axes == ("a", "b")
    assert audit(Stored(text)).collectives[0].axes is None


def test_a_backend_without_text():
    with pytest.raises(GShardError, match="no text"):
        audit(Stored(None))


def test_a_function_that_is_not_jitted():
    with pytest.raises(GShardError, match=r"step=a function has no.*jax\.jit or nnx\.jit"):
        audit(train, *train_arguments())


WRITTEN = """HloModule m
ENTRY main {
  x = f32[4] parameter(0)
  ROOT y = f32[8] all-gather(x), replica_groups={{0,1}}, dimensions={0}, metadata={op_name="OP"}
}
"""


@pytest.mark.parametrize("name", ["all_gather", "all_gather_invariant", "pbroadcast", "copy"])
def test_what_a_user_writes_is_the_users(name):
    text = WRITTEN.replace("OP", f"jit(f)/shard_map/{name}")
    (row,) = collective_rows(read_program(text), None)
    assert row.purpose == ("compiler" if name == "copy" else "user")


@pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")
def test_one_element_of_an_array_on_a_device_is_no_scalar():
    params = {"w": jnp.ones(8), "scale": jnp.ones(())}
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)), gshard.make_mesh(), "os", min_shard_size=0
    )
    step = gshard.make_train_step(lambda p, x: p["scale"] * (p["w"].sum() * x).mean(), plan)
    found = audit(step, state, np.ones((16, 4), np.float32))
    for kind in (AG, RS, AR):
        assert found.elements(kind) == found.budget.elements(kind)


def test_a_gather_of_one_element_from_each_device_can_be_over_budget():
    mesh = gshard.make_mesh()
    whole = jax.jit(lambda w: w * 2, out_shardings=NamedSharding(mesh, P()))
    w = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("shard")))
    found = audit(whole, w, budget=Budget("dp", 8, {}, ()))
    assert found.exceeded == ("all-gather for compiler: the budget is 0 elements, found 8",)


@pytest.mark.parametrize("case", ["more", "as much", "backward", "branch", "loop", "other kind"])
def test_the_forward_pass_of_a_loss_has_a_budget(case):
    scope = "jvp(needed by sum at model.py:3)"
    scope = f"transpose({scope})" if case == "backward" else scope
    text = WRITTEN.replace("OP", f"jit(f)/{scope}/all_gather")
    (row,) = collective_rows(read_program(text), None)
    assert (row.purpose, row.backward) == ("loss", case == "backward")
    row = dataclasses.replace(row, conditional=case == "branch")
    if case == "loop":
        row = dataclasses.replace(row, times=None, elements=None)
    kind = "all-to-all" if case == "other kind" else "all-gather"
    budget = Budget("dp", 2, {}, (Traffic(kind, "loss", 8 if case == "as much" else 7, 0),))
    found = Audit((row,), {}, budget)
    message = "all-gather for loss: the budget is 7 elements, found 8"
    assert found.exceeded == ((message,) if case == "more" else ())
    assert ("loss (backward)" in str(found)) == row.backward


def _in_a_loop(x, w):
    """XLA finds the length of this loop, JAX does not look for it."""

    def step(carry):
        i, x = carry
        x = jnp.tanh(x @ w)
        return i + 1, x - jax.nn.softmax(x, axis=0) @ w.T @ w

    return jax.lax.while_loop(lambda carry: carry[0] < 3, step, (0, x))[1]


NO_ALARM = {
    "maximum": lambda p, b: (jnp.tanh(b["x"] @ p["w"]).max(0) ** 2).mean(),
    "softmax of the batch": lambda p, b: (jax.nn.softmax(b["x"] @ p["w"], axis=0) ** 2).mean(),
    "contrastive": lambda p, b: jax.nn.logsumexp((z := b["x"] @ p["w"]) @ z.T, axis=1).mean(),
    "loop": lambda p, b: (
        jax.lax.stop_gradient(_in_a_loop(b["x"], p["w"])) * (b["x"] @ p["w"])
    ).mean(),
}


@pytest.mark.parametrize("name", quick(NO_ALARM, ["maximum", "loop"]))
def test_what_a_loss_sends_as_it_should_raises_no_alarm(name):
    params = {"w": np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)}
    x = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)),
        gshard.make_mesh(devices=jax.devices()[:4]),
        "os",
        min_shard_size=0,
    )
    step = gshard.make_train_step(NO_ALARM[name], plan)
    found = gshard.audit(step, state, {"x": x})
    assert [row for row in found.collectives if row.purpose == "loss"]
    assert found.exceeded == ()
    assert any(x.at_least for x in step.budget.communicated) == (name == "loop")


def test_what_xla_sends_over_the_users_own_axes_has_no_budget():
    mesh = gshard.make_mesh(extra={"model": 2})
    specs = {"w": P(None, "model"), "v": P("model", None)}
    shapes = {"w": (16, 64), "v": (64, 16)}
    params = {
        k: jax.device_put(np.ones(shapes[k], np.float32), NamedSharding(mesh, specs[k]))
        for k in shapes
    }
    state, plan = gshard.shard_train_state(
        (params, optax.adam(1e-3)), mesh, "p_g_os", min_shard_size=0
    )
    step = gshard.make_train_step(lambda p, x: jnp.square(x @ p["w"] @ p["v"]).mean(), plan)
    found = gshard.audit(step, state, np.ones((8, 16), np.float32))
    over_model = [row for row in found.collectives if row.axes == ("model",)]
    assert {row.purpose for row in over_model if not row.scalar} == {"user"}
    assert found.exceeded == ()


def test_a_cpu_program_without_a_mesh_has_no_peak():
    assert "peak" not in gshard.audit(jax.jit(lambda x: x @ x), jnp.ones((8, 8))).memory
