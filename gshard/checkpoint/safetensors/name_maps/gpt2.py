"""GPT-2: `gshard.models.gpt2` and the files of Hugging Face's `GPT2LMHeadModel`.

Its `Conv1D` has kernels like Flax's. The head is the embedding. The first files on the hub have
names without `transformer.`, and the causal mask of every layer.
"""

from __future__ import annotations

from gshard.checkpoint.safetensors.name_map import NameMap

_BLOCK = "transformer.h.{layer}."

GPT2 = NameMap(
    {
        "embed/embedding": "transformer.wte.weight",
        "positions/embedding": "transformer.wpe.weight",
        "layers/{norm:attention_norm,mlp_norm}/scale": (
            _BLOCK + "{norm:ln_1,ln_2}.weight",
            "layer width -> width",
        ),
        "layers/{norm:attention_norm,mlp_norm}/bias": (
            _BLOCK + "{norm:ln_1,ln_2}.bias",
            "layer width -> width",
        ),
        "layers/{dense:qkv,out,up,down}/kernel": (
            _BLOCK + "{dense:attn.c_attn,attn.c_proj,mlp.c_fc,mlp.c_proj}.weight",
            "layer in out -> in out",
        ),
        "layers/{dense:qkv,out,up,down}/bias": (
            _BLOCK + "{dense:attn.c_attn,attn.c_proj,mlp.c_fc,mlp.c_proj}.bias",
            "layer out -> out",
        ),
        "norm/scale": "transformer.ln_f.weight",
        "norm/bias": "transformer.ln_f.bias",
    },
    tied={"lm_head.weight": "transformer.wte.weight"},
    ignored=[r"^(transformer\.)?h\.\d+\.attn\.(masked_)?bias$"],
    prefix="transformer.",
)
