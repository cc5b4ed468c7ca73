"""Gemma: the NNX model of Flax's `examples/gemma` and the files of Hugging Face's Gemma.

Flax keeps heads as axes of their own, and keys and values, or all three, in one kernel. Gemma 2 and
3 have norms after attention and MLP as well, which gives a name of Gemma 1 another meaning.
"""

from __future__ import annotations

from gshard.checkpoint.safetensors.name_map import NameMap

_BLOCK = "model.layers.{layer}."
_HEADS = "head in feature -> (head feature) in"

_COMMON: dict[str, str | tuple[str, str]] = {
    "embedder/embedding": "model.embed_tokens.weight",
    "layers/{layer}/attn/q_einsum/kernel": (_BLOCK + "self_attn.q_proj.weight", _HEADS),
    "layers/{layer}/attn/kv_einsum/kernel": (
        _BLOCK + "self_attn.{part:k,v}_proj.weight",
        f"part {_HEADS}",
    ),
    "layers/{layer}/attn/qkv_einsum/kernel": (
        _BLOCK + "self_attn.{part:q,k,v}_proj.weight",
        f"part {_HEADS}",
    ),
    "layers/{layer}/attn/attn_vec_einsum/kernel": (
        _BLOCK + "self_attn.o_proj.weight",
        "head feature out -> out (head feature)",
    ),
    "layers/{layer}/mlp/{part:gate,up,down}_proj/kernel": (
        _BLOCK + "mlp.{part}_proj.weight",
        "in out -> out in",
    ),
    "final_norm/scale": "model.norm.weight",
}
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}

GEMMA = NameMap(
    _COMMON
    | {
        "layers/{layer}/{norm:pre_attention_norm,pre_ffw_norm}/scale": (
            _BLOCK + "{norm:input_layernorm,post_attention_layernorm}.weight"
        ),
    },
    tied=_TIED,
    prefix="model.",
)
GEMMA3 = NameMap(
    _COMMON
    | {
        "layers/{layer}/{when:pre,post}_attention_norm/scale": (
            _BLOCK + "{when:input,post_attention}_layernorm.weight"
        ),
        "layers/{layer}/{when:pre,post}_ffw_norm/scale": (
            _BLOCK + "{when}_feedforward_layernorm.weight"
        ),
        "layers/{layer}/attn/_{part:query,key}_norm/scale": (
            _BLOCK + "self_attn.{part:q,k}_norm.weight"
        ),
    },
    tied=_TIED,
    prefix="model.",
)
