"""`gshard advise`: what fits, in which order, and why."""

from __future__ import annotations

import dataclasses
import json
import math

import jax
import pytest

import gshard
from gshard._util.chips import memory_of
from gshard.analysis import cost_model
from gshard.analysis.aot.target import parse_target
from gshard.analysis.calibration import SCHEMA, Calibration, read_calibration
from gshard.analysis.config import Config, read_config
from gshard.analysis.cost_model import (
    COMPUTE_SHARE,
    Cost,
    cost,
    seconds_to_send,
)
from gshard.analysis.setup import Choices
from gshard.analysis.tune import (
    Option,
    Verdict,
    advise,
    options_to_try,
    ranked,
    replicas_of,
    with_replicas,
)
from gshard.analysis.tune_report import advice_text
from gshard.cli.main import main
from tests import setups

H100, KEPT = parse_target("h100:2x8"), ", kept for backward"
WIDE = ("tests.setups:mlp", {"target": "h100:2x8", "arguments.width": 1024})


def config_of(**more):
    values = {"target": H100, "devices": 16, "arguments": {"width": 1024, "layers": 2}}
    return Config("tests.setups:mlp", **{**values, **more})


# ---- options ------------------------------------------------------------------------------------


def test_options_take_the_same_examples():
    config = config_of(choices=Choices(micro_batch_size=6, micro_batches=2))
    found = list(options_to_try(config))
    assert {x.choices.micro_batches * x.choices.micro_batch_size for x in found} == {12}
    assert {x.choices.micro_batches for x in found} == {1, 2, 3, 4, 6, 12}
    assert {x.level for x in found} == {"dp", "os", "os_g", "p_g_os"}
    # Copies only where a level divides; keeping what is gathered only where it gathers.
    copies = {x.level: [y.replica for y in with_replicas(x, H100)] for x in found}
    assert copies == {"dp": [], "os": [2], "os_g": [2], "p_g_os": [2]}
    kept = {x.level for x in found if x.choices.reshard_after_forward is False}
    assert kept == {"p_g_os"}
    assert len(found) == len({repr(x) for x in found})


def test_what_varies_is_tried():
    config = config_of(levels=("os",), vary={"layers": [2, 3], "width": [64]})
    tried = [x.arguments for x in options_to_try(config)]
    assert tried == [{"layers": 2, "width": 64}, {"layers": 3, "width": 64}]


def test_copies_suit_the_hosts():
    assert replicas_of(parse_target("h100:12x8")) == (1, 2, 3, 4, 6, 12)
    assert replicas_of(parse_target("h100:8")) == (1,)
    assert replicas_of(parse_target("tpu-v5e:4x4")) == (1,)


# ---- the model of time --------------------------------------------------------------------------


def test_the_slower_link_decides_how_long_sending_takes():
    chip, tpu = H100.chip, parse_target("tpu-v5e:4x4")
    assert seconds_to_send(H100, 10**9) == 1e9 / chip.link
    assert seconds_to_send(H100, 10**9, 10**7) == 99e7 / chip.link
    assert seconds_to_send(H100, 10**9, 10**8) == max(9e8 / chip.link, 1e8 / chip.network)
    assert seconds_to_send(H100, 10**9, 10**9) == 1e9 / chip.network
    assert seconds_to_send(tpu, 10**9) == 1e9 / (2 * tpu.chip.link)  # both ways along an axis
    assert seconds_to_send(H100, 10**9, 10**8, MEASURED) == 1e9 / MEASURED.link


def test_only_collectives_between_nodes_wait_for_the_network(monkeypatch):
    """2 x 8: with replicas, arrays are gathered within a node and reduced over both."""
    monkeypatch.setattr(cost_model, "START", 1)
    monkeypatch.setattr(cost_model, "START_OF_NODES", 1000)
    found = {x.option.replica: x.cost.starts for x in advise(config_of(levels=("p_g_os",)))}
    of_nodes, every = divmod(found[1], 1000)
    assert 0 < of_nodes == every
    of_nodes, every = divmod(found[2], 1000)
    assert 0 < of_nodes < every


