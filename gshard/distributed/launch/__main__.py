"""`python -m gshard.distributed.launch`."""

from __future__ import annotations

import sys

from gshard.distributed.launch.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
