"""What commands print: the user's names as they are, and everything that goes wrong as a line."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

import gshard
from gshard.ahead_of_time.report import compiled_report
from gshard.audit_report import report as audit_report
from gshard.forecast.plan_report import table, text_of
from gshard.page.tables import shown_value

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
