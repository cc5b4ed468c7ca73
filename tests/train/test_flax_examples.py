"""Flax's own examples, as they are: two steps match one device.

`tests/checkouts.py` says how models and losses are taken out of the example's files.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import gshard
from tests import checkouts
from tests.unchanged import (
    DEVICES,
    EXAMPLES,
    STEPS,
    Functional,
    Module,
    check_functional,
    check_module,
    close,
    three_devices,
)

pytestmark = pytest.mark.slow


def example(*parts: str) -> Path:
    return checkouts.folder("flax", "examples", *parts)


def definitions_of(name: str, *wanted: str, **given: Any) -> dict[str, Any]:
    return checkouts.definitions(example(name, "train.py"), *wanted, **given)


def tokens(step: int, length: int = 10, vocabulary: int = 31) -> np.ndarray:
    """Ragged sequences: the mask of each example, and of each device, has another size."""
    rng = np.random.default_rng(step)
    ids = rng.integers(1, vocabulary, (EXAMPLES, length))
    ends = 1 + (np.arange(EXAMPLES) * 5 + step) % length
    return np.where(np.arange(length) < ends[:, None], ids, 0)


def normal(step: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(EXAMPLES, *shape)).astype(np.float32)


def language_model(name: str, targets: bool) -> Functional:
    """lm1b, wmt, nlp_seq: the sum of the losses of valid tokens, divided by their number."""
    models = checkouts.module(example(name), "models")
    scope = definitions_of(name, "compute_weighted_cross_entropy")
    sizes = {"emb_dim": 16, "num_heads": 2, "num_layers": 2, "qkv_dim": 16, "mlp_dim": 32}
    config = {"vocab_size": 31, "output_vocab_size": 31, "max_len": 16, **sizes}
    model = (models.TransformerLM if name == "lm1b" else models.Transformer)(
        models.TransformerConfig(**config)
    )

    def apply(variables, b, run=model.apply, **options):
        if name == "nlp_seq":
            return run(variables, inputs=b["inputs"], train=True, **options)
        return run(
            variables, *(b[k] for k in ("inputs", "targets")[: 1 + (name == "wmt")]), **options
        )

    def loss(params, b, *, rng):
        logits = apply({"params": params}, b, rngs={"dropout": rng})
        labels = b["targets"] if targets else b["inputs"]
        weights = jnp.where(labels > 0, 1, 0).astype(jnp.float32)
        total, weight = scope["compute_weighted_cross_entropy"](logits, labels, weights)
        return total / weight

    def batch(step):
        return {"inputs": tokens(step), "targets": tokens(step + 100)}

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return Functional(apply(keys, batch(0), run=model.init)["params"], loss, batch)


def vae() -> Functional:
    model = checkouts.module(example("vae"), "models").model(4)
    scope = definitions_of("vae", "kl_divergence", "binary_cross_entropy_with_logits")

    def loss(params, b, *, rng):
        recon_x, mean, logvar = model.apply({"params": params}, b, rng)
        cross_entropy = scope["binary_cross_entropy_with_logits"](recon_x, b).mean()
        return cross_entropy + scope["kl_divergence"](mean, logvar).mean()

    def batch(step):
        return (np.random.default_rng(step).random((EXAMPLES, 784)) > 0.5).astype(np.float32)

    start = model.init(jax.random.key(0), batch(0), jax.random.key(1))
    return Functional(start["params"], loss, batch, rate=1e-4)  # a sum over pixels


def train_step_of(name: str, scope: dict[str, Any], model: nn.Module, key: str, **given: Any):
    """`loss_fn` of the example's `train_step(state, batch, ...)`, of the parameters."""
    state = TrainState(step=0, apply_fn=model.apply, params=None, tx=None, opt_state=None)

    def loss(params, b, *, rng):
        arguments = {"state": state, "batch": b, key: rng if key != "rngs" else {"dropout": rng}}
        return checkouts.loss_fn(scope, "train_step", **arguments, **given)(params)

    return loss


