"""`gshard.Metrics`: what its rows say, what it costs, and that a writer never stops training."""

from __future__ import annotations

import gc
import json
import math
import os
import struct
import subprocess
import sys
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding

import gshard
from gshard._util import activity, events
from gshard._util.chips import CHIPS
from gshard.analysis.monitor import metrics as module
from gshard.analysis.monitor.mfu import chip_of_step, model_flops, seconds_at_peak
from gshard.analysis.monitor.step_calls import StepCalls
from gshard.analysis.monitor.writers import JsonLines, line_of
from tests.processes import run_together

WIDTH, EXAMPLES = 64, 16


class Rows(list):
    """A writer that keeps what it is given."""

    def write_scalars(self, step, scalars):
        self.append((step, scalars))


def make(**options):
    """A state, its step, and a batch; the losses of the nth batch is n."""

    def loss_fn(params, batch):
        return jnp.mean(batch["loss"][:, None] * (1 + batch["x"] @ params["w"]))

    params = {"w": jnp.zeros((WIDTH, WIDTH))}
    state, plan = gshard.shard_train_state(
        (params, optax.sgd(0.0)), gshard.make_mesh(), "os_g", min_shard_size=16
    )
    return state, plan, gshard.make_train_step(loss_fn, plan, **options)


def batch(loss=1.0, rows=EXAMPLES):
    return {"x": np.ones((rows, WIDTH), np.float32), "loss": np.full(rows, loss, np.float32)}


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- rows ---------------------------------------------------------------------------------------


def test_rows_are_means_of_their_steps_also_the_last_short_one(tmp_path):
    state, _, step = make()
    with gshard.Metrics(tmp_path, every=4, writers=[]) as metrics:
        for n in range(1, 11):
            state, info = step(state, batch(float(n)))
            metrics.step(info)
    rows = read(tmp_path)
    assert [row["step"] for row in rows] == [4, 8, 10]
    assert [row["steps"] for row in rows] == [4, 4, 2]
    assert [row["loss"] for row in rows] == pytest.approx([2.5, 6.5, 9.5])
    for row in rows:
        assert row["examples_per_second"] == pytest.approx(EXAMPLES / row["step_time"])
        assert row["host_memory"] > 50e6
        assert "mfu" not in row and "tokens_per_second" not in row


def test_steps_count_whose_result_was_not_given(tmp_path):
    """`if n % 5 == 0: metrics.step(info)`."""
    state, _, step = make()
    with gshard.Metrics(tmp_path, every=2, writers=[]) as metrics:
        for n in range(1, 21):
            state, info = step(state, batch(float(n)))
            if n % 5 == 0:
                metrics.step(info)
    rows = read(tmp_path)
    assert [row["step"] for row in rows] == [10, 20]
    assert [row["steps"] for row in rows] == [10, 10]
    for row in rows:
        assert row["examples_per_second"] == pytest.approx(EXAMPLES / row["step_time"])


def test_a_second_call_after_a_step_is_warned_of_once(tmp_path):
    """`metrics.step(evaluated)`, which counts as a step."""
    state, _, step = make()
    with gshard.Metrics(tmp_path, every=2, writers=[], peak_flops=np.float32(1e12)) as metrics:
        state, info = step(state, batch())
        metrics.step(info)
        with pytest.warns(gshard.GShardWarning, match="gshard saw no train step in between"):
            metrics.step({"accuracy": 0.5})
        metrics.step({"accuracy": 0.5})
        for n in range(1, 3):
            metrics.step({"accuracy": 0.5}, number=n)  # of a step of the user's own
    assert [row["steps"] for row in read(tmp_path)] == [2, 2, 1]


def test_step_time_is_wall_time_and_data_time_is_part_of_it(tmp_path):
    state, plan, step = make()
    state, _ = step(state, batch())

    def slow():
        for _ in range(8):
            time.sleep(0.02)
            yield batch()

    rows = Rows()
    with gshard.Metrics(every=4, writers=[rows]) as metrics:
        for given in gshard.global_batches(slow(), plan):
            time.sleep(0.01)
            state, info = step(state, given)
            metrics.step(info)
    _, last = rows[-1]
    assert last["step_time"] >= 0.03
    assert 4 * 0.02 <= last["data_time"] < 4 * last["step_time"] - 4 * 0.01
    assert last["goodput"] == pytest.approx(
        1 - (last["data_time"] + last["compile_time"]) / (4 * last["step_time"])
    )


