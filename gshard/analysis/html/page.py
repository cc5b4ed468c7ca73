"""A forecast as one HTML page that loads nothing: no network, no script, no font."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gshard._util.durable import NewFile, file_path
from gshard._util.units import bytes_of, count_of
from gshard._util.version import __version__
from gshard.analysis.config import Config
from gshard.analysis.forecast import Forecast, LevelForecast
from gshard.analysis.html.arrays import leaves_of_level, mesh_grid
from gshard.analysis.html.markup import (
    STYLE,
    Markup,
    amount,
    el,
    html_table,
    joined,
    records_table,
    shown_value,
)
from gshard.analysis.html.pictures import Bar, bars, definitions, legend

# Nothing is loaded and nothing runs, whatever the name of a model or of a leaf contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_PARTS = ("params", "optimizer", "non_trainable", "gradients", "batch", "gathered", "activations")
_FAR = 20  # a limit so many times the longest bar would leave nothing of it to see
_HEADINGS = {
    "params": "parameters",
    "optimizer": "optimizer",
    "non_trainable": "non_trainable",
    "gradients": "gradients",
    "batch": "batch",
    "gathered": "layer gathered",
    "activations": "activations",
}


def page(
    found: Forecast,
    *,
    model: str,
    compiled: Mapping[str, Mapping[str, Any]] | None = None,
    advice: Iterable[Mapping[str, Any]] | None = None,
    capacity: int | None = None,
    per_host: int | None = None,
) -> str:
    """Returns a forecast as a page.

    Args:
      found: the forecast.
      model: a description of what was planned.
      compiled: the compiler's report for each level: `gshard.Audit.as_dict`, and `fits`.
      advice: ways to train, the best first, as dicts with the same keys.
      capacity: bytes of one device's memory that programs can use.
      per_host: number of devices of one host, if the mesh does not have it.
    """
    contents = {
        "Memory of one device": _memory(found, capacity),
        "Sent by one device in one step": _wire(found),
        "Compiled": by_compiler(compiled) if compiled else None,
        "Advice": advised(advice) if advice else None,
        "Arrays": _arrays(found),
        "Devices": mesh_grid(found, per_host),
    }
    sections = {name: content for name, content in contents.items() if content is not None}
    title = f"Plan of {model}"
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", title),
        el("style", Markup(STYLE)),
    )
    main = el(
        "main",
        el("h1", title),
        _about(found, capacity),
        el("nav", el("ul", [el("li", el("a", x, href=f"#{_key(x)}")) for x in sections]),
           aria_label="Sections"),
        [el("section", el("h2", x), content, id=_key(x)) for x, content in sections.items()],
    )  # fmt: skip
    body = el("body", definitions(), main, el("footer", el("p", f"gshard {__version__}")))
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


def _key(heading: str) -> str:
    return heading.split()[0].lower()


def _about(found: Forecast, capacity: int | None) -> Markup:
    choices = found.choices
    copies = f", {found.replica:,} copies of the divided state" if found.replica > 1 else ""
    words = {
        "parameters": el(
            "data",
            f"{count_of(found.parameters)} ({found.parameters:,})",
            value=found.parameters,
        ),
        "devices": f"{found.devices:,}{copies}",
        "one step": f"{choices.micro_batches} x {choices.micro_batch_size} rows on each device",
        "gradients accumulate": choices.accumulate,
        "reshard after forward": str(choices.reshard_after_forward),
        "optimizer state on the host": "yes" if choices.offload else None,
        "usable memory of the chip": None if capacity is None else amount(capacity),
    }
    return el("dl", [[el("dt", k), el("dd", v)] for k, v in words.items() if v is not None])


def _memory(found: Forecast, capacity: int | None) -> Markup:
    """Returns bars and a table of all parts of the memory that some level has."""
    parts = {name: _parts(level) for name, level in found.levels.items()}
    used = [key for key in _PARTS if any(of.get(key) for of in parts.values())]
    known = all("activations" in of for of in parts.values())
    total = "in all" if known else "without activations"
    rows = []
    for name, level in found.levels.items():
        of = {key: parts[name].get(key, 0) for key in used}
        words = bytes_of(sum(of.values()))
        peak = level.peak
        if peak is not None:
            words += f", peak {bytes_of(peak)}"
        if level.host:
            words += f", {bytes_of(level.host)} on the host"
        rows.append(Bar(name, of, words, None if peak is None else (peak, "peak")))
    limit, note = None, None
    longest = max(sum(of.values()) for of in parts.values())
    if capacity is not None and capacity <= _FAR * longest:
        limit = (capacity, f"{bytes_of(capacity)} usable")
    elif capacity is not None:
        note = el("p", f"The chip has {bytes_of(capacity)}: more than can be drawn beside this.")
    title = f"Memory of one device, {total}"
    columns = ["level", *(_HEADINGS[key] for key in used), total]
    peaks = [level.peak for level in found.levels.values()]
    hosts = [level.host for level in found.levels.values()]
    columns += ["peak"] * any(x is not None for x in peaks) + ["on the host"] * any(hosts)
    lines = [
        [
            name,
            *(amount(parts[name].get(key, 0)) for key in used),
            amount(sum(parts[name].values())),
            *([amount(peak)] if "peak" in columns else []),
            *([amount(host)] if "on the host" in columns else []),
        ]
        for name, peak, host in zip(found.levels, peaks, hosts, strict=True)
    ]
    marked = "; the marks are the peak" if "peak" in columns else ""
    picture = el(
        "figure",
        el("figcaption", title, marked),
        legend(used),
        bars("memory-bars", title, rows, limit),
    )
    return joined([picture, note, html_table("The same in numbers", columns, lines)])


def _parts(level: LevelForecast) -> dict[str, int]:
    """Returns bytes by key of `FILLS`, without activations if these are not known."""
    found = {key: getattr(level, key, None) for key in _PARTS}
    return {key: count for key, count in found.items() if count is not None}


def _wire(found: Forecast) -> Markup:
    rows = [Bar(name, {"wire": x.wire}, bytes_of(x.wire)) for name, x in found.levels.items()]
    title = "Bytes that one device sends in one step, as chosen"
    flavours = next(iter(found.levels.values())).wire_by_flavour
    lines = [
        [name, amount(x.wire), *map(amount, x.wire_by_flavour.values())]
        for name, x in found.levels.items()
    ]
    notes = (
        "local, scatter, sync: ways to accumulate micro-batches; kept: what was gathered stays for "
        "the backward pass."
    )
    return joined([
        el("figure", el("figcaption", title), bars("wire-bars", title, rows)),
        html_table("By the way to accumulate", ["level", "as chosen", *flavours], lines),
        el("p", notes),
    ])  # fmt: skip


def _arrays(found: Forecast) -> Markup:
    """Returns one section for each level; the first is open."""
    first = next(iter(found.plans))
    return joined(leaves_of_level(name, of, name == first) for name, of in found.plans.items())


def place(file: str | None) -> contextlib.AbstractContextManager[NewFile | None]:
    """Opens the file of a page before the work, so that an unwritable path is refused at once."""
    if file is None:
        return contextlib.nullcontext()
    return NewFile(file_path(file, "--html"), "--html")


def page_of(
    config: Config,
    found: Forecast,
    compiled: Mapping[str, Mapping[str, Any]] | None = None,
    advice: Iterable[Mapping[str, Any]] | None = None,
) -> str:
    """Returns the page of a forecast, with what is known about the target."""
    target = config.target
    return page(
        found,
        model=config.model if target is None else f"{config.model} for {target.text}",
        compiled=compiled,
        advice=advice,
        capacity=None if target is None else target.chip.usable,
        # A host of a TPU slice is a tile of its torus, not consecutive devices.
        per_host=target.devices_per_host if target and target.platform == "gpu" else None,
    )


_COLLECTIVES = ("kind", "axes", "dtype", "purpose", "count", "asynchronous", "times",
                "payload_bytes", "wire_bytes")  # fmt: skip
_VERDICTS = {True: "fits", False: "does not fit", None: "not known whether it fits"}


def by_compiler(compiled: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Returns the section with the compiler's report for each level.

    Args:
      compiled: for each level, the result of `gshard.Audit.as_dict`, and `fits`. Further keys are
        shown as they are: lists of dicts as tables, everything else next to its name.
    """
    parts = []
    for name, of in compiled.items():
        verdict = of.get("fits")
        said = "does not compile" if "error" in of else _VERDICTS[verdict]
        parts.append(el("h3", name, ": ", el("strong", said)))
        parts += _level(name, {k: v for k, v in of.items() if k not in ("fits", "budget")})
    return joined(parts)