def test_collectives_overlap_with_computation_and_memory_traffic():
    made = cost(
        H100,
        flops={"bfloat16": 1e15, "float32": 1e14},
        traffic=10**12,
        wire=2e-3,
        all_gather_params=1e-3,
        update=10**9,
        host=10**9,
    )
    chip = H100.chip
    assert made.compute == pytest.approx(
        1e15 / (COMPUTE_SHARE * chip.bfloat16) + 1e14 / (COMPUTE_SHARE * chip.float32)
    )
    assert made.step == pytest.approx(
        made.compute + made.memory + made.update + made.all_gather_params + made.host
    )
    assert made.wire < made.memory < made.compute and made.binding == "compute"
    slow = dataclasses.replace(made, wire=made.compute + made.memory + 1)
    assert (slow.binding, slow.step - made.step) == ("wire", pytest.approx(1))


def test_the_break_even_of_p_g_os_is_independent_of_the_model():
    """Tokens of a device with which FLOPs take as long as bytes: FLOP/s over bytes/s."""
    tokens, speed = 1000, COMPUTE_SHARE * H100.chip.bfloat16
    for psi in (1e9, 7e10):
        made = cost(
            H100,
            flops={"bfloat16": 6 * psi * tokens},
            traffic=0,
            wire=seconds_to_send(H100, int(6 * psi)),  # three times two bytes each
            all_gather_params=0,
            update=0,
            host=0,
        )
        option = Option("p_g_os", 1, Choices(micro_batch_size=tokens))
        found = Verdict(option, 16, 1, 2, 0, made)
        assert found.balance == pytest.approx(speed / H100.chip.link)


def test_order():
    def verdict(seconds, needs):
        made = None if seconds is None else Cost(seconds, 0, 0, 0, 0, 0)
        return Verdict(Option("os", 1, Choices()), 8, needs, 100, 0, made)

    given = [(None, 300), (2.0, 10), (1.0, 60), (1.0001, 50), (None, 200)]
    found = ranked([verdict(*x) for x in given])
    assert [x.needs for x in found] == [50, 60, 10, 200, 300]


def test_the_simpler_of_ties_comes_first():
    def verdict(level, seconds, flops=0.1, k=1):
        option = Option(level, 1, Choices(micro_batches=k))
        return Verdict(option, 8, 1, 100, 0, Cost(flops, seconds - flops, 0, 0, 0, 0))

    given = [
        verdict("p_g_os", 1.0), verdict("os", 1.04, 0.2), verdict("os", 1.045), verdict("dp", 1.2)
    ]  # fmt: skip
    assert ranked(given) == [given[2], given[1], given[0], given[3]]
    assert (
        ranked([verdict("os", 1.0, k=2), verdict("os", 1.04)])[0].option.choices.micro_batches == 1
    )


def test_what_is_too_large_is_told_apart():
    """73 and 90 GB with the margin, and a host that is too small."""
    option = Option("os", 1, Choices(offload=True))
    verdicts = [
        Verdict(option, 8, needs * 10**9, 80 * 10**9, host, None)
        for needs, host in ((73, 1), (90, 10**15), (70, 10**15))
    ]
    lines = advice_text(config_of(), verdicts).splitlines()
    rows = [x for x in lines if x.split()[:1] == ["os"]]
    assert ["7.60 GB" in rows[0], "28.0 GB" in rows[1]] == [True, True]
    assert rows[2].endswith("the host's memory")


def test_a_small_model_is_bound_by_the_starts_of_its_collectives():
    """A million parameters on 8 GPUs: p_g_os has the most collectives."""
    found = advise(read_config("gpt2-smallest", {"target": "h100:1x8"}))
    assert found[0].option.level != "p_g_os"
    assert found[0].cost.binding == "starts of collectives"
    starts = {x.option.level: x.cost.starts for x in reversed(found)}
    assert starts["dp"] < starts["p_g_os"]


