"""What commands print: the user's names as they are, and everything that goes wrong as a line."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.ahead_of_time.report import compiled_report
from gshard.audit_report import report as audit_report
from gshard.forecast.plan_report import table, text_of
from gshard.forecast.setup import load_setup
from gshard.page.tables import shown_value
from tests import setups

NAMES = ("x[/red]", "gshard[aot-gpu]", ":tv:")


def named(*names):
    params = {name: jax.ShapeDtypeStruct((256, 256), jnp.float32) for name in names}
    return gshard.Setup((params, optax.adam(1e-3)))


# ---- names of the user's ------------------------------------------------------------------------


def test_what_looks_like_markup_stays():
    rows = table("[b]", NAMES, ())
    rows.add_row(*NAMES)
    said = text_of([*NAMES, rows])
    assert said.startswith("\n".join(NAMES))
    assert all(said.count(name) == 3 for name in NAMES)
    assert "[b]" in said


def test_a_plan_and_an_explanation_name_every_leaf():
    mesh = gshard.make_mesh()
    state, plan = gshard.shard_train_state(named(*NAMES).state, mesh, "os")
    for said in (str(plan), str(gshard.explain(state, plan))):
        assert all(name in said for name in NAMES)
        assert "float32[256, 256]" in said
        assert "\\" not in said


def test_an_audit_names_every_axis():
    row = gshard.audit(jax.jit(lambda x: x), jnp.zeros(3))
    found = dataclasses.replace(row, memory={"x[/red]": 1})
    assert "x[/red]" in audit_report(found)


# ---- what is not known --------------------------------------------------------------------------


def test_bytes_in_a_loop_of_unknown_length_are_shown_as_unknown():
    of = {
        "memory": {"argument": 8, "temp": 8},
        "needs": 16,
        "has": None,
        "fits": None,
        "compile_seconds": 1.0,
        "collectives": [],
        "wire_bytes": {"all-reduce": None, "all-gather": 2000, "all-to-all": 3000},
        "asynchronous_bytes": {"all-reduce": 0, "all-gather": 2000},
    }
    found = gshard.make_plan(named("w"), 4, levels=["os"])
    lines = compiled_report("cpu:4", found, {"os": of}).splitlines()
    (row,) = [x.split() for x in lines if "kB" in x and x.split()[0] == "os" and "?" in x]
    assert row == "os 2.00 kB 0 B ? 3.00 kB ? ? 0".split()
    assert shown_value("wire_bytes", of["wire_bytes"]).startswith("all-reduce ?, ")


# ---- a setup that is none -----------------------------------------------------------------------


def raises():
    raise TypeError("no such width\nand more")


@pytest.mark.parametrize(
    ("further", "said"),
    [
        ({"shard": {"presicion": "bfloat16"}}, "Did you mean 'precision'?"),
        ({"shard": [1, 2]}, "shard= of gshard.Setup is [1, 2]"),
        ({"shard": None}, "further arguments of shard_train_state"),
        ({"shard": {"level": "os"}}, "has no 'level': CONFIG says it"),
        ({"shard": {"offload": True}}, "has no 'offload': CONFIG says it"),
        ({"shard": {"init_args": (1,)}}, "functools.partial"),
        ({"step": {"micro_batchez": 2}}, "step= of gshard.Setup has no 'micro_batchez'"),
        ({"step": {"micro_batches": 4}}, "has no 'micro_batches': CONFIG says it"),
        ({"step": {"plan": 4}}, "has no 'plan': it is made"),
        ({"batch": {}}, "holds no arrays"),
        ({"batch": {"mask": None}}, "holds no arrays"),
        ({"state": raises}, "the init function of this setup fails: TypeError: no such width"),
        ({"state": lambda rng: rng}, "fails: TypeError"),
    ],
)
def test_a_setup_that_cannot_be_is_refused_in_words(further, said):
    with pytest.raises(gshard.GShardError) as caught:
        gshard.make_plan(dataclasses.replace(setups.mlp(), **further), 4, levels=["os"])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_in_words_is_passed_on_as_it_is():
    with pytest.raises(gshard.GShardError) as caught:
        load_setup("tests.setups:refuses")
    assert str(caught.value) == "tests.setups:refuses: Choose one of [none] or [full]."