def test_time_in_checkpoints_and_in_the_loader_is_told_apart(tmp_path):
    state, plan, step = make()
    source = {name: np.repeat(x, 4, axis=0) for name, x in batch().items()}
    rows = Rows()
    with (
        gshard.Metrics(every=4, writers=[rows]) as metrics,
        gshard.Checkpointer(tmp_path / "c") as checkpointer,
    ):
        slow = gshard.DataLoader(
            source, EXAMPLES, plan, prefetch=0, transform=lambda x: time.sleep(0.002) or x
        )
        for given in slow:
            state, info = step(state, given)
            before = time.monotonic()
            checkpointer.save(int(state.step), state)
            saved = time.monotonic() - before
            metrics.step(info)
    ((_, row),) = rows
    # The wait for the first batch is before the first step, and not part of the row.
    assert row["data_time"] >= 3 * EXAMPLES * 0.002
    assert saved * 0.9 < row["checkpoint_time"] < 4 * row["step_time"] - row["data_time"]


def test_time_of_nested_calls_counts_once():
    before = sum(activity.spent.values())
    began = time.monotonic()
    with activity.spending("checkpoint"), activity.spending("data"):
        time.sleep(0.05)
    assert 0.05 <= sum(activity.spent.values()) - before <= time.monotonic() - began


def test_names_of_the_row_are_not_taken_from_the_users_scalars(tmp_path):
    state, _, step = make()
    with gshard.Metrics(tmp_path, every=1) as metrics:
        _, info = step(state, batch())
        metrics.step({**info, "step": 9, "time": 3})
    (row,) = read(tmp_path)
    assert row["step"] == 1 and isinstance(row["time"], str) and list(row)[:2] == ["time", "step"]


def test_compilation_of_the_first_step_is_named():
    state, _, step = make()
    rows = Rows()
    with gshard.Metrics(every=2, writers=[rows]) as metrics:
        for _ in range(4):
            state, info = step(state, batch())
            metrics.step(info)
    assert rows[0][1]["compile_time"] > 0.5 * 2 * rows[0][1]["step_time"]
    assert rows[1][1]["compile_time"] == 0
    assert rows[1][1]["goodput"] > rows[0][1]["goodput"]


def test_a_resumed_run_appends_with_its_step_numbers(tmp_path):
    def train(steps):
        state, _, step = make()
        with gshard.Checkpointer(tmp_path / "c") as checkpointer:
            if checkpointer.latest_step() is not None:
                state = checkpointer.restore(like=state).state
            with gshard.Metrics(tmp_path, every=2, writers=[]) as metrics:
                for _ in range(steps):
                    state, info = step(state, batch())
                    metrics.step(info)
            checkpointer.save(int(state.step), state)

    train(3)
    train(4)
    assert [row["step"] for row in read(tmp_path)] == [2, 3, 5, 7]


def test_skipped_steps_have_no_number_and_do_not_spoil_the_mean():
    state, _, step = make()
    rows = Rows()
    with gshard.Metrics(every=4, writers=[rows]) as metrics:
        for loss in (1.0, np.nan, 3.0, 5.0):
            state, info = step(state, batch(loss))
            metrics.step(info)
    ((number, row),) = rows
    assert (number, row["skipped_steps"], row["loss"]) == (int(state.step), 1, 3.0)
    assert number == 3


@pytest.mark.parametrize(
    "given", [lambda x: {"loss": x["loss"]}, lambda x: {"loss": float(x["loss"])}], ids=["", "host"]
)
def test_steps_are_known_to_be_skipped_whatever_is_logged(given):
    state, _, step = make()
    rows = Rows()
    for loss in (np.nan, np.nan):  # before there are Metrics
        state, _ = step(state, batch(loss))
    with gshard.Metrics(every=2, writers=[rows]) as metrics:
        for loss in (1.0, np.nan, 3.0, 5.0):
            state, info = step(state, batch(loss))
            metrics.step(given(info))
    assert [(number, row["loss"]) for number, row in rows] == [(1, 1.0), (3, 4.0)]
    assert int(state.step) == 3


