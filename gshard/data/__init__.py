"""Global batches, the data loader, and checks that the processes agree about them.

May import: `_util`, `train_state`, `sharding`, `distributed`.
Start reading: `batch`, then `loader`.
"""
