"""The model and optimizer that the faces for Paddle and PyTorch wrap.

May import: `_util`, `train_state`, `sharding`, `distributed`, `data`, `train`, `checkpoint`.
Start reading: `wrapped_model`, then `accumulation`.
"""
