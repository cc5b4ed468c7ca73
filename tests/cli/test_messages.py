"""What commands print: the user's names as they are, and everything that goes wrong as a line."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard._util.text import text_of, text_table
from gshard.analysis.aot.compiled import compiled_report
from gshard.analysis.html.markup import shown_value
from gshard.analysis.setup import load_setup
from gshard.cli.common import guarded, lines_of_progress
from gshard.cli.main import main
from gshard.sharding.level import LEVELS
from tests import setups
from tests.terminal import on_terminal

ROOT = Path(__file__).parents[2]
PLAN = ("plan", "tests.setups:mlp")
NAMES = ("x[/red]", "gshard[aot-gpu]", ":tv:")


def named(*names):
    params = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in names}
    return gshard.TrainSetup((params, optax.adam(1e-3)))


# ---- names of the user's ------------------------------------------------------------------------


def test_what_looks_like_markup_stays():
    rows = text_table("[b]", NAMES, ())
    rows.add_row(*NAMES)
    said = text_of([*NAMES, rows])
    assert said.startswith("\n".join(NAMES))
    assert all(said.count(name) == 3 for name in NAMES)
    assert "[b]" in said


def test_a_plan_and_an_explanation_name_every_leaf():
    mesh = gshard.make_mesh()
    state, plan = gshard.shard_train_state(named(*NAMES).state, mesh, "os")
    for said in (str(plan), str(gshard.explain(state, plan))):
        assert all(name in said for name in NAMES)
        assert "float32[256, 256]" in said
        assert "\\" not in said


def test_an_audit_names_every_axis():
    row = gshard.audit(jax.jit(lambda x: x), jnp.zeros(3))
    found = dataclasses.replace(row, memory={"x[/red]": 1})
    assert "x[/red]" in str(found)


# ---- what is not known --------------------------------------------------------------------------


def test_bytes_in_a_loop_of_unknown_length_are_shown_as_unknown():
    of = {
        "memory": {"argument": 8, "temp": 8},
        "needs": 16,
        "has": None,
        "fits": None,
        "compile_seconds": 1.0,
        "collectives": [],
        "nodes": 2,
        "wire_bytes": {"all-reduce": None, "all-gather": 2000, "all-to-all": 3000},
        "asynchronous_bytes": {"all-reduce": 0, "all-gather": 2000},
        "network_bytes": {"all-reduce": None, "all-gather": 1000, "all-to-all": 3000},
    }
    found = gshard.forecast(named("w"), 4, levels=["os"])
    lines = compiled_report("cpu:4", found, {"os": of}).splitlines()
    (row,) = [x.split() for x in lines if "kB" in x and x.split()[0] == "os" and "?" in x]
    assert row == "os 2.00 kB 0 B ? 3.00 kB ? ? ? 0".split()
    of |= {"nodes": 1}
    assert "between" not in compiled_report("cpu:4", found, {"os": of})
    assert shown_value("wire_bytes", of["wire_bytes"]).startswith("all-reduce ?, ")


# ---- a setup that is none -----------------------------------------------------------------------


def raises():
    raise TypeError("no such width\nand more")


RAISES = raises.__code__.co_firstlineno + 1  # the line that does


@pytest.mark.parametrize(
    ("further", "said"),
    [
        ({"shard": {"presicion": "bfloat16"}}, "Did you mean 'precision'?"),
        ({"shard": [1, 2]}, "shard= of gshard.TrainSetup is [1, 2]"),
        ({"shard": None}, "further arguments of shard_train_state"),
        ({"shard": {"level": "os"}}, "has no 'level': CONFIG or an argument"),
        ({"shard": {"offload": True}}, "has no 'offload': CONFIG or an argument"),
        ({"shard": {"init_args": (1,)}}, "functools.partial"),
        ({"step": {"micro_batchez": 2}}, "step= of gshard.TrainSetup has no 'micro_batchez'"),
        ({"step": {"micro_batches": 4}}, "has no 'micro_batches': CONFIG or an argument"),
        ({"step": {"plan": 4}}, "has no 'plan': gshard makes one"),
        ({"batch": {}}, "has no arrays"),
        ({"batch": {"mask": None}}, "has no arrays"),
        (
            {"state": raises},
            f"init function of this setup fails at {__file__}:{RAISES}: TypeError: no such width",
        ),
        ({"state": lambda rng: rng}, "fails: TypeError"),
    ],
)
def test_a_setup_that_cannot_be_is_refused_in_words(further, said):
    with pytest.raises(gshard.GShardError) as caught:
        gshard.forecast(dataclasses.replace(setups.mlp(), **further), 4, levels=["os"])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_in_words_is_passed_on_as_it_is():
    with pytest.raises(gshard.GShardError) as caught:
        load_setup("tests.setups:refuses")
    assert str(caught.value) == "tests.setups:refuses: Choose one of [none] or [full]."


# ---- a command ends -----------------------------------------------------------------------------


# What nohup and the like have this process ignore, a child would ignore too.
HEARING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGTERM):
    signal.signal(number, signal.SIG_DFL)
from gshard.cli.main import main
sys.exit(main())
"""


