"""The demo killed, stopped and started again: the losses of a run that never stopped."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from examples import config, kill_and_resume
from examples.checkpoints import Checkpoints, refuse_other_settings
from examples.measure import Run
from tests.jobs import ROOT, launch, running
from tests.processes import run_together

LIMIT = 240
SETTINGS = (
    "--devices 2 --levels os,p_g_os --steps 24 --save_every 3 --arguments.layers 1 "
    "--sample_bytes 1 --one_device false"
).split()


def command(processes: int, output: Path, *options: object) -> list[str]:
    """The demo at its smallest, alone or as a job."""
    start = [sys.executable] if processes == 1 else launch("--nproc_per_node", processes)
    file = ROOT / "configs" / "smallest.toml"
    return [*start, "-m", "examples.train_gpt", str(file), *SETTINGS, f"--output={output}"] + [
        f"--{options[i]}={options[i + 1]}" for i in range(0, len(options), 2)
    ]


def runs(output: Path) -> list[dict]:
    """What came out, without how long it took."""
    found = json.loads((output / "results.json").read_text())["runs"]
    for run in found:
        del run["tokens_per_second"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "levels"), [(1, "os,p_g_os"), (2, "os,p_g_os")])
def test_killed_and_preempted_the_losses_match_an_uninterrupted_run(tmp_path, processes, levels):
    """A kill at the first level, SIGTERM at the last, and what is left to the end."""
    first, last = levels.split(",")[0], levels.split(",")[-1]
    same = ("levels", levels)
    # What one has compiled, those after it need not compile.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")} if processes == 1 else {}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.02"}
    with running(command(processes, tmp_path / "whole", *same), tmp_path, **cache) as job:
        assert job.code(LIMIT) == 0, job.out + job.err

    saved = tmp_path / "checkpoints"
    same += ("checkpoints", saved)
    slowly = command(processes, tmp_path / "output", *same, "pause", 0.2)

    def newest(level: str) -> int:
        return gshard.Checkpointer(saved / level).latest_step() or 0

    with running(slowly, tmp_path, **cache) as job:
        job.wait_until(lambda: newest(first) == 3, "saved", LIMIT)
        if processes == 1:
            job.process.kill()
        else:
            os.kill(job.ranks()[1], signal.SIGKILL)  # the launcher ends the other
        assert job.code(LIMIT) in (-signal.SIGKILL, 128 + signal.SIGKILL), job.err
        job.assert_nobody_left()
    assert newest(first) in (3, 6, 9)
    killed, before = f"{first:<10} resumes from step {newest(first)}\n", newest(last)

    with running(slowly, tmp_path, **cache) as job:
        job.wait_until(lambda: newest(last) > before, "saved", LIMIT)
        time.sleep(0.3)  # a step or two that no save was due after
        job.process.terminate()
        assert job.code(LIMIT) == gshard.distributed.PREEMPTED_EXIT_CODE, job.out + job.err
        assert killed in job.out
        assert f"{last:<10} told to stop after step {newest(last)}: saved\n" in job.out
    assert before < newest(last) < 24
    assert not (tmp_path / "output").exists()  # it is not done yet
    stopped = f"{last:<10} resumes from step {newest(last)}\n"

    with running(command(processes, tmp_path / "output", *same), tmp_path, **cache) as job:
        assert job.code(LIMIT) == 0, job.out + job.err
        assert stopped in job.out
        assert first == last or f"{first:<10} resumes from step 24\n" in job.out
    assert runs(tmp_path / "output") == runs(tmp_path / "whole")


@pytest.mark.slow
def test_a_launcher_that_starts_again_goes_on_by_itself(tmp_path):
    """One of two processes is killed: nobody does anything, and the job comes to its end."""
    with running(command(2, tmp_path / "whole"), tmp_path) as job:
        assert job.code(LIMIT) == 0, job.out + job.err
    words = command(2, tmp_path / "output", "checkpoints", tmp_path / "saved", "pause", 0.2)
    words[words.index("-m", 3) : words.index("-m", 3)] = ["--max_restarts", "1"]
    with running(words, tmp_path) as job:
        job.wait_until((tmp_path / "saved" / "p_g_os" / "3").exists, "saved", LIMIT)
        os.kill(job.ranks()[0], signal.SIGKILL)
        assert job.code(LIMIT) == 0, job.out + job.err
        assert "p_g_os     resumes from step " in job.out
    assert runs(tmp_path / "output") == runs(tmp_path / "whole")


def trained(folder, stop_after=None):
    """Losses of a short training with the demo's checkpoints, and what these say."""
    data = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    pair = ({"w": jnp.arange(16.0)}, optax.adam(0.1))
    state, plan = gshard.shard_train_state(pair, gshard.make_mesh(), "os", min_shard_size=8)
    step = gshard.make_train_step(lambda p, b: jnp.mean((p["w"] - b) ** 2), plan)
    run, said = Run("os"), []
    settings = config.Config(steps=5, save_every=2, checkpoints=str(folder))
    with Checkpoints(settings, run, said.append) as checkpoints:
        state = checkpoints.restore(state)
        for i in checkpoints.steps_left():
            state, metrics = step(state, data[i])
            run.losses.append(float(metrics["loss"]))
            checkpoints.after_step(state)
            if len(run.losses) == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)
    return run.losses, said


