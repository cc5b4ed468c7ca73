"""`gshard audit` and `gshard explain`: what they say of a config, and how they exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gshard.cli.main import main

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore:offload=True puts nothing"),
]

MODEL = """
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gshard


def setup(width=64, layers=2):
    def init():
        keys = jax.random.split(jax.random.key(0), layers)
        return {f"w{i}": jax.random.normal(k, (width, width)) for i, k in enumerate(keys)}, tx

    def loss(params, x):
        for w in params.values():
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    tx = optax.adam(1e-3)
    row = jax.ShapeDtypeStruct((1, width), jnp.float32)
    return gshard.TrainSetup(init, loss, row, shard={"min_shard_size": 256})


def multiplies(width=64):
    made = setup(width)

    def post_update(state):  # products need full matrices, which is in no level's budget
        return state.replace(params={k: w @ w.T @ w for k, w in state.params.items()})

    return gshard.TrainSetup(
        made.state, made.loss_fn, made.batch, made.shard, {"post_update": post_update}
    )


def pair(width=64):
    def init():
        model = nnx.Linear(width, width, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    row = jnp.zeros((1, width))
    shard = {"min_shard_size": 256}
    return gshard.TrainSetup(init, lambda m, x: jnp.square(m(x)).mean(), row, shard)


def no_step():
    return {"w": jnp.ones((8, 8))}, optax.sgd(0.1)


def stuck():
    raise RuntimeError("no data")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_model", raising=False)
    (tmp_path / "my_model.py").write_text(MODEL)
    (tmp_path / "my.toml").write_text(
        'model = "my_model:setup"\nlevels = ["os", "p_g_os"]\ndevices = 4\nmicro_batches = 2\n'
        "[arguments]\nwidth = 48\n"
    )
    return tmp_path


def asked(capsys, *words):
    code = main([str(w) for w in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_audit_of_a_config(folder, capsys):
    code, out, err = asked(capsys, "audit", "my.toml", "--json")
    assert code == 0 and not err
    found = json.loads(out)
    levels = found["levels"]
    assert list(levels) == ["os", "p_g_os"]
    assert found["compiled_for"] == "4 cpu devices of this computer"
    size = 2 * 48 * 48
    budgeted = levels["os"]["budget"]["communicated"]
    moved = {(m["kind"], m["purpose"]): m["elements"] for m in budgeted}
    rows = levels["os"]["collectives"]
    found = {(r["kind"], r["purpose"]): r["elements"] for r in rows if not r["scalar"]}
    assert moved == found == {("reduce-scatter", "scatter"): size, ("all-gather", "update"): size}
    for level in levels.values():
        assert level["exceeded"] == [] and level["memory"]["temp"] > 0
        assert level["budget"]["group_size"] == 4
    assert levels["p_g_os"]["budget"]["resident"]["params"] == size // 4 * 4


def test_audit_as_text_with_other_levels_and_devices(folder, capsys):
    words = ("audit", "my.toml", "--levels", "os_g", "--devices", 2, "--arguments.layers", 1)
    code, out, _ = asked(capsys, *words)
    assert code == 0 and out.startswith("level os_g, compiled for 2 cpu devices of this computer\n")
    assert "Elements communicated: budget and found" in out and "level p_g_os" not in out
    assert f"{2 * 48 * 48:,}" in out and "Memory of one device" in out


def test_audit_says_that_a_target_gives_it_only_the_number_of_devices(folder, capsys):
    words = ("audit", "my.toml", "--levels", "os_g", "--target", "h100:1x2")
    code, out, _ = asked(capsys, *words)
    assert code == 0 and "2 cpu devices of this computer, not for h100:1x2" in out


def test_audit_says_which_budget_is_exceeded(folder, capsys):
    words = ("audit", "my_model:multiplies", "--devices", 4, "--levels", "dp,p_g_os")
    code, out, err = asked(capsys, *words, "--json")
    assert code == 1
    lines = err.splitlines()
    assert lines and all(x.startswith("over budget: level p_g_os: ") for x in lines)
    assert "the budget is 0 elements, found" in lines[0] and " for compiler" in lines[0]
    levels = json.loads(out)["levels"]
    assert levels["dp"]["exceeded"] == [] and len(levels["p_g_os"]["exceeded"]) == len(lines)


def test_explain_of_a_config(folder, capsys):
    code, out, err = asked(capsys, "explain", "my.toml", "--json")
    assert code == 0 and not err
    levels = json.loads(out)["levels"]
    assert list(levels) == ["os", "p_g_os"]
    for name, level in levels.items():
        assert level["exact"] is True and level["not_measured"] == "" and level["level"] == name
        for row in level["measured"]["state"].values():
            assert row == level["planned"]
        assert len(level["measured"]["state"]) == level["devices"] == 4
        assert level["micro_batches"] == 2
    assert levels["os"]["levels"]["p_g_os"]["saves"] == 3 * 2 * 48 * 48
    code, out, _ = asked(capsys, "explain", "my.toml", "--levels", "os", "--most", 2)
    assert code == 0 and "(2 of " in out and "exactly, on every device" in out


def test_explain_without_arrays(folder, capsys):
    code, out, _ = asked(capsys, "explain", "my.toml", "--levels", "os", "--abstract")
    assert code == 0 and "Nothing was measured" in out and "Not measured: --abstract." in out
    big = ("explain", "my_model:setup", "--devices", 8, "--arguments.width", 1_000_000)
    code, out, _ = asked(capsys, *big, "--levels", "dp,p_g_os", "--json")
    levels = json.loads(out)["levels"]
    assert code == 0 and levels["dp"]["measured"] is None
    assert "TB on 8 devices" in levels["dp"]["not_measured"]
    assert "--abstract" in levels["p_g_os"]["not_measured"]


def test_explain_of_a_state_that_is_no_function(folder, capsys):
    code, out, _ = asked(capsys, "explain", "my_model:no_step", "--devices", 2, "--levels", "os")
    assert code == 0 and "exactly, on every device" in out


@pytest.mark.parametrize("command", ["audit", "explain"])
def test_what_cannot_be_asked(folder, capsys, command):
    for words, says in [
        (["my_model:setup"], "how many devices? Give --devices N"),
        (["my_model:setup", "--devices", "65"], "65 virtual ones are too many (at most 64)"),
        (["my_model:setup", "--devices", "8", "--replica", "3"], "does not divide the 8 devices"),
        (["my_model:stuck", "--devices", "2"], "RuntimeError: no data"),
        (["my_model:setpu", "--devices", "2"], "Did you mean 'setup'?"),
        (["my.tml"], "Did you mean 'my.toml'?"),
        (["my_model.setup"], "Did you mean 'my_model:setup'?"),
        (["my_model.py:setup", "--devices", "2"], "Did you mean 'my_model:setup'?"),
        (
            ["my.toml", "--arguments.widht", "8"],
            "setup has no argument 'widht'. Did you mean 'width'? It takes width, layers.",
        ),
        (["my_model:no_step", "--devices", "2", "--arguments.a", "1"], "It takes none."),
        (["my.toml", "--levels", "os_k"], "level='os_k' is unknown"),
    ]:
        code, out, err = asked(capsys, command, *words)
        assert code == 2 and not out, words
        assert err.startswith("error: ") and err.count("\n") == 1 and says in err, err
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0 and "examples:" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([command])
    assert ended.value.code == 2 and "name a CONFIG" in capsys.readouterr().err


def test_explain_takes_no_options_of_the_step_alone(folder, capsys):
    words = ("--accumulate", "local", "--micro-batch-size", 2)
    code, out, err = asked(capsys, "explain", "my.toml", *words)
    assert code == 2 and not out
    assert "explain does not use --accumulate, --micro_batch_size: it reports on the state" in err
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    listed = capsys.readouterr().out
    assert "--micro_batches" in listed and "--accumulate" not in listed


@pytest.mark.parametrize("most", ["0", "all"])
def test_how_many_arrays_is_a_whole_number(folder, capsys, most):
    code, out, err = asked(capsys, "explain", "my.toml", "--most", most)
    assert code == 2 and not out and "must be a whole number, 1 or more" in err


def test_audit_needs_a_step(folder, capsys):
    code, _, err = asked(capsys, "audit", "my_model:no_step", "--devices", 2)
    assert code == 2 and "so it has no step" in err


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command as a user starts it: JAX has not started, with no flags of the tests."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, "-W", "error", "-m", "gshard", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_commands_make_their_own_virtual_devices(folder):
    for words in (
        ["audit", "my_model:pair", "--devices", "3", "--levels", "p_g_os", "--json"],
        ["explain", "my_model:pair", "--devices", "3", "--levels", "p_g_os", "--json"],
    ):
        ended = run(folder, *words)
        assert ended.returncode == 0, ended.stderr
        level = json.loads(ended.stdout)["levels"]["p_g_os"]
        if words[0] == "audit":
            assert level["budget"]["group_size"] == 3 and level["exceeded"] == []
        else:
            assert level["exact"] is True and len(level["measured"]["state"]) == 3
    ended = run(folder, "explain", "nowhere.toml")
    assert ended.returncode == 2 and not ended.stdout
    assert ended.stderr.startswith("error: there is no file 'nowhere.toml'.")
    assert ended.stderr.count("\n") == 1


def test_what_a_loss_communicates_itself_exceeds_no_budget(capsys):
    """A synchronised BatchNorm: its sums, and those of its backward pass."""
    for name, purpose, elements in (("norm_of_each_device", "user", 800), ("norm", "loss", 1200)):
        options = ["--devices", "4", "--levels", "os", "--json"]
        assert main(["audit", f"tests.setups:{name}", *options]) == 0
        (found,) = json.loads(capsys.readouterr().out)["levels"].values()
        amounts = [x["elements"] for x in found["collectives"] if x["purpose"] == purpose]
        assert sum(amounts) == elements
