"""The user's optax optimizer on shards: updates, offload, matrix products.

Start reading: `optimizer`.
"""
