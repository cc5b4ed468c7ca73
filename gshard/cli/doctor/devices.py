"""Checks that JAX starts, uses every device of the machine, and computes correctly on them.

JAX may hang or abort, so it runs in other processes: `run_probe` starts one that runs a function
named `probe_...` of this module, and the check before that function judges its answer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module, metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gshard._util.errors import GShardError, GShardWarning
from gshard._util.text import bytes_of
from gshard.cli.doctor.machine import Check, Hardware, one_line
from gshard.distributed import env_vars
from gshard.distributed.initialize import initialize, process_index
from gshard.distributed.launch.exit_status import Readable, in_words
from gshard.distributed.launch.guardian import Guardian, kill_group
from gshard.distributed.launch.spawn import spawn
from gshard.sharding.host_arrays import full_params
from gshard.sharding.level import LEVELS
from gshard.sharding.mesh import make_mesh, virtual_devices
from gshard.train.shard_train_state import shard_train_state
from gshard.train.train_step import make_train_step

_RUN = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
_RUN += "from gshard.cli.doctor import devices; devices.answer(*sys.argv[2:])"
_ANSWER = "gshard answers: "  # begins the lines that are a probe's own
_GLOG = re.compile(r"^[IWEF]\d{4} [\d:.]+\s+\d+ \S+\] ")
_REASON = re.compile(r"F\d{4} |Unknown flag|Check failed|\b\w*(Error|Exception)\b|[Ff]ailed")


def run_probe(probe: str, seconds: float, **arguments: Any) -> tuple[dict[str, Any], str, str]:
    """Runs a probe in a new process; returns its result, what went wrong, and its error.

    A probe is a function of this module, or `module:function`, that returns a dict for JSON, or
    yields dicts, of which later ones replace the fields of earlier ones. Where something went
    wrong, the result has what the process had answered before.
    """
    # A probe runs alone, so it must not see this process's position in a job.
    alone = {name: x for name, x in os.environ.items() if not name.startswith("GSHARD_")}
    guardian = Guardian()
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, json.dumps(sys.path), probe, json.dumps(arguments)],
        # Other programs on the GPUs keep their memory.
        env=alone | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    guardian.watch(process.pid)
    try:
        out, log = process.communicate(timeout=seconds)
        trouble = f"it {in_words(process.returncode)}" if process.returncode else ""
    except subprocess.TimeoutExpired as error:
        out, log = error.stdout or b"", error.stderr or b""
        trouble = f"timed out: it had not ended after {seconds:g} s"
    finally:
        if process.poll() is None:
            kill_group(process.pid)
            with suppress(subprocess.TimeoutExpired):  # one that the kernel cannot kill
                process.communicate(timeout=5)
        guardian.forget(process.pid)
        guardian.close()
    found: dict[str, Any] = {}
    for line in out.splitlines():
        # Other lines are of the start of Python, as of a sitecustomize.py.
        _, marked, text = line.partition(_ANSWER.encode())
        if marked:
            with suppress(ValueError):  # cut off at the end
                found |= json.loads(text)
    trouble = trouble or one_line(found.pop("error", "" if found else "it printed no answer"))
    reason = reason_in(log.decode(errors="replace"))
    if trouble and reason not in trouble:
        trouble += f": {reason}"
    return found, trouble, reason


def answer(probe: str, arguments: str) -> None:
    """Runs a probe in this process and prints its answer as JSON; all else goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore", GShardWarning)
    try:
        module, _, name = probe.rpartition(":")
        found = getattr(import_module(module or __name__), name)(**json.loads(arguments))
        for one in [found] if isinstance(found, dict) else found:
            print(_ANSWER + json.dumps(one), file=out, flush=True)
    except (Exception, SystemExit) as error:
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        print(_ANSWER + json.dumps({"error": said}), file=out, flush=True)


def reason_in(log: str) -> str:
    """Returns the line of a log that says what went wrong; empty if none does."""
    readable = Readable()
    lines = [line for line in map(one_line, log.splitlines()) if readable.shows(line)]
    found = [line for line in lines if _REASON.search(line)]
    fatal = [line for line in found if re.match(r"F\d{4} ", line)]  # with which C++ aborts
    return _GLOG.sub("", (fatal or found or [""])[-1])


# ---- the devices that JAX uses -------------------------------------------------------------------

# field of `Hardware`: JAX's platform, and the name of one
_KINDS = {"nvidia": ("gpu", "NVIDIA GPU"), "amd": ("gpu", "AMD GPU"), "tpu": ("tpu", "TPU chip")}
_HIDE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_TIMED_OUT = "check that no other program holds the devices; --timeout gives it more seconds"


