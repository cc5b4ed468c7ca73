"""The levels of ZeRO as data, which say what each one shards.

Source: ZeRO (Rajbhandari et al., 2020), sections 5.1 to 5.3; the names are Paddle's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import shown

# What `level=` accepts: Paddle's names, JAX's and PyTorch's names, and the stages of ZeRO.
LevelName = Literal[
    "dp", "os", "os_g", "p_g_os", "ddp", "zero1", "zero2", "zero3", "fsdp", "auto", 0, 1, 2, 3
]
Accumulate = Literal["level", "local", "scatter", "sync"]


@dataclass(frozen=True)
class Level:
    """A level: what it shards over the shard group, and how gradients accumulate at it.

    Attributes:
      name: `dp`, `os`, `os_g` or `p_g_os`.
      shards_params: whether parameters are stored sharded, and all-gathered where they are used.
      shards_opt_state: whether the optimizer state, and with it the reduced gradient, is sharded.
      accumulate: `local` keeps each device's own gradient until the last micro-batch and reduces
        once; `scatter` reduces every micro-batch and keeps 1/N of the gradient.
    """

    name: Literal["dp", "os", "os_g", "p_g_os"]
    shards_params: bool
    shards_opt_state: bool
    accumulate: Literal["local", "scatter"]


LevelChoice = LevelName | Level

LEVELS: dict[str, Level] = {  # name, shards_params, shards_opt_state, accumulate
    "dp": Level("dp", False, False, "local"),
    "os": Level("os", False, True, "local"),
    "os_g": Level("os_g", False, True, "scatter"),
    "p_g_os": Level("p_g_os", True, True, "scatter"),
}

_ACCUMULATE = get_args(Accumulate)
_ALIASES = {"0": "dp", "1": "os", "2": "os_g", "3": "p_g_os", "ddp": "dp", "fsdp": "p_g_os"}


def parse_level(level: str | int | Level) -> Level:
    """Converts a name (`os_g`, `fsdp`) or a ZeRO stage (`2`, `zero2`) to its level."""
    if isinstance(level, Level):
        return level
    if not isinstance(level, bool) and isinstance(level, (str, int)):
        name = str(level).strip().lower()
        name = _ALIASES.get(name.removeprefix("zero").lstrip("-_ "), name)
        if name in LEVELS:
            return LEVELS[name]
    # Paddle's own examples pass "p_g", which Paddle refuses too; the cut-off name means "p_g_os".
    hint = " Did you mean 'p_g_os'?" if level == "p_g" else did_you_mean(level, LEVELS)
    raise GShardError(
        f"level={shown(level)} is unknown.{hint} Choose 'os' (ZeRO-1: optimizer state "
        "sharded), 'os_g' (ZeRO-2: gradients too), 'p_g_os' (ZeRO-3: parameters too) or 'dp' "
        "(nothing sharded); 1, 2, 3, 'zero1' to 'zero3', 'fsdp' and 'ddp' are accepted."
    )


def parse_levels(levels: Any) -> tuple[str, ...]:
    """Returns the names of several levels, given as a list, a text (`os,p_g_os`) or one level."""
    if isinstance(levels, str):
        levels = levels.split(",")
    elif isinstance(levels, (int, Level)) and not isinstance(levels, bool):
        levels = (levels,)
    if not isinstance(levels, Iterable) or isinstance(levels, Mapping):
        raise GShardError(f"levels={shown(levels)} must be a list of levels.")
    names = tuple(dict.fromkeys(parse_level(level).name for level in levels))
    if not names:
        raise GShardError("levels= is empty. Name at least one level, such as 'os'.")
    return names


def check_accumulate(accumulate: Any) -> None:
    """Refuses an unknown way to accumulate gradients over micro-batches."""
    if accumulate not in _ACCUMULATE:
        raise GShardError(
            f"accumulate={shown(accumulate)} is unknown.{did_you_mean(accumulate, _ACCUMULATE)} "
            "Choose 'level' (what the level says), 'local' (each device keeps its own gradient and "
            "reduces once), 'scatter' (every one is scattered over the shard group, and summed "
            "over replicas once) or 'sync' (every one is reduced over all devices)."
        )


def is_auto(level: str | int | Level) -> bool:
    """Whether the level is `"auto"`, to be chosen by the memory of the devices."""
    return isinstance(level, str) and level.strip().lower() == "auto"
