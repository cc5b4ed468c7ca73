"""A wrong argument is refused with its name, its value, and values that fit."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from gshard import GShardError, sequence

P = jax.P
TOKENS = P(None, "sequence")


def x(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


CUDNN = {"implementation": "cudnn", "by": "ulysses"}
Q, K = x(2, 6, 4, 8), x(2, 6, 2, 8)

WRONG = {
    "q needs four dimensions": ((x(2, 6, 8), K, K), {}, r"q has shape \(2, 6, 8\): .*four dim"),
    "tokens of k": (
        (Q, x(2, 5, 2, 8), K), {},
        r"^k has 5 tokens \(dimension 1\) and q has 6: .*self-attention only.*product_attention",
    ),
    "batch of v": ((Q, K, x(1, 6, 2, 8)), {}, r"v has shape \(1, 6, 2, 8\) and q .*batch"),
    "integers": ((x(2, 6, 4, 8, dtype=int), K, K), {}, "q has dtype int32: .*floating"),
    "two dtypes": ((Q, x(2, 6, 2, 8, dtype=jnp.bfloat16), K), {}, "k has dtype bfloat16 .*cast"),
    "heads of v": ((Q, K, x(2, 6, 4, 8)), {}, "k has 2 heads .* and v has 4"),
    "features": ((Q, x(2, 6, 2, 9), K), {}, "q has 8 features .* and k has 9"),
    "no heads": ((Q, x(2, 6, 0, 8), x(2, 6, 0, 8)), {}, "must not be empty"),
    "a multiple of heads": ((Q, *2 * [x(2, 6, 3, 8)]), {}, "k may have 1, 2 or 4"),
    "by": ((Q, K, K), {"by": "rings"}, "by='rings' is unknown: .*'ring'.*Did you mean 'ring'"),
    "order": ((Q, K, K), {"order": "zig-zag"}, "order='zig-zag' .*Did you mean 'zigzag'"),
    "no window": ((Q, K, K), {"window": 0}, "window=0 must be a whole number of tokens, 1 or"),
    "half a window": ((Q, K, K), {"window": 2.5}, "window=2.5 must be a whole number"),
    "no block": ((Q, K, K), {"block_size": 0}, "block_size=0 must be"),
    "causal": ((Q, K, K), {"causal": "yes"}, "causal='yes' must be True or False"),
    "scale": ((Q, K, K), {"scale": "big"}, "scale='big' must be a number. Multiply q"),
    "axis": ((Q, K, K), {"axis": ("a", "b")}, "axis=.*must be the name of one mesh axis"),
    "mask of floats": ((Q, K, K), {"mask": x(1, 1, 6, 6)}, "dtype float32: .*booleans.*dtype=bool"),
    "shape of mask": (
        (Q, K, K), {"mask": x(2, 3, 6, 6, dtype=bool)},
        r"mask has shape \(2, 3, 6, 6\): it must be \(2 or 1, 4 or 1, 6, 6\).*segment_ids=",
    ),
    "implementation": ((Q, K, K), {"implementation": "flash"}, "pass None or 'xla' or 'cudnn'"),
    "cudnn by ring": ((Q, K, K), CUDNN | {"by": "ring"}, "cudnn\" needs by=\"ulysses\".*by='ring'"),
    "cudnn of documents": (
        (Q, K, K), CUDNN | {"segment_ids": x(2, 6, dtype=int)}, "cudnn\" takes no segment_ids",
    ),
    "cudnn of a window": ((Q, K, K), CUDNN | {"window": 3}, "window=3 only with causal=True"),
    "cudnn in float32": ((Q, K, K), CUDNN, "bfloat16 or float16, and q has dtype float32: cast"),
    "cudnn of wide values": (
        [y.astype(jnp.bfloat16) for y in (Q, K, x(2, 6, 2, 9))], CUDNN, "v has 9 .*and q 8",
    ),
    "segments": ((Q, K, K), {"segment_ids": x(2, 6)}, r"segment_ids is float32 .*integers "),
    "shape of segments": ((Q, K, K), {"segment_ids": x(6, dtype=int)}, r"of shape \(6,\): it must"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_attention(case):
    arrays, options, message = WRONG[case]
    with pytest.raises(GShardError, match=message):
        sequence.attention(*arrays, **options)


def on_four(fun: Any, *arrays: Any, spec: Any = TOKENS) -> Any:
    mesh = Mesh(np.array(jax.devices()[:4]), ("sequence",))
    run = jax.shard_map(fun, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.eval_shape(run, *arrays)


def test_ulysses_names_the_devices_and_heads_that_fit():
    q = x(1, 8, 6, 8)
    message = (
        'by="ulysses" gives each of 4 devices some of the heads, but q has 6. Shard the sequence '
        'over 1, 2, 3 or 6 devices, use a multiple of 4 heads, or by="ring".'
    )
    with pytest.raises(GShardError) as caught:
        on_four(partial(sequence.attention, by="ulysses"), q, q, q)
    assert str(caught.value) == message


def test_zigzag_needs_an_even_slice():
    q = x(1, 12, 4, 8)
    message = "it has 3 tokens. Pad the sequence to a multiple of 8 tokens"
    for fun in (lambda x: sequence.attention(x, x, x, order="zigzag"),
                lambda x: sequence.shift_left(x, order="zigzag"),
                lambda x: sequence.positions(x, order="zigzag")):  # fmt: skip
        with pytest.raises(GShardError, match=message):
            on_four(fun, q)


def test_a_mask_has_the_keys_of_all_devices():
    q, mask = x(1, 12, 4, 8), jnp.ones((1, 1, 12, 3), bool)
    attend = lambda q, mask: sequence.attention(q, q, q, mask=mask[:, :, :3])  # noqa: E731
    with pytest.raises(GShardError, match=r"it must be \(1 or 1, 4 or 1, 3, 12\)"):
        on_four(attend, q, mask, spec=(TOKENS, P()))


WRONG_CALLS = {
    "positions of a vector": (lambda: sequence.positions(x(5)), r"x has shape \(5,\): .*two dim"),
    "no tokens": (lambda: sequence.positions(0), "x=0 must be a whole number of tokens"),
    "order of positions": (lambda: sequence.positions(3, order="z"), "order='z' is unknown"),
    "shift of a vector": (lambda: sequence.shift_left(x(5)), r"tokens has shape \(5,\)"),
    "several fills": (lambda: sequence.shift_right(x(1, 5), x(1)), r"fill has shape \(1,\): pass"),
    "a fill that would wrap": (
        lambda: sequence.shift_left(x(1, 5, dtype=jnp.uint8), -100),
        "fill=-100 does not fit uint8, .*from 0 to 255",
    ),
    "half a token": (
        lambda: sequence.shift_right(x(1, 5, dtype=int), 2.5),
        "fill=2.5 does not fit int32",
    ),
    "no number": (
        lambda: sequence.shift_left(x(1, 5, dtype=int), np.nan),
        "fill=nan does not fit int32",
    ),
    "cut for zig-zag": (
        lambda: sequence.zigzag(x(1, 6), 2),
        "6 tokens along dim=1, which zig-zag .*multiple of 4",
    ),
    "no such dimension": (lambda: sequence.zigzag(x(4), 2), r"dim=1 is not a dimension .*\(4,\)"),
    "devices": (lambda: sequence.unzigzag(x(1, 4), 0), "devices=0 must be"),
    "dimension of a sum": (lambda: sequence.sum(x(4)), r"dim=1 is not a dimension .*\(4,\)"),
    "where": (
        lambda: sequence.mean(x(2, 3, 4), where=x(2, 3, dtype=bool)),
        r"where has shape \(2, 3\), .*\(2, 3, 4\).*where\[..., None\]",
    ),
    "weights as where": (
        lambda: sequence.mean(x(2, 3), where=x(2, 3)),
        "where has dtype float32: .*where > 0",
    ),
    "axis of size": (lambda: sequence.size(3), "axis=3 must be the name"),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_other_functions(case):
    call, message = WRONG_CALLS[case]
    with pytest.raises(GShardError, match=message):
        call()
