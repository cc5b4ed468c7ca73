"""The site: it builds without a warning, has every public name, and works in a browser."""

from __future__ import annotations

import http.server
import os
import re
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

import gshard
from tests.browser import Browser

ROOT = Path(__file__).parents[1]
NAMED = {name: getattr(gshard, name) for name in gshard.__all__}
MODULES = [value for value in NAMED.values() if isinstance(value, types.ModuleType)]
PUBLIC = [f"{module.__name__}.{name}" for module in (gshard, *MODULES) for name in module.__all__]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(pytestconfig, tmp_path_factory) -> Path:
    """The folder of the site, built as `make docs` does."""
    if built := pytestconfig.getoption("site"):
        assert (Path(built) / "index.html").is_file(), f"{built} has no site: run make docs"
        return Path(built)
    for package in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="no MkDocs: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"SITE_PAGES": str(folder / "docs"), "NO_MKDOCS_2_WARNING": "1"}
    for command in (
        ["scripts.site_pages", folder / "docs"],
        ["mkdocs", "build", "--strict", "--site-dir", folder / "site"],
    ):
        ran = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder / "site"


def plain(html: str) -> str:
    """What a page says outside of code."""
    without = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", html, flags=re.DOTALL)
    return re.sub(r"<[^>]+>", "", without)


def test_every_public_name_has_its_documentation(site):
    pages = "\n".join(path.read_text() for path in (site / "reference").rglob("*.html"))
    sections = dict(re.findall(r'<h2 id="([\w.]+)"(.*?)(?=<h2 |</article>)', pages, re.DOTALL))
    assert len(MODULES) == 5 and len(PUBLIC) > 80
    for name in PUBLIC:
        if NAMED.get(name.removeprefix("gshard.")) in MODULES:
            assert (site / "reference" / name / "index.html").is_file()
        elif name.endswith("__version__"):
            assert f"<code>{gshard.__version__}</code>" in pages
        else:
            assert len(plain(sections[name])) > 40, name


def test_markdown_is_rendered(site):
    """Lists, tables, headings and examples are not left as they are typed."""
    marks = re.compile(r"^ *(?:[*-] |\d+\. |#+ |\||```|&gt;&gt;&gt;|:::).*", re.MULTILINE)
    typed = {}
    for path in site.rglob("*.html"):
        article = path.read_text().split("<article")[-1].split("</article>")[0]
        typed[str(path.relative_to(site))] = marks.findall(plain(article))
    assert not {path: lines for path, lines in typed.items() if lines}


# ---- in a browser -------------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site):
    def handler(*args):
        return Quiet(*args, directory=str(site))

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def browser(tmp_path, address):
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()
    assert not browser.errors
    elsewhere = [x for x in browser.requests if not x.startswith((address, "data:", "blob:"))]
    assert not elsewhere, "the site loads something from another host"


BROKEN = "[...document.images].filter(x => !(x.complete && x.naturalWidth)).map(x => x.src)"
WIDE = "document.documentElement.scrollWidth - window.innerWidth"
# The contrast of two colours after WCAG 2.1: text of normal size needs 4.5.
CONTRAST = """(() => {
  const light = color => {
    const [r, g, b] = color.match(/[\\d.]+/g).map(x => x / 255)
      .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const text = getComputedStyle(document.querySelector("article p"));
  const drawn = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const back = getComputedStyle(document.body).backgroundColor;
  const pixel = (...colors) => {
    for (const color of colors) { drawn.fillStyle = color; drawn.fillRect(0, 0, 1, 1); }
    return "rgb(" + [...drawn.getImageData(0, 0, 1, 1).data].slice(0, 3) + ")";
  };
  const [a, b] = [light(pixel(back, text.color)), light(pixel(back))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
})()"""


@pytest.mark.parametrize("width", [1400, 390], ids=["desktop", "phone"])
def test_every_page_opens(browser, address, site, width):
    browser.show(width, "light")
    pages = sorted(str(path.parent.relative_to(site)) for path in site.rglob("index.html"))
    assert len(pages) > 40
    for page in pages:
        browser.open(f"{address}{page}/")
        assert not browser.run(BROKEN), page
        assert browser.run(WIDE) <= 0, f"{page} is wider than the window"


@pytest.mark.parametrize(
    ("words", "page"),
    [("zero3", "levels/"), ("make_eval_step", "reference/train/"), ("分片", ".zh/")],
)
def test_search_finds(browser, address, words, page):
    browser.show(1400, "light")
    browser.open(address)
    browser.run("document.querySelector('.md-search__input').focus()")
    browser.wait("document.querySelector('.md-search').dataset.mdState !== 'loading'")
    browser.call("Input.insertText", text=words)
    browser.call("Input.dispatchKeyEvent", type="keyUp", key="Enter")  # as after any text
    browser.wait("document.querySelectorAll('.md-search-result__item').length > 0")
    found = browser.run(
        "[...document.querySelectorAll('.md-search-result__link')].map(x => x.href)"
    )
    assert any(page in link for link in found), found


@pytest.mark.parametrize("width", [1400, 390], ids=["desktop", "phone"])
def test_dark_and_light(browser, address, width):
    """As the system prefers, until the reader chooses."""
    scheme = "document.body.dataset.mdColorScheme"
    for prefers, other in (("light", "slate"), ("dark", "default")):
        browser.show(width, prefers)
        browser.open(f"{address}losses/")
        browser.run("localStorage.clear()")
        browser.open(f"{address}losses/")
        assert browser.run(scheme) == ("slate" if prefers == "dark" else "default")
        assert browser.run(CONTRAST) > 7
        browser.run("document.querySelector('.md-header__option label:not([hidden])').click()")
        browser.wait(f"{scheme} === '{other}'")
        assert browser.run(CONTRAST) > 7
