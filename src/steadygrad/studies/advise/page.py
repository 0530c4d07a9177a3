"""Charts and tables that the template ``page.html`` shows."""

from collections.abc import Mapping

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from steadygrad.studies.advise.schema import Growth, Summary
from steadygrad.studies.folder import Run
from steadygrad.studies.page import CRITICAL, INK, NOISE, chart
from steadygrad.studies.paired import SEEDS
from steadygrad.studies.schema import Training
from steadygrad.studies.text import plural, show


def view(run: Run, found: Summary | None) -> Mapping[str, object]:
    """The values of the template's own sections."""
    runs = sorted(run.results.select(Training), key=lambda one: one.key)
    grown = found.growth if found else None
    return {
        "found": found,
        "samples": plural(run.header.task.sample),
        "runs": runs,
        "sizes": len(run.header.plan.sizes),
        "seeds": len({one.seed for one in runs if one.seed not in SEEDS}),
        "growth": _growth(grown, plural(run.header.task.sample))
        if grown and grown.lengths
        else None,
    }


def _growth(grown: Growth, samples: str) -> Markup:
    """Critical sizes against the length: of the rungs, and the line to the predicted one."""
    points = [(one, CRITICAL) for one in grown.lengths]
    points += [(grown.predicted, NOISE)] if grown.predicted else []

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        for one, colour in points:
            # No interval is drawn to an end that is not known.
            sides = [one.low, one.high if one.is_closed else one.batch_size]
            axes.plot([one.samples] * 2, sides, color=colour, linewidth=2)
            mark = "D" if one.is_closed else "^"
            axes.plot([one.samples], [one.batch_size], mark, color=colour, ms=7)
        if end := grown.predicted:
            ends = np.array([grown.lengths[0].samples, end.samples])
            line = end.batch_size * (ends / end.samples) ** grown.slope
            axes.plot(ends, line, color=INK, linewidth=1, linestyle="--", zorder=1)
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda number, _: show(round(number)))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(samples)
        axes.set_ylabel("batch size")

    return chart("growth", "The largest batch size within the tolerance by length.", paint)
