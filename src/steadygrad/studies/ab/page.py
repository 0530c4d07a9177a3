"""The charts that the template ``page.html`` shows."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from steadygrad.studies.ab.findings import Changes
from steadygrad.studies.ab.schema import Summary
from steadygrad.studies.folder import Run
from steadygrad.studies.page import CRITICAL, MUTED, chart


def view(run: Run, found: Summary | None) -> Mapping[str, object]:
    """A chart of each B: differences pair by pair, and the interval of their mean after each."""
    changes, courses = Changes(run.header, run.results), []
    for arm, name in enumerate(changes.names):
        if arm and changes.metrics(0, arm).size:
            spoken, paint = f"Differences of {name} from A by pair.", partial(_paint, changes, arm)
            courses.append((name, chart(f"pairs-{arm}", spoken, paint, (800, 240))))
    arms = zip(changes.names, run.header.plan.arms, strict=True)
    return {"courses": courses, "arms": dict(arms)}


def _paint(changes: Changes, arm: int, figure: Figure) -> None:
    (a, b), course, axes = changes.metrics(0, arm), changes.judged(arm).course, figure.subplots()
    n, known = np.arange(1, 1 + len(a)), np.isfinite(course.half) & ~course.failed
    style: Any = {"fmt": "_", "ms": 12, "color": CRITICAL, "capsize": 3}
    axes.errorbar(n[known], course.mean[known], course.half[known], **style)
    axes.plot(n, b - a, "o", color=MUTED, ms=5)
    axes.axhline(0, color=MUTED, linewidth=1)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.set(xlabel="pairs", ylabel=f"{changes.names[arm]} minus A")
