"""Checkpoints: train states on disk, for any level, mesh and number of processes.

Data flows from `checkpointer`, which users call, to `arrays` (a state as named arrays), `save` and
`background_save` (the thread of each process), `orbax` (Orbax writes the arrays), `manifest`
(checksums of every byte) and `disk` (a rename commits the step) or `object_store`. A restore goes
the other way. `orbax` also reads Orbax's own checkpoints, `safetensors` writes and reads weights
alone.

May import: `_util`, `train_state`, `sharding`, `distributed`, `data`, `train`.
Start reading: `checkpointer`, then `save`.
"""
