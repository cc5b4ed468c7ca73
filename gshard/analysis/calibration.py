"""Rates measured on a machine: `make gpu-check` writes them, and `gshard advise` reads them."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from gshard._util.chips import chip_of_kind
from gshard._util.errors import GShardError
from gshard._util.validation import shown
from gshard.analysis.aot.target import Target

SCHEMA = 2  # of the report of `make gpu-check`; to be increased when its keys change


@dataclass(frozen=True)
class Calibration:
    """Rates of one device while all devices of the machine do the same.

    Attributes:
      device_kind: as JAX names it.
      jax: the version of JAX.
      small: whether small arrays were used, which do not keep an accelerator busy.
      devices: how many devices worked at once.
      bfloat16_flops: FLOP/s of products of square matrices.
      float32_flops: the same at JAX's default precision.
      memory_bandwidth: bytes/s, read and written.
      collective_start: seconds of an all-reduce of one element; None with one device.
      link: bytes/s that a device sends in an all-gather by a ring; None with one device.
    """

    device_kind: str
    jax: str
    small: bool
    devices: int
    bfloat16_flops: float
    float32_flops: float
    memory_bandwidth: float
    collective_start: float | None = None
    link: float | None = None


def read_calibration(path: str, target: Target) -> Calibration:
    """Reads `report.json` of `make gpu-check`, or its calibration alone, for a target.

    Raises:
      GShardError: one sentence: it cannot be read, is damaged, or is that of another machine.
    """
    on_cpu = f"python -m benchmarks.gpu --sections calibration --devices {target.devices}"
    run = on_cpu if target.platform == "cpu" else "make gpu-check ARGS='--sections calibration'"
    again = f"run `{run}` in a checkout of gshard on {target.text}, or leave --calibration out."
    if target.hosts > 1:
        raise GShardError(
            f"a calibration ({path}) is of one host, and {target.text} has {target.hosts}: it says "
            "nothing of the network between them. Leave --calibration out."
        )
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        raise GShardError(f"{path} cannot be read ({error.strerror}): {again}") from None
    except (ValueError, RecursionError) as error:
        raise GShardError(f"{path} is not JSON ({error}): {again}") from None
    if isinstance(found, dict) and "calibration" in found:
        if found.get("schema") != SCHEMA:
            has = found.get("schema")
            raise GShardError(f"{path} has schema {has!r}, and gshard reads {SCHEMA}: {again}")
        found = found["calibration"]
    if not isinstance(found, dict):
        raise GShardError(f"{path} has no calibration: {again}")
    values: dict[str, Any] = {x.name: found.get(x.name) for x in dataclasses.fields(Calibration)}
    for field in dataclasses.fields(Calibration):
        value = values[field.name]
        alone = field.default is None and found.get("devices") == 1
        if not (alone and value is None) and not _valid(value, str(field.type)):
            raise GShardError(f"{path} has {field.name}={shown(value)} in its calibration: {again}")
    made = Calibration(**values)
    chip = chip_of_kind(made.device_kind)
    if chip != target.chip or made.devices != target.devices:
        raise GShardError(
            f"{path} was measured on {made.devices} x {made.device_kind}, and {target.text} has "
            f"{target.devices} x {target.chip.title}: {again}"
        )
    if made.small and target.platform != "cpu":
        raise GShardError(
            f"{path} was measured with --small, whose arrays are too small for {target.text}: "
            f"{again}"
        )
    return made


def _valid(value: Any, type_: str) -> bool:
    if type_ in ("str", "bool"):
        return type(value).__name__ == type_
    number = type(value) is int or (type_ != "int" and type(value) is float)
    return number and 0 < value < math.inf