def test_a_step_that_was_skipped_and_not_logged_costs_no_other():
    state, _, step = make()
    rows = Rows()
    with gshard.Metrics(every=2, writers=[rows]) as metrics:
        for n, loss in enumerate((2.0, 1.0, np.nan, 3.0)):
            state, info = step(state, batch(loss))
            if n % 2:
                metrics.step(info)
        metrics.step({"accuracy": 0.5}, number=4)  # of no step
    assert [(number, row.get("loss")) for number, row in rows] == [(3, 2.0), (4, None)]


def test_skipped_steps_of_ones_own_jit_do_not_spoil_the_mean():
    state, plan, step = make()
    own, rows = jax.jit(lambda state, batch: step(state, batch)), Rows()
    with gshard.Metrics(every=3, writers=[rows]) as metrics:
        for n, loss in enumerate((1.0, np.nan, 3.0, np.nan, 5.0, 7.0)):
            given = gshard.shard_batch(batch(loss), plan)
            state, info = own(state, given)
            metrics.step(info, given, number=n + 1)
    assert [(number, row["loss"]) for number, row in rows] == [(3, 2.0), (6, 6.0)]


@pytest.mark.parametrize("every", [1, 2])
def test_skipped_steps_logged_late_do_not_spoil_the_mean(every):
    """Another state steps in turn."""
    state, _, step = make(donate=False)
    other, rows, infos = state, Rows(), []
    with gshard.Metrics(every=4, writers=[rows]) as metrics:
        for n, loss in enumerate((np.nan, np.nan, 1.0, np.nan, 3.0, 5.0, 6.0, 7.0, 8.0)):
            state, info = step(state, batch(loss))
            other, _ = step(other, batch())
            if infos and n % every == 0:
                metrics.step(infos[-1])
            infos.append(info)
    means = [[1.0, 21 / 4], [6.0]]  # of nan, nan, 1, nan and 3, 5, 6, 7; of nan, nan, 5, 7
    assert [row["loss"] for _, row in rows] == means[every - 1]


def test_a_step_with_another_state_counts_as_that_state_does():
    """Seeds of a sweep, and two states in turn."""
    state, _, step = make(donate=False)
    fresh, rows = state, Rows()
    with gshard.Metrics(every=2, writers=[rows]) as metrics:
        for _ in range(4):
            state, info = step(state, batch())
            metrics.step(info)
        for _ in range(2):
            fresh, info = step(fresh, batch())
            metrics.step(info)
        for _ in range(2):
            state, info = step(state, batch())
            fresh, info = step(fresh, batch())
        metrics.step(info)
    assert [number for number, _ in rows] == [2, 4, 2, 4] == [2, int(state.step) - 2, 2, 4]
    assert int(fresh.step) == 4


def test_integers_and_the_loss_scale_are_the_last_and_nested_values_have_paths():
    rows = Rows()
    with gshard.Metrics(every=2, writers=[rows]) as metrics:
        for n in range(2):
            metrics.step(
                {
                    "loss": jnp.bfloat16(n),
                    "count": jnp.int32(n),
                    "loss_scale": jnp.float32(2.0**n),
                    "aux": {"accuracy": jnp.float32(n)},
                    "logits": jnp.ones((3, 3)),
                    "note": "text",
                    "rng": jax.random.key(n),
                    "large": 10**400 + n,
                },
                np.zeros((8, 5), np.int32),
                number=7 + n,
            )
    ((number, row),) = rows
    assert number == 8
    assert (row["loss"], row["count"], row["loss_scale"], row["aux/accuracy"]) == (0.5, 1, 2, 0.5)
    assert not {"logits", "note", "rng"}.intersection(row)
    assert row["large"] == 10**400 + 1
    assert row["tokens_per_second"] == pytest.approx(5 * row["examples_per_second"])


@pytest.mark.parametrize("name", ["tokens", "input_ids"])
def test_tokens_are_known_of_the_batch_or_given(name):
    given = {name: np.zeros((8, 6), np.int32), "mask": np.ones((8, 6), np.int32)}
    for tokens, wanted in ((None, 6), (100, 100)):
        rows = Rows()
        with gshard.Metrics(every=1, writers=[rows], tokens=tokens) as metrics:
            metrics.step({"loss": 1.0}, given)
            time.sleep(0.01)
            metrics.step({"loss": 1.0}, given)
        row = rows[1][1]
        assert row["tokens_per_second"] == pytest.approx(wanted * row["examples_per_second"])


