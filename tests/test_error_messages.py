"""Twenty mistakes, one or more of each folder: the message says what, where and how to fix it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import pickle
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.cli.main import main
from gshard.distributed.agree import FailedError, FailedOutsideError
from gshard.paddle import group_sharded_parallel
from gshard.pytorch import ZeroRedundancyOptimizer
from tests.test_language import found
from tests.zoo import ZOO

MODEL = ZOO["linen_mlp"]

pytestmark = pytest.mark.filterwarnings("ignore:.*% of the parameters")  # the model is small

# In these senses the words belong to no message: a glossary is in CONTRIBUTING.md.
PRIVATE = re.compile(r"\b(whole (leaf|array|layout)|stays? whole|kept whole|divided|lies?|told)\b")


class Mistake(NamedTuple):
    """A wrong call, and what its message must say."""

    call: Callable[[Path], Any]
    what: str  # the value or the state of things that is wrong
    where: str  # the argument, the file or the path of the leaf
    fix: str  # what to pass or to call


def sharded(level: str = "os_g", **options: Any) -> tuple[Any, gshard.Plan]:
    options = MODEL.options() | options
    return gshard.shard_train_state(
        MODEL.state(optax.adam(1e-2)), gshard.make_mesh(), level, **options
    )


def step(**options: Any) -> Any:
    state, plan = sharded()
    return gshard.make_train_step(MODEL.loss, plan, **options)(state, MODEL.batch(0, 12, 0))


def saved(folder: Path) -> Any:
    state, _ = sharded()
    with gshard.Checkpointer(folder) as checkpointer:
        checkpointer.save(0, state)
    return state


def save_another(folder: Path) -> None:
    state = saved(folder)
    other = state.replace(params=jax.tree.map(lambda x: x + 1, state.params))
    with gshard.Checkpointer(folder) as checkpointer:
        checkpointer.save(0, other)


def restore_other_shapes(folder: Path) -> None:
    saved(folder)
    like, _ = gshard.shard_train_state(
        ({"w": jnp.ones((16, 8))}, optax.adam(1e-2)), gshard.make_mesh(), "os"
    )
    with gshard.Checkpointer(folder) as checkpointer:
        checkpointer.restore(like=like)


def damaged(folder: Path) -> None:
    state = saved(folder)
    file = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with gshard.Checkpointer(folder) as checkpointer:
        checkpointer.restore(0, like=state)


def donated(_: Path) -> None:
    state, plan = sharded()
    train = gshard.make_train_step(MODEL.loss, plan)
    train(state, MODEL.batch(0, 16, 0))
    train(state, MODEL.batch(0, 16, 0))


def load_another_model(folder: Path) -> None:
    state, _ = sharded()
    gshard.save_safetensors(state, folder / "model.safetensors")
    other, _ = gshard.shard_train_state(
        ({"w": jnp.ones((16, 8))}, optax.adam(1e-2)), gshard.make_mesh(), "os"
    )
    gshard.load_safetensors(other, folder / "model.safetensors")


def command(*words: str) -> None:
    """Raises what `gshard WORDS` writes to stderr, if it fails."""
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            code = main(list(words))
        except SystemExit as ended:
            code = ended.code
    if code:
        raise gshard.GShardError(stderr.getvalue())


def of_config(folder: Path, text: str) -> None:
    (folder / "my.toml").write_text(text)
    command("plan", str(folder / "my.toml"))


MISTAKES: dict[str, Mistake] = {
    "level": Mistake(lambda _: sharded("p_g"), "'p_g'", "level=", "Did you mean 'p_g_os'?"),
    "axis": Mistake(
        lambda _: sharded(shard_axes="shrad"), "'shrad'", "shard_axes", "Did you mean 'shard'?"
    ),
    "rule": Mistake(
        lambda _: sharded(rules={"Dense_0/kernel": 2}), "(7, 13)", "'Dense_0/kernel'", "0 to 1"
    ),
    "indivisible": Mistake(
        lambda _: sharded(indivisible="drop"), "'drop'", "indivisible=", "'replicate'"
    ),
    "mesh": Mistake(
        lambda _: gshard.make_mesh({"a": 16}),
        "needs 16 devices",
        "{'a': 16}",
        "virtual_devices(16)",
    ),
    "precision": Mistake(
        lambda _: gshard.Precision(param_dtype="bfloat61"), "'bfloat61'", "param_dtype", "bfloat16"
    ),
    "batch": Mistake(lambda _: step(), "12 examples", "batch['x']", "8 or 16"),
    "micro_batches": Mistake(lambda _: step(micro_batches=0), "0", "micro_batches=", "1 or more"),
    "accumulate": Mistake(
        lambda _: step(micro_batches=2, accumulate="locl"), "'locl'", "accumulate=", "'local'"
    ),
    "donated": Mistake(
        donated, "earlier step", "this train state", "state, metrics = step(state, batch)"
    ),
    "checkpoint of that step": Mistake(save_another, "step 0", "save:", "checkpointer.delete("),
    "checkpoint of other arrays": Mistake(
        restore_other_shapes, "does not fit", "params/w", "Choose another checkpoint"
    ),
    "damage": Mistake(damaged, "damaged", "arrays/", "Without step="),
    "safetensors": Mistake(
        load_another_model, "w", "model.safetensors", "shard a state of the same model"
    ),
    "configuration": Mistake(
        lambda folder: of_config(folder, "model = 'a:b'\nmicro_batch = 2"),
        "'micro_batch'",
        "my.toml",
        "Did you mean 'micro_batches'?",
    ),
    "target": Mistake(
        lambda folder: of_config(folder, "model = 'a:b'\ntarget = 'h101:8'"),
        "'h101:8'",
        "target",
        "Did you mean 'h100'?",
    ),
    "setup": Mistake(
        lambda _: command("plan", "tests.setups:mpl", "--devices", "8"),
        "'mpl'",
        "tests.setups",
        "Did you mean 'mlp'?",
    ),
    "launch": Mistake(
        lambda _: command("launch", "--nproc_per_nod", "2", "train.py"),
        "'--nproc_per_nod'",
        "launch",
        "Did you mean '--nproc_per_node'?",
    ),
    "processes": Mistake(
        lambda _: gshard.distributed.initialize(heartbeat_timeout=3),
        "'heartbeat_timeout'",
        "initialize",
        "Did you mean 'heartbeat_timeout_seconds'?",
    ),
    "paddle": Mistake(
        lambda _: group_sharded_parallel(None, None, "os"),
        "None",
        "group_sharded_parallel",
        "nnx.Module",
    ),
    "pytorch": Mistake(
        lambda _: ZeroRedundancyOptimizer({"w": jnp.ones(8)}, optax.adam, betas=(0.9, 0.99)),
        "'betas'",
        "adam",
        "b1=0.9",
    ),
}


def message(name: str, folder: Path) -> str:
    with pytest.raises(gshard.GShardError) as caught:
        MISTAKES[name].call(folder)
    return str(caught.value)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_message_says_what_where_and_how_to_fix_it(name, tmp_path):
    text = message(name, tmp_path)
    for part in MISTAKES[name][1:]:
        assert part in text, f"{part!r} is not in: {text}"
    assert text.strip()[-1] in ".?)", text
    assert not found(text), text
    assert not PRIVATE.search(text), text


def test_there_are_twenty():
    assert len(MISTAKES) >= 20


def public_errors():
    for module in (gshard, gshard.distributed):
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, type) and issubclass(value, Exception):
                yield f"{module.__name__}.{name}", value


@pytest.mark.parametrize(("name", "error"), [*public_errors()])
def test_a_traceback_names_an_error_as_users_import_it(name, error):
    assert f"{error.__module__}.{error.__qualname__}" == name
    assert pickle.loads(pickle.dumps(error)) is error  # as spawned processes send it


def all_errors():
    for module in pkgutil.walk_packages(gshard.__path__, "gshard."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    kinds = [gshard.GShardError]
    for kind in kinds:
        kinds += [x for x in kind.__subclasses__() if x not in kinds]
    return kinds


@pytest.mark.parametrize(
    "error",
    [
        *(kind("w is lost") for kind in all_errors() if not inspect.isfunction(kind.__init__)),
        gshard.SaveFailedError("step 3 was not saved", 3),
        gshard.DamagedCheckpointError("step 3 is damaged", {3: [gshard.Damage("x", "is missing")]}),
        gshard.distributed.ProcessFailedError("rank 1 failed", rank=1, exit_code=-9),
        FailedError({0: "w is lost"}),
        FailedOutsideError({0: "the disk is full"}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_in_another_process(error):
    """A `multiprocessing.Pool` waits forever for one that cannot be unpickled."""
    error.add_note("in the third epoch")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (copy.args, vars(copy)) == (error.args, vars(error))
