"""`DataLoader` and `global_batches` in one process: every row once, found again, errors."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import subprocess
import sys
import threading
import time
import types
import warnings
from collections import OrderedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard
from gshard import CallOrderError, DataLoader, GShardError, global_batches


def plan_on(devices=8, replica=1, **options):
    mesh = gshard.make_mesh(replica=replica, devices=jax.devices()[:devices], **options)
    return gshard.shard_train_state(({"w": jnp.ones(16)}, optax.sgd(0.1)), mesh, "dp")[1]


PLAN = plan_on()


def data(length=50):
    return {"x": np.arange(length * 3, dtype=np.float32).reshape(length, 3), "y": np.arange(length)}


def rows_of(loader):
    return [np.asarray(batch["y"]).tolist() for batch in loader]


def order_of(seed, epoch):
    entropy = np.random.SeedSequence(seed, spawn_key=(epoch,))
    return np.random.default_rng(entropy).permutation(50)


def threads():
    """The threads of loaders that this test has started; others may still hold an iterator."""
    return [t for t in every_thread() if t not in earlier]


def every_thread():
    return [t for t in threading.enumerate() if t.name.startswith("gshard-loader")]


earlier: list[threading.Thread] = []


@pytest.fixture(autouse=True)
def _note_earlier_threads():
    earlier[:] = every_thread()


class Items:
    """A dataset in PyTorch's form; a row in `broken` cannot be read."""

    def __init__(self, length=50, broken=()):
        self.length, self.broken = length, broken

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if i in self.broken:
            raise OSError("no such file")
        return {"x": np.arange(3, dtype=np.float32) + 3 * i, "y": i}


class Stored:
    """An array in a file, as of h5py: several entries are read in their order, and each once."""

    def __init__(self, array):
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype=None, copy=None):
        return self._array

    def __getitem__(self, index):
        if np.ndim(index) and (np.diff(index) <= 0).any():
            raise TypeError("Indexing elements must be in increasing order")
        return self._array[index]


class Column(Stored):
    """A column of a table, as of pandas: `x[i]` is the entry with the label i."""

    iloc = None

    def __len__(self):
        return len(self._array)


class Frame:
    """A table, as of pandas: `x[i]` is a column."""

    iloc = None

    def __len__(self):
        return 50

    def __getitem__(self, name):
        raise KeyError(name)

    def __iter__(self):
        return iter(["x"])


# ---- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices, replica", [(1, 1), (3, 1), (5, 1), (8, 1), (4, 2), (6, 3)])
def test_every_row_once_in_an_order_of_seed_and_epoch(devices, replica):
    plan = plan_on(devices, replica)
    loader = DataLoader(data(), 2 * devices, plan, seed=7)
    assert len(loader) == 50 // (2 * devices)
    for epoch in range(2):
        order = order_of(7, epoch)
        assert loader.epoch == epoch
        for i, batch in enumerate(loader):
            wanted = order[i * 2 * devices : (i + 1) * 2 * devices]
            assert batch["x"].sharding.is_equivalent_to(
                jax.sharding.NamedSharding(plan.mesh, plan.batch_spec), 2
            )
            np.testing.assert_array_equal(batch["y"], wanted)
            np.testing.assert_array_equal(batch["x"], data()["x"][wanted])
        assert i == len(loader) - 1


def test_it_prints_where_it_is():
    loader = DataLoader(data(), 8, PLAN)
    next(iter(loader))
    assert repr(loader) == "DataLoader(50 examples in batches of 8, epoch=0, position=1)"


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_reading_ahead_changes_nothing(prefetch):
    wanted = rows_of(DataLoader(data(), 8, PLAN, num_epochs=3, prefetch=2))
    assert rows_of(DataLoader(data(), 8, PLAN, num_epochs=3, prefetch=prefetch)) == wanted
    assert len(wanted) == 18


