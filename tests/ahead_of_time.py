"""Programs that are compiled in a process of their own, for machines that are not there."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gshard.analysis.aot.target import Target, parse_target

ROOT = Path(__file__).resolve().parents[1]
COMPILERS = {"tpu": "libtpu", "gpu": "jax_plugins.xla_cuda13"}


def python_for(platform: str) -> str:
    """A Python that has a compiler for `tpu` or `gpu`; skips the test where there is none."""
    python, module = os.environ.get("GSHARD_AOT_PYTHON", sys.executable), COMPILERS[platform]
    if subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode:
        pytest.skip(f"{module} is not installed; GSHARD_AOT_PYTHON= names a Python that has it")
    return python


def found_by(script: str, target: str) -> Any:
    """What a script of `tests` prints, as JSON in its last line, run for a target, its argument."""
    assert importlib.util.find_spec(f"tests.{script}"), script  # also where the test is skipped
    return json.loads(printed_for(parse_target(target), f"tests.{script}", target).splitlines()[-1])


def printed_for(target: Target, *words: str) -> str:
    """What a module prints, run by a Python that has the compiler for a target."""
    done = subprocess.run(
        [python_for(target.platform), "-m", *words],
        env=os.environ | target.environment,
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
