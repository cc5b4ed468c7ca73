"""Paddle's names for what gshard does: a thin face over the core, with no collective of its own.

`group_sharded`: the one call; `data_parallel`: the same without division. `wrapped`: what a model
can do then; `backward`, `accumulation`: its gradients from one call to the next; `phases`,
`on_model`: what is compiled. `wrapped_optimizer`, `scaling`: what steps. `checkpoint`: a directory.
`models`, `groups`, `excluded`, `named`, `reached`: arguments and values in gshard's terms.

May import: everything but `pytorch` and `cli`.
Start reading: `group_sharded`.
"""
