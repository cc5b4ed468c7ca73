"""Checkpoints: a train state on disk, for any level, mesh and number of processes.

Data goes one way: `leaves` (a state as named arrays), `storage` (Orbax writes them), `manifest`
(checksums of every byte), `directory` (a rename commits). `saving` does so in a thread, `writer`
and `reader` for all processes together; `checkpointer` is what users call.

May import: `_util`, `train_state`, `sharding`, `distributed`, `data`, `train`.
Start reading: `checkpointer`, then `save`.
"""
