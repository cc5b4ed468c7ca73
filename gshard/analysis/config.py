"""The config of a command of gshard: a TOML file, or `module:function`, and options."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import MOST, check_integer, shown
from gshard.analysis.aot.target import Target, parse_target
from gshard.analysis.setup import Choices
from gshard.sharding.level import LEVELS, parse_levels


@dataclass(frozen=True)
class Config:
    """A model, a machine and the options of a run.

    Attributes:
      model: `module:function`, a function that returns a `gshard.TrainSetup`.
      arguments: keyword arguments of the function.
      levels: names of levels.
      devices: number of devices; None if neither CONFIG nor an option has it.
      target: the machine, or None.
      replica: number of replicas of the sharded state.
      choices: options of the step.
      vary: values that `gshard advise` may choose from, by argument of the function.
    """

    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    levels: tuple[str, ...] = tuple(LEVELS)
    devices: int | None = None
    target: Target | None = None
    replica: int = 1
    choices: Choices = Choices()
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def device_count(self) -> int:
        """The number of devices.

        Raises:
          GShardError: neither CONFIG nor an option has it.
        """
        if self.devices is None:
            raise GShardError(
                "how many devices? Give --devices N, or --target, or either in CONFIG."
            )
        return self.devices


def read_config(source: str, options: Mapping[str, Any] | None = None) -> Config:
    """Reads a config.

    Args:
      source: a TOML file, or `module:function`.
      options: values by key, with `arguments.NAME` for the model's; they override the file's.

    Raises:
      GShardError: the file cannot be read, a key does not exist, or a value is not valid.
    """
    values, where = _from_file(source)
    for key, value in (options or {}).items():
        section, dot, name = key.partition(".")
        if dot and section == "arguments":
            values["arguments"] = {**values.get("arguments", {}), name: value}
        else:
            values[key] = value
    if options and "devices" in options and "target" not in options:
        values.pop("target", None)  # the file's machine has another number of devices
    if options and "target" in options and "devices" not in options:
        values.pop("devices", None)
    return _config_of(values, where)


def _from_file(source: str) -> tuple[dict[str, Any], str]:
    path = Path(source)
    if not path.exists() and ":" in source and path.suffix != ".toml":
        return {"model": source}, source
    try:
        return tomllib.loads(path.read_text()), source
    except FileNotFoundError:
        near = path.parent.glob("*.toml") if path.parent.is_dir() else ()
        raise GShardError(
            f"there is no file {source!r}.{did_you_mean(source, near)} Give a TOML file, or the "
            "model itself as module:function."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise GShardError(f"{source} cannot be read: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise GShardError(f"{source} is not TOML: {error}.") from None


def _config_of(values: dict[str, Any], where: str) -> Config:
    own = ["model", "arguments", "vary", "levels", "devices", "target", "replica"]
    chosen = [x.name for x in dataclasses.fields(Choices)]
    for key in values:
        if key not in (*own, *chosen):
            raise GShardError(
                f"{where}: there is no key {key!r}.{did_you_mean(key, [*own, *chosen])} "
                f"Keys are {', '.join([*own, *chosen])}; arguments of the model's function go "
                "into [arguments]."
            )
    if not isinstance(values.get("model"), str):
        raise GShardError(
            f"{where} names no model. Add model = 'module:function', a function that returns a "
            "gshard.TrainSetup."
        )
    arguments, vary = values.get("arguments", {}), values.get("vary", {})
    for key, table in (("arguments", arguments), ("vary", vary)):
        if not isinstance(table, dict):
            raise GShardError(f"{where}: {key}={shown(table)} must be a table.")
    for name, tried in vary.items():
        if not isinstance(tried, list) or not tried:
            raise GShardError(f"{where}: vary.{name}={shown(tried)} must be a list of values.")
    for key, type_, what in (
        ("target", str, "a text"),
        ("accumulate", str, "a text"),
        ("offload", bool, "true or false"),
    ):
        if key in values and type(values[key]) is not type_:
            raise GShardError(f"{where}: {key}={shown(values[key])} must be {what}.")
    devices, target = values.get("devices"), None
    if devices is not None:
        devices = check_integer("devices", devices, 1, most=MOST)
    if "target" in values:
        target = parse_target(values["target"])
        if devices not in (None, target.devices):
            raise GShardError(
                f"{where}: devices={devices}, and target {target.text} has {target.devices}. Give "
                "one of both."
            )
        devices = target.devices
    return Config(
        values["model"],
        arguments,
        parse_levels(values.get("levels", tuple(LEVELS))),
        devices,
        target,
        check_integer("replica", values.get("replica", 1), 1, most=MOST),
        Choices(**{key: values[key] for key in chosen if key in values}),
        vary,
    )
