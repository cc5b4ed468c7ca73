"""What the project promises about itself: dependencies, version, boundaries, documents, scripts."""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest

import gshard
from tests import boundaries
from tests.docs import python_blocks, run_blocks

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gshard"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES = sorted(PACKAGE.rglob("*.py"))


# ---- package ------------------------------------------------------------------------------------


def test_hard_dependencies_are_four():
    names = [re.split(r"[^\w-]", d)[0] for d in PROJECT["project"]["dependencies"]]
    assert names == ["jax", "flax", "optax", "numpy"]


def test_floors_but_no_upper_bounds():
    extras = dict(PROJECT["project"]["optional-dependencies"])
    names = extras.pop("all")[0].removeprefix("gshard[").removesuffix("]").split(",")
    assert {*names} <= extras.keys()
    wanted = PROJECT["project"]["dependencies"] + [d for extra in extras.values() for d in extra]
    for requirement in [*wanted, "python" + PROJECT["project"]["requires-python"]]:
        assert re.fullmatch(r"[\w-]+(\[[\w-]+\])?>=[\d.]+", requirement), requirement


def test_compilers_are_those_of_the_installed_jax():
    """JAX ignores a plugin of another version, so only its own extras may name them."""
    extras = PROJECT["project"]["optional-dependencies"]
    known = importlib.metadata.metadata("jax").get_all("Provides-Extra")
    for extra in ("cuda", "tpu", "aot-gpu", "aot-tpu"):
        of_jax = re.fullmatch(r"jax\[([\w-]+)\]>=[\d.]+", extras[extra][0])
        assert of_jax and of_jax[1] in known
    plugins = r"jax-cuda|libtpu"
    assert not [d for extra in extras.values() for d in extra if re.match(plugins, d)]


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").is_file()
    assert PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["gshard"]


def test_version_lives_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    place = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{gshard.__version__}"' in place.read_text()
    others = [p for p in MODULES if p != place and re.search(r"__version__\s*=", p.read_text())]
    assert not others
    assert not re.search(r"^version", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)


def test_installed_version_is_the_one_in_the_source():
    try:
        installed = importlib.metadata.version("gshard")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("gshard is not installed here, only on the path")
    assert installed == gshard.__version__


PUBLIC = (gshard, gshard.distributed, gshard.paddle, gshard.pytorch, gshard.sequence, gshard.expert)


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_public_names_are_there_once_and_documented(module):
    assert len(module.__all__) == len(set(module.__all__))
    for name in module.__all__:
        assert name.startswith("__") or inspect.getdoc(getattr(module, name)), name


def test_completion_shows_the_public_names_alone():
    assert dir(gshard) == sorted(gshard.__all__)
    modules = [x for x in gshard.__all__ if inspect.ismodule(getattr(gshard, x))]
    assert len(modules) <= 5
    assert len(gshard.__all__) - len(modules) <= 54


# ---- boundaries ---------------------------------------------------------------------------------

