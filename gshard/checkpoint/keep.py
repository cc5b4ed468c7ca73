"""Which steps of a directory stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gshard._util.errors import GShardError
from gshard._util.validation import shown, whole_number


@dataclass(frozen=True)
class Keep:
    """A step stays when any of these wants it, and the newest always. All None: all stay.

    Attributes:
      last: the newest so many.
      every: those whose number it divides.
      best: so many with the best `metric`; a step without it, or with NaN, is never one of them.
      metric: a key of `metadata`.
      mode: `"min"` or `"max"`: which is best.
    """

    last: int | None
    every: int | None
    best: int | None
    metric: str
    mode: str

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None:
                whole_number(f"keep_{name}", value, 1, " of steps (None: no such rule)")
        if not isinstance(self.metric, str) or not self.metric:
            raise GShardError(f"metric={shown(self.metric)} must be a key of metadata.")
        if self.mode not in ("min", "max"):
            raise GShardError(f"mode={shown(self.mode)} must be 'min' or 'max'.")

    @property
    def all(self) -> bool:
        """Whether nothing ever goes."""
        return self.last is self.every is self.best is None

    def to_delete(self, metadata: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """The steps that go, ascending, of steps with their metadata."""
        if self.all:
            return []
        steps = sorted(metadata)
        kept = set(steps[-max(self.last or 1, 1) :])
        kept |= {step for step in steps if self.every and step % self.every == 0}
        known = {step: self._value(metadata[step]) for step in steps}
        sign = 1 if self.mode == "min" else -1
        ranked = sorted((sign * x, -step) for step, x in known.items() if x is not None)
        kept |= {-step for _, step in ranked[: self.best or 0]}
        return [step for step in steps if step not in kept]

    def check(self, metadata: Mapping[str, Any]) -> None:
        """Refuses metadata that say nothing of how good a step is, where the best are to stay."""
        if self.best and not _is_number(metadata.get(self.metric)):
            raise GShardError(
                f"save: keep_best={self.best} needs the number {self.metric!r} in metadata, which "
                f"has {shown(metadata.get(self.metric))} there. Pass metadata={{{self.metric!r}: "
                "...}, or say metric= of the Checkpointer."
            )

    def _value(self, metadata: Mapping[str, Any]) -> float | None:
        value = metadata.get(self.metric)
        return None if not _is_number(value) or value != value else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
