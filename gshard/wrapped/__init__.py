"""What `gshard.paddle` and `gshard.pytorch` share: wrapped models and optimizers, state dicts.

`wrapped_model` and `wrapped_optimizer` are what users train with, `accumulation` keeps the
gradients between two calls, `loss_fns` looks at their losses, and `compiled_fns` is what is
compiled. `data_parallel`, `state_dict` and `files` have functions that are public in both folders.

May import: `_util`, `train_state`, `sharding`, `distributed`, `data`, `train`, `checkpoint`.
Start reading: `wrapped_model`, then `accumulation`.
"""
