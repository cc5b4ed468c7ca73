"""Models to plan with and to train: ordinary Flax Linen, each as a `gshard.TrainSetup`.

The sizes that are published lie in `configs/`, one file each.
"""
