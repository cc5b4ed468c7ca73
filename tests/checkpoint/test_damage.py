"""Whatever changes in a step is found before anything is restored, and the file is named."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

import gshard
from gshard._util.pytree import flatten
from tests.checkpoint import checkpoint_worker
from tests.checkpoint.soak_checkpoints import Life, live
from tests.tiers import quick

FLIPS, READ = 600, 80  # bits flipped; of those in values, how many are read nevertheless


class Saved(NamedTuple):
    """A directory of three steps."""

    directory: Path
    state: Any
    plan: gshard.Plan

    @property
    def newest(self) -> int:
        return gshard.Checkpointer(self.directory).latest_step()


def save_three(directory: Path) -> Saved:
    params = {"w": np.arange(1024, dtype=np.float32).reshape(16, 64), "b": np.ones(64, np.float32)}
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    state, plan = gshard.shard_train_state(
        (params, optax.adam(1e-2)), mesh, "p_g_os", min_shard_size=0
    )
    with gshard.Checkpointer(directory) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state, data_state={"at": step}, metadata={"loss": 1.0 / step})
    return Saved(directory, state, plan)


def of_two_processes(folder: Path) -> Saved:
    live(Life(2, 2, "p_g_os", "none", 0), folder)
    return Saved(folder / "steps", *checkpoint_worker.fresh("os"))


MAKERS = {"one process": save_three, "two processes": of_two_processes}


@pytest.fixture(scope="module")
def written(request, tmp_path_factory) -> Saved:
    return MAKERS[request.param](tmp_path_factory.mktemp("steps"))


@pytest.fixture
def saved(tmp_path) -> Saved:
    return save_three(tmp_path / "steps")


def files(step: Path) -> list[str]:
    return sorted(p.relative_to(step).as_posix() for p in step.rglob("*") if p.is_file())


def assert_found(saved: Saved, *names: str) -> list[gshard.Damage]:
    """The newest step is damaged: `verify` and `restore` both say so, with one of the names."""
    step, checkpointer = saved.newest, gshard.Checkpointer(saved.directory)
    found = checkpointer.verify(step)
    assert {x.file for x in found} & set(names), f"{names}: {found}"
    with pytest.raises(gshard.DamagedCheckpointError) as error:
        checkpointer.restore(step, like=(saved.state, saved.plan))
    assert error.value.damages == {step: found}
    assert any(name in str(error.value) for name in names), str(error.value)
    return found


def flips(step: Path, count: int) -> Iterator[tuple[str, int, int]]:
    """File, offset and bit: in turn any byte of the step, and a file, so that small ones come."""
    draw, names = random.Random(5), files(step)
    sizes = [(step / name).stat().st_size for name in names]
    for number in range(count):
        weights = sizes if number % 2 else None
        name, size = draw.choices(list(zip(names, sizes, strict=True)), weights)[0]
        yield name, draw.randrange(size), draw.randrange(8)


def differing(saved: Saved, step: int, sound: dict[str, bytes]) -> set[str] | None:
    """Paths of the arrays that read other values than before; None when nothing can be read."""
    checkpointer = gshard.Checkpointer(saved.directory)
    try:
        state = checkpointer.restore(step, like=(saved.state, saved.plan), verify=False).state
    except Exception:  # Orbax finds some damage itself, and has no error of its own for it
        return None
    return {path for path, x in values(saved.plan, state).items() if x != sound[path]}


def values(plan: gshard.Plan, state: Any) -> dict[str, bytes]:
    paths, leaves, _ = flatten(plan.kind.split(state))
    return {path: np.asarray(x).tobytes() for path, x in zip(paths, leaves, strict=True)}


# Orbax leaves its other reads behind when one fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("written", quick(MAKERS, ["one process"]), indirect=True)
def test_a_flipped_bit_is_found_wherever_it_is(written):
    step = written.directory / str(written.newest)
    kinds = ("gshard.json", "manifest.json", "manifests/", "arrays/_METADATA", "arrays/_sharding",
             "arrays/manifest.ocdbt", "arrays/array_metadatas/", "arrays/d/",
             "arrays/ocdbt.process_0/d/", "arrays/ocdbt.process_0/manifest.ocdbt")  # fmt: skip
    assert all(any(name.startswith(kind) for name in files(step)) for kind in kinds)
    like = (written.state, written.plan)
    sound = values(written.plan, gshard.Checkpointer(written.directory).restore(like=like).state)
    named = read = 0
    for name, offset, bit in flips(step, FLIPS):
        before = (step / name).read_bytes()
        after = bytearray(before)
        after[offset] ^= 1 << bit
        (step / name).write_bytes(after)
        harmed = {path for damage in assert_found(written, name) for path in damage.arrays}
        if harmed and named < READ:
            named += 1
            other = differing(written, written.newest, sound)
            read += other is not None
            assert other is None or other == harmed, f"{name} {offset}: {other} is not {harmed}"
        (step / name).write_bytes(before)
    assert not gshard.Checkpointer(written.directory).verify()
    assert read > READ // 4, f"{read} of {named} could be read"


def link_to_a_copy(path: Path) -> None:
    copy = next(p for p in path.parents if p.name == "steps").with_name("copy")
    shutil.move(path, copy)
    path.symlink_to(copy)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)  # who opens it waits for ever


OF_A_FILE = {
    "cut to nothing": lambda path: path.write_bytes(b""),
    "cut to half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut by a byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "deleted": Path.unlink,
    "a link to its copy": link_to_a_copy,
    "a folder in its place": folder_instead,
    "a pipe in its place": pipe_instead,
}


@pytest.mark.parametrize("damage", OF_A_FILE)
def test_a_damaged_file_is_named_whichever_it_is(damage, saved, tmp_path):
    step, sound = saved.directory / str(saved.newest), tmp_path / "sound"
    step.rename(sound)
    for name in files(sound):
        shutil.copytree(sound, step)
        OF_A_FILE[damage](step / name)
        assert_found(saved, name)
        shutil.rmtree(step)


def test_what_is_not_of_a_step_is_named(saved, tmp_path):
    step = saved.directory / str(saved.newest)
    (tmp_path / "elsewhere").mkdir()
    for inside in (".", "arrays", "arrays/ocdbt.process_0/d", "manifests"):
        foreign = step / inside / "foreign"
        for target in (step / "gshard.json", tmp_path / "elsewhere", tmp_path / "nowhere"):
            foreign.symlink_to(target)
            assert_found(saved, foreign.relative_to(step).as_posix())
            foreign.unlink()
        foreign.write_bytes(b"")
        assert_found(saved, foreign.relative_to(step).as_posix())
        foreign.unlink()
    assert not gshard.Checkpointer(saved.directory).verify()


def test_a_folder_that_is_gone_is_found(saved, tmp_path):
    step, sound = saved.directory / str(saved.newest), tmp_path / "sound"
    step.rename(sound)
    folders = {str(Path(name).parent) for name in files(sound)} - {"."}
    assert len(folders) >= 5
    for folder in folders:
        shutil.copytree(sound, step)
        shutil.rmtree(step / folder)
        assert_found(saved, *(name for name in files(sound) if name.startswith(f"{folder}/")))
        shutil.rmtree(step)


def test_swapped_files_are_found(saved):
    step = saved.directory / str(saved.newest)
    names = files(step)
    for one, other in zip(names, names[1:] + names[:1], strict=True):
        first, second = (step / one).read_bytes(), (step / other).read_bytes()
        (step / one).write_bytes(second)
        (step / other).write_bytes(first)
        assert_found(saved, one, other)
        (step / one).write_bytes(first)
        (step / other).write_bytes(second)
    assert not gshard.Checkpointer(saved.directory).verify()


def test_a_file_of_another_step_is_found(saved):
    newest, before = (saved.directory / str(step) for step in (3, 2))
    for name in ("gshard.json", "data_state/process_0.json", "manifest.json"):
        sound = (newest / name).read_bytes()
        shutil.copy(before / name, newest / name)
        assert_found(saved, *(files(newest) if name == "manifest.json" else [name]))
        (newest / name).write_bytes(sound)


# ---- the step before ----------------------------------------------------------------------------


def damage(saved: Saved, *steps: int) -> None:
    for step in steps:
        path = saved.directory / str(step) / "arrays" / "_METADATA"
        path.write_bytes(path.read_bytes()[::-1])


@pytest.mark.parametrize("bad", [(3,), (3, 2)], ids=str)
def test_the_newest_undamaged_step_is_restored(bad, saved):
    damage(saved, *bad)
    good, like = min(bad) - 1, (saved.state, saved.plan)
    with gshard.Checkpointer(saved.directory) as checkpointer:
        with pytest.warns(gshard.GShardWarning, match="arrays/_METADATA") as said:
            restored = checkpointer.restore(like=like)
        words = str(said[0].message)
        assert all(f"step {step} in {saved.directory} is damaged" in words for step in bad)
        assert f"Step {good} is restored instead" in words
        assert (restored.step, restored.data_state) == (good, {"at": good})
        with pytest.warns(gshard.GShardWarning, match="is now") as said:
            checkpointer.save(good + 1, restored.state)
        assert len(said) == len(bad)
        checkpointer.wait()
        assert checkpointer.all_steps() == [*range(1, good + 2)]
        assert not checkpointer.verify()
    aside = sorted(name for name in os.listdir(saved.directory) if name.endswith(".damaged"))
    assert aside == sorted(f"{step}.damaged" for step in bad)


def test_where_all_are_damaged_nothing_is_restored(saved):
    damage(saved, 1, 2, 3)
    with pytest.raises(gshard.DamagedCheckpointError, match="No step is undamaged") as error:
        gshard.Checkpointer(saved.directory).restore(like=(saved.state, saved.plan))
    assert sorted(error.value.damages) == [1, 2, 3]
    assert len(re.findall("arrays/_METADATA", str(error.value))) == 3


def test_a_step_that_is_asked_for_is_not_replaced_by_another(saved):
    damage(saved, 2)
    like = (saved.state, saved.plan)
    with gshard.Checkpointer(saved.directory) as checkpointer:
        with pytest.raises(gshard.DamagedCheckpointError, match="step 2 .* is damaged"):
            checkpointer.restore(2, like=like)
        assert checkpointer.restore(like=like).step == 3
        checkpointer.save(4, saved.state)  # what is older than a sound step is let be
        checkpointer.wait()
        assert checkpointer.all_steps() == [1, 2, 3, 4]