def started(here: Hardware, seconds: float) -> tuple[bool, list[Check]]:
    """Returns whether JAX starts, and checks of the devices that it uses."""
    found, trouble, log = run_probe("probe_devices", seconds)
    if trouble:
        return False, [Check("devices", "fail", trouble, _fix_start(trouble, here))]
    platform, kind, memory = found["platform"], found["kind"], found["memory"]
    about = [kind] * (kind != platform) + ([f"{bytes_of(memory)} each"] if memory else [])
    said = f"{found['count']} {platform}" + (f" ({', '.join(about)})" if about else "")
    idle = unused_devices(platform, found["count"], here, log)
    return True, [Check("devices", "ok", said), *idle]


def probe_devices() -> dict[str, Any]:
    """Returns the number of devices that JAX uses, and what one of them is."""
    try:
        found = jax.local_devices()
    except AssertionError:  # all that JAX says then
        raise RuntimeError("JAX has no plugin for what JAX_PLATFORMS names") from None
    memory = (found[0].memory_stats() or {}).get("bytes_limit")
    about = {"platform": found[0].platform, "kind": found[0].device_kind, "memory": memory}
    return {"count": len(found), **about}


def unused_devices(platform: str, count: int, here: Hardware, log: str = "") -> list[Check]:
    """Explains which devices of the machine JAX does not use, of the platform that it uses."""
    found = []
    for name, (wanted, _) in _KINDS.items():
        used = count if platform == wanted else 0
        if used < getattr(here, name) and not (used and name == "tpu"):  # a chip is one or two
            found.append(unused(name, used, here, os.environ, log))
    return found


def unused(
    kind: str, used: int, here: Hardware, environment: Mapping[str, str], log: str = ""
) -> Check:
    """Explains why JAX uses only some devices of a kind, a field of `Hardware`."""
    count, name = getattr(here, kind), "unused device"
    said = f"JAX uses {used} of {count} {_KINDS[kind][1]}{'s' if count > 1 else ''}"
    told = next((x for x in ("JAX_PLATFORMS", "JAX_PLATFORM_NAME") if environment.get(x)), "")
    if told and not used:
        return Check(name, "warn", f"{said}: {told}={environment[told]}", f"unset {told}")
    hides = next((x for x in _HIDE_GPUS if x in environment), "") if kind != "tpu" else ""
    if hides and (used or has_plugin(kind)):  # clusters set such variables, plugin or not
        said = f"{said}: {hides}={environment[hides]}"
        if env_vars.LOCAL_PROCESS_ID in environment or "SLURM_LOCALID" in environment:
            return Check("devices of this process", "ok", said)
        return Check(name, "warn", said, f"unset {hides}, unless you chose these devices")
    if kind == "nvidia" and used:
        fix = "see `nvidia-smi` and `dmesg` for the others: one may be broken, or in MIG mode"
        return Check(name, "fail", said, fix)
    return Check(name, "fail", f"{said}{': ' if log else ''}{log}", to_install(kind, here))


def has_plugin(kind: str) -> bool:
    """Whether a plugin of JAX for this kind of GPU is installed."""
    wanted = {"nvidia": "jax-cuda", "amd": "jax-rocm"}[kind]
    names = (found.metadata["Name"] or "" for found in metadata.distributions())
    return any(name.lower().replace("_", "-").startswith(wanted) for name in names)


def _fix_start(trouble: str, here: Hardware) -> str:
    if "XLA_FLAGS" in trouble:
        return "remove the flag from XLA_FLAGS, or correct it: flags differ between versions"
    if platforms := os.environ.get("JAX_PLATFORMS"):
        kinds = {"cuda": "nvidia", "gpu": "nvidia", "rocm": "amd", "tpu": "tpu"}
        lines = {to_install(kinds[p], here) for p in platforms.split(",") if p in kinds}
        plugin = f", or install its plugin: {' '.join(sorted(lines))}" if lines else ""
        return f"JAX_PLATFORMS={platforms}: unset it{plugin}"
    return _TIMED_OUT if "timed out" in trouble else "run python -c 'import jax; jax.devices()'"


def to_install(kind: str, here: Hardware) -> str:
    """Returns the pip command that gives JAX, at its version, a kind of device."""
    driver = re.match(r"\d+", here.driver)
    extras = metadata.metadata("jax").get_all("Provides-Extra") or []
    extra = {
        "nvidia": "cuda12" if driver and int(driver[0]) < 580 else "cuda13",
        "amd": next((x for x in extras if x.startswith("rocm")), "rocm"),
        "tpu": "tpu",
    }[kind]
    return f'pip install -U "jax[{extra}]=={jax.__version__}"'


