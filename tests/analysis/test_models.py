"""The models of `gshard/models` and the configs that name them: sizes, numbers, training."""

from __future__ import annotations

import functools
import itertools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

import gshard
from examples import training
from gshard.analysis.config import read_config
from gshard.analysis.setup import load_setup
from gshard.cli.main import main
from gshard.models import gpt2, llama, moe
from gshard.models.by_slices import attend
from gshard.sharding.level import LEVELS
from tests.reference import assert_same_leaves, assert_same_values, flat
from tests.tiers import quick

CONFIGS = Path(__file__).parents[2] / "gshard" / "models" / "configs"
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "llama-1b": 1_235_814_400,
    "llama-7b": 6_738_415_616,
    "llama-70b": 68_976_648_192,
    "moe-8x7b": 46_702_792_704,
    "mixtral-8x7b": 46_702_792_704,
}
SMALL = {"layers": 2, "heads": 4, "width": 32, "vocabulary": 96, "sequence": 256}
SMALL |= {"dtype": "float32", "optimizer": "sgd", "learning_rate": 0.1}
SETUPS = {
    "gpt2": functools.partial(gpt2.setup, **SMALL, positions=256),
    "llama": functools.partial(llama.setup, **SMALL, kv_heads=2, mlp=64),
    "llama tied": functools.partial(llama.setup, **SMALL, kv_heads=2, mlp=64, tied=True),
    "moe": functools.partial(moe.setup, **SMALL, kv_heads=2, mlp=48, experts=4, group=128),
}
ROWS, STEPS = 8, 4
FOUR = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))


# ---- sizes --------------------------------------------------------------------------------------


def parameters(name):
    config = read_config(str(CONFIGS / f"{name}.toml"))
    state = jax.eval_shape(load_setup(config.model, config.arguments).state)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(state.params))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_has_the_number_of_parameters_of_its_paper(name):
    assert parameters(name) == PUBLISHED[name]
    assert f"{PUBLISHED[name]:,} parameters" in (CONFIGS / f"{name}.toml").read_text()


def test_a_trillion_parameters():
    """12 D^2 + 13 D for a layer, the embeddings, and the last norm."""
    D = 25600
    wanted = 128 * (12 * D**2 + 13 * D) + (51200 + 2048) * D + 2 * D
    assert parameters("trillion") == wanted == 1_008_038_758_400


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.stem)
def test_a_config_can_be_planned_with(path):
    config = read_config(str(path))
    assert config.devices
    setup = load_setup(config.model, config.arguments)
    for level in config.levels:
        _, plan = gshard.shard_train_state(setup.state, FOUR, level, **setup.shard)
        stacks = [x for x in jax.tree.leaves(plan.params) if x.path.startswith("layers/")]
        divided = {x.dim for x in stacks}
        assert 0 not in divided  # inside a layer, never between layers
        assert (divided != {None}) == (level == "p_g_os")


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (llama, {"heads": 3}, "width=4096 must be a multiple of 2 x heads = 2 x 3 = 6"),
        (llama, {"kv_heads": 5}, "heads=32 must be a multiple of kv_heads=5"),
        (llama, {"layers": 0}, "at least 1"),
        (llama, {"sequence": 0}, "sequence=0 must be at least 1"),
        (llama, {"remat": "ful"}, "remat='ful' is unknown. Did you mean 'full'?"),
        (llama, {"dtype": "int8"}, "Choose one of bfloat16, float32"),
        (gpt2, {"optimizer": "adam"}, "Did you mean 'adamw'?"),
        (gpt2, {"heads": 7}, "width=768 must be a multiple of heads=7"),
        (gpt2, {"sequence": 2048}, "sequence=2048 must be at most positions=1024"),
        (moe, {"chosen": 9}, "chosen=9 must be from 1 to experts=8"),
        (moe, {"sequence": 640}, "sequence=640 must be a multiple of group=512"),
        (moe, {"sequence": 0}, "sequence=0 must be at least 1"),
        (moe, {"capacity": float("inf")}, "capacity=inf must be a number above 0"),
    ],
)
def test_sizes_that_cannot_be(make, given, said):
    with pytest.raises(gshard.GShardError, match="(?s)^[^\n]*$") as caught:
        make.setup(**given)
    assert said in str(caught.value)


