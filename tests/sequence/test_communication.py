"""What attention over a sharded sequence communicates and keeps, read off compiled programs."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from gshard import sequence
from gshard.analysis.hlo import read_program
from gshard.sequence.ring import SAVED
from tests.ahead_of_time import found_by
from tests.tiers import quick

P = jax.P
BATCH, TOKENS, HEADS, KV_HEADS, FEATURES = 2, 48, 8, 2, 16
ROW = BATCH * TOKENS * FEATURES  # elements of one head of the whole sequence


def arrays(tokens: int = TOKENS, heads: int = HEADS, kv_heads: int = KV_HEADS) -> Any:
    """Shapes of q, k, v and the gradient of the outputs."""
    sizes = (heads, kv_heads, kv_heads, heads)
    return [jax.ShapeDtypeStruct((BATCH, tokens, n, FEATURES), jnp.float32) for n in sizes]


def compiled(devices: int, backward: bool, remat: Any = None, shapes: Any = None, **options) -> Any:
    """Attention over so many devices, and its gradient if `backward`."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("sequence",))
    spec = P(None, "sequence")
    attend = partial(sequence.attention, causal=True, **options)
    mapped = jax.shard_map(
        remat(attend) if remat else attend, mesh=mesh, in_specs=spec, out_specs=spec,
        check_vma=False,
    )  # fmt: skip

    def both(q, k, v, d_out):
        out, back = jax.vjp(mapped, q, k, v)
        return out, back(d_out)

    inputs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x in shapes or arrays()
    ]
    return jax.jit(both if backward else mapped).lower(*inputs[: 4 if backward else 3]).compile()


def communicated(program: Any) -> dict[str, tuple[int, float]]:
    """Kinds of collectives: how many a device runs, and the elements that it sends."""
    count, sent = Counter(), Counter()
    for x in read_program(program.as_text()).collectives:
        assert x.times is not None and x.wire_bytes is not None
        count[x.kind] += x.times
        sent[x.kind] += x.wire_bytes / 4
    return {kind: (count[kind], sent[kind]) for kind in count}


def assert_permutes(found: Any, hops: int, once: float) -> None:
    """The gradient's permutes: keys in both passes, and their gradients.

    XLA:CPU of JAX 0.10 ignores optimization barriers, so it reuses hops of the forward pass that
    are outside of a loop. The programs for GPU and TPU are tested below.
    """
    count, sent = found["collective-permute"]
    assert 2 * hops <= count <= 3 * hops
    assert sent == count / hops * once


@pytest.mark.parametrize("devices", quick([2, 4, 8], [4]))
def test_ring_sends_keys_and_values_one_hop_fewer_than_devices(devices):
    once = 2 * ROW * KV_HEADS * (devices - 1) / devices
    found = communicated(compiled(devices, backward=False))
    assert found == {"collective-permute": (devices - 1, once)}
    found = communicated(compiled(devices, backward=True))
    assert list(found) == ["collective-permute"]
    assert 3 * (devices - 1) - found["collective-permute"][0] <= 1  # a first hop may be reused
    assert_permutes(found, devices - 1, once)


WINDOWS = [(1, 0), (2, 1), (7, 1), (8, 2), (13, 2), (14, 3)]  # with the hops that they reach


@pytest.mark.parametrize(("window", "hops"), quick(WINDOWS, [(1, 0), (7, 1)]))
def test_a_window_sends_to_as_many_devices_as_it_reaches(window, hops):
    """A slice has 6 tokens: 7 are the token itself and the 6 before it."""
    once = 2 * ROW * KV_HEADS / 8 * hops
    found = communicated(compiled(8, backward=False, window=window))
    assert found == ({"collective-permute": (hops, once)} if hops else {})
    if hops:
        assert_permutes(communicated(compiled(8, backward=True, window=window)), hops, once)


def test_gather_receives_once_and_sends_gradients_home():
    once = 2 * ROW * KV_HEADS * 3 / 4
    assert communicated(compiled(4, backward=False, by="gather")) == {"all-gather": (1, once)}
    found = communicated(compiled(4, backward=True, by="gather"))
    assert found.pop("reduce-scatter") == (1, once)
    assert found in ({"all-gather": (n, n * once)} for n in (1, 2))  # XLA:CPU may reuse the first


