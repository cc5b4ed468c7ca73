"""Models and losses of other projects, as they are: a few steps match one device.

`tests/checkouts.py` says where the code comes from. Hugging Face's GPT-2 and Equinox are packages;
no weights are downloaded.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import gshard
from tests import checkouts
from tests.unchanged import EXAMPLES, STEPS, Functional, check_functional, close, three_devices

pytestmark = pytest.mark.slow

LENGTH, VOCABULARY = 10, 31


def tokens(step: int, dtype: Any = np.int32) -> np.ndarray:
    """Sequences of other lengths for every example, device and step; 0 is padding."""
    rng = np.random.default_rng(step)
    ids = rng.integers(1, VOCABULARY, (EXAMPLES, LENGTH + 1))
    ends = 2 + (np.arange(EXAMPLES) * 5 + step) % LENGTH
    return np.where(np.arange(LENGTH + 1) < ends[:, None], ids, 0).astype(dtype)


def like_state(apply_fn: Any) -> TrainState:
    """What a train step of theirs reads besides the parameters."""
    return TrainState(step=0, apply_fn=apply_fn, params=None, tx=None, opt_state=None)


def nanodo(axis: str, warns: str, remat: bool = False) -> Functional:
    """Parameters are annotated for nanodo's own FSDP; the loss is a masked mean."""
    root = checkouts.folder("nanodo")
    models = checkouts.module(root, "nanodo.model")
    data = checkouts.definitions(root / "nanodo/data.py", "get_in_out", PAD_ID=0)
    scope = checkouts.definitions(
        root / "nanodo/loss.py",
        "LossAuxData",
        "get_default_loss_fn",
        data=checkouts.namespace(data),
    )
    config = models.DoConfig(D=12, H=2, L=LENGTH + 1, N=2, V=VOCABULARY, F=24, remat=remat)
    model = models.TransformerDo(config)

    def loss(params, b, *, rng):
        return scope["get_default_loss_fn"](b, model.apply, {})(params)

    params = model.init(jax.random.key(0), tokens(0))["params"]
    return Functional(params, loss, tokens, axis=axis, warns=warns)


def nanogptx() -> Functional:
    """A dataclass of arrays is the model; layers are stacked and scanned in the loss."""
    pytest.importorskip("dacite", reason="nanogptx needs dacite")
    pytest.importorskip("safetensors", reason="nanogptx needs safetensors")
    source = checkouts.folder("nanogptx", "src")
    models = checkouts.module(source, "model")
    scope = checkouts.definitions(source / "train.py")
    their_loss = checkouts.loss_fn(scope, "train")
    config = models.GPTConfig(LENGTH, VOCABULARY, n_layer=3, n_head=2, n_embd=12)

    def loss(model, b, *, rng):
        return their_loss(model, b[:, :-1], b[:, 1:], rng, True)

    return Functional(models.GPT.from_config(config).init(jax.random.key(0)), loss, tokens)


def gpt_jax() -> Functional:
    """The parameters are the collection of collections that `init` returns."""
    root = checkouts.folder("gpt-jax")
    models = checkouts.module(root, "model")
    scope = checkouts.definitions(root / "train.py")
    model = models.GPT(models.GPTConfig(LENGTH, VOCABULARY, 2, 2, 12, dtype="float32"))

    def loss(params, b, *, rng):
        arguments = {"state": like_state(model.apply), "tokens": b, "dropout_key": rng}
        return checkouts.loss_fn(scope, "train_step", **arguments)(params)

    return Functional(model.init(jax.random.key(0)), loss, lambda i: tokens(i, np.uint16))


def hugging_face() -> Functional:
    """GPT-2 of `transformers` with an attention mask, and the loss of its language models."""
    transformers = pytest.importorskip("transformers", reason="install transformers<5")
    if not hasattr(transformers, "FlaxGPT2LMHeadModel"):
        pytest.skip("transformers 5 has no Flax models: install transformers<5")
    config = transformers.GPT2Config(VOCABULARY, LENGTH + 1, n_embd=12, n_layer=2, n_head=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.FlaxGPT2LMHeadModel(config, seed=0)

    def loss(params, b, *, rng):
        mask = (b > 0).astype(jnp.int32)
        logits = model(b, mask, params=params, dropout_rng=rng, train=True).logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], b[:, 1:])
        return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()

    return Functional(model.params, loss, tokens)