def seq2seq() -> Functional:
    """The decoder is fed with tokens that it samples; returns its logits too."""
    models = checkouts.module(example("seq2seq"), "models")
    table = checkouts.module(example("seq2seq"), "input_pipeline").CharacterTable("0123456789+= ")
    scope = definitions_of("seq2seq", "cross_entropy_loss")
    model = models.Seq2seq(False, hidden_size=12, vocab_size=table.vocab_size, eos_id=table.eos_id)

    def batch(step):
        random.seed(step)
        return table.get_batch(EXAMPLES)

    keys = {"params": jax.random.key(0), "lstm": jax.random.key(1)}
    start = model.init(keys, batch(0)["query"], batch(0)["answer"])
    loss = train_step_of("seq2seq", scope, model, "lstm_rng", eos_id=table.eos_id)
    return Functional(start["params"], loss, batch)


def sst2() -> Functional:
    """A bidirectional LSTM over ragged sequences, with attention; returns its logits too."""
    models = checkouts.module(example("sst2"), "models")
    scope = definitions_of("sst2", "sigmoid_cross_entropy_with_logits")
    model = models.TextClassifier(
        embedding_size=12,
        hidden_size=10,
        vocab_size=31,
        output_size=1,
        dropout_rate=0.5,
        word_dropout_rate=0.1,
    )

    def batch(step):
        ids = tokens(step)
        label = np.random.default_rng(step).integers(0, 2, EXAMPLES).astype(np.float32)
        return {"token_ids": ids, "length": (ids > 0).sum(1), "label": label}

    b = batch(0)
    start = model.init(jax.random.key(0), b["token_ids"], b["length"], deterministic=True)
    return Functional(start["params"], train_step_of("sst2", scope, model, "rngs"), batch)


