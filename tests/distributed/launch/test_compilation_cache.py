"""JAX's persistent compilation cache under `gshard launch`."""

from __future__ import annotations

import importlib.util
import re
import stat

import pytest

import gshard
from gshard.distributed.launch import compilation_cache
from gshard.distributed.launch.cli import request
from gshard.distributed.launch.compilation_cache import VARIABLE, cache_variables
from tests.jobs import launch, running

SCRIPT = """
import jax, jax.numpy as jnp
import gshard
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
gshard.distributed.initialize()
mesh = gshard.make_mesh()
sharded = jax.NamedSharding(mesh, jax.P("shard"))
step = jax.jit(lambda x: jnp.tanh(x @ x).sum(), in_shardings=sharded)
print("value", step(jnp.ones((8, 8))))
print("hits", hits.count("/jax/compilation_cache/cache_hits"))
print("compiled", hits.count("/jax/compilation_cache/compile_requests_use_cache"))
"""


def counts(folder, *options):
    """What a script of one process says: programs found in the cache, and programs looked up."""
    (folder / "script.py").write_text(SCRIPT)
    command = launch("--virtual_devices", 2, *options, folder / "script.py")
    # Programs of this size are otherwise not kept.
    with running(command, folder, JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0") as job:
        assert job.code() == 0, job.err
        return [int(x) for x in re.findall(r"(?:hits|compiled) (\d+)", job.out)]


@pytest.mark.slow
def test_the_second_start_compiles_nothing(tmp_path):
    first, wanted = counts(tmp_path, "--compilation_cache", tmp_path / "kept")
    assert first == 0 < wanted
    assert counts(tmp_path, "--compilation_cache", tmp_path / "kept") == [wanted, wanted]
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    assert counts(tmp_path)[0] == 0  # not on CPUs
    assert not (tmp_path / "log" / "compilation_cache").exists()


@pytest.fixture
def on_gpus(monkeypatch):
    """As on a machine with GPUs."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(compilation_cache, "visible_gpus", lambda: ["0"])
    return monkeypatch


def test_it_is_in_the_folder_of_the_logs(on_gpus, tmp_path):
    folder = tmp_path / "log" / "compilation_cache"
    assert cache_variables(None, tmp_path / "log", 1, False) == {VARIABLE: str(folder)}
    assert folder.is_dir()
    on_gpus.setattr(compilation_cache, "visible_gpus", list)
    on_gpus.setattr(importlib.util, "find_spec", lambda name: name == "libtpu" or None)
    assert cache_variables(None, tmp_path / "log", 1, False)
    on_gpus.setattr(importlib.util, "find_spec", lambda name: None)
    assert cache_variables(None, tmp_path / "log", 1, False) == {}


@pytest.mark.parametrize(
    ("chosen", "machines", "on_cpu", "variables"),
    [
        (None, 2, False, {}),  # the folder may not be shared
        (None, 1, True, {}),
        (None, 1, False, {"JAX_PLATFORMS": "cpu"}),
        (None, 1, False, {VARIABLE: "/mine"}),
    ],
)
def test_where_it_is_off(on_gpus, tmp_path, chosen, machines, on_cpu, variables):
    for name, value in variables.items():
        on_gpus.setenv(name, value)
    assert cache_variables(chosen, tmp_path, machines, on_cpu) == {}
    assert not [*tmp_path.iterdir()]


def test_it_is_turned_off_where_the_user_has_a_folder(tmp_path):
    (tmp_path / "script.py").write_text(
        "import jax; print(jax.config.jax_compilation_cache_dir, "
        "jax.config.jax_enable_compilation_cache)"
    )
    command = launch("--virtual_devices", 1, "--compilation_cache", "off", "script.py")
    with running(command, tmp_path, **{VARIABLE: "/mine"}) as job:
        assert job.code() == 0, job.err
        assert job.out.split() == ["/mine", "False"]


def test_a_folder_that_is_named_is_used_everywhere(on_gpus, tmp_path):
    on_gpus.setenv(VARIABLE, "/mine")
    asked = request(["--compilation_cache", str(tmp_path / "a" / "b"), __file__])
    found = cache_variables(asked.compilation_cache, tmp_path, 2, True)
    assert found == {VARIABLE: str(tmp_path / "a" / "b")}


@pytest.mark.usefixtures("on_gpus")
def test_a_folder_that_cannot_be_created_is_named_with_its_option(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "x"
    with pytest.raises(
        gshard.GShardError,
        match=r"^--compilation_cache: .*file/x cannot be created \(Not a directory\).*, or off\.$",
    ):
        cache_variables(str(folder), tmp_path, 1, False)
    with pytest.raises(gshard.GShardError, match=r"^--log_dir: .*Name another folder\.$"):
        cache_variables(None, folder, 1, False)