# ---- training -----------------------------------------------------------------------------------


@functools.cache
def batches(sequence):
    """Texts with something to learn: every token is the last one and a step of its row."""
    rng = np.random.default_rng(0)
    first, step = rng.integers(0, 96, (2, STEPS, ROWS, 1))
    text = (first + (1 + step % 3) * np.arange(sequence + 1)) % 96
    return [{"tokens": x[:, :-1], "next": x[:, 1:]} for x in text.astype(np.int32)]


@functools.cache
def on_one_device(name):
    setup = SETUPS[name]()

    @jax.jit
    def step(state, batch):
        loss, grads = jax.value_and_grad(setup.loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    state, losses = jax.jit(setup.state)(), []
    for batch in batches(256):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, flat(state.params)


@pytest.mark.parametrize(
    ("name", "level"),
    quick(
        itertools.product(SETUPS, LEVELS),
        [("gpt2", "p_g_os"), ("llama tied", "os_g"), ("moe", "p_g_os")],
    ),
)
def test_a_training_is_that_of_one_device(name, level):
    setup = SETUPS[name]()
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state(
        setup.state, mesh, level, min_shard_size=64, **setup.shard
    )
    step = gshard.make_train_step(setup.loss_fn, plan, micro_batches=2, **setup.step)
    found = []
    for batch in batches(256):
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
    losses, params = on_one_device(name)
    assert_same_values(found, losses, 1e-5)
    assert_same_leaves(flat(gshard.full_params(state)), params, 1e-4, relative_to="leaf")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("precision", [None, "bfloat16"])
def test_precision_says_what_parameters_are_stored_in(precision):
    setup = SETUPS["llama"](precision=precision)
    state, _ = gshard.shard_train_state(setup.state, FOUR, "os", min_shard_size=64, **setup.shard)
    dtypes = {x.dtype.name for x in jax.tree.leaves(state.params)}
    assert dtypes == {precision or "float32"}


WITH_DEMO = SETUPS | {"demo with experts": functools.partial(training.setup, experts=8)}


@pytest.mark.parametrize("name", WITH_DEMO)
def test_parameters_are_float32_with_x64_too(name):
    with jax.enable_x64(True):
        params = jax.eval_shape(WITH_DEMO[name]().state).params
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}


def test_remat_changes_memory_and_no_number():
    memory, grads = {}, {}
    for remat in ("none", "dots", "full"):
        setup = llama.setup(**SMALL | {"layers": 8}, kv_heads=4, mlp=256, remat=remat)
        params = jax.jit(setup.state)().params
        batch = batches(256)[0]
        program = jax.jit(jax.grad(setup.loss_fn)).lower(params, batch).compile()
        memory[remat] = program.memory_analysis().temp_size_in_bytes
        grads[remat] = flat(program(params, batch))
    assert memory["none"] > 1.2 * memory["dots"] > 1.2**2 * memory["full"]
    for remat in ("dots", "full"):
        assert_same_leaves(grads[remat], grads["none"], 1e-5, relative_to="leaf")


# ---- parts --------------------------------------------------------------------------------------


def test_attention_by_slices_is_attention():
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, 96, n, 8)) for key, n in zip(keys, (6, 2, 2), strict=True)
    )
    found = attend(q, k, v, 32)
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(found, wanted, atol=2e-6)


X, K, D, F, T = 4, 2, 16, 24, 32


def through_experts(x_BxTxD, **routing):
    """Outputs and balance of experts, and their parameters."""
    experts = moe.Experts(F, moe.Routing(X, K, **routing), jnp.float32)
    params = experts.init(jax.random.key(1), x_BxTxD)["params"]
    return *experts.apply({"params": params}, x_BxTxD), params


def test_a_group_is_of_one_sequence():
    for tokens in (24, 0):
        said = f"a sequence of {tokens} tokens must be a multiple of group=16"
        with pytest.raises(gshard.GShardError, match=said):
            through_experts(jnp.zeros((2, tokens, D)), group=16)


