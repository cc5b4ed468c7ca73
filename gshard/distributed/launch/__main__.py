"""`python -m gshard.distributed.launch`, as PyTorch's and Paddle's launchers are started."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # A program of its own: the launcher must not have imported JAX, and this package has.
    os.execv(sys.executable, [sys.executable, "-m", "gshard", "launch", *sys.argv[1:]])
