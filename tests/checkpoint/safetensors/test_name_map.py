"""Name maps: numbers land where a plain NumPy transposition puts them."""

from __future__ import annotations

import os

import jax
import numpy as np
import optax
import pytest

import gshard
from gshard.checkpoint.safetensors.name_maps import KNOWN
from gshard.models import gpt2, llama
from tests.reference import flat

WHY = "needs the test extra: pip install 'gshard[test]'"
safetensors = pytest.importorskip("safetensors.numpy", reason=WHY)

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

RANDOM = np.random.default_rng(0)
D, H, E, L = 6, 3, 4, 2  # width, heads, features of each, layers


def some(*shape, dtype=np.float32):
    return RANDOM.normal(size=shape).astype(dtype)


def simple(params, devices=3, level="p_g_os", **options):
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    return gshard.shard_train_state(
        (params, optax.sgd(0.1)), mesh, level, min_shard_size=1, **options
    )[0]


def zeros(params):
    return jax.tree.map(np.zeros_like, params)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert found[name].dtype == x.dtype, name
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def written(state, folder, name_map, **options):
    gshard.save_safetensors(state, folder / "x.safetensors", name_map=name_map, **options)
    return safetensors.load_file(folder / "x.safetensors")


# ---- rules --------------------------------------------------------------------------------------

Q, K, V = some(D, H, E), some(D, H, E), some(D, H, E)
STACK = some(L, D, H * E)
FUSED = np.concatenate([x.reshape(D, -1) for x in (Q, K, V)], axis=1)
PAIR = some(2, H, D, E)
RULES = {
    "transposed": ({"w": STACK[0]}, {"w": ("t", "in out -> out in")}, {"t": STACK[0].T}),
    "a stack, a tensor for each layer": (
        {"layers": {"w": STACK}},
        {"layers/w": ("h.{layer}.t", "layer in out -> out in")},
        {f"h.{i}.t": STACK[i].T for i in range(L)},
    ),
    "a layer in the path and in the name": (
        {"h_0": {"w": STACK[0]}, "h_1": {"w": STACK[1]}},
        {"h_{layer}/w": ("h.{layer}.t", "in out -> out in")},
        {f"h.{i}.t": STACK[i].T for i in range(L)},
    ),
    "heads merged": (
        {"w": Q},
        {"w": ("t", "in head feature -> (head feature) in")},
        {"t": Q.reshape(D, -1).T},
    ),
    "heads split": (
        {"w": Q.reshape(D, -1)},
        {"w": ("{head:a,b,c}", "in (head feature) -> feature in")},
        {name: Q[:, i].T for i, name in enumerate("abc")},
    ),
    "query, key and value in one tensor": (
        {"q": {"w": Q}, "k": {"w": K}, "v": {"w": V}},
        {"{part:q,k,v}/w": ("qkv", "in head feature -> in (part head feature)")},
        {"qkv": FUSED},
    ),
    "query, key and value of all layers in one tensor each": (
        {name: {"w": np.stack([x, -x])} for name, x in {"q": Q, "k": K, "v": V}.items()},
        {"{p:q,k,v}/w": ("h.{i}.qkv", "i in head feature -> in (p head feature)")},
        {"h.0.qkv": FUSED, "h.1.qkv": -FUSED},
    ),
    "keys and values of one weight in two tensors": (
        {"kv": PAIR},
        {"kv": ("{part:k,v}.t", "part head in feature -> (head feature) in")},
        {name: PAIR[i].transpose(0, 2, 1).reshape(-1, D) for i, name in enumerate(("k.t", "v.t"))},
    ),
    "other words for the same": (
        {"up": some(3), "down": some(4)},
        {"{x:up,down}": "{x:w3,w2}"},
        None,
    ),
    "a scalar": ({"s": np.float32(3)}, {"s": "scale"}, {"scale": np.float32(3)}),
}


