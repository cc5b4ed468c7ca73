"""A step compiled in another process: what is found, and what is said when it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from gshard._util.errors import GShardError
from gshard.analysis.aot.child import read_kept, remove_oldest
from gshard.analysis.aot.compiled import compile_for, reason
from gshard.analysis.aot.target import parse_target
from tests.ahead_of_time import ROOT, python_for

CPU = {"model": "tests.compiled_models:stack", "target": "cpu:4", "level": "os"}
STATE = 3 * 4 * 256 * 256 * 4  # float32 parameters and two moments of 4 layers


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """What was compiled before does not answer, and nothing is left in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def asked(model, **more):
    return CPU | {"model": f"tests.compiled_models:{model}"} | more


def test_an_nnx_pair_is_two_arguments_of_its_step():
    found = compile_for(CPU | {"model": "tests.setups:pair", "target": "cpu:2"})
    # Parameters are replicated, and both moments of the kernel sharded.
    kernel, bias = 192 * 192 * 4, 192 * 4
    assert found["memory"]["argument"] == pytest.approx(2 * kernel + 4 * bias, abs=64)


def test_a_step_end_to_end():
    stages = []
    found = compile_for(
        CPU | {"level": "p_g_os", "micro_batch_size": 2, "arguments": {"layers": 4}},
        report=lambda stage, seconds: stages.append(stage),
    )
    assert list(dict.fromkeys(stages)) == [
        "importing",
        "importing the model",
        "tracing and lowering",
        "compiling",
        "reading the program",
    ]
    assert found["mesh"] == {"shard": 4}
    memory = found["memory"]
    assert memory["argument"] == pytest.approx(STATE / 4 + 2 * 256 * 4, abs=64)
    assert found["needs"] == pytest.approx(
        memory["argument"] + memory["temp"] + memory["output"] - memory["alias"], rel=1e-3
    )
    assert (found["has"], found["fits"]) == (parse_target("cpu:4").memory, True)
    largest = {buffer["what"]: buffer for buffer in found["largest"]}
    for path in ("params/w", "opt_state/inner/0/mu/w"):
        assert (largest[path]["bytes"], largest[path]["shape"]) == (STATE // 12, "f32[4,64,256]")
    listed = sum(buffer["bytes"] * buffer["count"] for buffer in found["largest"])
    assert 0.8 * found["needs"] < listed <= found["needs"]
    parameters, share = 4 * 256 * 256 * 4, 3 / 4
    assert found["wire_bytes"]["reduce-scatter"] == share * parameters
    assert found["wire_bytes"]["all-gather"] == 2 * share * parameters
    assert found["asynchronous_bytes"]["all-gather"] == 0  # XLA on CPU overlaps nothing
    purposes = {row["purpose"]: row["wire_bytes"] for row in found["collectives"]}
    assert purposes["gather"] == found["wire_bytes"]["all-gather"]


def test_an_answer_is_kept_by_program(tmp_path, monkeypatch):
    stages = []
    first = compile_for(CPU)
    assert len(list((tmp_path / "cache" / "gshard" / "compiled").iterdir())) == 1
    again = compile_for(CPU, report=lambda stage, seconds: stages.append(stage))
    assert again == first | {"cached": True} and "compiling" not in stages
    assert not compile_for(CPU | {"micro_batch_size": 2}).get("cached")  # another program
    renamed = compile_for(CPU | {"arguments": {"scope": "tower"}})
    assert not renamed.get("cached") and renamed["needs"] == first["needs"]
    assert any("tower" in x["what"] for x in renamed["largest"])
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_of_a_tpu=1")
    assert not compile_for(CPU).get("cached")


@pytest.mark.slow
def test_a_damaged_answer_is_compiled_again(tmp_path):
    first = compile_for(CPU)
    (kept,) = (tmp_path / "cache" / "gshard" / "compiled").iterdir()
    kept.write_text("{")
    assert not compile_for(CPU).get("cached")
    assert json.loads(kept.read_text())["memory"] == first["memory"]


def test_the_oldest_answers_are_removed(tmp_path):
    for age, name in enumerate("abcd"):
        (tmp_path / f"{name}.json").write_text("{}")
        os.utime(tmp_path / f"{name}.json", (100 - age, 100 - age))
    remove_oldest(tmp_path, keep=3)
    assert sorted(x.stem for x in tmp_path.iterdir()) == ["a", "b", "c"]
    remove_oldest(tmp_path, keep=3)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"target": "cpu:8"}'])
def test_a_damaged_answer_is_none(tmp_path, text):
    file = tmp_path / "answer.json"
    file.write_text('{"target": "cpu:4", "needs": 1}')
    assert read_kept(file, parse_target("cpu:4")) == {"target": "cpu:4", "needs": 1}
    file.write_text(text)
    assert read_kept(file, parse_target("cpu:4")) is None
    assert read_kept(tmp_path / "none", parse_target("cpu:4")) is None


