"""Models to plan with and to train: ordinary Flax Linen, each as a `gshard.TrainSetup`.

The usual sizes are in `configs/`, one file each: `gshard configs` lists them.

May import: the public names of `gshard`, `_util`, `expert`.
Start reading: `gpt2`; `training` has what the models share.
"""
