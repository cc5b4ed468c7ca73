"""Checkpoints: train states on disk, for any level, mesh and number of processes.

Data flows from `checkpointer`, which users call, to `arrays` (a state as named arrays), `metadata`
(what a step says about itself), `save` (the background thread of each process), `orbax_io` (Orbax
writes the arrays), `checksums` (manifests of every byte) and `directory` (a rename commits the
step). A restore goes the other way. `orbax_import` reads Orbax's own checkpoints, `safetensors`
writes and reads weights alone.

May import: `_util`, `train_state`, `sharding`, `distributed`, `data`, `train`.
Start reading: `checkpointer`, then `save`.
"""
