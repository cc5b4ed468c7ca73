"""`python -m gshard NAME`."""

from __future__ import annotations

import sys

from gshard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
