"""Flax's own examples, as they are: two steps match one device.

Models and loss functions are read from a checkout of Flax, whose `examples/` folder the environment
variable FLAX_EXAMPLES names. Only the functions of `train.py` that compute a loss are run, since
the files import TensorFlow.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import common_utils
from flax.training.train_state import TrainState

import gshard

FOLDER = os.environ.get("FLAX_EXAMPLES", "")
EXAMPLES = 12

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="set FLAX_EXAMPLES to the examples folder of Flax"),
]


def models_of(name: str) -> ModuleType:
    path = Path(FOLDER, name, "models.py")
    spec = importlib.util.spec_from_file_location(f"flax_examples_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def definitions_of(name: str, *wanted: str) -> dict[str, Any]:
    """The functions and classes of an example's `train.py`, without its other imports."""
    tree = ast.parse(Path(FOLDER, name, "train.py").read_text())
    found = [x for x in tree.body if getattr(x, "name", None) in wanted]
    assert [x.name for x in found] == [x for x in wanted if x in {y.name for y in found}]
    assert len(found) == len(wanted), f"{name}/train.py has no {wanted}"
    for x in found:
        x.decorator_list = []
    scope = {
        "jax": jax,
        "jnp": jnp,
        "np": np,
        "nn": nn,
        "nnx": nnx,
        "optax": optax,
        "partial": partial,
        "common_utils": common_utils,
        "Array": Any,
    }
    code = ast.Module([ast.parse("from __future__ import annotations").body[0], *found], [])
    exec(compile(ast.fix_missing_locations(code), f"{name}/train.py", "exec"), scope)
    return scope


def tokens(step: int, length: int = 10, vocabulary: int = 31) -> np.ndarray:
    """Ragged sequences: the mask of each example, and of each device, has another size."""
    rng = np.random.default_rng(step)
    ids = rng.integers(1, vocabulary, (EXAMPLES, length))
    ends = 1 + (np.arange(EXAMPLES) * 5 + step) % length
    return np.where(np.arange(length) < ends[:, None], ids, 0)


def language_model(name: str, targets: bool):
    """lm1b, wmt, nlp_seq: the sum of the losses of valid tokens, divided by their number."""
    models = models_of(name)
    loss_of = definitions_of(name, "compute_weighted_cross_entropy")
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
        total, weight = loss_of["compute_weighted_cross_entropy"](logits, labels, weights)
        return total / weight

    def batch(step):
        return {"inputs": tokens(step), "targets": tokens(step + 100)}

    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    start = apply(keys, batch(0), run=model.init)
    return start["params"], loss, batch


def vae():
    model = models_of("vae").model(4)
    names = ("kl_divergence", "binary_cross_entropy_with_logits")
    loss_of = definitions_of("vae", *names)
    kl, cross_entropy = (jax.vmap(loss_of[name]) for name in names)  # as they are decorated

    def loss(params, b, *, rng):
        recon_x, mean, logvar = model.apply({"params": params}, b, rng)
        return cross_entropy(recon_x, b).mean() + kl(mean, logvar).mean()

    def batch(step):
        return (np.random.default_rng(step).random((EXAMPLES, 784)) > 0.5).astype(np.float32)

    return model.init(jax.random.key(0), batch(0), jax.random.key(1))["params"], loss, batch


