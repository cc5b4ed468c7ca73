"""Safetensors files in an object store keep what they promise on a disk."""

from __future__ import annotations

import os
import tracemalloc
import weakref
from pathlib import Path, PurePosixPath

import jax
import numpy as np
import optax
import pytest

import gshard
from gshard.checkpoint import bucket
from gshard.checkpoint.bucket import Bucket, Upload
from gshard.checkpoint.safetensors.fetched import Fetched
from tests.checkpoint.safetensors.test_safetensors import (
    BAD_FILES,
    FORMS,
    assert_same,
    every_form,
    raw,
    replaced_meanwhile,
    safetensors,
    simple,
)
from tests.processes import run_workers
from tests.tiers import quick

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")

PLACES = [("dp", 1), ("os", 2), ("os_g", 3), ("p_g_os", 8)]
INDEX = "model.safetensors.index.json"
PART = 5 * 2**20  # the least that S3 takes


def new(value, devices=4, level="p_g_os"):
    """Weights of every dtype, and a state of them."""
    params = every_form(FORMS, value) | {"trained": np.full(7, value, np.float32)}
    return params, simple(params, devices, level, frozen="_")[0]


def large(count=4, value=1.0, rows=1024):
    """Weights of 4 MB each, or with fewer rows less."""
    params = {
        name: np.full((rows, 1024), value + i) for i, name in enumerate("abcdefghijkl"[:count])
    }
    return simple({name: x.astype(np.float32) for name, x in params.items()}, 4)[0]


@pytest.mark.parametrize(("level", "devices"), quick(PLACES, [("p_g_os", 8)]))
def test_any_level_and_mesh_to_any_other(address, tmp_path, level, devices):
    params, state = new(0)
    gshard.save_safetensors(state, f"{address}/a/model.safetensors", metadata={"for": "a test"})
    gshard.save_safetensors(state, tmp_path / "x", metadata={"for": "a test"})
    content = Bucket(address).read("a/model.safetensors")
    assert content == (tmp_path / "x").read_bytes()
    for path in (f"{address}/a/model.safetensors", f"{address}/a/"):
        back = gshard.load_safetensors(new(3, devices, level)[1], path)
        assert_same(gshard.full_params(back), params)


def test_an_object_is_replaced(address):
    state = large(1)
    for value in (1.0, 2.0):
        gshard.save_safetensors(large(1, value), f"{address}/x")
        back = gshard.full_params(gshard.load_safetensors(state, f"{address}/x"))
        assert (np.asarray(back["a"]) == value).all()


def test_an_object_that_is_replaced_while_it_is_read(address, monkeypatch):
    def replace():
        gshard.save_safetensors(large(2, 2.0, 16), f"{address}/x")

    state = large(2, 1.0, 16)
    gshard.save_safetensors(state, f"{address}/x")
    replaced_meanwhile(monkeypatch, replace)
    with pytest.raises(gshard.GShardError, match="x changed during the load"):
        gshard.load_safetensors(state, f"{address}/x")
    back = gshard.full_params(gshard.load_safetensors(state, f"{address}/x"))
    assert (np.asarray(back["a"]) == 2).all() and (np.asarray(back["b"]) == 3).all()


def test_shards_with_an_index(address, tmp_path):
    params, state = new(0)
    given = {"max_shard_bytes": 300}
    gshard.save_safetensors(state, tmp_path, **given)
    gshard.save_safetensors(state, f"{address}/model", **given)
    store = Bucket(f"{address}/model")
    assert {name: store.read(name) for name in store.list()} == {
        path.name: path.read_bytes() for path in tmp_path.iterdir()
    }
    with pytest.raises(gshard.GShardError, match="is not an index of shards: FileNotFoundError"):
        gshard.load_safetensors(state, f"{address}/{INDEX}")
    for path in (f"{address}/model", f"{address}/model/{INDEX}"):
        back = gshard.load_safetensors(new(3, 3)[1], path)
        assert_same(gshard.full_params(back), params)
    with pytest.raises(gshard.GShardError, match=f"{address}/model has weights already: {INDEX}"):
        gshard.save_safetensors(state, f"{address}/model", **given)
    with pytest.raises(gshard.GShardError, match=f"{address}/model is a folder"):
        gshard.save_safetensors(state, f"{address}/model")
    shard = min(store.list())
    store.delete([shard])
    with pytest.raises(gshard.GShardError, match=f"{shard} is missing"):
        gshard.load_safetensors(state, f"{address}/model")
    store.delete([INDEX])
    with pytest.raises(gshard.GShardError, match=f"{address}/model has several models"):
        gshard.load_safetensors(state, f"{address}/model")