# what is checked, the files and folders of gshard it does not hold for, and a module that breaks it
RULES = {
    "a stage reads layouts, it does not test the level": (
        boundaries.level_tests,
        ("sharding/level.py",),
        [
            "if plan.level.name == 'os': pass",
            "x = level in ('os', 'dp')",
            "match level:\n case 1: 0",
        ],
    ),
    "train/comm alone calls a collective": (
        boundaries.collective_calls,
        ("train/comm/", "sequence/collectives.py", "_util/gloo.py"),  # the last are for both
        [
            "from jax import lax\nlax.psum(x, 'd')",
            "jax.lax.all_gather",
            "from jax.lax import pmean",
            "from jax import lax as L\nL.psum(x, 'd')",
            "import jax.lax as jl\njl.all_gather(x, 'd')",
        ],
    ),
    "train_state alone knows Flax, and the faces for NNX models": (
        boundaries.flax_imports,
        ("train_state/", "wrapped/", "paddle/", "pytorch/", "models/"),  # and models that ship
        ["import flax", "from flax import nnx", "def f():\n import flax.linen as nn"],
    ),
    "public JAX only, and none of its retired ways": (
        boundaries.private_jax,
        (),
        [
            "from jax._src import core",
            "jax._src.core.x",
            "jax.pmap(f)",
            "from jax.experimental.pjit import pjit",
            "with mesh: pass",
            "with plan.mesh as m: pass",
        ],
    ),
    "no pickle": (boundaries.pickles, (), ["import pickle", "from pickle import loads"]),
    "input is refused by an error, not by assert": (boundaries.asserts, (), ["assert x > 0"]),
    "a message names a page, not a file that is not installed": (
        boundaries.documents,
        (),
        ["warn('see docs/losses.md')", "warn(f'{x}: docs/losses.md')"],
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_boundary(rule):
    check, exempt, _ = RULES[rule]
    offences = [
        f"{path.relative_to(ROOT)} {offence}"
        for path in MODULES
        if not path.relative_to(PACKAGE).as_posix().startswith(exempt)
        for offence in check(path.read_text())
    ]
    assert not offences, f"{rule}:\n" + "\n".join(offences)


@pytest.mark.parametrize(
    ("rule", "source"), [(rule, bad) for rule, (_, _, broken) in RULES.items() for bad in broken]
)
def test_boundary_can_be_broken(rule, source):
    assert RULES[rule][0](source)


def test_boundaries_allow_what_is_meant():
    fine = "with jax.set_mesh(mesh): pass\nlax.axis_index('d')\nif plan.divides: pass\nimport optax"
    assert not any(check(fine) for check, _, _ in RULES.values())


# ---- documents ----------------------------------------------------------------------------------

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
WITH_CODE = [p for p in DOCUMENTS if p.exists() and python_blocks(p.read_text())]


@pytest.mark.parametrize("path", WITH_CODE, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_code_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(path)


def test_extras_in_the_documents_are_those_that_exist():
    extras = PROJECT["project"]["optional-dependencies"]
    pages = [path.read_text() for path in (*DOCUMENTS, ROOT / "CHANGELOG.md")]
    named = set(re.findall(r"gshard\[([\w,-]+)\]", "\n".join(pages)))
    assert {extra for names in named for extra in names.split(",")} <= extras.keys()
    for_users = extras["all"][0].removeprefix("gshard[").removesuffix("]").split(",")
    install = (ROOT / "docs" / "install.md").read_text()
    assert not [x for x in (*for_users, "cuda", "tpu", "all") if f"gshard[{x}]" not in install]


def test_the_table_of_options_is_that_of_the_train_step():
    page = (ROOT / "docs" / "train-step.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)=` \| `(.+?)` \|", page, re.MULTILINE))
    options = inspect.signature(gshard.make_train_step).parameters.values()
    defaults = {x.name: x.default for x in options if x.kind is x.KEYWORD_ONLY}
    assert rows == {name: repr(x).replace("'", '"') for name, x in defaults.items()}


def test_blocks_share_a_namespace_and_name_their_line(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n```python\nx = 1\n```\n```python fragment\n...)\n```\n```python\ny = x\n```\n"
    )
    assert run_blocks(page)["y"] == 1
    page.write_text(page.read_text() + "```python\n\n1 / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks(page)
    assert caught.traceback[-1].path == page
    assert caught.traceback[-1].lineno + 1 == 13


# ---- scripts ------------------------------------------------------------------------------------


def run(*command, **environment):
    return subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", **environment},
    )


def test_make_says_what_each_target_does():
    said = run("make").stdout
    for target in ("demo", "test", "test-all", "docs", "lint", "help"):
        assert re.search(rf"^  make {target}\s+\w+", said, re.MULTILINE), said


def test_the_workflow_calls_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    called = re.findall(r"- run: (\w+) ([a-z-]+)", workflow)
    wanted = {"lint", "test", "docs", "setup-stores"}
    assert wanted == {target for _, target in called} <= targets
    assert {command for command, _ in called} == {"make"}


def test_the_image_copies_files_that_are_there():
    lines = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    copied = {name for line in lines for name in line.split()}
    needed = {"pyproject.toml", "gshard", PROJECT["project"]["readme"]}
    assert needed.union(PROJECT["project"]["license-files"]) == copied
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert copied == {line[1:] for line in sent if line.startswith("!")}


def test_scripts_parse():
    for script in (".ci/run", "scripts/venv.sh"):
        assert (ROOT / script).stat().st_mode & 0o100, f"{script} is not executable"
        assert run("bash", "-n", script).returncode == 0


def test_a_ci_that_is_stopped_leaves_no_process(tmp_path):
    (tmp_path / "ci").mkdir()
    begins = (ROOT / ".ci" / "run").read_text().partition("site() {")[0]
    runs = "sleeper() { sleep 60; echo went on; }\nat_once sleeper\n"
    (tmp_path / "ci" / "run").write_text(begins + runs)
    command = ["bash", str(tmp_path / "ci" / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        own = psutil.Process(process.pid)
        until = time.monotonic() + 30
        sleepers: list[psutil.Process] = []
        while not sleepers:
            assert time.monotonic() < until
            time.sleep(0.01)
            with contextlib.suppress(psutil.NoSuchProcess):  # another child that has just ended
                sleepers = [x for x in own.children(recursive=True) if x.name() == "sleep"]
        process.terminate()
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 143
    assert "CI FAILED in the stage: start (exit 143)" in said and "went on" not in said
    _, alive = psutil.wait_procs(sleepers, timeout=30)
    assert not alive


@pytest.mark.parametrize(("version", "kept"), [("3.13.0", True), ("3.14.2", False)])
def test_ci_creates_its_newest_environment_again_for_another_python(tmp_path, version, kept):
    ci = (ROOT / ".ci" / "run").read_text()
    found = re.search(r"^newest_environment\(\) {$.*?^}$", ci, re.MULTILINE | re.DOTALL)
    for path, says in ((".venv-newest/bin/python", "3.13.0"), ("new", version)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"#!/bin/sh\necho {says}\n")
        (tmp_path / path).chmod(0o755)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "venv.sh").symlink_to("/bin/true")
    script = f"set -euo pipefail\n{found[0]}\nnewest_environment ./new"
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True)
    assert (tmp_path / ".venv-newest").exists() == kept


def fake_python(folder: Path, version: str, has_venv: bool) -> str:
    """A program that answers the three questions that scripts/venv.sh asks a Python."""
    old = "exit 1" if version < "3.11" else "exit 0"
    path = folder / "python"
    path.write_text(
        f"""#!/bin/sh
case "$2" in
  *"sys.exit"*) {old} ;;
  *ensurepip*) exit {0 if has_venv else 1} ;;
  *%d.%d.%d*) echo {version} ;;
  *%d.%d*) echo {version.rpartition(".")[0]} ;;
esac
"""
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("version", "has_venv", "said"),
    [
        ("3.10.4", True, "is not a Python of version 3.11 or newer"),
        ("3.12.1", False, "apt install python3.12-venv"),
    ],
)
def test_set_up_says_what_is_missing(tmp_path, version, has_venv, said):
    python = fake_python(tmp_path, version, has_venv)
    result = run("scripts/venv.sh", str(tmp_path / "venv"), "test", PYTHON=python)
    assert result.returncode != 0
    assert said in result.stderr
    assert not (tmp_path / "venv").exists()


def test_set_up_leaves_a_folder_that_is_no_venv_alone(tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "mine").touch()
    result = run("scripts/venv.sh", str(tmp_path / "venv"), "test", PYTHON=sys.executable)
    assert result.returncode != 0
    assert "is not a virtual environment" in result.stderr
    assert (tmp_path / "venv" / "mine").exists()


CREATES = """#!/bin/sh
# A Python that creates an environment with a copy of itself, in two steps, and installs nothing.
echo "$*" >> "$LOG"
case "$*" in
  *fcntl*) exec "$REAL" "$@" ;;
  *"-m venv"*)
    mkdir -p "$3/bin"; touch "$3/pyvenv.cfg"; sleep 0.3; cp "$0" "$3/bin/python" || exit 1 ;;
  *"pip install"*) sleep 0.3 ;;
  *"-m ensurepip"*|*"pip --version"*) exit ${NO_PIP:-0} ;;
  *sys.version*sys.prefix*)
    if [ -n "${KILLS:-}" ]; then kill -9 $PPID; exit; fi
    echo "3.11.7 $(cd "$(dirname "$0")/.." && pwd)" ;;
  *sys.prefix*) cd "$(dirname "$0")/.." && pwd ;;
  *sys.version*|*%d.%d*) echo 3.11.7 ;;
esac
"""


@pytest.fixture
def set_up(tmp_path):
    """Starts scripts/venv.sh in a checkout `tmp_path / name`; gives what it does and says."""
    fake = tmp_path / "python 3"
    fake.write_text(CREATES)
    fake.chmod(0o755)
    log = tmp_path / "log"

    def start(name, extras="test", python=fake, folder=".venv", **own):
        checkout = tmp_path / name
        for file in ("scripts/venv.sh", "pyproject.toml", "gshard/_util/version.py"):
            (checkout / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, checkout / file)
        own |= {"LOG": log, "REAL": sys.executable, "PYTHON": python}
        return subprocess.Popen(
            ["bash", "scripts/venv.sh", folder, extras],
            cwd=checkout,
            env={"PATH": "/usr/bin:/bin", **{k: str(v) for k, v in own.items()}},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def test_set_up_by_two_at_once_creates_one_environment(set_up, tmp_path):
    started = [set_up("here", extras) for extras in ("test", "docs")]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert (tmp_path / "log").read_text().count("-m venv") == 1
    assert "again" not in "".join(said)


def test_set_up_installs_if_an_extra_is_missing(set_up):
    for extras, installs in (("test", True), ("test,docs", True), ("docs", False), ("dev", True)):
        said, _ = set_up("here", extras).communicate()
        assert f"installing gshard and its extras [{extras}]" in said if installs else not said


def test_set_up_creates_a_moved_environment_again(set_up, tmp_path):
    set_up("before").communicate()
    (tmp_path / "before").rename(tmp_path / "after")
    said, _ = set_up("after").communicate()
    assert ".venv was created at another path; creating it again" in said
    assert set_up("after").communicate()[0] == ""


def test_set_up_keeps_an_environment_whose_stamp_was_not_written(set_up, tmp_path):
    process = set_up("here", KILLS=1)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    (tmp_path / "here" / ".venv" / "mine").touch()
    said, _ = set_up("here").communicate()
    assert "again" not in said and (tmp_path / "here" / ".venv" / "mine").exists()


def test_set_up_creates_an_environment_without_its_python_again(set_up, tmp_path):
    set_up("here").communicate()
    (tmp_path / "here" / ".venv" / "bin" / "python").unlink()
    said, _ = set_up("here").communicate()
    assert said.startswith("== .venv does not work any more; creating it again\n")


def test_set_up_locks_beside_the_folder_or_says_that_it_cannot(set_up, tmp_path):
    set_up("here", folder=".venv/").communicate()
    lock = tmp_path / "here" / ".venv-lock"
    lock.unlink()  # it was there
    lock.mkdir()
    process = set_up("here", "docs", folder=".venv/")
    said, _ = process.communicate()
    assert process.returncode == 0
    assert said.startswith("== .venv-lock cannot be locked: run one make at a time\n")


def test_set_up_leaves_an_environment_without_pip_alone(set_up, tmp_path):
    set_up("here").communicate()
    (tmp_path / "here" / ".venv" / "mine").touch()
    process = set_up("here", "docs", NO_PIP=1)
    said, _ = process.communicate()
    assert process.returncode == 1
    assert "gshard: .venv has no pip that works" in said
    assert (tmp_path / "here" / ".venv" / "mine").exists()


def test_set_up_says_that_another_python_is_not_used(set_up):
    set_up("here").communicate()
    process = set_up("here", python=sys.executable)
    said, _ = process.communicate()
    assert process.returncode == 0
    assert f"PYTHON={sys.executable} is not used: .venv has Python 3.11.7. To create it" in said


def test_toml_checker_names_the_broken_file(tmp_path):
    (tmp_path / "bad.toml").write_text("a = \n")
    (tmp_path / "latin.toml").write_bytes(b'a = "\xe9"\n')
    bad = [str(tmp_path / name) for name in ("bad.toml", "latin.toml")]
    result = run(sys.executable, "scripts/check_toml.py", "pyproject.toml", *bad)
    assert result.returncode == 1
    assert [line.partition(":")[0] for line in result.stdout.splitlines()] == bad


def test_toml_checker_finds_the_files_itself(tmp_path):
    (tmp_path / "scripts").mkdir()
    script = shutil.copy(ROOT / "scripts" / "check_toml.py", tmp_path / "scripts")
    nothing = run(sys.executable, script)
    assert (nothing.returncode, nothing.stdout) == (1, f"there is no TOML file in {tmp_path}\n")
    for folder in ("configs", ".venv", "env"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "bad.toml").write_text("a = \n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert run(sys.executable, script).stdout.count("bad.toml") == 1
    assert run(sys.executable, "scripts/check_toml.py").returncode == 0
