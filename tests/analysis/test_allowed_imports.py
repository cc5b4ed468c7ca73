"""A configuration file runs no code that it names, except what its reader trusts."""

from __future__ import annotations

import sys

import pytest

import gshard
from gshard.analysis.config import read_config
from gshard.analysis.setup import load_setup
from gshard.cli.common import config_parser, given_config


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The current folder, and one on the path from which modules can be imported."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here), str(elsewhere), *sys.path])
    before = set(sys.modules)
    yield here, elsewhere
    for name in set(sys.modules) - before:
        del sys.modules[name]


def config(model: str) -> str:
    with open("config.toml", "w") as file:
        file.write(f'model = "{model}"\ndevices = 8\n[arguments]\ncommand = "touch ran"\n')
    return "config.toml"


@pytest.mark.parametrize(
    "model",
    ["os:system", "subprocess:run", "shutil:rmtree", "builtins:exec",
     "gshard.cli.main:main", "gshard._util.durable:remove_folder",
     "examples.train_gpt:main", "jax:jit"],
)  # fmt: skip
def test_a_file_may_not_name_any_code(folders, model):
    module = model.partition(":")[0]
    with pytest.raises(gshard.GShardError, match=f"pass --allow-import {module}, or give the"):
        read_config(config(model))


def test_a_module_that_is_not_there_is_no_foreign_code(folders):
    (folders[0] / "mine.py").write_text("def setup(): pass\n")
    for model, said in (
        ("mien:setup", "No module named 'mien'"),
        ("nothing:setup", "No module named 'nothing'"),
        ("examplesx:setup", "No module named 'examplesx'"),
        ("./mine.py:setup", "Did you mean 'mine:setup'"),
        ("../mine.py:setup", r"mine.py'\. Modules are looked for in"),
    ):
        with pytest.raises(gshard.GShardError, match=said) as raised:
            load_setup(read_config(config(model)).model)
        assert "allow-import" not in str(raised.value)


def test_nothing_is_imported_before_it_is_allowed(folders):
    here, elsewhere = folders
    (elsewhere / "planted").mkdir()
    (elsewhere / "planted" / "__init__.py").write_text("open('ran', 'w')")
    (elsewhere / "planted" / "inner.py").write_text("open('ran', 'w')")
    with pytest.raises(gshard.GShardError, match=r"--allow-import planted\.inner"):
        read_config(config("planted.inner:setup"))
    assert not (here / "ran").exists()
    read_config(config("planted.inner:setup"), allow_import=["planted"])
    read_config(config("planted.inner:setup"), allow_import=["planted.inner"])
    with pytest.raises(gshard.GShardError, match="allow-import"):
        read_config(config("planted.inner:setup"), allow_import=["plant"])


def test_the_current_folder_is_the_users_own(folders):
    here, elsewhere = folders
    (elsewhere / "library.py").write_text("def run(command): open('ran', 'w')")
    (here / "mine.py").write_text(
        "from functools import partial\nfrom library import run\n"
        "def setup(command): return partial(print, command)\nagain = partial(run)\n"
    )
    load_setup(read_config(config("mine:setup")).model, {"command": "x"})
    for name in ("run", "again"):
        with pytest.raises(gshard.GShardError, match="--allow-import library"):
            load_setup(read_config(config(f"mine:{name}")).model, {"command": "x"})
    assert not (here / "ran").exists()


def test_packages_installed_below_the_current_folder_are_not(folders, monkeypatch):
    here, _ = folders
    packages = here / ".venv" / "lib"
    packages.mkdir(parents=True)
    (packages / "installed.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(packages), *sys.path])
    read_config(config("installed:setup"))
    monkeypatch.setattr(sys, "prefix", str(here / ".venv"))
    with pytest.raises(gshard.GShardError, match="--allow-import installed"):
        read_config(config("installed:setup"))


def test_models_that_ship_with_gshard_may_be_named(folders):
    assert read_config("gpt2-smallest").model


def test_words_of_the_command_line_are_the_users_own(folders):
    def given(*words: str) -> str:
        config_ = given_config(config_parser("x", "about", ""), list(words))[1]
        assert config_ is not None
        return config_.model

    assert given("os:system") == "os:system"
    assert given(config("os:system"), "--allow-import", "os") == "os:system"
