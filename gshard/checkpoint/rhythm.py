"""`Rhythm`: which steps a `Checkpointer` saves in its directory, and which on each machine."""

from __future__ import annotations

from typing import Any

from gshard._util.errors import GShardError
from gshard._util.validation import check_integer, shown


class Rhythm:
    """How often steps are saved; the arguments are those of `Checkpointer`."""

    def __init__(self, every: Any, local: Any, local_every: Any):
        every, local_every = (
            None if value is None else check_integer(name, value, 1, " of steps")
            for name, value in (("every", every), ("local_every", local_every))
        )
        if local is None and local_every is not None:
            raise GShardError(f"local_every={shown(local_every)} needs local=, a folder.")
        if local is not None and None in (every, local_every):
            raise GShardError(
                "local= needs every= and local_every=, after how many steps to save in the "
                "directory and in the local folder, such as every=1000 and local_every=50."
            )
        if local is not None and every <= local_every:
            raise GShardError(
                f"local_every={local_every} must be less than every={every}: the local folder "
                "keeps steps between those of the directory."
            )
        self.every, self.local_every = every or 1, local_every
        self._given: int | None = None  # the number of the last call

    def __str__(self) -> str:
        return f"Checkpointer(every={self.every}, local_every={self.local_every})"

    def start_again(self) -> None:
        """Forgets the last call: training goes on from another step."""
        self._given = None

    def is_of_directory(self, step: int) -> bool:
        """Whether a step is saved in the directory."""
        return step % self.every == 0

    def is_local(self, step: int) -> bool:
        """Whether another step is saved on each machine."""
        return self.local_every is not None and step % self.local_every == 0

    def missed(self, step: int) -> int | None:
        """The step of the directory that was left out since the last call, if any."""
        before, self._given = self._given, step
        last = (step - 1) // self.every * self.every  # of those before this one
        return last if before is not None and before < last else None
