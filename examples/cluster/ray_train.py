"""Runs a training script in the workers of Ray Train, which starts them again when one is lost.

    python examples/cluster/ray_train.py --workers 2 examples/train.py --steps 200 --output output

The script joins its processes with `gshard.distributed.initialize()` and resumes from its newest
checkpoint, as it does under `gshard launch`; nothing in it is about Ray. `--gpus N` gives each
worker N GPUs. Ray's own `jax.distributed.initialize` is not used: gshard's says which process is
missing, and ends a job that hangs.
"""

from __future__ import annotations

import argparse
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxConfig, JaxTrainer


def run_script(config: dict[str, Any]) -> None:
    """What each worker does: it tells gshard who it is, and runs the script as `python` would."""
    context = ray.train.get_context()
    with socket.socket() as free:
        free.bind(("", 0))
        address = f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"
    os.environ |= {
        "GSHARD_COORDINATOR": broadcast_from_rank_zero(address),
        "GSHARD_NUM_PROCESSES": str(context.get_world_size()),
        "GSHARD_PROCESS_ID": str(context.get_world_rank()),
    }
    sys.argv = config["command"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    os.chdir(config["folder"])  # Ray has changed to one of its own
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Starts the workers and waits for them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, required=True, help="processes, at least 2")
    parser.add_argument("--gpus", type=int, default=0, help="of each worker")
    parser.add_argument("--max_failures", type=int, default=3, help="after which Ray gives up")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its arguments")
    asked = parser.parse_args()
    if not asked.command:
        parser.error("name the script, such as examples/train.py")
    if asked.workers < 2:
        parser.error(
            f"--workers {asked.workers}: Ray runs the script in a thread, in which a job of one "
            "process cannot hear SIGTERM. Start 2 workers or more, or run the script without Ray."
        )
    script, *arguments = asked.command
    trainer = JaxTrainer(
        run_script,
        train_loop_config={
            "command": [str(Path(script).absolute()), *arguments],
            "folder": os.getcwd(),
        },
        jax_config=JaxConfig(),
        scaling_config=ScalingConfig(
            num_workers=asked.workers,
            use_gpu=asked.gpus > 0,
            resources_per_worker={"GPU": asked.gpus} if asked.gpus else {"CPU": 1},
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=asked.max_failures)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
