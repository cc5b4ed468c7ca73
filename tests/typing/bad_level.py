"""A level that does not exist."""

from __future__ import annotations

import jax.numpy as jnp
import optax

import gshard

state = {"w": jnp.ones((64, 32))}, optax.adam(1e-3)
mesh = gshard.make_mesh({"data": 8})
gshard.shard_train_state(state, mesh, "os_g")
gshard.shard_train_state(state, mesh, "p_g_oss")  # wrong
gshard.shard_train_state(state, mesh, level="zero4")  # wrong
gshard.shard_train_state(state, mesh, "os", indivisible="whole")  # wrong
