"""A process that exports and imports a large state, and says how much memory that took.

    python -m tests.checkpoint.safetensors.export_memory FOLDER [AXES]

With AXES, such as "a b -> b a", the tensors have these. Apart from the tests, because what these
leave to be freed later would show as memory not taken. Prints the bytes of a leaf, of all leaves,
and the most that an export and an import had beside what was there before, and what an export left.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from pathlib import Path

import gshard

# 3 devices divide neither; more than malloc keeps for later, so that what is freed is given back.
SHAPE = (1021, 12325)
LEAF = 4 * SHAPE[0] * SHAPE[1]


class Peak:
    """The most memory that this process had, over what it had at first.

    `most` is sampled, and of its own memory; `high` is the kernel's count, with pages of files.
    """

    def __enter__(self) -> Peak:
        self.most, self._first, self._end = 0, own_memory(), threading.Event()
        Path("/proc/self/clear_refs").write_text("5")  # the count begins again
        self._high = memory("VmHWM")
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.left = own_memory() - self._first
        self.high = memory("VmHWM") - self._high

    def _watch(self) -> None:
        while not self._end.is_set():
            self.most = max(self.most, own_memory() - self._first)
            time.sleep(0.001)


def own_memory() -> int:
    """Bytes in memory that are no file's."""
    return memory("RssAnon")


def memory(name: str) -> int:
    """Bytes of a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def settle() -> None:
    """Waits until other threads have freed what they still hold: half a second without a change."""
    gc.collect()
    last, since = own_memory(), time.monotonic()
    while time.monotonic() < since + 0.5:
        time.sleep(0.02)
        if abs((now := own_memory()) - last) > LEAF / 100:
            last, since = now, time.monotonic()


def main(folder: Path, axes: str | None = None) -> None:
    gshard.virtual_devices(3)

    import jax
    import numpy as np
    import optax

    params = {name: np.full(SHAPE, i, np.float32) for i, name in enumerate("abcde")}
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.1)), gshard.make_mesh(), "p_g_os", rules={"a|b": 0, ".": 1}
    )
    padded = {layout.dim: layout.padding for layout in jax.tree.leaves(plan.params)}
    assert sorted(padded) == [0, 1] and all(padded.values())
    del params
    name_map = None if axes is None else gshard.NameMap({"{x}": ("{x}.t", axes)})
    jax.block_until_ready(state)
    settle()
    with Peak() as export:
        gshard.save_safetensors(state, folder / "x", name_map=name_map)
    with Peak() as back:
        state = gshard.load_safetensors(state, folder / "x", name_map=name_map)
    print(json.dumps([LEAF, 5 * LEAF, export.high, back.most, export.left]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
