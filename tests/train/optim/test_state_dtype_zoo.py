"""Every optimizer of optax with a state to store in 8 bits trains as it does in float32.

200 steps of a classifier over two devices, with new examples in each. At the rate of the other
tests some optimizers learn nothing, or so unsteadily that two runs in float32 differ by more than
1 % too: these have another rate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import gshard
from gshard.sharding.quantized_array import quantized_arrays
from tests.optimizers import BY_RATE, CONTRIB_BY_RATE, OPTIMIZERS
from tests.tiers import quick

STEPS, EXAMPLES, INPUTS, HIDDEN, CLASSES = 200, 64, 32, 129, 16
OTHER_RATES = {
    "acprop": lambda: contrib.acprop(1e-3),
    "dadapt_adamw": lambda: contrib.dadapt_adamw(1.0),  # it finds a factor of the rate
    "lion": lambda: optax.lion(1e-3),
    "prodigy": lambda: contrib.prodigy(1.0),
    "simplified_ademamix": lambda: contrib.simplified_ademamix(1e-4),
    "signum": lambda: optax.signum(1e-3),
}
COMBINED = (
    "clip, adamw, warm-up, mask", "lamb, masked decay", "lookahead",
    "MultiSteps", "masked", "mechanize", "schedule_free", "ema", "trace",
    "inject_hyperparams", "apply_if_finite(MultiSteps(lamb))",
)  # fmt: skip
# No array of their state has the shape of a parameter, or all that have it are copies of one.
WITHOUT_MOMENTS = {"fromage", "optimistic_gradient_descent", "schedule_free_sgd", "sgd", "sign_sgd"}
NAMES = [x for x in (*BY_RATE, *CONTRIB_BY_RATE, *COMBINED) if x not in WITHOUT_MOMENTS]


def params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    shapes = {
        "first": (INPUTS, 2 * HIDDEN),
        "second": (2 * HIDDEN, HIDDEN),
        "stack": (2, HIDDEN, HIDDEN),
        "last": (HIDDEN, CLASSES),
    }
    found = {k: rng.normal(size=s) / s[-2] ** 0.5 for k, s in shapes.items()}
    return {k: x.astype(np.float32) for k, x in found.items()} | {
        "bias": np.zeros(CLASSES, np.float32)
    }


def batches() -> dict[str, np.ndarray]:
    """Draws classes with the probabilities that a fixed network gives them."""
    rng = np.random.default_rng(1)
    inner, outer = rng.normal(size=(INPUTS, 64)) / 4, rng.normal(size=(64, CLASSES)) / 2
    x = rng.normal(size=(STEPS, EXAMPLES, INPUTS)).astype(np.float32)
    logits = np.tanh(x @ inner) @ outer
    y = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    return {"x": x, "y": y.astype(np.int32)}


def loss_of(p: Any, b: Any) -> jax.Array:
    x = jnp.tanh(jnp.tanh(b["x"] @ p["first"]) @ p["second"])
    for w in p["stack"]:
        x = x + jnp.tanh(x @ w)
    logits = x @ p["last"] + p["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, b["y"]).mean()


def losses(name: str, state_dtype: str | None) -> np.ndarray:
    """Trains in one program, a loop of the user's own; the loss of each step."""
    tx = OTHER_RATES.get(name, OPTIMIZERS[name])()
    state, plan = gshard.shard_train_state(
        (params(), tx),
        gshard.make_mesh(devices=jax.devices()[:2]),
        "os_g",
        min_shard_size=512,
        precision=gshard.Precision("float32", state_dtype=state_dtype),
    )
    assert bool(quantized_arrays(plan.opt_state)) == (state_dtype is not None)
    gradient = gshard.value_and_grad(loss_of, plan)

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        value, grads = gradient(state.params, batch)
        updates, opt_state = state.tx.update(grads, state.opt_state, state.params, value=value)
        new = optax.apply_updates(state.params, updates)
        return state.replace(params=new, opt_state=opt_state), value

    return np.asarray(jax.jit(lambda state, xs: jax.lax.scan(step, state, xs)[1])(state, batches()))


@pytest.mark.parametrize("name", quick(NAMES, []))
def test_8_bits_cost_at_most_1_percent_of_the_loss(name):
    exact, narrow = losses(name, None), losses(name, "int8")
    assert exact[-50:].mean() < 0.98 * exact[:5].mean(), "it does not train"
    assert (exact != narrow).any()
    assert narrow[-50:].mean() < 1.01 * exact[-50:].mean()
