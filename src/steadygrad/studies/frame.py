"""Parts of every study's page: the opening, the limits, and the origin of its numbers."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from steadygrad.studies.folder import Run
from steadygrad.studies.html import Html, el, section
from steadygrad.studies.schema import Header
from steadygrad.studies.text import show

__all__ = ["Figure", "limits", "opening", "provenance"]

# Name, value and detail of a key figure.
Figure = tuple[str, str, str]
PARTS = ("task", "settings", "plan", "runtime", "environment")


def opening(run: Run, title: str, figures: Iterable[Figure], notes: Iterable[str]) -> Html:
    """The title, the summary's words, the key figures, and the gaps of a partial record."""
    header = run.header
    parts = (header.study, f"seed {header.settings.seed}", str(header.time.get("created", ""))[:10])
    first, *others = (run.summary or {}).get("words") or [None]
    shown = [
        el("div", el("dt", name), el("dd.value", value), el("dd.detail", detail))
        for name, value, detail in figures
    ]
    files = len(run.unreadable)
    broken = [f"Results that cannot be read, and are left out: {files}."] if files else []
    missing = " ".join([*notes, *broken])
    return el(
        "header",
        el("p.kicker", el("b", "steadygrad"), (f" · {part}" for part in parts if part)),
        el("h1", title),
        el("p.lede", first) if first else None,
        el("ul.said", (el("li", said) for said in others)) if others else None,
        el("dl.figures", shown) if shown else None,
        el("div.note", el("p", missing), role="note") if missing else None,
    )


def limits(items: Mapping[str, str]) -> Html:
    """The limits of the run's conclusions; empty texts are left out."""
    listed = (el("li", el("b", lead), f" {text}") for lead, text in items.items() if text)
    return section("What this cannot tell you", el("div.note.limits", el("ul", listed)))


def provenance(header: Header) -> Html:
    """Everything of a record's header, as its last section."""
    fields = msgspec.to_builtins(header)
    parts = [_facts({"study": header.study, "schema": header.schema, **header.time})]
    for key in PARTS:
        if fields.get(key):
            parts += [el("h3", key.capitalize()), _facts(fields[key])]
    return section("Where the numbers come from", parts)


def _facts(values: Mapping[str, Any]) -> Html:
    return el("dl.facts", *((el("dt", name), el("dd", text)) for name, text in _flat(values)))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        name = prefix + str(key).replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, name + ": ")
        else:
            yield name, _text(value)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        nested = any(isinstance(item, (list, tuple)) for item in value)
        return ("; " if nested else ", ").join(map(_text, value))
    return show(value, digits=6)
