"""Documents about the project: their diagrams, their size, and the files they refer to."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def test_diagrams_are_what_the_script_draws(tmp_path):
    script = ROOT / "scripts" / "draw_architecture.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    drawn = sorted(tmp_path.iterdir())
    assert [path.name for path in drawn] == ["gather-at-first-use.svg", "step-by-level.svg"]
    for path in drawn:
        committed = ROOT / "docs" / "images" / path.name
        assert path.read_bytes() == committed.read_bytes(), f"run {script.name} again"


def test_the_readme_and_the_guide_stay_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
    assert len((ROOT / "CONTRIBUTING.md").read_text().split()) <= 1200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    broken = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert not broken


def test_every_example_is_listed():
    folder = ROOT / "examples"
    files = {x.name for x in folder.iterdir() if x.suffix in (".py", ".ipynb") and x.stat().st_size}
    assert files == set(re.findall(r"\[(\w+\.\w+)\]\(\1\)", (folder / "README.md").read_text()))


def test_guarantees_name_tests_that_exist():
    page = ROOT / "docs" / "development" / "guarantees.md"
    named = set(re.findall(r"`(tests/[\w/]+\.py)`", page.read_text()))
    assert len(named) > 40
    assert not [name for name in sorted(named) if not (ROOT / name).is_file()]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_files_and_folders_that_are_named_exist(page):
    quoted = re.findall(r"`([\w./-]+)`", (ROOT / page).read_text())
    paths = {name.strip("/") for name in quoted if "/" in name or name.endswith(".py")}
    assert len(paths) > 10
    there = [path for path in paths if (ROOT / path).exists()]
    inside = [path for path in paths if any((ROOT / "gshard").rglob(path))]
    assert not sorted(paths.difference(there, inside))


def test_upstream_cases_name_tests_that_exist():
    page = (ROOT / "docs" / "development" / "upstream-tests.md").read_text()
    tests = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(tests.values()), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 20
    assert not sorted(named - defined - tests.keys())
