"""Writes the sources of the site into a folder, from which MkDocs builds it (`make docs`).

    python -m scripts.site_pages build/docs

These are the pages of docs/ and pages that are made here: README, the quickstart, the reference of
the public names, and the files outside of docs/ that a page links to. A file of the repository has
its own path on the site, except that docs/ is the root and a README.md is an index. Source files
become pages that show them.
"""

from __future__ import annotations

import inspect
import os.path
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gshard
from scripts.quickstart import notebook

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
SOURCES = {".py": "python", ".sh": "sh", ".toml": "toml", ".yaml": "yaml"}
FENCED = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)#\s:]+)(?=[)#])")
CHINESE = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"  # a line break between two is no space
BROKEN = re.compile(rf"(?<={CHINESE})\n *(?={CHINESE})")
INLINE = re.compile(r"(?<![\[`])`(gshard(?:\.\w+)+)(?:\([^`]*\))?`(?![\]`])")


# ---- Markdown -----------------------------------------------------------------------------------


def outside_of_code(text: str, change: Callable[[str], str]) -> str:
    """A Markdown text, changed where it is not fenced code."""
    ends = [0, *(end for match in FENCED.finditer(text) for end in match.span()), len(text)]
    parts = [text[start:end] for start, end in zip(ends, ends[1:], strict=False)]
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


def on_site(path: str) -> str:
    """The path on the site of a file of the repository."""
    path = path.removeprefix("docs/")
    if path.endswith("README.md"):
        return path.removesuffix("README.md") + "index.md"
    return path + ".md" if Path(path).suffix in SOURCES else path


def page(path: str, names: set[str]) -> tuple[str, list[str]]:
    """A Markdown file for the site, and the files of the repository to which it links.

    Links lead to where the files are on the site, and public names to the reference.
    """
    folder, start = os.path.dirname(path), os.path.dirname(on_site(path))
    linked: list[str] = []

    def link(match: re.Match[str]) -> str:
        linked.append(os.path.normpath(os.path.join(folder, match[2])))
        return match[1] + os.path.relpath(on_site(linked[-1]), start or ".")

    def refer(match: re.Match[str]) -> str:
        return f"[{match[0]}][{match[1]}]" if match[1] in names else match[0]

    text = (ROOT / path).read_text().replace("```python fragment\n", "```python\n")

    def change(part: str) -> str:
        return INLINE.sub(refer, LINK.sub(link, BROKEN.sub("", part)))

    return outside_of_code(text, change), linked


def source(path: str) -> str:
    """A page that shows a source file, which the search leaves out."""
    text = (ROOT / path).read_text()
    head = f"---\nsearch:\n  exclude: true\n---\n# {Path(path).name}\n\n`{path}`\n\n"
    return f"{head}````{SOURCES[Path(path).suffix]}\n{text}````\n"


def quickstart() -> str:
    """The page of the quickstart: the cells of its notebook."""
    cells = notebook((ROOT / "examples" / "quickstart.py").read_text())["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(
        text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in texts
    )


# ---- reference ----------------------------------------------------------------------------------


def public() -> dict[str, dict[str, Any]]:
    """The public objects by page of the reference: of the folder that has them, or a module.

    A page has its functions first, then its classes.
    """
    pages: dict[str, dict[str, Any]] = {}
    for name in gshard.__all__:
        value = getattr(gshard, name)
        if isinstance(value, types.ModuleType):
            members = {f"gshard.{name}.{n}": getattr(value, n) for n in value.__all__}
            pages[f"gshard.{name}"] = members
        elif isinstance(value, type) and issubclass(value, Exception):
            pages.setdefault("errors", {})[f"gshard.{name}"] = value
        elif not name.startswith("__"):
            pages.setdefault(value.__module__.split(".")[1], {})[f"gshard.{name}"] = value
    by_kind = {page: sorted(of.items(), key=_is_class) for page, of in pages.items()}
    return {page: dict(members) for page, members in by_kind.items()}


# What the calls of a module return is no public name, but has methods that a user calls.
RETURNED = {
    "gshard.paddle": {
        "The wrapped model": "gshard.wrapped.wrapped_model.Wrapped",
        "The wrapped optimizer": "gshard.wrapped.wrapped_optimizer.WrappedOptimizer",
        "The scaler of a wrapped model": "gshard.paddle.grad_scaler.Scaler",
    }
}
HEADLESS = "    options: { show_root_heading: false, show_root_toc_entry: false }"


def _is_class(member: tuple[str, Any]) -> bool:
    return isinstance(member[1], type)


def reference(pages: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The pages of the reference by their path: one table of all names, and what each is."""
    made, table = {}, [f"# Reference\n\nThe public names of gshard `{gshard.__version__}`.\n"]
    navigation = (ROOT / "mkdocs.yml").read_text()
    for name, members in sorted(pages.items(), key=lambda item: navigation.find(f"/{item[0]}.md")):
        title = name if "." in name else name.replace("_", " ").capitalize()
        package = sys.modules.get(name if "." in name else f"gshard.{name}")
        intro = summary(package) if package else "What gshard raises, and its warning."
        parts = [directive(*member) for member in members.items()]
        returned = RETURNED.get(name, {}).items()
        parts += [f"## {what}\n\n::: {where}\n{HEADLESS}" for what, where in returned]
        directives = "\n\n".join(parts)
        made[f"reference/{name}.md"] = f"# {title}\n\n{intro}\n\n{directives}\n"
        rows = [f"| [`{n}`][{n}] | {summary(value)} |" for n, value in members.items()]
        table += [f"## [{title}]({name}.md)\n", "| name | what it is |", "|---|---|", *rows, ""]
    return made | {"reference/index.md": "\n".join(table)}


def directive(name: str, value: Any) -> str:
    """What MkDocs replaces with the documentation of an object.

    mkdocstrings finds an object by its name, unless a module has the same one.
    """
    home, own = getattr(value, "__module__", ""), getattr(value, "__name__", "")
    if f"{home.rpartition('.')[0]}.{own}" not in sys.modules:
        return f"::: {name}"
    label = name.rpartition(".")[2]
    return f"## {name} {{ #{name} data-toc-label='{label}' }}\n\n::: {home}.{own}\n{HEADLESS}"


def summary(value: Any) -> str:
    """The first paragraph of a docstring in one line, or a number itself."""
    text = f"`{value}`" if isinstance(value, int) else inspect.getdoc(value) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


# ---- folder -------------------------------------------------------------------------------------


def write(folder: Path) -> None:
    """Writes all sources of the site into a folder, in place of what was in it."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = public()
    names = {name for members in pages.values() for name in members}
    texts = {"quickstart.md": quickstart(), **reference(pages)}
    docs = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.*"))
    waiting = [*ALWAYS, *docs]
    while waiting:
        path = waiting.pop()
        to = folder / on_site(path)
        if to.exists() or not (ROOT / path).is_file():
            continue  # MkDocs reports a link that leads nowhere
        to.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".md"):
            text, linked = page(path, names)
            to.write_text(text)
            waiting += linked
        elif Path(path).suffix in SOURCES:
            to.write_text(source(path))
        else:
            shutil.copyfile(ROOT / path, to)
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
