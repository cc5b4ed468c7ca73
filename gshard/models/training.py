"""How the models here are trained: on the next token, with choices that go by names."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import gshard
from gshard._util.errors import did_you_mean
from gshard._util.validation import shown

STACK = "layers"  # the parameters of all layers, one on another

OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(optax.adamw, b2=0.95, weight_decay=0.1),
    "adafactor": optax.adafactor,
    "lion": partial(optax.lion, weight_decay=0.1),
    "sgd": partial(optax.sgd, momentum=0.9),
}

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}

# What is saved of a layer for the backward pass, besides its input; the rest is recomputed.
REMAT: dict[str, Any] = {
    "none": None,  # nothing is recomputed
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


def stack_of(block: Any, layers: int, remat: Any) -> Any:
    """A block as a scan over `layers` of it: one compiled block, and parameters in stacks.

    Args:
      block: a module; called with the stream and None it returns the stream and what is stacked.
      layers: how many.
      remat: a policy of `jax.checkpoint`, or None: see `REMAT`.
    """
    if remat is not None:
        # In a scan nothing but the policy decides what is kept.
        block = nn.remat(block, policy=remat, prevent_cse=False)
    return nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers)


def setup_of(
    model: nn.Module,
    sequence: int,
    *,
    optimizer: str,
    learning_rate: float,
    precision: str | None,
    seed: int,
) -> gshard.TrainSetup:
    """A model that learns the next token.

    Args:
      model: `model.apply({"params": ...}, tokens, next)` is the mean loss over the sequences.
      sequence: tokens of one example; a batch is `tokens` and `next`, each (examples, `sequence`)
        integers.
      optimizer: a name of `OPTIMIZERS`.
      learning_rate: constant.
      precision: of `gshard.shard_train_state`: with `"bfloat16"` parameters are stored and
        communicated in 2 bytes, and a float32 master copy is sharded like the moments.
      seed: of the parameters.
    """
    need(sequence > 0, f"sequence={sequence} must be at least 1")
    tx = named("optimizer", optimizer, OPTIMIZERS)(learning_rate)

    def init() -> TrainState:
        tokens_1xT = jnp.zeros((1, sequence), jnp.int32)
        params = model.init(jax.random.key(seed), tokens_1xT, tokens_1xT)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def loss_fn(params, batch):
        return model.apply({"params": params}, batch["tokens"], batch["next"])

    tokens_1xT = jax.ShapeDtypeStruct((1, sequence), jnp.int32)
    return gshard.TrainSetup(
        init,
        loss_fn,
        batch={"tokens": tokens_1xT, "next": tokens_1xT},
        shard={"scan_axes": {f"^{STACK}/": 0}, "precision": precision},
    )


def named(argument: str, name: str, known: dict[str, Any]) -> Any:
    """What a name stands for."""
    if name not in known:
        raise gshard.GShardError(
            f"{argument}={name!r} is unknown.{did_you_mean(name, known)} "
            f"Choose one of {', '.join(known)}."
        )
    return known[name]


def required(config: Mapping[str, Any], *names: str) -> None:
    """Refuses a `config.json` that does not say what a model needs."""
    if lost := [name for name in names if config.get(name) is None]:
        raise gshard.GShardError(
            f"config.json does not have {', '.join(lost)}. Use the config.json of this model's own "
            "folder."
        )


def only_with(config: Mapping[str, Any], **known: Any) -> None:
    """Refuses a `config.json` of Hugging Face that says something else than a model here does."""
    if not isinstance(config, Mapping):
        raise gshard.GShardError(
            f"from_config({shown(config)}): pass what config.json says, "
            "json.loads(path.read_text()), or config.to_dict() of a configuration of transformers."
        )
    other = [f"{x}={config[x]!r}" for x, value in known.items() if config.get(x, value) != value]
    if other:
        wanted = ", ".join(f"{name}={value!r}" for name, value in known.items())
        raise gshard.GShardError(
            f"This model cannot have {', '.join(other)} of config.json, only {wanted}."
        )


def need(possible: bool, what: str) -> None:
    """Refuses sizes that do not fit each other; `what` says what they must be."""
    if not possible:
        raise gshard.GShardError(f"These sizes do not fit together: {what}.")
