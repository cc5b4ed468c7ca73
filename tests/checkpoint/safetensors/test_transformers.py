"""Weights to and from Hugging Face's own models: the logits are the same, in both directions."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import gshard
from gshard.models import gpt2, llama

WHY = "needs torch and transformers: pip install 'gshard[pretrained]'"
torch = pytest.importorskip("torch", reason=WHY)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason=WHY)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

VOCABULARY, LENGTH = 61, 12
SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6}
LLAMA = SMALL | {"num_key_value_heads": 2, "intermediate_size": 44, "vocab_size": VOCABULARY}
STRETCH = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def hf_gpt2():
    sizes = {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 17}
    config = transformers.GPT2Config(vocab_size=VOCABULARY, **sizes)
    return transformers.GPT2LMHeadModel(config)


def hf_llama(**more):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **more))


MODELS = {
    "gpt2": (hf_gpt2, gpt2, "gpt2"),
    "llama": (lambda: hf_llama(rms_norm_eps=1e-3), llama, "llama"),
    "llama, tied": (lambda: hf_llama(tie_word_embeddings=True), llama, "llama"),
    "llama, stretched": (lambda: hf_llama(rope_parameters=STRETCH), llama, "llama"),
}
TABLE = [(model, level, n) for model in MODELS for level in ("dp", "p_g_os") for n in (1, 3, 8)]


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH)).astype(np.int32)


def make(name: str, folder: Path, **options):
    """A model of theirs with random weights, biases and norms included, saved by itself."""
    torch.manual_seed(0)
    theirs = MODELS[name][0]().eval()
    with torch.no_grad():
        for x in theirs.parameters():
            x.add_(0.2 * torch.randn(x.shape))
    theirs.save_pretrained(folder, **options)
    return theirs


def logits_of(theirs) -> np.ndarray:
    with torch.no_grad():
        return theirs(torch.tensor(tokens().astype(np.int64))).logits.numpy()


def shard(name: str, folder: Path, level: str, devices: int, **options):
    """Our model of their config with other weights, sharded, and a function of its logits."""
    config = json.loads((folder / "config.json").read_text())
    model = MODELS[name][1].from_config(config, dtype="float32", remat="none")

    def init():
        params = model.init(jax.random.key(1), tokens())["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    state, _ = gshard.shard_train_state(
        init, mesh, level, min_shard_size=8, scan_axes={"^layers/": 0}, **options
    )

    def logits(state) -> np.ndarray:
        return np.asarray(model.apply({"params": gshard.full_params(state)}, tokens()))

    return state, logits


@pytest.mark.parametrize(
    ("name", "level", "devices"),
    TABLE,
)
def test_logits_are_theirs_in_both_directions(tmp_path, name, level, devices):
    source, target = tmp_path / "source", tmp_path / "target"
    theirs = make(name, source, max_shard_size="12KB")
    assert len(list(source.glob("model-*.safetensors"))) > 2  # in shards
    state, logits = shard(name, source, level, devices)
    before = logits(state)
    state = gshard.load_safetensors(state, source, name_map=MODELS[name][2])
    expected = logits_of(theirs)
    assert np.abs(before - expected).max() > 0.1
    np.testing.assert_allclose(logits(state), expected, atol=1e-5, rtol=1e-5)

    changed = jax.tree.map(lambda x: x * 1.25, state.params)
    state = state.replace(params=changed)
    target.mkdir()
    shutil.copy(source / "config.json", target)
    gshard.save_safetensors(state, target, name_map=MODELS[name][2], max_shard_bytes=12_000)
    again, said = type(theirs).from_pretrained(target, output_loading_info=True)
    assert not any(said[x] for x in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert np.abs(logits_of(again) - expected).max() > 0.1
    np.testing.assert_allclose(logits_of(again.eval()), logits(state), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_that_goes_through_gshard_is_the_same_bit_for_bit(tmp_path, name):
    """In one file, with a master copy; its tensors are those that `save_pretrained` wrote."""
    load_file = pytest.importorskip("safetensors.numpy").load_file
    make(name, tmp_path / "a")
    state, _ = shard(name, tmp_path / "a", "p_g_os", 3, precision="bfloat16")
    state = gshard.load_safetensors(state, tmp_path / "a", name_map=MODELS[name][2])
    (tmp_path / "b").mkdir()
    gshard.save_safetensors(state, tmp_path / "b", name_map=MODELS[name][2], max_shard_bytes=5e9)
    assert os.listdir(tmp_path / "b") == ["model.safetensors"]
    theirs, ours = (load_file(tmp_path / x / "model.safetensors") for x in "ab")
    assert theirs.keys() == ours.keys()
    for tensor, x in theirs.items():
        np.testing.assert_array_equal(ours[tensor], x)
