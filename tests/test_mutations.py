"""Every mutation of tests/mutations.toml can be applied; scripts/mutate.py reports survivors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def mutate(*words):
    command = [sys.executable, str(ROOT / "scripts" / "mutate.py"), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    return done.returncode, done.stdout + done.stderr


def test_every_mutation_can_be_applied_and_names_tests_that_exist():
    code, said = mutate("--check")
    assert code == 0, said


MUTATIONS = """
[[mutation]]
what = "adds one more"
file = "adds.py"
old = "a + b"
new = "a + b + 1"
tests = ["test_adds.py::test_adds[1"]

[[mutation]]
what = "adds in another order"
file = "adds.py"
old = "a + b"
new = "b + a"
tests = ["test_adds.py"]
"""
TESTS = """
import pytest
from adds import add

@pytest.mark.parametrize("a", [1, 2])
def test_adds(a):
    assert add(a, 2) == a + 2
"""


@pytest.fixture
def project(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "mutations.toml").write_text(MUTATIONS)
    (tmp_path / "adds.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_adds.py").write_text(TESTS)
    return tmp_path


def test_a_mutation_that_breaks_nothing_survives(project):
    before = (project / "adds.py").read_text()
    code, said = mutate("--root", project)
    killed, survived, summary = said.splitlines()
    assert killed.startswith("killed") and killed.endswith("adds.py: adds one more")
    assert survived.startswith("SURVIVED") and survived.endswith("adds in another order")
    assert (code, summary) == (1, "1 killed, 1 SURVIVED")
    assert (project / "adds.py").read_text() == before
    assert mutate("--root", project, "--match", "one more")[0] == 0


def test_a_stale_mutation_and_a_missing_test_are_named(project):
    (project / "adds.py").write_text("def add(a, b):\n    return sum((a, b))\n")
    (project / "test_adds.py").write_text(TESTS.replace("test_adds", "test_sums"))
    code, said = mutate("--root", project, "--check")
    assert code == 1 and said.count("STALE: 'a + b' occurs 0 times, not once") == 2
    assert mutate("--root", project)[1].splitlines()[-1] == "2 STALE"
    (project / "adds.py").write_text("def add(a, b):\n    return a + b\n")
    code, said = mutate("--root", project, "--check")
    assert code == 1 and "test not found: test_adds.py::test_adds[1" in said
    assert "2 mutations, 1 of them not valid" in said


def test_a_test_that_fails_anyway_is_named(project):
    (project / "test_adds.py").write_text(TESTS.replace("a + 2", "a + 3"))
    code, said = mutate("--root", project)
    assert (code, said.splitlines()[-1]) == (1, "2 FAILS WITHOUT IT")


def test_changed_files_are_those_of_git(project):
    code, said = mutate("--root", project, "--changed", "no-such-revision", "--list")
    assert code == 1 and said.startswith("git diff --name-only no-such-revision")
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "a"]
    subprocess.run(["git", *own], cwd=project, check=True)
    listed = mutate("--root", project, "--changed", "HEAD", "--list")[1]
    assert listed.count("adds.py") == 2, "a new file is a changed one"
