"""The page of an ``inspect`` run: which layers float16 hurts, and what mends it."""

from collections.abc import Iterable, Mapping
from math import log2
from typing import Any

from steadygrad.record import Run
from steadygrad.report.inspect import charts
from steadygrad.report.inspect.data import BEFORE, KINDS, TITLES, Inspection, gather, shown
from steadygrad.report.numbers import loss, number, show
from steadygrad.report.page import Html, document, el, figure, section, table
from steadygrad.report.provenance import inside, provenance

__all__ = ["page"]

MISSING = {
    "interrupted": "The run was interrupted before its end.",
    "failed": "Training failed before everything planned was measured.",
    "budget": "The time budget was spent before everything planned was measured.",
    "unfinished": "The record has no end: the run was stopped, or is still going.",
}


def page(run: Run) -> str:
    """Draws the page; see :func:`steadygrad.report.render`."""
    found = gather(run)
    title = _headline(found)
    return document(
        f"{found.name}: {title}",
        _opening(found, title, run.truncated),
        _heat(found),
        _training(found),
        _numbers(found),
        section("What this cannot tell you", _limits(found)),
        provenance(run.header),
    )


def _headline(found: Inspection) -> str:
    starved, broken = found.names("starved"), found.names("broken")
    if not found.proposal:
        return f"Nothing is known of {found.name} in float16 yet: the run is not complete."
    said = [f"{_list(broken)} of {found.name} overflows at any scale"] if broken else []
    if starved:
        said.append(_hunger(found, starved))
    together = "; ".join(said) or f"Nothing is at fault: one loss scale serves {found.name}"
    return f"{together[0].upper() if together.startswith('one ') else together[0]}{together[1:]}."


def _hunger(found: Inspection, starved: list[str]) -> str:
    if found.proposal.get("layer_scales"):
        return f"one loss scale starves {_list(starved)} of {found.name}"
    scale = number(found.proposal.get("loss_scale"))
    settled = number(inside(found.phases, BEFORE, "loss_scale"))
    if scale > settled and not found.names("ceiling"):
        return f"one loss scale serves {found.name}, if it begins at {_power(scale)}"
    return f"{_list(starved)} of {found.name} loses small gradients at any scale"


def _list(layers: list[str]) -> str:
    names = [shown(name) for name in layers]
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more layers"
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _opening(found: Inspection, title: str, truncated: bool) -> Html:
    created = str(inside(found.header, "time", "created") or "")[:10]
    parts = ["inspect", f"seed {show(found.header.get('seed'))}", created]
    kicker = el("p.kicker", el("b", "steadygrad"), " · " + " · ".join(p for p in parts if p))
    notes = [MISSING[found.status]] if found.status in MISSING else []
    if truncated:
        notes.append("A broken last line of the record was left out.")
    return el(
        "header",
        kicker,
        el("h1", title),
        [el("p.lede", found.words[0])] if found.words else None,
        el("ul.said", (el("li", said) for said in found.words[1:])) if found.words[1:] else None,
        _key_figures(found),
        el("div.note", el("p", " ".join(notes)), role="note") if notes else None,
    )


def _key_figures(found: Inspection) -> Html | None:
    entries = []
    for phase, title in TITLES.items():
        row = found.phases.get(phase)
        if row is None:
            continue
        if row.get("valid_loss") is not None:
            steps = f"after {show(row.get('steps'))} steps with {title}"
            entries.append(("Validation loss", loss(row.get("valid_loss")), steps))
        skipped = f"{show(row.get('skipped'))} of {show(row.get('steps'))}"
        entries.append(("Steps left out", skipped, f"with {title}, for an overflow"))
    shown_ = (
        el("div", el("dt", name), el("dd.value", value), el("dd.detail", detail))
        for name, value, detail in entries
    )
    return el("dl.figures", shown_) if entries else None


def _heat(found: Inspection) -> Html | None:
    reading = (
        "Each row is a layer; a cell is stronger the more of its values have that exponent. "
        "Between the second and third dashed line float16 keeps all digits; left of it values lose "
        "digits, left of the first they vanish; right of the third they overflow. The outermost "
        "columns are values that are zero, and infinite. Orange is lost. Second half of the steps: "
        "the overflows by which a scale comes down at first are in the tables only."
    )
    whats = {
        "activations": "Gradients at the layers' boundaries. ",
        "weights": "Gradients of the layers' weights. ",
    }
    drawn = [
        figure(charts.heat(found, kind), el("b", whats[kind]), reading if i == 0 else "")
        for i, kind in enumerate(KINDS)
        if any(found.histograms[phase][kind] for phase in TITLES)
    ]
    more = len(found.layers) - charts.MOST_LAYERS
    cut = el("p.more", f"{more} more layers are in the table below.") if more > 0 else None
    return section("Where the bits go", drawn, cut) if drawn else None


def _training(found: Inspection) -> Html | None:
    if not any(found.losses.values()):
        return None
    caption = "Training loss, each dot a mean over an eighth of the steps; both see the same data."
    return section("Before and after", figure(charts.training(found), caption))


def _numbers(found: Inspection) -> Html | None:
    if not found.rows:
        return None
    tables = [_shares(found, phase) for phase in TITLES if phase in found.phases]
    return section("Every number", tables, _scales(found))


def _shares(found: Inspection, phase: str) -> Html:
    head = ["layer", "zero", "subnormal", "overflow"]
    head += ["weights: zero", "subnormal", "overflow", "overflowed in"]
    rows = []
    for name, row in found.rows.items():
        cells = [shown(name)]
        for kind in KINDS:
            for share in ("zero", "subnormal", "overflow"):
                cells.append(_percent(inside(row, phase, kind, share)))
        rows.append([*cells, f"{show(inside(row, phase, 'overflows'))} steps"])
    title = f"Shares of gradients with {TITLES[phase]}: at boundaries, and of weights"
    return table(title, head, rows, text_columns=1)


def _scales(found: Inspection) -> Iterable[Html]:
    if not found.proposal:
        return
    own = found.proposal.get("layer_scales")
    rows = [["(loss)", _power(found.proposal.get("loss_scale"))]]
    if isinstance(own, Mapping):
        rows += [[str(name), _power(scale)] for name, scale in own.items()]
    yield table("Scales proposed", ["layer", "scale"], rows, text_columns=1)


def _power(scale: Any) -> str:
    value = number(scale)
    return f"2^{log2(value):g}".replace("-", "−") if value > 0 else "–"


def _percent(share: Any) -> str:
    value = number(share)
    return "–" if value != value else f"{100 * value:.2f}%"


def _limits(found: Inspection) -> Html:
    steps = show(inside(found.header, "settings", "steps"))
    items = {
        "Later training.": (
            f"It holds for the first {steps} steps; gradients change in size as training goes on. "
            'LayerwiseGradScaler\'s "auto" follows them.'
        ),
        "Other hardware.": "Kernels differ in what they add up in float16 and what in float32.",
        "Inside a layer.": (
            "Gradients are counted where they enter and leave a layer, and in its weights. What "
            "vanishes between shows in the weights' zeros only."
        ),
        "The forward pass.": "What overflows on the way forward is no loss scale's fault.",
        "Whether it matters.": (
            "Lost gradients are no harm by themselves: look at the losses before and after."
        ),
    }
    listed = (el("li", el("b", lead), " " + rest) for lead, rest in items.items())
    return el("div.note.limits", el("ul", listed))
