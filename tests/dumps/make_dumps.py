"""Compiles the programs whose text is stored next to this file.

    python make_dumps.py cpu|tpu|gpu [directory]

CPU needs jax alone, TPU libtpu (the `aot-tpu` extra), GPU a CUDA plugin and nvcc (`aot-gpu`). No
accelerator is needed. The programs and what they must move are explained in README.md.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.experimental import mesh_utils, topologies  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84929347584 cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-\w+|while|send)(-start)?\("
)
SILENT = re.compile(r" (get-tuple-element|constant|bitcast|copy)\(")


def cpu_mesh(shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), axes)


def tpu_mesh(topology: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(mesh_utils.create_device_mesh(shape, devices=devices), axes)


def gpu_mesh(topology: str, axes: tuple[str, ...]) -> Mesh:
    description = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology=topology
    )
    return Mesh(np.array(description.devices), axes)


def abstract(mesh: Mesh, shape: tuple[int, ...], spec: P, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def gather(part, axes):
    with jax.named_scope("gshard/gather"):
        for axis in reversed(axes):
            part = lax.all_gather(part, axis, tiled=True)
    return part


def scatter(whole, axes):
    with jax.named_scope("gshard/scatter"):
        for axis in axes:
            whole = lax.psum_scatter(whole, axis, tiled=True)
    return whole


def train_step(mesh, *, width, rows, layers=2, weights=1, micro_batches=1):
    """One step of a scanned model with sharded weights, gathered a layer at a time.

    `weights` matrices of `width` x `width` per layer; each is gathered for the forward and again
    for the backward of every micro-batch, its gradient scattered once. The loss is one all-reduce.
    """
    axes = mesh.axis_names

    @jax.custom_vjp
    def whole(part):
        return gather(part, axes)

    whole.defvjp(lambda part: (gather(part, axes), None), lambda _, g: (scatter(g, axes),))

    def loss_fn(params, x):
        def layer(h, parts):
            for part in parts:
                h = jnp.tanh(h @ whole(part.astype(x.dtype)))
            return h, None

        h, _ = lax.scan(jax.checkpoint(layer), x, params)
        return jnp.mean(h.astype(jnp.float32) ** 2)

    def step(params, batch):
        def micro(total, x):
            loss, grads = jax.value_and_grad(loss_fn)(params, x)
            return jax.tree.map(jnp.add, total, (loss, grads)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = lax.scan(micro, zeros, batch)
        with jax.named_scope("gshard/scalar"):
            loss = lax.pmean(loss, axes)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    divided, by_rows = P(None, axes), P(None, axes)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(divided, by_rows), out_specs=(divided, P()), check_vma=False
    )
    params = [abstract(mesh, (layers, width, width), divided)] * weights
    batch = abstract(mesh, (micro_batches, rows * mesh.size, width), by_rows, jnp.bfloat16)
    return jax.jit(mapped, donate_argnums=0).lower(params, batch)


def one_scatter(mesh):
    """A reduce-scatter of f32[1024,256], alone."""
    mapped = jax.shard_map(
        lambda x: scatter(x * 2, mesh.axis_names),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(mapped).lower(abstract(mesh, (1024, 256), P()))


def two_slices():
    """f32[1024,256] scattered inside a slice of 4, summed between 2 slices, gathered inside."""
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name="v5e:2x2", num_slices=2
    ).devices
    mesh = Mesh(np.array(devices).reshape(2, 4), ("slice", "shard"))

    def f(x):
        return gather(lax.psum(scatter(x, ("shard",)), "slice"), ("shard",))

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(abstract(mesh, (1024, 256), P()))


def odd_ones(mesh):
    """What a train step rarely has.

    A combined all-reduce over "a" of (64, 64) and (64,) and a single number; an all-reduce of
    (64, 64) over "b" in a loop of unknown length, whose condition takes a maximum; a conditional
    of a gather over "a" and a sum over "b".
    """

    def f(x):
        a, b, c = lax.psum((x, x[0], x.sum()), "a")
        y = a + b + c
        y = lax.while_loop(
            lambda v: lax.pmax(jnp.sum(v), "b") < 1e3, lambda v: lax.psum(v * 1.5, "b"), y
        )
        return lax.cond(
            x[0, 0] > 0,
            lambda v: lax.all_gather(v, "a", tiled=True)[:64],
            lambda v: lax.psum(v[:1], "b") + v,
            y,
        )

    mapped = jax.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(mapped).lower(abstract(mesh, (64, 64), P()))


def left_to_the_compiler(mesh):
    """No collective is written: f32[64,64] sharded over "a", and over both axes, then gathered."""
    divided = [abstract(mesh, (64, 64), P("a")), abstract(mesh, (64, 64), P(("a", "b")))]
    whole = NamedSharding(mesh, P())
    return jax.jit(lambda x, y: (x * 2, y * 2), out_shardings=(whole, whole)).lower(*divided)


Programs = dict[str, Callable[[], jax.stages.Lowered]]


def programs(platform: str) -> Programs:
    if platform == "cpu":
        mesh = cpu_mesh((2, 4), ("a", "b"))
        version = "cpu-jax" + jax.__version__
        return {
            f"{version}-step": partial(
                train_step, mesh, width=64, rows=4, layers=5, micro_batches=3
            ),
            f"{version}-odd": partial(odd_ones, mesh),
            f"{version}-compiler": partial(left_to_the_compiler, mesh),
        }
    if platform == "gpu":
        mesh = gpu_mesh("1x8x1", ("shard",))
        return {"gpu-h100-1x8x1-step": partial(train_step, mesh, width=256, rows=8, layers=4)}
    flat = partial(tpu_mesh, axes=("shard",))
    two = partial(tpu_mesh, axes=("a", "b"))
    return {
        "tpu-v5e-4x4-scatter-flat": lambda: one_scatter(flat("v5e:4x4", (16,))),
        "tpu-v5e-4x4-scatter-axes": lambda: one_scatter(two("v5e:4x4", (4, 4))),
        "tpu-v5e-2x4-step-padded": lambda: train_step(
            two("v5e:2x4", (2, 4)), width=4096, rows=1024, layers=4
        ),
        "tpu-v5e-2x4-step-async": lambda: train_step(
            flat("v5e:2x4", (8,)), width=2048, rows=4096, weights=2
        ),
        "tpu-v5e-2x2-two-slices": two_slices,
        "tpu7x-2x2x2-step-sparsecore": lambda: train_step(
            flat("tpu7x:2x2x2", (16,)), width=1024, rows=64, layers=4
        ),
    }


def tidy(text: str) -> str:
    """The text without source positions, and without the settings of what does not communicate."""
    text = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d+ .*\n)*", "\n", text)
    text = re.sub(r" (stack_frame_id=\d+|(scheduling|deduplicated)_name=\"[^\"]*\")", "", text)
    lines = []
    for line in text.splitlines():
        if not COLLECTIVE.search(line):
            line = re.sub(r", backend_config=\{.*\}$", "", line)
        if SILENT.search(line):
            line = re.sub(r", metadata=\{[^{}]*\}", "", line)
        line = re.sub(r'"debug":"(?:[^"\\]|\\.)*"', '"debug":""', line)
        line = re.sub(r'"collective_offload_config":\{.*', '"collective_offload_config":{}}', line)
        lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


if __name__ == "__main__":
    directory = Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parent)
    for name, lower in programs(sys.argv[1]).items():
        text = tidy(lower().compile().as_text())
        (directory / f"{name}.hlo.txt").write_text(text)
        print(f"{name}: {len(text):,} bytes")
