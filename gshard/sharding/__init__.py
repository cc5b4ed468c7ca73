"""Decides how arrays are sharded: mesh, level, rules and layouts, which make a plan and a budget.

A plan is decided once, from shapes, and no later module decides a layout again.

May import: `_util`, `train_state`.
Start reading: `plan`, then `make_plan`, which makes one from `rules` and `layout`.
"""
