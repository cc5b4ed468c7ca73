"""`LocalReader`: reads a step from the folders of all machines together.

Each process takes what its devices need from the shards on its own machine, whatever the level and
the mesh were. What is not there, because the machine came back empty or a byte is damaged, a
process whose machine has it broadcasts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from gshard._util.durable import write_file
from gshard._util.scratch import scratch_folder
from gshard.checkpoint.bounds import Bounds
from gshard.checkpoint.casts import converted
from gshard.checkpoint.checksums import Damage
from gshard.checkpoint.data_state import data_state_name
from gshard.checkpoint.local.complete import Save, find_save
from gshard.checkpoint.local.shards import (
    SHARDS,
    Index,
    Key,
    covered,
    damaged,
    key_of,
    keys_of,
)
from gshard.checkpoint.local.store import LocalStore
from gshard.checkpoint.manifest import write_manifests
from gshard.checkpoint.place_shards import place_shards
from gshard.checkpoint.step_files import THREADS, StepFiles, StepFolder, run_parallel
from gshard.checkpoint.step_info import DATA, DESCRIPTION
from gshard.checkpoint.store import Wanted, Wants
from gshard.distributed.agree import all_gather_text, run_on_all
from gshard.distributed.broadcast import broadcast

_THREADED = 2**20  # bytes of an array that threads copy: starting them takes time


class LocalReader:
    """Reads arrays; all processes must make the same calls."""

    def __init__(self, store: LocalStore, verify: bool):
        self._store, self._verify = store, verify
        self._found: dict[int, _Found] = {}

    def damages(self, step: int, wants: Wants) -> list[Damage]:
        """What no machine has of a step, the same on every process; `read` has the rest."""
        call = f"restore of step {step}"
        save = find_save(self._store, step, call)
        if save is None:
            return [Damage(SHARDS, "are on no machine")]
        found = run_on_all(lambda: self._look(step, save, wants), call=call)
        return self._exchange(found, call)

    def _look(self, step: int, save: Save, wants: Wants) -> _Found:
        """What this process needs, and what its machine has of it."""
        files = _described(self._store, step, save.noted)
        found = self._found[step] = _Found(files, save.parts)
        for wanted in wants(save.info):
            for path, x in wanted.items():
                found.shapes[path] = save.info.arrays[path].shape
                found.needed |= {found.stored(key) for key in keys_of(path, x).values()}
        if self._verify:
            found.drop_damaged(found.needed)
        return found

    def _exchange(self, found: _Found, call: str) -> list[Damage]:
        """Broadcasts what some process lacks; returns what nobody has."""
        own = [key for key in found.needed if not found.covers(key)]
        told = all_gather_text(json.dumps(sorted(own)), what=call)
        lacking = sorted({key_of(*x) for text in told.values() for x in json.loads(text)})
        if not lacking:
            return []

        def offer() -> list[Any]:
            if self._verify:
                found.drop_damaged(lacking)
            held = {key: found.held[key] for needed in lacking for key in found.overlapping(needed)}
            return [(*key, str(shard.dtype)) for key, shard in held.items()]

        offers = all_gather_text(json.dumps(run_on_all(offer, call=call)), what=call)
        sources: dict[Key, tuple[int, str]] = {}
        for rank, text in sorted(offers.items()):
            for path, bounds, dtype in json.loads(text):
                sources.setdefault(key_of(path, bounds), (rank, dtype))
        if lost := [key.path for key in lacking if not covered(key, sources)]:
            return [Damage(SHARDS, "are on no machine any more", tuple(dict.fromkeys(lost)))]
        everyone = Mesh(np.array(jax.devices()), ("all",))
        for key, (rank, dtype) in sources.items():
            sends = rank == jax.process_index()
            x = found.held[key].view() if sends else np.zeros(key.shape, jnp.dtype(dtype))
            (got,) = broadcast([x], rank, everyone)
            if any(key.shared(part).size for part in own if part.path == key.path):
                found.received[key] = got
        return []

    def files(self, step: int) -> StepFiles:
        """The description of the step and the data states of all processes."""
        return self._found[step].files

    def read(self, step: int, wanted: Wanted) -> dict[str, jax.Array]:
        """Arrays by path; each device gets its shard."""
        found = self._found[step]
        return {path: _array(path, x, found) for path, x in wanted.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for found in self._found.values():
            shutil.rmtree(found.files.path.parent, ignore_errors=True)
        self._found.clear()


class _Found:
    """What this process needs of a step, and where it is."""

    def __init__(self, files: _Described, parts: Iterable[Index]):
        self.files = files
        self.shapes: dict[str, tuple[int, ...]] = {}  # without the padding of any mesh
        self.needed: set[Key] = set()
        self.held = {key: x for part in parts for key, x in part.shards.items()}  # here
        self.received: dict[Key, np.ndarray] = {}
        self._by_path: dict[str, list[Key]] = {}
        for key in self.held:
            self._by_path.setdefault(key.path, []).append(key)
        self._undamaged: set[Key] = set()

    def stored(self, key: Key) -> Key:
        """The part of a shard that is no padding."""
        sizes = self.shapes[key.path]
        limits = [*sizes, *(end for _, end in key.bounds[len(sizes) :])]  # the data of random keys
        return key.shared(Key(key.path, tuple((0, size) for size in limits)))

    def overlapping(self, needed: Key) -> Iterator[Key]:
        """The shards on this machine that have some of it."""
        for key in self._by_path.get(needed.path, ()):
            if key in self.held and key.shared(needed).size:
                yield key

    def drop_damaged(self, needed: Iterable[Key]) -> None:
        """Compares the checksums of the shards that have some of these, and forgets bad ones."""
        keys = {key for part in needed for key in self.overlapping(part)} - self._undamaged
        bad = damaged({key: self.held[key] for key in keys})
        self._undamaged |= keys - bad
        for key in bad:
            del self.held[key]

    def covers(self, needed: Key) -> bool:
        """Whether this machine has all of it."""
        return covered(needed, self.overlapping(needed))

    def pieces(self, needed: Key) -> Iterator[tuple[Key, np.ndarray]]:
        """The shards that have some of it, here or received."""
        for key in self.overlapping(needed):
            yield key, self.held[key].view()
        for key, x in self.received.items():
            if key.path == needed.path and key.shared(needed).size:
                yield key, x


class _Described(StepFolder):
    """The small files of a step, which another process may have sent."""

    def __init__(self, path: Path, address: str):
        super().__init__(path)
        self._address = address

    def __str__(self) -> str:
        return self._address


def _described(store: LocalStore, step: int, noted: Mapping[str, Any]) -> _Described:
    """Writes what a part notes of its step into files, as a step on a disk has them."""
    folder = scratch_folder("restore") / str(step)
    (folder / DATA).mkdir(parents=True)
    write_file(folder / DESCRIPTION, noted["info"].encode())
    for rank, text in noted["data"].items():
        write_file(folder / data_state_name(int(rank)), text.encode())
    write_manifests(folder)
    return _Described(folder, str(store.step(step)))


def _array(path: str, x: jax.ShapeDtypeStruct, found: _Found) -> jax.Array:
    """An array, each shard made of the pieces that have some of it."""

    def shard(bounds: Bounds) -> np.ndarray:
        key = found.stored(Key(path, bounds))
        out = np.empty(key.shape, x.dtype)  # never the mapped file: on a CPU JAX may keep it
        for piece, values in found.pieces(key):
            both = piece.shared(key)
            out[both.within(key)] = converted(path, values[both.within(piece)], x.dtype)
        return out

    def shards(several: Sequence[Bounds]) -> list[np.ndarray]:
        if x.size * x.dtype.itemsize < _THREADED:
            return [*map(shard, several)]
        return run_parallel(shard, several, THREADS)

    return place_shards(x, shards, at_once=True)