@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("case", RULES)
def test_a_rule_in_both_directions(tmp_path, case, devices):
    params, rules, expected = RULES[case]
    if expected is None:
        expected = {"w3": params["up"], "w2": params["down"]}
    name_map = gshard.NameMap(rules)
    for dim in (0, -1):  # what is sharded: also a dimension of several axes, and a stack
        by_dim = {path: dim for path, x in flat(params).items() if np.ndim(x)}
        state = simple(params, devices, rules=by_dim or None)
        assert_same(written(state, tmp_path, name_map), expected)
        back = simple(zeros(params), devices, rules=by_dim or None)
        back = gshard.load_safetensors(back, tmp_path / "x.safetensors", name_map=name_map)
        assert_same(flat(gshard.full_params(back)), flat(params))


BAD_RULES = {
    "an axis of the weight alone": ({"w": ("t", "layer in -> in")}, "'layer' is an axis of one"),
    "an axis of the tensor alone": ({"w": ("t", "in -> out in")}, "'out' is an axis of one side"),
    "an open part": ({"{p}/w": ("t", "in -> (p in)")}, "'p' of the path must list its texts"),
    "a lost word": ({"h_{i}/w": "t"}, "'i' of the path must be in the name"),
    "an unknown word": ({"w": "h.{i}"}, "'i' of the name must be in the path"),
    "uneven words": ({"{x:a,b}": "{x:c}"}, "'x' must list as many texts"),
    "no arrow": ({"w": ("t", "in out")}, "the axes 'in out' must be those"),
    "an axis twice": ({"w": ("t", "in in -> in")}, "must be those of the weight"),
    "brackets": ({"w": ("t", "in (a -> a in")}, "must be those of the weight"),
    "no rule": ({"w": None}, "is None. Give the name of a tensor, or a pair"),
    "three parts": ({"w": ("t", "i -> i", 1)}, "Give the name of a tensor, or a pair"),
}


@pytest.mark.parametrize("case", BAD_RULES)
def test_rules_that_cannot_be(case):
    rules, said = BAD_RULES[case]
    with pytest.raises(gshard.GShardError) as caught:
        gshard.NameMap(rules)
    assert said in str(caught.value) and repr(next(iter(rules))) in str(caught.value)


def test_what_a_map_is_made_of():
    assert [x.pattern for x in gshard.NameMap({"w": "t"}, ignored="inv_freq$").ignores] == [
        "inv_freq$"
    ]
    for wrong in ({"tied": ["w"]}, {"rules": [("w", "t")]}):
        with pytest.raises(gshard.GShardError, match="NameMap: (tied|rules)=.* must be a mapping"):
            gshard.NameMap(**{"rules": {"w": "t"}} | wrong)
    assert gshard.NameMap({"h/{0}/w": "h.{0}.w"}).pieces("h/3/w", (2,))[0].name == "h.3.w"


W = {"w": some(4, 6)}
BAD_MAPS = {
    "rank": ({"w": ("t", "i -> i")}, "w is [4, 6], and its rule has the axes 'i'"),
    "sizes": (
        {"w": ("{p:a,b,c,d,e}", "i (p j) -> i j")},
        "w is [4, 6], and its rule has the axes 'i (p j)' with {'p': 5}",
    ),
    "too many unknown": ({"w": ("t", "(i j) k -> i j k")}, "has the axes '(i j) k'"),
    "two rules": ({"w": "t", "{x}": "{x}"}, "w fits the rules 'w' and '{x}'"),
    "no rule": ({"ww": "t"}, "no rule for w (did you mean ww?)"),
    "two entries in one place": (
        {"w": ("{x:k,k,v,q}", "x j -> j")},
        "k has room for 6 [6] numbers, and w has 12 in 2 places",
    ),
    "nobody's part": (
        {"{x:w,u}": ("t", "i j -> i (x j)")},
        "t has room for 48 [4, 12] numbers, and w has 24",
    ),
}


@pytest.mark.parametrize("case", BAD_MAPS)
def test_maps_that_do_not_fit(tmp_path, case):
    rules, said = BAD_MAPS[case]
    with pytest.raises(gshard.GShardError) as caught:
        gshard.save_safetensors(simple(W), tmp_path / "x", name_map=gshard.NameMap(rules))
    assert said in str(caught.value)
    assert not os.listdir(tmp_path)


