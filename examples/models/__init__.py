"""Models to plan with and to train: ordinary Flax Linen, each as a `gshard.TrainSetup`.

The usual sizes are in `configs/`, one file each.
"""