@pytest.mark.parametrize(("kv_heads", "sent"), quick([(8, 8), (4, 4), (2, 4), (1, 4)], [(2, 4)]))
def test_ulysses_sends_each_head_once_and_repeats_keys_as_little_as_it_can(kv_heads, sent):
    shapes = arrays(kv_heads=kv_heads)
    found = communicated(compiled(4, backward=False, by="ulysses", shapes=shapes))
    assert list(found) == ["all-to-all"]
    assert found["all-to-all"][1] == (2 * HEADS + 2 * sent) * ROW / 4 * 3 / 4


@pytest.mark.slow
def test_remat_by_name_does_not_run_the_attention_again():
    policy = jax.checkpoint_policies.save_only_these_names(SAVED)
    named = communicated(compiled(4, True, partial(jax.checkpoint, policy=policy)))
    again = communicated(compiled(4, True, jax.checkpoint))
    plain = communicated(compiled(4, True))
    assert named["collective-permute"][0] == plain["collective-permute"][0]
    assert again["collective-permute"][0] >= plain["collective-permute"][0] + 3 - 1


def kept(devices: int, by: str) -> int:
    """Bytes that the backward pass needs of the forward pass, on all devices together."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("sequence",))
    spec = P(None, "sequence")
    mapped = jax.shard_map(
        partial(sequence.attention, causal=True, by=by), mesh=mesh, in_specs=spec, out_specs=spec,
        check_vma=False,
    )  # fmt: skip
    _, back = jax.eval_shape(lambda *x: jax.vjp(mapped, *x), *arrays()[:3])
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(back))


@pytest.mark.parametrize("by", ["ring", "gather"])
def test_what_is_kept_does_not_grow_with_the_devices(by):
    """Queries, keys and values, outputs and one number for each query and head."""
    expected = 4 * ROW * (2 * HEADS + 2 * KV_HEADS) + 4 * BATCH * TOKENS * HEADS
    assert {kept(devices, by) for devices in (2, 4, 8)} == {expected}


@pytest.mark.slow
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_temporary_memory_does_not_grow_with_the_devices(order):
    """With the same number of tokens on each device."""

    def temporary(devices):
        shapes = arrays(tokens=64 * devices)
        found = compiled(devices, backward=True, order=order, block_size=16, shapes=shapes)
        return found.memory_analysis().temp_size_in_bytes

    few = temporary(4)
    assert temporary(8) <= 1.1 * few


@pytest.mark.slow
def test_scores_of_all_tokens_are_never_in_memory():
    """Blocks of 64 tokens need far less than the scores of 512 tokens, 16 MB."""
    shapes = arrays(tokens=1024)
    small = compiled(2, backward=True, block_size=64, shapes=shapes).memory_analysis()
    large = compiled(2, backward=True, block_size=512, shapes=shapes).memory_analysis()
    scores = BATCH * HEADS * 512 * 512 * 4
    assert small.temp_size_in_bytes < scores / 2 < scores < large.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:1x8", "tpu-v5e:2x4"])
def test_programs_for_gpu_and_tpu(target):
    """The last permute, which brings gradients home, has no products left to overlap with."""
    found = found_by("sequence.ring_ahead_of_time", target)
    assert found["ring"]["kinds"] == {"collective-permute": 3 * 7}
    for name in ("ring", *{"line", "grid"} & found.keys()):  # 8 of 4 x 8 devices, and all
        assert found[name]["synchronous"] == 0, name
    assert found["ring"]["starts"] == found["ring"]["beside_products"] + 1
    # bfloat16 keys and values in both passes, and their gradients in float32
    assert found["ring"]["sent"] == (2 + 2 + 4) * found["slice"] * 7
    assert found["gather"]["kinds"] == {"all-gather": 2, "reduce-scatter": 1}
    assert found["gather"]["sent"] == found["ring"]["sent"]
    assert found["ulysses"]["kinds"] == {"all-to-all": 8}
    # eight devices and four of them, with the same number of tokens on each
    assert found["ring"]["temporary"] <= 1.1 * found["temporary_of_four"]
