"""Machines by name, what is known of them, and that their compilers know it too."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import pytest

from gshard._util.chips import CHIPS
from gshard._util.errors import GShardError
from gshard._util.version import install_command
from gshard.analysis.aot.target import GPUS, gpu_config, parse_target
from tests.ahead_of_time import ROOT, python_for


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v5e:16x16", "Did you mean 'tpu-v5e'?"),
        ("abacus:4", "Choose one of cpu, a100, h100, h200, b200, tpu-v4"),
        ("h100", "h100:HOSTSxGPUS"),
        ("h100:4x9", "at most 8 GPUs"),
        ("h100:0x8", "h100:HOSTSxGPUS"),
        ("h100:16", "h100:32x8"),
        ("h100:2x2x2", "h100:32x8"),
        ("tpu-v5e:16x32", "8x16, 16x16 chips"),
        ("tpu-v5p:8x8", "multiples of 4 up to 16x16x24"),
        ("tpu-v5p:4x4x6", "multiples of 4 up to 16x16x24"),
        ("tpu-v5p:16x16x28", "multiples of 4 up to 16x16x24"),
        ("cpu:1", "cpu:2 to cpu:64"),
        ("cpu:2x4", "cpu:2 to cpu:64"),
        ("", "Choose one of"),
    ],
)
def test_what_cannot_be_is_one_line(text, said):
    with pytest.raises(GShardError) as caught:
        parse_target(text)
    assert said in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "platform", "devices", "hosts"),
    [
        ("cpu:8", "cpu", 8, 1),
        ("h100:32x8", "gpu", 256, 32),
        ("b200:2x4", "gpu", 8, 2),
        ("tpu-v5e:2x2", "tpu", 4, 1),
        ("tpu-v5e:16x16", "tpu", 256, 64),
        ("tpu-v5p:8x8x16", "tpu", 1024, 256),
        ("tpu-7x:4x4x4", "tpu", 128, 16),  # two devices to a chip, four chips to a host
    ],
)
def test_what_a_target_is(text, platform, devices, hosts):
    target = parse_target(text)
    assert (target.text, target.platform) == (text, platform)
    assert (target.devices, target.hosts) == (devices, hosts)
    assert target.devices_per_host * hosts == devices


def test_gpus_of_one_host_need_one_number():
    assert parse_target("h100:8") == parse_target("h100:1x8")
    assert parse_target("h100:8").text == "h100:1x8"


def test_virtual_devices_of_this_process():
    assert parse_target("cpu:4").described_devices() == jax.devices()[:4]
    with pytest.raises(GShardError, match="device_count=16"):
        parse_target("cpu:16").described_devices()


@pytest.mark.parametrize("name", CHIPS)
def test_figures_are_of_the_right_size(name):
    """Units slip by factors of 8, 1e3 or 2**30 / 1e9 for all; these would not pass."""
    chip = CHIPS[name]
    assert chip.name == name
    if name == "cpu":
        assert chip.memory is None
        return
    assert chip.memory is not None and chip.usable is not None
    assert 15 * 2**30 < chip.usable <= chip.memory < 200e9
    assert chip.float32 <= chip.bfloat16
    assert chip.bfloat16 > 100 * chip.memory_bandwidth  # products are worth an accelerator
    assert chip.memory_bandwidth > 5 * chip.link > 5 * chip.network
    assert chip.link > chip.host_link >= 7.5e9
    assert 50e9 < chip.host_memory <= 250e9


def test_an_h100_by_its_data_sheet():
    h100 = CHIPS["h100"]
    assert h100.bfloat16 == pytest.approx(989.4e12)
    assert h100.float32 == h100.bfloat16 / 2
    assert h100.link == pytest.approx(350e9)
    assert h100.usable == pytest.approx(0.75 * 80e9, rel=0.07)


def test_xla_gets_the_same_description():
    for name in GPUS:
        text = gpu_config(CHIPS[name])
        assert f"device_memory_size: {CHIPS[name].memory}" in text
        assert CHIPS[name].title in text


def test_without_its_compiler_a_target_says_what_to_install():
    """No compiler is found where the path has none of a site."""
    code = "from gshard.analysis.aot.target import parse_target as parse; "
    code += "parse({!r}).described_devices()"
    for text, extra in (("h100:1x8", "aot-gpu"), ("tpu-v5e:2x4", "aot-tpu")):
        hidden = "import sys; sys.modules.update(libtpu=None, jax_plugins=None); "
        done = subprocess.run(
            [sys.executable, "-c", hidden + code.format(text)],
            cwd=ROOT,
            env=os.environ | parse_target(text).environment,
            capture_output=True,
            text=True,
        )
        assert f"GShardError: the compiler for target '{text}' is not installed" in done.stderr
        assert install_command(extra) in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["a100:2x4", "h200:8", "b200:8", "tpu-v4:2x2x2", "tpu-v6e:2x4", "tpu-7x:2x2x2"]
)
def test_the_compiler_has_these_devices(text):
    target = parse_target(text)
    code = f"""
import collections
from gshard.analysis.aot.target import parse_target
hosts = collections.Counter(d.process_index for d in parse_target({text!r}).described_devices())
print(len(hosts), *set(hosts.values()))
"""
    done = subprocess.run(
        [python_for(target.platform), "-c", code],
        cwd=ROOT,
        env=os.environ | target.environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [str(target.hosts), str(target.devices_per_host)], done.stderr
