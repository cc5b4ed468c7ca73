"""Settings: a TOML file into frozen dataclasses, each one changeable on the command line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import tomllib
import typing
from pathlib import Path

from gshard.sharding.level import parse_levels

DEFAULT_FILE = "configs/demo.toml"
MODEL = "examples.training:setup"
PLANNED = ("levels", "devices", "expert", "micro_batches")  # also keys of `gshard plan`
COUNTS = ("devices", "expert", "micro_batches", "steps", "batch_size", "save_every")
COUNTS += tuple(f"arguments.{name}" for name in ("width", "layers", "heads", "sequence"))


class ConfigError(ValueError):
    """A setting that does not exist, or has a value of the wrong type."""


def setting(default, meaning: str):
    """A dataclass field with a default and one line for --help."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Of `examples.training.setup`, which `gshard plan` calls too."""

    width: int = setting(160, "size of the residual stream")
    layers: int = setting(3, "number of blocks")
    heads: int = setting(5, "attention heads; width must be a multiple of twice this number")
    sequence: int = setting(64, "bytes the model sees at once")
    scan: bool = setting(True, "one compiled block for all layers (nn.scan)")
    remat: bool = setting(False, "recompute a block's activations in the backward pass")
    experts: int = setting(0, "experts in each block; 0: a dense MLP")
    chosen: int = setting(2, "experts that a byte goes to; must divide 4 x width")
    capacity: float = setting(1.25, "bytes that an expert takes, in multiples of its fair share")
    min_shard_size: int = setting(2**14, "arrays of more elements (of one layer) are sharded")
    learning_rate: float = setting(6e-3, "peak learning rate of AdamW")
    warmup_steps: int = setting(10, "steps from zero to the peak; cosine decay after")
    weight_decay: float = setting(0.1, "decoupled weight decay")
    clip: float = setting(1.0, "largest global norm of the gradient")


@dataclasses.dataclass(frozen=True)
class Config:
    levels: tuple[str, ...] = setting(("dp", "os", "os_g", "p_g_os"), "levels to train at")
    devices: int = setting(8, "virtual CPU devices")
    expert: int = setting(1, "devices that share the experts")
    micro_batches: int = setting(4, "micro-batches per step")
    steps: int = setting(100, "optimizer steps per level")
    batch_size: int = setting(32, "examples in the global batch")
    seed: int = setting(0, "of the parameters, the batches and the sample")
    prompt: str = setting("def ", "start of the sampled text")
    sample_bytes: int = setting(300, "length of the sampled text")
    output: str = setting("demo-output", "folder for the results")
    one_device: bool = setting(True, "train on one device first, to compare with")
    checkpoints: str = setting("", "folder to save to and resume from; empty: none")
    save_every: int = setting(10, "steps from one checkpoint to the next")
    pause: float = setting(0.0, "seconds after a step, to watch it")
    arguments: Arguments = dataclasses.field(default_factory=Arguments)


# ---- the dataclasses as a flat table: "arguments.width" -> (type, default, meaning) ------------


def flat_fields(cls=Config, prefix: str = "") -> dict[str, tuple[type, object, str]]:
    types = typing.get_type_hints(cls)
    table = {}
    for field in dataclasses.fields(cls):
        kind, name = types[field.name], prefix + field.name
        if dataclasses.is_dataclass(kind):
            table |= flat_fields(kind, name + ".")
        else:
            table[name] = (kind, field.default, field.metadata["meaning"])
    return table


def flat_values(tables: dict, prefix: str = "") -> dict[str, object]:
    values = {}
    for key, value in tables.items():
        name = prefix + key
        values |= flat_values(value, name + ".") if isinstance(value, dict) else {name: value}
    return values


def build(values: dict[str, object], cls=Config, prefix: str = ""):
    types = typing.get_type_hints(cls)
    arguments = {}
    for field in dataclasses.fields(cls):
        kind, name = types[field.name], prefix + field.name
        if dataclasses.is_dataclass(kind):
            arguments[field.name] = build(values, kind, name + ".")
        elif name in values:
            arguments[field.name] = values[name]
    return cls(**arguments)


def what_decides_the_numbers(config: Config) -> dict[str, object]:
    """The settings that a resumed run must share: all but its level, devices and folders."""
    values = flat_values(dataclasses.asdict(config))
    alone = ("steps", "batch_size", "seed")
    return {k: v for k, v in values.items() if k in alone or k.startswith("arguments.")}


# ---- checks -----------------------------------------------------------------------------------


def nearest(name: str, known) -> str:
    """Say which known name was probably meant."""
    known = list(known)
    guess = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    # A key in the wrong section has the right last part.
    guess = guess or [k for k in known if k.split(".")[-1] == name.split(".")[-1]]
    return f"did you mean {guess[0]!r}?" if guess else f"known: {', '.join(sorted(known))}"