def test_sources_of_every_kind_give_the_same(tmp_path):
    np.save(tmp_path / "x.npy", data()["x"])
    mapped = {"x": np.load(tmp_path / "x.npy", mmap_mode="r"), "y": data()["y"]}
    wanted = [np.asarray(batch["x"]) for batch in DataLoader(data(), 16, PLAN)]
    for source in (
        mapped,
        Items(),
        [Items()[i] for i in range(50)],
        jax.tree.map(jnp.array, data()),
        jax.tree.map(Stored, data()),
    ):
        found = [np.asarray(batch["x"]) for batch in DataLoader(source, 16, PLAN)]
        np.testing.assert_array_equal(found, wanted)


def test_a_tuple_of_arrays_is_a_tree_and_a_list_is_of_examples():
    batch = next(iter(DataLoader((data()["x"], data()["y"]), 8, PLAN)))
    assert [x.shape for x in batch] == [(8, 3), (8,)]
    batch = next(iter(DataLoader([(1.0, np.ones(2))] * 9, 8, PLAN)))
    assert [x.shape for x in batch] == [(8,), (8, 2)]


def test_a_map_dataset_of_grain():
    grain = pytest.importorskip("grain")
    source = grain.MapDataset.source(range(50)).map(lambda i: {"y": i, "x": np.float32(i) / 2})
    assert rows_of(DataLoader(source, 8, PLAN, seed=1)) == rows_of(
        DataLoader(data(), 8, PLAN, seed=1)
    )