def test_two_weights_of_one_name_or_of_two_dtypes_in_one_tensor(tmp_path):
    state = simple({"a": some(3), "b": some(3)})
    with pytest.raises(gshard.GShardError, match="room for 3 .* and b have 6"):
        rules = gshard.NameMap({"a": "t", "b": "t"})
        gshard.save_safetensors(state, tmp_path / "x", name_map=rules)
    state = simple({"a": some(3), "b": some(3, dtype=np.float16)})
    rules = gshard.NameMap({"{x:a,b}": ("t", "i -> x i")})
    with pytest.raises(gshard.GShardError, match="give these weights one dtype"):
        gshard.save_safetensors(state, tmp_path / "x", name_map=rules)


def test_weights_of_one_tensor_must_fill_it_before_they_are_read(tmp_path):
    safetensors.save_file({"t": some(3), "qk": some(6)}, tmp_path / "y")
    with pytest.raises(gshard.GShardError, match="t has room for 3 .* a and b have 6"):
        rules = gshard.NameMap({"a": "t", "b": "t"}, ignored=["qk"])
        gshard.load_safetensors(
            simple({"a": some(3), "b": some(3)}), tmp_path / "y", name_map=rules
        )
    rules = gshard.NameMap({"{x:q,k}": ("qk", "i -> (x i)")}, ignored=["^t$"])
    with pytest.raises(gshard.GShardError, match="qk has room for 6 .* and q has 3"):
        gshard.load_safetensors(simple({"q": some(3)}), tmp_path / "y", name_map=rules)
    both = simple({"q": some(3), "k": some(3)})  # one of them may be chosen
    found = gshard.load_safetensors(both, tmp_path / "y", name_map=rules, only="q")
    expected = safetensors.load_file(tmp_path / "y")["qk"][:3]
    assert_same({"q": gshard.full_params(found)["q"]}, {"q": expected})


def test_an_unknown_map(tmp_path):
    gshard.save_safetensors(simple(W), tmp_path / "x")
    for call in (gshard.save_safetensors, gshard.load_safetensors):
        with pytest.raises(gshard.GShardError, match="'lama' is unknown. Did you mean 'llama'"):
            call(simple(W), tmp_path / "x", name_map="lama")
        with pytest.raises(gshard.GShardError, match=f"Choose one of {', '.join(KNOWN)}"):
            call(simple(W), tmp_path / "x", name_map={"w": "t"})


# ---- the maps that gshard has ------------------------------------------------------------------


def hf_gpt2(w):
    """The tensors of Hugging Face's GPT-2, by hand; its Conv1D has kernels like Flax's."""
    dense = {"attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up", "mlp.c_proj": "down"}
    found = {"wte.weight": w["embed/embedding"], "wpe.weight": w["positions/embedding"]}
    found |= {"ln_f.weight": w["norm/scale"], "ln_f.bias": w["norm/bias"]}
    for i in range(2):
        for theirs, ours in dense.items():
            found[f"h.{i}.{theirs}.weight"] = w[f"layers/{ours}/kernel"][i]
            found[f"h.{i}.{theirs}.bias"] = w[f"layers/{ours}/bias"][i]
        for theirs, ours in {"ln_1": "attention_norm", "ln_2": "mlp_norm"}.items():
            found[f"h.{i}.{theirs}.weight"] = w[f"layers/{ours}/scale"][i]
            found[f"h.{i}.{theirs}.bias"] = w[f"layers/{ours}/bias"][i]
    return {f"transformer.{name}": x for name, x in found.items()}


