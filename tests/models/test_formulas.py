"""The models compute the formulas of their papers: here in NumPy, float64, and for one text.

Letters: T tokens, D width, H heads of queries, K of keys and values, E features of a head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.models import gpt2, llama, moe

V, T, LAYERS = 61, 24, 2
GPT2 = {"model_type": "gpt2", "n_embd": 24, "n_layer": LAYERS, "n_head": 3, "vocab_size": V}
GPT2 |= {"n_positions": 32}
LLAMA = {"model_type": "llama", "hidden_size": 60, "num_hidden_layers": LAYERS, "vocab_size": V}
LLAMA |= {"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 44}
LLAMA |= {"rms_norm_eps": 1e-3, "rope_theta": 50.0}
STRETCH = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCH |= {"original_max_position_embeddings": 40}
TOKENS = np.random.default_rng(0).integers(0, V, T)
NEXT = np.random.default_rng(1).integers(0, V, T)


def parameters(model, *args):
    """Random ones, biases and norms too: for the model, and in float64 with a list of layers."""
    params = jax.jit(model.init)(jax.random.key(0), *args)["params"]
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda x: np.asarray(x + 0.2 * rng.normal(size=x.shape), "f4"), params)
    wide = jax.tree.map(lambda x: x.astype(float), params)
    layers = [jax.tree.map(lambda x, i=i: x[i], wide["layers"]) for i in range(LAYERS)]
    return {"params": params}, wide, layers


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def attention(q_TxHxE, k_TxHxE, v_TxHxE):
    scores_HxTxT = np.einsum("qhe,khe->hqk", q_TxHxE, k_TxHxE) / np.sqrt(q_TxHxE.shape[-1])
    scores_HxTxT[:, np.triu(np.ones((T, T), bool), 1)] = -np.inf
    return np.einsum("hqk,khe->qhe", softmax(scores_HxTxT), v_TxHxE).reshape(T, -1)


# ---- GPT-2: Radford et al., 2019; gelu_new of its code ------------------------------------------


def layer_norm(x, norm):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * norm["scale"] + norm["bias"]


def test_gpt2():
    model = gpt2.from_config(GPT2)
    given, params, layers = parameters(model, TOKENS[None])
    x_TxD = params["embed"]["embedding"][TOKENS] + params["positions"]["embedding"][:T]
    for layer in layers:
        affine = lambda x, at: x @ at["kernel"] + at["bias"]  # noqa: E731
        qkv = affine(layer_norm(x_TxD, layer["attention_norm"]), layer["qkv"])
        q, k, v = (x.reshape(T, 3, 8) for x in np.split(qkv, 3, -1))
        x_TxD = x_TxD + affine(attention(q, k, v), layer["out"])
        h = affine(layer_norm(x_TxD, layer["mlp_norm"]), layer["up"])
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x_TxD = x_TxD + affine(h, layer["down"])
    wanted = layer_norm(x_TxD, params["norm"]) @ params["embed"]["embedding"].T
    found = jax.jit(model.apply)(given, TOKENS[None])[0]
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


# ---- Llama: Touvron et al., 2023; rotate_half and llama3 of Hugging Face's weights ---------------


def rms_norm(x, norm, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * norm["scale"]


def rotated(x_TxHxE, theta, stretch):
    E = x_TxHxE.shape[-1]
    speeds = []
    for i in range(0, E, 2):
        speed = theta ** (-i / E)
        if stretch is not None:
            waves, longest = stretch["original_max_position_embeddings"], 2 * np.pi / speed
            low, high = stretch["low_freq_factor"], stretch["high_freq_factor"]
            smooth = (waves / longest - low) / (high - low)
            if longest > waves / low:
                speed = speed / stretch["factor"]
            elif longest >= waves / high:
                speed = (1 - smooth) * speed / stretch["factor"] + smooth * speed
        speeds.append(speed)
    angle_Tx1xE = np.outer(np.arange(T), speeds + speeds)[:, None]
    half_TxHxE = np.concatenate([-x_TxHxE[..., E // 2 :], x_TxHxE[..., : E // 2]], -1)
    return x_TxHxE * np.cos(angle_Tx1xE) + half_TxHxE * np.sin(angle_Tx1xE)


def llama_logits(params, layers, mlp, epsilon, theta, stretch=None, H=6, K=2):
    x_TxD = params["embed"]["embedding"][TOKENS]
    for layer in layers:
        kernel = {name: at["kernel"] for name, at in layer["attention"].items()}
        h_TxD = rms_norm(x_TxD, layer["attention_norm"], epsilon)
        q = rotated((h_TxD @ kernel["q"]).reshape(T, H, -1), theta, stretch)
        k = rotated((h_TxD @ kernel["k"]).reshape(T, K, -1), theta, stretch)
        v = (h_TxD @ kernel["v"]).reshape(T, K, -1)
        k, v = np.repeat(k, H // K, 1), np.repeat(v, H // K, 1)
        x_TxD = x_TxD + attention(q, k, v) @ kernel["o"]
        x_TxD = x_TxD + mlp(layer, x_TxD)
    return rms_norm(x_TxD, params["norm"], epsilon) @ params["head"]


@pytest.mark.parametrize("stretch", [None, STRETCH])
def test_llama(stretch):
    model = llama.from_config(LLAMA | {"rope_scaling": stretch}, dtype="float32")
    given, params, layers = parameters(model, TOKENS[None])

    def mlp(layer, x_TxD):
        h_TxD = rms_norm(x_TxD, layer["mlp_norm"], 1e-3)
        gate, up, down = (layer["mlp"][name]["kernel"] for name in ("gate", "up", "down"))
        return (silu(h_TxD @ gate) * (h_TxD @ up)) @ down

    wanted = llama_logits(params, layers, mlp, 1e-3, 50.0, stretch)
    found = jax.jit(model.apply)(given, TOKENS[None])[0]
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


# ---- Mixtral: Jiang et al., 2024, section 2.1; the balance of Hugging Face, for each layer -------


def test_mixtral():
    """Where no expert is full."""
    sizes = llama.Sizes(LAYERS, 60, 6, 2, 44, V, theta=50.0)
    model = moe.MoE(sizes, moe.Routing(4, 2, capacity=2.0), jnp.float32)
    given, params, layers = parameters(model, TOKENS[None], NEXT[None])
    unevenness = []

    def mlp(layer, x_TxD):
        h_TxD, y_TxD = rms_norm(x_TxD, layer["experts_norm"], 1e-5), np.zeros_like(x_TxD)
        experts = layer["experts"]
        scores_TxX = h_TxD @ experts["router"]["kernel"]
        best_Tx2 = np.argsort(-scores_TxX)[:, :2]
        for t, best in enumerate(best_Tx2):
            for weight, e in zip(softmax(scores_TxX[t, best]), best, strict=True):
                gate, up, down = (experts[name][e] for name in ("gate", "up", "down"))
                y_TxD[t] += weight * (silu(h_TxD[t] @ gate) * (h_TxD[t] @ up)) @ down
        used = np.stack([(best_Tx2 == e).any(1).mean() for e in range(4)])
        unevenness.append(4 * (used * softmax(scores_TxX).mean(0)).sum())
        return y_TxD

    logits = llama_logits(params, layers, mlp, 1e-5, 50.0)
    cross_entropy = -np.log(softmax(logits)[np.arange(T), NEXT]).mean()
    wanted = cross_entropy + 0.02 * np.mean(unevenness)
    found = jax.jit(model.apply)(given, TOKENS[None], NEXT[None])
    assert found == pytest.approx(wanted, rel=1e-5)