def equinox() -> Functional:
    """A transformer block under `jax.vmap`, with a key for each example."""
    eqx = pytest.importorskip("equinox", reason="install equinox")

    class Model(eqx.Module):
        embed: Any
        attention: Any
        norm: Any
        dropout: Any
        mlp: Any
        out: Any

        def __init__(self, key):
            keys = jax.random.split(key, 4)
            self.embed = eqx.nn.Embedding(VOCABULARY, 12, key=keys[0])
            self.attention = eqx.nn.MultiheadAttention(2, 12, key=keys[1], dropout_p=0.1)
            self.norm = eqx.nn.LayerNorm(12)
            self.dropout = eqx.nn.Dropout(0.1)
            self.mlp = eqx.nn.MLP(12, 12, 24, 1, activation=jax.nn.gelu, key=keys[2])
            self.out = eqx.nn.Linear(12, VOCABULARY, key=keys[3])

        def __call__(self, ids, key):
            attention_key, dropout_key = jax.random.split(key)
            x = jax.vmap(self.embed)(ids)
            mask = jnp.tril(jnp.ones((len(ids), len(ids)), bool)) & (ids > 0)[None]
            mask |= jnp.eye(len(ids), dtype=bool)
            y = jax.vmap(self.norm)(x)
            x += self.attention(y, y, y, mask, key=attention_key)
            x += self.dropout(jax.vmap(self.mlp)(x), key=dropout_key)
            return jax.vmap(self.out)(x)

    params, static = eqx.partition(Model(jax.random.key(0)), eqx.is_inexact_array)

    def loss(params, b, *, rng):
        model = eqx.combine(params, static)
        logits = jax.vmap(model)(b[:, :-1], jax.random.split(rng, len(b)))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, b[:, 1:])
        return jnp.mean(losses, where=b[:, 1:] > 0)

    return Functional(params, loss, tokens)


CASES = {
    "nanodo": lambda: nanodo("shard", "no axis 'data': the constraint is ignored"),
    "nanodo_data": lambda: nanodo("data", "by its own rules and ignores", remat=True),
    "nanogptx": nanogptx,
    "gpt-jax": gpt_jax,
    "hugging_face": hugging_face,
    "equinox": equinox,
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
@pytest.mark.parametrize("name", CASES)
def test_code_of_another_project_matches_one_device(name, level, micro_batches):
    check_functional(CASES[name](), level, micro_batches)


class WithState(TrainState):
    layers: Any = None


@pytest.mark.filterwarnings("ignore:.*over the axis 'batch'")
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_batch_norm_of_equinox_and_its_state_match_one_device(level):
    """`eqx.nn.BatchNorm` averages over the axis name of the `jax.vmap` around the model."""
    eqx = pytest.importorskip("equinox", reason="install equinox")

    class Model(eqx.Module):
        first: Any
        norm: Any
        second: Any

        def __init__(self, key):
            keys = jax.random.split(key)
            self.first = eqx.nn.Linear(7, 24, key=keys[0])
            self.norm = eqx.nn.BatchNorm(24, axis_name="batch", mode="batch")
            self.second = eqx.nn.Linear(24, 1, key=keys[1])

        def __call__(self, x, state):
            x, state = self.norm(self.first(x), state)
            return self.second(jax.nn.gelu(x)), state

    model, start = eqx.nn.make_with_state(Model)(jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    arrays, structure = jax.tree.flatten(start)

    def loss(params, b, *, layers):
        model = eqx.combine(params["model"], static)
        state = jax.tree.unflatten(structure, layers)
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = run(b, state)
        return jnp.mean((y - 1) ** 2), {"layers": jax.tree.leaves(state)}

    def made():
        held = {"params": {"model": params}, "layers": arrays}  # Flax looks names up in `params`
        return WithState.create(apply_fn=None, tx=optax.sgd(0.1), **held)

    def batch(step):
        return np.random.default_rng(step).normal(size=(EXAMPLES, 7)).astype(np.float32)

    state, plan = gshard.shard_train_state(made(), three_devices(), level, min_shard_size=16)
    step = gshard.make_train_step(loss, plan, mutable="layers")
    plain, grad = made(), jax.jit(jax.value_and_grad(loss, has_aux=True))
    for i in range(STEPS):
        state, metrics = step(state, batch(i))
        (value, new), grads = grad(plain.params, batch(i), layers=plain.layers)
        plain = plain.apply_gradients(grads=grads, **new)
        np.testing.assert_allclose(metrics["loss"], value, rtol=2e-6)
    assert {x.kind for x in step.loss_transfers} == {"sum"}, step
    found = plan.unwrap(state)
    close((found.params, found.layers), (plain.params, plain.layers), 1e-5)


@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_the_optimizer_of_nanodo_matches_one_device(level):
    """AdamW with clipping in `optax.MultiSteps`."""
    root = checkouts.folder("nanodo")
    names = ("get_optimizer", "_get_base_optimizer", "get_learning_rate_schedule", "_params_mask")
    scope = checkouts.definitions(root / "nanodo/optimizer.py", *names)

    class Config(dict):
        __getattr__ = dict.__getitem__

    tx = scope["get_optimizer"](
        Config(
            optimizer="adamw",
            peak_learning_rate=1e-2,
            init_learning_rate=1e-3,
            final_learning_rate=1e-3,
            warmup_steps=1,
            num_train_steps=5,
            weight_decay=0.1,
            clip_by_global_norm=1.0,
            eps=1e-3,  # theirs of 1e-9 divides rounding by rounding
        )
    )
    check_functional(nanodo("shard", "no axis 'data'"), level, tx=tx)
