"""The quickstart: what is cut from it, and that it trains the same on any number of devices."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import clean_environment

ROOT = Path(__file__).parents[1]
SCRIPT = (ROOT / "examples" / "quickstart.py").read_text()
LAUNCH = ("-m", "gshard", "launch")
EXECUTE = """
import nbclient, nbformat
notebook = nbformat.read("quickstart.ipynb", 4)
nbclient.NotebookClient(notebook, timeout=300).execute()
nbformat.write(notebook, "quickstart.ipynb")
"""


def shortened(text: str, steps: int) -> str:
    """A text with the code of the quickstart, with fewer steps."""
    for old, new in (
        ("STEPS, done = 200, 0", f"STEPS, done = {steps}, 0"),
        ("number % 50", "number % 5"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def run(folder: Path, *launcher: str, steps: int = 20) -> str:
    """What the quickstart printed, started in a folder."""
    folder.mkdir(exist_ok=True)
    script = folder / "quickstart.py"
    script.write_text(shortened(SCRIPT, steps))
    ran = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        env=clean_environment() | {"PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "Warning" not in ran.stderr
    return ran.stdout


def losses(printed: str, rank: str = "") -> dict[str, float]:
    """Losses by what they are of: a step, or the held-out text."""
    found = re.findall(rf"^{re.escape(rank)}(step \d+:|held-out) loss ([\d.]+)$", printed, re.M)
    return {of: float(loss) for of, loss in found}


def test_readme_and_notebook_are_cut_from_the_script(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "quickstart.py"), str(tmp_path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    for path in (ROOT / "README.md", ROOT / "examples" / "quickstart.ipynb"):
        written = (tmp_path / path.name).read_text()
        assert written == path.read_text(), f"run python scripts/quickstart.py: {path} is old"
    block = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert block.startswith("from pathlib import Path\n")
    assert block.replace("\n# ", "\n# %% ") in SCRIPT
    assert len(SCRIPT.splitlines()) <= 60


@pytest.fixture(scope="module")
def one_device(tmp_path_factory) -> dict[str, float]:
    """Losses of 20 steps in one process with one device."""
    found = losses(run(tmp_path_factory.mktemp("one")))
    assert list(found) == ["step 5:", "step 10:", "step 15:", "step 20:", "held-out"]
    assert found["step 20:"] < 0.8 * found["step 5:"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (("--virtual_devices", "3"), [""]),
        (("--nproc_per_node", "2", "--virtual_devices", "1"), ["[rank 0] ", "[rank 1] "]),
    ],
    ids=["3 devices", "2 processes"],
)
def test_the_quickstart_prints_the_losses_of_one_device(tmp_path, one_device, options, ranks):
    printed = run(tmp_path, *LAUNCH, *options)
    for rank in ranks:
        assert losses(printed, rank) == pytest.approx(one_device, abs=1.01e-4)  # the last digit


@pytest.mark.slow
def test_the_quickstart_resumes_and_says_so(tmp_path, one_device):
    assert "resumed" not in run(tmp_path, *LAUNCH, "--virtual_devices", "3", steps=10)
    printed = run(tmp_path)
    assert f"resumed from step 10 of 20 in {tmp_path}/quickstart-checkpoints" in printed
    rest = {of: loss for of, loss in one_device.items() if of not in ("step 5:", "step 10:")}
    assert losses(printed) == pytest.approx(rest, abs=1.01e-4)
    again = run(tmp_path)
    assert "resumed from step 20 of 20" in again
    assert losses(again) == {"held-out": losses(printed)["held-out"]}


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    """In a kernel of its own, on 8 virtual devices, and once more in the same folder."""
    for package in ("nbclient", "ipykernel"):
        pytest.importorskip(package, reason=f"no {package}: pip install -e '.[test]'")
    source = shortened((ROOT / "examples" / "quickstart.ipynb").read_text(), 10)
    (tmp_path / "quickstart.ipynb").write_text(source)
    environment = clean_environment() | {"PYTHONPATH": ":".join([str(ROOT), *sys.path])}
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", EXECUTE],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    cells = json.loads((tmp_path / "quickstart.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    (table,) = ["".join(o["data"]["text/html"]) for o in outputs if "data" in o]
    assert "level p_g_os: 8 devices" in table
    assert "<td" in table
    printed = "".join("".join(o.get("text", "")) for o in outputs)
    assert "resumed from step 10 of 10" in printed
    assert "held-out loss" in printed
