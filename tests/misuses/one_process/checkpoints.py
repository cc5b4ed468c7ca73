"""Checkpoints and safetensors files."""

from __future__ import annotations

import os
import shutil
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gshard
from tests.misuses.small import ADAM, BATCH, kept, linen, params, shard
from tests.misuses.table import raw, refused, right, warned


def saver(path: Any, **options: Any) -> gshard.Checkpointer:
    return gshard.Checkpointer(path / "steps", asynchronous=False, **options)


def saved(path: Any, *steps: int) -> gshard.Checkpointer:
    own = saver(path)
    for step in steps or (3,):
        own.save(step, kept()[0])
    return own


def saves(path: Any, step: Any = 3, state: Any = None, **more: Any) -> None:
    with saver(path) as own:
        own.save(step, kept()[0] if state is None else state, **more)


def restores(path: Any, like: Any, **more: Any) -> Any:
    with saved(path) as own:
        return own.restore(**{"like": like} | more)


def after(path: Any, change: Any) -> Any:
    """The state that a directory of two steps gives after a change of its files."""
    with saved(path, 3, 4) as own:
        change(path / "steps")
        return own.restore(like=kept()[0])


def trained_on(path):
    """The state is trained on while it is written."""
    state, _, step = kept()
    with gshard.Checkpointer(path / "steps") as own:
        own.save(0, state)
        step(state, BATCH)
        own.wait()
        return gshard.full_params(own.restore(like=kept()[0]).state), params()


def from_threads(path):
    """Two threads save with one Checkpointer."""
    with saver(path) as own:
        errors = []

        def run(step):
            try:
                own.save(step, kept()[0])
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(i,)) for i in (1, 1)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        return (len(errors), own.all_steps()), (0, [1])


def closed(path):
    own = saved(path)
    own.close()
    own.save(4, kept()[0])


def closed_twice(path):
    own = saved(path)
    own.close()
    own.close()
    return own.all_steps(), [3]


def two_writers(path):
    own = saved(path)
    try:
        saver(path).save(4, kept()[0])
    finally:
        own.close()


def reader_with_rules(path):
    """A job that only reads, with the arguments of the one that trains."""
    own = gshard.Checkpointer(path / "steps", keep_last=2)
    try:
        gshard.Checkpointer(path / "steps", keep_last=2)
    finally:
        own.close()


def trained_state(path):
    state, _, step = kept()
    step(state, BATCH)
    saves(path, state=state)


def another_level(path):
    with saved(path) as own:
        return gshard.full_params(own.restore(like=kept("p_g_os")[0]).state), params()


def fewer_devices(path):
    like = shard(mesh=gshard.make_mesh(devices=jax.devices()[:3]))
    with saved(path) as own:
        return gshard.full_params(own.restore(like=like[0]).state), params()


def donated_like(path):
    """Restores into a state that was given to a step."""
    state, _, step = kept()
    with saved(path) as own:
        step(state, BATCH)
        return gshard.full_params(own.restore(like=state).state), params()


def weights(path: Any) -> Any:
    file = path / "x.safetensors"
    gshard.save_safetensors(kept()[0], file)
    return file


def own_file(path: Any, tensors: Any) -> Any:
    from safetensors.numpy import save_file

    save_file(tensors, path / "own.safetensors")
    return path / "own.safetensors"


def cut(path: Any) -> Any:
    file = weights(path)
    file.write_bytes(file.read_bytes()[:-7])
    return file


def inside_jit(path):
    jax.jit(lambda s: saves(path, state=s))(kept()[0])


def plain_torch(path, whole_folder=False):
    (path / "model.pt").write_bytes(b"PK\x03\x04 not safetensors, but a file of PyTorch")
    gshard.load_safetensors(kept()[0], path if whole_folder else path / "model.pt")


def removed_between(path):
    """The directory is deleted between two saves."""
    with saved(path) as own:
        shutil.rmtree(path / "steps")
        own.save(4, kept()[0])
        return own.all_steps(), [4]


