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
from gshard.sequence import ring
from gshard.sequence.attention import of_library
from gshard.sequence.blocks import Masking
from gshard.sequence.ring import SAVED
from tests.tiers import quick

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
        error = np.abs(x - y).max() / (np.abs(y).max() or 1)  # d_q is 0 with one key
        assert error <= tolerance, f"{name} is off by {error:.1e} of the largest entry"


CASES = [
    *[Case(n, by) for n in (2, 3, 4, 5, 8) for by in ("ring", "gather")],
    *[Case(n, "ulysses", heads=n * 2, kv_heads=n) for n in (2, 3, 4, 5, 8)],
    *[Case(n, by, causal=False) for n in (3, 8) for by in ("ring", "gather")],
    *[Case(n, by, order="zigzag") for n in (2, 3, 5, 8) for by in ("ring", "gather")],
    *[Case(4, by, order="zigzag", causal=False) for by in ("ring", "gather", "ulysses")],
    # several blocks, padded ones, and heads, features and tokens that are odd
    *[Case(3, by, tokens=11, heads=3, kv_heads=3, block_size=4) for by in ("ring", "gather")],
    Case(3, "ulysses", tokens=11, heads=9, kv_heads=3, features=(5, 7), block_size=4),
    *[Case(3, "ring", tokens=n, order="zigzag", block_size=3) for n in (12, 14)],
    Case(2, tokens=13, causal=False, features=(3, 1), block_size=5),
    # groups of queries share keys
    *[Case(4, by, heads=12, kv_heads=n) for by in ("ring", "ulysses") for n in (1, 2, 3, 6)],
    Case(2, "gather", heads=6, kv_heads=2),
    # windows: of one token, within a slice, just over its end, over several slices, over all
    *[Case(4, window=n) for n in (1, 5, 13, 14, 30, 100)],
    *[Case(5, window=n, causal=False, tokens=6) for n in (1, 4, 7, 8, 13, 14, 100)],
    *[Case(8, window=n, tokens=6, block_size=4) for n in (3, 9, 23)],
    *[Case(4, by, window=9) for by in ("gather", "ulysses")],
    *[Case(4, by, window=17, causal=False) for by in ("gather", "ulysses")],
    *[Case(4, by, window=9, order="zigzag") for by in ("ring", "gather", "ulysses")],
    Case(3, window=9, order="zigzag", causal=False, heads=3, kv_heads=3),
    # several documents in a sequence, and masks
    *[Case(4, by, documents=True, block_size=5) for by in ("ring", "ulysses", "gather")],
    *[Case(4, by, documents=True, order="zigzag") for by in ("ring", "ulysses", "gather")],
    *[Case(4, by, mask="shared", block_size=5) for by in ("ring", "ulysses", "gather")],
    *[Case(4, by, mask="heads", kv_heads=2) for by in ("ring", "ulysses", "gather")],
    *[Case(4, by, mask="heads", order="zigzag") for by in ("ring", "ulysses", "gather")],
    Case(3, documents=True, mask="shared", window=20, causal=False, tokens=10, block_size=4),
]  # fmt: skip


QUICK = [
    Case(4),
    Case(2, "gather"),
    Case(3, "ulysses", heads=6, kv_heads=3),
    Case(3, causal=False),
    Case(5, order="zigzag"),
    Case(3, "gather", order="zigzag"),
    Case(3, tokens=11, heads=3, kv_heads=3, block_size=4),
    Case(3, tokens=14, order="zigzag", block_size=3),
    Case(4, "ulysses", heads=12, kv_heads=2),
    *[Case(4, window=n) for n in (1, 13, 14)],
    *[Case(5, window=n, causal=False, tokens=6) for n in (8, 14)],
    Case(4, documents=True, block_size=5),
    Case(4, "gather", mask="heads", order="zigzag"),
    Case(4, "ulysses", mask="heads", order="zigzag"),
]  # fmt: skip