def gshard_command(*words, **more):
    """A command in a process of its own, which a test may break."""
    return subprocess.Popen(
        [sys.executable, "-c", HEARING, *words],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["plan", "advise", "audit", "explain"])
def test_what_a_model_prints_is_not_in_the_answer(command, capsys):
    machine = ["--target", "cpu:4"] if command == "plan" else ["--devices", "4"]
    if command == "advise":
        machine = ["--target", "h100:1x4"]
    more = ["--estimate"] if command == "plan" else []
    words = [command, "tests.setups:talks", *machine, "--levels", "os", "--json", *more]
    assert main(words) == 0
    said = capsys.readouterr()
    json.loads(said.out)
    assert "a setup is made" in said.err
    assert command == "explain" or "a loss is traced" in said.err


def test_progress_without_a_terminal_is_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr("gshard.cli.common.lines_of_progress", partial(lines_of_progress, 0.0))
    assert main(["advise", "tests.setups:mlp", "--target", "h100:1x8", "--levels", "os"]) == 0
    said = capsys.readouterr()
    assert re.search(r"^1 of \d+ options; best so far: os, 1 x 8, ", said.err, re.M)
    assert "options;" not in said.out
    words = ["plan", "tests.setups:mlp", "--target", "cpu:2", "--levels", "dp,os", "--compile"]
    assert main([*words, "--json"]) == 0
    said = capsys.readouterr()
    assert re.search(r"^dp \(1 of 2\): importing, \d+ s$", said.err, re.M)
    assert re.search(r"^os \(2 of 2\): ", said.err, re.M) and json.loads(said.out)


@pytest.mark.parametrize("command", ["plan", "advise"])
def test_a_terminal_shows_what_is_traced_until_it_is_done(command):
    machine = ["--devices", "8"] if command == "plan" else ["--target", "h100:1x8"]
    words = [command, "tests.setups:mlp", *machine, "--levels", "os,os_g", "--json"]
    code, out, shown = on_terminal(*words)
    assert code == 0 and json.loads(out)
    told = ["os: tracing", "os_g: tracing"] if command == "plan" else ["tracing", "0/"]
    assert all(text in shown for text in told)
    _, _, after = shown.rpartition("tracing")
    cleared = after.rpartition("\x1b[2K")[2]  # the last line is erased
    assert "\x1b[2K" in after and not re.sub(r"\x1b\[[?\d;]*[a-zA-Z]|\s", "", cleared)


@pytest.mark.parametrize(
    ("model", "code", "said"),
    [
        ("tests.setups:leaves", 2, "error: the model ends the program: SystemExit(3)."),
        ("tests.setups:leaves_in_loss", 2, "error: the model ends the program: SystemExit(4)."),
        ("tests.setups:interrupts", 130, ""),
    ],
)
def test_a_model_that_ends_the_program(model, code, said, capsys):
    assert main(["plan", model, "--devices", "4"]) == code
    printed = capsys.readouterr()
    assert printed.err.startswith(said)
    assert printed.err.count("\n") == (1 if said else 0)
    assert not printed.out


