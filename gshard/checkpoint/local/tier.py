"""`LocalTier`: what a `Checkpointer` keeps beside its directory, in a folder of each machine."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax

from gshard._util.errors import CallOrderError, GShardError, warn
from gshard.checkpoint.arrays import ArrayInfo
from gshard.checkpoint.local.complete import local_steps
from gshard.checkpoint.local.reader import LocalReader
from gshard.checkpoint.local.shards import note
from gshard.checkpoint.local.store import LocalStore, local_folder
from gshard.checkpoint.retention import RetentionPolicy
from gshard.checkpoint.save import Contents, StepWriter, check_same_run
from gshard.checkpoint.step_files import StoreError
from gshard.checkpoint.store import Draft, Store
from gshard.checkpoint.undamaged import steps_everywhere
from gshard.distributed.agree import all_gather_text


class LocalTier(StepWriter):
    """Writes and reads the newest steps in a folder of each machine.

    It keeps the newest step that all machines have, until they all have the next. Every process
    writes as if it were the only one.
    """

    def __init__(self, folder: Any, directory: Store, rhythm: str):
        own = local_folder(folder, directory.directory)
        self.store = LocalStore(own, str(directory), rhythm)
        super().__init__(self.store, RetentionPolicy(), (0, 1))
        self.after = max(steps_everywhere(directory), default=-1)  # the newest of the directory
        found, others = local_steps(self.store, self.after)
        self.steps = {*found}  # that all machines have together, the same on every process
        self.damaged = {*others}
        self._infos: Mapping[str, ArrayInfo] = found[max(found)].info.arrays if found else {}
        for step, missing in others.items():
            warn(f"step {step} in {self.store} is not restored: {missing}.")
        self._own: int | None = None  # the step that this object has saved last
        self._skipped = -1  # steps, until the last save

    def reader(self, verify: bool) -> LocalReader:
        """Reads steps."""
        return LocalReader(self.store, verify)

    def forget(self, steps: Callable[[int], bool]) -> None:
        """Gives up steps from which training does not go on; the next save deletes them."""
        gone = {step for step in self.steps if steps(step)}
        self.steps -= gone
        self.damaged |= gone

    def abandon(self, step: int) -> None:
        """Deletes the steps after this one, from which training does not go on.

        Unless another job writes there: then the next save raises an error.
        """
        self.forget(lambda own: own > step)
        is_locked = self.store.is_locked()
        with suppress(CallOrderError, OSError, StoreError):
            if self.damaged and not is_locked:
                self.store.open_for_writing()
            self._drop_forgotten()
        if not is_locked:
            self.store.close()

    def directory_has(self, step: int) -> None:
        """Learns that the directory has a step, which replaces the local one of that number."""
        if step > self.after:
            self.after = step
            self._note_after()
        self.forget(lambda own: own == step)
        with suppress(OSError):  # the next save deletes them
            self._drop_forgotten()

    def _note_after(self) -> None:
        """Notes that the last local step follows one that the directory did not have yet."""
        if self._own in self.steps and self._own > self.after:
            with suppress(OSError, ValueError):  # it cannot be restored either
                note(self.store.step(self._own).path, after=self.after)

    def _drop_forgotten(self) -> None:
        """Deletes what was given up; only who has the lock does, and not who reads."""
        if self.damaged and self.store.is_locked():
            self.store.drop(lambda own: own in self.damaged)
            self.damaged = set()

    def directory_lost(self, newest: int) -> None:
        """Gives up what follows a deleted step of the directory; `newest` is left there, or -1."""
        if newest < self.after:
            self.forget(lambda own: own > newest)
        self.after = newest

    def begin(self, describe: Callable[[], Contents], compare: Callable[[], None]) -> None:
        """Starts to write a step, unless it is the last one and a step was skipped since then.

        What is there would be given up before the new one is complete.
        """
        self.store.next_save()

        def described() -> Contents:
            contents = describe()
            before = self._skipped
            self.count_skipped(contents.arrays.get("opt_state/guard/skipped"))
            is_same = contents.step == self.last_step and contents.step in self.steps
            if not (is_same and self._skipped > before):
                self.last_step = None
            return contents

        super().begin(described, compare)

    def has_restored(self, step: int, metadata: Mapping[str, Any], data_state: Any) -> None:
        """Learns which step this is: it may be saved again, as if this object had written it."""
        super().has_restored(step, metadata, data_state)
        self._own = step

    def count_skipped(self, count: Any) -> None:
        """Remembers how many skipped steps a state has counted; None if it counts none."""
        self._skipped = -1 if count is None else int(count)

    def _check_same(self, contents: Contents) -> None:
        """Does nothing: only after a skipped step is the last one not written again."""

    def _make_draft(self, contents: Contents) -> Draft:
        number, arrays = contents.step, contents.info.arrays
        newest = max(self.steps | {self.after})
        if number <= newest and number != self._own:
            is_local = newest in self.steps
            where = self.store if is_local else self.store.run
            more = "" if is_local else "; or delete the newer steps: checkpointer.delete(step)"
            raise GShardError(
                f"save: step {number} is not after the newest one, {newest}, in {where}. Restore "
                "that one and continue from it, or choose another directory and local "
                f"folder{more}."
            )
        if self._infos:
            check_same_run(self._infos, arrays, str(self.store))
        self.store.open_for_writing()
        self.steps -= {number} | self.damaged
        kept, self.damaged = {*self.steps}, set()
        self.store.drop(lambda step: step not in kept)
        draft = self._draft(number)
        draft.make(contents.info)
        self._infos = arrays
        return draft

    def _start(self, contents: Contents) -> None:
        # Of all processes: a machine that comes back empty has nothing of its own.
        own = "" if contents.data is None else contents.data.decode()
        shared = [time.time(), contents.info.metadata] if jax.process_index() == 0 else None
        told = all_gather_text(json.dumps([own, shared]), what="save")
        found = {rank: json.loads(text) for rank, text in told.items()}
        at, metadata = found[0][1]
        self._noted = {
            "info": dataclasses.replace(contents.info, metadata=metadata).to_json().decode(),
            "data": {str(rank): text for rank, (text, _) in found.items() if text},
            "at": at,
            "of": len(found),
            "after": self.after,
        }
        super()._start(contents)

    def _write(self, draft: Draft, contents: Contents) -> Callable[[], object]:
        return draft.begin(contents.arrays, self._noted)

    def wait(self) -> None:
        """Waits for the step that is being written; now all machines have it, and older ones go."""
        saving = self.saving
        super().wait()
        if saving is not None:
            self._own = saving.draft.step
            self.steps = {self._own}
            if self._noted["after"] < self.after:
                self._note_after()
            with suppress(OSError):  # the next save deletes them
                self.store.drop(lambda step: step != self._own)
