"""Collectives wait for loops with collectives: read off the compiled program, and run."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard._util.jaxpr import all_equations
from gshard.sharding.group import data_group
from gshard.train.comm.loop_order import in_loop_order
from tests.processes import run_together

COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)\(")
BODIES = re.compile(r"(?:body|to_apply|calls|branch_computations)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")

# A scanned GPT, whose head is gathered beside the loop over its layers.
SCRIPT = """
from functools import partial
import jax, numpy as np, optax
import gshard
from examples.gpt import BYTES, GPT, next_byte_loss
gshard.virtual_devices(8)
model = GPT(32, 2, heads=4, scan=True)
batch = np.random.default_rng(0).integers(0, BYTES, (128, 17)).astype(np.uint8)
params = jax.tree.map(np.asarray, model.init(jax.random.key(0), batch[:1, :-1])["params"])

def losses(devices):
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    state, plan = gshard.shard_train_state(
        (params, optax.adamw(1e-3)), mesh, "zero3", min_shard_size=0, scan_axes={"^blocks/": 0}
    )
    step = gshard.make_train_step(partial(next_byte_loss, model), plan)
    for _ in range(10):
        state, metrics = step(state, batch)
        yield float(metrics["loss"])

np.testing.assert_allclose(list(losses(8)), list(losses(1)), rtol=1e-5)
"""


def unordered(text: str) -> list[tuple[str, str]]:
    """Pairs of a loop with collectives and another operation with some, in no order."""
    computations: dict[str, dict[str, tuple[list[str], str]]] = {}
    now: dict[str, tuple[list[str], str]] = {}
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?(%[\w.\-]+) \(.*\{$", line):
            now = computations.setdefault(head[1], {})
        elif made := re.match(r"\s+(?:ROOT )?(%[\w.\-]+) = (.*)", line):
            now[made[1]] = re.findall(r"%[\w.\-]+", made[2].split("metadata=")[0]), made[2]

    def communicates(line: str) -> bool:
        inner = (name for found in BODIES.findall(line) for name in found.split(", "))
        return bool(COLLECTIVE.search(line)) or any(
            communicates(line) for name in inner for _, line in computations[name].values()
        )

    found = []
    for ops in computations.values():
        after: dict[str, set[str]] = {}
        for name, (operands, _) in ops.items():  # operands come first
            after[name] = {x for y in operands if y in after for x in (y, *after[y])}
        talks = [name for name, (_, line) in ops.items() if communicates(line)]
        loops = [name for name in talks if re.search(r" (while|conditional|call)\(", ops[name][1])]
        found += [
            (a, b)
            for a in loops
            for b in talks
            if a != b and a not in after[b] and b not in after[a]
        ]
    return found


def program(micro_batches: int = 1, checkpoint: bool = False) -> str:
    """The compiled step of two stacks with parameters before, between and behind them."""
    shapes = {"before": (64, 64), "one": (3, 64, 64), "between": (64, 64), "two": (3, 64, 64)}
    params = {k: np.ones(s, np.float32) for k, s in (shapes | {"behind": (64, 512)}).items()}

    def loss(params, batch):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        body = jax.checkpoint(layer) if checkpoint else layer
        x = jnp.tanh(batch @ params["before"])
        x = jnp.tanh(jax.lax.scan(body, x, params["one"])[0] @ params["between"])
        return jnp.mean((jax.lax.scan(body, x, params["two"])[0] @ params["behind"]) ** 2)

    state, plan = gshard.shard_train_state(
        (params, optax.adam(0.01)),
        gshard.make_mesh(),
        "zero3",
        min_shard_size=16,
        scan_axes={"^(one|two)$": 0},
    )
    step = gshard.make_train_step(loss, plan, micro_batches=micro_batches, bucket_size=1)
    return step.lower(state, np.ones((8 * micro_batches, 64), np.float32)).compile().as_text() or ""


@pytest.mark.parametrize(("micro_batches", "checkpoint"), [(1, False), (2, True)])
def test_no_collective_overtakes_a_loop(micro_batches, checkpoint):
    text = program(micro_batches, checkpoint)
    assert text.count(" while(") >= 4
    assert unordered(text) == []


def test_the_order_is_what_the_step_adds(monkeypatch):
    """Otherwise the test above would show nothing."""
    monkeypatch.setattr("gshard.train.gradients.in_loop_order", lambda fun, group: fun)
    assert unordered(program())


def on_each_device(fun):
    """A function that runs on each of eight devices, in order and as it is."""
    mesh = gshard.make_mesh()
    each = partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=jax.P("shard"),
        out_specs=jax.P("shard"),
        check_vma=False,
    )
    return jax.jit(each(in_loop_order(fun, data_group(mesh)))), jax.jit(each(fun))


ROWS = jnp.arange(64.0).reshape(64, 1) + 1


def gather(x):
    return jax.lax.all_gather(x, "shard", tiled=True)


def loop_of_gathers(x):
    return jax.lax.scan(lambda x, _: (x + gather(x).sum(), None), x, None, length=3)[0]


def branch_of_gathers(x):
    return jax.lax.cond(x[0, 0] < 0, lambda x: x, lambda x: x + gather(x).sum(), x)


def while_of_gathers(x):
    return jax.lax.while_loop(lambda x: x[0, 0] < 1e4, lambda x: x + gather(x).sum(), x)


def loop_of_a_literal(x):
    return x + jax.lax.scan(lambda s, y: (s + gather(y).sum(), None), 0.0, jnp.stack([x, x]))[0]


def loop_of_a_counter(x):
    _, y = jax.lax.scan(lambda i, y: (i + 1, gather(y)[:8]), 0, jnp.stack([x, 2 * x]))
    return y.sum(0)


def loop_of_a_key(x):
    def body(key, y):
        key, own = jax.random.split(key)
        return key, gather(y)[:8] + jax.random.uniform(own, y.shape)

    return jax.lax.scan(body, jax.random.key(0), jnp.stack([x, 2 * x]))[1].sum(0)


INNER = {
    "of a literal": loop_of_a_literal,
    "of a counter": loop_of_a_counter,
    "of a key": loop_of_a_key,
    "beside a result in a jit": lambda x: sum(
        jax.jit(lambda x: (jnp.sin(x), loop_of_gathers(x)))(x)
    ),
    "beside a result in a checkpoint": lambda x: sum(
        jax.checkpoint(lambda x: (jnp.sin(x), loop_of_gathers(x)))(x)
    ),
    "of complex numbers": lambda x: jnp.abs(loop_of_gathers(x + 1j)),
    "in a linear solver": lambda x: jax.lax.custom_linear_solve(
        lambda y: 2 * y, x, lambda _, b: b / 2 + 0 * loop_of_gathers(b), symmetric=True
    ),
    "scan": loop_of_gathers,
    "cond": branch_of_gathers,
    "while": while_of_gathers,
    "in a jit": jax.jit(loop_of_gathers),
    "in a checkpoint": jax.checkpoint(loop_of_gathers),
    "in a loop": lambda x: jax.lax.scan(
        lambda x, _: (loop_of_gathers(x) + gather(2 * x).sum(), None), x, None, length=2
    )[0],
    "of integers": lambda x: jax.lax.scan(
        lambda i, _: (i + gather(i).sum(), None), x.astype(jnp.int32), None, length=3
    )[0].astype(jnp.float32),
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_values_stay_the_same_and_are_in_order(inner):
    def fun(x):
        before, after = gather(3 * x).sum(), jax.lax.psum((5 * x, 7 * x), "shard")
        return inner(x) + before + after[0].sum() + after[1].sum() + gather(x * x).sum()

    ordered, plain = on_each_device(fun)
    compiled = ordered.lower(ROWS).compile()
    assert unordered(compiled.as_text() or "") == []
    np.testing.assert_array_equal(compiled(ROWS), plain(ROWS))


def test_an_order_that_the_compiler_removes_is_none():
    def fun(x):
        other, looped = jax.lax.optimization_barrier((x, loop_of_gathers(x)))
        return gather(other).sum() + looped

    ordered, plain = on_each_device(fun)
    assert unordered(ordered.lower(ROWS).compile().as_text() or "") == []
    assert unordered(plain.lower(ROWS).compile().as_text() or "")

    def before(x):
        found, other = jax.lax.optimization_barrier((gather(2 * x)[:8], x))
        return loop_of_gathers(other) + found

    ordered, plain = on_each_device(before)
    assert unordered(ordered.lower(ROWS).compile().as_text() or "") == []


def test_a_result_of_a_call_may_be_known_before_its_loop_has_ended():
    def fun(x):
        first, second = jax.checkpoint(lambda x: (jnp.sin(x), loop_of_gathers(x)))(x)
        return gather(first)[:8] + second

    ordered, plain = on_each_device(fun)
    assert unordered(ordered.lower(ROWS).compile().as_text() or "") == []
    np.testing.assert_array_equal(ordered(ROWS), plain(ROWS))


def test_results_wait_for_the_last_loop():
    """What reads them communicates after it, whichever of them it reads."""

    def fun(x):
        return loop_of_gathers(x) * 0 + 1, x * 2

    mesh = gshard.make_mesh()
    spec = jax.P("shard")

    def step(x):
        mapped = jax.shard_map(
            in_loop_order(fun, data_group(mesh)),
            mesh=mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        again = jax.shard_map(gather, mesh=mesh, in_specs=spec, out_specs=jax.P(), check_vma=False)
        one, other = mapped(x)
        return one, again(other)

    compiled = jax.jit(step).lower(ROWS).compile()
    assert unordered(compiled.as_text() or "") == []
    np.testing.assert_array_equal(compiled(ROWS)[1], 2 * ROWS)


def test_nan_and_infinity_pass():
    """The values that the order reads change nothing, whatever they are."""

    def fun(x):
        bad = jax.lax.scan(lambda x, _: (gather(x)[:8] * jnp.inf, None), x - x, None, length=2)[0]
        return gather(x)[:8] + 0 * jnp.isnan(bad)

    ordered, _ = on_each_device(fun)
    np.testing.assert_array_equal(ordered(ROWS)[:8], ROWS[:8])


def test_without_loops_and_on_other_platforms_nothing_is_added():
    def fun(x):
        return gather(x)[:8] + gather(2 * x)[:8]

    def lines(fun):
        equations = all_equations(jax.make_jaxpr(fun)(ROWS).jaxpr)
        return [(x.primitive, x.outvars[0].aval) for x in equations if x.primitive.name != "jit"]

    ordered, plain = on_each_device(fun)
    assert lines(ordered) == lines(plain) != []
    mesh = gshard.make_mesh(devices=jax.devices()[:1])
    assert in_loop_order(fun, data_group(mesh)) is fun


@pytest.mark.slow
def test_a_step_that_gathers_in_loops_and_beside_them_trains(tmp_path):
    """With XLA's own flags, under which JAX 0.12 aborted."""
    (script := tmp_path / "train.py").write_text(SCRIPT)
    ended = run_together(tmp_path, [[script]], [{"XLA_FLAGS": ""}], limit=200)
    assert ended[0].code == 0, ended[0]
