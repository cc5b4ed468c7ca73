"""Arrays of a step are read with the shapes, dtypes and places that are asked for."""

from __future__ import annotations

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding

import gshard
from gshard._util.errors import OutsideError, is_outside
from gshard.checkpoint import place_shards as placing
from gshard.checkpoint.place_shards import inside
from gshard.checkpoint.read_arrays import read_arrays

VALUES = np.random.default_rng(0).normal(size=(7, 10)).astype(np.float32)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    """The folder with an array of 7 x 10, which three devices pad to 7 x 12."""
    directory = tmp_path_factory.mktemp("run")
    state, _ = sharded(3)
    with gshard.Checkpointer(directory) as checkpointer:
        checkpointer.save(1, state)
    return directory / "1" / "arrays"


def sharded(devices, **how):
    mesh = gshard.make_mesh(devices=jax.devices()[:devices])
    given = ({"w": VALUES}, optax.adam(0.1))
    return gshard.shard_train_state(given, mesh, "p_g_os", min_shard_size=0, **how)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_padding_and_dtypes(arrays, devices, dtype):
    plan = sharded(devices)[1]
    x = plan.abstract(plan.layouts.params["w"]).update(dtype=np.dtype(dtype))
    read = read_arrays(arrays, {"params/w": x})["params/w"]
    assert (read.shape, read.dtype, read.sharding) == (x.shape, x.dtype, x.sharding)
    expected = np.zeros(x.shape, dtype)
    expected[:7, :10] = VALUES.astype(dtype)
    np.testing.assert_array_equal(np.asarray(read), expected)


def test_a_smaller_shape_is_cut(arrays):
    mesh = gshard.make_mesh(devices=jax.devices()[:2])
    sharding = NamedSharding(mesh, jax.P("shard"))
    x = jax.ShapeDtypeStruct((4, 3), np.float32, sharding=sharding)
    read = read_arrays(arrays, {"params/w": x})["params/w"]
    np.testing.assert_array_equal(np.asarray(read), VALUES[:4, :3])


def test_arrays_go_to_the_memory_of_their_sharding(arrays):
    plan = sharded(4, offload=True)[1]
    layouts = jax.tree.leaves(plan.layouts.opt_state)
    (moment,) = (plan.abstract(x) for x in layouts if x.path.endswith("mu/w"))
    assert moment.sharding.memory_kind == "pinned_host"
    read = read_arrays(arrays, {"params/w": moment})["params/w"]
    assert read.sharding == moment.sharding


@pytest.mark.parametrize(("most", "calls"), [(2**24, [4]), (100, [1, 1, 1, 1])])
def test_shards_are_placed_together_if_they_are_small(monkeypatch, most, calls):
    """Of a large array one shard after another is on the host, and a call takes its time."""
    monkeypatch.setattr(placing, "_AT_ONCE", most)
    plan = sharded(4, offload=True)[1]
    layouts = jax.tree.leaves(plan.layouts.opt_state)
    (moment,) = (plan.abstract(x) for x in layouts if x.path.endswith("mu/w"))
    asked = []

    def read(several):
        asked.append(len(several))
        return [VALUES[inside(bounds, VALUES.shape)] for bounds in several]

    placed = placing.place_shards(moment, read)
    assert asked == calls and placed.sharding == moment.sharding
    expected = np.zeros(moment.shape, np.float32)
    expected[:7, :10] = VALUES
    np.testing.assert_array_equal(np.asarray(placed), expected)


def test_a_missing_block_is_told(arrays, tmp_path):
    """It is not zeros, though zarr leaves out blocks of zeros by default."""
    folder = shutil.copytree(arrays, tmp_path / "arrays")
    plan = sharded(2)[1]
    wanted = {"params/w": plan.abstract(plan.layouts.params["w"])}
    base = {"driver": "file", "path": f"{folder}/"}
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    (first,) = (x for x in store.list().result() if x.startswith(b"params/w/c/0/1"))
    store.delete_range(ts.KvStore.KeyRange(first, first + b"\0")).result()
    with pytest.raises(gshard.GShardError, match="cannot be read"):
        read_arrays(folder, wanted)


def test_an_error_of_the_system_comes_from_outside_the_program(arrays, tmp_path):
    """So a launcher does not take it for a bug, and starts the job again."""
    shutil.copytree(arrays.parents[1], tmp_path, dirs_exist_ok=True)
    manifest = tmp_path / "1" / "arrays" / "manifest.ocdbt"
    manifest.unlink()
    manifest.symlink_to(manifest)
    said = "cannot be read: .*Check the file system .* try again"
    with pytest.raises(OutsideError, match=said):
        gshard.Checkpointer(tmp_path).restore(like=sharded(2)[1], verify=False)


def test_zeros_are_read_as_they_were_written(tmp_path):
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    given = ({"w": np.zeros((8, 4), np.float32)}, optax.sgd(0.1))
    state, plan = gshard.shard_train_state(given, mesh, "p_g_os", min_shard_size=0)
    with gshard.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        restored = checkpointer.restore(like=plan).state
    np.testing.assert_array_equal(np.asarray(restored.params["w"]), given[0]["w"])


def test_a_missing_array_is_told(arrays):
    sharding = NamedSharding(gshard.make_mesh(), jax.P())
    x = jax.ShapeDtypeStruct((7,), np.float32, sharding=sharding)
    with pytest.raises(gshard.GShardError, match="(?s)cannot be read: .*gshard verify") as error:
        read_arrays(arrays, {"params/v": x})
    assert not is_outside(error.value)