# ---- whole --------------------------------------------------------------------------------------


def test_what_fits_comes_first_and_needs_what_make_plan_says():
    config = config_of(choices=Choices(micro_batch_size=4))
    found = advise(config)
    assert all(x.fits for x in found)
    steps = [x.cost.step for x in found]
    assert all(a <= b * 1.05 for a, b in zip(steps, steps[1:], strict=False))
    for x in found[:3]:
        level = gshard.forecast(
            config.model, 16, levels=[x.option.level], arguments=config.arguments,
            replica=x.option.replica, **vars(x.option.choices),
        ).levels[x.option.level]  # fmt: skip
        assert x.needs == level.peak


def test_what_does_not_fit_is_tried_with_the_host():
    # 16 bytes for each parameter at dp; 12 Psi of AdamW in float32 do not fit 63.7 GB.
    config = config_of(arguments={"width": 44_000, "layers": 2}, levels=("dp", "p_g_os"))
    found = advise(config)
    fits = {(x.option.level, x.option.choices.offload): x.fits for x in found}
    assert fits[("dp", False)] is False
    assert fits[("dp", True)] is True  # parameters and gradients are 31 GB
    assert fits[("p_g_os", False)] is True
    assert ("p_g_os", True) not in fits
    text = advice_text(config, found)
    assert "Fits, fastest first" in text
    assert "Does not fit: " in text


def test_activations_decide_too():
    """A batch of 25 GB fits; its activations do in micro-batches alone. (The number is prime.)"""
    config = config_of(levels=("dp",), choices=Choices(micro_batch_size=6_000_011))
    found = {x.option.choices.micro_batches: x for x in advise(config)}
    whole, split = found[1], found[6_000_011]
    assert not whole.fits
    assert whole.needs > whole.has > split.needs
    assert split.fits


