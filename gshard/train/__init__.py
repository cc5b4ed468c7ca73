"""Sharding a train state, and the train step, evaluation step and gradients that use it.

A step has three stages (`stages`): `gradients` (parameters and a batch in, sharded gradients out),
the update (`optim`), and, where parameters are replicated, the all-gather of the updated ones.

`comm` holds every collective, `fsdp` all-gathers parameters at their first use, `optim` runs the
user's optimizer on shards.

May import: `_util`, `train_state`, `sharding`, `distributed`, `data`.
Start reading: `shard_train_state`, then `train_step`.
"""
