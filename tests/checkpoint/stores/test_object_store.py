"""Checkpoints in an object store keep what they promise on a disk."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading

import jax
import numpy as np
import optax
import pytest
import tensorstore as ts

import gshard
from gshard.checkpoint import lease, needed_ranges, object_reader
from gshard.checkpoint.bucket import REQUESTS, Bucket
from gshard.checkpoint.lease import Lease
from gshard.checkpoint.matching import arrays_to_read
from gshard.checkpoint.open_store import open_step_or_store, open_store
from gshard.checkpoint.step_files import run_parallel
from gshard.checkpoint.step_info import StepInfo
from tests.checkpoint.test_checkpoints import Training, assert_equal_bits
from tests.checkpoint.test_processes import (
    AFTER,
    BEFORE,
    assert_is_what_they_had,
    assert_restored_what_one_wrote,
)
from tests.processes import clean_environment, run_workers
from tests.tiers import quick

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*of the parameters are replicated"),
    pytest.mark.filterwarnings("ignore:.*min_shard_size changes nothing"),
]

PLACES = [("dp", 1), ("os", 2), ("os_g", 3), ("p_g_os", 4), ("p_g_os", 8)]


@pytest.mark.parametrize(("level", "devices"), quick(PLACES, [("p_g_os", 4)]))
def test_any_level_and_mesh_to_any_other(address, level, devices):
    run = Training(level, devices)
    run.train(0, 1)
    with gshard.Checkpointer(address) as checkpointer:
        checkpointer.save(2, run.state, data_state={"at": 5}, metadata={"loss": 0.5})
        held = run.whole()
        after = run.train(2, 3)  # donated arrays, while the save is on its way
    for target in PLACES:
        other = Training(*target)
        restored = gshard.Checkpointer(address).restore(like=other.state)
        assert (restored.step, restored.data_state) == (2, {"at": 5})
        assert restored.metadata == {"loss": 0.5}
        other.state = restored.state
        assert_equal_bits(other.whole(), held)
        np.testing.assert_allclose(other.train(2, 3), after, rtol=2e-6)


@pytest.mark.parametrize("first", range(4))
def test_a_process_reads_its_shards_alone(address, monkeypatch, first):
    """As if one of the four devices were of this process."""
    params = {"w": np.random.default_rng(0).normal(size=(512, 256)).astype(np.float32)}
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "p_g_os")
    with gshard.Checkpointer(address) as checkpointer:
        checkpointer.save(1, state)
    shards, read, found = needed_ranges._shards, Bucket.read, []

    def of_one(x):
        indices = sorted(shards(x), key=str)
        return {indices[first % len(indices)]}

    def read_and_tell(*given):
        found.append(read(*given))
        return found[-1]

    monkeypatch.setattr(needed_ranges, "_shards", of_one)
    monkeypatch.setattr(Bucket, "read", read_and_tell)
    store = open_store(address)
    wants = arrays_to_read(StepInfo.read(store.step(1)).arrays, plan, cast=False)
    size = params["w"].nbytes
    with store.reader(verify=True) as reader:
        assert reader.damages(1, lambda info: wants) == []
        assert size / 4 < sum(map(len, found)) < size / 3
        base = f"file://{reader.fetch(1, wants[0])}/arrays/"
        where = {"driver": "ocdbt", "base": base, "path": "params/w/"}
        stored = ts.open({"driver": "zarr3", "kvstore": where}).result()
        for i in range(4):  # what was not copied cannot be read, and is not zero
            rows = slice(128 * i, 128 * i + 128)
            if i == first:
                np.testing.assert_array_equal(stored[rows].read().result(), params["w"][rows])
            else:
                with pytest.raises(ValueError, match="shard|range|crc"):
                    stored[rows].read().result()


def test_a_save_looks_at_no_step_that_it_knows(address, monkeypatch):
    """With a thousand kept steps a save would send thousands of requests."""
    pair = ({"w": np.ones(64, np.float32)}, optax.sgd(0.1))
    state, _ = gshard.shard_train_state(pair, gshard.make_mesh(), "os", min_shard_size=0)
    asked = []
    for name in ("exists", "find", "read"):
        before = getattr(Bucket, name)

        def told(self, path, *more, before=before):
            asked.append(path)
            return before(self, path, *more)

        monkeypatch.setattr(Bucket, name, told)
    with gshard.Checkpointer(address, keep_last=1, keep_every=1, asynchronous=False) as made:
        for step in (1, 2, 3):
            made.save(step, state)
        asked.clear()
        made.save(4, state)
        assert made.all_steps() == [1, 2, 3, 4]
        made.delete(2)
        assert made.all_steps() == [1, 3, 4]
    looked = {path.partition("/")[0] for path in asked}
    assert "1" not in looked and "4" in looked, asked


@pytest.mark.parametrize("verify", [True, False])
def test_adjacent_blocks_are_read_together_and_long_ones_in_pieces(address, monkeypatch, verify):
    params = {str(i): np.full((512, 64), i, np.float32) for i in range(12)}
    mesh = gshard.make_mesh(devices=jax.devices()[:4])
    state, plan = gshard.shard_train_state((params, optax.sgd(0.1)), mesh, "p_g_os")
    with gshard.Checkpointer(address) as checkpointer:
        checkpointer.save(1, state)
    read, found = Bucket.read, []

    def read_and_tell(self, name, start=0, end=None):
        if "/ocdbt.process_0/d/" in name:
            found.append((start, end))
        return read(self, name, start, end)

    monkeypatch.setattr(Bucket, "read", read_and_tell)
    size, piece = sum(x.nbytes for x in params.values()), 2**19
    for most, count in ((object_reader._REQUEST, 12), (piece, size // piece + 12)):
        monkeypatch.setattr(object_reader, "_REQUEST", most)
        found.clear()
        restored = gshard.Checkpointer(address).restore(like=plan, verify=verify).state
        assert_equal_bits(gshard.full_params(restored), params)
        assert len(found) < count and max(end - start for start, end in found) <= most
    assert len(found) >= size // piece


def test_old_steps_go_and_a_step_can_be_deleted(address):
    run = Training("os", 2)
    with gshard.Checkpointer(address, keep_last=2) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(step, run.state)
        checkpointer.wait()
        assert checkpointer.all_steps() == [3, 4]
        checkpointer.delete(3)
        assert checkpointer.all_steps() == [4]
    assert {*Bucket(address).list()} == {"4", ".gshard_lock"}


def test_the_same_step_again_is_compared(address):
    run = Training("os", 2)
    with gshard.Checkpointer(address) as checkpointer:
        checkpointer.save(1, run.state)
        checkpointer.save(1, run.state)
        run.train(0)
        with pytest.raises(gshard.GShardError, match="another state under this number"):
            checkpointer.save(1, run.state)


def test_a_second_writer_is_refused_by_name(address):
    with gshard.Checkpointer(address, writes=True) as checkpointer:
        with pytest.raises(gshard.CallOrderError, match=f"process {os.getpid()} on .* writes its"):
            gshard.Checkpointer(address, writes=True)
        checkpointer.all_steps()
    gshard.Checkpointer(address, writes=True).close()


def test_a_writer_on_another_machine_is_watched(address, monkeypatch, capsys):
    """While it renews its lease it is alive; when it does not, its lease is taken over."""
    first = gshard.Checkpointer(address, writes=True)
    monkeypatch.setattr(lease, "_is_alive", lambda other: None)
    with pytest.raises(gshard.CallOrderError, match="writes its checkpoints there"):
        gshard.Checkpointer(address, writes=True)
    assert "to see whether process" in capsys.readouterr().err
    cut_off = threading.Event()  # a renewal that was already on its way has arrived
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "replace", lambda *given: cut_off.set())
        assert cut_off.wait(60)
        second = gshard.Checkpointer(address, writes=True)
    run = Training("os", 2)
    with pytest.raises(gshard.GShardError, match="writes its checkpoints there"):
        first.save(1, run.state)
    second.save(1, run.state)
    second.close()
    assert gshard.Checkpointer(address).all_steps() == [1]


def test_who_lost_the_lease_commits_nothing(address, monkeypatch):
    run, writing = Training("os", 2), threading.Event()
    first = gshard.Checkpointer(address, writes=True)
    check = lease.Lease.check

    def wait(self):
        writing.wait(60)
        check(self)

    monkeypatch.setattr(lease.Lease, "check", wait)
    first.save(1, run.state)
    monkeypatch.setattr(lease, "_is_alive", lambda other: None)
    cut_off = threading.Event()
    monkeypatch.setattr(Bucket, "replace", lambda *given: cut_off.set())
    assert cut_off.wait(60)
    second = gshard.Checkpointer(address, writes=True)
    writing.set()
    with pytest.raises(gshard.SaveFailedError, match="did not renew its lease in time"):
        first.wait()
    assert second.all_steps() == []
    second.save(1, run.state)
    second.close()
    assert second.all_steps() == [1] and second.verify(1) == []


@pytest.mark.parametrize("flips", quick([300, 40], [40]))
def test_every_flipped_bit_is_seen(address, flips):
    """In every object of a step; a restore sees those that it reads."""
    run = Training("p_g_os", 4)
    with gshard.Checkpointer(address) as checkpointer:
        checkpointer.save(1, run.state)
    bucket, draw = Bucket(f"{address}/1"), random.Random(0)
    checkpointer = gshard.Checkpointer(address)
    names = sorted(bucket.find(""))
    for i in range(flips):
        name = names[i % len(names)]
        content = bucket.read(name)
        at = draw.randrange(len(content))
        bucket.replace(name, content[:at] + bytes([content[at] ^ 1 << i % 8]) + content[at + 1 :])
        assert [x.file for x in checkpointer.verify(1)] == [name]
        if not name.startswith(("arrays/array_metadatas", "arrays/ocdbt", "manifests")):
            with pytest.raises(gshard.DamagedCheckpointError, match=name):
                checkpointer.restore(like=run.state)
        bucket.replace(name, content)
    assert checkpointer.verify(1) == []


def test_a_damaged_step_is_set_aside(address):
    run = Training("p_g_os", 4)
    with gshard.Checkpointer(address) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, run.state)
        checkpointer.wait()
        bucket = Bucket(f"{address}/2")
        (name,) = [name for name in bucket.find("") if name.startswith("arrays/d/")]
        content = bucket.read(name)
        bucket.replace(name, content[:5] + b"?" + content[6:])
        with pytest.warns(
            gshard.GShardWarning, match=f"(?s)step 2 in {address} is damaged.*{name}"
        ):
            assert checkpointer.restore(like=run.state).step == 1
        with pytest.raises(gshard.DamagedCheckpointError, match=name):
            checkpointer.restore(2, like=run.state)
        with pytest.warns(gshard.GShardWarning, match=f"is now {address}/2.damaged"):
            checkpointer.save(2, run.state)
        checkpointer.wait()
        assert checkpointer.all_steps() == [1, 2] and checkpointer.verify(2) == []
    assert Bucket(address).read(f"2.damaged/{name}", 0, 6)[5:] == b"?"


def test_several_processes_save_and_any_number_restores(tmp_path, server, address):
    alone = Training("p_g_os", 4)
    alone.train(*BEFORE)
    with gshard.Checkpointer(f"{address}/alone") as checkpointer:
        checkpointer.save(2, alone.state, data_state={"position": 17})
    seen = run_workers(
        tmp_path, "checkpoint.saving_worker", "2", address, processes=2, devices_each=2
    )
    losses = alone.train(*AFTER)
    for rank, process in enumerate(seen):
        assert_restored_what_one_wrote(process, losses)
        assert_is_what_they_had(process, rank)
        said = process["said"].tolist()
        assert "the processes made different calls: save of step 10" in said[0]
        assert "does not see" in said[3] and "one address" in said[3]
        assert process["damaged"].tolist()[0].startswith("arrays/d/")
    np.testing.assert_allclose(seen[0]["after"], losses, rtol=2e-6)
    assert [x for x in seen[0]["left"].tolist() if x != ".gshard_lock"] == ["3"]
    checkpointer = gshard.Checkpointer(f"{address}/together")
    assert checkpointer.verify(3) == []
    one, other = Training("os", 3), Training("dp", 1)
    for run in (one, other):
        with pytest.warns(gshard.GShardWarning, match="a different data state for each of the 2"):
            run.state = checkpointer.restore(3, like=run.state).state
    assert_equal_bits(one.whole(), other.whole())


SAVES = """
import sys
import gshard
gshard.virtual_devices(2)
from tests.checkpoint.stores.failing_proxy import failing
from tests.checkpoint.test_checkpoints import Training
run = Training("p_g_os", 2)
checkpointer = gshard.Checkpointer(sys.argv[1], keep_last=2)
if checkpointer.latest_step() is not None:
    run.state = checkpointer.restore(like=run.state).state