def same_number(path):
    with saved(path) as own:
        own.save(3, kept()[2](kept()[0], BATCH)[0])


def nan_is_not_best(path):
    with saver(path, keep_best=1) as own:
        for step, loss in enumerate([2.0, float("nan"), 1.0, 3.0]):
            own.save(step, kept()[0], metadata={"loss": loss})
        return own.all_steps(), [2, 3]


def restored_data(path: Any, data: Any) -> Any:
    saves(path, data_state=data)
    with saver(path) as own:
        return own.restore(like=kept()[0]).data_state


def step_of_python(path):
    saves(path, state=kept()[0].replace(step=7))
    with saver(path) as own:
        return own.restore(like=kept()[0]).state.step, 7


def lower_number(path):
    with saved(path, 5) as own:
        own.save(4, kept()[0])


ROWS = {
    "keep_every= is no multiple of every=": warned(
        lambda path: gshard.Checkpointer(path, every=4, keep_every=6, keep_last=1).close(),
        *("keep_every=6 keeps only multiples of 12", "every=4"),
    ),
    "save with step and state swapped": refused(
        lambda path: saver(path).save(kept()[0], 3), "step=", "whole number"
    ),
    "save without a step": raw(
        lambda path: saver(path).save(kept()[0]), TypeError, "save", "argument: 'state'"
    ),
    "save with the step of the state": right(lambda path: (saves(path, kept()[0].step), None)),
    "step=-1": refused(lambda path: saves(path, -1), "step=-1", "0 or more"),
    "step='last'": refused(lambda path: saves(path, "last"), "step='last'"),
    "step=1.0": refused(lambda path: saves(path, 1.0), "step=1.0"),
    "step=True": refused(lambda path: saves(path, True), "step=True"),
    "a step that was saved, with another state": refused(
        same_number, "steps/3 holds another state", "delete(3)"
    ),
    "a state whose step is a number of Python": right(step_of_python),
    "a state whose step is 3.5": refused(
        lambda path: saves(path, state=kept()[0].replace(step=3.5)), "step is float", "int32"
    ),
    "a state whose step is an array of floats": refused(
        lambda path: saves(path, state=kept()[0].replace(step=jnp.float32(3.5))), "step", "float32"
    ),
    "a state whose step is 3j": refused(
        lambda path: saves(path, state=kept()[0].replace(step=3j)), "step is complex", "int32"
    ),
    "a state whose step is 2**31": refused(
        lambda path: saves(path, state=kept()[0].replace(step=2**31)), "step contains 2147", "int32"
    ),
    "a state whose step is np.uint32(2**31) is trained": refused(
        lambda _: kept()[2](kept()[0].replace(step=np.uint32(2**31)), BATCH),
        "step contains 2147483648",
        "does not fit int32",
    ),
    "a state whose step is 2**31 is gathered": refused(
        lambda _: kept()[1].unwrap(kept()[0].replace(step=2**31)), "step number contains 2147483648"
    ),
    "a step below the newest": refused(lower_number, "4", "5"),
    "a plain state is saved": refused(
        lambda path: saves(path, state=linen()), "save(step, state)", "gshard.shard_train_state"
    ),
    "parameters are saved": refused(
        lambda path: saves(path, state=kept()[0].params), "save(step, state)", "a dict"
    ),
    "a donated state is saved": refused(
        trained_state, "earlier step", error=gshard.DonatedStateError
    ),
    "what shard_train_state returned is saved, with its plan": refused(
        lambda path: saves(path, state=kept()[:2]), "save(step, state)"
    ),
    "a save inside a jit": refused(inside_jit, "jit"),
    "data_state= that is an object": refused(
        lambda path: saves(path, data_state=object()), "data_state"
    ),
    "data_state= with an array": refused(
        lambda path: saves(path, data_state={"i": np.arange(3)}), "data_state"
    ),
    "data_state= with NaN": right(
        lambda path: (
            restored_data(path, {"x": float("nan")})["x"],
            np.nan,
        )
    ),
    "data_state= with numbers as keys": refused(
        lambda path: saves(path, data_state={1: 2}), "data_state"
    ),
    "metadata= with a loss of JAX": right(
        lambda path: (saves(path, metadata={"loss": jnp.ones(())}), None)
    ),
    "metadata= that is a number": refused(lambda path: saves(path, metadata=3), "metadata=3"),
    "keep_best without the metric": refused(
        lambda path: saver(path, keep_best=2).save(1, kept()[0]), "'loss'", "metadata"
    ),
    "keep_best of an accuracy without mode": refused(
        lambda path: saver(path, keep_best=1, metric="accuracy"), "'accuracy'", "mode='max'"
    ),
    "keep_best with a metric that is NaN": right(nan_is_not_best),
    "keep_last=0": refused(lambda path: saver(path, keep_last=0), "keep_last=0"),
    "keep_last=2.5": refused(lambda path: saver(path, keep_last=2.5), "keep_last=2.5"),
    "mode='minimum'": refused(lambda path: saver(path, mode="minimum"), "'minimum'", "'min'"),
    "on_failure='ignore'": refused(
        lambda path: saver(path, on_failure="ignore"), "on_failure='ignore'", "'warn'"
    ),
    "directory=None": refused(lambda _: gshard.Checkpointer(None), "None"),
    "a number as the directory": refused(lambda _: gshard.Checkpointer(3), "3"),
    "an empty name as the directory": refused(lambda _: gshard.Checkpointer(""), "''"),
    "an address that no store has": refused(
        lambda _: gshard.Checkpointer("ftp://host/run"), "gs://", "s3://"
    ),
    "a file as the directory": refused(
        lambda path: ((path / "steps").write_text("x"), saves(path)), "steps"
    ),
    "a closed Checkpointer saves": refused(closed, "closed"),
    "directory= with a variable of the shell": refused(
        lambda _: gshard.Checkpointer("$SCRATCH/run"), "os.path.expandvars('$SCRATCH/run')"
    ),
    "local= with a variable of the shell": refused(
        lambda path: gshard.Checkpointer(path, every=9, local="$TMPDIR/run", local_every=1),
        "local='$TMPDIR/run' names an environment variable",
    ),
    "an address with a variable of the shell": refused(
        lambda _: gshard.Checkpointer("gs://$BUCKET/run"), "os.path.expandvars"
    ),
    "save_safetensors to a path with a variable of the shell": refused(
        lambda path: gshard.save_safetensors(kept()[0], path / "$JOB" / "x.safetensors"),
        *("save_safetensors", "$JOB", "os.path.expandvars"),
    ),
    "a Checkpointer is closed twice": right(closed_twice),
    "two Checkpointers write into one directory": refused(two_writers, "writes"),
    "a Checkpointer that only reads has the rules of the one that writes": refused(
        reader_with_rules, "To read only, leave out keep_last="
    ),
    "two threads save with one Checkpointer": right(from_threads),
    "the state is trained while it is written": right(trained_on),
    "the directory is deleted between saves": right(removed_between),
    "restore without like=": refused(
        lambda path: restores(path, None), "restore(like=...)", "no like="
    ),
    "restore into parameters": refused(
        lambda path: restores(path, params()), "restore(like=...)", "a dict"
    ),
    "restore into (params, tx)": refused(
        lambda path: restores(path, (params(), ADAM)),
        *(
            "state is a tuple, not a state of gshard",
            "Pass the state that gshard.shard_train_state or a step returned",
        ),
    ),
    "a save of parameters": refused(
        lambda path: saves(path, state=kept()[0].params), "not its params", "a step returned"
    ),
    "restore into a plain state": refused(
        lambda path: restores(path, linen()), "restore(like=...)", "gshard.shard_train_state"
    ),
    "restore into a state that was donated": right(donated_like),
    "restore at another level": right(another_level),
    "restore on other devices": right(fewer_devices),
    "restore of a step that is not there": refused(
        lambda path: restores(path, kept()[0], step=9), "9", "3"
    ),
    "restore from an empty directory": refused(
        lambda path: saver(path).restore(like=kept()[0]), "does not exist"
    ),
    "restore of the state by position": refused(
        lambda path: saved(path).restore(kept()[0]), "step=a TrainState"
    ),
    "restore into another model": refused(
        lambda path: restores(path, shard(({"w": np.ones((4, 4), np.float32)}, ADAM))[0]),
        *("does not fit", "params/w"),
    ),
    "restore into another optimizer": refused(
        lambda path: restores(path, shard(linen(optax.sgd(0.1)))[0]), "opt_state"
    ),
    "restore with another head": refused(
        lambda path: restores(path, shard(({"w": params()["w"], "b": np.ones(3)}, ADAM))[0]),
        "restore(like=state, only='^(?!b$)') restores the weights that both have",
    ),
    "restore of all weights with another head": refused(
        lambda path: restores(
            path, shard(({"w": params()["w"], "b": np.ones(3)}, ADAM))[0], only="."
        ),
        "Leave out what differs: only='^(?!b$)'",
    ),
    "restore with frozen= changed": refused(
        lambda path: restores(path, shard(frozen="^b$")[0]),
        *("trained in the checkpoint is frozen in like=: b", "only='.'"),
    ),
    "restore with another learning rate": warned(
        lambda path: restores(path, shard(linen(optax.adam(1.0)))[0]), "another optimizer"
    ),
    "restore into another dtype": refused(
        lambda path: restores(path, shard((jax.tree.map(np.float16, params()), ADAM))[0]),
        *("float16", "cast=True"),
    ),
    "the newest step is removed": right(
        lambda path: (after(path, lambda d: shutil.rmtree(d / "4")).step, 3)
    ),
    "a file of the newest step is removed": warned(
        lambda path: after(path, lambda d: largest(d / "4").unlink()), "damaged"
    ),
    "a file of the newest step is emptied": warned(
        lambda path: after(path, lambda d: os.truncate(largest(d / "4"), 0)), "damaged"
    ),
    "the newest step is renamed": right(
        lambda path: (after(path, lambda d: (d / "4").rename(d / "best")).step, 3)
    ),
    "a step is copied to another number": warned(
        lambda path: after(path, lambda d: shutil.copytree(d / "3", d / "9")),
        *("step 9", "renamed or copied"),
    ),
    "a stray file beside the steps": right(
        lambda path: (after(path, lambda d: (d / "notes.txt").write_text("x")).step, 4)
    ),
    "a stray file in the newest step": warned(
        lambda path: after(path, lambda d: (d / "4" / ".DS_Store").write_text("x")), ".DS_Store"
    ),
    "all steps are damaged": refused(
        lambda path: after(path, lambda d: [largest(d / x).unlink() for x in "34"]), "damaged"
    ),
    "delete of a step that is not there": refused(lambda path: saved(path).delete(9), "9", "3"),
    "metadata of an empty directory": refused(
        lambda path: saver(path).metadata(), "holds no checkpoint"
    ),
    "save_safetensors with path and state swapped": refused(
        lambda path: gshard.save_safetensors(path / "x.safetensors", kept()[0]), "save_safetensors"
    ),
    "save_safetensors of parameters": refused(
        lambda path: gshard.save_safetensors(params(), path / "x"), "save_safetensors", "a dict"
    ),
    "save_safetensors into a folder that is not there": refused(
        lambda path: gshard.save_safetensors(kept()[0], path / "no" / "x.safetensors"),
        "cannot be written: No such file or directory. Choose a folder that exists",
    ),
    "save_safetensors onto a folder": refused(
        lambda path: gshard.save_safetensors(kept()[0], path), "save_safetensors"
    ),
    "save_safetensors to a path with a slash at its end": refused(
        lambda path: gshard.save_safetensors(kept()[0], f"{path}/out/"),
        *("out/ ends with a slash", "out/model.safetensors", "max_shard_bytes="),
    ),
    "save_safetensors to an address with a slash at its end": refused(
        lambda _: gshard.save_safetensors(kept()[0], "gs://bucket/out/"),
        "gs://bucket/out/model.safetensors",
    ),
    "metadata of numbers in a safetensors file": refused(
        lambda path: gshard.save_safetensors(kept()[0], path / "x", metadata={"step": 3}),
        "metadata",
    ),
    "load_safetensors with path and state swapped": refused(
        lambda path: gshard.load_safetensors(weights(path), kept()[0]), "load_safetensors"
    ),
    "load_safetensors of a file that is not there": refused(
        lambda path: gshard.load_safetensors(kept()[0], path / "x"), "x"
    ),
    "load_safetensors of a file that is cut": refused(
        lambda path: gshard.load_safetensors(kept()[0], cut(path)), "x.safetensors"
    ),
    "load_safetensors of a file of PyTorch": refused(
        plain_torch, "model.pt is a pickle of PyTorch", "safetensors.torch.save_file"
    ),
    "load_safetensors of a folder of PyTorch": refused(
        lambda path: plain_torch(path, whole_folder=True),
        *("no safetensors file. It has model.pt", "safetensors.torch.save_file"),
    ),
    "load_safetensors of a step of a Checkpointer": refused(
        lambda path: gshard.load_safetensors(kept()[0], saved(path).directory / "3"),
        *("is a step of gshard.Checkpointer", ".restore(step=3, like=..., only='.')"),
    ),
    "load_safetensors of the directory of a Checkpointer": refused(
        lambda path: gshard.load_safetensors(kept()[0], saved(path, 9, 10).directory),
        ".restore(step=10, like=..., only='.')",
    ),
    "save_safetensors in a dtype that is not floating": refused(
        lambda path: gshard.save_safetensors(kept()[0], path / "x", dtype="int8"),
        "save_safetensors: dtype=int8 is not floating",
    ),
    "load_safetensors of an empty file": refused(
        lambda path: gshard.load_safetensors(kept()[0], ((path / "e").touch(), path / "e")[1]),
        "e",
    ),
    "load_safetensors with transposed kernels, as in PyTorch": refused(
        lambda path: gshard.load_safetensors(
            kept()[0], own_file(path, {"w": params()["w"].T.copy(), "b": params()["b"]})
        ),
        *("w is [8, 16]", "[16, 8]"),
    ),
    "load_safetensors of other names": refused(
        lambda path: gshard.load_safetensors(
            kept()[0], own_file(path, {"weight": params()["w"], "b": params()["b"]})
        ),
        *("Missing", "w", "weight"),
    ),
    "load_safetensors of another dtype": refused(
        lambda path: gshard.load_safetensors(
            kept()[0], own_file(path, jax.tree.map(np.float16, params()))
        ),
        *("F16", "cast=True"),
    ),
    "load_safetensors into a plain state": refused(
        lambda path: gshard.load_safetensors(linen(), weights(path)), "gshard.shard_train_state"
    ),
    "load_safetensors with an unknown map of names": refused(
        lambda path: gshard.load_safetensors(kept()[0], weights(path), name_map="lama"), "llama"
    ),
    "load_safetensors of a folder with several models": refused(
        lambda path: gshard.load_safetensors(
            kept()[0], (weights(path), own_file(path, {}))[0].parent
        ),
        "several models",
        "own.safetensors",
        "x.safetensors",
    ),
    "what load_safetensors returns is not kept": right(
        lambda path: (gshard.load_safetensors(kept()[0], weights(path)).params, params())
    ),
    "import_orbax of a checkpoint of gshard": refused(
        lambda path: gshard.import_orbax(path, kept()[0]), "import_orbax"
    ),
}


def largest(folder: Any) -> Any:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
