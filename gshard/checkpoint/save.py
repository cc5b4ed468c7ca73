"""`StepWriter`: prepares the saves of a run, starts them in the background, and awaits them."""

from __future__ import annotations

import contextlib
import json
import secrets
import weakref
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from gshard._util.errors import CallOrderError, GShardError, OutsideError, is_outside, some, warn
from gshard.checkpoint.arrays import (
    FROZEN_PARAMS,
    PARAMS,
    ArrayInfo,
    weight_at,
)
from gshard.checkpoint.background_save import BackgroundSave
from gshard.checkpoint.data_state import packed_data_state
from gshard.checkpoint.matching import Read, read_one_by_one
from gshard.checkpoint.place_shards import host_copy
from gshard.checkpoint.retention import RetentionPolicy, readable_metadata
from gshard.checkpoint.step_files import StoreError
from gshard.checkpoint.step_info import StepInfo
from gshard.checkpoint.store import Draft, Reader, Store
from gshard.distributed.agree import FailedError, all_gather_text, run_on_all
from gshard.sharding.plan import Plan

# A skipped step changes these arrays but not the step's number.
_COUNTS = ("opt_state/guard/", "opt_state/scaler/")


class SaveFailedError(GShardError, RuntimeError):
    """A step could not be written; the steps before it are unchanged.

    Attributes:
      step: the number of the step that is missing.
    """

    __module__ = "gshard"

    def __init__(self, message: str, step: int):
        super().__init__(message)
        self.step = step


class Contents(NamedTuple):
    """What a process writes of a step: its description, its arrays, its data state."""

    info: StepInfo
    arrays: Mapping[str, jax.Array]
    data: bytes | None
    plan: Plan  # of the arrays

    @property
    def step(self) -> int:
        """The step's number."""
        return self.info.step


