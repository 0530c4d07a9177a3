"""The page of an ``inspect`` run: which layers float16 hurts, and which scales prevent it."""

from collections.abc import Iterable
from math import log2

from steadygrad.record import Run
from steadygrad.record.schema.inspect import BEFORE, KINDS, layer_title
from steadygrad.report.inspect import charts
from steadygrad.report.inspect.data import TITLES, Inspection, gather
from steadygrad.report.numbers import loss, show
from steadygrad.report.page import Html, document, el, figure, section, table
from steadygrad.report.provenance import provenance

__all__ = ["page"]


def page(run: Run) -> str:
    """Draws the page; see :func:`steadygrad.report.render`."""
    found = gather(run)
    title = _headline(found)
    return document(
        title,
        _opening(found, title, run.truncated),
        _heat(found),
        _training(found),
        _numbers(found),
        section("What this cannot tell you", _limits(found)),
        provenance(run.header),
    )


def _headline(found: Inspection) -> str:
    underflowing = found.names("underflowing")
    nonfinite = found.names("nonfinite_at_any_scale")
    if not found.proposal:
        return f"No result for {found.name} in float16 yet: the run is not complete."
    said = [f"gradients are not finite at any scale in {_list(nonfinite)}"] if nonfinite else []
    if underflowing:
        said.append(_underflow(found, underflowing))
    together = "; ".join(said) or "one loss scale is enough"
    return f"{found.name}: {together}."


def _underflow(found: Inspection, layers: list[str]) -> str:
    scale = found.proposal["loss_scale"]
    if found.proposal["layer_scales"]:
        return f"with one loss scale, gradients underflow in {_list(layers)}"
    if scale > found.phases[BEFORE]["loss_scale"] and not found.names("limiting"):
        return f"one loss scale is enough if it starts at {_power(scale)}"
    return f"gradients underflow in {_list(layers)}, and no scale prevents it"


def _list(layers: list[str]) -> str:
    names = [layer_title(name) for name in layers]
    if len(names) > 4:
        return f"{', '.join(names[:3])} and {len(names) - 3} more layers"
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _opening(found: Inspection, title: str, truncated: bool) -> Html:
    created = str(found.header.time.get("created", ""))[:10]
    parts = ["inspect", f"seed {found.header.settings.seed}", created]
    kicker = el("p.kicker", el("b", "steadygrad"), " · " + " · ".join(p for p in parts if p))
    # How a study ended is said by its words.
    ends = "The record has no end: the run was stopped, or is still going."
    notes = [] if found.finished else [ends]
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
    for phase, row in found.phases.items():
        if row["valid_loss"] is not None:
            steps = f"after {show(row['steps'])} steps with {TITLES[phase]}"
            entries.append(("Validation loss", loss(row["valid_loss"]), steps))
        skipped = f"{show(row['skipped'])} of {show(row['steps'])}"
        entries.append(("Skipped steps", skipped, f"with {TITLES[phase]}, for an overflow"))
    figures = (
        el("div", el("dt", name), el("dd.value", value), el("dd.detail", detail))
        for name, value, detail in entries
    )
    return el("dl.figures", figures) if entries else None


def _heat(found: Inspection) -> Html | None:
    reading = (
        "Each row is a layer. A cell is stronger if more of the layer's values have its exponent. "
        "Between the second and the third dashed line float16 keeps all digits. Values to the left "
        "lose digits, and left of the first line they become zero. Values right of the third line "
        "overflow. The outermost columns count zeros and infinities. Orange values are lost. The "
        "second half of the steps is shown; the tables also count the overflows by which a scale "
        "comes down at first."
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
    caption = (
        "Training loss. Each dot is a mean over an eighth of the steps; the data are the same."
    )
    return section("Before and after", figure(charts.training(found), caption))


def _numbers(found: Inspection) -> Html | None:
    if not found.rows:
        return None
    tables = [_shares(found, phase) for phase in found.phases]
    return section("Every number", tables, _scales(found))


def _shares(found: Inspection, phase: str) -> Html:
    head = ["layer", "zero", "subnormal", "overflow"]
    head += ["weights: zero", "subnormal", "overflow", "overflowed in"]
    rows = []
    for name, row in found.rows.items():
        cells = [layer_title(name)]
        for kind in KINDS:
            shares = row[phase].get(kind) or {}
            cells += [_percent(shares.get(share)) for share in ("zero", "subnormal", "overflow")]
        rows.append([*cells, f"{show(row[phase]['overflows'])} steps"])
    title = f"Shares of gradients with {TITLES[phase]}: at boundaries, and of weights"
    return table(title, head, rows, text_columns=1)


def _scales(found: Inspection) -> Iterable[Html]:
    if found.proposal:
        rows = [["the loss", _power(found.proposal["loss_scale"])]]
        rows += [[name, _power(scale)] for name, scale in found.proposal["layer_scales"].items()]
        yield table("Proposed scales", ["scale of", "value"], rows, text_columns=1)


def _power(scale: float) -> str:
    return f"2^{log2(scale):g}".replace("-", "−")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}%"


def _limits(found: Inspection) -> Html:
    items = {
        "Later training.": (
            f"The result holds for the first {show(found.header.settings.steps)} steps. Gradients "
            'change in size as training goes on; LayerwiseGradScaler\'s "auto" follows them.'
        ),
        "Other hardware.": "Kernels differ in what they add up in float16 and what in float32.",
        "Inside a layer.": (
            "Gradients are counted where they enter and leave a layer, and in its weights. "
            "Underflow between these places shows only as zeros in the weights' gradients."
        ),
        "The forward pass.": "No loss scale prevents an overflow of activations.",
        "Whether it matters.": (
            "Underflow does no harm by itself: compare the losses before and after."
        ),
    }
    listed = (el("li", el("b", lead), " " + rest) for lead, rest in items.items())
    return el("div.note.limits", el("ul", listed))
