"""The Gemma of Flax's examples, an NNX model, with weights of `transformers` and back."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard
from tests import checkouts

WHY = "needs torch and transformers: pip install 'gshard[pretrained]'"
torch = pytest.importorskip("torch", reason=WHY)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers", reason=WHY)
pytest.importorskip("jaxtyping", reason="Flax's gemma needs jaxtyping")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

V, D, F, L, H, E, T, WINDOW = 61, 16, 24, 2, 2, 8, 12, 4
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
MODELS = {  # theirs: class, config; ours: heads of keys and values, further fields; the map
    "gemma": ("Gemma", {}, 1, {}, "gemma"),
    "gemma, fused": ("Gemma", {}, H, {}, "gemma"),
    "gemma2": ("Gemma2", CAPS, 1, {"attn_logits_soft_cap": 50.0}, "gemma3"),
    "gemma3": (
        "Gemma3",
        {},
        1,
        {"use_qk_norm": True, "global_base_frequency": 1_000_000},
        "gemma3",
    ),
}


def theirs_of(name: str):
    """A model of theirs with random weights, norms included."""
    family, more, kv_heads, _, _ = MODELS[name]
    sizes = {"vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L}
    sizes |= {"num_attention_heads": H, "num_key_value_heads": kv_heads, "head_dim": E}
    if family != "Gemma":
        sizes |= {"sliding_window": WINDOW, "query_pre_attn_scalar": E}
        sizes["layer_types"] = ["sliding_attention", "full_attention"]
    suffix = "TextConfig" if family == "Gemma3" else "Config"
    config = getattr(transformers, family + suffix)(**sizes, **more)
    config._attn_implementation = "eager"  # the other ones have no soft cap
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.2 * torch.randn(x.shape))
    return model


def ours_of(name: str):
    """The same model of Flax, with other weights."""
    models = checkouts.module(checkouts.folder("flax", "examples", "gemma"), "transformer")
    family, more, kv_heads, fields, _ = MODELS[name]
    kinds = models.modules.AttentionType
    later = family != "Gemma"
    config = models.TransformerConfig(
        num_layers=L,
        num_embed=V,
        embed_dim=D,
        hidden_dim=F,
        num_heads=H,
        head_dim=E,
        num_kv_heads=kv_heads,
        final_logit_softcap=more.get("final_logit_softcapping"),
        use_post_attn_norm=later,
        use_post_ffw_norm=later,
        attention_types=(kinds.LOCAL_SLIDING if later else kinds.GLOBAL, kinds.GLOBAL),
        sliding_window_size=WINDOW,
        **fields,
    )
    return models.Transformer(config, rngs=nnx.Rngs(params=0))


@pytest.mark.parametrize(("level", "devices"), [("dp", 1), ("p_g_os", 3), ("p_g_os", 8)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_theirs_in_both_directions(tmp_path, name, level, devices):
    theirs, model, name_map = theirs_of(name), ours_of(name), MODELS[name][-1]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    theirs.save_pretrained(tmp_path / "a")
    ids = np.random.default_rng(0).integers(0, V, (2, T))
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    pair, _ = gshard.shard_train_state((model, optimizer), mesh, level, min_shard_size=8)

    def logits() -> np.ndarray:
        plain = nnx.clone(ours_of(name))
        nnx.update(plain, gshard.full_params(pair))
        plain.eval()
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (2, T, T))
        return np.asarray(plain(ids, jnp.broadcast_to(jnp.arange(T), (2, T)), None, mask)[0])

    before = logits()
    pair = gshard.load_safetensors(pair, tmp_path / "a", name_map=name_map)
    assert np.abs(before - expected).max() > 0.1
    np.testing.assert_allclose(logits(), expected, atol=1e-5, rtol=1e-5)

    gshard.save_safetensors(pair, tmp_path / "b", name_map=name_map, max_shard_bytes=5e9)
    theirs.config.save_pretrained(tmp_path / "b")
    again, said = type(theirs).from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(said[x] for x in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for tensor, x in theirs.state_dict().items():
        assert torch.equal(x, again.state_dict()[tensor]), tensor
