"""Break the code on purpose, one mutation after the other, and see that a test fails each time.

The mutations are in tests/mutations.toml: a file, a text that occurs once in it, the text that
replaces it, and the tests of which at least one must fail then. A test is named by its node id or
by the beginning of one: `tests/test_x.py`, `tests/test_x.py::test_y`, `tests/test_x.py::test_y[2-`.
All of them run once without a mutation first, since one that fails anyway proves nothing.
The tests run in a copy of the working tree; the tree itself is never changed.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
running: set[subprocess.Popen] = set()
FINE = ("killed", "skipped")  # skipped: no test of it ran here


@dataclass(frozen=True)
class Mutation:
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    number: int

    def fault(self, root: Path) -> str:
        """Return why this mutation cannot be applied to a project, or an empty string."""
        path = root / self.file
        found = path.read_text().count(self.old) if path.is_file() else 0
        if found != 1:
            return f"STALE: {self.old!r} occurs {found} times, not once"
        if path.suffix == ".py":
            try:  # a mutated file that is no Python fails every test and proves nothing
                compile(path.read_text().replace(self.old, self.new), self.file, "exec")
            except SyntaxError as error:
                return f"not Python: {error}"
        for test in self.tests:
            file, _, name = test.partition("::")
            text = (root / file).read_text() if (root / file).is_file() else ""
            if f"def {name.partition('[')[0]}{'(' if name else ''}" not in text:
                return f"test not found: {test}"
        return ""


def load(root: Path) -> list[Mutation]:
    table = tomllib.loads((root / "tests" / "mutations.toml").read_text())["mutation"]
    return [
        Mutation(**row | {"tests": tuple(row["tests"])}, number=i) for i, row in enumerate(table)
    ]


def git(root: Path, *words: str, check: bool = True) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def changed_files(root: Path, revision: str) -> set[str]:
    """Files that differ from `revision`; by default, from where this branch left origin/main."""
    if not revision:
        base = git(root, "merge-base", "origin/main", "HEAD", check=False)
        revision = base.strip() if base not in ("", git(root, "rev-parse", "HEAD")) else "HEAD~1"
    differ = git(root, "diff", "--name-only", revision, "--")
    new = git(root, "ls-files", "--others", "--exclude-standard")
    return {*differ.splitlines(), *new.splitlines()}


def copy_tree(root: Path, to: Path) -> None:
    listed = git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


def pytest(copy: Path, timeout: float | None, *words: str) -> tuple[int | None, str]:
    """Run pytest in the copy; return its exit code, None when it took too long, and its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    running.add(process)
    try:
        said, _ = process.communicate(timeout=timeout)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    finally:
        running.discard(process)


def node_ids(tests: tuple[str, ...], copy: Path) -> list[str]:
    """Return what to pass to pytest: ids that begin with `test_y[os-` have to be looked up."""
    found = [test for test in tests if "[" not in test]
    for test in tests:
        if "[" in test:
            _, said = pytest(copy, None, "--collect-only", test.partition("[")[0])
            found += [line for line in said.splitlines() if line.startswith(test)]
    return found


def outcome(mutation: Mutation, copy: Path, slow: bool, timeout: float) -> tuple[str, str]:
    """Apply one mutation, run its tests, undo it; return the verdict and what pytest said."""
    if fault := mutation.fault(copy):
        return fault, ""
    tests = node_ids(mutation.tests, copy)
    if not tests:
        return f"test not found: {', '.join(mutation.tests)}", ""
    path = copy / mutation.file
    text, times = path.read_text(), path.stat()
    try:
        path.write_text(text.replace(mutation.old, mutation.new))
        os.utime(path, (mutation.number, mutation.number))  # else Python may use an older .pyc
        only = [] if slow else ["-m", "not slow"]
        code, said = pytest(copy, timeout, "-x", *only, *tests)
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    if code in (1, None):
        return "killed", said
    if code == 5 or (code == 0 and not re.search(r"\d+ passed", said)):
        return "skipped", said
    return ("SURVIVED" if code == 0 else f"ERROR: pytest ended with code {code}"), said


