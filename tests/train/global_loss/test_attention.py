"""cuDNN's attention kernels, traced for a GPU: they keep the examples where they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.train.global_loss.placement import PARTIAL, REPLICATED, sharded
from tests.train.global_loss.placed import AXIS, Placed

EXAMPLES, LENGTH, HEADS = 6, 64, 2
QUERY = np.zeros((EXAMPLES, LENGTH, HEADS, 64), np.float32)
BIAS = np.zeros((1, HEADS, LENGTH, LENGTH), np.float32)
LENGTHS = np.full(EXAMPLES, LENGTH // 2, np.int32)
EACH = sharded(0)


def attention(q, bias=None, lengths=None, **options):
    q, bias = q.astype(jnp.bfloat16), None if bias is None else bias.astype(jnp.bfloat16)
    return jax.nn.dot_product_attention(
        q,
        q,
        q,
        bias,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
        **options,
    )


@pytest.fixture(autouse=True)
def _traced():
    try:
        jax.make_jaxpr(attention)(QUERY)
    except RuntimeError as error:  # needs the packages, but no GPU
        pytest.skip(str(error))


def traced(f, args, places):
    """Evaluates `f` on three devices, without computing anything; `jax.vmap` of it has no bias."""
    placed = Placed(f, args, 3)
    none = [None] * len(placed.closed.out_avals)
    mapped = jax.shard_map(
        lambda *local: placed.part(places, none, *local)[1],
        mesh=jax.sharding.Mesh(np.array(jax.devices()[:3]), (AXIS,)),
        in_specs=tuple(jax.P(AXIS) if p == EACH else jax.P() for p in places),
        out_specs=jax.P(),
        check_vma=False,
    )
    jax.eval_shape(mapped, *args)
    return placed


def test_the_forward_pass():
    placed = traced(lambda q: attention(q, is_causal=True), [QUERY], [EACH])
    assert not placed.transfers and placed.results == [EACH]


@pytest.mark.parametrize(
    "bias, found", [(BIAS, PARTIAL), (np.tile(BIAS, (EXAMPLES, 1, 1, 1)), EACH)]
)
def test_the_backward_pass(bias, found):
    """The gradient of a bias that all examples share is a sum over them."""

    def gradients(q, bias, lengths):
        def loss(q, bias):
            return jnp.vdot(attention(q, bias, lengths).astype(jnp.float32), q)

        return jax.grad(loss, (0, 1))(q, bias)

    args = [QUERY, bias, LENGTHS]
    placed = traced(gradients, args, [EACH, EACH if len(bias) > 1 else REPLICATED, EACH])
    assert not placed.transfers and placed.results == [EACH, found]
