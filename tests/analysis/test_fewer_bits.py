"""What sending and storing in fewer bits would give: the budget of the plan that it names."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard._util.text import text_of
from gshard.analysis.fewer_bits import FewerBits, fewer_bits, fewer_bits_table, written
from gshard.analysis.forecast import abstract_mesh
from gshard.analysis.setup import Choices, TrainSetup
from gshard.sharding import mesh as mesh_module
from gshard.sharding import nodes as nodes_module
from gshard.sharding import topology

SHAPES = {"a": (300, 130), "b": (130, 300), "bias": (300,)}
TWO = Choices(micro_batches=2)


def setup_of(tx: Any = None, dtype: Any = jnp.float32, **shard: Any) -> TrainSetup:
    params = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in SHAPES.items()}
    shard = {"min_shard_size": 1000, **shard}
    return TrainSetup((params, tx or optax.adam(1e-3)), shard=shard)


def asked(argument: str) -> tuple[dict[str, Any], Any]:
    """The arguments that a suggestion says to write, and its mesh."""
    words, _, mesh = argument.partition(", on ")
    names = {"gshard": gshard, "dict": dict}
    return eval(f"dict({words})", names), eval(mesh or "gshard.make_mesh()", names)


def budget_of(setup: TrainSetup, mesh: Any, level: str, **shard: Any) -> gshard.Budget:
    plan = gshard.shard_train_state(setup.state, mesh, level, **{**setup.shard, **shard})[1]
    return gshard.budget(plan, micro_batches=2, devices_per_node=4)


def stored(budget: gshard.Budget) -> int:
    return sum(budget.resident.values())


@pytest.fixture
def two_nodes(monkeypatch):
    """The first half of the devices is one node."""
    for module in (mesh_module, topology, nodes_module):
        monkeypatch.setattr(
            module, "node_of", lambda x: int(x is not None and x.id >= 4), raising=False
        )


PRECISIONS = {"none": None, "bfloat16": "bfloat16"}


@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
@pytest.mark.parametrize("replica", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_amounts_are_those_of_the_plan_that_is_named(level, replica, precision, two_nodes):
    given = {} if precision == "none" else {"precision": PRECISIONS[precision]}
    setup = setup_of(**given)
    found = fewer_bits(setup, abstract_mesh(8, replica), level, TWO, 4)
    assert [x.reason for x in found] == ["", ""]
    now = budget_of(setup, abstract_mesh(8, replica), level)
    for x in found:
        shard, mesh = asked(x.argument)
        if "make_mesh" not in x.argument:
            mesh = gshard.make_mesh(replica=replica)
        assert ("'node': 2, 'local': 4" in x.argument) == (replica == 1 and "wire" in shard)
        then = budget_of(setup, mesh, level, **shard)  # refused if the mesh were a wrong one
        assert x.stored == (stored(now), stored(then))
        assert x.sent == (now.wire_bytes, then.wire_bytes)
        assert x.network == (now.network_bytes, then.network_bytes)
    sends, stores = found
    assert sends.sent[1] < sends.sent[0] and sends.stored[0] == sends.stored[1]
    assert stores.stored[1] < stores.stored[0] and stores.sent[0] == stores.sent[1]


def test_what_cannot_be_used_says_why():
    low = fewer_bits(setup_of(dtype=jnp.bfloat16), abstract_mesh(8), "os", TWO)
    assert "no float32 copy" in low[0].reason and "precision='bfloat16'" in low[0].reason
    assert low[1].argument == (
        "precision=gshard.Precision('bfloat16', param_dtype='bfloat16', state_dtype='int8')"
    )
    none = fewer_bits(setup_of(optax.sgd(1.0)), abstract_mesh(8), "os", TWO)
    assert "no effect: the optimizer has no moments" in none[1].reason
    parts = fewer_bits(setup_of(), abstract_mesh(24, 4), "os", TWO, 8)
    assert "6 devices in a shard group are on parts of nodes of 8" in parts[0].reason
    params = {"a": jax.ShapeDtypeStruct((300, 130), jnp.float32)}
    params["b"] = jax.ShapeDtypeStruct((300, 130), jnp.bfloat16)
    mixed = TrainSetup((params, optax.adam(1e-3)), shard={"wire": "int8"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (found,) = fewer_bits(mixed, abstract_mesh(1), "dp", TWO)
    assert "several dtypes" in found.reason
    said = text_of(fewer_bits_table([found, *none]))
    assert said.count("Not here: ") == 2 and "wire='int8'" in said


def test_what_is_used_is_not_suggested():
    mesh = abstract_mesh(8)
    (found,) = fewer_bits(setup_of(wire="int8"), mesh, "os", TWO)
    assert "state_dtype" in found.argument
    every = gshard.Precision("float32", scatter_dtype="int8", state_dtype="int8")
    assert fewer_bits(setup_of(precision=every), mesh, "os", TWO) == []
    (found,) = fewer_bits(setup_of(), mesh, "dp", TWO)  # nothing is sharded, and sent in bytes
    assert "state_dtype" in found.argument


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"compute_dtype": "float16", "exceptions": {"norm": "float32"}},
        {"reduce_dtype": "float32", "gather_dtype": "int4", "wire_exceptions": {"a": None}},
        {"state_dtype": "int8", "state_exceptions": {"a": None, "b": "int8"}},
    ],
)
def test_a_precision_is_written_as_it_is_made(given):
    precision = gshard.Precision(**given)
    assert eval(written(precision), {"gshard": gshard}) == precision


def test_a_table_has_the_amounts():
    found = FewerBits("wire='int8'", (8, 8), (4_000_000, 1_000_000), (2_000, 500))
    said = text_of(fewer_bits_table([found]))
    assert all(x in said for x in ("wire='int8'", "4.00 MB", "1.00 MB", "2.00 kB", "500 B"))
    alone = dataclasses.replace(found, network=(0, 0))
    assert "between nodes" in said and "between nodes" not in text_of(fewer_bits_table([alone]))
