"""What a step needs and communicates: forecast and tune before it runs, audit and explain after.

`hlo` reads compiled programs, `memory` estimates the peak from a trace, `aot` compiles for machines
that are not there, `html` writes pages.

May import: `_util`, `train_state`, `sharding`, `distributed`, `data`, `train`, `checkpoint`.
Start reading: `audit`, then `forecast`.
"""
