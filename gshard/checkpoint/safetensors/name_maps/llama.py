"""Llama: `gshard.models.llama` and the files of Hugging Face's `LlamaForCausalLM`.

PyTorch's kernels are transposed. A tied head is not in the files, or repeats the embedding.
"""

from __future__ import annotations

from gshard.checkpoint.safetensors.name_map import NameMap

_BLOCK = "model.layers.{layer}."

LLAMA = NameMap(
    {
        "embed/embedding": "model.embed_tokens.weight",
        "layers/{norm:attention_norm,mlp_norm}/scale": (
            _BLOCK + "{norm:input_layernorm,post_attention_layernorm}.weight",
            "layer width -> width",
        ),
        "layers/attention/{part:q,k,v,o}/kernel": (
            _BLOCK + "self_attn.{part}_proj.weight",
            "layer in out -> out in",
        ),
        "layers/mlp/{part:gate,up,down}/kernel": (
            _BLOCK + "mlp.{part}_proj.weight",
            "layer in out -> out in",
        ),
        "norm/scale": "model.norm.weight",
        "head": ("lm_head.weight", "in out -> out in"),
    },
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    ignored=[r"\.rotary_emb\.inv_freq$"],
    prefix="model.",
)