# ---- MFU ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("level", ["dp", "os_g", "p_g_os"])
def test_model_flops_are_three_forward_passes(level, remat):
    def loss_fn(params, x):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        body = jax.checkpoint(layer) if remat else layer
        return jnp.square(jax.lax.scan(body, x @ params["in"], params["w"])[0]).mean()

    params = {"in": jnp.ones((WIDTH, WIDTH)), "w": jnp.ones((6, WIDTH, WIDTH))}
    traces = []
    state, plan = gshard.shard_train_state(
        (params, optax.adam(1e-3)), gshard.make_mesh(), level, min_shard_size=16
    )
    step = gshard.make_train_step(lambda *x: traces.append(1) or loss_fn(*x), plan, donate=True)
    x = np.ones((EXAMPLES, WIDTH), np.float32)
    step(state, x)
    ran = len(traces)
    found = model_flops(step, gshard.shard_batch(x, plan))
    assert len(traces) == ran, "it was traced again"
    forward = 2 * EXAMPLES / len(jax.devices()) * WIDTH**2
    assert found == {"float32": 3 * 6 * forward + 2 * forward}  # no gradient of the data


def test_mfu_is_flops_over_wall_time_and_peak():
    state, plan, step = make()
    rows = Rows()
    with gshard.Metrics(every=3, writers=[rows], peak_flops=1e9) as metrics:
        for _ in range(3):
            state, info = step(state, batch())
            metrics.step(info)
    ((_, row),) = rows
    flops = sum(model_flops(step, gshard.shard_batch(batch(), plan)).values())
    assert flops > 2 * EXAMPLES / 8 * WIDTH**2
    assert row["mfu"] == pytest.approx(flops / row["step_time"] / 1e9)


def test_the_peak_is_that_of_the_dtype():
    flops = {"bfloat16": 6e14, "float32": 1e14, "float8_e4m3fn": 1e14}
    assert seconds_at_peak(flops, 1e15) == pytest.approx(0.8)
    h100 = CHIPS["h100"]
    wanted = 7e14 / h100.bfloat16 + 1e14 / h100.float32
    assert seconds_at_peak(flops, h100) == pytest.approx(wanted)
    assert chip_of_step(make()[2]) is None  # a CPU


def test_mfu_of_nnx_models_and_several_shapes_of_batches():
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    (model, optimizer), plan = gshard.shard_train_state(
        (model, optimizer), gshard.make_mesh(), "zero3", min_shard_size=16
    )
    step = gshard.make_train_step(lambda model, x: jnp.square(model(x)).mean(), plan)
    rows = Rows()
    with gshard.Metrics(every=2, writers=[rows], peak_flops=1e9) as metrics:
        for examples in (8, 16):
            metrics.step(step(model, optimizer, np.ones((examples, WIDTH), np.float32)))
    ((_, row),) = rows
    per_example = 2 * 2 * WIDTH**2  # forward, and the gradient of the kernel
    assert row["mfu"] == pytest.approx((8 + 16) / 8 * per_example / 2 / row["step_time"] / 1e9)


def test_why_there_is_no_mfu_is_said_once(capsys):
    state, _, step = make()
    with gshard.Metrics(every=1) as metrics:
        for _ in range(4):
            state, info = step(state, batch())
            metrics.step(info)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 5
    assert [line for line in said if "MFU" in line] == [
        "no MFU: the peak of a CPU is not known; peak_flops= gives it, in FLOP/s"
    ]
    assert said[0].startswith("step 1  loss 1  grad norm ")


def test_a_step_without_products_has_no_mfu(capsys):
    state, plan, _ = make()
    step = gshard.make_train_step(lambda p, b: b["loss"].mean() * p["w"].mean(), plan)
    with gshard.Metrics(every=1, peak_flops=1e9) as metrics:
        metrics.step(step(state, batch())[1])
    assert capsys.readouterr().out.splitlines()[1] == "no MFU: the step multiplies no matrices"


# ---- cost ---------------------------------------------------------------------------------------


def test_values_are_fetched_once_per_window_and_never_of_a_running_step(monkeypatch):
    """Every way from a device to the host is through one property of an array."""
    state, _, step = make(max_bad_steps=None)
    kind, fetched = type(jnp.ones(())), []
    original = kind._value
    monkeypatch.setattr(
        kind, "_value", property(lambda x: fetched.append((count, x)) or original.fget(x))
    )
    count = -1
    rows = Rows()
    with gshard.Metrics(every=5, writers=[rows]) as metrics:
        for count in range(1, 18):
            state, info = step(state, batch())
            if count == 1:
                fetched.clear()  # the number of the first step
            metrics.step(info)
        assert {at for at, _ in fetched} == {5 + 2, 10 + 2, 15 + 2}
        # Loss, norm and skipped steps, and how many were skipped before; before the first none.
        assert len({id(x) for _, x in fetched}) == 4 * 5 * 3 - 1
        assert len(rows) == 3


