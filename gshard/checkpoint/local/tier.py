"""`LocalTier`: what a `Checkpointer` keeps beside its directory, in a folder of each machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gshard._util.errors import warn
from gshard.checkpoint.local.complete import incomplete_steps
from gshard.checkpoint.local.reader import LocalReader
from gshard.checkpoint.local.store import LocalStore, local_folder
from gshard.checkpoint.retention import RetentionPolicy
from gshard.checkpoint.save import Contents, StepWriter
from gshard.checkpoint.store import Draft
from gshard.distributed.agree import all_gather_text


class LocalTier(StepWriter):
    """Writes and reads the newest steps in a folder of each machine.

    It keeps the newest step that all machines have, until they all have the next. Every process
    writes as if it were the only one.
    """

    def __init__(self, folder: Any, run: str, rhythm: str):
        self.store = LocalStore(local_folder(folder), run, rhythm)
        super().__init__(self.store, RetentionPolicy(), (0, 1))
        found = incomplete_steps(self.store)
        self.steps = {step for step, missing in found.items() if not missing}  # as on all processes
        for step in found.keys() - self.steps:
            warn(f"step {step} in {self.store} is not restored: {found[step]}.")

    def reader(self, verify: bool) -> LocalReader:
        """Reads steps."""
        return LocalReader(self.store, verify)

    def begin(self, describe: Callable[[], Contents], compare: Callable[[], None]) -> None:
        """Starts to write a step; one of that number, and later ones, are replaced."""
        self.last_step = None
        self.store.next_save()
        super().begin(describe, compare)

    def _make_draft(self, contents: Contents) -> Draft:
        self.store.open_for_writing()
        older = {step for step in self.steps - self.damaged if step < contents.step}
        self.steps, self.damaged = {*sorted(older)[-1:]}, set()
        for step in self.store.steps():
            if step not in self.steps:
                self.store.delete(step)
        own = sum(
            part.data.nbytes for x in contents.arrays.values() for part in x.addressable_shards
        )
        self.store.check_room(own)
        draft = self._draft(contents.step)
        draft.make(contents.info)
        return draft

    def _write(self, draft: Draft, contents: Contents) -> Callable[[], object]:
        info = contents.info.to_json().decode()
        return draft.begin(contents.arrays, {"info": info, "data": self._data_states})

    def _start(self, contents: Contents) -> None:
        # Of all processes: a machine that comes back empty has nothing of its own.
        own = "" if contents.data is None else contents.data.decode()
        told = all_gather_text(own, what="save")
        self._data_states = {str(rank): text for rank, text in told.items() if text}
        super()._start(contents)

    def wait(self) -> None:
        """Waits for the step that is being written; now all machines have it."""
        saving = self.saving
        super().wait()
        if saving is not None:
            self.steps.add(saving.draft.step)
