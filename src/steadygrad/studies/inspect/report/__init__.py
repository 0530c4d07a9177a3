"""The page of an ``inspect`` run: which layers float16 hurts, and which scales prevent it."""

from collections.abc import Iterable
from math import log2

from steadygrad.studies.folder import Run
from steadygrad.studies.frame import Figure, limits, opening, provenance
from steadygrad.studies.html import Html, document, el, figure, section, table
from steadygrad.studies.inspect.report import charts
from steadygrad.studies.inspect.report.data import TITLES, Inspection
from steadygrad.studies.inspect.schema import BEFORE, KINDS, layer_title
from steadygrad.studies.text import listed, loss, show

__all__ = ["page"]

SHARES = ("zero", "subnormal", "overflow")
WHATS = {
    "activations": "Gradients at the layers' boundaries. ",
    "weights": "Gradients of the layers' weights. ",
}
READING = (
    "Each row is a layer. A cell is stronger if more of the layer's values have its exponent. "
    "Between the second and the third dashed line float16 keeps all digits. Values to the left "
    "lose digits, and left of the first line they become zero. Values right of the third line "
    "overflow. The outermost columns count zeros and infinities. Orange values are lost. The "
    "second half of the steps is shown; the tables also count the overflows by which a scale "
    "comes down at first."
)


def page(run: Run) -> str:
    """Draws the page; see :func:`steadygrad.studies.page.render`."""
    found = Inspection(run)
    title = _headline(found)
    # How a study ended is said by its words.
    ends = "The record has no end: the run was stopped, or is still going."
    return document(
        title,
        opening(run, title, _figures(found), [] if found.finished else [ends]),
        _heat(found),
        _training(found),
        section("Every number", _tables(found)) if found.rows else None,
        limits(_what_it_cannot_tell(found)),
        provenance(run.header),
    )


def _headline(found: Inspection) -> str:
    if not found.proposal:
        return f"No result for {found.name} in float16 yet: the run is not complete."
    said = []
    if found.forward:
        count, steps = max(found.forward.values()), found.phases[BEFORE]["steps"]
        said.append(f"the forward pass is not finite in {show(count)} of {show(steps)} steps")
    if nonfinite := found.names("nonfinite_at_any_scale"):
        said.append(f"gradients are not finite at any scale in {_list(nonfinite)}")
    if underflowing := found.names("underflowing"):
        said.append(_underflow(found, underflowing))
    return f"{found.name}: {'; '.join(said) or 'one loss scale is enough'}."


def _underflow(found: Inspection, layers: list[str]) -> str:
    scale = found.proposal["loss_scale"]
    if found.proposal["layer_scales"]:
        return f"with one loss scale, gradients underflow in {_list(layers)}"
    if scale > found.phases[BEFORE]["loss_scale"] and not found.names("limiting"):
        return f"one loss scale is enough if it starts at {_power(scale)}"
    return f"gradients underflow in {_list(layers)}, and no scale prevents it"


def _list(layers: list[str]) -> str:
    names = [layer_title(name) for name in layers]
    return listed([*names[:3], f"{len(names) - 3} more layers"] if len(names) > 4 else names)


def _figures(found: Inspection) -> Iterable[Figure]:
    for phase, row in found.phases.items():
        scales, steps = TITLES[phase], show(row["steps"])
        if row["valid_loss"] is not None:
            yield "Validation loss", loss(row["valid_loss"]), f"after {steps} steps with {scales}"
        skipped = f"{show(row['skipped'])} of {steps}"
        yield "Skipped steps", skipped, f"with {scales}, for an overflow"


def _heat(found: Inspection) -> Html | None:
    drawn = [
        figure(charts.heat(found, kind), el("b", WHATS[kind]), READING if kind == KINDS[0] else "")
        for kind in KINDS
        if any(held[kind] for held in found.histograms.values())
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


def _tables(found: Inspection) -> Iterable[Html]:
    head = ["layer", *SHARES, "weights: zero", *SHARES[1:], "overflowed in"]
    for phase in found.phases:
        rows = []
        for row in found.rows:
            shares = [(row[phase].get(kind) or {}).get(share) for kind in KINDS for share in SHARES]
            overflows = f"{show(row[phase]['overflows'])} steps"
            rows.append([layer_title(row["name"]), *map(_percent, shares), overflows])
        title = f"Shares of gradients with {TITLES[phase]}: at boundaries, and of weights"
        yield table(title, head, rows, text_columns=1)
    if found.proposal:
        scales = {"the loss": found.proposal["loss_scale"], **found.proposal["layer_scales"]}
        rows = [[name, _power(scale)] for name, scale in scales.items()]
        yield table("Proposed scales", ["scale of", "value"], rows, text_columns=1)


def _power(scale: float) -> str:
    return f"2^{log2(scale):g}".replace("-", "−")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.2f}%"


def _what_it_cannot_tell(found: Inspection) -> dict[str, str]:
    return {
        "Later training.": (
            f"The result holds for the first {show(found.steps)} steps. Gradients change in size "
            'during training; LayerwiseGradScaler\'s "auto" follows them.'
        ),
        "Other hardware.": "Kernels differ in what they add up in float16 and what in float32.",
        "Inside a layer.": (
            "Gradients are counted where they enter and leave a layer, and in its weights. "
            "Underflow between these places shows only as zeros in the weights' gradients."
        ),
        "The forward pass.": (
            "The first module at fault is named in each step; no loss scale prevents an overflow "
            "of activations."
        ),
        "Whether it matters.": (
            "Underflow does no harm by itself: compare the losses before and after."
        ),
    }