# ---- a train step --------------------------------------------------------------------------------

_TOLERANCE = 1e-5
_TRY_ANOTHER = "try another version of JAX, jaxlib or the driver; then report it to gshard"


def train_step(seconds: float) -> list[Check]:
    """Checks that a train step at every level matches single-device training."""
    found, trouble, _ = run_probe("probe_train_step", seconds)
    if trouble:
        busy = "timed out" in trouble or "RESOURCE_EXHAUSTED" in trouble
        return [Check("train step", "fail", trouble, _TIMED_OUT if busy else _TRY_ANOTHER)]
    return [judged(found["levels"], found["where"])]


def judged(found: Mapping[str, float], where: str) -> Check:
    """Checks that each level differs from single-device training only by rounding."""
    wrong = [f"{level} by {x:.1g}" for level, x in found.items() if not x <= _TOLERANCE]
    if wrong:
        said = f"on {where} the parameters differ from single-device training: {', '.join(wrong)}"
        return Check("train step", "fail", said, _TRY_ANOTHER)
    said = f"{', '.join(found)} on {where}: matches one device to {max(found.values()):.0e}"
    return Check("train step", "ok", said)


def probe_train_step() -> dict[str, Any]:
    """Returns each level's largest difference in parameters from single-device training."""
    with suppress(GShardError):  # JAX has started, or XLA_FLAGS says how many
        virtual_devices(4)  # has no effect on accelerators
    here = jax.local_devices()
    mesh = make_mesh(devices=here)
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    params = {"in": normal(64, 48) / 8, "bias": normal(48), "out": normal(48, 16) / 7}
    batch = {"x": normal(4 * len(here), 64), "y": normal(4 * len(here), 16)}
    tx = optax.sgd(0.1, momentum=0.9)
    found = {}
    # Otherwise TPUs, and GPUs with TF32, round the operands of a product.
    with jax.default_matmul_precision("highest"):
        wanted, opt_state = params, tx.init(params)
        for _ in range(2):
            updates, opt_state = tx.update(jax.grad(_loss)(wanted, batch), opt_state, wanted)
            wanted = optax.apply_updates(wanted, updates)
        for level in LEVELS:
            state, plan = shard_train_state((params, tx), mesh, LEVELS[level], min_shard_size=0)
            step = make_train_step(_loss, plan)
            for _ in range(2):
                state, _ = step(state, batch)
            got = full_params(state)
            differences = jax.tree.map(lambda a, b: abs(np.asarray(a) - b).max(), got, wanted)
            found[level] = float(max(differences.values()))
    where = f"{len(here)} {here[0].platform} device{'s' if len(here) > 1 else ''}"
    return {"levels": found, "where": where}


def _loss(params: Any, batch: Any) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["in"] + params["bias"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def two_processes(seconds: float) -> list[Check]:
    """Checks that two CPU processes of this machine can join and compute a sum."""
    name = "two processes (Gloo)"
    found, trouble, _ = run_probe("probe_two_processes", seconds, timeout=max(1, int(seconds)))
    if trouble:
        fix = "see `own name` above, and let firewalls pass connections of this machine to itself"
        return [Check(name, "fail", trouble, fix)]
    if found["sums"] != [3.0, 3.0]:
        return [Check(name, "fail", f"1 + 2 gave {found['sums']}", "reinstall jaxlib")]
    return [Check(name, "ok", "joined, and their sum is correct")]


def probe_two_processes(timeout: int, gpus: str | None = None) -> dict[str, Any]:
    """Returns the sum of 1 and 2 that each of two new processes gets, on the CPU or on two GPUs."""
    sums = spawn(
        sum_over_processes,
        nprocs=2,
        devices=gpus,
        virtual_devices=None if gpus else 1,
        initialization_timeout=timeout,
    )
    return {"sums": sums}


def sum_over_processes() -> float:
    """Joins the processes of this job, and returns the sum of 1, 2, ... over them."""
    initialize()
    mesh = make_mesh()
    sharded = jax.NamedSharding(mesh, jax.P(mesh.axis_names))
    own = np.full((1,), process_index() + 1, np.float32)
    add = jax.jit(jnp.sum, out_shardings=jax.NamedSharding(mesh, jax.P()))
    return float(add(jax.make_array_from_process_local_data(sharded, own)))