def test_the_command(capsys, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(
        'model = "tests.setups:mlp"\ntarget = "h100:8"\nlevels = ["os", "p_g_os"]\n'
        "[arguments]\nwidth = 512\n[vary]\nlayers = [2, 4]\n"
    )
    assert main(["advise", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["target"] == "h100:1x8"
    assert len(found["options"]) == 2 * (1 + 2)
    assert all(x["fits"] and x["cost"]["step"] > 0 for x in found["options"])
    sends, stores = found["fewer_bits"]
    assert sends["sent"][1] < sends["sent"][0] and stores["stored"][1] < stores["stored"][0]
    assert main(["advise", str(path)]) == 0
    text = capsys.readouterr().out
    assert "wire='int8'" in text and "gshard.Precision('float32', state_dtype='int8')" in text
    assert "Fits, fastest first" in text
    assert text.count(" os ") == 2
    assert "\x1b" not in text


def test_nothing_fits_is_a_failure(capsys):
    words = ["advise", "tests.setups:mlp", "--target", "a100:2", "--arguments.width", "300000"]
    assert main([*words, "--levels", "os"]) == 1
    assert "Nothing fits." in capsys.readouterr().out


CANNOT_BE_TRACED = f"the loss cannot be traced with this state and batch at {setups.__file__}:"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tests.setups:mlp"], "for which machine?"),
        (
            ["tests.setups:mlp", "--target", "cpu:8", "--offload", "true"],
            "offload=true moves nothing on cpu:8",
        ),
        (["tests.setups:mlp", "--target", "h100"], "needs sizes"),
        (["tests.setups:fails_in_loss", "--target", "h100:8"], CANNOT_BE_TRACED),
    ],
)
def test_the_command_says_what_is_wrong(words, said, capsys):
    assert main(["advise", *words]) == 2
    assert said in capsys.readouterr().err


def test_virtual_devices_share_the_memory_of_this_computer(capsys):
    """What does not fit is not tried with offload, whose host has the same memory."""
    has = memory_of(jax.devices("cpu")[0])
    assert has == parse_target("cpu:8").memory
    fits = ["advise", "tests.setups:mlp", "--target", "cpu:8", "--levels", "dp"]
    assert main([*fits, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["options"]
    assert [(x["has"], x["choices"]["offload"]) for x in found] == [(has, False)]
    width = str(int((has / 16) ** 0.5) + 1)  # 16 bytes for each parameter, of two layers
    assert main([*fits, "--arguments.layers", "2", "--arguments.width", width]) == 1
    text = capsys.readouterr().out
    assert "Does not fit: 1" in text and "offload" not in text


# ---- measured rates -----------------------------------------------------------------------------

MEASURED = Calibration("NVIDIA H100 80GB HBM3", "0.10.2", False, 8, 6e14, 3e14, 2e12, 5e-5, 3e11)


def written(path, **changes):
    path.write_text(
        json.dumps({"schema": SCHEMA, "calibration": dataclasses.asdict(MEASURED) | changes})
    )
    return str(path)


def test_measured_rates_replace_those_of_data_sheets():
    flops = {"bfloat16": 4e14, "float8_e4m3fn": 2e14, "float32": 3e14}
    args = (flops, 2 * 10**12, 1.0, 2.0, 10**12, 0, 4, 0, MEASURED)
    made = cost(parse_target("h100:1x8"), *args)
    assert made == Cost(2.0, 1.0, 1.0, 0.5, 2.0, 0.0, 2e-4)
    on_cpu = cost(parse_target("cpu:8"), *args)
    assert made.step == pytest.approx(2 + 1 + 2e-4 + 0.5 + 2)  # the wire overlaps
    assert on_cpu.step == pytest.approx(2 + 1 + 1 + 2e-4 + 0.5 + 2)  # one thread does it all


def test_a_calibration_makes_times_seconds(tmp_path, capsys):
    target = parse_target("h100:1x8")
    file = written(tmp_path / "report.json")
    assert read_calibration(file, target) == MEASURED
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps(dataclasses.asdict(MEASURED)))
    assert read_calibration(str(alone), target) == MEASURED
    words = ["advise", "tests.setups:mlp", "--target", "h100:1x8", "--levels", "dp"]
    assert main([*words, "--calibration", file]) == 0
    text = capsys.readouterr().out
    assert " us " in text and "1.00x" not in text and "rates in the calibration" in text
    assert main([*words, "--calibration", file, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    step = found["options"][0]["cost"]["step"]
    assert found["unit"] == "second" and 5e-5 < step < 1e-2
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "1.00x" in text and " us " not in text


def test_a_calibration_of_one_host_is_refused_for_several(tmp_path):
    file = written(tmp_path / "report.json")
    with pytest.raises(gshard.GShardError, match="of one host, and h100:2x4 has 2"):
        read_calibration(file, parse_target("h100:2x4"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device_kind": "NVIDIA H200"}, "8 x NVIDIA H200, and h100:1x8 has 8 x NVIDIA H100"),
        ({"devices": 4}, "4 x NVIDIA H100 80GB HBM3, and h100:1x8 has 8 x NVIDIA H100"),
        ({"small": True}, "was measured with --small"),
        ({"link": None}, "link=None"),
        ({"devices": 8.0}, "devices=8.0"),
        ({"float32_flops": "fast"}, "float32_flops='fast'"),
        ({"memory_bandwidth": 0}, "memory_bandwidth=0"),
        ({"bfloat16_flops": math.nan}, "bfloat16_flops=nan"),
        ({"collective_start": True}, "collective_start=True"),
        ({"device_kind": None}, "device_kind=None"),
    ],
)
def test_a_calibration_of_another_machine_or_damaged_is_refused(changes, said, tmp_path):
    file = written(tmp_path / "report.json", **changes)
    with pytest.raises(gshard.GShardError, match="make gpu-check") as raised:
        read_calibration(file, parse_target("h100:1x8"))
    assert said in str(raised.value) and str(raised.value).startswith(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[1]", "has no calibration"),
        ('{"schema": 2, "calibration": null}', "has no calibration"),
        ('{"schema": 1, "calibration": {}}', "has schema 1, and gshard reads 2"),
        ("{}", "device_kind=None"),
    ],
)
def test_a_file_without_a_calibration_is_refused(text, said, tmp_path, capsys):
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text)
    words = ["advise", "tests.setups:mlp", "--target", "h100:1x8", "--calibration", str(file)]
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and said in lines[0] and "make gpu-check" in lines[0]


def test_it_is_the_config_s_machine():
    config = read_config(*WIDE)
    assert config.target == H100
    assert math.prod(H100.sizes) == config.devices


def test_what_was_asked_for_is_kept():
    config = config_of(replica=2, choices=Choices(reshard_after_forward=4), levels=("os", "p_g_os"))
    found = advise(config)
    assert {x.option.replica for x in found} == {2}
    kept = {x.option.choices.reshard_after_forward for x in found if x.option.level == "p_g_os"}
    assert kept == {4}


def test_what_was_given_is_kept_though_it_is_the_default(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(
        'model = "tests.setups:mlp"\ntarget = "h100:2x8"\nlevels = ["p_g_os"]\n'
        "[arguments]\nwidth = 1024\n[vary]\nlayers = [2, 3]\n"
    )

    def kinds(**options):
        found = advise(read_config(str(path), options))
        return {(x.option.replica, x.option.extras_text) for x in found}

    free = kinds()
    assert free == {(r, f"layers {n}{k}") for r in (1, 2) for n in (2, 3) for k in ("", KEPT)}
    assert kinds(replica=1) == {x for x in free if x[0] == 1}
    assert kinds(reshard_after_forward=True) == {x for x in free if KEPT not in x[1]}
    assert kinds(**{"arguments.layers": 2}) == {(r, k) for r in (1, 2) for k in ("", KEPT[2:])}
    large = {"arguments.width": 100_000, "replica": 1, "reshard_after_forward": True}
    assert kinds(**large) == {(1, f"layers {n}{x}") for n in (2, 3) for x in ("", ", offload")}
    assert kinds(**large, offload=False) == {(1, "layers 2"), (1, "layers 3")}


def test_an_option_of_its_own_that_is_refused_is_left_out():
    """Sub-groups of 16 devices divide a shard group of 32 or 16, and none of 8."""
    host = {"target": parse_target("h100:4x8"), "devices": 32, "levels": ("p_g_os",)}
    config = config_of(choices=Choices(reshard_after_forward=16), **host)
    with pytest.warns(gshard.GShardWarning, match="1 option raises an error .* a divisor of 8"):
        assert {x.option.replica for x in advise(config)} == {1, 2}


def test_what_only_replicas_make_possible_is_found():
    """Quantized gradients, whose shard axis must not have several devices of several nodes."""
    host = {"target": parse_target("h100:2x8"), "devices": 16, "levels": ("os_g",)}
    config = dataclasses.replace(config_of(**host), model="tests.setups:quantized")
    with pytest.warns(gshard.GShardWarning, match=r"wire= or scatter_dtype=: .*replica=2"):
        assert {x.option.replica for x in advise(config)} == {2}


def test_all_gathers_of_a_loss_are_not_those_of_the_update():
    config = config_of(target=parse_target("h100:1x8"), devices=8, levels=("os_g",))
    contrastive = dataclasses.replace(config, model="tests.setups:contrastive")
    plain, more = (advise(x)[0].cost for x in (config, contrastive))
    assert more.all_gather_params == plain.all_gather_params > 0
    assert more.wire > plain.wire


def test_a_value_that_the_model_refuses_is_left_out():
    """Here a number of layers that is none."""
    config = config_of(levels=("dp",), vary={"layers": [2, "many"]})
    with pytest.warns(gshard.GShardWarning, match=r"1 option raises .*layers='many'\) fails"):
        assert [x.option.arguments for x in advise(config)] == [{"layers": 2}]
    with pytest.raises(gshard.GShardError, match="layers='many'"):
        advise(config_of(levels=("dp",), vary={"layers": ["many"]}))


def test_what_is_too_small_to_be_sharded_is_not_tried_both_ways(recwarn):
    """By name the two would be the same line twice, with a warning about what nobody asked for."""
    host = {"target": parse_target("h100:1x8"), "devices": 8, "levels": ("p_g_os",)}
    small = config_of(arguments={"width": 16, "layers": 2}, **host)
    assert [x.option.extras_text for x in advise(small)] == [""]
    assert not [x for x in recwarn if "reshard_after_forward" in str(x.message)]
    assert {x.option.extras_text for x in advise(config_of(**host))} == {"", "kept for backward"}
    asked = dataclasses.replace(small, choices=Choices(reshard_after_forward=False))
    with pytest.warns(gshard.GShardWarning, match="reshard_after_forward=False changes nothing"):
        assert [x.option.extras_text for x in advise(asked)] == ["kept for backward"]


@pytest.mark.filterwarnings("ignore:100% of the parameters are replicated")
def test_what_is_frozen_is_gathered_too():
    """Adapters are too small to be sharded, and the layers next to them are not."""
    host = {"target": parse_target("h100:1x8"), "devices": 8, "levels": ("p_g_os",)}
    config = dataclasses.replace(config_of(**host), model="tests.setups:adapters", arguments={})
    found = {x.option.extras_text: x for x in advise(config)}
    assert found["kept for backward"].needs > found[""].needs
    assert found["kept for backward"].cost.wire < found[""].cost.wire
    assert {x.cost.all_gather_params for x in found.values()} == {0}


def test_offload_takes_the_state_off_the_device():
    config = config_of(arguments={"width": 16384, "layers": 5}, levels=("dp",))
    near, away = (
        gshard.forecast(
            config.model, 4, levels=["dp"], arguments=config.arguments, offload=offload
        ).levels["dp"]
        for offload in (False, True)
    )
    assert away.host > 2 * near.params * 0.99
    assert away.peak < near.peak - 0.5 * away.host


def test_more_examples_than_can_be_divided():
    config = read_config("llama-7b", {"micro_batch_size": 10**9, "micro_batches": 2})
    with pytest.raises(gshard.GShardError, match="2,000,000,000 examples of a device in a step"):
        next(options_to_try(config))


def test_a_page_has_the_levels_as_the_first_option_trains_them(tmp_path, capsys):
    """Without replicas this model is refused: its gradients are quantized between them."""
    page = tmp_path / "advice.html"
    words = ["advise", "tests.setups:quantized", "--target", "h100:2x8", "--levels", "os_g"]
    assert main([*words, "--html", str(page)]) == 0
    assert f"wrote {page}" in capsys.readouterr().err
    assert "Plan of tests.setups:quantized" in page.read_text()


@pytest.mark.parametrize("given", [("1x8", "--replica", "1"), ("1x8", "--replica", "2"), ("2x8",)])
def test_a_page_has_all_levels_that_are_possible(given, tmp_path, capsys):
    page = tmp_path / "advice.html"
    words = ["advise", "tests.setups:mlp", "--target", f"h100:{given[0]}", *given[1:]]
    assert main([*words, "--html", str(page)]) == 0
    assert "changes nothing" not in capsys.readouterr().err  # options of one level at another
    levels = {"dp", "os", "os_g", "p_g_os"}
    assert {name for name in levels if f"<dt>{name}</dt>" in page.read_text()} == levels
