"""Charts and tables that the template ``page.html`` shows."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from steadygrad.studies.compare import words
from steadygrad.studies.compare.findings import Optimizers, titles_of
from steadygrad.studies.compare.schema import KNOWN, Summary, Tuned
from steadygrad.studies.folder import Run
from steadygrad.studies.page import CRITICAL, INK, MUTED, NOISE, PANEL, PAPER, chart, label
from steadygrad.studies.schema import Training
from steadygrad.studies.text import listed, plural, show


def view(run: Run, found: Summary | None) -> Mapping[str, object]:
    """The values of the template's own sections."""
    plan, evidence = run.header.plan, Optimizers(run.header, run.results)
    titles, several = titles_of(run.header), len({arm.batch_size for arm in plan.arms}) > 1
    labels = [f"{titles[a.optimizer]}{f', {show(a.batch_size)}' * several}" for a in plan.arms]
    tuned = [evidence.tuned(arm) for arm in range(len(plan.arms))]
    rows, runs = found.verdicts if found else [], run.results.select(Training)
    losses = [{n: run.loss for n, run in evidence.pairs(arm).items()} for arm in range(len(tuned))]
    panels = [_rates(evidence, arm, labels[arm], one) for arm, one in enumerate(tuned)]
    return {
        "titles": titles,
        "labels": labels,
        "samples": plural(run.header.task.sample),
        "tuned": [*zip(labels, tuned, strict=True)],
        "steps": sorted({step for one in tuned for step in one.tried}),
        "losses": [(name, own) for name, own in zip(labels, losses, strict=True) if own],
        "trained": len(runs),
        "diverged": sum(math.isinf(one.loss) for one in runs),
        "seeds": range(max((row.pairs for row in rows), default=0)),
        "panels": [drawn for drawn in panels if drawn],
        "missing_names": listed([name for name in KNOWN if name not in titles] + ["all others"]),
        "words": words,
    }


def _rates(evidence: Optimizers, arm: int, name: str, tuned: Tuned) -> Markup | None:
    """Losses of one arm over the learning rate: means of the search, and the seeds of the pairs."""
    length, pairs, tried = evidence.plan.samples, [*evidence.pairs(arm).values()], {}
    for octave, loss in tuned.tried.items():
        run, *_ = evidence.trainings(arm, length, octave).values()
        tried[run.lr] = loss
    known = [*tried.items(), *((run.lr, run.loss) for run in pairs)]
    if not known:
        return None

    def paint(figure: Figure) -> None:
        axes, rates = figure.subplots(), sorted({lr for lr, _ in known})
        ticks = rates[:: math.ceil(len(rates) / 4)]
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [show(lr) for lr in ticks])
        axes.minorticks_off()
        axes.set_xlim(rates[0] / 1.3, rates[-1] * 1.3)
        line = {lr: loss for lr, loss in tried.items() if math.isfinite(loss)}
        axes.plot([*line], [*line.values()], "-o", color=MUTED, ms=4)
        ended = [run for run in pairs if math.isfinite(run.loss)]
        places = [run.lr for run in ended], [run.loss for run in ended]
        axes.plot(*places, "o", color=CRITICAL, mec=PAPER, mew=0.7, ms=5)
        lost, edge = {lr for lr, loss in known if math.isinf(loss)}, axes.get_xaxis_transform()
        axes.plot([*lost], [0.95] * len(lost), "x", color=NOISE, mew=2, ms=7.5, transform=edge)
        axes.set_title(label(name), loc="left", fontsize=11.5, color=INK)
        _limit(axes, [loss for _, loss in known if math.isfinite(loss)])

    spoken = f"Validation loss with {label(name)} over the learning rate."
    return chart(f"rates-{arm}", spoken, paint, PANEL)


def _limit(axes: Axes, losses: Sequence[float]) -> None:
    """Leaves out losses far above the best, so that differences near it can be seen."""
    axes.locator_params(axis="y", nbins=4)
    if not losses:
        axes.set_yticks([])
        return
    low = min(losses)
    span = min(max(losses) - low, 4 * (median(losses) - low)) or 1.0
    axes.set_ylim(low - 0.1 * span, low + 1.1 * span)
