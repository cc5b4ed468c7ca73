"""What the estimate believes of XLA:GPU, rule by rule; what each one was seen in is said there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from gshard.analysis.memory import gpu
from gshard.analysis.memory.fusion import Fused, fused, split_k
from gshard.analysis.memory.gpu import latency_hidden, padded_kernel
from gshard.analysis.memory.liveness import depth_first
from gshard.analysis.memory.opening import program_of
from gshard.analysis.memory.program import Op, TracedProgram, Value


def kernels_of(f, *shapes: tuple[int, ...]) -> Fused:
    """The kernels of a function inside a `shard_map` over 8 devices, of operands of one device."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ("shard",))
    step = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    closed = jax.make_jaxpr(step)(*avals)
    return fused(program_of(closed, [None] * len(avals), True, "gpu"), "gpu")


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "parts"),
    [  # as in programs compiled for an H100
        (2048, 256, 768, jnp.float32, 1),
        (1024, 1024, 256, jnp.float32, 1),
        (1024, 256, 768, jnp.float32, 4),
        (256, 1024, 1024, jnp.float32, 4),
        (256, 256, 1024, jnp.float32, 8),
        (512, 128, 2048, jnp.bfloat16, 16),
        (128, 64, 4096, jnp.float32, 32),
        (2048, 512, 1536, jnp.bfloat16, 2),
        (3072, 512, 2048, jnp.bfloat16, 1),
    ],
)
def test_matrix_products_are_split_as_by_the_compiler(m, n, k, dtype, parts):
    values = [Value(shape, jnp.dtype(dtype), (1, 1)) for shape in ((m, k), (k, n), (m, n))]
    numbers = {"dimension_numbers": (((1,), (0,)), ((), ()))}
    op = Op("dot_general", [0, 1], [2], numbers, "")
    assert split_k(op, TracedProgram([op], values, [0, 1], [2])) == parts


def test_products_that_a_gather_does_not_wait_for_overlap_with_it():
    def step(w, v, x):
        y = x @ jax.lax.all_gather(w, "shard", tiled=True)
        z, v = jax.lax.optimization_barrier((y, v))
        return z @ jax.lax.all_gather(v, "shard", tiled=True), y @ x, x @ y, x @ x

    whole = kernels_of(step, (128, 1024), (128, 1024), (1024, 1024))
    order = depth_first(whole)
    assert [kernel.op.name for kernel in order] == [
        "all_gather", "dot_general", "all_gather", *["dot_general"] * 4
    ]  # fmt: skip
    first, y, second, z, yx, xy, xx = order
    found = latency_hidden(whole, order)
    assert [kernel.op.name for kernel in found].count("done") == 2
    done = found[-2]
    assert set(done.reads) == {*second.reads, *second.writes}  # they live until then
    # What comes after a gather that is over is put as late as it can be.
    assert [id(kernel) for kernel in found if kernel.op.name != "done"] == [
        id(kernel) for kernel in (first, y, second, xx, yx, xy, z)
    ]
    assert found[-1] is z


def test_kernels_that_are_ready_are_not_all_looked_at_for_each(monkeypatch):
    """Thousands of leaves are updated by as many kernels, which wait for nothing."""

    def step(w, *leaves):
        return jax.lax.all_gather(w, "shard", tiled=True), *[jnp.sort(x) for x in leaves]

    whole = kernels_of(step, (128, 1024), *[(8,)] * 300)
    ranked, rank = [], gpu._rank
    monkeypatch.setattr(gpu, "_rank", lambda *of: ranked.append(of) or rank(*of))
    found = latency_hidden(whole, depth_first(whole))
    assert len(found) == 302
    assert len(ranked) < 5 * len(found)


@pytest.mark.parametrize(("rows", "stored"), [(4096, True), (64, False)])
def test_what_several_kernels_would_compute_from_much_is_stored_once(rows, stored):
    def step(x, u, v, w):
        s = x @ u + x @ v + x @ w
        return s.sum(0), s.sum(1), s.max(0), s.max(1)

    whole = kernels_of(step, (rows, 64), (64, 512), (64, 512), (64, 512))
    added = [kernel for kernel in whole.kernels if kernel.op.name == "add"]
    assert len(added) == stored


def test_a_kernel_larger_than_the_image_is_padded_for_cudnn():
    def params(image, kernel):
        f = lambda x, w: jax.lax.conv_general_dilated(  # noqa: E731
            x, w, (1, 1), [(2, 1), (2, 1)], (2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        avals = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (image, kernel)]
        return jax.make_jaxpr(f)(*avals).jaxpr.eqns[0].params

    image, kernel = (16, 2, 2, 256), (3, 3, 256, 256)
    assert padded_kernel(image, kernel, params(image, kernel)) == (6, 6, 256, 256)
    image = (16, 4, 4, 256)
    assert padded_kernel(image, kernel, params(image, kernel)) is None
