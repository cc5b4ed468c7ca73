"""A model in a folder: shards and their index, and which folders are refused."""

from __future__ import annotations

import json
import os

import jax
import numpy as np
import optax
import pytest

import gshard

WHY = "needs the test extra: pip install 'gshard[test]'"
safetensors = pytest.importorskip("safetensors.numpy", reason=WHY)


def shard(params):
    return gshard.shard_train_state(
        (params, optax.sgd(0.1)), gshard.make_mesh(), "p_g_os", min_shard_size=1
    )[0]


def params_of(value):
    """Five weights of 40 bytes each."""
    return {name: np.full(10, i * value, np.float32) for i, name in enumerate("abcde")}


def assert_loads(path):
    state = gshard.load_safetensors(shard(params_of(0)), path)
    jax.tree.map(np.testing.assert_array_equal, gshard.full_params(state), params_of(1))


def folder_of(path, most):
    path.mkdir()
    state = shard(params_of(1))
    gshard.save_safetensors(state, path, max_shard_bytes=most)
    return state


@pytest.mark.parametrize(
    ("most", "shards"), [(1, 5), (79, 5), (np.int64(80), 3), (199, 2), (200, 1)]
)
def test_shards_have_at_most_so_many_bytes(tmp_path, most, shards):
    folder_of(tmp_path / "x", most)
    files = sorted(x.name for x in (tmp_path / "x").glob("*.safetensors"))
    assert len(files) == shards
    found = {}
    for name in files:
        tensors = safetensors.load_file(tmp_path / "x" / name)
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= most
        found |= {tensor: name for tensor in tensors}
    others = {x for x in os.listdir(tmp_path / "x") if x not in files}
    if shards == 1:
        assert files == ["model.safetensors"] and not others
    else:
        assert files == [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        (index,) = others
        said = json.loads((tmp_path / "x" / index).read_text())
        assert said == {"metadata": {"total_size": 200}, "weight_map": found}
    assert_loads(tmp_path / "x")


def index(folder):
    return folder / "model.safetensors.index.json"


def change_index(folder, change):
    said = json.loads(index(folder).read_text())
    change(said["weight_map"])
    index(folder).write_text(json.dumps(said))


SHARD = "model-00002-of-00003.safetensors"
BAD_FOLDERS = {
    "a missing shard": (lambda x: (x / SHARD).unlink(), f"{SHARD} is missing"),
    "no weights": (lambda x: [y.unlink() for y in x.iterdir()], "has no safetensors file"),
    "several models": (
        lambda x: (x / "consolidated.safetensors").write_bytes((x / SHARD).read_bytes()),
        "several models: model.safetensors.index.json, consolidated.safetensors",
    ),
    "no index": (
        lambda x: index(x).unlink(),
        f"several models: model-00001-of-00003.safetensors, {SHARD}",
    ),
    "an index of nothing": (lambda x: index(x).write_text("{}"), "is not an index of shards"),
    "an index that is cut": (lambda x: index(x).write_text('{"weight'), "is not an index of"),
    "an index of paths": (
        lambda x: change_index(x, lambda y: y.update(a="../a.safetensors")),
        "weight_map must have names of files",
    ),
    "a tensor elsewhere": (
        lambda x: change_index(x, lambda y: y.update(a=SHARD)),
        f"a is not in {SHARD}",
    ),
    "a tensor that is not listed": (
        lambda x: change_index(x, lambda y: y.pop("a")),
        "a is in model-00001-of-00003.safetensors too",
    ),
    "a damaged shard": (
        lambda x: (x / SHARD).write_bytes(b"x" * 9),
        f"{SHARD} is not a safetensors",
    ),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_folders_that_are_refused(tmp_path, case):
    damage, said = BAD_FOLDERS[case]
    state = folder_of(tmp_path / "x", 80)
    damage(tmp_path / "x")
    with pytest.raises(gshard.GShardError) as caught:
        gshard.load_safetensors(state, tmp_path / "x")
    assert said in str(caught.value) and str(tmp_path / "x") in str(caught.value)


def test_one_of_several_models_by_its_path(tmp_path):
    folder_of(tmp_path / "x", 80)
    (tmp_path / "x" / "other.safetensors").write_bytes(b"of another program")
    assert_loads(index(tmp_path / "x"))


def test_a_cache_whose_files_are_links_to_files_of_other_names(tmp_path):
    """Hugging Face's cache; `hf_hub_download` returns the path of such a link."""
    folder_of(tmp_path / "snapshot", 80)
    (tmp_path / "blobs").mkdir()
    for i, file in enumerate([*(tmp_path / "snapshot").iterdir()]):
        blob = file.rename(tmp_path / "blobs" / f"{i:064x}")
        file.symlink_to(blob)
    assert_loads(tmp_path / "snapshot")
    assert_loads(index(tmp_path / "snapshot"))


@pytest.mark.parametrize("name", ["latest", "current.safetensors.index.json"])
def test_a_link_of_ones_own_to_an_index(tmp_path, name):
    folder_of(tmp_path / "run7", 80)
    (tmp_path / name).symlink_to(index(tmp_path / "run7"))
    assert_loads(tmp_path / name)


def test_a_folder_that_cannot_be_written(tmp_path):
    state = folder_of(tmp_path / "x", 80)
    before = {x.name: x.read_bytes() for x in (tmp_path / "x").iterdir()}
    with pytest.raises(gshard.GShardError, match="has weights already: model.safetensors.index"):
        gshard.save_safetensors(state, tmp_path / "x", max_shard_bytes=80)
    assert {x.name: x.read_bytes() for x in (tmp_path / "x").iterdir()} == before
    with pytest.raises(gshard.GShardError, match="must be a folder that exists"):
        gshard.save_safetensors(state, tmp_path / "y", max_shard_bytes=80)
    for most in (0, -1, True, "5GB", float("nan")):
        with pytest.raises(gshard.GShardError, match="max_shard_bytes=.* a number of bytes"):
            gshard.save_safetensors(state, tmp_path / "x", max_shard_bytes=most)
