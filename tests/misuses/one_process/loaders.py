"""`DataLoader` and `global_batches`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import gshard
from tests.misuses.small import BATCH, Tensor, kept
from tests.misuses.table import raw, refused, right, warned

DATA = {"x": np.arange(32, dtype=np.float32), "i": np.arange(32)}


def loader(source: Any = None, size: Any = 8, **options: Any) -> Any:
    source = DATA if source is None else source
    return gshard.DataLoader(source, size, kept()[1], **({"shuffle": False} | options))


def first(source: Any = None, **options: Any) -> Any:
    return next(iter(loader(source, **options)))


def two_at_once(_):
    own = loader()
    for _ in zip(own, own, strict=False):
        pass


def loaded_while_running(_):
    own = loader()
    it = iter(own)
    next(it)
    own.load_state_dict(own.state_dict())
    next(it)


def broken_off(_):
    """After a break the next `for` goes on where the first one was."""
    own = loader()
    for _ in own:
        break
    return next(iter(own))["i"], np.arange(8, 16)


def emptied(_):
    """A `for` after the last epoch begins the next."""
    own = loader(num_epochs=1)
    return (len(list(own)), len(list(own))), (4, 4)


def restored(change: Any, **options: Any) -> Any:
    own = loader(**options)
    own.load_state_dict(change(own.state_dict()))
    return own


def finished_twice(num_epochs: int) -> Any:
    """A script that has trained to its end, and is started again."""
    own = restored(lambda s: {**s, "epoch": 3}, num_epochs=num_epochs)
    for _ in range(own.epoch, 3) if num_epochs == 1 else [0]:
        list(own)
    return own.epoch, 3


@dataclass
class Row:
    x: Any
    y: Any


class Uneven:
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return np.zeros(i % 3 + 1)


class Endless:
    def __getitem__(self, i):
        return np.zeros(3)


class Fails:
    def __len__(self):
        return 16

    def __getitem__(self, i):
        raise OSError("the disk is gone")


def global_of(batches: Any) -> Any:
    return list(gshard.global_batches(batches, kept()[1]))


ROWS = {
    "batch_size=0": refused(lambda _: loader(size=0), "batch_size=0", "1 or more"),
    "batch_size=8.0": refused(lambda _: loader(size=8.0), "batch_size=8.0"),
    "token ids as Python lists, as Hugging Face's datasets give them": refused(
        lambda _: loader([{"ids": [1, 2, 3]} for _ in range(8)]),
        *("source[0]['ids'] is a Python list of 3", "with_format"),
    ),
    "arguments of PyTorch's DataLoader": refused(
        lambda _: loader(num_workers=2),
        *("num_workers", "prefetch="),
        error=gshard.ArgumentTypeError,
    ),
    "a sampler": refused(
        lambda _: loader(sampler=range(8)), "full dataset", error=gshard.ArgumentTypeError
    ),
    "no plan": refused(
        lambda _: gshard.DataLoader(DATA, 8),
        "plan of shard_train_state",
        error=gshard.ArgumentTypeError,
    ),
    "batch_size=12 on 8 devices": refused(
        lambda _: loader(size=12), "batch_size=12", "8 devices", "Use 8 or 16"
    ),
    "a batch larger than the data": refused(
        lambda _: loader(size=64), "32 examples", "batch_size=64", "pad_last=True"
    ),
    "a last batch that does not divide": refused(
        lambda _: loader({"x": np.zeros(30)}, drop_remainder=False), "last batch", "8 devices"
    ),
    "batch_size and plan are swapped": refused(
        lambda _: gshard.DataLoader(DATA, kept()[1], 8), "DataLoader(source, batch_size, plan)"
    ),
    "the mesh instead of the plan": refused(
        lambda _: gshard.DataLoader(DATA, 8, gshard.make_mesh()), "a Mesh as the plan"
    ),
    "seed=-1": refused(lambda _: loader(seed=-1), "seed=-1", "0 or more"),
    "a key as the seed": refused(lambda _: loader(seed=jax.random.key(0)), "seed="),
    "seed=None": refused(lambda _: loader(seed=None), "seed=None"),
    "shuffle='yes'": refused(lambda _: loader(shuffle="yes"), "shuffle='yes'", "True or False"),
    "num_epochs=0": refused(lambda _: loader(num_epochs=0), "num_epochs=0", "1 or more"),
    "prefetch=-1": refused(lambda _: loader(prefetch=-1), "prefetch=-1"),
    "transform= that is no function": refused(lambda _: loader(transform=3), "transform=3"),
    "transform= that returns nothing": refused(
        lambda _: first(transform=lambda x: None), "transform"
    ),
    "transform= of three arguments": refused(
        lambda _: first(transform=lambda a, b, c: a), "transform"
    ),
    "no data": refused(lambda _: loader([]), "the source is empty"),
    "None as the data": refused(lambda _: gshard.DataLoader(None, 8, kept()[1]), "None"),
    "text as the data": refused(lambda _: loader("data.npy"), "'data.npy'"),
    "a generator as the data": refused(
        lambda _: loader(x for x in range(3)), "a generator", "len(source)"
    ),
    "data without a length": refused(lambda _: loader(Endless()), "a Endless", "len"),
    "a set as the data": refused(lambda _: loader({1, 2, 3}), "a set"),
    "a scalar beside arrays": refused(lambda _: loader({**DATA, "n": 3}), "n"),
    "arrays of different lengths": refused(
        lambda _: loader({**DATA, "y": np.zeros(31)}), "31", "32"
    ),
    "texts as the data": refused(lambda _: first({"t": np.array(["a"] * 16)}), "'t'", "<U1"),
    "a masked array as the data": refused(
        lambda _: first({"x": np.ma.masked_array(np.zeros(16), mask=True)}), "masked", "filled(0)"
    ),
    "int64 beyond 32 bits in the data": refused(
        lambda _: first({"x": np.full(16, 2**40)}), str(2**40), "int32"
    ),
    "PyTorch's tensors as the data": refused(
        lambda _: first({"x": Tensor(np.zeros((16, 2)))}), "Tensor", "np.asarray"
    ),
    "examples of different shapes": refused(lambda _: first(Uneven()), "shape"),
    "examples that cannot be read": raw(lambda _: first(Fails()), OSError, "the disk is gone"),
    "a list of the arrays of inputs and targets": refused(
        lambda _: loader(list(DATA.values())), "2 examples", "as a tuple or a dictionary"
    ),
    "pad_last=True with examples that are one array": refused(
        lambda _: loader(DATA["x"], pad_last=True), "source[0] is one array", "transform="
    ),
    "pad_last=True and drop_remainder=True": refused(
        lambda _: loader(pad_last=True, drop_remainder=True), "contradict each other", "Leave one"
    ),
    "examples of a dataclass that is no pytree": refused(
        lambda _: loader([Row(1, 2)] * 8), "source[0] is a Row", "jax.tree_util.register_dataclass"
    ),
    "two iterations of one loader at once": refused(two_at_once, "another one of the same loader"),
    "a state is loaded during an iteration": refused(loaded_while_running, "a state was loaded"),
    "a break, and another for": right(broken_off),
    "another for after the last epoch": right(emptied),
    "next of a loader": raw(lambda _: next(loader()), TypeError, "not an iterator"),
    "the state of another loader": refused(
        lambda _: restored(lambda s: {**s, "seed": 7}), "seed=7", "seed=0"
    ),
    "a state that lacks an entry": refused(
        lambda _: restored(lambda s: {"epoch": 0}), "missing", "position"
    ),
    "a state that is a number": refused(lambda _: restored(lambda s: 3), "load_state_dict", "3"),
    "a state with a negative position": refused(
        lambda _: restored(lambda s: {**s, "position": -1}), "position", "0 or more"
    ),
    "a state beyond the epoch": refused(
        lambda _: restored(lambda s: {**s, "position": 99}), "99", "4 batches"
    ),
    "the state of a finished for of 3 epochs": warned(
        lambda _: finished_twice(3), "starts 3 more.", "`if loader.epoch < 3`"
    ),
    "the state of a finished loop over 3 epochs": right(lambda _: finished_twice(1)),
    "a loader's state with the data in another order": refused(
        lambda _: loader({name: x[::-1] for name, x in DATA.items()}).load_state_dict(
            loader().state_dict()
        ),
        *("not those of the saved run", "Give the loader the same data in the same order"),
    ),
    "a short last batch for global_batches": refused(
        lambda _: global_of([BATCH, {name: x[:5] for name, x in BATCH.items()}]),
        *("5 examples", "another loader may drop it (drop_remainder=True)"),
    ),
    "one batch for global_batches": refused(
        lambda _: global_of(BATCH), "batches=a dict", "gshard.shard_batch"
    ),
    "the inputs and targets of one batch for global_batches": refused(
        lambda _: global_of(tuple(BATCH.values())), "batches=a tuple", "gshard.shard_batch"
    ),
    "the name of a file for global_batches": refused(
        lambda _: global_of("x.npy"), "batches='x.npy'"
    ),
    "batches of another size midway": refused(
        lambda _: global_of([BATCH, {"x": np.zeros((3, 2))}]), "3 examples", "8 devices"
    ),
    "plan and batches are swapped": refused(
        lambda _: gshard.global_batches(kept()[1], [BATCH]), "global_batches(batches, plan)"
    ),
}
