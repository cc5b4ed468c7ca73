"""Two writers at once, a deletion that stops, and lists that lag behind."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import optax
import pytest

import gshard
from gshard.checkpoint import lease
from gshard.checkpoint.bucket import Bucket
from gshard.checkpoint.lease import Lease

pytestmark = pytest.mark.filterwarnings("ignore:.*of the parameters are replicated")


def state_of(value):
    params = {"w": np.full(64, value, np.float32)}
    return gshard.shard_train_state((params, optax.sgd(0.1)), gshard.make_mesh(), "os")[0]


def test_the_second_of_two_commits_loses(address, monkeypatch):
    """It had looked at its lease and its token before it was suspended."""
    committing, go_on, create = threading.Event(), threading.Event(), Bucket.create

    def suspended(self, name, content):
        if name == "1/manifest.json" and not committing.is_set():
            committing.set()
            assert go_on.wait(60)
        create(self, name, content)

    monkeypatch.setattr(Bucket, "create", suspended)
    first = gshard.Checkpointer(address, writes=True)
    first.save(1, state_of(1.0))
    assert committing.wait(60)
    monkeypatch.setattr(lease, "_is_alive", lambda other: False)
    with gshard.Checkpointer(address, writes=True) as second:
        second.save(1, state_of(2.0))
    before = Bucket(address).read("1/manifest.json")
    go_on.set()
    with pytest.raises(gshard.SaveFailedError, match="exists already"):
        first.wait()
    assert Bucket(address).read("1/manifest.json") == before
    checkpointer = gshard.Checkpointer(address)
    assert checkpointer.verify(1) == []
    params = gshard.full_params(checkpointer.restore(like=state_of(0.0)).state)
    assert params["w"][0] == 2.0


@pytest.mark.parametrize("released", [False, True])
def test_a_renewal_that_was_suspended_does_not_bring_a_lease_back(address, monkeypatch, released):
    """Nor does it write over that of a third, where the second has released its own meanwhile."""
    renewing, go_on, replace = threading.Event(), threading.Event(), Bucket.replace

    def suspended(self, name, content):
        if not renewing.is_set():
            renewing.set()
            assert go_on.wait(60)
        replace(self, name, content)

    monkeypatch.setattr(Bucket, "replace", suspended)
    first, second = Lease(Bucket(address)), Lease(Bucket(address))
    first.take()
    assert renewing.wait(60)
    monkeypatch.setattr(lease, "_is_alive", lambda other: False)
    second.take()
    if released:
        second.release()
        second = Lease(Bucket(address))
        second.take()
    go_on.set()
    assert first._lost.wait(10)
    assert second.is_held() and not first.is_held()
    second.release()
    assert not first.is_held()
    first.release()
    assert {*Bucket(address).list(lease.FOLDER)} == {"3" if released else "2"}


def test_a_lease_that_was_seen_to_be_lost_stays_lost(address, monkeypatch):
    monkeypatch.setattr(lease, "PERIOD", 60.0)
    bucket = Bucket(address)
    first = Lease(bucket)
    first.take()
    own = f"{lease.FOLDER}/1"
    content = bucket.read(own)
    bucket.delete([own])
    assert not first.is_held()
    bucket.replace(own, content)
    assert not first.is_held()
    first.take()  # another one
    assert first.is_held()
    first.release()


def test_a_deletion_that_stops_anywhere_leaves_no_half_step(address, monkeypatch):
    delete, state = Bucket.delete, state_of(1.0)
    for done in range(5):
        step = str(done + 1)
        left = done

        def stop(self, names, step=step):
            nonlocal left
            left -= any(name.startswith(f"{step}/") for name in names)
            if left < 0:
                raise RuntimeError("killed")
            delete(self, names)

        with gshard.Checkpointer(address) as checkpointer:
            checkpointer.save(done + 1, state)
        with monkeypatch.context() as patch:
            patch.setattr(Bucket, "delete", stop)
            with contextlib.suppress(RuntimeError):
                checkpointer._store.delete(done + 1)
        reader = gshard.Checkpointer(address)
        assert (left < 0) == (done < 4) and reader.all_steps() == [1]
        assert reader.verify(1) == []
        if done == 0:
            continue
        gshard.Checkpointer(address, writes=True).close()  # removes the rest
        assert Bucket(address).find(step) == {}


@pytest.mark.parametrize("lag", ["new", "old"])
def test_a_list_that_lags_behind_shows_no_half_step(address, monkeypatch, lag):
    """An object that was just written is not in it, or one that was just deleted still is."""
    bucket, find = Bucket(address), Bucket.find
    with gshard.Checkpointer(address) as checkpointer:
        checkpointer.save(1, state_of(1.0))
    before = bucket.list(), bucket.find("1")
    if lag == "new":
        with monkeypatch.context() as patch:
            patch.setattr(
                Bucket,
                "find",
                lambda self, folder: {
                    name: size
                    for name, size in find(self, folder).items()
                    if name != "manifest.json"
                },
            )
            gshard.Checkpointer(address)._store.delete(1)
        assert gshard.Checkpointer(address).all_steps() == []
    else:
        gshard.Checkpointer(address)._store.delete(1)
        monkeypatch.setattr(Bucket, "list", lambda self, folder="": before[0])
        monkeypatch.setattr(Bucket, "find", lambda self, folder: before[1])
        assert gshard.Checkpointer(address).all_steps() == []