def test_an_error_in_a_loss_exceeds_no_budget(capsys):
    """Python itself exits with 1 for it, which would be an answer."""
    assert main(["audit", "tests.setups:breaks", "--devices", "4", "--levels", "os"]) == 2
    printed = capsys.readouterr()
    assert "ZeroDivisionError: of the loss" in printed.err
    assert "setups.py" in printed.err  # where
    assert not printed.out


def test_warnings_of_others_are_shown_by_python(capsys):
    with pytest.warns(DeprecationWarning, match="this model is old"):
        assert main(["plan", "tests.setups:warns", "--devices", "4", "--shapes"]) == 0
    assert "old" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["plan", "--paper"], 0),
        (["advise", "tests.setups:mlp", "--target", "a100:2", "--arguments.width", "300000"], 1),
        (["doctor", "--quick"], 2),  # the checks end with their reader
    ],
)
def test_a_closed_reader_is_no_error(words, code):
    with gshard_command(*words) as run:
        run.stdout.close()
        assert run.wait() == code
        assert run.stderr.read() == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.parametrize("words", [("plan", "--paper"), ("doctor", "--quick", "--json")])
def test_a_full_disk_is_a_line(words):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "gshard", *words]
        run = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2
    assert run.stderr == "error: stdout cannot be written: No space left on device.\n"


@pytest.mark.parametrize(
    ("full", "words", "code"),
    [
        (False, [*PLAN, "--devices", "8", "--arguments.width", "64", "--shapes"], 0),  # warns
        (True, [*PLAN, "--devices", "-8"], 2),
        (False, ["plna"], 2),
    ],
)
def test_an_unread_warning_or_error_does_not_change_the_exit_code(full, words, code):
    """A closed pipe, as with `2>&1 | head`, or a full disk."""
    read, write = (0, os.open("/dev/full", os.O_WRONLY)) if full else os.pipe()
    if read:
        os.close(read)
    with open(write, "w") as stream:
        command = [sys.executable, "-m", "gshard", *words]
        run = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=stream)
    assert run.returncode == code


def test_a_table_in_an_encoding_without_lines():
    environment = os.environ | {"PYTHONIOENCODING": "cp1252"}
    command = [sys.executable, "-m", "gshard", "plan", "--paper"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert b" -----" in run.stdout and b"?" not in run.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing(tmp_path, number):
    page, temporary = tmp_path / "page", tmp_path / "temporary"
    page.mkdir()
    temporary.mkdir()
    words = ["plan", "tests.compiled_models:sleeps_in_child", "--target", "cpu:2", "--levels", "os"]
    asleep = page / "asleep"
    words += ["--html", str(page / "plan.html"), "--arguments.path", str(asleep)]
    with gshard_command(*words, env=os.environ | {"TMPDIR": str(temporary)}) as run:
        while not (asleep.exists() and asleep.read_text()):
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.1)
        assert list(temporary.iterdir()) and len(list(page.iterdir())) == 2
        run.send_signal(number)
        assert run.wait() == 128 + number
        assert "Traceback" not in run.stderr.read()
    assert [x.name for x in page.iterdir()] == ["asleep"]
    assert not list(temporary.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int(asleep.read_text()), 0)


