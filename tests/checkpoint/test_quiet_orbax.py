"""A script that logs at INFO gets its own lines, not those of Orbax."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import ROOT, clean_environment

SCRIPT = """
import logging
logging.basicConfig(level=logging.INFO)
{before}
import jax.numpy as jnp, optax
import gshard
from absl import logging as absl_logging
params = {{"w": jnp.ones(4)}}
state, _ = gshard.shard_train_state((params, optax.sgd(0.1)), gshard.make_mesh(), "os")
with gshard.Checkpointer("checkpoints") as checkpointer:
    checkpointer.save(0, state)
    checkpointer.restore(like=state)
absl_logging.info("a line of the script")
absl_logging.warning("a warning of the script")
"""


@pytest.mark.parametrize(
    ("before", "least", "most"),
    [
        ("", 0, 0),
        # before absl is imported
        pytest.param(
            "logging.getLogger('absl').setLevel(logging.INFO)", 0, 0, marks=pytest.mark.slow
        ),
        pytest.param("import orbax.checkpoint", 0, 0, marks=pytest.mark.slow),
        ("logging.getLogger('absl').setLevel(logging.DEBUG)", 20, 10**9),
    ],
    ids=["alone", "older logger", "older import", "debug"],
)
def test_lines_of_orbax_in_a_log(before, least, most, tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=before)],
        cwd=tmp_path,
        env=clean_environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if ":absl:" in line]
    own = [line for line in lines if "of the script" in line]
    assert own == ["INFO:absl:a line of the script", "WARNING:absl:a warning of the script"]
    assert least <= len(lines) - len(own) <= most, lines
