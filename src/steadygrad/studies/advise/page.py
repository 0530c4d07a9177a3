"""Charts and tables that the template ``page.html`` shows."""

import math
from collections.abc import Mapping

import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure

from steadygrad.studies import charts
from steadygrad.studies.advise.analysis import BatchSizes
from steadygrad.studies.advise.schema import Summary
from steadygrad.studies.charts import CRITICAL, INK, MUTED
from steadygrad.studies.folder import Run
from steadygrad.studies.ladder import SEEDS
from steadygrad.studies.paired import ALPHA, interval
from steadygrad.studies.schema import Training
from steadygrad.studies.text import plural, size


def view(run: Run, found: Summary | None) -> Mapping[str, object]:
    """The values of the template's own sections."""
    runs = sorted(run.select(Training), key=lambda one: one.key)
    return {
        "found": found,
        "samples": plural(run.header.task.sample),
        "runs": runs,
        "seeds": len({one.seed for one in runs if one.seed not in SEEDS}),
        "differences": _differences(run, found) if found else None,
    }


def _differences(run: Run, summary: Summary) -> Markup | None:
    """Differences of the final losses from the tolerated one, by batch size, seed by seed."""
    found = BatchSizes(run.header, run.results)
    if not found.pairs or summary.rise:
        return None

    def paint(figure: Figure, narrow: bool) -> None:
        axes = figure.subplots()
        axes.axhline(0, color=INK, linewidth=1)
        for place, pairs in enumerate(found.pairs.values()):
            apart = pairs.behind(np.asarray(found.tolerance))
            known = [each for each in apart if math.isfinite(each)]
            charts.dots(axes, place, known, CRITICAL, size=7)
            if len(known) < len(apart):
                charts.cross(axes, place)
                continue
            ends = interval(apart, ALPHA, pairs.prior)[1:]
            if np.isfinite(ends).all():
                axes.plot([place, place], ends, color=INK, linewidth=1.5)
        axes.set_xlim(-0.6, len(found.pairs) - 0.4)
        sizes = [size(found.size(arm)) for arm in found.pairs]
        axes.set_xticks(range(len(sizes)), sizes, color=MUTED)
        axes.set_xlabel("batch size")
        axes.set_ylabel("validation loss, difference")

    names = ", ".join(str(found.size(arm)) for arm in found.pairs)
    spoken = f"Final losses of batch {names} less the tolerated loss, seed by seed."
    return charts.chart("sizes", spoken, paint, height=300)
