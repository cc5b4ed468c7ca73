"""`make_plan`, the paper's table, and the command `gshard plan`."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard._util.text import bytes_of, count_of
from gshard._util.version import install_command
from gshard.analysis.aot.target import parse_target
from gshard.analysis.config import read_config
from gshard.analysis.setup import load_setup
from gshard.cli.main import main
from gshard.cli.plan import DEGREES, SIZES, exit_code, rounded, table_1
from gshard.train.shard_train_state import shard_train_state
from tests import setups

LEVELS = ("dp", "os", "os_g", "p_g_os")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What was compiled before does not answer, and nothing is left in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ---- bytes and wire -----------------------------------------------------------------------------


@pytest.mark.parametrize("devices", [1, 3, 8])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [setups.mlp, setups.norm, setups.pair], ids=lambda x: x.__name__)
def test_stored_bytes_are_those_of_the_live_shards(make, level, devices):
    setup = make()
    found = gshard.forecast(setup, devices, levels=[level]).levels[level]
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    state, plan = shard_train_state(setup.state, mesh, level, **setup.shard)
    parts = plan.kind.split(state)
    device = jax.devices()[devices - 1]

    def live(tree):
        return sum(
            shard.data.nbytes
            for x in jax.tree.leaves(tree)
            for shard in x.addressable_shards
            if shard.device == device
        )

    assert found.params == live(parts.params)
    assert found.optimizer == live((parts.opt_state, parts.step))
    assert found.non_trainable == live(parts.non_trainable)
    assert found.stored == live((parts.params, parts.opt_state, parts.step, parts.non_trainable))


def test_master_copies_count_as_optimizer_state():
    found = gshard.forecast("tests.setups:mlp", 4, arguments={"precision": "bfloat16"})
    psi = found.parameters
    assert psi == 3 * (256 * 256 + 256)
    assert found.levels["dp"].params == 2 * psi
    assert (
        found.levels["dp"].optimizer - 12 * psi == 4 * 8
    )  # counts of Adam, the step and the guard


@pytest.mark.parametrize("level", LEVELS)
def test_wire_is_what_the_compiled_step_sends(level):
    setup = setups.mlp()
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    forecast = gshard.forecast(setup, 4, levels=[level], micro_batches=2, platform="cpu")
    found = forecast.levels[level]
    state, plan = shard_train_state(setup.state, mesh, level)
    rows = np.ones((8, 256), np.float32)
    for flavour, options in {
        "level": {},
        "local": {"accumulate": "local"},
        "scatter": {"accumulate": "scatter"},
        "sync": {"accumulate": "sync"},
    }.items():
        step = gshard.make_train_step(setup.loss_fn, plan, micro_batches=2, **options)
        audit = gshard.audit(step, state, rows)
        sent = sum(r.wire_bytes for r in audit.collectives if not r.scalar)
        if flavour == "level":
            assert sent == found.wire  # of the traced program
            continue
        budgeted = gshard.budget(plan, micro_batches=2, **options).wire_bytes
        # A linear layer's backward pass keeps what its forward pass gathered, where XLA sees it.
        gathered = sum(r.wire_bytes for r in audit.collectives if r.purpose == "gather")
        assert budgeted - gathered <= sent <= budgeted
        if not gathered:
            assert sent == budgeted


def test_a_batch_may_have_scalars():
    setup = setups.mlp()

    def loss(params, batch):
        rows = batch["x"] + jax.random.normal(batch["key"], batch["x"].shape) * batch["scale"]
        return setup.loss_fn(params, rows)

    more = {"x": setup.batch, "key": jax.random.key(0), "scale": np.float32(0.1)}
    found = gshard.forecast(gshard.TrainSetup(setup.state, loss, more), 4, levels="os")
    assert found.levels["os"].peak > 0
    assert found.levels["os"].batch == 256 * 4 + 4 + 8


@pytest.mark.filterwarnings("ignore:no parameter is sharded over mesh axes model")
def test_model_parallel_axes_are_named_and_nothing_is_traced():
    mesh = gshard.make_mesh(extra={"model": 2})
    found = gshard.forecast(setups.mlp(), mesh)
    assert found.levels["os"].peak is None
    said = str(found)
    assert "8 devices, 2 along 'model'" in said and "sent at most, without activations" in said


def test_kept_and_frozen_parameters_are_gathered_too():
    setup = setups.mlp()
    asked = {"levels": "p_g_os", "activations": False}
    every = 3 * 256 * 256 * 4  # biases are replicated
    found = gshard.forecast(setup, 4, reshard_after_forward=False, **asked)
    assert found.levels["p_g_os"].gathered == every
    frozen = gshard.TrainSetup(
        setup.state, setup.loss_fn, setup.batch, shard={**setup.shard, "frozen": "^layers_[01]/"}
    )
    assert gshard.forecast(frozen, 4, **asked).levels["p_g_os"].gathered == every // 3
    found = gshard.forecast(frozen, 4, reshard_after_forward=False, **asked)
    assert found.levels["p_g_os"].gathered == every


def test_a_batch_and_a_gathered_layer_count():
    found = gshard.forecast(
        setups.mlp(), 4, micro_batches=3, micro_batch_size=5, levels=["p_g_os", "os"]
    )
    assert list(found.levels) == ["p_g_os", "os"]
    assert found.levels["os"].batch == 3 * 5 * 256 * 4
    assert found.levels["os"].gathered == 0
    assert found.levels["p_g_os"].gathered == 256 * 256 * 4


def test_offload_moves_bytes_to_the_host():
    there = gshard.forecast(setups.mlp(), 4, levels=["os"]).levels["os"]
    away = gshard.forecast(setups.mlp(), 4, levels=["os"], offload=True).levels["os"]
    assert there.host == 0
    assert away.host > 0.9 * there.optimizer
    assert away.host + away.optimizer == there.optimizer


def test_an_optimizer_with_a_scan_of_one_step():
    """What it slices and stacks has one dimension more than in its body."""

    def update(grads, moments, params=None):
        def scaled(carry, rate):
            return carry, jax.tree.map(lambda g: g * rate, grads)

        _, found = jax.lax.scan(scaled, 0.0, jnp.ones(1))
        return jax.tree.map(lambda x: x[0], found), moments

    tx = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)
    params = {"w": jax.ShapeDtypeStruct((256, 512), jnp.float32)}
    batch = jax.ShapeDtypeStruct((1, 256), jnp.float32)
    setup = gshard.TrainSetup((params, tx), lambda p, b: jnp.mean((b @ p["w"]) ** 2), batch)
    found = gshard.forecast(setup, 8).levels
    assert found["os"].peak < 0.7 * found["dp"].peak


def test_a_trillion_parameters_on_16384_devices():
    params = {f"w{i}": jax.ShapeDtypeStruct((100_000, 100_000), jnp.float32) for i in range(100)}
    with pytest.warns(gshard.GShardWarning, match="parameters take 1.15 times as many elements"):
        found = gshard.forecast((params, optax.adam(1e-3)), 16384)
    assert found.parameters == 10**12
    assert found.levels["dp"].stored == 12 * 10**12 + 4 * 8
    # 100,000 rows are 7 on each device, the last ones padding.
    assert found.levels["p_g_os"].params == 100 * 7 * 100_000 * 4


# ---- the paper's table --------------------------------------------------------------------------

# Rajbhandari et al., 2020, Table 1: 7.5B, 128B and 1T, each at os, os_g, p_g_os.
PRINTED = """
1 120 120 120 2048 2048 2048 16000 16000 16000
4 52.5 41.3 30 896 704 512 7000 5500 4000
16 35.6 21.6 7.5 608 368 128 4750 2875 1000
64 31.4 16.6 1.88 536 284 32 4187 2218 250
256 30.4 15.4 0.47 518 263 8 4046 2054 62.5
1024 30.1 15.1 0.12 513 257 2 4011 2013 15.6
"""


def test_table_1_is_the_paper_s_formulas():
    found = table_1()
    for name, psi in SIZES.items():
        for n in DEGREES:
            formulas = 4 * psi + 12 * psi / n, 2 * psi + 14 * psi / n, 16 * psi / n
            for count, formula in zip(found[name][n].values(), formulas, strict=True):
                # Counts of steps too, and a shard rounded up to full elements.
                assert formula <= count < formula + 100, (name, n)


def test_table_1_is_printed_as_in_the_paper(capsys):
    assert main(["plan", "--paper"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row and row[0].isdigit()] == [
        line.split() for line in PRINTED.strip().splitlines()
    ]
    assert main(["plan", "--paper", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["1T"]["1"]["os"] >= 16 * 10**12


def test_rounding():
    assert [rounded(x) for x in (41_250_000_000, 7_500_000_000, 117_187_500)] == [
        "41.3", "7.5", "0.12",
    ]  # fmt: skip
    assert [rounded(x) for x in (4_187_500_000_000, 99_960_000_000)] == ["4187", "100"]


def test_amounts():
    assert [bytes_of(x) for x in (0, 999, 1000, 999_600, 1_234_567, 10**12)] == [
        "0 B", "999 B", "1.00 kB", "1.00 MB", "1.23 MB", "1.00 TB",
    ]  # fmt: skip
    assert [count_of(x) for x in (7_500_000_000, 124_439_808, 12)] == ["7.50 B", "124 M", "12"]


# ---- configs ------------------------------------------------------------------------------------


def test_options_win_over_a_file(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(
        'model = "tests.setups:mlp"\ntarget = "h100:2x8"\nmicro_batches = 2\n'
        "[arguments]\nwidth = 64\nlayers = 2\n"
    )
    config = read_config(str(path))
    assert (config.devices, config.target.text) == (16, "h100:2x8")
    config = read_config(str(path), {"devices": 4, "arguments.width": 32, "levels": "os,2"})
    assert (config.devices, config.target, config.levels) == (4, None, ("os", "os_g"))
    assert read_config(str(path), {"devices": 16}).target.text == "h100:2x8"
    assert config.arguments == {"width": 32, "layers": 2}
    assert config.choices.micro_batches == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("levels = ['os']", "names no model"),
        ("model = 'a:b'\nmicro_batch = 2", "Did you mean 'micro_batches'?"),
        ("model = 'a:b'\nlevels = ['ox']", "level='ox' is unknown"),
        ("model = 'a:b'\nlevels = 3.5", "levels=3.5 must be a list"),
        ("model = 'a:b'\ntarget = 'h101:8'", "Did you mean 'h100'?"),
        ("model = 'a:b'\ntarget = 'h100:2x8'\ndevices = 8", "target h100:2x8 has 16"),
        ("model = 'a:b'\nmicro_batches = 0", "micro_batches=0 must be a whole number"),
        ("model = 'a:b'\noffload = 'yes'", "offload='yes' must be true or false"),
        ("model = 'a:b'\narguments = 3", "arguments=3 must be a table"),
        ("model = 'a:b'\ntarget = 3", "target=3 must be a text"),
        ("model = 'a:b'\n[vary]\nx = 3", "vary.x=3 must be a list"),
        ("model = ", "is not TOML"),
        (f"devices = {'1' * 5000}", "cannot be read: Exceeds the limit"),
    ],
)
def test_a_wrong_config_says_where(tmp_path, text, said):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(gshard.GShardError) as caught:
        read_config(str(path))
    assert said in str(caught.value)


def test_a_config_as_an_editor_may_save_it(tmp_path):
    path = tmp_path / "marked.toml"
    path.write_text("\ufeffmodel = 'a:b'\r\narguments = 3\r\n", "utf-8")  # with a byte order mark
    for options in ({}, {"arguments.layers": 2}):
        with pytest.raises(gshard.GShardError, match="arguments=3 must be a table"):
            read_config(str(path), options)


def test_a_missing_file_has_a_near_one(tmp_path):
    (tmp_path / "llama-7b.toml").touch()
    with pytest.raises(gshard.GShardError, match="Did you mean .*llama-7b.toml"):
        read_config(str(tmp_path / "llama_7b.toml"))


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("tests.setups", {}, "must be 'module:function'"),
        ("tests.setupz:mlp", {}, "cannot be imported: ModuleNotFoundError"),
        ("tests.setups:mpl", {}, "Did you mean 'mlp'?"),
        ("tests.setups:NUMBER", {}, "has no function 'NUMBER'"),
        ("tests.setups:mlp", {"wdth": 3}, "has no argument 'wdth'. Did you mean 'width'?"),
        ("tests.setups:fails", {}, "RuntimeError: no such data set"),
    ],
)
def test_a_wrong_model_says_what(name, arguments, said):
    with pytest.raises(gshard.GShardError) as caught:
        load_setup(name, arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: gshard.forecast(setups.mlp(), 0), "devices=0 must be"),
        (lambda: gshard.forecast(setups.mlp(), 6, replica=4), "replica=4 does not divide 6"),
        (lambda: gshard.forecast(3, 8), "state is a int"),
        (lambda: gshard.forecast(setups.mlp, 8), "setup() in place of setup"),
        (lambda: gshard.forecast(setups.mlp(), 8, levels=[]), "levels= is empty"),
        (
            lambda: gshard.forecast(setups.mlp(), gshard.make_mesh(), replica=2),
            "replica= goes with a number",
        ),
        (
            lambda: gshard.forecast(
                gshard.TrainSetup(setups.mlp().state, setups.mlp().loss_fn, {"a": 3}), 8
            ),
            "give arrays of at least one example",
        ),
    ],
)
def test_bad_input(call, said):
    with pytest.raises(gshard.GShardError) as caught:
        call()
    assert said in str(caught.value)


# ---- the command --------------------------------------------------------------------------------


def test_the_command_in_a_folder_of_the_user_s(tmp_path):
    (tmp_path / "mine.py").write_text((Path(__file__).parents[1] / "setups.py").read_text())
    (tmp_path / "mine.toml").write_text('model = "mine:mlp"\ndevices = 8\n')
    ran = subprocess.run(
        [sys.executable, "-m", "gshard", "plan", "mine.toml", "--json", "--arguments.layers", "5"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(gshard.__file__).parents[1])},
    )  # fmt: skip
    found = json.loads(ran.stdout)
    assert found["parameters"] == 5 * (256 * 256 + 256)
    assert found.pop("compiled") == {}
    assert found == json.loads(json.dumps(gshard.forecast(setups.mlp(layers=5), 8).as_dict()))


def test_a_warning_of_some_levels_names_them(capsys):
    assert main(["plan", "tests.setups:quantized", "--devices", "8"]) == 0
    (said,) = [x for x in capsys.readouterr().err.splitlines() if "wire=" in x]
    assert said == "warning: wire='int8' changes nothing: no array is sharded at level 'dp'."
    words = "plan", "tests.setups:mlp", "--devices", "8", "--reshard_after_forward", "false"
    assert main(list(words)) == 0
    said = capsys.readouterr().err
    assert (
        said.count("reshard_after_forward=False changes nothing at level 'dp', 'os' and 'os_g',")
        == 1
    )


def test_warnings_are_lines_and_said_once(capsys):
    words = ["plan", "tests.setups:mlp", "--devices", "8", "--arguments.width", "64"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert said.err.count("warning: ") == 1
    assert said.err.count("of the parameters are replicated") == 1
    assert "site-packages" not in said.err
    assert "parameters on 8 devices" in said.out
    assert "\x1b" not in said.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tests.setups:mlp"], "how many devices?"),
        ([__file__], "function in it that makes the model: tests.analysis.test_forecast:FUNCTION"),
        (
            ["tests/setups.py"],
            "is a program, not TOML. Name the function in it that makes the model: "
            "tests.setups:FUNCTION.",
        ),
        (["nowhere.toml"], "there is no file 'nowhere.toml'"),
        (["tests.setups:mlp", "--devices", "8", "--levels", "oss"], "Did you mean 'os'?"),
        (["tests.setups:mlp", "--device", "8"], "Did you mean '--devices'?"),
        (["tests.setups:mlp", "--arguments.width"], "expected one argument"),
        (["tests.setups:mlp", "--devices", "8", "--levels", "os", "os_g"], "joined by commas"),
        ([], "name a CONFIG"),
    ],
)
def test_the_command_says_what_is_wrong(words, said, capsys):
    try:
        assert main(["plan", *words]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert not printed.out


def test_the_exit_code_of_a_plan():
    """No answer is not the answer no."""
    found = gshard.forecast(setups.mlp(), 8, activations=False)
    small = dataclasses.replace(found, usable=1)
    error, fits, does_not = {"error": "no compiler"}, {"fits": True}, {"fits": False}
    assert (exit_code(found, {}), exit_code(small, {})) == (0, 1)
    unknown = {"os": {"fits": None}, "os_g": error}
    assert (exit_code(found, unknown), exit_code(small, unknown)) == (0, 1)
    assert exit_code(small, {"os": fits}) == 0
    every = dict.fromkeys(small.levels, does_not)
    assert exit_code(found, every) == 1
    assert exit_code(found, {"os": error}) == 0  # the estimate answers
    assert exit_code(small, {"os": error}) == 1
    large = dataclasses.replace(gshard.forecast(setups.mlp(), 8), usable=10**15)
    assert exit_code(large, every) == 1
    assert exit_code(large, every | {"os_g": error}) == 0  # by its estimate
    assert exit_code(large, every | {"os_g": error}, insists=True) == 2
    assert exit_code(large, {"os": error}, insists=True) == 2


def test_a_level_fits_with_the_margin_of_the_estimate():
    found = gshard.forecast(setups.mlp(), 8, levels="os")
    peak = found.levels["os"].peak
    near = dataclasses.replace(found, target="h100:1x8", usable=int(1.19 * peak))
    assert near.fits("os") is False
    assert dataclasses.replace(near, usable=int(1.21 * peak)).fits("os") is True
    assert f"about {bytes_of(peak)}, +-20 %" in str(near)


def test_a_forecast_also_compiles_for_the_target(capsys):
    words = ["plan", "tests.setups:mlp", "--target", "cpu:4", "--levels", "os,p_g_os"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["compiled"]) == ["os", "p_g_os"]
    for name, of in found["compiled"].items():
        level = found["levels"][name]
        stored = level["params"] + level["optimizer"] + level["non_trainable"]
        assert of["memory"]["argument"] == stored + level["batch"]
        assert (of["has"], of["fits"]) == (found["usable"], True)
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "Compiled for cpu:4: memory of one device" in text
    assert "Sent by one device in one step, as compiled" in text
    assert main([*words, "--estimate"]) == 0
    assert "Compiled" not in capsys.readouterr().out


def test_a_plan_for_virtual_devices_says_what_fits(capsys):
    """They have equal shares of the memory of this computer, as gshard advise has it."""
    words = ["plan", "tests.setups:mlp", "--target", "cpu:4", "--levels", "dp", "--estimate"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["usable"] == parse_target("cpu:4").memory and found["levels"]["dp"]["fits"]
    assert main([*words, "--arguments.width", "60000", "--arguments.layers", "20"]) == 1
    assert "does not fit" in capsys.readouterr().out
    assert main([*words, "--offload"]) == 2
    assert "offload=true moves nothing on cpu:4" in capsys.readouterr().err


def test_a_missing_compiler_is_said_before_any_work(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_plugins", None)
    assert main(["plan", "tests.setups:fails", "--target", "h100:8", "--compile"]) == 2
    assert install_command("aot-gpu") in capsys.readouterr().err
    words = ["plan", "tests.setups:mlp", "--target", "h100:8", "--levels", "os"]
    assert main(words) == 0  # by the estimate
    printed = capsys.readouterr()
    assert install_command("aot-gpu") in printed.err and "+-20 %" in printed.out


def test_a_compiler_that_fails_leaves_the_estimate(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")  # of the process that compiles
    words = ["plan", "tests.setups:mlp", "--target", "cpu:4", "--levels", "os"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "os: not compiled, only estimated: " in text and "xla_no_such_flag" in text
    assert "+-20 %" in text
    assert main([*words, "--compile"]) == 2


def test_a_forecast_for_a_target_says_what_fits(capsys):
    words = ["plan", "tests.setups:mlp", "--target", "h100:8", "--estimate", "--levels", "dp"]
    assert main(words) == 0
    assert " fits" in capsys.readouterr().out
    assert main([*words, "--arguments.width", "60000"]) == 1
    text = capsys.readouterr().out
    assert "h100:1x8 has 63.7 GB for programs" in text
    assert "does not fit" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["target"], found["levels"]["dp"]["fits"]) == ("h100:1x8", True)


def test_sizes_without_activations_never_fit():
    """They can be too large, which is an answer; that the rest fits is none."""
    small = gshard.forecast(setups.mlp(), 8, activations=False)
    small = dataclasses.replace(small, target="h100:1x8", usable=10**12)
    assert [small.fits(level) for level in small.levels] == [None] * 4
    assert "not known" in str(small) and exit_code(small, {}) == 2
    large = dataclasses.replace(small, usable=1)
    assert [large.fits(level) for level in large.levels] == [False] * 4
    assert exit_code(large, {}) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "tests.setups:mlp", "--mots", "3"], "Did you mean '--most'?"),
        (["explain", "tests.setups:mlp", "--html", "x"], "unknown option '--html'."),
        (["advise", "tests.setups:mlp", "--targett", "x"], "Did you mean '--target'?"),
        (["plan", "tests.setups:mlp", "--layers", "4"], "by name: --arguments.layers VALUE"),
        (["audit", "tests.setups:mlp", "--arguments", "layers=4"], "--arguments.NAME VALUE."),
        (["plan", "tests.setups:mlp", "--model", "x"], "unknown option '--model'."),
        (["verify", ".", "--model", "x"], "unknown option '--model'.\n"),
        (["doctor", "--tmeout", "3"], "Did you mean '--timeout'?"),
        (["verify", ".", "--stp", "3"], "Did you mean '--step'?"),
    ],
)
def test_an_unknown_option_suggests_one_of_its_command(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert f"Did you mean {words[-2]!r}" not in printed


def test_a_plan_at_another_level_takes_every_name():
    found = gshard.forecast(setups.mlp(), 8, levels="os")
    plan = found.plans["os"]
    assert plan.at_level("zero3").level.name == plan.at_level(3).level.name == "p_g_os"
    with pytest.raises(gshard.GShardError, match="Did you mean 'p_g_os'"):
        plan.at_level("p_g_oss")


def test_a_level_that_is_not_possible_is_named_with_those_before_it():
    """The layer dimension can be sharded where no scan gathers the layers."""
    setup = dataclasses.replace(
        setups.mlp(), shard={"rules": {"layers": 0}, "scan_axes": {"layers": 0}}
    )
    said = r"level p_g_os: .*iterates over that dimension.* pass levels='dp,os,os_g'\."
    with pytest.raises(gshard.GShardError, match=said):
        gshard.forecast(setup, 3)
    assert [*gshard.forecast(setup, 3, levels="dp,os,os_g").levels] == ["dp", "os", "os_g"]