print(int(run.state.step), flush=True)
while True:
    (loss,) = run.train(int(run.state.step))
    checkpointer.save(int(run.state.step), run.state, metadata={"loss": loss})
    print("saving", flush=True)
"""


@pytest.mark.parametrize("kills, seed", quick([(25, 0), (25, 1), (4, 4)], [(4, 4)]))
def test_killed_at_any_moment_it_goes_on_from_a_complete_step(address, server, kills, seed):
    """Its losses are those of a run that never stopped."""
    draw, losses = random.Random(seed), Training("p_g_os", 2).train(*range(40))
    environment = clean_environment() | server.environment | {"PYTHONWARNINGS": "ignore"}
    reader, reached = gshard.Checkpointer(address), 0
    for _ in range(kills):
        with subprocess.Popen(
            [sys.executable, "-c", SAVES, address],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            timer = threading.Timer(120, process.kill)
            timer.start()
            line = process.stdout.readline()
            assert line, process.stderr.read()
            assert int(line) >= reached  # it takes the lease of the dead, and goes on
            for _ in range(2):  # a save has begun
                process.stdout.readline()
            threading.Timer(draw.uniform(0, 1), process.kill).start()
            process.stdout.read()
            timer.cancel()
        steps = reader.all_steps()
        reached = max(steps, default=0)
        for step in steps:
            assert reader.verify(step) == []
            if step < len(losses):
                np.testing.assert_allclose(reader.metadata(step)["loss"], losses[step - 1], 2e-6)
    assert reached > 0


def test_what_a_killed_save_left_is_removed_by_the_next_writer(address):
    run = Training("os", 2)
    with gshard.Checkpointer(address) as checkpointer:
        checkpointer.save(1, run.state)
    bucket = Bucket(address)
    for name in bucket.find("1"):
        if name != "manifest.json":  # the commit object, which a killed save did not write
            bucket.copy(f"1/{name}", f"2/{name}")
    with gshard.Checkpointer(address, writes=True) as checkpointer:
        assert checkpointer.all_steps() == [1] and bucket.find("2") == {}
        assert checkpointer.verify(1) == []


def test_what_a_lost_writer_uploads_late_is_removed(address):
    run, bucket = Training("os", 2), Bucket(address)
    with gshard.Checkpointer(address) as checkpointer:
        checkpointer.save(1, run.state, data_state=1)
        checkpointer.wait()
        for name in bucket.find("1").keys() - {"gshard.json", "manifest.json"}:
            bucket.copy(f"1/{name}", f"2/{name}")
        bucket.create("2/.draft/token", b"of the lost one")
        checkpointer.save(2, run.state)
    assert checkpointer.all_steps() == [1, 2] and checkpointer.verify(2) == []


def test_gshard_verify_takes_an_address(address, capsys):
    from gshard.cli.main import main

    run = Training("os", 2)
    with gshard.Checkpointer(address) as checkpointer:
        checkpointer.save(7, run.state)
    assert main(["verify", address, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["directory"] == address and [x["step"] for x in data["steps"]] == [7]
    bucket = Bucket(f"{address}/7")
    bucket.replace("gshard.json", b"{}")
    assert main(["verify", f"{address}/7"]) == 1
    assert "gshard.json has 2 bytes" in capsys.readouterr().out


def test_a_bucket_that_does_not_exist(server, address):
    other = f"{server.scheme}://no-such-bucket/run"
    for call in (
        lambda: gshard.Checkpointer(other).all_steps(),
        lambda: gshard.Checkpointer(other).save(1, Training("os", 2).state),
    ):
        with pytest.raises(gshard.GShardError, match="there is no such bucket. Make it first"):
            call()


def test_what_is_below_a_number_and_not_of_gshard_is_left_alone(address):
    bucket = Bucket(address)
    others = ["2023/arrays/x.npy", "2024/photo.jpg"]
    for name in others:
        bucket.create(name, b"x")
    run = Training("os", 2)
    with gshard.Checkpointer(address) as checkpointer:
        with pytest.raises(gshard.GShardError, match="2024 exists, and gshard did not write it"):
            checkpointer.save(2024, run.state)
        checkpointer.save(2025, run.state)
    assert [bucket.read(name) for name in others] == [b"x", b"x"]
    assert gshard.Checkpointer(address).all_steps() == [2025]


@pytest.mark.parametrize("kind", quick(["500", "503", "slow", "closed"], ["503"]))
def test_a_server_that_fails_now_and_then_is_asked_again(address, through_proxy, kind):
    run, draw, failed = Training("os", 2), random.Random(3), []

    def fault():
        failed.append(draw.random() < 0.1)
        return kind if failed[-1] else None

    through_proxy(fault)
    with gshard.Checkpointer(address, keep_last=2) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, run.state)
        checkpointer.wait()
        assert checkpointer.restore(like=run.state).step == 3
        assert checkpointer.verify(3) == []
    assert sum(failed) > 3


@pytest.mark.slow
def test_a_server_that_is_gone_fails_the_save_and_training_goes_on(address, through_proxy):
    run, gone = Training("os", 2), False
    through_proxy(lambda: "503" if gone else None)
    with gshard.Checkpointer(address, on_failure="warn") as checkpointer:
        checkpointer.save(1, run.state)
        checkpointer.wait()
        gone = True
        with pytest.warns(gshard.GShardWarning, match="step 2 was not saved in .*"):
            checkpointer.save(2, run.state)
            checkpointer.wait()
        run.train(0)
        gone = False
        checkpointer.save(3, run.state)
        checkpointer.wait()
        assert checkpointer.all_steps() == [1, 3]


def test_without_the_package_of_a_store_the_extra_is_named():
    script = (
        "import sys; sys.modules['s3fs'] = None; import gshard; gshard.Checkpointer('s3://b/run')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(), capture_output=True, text=True
    )
    assert "s3:// needs a package that is not installed: pip install 's3fs" in done.stderr


def test_wrong_credentials_are_one_sentence(server, address, monkeypatch, through_proxy):
    """The emulators take any; this is how the stores refuse them."""
    through_proxy(lambda: "403")
    with pytest.raises(gshard.GShardError, match="Check the credentials") as error:
        gshard.Checkpointer(address).all_steps()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("objects", quick([10_000, 20], [20]))
def test_a_store_of_many_objects(server, address, objects):
    """Ten thousand are more than a page of a list."""
    bucket = Bucket(address)
    run_parallel(lambda i: bucket.create(f"1/other{i}", b"x"), range(objects), REQUESTS)
    run = Training("os", 2)
    with gshard.Checkpointer(address) as checkpointer:
        with pytest.raises(gshard.GShardError, match="1 exists, and gshard did not write it"):
            checkpointer.save(1, run.state)
        checkpointer.save(2, run.state)
    assert gshard.Checkpointer(address).all_steps() == [2]
    assert len(bucket.find("1")) == objects


def test_an_outage_is_no_damage(address, monkeypatch):
    """Else an older step is restored, and the good one is set aside."""
    run = Training("p_g_os", 4)
    with gshard.Checkpointer(address) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, run.state)
        checkpointer.wait()

        def fail(*given, **how):
            raise OSError("the server went away")

        with monkeypatch.context() as patch:
            patch.setattr(checkpointer._store._bucket._fs, "cat_file", fail)
            for call in (lambda: checkpointer.restore(like=run.state), checkpointer.verify):
                with pytest.raises(gshard.GShardError, match="the server went away") as error:
                    call()
                assert not isinstance(error.value, gshard.DamagedCheckpointError)
        assert checkpointer.restore(like=run.state).step == 2
        checkpointer.save(3, run.state)
        checkpointer.wait()
        assert checkpointer.all_steps() == [1, 2, 3]


def test_a_lease_of_the_same_number_is_not_ones_own(address, monkeypatch):
    """Its object was deleted, and a third took the first number again."""
    first, third = Lease(Bucket(address)), Lease(Bucket(address))
    first.take()
    Bucket(address).delete([f"{lease.FOLDER}/1"])
    third.take()
    assert third.is_held() and not first.is_held()
    first.release()
    assert third.is_held()
    third.release()


def test_a_draft_that_was_removed_is_not_committed(address, monkeypatch):
    run, writing, commit = Training("os", 2), threading.Event(), Bucket.create

    def wait(self, name, content):
        if name.endswith("arrays/_METADATA"):
            writing.wait(60)
        commit(self, name, content)

    monkeypatch.setattr(Bucket, "create", wait)
    checkpointer = gshard.Checkpointer(address)
    checkpointer.save(1, run.state)
    checkpointer._store.delete(1)
    writing.set()
    with pytest.raises(gshard.SaveFailedError):
        checkpointer.wait()
    assert checkpointer.all_steps() == []


def test_the_address_of_a_step_is_no_address_of_steps(address):
    with gshard.Checkpointer(address) as checkpointer:
        checkpointer.save(5, Training("os", 2).state)
    said = rf"5 of the checkpoints in {address}\. .*Checkpointer\('{address}'\).restore\(step=5"
    with pytest.raises(gshard.GShardError, match=said):
        gshard.Checkpointer(f"{address}/5/")
    assert gshard.Checkpointer(f"{address}/6").all_steps() == []


def test_a_step_directly_in_a_bucket(server, address):
    root = f"{server.scheme}://bucket"
    with gshard.Checkpointer(root) as checkpointer:
        checkpointer.save(3, Training("os", 2).state)
    store, step = open_step_or_store(f"{root}/3/")
    assert (str(store), step) == (root, 3)
    Bucket(root).delete(["3/manifest.json"])  # incomplete: `gshard verify` says so of step 3
    assert open_step_or_store(f"{root}/3")[1] == 3
    checkpointer._store.delete(3)


def test_a_local_tier_beside_a_store(address, tmp_path):
    """The newest of both is restored; without the machine's folder, what the store has."""
    run, local = Training("os", 2), tmp_path / "local"
    folders = {"every": 2, "local": local, "local_every": 1}
    held = {}
    with pytest.warns(gshard.GShardWarning, match="step, 3, is only in .*local"):
        with gshard.Checkpointer(address, **folders) as checkpointer:
            for step in (1, 2, 3):
                run.train(step - 1)
                held[step] = run.whole()
                checkpointer.save(step, run.state)
    for step, source in ((3, str(local)), (2, address)):
        restored = gshard.Checkpointer(address, **folders).restore(like=run.state)
        assert (restored.step, restored.source) == (step, source)
        run.state = restored.state
        assert_equal_bits(run.whole(), held[step])
        shutil.rmtree(local, ignore_errors=True)
