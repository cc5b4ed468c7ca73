"""`gshard verify`: what it says, and the code with which it exits."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil

import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.cli import verify
from gshard.cli.main import main
from tests.checkpoint.test_checkpoints import shard

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore:.*min_shard_size changes nothing"),
]


@pytest.fixture
def directory(tmp_path):
    state, _ = shard(({"w": jnp.ones((64, 64))}, optax.sgd(0.1)), "os", 2)
    with gshard.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (3, 12):
            checkpointer.save(step, state)
    return tmp_path / "run"


def damage(directory):
    weights = (directory / "12" / "arrays" / "ocdbt.process_0").rglob("d/*")
    largest = max(weights, key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 3] ^= 8
    largest.write_bytes(data)
    return largest.relative_to(directory / "12").as_posix()


def test_undamaged_steps(directory, capsys):
    assert main(["verify", str(directory)]) == 0
    said = capsys.readouterr()
    assert [line.split(":")[0] for line in said.out.splitlines()] == [
        "[ok]   step 3",
        "[ok]   step 12",
    ]
    assert "level os, 1 process, saved 2" in said.out and not said.err
    assert re.search(r"step 3: \d+\.?\d* kB, ", said.out)  # and not 0.0 MB
    assert {x.name for x in directory.iterdir()} == {"3", "12", ".gshard_lock"}


def test_a_damaged_step_is_named_with_its_file_and_array(directory, capsys):
    name = damage(directory)
    assert main(["verify", str(directory)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[ok]   step 3") and lines[1] == "[fail] step 12"
    assert name in lines[2] and lines[2].endswith("differs from what was written, of params/w")
    assert main(["verify", str(directory), "--step", "3"]) == 0
    capsys.readouterr()
    assert main(["verify", str(directory), "--json"]) == 1
    table = json.loads(capsys.readouterr().out)
    assert [(x["step"], x["ok"]) for x in table["steps"]] == [(3, True), (12, False)]
    (row,) = table["steps"][1]["damages"]
    assert (
        row["file"] == name and row["arrays"] == ["params/w"] and table["steps"][0]["bytes"] > 1000
    )


def test_nothing_to_verify(directory, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for words, says in [
        ([tmp_path / "nowhere"], "does not exist"),
        ([tmp_path / "empty"], "holds no checkpoint"),
        ([directory.parent], f"Checkpoints are in its subdirectories: {directory.name}."),
        ([tmp_path / "file"], "is a file"),
        ([directory, "--step", "5"], "The nearest are [3, 12]"),
        ([directory, "--step", "x"], "--step='x' must be a whole number, 0 or more."),
    ]:
        assert main(["verify", *map(str, words)]) == 2
        assert f"error: {says}" in (err := capsys.readouterr().err) or says in err
    with pytest.raises(SystemExit) as ended:
        main(["verify", "--help"])
    assert ended.value.code == 0 and "example:" in capsys.readouterr().out


@pytest.mark.parametrize("when", ["verify_step", "size_of", "_line"])
def test_a_step_that_a_job_deletes_meanwhile_is_skipped(directory, capsys, monkeypatch, when):
    before = getattr(verify, when)

    def deletes(*given, **more):
        if "3" in [getattr(x, "name", "") for x in given]:
            with gshard.Checkpointer(directory) as checkpointer:
                if 3 in checkpointer.all_steps():
                    checkpointer.delete(3)
        return before(*given, **more)

    monkeypatch.setattr(verify, when, deletes)
    assert main(["verify", str(directory)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "[gone] step 3: it was deleted meanwhile" and "step 12: " in second


def test_a_folder_that_may_not_be_read_is_no_damage(directory, capsys, monkeypatch):
    arrays, scandir = directory / "12" / "arrays", os.scandir

    def refuse(path):
        if str(path) == str(arrays):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    if os.geteuid() == 0:  # whom nothing is forbidden
        monkeypatch.setattr(os, "scandir", refuse)
    else:
        arrays.chmod(0)
    assert main(["verify", str(directory)]) == 2
    said = capsys.readouterr().err
    assert "12/arrays cannot be read: Permission denied. That does not mean" in said
    assert "Traceback" not in said


def test_where_all_steps_are_deleted_meanwhile_nothing_was_verified(directory, capsys, monkeypatch):
    def deletes(step, **_):
        shutil.rmtree(directory / "12")
        raise FileNotFoundError(step)

    monkeypatch.setattr(verify, "verify_step", deletes)
    assert main(["verify", str(directory), "--step", "12"]) == 2
    assert "all steps that were to be verified were deleted" in capsys.readouterr().err
