"""The page of a ``compare`` run: which optimizer, at which learning rate, and how sure."""

from collections.abc import Iterable, Mapping
from typing import Any

from steadygrad.record import Run, plural
from steadygrad.report.compare import charts, tables
from steadygrad.report.frame import Figure, limits, opening, provenance
from steadygrad.report.numbers import show
from steadygrad.report.page import Html, document, figure, section, table

__all__ = ["page"]

RATES = (
    "Validation loss over the learning rate, each run with a whole schedule: grey after a quarter "
    "of the samples, then after half of them, then after all. Larger dots: seeds of the verdict. "
    "Shaded: rates that cost at most a tenth more samples, by the short runs. A cross diverged."
)
SAMPLES = (
    "Mean validation loss of the verdict's seeds, at the tuned rates. Dashed: runs half as long, "
    "with a schedule of their own."
)
PAIRS = (
    "Each grey dot is a seed: two runs with the same initial weights and the same data in the same "
    "order. Bar: interval of the mean, with Holm's correction for several optimizers."
)
LIMITS = {
    "Other tasks and lengths.": (
        "The result holds for this model, these data and these lengths. Orders of optimizers have "
        "changed with the length of a training, and with the model's size."
    ),
    "Options that were not tuned.": (
        "The learning rate was searched on a ladder of factors of two{knobs}. Warm-up (10%), decay "
        "(linear to zero), gradient clipping (none), and all else were the same or the defaults."
    ),
    "The search.": (
        "Each learning rate was tried on one seed. A rate that looks best by chance handicaps "
        "every optimizer alike."
    ),
    "Other optimizers.": "Not compared here: {missing}.",
}


def page(run: Run) -> str:
    """Draws the page; see :func:`steadygrad.report.render`."""
    summary: Mapping[str, Any] = run.summary or {}
    judged = bool(summary.get("verdicts"))
    title = _headline(run, summary)
    partial = "The record has no summary: the study is still going, or it was killed."
    return document(
        title,
        opening(run, title, _figures(run, summary), [] if summary else [partial]),
        *(_results(run, summary) if judged else ()),
        section("Every number", _tables(summary)) if summary else None,
        limits(_limits(run, summary)),
        provenance(run.header),
    )


def _headline(run: Run, summary: Mapping[str, Any]) -> str:
    last = {row["optimizer"]: row for row in summary.get("verdicts", ()) if row["multiple"] == 1}
    better = [summary["optimizers"][n] for n, row in last.items() if row["verdict"] == "better"]
    name = run.header.task.name
    if not last:
        return f"{name}: no verdict yet."
    if summary["flips"]:
        return f"{name}: the order of the optimizers changes with the length of the training."
    if better:
        return f"{name}: {' and '.join(better)} better than AdamW."
    return f"{name}: no optimizer is known to be better than AdamW."


def _figures(run: Run, summary: Mapping[str, Any]) -> Iterable[Figure]:
    plan = run.header.plan
    samples = plural(run.header.task.sample)
    yield "Longest training", show(plan.horizons[2]), f"{samples}; also half of it"
    yield "Seeds", show(plan.seeds), "of each verdict, none of them used in the search"
    if summary:
        detail = f"of {show(summary['trained'])} trainings"
        yield "Diverged", show(summary["diverged"]), detail


def _results(run: Run, summary: Mapping[str, Any]) -> Iterable[Html]:
    yield section("Differences from AdamW", figure(charts.differences(summary), PAIRS))
    drawn = [charts.over_rates(run, summary, name) for name in summary["optimizers"]]
    yield section("Learning rates", figure(Html("".join(drawn)), RATES))
    yield section("On the way", figure(charts.over_samples(run, summary), SAMPLES))


def _tables(summary: Mapping[str, Any]) -> Iterable[Html]:
    yield table("Verdicts", tables.HEAD, tables.verdict_rows(summary), text_columns=1)
    head = ["optimizer", "batch", "learning rate", "other knobs", "trials", "plateau in octaves"]
    head += ["interior", "loss at defaults"]
    yield table("Tuned settings", head, tables.tuned_rows(summary), text_columns=1)
    head = ["optimizer", "batch", "1 trial", "3 trials", "9 trials"]
    name = "Expected best loss of a few learning rates, after a quarter of the samples"
    yield table(name, head, tables.effort_rows(summary), text_columns=1)
    head = ["optimizer", "time of a training step", "bytes of state for a weight"]
    yield table("Costs, over AdamW's time", head, tables.cost_rows(summary), text_columns=1)
    if summary["critical"]:
        head = ["optimizer", "critical batch size", "extra samples by batch size"]
        name = "Critical batch size: a fifth more samples than the smallest batch"
        yield table(name, head, tables.critical_rows(summary), text_columns=1)


def _limits(run: Run, summary: Mapping[str, Any]) -> dict[str, str]:
    plan = run.header.plan
    tried = f", and {plan.points} points of two other options" if plan.points > 1 else " alone"
    known = ("adamw", "scaledadam", "lans", "lamb", "sgd", "muon")
    missing = [name for name in known if name not in plan.optimizers]
    values = {"knobs": tried, "missing": ", ".join([*missing, "and all others"])}
    return {name: text.format(**values) for name, text in LIMITS.items()}
