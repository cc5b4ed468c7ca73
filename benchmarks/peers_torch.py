"""One process of PyTorch for `benchmarks.peers`: the same GPT, by DDP, DDP and ZeRO, or FSDP2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, gelu, layer_norm, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from benchmarks.groups import ADDRESS, memory, on_own_cores, rank, serve, size


class Block(nn.Module):
    """A block of `examples.gpt`, with the weights that Flax made."""

    def __init__(self, weights: dict[str, np.ndarray], heads: int):
        super().__init__()
        self.heads = heads
        self.weights = nn.ParameterDict(
            {name.replace("/", "_"): torch.tensor(x) for name, x in weights.items()}
        )

    def forward(self, x):
        w = self.weights
        batch, length, width = x.shape
        parts = normed(x, w, "LayerNorm_0") @ w["attention_qkv_kernel"]
        q, k, v = (
            part.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in parts.split(width, dim=-1)
        )
        y = scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + y.transpose(1, 2).reshape(batch, length, width) @ w["attention_out_kernel"]
        h = normed(x, w, "LayerNorm_1") @ w["up_kernel"] + w["up_bias"]
        return x + gelu(h, approximate="tanh") @ w["down_kernel"] + w["down_bias"]


class GPT(nn.Module):
    """`examples.gpt.GPT`, with the weights that Flax made."""

    def __init__(self, weights: dict[str, np.ndarray], heads: int):
        super().__init__()
        of: dict[str, dict[str, np.ndarray]] = {}
        for name, x in weights.items():
            block, _, rest = name.partition("/")
            of.setdefault(block, {})[rest] = x
        count = sum(name.startswith("block_") for name in of)
        self.blocks = nn.ModuleList(Block(of.pop(f"block_{i}"), heads) for i in range(count))
        self.rest = nn.ParameterDict(
            {f"{name}_{x}": torch.tensor(w) for name, part in of.items() for x, w in part.items()}
        )

    def forward(self, text):
        w, x = self.rest, self.rest["Embed_0_embedding"][text]
        for block in self.blocks:
            x = block(x)
        return normed(x, w, "LayerNorm_0") @ w["unembed_kernel"]


def normed(x, w, name):
    scale, bias = w[f"{name}_scale"], w[f"{name}_bias"]
    return layer_norm(x, x.shape[-1:], scale, bias, eps=1e-6)


def rotate(x):
    length, half = x.shape[-2], x.shape[-1] // 2
    powers = 100.0 ** -(torch.arange(half) / half)
    angle = torch.arange(length)[:, None] * powers
    a, b = x.chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def make(program: str, problem: str, heads: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    on_own_cores()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    dist.init_process_group(
        "gloo", init_method=f"tcp://{os.environ[ADDRESS]}", rank=rank(), world_size=size()
    )
    stored = np.load(problem)
    text = torch.tensor(np.array_split(stored["batch"], size())[rank()].astype(np.int64))
    before = memory()
    model: Any = GPT({name: stored[name] for name in stored.files if name != "batch"}, heads)
    how = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-4}
    if program == "FSDP2":
        mesh = dist.init_device_mesh("cpu", (size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if program == "DDP + ZeRO":
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, **how
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **how)

    def step() -> float:
        logits = model(text[:, :-1])
        loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), text[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step, lambda: memory() - before


if __name__ == "__main__":
    serve(lambda: make(sys.argv[1], sys.argv[2], int(sys.argv[3])))