def failing(tests: set[str], copy: Path, slow: bool, timeout: float) -> set[str]:
    """Return which of these tests fail without a mutation: they would seem to notice each."""
    only = [] if slow else ["-m", "not slow"]
    asked = sorted({test.partition("[")[0] for test in tests})
    code, said = pytest(copy, timeout, *only, *asked)
    if code not in (0, 1, 5):
        sys.exit(f"without a mutation, pytest ended with code {code}\n{said}")
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    return {
        test
        for test in tests
        for name in failed
        if name == test or name.startswith(test if "[" in test else (f"{test}[", f"{test}::"))
    }


def run(
    mutations: list[Mutation], root: Path, jobs: int, slow: bool, timeout: float
) -> Counter[str]:
    found: Counter[str] = Counter()
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()

    def one(mutation: Mutation) -> None:
        copy, began = copies.get(), time.monotonic()
        if failed.intersection(mutation.tests):
            verdict, said = "FAILS WITHOUT IT", ""
        else:
            verdict, said = outcome(mutation, copy, slow, timeout)
        copies.put(copy)
        found[verdict.partition(":")[0]] += 1
        took = time.monotonic() - began
        print(f"{verdict:<9} {took:6.1f} s  {mutation.file}: {mutation.what}", flush=True)
        if verdict.startswith("ERROR"):
            print("\n".join(said.splitlines()[-20:]), flush=True)

    with tempfile.TemporaryDirectory(prefix="mutate-") as scratch:
        for i in range(jobs):
            copies.put(Path(scratch, str(i)))
            copy_tree(root, Path(scratch, str(i)))
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        pool = ThreadPoolExecutor(jobs)
        try:
            first = Path(scratch, "0")
            tests = {x for m in mutations if not m.fault(first) for x in m.tests}
            limit = timeout * len(mutations)
            failed = pool.submit(failing, tests, first, slow, limit).result() if tests else set()
            list(pool.map(one, mutations))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:  # each has a process group of its own, which hears no Ctrl-C
                os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            pool.shutdown()
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--changed", nargs="?", const="", metavar="REV", help="only mutations of files that differ "
        "from REV (default: from where this branch left origin/main, or from HEAD~1)")  # fmt: skip
    add("--match", metavar="TEXT", help="only mutations whose description or file contains TEXT")
    add("--list", action="store_true", help="print the mutations and run nothing")
    add("--check", action="store_true", help="only check that each old text occurs once and that "
        "each test exists")  # fmt: skip
    add("--slow", action="store_true", help="also run tests that are marked slow")
    add("--jobs", type=int, default=1, metavar="N", help="mutations at the same time (default: 1)")
    add("--timeout", type=float, default=600, metavar="SECONDS", help="a mutation whose tests take "
        "longer counts as killed (default: 600)")  # fmt: skip
    add("--root", type=Path, default=ROOT, metavar="DIR", help="the project (default: this one)")
    given = parser.parse_args(words)

    chosen = load(given.root)
    if given.changed is not None:
        files = changed_files(given.root, given.changed)
        chosen = [m for m in chosen if m.file in files]
    if given.match:
        chosen = [m for m in chosen if given.match in f"{m.file}: {m.what}"]
    if given.list:
        print("\n".join(f"{m.file}: {m.what}" for m in chosen))
        return 0
    if given.check:
        faults = [
            f"{m.file}: {m.what}\n  {fault}" for m in chosen if (fault := m.fault(given.root))
        ]
        print("\n".join([*faults, f"{len(chosen)} mutations, {len(faults)} of them not valid"]))
        return bool(faults)
    found = run(chosen, given.root, given.jobs, given.slow, given.timeout)
    print(", ".join(f"{count} {verdict}" for verdict, count in found.items()) or "no mutation")
    return any(verdict not in FINE for verdict in found)


if __name__ == "__main__":
    sys.exit(main())