LINEN = {
    "lm1b": partial(language_model, "lm1b", targets=False),
    "wmt": partial(language_model, "wmt", targets=True),
    "nlp_seq": partial(language_model, "nlp_seq", targets=True),
    "vae": vae,
    "seq2seq": seq2seq,
    "sst2": sst2,
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
@pytest.mark.parametrize("name", LINEN)
def test_a_linen_example_matches_one_device(name, level, micro_batches):
    check_functional(LINEN[name](), level, micro_batches)


class WithStats(TrainState):
    batch_stats: Any = None


@pytest.mark.filterwarnings("ignore:.*over the axis 'batch'")
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_the_resnet_of_imagenet_and_its_statistics_match_one_device(level):
    models = checkouts.module(example("imagenet"), "models")
    model = models._ResNet1(num_classes=7, dtype=jnp.float32)
    scope = definitions_of("imagenet", "cross_entropy_loss", NUM_CLASSES=7)
    batch = {
        "image": normal(0, 16, 16, 3),
        "label": np.random.default_rng(0).integers(0, 7, EXAMPLES),
    }
    start = model.init(jax.random.key(0), batch["image"])

    def loss(params, b, *, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = model.apply(variables, b["image"], mutable=["batch_stats"])
        weights = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        value = scope["cross_entropy_loss"](logits, b["label"]) + 0.0001 * 0.5 * weights
        return value, {"batch_stats": new["batch_stats"]}

    mesh = gshard.make_mesh(devices=jax.devices()[:DEVICES])
    state = WithStats.create(apply_fn=None, tx=optax.sgd(0.1), **start)
    state, plan = gshard.shard_train_state(state, mesh, level, min_shard_size=16)
    state, metrics = gshard.make_train_step(loss, plan, mutable="batch_stats")(state, batch)
    plain = partial(jax.value_and_grad(loss, has_aux=True), batch_stats=start["batch_stats"])
    one = jax.vmap(plain, in_axes=None, axis_name="batch", axis_size=1)  # the model names the axis
    (value, new), grads = jax.tree.map(lambda x: x[0], jax.jit(one)(start["params"], batch))
    params = jax.tree.map(lambda p, g: p - 0.1 * g, start["params"], grads)
    np.testing.assert_allclose(metrics["loss"], value, rtol=2e-6)
    found = plan.unwrap(state)
    close(found.params, params, 2e-5)
    close(found.batch_stats, new["batch_stats"], 2e-5)


def mnist() -> Module:
    """BatchNorm and dropout; returns its logits too."""
    scope = definitions_of("mnist", "CNN", "loss_fn")

    def batch(step):
        label = np.random.default_rng(step).integers(0, 10, EXAMPLES)
        return {"image": normal(step, 28, 28, 1), "label": label}

    def loss(model, b):
        return scope["loss_fn"](model, b, nnx.Rngs(dropout=3))

    return Module(lambda: scope["CNN"](nnx.Rngs(0)), loss, batch, micro_batches=1)


class WithRngs(nnx.Module):
    """A model whose loss takes the Rngs as an argument."""

    def __init__(self, model: nnx.Module, rngs: nnx.Rngs):
        self.model, self.rngs = model, rngs


def gemma(function: str = "nnx_train_step") -> Module:
    """Gemma 3 in small; returns losses per example and logits."""
    pytest.importorskip("jaxtyping", reason="Flax's gemma needs jaxtyping")
    models = checkouts.module(example("gemma"), "transformer")
    kinds = models.modules.AttentionType
    config = models.TransformerConfig(
        num_layers=2,
        num_embed=31,
        embed_dim=16,
        hidden_dim=24,
        num_heads=2,
        head_dim=8,
        num_kv_heads=1,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        use_qk_norm=True,
        attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL),
        sliding_window_size=4,
        dropout_rate=0.1,
    )
    scope = definitions_of("gemma", "compute_weighted_cross_entropy", transformer_lib=models)

    def make():
        model = models.Transformer(config, rngs=nnx.Rngs(params=0))
        return WithRngs(model, nnx.Rngs(dropout=1))

    def loss(model, b):
        arguments = {"model": model.model, "batch": b}
        return checkouts.loss_fn(scope, function, **arguments)(model.model, model.rngs.fork())

    def batch(step):
        ids = tokens(step)
        positions = np.broadcast_to(np.arange(10), ids.shape)
        segments = 1 + (positions >= 1 + (np.arange(EXAMPLES) * 3 % 9)[:, None])
        targets = np.pad(ids[:, 1:], ((0, 0), (0, 1)))
        return {
            "inputs": ids,
            "inputs_position": positions,
            "inputs_segmentation": segments,
            "targets": targets,
        }

    return Module(make, loss, batch)


toy_file = partial(example, "nnx_toy_examples")


def curve(step: int) -> tuple[np.ndarray, np.ndarray]:
    x = normal(step, 1)
    return x, 0.8 * x**2 + 0.1


def toy(file: str, *names: str, trained: str = "", mesh: Any = three_devices) -> Module:
    """A regression of nnx_toy_examples, most with a counter of calls."""
    scope = checkouts.definitions(toy_file(file), "MLP", *names)

    def loss(model, b):
        return checkouts.loss_fn(scope, "train_step", batch=b, x=b[0], y=b[1])(model)

    wrt = scope[trained] if trained else nnx.Param
    return Module(lambda: scope["MLP"](1, 32, 1, rngs=nnx.Rngs(0)), loss, curve, wrt=wrt, mesh=mesh)


def toy_vae() -> Module:
    """A term of the loss is stored in the model, and taken out again."""
    names = ("Loss", "Encoder", "Decoder", "VAE")
    scope = checkouts.definitions(toy_file("05_vae.py"), *names)

    def loss(model, b):
        return checkouts.loss_fn(scope, "train_step", x=b)(model)

    def batch(step):
        return (normal(step, 28, 28) > 0).astype(np.float32)

    make = lambda: scope["VAE"](784, 16, 4, (28, 28), rngs=nnx.Rngs(0, noise=1))  # noqa: E731
    return Module(make, loss, batch)


def toy_scan() -> Module:
    """BatchNorm and dropout in layers that are stacked and scanned; the file has no loss."""
    scope = checkouts.definitions(toy_file("06_scan_over_layers.py"), "Block", "ScanMLP")
    return Module(
        lambda: scope["ScanMLP"](20, n_layers=3, rngs=nnx.Rngs(0)),
        lambda model, b: jnp.mean((model(b) - 1) ** 2),
        lambda step: normal(step, 20),
        micro_batches=1,
        scan_axes={"layers": 0},
    )


def toy_tensor_parallel() -> Module:
    """Parameters are annotated for a mesh axis "model"."""
    file = toy_file("10_fsdp_and_optimizer.py")
    rules = checkouts.definitions(file, "MeshRules")["MeshRules"](mlp="model", data="data")
    scope = checkouts.definitions(file, "MLP", mesh_rules=rules)

    def loss(model, b):
        return checkouts.loss_fn(scope, "train_step", x=b[0], y=b[1])(model)

    def mesh():
        return gshard.make_mesh(extra={"model": 2}, devices=jax.devices()[:6])

    def make():
        with nnx.use_eager_sharding(False):
            return scope["MLP"](1, 32, 2, nnx.Rngs(0))  # 1 is not divisible

    return Module(make, loss, curve, mesh=mesh)


NNX = {
    "mnist": mnist,
    "gemma": gemma,
    "toy_02": partial(toy, "02_lifted_transforms.py", "Linear", "Count"),
    "toy_04": partial(toy, "04_data_parallel_with_jit.py"),
    "toy_05": toy_vae,
    "toy_06": toy_scan,
    "toy_07": partial(toy, "07_array_leaves.py", "Linear", "is_param", trained="is_param"),
    "toy_10": toy_tensor_parallel,
}
OLD_ACCESS = "ignore:'.value' (access|setter) is now deprecated:DeprecationWarning"


@pytest.mark.filterwarnings(OLD_ACCESS)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
@pytest.mark.parametrize("name", NNX)
def test_an_nnx_example_matches_one_device(name, level, micro_batches):
    case = NNX[name]()
    if micro_batches > case.micro_batches:
        pytest.skip("its BatchNorm needs all examples at once")
    check_module(case, level, micro_batches)


@pytest.mark.filterwarnings(OLD_ACCESS)
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_a_train_state_with_an_nnx_model_and_its_counter_matches_one_device(level):
    """03_train_state."""
    names = ("Linear", "Count", "MLP", "TrainState")
    scope = checkouts.definitions(toy_file("03_train_state.py"), *names)

    def made():
        model = scope["MLP"](din=1, dhidden=32, dout=1, rngs=nnx.Rngs(0))
        graphdef, params, counts = nnx.split(model, nnx.Param, scope["Count"])
        fields = {"graphdef": graphdef, "params": params, "counts": counts}
        return scope["TrainState"].create(apply_fn=None, tx=optax.sgd(0.1), **fields)

    first = made()  # not the one that trains: what a loss closes over must not change

    def loss(params, b, *, counts):
        state = first.replace(counts=counts)
        value, new = checkouts.loss_fn(scope, "train_step", state=state, batch=b)(params)
        return value, {"counts": new}

    plain = made()
    state, plan = gshard.shard_train_state(made(), three_devices(), level, min_shard_size=16)
    step = gshard.make_train_step(loss, plan, mutable="counts")
    for i in range(STEPS):
        state, metrics = step(state, curve(i))
        grad = jax.value_and_grad(loss, has_aux=True)
        (value, new), grads = grad(plain.params, curve(i), counts=plain.counts)
        plain = plain.apply_gradients(grads=grads, **new)
        np.testing.assert_allclose(metrics["loss"], value, rtol=2e-6)
    found = plan.unwrap(state)
    close((found.params, found.counts), (plain.params, plain.counts))
