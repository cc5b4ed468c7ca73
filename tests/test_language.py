"""Words that have a plain name in the field are not used: see the glossary in CONTRIBUTING.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

INSTEAD = {
    r"publish(es|ed|ing)?": "all-gather (the updated parameters)",
    r"anew": "again",
    r"mend(s|ed|ing)?": "fix",
    r"made whole": "all-gathered",
    r"kept whole": "kept unsharded",
    r"at rest": "between steps; stored",
    r"lies over": "is sharded over",
    r"divided over": "sharded over",
    r"own parts?": "local shard",
    r"the numbers of one device": "matches single-device training",
}
PLACES = [  # patterns of paths
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md"),
    *("Makefile", "scripts/*.py", "scripts/*.sh", ".ci/run", "gshard/*.py"),
    *(f"gshard/{path.parent.name}/**/*.py" for path in sorted(ROOT.glob("gshard/*/__init__.py"))),
]


def texts(place: str) -> dict[Path, str]:
    """What is written at a place, by file; of the change log without its table of old names."""
    return {
        path: re.sub(r"^\| `.*", "", path.read_text(), flags=re.MULTILINE)
        if path.name == "CHANGELOG.md"
        else path.read_text()
        for path in sorted(ROOT.glob(place))
    }


def found(text: str) -> list[str]:
    """Every use of a word, with its line; a line break or `_` is a space like any other."""
    plain = re.sub(r"[\s_]", " ", text)
    return sorted(
        f"line {text.count(chr(10), 0, match.start()) + 1}: {match.group()!r}, say {word!r}"
        for pattern, word in INSTEAD.items()
        for match in re.finditer(rf"\b{pattern.replace(' ', ' +')}\b", plain, re.IGNORECASE)
    )


@pytest.mark.parametrize("place", PLACES)
def test_the_words_of_the_field(place):
    offences = [
        f"{path.relative_to(ROOT)}, {use}"
        for path, text in texts(place).items()
        for use in found(text)
    ]
    assert texts(place)
    assert not offences, "\n" + "\n".join(offences)


def test_the_words_of_the_field_in_names_of_tests():
    names = {
        name: path
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    offences = [f"{path.name}::{name}" for name, path in names.items() if found(name)]
    assert not offences, "\n" + "\n".join(offences)


@pytest.mark.parametrize("text", ["Published.", "made\n  whole", "test_own_parts", "It is At rest"])
def test_a_word_is_found_however_it_is_written(text):
    assert found(text)


def test_what_is_fine():
    assert not found(
        "a part of a whole, divided by two; to recommend; at restore; sharded over two"
    )
