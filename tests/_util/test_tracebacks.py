"""What a user sees of gshard in a traceback."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import gshard
from gshard._util.tracebacks import short_traceback

GSHARD = str(Path(gshard.__file__).parent)
X = np.ones((8, 4), np.float32)


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def trained(loss, batch=X, params=None):
    pair = ({"w": X.T} if params is None else params, optax.sgd(0.1))
    state, plan = gshard.shard_train_state(pair, gshard.make_mesh(), "p_g_os", min_shard_size=0)
    return gshard.make_train_step(loss, plan)(state, batch)


def wrong_key(params, batch):
    return (batch @ params["v"]).mean()


def wrong_shape(params, batch):
    return (params["w"] @ params["w"]).mean() + batch.mean()


def own_collective(params, batch):
    return jax.lax.axis_index("shard") * (batch @ params["w"]).mean()


@pytest.mark.parametrize("loss, error", [(wrong_key, KeyError), (wrong_shape, TypeError)])
def test_an_error_of_a_loss_shows_the_call_of_the_step_and_the_loss(loss, error):
    with pytest.raises(error) as caught:
        trained(loss)
    found = traceback.extract_tb(caught.value.__traceback__)
    assert [frame.name for frame in found if frame.filename == __file__][-2:] == [
        "trained",
        loss.__name__,
    ]
    assert not [frame for frame in found if frame.filename.startswith(GSHARD)]


@pytest.mark.parametrize("loss, batch", [(wrong_key, X[:7]), (own_collective, X)])
def test_an_error_of_gshard_shows_the_call_alone(loss, batch):
    with pytest.raises(gshard.GShardError) as caught:
        trained(loss, batch)
    assert files(caught.value)[-1] == __file__


def test_the_cause_of_an_error_is_shortened_too():
    source = """def inner(function, error):
    try:
        function()
    except TypeError as cause:
        raise error("of the user's") from cause
"""
    exec(compile(source, GSHARD + "/inner.py", "exec"), scope := {})
    with pytest.raises(gshard.GShardError) as caught:
        short_traceback(scope["inner"])(lambda: len(3), gshard.GShardError)
    assert files(caught.value) == [__file__]
    assert files(caught.value.__cause__) == [__file__]


def test_an_error_that_gshard_did_not_mean_to_raise_keeps_its_frames():
    exec(compile("def inner(x): return x.missing", GSHARD + "/inner.py", "exec"), scope := {})
    with pytest.raises(AttributeError) as caught:
        short_traceback(scope["inner"])(3)
    assert files(caught.value)[-1] == GSHARD + "/inner.py"


def test_what_gshard_does_below_the_loss_is_shown():
    q = np.ones((2, 4, 2, 8), np.float32)

    def loss(params, batch):
        return gshard.sequence.attention(q, q, q, segment_ids="x").mean() * params["w"].mean()

    with pytest.raises(TypeError) as caught:
        trained(loss)
    found = files(caught.value)
    assert any(file.startswith(GSHARD) for file in found[found.index(__file__) :])
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[names.index("trained") + 1] == "loss"


class Loss:
    def __call__(self, params, batch):
        return branching(params, batch)


def branching(params, batch):
    return (batch["x"] @ params["w"]).mean() if batch["train"] else params["w"].sum()


@pytest.mark.parametrize("loss", [branching, functools.partial(branching), Loss()])
def test_an_error_of_jax_about_a_value_names_the_loss_of_the_user(loss):
    pair = ({"w": X}, optax.sgd(0.1))
    state, plan = gshard.shard_train_state(pair, gshard.make_mesh(), "os", min_shard_size=0)
    name = "__call__" if isinstance(loss, Loss) else "branching"
    traced = f"tracing the function {name} at {re.escape(__file__)}"
    with pytest.raises(jax.errors.TracerBoolConversionError, match=traced):
        gshard.make_train_step(loss, plan)(state, {"x": X, "train": True})


def test_an_example_that_cannot_be_read_shows_the_line_that_reads_it():
    class Data:
        def __len__(self):
            return 16

        def __getitem__(self, i):
            return {"x": X[i]}

    pair = ({"w": X}, optax.sgd(0.1))
    _, plan = gshard.shard_train_state(pair, gshard.make_mesh(), "os", min_shard_size=0)
    with pytest.raises(IndexError) as caught:
        list(gshard.DataLoader(Data(), 8, plan))
    found = files(caught.value)
    assert found[-1] == __file__ and not [x for x in found if x.startswith(GSHARD)]


@pytest.mark.parametrize("filtering", ["auto", "off"])
def test_a_script_shows_all_frames_if_asked_to(tmp_path, filtering):
    (tmp_path / "script.py").write_text(
        "import numpy as np, optax, gshard\n"
        "pair = ({'w': np.ones((4, 4), np.float32)}, optax.sgd(0.1))\n"
        "state, plan = gshard.shard_train_state(pair, gshard.make_mesh(), 'os', min_shard_size=0)\n"
        "step = gshard.make_train_step(lambda p, x: p['v'].sum() * x.mean(), plan)\n"
        "step(state, np.ones((8, 4), np.float32))\n"
    )
    run = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "JAX_TRACEBACK_FILTERING": filtering},
        capture_output=True,
        text=True,
    )
    assert "KeyError: 'v'" in run.stderr
    assert (GSHARD in run.stderr) == (filtering == "off"), run.stderr
    assert run.stderr.count("script.py") == 2, run.stderr
