"""`benchmarks.wire`: its arguments, its theory against a count by hand, and what it writes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

from benchmarks import wire, wire_rows
from benchmarks.llama import Sizes, abstract_params
from benchmarks.wire_compile import budgeted, sharded_state
from gshard._util.errors import GShardError
from gshard.analysis.aot.target import parse_target
from gshard.models.by_slices import cross_entropy
from tests.ahead_of_time import python_for

ROOT = Path(__file__).parents[3]
LAYER = 4 * 4096**2 + 3 * 4096 * 11008  # attention, and a gated MLP
TABLE = 32000 * 4096  # the embedding; the head is as large
NORMS = (2 * 32 + 1) * 4096
TINY = ("--layers", "2", "--width", "128", "--vocabulary", "512", "--sequence", "128")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--target", "cpu:1"], "cpu:2 to cpu:64"),
        (["--target", "cpu:8", "--level", "zero9"], "Choose one of dp, os, os_g, p_g_os"),
        (["--target", "cpu:8", "--width", "100"], "a multiple of 128"),
        (["--target", "cpu:8", "--layers", "0"], "layers=0"),
    ],
)
def test_what_cannot_be_is_one_line(given, said):
    with pytest.raises(GShardError) as caught:
        wire.arguments(given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_model_is_llama_2_7b():
    sizes = [math.prod(x.shape) for x in jax.tree.leaves(abstract_params(Sizes()))]
    assert sum(sizes) == 32 * LAYER + 2 * TABLE + NORMS == 6_738_415_616


def plan_of(axes, level):
    mesh = AbstractMesh(axes, tuple("xyz"[: len(axes)]), axis_types=(AxisType.Auto,) * len(axes))
    return sharded_state(abstract_params(Sizes()), mesh, level)[1]


@pytest.mark.parametrize("axes", [(256,), (16, 16), (4, 8, 8)])
@pytest.mark.parametrize("level", wire.LEVELS)
def test_theory_is_what_a_hand_counts(level, axes):
    """In bytes of bfloat16, the norms in float32 where parameters are stored in it."""
    plan = plan_of(axes, level)
    layers, tables, share = 2 * 32 * LAYER, 2 * 2 * TABLE, 255 / 256
    once = layers + tables
    wanted = {
        "dp": {"all-reduce": 2 * (once + 2 * NORMS)},
        "os": {"reduce-scatter": once, "all-gather": once, "all-reduce": 4 * NORMS},
        "os_g": {"reduce-scatter": once, "all-gather": once, "all-reduce": 4 * NORMS},
        "p_g_os": {
            "reduce-scatter": once,
            "all-gather": 2 * layers + tables,
            "all-reduce": 8 * NORMS,
        },
    }[level]
    found = budgeted(plan)
    assert found["theory_bytes"] == {kind: round(x * share) for kind, x in wanted.items()}
    bound = wanted | ({"all-gather": 2 * once} if level == "p_g_os" else {})
    assert found["budget_bytes"] == {kind: round(x * share) for kind, x in bound.items()}


def test_a_stored_parameter_takes_12_bytes_over_the_devices():
    plan = plan_of((16, 16), "p_g_os")
    rest = sum(x.bytes_per_device for x in jax.tree.leaves((plan.params, plan.opt_state)))
    assert rest == pytest.approx(12 * (6_738_415_616 - NORMS) / 256 + 12 * NORMS, abs=64)


def test_cross_entropy_by_slices_equals_the_full_one():
    keys = jax.random.split(jax.random.key(0), 3)
    x_BxTxD = jax.random.normal(keys[0], (2, 256, 64))
    head_DxV = jax.random.normal(keys[1], (64, 512))
    next_BxT = jax.random.randint(keys[2], (2, 256), 0, 512)
    weights_B = jnp.array([1.0, 3.0])

    def by_slices(x_BxTxD, head_DxV):
        return weights_B @ cross_entropy(x_BxTxD, head_DxV, next_BxT, 128)

    def whole(x_BxTxD, head_DxV):
        logits_BxTxV = x_BxTxD @ head_DxV
        losses_BxT = optax.softmax_cross_entropy_with_integer_labels(logits_BxTxV, next_BxT)
        return weights_B @ losses_BxT.sum(1)

    found, wanted = (
        jax.value_and_grad(f, argnums=(0, 1))(x_BxTxD, head_DxV) for f in (by_slices, whole)
    )
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-6)
    for x, y in zip(found[1], wanted[1], strict=True):
        np.testing.assert_allclose(x, y, atol=5e-6 * np.abs(y).max())


def test_the_baseline_that_counts():
    def ran(name, wire_bytes, peak):
        memory = {"peak_memory": peak}
        return {"program": name, "wire_bytes": {"all-gather": wire_bytes}, "memory_bytes": memory}

    failed = {"program": "a", "error": "does not fit"}
    assert wire.better([failed]) is None
    assert wire.better([failed, ran("b", 5000, 1)])["program"] == "b"
    assert wire.better([ran("a", 4000, 9), ran("b", 5000, 1)])["program"] == "a"
    assert wire.better([ran("a", 5000, 9), ran("b", 5001, 1)])["program"] == "b"


def test_a_compilation_that_takes_too_long_is_ended(tmp_path):
    target = parse_target("cpu:8")
    found = wire.compiled("gshard", target, "os", Sizes(), tmp_path / "x.txt", timeout=0.1)
    assert found["program"] == "gshard"
    assert "not compiled after 0 s" in found["error"]


def measured(python, folder, *given):
    """Runs the benchmark as a user does; returns what it printed and what it wrote."""
    command = [python, "-m", "benchmarks.wire", *given]
    command += ["--json", str(folder / "found.json"), "--dump", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_json_and_dump_of_a_run_on_the_cpu(tmp_path):
    target = ("--target", "cpu:4", "--level", "os", "--gshard-only")
    shown, found = measured(sys.executable, tmp_path, *target, *TINY)
    assert "XLA on CPU moves bfloat16 as float32" in shown
    assert (tmp_path / "gshard.hlo.txt").read_text().startswith("HloModule")
    assert found["model"] == {
        "layers": 2,
        "width": 128,
        "vocabulary": 512,
        "sequence": 128,
        "parameters": 656_000,
    }
    assert (found["target"], found["devices"], found["level"]) == ("cpu:4", 4, "os")
    assert found["versions"]["jax"] == jax.__version__
    (program,) = found["programs"]
    for kind in ("all-gather", "reduce-scatter"):
        assert program["wire_bytes"][kind] == 2 * found["theory_bytes"][kind]
    assert program["memory_bytes"]["argument_size"] > 0
    assert found["best_baseline"] is None


@pytest.mark.slow
def test_on_a_tpu_torus_no_full_gradient_is_all_reduced(tmp_path):
    small = ("--layers", "4", "--width", "512", "--vocabulary", "2048", "--sequence", "256")
    python = python_for("tpu")
    _, found = measured(python, tmp_path, "--target", "tpu-v5e:4x4", *small)
    ours, *baselines = found["programs"]
    theory = found["theory_bytes"]
    assert ours["wire_bytes"]["all-gather"] == theory["all-gather"]
    assert ours["wire_bytes"]["reduce-scatter"] >= theory["reduce-scatter"]
    assert (
        ours["wire_bytes"]["all-reduce"] <= 0.01 * theory["reduce-scatter"] + theory["all-reduce"]
    )
    assert found["gshard_to_baseline"] < 1
    assert [p["program"] for p in baselines] == list(wire.BASELINES)
    assert {p.name for p in tmp_path.glob("*.txt")} == {"gshard.hlo.txt", "gspmd.hlo.txt"}


@pytest.mark.slow
@pytest.mark.parametrize("level", wire.LEVELS[1:])
def test_on_gpus_a_step_sends_what_theory_says(level, tmp_path):
    python = python_for("gpu")
    target = ("--target", "h100:1x8", "--layers", "2", "--width", "512", "--sequence", "256")
    _, found = measured(python, tmp_path, *target, "--level", level, "--gshard-only")
    assert found["gshard_to_theory"] == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_on_gpus_a_scan_holds_the_gradients_of_one_layer(tmp_path):
    """XLA moves a reduce-scatter into the next turn of its loop where it can, and holds two."""
    python, few = python_for("gpu"), ("--layers", "4", "--vocabulary", "2048")
    _, found = measured(python, tmp_path, "--target", "h100:32x8", *few)
    peaks = {p["program"]: p["memory_bytes"]["peak_memory"] for p in found["programs"]}
    assert peaks["gshard"] < peaks["gspmd"]
    assert found["gshard_to_theory"] == pytest.approx(1, abs=1e-3)


# ---- figures of an earlier run ------------------------------------------------------------------


def test_what_is_worse_by_more_than_one_percent():
    before = {"sent": 1000, "between nodes": 0, "overlapped": 1000, "peak": 1000}
    assert wire_rows.losses(before, before) == []
    assert wire_rows.losses(before, before | {"sent": 1010, "overlapped": 990}) == []
    assert wire_rows.losses(before, before | {"sent": 500, "overlapped": 2000, "peak": 1}) == []
    assert wire_rows.losses(before, before | {"sent": 1011}) == ["sent"]
    assert wire_rows.losses(before, before | {"between nodes": 1}) == ["between nodes"]
    assert wire_rows.losses(before, before | {"overlapped": 989}) == ["overlapped"]
    assert wire_rows.losses(before, before | {"peak": 2000}) == ["peak"]


def test_the_committed_rows_are_complete():
    rows = json.loads(wire_rows.ROWS.read_text())
    assert len({(row["target"], row["level"]) for row in rows}) == len(rows) == 3
    for row in rows:
        parse_target(row["target"])
        assert set(row["bytes"]) == set(wire_rows.AMOUNTS) and "jaxlib" in row["versions"]


def compared(tmp_path, monkeypatch, change, bytes_now, only="", lost=()):
    """What a check says of the committed rows, next to programs with these versions and bytes."""
    rows = json.loads(wire_rows.ROWS.read_text())
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{k: x for k, x in row.items() if k not in lost} for row in rows]))

    def found(program, target, level, *_):
        if target.platform == "tpu" and bytes_now is None:
            return {"error": "it does not compile"}
        (row,) = (r for r in rows if (r["target"], r["level"]) == (target.text, level))
        amount = bytes_now or row["bytes"]["sent"]
        memory = {"peak_memory": row["bytes"]["peak"]}
        return {
            "wire_bytes": {"all-gather": amount},
            "network_bytes": {"all-gather": row["bytes"]["between nodes"]},
            "asynchronous_bytes": {"all-gather": row["bytes"]["overlapped"]},
            "memory_bytes": memory,
            "versions": row["versions"] | change,
        }

    monkeypatch.setattr(wire_rows, "compiled", found)
    return wire_rows.compare(file, only, False, 1)


def test_only_versions_of_the_compiler_at_hand_count(tmp_path, monkeypatch, capsys):
    assert compared(tmp_path, monkeypatch, {"python": "3.20"}, 0)
    for name, only in (("libtpu", "h100"), ("jax-cuda13-plugin", "v5e")):
        assert not compared(tmp_path, monkeypatch, {name: "9"}, 10**12, only)
        assert "worse: sent" in capsys.readouterr().out
    for name, only in (("libtpu", "v5e"), ("nvidia-cuda-nvcc", "h100"), ("jax", "")):
        with pytest.raises(GShardError, match="nothing was compared"):
            compared(tmp_path, monkeypatch, {name: "9"}, 10**12, only)
        assert "not compared, other" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(GShardError, match="nothing was compared"):
        compared(tmp_path, monkeypatch, {}, 0, lost=("bytes",))


def test_rows_before_one_that_does_not_compile_are_shown(tmp_path, monkeypatch, capsys):
    with pytest.raises(GShardError, match="does not compile"):
        compared(tmp_path, monkeypatch, {}, None)
    assert capsys.readouterr().out.count("as before") == 2


def test_bytes_that_are_not_known_are_an_error(tmp_path, monkeypatch):
    found = {"wire_bytes": {"all-gather": 1, "all-reduce": None}}
    monkeypatch.setattr(wire, "ask", lambda *_: found)
    given = "gshard", parse_target("cpu:4"), "os", Sizes(), tmp_path / "dump", 1.0
    assert wire.compiled(*given)["error"] == (
        "gshard at os for cpu:4: all-reduce in a loop of unknown length, so its bytes are unknown"
    )


@pytest.mark.slow
def test_a_check_fails_for_a_worse_figure(tmp_path):
    sizes = {"layers": 2, "width": 128, "vocabulary": 512, "sequence": 128}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"target": "cpu:4", "level": "os", "sizes": sizes}]))

    def check(*more):
        command = [sys.executable, "-m", "benchmarks.wire_rows", "--rows", str(file), *more]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        return done.returncode, done.stdout + done.stderr

    assert check("--record")[0] == 0
    (row,) = json.loads(file.read_text())
    assert row["bytes"]["peak"] > 0 and row["bytes"]["between nodes"] == 0 < row["bytes"]["sent"]
    code, said = check()
    assert code == 0 and "as before" in said
    row["bytes"]["peak"] = int(row["bytes"]["peak"] / 1.02)
    file.write_text(json.dumps([row]))
    code, said = check()
    assert code == 1 and "worse: peak" in said
    row["versions"]["jaxlib"] = "0.1"
    file.write_text(json.dumps([row]))
    code, said = check()
    assert code == 1 and "other versions" in said and "nothing was compared" in said
    code, said = check("--only", "h100")
    assert code == 1 and "no row of" in said and "cpu:4 os" in said