def test_examples_that_are_never_read_are_said():
    for source, words in [
        (data(40), "the last 16 of 40 examples are never read.*drop_remainder=False reads"),
        (data(41), "the last 17 of 41 examples.*pad_last=True reads"),
        (data(41)["x"], "the last 17 of 41 examples.*Make each example a dictionary"),
    ]:
        with pytest.warns(gshard.GShardWarning, match=words):
            DataLoader(source, 24, PLAN, shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in (
            {"drop_remainder": True},
            {"drop_remainder": False},
            {"pad_last": True},
            {"shuffle": True},
        ):
            DataLoader({"x": data(40)["x"]}, 24, PLAN, **({"shuffle": False} | options))
        DataLoader(data(48), 24, PLAN, shuffle=False)
        DataLoader(Items(sys.maxsize), 24, PLAN, shuffle=False)


def test_the_remainder_is_dropped_or_a_smaller_batch():
    assert [len(x) for x in rows_of(DataLoader(data(40), 24, PLAN))] == [24]
    loader = DataLoader(data(40), 24, PLAN, drop_remainder=False)
    found = rows_of(loader)
    assert len(loader) == 2 and [len(x) for x in found] == [24, 16]
    assert sorted(sum(found, [])) == list(range(40))


@pytest.mark.parametrize(("devices", "length", "size"), [(8, 50, 16), (3, 10, 9), (5, 4, 10)])
@pytest.mark.parametrize("as_items", [False, True])
def test_the_last_batch_is_filled_with_its_own_examples_and_masked(devices, length, size, as_items):
    source = [{"y": i} for i in range(length)] if as_items else {"y": np.arange(length)}
    loader = DataLoader(source, size, plan_on(devices), pad_last=True, num_epochs=2)
    batches = [{k: np.asarray(x) for k, x in batch.items()} for batch in loader]
    assert len(batches) == 2 * len(loader) == 2 * -(-length // size)
    for epoch in (batches[: len(loader)], batches[len(loader) :]):
        assert all(batch["y"].shape == batch["mask"].shape == (size,) for batch in epoch)
        kept = [batch["y"][batch["mask"]].tolist() for batch in epoch]
        assert sorted(sum(kept, [])) == list(range(length))
        assert set(epoch[-1]["y"].tolist()) == set(kept[-1])
    # The same positions as those of a smaller last batch.
    if length % devices == 0:
        DataLoader(source, size, plan_on(devices), drop_remainder=False).load_state_dict(
            loader.state_dict()
        )


def test_no_shuffle_is_the_order_of_the_source_and_none_has_no_end():
    loader = iter(DataLoader(data(16), 8, PLAN, shuffle=False, num_epochs=None))
    assert [int(next(loader)["y"][0]) for _ in range(7)] == [0, 8] * 3 + [0]


def test_a_transform_draws_for_each_row_and_epoch_the_same_whoever_reads_it():
    def noisy(example, rng):
        return {"y": example["y"], "n": rng.integers(1 << 30)}

    def drawn(batch_size, plan, source):
        loader = DataLoader(source, batch_size, plan, transform=noisy, num_epochs=2)
        pairs = [zip(b["y"].tolist(), b["n"].tolist(), strict=True) for b in loader]
        return [pair for batch in pairs for pair in batch]

    wanted = drawn(10, plan_on(5), data())
    assert len({n for _, n in wanted}) == 100
    assert drawn(25, plan_on(5), Items()) == wanted
    batch = next(iter(DataLoader(data(), 8, PLAN, transform=lambda e: e["x"].sum())))
    assert batch.shape == (8,)


def test_a_source_may_give_one_buffer_for_every_row():
    class Reused(Items):
        row = {"x": np.zeros(3, np.float32), "y": np.zeros((), int)}

        def __getitem__(self, i):
            self.row["x"][:] = 3 * i + np.arange(3)
            self.row["y"][...] = i
            return self.row

    for options in ({}, {"transform": lambda example: example}):
        found = rows_of(DataLoader(Reused(), 8, PLAN, **options))
        assert found == rows_of(DataLoader(data(), 8, PLAN))


def test_a_transform_may_write_into_its_example():
    def doubled(example):
        example["x"] *= 2
        return example

    for source in (data(), [{"x": np.ones(3) * i, "y": i} for i in range(50)]):
        loader = DataLoader(source, 8, PLAN, transform=doubled, num_epochs=2)
        kept = jax.tree.map(np.array, source)
        for batch in loader:
            first = 6 if isinstance(source, dict) else 2
            np.testing.assert_array_equal(batch["x"][:, 0], first * batch["y"])
        jax.tree.map(np.testing.assert_array_equal, source, kept)


def test_a_number_of_an_array_can_be_a_key():
    squares = {y: y * y for y in range(8)}
    for y in (np.arange(8), jnp.arange(8)):
        batch = next(iter(DataLoader({"y": y}, 8, PLAN, transform=lambda e: squares[e["y"]])))
        assert sorted(batch.tolist()) == sorted(squares.values())


def test_rng_that_the_user_gave_stays():
    def noisy(example, rng):
        assert rng is None
        return example

    noisy = functools.partial(noisy, rng=None)
    assert rows_of(DataLoader(data(), 8, PLAN, transform=noisy)) == rows_of(
        DataLoader(data(), 8, PLAN)
    )


def test_seeds_of_more_than_32_bits_have_orders_of_their_own():
    found = [rows_of(DataLoader(data(), 8, PLAN, seed=s, num_epochs=2)) for s in (1, 1 + 2**32)]
    epochs = {str(rows[i : i + 6]) for rows in found for i in (0, 6)}
    assert len(epochs) == 4


def test_it_trains():
    state, plan = gshard.shard_train_state(
        ({"w": jnp.zeros(3)}, optax.sgd(0.1)), gshard.make_mesh(), "dp"
    )
    step = gshard.make_train_step(lambda p, b: ((b["x"] @ p["w"] - b["z"]) ** 2).mean(), plan)
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    for batch in DataLoader({"x": x, "z": x @ np.ones(3, np.float32)}, 32, plan, num_epochs=20):
        state, metrics = step(state, batch)
    assert float(metrics["loss"]) < 1e-2


# ---- state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 5, 6, 7, 11, 12])
@pytest.mark.parametrize("devices", [8, 2])
def test_it_goes_on_bit_by_bit(stop, devices):
    wanted = rows_of(DataLoader(data(), 8, PLAN, seed=2, num_epochs=2))
    third = rows_of(DataLoader(data(), 8, PLAN, seed=2, num_epochs=4))[12:]
    loader = DataLoader(data(), 8, PLAN, seed=2, num_epochs=2, prefetch=4)
    walk = iter(loader)
    assert [np.asarray(next(walk)["y"]).tolist() for _ in range(stop)] == wanted[:stop]
    state = loader.state_dict()
    assert all(type(x) is int for x in state.values())
    later = DataLoader(data(), 8, plan_on(devices), seed=2, num_epochs=2)
    later.load_state_dict({name: np.array(x) for name, x in state.items()})  # as restored
    if stop < 12:
        assert rows_of(later) == wanted[stop:]
    else:
        with pytest.warns(gshard.GShardWarning, match=r"starts 2 more.* `if loader.epoch < 2`"):
            assert rows_of(later) == third
    assert later.epoch == (2 if stop < 12 else 4)


def test_a_for_goes_on_where_the_last_one_was_left():
    loader, wanted = DataLoader(data(), 8, PLAN), rows_of(DataLoader(data(), 8, PLAN))
    for batch in loader:
        assert np.asarray(batch["y"]).tolist() == wanted[0]
        break
    assert rows_of(loader) == wanted[1:]


def test_a_for_left_at_its_last_batch_is_over():
    wanted = rows_of(DataLoader(data(), 8, PLAN, num_epochs=2))
    loader = DataLoader(data(), 8, PLAN)
    given = [np.asarray(b["y"]).tolist() for b in itertools.islice(loader, len(loader))]
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (1, 0)
    assert given + rows_of(loader) == wanted
    assert loader.epoch == 2


def test_a_loader_has_one_position():
    loader = DataLoader(data(), 8, PLAN)
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    with pytest.raises(CallOrderError, match="make a second one"):
        next(first)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(CallOrderError, match="a state was loaded"):
        next(second)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"seed": 1}, "seed=1, and this one has seed=0"),
        ({"length": 51}, "a source of 51 examples"),
        ({"batch_size": 16}, "batch_size=16, and"),
        ({"shuffle": 0}, "shuffle=False"),
        ({"drop_remainder": 0}, "drop_remainder=False"),
        ({"checksum": 1}, "not those of the saved run: their first or last example differs"),
        ({"position": 7}, "position is 7, and an epoch has 6"),
        ({"position": -1}, "position"),
        ({"epoch": "x"}, "epoch"),
        ({"other": 1}, "added other"),
    ],
)
def test_another_state_is_refused_by_name(changed, said):
    loader = DataLoader(data(), 8, PLAN)
    with pytest.raises(GShardError) as caught:
        loader.load_state_dict({**loader.state_dict(), **changed})
    assert said in str(caught.value)
    with pytest.raises(GShardError, match="is not what"):
        loader.load_state_dict(None)
    assert loader.state_dict()["position"] == 0