def test_every_token_goes_to_its_experts():
    x_BxTxD = jax.random.normal(jax.random.key(0), (2, T, D))
    y_BxTxD, uneven, params = through_experts(x_BxTxD, capacity=X / K, group=16)
    scores_BxTxX = np.asarray(x_BxTxD @ params["router"]["kernel"])
    least_BxTx1 = np.sort(scores_BxTxX)[..., -K, None]
    weights_BxTxX = np.exp(scores_BxTxX) * (scores_BxTxX >= least_BxTx1)
    weights_BxTxX /= weights_BxTxX.sum(-1, keepdims=True)
    wanted_BxTxD = sum(
        weights_BxTxX[..., [e]]
        * (jax.nn.silu(x_BxTxD @ params["gate"][e]) * (x_BxTxD @ params["up"][e]))
        @ params["down"][e]
        for e in range(X)
    )
    np.testing.assert_allclose(y_BxTxD, wanted_BxTxD, atol=2e-5)
    assert 0.9 < uneven < X


def test_a_full_expert_is_passed_by_later_tokens_alone():
    x_BxTxD = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (D,)), (1, T, D))
    y_BxTxD, uneven, _ = through_experts(x_BxTxD, capacity=1.0, group=16)
    used_GxS = (jnp.abs(y_BxTxD).max(-1) > 0).reshape(2, 16)
    slots = moe.Routing(X, K, capacity=1.0).slots(16)
    np.testing.assert_array_equal(used_GxS, np.tile(np.arange(16) < slots, (2, 1)))
    assert uneven > 1.2  # all of them chose the same two


@pytest.mark.parametrize("chosen", [1, 2])
def test_the_balance_of_tokens_that_all_go_to_the_same_experts(chosen):
    experts = moe.Experts(F, moe.Routing(X, chosen), jnp.float32)
    params = experts.init(jax.random.key(1), jnp.ones((2, T, D)))["params"]
    params["router"]["kernel"] = jnp.zeros((D, X)).at[:, 3].set(9.0)
    _, uneven = experts.apply({"params": params}, jnp.ones((2, T, D)))
    assert uneven == pytest.approx(X / chosen)


def test_the_router_computes_in_float32_on_every_device():
    experts = moe.Experts(F, moe.Routing(X, K), jnp.bfloat16)
    x_BxTxD = jnp.zeros((2, T, D), jnp.bfloat16)
    params = experts.init(jax.random.key(1), x_BxTxD)
    products = [
        e.params["precision"]
        for e in jax.make_jaxpr(experts.apply)(params, x_BxTxD).eqns
        if e.primitive.name == "dot_general" and e.outvars[0].aval.shape[-1] == X
    ]
    assert products == [(jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)]


def test_no_token_depends_on_a_later_one():
    x_BxTxD = jax.random.normal(jax.random.key(0), (1, T, D))
    y_BxTxD, *_ = through_experts(x_BxTxD, capacity=0.5, group=T)
    changed_BxTxD = x_BxTxD.at[:, T // 2 :].add(jax.random.normal(jax.random.key(2), (D,)))
    z_BxTxD, *_ = through_experts(changed_BxTxD, capacity=0.5, group=T)
    np.testing.assert_allclose(z_BxTxD[:, : T // 2], y_BxTxD[:, : T // 2], atol=1e-6)
    assert (np.abs(y_BxTxD).max(-1) == 0).any()  # experts were full


def test_the_smallest_config_is_compiled_and_forecast(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing that was compiled before
    words = ["plan", str(CONFIGS / "gpt2-smallest.toml"), "--levels", "os_g"]
    assert main([*words, "--compile", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    forecast, compiled = found["levels"]["os_g"], found["compiled"]["os_g"]
    assert compiled["needs"] * 0.9 < forecast["peak"] < compiled["needs"] * 1.1
    sent = sum(row["wire_bytes"] for row in compiled["collectives"] if not row["scalar"])
    assert sent == pytest.approx(forecast["wire"], rel=1e-3)
