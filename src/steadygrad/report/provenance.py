"""Where a report's numbers come from."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from steadygrad.record import Header
from steadygrad.report.numbers import show
from steadygrad.report.page import Html, el, section

__all__ = ["provenance"]

PARTS = ("task", "settings", "plan", "runtime", "environment")


def provenance(header: Header) -> Html:
    """Everything of a record's header, as its last section."""
    fields = msgspec.to_builtins(header)
    top = {"study": header.study, "schema": header.schema, **header.time}
    parts: list[Html] = [_facts(top)]
    for key in PARTS:
        if fields.get(key):
            parts += [el("h3", key.capitalize()), _facts(fields[key])]
    return section("Where the numbers come from", parts)


def _facts(values: Mapping[str, Any]) -> Html:
    pairs = ((el("dt", name), el("dd", text)) for name, text in _flat(values))
    return el("dl.facts", (part for pair in pairs for part in pair))


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
        return ("; " if nested else ", ").join(_text(item) for item in value)
    return show(value, digits=6)
