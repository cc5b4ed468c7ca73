"""Processes: joining a job, agreeing, leaving it; `launch` starts them on one machine.

May import: `_util`, `train_state`, `sharding`.
Start reading: `initialize`; for starting processes `launch.job` and `launch.spawn`.
"""
