"""The operations of `gshard.sequence` inside a step, and what they communicate."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard.models import llama
from tests.tiers import quick
from tests.train.sequence.models import (
    B,
    D,
    Model,
    T,
    V,
    assert_gradients,
    batch,
    forward,
    init,
    loss_of,
    sharded,
)

HOW = {
    "ring": {"by": "ring", "causal": True},
    "ulysses": {"by": "ulysses", "causal": True},
    "gather": {"by": "gather", "causal": True},
    "window": {"by": "ring", "causal": True, "window": 5},
}


def model_of(how, *parts):
    return Model(parts, tuple(HOW[how].items()))


@pytest.mark.parametrize("order", quick(["contiguous", "zigzag"], ["zigzag"]))
@pytest.mark.parametrize("how", quick(HOW, ["ring", "ulysses"]))
@pytest.mark.parametrize("parts", quick(["", "scan remat"], [""]))
def test_attention_matches_one_device(how, order, parts):
    model = model_of(how, *parts.split())
    loss, params = loss_of(model), init(model)
    state, plan = sharded(params, sequence=4, order=order)
    found = jax.jit(gshard.value_and_grad(loss, plan))(state.params, batch())
    assert_gradients(loss, params, found)


def shifted_loss(params, batch):
    """Uses what needs the neighbouring device, and reductions over sequences."""
    sequence = gshard.sequence
    x = params["embedding"][batch["x"]] * jnp.cos(sequence.positions(batch["x"]))[:, None]
    x = x + sequence.shift_right(x) + sequence.norm(x, keepdims=True)
    scores = jax.nn.log_softmax(x @ params["embedding"].T)
    targets = sequence.shift_left(batch["x"], fill=0)
    found = -jnp.take_along_axis(scores, targets[..., None], -1)[..., 0]
    return sequence.mean(found, where=sequence.positions(batch["x"]) < T - 1).mean()


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_shifts_positions_and_reductions(order):
    rng = np.random.default_rng(0)
    params = {"embedding": rng.normal(size=(V, D)).astype(np.float32)}
    state, plan = sharded(params, sequence=4, order=order)
    found = jax.jit(gshard.value_and_grad(shifted_loss, plan))(state.params, batch())
    assert_gradients(shifted_loss, params, found)


def transfers(loss, params, **how):
    state, plan = sharded(params, sequence=4, **how)
    step = gshard.make_train_step(loss, plan)
    step.lower(state, batch())
    return step


def of_kind(step, kind, file="models.py"):
    """Elements on one device, by the operation."""
    found: Counter[str] = Counter()
    for x in step.loss_transfers:
        if x.kind == kind:
            assert x.axes == ("sequence",)
            assert x.line.startswith(f"{file}:"), x
            found[x.operation] += x.elements * x.times
    return found


def test_a_ring_sends_keys_and_values_once_round():
    step = transfers(loss_of(model_of("ring")), init(model_of("ring")))
    keys = B // 2 * T // 4 * 2 * 3  # of a device
    assert of_kind(step, "collective-permute") == {"gshard.sequence.attention": 3 * 2 * keys}
    assert not of_kind(step, "all-gather")


def test_flaxs_attention_gathers_keys_and_values():
    step = transfers(loss_of(Model()), init(Model()))
    assert of_kind(step, "all-gather") == {"dot_general": 2 * B // 2 * T * D}
    assert not of_kind(step, "collective-permute")


def test_a_layer_in_a_scan_counts_as_often_as_it_runs():
    model = model_of("ulysses", "scan", "remat")
    counts = {x.times for x in transfers(loss_of(model), init(model)).loss_transfers}
    assert counts == {4}  # two layers, in each q and the output, and k and v


@pytest.mark.parametrize(
    ("how", "parts"),
    quick(itertools.product(HOW, ["", "scan remat"]), [("ring", "")]),
)
def test_the_budget_is_what_the_program_sends(how, parts):
    """In the forward pass: the backward pass sends more, and remat once more."""
    model = model_of(how, *parts.split())
    state, plan = sharded(init(model), "dp", sequence=4)
    step = gshard.make_train_step(loss_of(model), plan)
    audit = gshard.audit(step, state, batch())
    sent = forward(step.budget.communicated)
    assert sent == forward(audit.collectives) and sent.total() > 0
    assert audit.exceeded == ()
    less = [dataclasses.replace(x, elements=x.elements - 1) for x in step.loss_transfers]
    short = dataclasses.replace(audit, budget=gshard.budget(plan, loss_transfers=less))
    compared = sent.keys() - {"all-reduce"}
    assert {x.split(":")[0] for x in short.exceeded} == {f"{kind} for loss" for kind in compared}


@pytest.mark.slow
def test_a_maximum_over_the_sequence_exceeds_no_budget():
    """It also sends how many entries tie, which no budget has."""
    model = model_of("ring", "pooling")
    state, plan = sharded(init(model), "dp", sequence=4)
    step = gshard.make_train_step(loss_of(model), plan)
    audit = gshard.audit(step, state, batch())
    assert audit.exceeded == ()
    assert (
        forward(audit.collectives)["all-reduce"] > forward(step.budget.communicated)["all-reduce"]
    )


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_layers_in_a_loop_keep_no_masks(order):
    """JAX computes before a loop, and keeps, what does not depend on what goes through it."""

    def peak(layers):
        sizes = {"layers": layers, "width": 64, "heads": 8, "kv_heads": 4, "mlp": 64}
        setup = llama.setup(vocabulary=32, sequence=8192, attention="ring", **sizes)
        shard = {**setup.shard, "sequence_order": order, "min_shard_size": 0}
        setup = dataclasses.replace(setup, shard=shard)
        found = gshard.forecast(setup, 8, levels="p_g_os", sequence=8)
        return found.levels["p_g_os"].peak

    inputs = 8192 // 8 * 64 * 2  # of a layer, on one device, in bfloat16
    assert peak(3) - peak(1) < 6 * inputs < 8 * 512 * 512  # the mask of one pair of blocks


RUNNING: dict[str, Any] = {
    "sum": lambda total, x: total + x,
    "product": lambda total, x: total * (1 + x / 10),
    "largest": jnp.maximum,
}


@pytest.mark.parametrize("how", RUNNING)
def test_loops_over_slices_with_a_running_result(how):
    """A sum is computed on each device's slices; anything else of all slices."""

    def loss(params, batch):
        x = params["embedding"][batch["x"]]
        slices = jnp.moveaxis(x.reshape(B, 8, -1, D), 1, 0)
        total, found = jax.lax.scan(
            lambda total, x: (RUNNING[how](total, x.mean(1)), jnp.tanh(x).mean()),
            jnp.ones((B, D)),
            slices,
        )
        return jnp.square(total).mean() + found.mean()

    rng = np.random.default_rng(0)
    params = {"embedding": rng.normal(size=(V, D)).astype(np.float32)}
    state, plan = sharded(params, sequence=4)
    gradient = gshard.value_and_grad(loss, plan)
    assert_gradients(loss, params, jax.jit(gradient)(state.params, batch()))
    gathered = of_kind_in(gshard.make_train_step(loss, plan), state, "all-gather")
    assert bool(gathered) == (how != "sum")