@pytest.mark.parametrize("size", [1, PART, 2 * PART, 2 * PART + 1])
def test_an_upload_appears_when_it_is_complete(address, monkeypatch, size):
    monkeypatch.setattr(bucket, "_PART", PART)
    store, content = Bucket(address), os.urandom(size)
    with Upload(store, "x", size) as upload:
        upload.write(content[: size // 3])
        upload.write(memoryview(content)[size // 3 :])
        assert len(upload._file.buffer.getbuffer()) < 2**18 and not store.exists("x")
        upload.commit()
    assert store.read("x") == content and store.size("x") == size
    with Upload(store, "x", 3) as upload:
        upload.write(b"new")
    assert store.read("x") == content


FILES = {"one file": (1500, {}), "shards": (4, {"max_shard_bytes": 2e4})}
REQUESTS = [(files, request) for files in FILES for request in range(1, 13)]


@pytest.mark.parametrize(
    ("files", "request_"), quick(REQUESTS, [("one file", 5), ("shards", 8), ("shards", 11)])
)
def test_a_save_that_fails_leaves_nothing(
    server, address, through_proxy, monkeypatch, files, request_
):
    """Whichever request is refused: the object before is there, or none, and no open upload."""
    monkeypatch.setattr(bucket, "_PART", PART)
    rows, given = FILES[files]
    name, store, state = f"{address}/x", Bucket(address), large(2, rows=rows)
    before = {} if given else {"x": b"old"}
    for old, content in before.items():
        store.create(old, content)
    left = 0

    def fault():
        nonlocal left
        left -= 1
        return "403" if left == 0 else None

    through_proxy(fault)
    left = request_
    try:
        gshard.save_safetensors(state, name, **given)
    except gshard.GShardError as error:
        assert "Check the credentials" in str(error) and "\n" not in str(error)
        assert {found: store.read(found) for found in store.find("")} == before
    else:  # it needs fewer, or may not see whether there is such an object or a bucket
        assert left > 0 or request_ in (1, 2, 3)
        left = 0
        gshard.load_safetensors(state, name)
    assert open_uploads(server, store) == []


def open_uploads(server, store):
    """Uploads to S3 that were neither completed nor aborted."""
    if server.scheme == "gs":  # one that is not completed costs nothing, and ends in a week
        return []
    return store._fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads", [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["503", "closed"])
def test_a_server_that_is_gone(address, through_proxy, monkeypatch, kind):
    monkeypatch.setattr(bucket, "_PART", PART)
    state, requests = large(), 0

    def fault():
        nonlocal requests
        requests += 1
        return kind if requests > 6 else None

    through_proxy(fault)
    with pytest.raises(gshard.GShardError, match=f"cannot write {address}/x: .*Check the network"):
        gshard.save_safetensors(state, f"{address}/x")
    requests = -1000
    assert Bucket(address).find("") == {}
    gshard.save_safetensors(state, f"{address}/x")
    requests = 6
    with pytest.raises(gshard.GShardError, match=f"cannot read {address}/x: "):
        gshard.load_safetensors(state, f"{address}/x")


@pytest.mark.parametrize("case", quick(BAD_FILES, ["names", "empty", "cut", "json"]))
def test_files_that_are_refused(address, case):
    state, _ = simple({"w": {"kernel": np.zeros((2, 3), np.float32)}})
    content, said = BAD_FILES[case]
    Bucket(address).replace("x", content if isinstance(content, bytes) else raw(content))
    with pytest.raises(gshard.GShardError) as caught:
        gshard.load_safetensors(state, f"{address}/x")
    assert said in str(caught.value) and f"{address}/x" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_object_that_becomes_shorter_meanwhile(address, monkeypatch):
    state = large(1)
    gshard.save_safetensors(state, f"{address}/x")
    read = Bucket.read

    def shorter(self, name, start=0, end=None):
        return read(self, name, start, end)[: None if start == 0 else -1]

    monkeypatch.setattr(Bucket, "read", shorter)
    with pytest.raises(gshard.GShardError, match=f"{address}/x was cut short while it was read"):
        gshard.load_safetensors(state, f"{address}/x")


def test_what_is_not_there(server, address):
    state, none = large(1), f"{server.scheme}://no-such-bucket"
    for call, path, said in (
        (gshard.load_safetensors, f"{address}/x", f"{address}/x does not exist"),
        (gshard.load_safetensors, f"{none}/x", "there is no such bucket. Make it first"),
        (gshard.save_safetensors, f"{none}/x", "there is no such bucket. Make it first"),
        (gshard.save_safetensors, address.rpartition("/")[0], "is a folder. Choose another name"),
    ):
        with pytest.raises(gshard.GShardError, match=said):
            call(state, path)
    with pytest.raises(gshard.GShardError, match="there is no such bucket"):
        gshard.save_safetensors(state, f"{none}/x", max_shard_bytes=5e9)
    Bucket(address).create("folder/README.md", b"x")
    with pytest.raises(gshard.GShardError, match="has no safetensors file"):
        gshard.load_safetensors(state, f"{address}/folder")


def test_wrong_credentials_are_one_sentence(address, through_proxy):
    through_proxy(lambda: "403")
    state = large(1)
    for call in (gshard.save_safetensors, gshard.load_safetensors):
        with pytest.raises(gshard.GShardError, match="Check the credentials") as caught:
            call(state, f"{address}/x")
        assert "\n" not in str(caught.value)


class Address(os.PathLike):
    """What other libraries call a path."""

    def __init__(self, text):
        self.text = text

    def __fspath__(self):
        return self.text


def test_addresses(tmp_path):
    state = large(1)
    file = f"file://{tmp_path}/x"
    gshard.save_safetensors(state, Address(file))
    gshard.load_safetensors(state, file)
    assert os.listdir(tmp_path) == ["x"]
    for bad, said in (
        ("ftp://host/x", "path='ftp://host/x' has the scheme ftp://. gshard knows gs://"),
        ("gs:///x", "path='gs:///x' names no bucket"),
        (Path("gs://bucket/x"), "lacks a slash"),
        (PurePosixPath("s3://bucket/x"), "lacks a slash"),
    ):
        for call in (gshard.save_safetensors, gshard.load_safetensors):
            with pytest.raises(gshard.GShardError, match=said) as caught:
                call(state, bad)
            assert str(caught.value).startswith(call.__name__)


def test_two_processes(server, address, tmp_path):
    """The first writes; each reads its rows alone."""
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    params = {name: np.random.default_rng(i).normal(size=(256, 512)) for i, name in enumerate("ab")}
    params = {name: x.astype(np.float32) for name, x in params.items()}
    state, _ = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "p_g_os")
    gshard.save_safetensors(state, f"{address}/alone")
    seen = run_workers(tmp_path, "checkpoint.stores.safetensors_worker", address)
    half = sum(x.nbytes for x in params.values()) / 2
    for rank, process in enumerate(seen):
        assert half < process["bytes"] < half + 2**17 + 2**14  # the header, and whole pages
        said = str(process["said"])
        assert "bad is not a safetensors file" in said
        assert said.startswith("process 0: ") == (rank == 1)
    store = Bucket(address)
    assert store.read("together") == store.read("alone")
    assert_same(safetensors.load(store.read("together")), params)
    assert {*store.find("")} == {"alone", "bad", "together"}


def test_one_weight_is_held_at_a_time(address, monkeypatch):
    """Beside it a save holds some parts of an upload, however many weights there are."""
    monkeypatch.setattr(bucket, "_PART", PART)
    state, made, alive = large(12), Fetched.__init__, []
    gshard.save_safetensors(large(1), f"{address}/first")  # what is imported is no weight
    tracemalloc.start()
    gshard.save_safetensors(state, f"{address}/x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20 + 7 * PART < 12 * 4 * 2**20

    def counting(self, stored):
        made(self, stored)
        alive.append(weakref.ref(self))
        assert sum(x() is not None for x in alive) == 1

    monkeypatch.setattr(Fetched, "__init__", counting)
    gshard.load_safetensors(state, f"{address}/x")
    assert len(alive) == 12
