"""A forecast as one HTML page that loads nothing: no network, no script, no font."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gshard._util.html import Markup, el, joined
from gshard._util.text import bytes_of, count_of
from gshard._util.version import __version__
from gshard.analysis.explain import state_arrays
from gshard.analysis.forecast_report import Forecast, about, axes_of, sent_column
from gshard.analysis.html.markup import (
    STYLE,
    amount,
    bars,
    facts,
    html_table,
    records_table,
    shown_value,
)
from gshard.sharding.plan import Plan

# Nothing is loaded and nothing runs, whatever the name of a model or of a leaf contains.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_PARTS = {  # of a level's forecast: its name on the page, and its color
    "params": ("parameters", "#0072b2"),
    "optimizer": ("optimizer", "#56b4e9"),
    "non_trainable": ("non_trainable", "#f0e442"),
    "gradients": ("gradients", "#e69f00"),
    "batch": ("batch", "#cc79a7"),
    "gathered": ("gathered", "#009e73"),
    "activations": ("activations", "#d55e00"),
}
_FAR = 20  # a limit so many times the longest bar would leave nothing of it to see
_LISTED = 40  # leaves; the rest is one row
_COLLECTIVES = ("kind", "axes", "dtype", "purpose", "count", "asynchronous", "times",
                "payload_bytes", "wire_bytes", "network_bytes")  # fmt: skip
_RANKED = "Ways to train, the best first (estimates, meant for ranking)"

Compiled = Mapping[str, Mapping[str, Any]]  # results of `compile_for`, or of `audit`, by level


def page(
    found: Forecast,
    model: str,
    compiled: Compiled | None = None,
    advice: Iterable[Mapping[str, Any]] = (),
) -> str:
    """Returns a forecast as a page.

    Args:
      found: the forecast.
      model: a description of what was planned.
      compiled: the compiler's report for each level: `gshard.Audit.as_dict`, and `fits`.
      advice: ways to train, the best first, as dicts; keys are headings, and those that end with
        `bytes` have amounts in bytes.
    """
    compiled = compiled or {}
    ranked = [{"rank": n, **row} for n, row in enumerate(advice, 1)]
    contents = {
        "Verdict": _verdict(found, compiled),
        "Memory of one device": _memory(found),
        "Sent by one device in one step": _wire(found),
        "Compiled": _compiled(compiled),
        "Advice": records_table(_RANKED, ranked) if ranked else None,
        "Arrays": joined(_leaves(name, plan) for name, plan in found.plans.items()),
    }
    title = f"Plan of {model}" + (f" for {found.target}" if found.target else "")
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", title),
        el("style", Markup(STYLE)),
    )
    sections = [
        el("section", el("h2", heading), content, id=heading.split()[0].lower())
        for heading, content in contents.items()
        if content
    ]
    footer = el("footer", el("p", f"gshard {__version__}"))
    body = el("body", el("main", el("h1", title), sections), footer)
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


def _verdict(found: Forecast, compiled: Compiled) -> Markup:
    """Returns whether each level fits, as compiled or else estimated, and what was planned."""
    verdicts = {}
    for name, level in found.levels.items():
        of: Mapping[str, Any] = compiled.get(name, {})
        failed = "; it was not compiled" if "error" in of else ""
        of = of if of and not failed else {"fits": found.fits(name)}
        if of.get("needs"):
            needs = bytes_of(of["needs"])
        elif level.peak is not None:
            needs = about(level.peak)
        else:
            needs = f"{bytes_of(level.needs)} without activations"
        verdicts[name] = joined([_fits(of), f", needs {needs}{failed}"])
    choices = found.choices
    named = {
        "parameters": el(
            "data",
            f"{count_of(found.parameters)} ({found.parameters:,})",
            value=found.parameters,
        ),
        "devices": f"{found.devices:,}{axes_of(found)}",
        "one step": choices.examples(found.sequence),
        "gradients accumulate": choices.accumulate,
        "reshard after forward": choices.reshard_after_forward,
        "optimizer state on the host": "yes" if choices.offload else None,
        "usable memory of the chip": None if found.usable is None else amount(found.usable),
    }
    return joined([facts(verdicts), facts({k: v for k, v in named.items() if v is not None})])


def _fits(of: Mapping[str, Any]) -> Markup:
    verdicts = {True: "fits", False: "does not fit", None: "not known whether it fits"}
    return el("strong", "does not compile" if "error" in of else verdicts[of.get("fits")])


def _memory(found: Forecast) -> Markup:
    """Returns bars and a table of all parts of the memory that some level has."""
    rows = {
        name: {said: getattr(level, key) for key, (said, _) in _PARTS.items()}
        for name, level in found.levels.items()
    }
    used = [said for said, _ in _PARTS.values() if any(of[said] for of in rows.values())]
    rows = {name: {said: of[said] or 0 for said in used} for name, of in rows.items()}
    peaks = {name: level.peak for name, level in found.levels.items()}
    known = all(peak is not None for peak in peaks.values())
    total = "in all" if known else "without activations"
    limit = found.usable
    if limit is not None and limit > _FAR * max(sum(of.values()) for of in rows.values()):
        limit = None
    title = f"Memory of one device, {total}"
    title += "; the double lines are the estimated peak" if known else ""
    title += f"; the dashed line is the usable {bytes_of(limit)}" if limit else ""
    more = {"peak": peaks, "on the host": {name: x.host for name, x in found.levels.items()}}
    more = {heading: of for heading, of in more.items() if any(of.values())}
    lines = [
        [name, *map(amount, [*of.values(), sum(of.values()), *(x[name] for x in more.values())])]
        for name, of in rows.items()
    ]
    drawn = bars(rows, peaks, limit, dict(_PARTS.values()))
    return joined([
        el("figure", el("figcaption", title), drawn),
        html_table("The same in numbers", ["level", *used, total, *more], lines),
    ])  # fmt: skip


def _wire(found: Forecast) -> Markup:
    sent = sent_column(found)
    rows = {name: {sent: level.wire} for name, level in found.levels.items()}
    heads, lines = ["level", sent], [[name, amount(x.wire)] for name, x in found.levels.items()]
    if found.nodes > 1:
        heads.append(f"between {found.nodes} nodes")
        for line, level in zip(lines, found.levels.values(), strict=True):
            line.append(amount(level.network))
    return joined([
        el("figure", bars(rows, {}, None, {sent: "#999999"})),
        html_table("The same in numbers", heads, lines),
    ])  # fmt: skip


def _compiled(compiled: Compiled) -> Markup:
    """Returns what the compiler reports: lists of dicts as tables, other values by name."""
    parts = []
    for name, of in compiled.items():
        named, tables = {}, []
        for key, value in of.items():
            if key in ("fits", "budget"):
                continue
            if key == "memory":
                value = [{"use": use.replace("_", " "), "bytes": n} for use, n in value.items()]
            if key == "collectives":
                value = [{k: row.get(k) for k in _COLLECTIVES} for row in value]
            heading = key.replace("_", " ")
            if not isinstance(value, list) or not all(isinstance(x, Mapping) for x in value):
                named[heading] = shown_value(key, value)
            elif value:
                tables.append(records_table(f"{heading.capitalize()} at level {name}", value))
        parts += [el("h3", name, ": ", _fits(of)), facts(named), *tables]
    return joined(parts)


def _leaves(level: str, plan: Plan) -> Markup:
    """Returns a section with the largest leaves of one level, which can be collapsed."""
    leaves = state_arrays(plan)
    rows: list[Sequence[Any]] = [
        (
            x.path,
            " x ".join(map(str, x.shape)) or "scalar",
            x.dtype,
            x.placement,
            amount(x.bytes),
            x.reason,
        )
        for x in leaves[:_LISTED]
    ]
    if rest := leaves[_LISTED:]:
        others = f"{len(rest):,} other{'s' * (len(rest) > 1)}"
        rows.append((others, "", "", "", amount(sum(x.bytes for x in rest)), ""))
    columns = ("path", "shape", "dtype", "layout", "bytes on one device", "reason")
    table = html_table(f"Arrays at level {level}, the largest first", columns, rows)
    total = amount(sum(x.bytes for x in leaves))
    line = el("summary", el("strong", level), f": {len(leaves):,} arrays, ", total)
    return el("details", line, table, open=True)
