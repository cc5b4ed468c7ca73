"""A window: the steps of one row of metrics, and what is computed from them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from gshard._util.pytree import flatten
from gshard.analysis.monitor.step_calls import Program

_LAST = ("loss_scale",)  # values of which the last one counts, besides integers
_MEMORY = {"device_memory": "bytes_in_use", "device_memory_peak": "peak_bytes_in_use"}
_TOKENS = ("tokens", "input_ids")


@dataclass
class Window:
    """Some steps in a row.

    Attributes:
      infos: what the steps returned: scalars by name, still on the devices.
      skips: how many steps were skipped before each of these, and with it, on the devices too.
      steps: how many there were, with those whose result was not given.
      examples: global examples of all steps; None once a step's are not known.
      tokens: the same of tokens.
      number: that of the last step as the user gave it, or counted here.
      calls: number of the steps in the life of the state, skipped ones included; None if unknown.
      programs: how often each train step ran.
      seconds: wall time.
      spent: seconds of it by what they were spent on.
    """

    infos: list[dict[str, Any]] = field(default_factory=list)
    skips: list[tuple[Any, Any]] = field(default_factory=list)
    steps: int = 0
    examples: int | None = 0
    tokens: int | None = 0
    number: int = 0
    calls: int | None = None
    programs: Counter[Program] = field(default_factory=Counter)
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    def add(
        self,
        info: dict[str, Any],
        skips: tuple[Any, Any],
        examples: int | None,
        tokens: int | None,
        steps: int = 1,
    ) -> None:
        """Adds the scalars of a step, and those before it of which nothing else is known."""
        self.infos.append(info)
        self.skips.append(skips)
        self.steps += steps
        self.examples = _sum(self.examples, None if examples is None else examples * steps)
        self.tokens = _sum(self.tokens, None if tokens is None else tokens * steps)

    def is_ready(self) -> bool:
        """Whether the devices have finished its steps."""
        leaves = jax.tree.leaves((self.infos, self.skips))
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        arrays = [x for x in arrays if not x.is_deleted()]  # donated, which costs the row
        return all(x.is_ready() for x in arrays)

    def fetch(self) -> tuple[dict[str, float], int]:
        """Returns its averages, and how many steps have been skipped by its last one.

        It copies all values to the host at once.

        Floats are averaged over the steps that were not skipped, which have no meaning where
        gradients are not finite; of integers the last one is taken.
        """
        steps = jax.device_get([*zip(self.infos, self.skips, strict=True)])
        infos, skips = zip(*steps, strict=True)
        kept = [now <= before for before, now in skips]
        found = {}
        for name in dict.fromkeys(name for info in infos for name in info):
            has = [name in info for info in infos]
            values = np.array([info[name] for info in infos if name in info])
            if values.dtype.kind in "iubO" or name in _LAST:  # O: Python's, above 64 bits
                found[name] = values.tolist()[-1]
                continue
            chosen = np.array(kept)[has]
            values = values[chosen] if chosen.any() else values
            found[name] = float(np.mean(values.astype(np.float64)))
        return found, int(skips[-1][1])

    def row(self) -> tuple[int, dict[str, float]]:
        """Returns the number of its last step, and all scalars but MFU and memory."""
        means, skipped = self.fetch()
        number = self.number if self.calls is None else self.calls - skipped
        scalars: dict[str, float] = {
            **means,
            "steps": self.steps,
            "step_time": self.seconds / self.steps,
        }
        for name in ("examples", "tokens"):
            if (count := getattr(self, name)) is not None and self.seconds:
                scalars[f"{name}_per_second"] = count / self.seconds
        for name in ("data", "checkpoint", "compile"):
            scalars[f"{name}_time"] = self.spent.get(name, 0.0)
        elsewhere = sum(scalars[f"{name}_time"] for name in ("data", "checkpoint", "compile"))
        if self.seconds:
            scalars["goodput"] = max(0.0, 1 - elsewhere / self.seconds)
        return number, scalars


def scalars_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a tree, by path; arrays with several entries are left out."""
    paths, leaves, _ = flatten(dict(info))
    return {
        path: x
        for path, x in zip(paths, leaves, strict=True)
        if np.ndim(x) == 0 and _kind(x) in "iubfV"
    }


def _kind(x: Any) -> str:
    try:
        return np.dtype(getattr(x, "dtype", type(x))).kind
    except TypeError:  # not NumPy's, such as that of a random key
        return "O"


def sizes_of(batch: Any, tokens: int | None) -> tuple[int | None, int | None]:
    """Counts the examples and the tokens of a batch; None where that cannot be known.

    `tokens` is the number of tokens of an example. Without it, tokens are the entries of a matrix
    of integers that is the batch, or that a dictionary has as `tokens` or `input_ids`.
    """
    shaped = [x for x in jax.tree.leaves(batch) if np.ndim(x)]
    if not shaped:
        return None, None
    examples = _global(shaped[0])
    if tokens is not None:
        return examples, examples * tokens
    found: list[Any] = [batch]
    if isinstance(batch, Mapping):
        found = [batch[name] for name in _TOKENS if name in batch]
    for x in found:
        if hasattr(x, "dtype") and np.ndim(x) == 2 and np.dtype(x.dtype).kind in "iu":
            return examples, examples * x.shape[1]
    return examples, None


def _global(x: Any) -> int:
    """The global number of examples: every process has its own of an array of the host."""
    is_own = not isinstance(x, jax.Array | jax.ShapeDtypeStruct) or (
        isinstance(x, jax.Array) and x.is_fully_addressable
    )
    return x.shape[0] * (jax.process_count() if is_own else 1)


def _sum(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more


def memory() -> dict[str, float]:
    """Bytes in use: of the fullest device where the backend knows it, else of this process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    found = {}
    for name, key in _MEMORY.items():
        known = [x[key] for x in stats if key in x]
        found |= {name: max(known)} if known else {}
    if found:
        return found
    try:
        with open("/proc/self/statm") as file:
            return {"host_memory": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
    except (OSError, ValueError):
        return {}  # not Linux
