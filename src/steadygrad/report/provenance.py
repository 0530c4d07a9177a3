"""Where a report's numbers come from."""

from collections.abc import Iterable, Mapping
from typing import Any

from steadygrad.report.numbers import show
from steadygrad.report.page import Html, el, section

__all__ = ["inside", "provenance"]


def provenance(header: Mapping[str, Any]) -> Html:
    """Everything of a record's header, as its last section."""
    parts: list[Html] = []
    top = {key: header.get(key) for key in ("study", "seed", "command", "schema")}
    top["created"] = inside(header, "time", "created")
    parts.append(_facts({key: value for key, value in top.items() if value is not None}))
    for key in ("task", "settings", "plan", "environment"):
        value = header.get(key)
        if isinstance(value, Mapping) and value:
            parts += [el("h3", key.capitalize()), _facts(value)]
    return section("Where the numbers come from", parts)


def _facts(values: Mapping[str, Any]) -> Html:
    pairs = ((el("dt", name), el("dd", text)) for name, text in _flat(values))
    return el("dl.facts", (part for pair in pairs for part in pair))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in values.items():
        name = prefix + str(key).replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, name + ": ")
        elif isinstance(value, list):
            yield name, ", ".join(show(item) for item in value)
        else:
            yield name, show(value, digits=6)


def inside(parent: Mapping[str, Any], *keys: str) -> Any:
    """What lies in a nest of mappings; None if nothing does."""
    value: Any = parent
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
