"""Models to plan with and to train: ordinary Flax Linen, and each a `gshard.Setup` of any size.

The sizes that are published lie in `configs/`, one file each.
"""
