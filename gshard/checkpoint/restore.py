"""Restores a step: the newest that is undamaged, from the directory or from a local folder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from gshard._util.errors import GShardError, OutsideError, is_outside, warn
from gshard.checkpoint.arrays import ArrayInfo, with_components
from gshard.checkpoint.checksums import Damage
from gshard.checkpoint.data_state import read_data_state
from gshard.checkpoint.matching import arrays_to_read, read_components
from gshard.checkpoint.save import StepWriter
from gshard.checkpoint.step_info import StepInfo
from gshard.checkpoint.store import Reader, Wanted
from gshard.checkpoint.undamaged import (
    Source,
    find_damages_together,
    find_undamaged,
    steps_everywhere,
)
from gshard.checkpoint.weights import parts_to_restore, warn_of_choice, with_copies
from gshard.distributed.agree import run_on_all
from gshard.sharding.plan import Plan
from gshard.train.optim.optimizer_info import difference, optimizer_info

S = TypeVar("S")


@dataclass(frozen=True)
class Restored(Generic[S]):
    """What `Checkpointer.restore` read.

    Attributes:
      step: the number of the step.
      state: the train state, of the type, mesh and level of `like`.
      data_state: the data state that this process passed to `save`, or None.
      metadata: the metadata that was passed to `save`.
      source: where it was read: the directory, or the local folder.

    Example:
      >>> mesh = gshard.make_mesh()
      >>> state, plan = gshard.shard_train_state((params, tx), mesh, "os", min_shard_size=0)
      >>> with gshard.Checkpointer("checkpoints") as checkpointer:
      ...     checkpointer.save(0, state, metadata={"loss": 0.5})
      ...     restored = checkpointer.restore(like=state)
      >>> restored.step, restored.metadata, type(restored.state) is type(state)
      (0, {'loss': 0.5}, True)
    """

    step: int
    state: S
    data_state: Any
    metadata: dict[str, Any]
    source: str


class Tier(NamedTuple):
    """A store of a run: who writes it, and what reads it."""

    writer: StepWriter
    reader: Reader


def restore(
    tiers: Sequence[Tier], asked: int | None, state: Any, plan: Plan, cast: bool, only: Any
) -> Restored[Any]:
    """Reads the step that was asked for, or the newest undamaged one of all tiers."""
    parts = partial(parts_to_restore, state, plan, only)

    def source(tier: Tier) -> Source:
        store = tier.writer.store

        def wants(info: StepInfo) -> list[Wanted]:
            with _named(store.step(info.step)):
                stored, kept = parts(info.arrays)
                return [*arrays_to_read(stored, plan, cast, kept)]

        def damages(step: int) -> list[Damage]:
            return tier.reader.damages(step, wants)

        together = partial(find_damages_together, damages_of=damages)
        if store.is_shared:
            return Source(store, together)
        return Source(store, damages, frozenset(tier.writer.damaged))

    sources = [source(tier) for tier in tiers]
    while True:
        i, number, damaged = find_undamaged(sources, asked)
        for tier, bad in zip(tiers, damaged, strict=True):
            tier.writer.damaged |= bad
            if only is None or tier.writer.last_step in bad:
                tier.writer.last_step = None  # its number may be reached with another state
        store = sources[i].store
        gone = f"step {number} was deleted from {store} while it was read."
        try:
            make_restored = run_on_all(
                lambda: _read(tiers[i], number, state, plan, cast, parts),  # noqa: B023
                call=f"restore of step {number}",
            )
            if number not in steps_everywhere(store):  # what was missing may count as not saved
                raise GShardError(gone)
        except GShardError as error:
            if number in steps_everywhere(store):
                raise
            if asked is not None:
                raise GShardError(gone) from error
            continue  # another job has deleted it
        if only is not None:
            warn_of_choice(plan, only, "restore")
        return make_restored()


def _read(
    tier: Tier,
    step: int,
    state: Any,
    plan: Plan,
    cast: bool,
    parts: Callable[[Mapping[str, ArrayInfo]], tuple[Mapping[str, ArrayInfo], dict[str, Any]]],
) -> Callable[[], Restored[Any]]:
    """Reads a step; the function that is returned may change an NNX state in place."""
    files = tier.reader.files(step)
    info = StepInfo.read(files)
    with _named(files):
        stored, kept = parts(info.arrays)
        read = partial(tier.reader.read, step)
        components = read_components(read, stored, plan, cast, kept=kept)
    if not kept and info.optimizer and (said := difference(info.optimizer, optimizer_info(plan))):
        warn(
            f"{files} was saved with another optimizer than that of like=: {said}. The saved "
            "optimizer state is restored, and training continues with the optimizer of like=."
        )
    data, metadata = read_data_state(files, info.processes), dict(info.metadata)
    where = str(tier.writer.store)

    def make_restored() -> Restored[Any]:
        own = components
        if kept:
            own = with_copies(components, plan.kind.split(state), plan, "restore")
        return Restored(step, with_components(own, state, plan), data, metadata, where)

    return make_restored


@contextlib.contextmanager
def _named(files: object) -> Iterator[None]:
    """Says of which step an error is."""
    try:
        yield
    except GShardError as error:
        kind = OutsideError if is_outside(error) else GShardError
        raise kind(f"{files}: {error}") from error
