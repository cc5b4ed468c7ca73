"""Whether the packages at hand are those that gshard, and JAX, ask for.

Every bound is read from the metadata of what is installed, so that none is written twice.
"""

from __future__ import annotations

import platform
import re
from importlib import metadata

from gshard.cli.doctor.check import Check

PACKAGES = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"
_ASKING = "gshard", "jax", "flax", "optax", "orbax-checkpoint"
_PLUGIN = re.compile(r"jax-(cuda|rocm)\d+-(plugin|pjrt)|libtpu")
_FOR_DEVELOPMENT = {"test", "dev", "peers"}
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_COMPARED = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


def versions() -> list[Check]:
    """Python, the packages, the plugins of JAX, and what is there of gshard's extras."""
    try:
        floor = metadata.metadata("gshard")["Requires-Python"]
    except metadata.PackageNotFoundError:
        return [
            Check(
                "gshard",
                "warn",
                "on the path, but not installed: what it asks for is not known",
                "pip install gshard, or `pip install -e .` in its folder",
            )
        ]
    found = [_gshard(), _python(floor), *map(package, PACKAGES)]
    names = {_normal(d.metadata["Name"] or "") for d in metadata.distributions()}
    found += [plugin(name) for name in sorted(filter(_PLUGIN.fullmatch, names))]
    return [*found, extras()]


def _gshard() -> Check:
    return Check("gshard", "ok", metadata.version("gshard"))


def _python(floor: str) -> Check:
    here = platform.python_version()
    if _met(here, floor):
        return Check("Python", "ok", here)
    return Check(
        "Python", "fail", f"{here}; gshard asks for {floor}", f"make an environment of {floor}"
    )


def package(name: str) -> Check:
    """The version of a package, and whether it is what gshard and the others ask for."""
    here, asked = _version(name), _asked(name)
    wanted = ", ".join(f"{who} asks for {what}" for who, what in asked)
    to_install = f"{name}{asked[0][1]}" if asked else name
    if here is None:
        why = f"not installed{'; ' if wanted else ''}{wanted}"
        return Check(name, "fail", why, f'pip install "{to_install}"')
    for who, what in asked:
        if not _met(here, what):
            found = f"{here}; {who} asks for {name}{what}"
            return Check(name, "fail", found, f'pip install -U "{name}{what}"')
    return Check(name, "ok", here)


def plugin(name: str) -> Check:
    """A plugin of JAX: of the version that this JAX asks for, or JAX does without it."""
    here, jax = _version(name) or "", _version("jax")
    asked = [what for one, what, marker in _requirements("jax") if one == name and marker]
    extra = name.removeprefix("jax-").split("-")[0].replace("libtpu", "tpu")
    if name.endswith("pjrt"):
        asked = [f"=={_version(name.replace('pjrt', 'plugin'))}"]
    for what in asked:
        if not _met(here, what):
            return Check(
                name,
                "warn",
                f"{here}; JAX {jax} asks for {name}{what}, and may not use it",
                f'pip install -U "jax[{extra}]=={jax}"',
            )
    return Check(name, "ok", here)


def extras() -> Check:
    """Which optional parts of gshard are there; none is needed."""
    there, missing = [], []
    for extra in metadata.metadata("gshard").get_all("Provides-Extra") or []:
        if extra in _FOR_DEVELOPMENT:
            continue
        marker = re.compile(rf"extra\s*==\s*['\"]{extra}['\"]")
        needs = [(n, w) for n, w, m in _requirements("gshard") if marker.search(m)]
        met = all((here := _version(name)) and _met(here, what) for name, what in needs)
        (there if met else missing).append(extra)
    found = f"installed: {', '.join(sorted(there)) or 'none'}"
    if missing:
        names = ", ".join(sorted(missing))
        found += f'; not installed: {names} (pip install "gshard[{min(missing)}]")'
    return Check("optional extras", "ok", found)


# ---- metadata ------------------------------------------------------------------------------------


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _asked(name: str) -> list[tuple[str, str]]:
    """(who asks, for which versions), of those that always ask."""
    return [
        (who, what)
        for who in _ASKING
        for one, what, marker in _requirements(who)
        if one == name and what and not marker
    ]


def _requirements(name: str) -> list[tuple[str, str, str]]:
    """(name, versions, marker) of each requirement of a package."""
    try:
        lines = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    found = [match.groups("") for line in lines if (match := _REQUIREMENT.match(line))]
    return [(_normal(n), what.replace(" ", ""), marker.strip()) for n, what, marker in found]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _met(version: str, specifier: str) -> bool:
    """Whether a version is among those of a specifier; parts of other forms are passed by."""
    here = _numbers(version)
    for part in filter(None, specifier.split(",")):
        match = re.fullmatch(r"(>=|<=|==|>|<)([\d.]+?)(\.\*)?", part)
        if match is None:
            continue
        operator, text, any_rest = match.groups()
        there = _numbers(text)
        if operator == "==":
            same = here[: len(there)] == there if any_rest else _same(here, there)
            if not same:
                return False
        elif not (_COMPARED[operator](here, there) or ("=" in operator and _same(here, there))):
            return False
    return True


def _same(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    most = max(len(a), len(b))
    return a + (0,) * (most - len(a)) == b + (0,) * (most - len(b))


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: `(0, 10, 2)` of `0.10.2.dev1+cuda`."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