# ---- the thread ---------------------------------------------------------------------------------


def gone():
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not threads()


def test_no_thread_is_left():
    loader = DataLoader(data(), 8, PLAN, num_epochs=None)
    walk = iter(loader)
    next(walk)
    assert len(threads()) == 1
    del walk
    gc.collect()
    assert gone()
    rows_of(DataLoader(data(), 8, PLAN))
    assert gone()


def test_prefetch_has_no_most():
    assert len(rows_of(DataLoader(data(), 8, PLAN, prefetch=10**30))) == 6


def test_a_script_that_fails_does_not_wait_for_what_is_read_ahead(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import time\n"
        "import jax.numpy as jnp, numpy as np, optax, gshard\n"
        "class Slow:\n"
        "    def __len__(self):\n"
        "        return 64\n"
        "    def __getitem__(self, i):\n"
        "        time.sleep(2 * (i > 8))\n"
        "        return np.float32(i)\n"
        "params = {'w': jnp.ones(3)}\n"
        "plan = gshard.shard_train_state((params, optax.sgd(0.1)), gshard.make_mesh(), 'dp')[1]\n"
        "for batch in gshard.DataLoader(Slow(), 8, plan, shuffle=False):\n"
        "    print('failing', time.time(), flush=True)\n"
        "    raise RuntimeError('mine')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    ended = time.time()
    assert done.returncode == 1 and "RuntimeError: mine" in done.stderr
    assert ended - float(done.stdout.split()[1]) < 10


def test_an_error_comes_where_its_batch_is_due():
    order = order_of(0, 0)
    source = Items(broken={int(order[17])})
    loader = DataLoader(source, 8, PLAN)
    walk = iter(loader)
    for _ in range(2):
        next(walk)
    with pytest.raises(OSError, match="no such file") as caught:
        next(walk)
    notes = " ".join(caught.value.__notes__)
    assert f"example {order[17]} of the source" in notes and "batch 2 of epoch 0" in notes
    assert loader.state_dict()["position"] == 2 and gone()
    source.broken = ()
    assert len(rows_of(loader)) == 4


class OneAtATime(Items):
    """Its examples are in a file with one position, as those of many datasets are."""

    inside = reads = 0

    def __getitem__(self, i):
        assert not self.inside
        self.inside, self.reads = 1, self.reads + 1
        time.sleep(0.5 * (self.reads == 1 + 8 + 1))  # in the thread, for the second batch
        self.inside = 0
        return super().__getitem__(i)


def test_a_for_after_a_break_does_not_read_beside_the_thread_of_the_one_before():
    loader = DataLoader(OneAtATime(), 8, PLAN)
    for _ in loader:
        time.sleep(0.1)  # the thread begins the second batch
        break
    assert len(rows_of(loader)) == 5


def test_a_copy_of_a_loader_reads_by_itself():
    loader = DataLoader(data(), 8, PLAN, num_epochs=1)
    assert rows_of(copy.deepcopy(loader)) == rows_of(loader)


def test_a_script_that_ends_does_not_leave_a_thread_inside_xla(tmp_path):
    """An example takes 0.2 s and a batch 13 s: the end waits for the example alone."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, time\n"
        "atexit.register(lambda: print(time.time() - ending, flush=True))\n"  # called last
        "import jax.numpy as jnp, numpy as np, optax, gshard\n"
        "def slow(x):\n"
        "    end = time.monotonic() + 0.2 * (x > 64)\n"
        "    while time.monotonic() < end:\n"
        "        (jnp.ones((300, 300)) @ jnp.ones((300, 300))).block_until_ready()\n"
        "    return x\n"
        "params = {'w': jnp.ones(3)}\n"
        "plan = gshard.shard_train_state((params, optax.sgd(0.1)), gshard.make_mesh(), 'dp')[1]\n"
        "options = {'shuffle': False, 'transform': slow}\n"
        "next(iter(gshard.DataLoader(np.arange(256.0), 64, plan, **options)))\n"
        "ending = time.time()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 7


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_thread_has_the_width_of_numbers_of_the_loop(prefetch):
    with jax.enable_x64(True):
        batch = next(iter(DataLoader(np.arange(8) + 2**40, 8, PLAN, prefetch=prefetch)))
    assert sorted(np.asarray(batch).tolist()) == [2**40 + i for i in range(8)]


def test_no_more_than_asked_is_read_ahead():
    read = []

    class Counted(Items):
        def __getitem__(self, i):
            read.append(i)
            return super().__getitem__(i)

    walk = iter(DataLoader(Counted(), 8, PLAN, prefetch=2))
    next(walk)
    time.sleep(0.3)
    assert len(read) == 1 + 3 * 8  # the first example, the batch given and two more
    del walk
    assert gone()


# ---- wrong input --------------------------------------------------------------------------------


class Endless(Items):
    def __len__(self):
        raise TypeError("no end")


def odd_one(i, example):
    return [example if j == i else Items()[j] for j in range(50)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            (data(), 12, PLAN),
            "not a multiple of the 8 devices that they are sharded over. Use 8 or 16",
        ),
        ((data(), 0, PLAN), "batch_size=0"),
        ((data(), 8.0, PLAN), "batch_size=8.0"),
        ((data(), 8, "plan"), "DataLoader(source, batch_size, plan) was called with 'plan'"),
        ((data(0), 8, PLAN), "the source is empty"),
        (([], 8, PLAN), "the source is empty"),
        ((data(7), 8, PLAN), "fewer than batch_size=8"),
        (({**data(), "y": np.arange(49)}, 8, PLAN), "source['y'] has 49 examples and source['x']"),
        (({"x": np.ones(())}, 8, PLAN), "source['x'] is a single number"),
        (({"x": 3}, 8, PLAN), "no examples that can be read by index"),
        ((iter([1]), 8, PLAN), "use gshard.global_batches"),
        (("text", 8, PLAN), "no examples that can be read by index"),
        ((Endless(), 8, PLAN), "len(source) of a Endless is not known"),
        (({"x": [1, 2]}, 8, PLAN), "lists in it must be arrays"),
        (({"x": np.array([1, "a"] * 8, object)}, 8, PLAN), "source['x'] has dtype object"),
        (({"x": np.zeros(8, [("a", int)])}, 8, PLAN), "source['x'] has dtype [('a',"),
        (({"x": jax.random.split(jax.random.key(0), 8)}, 8, PLAN), "source['x'] contains keys"),
        ((data() | {"y": Column(np.arange(50))}, 8, PLAN), "source['y'] is a Column"),
        ((Frame(), 8, PLAN), "source is a Frame (tests.data.test_loader), which is indexed by la"),
        ((types.MappingProxyType({"x": np.ones(8)}), 8, PLAN), "by name, pass dict(source)"),
        (([None] * 8, 8, PLAN), "holds no number"),
        (([{"s": "text"}] * 8, 8, PLAN), "source[0]['s'] has dtype"),
    ],
)
def test_wrong_arguments(arguments, said):
    with pytest.raises(GShardError) as caught:
        DataLoader(*arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"shuffle": 1}, "shuffle=1"),
        ({"transform": lambda e, key: e}, "an argument 'key' that it is not given"),
        ({"transform": lambda e: None}, "transform(source[0]) is None"),
        ({"num_epochs": 0}, "num_epochs=0"),
        ({"drop_remainder": 2}, "drop_remainder=2"),
        ({"drop_remainder": False}, "Give 48 or 56 examples instead of 50"),
        ({"drop_remainder": False}, "pad_last=True"),
        ({"pad_last": 1}, "pad_last=1"),
        ({"pad_last": True, "drop_remainder": True}, "contradict each other"),
        ({"pad_last": True, "transform": lambda e: e["x"]}, "dictionary without one; transform"),
        ({"pad_last": True, "transform": lambda e: e | {"mask": 1}}, "has 'mask' already"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"transform": 3}, "transform=3 is not a function"),
    ],
)
def test_wrong_options(options, said):
    with pytest.raises(GShardError) as caught:
        DataLoader(data(), 8, PLAN, **options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ({"x": np.ones(3, np.float32)}, "source[30] is another tree than source[0]: missing y"),
        ({"x": np.ones(4, np.float32), "y": 1}, "source[30]['x'] is float32[4]"),
        ({"x": np.ones(3, np.float32), "y": 1.0}, "source[30]['y'] is float64[]"),
        (None, "source[30] is another tree"),
    ],
)
def test_examples_that_differ(example, said):
    with pytest.raises(GShardError) as caught:
        rows_of(DataLoader(odd_one(30, example), 8, PLAN, drop_remainder=True, num_epochs=2))
    assert said in str(caught.value)


def test_the_first_row_has_a_note_too():
    with pytest.raises(OSError, match="no such file") as caught:
        DataLoader(Items(broken={0}), 8, PLAN)
    assert "example 0 of the source" in caught.value.__notes__[0]


def test_an_abstract_mesh_has_no_devices():
    mesh = jax.sharding.AbstractMesh((8,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,))
    plan = gshard.shard_train_state(({"w": jnp.ones(16)}, optax.sgd(0.1)), mesh, "dp")[1]
    for call in (lambda: DataLoader(data(), 8, plan), lambda: global_batches([], plan)):
        with pytest.raises(GShardError, match="abstract mesh"):
            call()


# ---- batches that come one after the other ------------------------------------------------------


def test_global_batches_of_what_has_its_own_order():
    found = list(global_batches(({"y": np.arange(8) + i} for i in range(3)), PLAN))
    assert [int(batch["y"][0]) for batch in found] == [0, 1, 2]
    assert found[0]["y"].sharding.device_set == set(jax.devices())
    for wrong in (3, data(), "text", (data()["x"], data()["y"]), Frame(), data()["x"]):
        with pytest.raises(GShardError, match="does not give batches one by one"):
            global_batches(wrong, PLAN)
    assert len(list(global_batches((data(8), data(8)), PLAN))) == 2  # a tuple of batches
    with pytest.raises(GShardError, match="as the plan"):
        global_batches([], None)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_generator_may_fill_one_buffer(platform):
    def fill():
        apart = np.zeros(64 + 4096 * 16 * 4, np.uint8)
        start = -apart.ctypes.data % 64  # JAX takes over what is aligned like this
        buffer = apart[start : start + 4096 * 16 * 4].view(np.float32).reshape(4096, 16)
        for i in range(3):
            buffer[:] = i
            yield {"x": buffer}

    for plan in (PLAN, plan_on(1)):
        group = dataclasses.replace(plan.group, platform=platform)
        plan = dataclasses.replace(plan, group=group)
        assert [float(b["x"].max()) for b in list(global_batches(fill(), plan))] == [0, 1, 2]


def test_an_iterator_of_grain_keeps_its_state():
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.source(range(64)).shuffle(seed=1).batch(8).to_iter_dataset()
    wanted = [np.asarray(x).tolist() for x in global_batches(dataset, PLAN)]
    batches = iter(dataset)
    walk = global_batches(batches, PLAN)
    assert [np.asarray(next(walk)).tolist() for _ in range(3)] == wanted[:3]
    later = iter(dataset)
    later.set_state(batches.get_state())
    assert [np.asarray(x).tolist() for x in global_batches(later, PLAN)] == wanted[3:]


# ---- fewer devices ------------------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "counts"), [(8, [3, 1, 3]), (6, [2, 1, 4]), (2, [6, 3, 12])])
def test_micro_batches_follow_from_what_a_device_may_take(devices, counts):
    loader = DataLoader(data(), 24, plan_on(devices))
    assert [loader.micro_batches(most) for most in (2, 4, 1)] == counts
    with pytest.raises(GShardError, match="examples_per_device=0"):
        loader.micro_batches(0)


def test_a_batch_that_does_not_fit_says_how_many_machines_would(monkeypatch):
    plan = plan_on(6)
    monkeypatch.setenv("GSHARD_NNODES", "3 of 2:4")
    with pytest.raises(GShardError, match="3 machines of 2 devices, and 16 examples fit 2 or 4 ma"):
        DataLoader(data(), 16, plan)
    with pytest.raises(GShardError, match="No number of machines from 2 to 4, of 2 devices each,"):
        DataLoader(data(), 14, plan)
    monkeypatch.delenv("GSHARD_NNODES")
    with pytest.raises(GShardError, match=r"Use 12 or 18\.$"):
        DataLoader(data(), 16, plan)


def test_a_source_without_an_end_is_not_shuffled():
    class Endless:
        def __len__(self):
            return sys.maxsize

        def __getitem__(self, index):
            return {"x": np.float32(index)}

    with pytest.raises(GShardError, match="has no end, so its examples cannot be shuffled"):
        DataLoader(Endless(), 8, PLAN)


def test_examples_whose_keys_have_another_order():
    a, b = OrderedDict(a=np.ones(2), b=np.ones(2)), OrderedDict(b=np.ones(2), a=np.ones(2))
    loader = DataLoader([a] * 15 + [b], 16, PLAN, shuffle=False)
    with pytest.raises(GShardError, match=r"OrderedDict\[\('b', 'a'\)\].* in place of"):
        next(iter(loader))
