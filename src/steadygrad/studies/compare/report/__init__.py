"""The page of a ``compare`` run: which optimizer, at which learning rate, and how sure."""

import math
from collections.abc import Iterable

from steadygrad.studies.compare.report import charts, tables
from steadygrad.studies.compare.report.data import Comparison
from steadygrad.studies.compare.schema import BASELINE, OPTIMIZERS
from steadygrad.studies.folder import Run
from steadygrad.studies.frame import Figure, limits, opening, provenance
from steadygrad.studies.html import Html, document, el, figure, section
from steadygrad.studies.text import listed, show

__all__ = ["page"]

VERDICTS = (
    "Mean validation loss of the seeds at tuned options, and its difference from AdamW's with its "
    "interval: Student's, with Holm's correction for several optimizers. AdamW's samples: what "
    "AdamW would need for the same loss, over what was spent; above 1 the optimizer saves. Time: "
    "for the same loss, over AdamW's; below 1 it saves. State: bytes for each weight. Untuned: at "
    "the default learning rate, by two of the seeds."
)
PAIRS = (
    "Loss less AdamW's: left is better. A small dot is a seed: two runs with the same initial "
    "weights and the same data in the same order. Bar: interval of the mean. Blue: the longest "
    "runs; grey: half as long. A cross: diverged; a triangle: the interval extends beyond "
    "the chart."
)
RATES = (
    "Validation loss over the learning rate, each run with a whole schedule: light grey after a "
    "quarter of the samples, dark grey after half of them, blue after all. Large dots: the seeds "
    "at the tuned rate and at the default. Shaded: rates that cost at most a tenth more samples, "
    "by the short runs. Short bars: other options. A cross: diverged."
)
SAMPLES = (
    "Mean validation loss of the seeds that did not diverge, at the tuned rates. Dashed: runs half "
    "as long, with a schedule of their own."
)
EFFORTS = (
    "Expected lowest loss of this many learning rates, picked at random from those tried. It is "
    "infinite if at least as many of them diverge."
)
BATCHES = (
    "Samples beyond those that the smallest batch needs for the same loss, each optimizer tuned at "
    "each batch size. The critical batch size costs a fifth more (dashed). Values above 300% "
    "are drawn at 300%."
)
LIMITS = {
    "Other tasks and lengths.": (
        "The result holds for this model, these data and these lengths. Orders of optimizers have "
        "changed with the length of a training, and with the model's size."
    ),
    "Options that were not tuned.": (
        "The learning rate was searched on a ladder of factors of two{options}. Warm-up (10%), "
        "decay (linear to zero), gradient clipping (none), and all else were the same or the "
        "defaults."
    ),
    "The search.": (
        "Each learning rate was tried on one seed. The intervals include this uncertainty: they "
        "use the curvature of the loss around the best rate and an error of at least a quarter of "
        "an octave. A difference that another choice of rates could undo gives no verdict."
    ),
    "Several verdicts.": (
        "At one length and batch size, the probability that any verdict is wrong by chance is at "
        "most 5%. Each further length or batch size adds at most another 5%."
    ),
    "One against another.": "Each optimizer was tested against AdamW only.",
    "Other optimizers.": "Not compared here: {missing}.",
}


def page(run: Run) -> str:
    """Draws the page; see :func:`steadygrad.studies.page.render`."""
    found = Comparison(run)
    title = f"{found.header.task.name}: {_headline(found)}"
    numbers = [table for table in tables.tables(found) if table]
    return document(
        title,
        opening(run, title, _figures(found), _missing(found)),
        _verdicts(found),
        _rates(found),
        _on_the_way(found),
        _batches(found),
        limits(_limits(found)),
        section("Every number", numbers) if numbers else None,
        provenance(run.header),
    )


def _headline(found: Comparison) -> str:
    rows = [row for row in found.rows(found.longest) if row["optimizer"] != BASELINE]
    judged = {multiple: show(multiple * found.plan.batch_size) for multiple in found.plan.multiples}
    if found.summary.get("flips"):
        return "the order of the optimizers changes with the length of the training."
    if not rows:
        return "no verdict yet."
    better: dict[str, list[str]] = {}
    for row in rows:
        if row["verdict"] == "better":
            better.setdefault(row["optimizer"], []).append(judged[row["multiple"]])
    over = f"over {show(found.longest)} {found.samples}"
    if better:
        if len(judged) > 1 and all(len(at) == len(judged) for at in better.values()):
            names = [found.titles[name] for name in better]
            over = f"at each of {len(judged)} batch sizes, {over}"
        else:
            names = [
                found.titles[name] + (f" at batch size {listed(at)}" if len(judged) > 1 else "")
                for name, at in better.items()
            ]
        return f"{listed(names)} {'is' if len(names) == 1 else 'are'} better than AdamW {over}."
    if all(row["verdict"] == "worse" for row in rows):
        names = list(dict.fromkeys(found.titles[row["optimizer"]] for row in rows))
        return f"AdamW is better than {listed(names)} {over}."
    return f"no optimizer is known to be better than AdamW {over}."


def _figures(found: Comparison) -> Iterable[Figure]:
    judged = max((len(row["losses"]) for row in found.rows(found.longest)), default=0)
    yield "Longest training", show(found.longest), f"{found.samples}; also half of it"
    seeds = "of each verdict, none of them used in the search"
    yield "Seeds", show(judged), f"of {show(found.plan.seeds)} planned; {seeds}"
    if found.tuned:
        trials = sum(map(len, found.tuned[0]["tried"].values()))
        yield "Learning rates", show(trials), "tried with each optimizer, over all lengths"
    diverged = sum(math.isinf(run.loss) for run in found.trainings)
    yield "Diverged", show(diverged), f"of {show(len(found.trainings))} trainings"


def _missing(found: Comparison) -> Iterable[str]:
    if not found.summary:
        yield "The record has no summary: the study is still going, or it was killed."
    for samples in (found.longest, found.half):
        if found.summary and not any(found.rows(samples)):
            yield f"Nothing was judged after {show(samples)} {found.samples}."


def _verdicts(found: Comparison) -> Html | None:
    both = (tables.verdicts(found, samples) for samples in (found.longest, found.half))
    shown = [table for table in both if table]
    if not shown:
        return None
    drawn = figure(charts.differences(found), PAIRS)
    return section("Verdicts", shown, el("p.more", VERDICTS), drawn)


def _rates(found: Comparison) -> Html | None:
    places = range(len(found.plan.optimizers))
    panels = [drawn for place in places if (drawn := charts.over_rates(found, place))]
    if not panels:
        return None
    base = f" At batch size {show(found.plan.batch_size)}." if len(found.plan.multiples) > 1 else ""
    drawn, efforts = el("div.panels.three", panels), tables.efforts(found)
    few = (efforts, el("p.more", EFFORTS)) if efforts else ()
    return section("Learning rates", figure(drawn, RATES + base), *few)


def _on_the_way(found: Comparison) -> Html | None:
    if not any(found.curve(name, found.longest) for name in found.titles):
        return None
    return section("On the way", figure(charts.over_samples(found), SAMPLES))


def _batches(found: Comparison) -> Html | None:
    table = tables.critical(found)
    return table and section("Larger batches", figure(charts.over_batches(found), BATCHES), table)


def _limits(found: Comparison) -> dict[str, str]:
    points = found.plan.points
    options = f", and {points} points of two other options" if points > 1 else " alone"
    missing = [name for name in OPTIMIZERS if name not in found.plan.optimizers]
    values = {"options": options, "missing": listed([*missing, "all others"])}
    return {name: text.format(**values) for name, text in LIMITS.items()}