class StepWriter:
    """Writes the steps of one run. All processes make the same calls; the first makes the drafts.

    `among` is the rank of this process and the number of those that write a step together, by
    default all. A restore adds the steps that it finds damaged to `damaged`; the next save sets
    them aside.
    """

    def __init__(
        self, store: Store, retention: RetentionPolicy, among: tuple[int, int] | None = None
    ):
        self.damaged: set[int] = set()
        self.store, self._retention = store, retention
        self._among = among or (jax.process_index(), jax.process_count())
        self._first = self._among[0] == 0
        self.saving: BackgroundSave | None = None  # until somebody has waited for it
        self.last_step: int | None = None  # that this object has written
        # Of the step that was begun last, to recognize it when it is saved again.
        self._metadata: Mapping[str, Any] = {}
        self._data: bytes | None = None
        self._arrays: dict[str, weakref.ref[jax.Array]] = {}
        self._known: Mapping[int, Mapping[str, Any]] = {}  # metadata of the steps, once read
        self._session = secrets.token_hex(4)  # of the first process, once a save has begun
        self._saves = 0  # that were begun

    def reader(self, verify: bool) -> Reader:
        """Reads the steps."""
        return self.store.reader(verify)

    def claim(self) -> None:
        """Refuses another job that would write there, from now on."""

        def become_writer() -> None:
            if self._first:
                try:
                    self.store.open_for_writing()
                except CallOrderError as error:
                    raise type(error)(
                        f"{error} To read only, leave out keep_last=, keep_every=, keep_best= and "
                        "writes=."
                    ) from error
                # No error: it may only be there to restore.
                except (OSError, StoreError) as error:
                    why = str(getattr(error, "strerror", None) or error).removesuffix(".")
                    warn(
                        f"{self.store} cannot be written: {why}. "
                        "Every save will fail. Choose another directory, or pass writes=False to "
                        "only restore from this one."
                    )

        call = "Checkpointer(writes=True)"
        run_on_all(become_writer, call=call, what=lambda: call)

    def begin(self, describe: Callable[[], Contents], compare: Callable[[], None]) -> None:
        """Copies the arrays to the host and starts to write, when no other save is running.

        `describe` returns what to write. `compare` runs once all processes have something to write,
        and raises an error on all if they must not. An error of one process is raised on all: as a
        `SaveFailedError` if the save could not be started, and otherwise nothing was written.
        """
        found: list[Contents] = []
        try:
            self._prepare(describe, compare, found)
            if found[0].step == self.last_step:
                self._check_same(found[0])
            else:
                self._start(found[0])
        except FailedError as error:
            if not found:
                raise
            raise self._failed(found[0].step, error) from error.__cause__

    def _prepare(
        self,
        describe: Callable[[], Contents],
        compare: Callable[[], None],
        found: list[Contents],
    ) -> None:
        """Appends what to write, and makes its draft; none is left if any process fails.

        The step that this object has written last gets no draft either.
        """
        made: list[Draft] = []

        def prepare() -> None:
            found.append(describe())
            if self.last_step is not None and not self.store.is_taken(self.last_step):
                self.last_step = None  # somebody deleted it
            if self._first and found[0].step != self.last_step:
                made.append(self._make_draft(found[0]))

        def what() -> str:
            again = " again" if found and found[0].step == self.last_step else ""
            return f"save of step {found[0].step}{again}" if found else ""

        try:
            run_on_all(prepare, call="save", what=what)
            compare()
        except GShardError:
            for draft in made:
                draft.discard()
            raise

    def _start(self, contents: Contents) -> None:
        """Copies the arrays to the host, and starts the thread that writes them."""
        self.last_step = None
        self.damaged.clear()  # the first process has set them aside
        self._metadata, self._data = contents.info.metadata, contents.data
        self.remember(contents.arrays)
        begun: list[Callable[[], object]] = []
        call = f"save of step {contents.step}"
        if self.store.is_shared and not self._saves:
            sessions = all_gather_text(self._session, what=call)
            self._session = sessions[min(sessions)]
        draft = self._draft(contents.step)
        self._saves += 1

        def write() -> None:
            arrays = {path: host_copy(x) for path, x in contents.arrays.items()}
            begun.append(self._write(draft, contents._replace(arrays=arrays)))

        try:
            run_on_all(write, call=call)
        except GShardError:
            for finish in begun:
                with contextlib.suppress(Exception):  # the save has failed already
                    finish()
            run_on_all(lambda: None, call=call)  # nobody writes any more
            draft.discard()
            raise
        self.saving = BackgroundSave(
            draft,
            *self._among,
            begun[0],
            self._delete_old,
        )
        self.saving.start()

    def _check_same(self, contents: Contents) -> None:
        """Refuses `contents` that are not the step that was just written.

        Arrays that are other objects than those that were written are compared with what a restore
        gives, since the step may have been restored in another form, such as another precision.
        After a skipped step the number is the same, and so are all arrays but the counts of skipped
        steps: then the step is not changed, nor are its data state and metadata.
        """
        read, last = contents.arrays, self._arrays
        others = [path for path, x in read.items() if path not in last or last[path]() is not x]
        everywhere = _all_of(others)  # every process reads the same arrays, as in a restore
        read = {path: x for path, x in read.items() if path in everywhere}
        where = self.store.step(contents.step)
        call = f"save of step {contents.step} again"
        with self.store.reader(verify=False) as reader:

            def compare() -> list[str]:
                try:
                    stored = StepInfo.read(where).arrays
                    one = partial(reader.read, contents.step)
                    return _differing_arrays(one, stored, contents.plan, read)
                except GShardError as error:
                    raise GShardError(f"save: {where}: {error}") from error

            changed = run_on_all(compare, call=call)
        changed = _all_of(changed)
        differing = [p for p in contents.arrays if p in changed and not p.startswith(_COUNTS)]
        if differing:
            raise GShardError(
                f"save: {where} holds another state under this number: {some(differing)} "
                f"differ{'s' * (len(differing) == 1)}. Nothing was written. Save this state under "
                "a later number, such as the number of steps so far; or delete the other one "
                f"first: checkpointer.delete({contents.step})."
            )

        def refuse() -> None:
            other = ["data_state"] if contents.data not in (None, self._data) else []
            now, then = (
                json.dumps(x, sort_keys=True) for x in (contents.info.metadata, self._metadata)
            )
            other += ["metadata"] if self._first and now not in ("{}", then) else []
            if other and not changed:
                raise GShardError(
                    f"save: {where} holds this state with other {' and '.join(other)}. Nothing "
                    "was written. Pass what was passed before, or nothing; or delete the step "
                    f"first: checkpointer.delete({contents.step})."
                )

        run_on_all(refuse, call=call)

    def wait(self) -> None:
        """Waits for the step that is being written; a failure is a `SaveFailedError`."""
        if (saving := self.saving) is None:
            return
        call = f"the end of the save of step {saving.draft.step}"
        try:
            run_on_all(saving.wait_for_files, call=call)  # Ctrl-C ends the wait, not the save
            run_on_all(saving.wait_for_commit, call=call)
        except GShardError as error:
            self.saving = None
            saving.give_up()
            saving.draft.discard()
            raise self._failed(saving.draft.step, error) from error.__cause__
        self.saving = None
        self.last_step = saving.draft.step
        if (error := saving.afterwards) is not None:
            warn(
                f"step {saving.draft.step} is saved, but an older one could not be deleted: {error}"
            )

    def delete(self, step: int) -> None:
        """Deletes a step."""

        def delete() -> None:
            if self._first:
                self.store.open_for_writing()
                self.store.delete(step)
                self._known = {n: x for n, x in self._known.items() if n != step}

        try:
            call = f"deletion of step {step}"
            run_on_all(delete, call=call, what=lambda: call)
        except FailedError as error:
            kind = OutsideError if is_outside(error) else GShardError
            raise kind(f"step {step} could not be deleted: {error}") from error.__cause__
        self.damaged.discard(step)
        self.last_step = None

    def has_restored(self, step: int, metadata: Mapping[str, Any], data_state: Any) -> None:
        """Learns what the newest step holds: it may be saved again, as if it were written last."""
        self.last_step, self._metadata, self._arrays = step, metadata, {}
        self._data = None if data_state is None else packed_data_state(data_state)

    def remember(self, arrays: Mapping[str, jax.Array]) -> None:
        """Remembers what the last step holds: the same objects need no comparison."""
        self._arrays = {path: weakref.ref(x) for path, x in arrays.items()}

    def _draft(self, step: int) -> Draft:
        """What this save writes. An earlier one, of this job or another, may still write its own.

        Another job may be one on a machine that was cut off and is back.
        """
        return self.store.draft(step, f"{self._session}-{self._saves}")

    def _make_draft(self, contents: Contents) -> Draft:
        """Checks that the step may be written, and makes its draft."""
        self.store.open_for_writing()
        there = self.store.steps()
        steps = [step for step in there if step not in self.damaged]
        if steps:
            try:
                newest = StepInfo.read(self.store.step(steps[-1]))
            except GShardError as error:
                raise GShardError(
                    f"save: {error} Call restore(), which finds the newest undamaged step; the "
                    "next save then sets the damaged ones aside. Or delete it: "
                    f"checkpointer.delete({steps[-1]})."
                ) from error
            check_same_run(newest.arrays, contents.info.arrays, str(self.store))
            if steps[-1] >= contents.step:
                raise GShardError(
                    f"save: step {contents.step} is not after the newest one, {steps[-1]}, in "
                    f"{self.store}. Restore that one and continue from it, choose another "
                    "directory, or delete the newer steps: checkpointer.delete(step)."
                )
        if contents.step not in self.damaged and self.store.is_taken(contents.step):
            raise GShardError(
                f"save: {self.store.step(contents.step)} exists, and gshard did not write "
                "it. Choose another directory."
            )
        self.store.check_room(sum(x.size * x.dtype.itemsize for x in contents.arrays.values()))
        self._known = {n: x for n, x in self._known.items() if n not in self.damaged}
        for step in sorted(self.damaged & set(there)):
            warn(f"the damaged step {step} is now {self.store.set_aside(step)}.")
        draft = self._draft(contents.step)
        draft.make(contents.info)
        return draft

    def _write(self, draft: Draft, contents: Contents) -> Callable[[], object]:
        draft.join()
        return draft.begin(contents.arrays, contents.data)

    def _delete_old(self) -> None:
        """Deletes the steps that the policy does not keep; called in the thread of a save."""
        if self._retention.keeps_all:
            return
        # A damaged step stays, to be examined, and the others are deleted nevertheless.
        found = readable_metadata(self.store, self._known)
        self._known = found if self.store.is_remote else {}
        for step in self._retention.to_delete(found):
            self.store.delete(step)

    def _failed(self, step: int, why: GShardError) -> SaveFailedError:
        try:
            newest = max(self.store.steps(), default=None)
            known = "There is no step yet" if newest is None else f"The newest step is {newest}"
        except (GShardError, StoreError):  # the reason may be the same
            known = "Its steps cannot be listed"
        reason = str(why).removesuffix(".")
        text = f"step {step} was not saved in {self.store}: {reason}. {known}."
        return SaveFailedError(text, step)


