"""`gshard` itself: what it prints without JAX, how options are spelt, and what ships with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import tomllib
import venv
from pathlib import Path

import pytest

import gshard
from gshard.analysis.config import SHIPPED
from gshard.cli.common import config_parser, named_config
from gshard.cli.main import COMMANDS, main
from gshard.distributed.launch.cli import request
from tests.tiers import quick

ROOT = Path(__file__).parents[2]


def test_help_and_version_do_not_import_jax(tmp_path):
    code = "import sys; from gshard.cli.main import main; import gshard; main(sys.argv[1:])"
    for word in ("--help", "--version"):
        command = [sys.executable, "-c", f"{code}; assert 'jax' not in sys.modules", word]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        said = {"--help": "gshard plan", "--version": f"gshard {gshard.__version__}"}[word]
        assert said in ended.stdout


TRAINS_WITHOUT_NNX = """
import sys
import gshard
assert "jax" not in sys.modules
import jax.numpy as jnp, optax
pair = ({"w": jnp.ones((16, 8))}, optax.adam(0.1))
state, plan = gshard.shard_train_state(pair, gshard.make_mesh(), "p_g_os", min_shard_size=0)
step = gshard.make_train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2), plan)
state, _ = step(state, jnp.ones((8, 16)))
assert not {"flax.nnx", "gshard.wrapped", "gshard.analysis"} & sys.modules.keys(), sys.modules
gshard.nothing
"""


def test_a_public_name_is_imported_at_its_first_use():
    ended = subprocess.run(
        [sys.executable, "-c", TRAINS_WITHOUT_NNX], capture_output=True, text=True, timeout=120
    )
    assert "AttributeError: module 'gshard' has no attribute 'nothing'" in ended.stderr


def test_models_are_imported_by_themselves():
    code = "import gshard\ntry: gshard.models\nexcept AttributeError as e: print(e)"
    code += "\nfrom gshard import models\nassert gshard.models is models"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "Import it first, such as: from gshard.models import llama." in ended.stdout


def test_threads_import_public_names_at_the_same_time():
    code = """
import random, threading
import gshard
failed = []
def use(seed):
    for name in random.Random(seed).sample(gshard.__all__, len(gshard.__all__)):
        try:
            getattr(gshard, name)
        except Exception as error:
            failed.append((name, error))
threads = [threading.Thread(target=use, args=(seed,)) for seed in range(12)]
for act in (threading.Thread.start, threading.Thread.join):
    for thread in threads:
        act(thread)
assert not failed, failed
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr


def test_every_command_has_help(capsys):
    for name in COMMANDS:
        try:
            code = main([name, "--help"])
        except SystemExit as ended:  # as argparse ends
            code = ended.code
        assert code == 0
        assert f"gshard {name}" in capsys.readouterr().out


def test_help_as_a_command(capsys):
    assert main(["help"]) == 0
    assert "gshard plan" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["help", "plan"])
    assert ended.value.code == 0 and "usage: gshard plan" in capsys.readouterr().out
    assert main(["help", "plna"]) == 2 and "Did you mean 'plan'?" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--micro-batch-size", "--micro_batch_size"])
def test_options_take_hyphens_and_underscores(option):
    parser = config_parser("gshard plan", "", "")
    _, config = named_config(parser, ["gpt2-smallest", "--allow_import=os", option, "3"])
    assert config.choices.micro_batch_size == 3


def test_options_of_the_launcher_take_both_and_those_of_the_script_stay(tmp_path):
    script = tmp_path / "a.py"
    script.touch()
    asked = request(["--log-dir", "x", "--max-restarts=2", str(script), "--a-b", "1"])
    assert (str(asked.log_dir), asked.max_restarts) == ("x", 2)
    assert asked.arguments == ["--a-b", "1"]


def test_configs_are_listed_and_printed(capsys):
    assert main(["configs", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == SHIPPED.keys()
    assert main(["configs", "show", "llama-7b"]) == 0
    printed = capsys.readouterr().out
    assert tomllib.loads(printed) == tomllib.loads(SHIPPED["llama-7b"].read_text())
    assert main(["configs", "show", "llama-7"]) == 2
    assert "Did you mean 'llama-7b'?" in capsys.readouterr().err
    for words in (["llama-7b"], ["list", "llama-7b"]):
        assert main(["configs", *words]) == 2
        assert "`gshard configs show llama-7b` prints one" in capsys.readouterr().err
    assert main(["configs"]) == 0
    assert "et al" not in capsys.readouterr().out.replace("et al., ", "")  # whole sentences
    assert main(["plan", "llama-7"]) == 2
    assert "Did you mean 'llama-7b'?" in capsys.readouterr().err


@pytest.mark.slow
def test_a_wheel_plans_a_shipped_model_in_an_empty_folder(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(tmp_path)]
    built = subprocess.run([*build, str(ROOT)], capture_output=True, text=True, timeout=300)
    if built.returncode and "Connection" in built.stderr:
        pytest.skip("hatchling cannot be downloaded here")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    # Its own site-packages, with those of this environment after it.
    venv.create(tmp_path / "venv", with_pip=False)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(site)]
        + [str(wheel)],
        check=True,
        timeout=300,
    )
    here = next(x for x in sys.path if x.endswith("site-packages"))
    (site / "more.pth").write_text(f"{here}\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    command = [str(tmp_path / "venv" / "bin" / "python"), "-m", "gshard", "plan", "gpt2-smallest"]
    ended = subprocess.run(
        [*command, "--json"], cwd=empty, capture_output=True, text=True, timeout=300,
        env={"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert ended.returncode in (0, 1), ended.stderr
    assert json.loads(ended.stdout)["levels"].keys() >= {"os", "p_g_os"}


@pytest.mark.parametrize("seconds", quick([0.0, 0.1, 0.5, 1.5, 2.5], [0.0]))
def test_ctrl_c_ends_a_command_at_any_time(seconds):
    """While NumPy is imported, and while XLA compiles what is freed at the end of Python."""
    command = [sys.executable, "-m", "gshard", "audit", "gpt2-smallest", "--devices", "4"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    maps = Path(f"/proc/{process.pid}/maps")
    while process.poll() is None and "numpy" not in maps.read_text():  # Python itself has begun
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=200)
    assert process.returncode in (130, 0), said
    assert "Traceback" not in said


def test_a_ctrl_c_that_a_finalizer_drops_ends_a_command():
    """Python only reports an exception of one, such as JAX's at a garbage collection."""
    program = """if True:
        import gc, os, signal, sys, time
        from gshard.cli import main

        def interrupted(phase, _):
            gc.callbacks.remove(interrupted)
            signal.raise_signal(signal.SIGINT)

        def run():
            gc.callbacks.append(interrupted)
            gc.collect()
            time.sleep(20)
            return 0

        main.main = run
        main.run()
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "")
