"""`python -m gshard NAME`."""

from __future__ import annotations

from gshard.cli.main import run

if __name__ == "__main__":
    run()