def test_windows_are_copied_together(monkeypatch):
    state, _, step = make()
    calls = []
    original = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: calls.append(x) or original(x))
    with gshard.Metrics(every=5, writers=[]) as metrics:
        for _ in range(17):
            state, info = step(state, batch())
            metrics.step(info)
    assert [len(x) for x in calls] == [5, 5, 5, 2]


def test_nothing_is_compiled_for_it():
    state, _, step = make()
    state, info = step(state, batch())
    compiled = []
    on = [True]
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if on[0] and "compile" in event else None
    )
    with gshard.Metrics(every=2, writers=[Rows()], peak_flops=1e12) as metrics:
        for _ in range(6):
            state, info = step(state, batch())
            metrics.step(info)
    on[0] = False
    assert not [x for x in compiled if "backend_compile" in x]


def test_it_keeps_no_batch_alive_and_forgets_its_observer():
    state, _, step = make()
    metrics = gshard.Metrics(every=100, writers=[])
    assert [x for x in events.observers if isinstance(x, StepCalls)]
    given = gshard.shard_batch(batch(), step.plan)
    state, info = step(state, given)
    metrics.step(info)
    refs = [weakref.ref(x) for x in jax.tree.leaves(given)]
    del given
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    metrics.close()
    assert not [x for x in events.observers if isinstance(x, StepCalls)]


def test_metrics_of_the_same_directory_are_closed_by_new_ones(tmp_path):
    """As of a cell of a notebook that runs again."""
    state, _, step = make()
    for _ in range(3):
        metrics = gshard.Metrics(tmp_path, every=2, writers=[])
        for _ in range(3):
            state, info = step(state, batch())
            metrics.step(info)
    assert [row["step"] for row in read(tmp_path)] == [2, 3, 5, 6]
    assert len([x for x in events.observers if isinstance(x, StepCalls)]) == 1
    metrics.close()


@pytest.mark.filterwarnings("ignore:make_train_step was called 3 times")
def test_a_step_that_the_program_has_dropped_is_not_kept_alive():
    """As of a loop that makes a new one in each epoch: each holds programs and constants."""
    state, plan, step = make()
    alive = []
    with gshard.Metrics(every=1, writers=[], peak_flops=1e9) as metrics:
        for _ in range(5):
            step = gshard.make_train_step(lambda p, b: jnp.square(b["x"] @ p["w"]).mean(), plan)
            state, info = step(state, batch())
            metrics.step(info)
            alive.append(weakref.ref(step))
        gc.collect()
        kept = [ref() is not None for ref in alive]
    assert kept == [False, False, False, True, True]  # rows are written two steps late


def test_a_step_inside_a_jit_of_the_user_is_not_counted():
    state, _, step = make(donate=False)
    rows = Rows()
    with gshard.Metrics(every=1, writers=[rows]) as metrics:
        inside = jax.jit(lambda s, b: step(s, b))
        for _ in range(2):
            state, info = inside(state, gshard.shard_batch(batch(), step.plan))
            metrics.step(info, batch())
    assert [number for number, _ in rows] == [1, 2]


# ---- writers ------------------------------------------------------------------------------------


def test_a_failing_writer_warns_once_and_others_go_on(tmp_path):
    state, _, step = make()
    calls = []

    def broken(number, scalars):
        calls.append(number)
        raise OSError("disk full")

    with pytest.warns(gshard.GShardWarning) as said:
        with gshard.Metrics(tmp_path, every=1, writers=[broken]) as metrics:
            for _ in range(4):
                state, info = step(state, batch())
                metrics.step(info)
    assert [str(x.message) for x in said] == [
        "gshard.Metrics: broken could not write: OSError: disk full. Training goes on, and so do "
        "later attempts to write."
    ]
    assert calls == [1, 2, 3, 4]
    assert len(read(tmp_path)) == 4


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.warns(gshard.GShardWarning, match=r"metrics.jsonl could not write: IsADirectory"):
        with gshard.Metrics(tmp_path, every=1, writers=[]) as metrics:
            metrics.step({"loss": 1.0})


