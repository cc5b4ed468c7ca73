"""`gshard.profile`: a trace of exactly the steps that it was given."""

from __future__ import annotations

import collections
import re
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard._util import events
from gshard.analysis.monitor import profile as module
from tests.processes import ROOT, clean_environment

X = np.ones((16, 64), np.float32)


def make():
    state, plan = gshard.shard_train_state(
        ({"w": jnp.ones((64, 64))}, optax.sgd(0.1)), gshard.make_mesh(), "zero3", min_shard_size=16
    )
    return state, gshard.make_train_step(lambda p, x: jnp.square(x @ p["w"]).mean(), plan)


def train(state, step, steps):
    for _ in range(steps):
        state, _ = step(state, X)
    return state


def traces(folder):
    return sorted(folder.glob("plugins/profile/*/*.xplane.pb"))


def host_events(file):
    """The name of each event on the host, and its number if it is a step."""
    data = jax.profiler.ProfileData.from_file(str(file))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one of its types has no module, which Python deprecates
        for line in data.find_plane_with_name("/host:CPU").lines:
            for event in line.events:
                is_step = event.name == module.ANNOTATION
                yield event.name, dict(event.stats)["step_num"] if is_step else None


def read(file):
    """The step numbers in a trace, and how often each device ran an all-gather."""
    found = list(host_events(file))
    gathers = [name for name, _ in found if re.fullmatch(r"all.gather[.\d]*", name)]
    return [n for _, n in found if n is not None], len(gathers) / len(jax.devices())


def test_a_trace_has_exactly_these_steps(tmp_path, capsys):
    state, step = make()
    gshard.profile((3, 5), tmp_path / "trace")
    train(state, step, 8)
    (file,) = traces(tmp_path / "trace")
    steps, gathers = read(file)
    assert steps == [3, 4, 5]
    assert gathers == 3  # one in each step: none of a step before or after
    assert not events.observers
    assert f"profile of steps 3 to 5: {tmp_path / 'trace'}" in capsys.readouterr().out
    assert b"gshard/scatter" in file.read_bytes()  # the scopes of docs/metrics.md


def test_a_trace_has_no_part_of_the_steps_around(tmp_path):
    """Steps that take the devices half a second, of which the host knows nothing."""

    def loss_fn(params, x):
        def body(h, _):
            return jnp.tanh(h @ params["w"]), None

        return jax.lax.scan(body, x, length=400)[0].mean()

    mesh = gshard.make_mesh(devices=jax.devices()[:1])
    params = {"w": jnp.ones((256, 256)) / 256}
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "dp")
    step = gshard.make_train_step(loss_fn, plan, max_bad_steps=None)
    x = np.ones((64, 256), np.float32)
    state, _ = step(state, x)  # compiled
    with gshard.profile((3, 4), tmp_path):
        for _ in range(4):
            state, info = step(state, x)
    (file,) = traces(tmp_path)
    ran = collections.Counter(name for name, _ in host_events(file) if name.startswith("dot"))
    assert ran and all(abs(count - 2 * 400) < 20 for count in ran.values()), ran


def test_two_ranges_one_after_the_other(tmp_path):
    state, step = make()
    gshard.profile((2, 2), tmp_path / "a")
    gshard.profile((4, 5), tmp_path / "b")
    train(state, step, 6)
    assert [read(file)[0] for x in "ab" for file in traces(tmp_path / x)] == [[2], [4, 5]]


def test_the_number_is_that_of_the_train_state(tmp_path):
    state, step = make()
    first = jax.tree.map(jnp.copy, state)
    with gshard.profile((2, 2), tmp_path / "a"):
        state = train(state, step, 3)
    state = train(state, step, 2)  # that nobody counts
    with gshard.profile((7, 7), tmp_path / "b"):
        train(state, step, 3)
    with gshard.profile((2, 2), tmp_path / "c"):
        train(first, step, 3)
    assert [read(file)[0] for x in "abc" for file in traces(tmp_path / x)] == [[2], [7], [2]]


def test_steps_that_never_come_are_a_warning(tmp_path):
    state, step = make()
    with pytest.warns(gshard.GShardWarning, match="recorded nothing: the last step was 3"):
        with gshard.profile((10, 13), tmp_path / "late"):
            state = train(state, step, 3)
    with pytest.warns(gshard.GShardWarning, match="recorded nothing: the last step was 3"):
        gshard.profile((1, 2), tmp_path / "early")
        state = train(state, step, 1)
    with pytest.warns(gshard.GShardWarning, match="5 to 9 is not complete: the last step was 6"):
        with gshard.profile((5, 9), tmp_path / "cut"):
            train(state, step, 2)
    assert [read(x)[0] for x in traces(tmp_path / "cut")] == [[5, 6]]
    assert not traces(tmp_path / "late") and not traces(tmp_path / "early")
    assert not events.observers


def test_the_end_of_a_script_says_that_steps_never_came(tmp_path):
    script = "import gshard; gshard.profile((2, 3))"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=clean_environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0
    assert "the profile of steps 2 to 3 recorded nothing: no step ran. Steps are" in ended.stderr


def test_a_step_that_fails_leaves_a_trace_that_can_go_on(tmp_path):
    state, step = make()
    with gshard.profile((1, 2), tmp_path):
        with pytest.raises(gshard.GShardError):
            step(state, X[:3])
        train(state, step, 2)
    (file,) = traces(tmp_path)
    assert [n for n in read(file)[0] if n == 2] == [2]


def test_another_trace_that_runs_is_a_warning(tmp_path):
    state, step = make()
    gshard.profile((2, 2), tmp_path / "own")
    with jax.profiler.trace(str(tmp_path / "other")):
        with pytest.warns(gshard.GShardWarning, match="Training goes on without it"):
            train(state, step, 3)
    assert not events.observers


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((13, 10), r"ends before it begins. Pass \(10, 13\)"),
        ((0, 3), r"steps\[0\]=0 must be a whole number, 1 or more"),
        (10, r"must be the first and the last step, such as \(10, 13\)"),
        ((1, 2, 3), "must be the first and the last step"),
        ((1.5, 2), r"steps\[0\]=1.5"),
    ],
)
def test_wrong_ranges(steps, said):
    with pytest.raises(gshard.GShardError, match=said):
        gshard.profile(steps)
    assert not events.observers


def test_two_profiles_of_the_same_steps_are_refused(tmp_path):
    with (
        pytest.warns(gshard.GShardWarning, match="no step ran"),
        gshard.profile((10, 13), tmp_path),
    ):
        with pytest.raises(gshard.CallOrderError, match="profile of steps 10 to 13 has some"):
            gshard.profile((13, 20), tmp_path)
    assert not events.observers


def test_a_range_that_a_resumed_run_enters_late_is_not_complete(tmp_path):
    state, step = make()
    state = train(state, step, 3)
    with pytest.warns(gshard.GShardWarning, match="not complete: it begins at step 4"):
        with gshard.profile(steps=(2, 5), directory=tmp_path):
            train(state, step, 2)


def test_a_trace_that_the_user_stops_does_not_stop_the_training(tmp_path):
    state, step = make()
    with pytest.warns(gshard.GShardWarning, match="profile of steps 1 to 2 was not written"):
        with gshard.profile(steps=(1, 2), directory=tmp_path):
            state = train(state, step, 1)
            jax.profiler.stop_trace()
            state = train(state, step, 1)
    assert int(state.step) == 2
