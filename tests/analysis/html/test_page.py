"""A forecast as an HTML page: what it says, and how it looks in a real browser."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import subprocess
from html.parser import HTMLParser
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.analysis.explain import state_arrays
from gshard.analysis.html.page import page
from gshard.cli.main import main
from tests.browser import find

VOID = {"meta"}


class Page(HTMLParser):
    """What a page holds; raises where elements do not close in order."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), (tag, attrs)
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def ids(self) -> list[str]:
        return [found["id"] or "" for _, found in self.elements if "id" in found]


def forecast(devices: int = 8, layers: int = 3, width: int = 200, **choices: Any):
    block = {"kernel": (width, 4 * width), "bias": (width,)}
    tree = {f"layer_{i}": block for i in range(layers)} | {"out": {"kernel": (width, 31)}}
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        tree,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    batch = {"x": jax.ShapeDtypeStruct((1, width), jnp.float32)}
    setup = gshard.TrainSetup(
        (params, optax.adamw(1e-3)),
        batch=batch,
        shard={"precision": "bfloat16", "min_shard_size": 1000},
    )
    return gshard.forecast(setup, devices, **{"micro_batches": 2, **choices})


def full(found) -> str:
    """A page with every optional section."""
    row = {"kind": "all-gather", "axes": ["shard"], "dtype": "bf16", "purpose": "gather"}
    row |= {"scalar": False, "count": 3, "asynchronous": 2, "times": None, "wire_bytes": 12_345}
    compiled = {
        "os": {
            "fits": False,
            "target": "h100:1x8",
            "memory": {"argument": 7_654_321, "peak": 9_876_543},
            "collectives": [row],
            "largest_buffers": [{"name": "fusion.3", "bytes": 4_321_000}],
        },
        "dp": {"fits": True, "memory": {}, "collectives": []},
    }
    advice = [{"level": "os", "seconds": 1.25, "peak_bytes": 5_550_000}, {"level": "dp"}]
    largest = max(level.needs for level in found.levels.values())
    return page(dataclasses.replace(found, usable=largest // 2), "m:setup", compiled, advice)


def with_activations(found, activations: int):
    """The same forecast as with a trace."""
    levels = {
        name: dataclasses.replace(level, peak=level.needs + activations)
        for name, level in found.levels.items()
    }
    return dataclasses.replace(found, levels=levels)


@pytest.mark.parametrize("devices, replica", [(1, 1), (8, 1), (8, 2), (16_384, 32)])
def test_a_page_is_complete_and_needs_no_other_file(devices, replica):
    found = forecast(devices, replica=replica)
    text = full(found)
    parsed = Page(text)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert parsed.all("html") == [{"lang": "en"}]
    assert not parsed.all("script") and not parsed.all("link") and not parsed.all("img")
    assert not re.search(r"https?:|//[a-z]|@import|@font-face", text)
    assert not any({"href", "src"} & set(attributes) for _, attributes in parsed.elements)
    bars = [x for x in parsed.all("div") if x["class"] == "bar"]
    assert len(bars) == 2 * len(found.levels) and all(x["aria-label"] for x in bars)
    assert len(parsed.all("caption")) == len(parsed.all("table"))
    assert len(text) < 1_000_000


def test_numbers_are_those_of_the_forecast():
    found = forecast(8, offload=True)
    values = [int(x["value"]) for x in Page(page(found, "m")).all("data")]
    rows = []
    for level in found.levels.values():
        row = [level.params, level.optimizer, level.gradients, level.batch, level.gathered]
        rows += [*row, level.needs, level.host]
    assert not any(level.non_trainable for level in found.levels.values())  # no column of nothing
    wire = [of.wire for of in found.levels.values()]
    assert values[: 1 + len(rows) + len(wire)] == [found.parameters, *rows, *wire]


@pytest.mark.parametrize("offload", [False, True])
def test_leaves_add_up_to_the_forecast(offload):
    found = forecast(8, offload=offload)
    kinds = {"opt_state": "optimizer", "step": "optimizer"}
    for name, level in found.levels.items():
        sums = {"params": 0, "optimizer": 0, "non_trainable": 0, "host": 0}
        for x in state_arrays(found.plans[name]):
            sums["host" if x.on_host else kinds.get(x.part, x.part)] += x.bytes
        assert sums == {kind: getattr(level, kind) for kind in sums}


@pytest.mark.parametrize("level", ["dp", "os", "os_g", "p_g_os"])
def test_the_reason_of_an_array_is_that_of_its_own_layout(level):
    leaves = state_arrays(forecast().plans[level])
    for leaf in leaves:
        assert (leaf.reason == "divisible") == (not leaf.placement.startswith("replicated")), leaf
        if leaf.part == "params" and level != "p_g_os":
            assert leaf.reason == f"level {level} replicates it on every device"
    small = [x.reason for x in leaves if x.path.endswith("bias")]
    assert any("min_shard_size" in x for x in small) == (level != "dp")


def test_activations_and_peak_show_when_they_are_known():
    found = forecast()
    known = with_activations(found, 77_700_000)
    before, after = page(found, "m"), page(known, "m")
    for word in ("activations", "peak"):
        assert f">{word}</th>" not in before and f">{word}</th>" in after
    assert after.count('value="77700000"') == len(known.levels)
    for level in known.levels.values():
        assert f'value="{level.peak}"' in after and f'value="{level.peak}"' not in before
    assert "without activations" in before and "without activations" not in after


def test_optional_sections():
    found = forecast()
    for key in ("compiled", "advice"):
        assert f'<section id="{key}">' in full(found)
        assert f'<section id="{key}">' not in page(found, "m")
    text = full(found)
    for words in ("does not fit", "h100:1x8", "fusion.3", 'value="12345"', 'value="9876543"'):
        assert words in text
    assert "memory of the chip" in text and "memory of the chip" not in page(found, "m")
    far = page(dataclasses.replace(found, usable=10**15), "m")
    assert 'class="limit"' not in far and 'class="limit"' in text and "1000 TB" in far


def test_the_verdict_is_at_the_top():
    found = forecast()
    between = (found.levels["dp"].needs + found.levels["p_g_os"].needs) // 2
    parsed = Page(page(dataclasses.replace(found, usable=between, target="h100:1x8"), "m"))
    text = "".join(parsed.text)
    assert parsed.ids[0] == "verdict" and "Plan of m for h100:1x8" in text
    assert "dpdoes not fit, needs" in text
    assert re.search(r"p_g_osnot known whether it fits, needs \S+ MB without activations", text)
    assert "not known whether it fits" in page(found, "m")
    compiled = {"dp": {"fits": True, "needs": 12_000}, "os": {"error": "no compiler"}}
    text = "".join(Page(page(found, "m", compiled)).text)
    assert "dpfits, needs 12.0 kB" in text
    assert re.search(r"osnot known whether it fits, needs [^;]+ activations; it was not", text)
    assert "sent at most" in text and "os: does not compile" in text


def test_bars_are_in_proportion_to_the_bytes():
    found = dataclasses.replace(forecast(), usable=10_000_000)
    shares: dict[str, float] = {}
    for span in Page(page(found, "m")).all("span"):
        if name := span.get("title"):  # the first of a kind is the first level's
            shares.setdefault(name, float(re.search(r"width:([\d.]+)%", span["style"])[1]))
    level = next(iter(found.levels.values()))
    longest = max(found.usable, *(x.needs for x in found.levels.values()))
    for name, count in (("parameters", level.params), ("gradients", level.gradients)):
        (share,) = [x for key, x in shares.items() if key.startswith(name) and f"({count:,}" in key]
        assert share == pytest.approx(98 * count / longest, abs=0.01)


def test_nothing_that_is_named_becomes_markup():
    bad = "</title></style><script>alert('x')</script>\"onload=\"alert(1)"
    params = {bad: jax.ShapeDtypeStruct((300, 300), jnp.float32)}
    found = gshard.forecast((params, optax.sgd(0.1)), 4)
    hostile = {"fits": True, "memory": {bad: 1}, bad: [{bad: bad}], "collectives": [{"kind": bad}]}
    text = page(found, bad, {bad: hostile}, [{bad: bad}])
    parsed = Page(text)
    assert not parsed.all("script")
    assert not any("onload" in attributes for _, attributes in parsed.elements)
    assert f"Plan of {bad}" in "".join(parsed.text)


def test_thousands_of_arrays_are_cut_to_the_largest():
    found = forecast(8, layers=1500, width=64, levels=["p_g_os"])
    leaves = state_arrays(found.plans["p_g_os"])
    text = page(found, "m")
    assert len(leaves) > 10_000 and len(text) < 100_000
    rest = leaves[40:]
    row = re.search(rf"<tr>[^\n]*?{len(rest):,} others(.*?)</tr>", text)
    assert row is not None and f'value="{sum(x.bytes for x in rest)}"' in row[1]


# ---- the command --------------------------------------------------------------------------------

MODEL = """
import jax, jax.numpy as jnp, optax

def setup(width=300):
    return {"w": jax.ShapeDtypeStruct((width, width), jnp.float32)}, optax.adam(1e-3)

def broken():
    raise AssertionError("the model was made")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "page_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_command_writes_a_page(folder, capsys):
    (folder / "plan.html").write_text("before")
    words = ["plan", "page_model:setup", "--devices", "8", "--html", "plan.html", "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["devices"] == 8
    assert err == "wrote plan.html\n"
    assert "Plan of page_model:setup" in "".join(Page((folder / "plan.html").read_text()).text)
    assert sorted(x.name for x in folder.iterdir() if x.is_file()) == ["page_model.py", "plan.html"]


@pytest.mark.parametrize("place", [".", "missing/plan.html", "page_model.py/plan.html", ""])
def test_an_unwritable_path_is_refused_before_the_work(folder, capsys, place):
    # The model fails when it is made: the place is looked at before.
    assert main(["plan", "page_model:broken", "--devices", "8", "--html", place]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: --html") and err.count("\n") == 1


def test_a_plan_that_fails_leaves_what_was_there(folder, capsys):
    (folder / "plan.html").write_text("before")
    assert main(["plan", "page_model:broken", "--devices", "8", "--html", "plan.html"]) == 2
    assert "the model was made" in capsys.readouterr().err
    assert (folder / "plan.html").read_text() == "before"
    assert not list(folder.glob(".*"))


def test_the_paper_has_no_page(folder, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--paper", "--html", "plan.html"])
    assert "--paper can be combined only with --json, not with --html" in capsys.readouterr().err
    assert not (folder / "plan.html").exists()


# ---- in a browser -------------------------------------------------------------------------------

OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --hide-scrollbars
    --enable-logging=stderr --v=0""".split()

# Around a page in a frame of the width of a telephone or a desk: how wide its content is.
MEASURE = """<!DOCTYPE html><body><iframe style="border:0;width:%dpx;height:3000px"
srcdoc="%s"></iframe><pre id="found"></pre><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, e = page.documentElement;
  document.getElementById("found").textContent = JSON.stringify({
    width: e.scrollWidth, shown: e.clientWidth,
    bars: [...page.querySelectorAll(".bar span")].filter(x => x.clientWidth > 20).length});
};
</script>"""


@pytest.fixture
def browse(tmp_path):
    """Runs a browser without a network on a page; gives its output and what it logged."""
    browser = find()

    def run(text: str, *options: str) -> tuple[str, str]:
        file = tmp_path / "page.html"
        file.write_text(text)
        ended = subprocess.run(
            [browser, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", *options, file.as_uri()],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout, ended.stderr

    return run


@pytest.mark.filterwarnings("ignore:sharded over 16,384 devices")  # with padding
@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("devices, layers", [(8, 3), (16_384, 60)])
def test_nothing_is_wider_than_the_screen(browse, width, devices, layers):
    found = forecast(devices, layers=layers, width=1024, offload=True)
    text = html.escape(full(with_activations(found, 9_000_000)))
    out, log = browse(MEASURE % (width, text), f"--window-size={width + 100},3100",
                      "--dump-dom", "--virtual-time-budget=5000")  # fmt: skip
    assert "CONSOLE" not in log
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', out, re.S)[1]))
    assert found["shown"] == width and found["width"] <= width
    assert found["bars"] >= 8


@pytest.mark.slow
def test_a_picture_and_paper(browse, tmp_path):
    text = full(forecast())
    picture, paper = tmp_path / "page.png", tmp_path / "page.pdf"
    _, log = browse(text, f"--screenshot={picture}", "--window-size=1200,2400")
    assert "CONSOLE" not in log
    # PNG of a blank page is a few kB.
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size > 60_000
    browse(text, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    printed = paper.read_bytes()
    assert printed.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", printed)) >= 4
