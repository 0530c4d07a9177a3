"""HTML that is safe by construction: a string is escaped unless it is already :class:`Html`."""

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from markupsafe import Markup

__all__ = [
    "Html",
    "clean",
    "document",
    "el",
    "escape",
    "figure",
    "fill",
    "listing",
    "section",
    "table",
]

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"

Child = str | Iterable[str] | None

# HTML has no way to write these, and half a surrogate pair cannot be encoded.
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


Html = Markup


def clean(text: object) -> str:
    """The text without the characters that no HTML page can hold; ``\ufffd`` takes their place."""
    return _FORBIDDEN.sub("\ufffd", str(text))


def escape(text: str) -> Html:
    """Escapes a string for element content and attribute values; leaves :class:`Html` alone."""
    return text if isinstance(text, Html) else Html(html.escape(clean(text)))


def fill(markup: str, **parts: str) -> Html:
    """Puts escaped parts where a piece of markup, which is not escaped, has their ``{name}``."""
    return Html(markup.format_map({name: escape(part) for name, part in parts.items()}))


def el(tag: str, *children: Child, **attributes: str | None) -> Html:
    """Writes one element.

    Args:
        tag: Name of the element; ``"td.number"`` adds a class.
        children: Strings (escaped), :class:`Html`, iterables of both, or ``None`` (left out).
        attributes: ``None`` leaves one out; ``aria_label`` is written ``aria-label``.
    """
    name, *classes = tag.split(".")
    if classes:
        attributes = {"class": " ".join(classes), **attributes}
    opening = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    content = "".join(
        escape(part)
        for child in children
        if child is not None
        for part in ([child] if isinstance(child, str) else child)
    )
    return Html(f"<{name}{opening}>{content}</{name}>")


def table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 0
) -> Html:
    """Writes a table in a box that scrolls; the ``text_columns`` on the left hold no numbers."""
    kinds = ["" if column < text_columns else ".number" for column in range(len(head))]

    def cells(tag: str, row: Sequence[str]) -> Iterable[Html]:
        return (el(tag + kind, cell) for kind, cell in zip(kinds, row, strict=True))

    heading = el("thead", el("tr", cells("th", head)))
    body = el("tbody", (el("tr", cells("td", row)) for row in rows))
    inner = el("table", el("caption", caption), heading, body)
    # A box that scrolls has to be reachable by keyboard.
    return el("div.scroll", inner, tabindex="0", role="region", aria_label=caption)


def listing(
    title: str,
    rows: Sequence[Any],
    columns: Mapping[str, Callable[[Any], str]],
    *,
    text_columns: int = 0,
) -> Html | None:
    """A table with a column for each title; None without rows."""
    cells = ([cell(row) for cell in columns.values()] for row in rows)
    return table(title, list(columns), cells, text_columns=text_columns) if rows else None


def figure(content: Html, *caption: str) -> Html:
    """Writes a chart with the caption that says how to read it."""
    return el("figure", content, el("figcaption", caption))


def section(title: str, *children: Child) -> Html:
    """Writes a section of the page with its heading."""
    return el("section", el("h2", title), *children)


def document(title: str, *body: Child) -> str:
    """Writes the whole page: self-contained, without scripts and without the network."""
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    head = (
        Html('<meta charset="utf-8">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        # An icon of its own keeps browsers from asking a server for one.
        Html('<link rel="icon" href="data:,">'),
        # Nothing in a record can run or load anything, even if escaping it were to fail.
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'),
        el("title", title),
        el("style", Html(style)),
    )
    page = el("html", el("head", head), el("body", el("main", *body)), lang="en")
    return f"<!doctype html>\n{page}\n"
