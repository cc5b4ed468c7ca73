"""Whatever changes in a step is found before anything is restored, and the file is named."""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import random
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

import gshard
from gshard._util import crc32
from gshard._util.errors import OutsideError
from gshard._util.pytree import flatten
from gshard.checkpoint import manifest as manifests
from gshard.checkpoint import step_files
from gshard.checkpoint.step_files import StepFolder
from tests.checkpoint import checkpoint_worker
from tests.checkpoint.soak_checkpoints import Life, live
from tests.tiers import quick


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
FLIPS = [("one process", 200), *((maker, 600) for maker in MAKERS)]  # how many bits


@pytest.fixture(scope="module")
def written(request, tmp_path_factory) -> Saved:
    return MAKERS[request.param](tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> Saved:
    return save_three(tmp_path_factory.mktemp("three") / "steps")


@pytest.fixture
def saved(three, tmp_path) -> Saved:
    return three._replace(directory=shutil.copytree(three.directory, tmp_path / "steps"))


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


def test_a_large_array_is_compared_in_segments(tmp_path, monkeypatch):
    """By several threads, and a flip in any of them names the array."""
    monkeypatch.setattr(manifests, "_LARGEST_SEGMENT", 1000)
    monkeypatch.setattr(step_files, "_BLOCK", 300)
    saved = save_three(tmp_path / "steps")
    step = saved.directory / str(saved.newest)
    manifest = (step / "manifests" / "process_0.json").read_bytes().splitlines()[0]
    name, segments = max(json.loads(manifest).items(), key=lambda item: len(item[1]))
    assert max(length for length, _, _ in segments) == 1000
    data = (step / name).read_bytes()
    assert len(data) == sum(length for length, _, _ in segments)
    at = 0
    for length, checksum, array in segments:
        assert zlib.crc32(data[at : at + length]) == checksum
        for offset in (at, at + length - 1):
            (step / name).write_bytes(
                data[:offset] + bytes([data[offset] ^ 8]) + data[offset + 1 :]
            )
            (found,) = gshard.Checkpointer(saved.directory).verify(saved.newest)
            assert found.file == name and found.arrays == (() if array is None else (array,))
        at += length


def test_the_checksum_is_that_of_zlib_with_and_without_zlib_ng(monkeypatch):
    data = random.Random(0).randbytes(100_001)
    fast = crc32.crc32
    assert fast is not zlib.crc32  # zlib-ng is among the packages of the tests
    for length in (0, 1, 7, 64, 4097, len(data)):
        assert fast(data[:length]) == zlib.crc32(data[:length])
        assert fast(data[length:], fast(data[:length])) == zlib.crc32(data)
    monkeypatch.setitem(sys.modules, "zlib_ng.zlib_ng", None)
    try:
        assert importlib.reload(crc32).crc32 is zlib.crc32
    finally:
        monkeypatch.undo()
        importlib.reload(crc32)


# Orbax leaves its other reads behind when one fails.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize(("written", "count"), quick(FLIPS, FLIPS[:1]), indirect=["written"])
def test_a_flipped_bit_is_found_wherever_it_is(written, count):
    step = written.directory / str(written.newest)
    kinds = ("gshard.json", "manifest.json", "manifests/", "arrays/_METADATA", "arrays/_sharding",
             "arrays/manifest.ocdbt", "arrays/array_metadatas/", "arrays/d/",
             "arrays/ocdbt.process_0/d/", "arrays/ocdbt.process_0/manifest.ocdbt")  # fmt: skip
    assert all(any(name.startswith(kind) for name in files(step)) for kind in kinds)
    like = (written.state, written.plan)
    sound = values(written.plan, gshard.Checkpointer(written.directory).restore(like=like).state)
    named = read = 0
    for name, offset, bit in flips(step, count):
        before = (step / name).read_bytes()
        after = bytearray(before)
        after[offset] ^= 1 << bit
        (step / name).write_bytes(after)
        harmed = {path for damage in assert_found(written, name) for path in damage.arrays}
        if harmed and named < count // 7:  # of so many, whether they can be read nevertheless
            named += 1
            other = differing(written, written.newest, sound)
            read += other is not None
            assert other is None or other == harmed, f"{name} {offset}: {other} is not {harmed}"
        (step / name).write_bytes(before)
    assert not gshard.Checkpointer(written.directory).verify()
    assert read > count // 28, f"{read} of {named} could be read"
    gc.collect()  # what Orbax has left, while its warnings are ignored


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


PASSING = ["ESTALE", "ECONNRESET", "EMFILE", "EACCES"]
MORE = ["ECONNABORTED", "ENETDOWN", "ENETUNREACH", "ESHUTDOWN", "EREMOTEIO"]


@pytest.mark.parametrize("name", quick(PASSING + MORE, PASSING))
def test_an_error_that_may_pass_is_no_damage(saved, monkeypatch, name):
    """The newest step is neither passed over nor set aside."""
    number = getattr(errno, name)
    checksums = StepFolder.checksums

    def fails(step, name, *given):
        if int(step.name) == saved.newest and name.startswith("arrays/"):
            raise OSError(number, os.strerror(number))
        return checksums(step, name, *given)

    monkeypatch.setattr(StepFolder, "checksums", fails)
    with gshard.Checkpointer(saved.directory) as checkpointer:
        for call in (lambda: checkpointer.restore(like=saved.state), checkpointer.verify):
            with pytest.raises(gshard.GShardError, match=f"{os.strerror(number)}. That does not"):
                call()
        monkeypatch.setattr(StepFolder, "checksums", checksums)
        assert checkpointer.restore(like=saved.state).step == saved.newest


def test_a_description_that_cannot_be_read_now_is_no_damage(saved, monkeypatch):
    """Nor is the step one without metadata."""

    def fails(step, name, most):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(StepFolder, "read", fails)
    checkpointer = gshard.Checkpointer(saved.directory)
    for call in (checkpointer.metadata, checkpointer.best_step):
        with pytest.raises(OutsideError, match="gshard.json cannot be read: Stale"):
            call()


def test_a_step_that_another_host_deletes_while_it_is_read(saved, monkeypatch):
    """NFS says of its files that their handles are stale: the next step is read."""
    checksums, newest = StepFolder.checksums, saved.newest

    def deleted(step, name, *given):
        if int(step.name) == newest:
            shutil.rmtree(step.path, ignore_errors=True)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return checksums(step, name, *given)

    monkeypatch.setattr(StepFolder, "checksums", deleted)
    assert gshard.Checkpointer(saved.directory).restore(like=saved.state).step == newest - 1


def test_the_best_of_the_steps_that_another_host_does_not_delete(saved, monkeypatch):
    read, newest = StepFolder.read, saved.newest

    def deleted(step, name, most):
        if int(step.name) == newest:
            shutil.rmtree(step.path, ignore_errors=True)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(step, name, most)

    monkeypatch.setattr(StepFolder, "read", deleted)
    assert gshard.Checkpointer(saved.directory).best_step() == newest - 1


def test_what_is_not_of_a_step_is_named(saved, tmp_path):
    step = saved.directory / str(saved.newest)
    (tmp_path / "elsewhere").mkdir()
    for inside in (".", "arrays", "arrays/ocdbt.process_0/d", "manifests"):
        foreign = step / inside / "foreign"
        for target in (step / "gshard.json", tmp_path / "elsewhere", tmp_path / "nowhere"):
            foreign.symlink_to(target)
            assert_found(saved, foreign.relative_to(step).as_posix())
            foreign.unlink()
    for inside in ("manifests", "data_state", "arrays/array_metadatas"):  # read by what is there
        foreign = step / inside / "process_7.json"
        foreign.write_bytes(b"")
        assert_found(saved, foreign.relative_to(step).as_posix())
        foreign.unlink()
    assert not gshard.Checkpointer(saved.directory).verify()


@pytest.mark.parametrize(
    "name", [".DS_Store", "arrays/.nfs0001", "data_state/.process_0.json.swp", "manifests/a~", "x"]
)
def test_a_file_that_nothing_reads_is_no_damage(saved, name):
    step = saved.directory / str(saved.newest)
    (step / name).write_bytes(b"left by somebody else")
    checkpointer = gshard.Checkpointer(saved.directory)
    with pytest.warns(gshard.GShardWarning, match=re.escape(name)):
        assert not checkpointer.verify()
    with pytest.warns(gshard.GShardWarning, match="not of this step, and are not read"):
        assert checkpointer.restore(like=(saved.state, saved.plan)).step == saved.newest


def sealed(text: str) -> bytes:
    line = text.encode() + b"\n"
    return line + b"%08x\n" % zlib.crc32(line)


DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE = {
    "a list": "[]",
    "a number": "7",
    "nothing": "null",
    "a number for segments": '{"gshard.json": 7}',
    "a number for a segment": '{"gshard.json": [7]}',
    "two values": '{"gshard.json": [[1, 2]]}',
    "texts for numbers": '{"gshard.json": [["1", "2", null]]}',
    "a float": '{"gshard.json": [[1.5, 2, null]]}',
    "less than nothing": '{"gshard.json": [[-1, 2, null]]}',
    "a list for an array": '{"gshard.json": [[1, 2, ["w"]]]}',
    "a table for segments": '{"gshard.json": {"a": 1}}',
    "deep": DEEP,
    "a name that leaves": '{"../x": [[1, 2, null]]}',
}


@pytest.mark.parametrize("kind", [*HOSTILE, "a pipe", "huge"])
@pytest.mark.parametrize("name", ["manifest.json", "manifests/process_0.json"])
def test_a_manifest_that_gshard_did_not_write_is_damage(saved, kind, name):
    path = saved.directory / str(saved.newest) / name
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(2**40)  # no byte of it takes room on the disk
    else:
        path.write_bytes(sealed(HOSTILE[kind]))
        combined = path.parents[len(Path(name).parts) - 1] / "manifest.json"
        if name != "manifest.json":  # seal it there too, so that it is read
            content = path.read_bytes()
            listed = json.loads(combined.read_text().splitlines()[0])
            listed[name] = [[len(content), zlib.crc32(content), None]]
            combined.write_bytes(sealed(json.dumps(listed)))
    found = assert_found(saved, name)
    assert kind != "huge" or "bytes" in found[0].what
    with pytest.warns(gshard.GShardWarning, match="is restored instead"):
        restored = gshard.Checkpointer(saved.directory).restore(like=(saved.state, saved.plan))
    assert restored.step == saved.newest - 1


@pytest.mark.parametrize(
    "text", ["[]", '{"format": 2}', DEEP, '{"format": 2, "step": "3", "processes": 1, '
             '"made_by": {}, "metadata": {}, "arrays": {}}']
)  # fmt: skip
def test_a_description_that_gshard_did_not_write_is_damage(saved, text):
    """Its checksum is right, as somebody who writes into a directory can make it."""
    step = saved.directory / str(saved.newest)
    content = text.encode()
    (step / "gshard.json").write_bytes(content)
    listed = json.loads((step / "manifest.json").read_text().splitlines()[0])
    listed["gshard.json"] = [[len(content), zlib.crc32(content), None]]
    (step / "manifest.json").write_bytes(sealed(json.dumps(listed)))
    assert_found(saved, "gshard.json")
    with pytest.warns(gshard.GShardWarning, match="is restored instead"):
        gshard.Checkpointer(saved.directory).restore(like=(saved.state, saved.plan))


@pytest.mark.parametrize("name", ["gshard.json", "data_state/process_0.json"])
def test_a_pipe_that_is_read_before_it_is_compared_does_not_wait(saved, name):
    path = saved.directory / str(saved.newest) / name
    pipe_instead(path)
    checkpointer = gshard.Checkpointer(saved.directory)
    with pytest.raises(gshard.GShardError, match="cannot be read: it is not a regular file"):
        if name == "gshard.json":
            checkpointer.metadata()
        else:
            checkpointer.restore(3, like=(saved.state, saved.plan), verify=False)


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