def hf_llama(w):
    """The tensors of Hugging Face's Llama, by hand."""
    found = {"model.embed_tokens.weight": w["embed/embedding"], "lm_head.weight": w["head"].T}
    found["model.norm.weight"] = w["norm/scale"]
    for i in range(2):
        block = f"model.layers.{i}"
        for x in "qkvo":
            found[f"{block}.self_attn.{x}_proj.weight"] = w[f"layers/attention/{x}/kernel"][i].T
        for x in ("gate", "up", "down"):
            found[f"{block}.mlp.{x}_proj.weight"] = w[f"layers/mlp/{x}/kernel"][i].T
        found[f"{block}.input_layernorm.weight"] = w["layers/attention_norm/scale"][i]
        found[f"{block}.post_attention_layernorm.weight"] = w["layers/mlp_norm/scale"][i]
    return found


SIZES = {"layers": 2, "width": 8, "heads": 2, "vocabulary": 11}
SHIPPED = {
    "gpt2": (lambda: gpt2.setup(**SIZES, positions=6), hf_gpt2),
    "llama": (lambda: llama.setup(**SIZES, kv_heads=1, mlp=10, sequence=4), hf_llama),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_names_of_hugging_face(tmp_path, name):
    setup, theirs = SHIPPED[name]
    params = jax.tree.map(lambda x: some(*x.shape), jax.eval_shape(setup().state).params)
    state = simple(params, scan_axes={"^layers/": 0})
    assert_same(written(state, tmp_path, name), theirs(flat(params)))
    back = simple(zeros(params), scan_axes={"^layers/": 0})
    back = gshard.load_safetensors(back, tmp_path / "x.safetensors", name_map=name)
    assert_same(flat(gshard.full_params(back)), flat(params))


# ---- what a file has besides --------------------------------------------------------------------

MAP = gshard.NameMap(
    {"w": ("model.w", "i o -> o i"), "b": "model.b", "head": "head"},
    tied={"head": "model.b"},
    ignored=[r"\.mask$"],
    prefix="model.",
)


def test_tied_and_ignored_tensors_and_names_without_the_prefix(tmp_path):
    params = {"w": some(4, 6), "b": some(5)}
    whole = {"model.w": params["w"].T.copy(), "model.b": params["b"]}
    bare = {"w": whole["model.w"], "b": whole["model.b"]}
    assert_same(written(simple(params), tmp_path, MAP), whole)
    for tensors in (whole, bare):
        for more in ({}, {"head": params["b"]}, {"h.mask": some(2)}):
            safetensors.save_file({**tensors, **more}, tmp_path / "y")
            back = gshard.load_safetensors(simple(zeros(params)), tmp_path / "y", name_map=MAP)
            assert_same(gshard.full_params(back), params)


def test_a_name_with_and_without_the_prefix(tmp_path):
    params = {"w": some(4, 6), "b": some(5)}
    tensors = {"model.w": params["w"].T.copy(), "model.b": params["b"], "b": -params["b"]}
    safetensors.save_file(tensors, tmp_path / "y")
    with pytest.raises(gshard.GShardError, match="has both model.b and b"):
        gshard.load_safetensors(simple(params), tmp_path / "y", name_map=MAP)


def test_a_head_of_its_own_is_not_dropped(tmp_path):
    params = {"w": some(4, 6), "b": some(5)}
    other = params["b"].copy()
    other[-1] += 1
    for head in (other, some(4), params["b"].astype(np.float16)):
        tensors = {"model.w": params["w"].T.copy(), "model.b": params["b"], "head": head}
        safetensors.save_file(tensors, tmp_path / "y")
        with pytest.raises(gshard.GShardError, match="head is tied to model.b .* output head"):
            gshard.load_safetensors(simple(params), tmp_path / "y", name_map=MAP)
    mine = params | {"head": some(5)}
    del tensors["head"]
    safetensors.save_file(tensors, tmp_path / "y")
    with pytest.raises(gshard.GShardError, match=r"head \(a model with a tied head has none\)"):
        gshard.load_safetensors(simple(mine), tmp_path / "y", name_map=MAP)


def test_all_that_does_not_fit_is_said_at_once_and_each_name_once(tmp_path):
    params = {"layers": {n: some(2, 3, 3) for n in ("query", "key", "shape", "dtype")}}
    rules = gshard.NameMap({"layers/{x}": ("h.{i}.{x}", "i a b -> b a")})
    tensors = {f"h.{i}.{n}": some(3, 3) for i in range(2) for n in ("query", "shape", "dtype")}
    tensors["h.0.keys"] = some(3, 3)  # key is missing, and one of them has another name
    tensors["h.1.shape"] = some(3, 4)
    tensors["h.1.dtype"] = some(3, 3, dtype=np.float16)
    tensors["unrelated"] = some(1)
    safetensors.save_file(tensors, tmp_path / "x")
    with pytest.raises(gshard.GShardError) as caught:
        gshard.load_safetensors(simple(params), tmp_path / "x", name_map=rules)
    said = str(caught.value)
    assert "Missing in the file: h.0.key (did you mean h.0.keys?), h.1.key." in said
    assert "Not in the state: unrelated." in said
    assert "h.1.shape is [3, 4] in the file and [3, 3] in the state." in said
    assert "h.1.dtype is F16 in the file and float32 in the state." in said
    assert said.count("h.0.keys") == said.count("unrelated") == said.count("h.1.key") == 1
    assert "h.0.query" not in said and "h.0.shape" not in said


# ---- only ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["dp", "p_g_os"])
def test_only_some_weights(tmp_path, level):
    params = {"base": {"w": some(4, 6)}, "lora": {"a": some(4, 2), "b": some(2, 6)}}
    options = {"frozen": "^base/", "precision": "bfloat16"}
    state = simple(params, level=level, **options)
    gshard.save_safetensors(state, tmp_path / "x", only="^lora/")
    expected = {"lora.a": params["lora"]["a"], "lora.b": params["lora"]["b"]}
    assert_same(safetensors.load_file(tmp_path / "x"), expected)
    other = jax.tree.map(lambda x: -x, params)
    back = simple(other, level=level, **options)
    back = gshard.load_safetensors(back, tmp_path / "x", only=["^lora/a", "lora/b"])
    full = gshard.full_params(back)
    assert_same(full["lora"], params["lora"])
    assert_same(full["base"], other["base"])
    rules = gshard.NameMap({"base/w": "w", "lora/{x:a,b}": "x.{x}"})
    gshard.save_safetensors(state, tmp_path / "y", name_map=rules)
    gshard.save_safetensors(state, tmp_path / "z")
    for file, names in (("y", rules), ("z", None)):  # of files with the other weights too
        back = simple(other, level=level, **options)
        back = gshard.load_safetensors(back, tmp_path / file, name_map=names, only="lora/b")
        full = gshard.full_params(back)
        assert_same(full["lora"], {"a": other["lora"]["a"], "b": params["lora"]["b"]})
    for call in (gshard.save_safetensors, gshard.load_safetensors):
        with pytest.raises(gshard.GShardError, match=r"only=\[\] chooses nothing"):
            call(state, tmp_path / "x", only=[])
        with pytest.raises(gshard.GShardError, match="only='adapter' matches no weight"):
            call(state, tmp_path / "x", only=["lora", "adapter"])


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_only_some_weights_of_files_with_a_tied_head_or_without_the_prefix(tmp_path, prefix):
    params = {"w": some(4, 6), "b": some(5)}
    tensors = {f"{prefix}w": params["w"].T.copy(), f"{prefix}b": params["b"]}
    for head in ({}, {"head": params["b"]}):
        safetensors.save_file(tensors | head, tmp_path / "y")
        for name in "wb":
            old = zeros(params)
            back = gshard.load_safetensors(
                simple(old), tmp_path / "y", name_map=MAP, only=f"^{name}$"
            )
            assert_same(gshard.full_params(back), old | {name: params[name]})
    safetensors.save_file(tensors | {"head": -params["b"]}, tmp_path / "y")
    with pytest.raises(gshard.GShardError, match="head is tied to model.b"):
        gshard.load_safetensors(simple(params), tmp_path / "y", name_map=MAP, only="^w$")