def advised(advice: Iterable[Mapping[str, Any]]) -> Markup:
    """Returns a ranked table, the best first.

    Args:
      advice: dicts of the compared options; keys are headings, and those that end with `bytes` have
        amounts in bytes.
    """
    rows = [{"rank": n, **row} for n, row in enumerate(advice, 1)]
    caption = "Ways to train that were compared, the best first"
    return records_table(caption, rows)


def _level(name: str, of: Mapping[str, Any]) -> list[Markup]:
    made, words = [], []
    for key, value in of.items():
        if key == "memory":
            rows = [(use.replace("_", " "), amount(count)) for use, count in value.items()]
            caption = f"Memory of one device at level {name}, by the compiler"
            made.append(html_table(caption, ("use", "bytes"), rows))
        elif key == "collectives":
            caption = f"Collectives of the compiled step at level {name}, on one device"
            rows = [{k: row.get(k) for k in _COLLECTIVES} for row in value]
            made.append(records_table(caption, rows) if rows else el("p", "No collectives."))
        elif _is_records(value):
            made.append(
                records_table(f"{key.replace('_', ' ').capitalize()} at level {name}", value)
            )
        else:
            words += [el("dt", key.replace("_", " ")), el("dd", shown_value(key, value))]
    return ([el("dl", words)] if words else []) + made


def _is_records(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return listed and all(isinstance(x, Mapping) for x in value)