def check_value(kind: type, value: object, name: str, where: str):
    """Return `value` as `kind`; TOML and the command line both come through here."""
    if kind == tuple[str, ...]:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
    elif kind is float and type(value) is int:
        return float(value)
    elif type(value) is kind:  # and not isinstance: True is an int
        return value
    wanted = "list of str" if kind == tuple[str, ...] else kind.__name__
    raise ConfigError(
        f"{where}: {name} must be {'an' if wanted == 'int' else 'a'} {wanted}, "
        f"but is {value!r} ({type(value).__name__})"
    )


def read_file(path: str | Path) -> dict[str, object]:
    """Return the checked settings of a TOML file as a flat table."""
    try:
        with open(path, "rb") as file:
            values = flat_values(tomllib.load(file))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML ({error})") from error
    model = values.pop("model", MODEL)
    if model != MODEL:
        raise ConfigError(f"{path}: model={model!r}, and the demo trains {MODEL!r}")
    known = {key_in_file(name): (name, kind) for name, (kind, *_) in flat_fields().items()}
    for key in values:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}; {nearest(key, known)}")
    return {
        known[key][0]: check_value(known[key][1], value, key, str(path))
        for key, value in values.items()
    }


def key_in_file(name: str) -> str:
    """The key of a setting in a file, of which `gshard plan` reads all but `[training]`."""
    return name if name in PLANNED or name.startswith("arguments.") else f"training.{name}"


def check_whole(config: Config) -> Config:
    """Refuse settings that do not fit each other, before anything is compiled."""
    values = flat_values(dataclasses.asdict(config))
    for name in COUNTS:
        if values[name] < 1:
            raise ConfigError(f"{name}={values[name]} must be at least 1")
    for name in ("sample_bytes", "seed", "pause", "arguments.experts"):
        if values[name] < 0:
            raise ConfigError(f"{name}={values[name]} must not be negative")
    for name in ("levels", "prompt"):
        if not values[name]:
            raise ConfigError(f"{name} must not be empty")
    width, heads = config.arguments.width, config.arguments.heads
    if width % (2 * heads):
        raise ConfigError(
            f"arguments.width={width} must be a multiple of 2 x arguments.heads "
            f"= 2 x {heads} = {2 * heads}"
        )
    experts, chosen = config.arguments.experts, config.arguments.chosen
    if experts and (not 0 < chosen <= experts or 4 * width % chosen):
        raise ConfigError(
            f"arguments.chosen={chosen} must be at most arguments.experts={experts}, and divide "
            f"4 x arguments.width = 4 x {width} = {4 * width}"
        )
    shared = config.expert > 1 and (not experts or experts % config.expert)
    if config.devices % config.expert or shared:
        raise ConfigError(
            f"expert={config.expert} must divide devices={config.devices} and "
            f"arguments.experts={experts}"
        )
    parts = config.devices * config.micro_batches
    if config.batch_size % parts:
        raise ConfigError(
            f"batch_size={config.batch_size} must be a multiple of devices x micro_batches "
            f"= {config.devices} x {config.micro_batches} = {parts}"
        )
    return dataclasses.replace(config, levels=parse_levels(config.levels))


# ---- the command line -------------------------------------------------------------------------


def from_text(kind: type):
    """How a word of the command line becomes a value of `kind`."""
    if kind is bool:
        return lambda word: {"true": True, "false": False}[word.lower()]
    if kind == tuple[str, ...]:
        return lambda word: tuple(word.split(","))
    return kind


def parse(
    arguments: list[str] | None = None,
    description: str | None = None,
    *,
    file: str = DEFAULT_FILE,
    without: tuple[str, ...] = (),
) -> Config:
    """Read `[FILE] [--name value ...]`: the file's settings, then the command line's over them.

    A program refuses the settings that it is `without`.
    """
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("file", nargs="?", default=file, help=f"TOML file (default {file})")
    known = {name: field for name, field in flat_fields().items() if name not in without}
    for name, (kind, default, meaning) in known.items():
        parser.add_argument(
            f"--{name}",
            dest=name,
            metavar={bool: "true|false", tuple[str, ...]: "A,B"}.get(kind) or kind.__name__,
            default=argparse.SUPPRESS,
            help=f"{meaning} (default {default}, unless the file sets it)",
        )
    given, unknown = parser.parse_known_args(arguments)
    if unknown:
        word = unknown[0].split("=")[0]
        raise ConfigError(
            f"command line: unknown option {word!r}; {nearest(word, ['--' + k for k in known])}"
        )
    values = read_file(given.file)
    if others := [name for name in without if name in values]:
        raise ConfigError(f"{given.file}: {key_in_file(others[0])} is not used by this program")
    for name, word in vars(given).items():
        if name == "file":
            continue
        kind = known[name][0]
        try:
            value = from_text(kind)(word)
        except (ValueError, KeyError):
            value = word
        values[name] = check_value(kind, value, name, "command line")
    return check_whole(build(values))
