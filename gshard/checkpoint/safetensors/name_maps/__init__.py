"""The name maps that gshard has, one module each; all of them are data.

May import: `name_map`.
Start reading: `llama`.
"""

from __future__ import annotations

from typing import Any

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import shown
from gshard.checkpoint.safetensors.name_map import NameMap
from gshard.checkpoint.safetensors.name_maps.gemma import GEMMA, GEMMA3
from gshard.checkpoint.safetensors.name_maps.gpt2 import GPT2
from gshard.checkpoint.safetensors.name_maps.llama import LLAMA

KNOWN = {"gemma": GEMMA, "gemma3": GEMMA3, "gpt2": GPT2, "llama": LLAMA}


def name_map_of(value: Any, call: str) -> NameMap | None:
    """The map that a user names or makes; None for gshard's own names."""
    if value is None or isinstance(value, NameMap):
        return value
    if isinstance(value, str) and value in KNOWN:
        return KNOWN[value]
    raise GShardError(
        f"{call}: name_map={shown(value)} is unknown.{did_you_mean(value, KNOWN)} Choose one of "
        f"{', '.join(KNOWN)}, or pass a gshard.NameMap."
    )
