"""The LoRA example: what it exports are the base, the adapters, and both in one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import gshard
from examples import finetune_lora
from gshard.models import llama
from tests.jobs import launch
from tests.processes import clean_environment

WHY = "needs the test extra: pip install 'gshard[test]'"
safetensors = pytest.importorskip("safetensors.numpy", reason=WHY)


def test_a_merged_model_computes_what_base_and_adapters_do():
    model = llama.from_config(finetune_lora.SMALL, dtype="float32", remat="none")
    params = jax.jit(lambda: finetune_lora.init(model, seed=3))()
    params = {**params, "layers": jax.tree.map(lambda x: np.asarray(x) + 0.01, params["layers"])}
    tokens = np.arange(10, dtype=np.int32)[None]
    plain = jax.jit(lambda params: model.apply({"params": params}, tokens))
    found = plain(finetune_lora.merge(params))
    expected = jax.jit(lambda params: finetune_lora.apply(model, params, tokens))(params)
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)
    assert np.abs(plain(params) - expected).max() > 0.01


def test_adapters_are_float32_with_x64_too():
    model = llama.from_config(finetune_lora.SMALL)
    with jax.enable_x64(True):
        params = jax.eval_shape(lambda: finetune_lora.init(model, seed=0))
    assert {x.dtype.name for x in jax.tree.leaves(params)} == {"float32"}


@pytest.mark.slow
def test_two_processes_and_a_second_run(tmp_path):
    words = launch("--nproc_per_node", 2, "--virtual_devices", 2, finetune_lora.__file__, tmp_path)
    environment = clean_environment() | {"PYTHONPATH": str(Path(__file__).parents[1])}
    run = partial(subprocess.run, capture_output=True, text=True, env=environment, timeout=300)
    first = run([*words, "--steps", "3"], check=True)
    assert len({*re.findall(r"step 1: loss ([\d.]+)", first.stdout)}) == 1
    merged = safetensors.load_file(tmp_path / "merged/model.safetensors")
    assert merged.keys() == safetensors.load_file(tmp_path / "base/model.safetensors").keys()
    second = run([*words, "--steps", "3"])
    assert second.returncode == 2 and "has the results of another run" in second.stderr


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")
@pytest.mark.parametrize("level", ["dp", "zero1", "zero2", "zero3"])
def test_the_merged_model_is_the_base_with_adapters(tmp_path, monkeypatch, capsys, level):
    words = ["finetune_lora.py", str(tmp_path), "--level", level, "--steps", "20"]
    monkeypatch.setattr(sys, "argv", words)
    finetune_lora.main()
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", capsys.readouterr().out)]
    assert losses[-1] < losses[0] - 1

    base = safetensors.load_file(tmp_path / "base/model.safetensors")
    adapters = safetensors.load_file(tmp_path / "adapters.safetensors")
    merged = safetensors.load_file(tmp_path / "merged/model.safetensors")
    assert len(adapters) == 14 and all(".lora_" in name for name in adapters)
    assert merged.keys() == base.keys()
    kernel = "model.layers.1.self_attn.q_proj.weight"
    a, b = (adapters[f"layers.attention.q.lora_{x}"][1] for x in "ab")
    added = finetune_lora.SCALE * (a @ b).T
    assert np.abs(added).max() > 1e-3
    np.testing.assert_allclose(merged[kernel], base[kernel] + added, atol=1e-6)
    np.testing.assert_array_equal(merged["lm_head.weight"], base["lm_head.weight"])

    model = llama.from_config(json.loads((tmp_path / "merged/config.json").read_text()))
    model = model.clone(dtype=np.float32)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 33)).astype(np.int32)
    params = finetune_lora.init(model, seed=7)
    state, _ = finetune_lora.shard((params, optax.identity()), level)
    state = gshard.load_safetensors(
        state, tmp_path / "base", name_map="llama", only=finetune_lora.BASE
    )
    before = model.apply({"params": gshard.full_params(state)}, tokens)
    state = gshard.load_safetensors(
        state, tmp_path / "adapters.safetensors", only=finetune_lora.ADAPTERS
    )
    with_adapters = finetune_lora.apply(model, gshard.full_params(state), tokens)
    plain, _ = finetune_lora.shard((finetune_lora.merge(params), optax.identity()), level)
    plain = gshard.load_safetensors(plain, tmp_path / "merged", name_map="llama")
    without = model.apply({"params": gshard.full_params(plain)}, tokens)
    assert np.abs(before - with_adapters).max() > 0.1
    np.testing.assert_allclose(without, with_adapters, atol=1e-5, rtol=1e-5)