# ---- words that cannot be meant -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["plan", "--paper", "tests.setups:mlp"],
            "--paper can be combined only with --json, not with CONFIG",
        ),
        (["plan", "--paper", "--devices", "3"], "not with --devices"),
        (["plan", "--paper", "--html", "x"], "not with --html"),
        (["plan", "--paper", "--arguments.layers", "3"], "--arguments.layers goes with a CONFIG"),
        (["plan", "tests.setups:mlp", "--arguments.width"], "width: expected one argument"),
    ],
)
def test_words_that_cannot_be_meant(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_config_may_come_last_and_booleans_as_in_python(capsys):
    words = ["plan", "--devices", "4", "--offload", "True", "--shapes", "--json"]
    assert main([*words, "--arguments.layers", "1", "tests.setups:mlp"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 256 * 256 + 256
    assert found["choices"]["offload"] is True


@pytest.mark.parametrize(
    "words",
    [["--offload", "tests.setups:mlp"], ["tests.setups:mlp", "--offload"],
     ["--offload", "--shapes", "tests.setups:mlp"]],
)  # fmt: skip
def test_offload_alone_means_true(words, capsys):
    assert main(["plan", "--devices", "4", "--levels", "os", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["choices"]["offload"] is True
    assert main(["plan", "tests.setups:mlp", "--offload", "no"]) == 2
    assert "offload='no' must be true or false" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("devices = 100000000000000000000", "is too large: 1,000,000 at most"),
        ("devices = 4\nreplica = 100000000000000000000", "is too large"),
        ("devices = 4\nmicro_batches = 100000000000000000000", "micro_batches=1"),
        ("devices = 4\nmicro_batches = 1000000000\nmicro_batch_size = 1000000000", "too many"),
        ("devices = 4\noffload = 1", "offload=1 must be true or false"),
        ("devices = 4\naccumulate = 1", "accumulate=1 must be a text"),
        ("devices = 4\naccumulate = 'scater'", "Did you mean 'scatter'?"),
        ("devices = 4\nreshard_after_forward = 'no'", "whole number of devices of a sub-group"),
        ("devices = 4\nlevels = true", "levels=True must be a list"),
        ("target = 'cpu:2'\n[arguments]\nwidth = 1979-05-27", "arguments.width=1979-05-27 cannot"),
    ],
)
def test_a_value_that_cannot_be_meant(tmp_path, text, said, capsys):
    path = tmp_path / "wrong.toml"
    path.write_text(f'model = "tests.setups:mlp"\n{text}\n')
    assert main(["plan", str(path), "--compile"] if "target" in text else ["plan", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert said in printed.err


def test_one_level_is_enough():
    for levels in (1, "os", LEVELS["os"], ["os"]):
        assert list(gshard.forecast(named("w"), 4, levels=levels).levels) == ["os"]
    assert list(gshard.forecast(named("w"), 4, levels="dp,3").levels) == ["dp", "p_g_os"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"levels": None}, "levels=None must be a list"),
        ({"levels": True}, "levels=True must be a list"),
        ({"offload": "no"}, "offload='no' must be True or False"),
        ({"accumulate": "locl"}, "Did you mean 'local'?"),
        ({"accumulate": ["local"]}, "accumulate=['local'] is unknown"),
        ({"reshard_after_forward": 0}, "reshard_after_forward=0 must be"),
        ({"platform": "gpus"}, "Did you mean 'gpu'?"),
        ({"arguments": {"layers": 3}}, "model is a TrainSetup, which takes none"),
        ({"devices": 10**20}, "is too large"),
    ],
)
def test_an_argument_that_cannot_be_meant(given, said):
    with pytest.raises(gshard.GShardError) as caught:
        gshard.forecast(**{"model": named("w"), "devices": 4, **given})
    assert said in str(caught.value)


def test_arguments_are_by_name():
    for arguments in ([3], {3: 4}):
        with pytest.raises(gshard.GShardError, match="must be values by name"):
            load_setup("tests.setups:mlp", arguments)


def test_a_signal_in_a_finalizer_ends_the_command_all_the_same(capfd):
    """Python drops what is raised there; JAX's caches have thousands of them."""

    class Kept:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    def run():
        kept = Kept()
        del kept
        time.sleep(20)
        return 0

    assert guarded(run) == 128 + signal.SIGTERM
    assert not capfd.readouterr().err


def test_a_signal_while_python_reports_a_failed_finalizer_ends_the_command(monkeypatch):
    class Fails:
        def __del__(self):
            raise ValueError(self)

    def hook(problem):
        if not reported:
            reported.append(1)
            Fails()  # its report comes within this one
            signal.raise_signal(signal.SIGTERM)

    def run():
        Fails()
        time.sleep(20)
        return 0

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", hook)
    assert guarded(run) == 128 + signal.SIGTERM