def test_told_to_stop_it_saves_and_goes_on_from_there(tmp_path):
    """In processes of their own, since a process never gets its handler of SIGTERM back."""
    folders = str(tmp_path / "stopped"), str(tmp_path / "whole")

    def run(code):
        command = ["-c", f"from tests.checkpoint.test_resume import *; {code}"]
        return run_together(tmp_path, [command])[0]

    ended = run(f"trained({folders[0]!r}, stop_after=3)")  # no save is due after three steps
    assert ended.code == gshard.distributed.PREEMPTED_EXIT_CODE, ended.said
    ended = run(f"print(json.dumps([trained(folder) for folder in {folders}]))")
    assert ended.code == 0, ended.said
    (losses, said), (wanted, _) = json.loads(ended.said.splitlines()[-1])
    assert said == ["resumes from step 3"]
    assert losses == wanted and len(losses) == 5


# ---- without a process ---------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path):
    return config.Config(steps=5, save_every=2, checkpoints=str(tmp_path / "saved"))


def toy():
    state, _ = gshard.shard_train_state(
        ({"w": jnp.arange(16.0)}, optax.sgd(0.1)), gshard.make_mesh(), "os", min_shard_size=8
    )
    return state


def test_a_step_is_saved_once(settings):
    """As when the job gets SIGTERM right after a step that was due."""
    run = Run("os")
    with Checkpoints(settings, run, print) as checkpoints:
        state = checkpoints.restore(toy())
        for loss in (3.0, 2.0):
            run.losses.append(loss)
            checkpoints.after_step(state)
        checkpoints.save_and_wait()
        assert checkpoints.checkpointer.all_steps() == [2]
        run.losses.append(1.0)
        checkpoints.after_step(state)
        checkpoints.save_and_wait()
        assert checkpoints.checkpointer.all_steps() == [2, 3]
    again = Run("os")
    with Checkpoints(settings, again, print) as checkpoints:
        checkpoints.restore(toy())
        assert again.losses == [3.0, 2.0, 1.0]
        assert checkpoints.saved == 3
        checkpoints.save_and_wait()  # nothing was trained


def test_another_training_is_refused(settings):
    refuse_other_settings(settings)
    refuse_other_settings(config.Config(steps=5, checkpoints=settings.checkpoints, devices=2))
    with pytest.raises(config.ConfigError, match="with seed=0, and now seed=1: choose another"):
        refuse_other_settings(config.Config(steps=5, checkpoints=settings.checkpoints, seed=1))


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(config.ConfigError, match=f"checkpoints={tmp_path}/file"):
        refuse_other_settings(config.Config(checkpoints=str(tmp_path / "file")))


def test_nothing_is_compared_with_the_run_of_other_settings(tmp_path):
    file = tmp_path / "results.json"
    for there in ("missing", json.dumps({"settings": {"steps": 3}, "runs": []})):
        if there != "missing":
            file.write_text(there)
        with pytest.raises(config.ConfigError, match="is not of these settings"):
            kill_and_resume.never_stopped(config.Config(output=str(tmp_path)))
