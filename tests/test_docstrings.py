"""Every public object says what it takes, gives and raises, with an example that runs."""

from __future__ import annotations

import doctest
import inspect
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gshard

MODULES = ("distributed", "expert", "paddle", "pytorch", "sequence")
PUBLIC = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (gshard, *(getattr(gshard, name) for name in MODULES))
    for name in module.__all__
    if not name.startswith("__") and not isinstance(getattr(module, name), types.ModuleType | int)
}
ERRORS = {n: x for n, x in PUBLIC.items() if isinstance(x, type) and issubclass(x, BaseException)}
ERRORS |= {n: x for n, x in PUBLIC.items() if isinstance(x, type) and issubclass(x, Warning)}
OBJECTS = {n: x for n, x in PUBLIC.items() if n not in ERRORS}


def namespace() -> dict[str, Any]:
    """What an example may use without saying it: a small model, its data, and the modules."""

    def loss_fn(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.square(batch["x"] @ params["w"] + params["b"] - batch["y"]))

    params = {"w": jnp.ones((64, 32)), "b": jnp.zeros(32)}
    batch = {"x": np.ones((16, 64), np.float32), "y": np.zeros((16, 32), np.float32)}
    return {
        **{"gshard": gshard, "jax": jax, "jnp": jnp, "np": np, "optax": optax},
        **{"params": params, "tx": optax.adam(1e-3), "loss_fn": loss_fn, "batch": batch},
    }


@pytest.mark.parametrize("name", OBJECTS)
def test_it_has_an_example(name):
    assert "Example:" in (inspect.getdoc(OBJECTS[name]) or "")


@pytest.mark.parametrize("name", OBJECTS)
def test_its_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # what joins this process to others must not last: other tests join it again
    monkeypatch.setattr(sys.modules["gshard.distributed.initialize"], "_joined", [])
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    text = inspect.getdoc(OBJECTS[name]) or ""
    example = doctest.DocTestParser().get_doctest(text, namespace(), name, None, None)
    if "Example:" in text:
        assert example.examples, "write it with >>>"
    runner = doctest.DocTestRunner(optionflags=flags)
    said: list[str] = []
    runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize("name", [n for n, x in OBJECTS.items() if inspect.isroutine(x)])
def test_a_function_says_what_it_takes_and_gives(name):
    function = OBJECTS[name]
    text = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    assert not signature.parameters or "Args:" in text
    if signature.return_annotation not in ("None", None):
        assert "Returns:" in text
