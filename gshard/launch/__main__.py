"""`python -m gshard.launch`."""

from __future__ import annotations

import sys

from gshard.launch.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