def _differing_arrays(
    read: Read, stored: Mapping[str, ArrayInfo], plan: Plan, arrays: Mapping[str, jax.Array]
) -> list[str]:
    """Paths of the arrays whose bits differ from those that a restore gives."""
    found = []
    for path, y in read_one_by_one(read, stored, plan, arrays):
        x = arrays[path]
        y = y if x.sharding.is_equivalent_to(y.sharding, x.ndim) else jax.device_put(y, x.sharding)
        pairs = zip(x.addressable_shards, y.addressable_shards, strict=True)
        if any(a.replica_id == 0 and _bits(a.data) != _bits(b.data) for a, b in pairs):
            found.append(path)
    return found


def _bits(x: jax.Array) -> bytes:
    return np.asarray(x).tobytes()


def _all_of(paths: Collection[str]) -> set[str]:
    """The paths of all processes."""
    texts = all_gather_text(json.dumps([*paths]), what="save")
    return set().union(*map(json.loads, texts.values()))


def check_same_run(
    stored: Mapping[str, ArrayInfo], own: Mapping[str, ArrayInfo], where: str
) -> None:
    """Raises a `GShardError` when the parameters differ from those of the stored checkpoints."""
    (theirs, all_theirs), (mine, all_mine) = map(_params_and_weights, (stored, own))
    found = [f"{p} is missing" for p in theirs if p not in all_mine]
    found += [f"{p} is added" for p in mine if p not in all_theirs]
    both = [p for p in theirs | mine if p in all_theirs and p in all_mine]
    found += [
        f"{p} has the shape {all_mine[p]}, there {all_theirs[p]}"
        for p in both
        if all_mine[p] != all_theirs[p]
    ]
    if found:
        raise GShardError(
            f"save: {where} holds checkpoints of another model: {'; '.join(found[:5])}. Nothing "
            "was written. Choose another directory."
        )


def _params_and_weights(arrays: Mapping[str, ArrayInfo]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The shapes of the parameters, trained and frozen, and those of all weights."""
    named = {path: weight_at(path) for path in arrays}
    weights = {name: arrays[path].shape for path, name in named.items() if name is not None}
    params = [name for path, name in named.items() if path.startswith((PARAMS, FROZEN_PARAMS))]
    return {name: weights[name] for name in params if name is not None}, weights