def convolution(x, size, padding, dilation=1, groups=1):
    kernel = jnp.cos(jnp.arange(size * D // groups * D)).reshape(size, D // groups, D)
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (1,), padding, rhs_dilation=(dilation,), dimension_numbers=numbers,
        feature_group_count=groups,
    )  # fmt: skip


def padded_convolution(x):
    """As Flax does for `padding="CAUSAL"`."""
    return convolution(jnp.pad(x, ((0, 0), (2, 0), (0, 0))), 3, "VALID")


CONVOLUTIONS = {  # and how many positions a device sends for each of its slices
    "causal": (lambda x: convolution(x, 4, [(3, 0)]), 3),
    "of both sides": (lambda x: convolution(x, 4, "SAME"), 1 + 2),
    "of what follows": (lambda x: convolution(x, 2, [(0, 1)]), 1),
    "dilated": (lambda x: convolution(x, 3, "SAME", dilation=2), 2 + 2),
    "of each feature": (lambda x: convolution(x, 4, [(3, 0)], groups=D), 3),
    "padded before": (padded_convolution, 2),
    "in a loop": (
        lambda x: jax.lax.scan(lambda c, _: (jax.checkpoint(padded_convolution)(c) / 9, c.mean()),
                               x, None, 3)[0], 3 * 2),
    "as wide as a slice": (lambda x: convolution(x, T // 8 + 1, [(T // 8, 0)]), T // 8),
}  # fmt: skip
OTHERS = {
    "strides": lambda x: convolution(x, 3, "SAME")[:, ::2],
    "wider than a slice": lambda x: convolution(x, T // 4 + 2, [(T // 4 + 1, 0)]),
    "padded for two": lambda x: (y := jnp.pad(x, ((0, 0), (2, 0), (0, 0))))[:, 1:-1] * convolution(
        y, 3, "VALID"
    ),
    "not padded": lambda x: convolution(x, 3, "VALID"),
    "padded with ones": lambda x: convolution(
        jnp.pad(x, ((0, 0), (2, 0), (0, 0)), constant_values=1), 3, "VALID"
    ),
}  # fmt: skip


def convolved(use):
    def loss(params, batch):
        x = jnp.tanh(params["embedding"])[batch["x"]]
        return jnp.square(use(x) @ params["out"]).mean() + x.mean()

    rng = np.random.default_rng(0)
    params = {"embedding": rng.normal(size=(V, D)), "out": rng.normal(size=(D, D)) / 5}
    return loss, jax.tree.map(lambda x: x.astype(np.float32), params)


def checked_step(loss, params, order):
    """A step whose gradients are those of one device, and that gathers nothing."""
    state, plan = sharded(params, sequence=4, order=order)
    found = jax.jit(gshard.value_and_grad(loss, plan))(state.params, batch())
    assert_gradients(loss, params, found)
    step = transfers(loss, params, order=order)
    assert not of_kind(step, "all-gather")
    return step


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("how", quick(CONVOLUTIONS, ["of both sides", "padded before"]))
def test_convolutions_send_what_their_kernel_reaches(how, order):
    use, sent = CONVOLUTIONS[how]
    loss, params = convolved(use)
    step = checked_step(loss, params, order)
    permuted = [x for x in step.loss_transfers if x.operation == "conv_general_dilated"]
    slices = 1 if order == "contiguous" else 2
    assert sum(x.elements * x.times for x in permuted) == B // 2 * D * sent * slices
    assert all(x.kind == "collective-permute" for x in permuted)
    assert all(x.line.startswith("test_operations.py:") for x in permuted)


@pytest.mark.parametrize("order", quick(["contiguous", "zigzag"], ["zigzag"]))
@pytest.mark.parametrize("how", quick(OTHERS, ["padded for two", "padded with ones"]))
def test_other_convolutions_match_one_device(how, order):
    loss, params = convolved(OTHERS[how])
    state, plan = sharded(params, sequence=4, order=order)
    found = jax.jit(gshard.value_and_grad(loss, plan))(state.params, batch())
    assert_gradients(loss, params, found)


PICKED = {
    "first": lambda x: x[:, 0],
    "last": lambda x: x[:, -1:],
    "across a seam": lambda x: x[:, 10:14],
    "with strides": lambda x: x[2:, 7:40:5],
    "backwards": lambda x: x[:, 20:7:-4],
}


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("how", quick(PICKED, ["last", "with strides"]))
def test_few_positions_are_not_gathered_for(how, order):
    loss, params = convolved(PICKED[how])
    step = checked_step(loss, params, order)
    assert 0 < of_kind(step, "all-reduce", "test_operations.py")["slice"] <= B // 2 * D * 13


def of_kind_in(step, state, kind):
    step.lower(state, batch())
    return [x for x in step.loss_transfers if x.kind == kind]


def next_rows(x):
    """The next token of each, for the examples that `jax.vmap` gives one by one."""
    return jax.vmap(lambda row: gshard.sequence.shift_left(row[None], fill=1.0)[0])(x)


def next_of_two(x):
    """A mapped dimension before that of the examples."""
    both = jax.vmap(lambda x: gshard.sequence.shift_left(x, fill=1.0))(jnp.stack([x, jnp.sin(x)]))
    return both[0] + both[1]


def attended_rows(x):
    def of_row(row):
        heads = row.reshape(1, T, 4, -1)
        return gshard.sequence.attention(heads, heads, heads, causal=True).reshape(row.shape)

    return jax.vmap(of_row)(x)


def energy_gradient(x):
    """A derivative in the loss, of which that of the step is the second."""

    def energy(x):
        heads = x.reshape(B, T, 4, -1)
        out = gshard.sequence.attention(heads, heads, heads, causal=True).reshape(x.shape)
        return jnp.sum(out * gshard.sequence.shift_left(x, fill=1.0))

    return jax.grad(energy)(x)


@jax.custom_vjp
def doubled_shift(x):
    return gshard.sequence.shift_left(x)


def _forward(x):
    return jax.vjp(gshard.sequence.shift_left, x)


def _backward(back, cotangent):
    return (2 * back(cotangent)[0],)


doubled_shift.defvjp(_forward, _backward)


def attended_start(x):
    """Queries and keys of no device alone: the first tokens are gathered."""
    start = x[:, :10].reshape(B, 10, 4, -1)
    return x + gshard.sequence.attention(start, start, start).mean((1, 2, 3))[:, None, None]


def attended_heads(x):
    """Heads on a mapped dimension; the keys of all of them are the same."""
    queries, keys = x.reshape(B, T, 4, -1), x[..., :4][:, :, None]

    def of_head(q):
        return gshard.sequence.attention(q[:, :, None], keys, keys, by="gather", causal=True)[
            :, :, 0
        ]

    return jax.vmap(of_head, 2, 2)(queries).reshape(x.shape)


def attended_documents(x):
    """Every mapped entry has its own documents, and a mask for all of its examples."""
    heads = jnp.stack([x, jnp.sin(x)], 1).reshape(B, 2, T, 4, -1)
    documents = jnp.arange(T) // jnp.array([[5], [7]])
    masks = jnp.arange(T) % jnp.array([[3], [4]]) > 0

    def of_one(heads, documents, mask):
        documents, mask = (jnp.broadcast_to(x, (B, T)) for x in (documents, mask))
        mask = jnp.broadcast_to(mask[:1, None, None], (1, 1, T, T))
        return gshard.sequence.attention(heads, heads, heads, segment_ids=documents, mask=mask)

    out = jax.vmap(of_one, (1, 0, 0), 3)(heads, documents, masks)
    return out.sum(3).reshape(x.shape)


def heads_of_mapped_examples(x):
    def of_row(row):
        def of_head(q):
            return gshard.sequence.attention(*3 * [q[None, :, None]], causal=True)[0, :, 0]

        return jax.vmap(of_head, 1, 1)(row.reshape(T, 4, -1)).reshape(row.shape)

    return jax.vmap(of_row)(x)


FOLDED = {
    "mapped examples": next_rows,
    "mapped in front": next_of_two,
    "attention of mapped examples": attended_rows,
    "attention of mapped heads": attended_heads,
    "attention of mapped documents": attended_documents,
    "as many as the examples": lambda x: jax.vmap(gshard.sequence.shift_left, 1, 2)(
        jnp.stack([x] * B, 1) * jnp.arange(B)[:, None, None] / B
    ).mean(2),
}
GATHERED = {
    "derivative": energy_gradient,
    "derivative of the user's own": doubled_shift,
    "heads of mapped examples": heads_of_mapped_examples,
}
USES = {
    **FOLDED,
    **GATHERED,
    "replicated operands": attended_start,
    "traced fill": lambda x: gshard.sequence.shift_left(x, fill=x.mean()),
}


def loss_with(use):
    def loss(params, batch):
        x = jnp.tanh(params["embedding"])[batch["x"]]
        return jnp.mean(jnp.square(USES[use](x) @ params["out"] - x))

    rng = np.random.default_rng(0)
    params = {"embedding": rng.normal(size=(V, D)), "out": rng.normal(size=(D, D)) / 5}
    return loss, jax.tree.map(lambda x: x.astype(np.float32), params)


@pytest.mark.filterwarnings("ignore:gshard.sequence.* is transformed inside the loss")
@pytest.mark.parametrize("order", quick(["contiguous", "zigzag"], ["zigzag"]))
@pytest.mark.parametrize("use", USES)
def test_operations_that_jax_transforms(use, order):
    loss, params = loss_with(use)
    state, plan = sharded(params, sequence=4, order=order)
    found = jax.jit(gshard.value_and_grad(loss, plan))(state.params, batch())
    assert_gradients(loss, params, found)


GATHERS = {  # elements on one device, of an operation that gathers anyhow
    "attention of mapped heads": B // 2 * T * 4 * (4 + 4),  # by="gather"
    "attention of mapped documents": B // 2 * T * 2,  # the numbers of the documents
}


@pytest.mark.parametrize("use", quick(FOLDED, ["mapped in front", "attention of mapped documents"]))
def test_vmap_of_an_operation_gathers_nothing(use):
    loss, params = loss_with(use)
    gathered = of_kind(transfers(loss, params), "all-gather", "test_operations.py")
    assert gathered.total() == GATHERS.get(use, 0)


@pytest.mark.parametrize("use", quick(GATHERED, ["derivative"]))
def test_what_is_gathered_for_a_derivative_is_said(use):
    loss, params = loss_with(use)
    state, plan = sharded(params, sequence=4)
    line = r"gshard.sequence.(attention|shift_left) at .*test_operations.py:\d+ is transformed"
    with pytest.warns(gshard.GShardWarning, match=line):
        gshard.make_train_step(loss, plan).lower(state, batch())


def test_another_axis_is_named():
    """It computed attention of gathered keys, in place of the ring that was asked for."""
    mesh = gshard.make_mesh(sequence=2, devices=jax.devices()[:2])
    given = {"w": np.ones((4, 2, 4), np.float32)}, optax.sgd(0.1)
    state, plan = gshard.shard_train_state(given, mesh, "os", min_shard_size=0)

    def loss(p, b):
        q = jnp.einsum("btd,dhf->bthf", b, p["w"])
        return (gshard.sequence.attention(q, q, q, axis="seq") ** 2).mean()

    with pytest.raises(gshard.GShardError, match="axis='seq' is not an axis.* over 'sequence'"):
        gshard.make_train_step(loss, plan)(state, np.ones((2, 8, 4), np.float32))
