"""A run becomes one HTML page: self-contained, without scripts and without the network.

Its charts are Matplotlib's figures as inline SVG that follows the page: colours, fonts, width.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib import style
from matplotlib.figure import Figure

from steadygrad._studies import module_of
from steadygrad.studies import text
from steadygrad.studies.folder import HEADER, Run, read_run, replace_file, summarize, understanding

PAGE = "report.html"
Painter = Callable[[Figure], None]

# Matplotlib wants real colours. Each of these stands for one of the page's CSS variables, which
# differ between light, dark and print.
NAMES = ("ink", "muted", "grid", "paper", "critical", "noise")
VARIABLES = {f"#0101{number:02}": name for number, name in enumerate(NAMES, start=1)}
INK, MUTED, GRID, PAPER, CRITICAL, NOISE = VARIABLES

# Of one of several small charts side by side.
PANEL = 240, 190

STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 11.5,
    "grid.color": GRID,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "steadygrad",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.color": GRID,
    "ytick.labelcolor": MUTED,
    "ytick.left": False,
}


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
    common = {"header": header, "missing": missing, "colours": VARIABLES}
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


def chart(
    name: str, description: str, paint: Painter, size: tuple[float, float] = (800, 320)
) -> Markup:
    """Draws a chart.

    One page uses each name once; the description is for a reader who cannot see the chart.
    """
    return Markup('<div class="chart">{}</div>').format(_svg(name, description, paint, size))


def _svg(name: str, description: str, paint: Painter, size: tuple[float, float]) -> Markup:
    out = io.StringIO()
    with style.context(["default", STYLE]), warnings.catch_warnings():
        # The browser has fonts that Matplotlib lacks: a missing glyph here is none there.
        warnings.filterwarnings("ignore", message=r"Glyph \d+")
        drawing = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        paint(drawing)
        drawing.savefig(out, format="svg", transparent=True)
    # The stand-alone SVG becomes a part of the page.
    body = out.getvalue().partition("<svg")[2].partition(">")[2]
    # The metadata hold the date. A style would apply to the whole page; style.css has its rule.
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    # One page has several drawings. Only in tags: a label that spells `id="` stays what it is.
    own = partial(re.sub, r'(\bid="|url\(#|\bhref="#)', rf"\g<1>{name}-")
    body = re.sub(r"<[^>]*>", lambda tag: own(tag.group().replace("xlink:href", "href")), body)
    view = f"0 0 {size[0]:g} {size[1]:g}"
    opening = Markup('<svg role="img" aria-label="{}" viewBox="{}">').format(
        text.clean(description), view
    )
    return opening + Markup(body.strip())


def label(name: str, most: int = 24) -> str:
    """A name from a record, in one line short enough to stand in a chart: names differ at ends."""
    name = " ".join(text.clean(name).split())
    return name if len(name) <= most else "…" + name[1 - most :]