RATES = {"vae": 1e-4}  # a sum over pixels
CASES = {
    "lm1b": lambda: language_model("lm1b", targets=False),
    "wmt": lambda: language_model("wmt", targets=True),
    "nlp_seq": lambda: language_model("nlp_seq", targets=True),
    "vae": vae,
}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("level", ["os", "p_g_os"])
@pytest.mark.parametrize("name", CASES)
def test_an_example_of_flax_matches_one_device(name, level, micro_batches):
    params, loss, batch = CASES[name]()
    params, tx, key = (
        nn.unbox(params),
        optax.sgd(RATES.get(name, 0.1), momentum=0.9),
        jax.random.key(7),
    )
    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    state, plan = gshard.shard_train_state(state, mesh, level, min_shard_size=16)
    step = gshard.make_train_step(loss, plan, rng=key, micro_batches=micro_batches)
    opt_state = tx.init(params)
    for i in range(2):
        state, metrics = step(state, batch(i))
        value, grads = jax.jit(jax.value_and_grad(loss))(
            params, batch(i), rng=jax.random.fold_in(key, i)
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(metrics["loss"], value, rtol=2e-6)
    assert all(x.kind != "gather" for x in step.loss_transfers), step
    for ours, theirs in zip(
        jax.tree.leaves(gshard.full_params(state)), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max() + 1e-6)


class WithStats(TrainState):
    batch_stats: Any = None


@pytest.mark.filterwarnings("ignore:.*over the axis 'batch'")
@pytest.mark.parametrize("level", ["os_g", "p_g_os"])
def test_the_resnet_of_imagenet_and_its_statistics_match_one_device(level):
    model = models_of("imagenet")._ResNet1(num_classes=7, dtype=jnp.float32)
    loss_of = definitions_of("imagenet", "cross_entropy_loss")
    loss_of["NUM_CLASSES"] = 7
    rng = np.random.default_rng(0)
    batch = {
        "image": rng.normal(size=(EXAMPLES, 16, 16, 3)).astype(np.float32),
        "label": rng.integers(0, 7, EXAMPLES),
    }
    start = model.init(jax.random.key(0), batch["image"])

    def loss(params, b, *, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = model.apply(variables, b["image"], mutable=["batch_stats"])
        weights = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
        value = loss_of["cross_entropy_loss"](logits, b["label"]) + 0.0001 * 0.5 * weights
        return value, {"batch_stats": new["batch_stats"]}

    mesh = gshard.make_mesh(devices=jax.devices()[:3])
    state = WithStats.create(apply_fn=None, tx=optax.sgd(0.1), **start)
    state, plan = gshard.shard_train_state(state, mesh, level, min_shard_size=16)
    state, metrics = gshard.make_train_step(loss, plan, mutable="batch_stats")(state, batch)
    plain = partial(jax.value_and_grad(loss, has_aux=True), batch_stats=start["batch_stats"])
    one = jax.vmap(plain, in_axes=None, axis_name="batch", axis_size=1)  # the model names the axis
    (value, new), grads = jax.tree.map(lambda x: x[0], jax.jit(one)(start["params"], batch))
    params = jax.tree.map(lambda p, g: p - 0.1 * g, start["params"], grads)
    np.testing.assert_allclose(metrics["loss"], value, rtol=2e-6)
    found = plan.unwrap(state)
    for ours, theirs in ((found.params, params), (found.batch_stats, new["batch_stats"])):
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max() + 1e-6)


def test_the_nnx_model_of_mnist_matches_one_device():
    scope = definitions_of("mnist", "CNN", "loss_fn")
    rng = np.random.default_rng(0)
    batches = [
        {
            "image": rng.normal(size=(EXAMPLES, 28, 28, 1)).astype(np.float32),
            "label": rng.integers(0, 10, EXAMPLES),
        }
        for _ in range(2)
    ]

    def made():
        model = scope["CNN"](nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param)

    def loss(model, b):
        return scope["loss_fn"](model, b, nnx.Rngs(dropout=3))

    (model, optimizer), plan = gshard.shard_train_state(
        made(), gshard.make_mesh(devices=jax.devices()[:4]), "os_g", min_shard_size=16
    )
    step = gshard.make_train_step(loss, plan, has_aux=True)
    plain, plain_optimizer = made()
    for b in batches:
        metrics = step(model, optimizer, b)
        (value, logits), grads = nnx.value_and_grad(loss, has_aux=True)(plain, b)
        plain_optimizer.update(plain, grads)
        np.testing.assert_allclose(metrics["loss"], value, rtol=5e-6)
        np.testing.assert_allclose(metrics["aux"], logits, rtol=0, atol=1e-4)
    for x, y in zip(
        jax.tree.leaves(nnx.state(plan.unwrap((model, optimizer))[0], nnx.Param)),
        jax.tree.leaves(nnx.state(plain, nnx.Param)),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max() + 1e-6)
