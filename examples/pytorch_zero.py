"""PyTorch's recipe for ZeroRedundancyOptimizer on JAX: 20 layers of 2000 x 2000 with Adam.

    python -m examples.pytorch_zero [--width 2000] [--layers 20] [--devices 2] [--steps 3]

Trains with the state sharded and with plain Adam on every device, and says what each device holds.
The sums of the parameters are the same.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.table import Table

import gshard


def loss_fn(model: nnx.Module, x: jax.Array) -> jax.Array:
    """The mean output. PyTorch's recipe takes the sum, which differs by a factor alone."""
    return model(x).mean()


def model_of(width: int, layers: int) -> nnx.Module:
    """The recipe's model."""
    rngs = nnx.Rngs(0)
    return nnx.Sequential(*[nnx.Linear(width, width, rngs=rngs) for _ in range(layers)])


def held(tree: Any, device: jax.Device) -> int:
    """Bytes that one device has of some arrays."""
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device == device)


def train(width: int, layers: int, devices: int, steps: int, sharded: bool) -> dict[str, float]:
    """What one device holds after some steps, and the sum of all parameters."""
    ddp = gshard.pytorch.DistributedDataParallel(
        model_of(width, layers), process_group=gshard.distributed.new_group(range(devices))
    )
    if sharded:
        opt = gshard.pytorch.ZeroRedundancyOptimizer(
            ddp.parameters(), optax.adam, gshard.distributed.new_group(range(devices)), lr=0.01
        )
    else:
        plain = nnx.Optimizer(ddp, optax.adam(0.01), wrt=nnx.Param)
        update = nnx.jit(lambda plain, ddp, grads: plain.update(ddp, grads))
    batch = np.random.default_rng(0).normal(size=(4 * devices, width)).astype(np.float32)
    for _ in range(steps):
        ddp.backward(loss_fn, batch)
        if sharded:
            opt.step()
            opt.zero_grad()
        else:
            update(plain, ddp, ddp.grads)
            ddp.clear_gradients()
    first = jax.devices()[0]
    found = {"parameters": held(nnx.state(ddp, nnx.Param), first)}
    if sharded:
        found["optimizer state"] = opt.plan.bytes_per_device["opt_state"]
    else:
        found["optimizer state"] = held(nnx.state(plain), first)
    total = sum(float(jnp.sum(x)) for x in jax.tree.leaves(nnx.state(ddp, nnx.Param)))
    return {**found, "sum of the parameters": total}


def main() -> None:
    """Both ways, side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=2000, help="of a layer")
    parser.add_argument("--layers", type=int, default=20, help="how many")
    parser.add_argument("--devices", type=int, default=2, help="how many, at most; virtual on CPU")
    parser.add_argument("--steps", type=int, default=3, help="of training")
    args = parser.parse_args()
    gshard.virtual_devices(args.devices)
    args.devices = min(args.devices, jax.device_count())  # of GPUs there may be fewer
    given = (args.width, args.layers, args.devices, args.steps)
    plain, sharded = (train(*given, sharded=way) for way in (False, True))
    table = Table(title=f"One of {args.devices} devices", title_justify="left")
    for name in ("", "Adam on every device", "ZeroRedundancyOptimizer"):
        table.add_column(name, justify="right" if name else "left")
    for name in plain:
        unit, scale = ("", 1) if name.startswith("sum") else (" MB", 1e6)
        cells = [f"{x[name] / scale:,.{4 if scale == 1 else 1}f}{unit}" for x in (plain, sharded)]
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
