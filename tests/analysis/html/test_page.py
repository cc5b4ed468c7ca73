"""A forecast as an HTML page: what it says, and how it looks in a real browser."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import gshard
from gshard.analysis.html.arrays import leaves_of
from gshard.analysis.html.page import page
from gshard.analysis.html.pictures import FILLS, Rectangle, squarified
from gshard.cli.main import main

VOID = {"meta", "link", "br", "hr", "col"}


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
    return page(found, model="m:setup", compiled=compiled, advice=advice, capacity=largest // 2)


def with_activations(found, activations: int):
    """The same forecast as with a trace."""
    levels = {
        name: dataclasses.replace(level, peak=level.needs + activations)
        for name, level in found.levels.items()
    }
    return dataclasses.replace(found, levels=levels)


@pytest.mark.parametrize("devices, replica", [(1, 1), (8, 1), (8, 2), (16_384, 32)])
def test_a_page_is_whole_and_needs_nothing_else(devices, replica):
    found = forecast(devices, replica=replica)
    text = full(found)
    parsed = Page(text)
    assert len(set(parsed.ids)) == len(parsed.ids)
    assert parsed.all("html") == [{"lang": "en"}]
    assert not parsed.all("script") and not parsed.all("link") and not parsed.all("img")
    assert not re.search(r"https?:|//[a-z]|@import|@font-face", text)
    for _, attributes in parsed.elements:
        for key in ("href", "src", "fill"):
            if "#" in (at := attributes.get(key) or "") and not re.match(r"#[0-9a-f]{6}$", at):
                assert re.sub(r"^url\(|\)$", "", at)[1:] in parsed.ids
        for key in (attributes.get("aria-labelledby") or "").split():
            assert key in parsed.ids
    assert all(svg.get("role") == "img" or svg.get("aria-hidden") for svg in parsed.all("svg"))
    assert len(parsed.all("caption")) == len(parsed.all("table"))
    assert len(text) < 1_000_000


def test_numbers_are_those_of_the_forecast():
    found = forecast(8, offload=True)
    values = [int(x["value"]) for x in Page(page(found, model="m")).all("data")]
    rows = []
    for level in found.levels.values():
        row = [level.params, level.optimizer, level.gradients, level.batch, level.gathered]
        rows += [*row, level.needs, level.host]
    assert not any(level.non_trainable for level in found.levels.values())  # no column of nothing
    wire = [x for of in found.levels.values() for x in (of.wire, *of.wire_by_flavour.values())]
    assert values[: 1 + len(rows) + len(wire)] == [found.parameters, *rows, *wire]


@pytest.mark.parametrize("offload", [False, True])
def test_leaves_add_up_to_the_forecast(offload):
    found = forecast(8, offload=offload)
    for name, level in found.levels.items():
        sums = {"params": 0, "optimizer": 0, "non_trainable": 0, "host": 0}
        for leaf in leaves_of(found.plans[name]):
            sums[leaf.kind] += leaf.bytes
        assert sums == {kind: getattr(level, kind) for kind in sums}


@pytest.mark.parametrize("level", ["dp", "os", "os_g", "p_g_os"])
def test_the_reason_of_an_array_is_that_of_its_own_layout(level):
    plan = forecast().plans[level]
    for leaf in leaves_of(plan):
        assert (leaf.reason == "divides") == (leaf.layout.dim is not None), leaf
        if leaf.part == "parameters" and level != "p_g_os":
            assert leaf.reason == f"replicated at {level}"
    small = [x.reason for x in leaves_of(plan) if x.layout.path.endswith("bias")]
    assert any("min_shard_size" in x for x in small) == (level != "dp")


def test_activations_and_peak_show_when_they_are_known():
    found = forecast()
    known = with_activations(found, 77_700_000)
    before, after = page(found, model="m"), page(known, model="m")
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
        assert f'<section id="{key}">' not in page(found, model="m")
    text = full(found)
    for words in ("does not fit", "h100:1x8", "fusion.3", 'value="12345"', 'value="9876543"'):
        assert words in text
    assert "memory of the chip" in text and "memory of the chip" not in page(found, model="m")
    far = page(found, model="m", capacity=10**15)
    assert 'class="limit"' not in far and 'class="limit"' in text and "1000 TB" in far


def test_nothing_that_is_named_becomes_markup():
    bad = "</title></style><script>alert('x')</script>\"onload=\"alert(1)"
    params = {bad: jax.ShapeDtypeStruct((300, 300), jnp.float32)}
    found = gshard.forecast((params, optax.sgd(0.1)), 4)
    hostile = {"fits": True, "memory": {bad: 1}, bad: [{bad: bad}], "collectives": [{"kind": bad}]}
    text = page(found, model=bad, compiled={bad: hostile}, advice=[{bad: bad}])
    parsed = Page(text)
    assert not parsed.all("script")
    assert not any("onload" in attributes for _, attributes in parsed.elements)
    assert f"Plan of {bad}" in "".join(parsed.text)


def test_thousands_of_arrays_are_cut_to_the_largest():
    found = forecast(8, layers=1500, width=64, levels=["p_g_os"])
    leaves = leaves_of(found.plans["p_g_os"])
    text = page(found, model="m")
    assert len(leaves) > 10_000 and len(text) < 100_000
    rest = leaves[40:]
    row = re.search(rf"<tr>[^\n]*?{len(rest):,} others(.*?)</tr>", text)
    assert row is not None and f'value="{sum(x.bytes for x in rest)}"' in row[1]
    assert "layer_*/kernel" in text


def test_devices_of_a_large_mesh_are_abridged():
    few = Page(page(forecast(8), model="m"))
    text = page(forecast(16_384, replica=32), model="m", per_host=8)
    shown = {int(x) for x in re.findall(r"device (\d+)<", text)}
    # 32 copies over 512 devices: the first 2 copies and the last, 4 and 2 devices of each.
    assert shown == {c * 512 + i for c in (0, 1, 31) for i in (0, 1, 2, 3, 510, 511)}
    assert "host 2047" in text and "…" in text
    assert not any(x.get("class") == "dots" for x in few.all("td"))
    assert "host 0" not in "".join(few.text)


def test_parts_of_the_leaf_are_those_of_its_layout():
    found = forecast(8, levels=["p_g_os"], width=201)  # 201 columns of 804: dim 0 is padded to 208
    layout = found.plans["p_g_os"].params["layer_0"]["kernel"]
    text = page(found, model="m")
    said = re.findall(r"part (\d): (\d+) to (\d+) of dim (\d)", text)
    size, whole = layout.shard_shape[layout.dim], layout.shape[layout.dim]
    expected = [(i, i * size, min(i * size + size, whole) - 1, layout.dim) for i in range(8)]
    assert [tuple(map(int, x)) for x in said] == expected
    assert "p_g_os</strong>: parameters 1/8, gradients 1/8, optimizer state 1/8" in text


def test_hosts_of_a_mesh_of_devices():
    """One host is not drawn; `per_host` begins one at each multiple."""
    found = forecast(8, levels=["os"])
    assert 'class="host"' not in page(found, model="m")
    assert page(found, model="m", per_host=4).count('<td class="host"') == 2


def test_areas_are_in_proportion():
    sizes = [60.0, 60, 40, 30, 20, 10, 1, 0.01]
    room = Rectangle(5, 7, 600, 400)
    found = squarified(sizes, room)
    for size, one in zip(sizes, found, strict=True):
        assert one.area == pytest.approx(size / sum(sizes) * room.area)
        assert one.x >= 5 and one.y >= 7
        assert one.x + one.width <= 605.001 and one.y + one.height <= 407.001
        if size >= 10:
            assert max(one.width / one.height, one.height / one.width) < 3
    for i, a in enumerate(found):
        for b in found[:i]:
            wide = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            high = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert wide < 1e-6 or high < 1e-6
    assert squarified([], room) == []


def test_labels_can_be_read_on_every_fill():
    def light(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        lin = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * lin[0] + 0.7152 * lin[1] + 0.0722 * lin[2]

    for fill in FILLS.values():
        low, high = sorted([light(fill.colour), light(fill.ink)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, fill
    in_one_bar = [x for x in FILLS.values() if x.key not in ("wire", "host")]
    assert len({x.lines for x in in_one_bar}) == len({x.colour for x in in_one_bar}) == 7


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
def test_a_place_that_cannot_be_written_is_refused_before_the_work(folder, capsys, place):
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
    assert "--paper goes with --json alone, not with --html" in capsys.readouterr().err
    assert not (folder / "plan.html").exists()


# ---- in a browser -------------------------------------------------------------------------------

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --hide-scrollbars
    --enable-logging=stderr --v=0""".split()

