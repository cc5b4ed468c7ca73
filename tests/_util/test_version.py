"""How the packages of an extra are installed."""

from __future__ import annotations

import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from gshard._util.version import install_command

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("extra", ["s3", "aot-gpu", "tensorboard"])
def test_the_packages_of_an_extra_are_named(extra):
    command = shlex.split(install_command(extra).lower())
    assert command[:2] == ["pip", "install"]
    assert sorted(command[2:]) == sorted(package.lower() for package in EXTRAS[extra])


def test_where_gshard_is_only_on_the_path_its_folder_is_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert install_command("s3") == f"pip install -e '{ROOT}[s3]'"
