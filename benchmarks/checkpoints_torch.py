"""PyTorch's checkpoints for `benchmarks.checkpoints`: a round for each line that it is sent."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp


def one_round(folder: Path, tensors: int, width: int) -> dict[str, float]:
    """Seconds of a save, which syncs its files, and of a load into new tensors."""
    shutil.rmtree(folder, ignore_errors=True)
    state = {str(i): torch.randn(width, width) for i in range(tensors)}
    start = time.monotonic()
    dcp.save(state, checkpoint_id=folder)
    saved = time.monotonic()
    loaded = {name: torch.empty(width, width) for name in state}
    dcp.load(loaded, checkpoint_id=folder)
    end = time.monotonic()
    for name, x in state.items():
        assert torch.equal(x, loaded[name])
    return {
        "torch.distributed.checkpoint, save": saved - start,
        "torch.distributed.checkpoint, load": end - saved,
    }


def main() -> None:
    folder, tensors, width = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for _ in sys.stdin:
        print(json.dumps(one_round(folder, tensors, width)), flush=True)


if __name__ == "__main__":
    main()
