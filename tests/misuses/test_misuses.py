"""Each row of the table: what a user sees is what it says; and the page shows the same rows."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest

from tests.misuses import page, several_processes
from tests.misuses.one_process import TOPICS
from tests.misuses.table import assert_words, check
from tests.processes import run_workers_once

TROUBLES = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
QUOTED = re.findall(r"```text\n(.*?)\n```\n<!-- misuse: (.*?) -->", TROUBLES.read_text(), re.DOTALL)
CASES = {f"{topic}: {name}": row for topic, rows in TOPICS.items() for name, row in rows.items()}
SLOW = {"Losses", "Files", "Transforms, modes and threads"}  # what works there is compiled
QUICK = {"jax.disable_jit", "jax.transfer_guard('disallow')"}
QUICK |= {"a state whose step is a number of Python", "jax.enable_x64 from the start"}
QUICK |= {"it is a partial function that binds a field of the state"}
QUICK |= {"metrics in aux have the keys of batch statistics"}


def is_slow(topic: str, name: str) -> bool:
    return topic in SLOW and TOPICS[topic][name].seen == "right" and name not in QUICK


MARKED = [
    pytest.param(name, marks=pytest.mark.slow if is_slow(*name.split(": ", 1)) else ())
    for name in CASES
]


@pytest.mark.filterwarnings("ignore:.*% of the parameters", "ignore:.*coroutine")
@pytest.mark.parametrize("name", MARKED)
def test_what_a_user_sees(name, tmp_path):
    check(CASES[name], tmp_path)
    if "coroutine" in name:
        gc.collect()  # Python warns of it when it is freed, which may be in another test


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def processes(tmp_path_factory, request):
    folder, count = tmp_path_factory.mktemp("misuses"), request.param
    sizes = {"processes": count, "devices_each": 4 // count}
    name = f"misuses-{count}"
    module = "misuses.several_processes"
    return run_workers_once(tmp_path_factory, name, module, str(folder), **sizes)


@pytest.mark.parametrize("name", several_processes.ROWS)
def test_what_every_process_sees(processes, name):
    row = several_processes.ROWS[name]
    for process in processes:
        said = str(process[name])
        assert said.startswith(row.seen), said
        if row.words and len(processes) == 2:  # others name other numbers
            assert_words(row.words, said)


def test_the_page_is_current():
    assert page.PAGE.read_text() == page.text(), "run python -m tests.misuses.page"


@pytest.mark.filterwarnings("ignore:.*% of the parameters")
@pytest.mark.parametrize(("message", "name"), QUOTED, ids=[name for _, name in QUOTED])
def test_what_troubleshooting_quotes_is_what_a_user_sees(message, name, tmp_path):
    """Word for word, where `...` stands for what differs from program to program."""
    (row,) = (rows[name] for rows in TOPICS.values() if name in rows)
    with pytest.raises(row.error) as caught:
        row.misuse(tmp_path)
    words = (re.escape(part.strip()) for part in " ".join(message.split()).split("..."))
    assert re.fullmatch(r"\s*.*?".join(words), " ".join(str(caught.value).split()))


def test_every_message_of_troubleshooting_is_compared():
    assert len(QUOTED) == TROUBLES.read_text().count("```text\n") >= 12


def test_there_are_enough():
    assert len(CASES) >= 600 and len(several_processes.ROWS) >= 45