def test_json_lines_after_a_crash_or_a_full_disk_are_whole(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    writer = JsonLines(path)
    writer.write_scalars(2, {"loss": math.nan, "x": math.inf, "y": 1.5})
    lines = path.read_text().splitlines()
    assert lines[1] == '{"ste'
    row = json.loads(lines[2])
    assert (row["step"], row["loss"], row["x"], row["y"]) == (2, None, None, 1.5)
    write = module.os.write
    monkeypatch.setattr(module.os, "write", lambda file, data: write(file, data[:9]))
    before = path.read_bytes()
    with pytest.raises(OSError, match="no space"):
        writer.write_scalars(3, {"loss": 1.0})
    assert path.read_bytes() == before
    writer.close()


def test_a_clu_style_writer_is_flushed_and_left_open():
    class Writer(Rows):
        flushed = closed = 0

        def flush(self):
            self.flushed += 1

        def close(self):
            self.closed += 1

    writer = Writer()
    with gshard.Metrics(every=1, writers=[writer]) as metrics:
        metrics.step({"loss": 1.0})
    assert (len(writer), writer.flushed, writer.closed) == (1, 1, 0)


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with gshard.Metrics(tmp_path, every=1, writers=["tensorboard"]) as metrics:
        metrics.step({"loss": 1.5}, number=7)
    (file,) = tmp_path.glob("events.out.tfevents*")
    data, found = file.read_bytes(), {}
    while data:  # records: length, its checksum, event, its checksum
        (size,) = struct.unpack("<Q", data[:8])
        event, data = Event.FromString(data[12 : 12 + size]), data[16 + size :]
        found |= {value.tag: (event.step, value.simple_value) for value in event.summary.value}
    assert found["loss"] == (7, 1.5)
    assert found["step_time"][1] >= 0


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with gshard.Metrics(tmp_path, every=1, writers=["wandb"]) as metrics:
        metrics.step({"loss": 1.5}, number=7)
    assert wandb.run is None  # it has finished the run that it began
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 30  # a process of its own writes the file
    while b"loss" not in file.read_bytes():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_a_run_of_wandb_that_cannot_begin_is_not_tried_again(tmp_path):
    """In a process of its own: wandb reads its variables once."""
    pytest.importorskip("wandb")
    script = tmp_path / "script.py"
    script.write_text(
        "import gshard\n"
        "with gshard.Metrics('run', every=1, writers=['wandb']) as metrics:\n"
        "    for number in range(8):\n"
        "        metrics.step({'loss': 1.5}, number=number)\n"
        "    writer = metrics._writers[-1]._writer\n"
        "    assert writer.has_failed and writer._run is None\n"
    )
    variables = {"WANDB_MODE": "online", "WANDB_INIT_TIMEOUT": "1", "WANDB_API_KEY": "0" * 40}
    variables["WANDB_BASE_URL"] = "http://127.0.0.1:9"  # nobody listens there
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, env=os.environ | variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Training goes on, and nothing more is written.") == 1
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_writer_without_its_package_is_one_sentence(name, package, tmp_path, monkeypatch):
    monkeypatch.setattr("gshard.analysis.monitor.writers.find_spec", lambda _: None)
    wanted = rf"^the writer '{name}' needs the package {package}: pip install '{package}>=[\d.]+'$"
    with pytest.raises(gshard.GShardError, match=f"(?i){wanted}"):
        gshard.Metrics(tmp_path, writers=[name])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every": 0}, "every=0 must be a whole number of steps, 1 or more"),
        ({"tokens": -1}, "tokens=-1 must be"),
        ({"peak_flops": 0}, "peak_flops=0 must be above 0"),
        ({"writers": "terminal"}, "must be a list"),
        ({"writers": ["wandbb"]}, "Did you mean 'wandb'"),
        ({"writers": [3]}, "A writer is one of terminal, tensorboard, wandb"),
        ({"directory": 3}, "must be the path of a directory"),
    ],
)
def test_wrong_arguments(arguments, said):
    with pytest.raises(gshard.GShardError, match=said):
        gshard.Metrics(**arguments)
    assert not events.observers


def test_wrong_calls():
    metrics = gshard.Metrics(writers=[])
    with pytest.raises(gshard.ArgumentTypeError, match="state, info = step"):
        metrics.step((1, {}))
    metrics.close()
    metrics.close()
    with pytest.raises(gshard.CallOrderError, match="closed"):
        metrics.step({})


