"""Parameters all-gathered at their first use and re-gathered in the backward pass (FSDP, ZeRO-3).

The user's loss is traced to a jaxpr and evaluated with sharded parameters:

    loss(params, batch)
        | jax.make_jaxpr
        v
    jaxpr --- interpreter ---> cast, reshape, transpose   stay on the shard (lazy_param)
                |              jit                        is entered
                |              scan, checkpoint           are rebuilt with the gather in their body
                |              anything else              all-gathers its operands
                v
    gather_bucket: all-gather in the forward pass; in the backward pass re-gather,
                   then reduce-scatter the gradient

`use_analysis` finds where a parameter is used first and which ones share a bucket.

Start reading: `interpreter`.
"""
