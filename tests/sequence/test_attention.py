"""Attention of a sharded sequence equals that of one device, in values and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from gshard import sequence

P = jax.P
TOLERANCE = 2e-6  # of the largest entry


class Case(NamedTuple):
    """Sizes of an attention, and its options."""

    devices: int = 4
    by: str = "ring"
    tokens: int = 12  # of a device
    heads: int = 4
    kv_heads: int = 4
    causal: bool = True
    window: int | None = None
    order: str = "contiguous"
    documents: bool = False
    mask: str = ""  # "shared" or "heads"
    features: tuple[int, int] = (6, 6)
    block_size: int = 512
    dtype: Any = jnp.float32

    def __str__(self) -> str:
        changed = [x for x in self._fields if getattr(self, x) != self._field_defaults[x]]
        return "-".join(f"{x}={getattr(self, x)}" for x in changed) or "plain"


def inputs(case: Case, batch: int = 2) -> dict[str, Any]:
    """Random arrays of the whole sequence, by position; other numbers on every device."""
    rng, tokens = np.random.default_rng(0), case.tokens * case.devices
    features, of_value = case.features

    def draw(heads: int, size: int) -> Any:
        return jnp.asarray(rng.normal(size=(batch, tokens, heads, size)), case.dtype)

    found: dict[str, Any] = {
        "q": draw(case.heads, features),
        "k": draw(case.kv_heads, features),
        "v": draw(case.kv_heads, of_value),
        "d_out": draw(case.heads, of_value),
    }
    if case.documents:
        found["segment_ids"] = np.sort(rng.integers(0, 3, (batch, tokens)), 1)
    if case.mask:
        heads = case.heads if case.mask == "heads" else 1
        found["mask"] = rng.random((1 if heads > 1 else batch, heads, tokens, tokens)) < 0.6
    return found


def reference(case: Case, q, k, v, segment_ids=None, mask=None) -> jax.Array:
    """The equation of attention, with an array of all scores."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, case.heads // case.kv_heads, 2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    at = np.arange(q.shape[1])
    ahead = at[None, :] - at[:, None]
    allowed = jnp.broadcast_to(jnp.array(True), scores.shape)
    if case.causal:
        allowed &= ahead <= 0
    if case.window:
        allowed &= np.abs(ahead) < case.window
    if segment_ids is not None:
        allowed &= (segment_ids[:, :, None] == segment_ids[:, None])[:, None]
    if mask is not None:
        allowed &= mask
    weights = jax.nn.softmax(jnp.where(allowed, scores, -1e30), -1)
    weights = jnp.where(allowed.any(-1, keepdims=True), weights, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def sharded(case: Case, attend=None, **shard_map) -> Any:
    """`attention` over a mesh, on arrays of the whole sequence by position."""
    mesh = Mesh(np.array(jax.devices()[: case.devices]), ("sequence",))
    options = {x: getattr(case, x) for x in ("causal", "window", "by", "order", "block_size")}
    attend = attend or partial(sequence.attention, **options)
    reorder = partial(sequence.zigzag, devices=case.devices)
    back = partial(sequence.unzigzag, devices=case.devices)
    if case.order == "contiguous":
        reorder = back = lambda x, dim=1: x

    def call(q, k, v, segment_ids=None, mask=None):
        rows = {"segment_ids": P(None, "sequence"), "mask": P(None, None, "sequence")}
        named = {"segment_ids": segment_ids, "mask": mask}
        named = {x: y for x, y in named.items() if y is not None}
        dims = {x: 1 if x == "segment_ids" else 2 for x in named}
        named = {x: reorder(y, dim=dims[x]) for x, y in named.items()}
        run = jax.shard_map(
            lambda q, k, v, named: attend(q, k, v, **named),
            mesh=mesh,
            in_specs=(*[P(None, "sequence")] * 3, {x: rows[x] for x in named}),
            out_specs=P(None, "sequence"),
            check_vma=False,
            **shard_map,
        )
        return back(run(*(reorder(x) for x in (q, k, v)), named))

    return call


def value_and_gradients(call, d_out, q, k, v, **named) -> Any:
    """Outputs, and the gradients of q, k and v for one gradient of the outputs."""

    @jax.jit
    def both(q, k, v):
        out, back = jax.vjp(lambda q, k, v: call(q, k, v, **named), q, k, v)
        return out, *back(d_out.astype(out.dtype))

    return both(q, k, v)


def assert_equal(found, expected, tolerance=TOLERANCE):
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        x, y = (np.asarray(a, np.float64) for a in (x, y))
        assert np.isfinite(x).all(), name
        error = np.abs(x - y).max() / np.abs(y).max()
        assert error <= tolerance, f"{name} is off by {error:.1e} of the largest entry"


CASES = [
    *[Case(n, by) for n in (2, 3, 4, 5, 8) for by in ("ring", "gather")],
    *[Case(n, "ulysses", heads=n * 2, kv_heads=n) for n in (2, 3, 4, 5, 8)],
    *[Case(n, by, causal=False) for n in (3, 8) for by in ("ring", "gather")],
    *[Case(n, by, order="zigzag") for n in (2, 3, 5, 8) for by in ("ring", "gather")],
    *[Case(4, by, order="zigzag", causal=False) for by in ("ring", "gather", "ulysses")],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_equals_one_device(case):
    arrays = inputs(case)
    d_out = arrays.pop("d_out")
    found = value_and_gradients(sharded(case), d_out, **arrays)
    expected = value_and_gradients(partial(reference, case), d_out, **arrays)
    assert_equal(found, expected)
