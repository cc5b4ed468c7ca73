"""What is sharded over what: mesh, level, rules, layouts, and the plan and budget they lead to.

A plan is decided once, from shapes, and nobody downstream decides a layout again.

May import: `_util`, `train_state`.
Start reading: `plan`, then `make_plan`, which makes one from `rules` and `layout`.
"""
