"""Charts and tables that the template ``page.html`` shows."""

from collections.abc import Mapping

import numpy as np
from markupsafe import Markup

from steadygrad.studies.advise.analysis import BatchSizes
from steadygrad.studies.advise.schema import Summary
from steadygrad.studies.charts import Row, differences
from steadygrad.studies.folder import Run
from steadygrad.studies.ladder import SEEDS
from steadygrad.studies.paired import interval
from steadygrad.studies.schema import Training
from steadygrad.studies.text import plural, show


def view(run: Run, found: Summary | None) -> Mapping[str, object]:
    """The values of the template's own sections."""
    runs = sorted(run.results.select(Training), key=lambda one: one.key)
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
    rows = []
    for arm, pairs in found.pairs.items():
        apart = pairs.behind(np.asarray(pairs.tolerance))
        mean, low, high = map(float, interval(apart, prior=pairs.prior))
        rows.append(Row(show(found.plan.arms[arm]), [*apart], mean, low, high))
    spoken = "Final losses of each batch size less the tolerated loss, seed by seed."
    return differences("sizes", spoken, rows, "validation loss, difference")