@pytest.mark.parametrize("case", quick(CASES, QUICK), ids=str)
def test_it_equals_one_device(case):
    arrays = inputs(case)
    d_out = arrays.pop("d_out")
    found = value_and_gradients(sharded(case), d_out, **arrays)
    expected = value_and_gradients(partial(reference, case), d_out, **arrays)
    assert_equal(found, expected)


ON_ONE_DEVICE = [
    Case(1, by, kv_heads=2, window=window, block_size=5, documents=documents)
    for by in ("ring", "ulysses", "gather")
    for window, documents in ((None, True), (7, False))
]


@pytest.mark.parametrize("case", quick(ON_ONE_DEVICE, ON_ONE_DEVICE[:2]), ids=str)
def test_without_the_axis_it_is_attention_on_one_device(case):
    arrays = inputs(case)
    d_out = arrays.pop("d_out")
    options = {x: getattr(case, x) for x in ("causal", "window", "by", "block_size")}
    attend = partial(sequence.attention, **options, order="zigzag")
    found = value_and_gradients(attend, d_out, **arrays)
    assert_equal(found, value_and_gradients(partial(reference, case), d_out, **arrays))


@pytest.mark.parametrize("by", quick(["ring", "ulysses", "gather"], ["ring"]))
def test_bfloat16_differs_by_its_rounding(by):
    case = Case(4, by, dtype=jnp.bfloat16, kv_heads=2, block_size=5)
    arrays = inputs(case)
    d_out = arrays.pop("d_out")
    found = value_and_gradients(sharded(case), d_out, **arrays)
    assert [x.dtype for x in found] == [jnp.bfloat16] * 4
    assert_equal(found, value_and_gradients(partial(reference, case), d_out, **arrays), 1.5e-2)


def test_a_query_without_keys_gives_zeros_and_no_gradient():
    case = Case(4, mask="shared", causal=False)
    arrays = inputs(case)
    arrays["mask"][:, :, 5] = False
    d_out = arrays.pop("d_out")
    out, d_q, d_k, d_v = value_and_gradients(sharded(case), d_out, **arrays)
    assert not out[:, 5].any() and not d_q[:, 5].any()
    expected = value_and_gradients(partial(reference, case), d_out, **arrays)
    assert_equal((out, d_q, d_k, d_v), expected)


LOOPS = [{}, {"causal": False}, {"order": "zigzag"}]
LOOPS += [{"window": n, "causal": causal} for n in (20, 30) for causal in (True, False)]


@pytest.mark.parametrize("by", quick(["ring", "gather"], ["ring"]))
@pytest.mark.parametrize("options", quick(LOOPS, [LOOPS[-1]]))
def test_a_loop_over_many_hops(by, options, monkeypatch):
    monkeypatch.setattr(ring, "UNROLLED", 1)  # also of a window
    case = Case(8, by, tokens=6, **options)
    arrays = inputs(case)
    d_out = arrays.pop("d_out")
    found = value_and_gradients(sharded(case), d_out, **arrays)
    assert_equal(found, value_and_gradients(partial(reference, case), d_out, **arrays))


def layers(attend: Any, remat: Any, scanned: bool) -> Any:
    """Three layers of attention, each with weights of its own."""

    def layer(x, w):
        q, k, v = jnp.split(x @ w, 3, -1)
        heads = [y.reshape(*y.shape[:2], 4, -1) for y in (q, k, v)]
        return x + attend(*heads).reshape(x.shape), None

    body = remat(layer) if remat else layer

    def model(weights, x):
        if scanned:
            return jax.lax.scan(body, x, weights)[0]
        for w in weights:
            x, _ = body(x, w)
        return x

    return model


REMAT = {
    "": None,
    "all": jax.checkpoint,
    "named": partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(SAVED)),
}


LAYERS = [
    (by, remat, scanned)
    for by in ("ring", "ulysses", "gather")
    for remat in REMAT
    for scanned in (False, True)
]


