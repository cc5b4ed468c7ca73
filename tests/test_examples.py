"""The demo: its settings, its data, and the whole program at its smallest size."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from rich.console import Console

import gshard
from benchmarks.groups import free_address
from examples import config, gpt, kill_and_resume, text, training
from examples.measure import KINDS, Run, bytes_on_first_device, carried_by_micro_batch_loop
from examples.report import Meter, write_picture
from gshard.analysis.config import read_config
from gshard.analysis.forecast import abstract_mesh
from gshard.analysis.setup import load_setup
from gshard.distributed.launch.exit_status import Readable
from tests.processes import assert_all_well, once, run_together, variables

ROOT = Path(__file__).parents[1]


# ---- settings -----------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    def file(content: str) -> str:
        path = tmp_path / "some.toml"
        path.write_text(content)
        return str(path)

    return file


@pytest.mark.parametrize("name", ["demo", "smallest", "moe", "moe-smallest"])
def test_shipped_settings_are_good(name):
    assert config.parse([str(ROOT / "configs" / f"{name}.toml")]).steps > 0


@pytest.mark.parametrize(("name", "expert"), [("smallest", 1), ("moe", 4), ("moe-smallest", 4)])
def test_half_of_the_devices_can_train_what_all_can(name, expert):
    read = config.parse([str(ROOT / "configs" / f"{name}.toml")])
    half = kill_and_resume.half(read)
    assert half == {"devices": 4, "expert": expert}
    config.check_whole(dataclasses.replace(read, **half))


@pytest.mark.parametrize("name", ["demo", "smallest", "moe", "moe-smallest"])
def test_shipped_settings_are_planned_as_they_are_trained(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    planned = read_config(f"configs/{name}.toml")
    setup = load_setup(planned.model, planned.arguments)
    trained = config.parse([f"configs/{name}.toml"])
    assert planned.devices == trained.devices and planned.levels == trained.levels
    assert planned.expert == trained.expert
    mesh = abstract_mesh(planned.devices, expert=planned.expert)
    _, plan = gshard.shard_train_state(setup.state, mesh, "p_g_os", **setup.shard)
    _, start = training.make_state(trained)
    mesh = gshard.make_mesh(expert=trained.expert)
    _, own = gshard.shard_train_state(start, mesh, "p_g_os", **training.shard_options(trained))
    assert plan.bytes_per_device == own.bytes_per_device


def test_file_then_command_line(write):
    file = write("[training]\nsteps = 7\n[arguments]\nwidth = 96\nheads = 3\n")
    read = config.parse(
        [file, "--arguments.width", "48", "--levels=os,p_g_os", "--arguments.remat", "true"]
    )
    assert (read.steps, read.arguments.width, read.arguments.heads) == (7, 48, 3)
    assert read.levels == ("os", "p_g_os")
    assert read.arguments.remat is True
    assert read.arguments.layers == config.Arguments().layers


def test_an_int_is_a_good_float(write):
    assert config.parse([write("[arguments]\nclip = 2\n")]).arguments.clip == 2.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[training]\nstepz = 3", "unknown key 'training.stepz'; did you mean 'training.steps'?"),
        (
            "[arguments]\nwidht = 3",
            "unknown key 'arguments.widht'; did you mean 'arguments.width'?",
        ),
        ("learning_rate = 1.0", "did you mean 'arguments.learning_rate'?"),
        ("qqq = 1", "unknown key 'qqq'; known: arguments.capacity, "),
        ("[training]\nsteps = 1.5", "training.steps must be an int, but is 1.5 (float)"),
        ("[training]\nsteps = true", "training.steps must be an int, but is True (bool)"),
        ("[arguments]\nscan = 1", "arguments.scan must be a bool, but is 1 (int)"),
        ('levels = "os"', "levels must be a list of str, but is 'os' (str)"),
        ("levels = [1]", "levels must be a list of str"),
        ("steps = 3", "unknown key 'steps'; did you mean 'training.steps'?"),
        ('model = "other:setup"', "the demo trains 'examples.training:setup'"),
        ("steps = ", "is not TOML"),
    ],
)
def test_bad_file_is_named_with_key_and_fix(write, content, said):
    file = write(content)
    with pytest.raises(config.ConfigError) as caught:
        config.parse([file])
    assert str(caught.value).startswith(file)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stepz", "3"], "unknown option '--stepz'; did you mean '--steps'?"),
        (["--arguments.widht=3"], "did you mean '--arguments.width'?"),
        (["--steps", "many"], "steps must be an int, but is 'many' (str)"),
        (["--arguments.scan", "maybe"], "arguments.scan must be a bool"),
        (["--batch_size", "20"], "devices x micro_batches = 8 x 4 = 32"),
        (["--arguments.heads", "32"], "must be a multiple of 2 x arguments.heads = 2 x 32 = 64"),
        (["--arguments.heads", "0"], "arguments.heads=0 must be at least 1"),
        (["--arguments.sequence", "0"], "arguments.sequence=0 must be at least 1"),
        (["--devices", "0"], "devices=0 must be at least 1"),
        (["--micro_batches", "0"], "micro_batches=0 must be at least 1"),
        (["--sample_bytes", "-1"], "sample_bytes=-1 must not be negative"),
        (["--prompt", ""], "prompt must not be empty"),
        (["configs/moe.toml", "--expert", "3"], "expert=3 must divide devices=8 and arguments.exp"),
        (["--expert", "2"], "expert=2 must divide devices=8 and arguments.experts=0"),
        (["configs/moe.toml", "--arguments.chosen", "9"], "must be at most arguments.experts=8"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--save_every", "0"], "save_every=0 must be at least 1"),
        (["--pause", "-1"], "pause=-1.0 must not be negative"),
        (["no/such.toml"], "no/such.toml: cannot be read"),
    ],
)
def test_bad_command_line(monkeypatch, arguments, said):
    monkeypatch.chdir(ROOT)
    with pytest.raises(config.ConfigError) as caught:
        config.parse(arguments)
    assert said in str(caught.value)


def test_no_levels_are_refused(write):
    with pytest.raises(config.ConfigError, match="levels must not be empty"):
        config.parse([write("levels = []")])


def test_settings_without_an_effect_are_refused(monkeypatch, write):
    monkeypatch.chdir(ROOT)
    without = {"file": "configs/moe.toml", "without": ("prompt",)}
    assert config.parse([], **without).arguments.experts
    with pytest.raises(config.ConfigError, match="unknown option '--prompt'"):
        config.parse(["--prompt", "x"], **without)
    with pytest.raises(config.ConfigError, match=r"training.prompt is not used by this program"):
        config.parse([write('[training]\nprompt = "x"')], **without)


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit):
        config.parse(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name, (_, default, meaning) in config.flat_fields().items():
        assert f"--{name} " in said
        assert meaning in said
        assert f"default {default}" in said


def test_saving_every_zero_steps_is_refused(monkeypatch, capsys):
    from examples import train  # which joins processes when it is imported

    monkeypatch.setattr(sys, "argv", ["train.py", "--save_every", "0"])
    with pytest.raises(SystemExit):
        train.main()
    assert "--save_every 0 must be at least 1" in capsys.readouterr().err


# ---- data ---------------------------------------------------------------------------------------


def test_text_is_the_library_and_the_same_every_time():
    text_N = text.standard_library()
    assert text_N.dtype == np.uint8
    assert text_N.size > 2_000_000
    np.testing.assert_array_equal(text_N, text.standard_library())
    source = Path(os.__file__).read_bytes()
    assert source in text_N.tobytes()


def test_batch_depends_on_step_and_seed_alone():
    text_N = np.arange(251, dtype=np.uint8)
    first = text.batch(text_N, 3, examples=16, length=9, seed=1)
    assert first.shape == (16, 9)
    np.testing.assert_array_equal(first, text.batch(text_N, 3, examples=16, length=9, seed=1))
    assert not np.array_equal(first, text.batch(text_N, 4, examples=16, length=9, seed=1))
    assert not np.array_equal(first, text.batch(text_N, 3, examples=16, length=9, seed=2))
    parts = [text.own_rows(first, rank, processes=4) for rank in range(4)]
    np.testing.assert_array_equal(np.concatenate(parts), first)
    # every row is a window of the text, in its order
    assert (np.diff(first.astype(int), axis=1) == 1).all()


# ---- model and measures -------------------------------------------------------------------------


@pytest.mark.slow
def test_model_does_not_see_the_future():
    model = gpt.GPT(width=16, layers=2, heads=2)
    bytes_1xT = np.arange(8, dtype=np.uint8)[None]
    variables = jax.tree.map(  # blocks start at zero, which would see nothing at all
        lambda x: x + 0.1, model.init(jax.random.key(0), bytes_1xT)
    )
    changed_1xT = bytes_1xT.copy()
    changed_1xT[0, 5] = 99
    before, after = model.apply(variables, bytes_1xT), model.apply(variables, changed_1xT)
    np.testing.assert_array_equal(before[0, :5], after[0, :5])
    assert not np.array_equal(before[0, 6], after[0, 6])


def test_bytes_are_those_of_one_device():
    mesh = gshard.make_mesh()
    divided = jax.device_put(
        np.zeros((16, 4), np.float32), jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    )
    whole = jax.device_put(np.zeros(3, np.float32), jax.NamedSharding(mesh, jax.P()))
    assert bytes_on_first_device({"a": divided, "b": whole}) == 2 * 4 * 4 + 3 * 4


def test_carried_bytes_are_what_the_body_changes():
    def two_sums(rows, weight):
        def body(carry, row):
            big, small, number = carry
            return (big + row @ weight, small + row[:2], number + 1.0), None

        start = np.zeros(8, np.float32), np.zeros(2, np.float32), np.float32(0)
        return jax.lax.scan(body, start, rows)[0]

    args = np.ones((4, 3), np.float32), np.ones((3, 8), np.float32)
    compiled = jax.jit(two_sums).lower(*args).compile()
    assert carried_by_micro_batch_loop(compiled) == (8 + 2) * 4
    assert carried_by_micro_batch_loop(jax.jit(lambda x: x + 1).lower(1.0).compile()) is None


def test_missing_matplotlib_is_said(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    console = Console(width=100)
    with console.capture() as said:
        write_picture(tmp_path / "x.png", Run("one device"), [], console)
    assert "pip install matplotlib" in said.get()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_loss_and_speed(terminal, tmp_path):
    with open(tmp_path / "out", "w") as file:
        console = Console(file=file, force_terminal=terminal, width=110)
        with Meter(console) as meter:
            run = meter.run("os_g", 2)
            with run.phase("compiling"):
                pass
            run.step(1, 3.5, 1000.0)
            run.step(2, 2.25, 1234.0)
    said = (tmp_path / "out").read_text()
    for word in ("os_g", "2/2", "loss 2.2500", "1,234 tokens/s"):
        assert word in said


# ---- the whole program --------------------------------------------------------------------------


def run_smallest(module, output, name="smallest", *words):
    """What a part of the demo printed, at its smallest size, in its own process."""
    ran = subprocess.run(
        [sys.executable, "-m", module, f"configs/{name}.toml", "--output", str(output), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        stdin=subprocess.DEVNULL,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def demo(pytestconfig, tmp_path_factory):
    """The demo at its smallest, as `make demo` runs it: what it printed and where it wrote."""

    def run(folder):
        modules = "examples.train_gpt", "examples.kill_and_resume"
        printed = [run_smallest(module, folder / "output") for module in modules]
        (folder / "printed.txt").write_text("".join(printed))

    folder = Path(pytestconfig.getoption("demo") or once(tmp_path_factory, "demo", run))
    output, printed = folder / "output", (folder / "printed.txt").read_text()
    results = json.loads((output / "results.json").read_text())
    runs = [Run(**run) for run in results["runs"]]
    return printed, output, Run(**results["reference"]), runs


@pytest.mark.slow
def test_demo_runs_every_level(demo):
    _, _, _, runs = demo
    assert [run.name for run in runs] == ["dp", "os", "os_g", "p_g_os"]


@pytest.mark.slow
def test_demo_stays_within_the_budget(demo):
    _, _, _, runs = demo
    for run in runs:
        for part, budgeted in run.budget_bytes.items():
            assert run.bytes[part] == pytest.approx(budgeted, rel=0.02), (run.name, part)
        for kind in KINDS:
            if kind in run.at_most:
                assert 0 < run.moved[kind] <= run.budget_elements[kind], (run.name, kind)
            else:
                assert run.moved[kind] == run.budget_elements[kind], (run.name, kind)


@pytest.mark.slow
def test_demo_levels_differ_where_they_should(demo):
    dp, os_, os_g, p_g_os = demo[3]
    assert dp.bytes["optimizer"] > 4 * os_.bytes["optimizer"]
    assert os_.bytes["gradients"] > 4 * os_g.bytes["gradients"]
    assert os_g.bytes["params"] > 4 * p_g_os.bytes["params"]


@pytest.mark.slow
def test_demo_matches_single_device_training(demo):
    _, _, reference, runs = demo
    assert len(reference.losses) == 4
    assert reference.losses[-1] < reference.losses[0]
    for run in runs:
        np.testing.assert_allclose(run.losses, reference.losses, rtol=5e-6)


@pytest.mark.slow
def test_demo_prints_the_table_and_a_sample(demo):
    printed, output, reference, runs = demo
    for run in runs:
        (row,) = re.findall(rf"^ {run.name} +\d.*$", printed, re.MULTILINE)
        shown = [float(word.replace(",", "")) for word in row.split()[1:7]]
        assert shown == [
            *(run.bytes[p] for p in run.budget_bytes),
            *(run.moved[k] for k in KINDS),
        ]
        assert f"{run.losses[-1]:.5f} {run.off_by(reference):8.1e}".split() == row.split()[7:9]
    assert "\ndef " in printed.split("Sampled from the model trained at p_g_os")[1]
    assert (output / "memory_and_loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_demo_kills_one_and_says_that_the_losses_are_identical(demo):
    printed = demo[0]
    assert "Killed and started again, at p_g_os on 8 devices" in printed
    start, newest = re.search(r"disk: (.*); the newest complete step is (\d)", printed).groups()
    assert newest in start.split(", ")
    assert f" again    from step {newest} to 4" in printed
    assert f" moved    from step {newest} to 4 (its end), to os_g on 4 devices" in printed
    assert "losses identical bit by bit, steps 1 to 4: yes" in printed
    (off,) = re.findall(r"largest relative difference where moved, .*: (.*)", printed)
    assert float(off) <= 1e-6


@pytest.mark.slow
def test_demo_of_experts_matches_one_device_and_sends_less(tmp_path):
    saved = tmp_path / "saved"  # each run in a folder of its own
    words = "--checkpoints", str(saved)
    printed = run_smallest("examples.train_moe", tmp_path, "moe-smallest", *words)
    names = ["os_g", "p_g_os", "p_g_os, dense", "p_g_os, gathered"]
    assert sorted(x.name for x in saved.iterdir() if x.is_dir()) == names
    assert "resumes" not in printed
    results = json.loads((tmp_path / "results.json").read_text())
    reference, dense = Run(**results["reference"]), Run(**results["dense"])
    runs = {run["name"]: Run(**run) for run in results["runs"]}
    assert list(runs) == ["os_g", "p_g_os", "p_g_os, gathered"]
    for name, run in runs.items():
        np.testing.assert_allclose(run.losses, reference.losses, rtol=5e-6)
        row = next(line for line in printed.splitlines() if line.startswith(f" {name}  "))
        planned = [] if "gathered" in name else [run.sent]  # the plan says the same
        shown = [run.bytes["params"], run.bytes["optimizer"], run.sent, *planned, run.exchanged]
        cells = row.removeprefix(f" {name}").replace(",", "").split()
        assert [int(cell) for cell in cells[: len(shown)]] == shown
        assert bool(run.exchanged) == ("gathered" not in name)
    kept, gathered = runs["p_g_os"], runs["p_g_os, gathered"]
    assert kept.bytes == gathered.bytes  # of the same state
    assert 2 * kept.sent < gathered.sent
    assert dense.exchanged == 0 and len(dense.losses) == len(reference.losses)
    assert f"Losses of {len(runs)} runs are those of one device to" in printed


def test_levels_are_known_by_all_of_their_names(write):
    words = [write("")]
    assert config.parse([*words, "--levels=zero2,os_g,fsdp"]).levels == ("os_g", "p_g_os")
    with pytest.raises(gshard.GShardError, match="zero9"):
        config.parse([*words, "--levels=os_g,zero9"])


@pytest.mark.slow
def test_demo_keeps_experts_on_their_devices_too(tmp_path):
    words = "--levels=p_g_os", "--steps=1", "--one_device=false", "--sample_bytes=1"
    run_smallest("examples.train_gpt", tmp_path, "moe-smallest", *words)
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert run["exchanged"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--levels", "os,p_g"], "Did you mean 'p_g_os'?"),
        (["--stepz", "3"], "did you mean '--steps'?"),
    ],
)
def test_demo_refuses_in_one_line_and_at_once(arguments, said):
    command = [sys.executable, "-m", "examples.train_gpt", "configs/smallest.toml", *arguments]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert "compiling" not in ran.stdout


def test_demo_says_that_devices_do_not_divide_over_processes(tmp_path):
    command = ["-m", "examples.train_gpt", "configs/smallest.toml", "--devices", "1"]
    at = free_address()
    ended = run_together(
        tmp_path, [command] * 2, [variables(at, 2, i) for i in range(2)], to_the_end=True
    )
    for end in ended:
        assert end.code == 1
        assert "error: devices=1 do not divide over 2 processes" in end.said
        assert "Traceback" not in end.said


SMALL = (
    *("--devices", "2", "--levels", "p_g_os", "--steps", "3"),
    *("--arguments.layers", "1", "--sample_bytes", "1", "--one_device", "false"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "settings"),
    [(2, ("--steps", "20")), (4, ("--steps", "4")), (2, SMALL)],
    ids=["2 for 20 steps", "4 for 4 steps", "2, small"],
)
def test_demo_of_several_processes_is_that_of_one(tmp_path, processes, settings):
    """They share its devices: the same losses, bytes and elements moved, at every level."""
    results, said = [], []
    for n in (1, processes):
        folder = tmp_path / str(n)
        folder.mkdir()
        command = ["-m", "examples.train_gpt", "configs/smallest.toml", *settings]
        command += ["--output", str(folder / "output")]
        at = free_address()
        ended = run_together(folder, [command] * n, [variables(at, n, i) for i in range(n)])
        assert_all_well(ended)
        results.append(json.loads((folder / "output" / "results.json").read_text())["runs"])
        said.append([end.said for end in ended])
    assert f"virtual CPU devices of {processes} processes, " in said[1][0]
    assert "Sampled from the model" in said[1][0]
    for other in said[1][1:]:  # gloo's threads say who is connected, in pieces of lines
        assert not [x for x in other.splitlines() if x.strip() and Readable().shows(x)]
    for one, several in zip(*results, strict=True):
        np.testing.assert_allclose(several.pop("losses"), one.pop("losses"), rtol=1e-6)
        assert several.pop("tokens_per_second") > 0 < one.pop("tokens_per_second")
        assert several == one


@pytest.mark.slow
def test_unrolled_model_too():
    """The other form of the model: layers one by one, rematerialised."""
    model = gpt.GPT(width=32, layers=2, heads=2, scan=False, remat=True)
    rows_BxT1 = text.batch(text.standard_library(), 0, examples=8, length=9, seed=0)
    params = model.init(jax.random.key(0), rows_BxT1[:1, :-1])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))

    def loss_fn(params, rows):
        return gpt.next_byte_loss(model, params, rows)

    divided, plan = gshard.shard_train_state(
        state, gshard.make_mesh(), "p_g_os", min_shard_size=512
    )
    _, metrics = gshard.make_train_step(loss_fn, plan)(divided, rows_BxT1)
    np.testing.assert_allclose(metrics["loss"], loss_fn(params, rows_BxT1), rtol=2e-6)
