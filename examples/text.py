"""Real text that is on every machine: the source files of the Python standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

# Not written to be read, or not part of the library proper.
LEFT_OUT = {
    "__pycache__", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "dist-packages", "test", "tests", "turtledemo", "encodings",
}  # fmt: skip


def standard_library() -> np.ndarray:
    """All source files one after the other, in the order of their paths, as uint8 (bytes,)."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts)
    )
    if not files:
        raise FileNotFoundError(
            f"{root} holds no .py files: this Python came without the source of its standard "
            "library. Run the example with an ordinary CPython."
        )
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8)


def batch(text_N: np.ndarray, step: int, examples: int, length: int, seed: int) -> np.ndarray:
    """Returns (examples, length) windows of the text; the same for the same step and seed."""
    starts_B = np.random.default_rng((seed, step)).integers(0, text_N.size - length, size=examples)
    return text_N[starts_B[:, None] + np.arange(length)]


def own_rows(batch_BxT: np.ndarray, rank: int, processes: int) -> np.ndarray:
    """Returns the rows of one process, of a batch that all processes make alike."""
    return np.split(batch_BxT, processes)[rank]
