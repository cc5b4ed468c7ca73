"""Fine-tune a Llama with LoRA (Hu et al., 2021): its weights are frozen, adapters are trained.

python finetune_lora.py out                              # a small random model, made here
python finetune_lora.py out --base ~/Llama-3.2-1B        # a folder with a Llama of Hugging Face
gshard launch --virtual_devices 8 finetune_lora.py out   # on 8 virtual CPU devices
gshard launch --nproc_per_node 2 finetune_lora.py out    # in two processes

The number of devices must divide the batch of 24 examples.
"""

import argparse
import json
import shutil
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import gshard
from gshard.models import llama

RANK, SCALE = 8, 2.0
ADAPTED = ("q", "k", "v", "o", "gate", "up", "down")
ADAPTERS, BASE = "/lora_[ab]$", "^(?!.*/lora_[ab]$)"  # by their paths

# A small Llama in the words of Hugging Face
SMALL = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 160}
SMALL |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 128}


def lora(call, args, kwargs, context):
    """Adds x @ a @ b to every dense layer that is adapted; b is zero at first."""
    y, dense = call(*args, **kwargs), context.module
    if isinstance(dense, nn.Dense) and dense.name in ADAPTED:
        (x,) = args
        at_random, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros
        a = dense.param("lora_a", at_random, (x.shape[-1], RANK), jnp.float32)
        b = dense.param("lora_b", zeros, (RANK, dense.features), jnp.float32)
        y += SCALE * (x @ a.astype(x.dtype)) @ b.astype(x.dtype)
    return y


def init(model, seed: int):
    """Parameters of the model and of adapters."""
    with nn.intercept_methods(lora):
        return model.init(jax.random.key(seed), jnp.zeros((1, 8), jnp.int32))["params"]


def apply(model, params, *args):
    """The model with adapters: its loss, or without the next tokens its logits."""
    with nn.intercept_methods(lora):
        return model.apply({"params": params}, *args)


def merge(params):
    """Full parameters without adapters: each adapted kernel has them inside."""
    if "lora_a" in params:
        return {"kernel": params["kernel"] + SCALE * (params["lora_a"] @ params["lora_b"])}
    return {k: merge(x) if isinstance(x, dict) else x for k, x in params.items()}


def shard(state, level, **options):
    """The layers are scanned over: dimension 0 of their stacks is never sharded."""
    mesh = gshard.make_mesh()
    return gshard.shard_train_state(
        state, mesh, level, scan_axes={"^layers/": 0}, min_shard_size=64, **options
    )


def save_model(params, config: dict, folder: Path, level) -> None:
    """A folder that transformers' `from_pretrained` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    state, _ = shard((params, optax.identity()), level)
    gshard.save_safetensors(state, folder, name_map="llama", max_shard_bytes=5e9)
    if jax.process_index() == 0:
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    gshard.distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="a new folder for adapters and merged weights")
    parser.add_argument("--base", type=Path, help="a folder with config.json and safetensors")
    parser.add_argument("--level", default="zero3")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    gshard.distributed.initialize()
    args.out.mkdir(parents=True, exist_ok=True)
    done = any((args.out / "merged").glob("*.safetensors"))
    made = (args.out / "base" / "config.json").exists()
    gshard.distributed.barrier()  # all have looked before one writes
    if done:
        parser.error(f"{args.out} has the results of another run: choose a new folder")

    if args.base is None:
        args.base = args.out / "base"
    if args.base == args.out / "base" and not made:
        model = llama.from_config(SMALL, dtype="float32", remat="none")
        save_model(merge(init(model, seed=0)), SMALL, args.base, args.level)

    # The frozen base, read into its shards, and adapters that are trained
    config = json.loads((args.base / "config.json").read_text())
    model = llama.from_config(config, dtype="float32")
    tx = optax.adamw(1e-2)
    state, plan = shard(lambda: (init(model, seed=1), tx), args.level, frozen=BASE)
    state = gshard.load_safetensors(state, args.base, name_map="llama", only=BASE, cast=True)

    # Bytes of gshard's source as tokens; here your tokenizer and data
    text = b"".join(x.read_bytes() for x in sorted(Path(gshard.__file__).parent.rglob("*.py")))
    tokens = np.frombuffer(text[: len(text) // 65 * 65], np.uint8).reshape(-1, 65).astype(np.int32)
    step = gshard.make_train_step(lambda p, b: apply(model, p, b[:, :-1], b[:, 1:]), plan)
    batches = gshard.DataLoader(tokens, 24, plan, seed=0, num_epochs=None)
    for number, batch in zip(range(1, args.steps + 1), batches, strict=False):
        state, metrics = step(state, batch)
        if (number % 20 == 0 or number == 1) and jax.process_index() == 0:
            print(f"step {number}: loss {float(metrics['loss']):.4f}")

    gshard.save_safetensors(state, args.out / "adapters.safetensors", only=ADAPTERS)
    merged = merge(gshard.full_params(state))  # the host must hold the model
    save_model(merged, config, args.out / "merged", args.level)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if jax.process_index() == 0 and (args.base / name).exists():
            shutil.copy(args.base / name, args.out / "merged")
    if jax.process_index() == 0:
        print(f"adapters and merged weights are in {args.out}")


if __name__ == "__main__":
    main()