# Around a page in a frame of the width of a telephone or a desk: how wide its content is, and which
# labels do not lie within what they are on.
MEASURE = """<!DOCTYPE html><body><iframe style="border:0;width:%dpx;height:3000px"
srcdoc="%s"></iframe><pre id="found"></pre><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, out = [];
  page.querySelectorAll("details").forEach(x => { x.open = true; });
  page.querySelectorAll("svg g").forEach(g => {
    const box = g.querySelector("rect");
    if (!box || g.querySelectorAll("rect").length > 1) return;
    const r = box.getBoundingClientRect();
    g.querySelectorAll("text.label").forEach(t => {
      const b = t.getBoundingClientRect();
      if (b.width && (b.left < r.left - 1 || b.right > r.right + 1 || b.bottom > r.bottom + 3))
        out.push(t.textContent);
    });
  });
  page.querySelectorAll("svg text.free").forEach(t => {
    const b = t.getBoundingClientRect();
    if (b.left < 0 || b.right > %d) out.push(t.textContent);
  });
  const e = page.documentElement;
  document.getElementById("found").textContent = JSON.stringify({
    width: e.scrollWidth, shown: e.clientWidth, out,
    labels: [...page.querySelectorAll("text.label")].filter(t => t.getBoundingClientRect().width)
      .length});
};
</script>"""


@pytest.fixture
def browse(tmp_path):
    """Runs a browser without a network on a page; gives its output and what it logged."""
    if BROWSER is None:
        pytest.skip("there is no chromium or google-chrome here")

    def run(text: str, *options: str) -> tuple[str, str]:
        file = tmp_path / "page.html"
        file.write_text(text)
        ended = subprocess.run(
            [BROWSER, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", *options, file.as_uri()],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout, ended.stderr

    return run


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("devices, layers", [(8, 3), (16_384, 60)])
def test_nothing_is_wider_than_the_screen(browse, width, devices, layers):
    found = forecast(devices, layers=layers, width=1024, offload=True)
    text = html.escape(full(with_activations(found, 9_000_000)))
    out, log = browse(MEASURE % (width, text, width), f"--window-size={width + 100},3100",
                      "--dump-dom", "--virtual-time-budget=5000")  # fmt: skip
    assert "CONSOLE" not in log
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', out, re.S)[1]))
    assert found["shown"] == width and found["width"] <= width
    assert found["labels"] > 20 and found["out"] == []


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
