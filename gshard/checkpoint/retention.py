"""`RetentionPolicy`: which steps of a run are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gshard._util.errors import GShardError, some
from gshard._util.validation import check_integer, shown
from gshard.checkpoint.step_files import StoreError
from gshard.checkpoint.step_info import StepInfo
from gshard.checkpoint.store import Store


@dataclass(frozen=True)
class RetentionPolicy:
    """Which steps are kept: the newest, and each that any rule selects. Without rules, all.

    The fields are the arguments of `Checkpointer`. Steps without the metric, or where it is not
    finite, are not among the best.
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str = "loss"
    mode: Literal["min", "max"] | None = None

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None:
                meaning = " of steps (None: no such rule)"
                object.__setattr__(self, name, check_integer(f"keep_{name}", value, 1, meaning))
        if not isinstance(self.metric, str) or not self.metric:
            raise GShardError(f"metric={shown(self.metric)} must be a key of metadata.")
        if self.best:
            self.check_mode(f"keep_best={self.best}")
        if self.mode not in ("min", "max", None):
            raise GShardError(f"mode={shown(self.mode)} must be 'min' or 'max'.")

    def check_mode(self, what: str) -> None:
        """Raises a `GShardError` if it is not known whether a low or a high metric is best."""
        if self.mode is None and "loss" not in self.metric.lower():
            raise GShardError(
                f"{what} compares metric={self.metric!r}. Say which is best: "
                "Checkpointer(mode='max') for the highest, mode='min' for the lowest."
            )

    @property
    def keeps_all(self) -> bool:
        """Whether there are no rules."""
        return self.last is self.every is self.best is None

    def to_delete(self, metadata: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """The steps to delete, ascending, given each step's metadata."""
        if self.keeps_all:
            return []
        steps = sorted(metadata)
        kept = set(steps[-(self.last or 1) :])
        kept |= {step for step in steps if self.every and step % self.every == 0}
        kept |= {*self.ranked(metadata)[: self.best or 0]}
        return [step for step in steps if step not in kept]

    def ranked(self, metadata: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """The steps with a finite metric, the best first, and of equal ones the newest."""
        known: dict[int, Any] = {step: x.get(self.metric) for step, x in metadata.items()}
        sign = -1 if self.mode == "max" else 1
        finite = {s: x for s, x in known.items() if _is_number(x) and _is_finite(x)}
        pairs = sorted((sign * x, -step) for step, x in finite.items())
        return [-step for _, step in pairs]

    def best_of(self, metadata: Mapping[int, Mapping[str, Any]], where: str) -> int | None:
        """The best step; None without steps, and an error if none has the metric."""
        self.check_mode("best_step")
        if not metadata:
            return None
        if ranked := self.ranked(metadata):
            return ranked[0]
        names = sorted({repr(name) for x in metadata.values() for name in x})
        raise GShardError(
            f"best_step: no step in {where} has a finite number {self.metric!r} in its metadata "
            f"(keys there: {some(names) or 'none'}). Save one with metadata=, or name another "
            "metric: Checkpointer(metric=)."
        )

    def check(self, metadata: Mapping[str, Any]) -> None:
        """Raises a `GShardError` for metadata without the metric that `best` needs."""
        if self.best and not _is_number(metadata.get(self.metric)):
            raise GShardError(
                f"save: keep_best={self.best} needs the number {self.metric!r} in metadata, which "
                f"has {shown(metadata.get(self.metric))} there. Pass metadata={{{self.metric!r}: "
                "...}, or pass metric= to the Checkpointer."
            )


def readable_metadata(
    store: Store, known: Mapping[int, Mapping[str, Any]] | None = None
) -> dict[int, Mapping[str, Any]]:
    """The metadata of the steps of a store, without those whose description is damaged.

    A step may be deleted meanwhile, of which NFS says that its handle is stale. What was read
    before, `known`, is not read again.
    """
    known, found = known or {}, dict[int, Mapping[str, Any]]()
    for step in store.steps():
        try:
            is_known = step in known
            found[step] = known[step] if is_known else StepInfo.read(store.step(step)).metadata
        except GShardError:
            pass
        except StoreError:
            if step in store.steps():
                raise
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond floats
        return False