def test_values_that_were_donated_cost_their_row_alone():
    rows = Rows()
    gone = jnp.float32(1)
    gone.delete()
    with pytest.warns(gshard.GShardWarning, match="lost 1 steps, .* must not be donated"):
        with gshard.Metrics(every=1, writers=[rows]) as metrics:
            metrics.step({"loss": gone})
            metrics.step({"loss": jnp.float32(2)})
    assert [row["loss"] for _, row in rows] == [2.0]


def test_the_line_of_a_terminal():
    scalars = {
        **{"aux/accuracy": 0.5, "grad_norm": 0.25, "loss": 1.23456, "skipped_steps": 0},
        **{"steps": 10, "step_time": 0.0123, "examples_per_second": 1234.0},
        **{"tokens_per_second": 5.5e6, "data_time": 0.0246, "checkpoint_time": 0.0},
        **{"compile_time": 0.0, "goodput": 0.8, "mfu": 0.412, "device_memory": 8.1e9},
        "device_memory_peak": 9e9,
    }
    assert line_of(40, scalars) == (
        "step 40  loss 1.235  grad norm 0.25  12.3 ms/step  1.23k examples/s  5.5M tokens/s  "
        "MFU 41.2 %  device memory 8.1 GB  data 20 %  aux/accuracy 0.5"
    )


# ---- processes ----------------------------------------------------------------------------------

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
import gshard
metrics = gshard.Metrics(sys.argv[1], every=2)  # before the processes join
gshard.profile((2, 3), sys.argv[1] + "-trace")
gshard.distributed.initialize()
rank = gshard.distributed.process_index()
state, plan = gshard.shard_train_state(
    ({"w": jnp.ones((64, 64))}, optax.sgd(0.0)), gshard.make_mesh(), "zero3", min_shard_size=16
)
step = gshard.make_train_step(lambda p, b: (b @ p["w"] * 0 + b[:, :1]).mean(), plan)
for _ in range(5):
    state, info = step(state, np.full((4, 64), rank, np.float32))
    metrics.step(info)
"""


def test_the_first_process_writes_global_values_at_the_end_of_the_script_too(tmp_path):
    from benchmarks.groups import free_address
    from tests.processes import variables

    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    address = free_address()
    ended = run_together(
        tmp_path,
        [[str(script), str(tmp_path / f"run{rank}")] for rank in range(2)],
        [variables(address, 2, rank) for rank in range(2)],
    )
    assert [x.code for x in ended] == [0, 0], ended
    rows = read(tmp_path / "run0")
    assert [(row["step"], row["loss"]) for row in rows] == [(2, 0.5), (4, 0.5), (5, 0.5)]
    for row in rows[1:]:
        assert row["examples_per_second"] == pytest.approx(8 / row["step_time"])
    assert not (tmp_path / "run1").exists()
    assert len(list(tmp_path.glob("run*-trace/plugins/profile/*/*.xplane.pb"))) == 1
    assert not (tmp_path / "run1-trace").exists()
    assert "step 2  loss 0.5" in ended[0].said
    assert "step" not in ended[1].said and "Warning" not in ended[1].said, ended[1].said


def test_values_of_a_trace_are_refused():
    with gshard.Metrics(every=1, writers=[]) as metrics:

        @jax.jit
        def step(x):
            metrics.step({"loss": x.sum()})
            return x

        with pytest.raises(gshard.GShardError, match="metrics.step was called inside jax.jit"):
            step(jnp.ones(2))


def test_devices_of_a_model_parallel_axis_share_the_flops():
    def flops(mesh, spec):
        w = jax.device_put(np.ones((64, 64), np.float32), NamedSharding(mesh, spec))
        _, plan = gshard.shard_train_state(({"w": w}, optax.sgd(0.1)), mesh, "dp")
        step = gshard.make_train_step(lambda p, x: jnp.square(x @ p["w"]).mean(), plan)
        rows = gshard.shard_batch(np.ones((16, 64), np.float32), plan)
        return mesh.size * sum(model_flops(step, rows).values())

    one = flops(gshard.make_mesh(devices=jax.devices()[:1]), jax.P())
    assert flops(gshard.make_mesh(extra={"model": 2}), jax.P(None, "model")) == one > 0