def test_copies_and_further_choices():
    found = compile_for(CPU | {"replica": 2, "micro_batches": 2, "accumulate": "scatter"})
    assert found["mesh"] == {"replica": 2, "shard": 2}


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (CPU | {"model": "tests.no_model:setup"}, "No module named 'tests.no_model'"),
        (CPU | {"level": "oss"}, "Did you mean 'os'?"),
        (CPU | {"target": "h100:3x9"}, "at most 8 GPUs"),
        (asked("aborts"), "the compiler aborted: Check failed: 2 == 3 no such torus (mesh.cc:12)"),
        (asked("killed"), "the kernel killed the compiler"),
        (asked("leaves"), "code 3"),
        (asked("wrong_loss", level="dp"), "TypeError: a loss that was never right"),
    ],
    ids=lambda x: x["model"] if isinstance(x, dict) else "",
)
def test_a_failure_is_one_line(request_, said):
    with pytest.raises(GShardError) as caught:
        compile_for(request_)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def gone(pid, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_too_long_is_an_error_and_leaves_nothing(tmp_path):
    path = tmp_path / "pid"
    asleep = asked("sleeps", arguments={"path": str(path)})

    def report(stage, seconds):
        if path.exists() and path.read_text():
            raise KeyboardInterrupt  # as Ctrl-C does, once the model is at it

    with pytest.raises(KeyboardInterrupt):
        compile_for(asleep, report=report)
    assert gone(int(path.read_text()))
    with pytest.raises(GShardError, match=r"not compiled after 0 s \(importing\)"):
        compile_for(asleep, timeout=0.1)


def test_it_ends_with_a_parent_that_is_killed(tmp_path):
    path = tmp_path / "pid"
    asleep = asked("sleeps", arguments={"path": str(path)})
    code = f"from gshard.analysis.aot.compiled import compile_for; compile_for({asleep!r})"
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as parent:
        while not (path.exists() and path.read_text()):
            assert parent.poll() is None
            time.sleep(0.1)
        parent.send_signal(signal.SIGKILL)
    assert gone(int(path.read_text()))


@pytest.mark.parametrize(
    ("said", "code", "why"),
    [
        (
            "E1\nXlaError: Couldn't find a suitable version of nvlink. The",
            1,
            "nvidia-cuda-nvcc",
        ),
        ("OSError: [Errno 28] No space left on device: 'x.so'", 1, "the disk is full"),
        ("OSError: [Errno 122] Disk quota exceeded: 'x.so'", 1, "the disk is full"),
        ("terminate called after throwing 'std::bad_alloc'", -6, "too little memory"),
        ("*** SIGSEGV", -11, "ended by SIGSEGV: *** SIGSEGV"),
        ("Traceback\nValueError: too odd\nFor simplicity", 1, "code 1: ValueError: too odd"),
        ("", 3, "code 3: it said nothing"),
    ],
)
def test_why_a_compilation_failed(said, code, why):
    assert why in reason(said, code)


def found_with(platform, request_):
    """What `compile_for` returns in a Python that has the compiler."""
    code = f"""
import json
from gshard.analysis.aot.compiled import compile_for
print(json.dumps(compile_for({request_!r})))
"""
    command = [python_for(platform), "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100:1x8", "tpu-v5e:2x4"])
def test_what_fits_on_accelerators(target):
    more = {"target": target, "level": "os", "arguments": {"width": 2048}}
    found = found_with("gpu" if target.startswith("h") else "tpu", CPU | more)
    assert found["fits"] is True
    whole = 4 * 2048**2 * 4
    assert found["memory"]["argument"] == pytest.approx(whole * (1 + 2 / 8) + 8192, abs=8192)
    assert found["needs"] == pytest.approx(
        found["memory"]["argument"] + found["memory"]["temp"], rel=0.01
    )
    assert found["wire_bytes"]["reduce-scatter"] == whole * 7 / 8


@pytest.mark.slow
def test_too_large_for_a_gpu_is_a_verdict():
    """XLA compiles it; the activations of 40 layers are what is too much."""
    more = {"target": "h100:1x8", "level": "p_g_os", "micro_batch_size": 2**15}
    found = found_with("gpu", CPU | more | {"arguments": {"width": 8192, "layers": 40}})
    assert found["fits"] is False
    assert found["needs"] > found["has"] == pytest.approx(0.75 * 84.9e9, rel=0.01)
    assert found["needs"] == pytest.approx(found["memory"]["peak"], rel=0.01)
    first = found["largest"][0]
    assert first["shape"] == "f32[40,32768,8192]"
    assert first["what"].startswith("jvp(loss)/while/body")
    assert found["wire_bytes"]["all-gather"] > 0


@pytest.mark.slow
def test_too_large_for_a_tpu_is_a_verdict():
    """The compiler refuses it: 20 replicated layers of 256 MiB, with moments and gradients."""
    more = {"target": "tpu-v5e:2x4", "level": "dp"}
    found = found_with("tpu", CPU | more | {"arguments": {"width": 8192, "layers": 20}})
    assert found["fits"] is False
    whole = 20 * 8192**2 * 4
    assert found["memory"]["argument"] == pytest.approx(3 * whole, rel=1e-3)
    assert found["needs"] == pytest.approx(25 * 2**30, rel=1e-3)  # the error says 25.00G
    assert found["has"] == 15.75 * 2**30
    assert {"params/w", "opt_state/inner/0/mu/w"} <= {x["what"] for x in found["largest"][:4]}
    assert found["wire_bytes"]["all-reduce"] >= 2 * 7 / 8 * whole