@pytest.mark.parametrize(("by", "remat", "scanned"), quick(LAYERS, [("ring", "named", True)]))
def test_layers_with_remat_and_in_a_scan(by, remat, scanned):
    case = Case(4, by)
    rng = np.random.default_rng(1)
    weights = jnp.asarray(rng.normal(size=(3, 24, 72)) * 0.2, jnp.float32)
    x, d_out = (jnp.asarray(rng.normal(size=(2, 48, 24)), jnp.float32) for _ in range(2))
    mesh = Mesh(np.array(jax.devices()[:4]), ("sequence",))
    tokens = P(None, "sequence")

    def gradients(model, reduce, weights, x, d_out):
        out, back = jax.vjp(model, weights, x)
        d_weights, d_x = back(d_out)
        return out, d_x, *reduce(d_weights)

    attend = partial(sequence.attention, causal=True, by=by)
    both = partial(
        gradients,
        layers(attend, REMAT[remat], scanned),
        lambda x: [jax.lax.psum(x, "sequence")],
    )
    out_specs = (tokens, tokens, P())
    run = jax.shard_map(
        both, mesh=mesh, in_specs=(P(), tokens, tokens), out_specs=out_specs, check_vma=False
    )
    plain = partial(gradients, layers(partial(reference, case), None, False), lambda x: [x])
    assert_equal(
        (*jax.jit(run)(weights, x, d_out), d_out), (*jax.jit(plain)(weights, x, d_out), d_out)
    )


def test_rows_over_one_axis_and_the_sequence_over_another():
    case = Case(4, heads=2, kv_heads=1)
    arrays = inputs(case)
    d_out = arrays.pop("d_out")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "sequence"))
    spec = P("data", "sequence")
    run = jax.shard_map(
        partial(sequence.attention, causal=True), mesh=mesh, in_specs=spec, out_specs=spec,
        check_vma=False,
    )  # fmt: skip
    found = value_and_gradients(run, d_out, **arrays)
    assert_equal(found, value_and_gradients(partial(reference, case), d_out, **arrays))


def test_another_name_of_the_axis():
    case = Case(4, causal=False)
    arrays = inputs(case)
    d_out = arrays.pop("d_out")
    mesh = Mesh(np.array(jax.devices()[:4]), ("tokens",))
    spec = P(None, "tokens")
    run = jax.shard_map(
        partial(sequence.attention, axis="tokens"), mesh=mesh, in_specs=spec, out_specs=spec,
        check_vma=False,
    )  # fmt: skip
    found = value_and_gradients(run, d_out, **arrays)
    assert_equal(found, value_and_gradients(partial(reference, case), d_out, **arrays))


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window": 5}, {"window": 5, "causal": False}, {"mask": "heads"}],
)
def test_the_function_of_jax_that_cudnn_is_reached_by(options):
    """By its implementation for every platform: masks, windows and groups mean the same."""
    case = Case(1, kv_heads=2, **options)
    arrays = inputs(case)
    d_out, mask = arrays.pop("d_out"), arrays.pop("mask", None)
    masking = Masking(case.causal, case.window)
    call = partial(of_library, mask=mask, masking=masking, scale=6**-0.5, implementation="xla")
    plain = partial(reference, case, mask=mask)
    found = value_and_gradients(call, d_out, **arrays)
    assert_equal(found, value_and_gradients(plain, d_out, **arrays))


def test_cudnn_is_called_for_the_heads_of_a_device():
    case = Case(4, "ulysses", heads=8, kv_heads=2, dtype=jnp.bfloat16, tokens=16, features=(8, 8))
    arrays = inputs(case)
    del arrays["d_out"]
    attend = partial(sequence.attention, causal=True, by="ulysses", implementation="cudnn")
    try:
        traced = str(jax.make_jaxpr(sharded(case, attend))(**arrays))
    except RuntimeError as error:  # needs the packages, but no GPU
        pytest.skip(str(error))
    assert "dot_product_attention_fwd" in traced and "bf16[2,64,2,8]" in traced


def test_blocks_of_a_long_sequence_grow():
    """So that a table of all pairs of blocks stays small."""
    long = jax.ShapeDtypeStruct((1, 2**20, 1, 4), jnp.bfloat16)
    traced = jax.make_jaxpr(partial(sequence.attention, causal=True))(long, long, long)
    assert max(x.size for x in traced.consts) <= 256 * 257
