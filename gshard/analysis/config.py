"""A model, a machine and the options of a run: `Config`.

A config is a TOML file, or `module:function`, and options of a command.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gshard._util.errors import GShardError, did_you_mean
from gshard._util.validation import MOST_DEVICES, check_integer, shown
from gshard.analysis.allowed_imports import ModelOfFile
from gshard.analysis.aot.target import Target, parse_target
from gshard.analysis.setup import Choices, check_kept_axis, module_at
from gshard.sharding.level import LEVELS, parse_levels


@dataclass(frozen=True)
class Config:
    """A model (`module:function`), a machine and the options of a run, from a file or options.

    `devices` is None if neither has it. `vary` lists values that `gshard advise` may choose from,
    by argument of the model's function; it keeps the keys in `given`, which the two name.
    """

    model: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    levels: tuple[str, ...] = tuple(LEVELS)
    devices: int | None = None
    target: Target | None = None
    replica: int = 1
    choices: Choices = Choices()
    vary: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    sequence: int = 1
    expert: int = 1
    given: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        check_kept_axis(self.expert, self.choices)
        if self.choices.offload and self.target is not None and self.target.platform == "cpu":
            raise GShardError(
                f"offload=true moves nothing on {self.target.text}, whose devices have the host's "
                "memory. Leave it out."
            )

    def device_count(self) -> int:
        """The number of devices, which CONFIG or an option must give."""
        if self.devices is None:
            raise GShardError(
                "how many devices? Give --devices N, or --target, or either in CONFIG."
            )
        return self.devices


# The configs that ship with gshard, by name.
SHIPPED = {
    path.stem: path
    for path in sorted((Path(__file__).parents[1] / "models" / "configs").glob("*.toml"))
}


def read_config(
    source: str, options: Mapping[str, Any] | None = None, allow_import: Sequence[str] = ()
) -> Config:
    """Reads a config from a TOML file, a name in `SHIPPED`, or from `module:function`.

    `options` are values by key, with `arguments.NAME` for the model's; they override the file's.
    The model that a file names has to ship with gshard, to be in the current folder, or to be in a
    module or package of `allow_import`.
    """
    values = _from_file(source)
    for key, value in (options or {}).items():
        section, dot, name = key.partition(".")
        if dot and section == "arguments":
            if isinstance(known := values.get("arguments", {}), dict):  # else it is refused below
                values["arguments"] = {**known, name: value}
        else:
            values[key] = value
    one = {"devices", "target"}.intersection(options or {})
    if one == {"target"}:
        values.pop("devices", None)
    elif one == {"devices"} and isinstance(target := values.get("target"), str):
        if parse_target(target).devices != values["devices"]:
            del values["target"]
    config = _config_of(values, source)
    if config.model == source:
        return config
    fixed = options or {}
    vary = {name: tried for name, tried in config.vary.items() if f"arguments.{name}" not in fixed}
    return dataclasses.replace(config, model=ModelOfFile(config.model, allow_import), vary=vary)


def _from_file(source: str) -> dict[str, Any]:
    path = SHIPPED.get(source) or Path(source)
    if not os.path.exists(path) and ":" in source and path.suffix != ".toml":
        return {"model": source}
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError:
        near = path.parent.glob("*.toml") if path.parent.is_dir() else ()
        hint = did_you_mean(source, [*near, *SHIPPED])
        module, _, function = source.rpartition(".")
        if Path(module.replace(".", "/") + ".py").exists():
            hint = f" Did you mean '{module}:{function}'?"
        raise GShardError(
            f"there is no file {source!r}.{hint} Give a TOML file, the name of a config that ships "
            "with gshard (`gshard configs` lists them), or the model itself as module:function."
        ) from None
    except tomllib.TOMLDecodeError as error:
        if path.suffix == ".py":
            raise GShardError(
                f"{source} is a program, not TOML. Name the function in it that makes the model: "
                f"{module_at(source) or 'MODULE'}:FUNCTION."
            ) from None
        raise GShardError(f"{source} is not TOML: {error}.") from None
    except (OSError, ValueError, RecursionError) as error:  # too many digits, or too deep
        raise GShardError(f"{source} cannot be read: {error}.") from None


def _config_of(values: dict[str, Any], where: str) -> Config:
    chosen = [x.name for x in dataclasses.fields(Choices)]
    keys = [
        "model",
        "arguments",
        "training",
        "vary",
        "levels",
        "devices",
        "target",
        "replica",
        "sequence",
        "expert",
        *chosen,
    ]
    for key in values:
        if key not in keys:
            raise GShardError(
                f"{where}: there is no key {key!r}.{did_you_mean(key, keys)} Keys are "
                f"{', '.join(keys)}; arguments of the model's function go into [arguments], and "
                "what only your own script reads into [training]."
            )
    if not isinstance(values.get("model"), str):
        raise GShardError(
            f"{where} names no model. Add model = 'module:function', a function that returns a "
            "gshard.TrainSetup."
        )
    arguments, vary = values.get("arguments", {}), values.get("vary", {})
    for key, type_, what in (
        ("arguments", dict, "a table"),
        ("vary", dict, "a table"),
        ("training", dict, "a table"),
        ("keep", dict, "a table, such as {'experts/' = ['expert', 0]}, with = and no colon"),
        ("target", str, "a text"),
        ("accumulate", str, "a text"),
        ("offload", bool, "true or false"),
    ):
        if key in values and type(values[key]) is not type_:
            raise GShardError(f"{where}: {key}={shown(values[key])} must be {what}.")
    for name, tried in vary.items():
        if not isinstance(tried, list) or not tried:
            raise GShardError(f"{where}: vary.{name}={shown(tried)} must be a list of values.")
    devices, target = values.get("devices"), None
    if devices is not None:
        devices = check_integer("devices", devices, 1, most=MOST_DEVICES)
    if "target" in values:
        target = parse_target(values["target"])
        if devices not in (None, target.devices):
            raise GShardError(
                f"{where}: devices={devices}, but target {target.text} has {target.devices}. Give "
                "only one of the two."
            )
        devices = target.devices
    return Config(
        values["model"],
        arguments,
        parse_levels(values.get("levels", tuple(LEVELS))),
        devices,
        target,
        check_integer("replica", values.get("replica", 1), 1, most=MOST_DEVICES),
        Choices(**{key: values[key] for key in chosen if key in values}),
        vary,
        check_integer("sequence", values.get("sequence", 1), 1, most=MOST_DEVICES),
        check_integer("expert", values.get("expert", 1), 1, most=MOST_DEVICES),
        frozenset(values),
    )
