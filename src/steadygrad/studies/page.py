"""A run becomes one HTML page: self-contained, without scripts and without the network."""

import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined

from steadygrad._studies import module_of
from steadygrad.studies import charts, text
from steadygrad.studies.folder import HEADER, Run, read_run, replace_file, summarize, understanding

PAGE = "report.html"


def render(run: Run) -> str:
    """Draws a run's page; the same run gives the same page, byte for byte.

    A partial run is drawn too, and the page says what is missing.
    """
    study, status, missing = run.header.study, (run.summary or {}).get("status"), []
    if run.unreadable:
        missing.append(f"Results that cannot be read, and are left out: {len(run.unreadable)}.")
    if not status:
        missing.append("The run was stopped, or is still going.")
    header = msgspec.to_builtins(run.header)
    common = {"header": header, "missing": missing, "colours": charts.VARIABLES}
    with understanding(run.folder), warnings.catch_warnings():
        # Of odd numbers in a run: many lines, about lines of Matplotlib's code.
        warnings.simplefilter("ignore")
        found = summarize(run.header, run.results, status) if status else None
        view = module_of(study, "page").view
        template = environment().get_template(f"{study}/page.html")
        return template.render({**common, "summary": found, **view(run, found)})


def write(folder: Path) -> Path:
    """Draws the page of the run in ``folder`` again, and returns its path."""
    # Its header may name it.
    folder = Path(folder).parent if Path(folder).name == HEADER else Path(folder)
    replace_file(folder / PAGE, render(read_run(folder)).encode("utf-8", "replace"))
    return folder / PAGE


@cache
def environment() -> Environment:
    """The templates of pages, with the filters that they share."""
    found = Environment(
        loader=PackageLoader("steadygrad", "studies"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup, a kind of text, stays as it is.
        finalize=lambda value: text.clean(value) if type(value) is str else value,
    )
    found.filters |= {"flat": _flat, "loss": text.loss, "show": text.show}
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Names and values of a nest, as texts."""
    for key, value in values.items():
        name = prefix + str(key).replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}: ")
        else:
            yield name, _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        nested = any(isinstance(item, (list, tuple)) for item in value)
        return ("; " if nested else ", ").join(map(_shown, value))
    return text.show(value, digits=6)
